"""CUDA graphs of calls: torch's, which replay on fixed tensors, and `CallGraph`, the launches of one stream as one
graph of which some kernels are given other arguments at each call.

To the host a `CallGraph` is these kernels' arguments set and one launch, whatever lies between them: less than half of
the time that the launches take by themselves. Nothing is copied to where a graph would read it.
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
from ep_moe.runtime.nvrtc import done
from ep_moe.runtime.workspace import Workspaces
from ep_moe.types import capturing

Given = Sequence[int]  # addresses, and a number of 32 bits as the last one


class Recorder:
    """Records calls as CUDA graphs in one memory pool, and has them replayed on the stream that was current when it was
    made, and on no other: what graphs share is kept apart by that stream's order alone.

    handle: of that stream; memory: what the calls read
    """

    def __init__(self, device: torch.device, workspaces: Workspaces) -> None:
        self.stream: Any = torch.cuda.current_stream(device)
        self._device, self.handle = device, self.stream.cuda_stream
        self._beside = torch.cuda.Stream(device)  # the default stream cannot be captured
        workspaces.lend(self._beside)  # what is recorded there runs here
        self._pool = torch.cuda.graph_pool_handle()
        self.memory = InputMemory()

    @classmethod
    def unsupported_reason(cls, device: torch.device) -> str | None:
        """None, or why calls there cannot be recorded."""
        return None if device.type == "cuda" else f"the layer is on {device}, and CUDA graphs need a GPU"

    @classmethod
    def among(cls, made: list[Any], device: torch.device, workspaces: Workspaces) -> Recorder:
        """The one of those that were made that is for the current stream; a new one joins them."""
        found = next((recorder for recorder in made if recorder.here), None)
        if found is None:
            made.append(found := cls(device, workspaces))
        return found

    @property
    def here(self) -> bool:
        """Whether a replay may begin: the stream is current, and not being captured itself."""
        return current_stream(self._device) == self.handle and not capturing(self._device)

    def warm(self, call: Callable[[], Any]) -> None:
        """Run it where it will be recorded: what the first call on a stream makes is not to be made in a graph."""
        self._beside.wait_stream(self.stream)
        with torch.cuda.stream(self._beside):
            call()
        self.stream.wait_stream(self._beside)

    def record(self, call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """What replays it, and the tensor that each replay writes."""
        graph = torch.cuda.CUDAGraph()
        # the outer one leaves the stream again where a capture fails
        with self._settled(), torch.cuda.stream(self._beside), torch.cuda.graph(graph, self._pool, self._beside):
            out = call()
        return graph.replay, out

    def record_within_step(self, call: Callable[[], object]) -> Callable[[], object]:
        """What replays a call that runs in the middle of others' work: the device is not waited for, its free memory
        is kept, and other threads may use it meanwhile."""
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # what it would free, perhaps another graph, cannot be freed within a capture
        try:
            with self._settled(), torch.cuda.stream(self._beside):
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
    def _settled(self) -> Iterator[None]:
        """For a capture. Where one fails, torch takes the device's random numbers for captured, and raises where they
        are asked for (pytorch/pytorch#171263), until a capture succeeds."""
        try:
            yield
        except BaseException:
            graph = torch.cuda.CUDAGraph()
            with suppress(RuntimeError), torch.cuda.stream(self._beside):  # what failed first is what is raised
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    torch.zeros(1, device=self._device)  # torch warns of an empty graph
                finally:
                    graph.capture_end()
            raise

    def graph_of(self, launch: Callable[[], None], given: Mapping[int, Given]) -> CallGraph:
        """As `CallGraph.record`."""
        return CallGraph.record(launch, given, self._beside)


class CallGraph:
    """graph(given, stream): all launches on that stream, with these instead of the arguments that some of them were
    recorded with."""

    @classmethod
    def record(cls, launch: Callable[[], None], given: Mapping[int, Given], stream: torch.cuda.Stream) -> CallGraph:
        """given: what `launch`, on a stream of which nothing else is recorded, gives the kernels that calls give
        something, by their place in its order; -1 for the last one. Raises BackendUnavailable where that is not so, or
        memory is allocated, which another call could have meanwhile."""
        from cuda.bindings import driver

        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL  # other threads may ask what they like
        with torch.cuda.stream(stream):
            before = _allocations(stream.device)
            done(driver.cuStreamBeginCapture(stream.cuda_stream, mode))
            try:
                launch()
            finally:
                answer = driver.cuStreamEndCapture(stream.cuda_stream)
            graph = done(answer)
            if _allocations(stream.device) != before:
                done(driver.cuGraphDestroy(graph))
                raise BackendUnavailable("the launches of a call allocate memory, which a graph of them would keep")
        return cls(graph, given)

    def __init__(self, graph: Any, given: Mapping[int, Given]) -> None:
        """graph: the driver's, which is this object's from now on"""
        from cuda.bindings import driver

        weakref.finalize(self, driver.cuGraphDestroy, graph).atexit = False
        nodes = _in_order(graph)
        self._kernels = [_Kernel(nodes[place], arguments) for place, arguments in given.items()]
        self._made = done(driver.cuGraphInstantiate(graph, 0))
        weakref.finalize(self, driver.cuGraphExecDestroy, self._made).atexit = False  # waits for what is under way
        self._launch = driver.cuGraphLaunch

    def __call__(self, given: Sequence[Given], stream: int) -> None:
        made = self._made
        for kernel, arguments in zip(self._kernels, given, strict=True):
            kernel.give(made, arguments)
        done(self._launch(made, stream))


class _Kernel:
    """One of a graph, whose first arguments change. given: what they were recorded as"""

    def __init__(self, node: Any, given: Given) -> None:
        from cuda.bindings import driver

        self._node, self._how = node, done(driver.cuGraphKernelNodeGetParams(node))
        self._values, self._given = (c_uint64 * len(given))(*given), tuple(given)
        sizes = _sizes(self._how.func)
        kept = (c_void_p * len(sizes)).from_address(int(self._how.kernelParams))  # the node's own, while there is one
        recorded = [int.from_bytes(string_at(at, size), "little") for at, size in zip(kept, sizes, strict=True)]
        asked = [sizeof(c_uint64)] * (len(given) - 1) + [4]
        if (sizes[: len(given)], recorded[: len(given)]) != (asked, list(given)):
            raise BackendUnavailable(f"a kernel has arguments {recorded} of {sizes} bytes, and begins not with {given}")
        own = [addressof(self._values) + n * sizeof(c_uint64) for n in range(len(given))]  # little-endian numbers
        self._places = (c_void_p * len(sizes))(*own, *kept[len(given) :])
        self._how.kernelParams = addressof(self._places)
        self._set = driver.cuGraphExecKernelNodeSetParams

    def give(self, made: Any, given: Given) -> None:
        """To the launches from now on; those that are under way keep theirs."""
        given = tuple(given)
        if given == self._given:  # a loop's tensors lie where those of its last round lay
            return
        self._values[:] = given  # type: ignore[call-overload]  # ctypes takes whatever has as many
        done(self._set(made, self._node, self._how))
        self._given = given


def _in_order(graph: Any) -> list[Any]:
    """The nodes, each of which waits for the one before it."""
    from cuda.bindings import driver

    nodes, _ = done(driver.cuGraphGetNodes(graph, done(driver.cuGraphGetNodes(graph))[1]))
    before, after, *_ = done(driver.cuGraphGetEdges(graph, done(driver.cuGraphGetEdges(graph))[-1]))
    place, behind = {int(node): node for node in nodes}, dict(zip(map(int, before), map(int, after), strict=True))
    heads = place.keys() - {int(node) for node in after}
    found = list(heads)[:1]
    while found and (following := behind.get(found[-1])) is not None:
        found.append(following)
    if len(heads) != 1 or len(found) != len(place):
        raise BackendUnavailable(
            f"the launches of a call begin with {len(heads)} kernels, and {len(found)} of {len(place)} follow one "
            f"another"
        )
    return [place[node] for node in found]


def _sizes(function: Any) -> list[int]:
    """Bytes of each of a kernel's arguments."""
    from cuda.bindings import driver

    sizes: list[int] = []
    while True:
        status, _, size = driver.cuFuncGetParamInfo(function, len(sizes))
        if int(status):
            return sizes
        sizes.append(int(size))


def _allocations(device: torch.device) -> int:
    """How often tensors were given memory there."""
    return int(torch.cuda.memory_stats_as_nested_dict(device)["allocation"]["all"]["allocated"])
