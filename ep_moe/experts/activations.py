"""What stands between the two expert matrices, in plain torch."""

from __future__ import annotations

from torch import Tensor, finfo
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
        case Activation.GEGLU_TANH:
            return gelu(gate, approximate="tanh") * up
        case Activation.SWIGLU_LIMITED:
            gate, up = _limited(gate, up, config.activation_limit)
            return silu(gate) * up
        case Activation.SWIGLU_LIMITED_AFTER:
            gate, up = _limited(silu(gate), up, config.activation_limit)
            return gate * up
        case Activation.SWIGLU_SOFTCAPPED:
            return _softcap(gate, config.activation_alpha) * gate.sigmoid() * _softcap(up, config.activation_limit)
        case Activation.SWIGLU_CLAMPED:
            gate, up = _limited(gate, up, config.activation_limit)
            return (up + 1) * (gate * (config.activation_alpha * gate).sigmoid())


def _softcap(x: Tensor, cap: float) -> Tensor:
    return (x / cap).tanh() * cap


def _limited(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    limit = min(limit, finfo(gate.dtype).max)
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
