"""Test `flashinfer_cutlass` without a GPU: what it passes to FlashInfer, computed by an emulation of its layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep_moe.experts.flashinfer.cutlass import ACTIVATIONS, FlashInferCutlassExperts
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import Received
from ep_moe.weights.layouts.cutlass import SM90_SCHEMES, SM100_SCHEMES
from tests.fixtures.flashinfer_cutlass import (
    build,
    emulated,  # noqa: F401 (fixtures)
    rows,
    shape,
)

COMPUTED = sorted(ACTIVATIONS, key=lambda activation: activation.value)

pytestmark = pytest.mark.filterwarnings("ignore:.*EPContext.tune:UserWarning")


def check(experts: FlashInferCutlassExperts, tensors: list[dict[str, Tensor]], received: Received) -> Tensor:
    config, weights = experts.config, experts.weights
    y = experts(received)
    expected, limit = expected_and_limit(
        config, weights.scheme, tensors, received.x, received.local_ids, received.weights, weights.dtype
    )
    assert max_error_ratio(y, expected, limit) <= 1
    assert (y[(received.local_ids < 0).all(1)] == 0).all()
    return y


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", COMPUTED, ids=lambda a: a.value)
@pytest.mark.parametrize("scheme", SM90_SCHEMES + SM100_SCHEMES)
def test_within_the_bound_of_the_dequantised_weights(scheme, activation, bias):
    config = shape(activation, bias=bias)
    experts, tensors = build(config, SCHEMES[scheme])
    check(experts, tensors, rows(config))


@pytest.mark.parametrize("scheme", ["none", "fp8_static", "fp8_dynamic", "int4_fp8", "mxfp4_fp8", *SM100_SCHEMES])
def test_half_precision(scheme):
    experts, tensors = build(shape(), SCHEMES[scheme], torch.float16)
    check(experts, tensors, rows(shape(), torch.float16))
