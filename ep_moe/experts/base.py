"""The contract of an expert kernel: received rows in, the same rows out. It sees local ids only, never a placement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.types import Activation, Received, RowLayout, Weighting, dtype_name
from ep_moe.weights.expert_weights import ExpertWeights


@dataclass(frozen=True, kw_only=True)
class ExpertsCapabilities:
    """What a kernel can do; one constant per class.

    layouts, weightings: row arrangements it accepts, and who multiplies by the routing weight
    alignment_bytes: rows of H and I (its etp shard) must be multiples of this
    min_compute_capability: of a GPU, e.g. (9, 0); None where the CPU or any GPU will do
    cuda_graph, host_sync, deterministic, differentiable: as for a dispatcher
    """

    layouts: frozenset[RowLayout]
    weightings: frozenset[Weighting]
    activations: frozenset[Activation]
    dtypes: frozenset[torch.dtype]
    biases: bool
    etp: bool
    alignment_bytes: int
    cuda_graph: bool
    host_sync: bool
    deterministic: bool
    differentiable: bool
    min_compute_capability: tuple[int, int] | None = None
    devices: frozenset[str] = frozenset({"cpu", "cuda"})


class Experts(ABC):
    """One rank's experts of one layer. Holds no parameters of its own: it reads those of `ExpertWeights`."""

    name: ClassVar[str]
    capabilities: ClassVar[ExpertsCapabilities]

    def __init__(self, config: MoEConfig, weights: ExpertWeights) -> None:
        self.config = config
        self.weights = weights

    @classmethod
    def available(cls) -> str | None:
        """None, or why it cannot run in this installation. Touches no device."""
        return None

    @classmethod
    def why_not(cls, config: MoEConfig, dtype: torch.dtype, etp: int) -> str | None:
        """None, or why this kernel cannot serve a layer of this shape."""
        can = cls.capabilities
        if dtype not in can.dtypes:
            return f"dtype {dtype_name(dtype)} is not among {', '.join(sorted(map(dtype_name, can.dtypes)))}"
        if config.activation not in can.activations:
            known = ", ".join(sorted(activation.value for activation in can.activations))
            return f"activation {config.activation.value} is not among {known}"
        if config.expert_bias and not can.biases:
            return "it has no expert biases (expert_bias=True)"
        if etp > 1 and not can.etp:
            return f"it cannot cut experts over ranks (etp={etp})"
        unit = can.alignment_bytes // dtype.itemsize
        for name, size in (
            ("hidden_size", config.hidden_size),
            ("intermediate_size / etp", config.intermediate_size // etp),
        ):
            if size % unit:
                return f"{name} must be a multiple of {unit} in {dtype_name(dtype)}, got {size}"
        return None

    @abstractmethod
    def __call__(self, received: Received) -> Tensor:
        """The experts' output for each received row, in the same rows; under Weighting.EXPERTS multiplied by the
        weights and summed over the row's local experts, exactly zero where it has none."""
