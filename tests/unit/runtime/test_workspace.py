"""Test scratch memory: one buffer per stream, as large as the largest layer needs, cut without overlap."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.experts.base import Experts
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.runtime import workspace
from ep_moe.runtime.workspace import ALIGNMENT, Workspaces, carve, carved_bytes, round_up

CPU = torch.device("cpu")
CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)


def test_nothing_is_allocated_before_the_first_take():
    spaces = Workspaces(CPU)
    assert (spaces.reserved, spaces.allocated) == (0, 0)
    spaces.reserve(1000)
    assert (spaces.reserved, spaces.allocated) == (1000, 0)
    taken = spaces.take(1000)
    assert (taken.dtype, taken.shape, taken.device) == (torch.uint8, (1000,), CPU)
    assert spaces.allocated == 1000


def test_the_largest_reservation_counts_and_the_buffer_is_shared():
    spaces = Workspaces(CPU)
    for size in (100, 300, 200):
        spaces.reserve(size)
    assert spaces.reserved == 300
    first = spaces.take(100)
    assert first.numel() == 300
    assert spaces.take(300).data_ptr() == spaces.take(0).data_ptr() == first.data_ptr()
    assert spaces.allocated == 300


def test_more_than_was_reserved_cannot_be_taken():
    spaces = Workspaces(CPU)
    spaces.reserve(100)
    with pytest.raises(AssertionError, match="take what was reserved"):
        spaces.take(101)


def test_growth_keeps_the_smaller_buffer_and_shrinks_never():
    """Growth keeps the smaller buffer, because a captured graph may hold its address. Memory never shrinks."""
    spaces = Workspaces(CPU)
    spaces.reserve(100)
    small = spaces.take(100)
    small.fill_(7)
    spaces.reserve(500)
    assert spaces.take(100).data_ptr() == small.data_ptr()  # still large enough for this request
    large = spaces.take(500)
    assert large.numel() == 500
    large.fill_(9)
    assert (small == 7).all()
    assert spaces.take(100).data_ptr() == large.data_ptr()
    assert spaces.allocated == 600
    spaces.reserve(50)
    assert spaces.reserved == 500


def test_streams_have_buffers_of_their_own(monkeypatch):
    """Each stream of a GPU has its own buffer, because work on two streams may run at once."""
    spaces = Workspaces(CPU)
    spaces.reserve(64)
    spaces.device = SimpleNamespace(type="cuda")
    streams = [1]
    monkeypatch.setattr(workspace, "current_stream", lambda device: streams[-1])
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, dtype=options["dtype"]))
    one = spaces.take(64)
    streams.append(2)
    two = spaces.take(64)
    assert one.data_ptr() != two.data_ptr()
    assert spaces.take(64).data_ptr() == two.data_ptr()
    streams.append(1)
    assert spaces.take(64).data_ptr() == one.data_ptr()
    assert spaces.allocated == 128
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=streams[-1]))
    spaces.lend(SimpleNamespace(cuda_stream=3))  # a capture's stream, which never runs at the same time
    streams.append(3)
    assert spaces.take(64).data_ptr() == one.data_ptr()
    assert spaces.allocated == 128


def test_what_is_taken_in_inference_mode_serves_outside():
    spaces = Workspaces(CPU)
    spaces.reserve(64)
    with torch.inference_mode():
        spaces.take(64)
    spaces.take(64).fill_(1)


def test_clear_gives_back():
    spaces = Workspaces(CPU)
    spaces.reserve(64)
    spaces.take(64)
    spaces.clear()
    assert (spaces.allocated, spaces.reserved) == (0, 64)
    assert spaces.take(64).numel() == 64


# --- cutting --------------------------------------------------------------------------------------------------------

SHAPES = {
    "ids": ((5, 3), torch.int32),
    "rows": ((7, 33), torch.float8_e4m3fn),
    "scale": ((), torch.float32),
    "nothing": ((0, 4), torch.bfloat16),
    "even": ((ALIGNMENT // 2,), torch.bfloat16),
    "last": ((3,), torch.float64),
}


@pytest.mark.parametrize(("size", "up"), [(0, 0), (1, 256), (255, 256), (256, 256), (257, 512)])
def test_aligned(size, up):
    assert round_up(size) == up


def test_carved_tensors_are_aligned_and_do_not_overlap():
    needed = carved_bytes(SHAPES)
    assert needed == 256 * 5
    buffer = torch.zeros(needed + 40, dtype=torch.uint8)
    views = carve(buffer, SHAPES)
    assert list(views) == [*SHAPES, "rest"]
    spans = []
    for name, (shape, dtype) in SHAPES.items():
        view = views[name]
        assert (tuple(view.shape), view.dtype) == (shape, dtype)
        assert view.is_contiguous()
        if view.numel():  # an empty tensor has no address
            assert (view.data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0
            spans.append((view.data_ptr() - buffer.data_ptr(), view.numel() * view.itemsize))
    assert (views["rest"].data_ptr() - buffer.data_ptr(), views["rest"].numel()) == (needed, 40)
    spans.append((needed, 40))
    for (start, size), (following, _) in pairwise(spans):
        assert start + size <= following
    for number, view in enumerate(views.values(), 1):
        view.copy_(torch.full(view.shape, number).to(view.dtype))
    for number, view in enumerate(views.values(), 1):
        assert (view.float() == number).all()


def test_carve_of_nothing_is_all_rest():
    buffer = torch.zeros(16, dtype=torch.uint8)
    assert carved_bytes({}) == 0
    assert carve(buffer, {})["rest"].data_ptr() == buffer.data_ptr()


# --- layers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hungry(monkeypatch):
    """Make the reference kernel need scratch memory that grows with I."""
    monkeypatch.setattr(ReferenceExperts, "workspace_bytes", lambda self: 1000 * self.config.intermediate_size)


def layer(context: EPContext, inner: int) -> MoELayer:
    return MoELayer(MoEConfig(hidden_size=16, intermediate_size=inner, num_experts=4, top_k=2), context)


def test_plan_counts_the_workspace_once(hungry):
    context = EPContext.local(CPU)
    assert context.plan() == {}
    layers = [layer(context, inner) for inner in (16, 32, 16)]
    plans = [one.plan() for one in layers]
    assert [plan["workspace"] for plan in plans] == [16_000, 32_000, 16_000]
    total = context.plan()
    assert total["workspace"] == context._workspaces.reserved == 32_000
    assert total["experts"] == sum(plan["experts"] for plan in plans)
    assert total.keys() == plans[0].keys()


def test_layers_share_one_buffer_and_plan_does_not_change_with_it(hungry):
    context = EPContext.local(CPU)
    first, second = layer(context, 16), layer(context, 32)
    before = context.plan()
    assert context._workspaces.allocated == 0
    assert first.experts.workspace().data_ptr() == second.experts.workspace().data_ptr()
    assert context._workspaces.allocated == before["workspace"] == 32_000
    assert context.plan() == before
    third = layer(context, 48)
    assert third.experts.workspace().numel() == 48_000
    assert first.experts.workspace().data_ptr() == third.experts.workspace().data_ptr()
    context.destroy()
    assert context._workspaces.allocated == 0


def test_a_kernel_that_needs_none_takes_none():
    context = EPContext.local(CPU)
    made = MoELayer(CONFIG, context)
    assert isinstance(made.experts, Experts)
    made(torch.ones(3, 16))
    assert context.plan()["workspace"] == 0
    assert context._workspaces.allocated == 0


def test_a_compiled_graph_without_an_eager_call_has_a_buffer_of_its_own(hungry, monkeypatch):
    context = EPContext.local(CPU)
    experts = layer(context, 16).experts
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = experts.workspace()
    assert (found.numel(), found.dtype, found.device) == (16_000, torch.uint8, CPU)
    assert context._workspaces.allocated == 0, "the graph allocates it"
    monkeypatch.undo()


def test_a_compiled_graph_keeps_the_buffer_of_the_eager_call(hungry, monkeypatch):
    context = EPContext.local(CPU)
    first = layer(context, 16)
    eager = first.experts.workspace()
    context._workspaces.clear()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert first.experts.workspace() is eager
    monkeypatch.undo()
