"""Call graphs on a GPU: the arguments of calls in quick succession, and graphs that were deleted."""

from __future__ import annotations

import gc

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import triton
import triton.language as tl

from ep_moe.errors import BackendUnavailable
from ep_moe.execution.cuda_graph import CallGraph, Recorder
from ep_moe.runtime.launch_cache import pdl_launch, pdl_trigger, pdl_wait
from ep_moe.runtime.workspace import Workspaces

SIZE, DEVICE = 1024, torch.device("cuda")


@triton.jit(do_not_specialize=["count"])
def _begin(x, count, held, SIZE: tl.constexpr, PDL: tl.constexpr):  # noqa: N803
    pdl_trigger(PDL)
    at = tl.arange(0, SIZE)
    tl.store(held + at, tl.load(x + at, mask=at < count, other=-1))


@triton.jit(do_not_specialize=["count"])
def _end(out, count, held, SIZE: tl.constexpr, PDL: tl.constexpr):  # noqa: N803
    pdl_wait(PDL)
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(held + at), mask=at < count)


@pytest.fixture
def held():
    return torch.zeros(SIZE, dtype=torch.int64, device=DEVICE)


def chain(x, out, held, count=SIZE):
    how = pdl_launch(DEVICE)
    _begin[(1,)](x, count, held, SIZE=SIZE, PDL=how["PDL"])
    held.mul_(3)
    _end[(1,)](out, count, held, SIZE=SIZE, **how)


def recorded(held, call=chain) -> CallGraph:
    x, out = torch.zeros_like(held), torch.zeros_like(held)
    call(x, out, held)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    given = {0: [x.data_ptr(), SIZE], -1: [out.data_ptr(), SIZE]}
    return CallGraph.record(lambda: call(x, out, held), given, stream)


def test_each_call_has_its_own_arguments(held):
    """Each of hundreds of launched calls reads its own arguments."""
    graph, current = recorded(held), torch.cuda.current_stream()
    calls = 400
    given = [torch.full((SIZE,), call, device=DEVICE) for call in range(calls)]
    found = [torch.full((SIZE,), -7, device=DEVICE) for _ in range(calls)]
    torch.cuda.synchronize()
    for call, (x, out) in enumerate(zip(given, found, strict=True)):
        graph(([x.data_ptr(), call % SIZE], [out.data_ptr(), SIZE - 1]), current.cuda_stream)
    torch.cuda.synchronize()
    for call, out in enumerate(found):
        expected = torch.full((SIZE,), -3)
        expected[: call % SIZE] = 3 * call
        expected[SIZE - 1] = -7
        assert torch.equal(out.cpu(), expected), call


def test_it_may_go_while_it_runs(held):
    out, x = torch.zeros_like(held), torch.ones_like(held)
    for _ in range(20):
        graph = recorded(held)
        torch.cuda._sleep(2_000_000)
        graph(([x.data_ptr(), SIZE], [out.zero_().data_ptr(), SIZE]), torch.cuda.current_stream().cuda_stream)
        del graph
        gc.collect()
        torch.cuda.synchronize()
        assert bool((out == 3).all())


def allocating(x, out, held):
    chain(x, out, held.clone())


def waiting(x, out, held):
    chain(x, out, held)
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (allocating, BackendUnavailable, "the launches of a call allocate memory"),
        (waiting, RuntimeError, "stream is capturing"),
    ],
    ids=["allocating", "waiting"],
)
def test_what_cannot_be_recorded_leaves_nothing_behind(call, error, sentence, held):
    with pytest.raises(error, match=sentence):
        recorded(held, call)
    out, x = torch.zeros_like(held), torch.ones_like(held)
    chain(x, out, held)
    assert bool((out == 3).all())
    graph = recorded(held)
    graph(([x.data_ptr(), 1], [out.data_ptr(), 2]), torch.cuda.current_stream().cuda_stream)
    assert out[:3].tolist() == [3, -3, 3]


@pytest.mark.parametrize("way", ["record", "record_within_step"])
def test_random_numbers_after_a_capture_that_failed(way):
    """Random numbers work after a failed capture.

    It fails because the call waits for the device, which a capture does not allow.
    """
    recorder = Recorder(DEVICE, Workspaces(DEVICE))
    with pytest.raises(RuntimeError):
        getattr(recorder, way)(lambda: torch.zeros(1, device=DEVICE).item())
    assert torch.rand(3, device=DEVICE).isfinite().all()
