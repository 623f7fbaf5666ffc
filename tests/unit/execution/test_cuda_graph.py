"""Test call graphs over a stand-in for the CUDA driver, which reads kernel arguments by address as the driver does."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch

from ep_moe.errors import BackendUnavailable
from ep_moe.execution.cuda_graph import CallGraph, Recorder

STREAM = SimpleNamespace(cuda_stream=5, device=torch.device("cpu"))
FIRST, LAST = [4096, 2**40 + 16, 7], [2**62, 0]
INVALID = 1


class Node:
    """A kernel node. sizes: bytes of each kernel argument."""

    def __init__(self, sizes: list[int], values: list[int]) -> None:
        self.own = [ctypes.create_string_buffer(v.to_bytes(s, "little"), s) for s, v in zip(sizes, values, strict=True)]
        self.places = (ctypes.c_void_p * len(sizes))(*map(ctypes.addressof, self.own))
        self.how = SimpleNamespace(func=sizes, kernelParams=ctypes.addressof(self.places))

    def __int__(self) -> int:
        return id(self)


def given(how: SimpleNamespace) -> list[int]:
    places = (ctypes.c_void_p * len(how.func)).from_address(how.kernelParams)
    return [int.from_bytes(ctypes.string_at(at, size), "little") for at, size in zip(places, how.func, strict=True)]


class Driver(ModuleType):
    """A stand-in for the CUDA driver.

    launched: stream and arguments of each kernel; destroyed: what was destroyed; sets: number of argument updates.
    """

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL="this thread's")

    def __init__(self) -> None:
        self.nodes, self.edges, self.launched, self.destroyed, self.allocated = None, [], [], [], 0
        self.cuGraphDestroy = self.cuGraphExecDestroy = self._destroy
        self.failing, self.sets = "", 0

    def _destroy(self, made):
        self.destroyed.append(made)
        return (0,)

    def launch(self, sizes: list[int], values: list[int], *, after: int = 1) -> None:
        self.nodes.append(Node(sizes, values))
        if len(self.nodes) > after:
            self.edges.append((self.nodes[-1 - after], self.nodes[-1]))

    def cuStreamBeginCapture(self, stream, mode):  # noqa: N802
        assert (stream, mode) == (5, "this thread's")
        self.nodes, self.edges = [], []
        return (0,)

    def cuStreamEndCapture(self, stream):  # noqa: N802
        return 0, "graph"

    def cuGraphGetNodes(self, graph, count=0):  # noqa: N802
        return 0, (self.nodes[:count] if count else []), len(self.nodes)

    def cuGraphGetEdges(self, graph, count=0):  # noqa: N802
        before, after = zip(*self.edges, strict=True) if count else ((), ())
        return 0, list(before), list(after), [object()] * count, len(self.edges)

    def cuGraphKernelNodeGetParams(self, node):  # noqa: N802
        return 0, node.how

    def cuFuncGetParamInfo(self, function, number):  # noqa: N802
        return (0, 8 * number, function[number]) if number < len(function) else (INVALID, 0, 0)

    def cuGraphInstantiate(self, graph, flags):  # noqa: N802
        return 0, {node: given(node.how) for node in self.nodes}

    def cuGraphExecKernelNodeSetParams(self, made, node, how):  # noqa: N802
        made[node] = given(how)
        self.sets += 1
        return (INVALID if self.failing == "set" else 0,)

    def cuGraphLaunch(self, made, stream):  # noqa: N802
        self.launched.append((stream, *(made[node] for node in self.nodes)))
        return (INVALID if self.failing == "launch" else 0,)


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    bindings = ModuleType("cuda.bindings")
    bindings.driver = made
    for name, module in {"cuda": ModuleType("cuda"), "cuda.bindings": bindings, "cuda.bindings.driver": made}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())

    def stats(device):
        return {"allocation": {"all": {"allocated": made.allocated}}}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    return made


def recorded(driver: Driver, first: list[int] = FIRST, last: list[int] = LAST, **how: int) -> CallGraph:
    def launch() -> None:
        driver.launch([8, 8, 4, 8, 1], [*FIRST, 99, 3], **how)
        driver.launch([128, 4], [2**1000 + 1, 12], **how)
        driver.launch([8, 4, 8], [*LAST, 77], **how)

    return CallGraph.record(launch, {0: first, -1: last}, STREAM)


def test_the_first_and_the_last_are_given_what_a_call_brings(driver):
    graph = recorded(driver)
    for call in range(3):
        graph(([call, 2**63 + call, call], (16 * call, 2**31 - 1 - call)), 9)
    middle = [2**1000 + 1, 12]
    assert driver.launched == [
        (9, [call, 2**63 + call, call, 99, 3], middle, [16 * call, 2**31 - 1 - call, 77]) for call in range(3)
    ]


def test_arguments_are_set_where_they_are_others(driver):
    """Arguments are updated in the graph only where they differ from the last launch.

    In a loop, tensors usually have the addresses of the previous round.
    """
    graph, first, sets = recorded(driver), [*FIRST], []
    for call in range(5):
        if call in {1, 2, 4}:
            first[2] = 30 if call == 1 else FIRST[2] + call  # the caller changes its own list
        graph((first, LAST), 9)
        sets.append(driver.sets)
    assert [launched[1][2] for launched in driver.launched] == [7, 30, 9, 9, 11]
    assert sets == [0, 1, 2, 2, 3]


def test_one_kernel(driver):
    graph = CallGraph.record(lambda: driver.launch([8, 4], [16, 2]), {0: [16, 2]}, STREAM)
    graph([[32, 3]], 9)
    assert driver.launched == [(9, [32, 3])]


def test_what_was_recorded_must_be_what_was_given(driver):
    for first, last in (([4096, 16, 7], LAST), ([4096, 2**40 + 16], LAST), (FIRST, [*LAST, 77]), ([*FIRST, 99], LAST)):
        with pytest.raises(BackendUnavailable, match=r"must have .* as its first arguments"):
            recorded(driver, first, last)


def test_several_ends(driver):
    with pytest.raises(BackendUnavailable, match="must form one chain, got 2 first kernels and a chain of 2 of 3"):
        recorded(driver, after=2)


def test_memory_that_another_call_could_have(driver):
    def launch() -> None:
        driver.launch([8, 4], [16, 2])
        driver.allocated += 1

    with pytest.raises(BackendUnavailable, match="allocate memory"):
        CallGraph.record(launch, {0: [16, 2]}, STREAM)
    assert driver.destroyed == ["graph"]


def test_what_fails_while_it_is_recorded_leaves_the_stream(driver, monkeypatch):
    ended = []
    monkeypatch.setattr(Driver, "cuStreamEndCapture", lambda self, stream: ended.append(stream) or (INVALID, None))
    with pytest.raises(ZeroDivisionError):
        CallGraph.record(lambda: 1 / 0, {0: FIRST, -1: LAST}, STREAM)
    assert ended == [5]


@pytest.mark.parametrize("what", ["set", "launch"])
def test_a_driver_that_refuses_is_heard(what, driver):
    graph, other = recorded(driver), [*FIRST[:2], 8]
    driver.failing = what
    for _ in range(2):  # arguments that the driver refused do not count as set
        with pytest.raises(BackendUnavailable, match="the CUDA driver"):
            graph((other, LAST), 9)


def test_it_gives_back_what_it_has(driver):
    graph = recorded(driver)
    made = graph._made
    del graph
    gc.collect()
    assert len(driver.destroyed) == 2
    assert "graph" in driver.destroyed
    assert made in driver.destroyed


class Graph:
    """A stand-in for torch's CUDAGraph. Its generator stays in capture mode after a failed capture.

    captures: captures under way, or never ended.
    """

    captures, made = 0, 0

    def capture_begin(self, *pool, capture_error_mode):
        Graph.captures, Graph.made = 1, Graph.made + 1

    def capture_end(self):
        if Graph.made == 1:
            raise RuntimeError("operation failed due to a previous error during capture")
        Graph.captures = 0

    def replay(self):
        raise AssertionError("it is not called")


@pytest.mark.parametrize("fails", [True, False])
def test_a_capture_that_fails_is_followed_by_one_that_does_not(fails, monkeypatch):
    """A failed capture is followed by an empty one that succeeds and resets the generator.

    Otherwise random numbers on the device would raise from then on.
    """
    monkeypatch.setattr(Graph, "captures", 0)
    monkeypatch.setattr(Graph, "made", 0 if fails else 1)
    own = {"CUDAGraph": Graph, "stream": lambda stream: nullcontext(), "current_stream": lambda device: STREAM}
    own |= {"Stream": lambda device: STREAM, "graph_pool_handle": lambda: (0, 1)}
    for name, stand_in in own.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    recorder = Recorder(torch.device("cpu"), SimpleNamespace(lend=lambda stream: None))
    with pytest.raises(RuntimeError, match="previous error during capture") if fails else nullcontext():
        recorder.record_within_step(lambda: None)
    assert (Graph.captures, Graph.made) == (0, 2)
