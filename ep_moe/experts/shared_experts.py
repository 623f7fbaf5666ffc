"""The shared expert: a dense block that every token passes, computed while the routed tokens travel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ep_moe.config import MoEConfig
from ep_moe.experts.reference import activate


class SharedExperts(nn.Module):
    """gate_proj, up_proj, down_proj as in Hugging Face models, and optionally `shared_gate` [1, H], whose sigmoid
    scales the output. Replicated on every rank."""

    def __init__(
        self, config: MoEConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        hidden, inner = config.hidden_size, config.shared_intermediate_size

        def linear(rows: int, columns: int) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False, device=device, dtype=dtype)

        self.gate_proj = linear(inner, hidden) if config.activation.gated else None
        self.up_proj = linear(inner, hidden)
        self.down_proj = linear(hidden, inner)
        self.shared_gate = linear(1, hidden) if config.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H]."""
        h = self.up_proj(x)
        if self.gate_proj is not None:
            h = torch.cat([self.gate_proj(x), h], dim=-1)
        out: Tensor = self.down_proj(activate(h, self.config))
        return out if self.shared_gate is None else out * self.shared_gate(x).sigmoid()
