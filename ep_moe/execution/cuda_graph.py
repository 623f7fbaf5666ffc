"""CUDA graphs of calls, of two kinds.

- Graphs of torch (`torch.cuda.CUDAGraph`), which `Recorder` records. They replay on fixed tensors.
- `CallGraph`: the launches of one stream as one graph. Each replay sets new arguments of some of its kernels, so no
  input is copied into fixed tensors. The host sets these arguments and makes one launch, which takes less than half of
  the time of the separate launches.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import addressof, c_uint64, c_void_p, sizeof, string_at
from typing import Any

import torch
from torch import Tensor

from ep_moe.errors import BackendUnavailable
from ep_moe.execution.graph_inputs import InputMemory
from ep_moe.runtime.devices import current_stream
from ep_moe.runtime.nvrtc import check_status
from ep_moe.runtime.workspace import Workspaces
from ep_moe.types import capturing

Given = Sequence[int]  # arguments of a kernel: addresses, and a 32-bit integer as the last one


class Recorder:
    """Records calls as CUDA graphs in one memory pool.

    The graphs replay only on the stream that was current when the recorder was created. They share memory, and only the
    order of that stream keeps their uses of it apart.

    handle: of that stream; memory: the input tensors of the calls
    """

    def __init__(self, device: torch.device, workspaces: Workspaces) -> None:
        self.stream: Any = torch.cuda.current_stream(device)
        self._device, self.handle = device, self.stream.cuda_stream
        self._capture_stream = torch.cuda.Stream(device)  # the default stream cannot be captured
        # recorded on this stream, replayed on `self.stream`: it may use its workspace
        workspaces.lend(self._capture_stream)
        self._pool = torch.cuda.graph_pool_handle()
        self.memory = InputMemory()

    @classmethod
    def unsupported_reason(cls, device: torch.device) -> str | None:
        """Return None, or the reason why calls on a device cannot be recorded."""
        return None if device.type == "cuda" else f"the layer is on {device}, and CUDA graphs need a GPU"

    @classmethod
    def for_current_stream(cls, made: list[Any], device: torch.device, workspaces: Workspaces) -> Recorder:
        """Return the recorder in `made` for the current stream. If there is none, create one and append it."""
        found = next((recorder for recorder in made if recorder.can_replay), None)
        if found is None:
            made.append(found := cls(device, workspaces))
        return found

    @property
    def can_replay(self) -> bool:
        """Whether a replay may begin: the stream is current, and not being captured itself."""
        return current_stream(self._device) == self.handle and not capturing(self._device)

    def warm(self, call: Callable[[], Any]) -> None:
        """Run a call eagerly on the recording stream, so that one-time allocations of a stream's first call are not
        captured."""
        self._capture_stream.wait_stream(self.stream)
        with torch.cuda.stream(self._capture_stream):
            call()
        self.stream.wait_stream(self._capture_stream)

    def record(self, call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Record a call; return the function that replays it, and the tensor that each replay writes."""
        graph = torch.cuda.CUDAGraph()
        # the outer `torch.cuda.stream` restores the stream if a capture fails
        with (
            self._restore_rng_on_failure(),
            torch.cuda.stream(self._capture_stream),
            torch.cuda.graph(graph, self._pool, self._capture_stream),
        ):
            out = call()
        return graph.replay, out

    def record_within_step(self, call: Callable[[], object]) -> Callable[[], object]:
        """Record a call in the middle of a step; return the function that replays it.

        Unlike `torch.cuda.graph`, this neither waits for the device nor empties the allocator's cache, and other
        threads may use the device meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # a collection might free another graph, which is not allowed during a capture
        try:
            with self._restore_rng_on_failure(), torch.cuda.stream(self._capture_stream):
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    call()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph.replay

    @contextmanager
    def _restore_rng_on_failure(self) -> Iterator[None]:
        """Restore the state of torch's random number generator if the capture in the block fails.

        After a failed capture torch treats the generator as captured, and raises when random numbers are drawn
        (pytorch/pytorch#171263), until another capture succeeds. So this makes a small capture.
        """
        try:
            yield
        except BaseException:
            graph = torch.cuda.CUDAGraph()
            with suppress(RuntimeError), torch.cuda.stream(self._capture_stream):  # the first error is the one to raise
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    torch.zeros(1, dtype=torch.float32, device=self._device)  # torch warns about an empty graph
                finally:
                    graph.capture_end()
            raise

    def graph_of(self, launch: Callable[[], None], given: Mapping[int, Given]) -> CallGraph:
        """Record launches as a `CallGraph`; see `CallGraph.record`."""
        return CallGraph.record(launch, given, self._capture_stream)


class CallGraph:
    """A graph of kernel launches whose replays replace the first arguments of some kernels.

    `graph(given, stream)` launches it on a stream. `given` has the new arguments of each of these kernels.
    """

    @classmethod
    def record(cls, launch: Callable[[], None], given: Mapping[int, Given], stream: torch.cuda.Stream) -> CallGraph:
        """Capture the kernels that `launch` launches on a stream.

        given: the first arguments of each kernel that replays give new arguments, by the kernel's place in the order of
            launches; -1 is the last kernel. `launch` must launch the kernels with these arguments.

        Raises BackendUnavailable if a kernel has other arguments, or if `launch` allocates memory: after the capture
        another call could be given that memory.
        """
        from cuda.bindings import driver

        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL  # does not restrict other threads
        with torch.cuda.stream(stream):
            before = _allocations(stream.device)
            check_status(driver.cuStreamBeginCapture(stream.cuda_stream, mode))
            try:
                launch()
            finally:
                answer = driver.cuStreamEndCapture(stream.cuda_stream)
            graph = check_status(answer)
            if _allocations(stream.device) != before:
                check_status(driver.cuGraphDestroy(graph))
                raise BackendUnavailable("the launches of a call allocate memory, which a CUDA graph would keep")
        return cls(graph, given)

    def __init__(self, graph: Any, given: Mapping[int, Given]) -> None:
        """graph: a graph of the driver, which this object now owns; given: as in `record`"""
        from cuda.bindings import driver

        weakref.finalize(self, driver.cuGraphDestroy, graph).atexit = False
        nodes = _in_order(graph)
        self._kernels = [_Kernel(nodes[place], arguments) for place, arguments in given.items()]
        self._made = check_status(driver.cuGraphInstantiate(graph, 0))
        weakref.finalize(self, driver.cuGraphExecDestroy, self._made).atexit = False  # waits for running launches
        self._launch = driver.cuGraphLaunch

    def __call__(self, given: Sequence[Given], stream: int) -> None:
        made = self._made
        for kernel, arguments in zip(self._kernels, given, strict=True):
            kernel.give(made, arguments)
        check_status(self._launch(made, stream))


class _Kernel:
    """A kernel of a graph whose first arguments change. given: the arguments with which it was recorded"""

    def __init__(self, node: Any, given: Given) -> None:
        from cuda.bindings import driver

        self._node, self._how = node, check_status(driver.cuGraphKernelNodeGetParams(node))
        self._values, self._given = (c_uint64 * len(given))(*given), tuple(given)
        sizes = _sizes(self._how.func)
        kept = (c_void_p * len(sizes)).from_address(int(self._how.kernelParams))  # owned by the node
        recorded = [int.from_bytes(string_at(at, size), "little") for at, size in zip(kept, sizes, strict=True)]
        asked = [sizeof(c_uint64)] * (len(given) - 1) + [4]
        if (sizes[: len(given)], recorded[: len(given)]) != (asked, list(given)):
            raise BackendUnavailable(
                f"a kernel must have {given} as its first arguments, got {recorded} of {sizes} bytes"
            )
        own = [addressof(self._values) + n * sizeof(c_uint64) for n in range(len(given))]  # assumes little-endian
        self._places = (c_void_p * len(sizes))(*own, *kept[len(given) :])
        self._how.kernelParams = addressof(self._places)
        self._set = driver.cuGraphExecKernelNodeSetParams

    def give(self, made: Any, given: Given) -> None:
        """Set the arguments of later launches. Launches that are running keep theirs."""
        given = tuple(given)
        if given == self._given:  # common in loops: the allocator returns the same addresses in each iteration
            return
        self._values[:] = given  # type: ignore[call-overload]  # ctypes takes any sequence of this length
        check_status(self._set(made, self._node, self._how))
        self._given = given


def _in_order(graph: Any) -> list[Any]:
    """Return the nodes of a graph in launch order. Raise BackendUnavailable unless they form one chain."""
    from cuda.bindings import driver

    nodes, _ = check_status(driver.cuGraphGetNodes(graph, check_status(driver.cuGraphGetNodes(graph))[1]))
    before, after, *_ = check_status(driver.cuGraphGetEdges(graph, check_status(driver.cuGraphGetEdges(graph))[-1]))
    place, behind = {int(node): node for node in nodes}, dict(zip(map(int, before), map(int, after), strict=True))
    heads = place.keys() - {int(node) for node in after}
    found = list(heads)[:1]
    while found and (following := behind.get(found[-1])) is not None:
        found.append(following)
    if len(heads) != 1 or len(found) != len(place):
        raise BackendUnavailable(
            f"the launches of a call must form one chain, got {len(heads)} first kernels and a chain of {len(found)} "
            f"of {len(place)}"
        )
    return [place[node] for node in found]


def _sizes(function: Any) -> list[int]:
    """Return the size in bytes of each argument of a kernel."""
    from cuda.bindings import driver

    sizes: list[int] = []
    while True:
        status, _, size = driver.cuFuncGetParamInfo(function, len(sizes))
        if int(status):
            return sizes
        sizes.append(int(size))


def _allocations(device: torch.device) -> int:
    """Return how many allocations torch has made on a device."""
    return int(torch.cuda.memory_stats_as_nested_dict(device)["allocation"]["all"]["allocated"])
