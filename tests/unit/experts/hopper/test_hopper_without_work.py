"""Test the Hopper kernels where nothing is launched, which needs no Triton, and what calls keep."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from ep_moe import Activation, ExpertMap, MoEConfig, registry
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.hopper.experts import Bf16TritonExperts
from ep_moe.experts.hopper.scaling import Products, Rows, Unscaled
from ep_moe.experts.layouts import row_bounds
from ep_moe.quant.schemes import SCHEMES
from ep_moe.types import LocalIds, PhysicalIds, Received, RowLayout, Weighting, WireIds
from ep_moe.weights.expert_weights import ExpertWeights

CONFIG = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=4, top_k=2)


def kernel(monkeypatch, slots: int) -> Bf16TritonExperts:
    monkeypatch.setattr(Bf16TritonExperts, "workspace_bytes", lambda self: 1)  # the real method needs Triton
    held = ExpertMap.uneven([slots, CONFIG.num_experts - slots])
    return Bf16TritonExperts(CONFIG, ExpertWeights(CONFIG, held, dtype=torch.bfloat16, trainable=False))


def received(rows: int) -> Received:
    return Received(
        x=torch.ones(rows, CONFIG.hidden_size).bfloat16(),
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        handle=None,
        local_ids=LocalIds(torch.zeros(rows, CONFIG.top_k, dtype=torch.int64)),
        weights=torch.ones(rows, CONFIG.top_k),
    )


@pytest.mark.parametrize(("slots", "rows"), [(0, 3), (2, 0)], ids=["no experts", "no rows"])
def test_nothing_to_compute(slots, rows, monkeypatch):
    """Without rows or experts the result is zeros, and waiting peers are notified that no rows come."""
    experts, given = kernel(monkeypatch, slots), received(rows)
    out = torch.full_like(given.x, torch.nan)
    assert experts.compute(given, out) is out
    assert not out.any()
    assert experts.compute(given, None).dtype == torch.bfloat16
    written = []
    experts.compute_to_peers(given, SimpleNamespace(write_nothing=lambda: written.append(True)))
    assert written == [True]


def test_few_calls_are_recorded(monkeypatch):
    experts, given, launched = kernel(monkeypatch, 2), received(3), []
    monkeypatch.setattr(experts, "_launch", lambda *call: launched.append(call))
    outs = [torch.empty_like(given.x) for _ in range(100)]
    for out in outs:
        experts.compute(given, out)
    assert len(launched) == 100
    assert len(experts._recorded) <= 32


def test_all_that_launches_are_made_of_tells_calls_apart(monkeypatch):
    experts, given = kernel(monkeypatch, 2), received(3)
    wire = PhysicalIds(given.local_ids)
    out, flags = torch.empty_like(given.x), torch.zeros(2, dtype=torch.int32)
    changes = [
        {"x": given.x.clone()},
        {"x": given.x[:2]},
        {"x_scale": torch.ones(3, 1)},
        {"format": "fp8_tensor"},
        {"input_scale": 0.5},
        {"weighting": Weighting.COMBINE},
        {"weights": given.weights.clone()},
        {"local_ids": given.local_ids.clone()},
        {"local_ids": given.local_ids.view(torch.int32)},
        {"local_ids": None, "wire_ids": WireIds(wire, 2)},
        {"local_ids": None, "wire_ids": WireIds(wire, 0, flags, flags)},
    ]
    keys = {experts._launch_key(dataclasses.replace(given, **change), out, None) for change in [{}, *changes]}
    keys |= {
        experts._launch_key(given, out.clone(), None),
        experts._launch_key(given, out, SimpleNamespace(place=(7,))),
    }
    assert len(keys) == len(changes) + 3
    assert experts._launch_key(given, out, None) in keys


def test_rows_of_slots_that_only_wider_ranks_have_are_none_of_ours():
    given = received(12)
    offsets = torch.tensor([0, 3, 5, 9, 12])  # of 4 slots; this rank has 2
    grouped = dataclasses.replace(given, layout=RowLayout.CONTIGUOUS, expert_offsets=offsets)
    assert [bound.tolist() for bound in row_bounds(grouped, 2)] == [[0, 3], [3, 5]]
    batched = dataclasses.replace(
        given, x=given.x.view(4, 3, -1), layout=RowLayout.BATCHED, expert_counts=torch.tensor([1, 0, 3, 2])
    )
    assert [bound.tolist() for bound in row_bounds(batched, 2)] == [[0, 3], [1, 3]]
    assert row_bounds(given, 2) == (None, None)


def test_numbers_that_products_are_made_with(monkeypatch):
    assert kernel(monkeypatch, 2).routes == 16384 * CONFIG.top_k, "rows of one pass times the experts of each"
    products = Products(None, None, [], torch.bfloat16, Activation.SWIGLU_CLAMPED, 1.3, 5.0, 0, None)
    _, how = Unscaled(products).first_result({"act": None})
    assert how == {"activation": Activation.SWIGLU_CLAMPED, "alpha": 1.3, "limit": 5.0}
    rows = Rows(torch.arange(6).view(3, 2), torch.arange(3.0)).part(slice(1, 3))
    assert (rows.x.tolist(), rows.scale.tolist()) == ([[2, 3], [4, 5]], [1.0, 2.0])
    assert Rows(rows.x, 0.5).part(slice(0, 1)).scale == 0.5


@pytest.mark.parametrize("weighting", Weighting)
def test_weights_that_a_transport_multiplies_by_have_no_gradient_here(weighting, monkeypatch):
    experts, given = kernel(monkeypatch, 2), dataclasses.replace(received(0), weighting=weighting)
    stored = {name: experts.weights.get_parameter(name) for name in ("w13", "w2")}
    lists = torch.zeros(0, CONFIG.top_k, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    saved = (given.x.new_empty(0, CONFIG.w13_rows), *lists, lists[0])
    found = experts.gradients(given, saved, stored, given.x, dict.fromkeys(stored, True))
    assert (found.weights is None) == (weighting is Weighting.COMBINE)
    assert not any(found.stored[name].any() for name in stored)


MULTIPLES = {
    "bf16_triton": 64, "fp8_tensor_triton": 128, "fp8_channel_triton": 128, "fp8_dynamic_triton": 128,
    "w4a16_triton": 64, "w4a8_triton": 64,
}  # fmt: skip


@pytest.mark.parametrize("name", MULTIPLES)
def test_sizes_that_a_kernel_serves(name):
    kind, multiple = registry.load("experts", name), MULTIPLES[name]
    for scheme in kind.capabilities.schemes:
        for size, wrong in ((3 * multiple, False), (2 * multiple + 32, True)):
            config = dataclasses.replace(CONFIG, hidden_size=size, intermediate_size=256)
            why = kind.unsupported_reason(config, torch.bfloat16, 1, SCHEMES[scheme], ExpertsOptions())
            assert (why is not None) == wrong
            assert why is None or f"hidden_size must be a multiple of {multiple}" in why
