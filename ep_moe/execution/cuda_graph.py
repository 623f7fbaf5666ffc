"""CUDA graphs of calls: torch's, which replay on fixed tensors, and `CallGraph`, the launches of one stream as one
graph whose first and last kernel are given other arguments at each call.

To the host a `CallGraph` is two kernels' arguments set and one launch, whatever lies between them: less than half of
the time that the launches take by themselves. Nothing is copied to where a graph would read it.

A router of ours is recorded apart (`RouterGraphs`), for few tokens. By themselves its launches take the host longer
than a whole call that is replayed (`CallerInputs`), which a router's kernels, torch's own, cannot be part of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from ctypes import addressof, c_uint64, c_void_p, sizeof, string_at
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_moe.errors import BackendUnavailable
from ep_moe.execution.graph_inputs import InputMemory
from ep_moe.router import Router
from ep_moe.runtime.devices import current_stream
from ep_moe.runtime.nvrtc import done
from ep_moe.runtime.workspace import Workspaces
from ep_moe.types import Routing, capturing

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
        with torch.cuda.stream(self._beside), torch.cuda.graph(graph, self._pool, self._beside):
            out = call()
        return graph.replay, out

    def graph_beside(self, call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """A graph of a call that no user asked to capture, and what it gives: other threads may ask what they like."""
        self.warm(call)
        graph, beside = torch.cuda.CUDAGraph(), self._beside
        with (
            torch.cuda.stream(beside),
            torch.cuda.graph(graph, self._pool, beside, capture_error_mode="thread_local"),
        ):
            found = call()
        return graph, found

    def graph_of(self, launch: Callable[[], None], first: Given, last: Given) -> CallGraph:
        """As `CallGraph.record`."""
        return CallGraph.record(launch, first, last, self._beside)


class CallGraph:
    """graph(first, last, stream): all launches on that stream, with these instead of the arguments that the first
    and the last one begin with."""

    @classmethod
    def record(cls, launch: Callable[[], None], first: Given, last: Given, stream: torch.cuda.Stream) -> CallGraph:
        """first, last: what `launch`, on a stream of which nothing else is recorded, gives the two kernels. Raises
        BackendUnavailable where that is not so, or memory is allocated, which another call could have meanwhile."""
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
        return cls(graph, first, last)

    def __init__(self, graph: Any, first: Given, last: Given) -> None:
        """graph: the driver's, which is this object's from now on"""
        from cuda.bindings import driver

        weakref.finalize(self, driver.cuGraphDestroy, graph).atexit = False
        begin, end = _ends(graph)
        self._first, self._last = _Kernel(begin, first), _Kernel(end, last)
        self._made = done(driver.cuGraphInstantiate(graph, 0))
        weakref.finalize(self, driver.cuGraphExecDestroy, self._made).atexit = False  # waits for what is under way
        self._launch = driver.cuGraphLaunch

    def __call__(self, first: Given, last: Given, stream: int) -> None:
        made = self._made
        self._first.give(made, first)
        self._last.give(made, last)
        done(self._launch(made, stream))


class _Kernel:
    """One of a graph, whose first arguments change. given: what they were recorded as"""

    def __init__(self, node: Any, given: Given) -> None:
        from cuda.bindings import driver

        self._node, self._how = node, done(driver.cuGraphKernelNodeGetParams(node))
        self._values = (c_uint64 * len(given))(*given)
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
        self._values[:] = given  # type: ignore[call-overload]  # whatever has as many
        done(self._set(made, self._node, self._how))


def _ends(graph: Any) -> tuple[Any, Any]:
    """The nodes that no other comes before, and after."""
    from cuda.bindings import driver

    nodes, _ = done(driver.cuGraphGetNodes(graph, done(driver.cuGraphGetNodes(graph))[1]))
    before, after, *_ = done(driver.cuGraphGetEdges(graph, done(driver.cuGraphGetEdges(graph))[-1]))
    heads, tails = ({int(node) for node in nodes} - {int(node) for node in found} for found in (after, before))
    if len(heads) != 1 or len(tails) != 1:
        raise BackendUnavailable(f"the launches of a call begin with {len(heads)} kernels and end with {len(tails)}")
    place = {int(node): node for node in nodes}
    return place[heads.pop()], place[tails.pop()]


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


MOST = 256  # tokens: more take the device longer than the host
_SIZES = 32  # numbers of tokens that are kept at once


class _Recorded(NamedTuple):
    x: Tensor
    graph: torch.cuda.CUDAGraph
    routing: Routing
    places: list[int]


class RouterGraphs:
    """Of one layer, on one stream. The second call of a number of tokens is recorded, and later ones are replayed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._made: dict[Any, _Recorded | None] = {}  # by tokens and dtype; None: of a call that was seen once
        self._failed = False

    def __call__(self, router: Router, x: Tensor) -> Routing:
        """Choose experts for x [T, H], without gradients. What is replayed holds until the next call."""
        tokens = len(x)
        if not 0 < tokens <= MOST or self._failed or router._forward_hooks or router._forward_pre_hooks:
            found: Routing = router(x)
            return found
        places = _places(router)
        key = (tokens, x.dtype)  # a router in float32 stays where it is when a layer changes its dtype
        made = self._made.get(key)
        if made is None or made.places != places:
            if key not in self._made:
                if len(self._made) == _SIZES:
                    self._made.clear()
                self._made[key] = None
                return router(x)  # type: ignore[no-any-return]
            made = self._record(router, x, places)
            if made is None:
                return router(x)  # type: ignore[no-any-return]
            self._made[key] = made
        made.x.copy_(x)
        made.graph.replay()
        return made.routing

    def _record(self, router: Router, x: Tensor, places: list[int]) -> _Recorded | None:
        try:
            with torch.inference_mode(False), torch.no_grad():  # what is made within it could not be written outside
                kept = torch.empty_like(x)
                graph, routing = self._recorder.graph_beside(lambda: router(kept))
                return _Recorded(kept, graph, routing, places)
        except RuntimeError:  # another thread of the process did what a capture does not stand
            self._failed = True
            return None


def _places(router: Router) -> list[int]:
    found: list[Any] = [*router._parameters.values(), *router._buffers.values()]
    return [tensor.data_ptr() for tensor in found if tensor is not None]
