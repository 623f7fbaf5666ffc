"""The shared experts, and the activations of all experts, in plain torch.

The shared experts are one dense block for every token. It is computed while the routed tokens travel.
"""

from __future__ import annotations

import torch
from torch import Tensor, finfo, nn
from torch.nn.functional import gelu, relu, silu

from ep_moe.config import MoEConfig
from ep_moe.runtime import batch_invariant
from ep_moe.types import Activation


def activate(h: Tensor, config: MoEConfig) -> Tensor:
    """Apply the activation between the two expert matrices.

    Args:
        h: [M, 2I], gate first, then up; [M, I] for activations without a gate.
        config: The layer's configuration, for its activation and constants.

    Returns:
        [M, I].
    """
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


def activate_exact(h: Tensor, config: MoEConfig) -> Tensor:
    """Do what `activate` does, by the same instructions for every row, so that bits do not depend on the batch."""
    if not config.activation.gated:
        return activate(h, config)  # relu and a product are exact in any batch
    return batch_invariant.pointwise(lambda gate, up: activate(torch.cat([gate, up]), config), *h.chunk(2, dim=-1))


def _softcap(x: Tensor, cap: float) -> Tensor:
    return (x / cap).tanh() * cap


def _limited(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    limit = min(limit, finfo(gate.dtype).max)
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


class SharedExperts(nn.Module):
    """The shared experts as one dense block, replicated on every rank.

    Parameters are gate_proj, up_proj and down_proj as in Hugging Face models, and optionally `shared_gate` [1, H],
    whose sigmoid scales the output.

    exact: a row's result has the same bits in every batch
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.exact = config, exact
        hidden, inner = config.hidden_size, config.shared_intermediate_size

        def linear(rows: int, columns: int) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False, device=device, dtype=dtype)

        self.gate_proj = linear(inner, hidden) if config.activation.gated else None
        self.up_proj = linear(inner, hidden)
        self.down_proj = linear(hidden, inner)
        self.shared_gate = linear(1, hidden) if config.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [T, H] for x [T, H]."""
        h = self._product(self.up_proj, x)
        if self.gate_proj is not None:
            h = torch.cat([self._product(self.gate_proj, x), h], dim=-1)
        inner = activate_exact(h, self.config) if self.exact else activate(h, self.config)
        out = self._product(self.down_proj, inner)
        if self.shared_gate is None:
            return out
        gate = self._product(self.shared_gate, x)
        return out * (batch_invariant.pointwise(torch.sigmoid, gate) if self.exact else gate.sigmoid())

    def _product(self, linear: nn.Linear, x: Tensor) -> Tensor:
        out: Tensor = batch_invariant.linear(x, linear.weight, linear.bias) if self.exact else linear(x)
        return out
