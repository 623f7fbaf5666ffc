"""What stands between the two expert matrices, in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from ep_moe.config import MoEConfig
from ep_moe.types import Activation


def activate(h: Tensor, config: MoEConfig) -> Tensor:
    """h: [M, 2I] with gate first, then up (or [M, I] without a gate). Returns [M, I]."""
    if config.activation is Activation.RELU2:
        return relu(h).square()
    gate, up = h.chunk(2, dim=-1)
    match config.activation:
        case Activation.SWIGLU:
            return silu(gate) * up
        case Activation.GEGLU:
            return gelu(gate) * up
        case Activation.SWIGLU_CLAMPED:
            gate = gate.clamp(max=config.activation_limit)
            up = up.clamp(min=-config.activation_limit, max=config.activation_limit)
            return (up + 1) * (gate * (config.activation_alpha * gate).sigmoid())
