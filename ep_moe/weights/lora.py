"""Low-rank updates of frozen experts (LoRA, Hu et al. 2021): the factors of the experts on one rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ep_moe.errors import ConfigError
from ep_moe.placement.expert_map import EMPTY
from ep_moe.weights.optimizers import guard_optimizers

if TYPE_CHECKING:
    from ep_moe.weights.slots import ExpertSlots


@dataclass(frozen=True)
class LowRank:
    """The size of the LoRA factors of one stored matrix: W + scaling * B @ A.

    Args:
        rank: Rows of A and columns of B.
        scaling: alpha / rank.
    """

    rank: int
    scaling: float


def _factor_dtype(matrix: Tensor) -> torch.dtype:
    return matrix.dtype if matrix.dtype == torch.float64 else torch.float32


class ExpertLora(nn.Module):
    """The LoRA factors of the experts in a rank's slots. `forward` returns the updated matrices for the kernel.

    Each expert has `lora_A_w13` [r, H], `lora_B_w13` [2I, r], `lora_A_w2` [r, I] and `lora_B_w2` [H, r]. Their names
    begin with the logical id, as those of its matrices do, so that names are unique over ranks in a distributed
    checkpoint. Factors of 16-bit matrices are float32. A is initialized as the weight of `nn.Linear`, B is zero.

    Args:
        matrices: Stored tensors [L, out, in] by name. Only those named in `ranks` get factors.
        ranks: The size of the factors by stored name.
        experts: The logical expert in each slot, -1 for an empty one.
        seed: The seed of the layer. An expert's initial factors depend on it and on the logical id.
        num_experts: E.
    """

    def __init__(
        self,
        matrices: Mapping[str, Tensor],
        ranks: Mapping[str, LowRank],
        experts: tuple[int, ...],
        seed: int,
        num_experts: int,
    ) -> None:
        super().__init__()
        self.ranks, self.enabled, self._experts = dict(ranks), True, experts
        for expert in sorted({*experts} - {EMPTY}):
            module = nn.Module()
            generator = torch.Generator("cpu").manual_seed(seed * num_experts + expert)
            for name, one in ranks.items():
                _, rows, columns = matrices[name].shape
                device, dtype = matrices[name].device, _factor_dtype(matrices[name])
                a = torch.empty(one.rank, columns, dtype=dtype, device="cpu")
                a.uniform_(-1 / math.sqrt(columns), 1 / math.sqrt(columns), generator=generator)
                module.register_parameter(f"lora_A_{name}", nn.Parameter(a.to(device)))
                b = torch.zeros(rows, one.rank, dtype=dtype, device=device)
                module.register_parameter(f"lora_B_{name}", nn.Parameter(b))
            self.add_module(str(expert), module)

    @property
    def kinds(self) -> list[str]:
        """The names of one expert's factors, such as "lora_A_w13". The list is the same on all ranks."""
        return [f"lora_{factor}_{name}" for name in self.ranks for factor in "AB"]

    def factors(self, name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stacked factors A [L, r, in] and B [L, out, r] of a stored matrix [L, out, in].

        Factors of empty slots are zero.
        """
        (slots, rows, columns), rank = matrix.shape, self.ranks[name].rank
        dtype = _factor_dtype(matrix)
        stacked = []
        for factor, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            none = torch.zeros(shape, dtype=dtype, device=matrix.device)
            own = [
                none if expert == EMPTY else getattr(self._modules[str(expert)], f"lora_{factor}_{name}")
                for expert in self._experts
            ]
            stacked.append(torch.stack(own) if own else none.expand(slots, *shape))
        return stacked[0], stacked[1]

    def write(self, name: str, a: Tensor, b: Tensor) -> None:
        """Load this rank's factors from those of all experts, A [E, r, in] and B [E, out, r]."""
        for expert, module in self.named_children():
            for factor, tensor in (("A", a), ("B", b)):
                module.get_parameter(f"lora_{factor}_{name}").copy_(tensor[int(expert)])

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        """Do nothing: the experts' submodules load their factors. Factors of other ranks are not unexpected keys."""

    def forward(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the stored tensors [L, ...]. If `enabled`, matrices with factors are copies W + scaling * B @ A."""
        found = dict(stored)
        for name, one in self.ranks.items() if self.enabled else ():
            a, b = (factor.to(found[name].dtype) for factor in self.factors(name, found[name]))
            with torch.autocast(found[name].device.type, enabled=False):
                found[name] = torch.baddbmm(found[name], b, a, alpha=one.scaling)
        return found


def add_lora(weights: ExpertSlots, ranks: Mapping[str, LowRank], seed: int) -> ExpertLora:
    """Freeze a layer's experts and add trainable low-rank updates of their matrices.

    Args:
        weights: The layer's expert weights.
        ranks: The size of the factors by stored name, "w13" and "w2".
        seed: The seed of the layer, equal on all ranks.

    Returns:
        The factors. `merge_lora` removes them.

    Raises:
        ConfigError: These experts do not support LoRA (see `check_lora`).
    """
    check_lora(weights)
    weights.requires_grad_(False)
    num_experts = weights.config.num_experts
    weights.lora = lora = ExpertLora(weights.stored_tensors(), ranks, weights.local_experts, seed, num_experts)
    for parameter in lora.parameters():
        guard_optimizers(parameter, weights)
    return lora


def check_lora(weights: ExpertSlots) -> None:
    """Raise ConfigError if these experts do not support low-rank updates."""
    if weights.lora is not None:
        why = "they have LoRA factors already; merge these first"
    elif not weights.has_expert_parameters:
        why = "the experts are quantized, or their kernel has no backward; build the layer with experts='reference'"
    elif weights.etp.size > 1:
        why = f"each expert is sharded over {weights.etp.size} ranks; set etp=1"
    elif weights.expert_map.replicated:
        why = "the expert map has redundant experts; choose one without"
    elif weights.is_meta or not weights._slots:
        why = (
            "the layer is on the meta device, or its experts are sharded by FSDP; add LoRA before fully_shard and "
            "after to_empty"
        )
    else:
        return
    raise ConfigError(f"low-rank updates cannot be added: {why}")


def gather_factor(weights: ExpertSlots, own: Tensor) -> Tensor:
    """Gather a factor [L, ...] of this rank's slots into one of all experts, [E, ...]. Collective over the EP group."""
    whole = own.new_zeros(weights.config.num_experts, *own.shape[1:])
    for slot, expert in enumerate(weights.local_experts):
        if expert != EMPTY:
            whole[expert] = own[slot].detach()
    group = weights.gradient_sum.ep
    if group.size > 1:
        with group.flight_recorder.step("gather factors", counted=False):
            group.all_reduce(whole)
    return whole


@torch.no_grad()
def merge_lora(weights: ExpertSlots) -> None:
    """Add the low-rank updates to the stored matrices, and remove the factors. Experts stay frozen."""
    if weights.lora is None:
        return
    stored = weights.stored_tensors()
    weights.lora.enabled = True
    for name, tensor in weights.lora(stored).items():
        stored[name].copy_(tensor)
    weights.lora = None
    weights.updates += 1
