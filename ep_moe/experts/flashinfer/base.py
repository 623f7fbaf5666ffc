"""The base class of FlashInfer's MoE kernels. They are called as if this rank were the only one, with local ids."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ep_moe import registry
from ep_moe.config import MoEConfig
from ep_moe.experts.base import Experts
from ep_moe.types import Activation, Received, Weighting

# out, workspace, x, x_scale, input_scale, ids, base, routing weights, w13, w2
Given = tuple[Tensor, Tensor, Tensor, Tensor | None, float | None, Tensor, int, Tensor | None, Tensor, Tensor]


class FlashInferExperts(Experts):
    """A FlashInfer kernel behind a torch operator. The first arguments (`Given`) are the same for all operators."""

    own_rows: ClassVar[Mapping[str, str]] = {}  # by scheme, a row format that it reads besides `row_formats`

    def __init__(self, *args: Any, **options: Any) -> None:
        self._clamp: list[Tensor] | None = None
        super().__init__(*args, **options)

    @classmethod
    def available(cls) -> str | None:
        return registry.without_flashinfer()

    @property
    def row_formats(self) -> frozenset[str]:
        """The formats of the capabilities, and that to which the scheme rounds rows, if the kernel reads it."""
        own = self.own_rows.get(self.weights.scheme.name)
        return self.capabilities.row_formats | ({own} if own else set())

    def compute(self, received: Received, out: Tensor | None) -> Tensor:
        x, weights, wire = received.x, self.weights, received.wire_ids
        ids, base = (received.local_ids, 0) if wire is None else (wire.ids, wire.base)
        assert ids is not None
        if out is None:
            out = torch.empty(len(x), self.config.hidden_size, dtype=weights.dtype, device=x.device)
        routing_weights = received.weights if received.weighting is Weighting.EXPERTS else None
        matrices = (weights.get_parameter("w13"), weights.get_parameter("w2"))
        rows = (x, received.x_scale, received.input_scale)
        self._call((out, self.workspace(), *rows, ids, base, routing_weights, *matrices))
        return out

    @abstractmethod
    def _call(self, given: Given) -> None:
        """Call the operator with the common arguments and its own."""

    def _clamp_constants(self) -> list[Tensor]:
        if self._clamp is None:
            self._clamp = clamp_constants(self.config, self.weights.num_slots, self.weights.device)
        return self._clamp


def clamp_constants(config: MoEConfig, slots: int, device: torch.device) -> list[Tensor]:
    """Return alpha, beta and limit of the clamped SwiGLU, float32 [L] each; [] for other activations."""
    if config.activation is not Activation.SWIGLU_CLAMPED:
        return []
    values = (config.activation_alpha, 1.0, config.activation_limit)
    return [torch.full((slots,), value, dtype=torch.float32, device=device) for value in values]
