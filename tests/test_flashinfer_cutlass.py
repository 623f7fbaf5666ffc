"""`flashinfer_cutlass` without a GPU: what it hands to FlashInfer, computed by an emulation of its layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep_moe import Activation, ExpertMap, MoEConfig
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.flashinfer import cutlass_op
from ep_moe.experts.flashinfer.cutlass import FlashInferCutlassExperts
from ep_moe.quant.schemes import SCHEMES, Scheme
from ep_moe.testing.expert_oracle import expected_and_limit, random_expert, worst
from ep_moe.types import LocalIds, Received, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.layouts.cutlass_sm90 import SM90_SCHEMES
from ep_moe.weights.layouts.cutlass_sm100 import SM100_SCHEMES
from tests.cutlass_sm100_emulation import emulate_call

pytestmark = pytest.mark.filterwarnings("ignore:.*EPContext.tune:UserWarning")
SLOTS, ROWS, TOP_K = 5, 24, 3
BF16 = torch.bfloat16


def shape(activation: Activation = Activation.SWIGLU, *, bias: bool = False, inner: int = 128) -> MoEConfig:
    return MoEConfig(
        hidden_size=256, intermediate_size=inner, num_experts=8, top_k=TOP_K, activation=activation, expert_bias=bias
    )


@pytest.fixture(autouse=True)
def emulated(monkeypatch) -> list[dict]:
    """FlashInfer's module replaced by the emulation; the list of the calls' arguments."""
    calls: list[dict] = []

    def run(runner: cutlass_op.Runner, **arguments) -> None:
        calls.append(arguments)
        assert arguments.keys() == set(cutlass_op.RUN_MOE)
        emulate_call(runner.flags, runner.output, arguments)

    monkeypatch.setattr(cutlass_op, "run_moe", run)
    monkeypatch.setattr(cutlass_op, "scratch_bytes", lambda *shape: 1024)
    return calls


def build(
    config: MoEConfig, scheme: Scheme, dtype: torch.dtype = BF16, **options
) -> tuple[FlashInferCutlassExperts, list[dict[str, Tensor]]]:
    weights = ExpertWeights(
        config,
        ExpertMap.uneven([SLOTS, config.num_experts - SLOTS]),
        dtype=dtype,
        scheme=scheme,
        weight_layout=FlashInferCutlassExperts.weight_layout,
        trainable=False,
    )
    tensors = [random_expert(config, scheme, expert, dtype) for expert in range(SLOTS)]
    for expert, expert_tensors in enumerate(tensors):
        weights.update_expert(expert, expert_tensors)
    return FlashInferCutlassExperts(config, weights, options=ExpertsOptions(**options)), tensors


def rows(config: MoEConfig, dtype: torch.dtype = BF16, count: int = ROWS) -> Received:
    generator = torch.Generator().manual_seed(9)
    ids = torch.rand(count, SLOTS, generator=generator).topk(TOP_K).indices
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.4, -1, ids)
    if count > 3:
        ids[3] = -1
    return Received(
        x=torch.randn(count, config.hidden_size, generator=generator).to(dtype),
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        handle=None,
        local_ids=LocalIds(ids),
        weights=torch.rand(ids.shape, generator=generator) + 0.1,
    )


def check(experts: FlashInferCutlassExperts, tensors: list[dict[str, Tensor]], received: Received) -> Tensor:
    config, weights = experts.config, experts.weights
    y = experts(received)
    expected, limit = expected_and_limit(
        config, weights.scheme, tensors, received.x, received.local_ids, received.weights, weights.dtype
    )
    assert worst(y, expected, limit) <= 1
    assert (y[(received.local_ids < 0).all(1)] == 0).all()
    return y


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.value)
@pytest.mark.parametrize("scheme", SM90_SCHEMES + SM100_SCHEMES)
def test_within_the_bound_of_the_dequantised_weights(scheme, activation, bias):
    config = shape(activation, bias=bias)
    experts, tensors = build(config, SCHEMES[scheme])
    check(experts, tensors, rows(config))


@pytest.mark.parametrize("scheme", ["none", "fp8_static", "fp8_dynamic", "int4_fp8", "mxfp4_fp8", *SM100_SCHEMES])
def test_half_precision(scheme):
    experts, tensors = build(shape(), SCHEMES[scheme], torch.float16)
    check(experts, tensors, rows(shape(), torch.float16))
