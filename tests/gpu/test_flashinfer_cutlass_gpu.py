"""`flashinfer_cutlass` on a Hopper GPU: each scheme is within its bound, allocates nothing, is captured and
deterministic."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

from ep_moe import Activation, EPContext, ExpertMap, MoEConfig, MoELayer, registry
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.flashinfer import cutlass_op
from ep_moe.experts.flashinfer.cutlass import ACTIVATIONS, FlashInferCutlassExperts
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.quant.schemes import SCHEMES
from ep_moe.runtime.workspace import Workspaces
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import LocalIds, Received, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.initial import random_expert
from ep_moe.weights.layouts.cutlass import SM90_SCHEMES
from tests.fixtures.expert_weights import first_slots
from tests.fixtures.flashinfer_cutlass_gpu import BF16, DEEPSEEK, GPU, QWEN3, SMALL, rows

COMPUTED = sorted(ACTIVATIONS, key=lambda activation: activation.value)

REASON = (
    "torch sees no GPU"
    if not torch.cuda.is_available()
    else registry.unsupported_reason("experts", "flashinfer_cutlass")
)
if not REASON and torch.cuda.get_device_capability() != (9, 0):
    REASON = "needs a GPU of compute capability 9.0"
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(600)]

GPT_OSS = (
    MoEConfig(
        hidden_size=2944,  # 2880, padded to a multiple of 128
        intermediate_size=2944,
        num_experts=128,
        top_k=4,
        activation=Activation.SWIGLU_CLAMPED,
        expert_bias=True,
    ),
    32,
)


@functools.lru_cache(maxsize=2)
def build(
    config: MoEConfig, slots: int, scheme: str, dtype: torch.dtype = BF16, options: ExpertsOptions | None = None
) -> tuple[FlashInferCutlassExperts, list[dict[str, Tensor]]]:
    tensors = [random_expert(config, SCHEMES[scheme], expert, dtype, GPU) for expert in range(slots)]
    layout = FlashInferCutlassExperts.weight_layout
    weights = first_slots(config, tensors, SCHEMES[scheme], layout, device=GPU, dtype=dtype)
    return FlashInferCutlassExperts(config, weights, Workspaces(GPU), options), tensors


def check(experts: FlashInferCutlassExperts, tensors: list[dict[str, Tensor]], received: Received) -> float:
    weights = experts.weights
    out = torch.full_like(received.x, torch.nan)
    y = experts(received, out)
    expected, limit = expected_and_limit(
        experts.config, weights.scheme, tensors, received.x, received.local_ids, received.weights, weights.dtype
    )
    found = max_error_ratio(y, expected, limit)
    print(f"{weights.scheme.name}: {len(y)} rows, {found:.3f} of the bound")
    assert found <= 1
    assert (y[(received.local_ids < 0).all(1)] == 0).all()
    return found


@pytest.mark.parametrize("count", [1, 7, 255, 256, 257, 4099])
@pytest.mark.parametrize("scheme", SM90_SCHEMES)
def test_small_shapes_at_the_alignment_limit(scheme, count):
    experts, tensors = build(*SMALL, scheme)
    check(experts, tensors, rows(*SMALL, count))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", COMPUTED, ids=lambda a: a.value)
@pytest.mark.parametrize("scheme", SM90_SCHEMES)
def test_every_activation(scheme, activation, bias):
    config = dataclasses.replace(SMALL[0], activation=activation, expert_bias=bias)
    experts, tensors = build(config, SMALL[1], scheme)
    check(experts, tensors, rows(config, SMALL[1], 100))


@pytest.mark.parametrize("scheme", ["none", "fp8_static", "fp8_dynamic", "int4_fp8", "mxfp4_fp8"])
def test_half_precision(scheme):
    experts, tensors = build(*SMALL, scheme, torch.float16)
    check(experts, tensors, rows(*SMALL, 300, torch.float16))


@pytest.mark.parametrize(("hidden", "inner"), [(8, 8), (24, 40)])
def test_smallest_plain_matrices(hidden, inner):
    config = dataclasses.replace(SMALL[0], hidden_size=hidden, intermediate_size=inner)
    experts, tensors = build(config, SMALL[1], "none")
    check(experts, tensors, rows(config, SMALL[1], 33))


@pytest.mark.parametrize("count", [1, 257, 4099])
@pytest.mark.parametrize("scheme", SM90_SCHEMES)
@pytest.mark.parametrize("model", [QWEN3, GPT_OSS], ids=["qwen3", "gpt_oss"])
def test_models(model, scheme, count):
    experts, tensors = build(*model, scheme)
    check(experts, tensors, rows(*model, count))


@pytest.mark.parametrize("scheme", SM90_SCHEMES)
def test_deepseek_share(scheme):
    build.cache_clear()
    experts, tensors = build(*DEEPSEEK, scheme)
    for count in (1, 255, 4099):
        check(experts, tensors, rows(*DEEPSEEK, count))
    build.cache_clear()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("tuned", [False, True], ids=["", "tuned"])
@pytest.mark.parametrize("scheme", ["fp8_static", "fp8_dynamic", "fp8_block"])
def test_scales_of_experts_that_differ_by_factors(scheme, tuned):
    """Each expert is multiplied by its own scales.

    Scales differ by factors here; those of random experts are all similar.
    """
    build.cache_clear()
    experts, tensors = build(*QWEN3, scheme)
    for expert, own in enumerate(tensors):
        own["w2_scale"] = own["w2_scale"] / 2 ** (expert % 3)
        own["w13_scale"] = own["w13_scale"] / 2 ** (expert % 2)
        experts.weights.update_expert(expert, own)
    if tuned:
        experts.use(experts.tune([64, 1024], None))
    for count in (3, 64, 1024):
        check(experts, tensors, rows(*QWEN3, count))
    build.cache_clear()


@pytest.mark.parametrize("scheme", SM90_SCHEMES)
def test_no_rows_and_rows_without_an_expert(scheme):
    experts, _ = build(*SMALL, scheme)
    assert experts(rows(*SMALL, 0)).shape == (0, 256)
    received = rows(*SMALL, 50)
    without = dataclasses.replace(received, local_ids=LocalIds(torch.full_like(received.local_ids, -1)))
    assert (experts(without, torch.full_like(received.x, torch.nan)) == 0).all()


def test_garbage_in_rows_without_an_expert_and_repeated_ids():
    for scheme in ("none", "fp8_dynamic", "int4_fp8"):
        experts, _ = build(*SMALL, scheme)
        received = rows(*SMALL, 300)
        received.local_ids[5:20] = -1
        expected = experts(received)
        received.x[5:20] = torch.nan
        assert torch.equal(experts(received), expected), scheme
    twice = rows(*SMALL, 3)
    twice.local_ids[:] = torch.tensor([[2, 2, -1, 4]], device=GPU)
    check(*build(*SMALL, "none"), twice)
    stray = rows(*SMALL, 3)
    stray.local_ids[:] = torch.tensor([[1, 99, -7, 4]], device=GPU)
    y = experts(stray)
    stray.local_ids[:] = torch.tensor([[1, -1, -1, 4]], device=GPU)
    assert torch.equal(y, experts(stray))


@pytest.mark.parametrize("scheme", SM90_SCHEMES)
def test_deterministic_mode_repeats_its_bits(scheme):
    experts, tensors = build(*QWEN3, scheme, BF16, ExpertsOptions(deterministic=True))
    received = rows(*QWEN3, 1000)
    check(experts, tensors, received)
    first = experts(received).clone()
    assert all(torch.equal(experts(received), first) for _ in range(20))


@pytest.mark.parametrize("scheme", SM90_SCHEMES)
def test_chunks_give_the_same_result(scheme):
    whole, _ = build(*SMALL, scheme, BF16, ExpertsOptions(deterministic=True))
    parts, tensors = build(*SMALL, scheme, BF16, ExpertsOptions(deterministic=True, chunk_rows=100))
    received = rows(*SMALL, 1001)
    check(parts, tensors, received)
    assert torch.equal(whole(received), parts(received))
    assert parts.workspace_bytes() < whole.workspace_bytes()


@pytest.mark.parametrize("scheme", SM90_SCHEMES)
def test_nothing_is_allocated_in_a_warm_call(scheme):
    experts, _ = build(*QWEN3, scheme)
    received, out = rows(*QWEN3, 700), torch.empty(700, 2048, dtype=BF16, device=GPU)
    experts(received, out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        experts(received, out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("scheme", SM90_SCHEMES)
def test_captured_and_replayed_with_other_rows(scheme):
    experts, tensors = build(*SMALL, scheme)
    static, out = rows(*SMALL, 200), torch.empty(200, 256, dtype=BF16, device=GPU)
    experts(static, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(static, out)
    for seed in (1, 2):
        fresh = rows(*SMALL, 200, seed=seed)
        for name in ("x", "local_ids", "weights"):
            getattr(static, name).copy_(getattr(fresh, name))
        out.fill_(torch.nan)
        graph.replay()
        expected, limit = expected_and_limit(
            SMALL[0], SCHEMES[scheme], tensors, static.x, static.local_ids, static.weights, BF16
        )
        assert max_error_ratio(out, expected, limit) <= 1


@pytest.mark.parametrize("scheme", ["none", "fp8_static", "fp8_block"])
def test_other_layouts_come_through_the_adapter(scheme):
    experts, tensors = build(*SMALL, scheme)
    slots, slots_per_rank, hidden = SMALL[1], 40, 256
    counts = torch.tensor([40, 0, 7, 1, 33], dtype=torch.int32, device=GPU)
    x = torch.randn(slots, slots_per_rank, hidden, device=GPU).to(BF16)
    valid = torch.arange(slots_per_rank, device=GPU) < counts.unsqueeze(1)
    x[~valid] = torch.nan
    batched = Received(
        x=x, layout=RowLayout.BATCHED, weighting=Weighting.COMBINE, handle=None, expert_counts=counts
    )  # fmt: skip
    y = experts(batched)
    ids = torch.where(valid, torch.arange(slots, device=GPU).unsqueeze(1), -1).view(-1, 1)
    expected, limit = expected_and_limit(
        SMALL[0], SCHEMES[scheme], tensors, x.view(-1, hidden).nan_to_num(), ids, None, BF16
    )
    assert max_error_ratio(y.view(-1, hidden), expected, limit) <= 1
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    rest = torch.full((9, hidden), torch.nan, dtype=BF16, device=GPU)
    contiguous = Received(
        x=torch.cat([x[valid], rest]), layout=RowLayout.CONTIGUOUS, weighting=Weighting.COMBINE, handle=None,
        expert_offsets=offsets,
    )  # fmt: skip
    found = experts(contiguous)
    assert max_error_ratio(found[:-9], expected[valid.view(-1)], limit[valid.view(-1)]) <= 1
    assert (found[-9:] == 0).all()


@pytest.mark.parametrize("scheme", ["none", "fp8_block", "mxfp4"])
def test_pieces_of_etp_sum_to_the_whole(scheme):
    config = dataclasses.replace(SMALL[0], intermediate_size=256, expert_bias=True)
    tensors = [random_expert(config, SCHEMES[scheme], expert, BF16, GPU) for expert in range(16)]
    received, total = rows(config, 16, 300), 0
    for rank in range(2):
        rank_group = RankGroup(None, (0, 1), rank, FlightRecorder())
        weights = ExpertWeights(
            config, ExpertMap.linear(16, 1), etp=rank_group, device=GPU, dtype=BF16, scheme=SCHEMES[scheme],
            weight_layout=FlashInferCutlassExperts.weight_layout, trainable=False,
        )  # fmt: skip
        for expert, expert_tensors in enumerate(tensors):
            weights.update_expert(expert, expert_tensors)
        total = total + FlashInferCutlassExperts(config, weights, Workspaces(GPU))(received).float()
    expected, limit = expected_and_limit(
        config, SCHEMES[scheme], tensors, received.x, received.local_ids, received.weights, BF16
    )
    assert max_error_ratio(total, expected, 2 * limit) <= 1  # two ranks round their halves


@pytest.mark.parametrize("scheme", ["none", "fp8_static", "int4_fp8"])
def test_tuned_tactics_are_right_and_kept(scheme, tmp_path):
    experts, tensors = build(*QWEN3, scheme)
    found = experts.tune((16, 1024), tmp_path)
    print(scheme, found)
    assert found[0::3] == [16, 1024]
    assert min(found) >= 0
    assert experts.tune((16, 1024), tmp_path) == found
    experts.use(found)
    for count in (3, 16, 700, 3000):
        check(experts, tensors, rows(*QWEN3, count))
    build.cache_clear()


def test_compiled_without_a_graph_break():
    experts, _ = build(*SMALL, "none", BF16, ExpertsOptions(deterministic=True))
    received = rows(*SMALL, 64)
    expected = experts(received)

    def step(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        call = dataclasses.replace(received, x=x * 1, local_ids=ids, weights=weights)
        return experts(call) * 1

    y = torch.compile(step, fullgraph=True)(received.x, received.local_ids, received.weights)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("quantization", ["none", "fp8_block"])
def test_layer_captures_and_replays_after_the_placement_changed(quantization):
    config = SMALL[0]
    context = EPContext.local(GPU)
    layer = MoELayer(config, context, quantization=quantization, experts="flashinfer_cutlass", dtype=BF16)
    tensors = [random_expert(config, SCHEMES[quantization], expert, BF16, GPU) for expert in range(16)]
    order = list(range(16))
    for expert in order:
        layer.update_expert(expert, **tensors[expert])
    x = torch.randn(128, 256, device=GPU).to(BF16)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        expected = layer(x).clone()
        graph.replay()
        limit = expected.float().abs().max() * 2**-6  # the same numbers, added in any order
        assert (y - expected).abs().max() <= limit
        moved = ExpertMap(physical_to_logical=tuple(reversed(order)), num_experts=16, num_ranks=1)
        layer.placement.update(moved)
        layer.expert_weights.set_expert_map(moved)
        for expert in order:
            layer.update_expert(expert, **tensors[expert])
        y.fill_(torch.nan)
        graph.replay()
        assert (y - expected).abs().max() <= limit
    plan = context.plan()
    assert plan["workspace"] == context._workspaces.reserved
    assert context._workspaces.allocated % plan["workspace"] == 0


def test_the_runner_that_flashinfer_itself_would_make():
    """The direct call of the runner gives the same bits as FlashInfer's public function."""
    from flashinfer.fused_moe import cutlass_fused_moe

    experts, _ = build(*SMALL, "none", BF16, ExpertsOptions(deterministic=True))
    received = rows(*SMALL, 300)
    public = cutlass_fused_moe(
        received.x, received.local_ids.int(), received.weights, experts.weights.get_parameter("w13"),
        experts.weights.get_parameter("w2"), BF16, [], use_fused_finalize=False, profile_ids=[-1, -1],
    )[0]  # fmt: skip
    assert torch.equal(experts(received), public)
    assert cutlass_op.RUN_MOE[0] == "output"
