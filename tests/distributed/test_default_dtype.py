"""Layers compute the same bits under another default dtype, such as `torch.set_default_dtype(torch.bfloat16)`.

Tensors that kernels and peers read as float32 name their dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from ep_moe import EPContext, ExpertMap, MoEConfig, MoELayer
from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.testing import distributed, rank_device
from ep_moe.training import (
    BiasUpdate,
    clip_grad_norm_,
    load_balancing_loss,
    parameter_groups,
    router_logits,
    router_z_loss,
    sync_gradients,
)

CONFIG = MoEConfig(
    hidden_size=128,
    intermediate_size=128,
    num_experts=8,
    top_k=2,
    shared_intermediate_size=128,
    routing=RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, correction_bias=True, renormalize=True),
)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def rows(context: EPContext, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(context.layout.rank)
    return torch.randn(11, CONFIG.hidden_size, generator=generator, dtype=torch.float32).to(context.device, dtype)


def trained(context: EPContext) -> list[Tensor]:
    """Return what a few steps compute: results, losses, norms, and all weights and biases behind them."""
    torch.manual_seed(0)
    placed = ExpertMap.redundant(CONFIG.num_experts, 2, 2)
    layer = MoELayer(CONFIG, context, dtype=torch.float32, expert_map=placed, experts="reference")
    optimizer = torch.optim.SGD(parameter_groups(layer), lr=0.1)
    optimizer.register_step_pre_hook(BiasUpdate(layer, context))
    found = []
    for _ in range(3):
        with router_logits(layer) as logits:
            y = layer(rows(context, torch.float32))
        loss = y.square().mean() + load_balancing_loss(logits, 2, context=context) + router_z_loss(logits)
        loss.backward()
        sync_gradients(layer, context)
        found += [y, loss, clip_grad_norm_(layer, context, max_norm=0.1)]
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.detach().clone() for tensor in (*found, *layer.parameters(), *layer.buffers())]


def served(context: EPContext, quantization: str) -> list[Tensor]:
    """Return the result of a quantized layer, and its weights and scales."""
    torch.manual_seed(0)
    layer = MoELayer(CONFIG, context, dtype=torch.bfloat16, experts="reference", quantization=quantization)
    with torch.no_grad():
        return [layer(rows(context, torch.bfloat16)), *layer.expert_weights.stored_tensors().values()]


@distributed(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
def test_steps_and_quantized_layers_are_bitwise_equal(dtype, world_size):
    with EPContext.from_groups(device=rank_device()) as context:
        schemes = ["fp8_static", "fp8_block", "mxfp4", "int4", "nvfp4"]
        wanted = [trained(context), *(served(context, scheme) for scheme in schemes)]
        with default_dtype(dtype):
            found = [trained(context), *(served(context, scheme) for scheme in schemes)]
        for name, one, other in zip(["float32", *schemes], wanted, found, strict=True):
            assert [tensor.dtype for tensor in one] == [tensor.dtype for tensor in other], name
            for left, right in zip(one, other, strict=True):
                assert torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8)), name
