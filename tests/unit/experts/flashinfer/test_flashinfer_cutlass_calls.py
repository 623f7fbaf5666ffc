"""Test `flashinfer_cutlass` without a GPU: chunks, the caller's memory, other row layouts, and its error messages."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch import Tensor

from ep_moe import MoEConfig
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.flashinfer import cutlass_op
from ep_moe.experts.flashinfer.cutlass import FlashInferCutlassExperts
from ep_moe.quant.schemes import PLAIN, SCHEMES
from ep_moe.types import LocalIds, Received, RowLayout, Weighting
from ep_moe.weights.layouts.cutlass import SM90_SCHEMES
from tests.fixtures.expert_weights import etp_link
from tests.fixtures.flashinfer_cutlass import BF16, SLOTS, TOP_K, build, emulated, rows, shape  # noqa: F401 (a fixture)
from tests.fixtures.flashinfer_cutlass_planted import before_run, each_scheme, times_the_limit

pytestmark = pytest.mark.filterwarnings("ignore:.*EPContext.tune:UserWarning")


# --- chunks, memory of the caller, layouts, weighting ---------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, 24])
@each_scheme
def test_in_chunks_as_in_one(scheme, chunk, monkeypatch, emulated):  # noqa: F811
    received = rows(shape())
    seen: list[list[Tensor]] = []
    before_run(monkeypatch, lambda arguments: seen.append([t.clone() for t in arguments["quant_scales"] or []]))
    parts, tensors = build(shape(), scheme, chunk_rows=chunk)
    assert parts.chunk_rows == chunk
    assert times_the_limit(parts, tensors, received) <= 1
    sizes = [len(call["input"]) for call in emulated]
    assert sizes == [min(chunk, 24 - start) for start in range(0, 24, chunk)]
    for scales in seen:  # all chunks use one scale for all rows
        assert all(
            torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
            for a, b in zip(scales, seen[0], strict=True)
        )


def test_a_chunk_needs_less_memory():
    whole, _ = build(shape(), PLAIN)
    parts, _ = build(shape(), PLAIN, chunk_rows=8)
    assert parts.workspace_bytes() < whole.workspace_bytes()
    assert parts.workspaces.reserved == parts.workspace_bytes()


def test_flashinfers_memory_and_ours_lie_side_by_side(monkeypatch):
    sizes = []
    for scratch in (1024, 4096):
        monkeypatch.setattr(cutlass_op, "scratch_bytes", lambda *shape, size=scratch: size)
        sizes.append(build(shape(), PLAIN)[0].workspace_bytes())
    assert sizes[1] - sizes[0] == 3072


def test_a_chunk_is_never_more_than_the_kernel_can_count():
    config = MoEConfig(hidden_size=7168, intermediate_size=8192, num_experts=4, top_k=2)
    experts = object.__new__(FlashInferCutlassExperts)
    experts.config, experts.options = config, ExpertsOptions(chunk_rows=10**9)
    for etp in (1, 2):  # ranks that share an expert
        experts.weights = type("Weights", (), {"etp": etp_link(etp, 0)})()
        widest = config.w13_rows // etp
        assert experts.chunk_rows * config.top_k * widest < 2**31
        assert (experts.chunk_rows + 1) * config.top_k * widest >= 2**31 - 1


@each_scheme
def test_out_is_written(scheme):
    experts, _ = build(shape(), scheme)
    received = rows(shape())
    out = torch.full((24, 256), torch.nan, dtype=BF16)
    assert experts(received, out) is out
    assert torch.equal(out, experts(received))
    assert not out.isnan().any()


def test_the_callers_rows_ids_and_weights_are_left_alone():
    for name in SM90_SCHEMES:
        experts, _ = build(shape(), SCHEMES[name])
        received = rows(shape())
        before = [t.clone() for t in (received.x, received.local_ids, received.weights)]
        stored = {name: p.detach().clone() for name, p in experts.weights.stored_tensors().items()}
        experts(received)
        for now, then in zip((received.x, received.local_ids, received.weights), before, strict=True):
            assert torch.equal(now, then)
        for name, parameter in experts.weights.stored_tensors().items():
            assert torch.equal(parameter.contiguous().view(torch.uint8), stored[name].view(torch.uint8)), name


COUNTS = [3, 0, 5, 1, 2]  # rows of each expert


def by_expert(config: MoEConfig) -> tuple[Received, Tensor, Tensor, Tensor]:
    """Return RANK_MAJOR rows with one expert each, sorted by expert. Also return the rows, experts and weights."""
    generator = torch.Generator().manual_seed(4)
    expert = torch.repeat_interleave(torch.arange(SLOTS), torch.tensor(COUNTS))
    x = torch.randn(len(expert), config.hidden_size, generator=generator).to(BF16)
    weights = torch.rand(len(expert), generator=generator) + 0.1
    ids = torch.cat([expert.unsqueeze(1), torch.full((len(expert), TOP_K - 1), -1)], 1)
    received = Received(
        x=x,
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        handle=None,
        local_ids=LocalIds(ids),
        weights=torch.cat([weights.unsqueeze(1), torch.ones(len(expert), TOP_K - 1)], 1),
    )
    return received, x, expert, weights


@pytest.mark.parametrize("weighting", list(Weighting), ids=lambda w: w.value)
@each_scheme
def test_contiguous_rows_are_rank_major_ones(scheme, weighting):
    experts, _ = build(shape(), scheme)
    received, x, _, weights = by_expert(shape())
    offsets = torch.tensor([0, *COUNTS]).cumsum(0)
    weighted = weighting is Weighting.EXPERTS
    expected = experts(
        dataclasses.replace(received, weighting=weighting, weights=received.weights if weighted else None)
    )
    junk = torch.full((4, 256), torch.nan, dtype=BF16)  # room for more rows than were sent
    contiguous = Received(
        x=torch.cat([x, junk]),
        layout=RowLayout.CONTIGUOUS,
        weighting=weighting,
        handle=None,
        weights=torch.cat([weights, torch.full((4,), 7.0)]) if weighted else None,
        expert_offsets=offsets.int(),
    )
    out = torch.empty(len(x) + 4, 256, dtype=BF16)
    y = experts(contiguous, out)
    assert y.data_ptr() == out.data_ptr()
    assert torch.equal(y[: len(x)], expected)
    assert torch.equal(experts(dataclasses.replace(contiguous, expert_offsets=offsets))[: len(x)], expected)


@pytest.mark.parametrize("weighting", list(Weighting), ids=lambda w: w.value)
@each_scheme
def test_batched_rows_are_rank_major_ones(scheme, weighting):
    experts, _ = build(shape(), scheme)
    received, x, expert, weights = by_expert(shape())
    weighted = weighting is Weighting.EXPERTS
    expected = experts(
        dataclasses.replace(received, weighting=weighting, weights=received.weights if weighted else None)
    )
    place = torch.cat([torch.arange(count) for count in COUNTS])
    batch = torch.full((SLOTS, 6, 256), torch.nan, dtype=BF16)
    batch[expert, place] = x
    factors = torch.full((SLOTS, 6), 7.0)
    factors[expert, place] = weights
    batched = Received(
        x=batch,
        layout=RowLayout.BATCHED,
        weighting=weighting,
        handle=None,
        weights=factors if weighted else None,
        expert_counts=torch.tensor(COUNTS, dtype=torch.int32),
    )
    out = torch.empty(SLOTS, 6, 256, dtype=BF16)
    y = experts(batched, out)
    assert (y.shape, y.data_ptr()) == (out.shape, out.data_ptr())
    assert torch.equal(y[expert, place], expected)


@each_scheme
def test_weights_left_to_combine_are_one(scheme, emulated):  # noqa: F811
    experts, tensors = build(shape(), scheme)
    received = dataclasses.replace(rows(shape()), weighting=Weighting.COMBINE, weights=None)
    assert times_the_limit(experts, tensors, received) <= 1
    assert emulated[-1]["token_final_scales"] is None
    ones = torch.ones_like(rows(shape()).weights)
    assert torch.equal(
        experts(received), experts(dataclasses.replace(received, weighting=Weighting.EXPERTS, weights=ones))
    )


def test_a_router_that_gives_weights_to_combine_too_is_not_weighted_twice():
    experts, _ = build(shape(), PLAIN)
    received = rows(shape())
    combine = dataclasses.replace(received, weighting=Weighting.COMBINE)
    assert torch.equal(experts(combine), experts(dataclasses.replace(combine, weights=None)))
    assert not torch.equal(experts(combine), experts(received))


# --- advice ---------------------------------------------------------------------------------------------------------


def advice(experts: FlashInferCutlassExperts, times: int = 2) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            experts(rows(shape(), count=2))
    return [str(warning.message) for warning in caught]


def test_untuned_kernels_say_so_once():
    (text,) = advice(build(shape(), PLAIN)[0])
    assert "EPContext.tune()" in text
    assert not advice(build(shape(), SCHEMES["fp8_block"])[0])
    tuned = build(shape(), PLAIN)[0]
    tuned.use([])
    assert not advice(tuned)


def test_tactics_reach_the_kernel(emulated):  # noqa: F811
    experts, _ = build(shape(), PLAIN)
    experts.use([8, 3, 11, 24, 4, 12])
    for count, pair in ((2, [3, 11]), (8, [3, 11]), (9, [4, 12]), (24, [4, 12]), (30, [4, 12])):
        experts(rows(shape(), count=count))
        assert emulated[-1]["profile_ids"] == pair
