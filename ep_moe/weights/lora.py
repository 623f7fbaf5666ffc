"""Low-rank updates of expert matrices (LoRA, Hu et al. 2021), trained while the matrices stay as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ep_moe.weights.slots import ExpertSlots


@dataclass(frozen=True)
class LowRank:
    """Of one stored matrix: W + scaling * B @ A.

    Args:
        rank: Rows of A and columns of B.
        scaling: alpha / rank.
    """

    rank: int
    scaling: float


def refusal(weights: ExpertSlots) -> str | None:
    """None, or why these experts cannot have low-rank updates."""
    if weights.lora is not None:
        return "they have factors already; merge these first"
    if not weights.named:
        return "the experts are quantised, or their kernel has no backward; build the layer with experts='reference'"
    if weights.etp.size > 1:
        return f"each expert is cut over {weights.etp.size} ranks; lay the ranks out with etp=1"
    if weights.expert_map.replicated:
        return "the map has redundant experts; choose one without"
    if weights.is_meta or not weights._slots:
        return "the layer is on the meta device, or its experts are sharded by FSDP; add LoRA before and behind"
    return None


class ExpertLora(nn.Module):
    """The factors of the experts in a rank's slots, as functions of which a kernel reads the matrices.

    `lora_A_w13` [L, r, H] and `lora_B_w13` [L, 2I, r], `lora_A_w2` [L, r, I] and `lora_B_w2` [L, H, r]. They are
    float32 where the matrices have 16 bits. A is drawn as `nn.Linear` draws its weight, B is zero.

    Args:
        matrices: [L, out, in] by stored name, of which those in `ranks` get factors.
        ranks: By stored name.
        seeds: Of the experts in the slots: copies of an expert get equal numbers.
    """

    def __init__(self, matrices: Mapping[str, Tensor], ranks: Mapping[str, LowRank], seeds: list[int]) -> None:
        super().__init__()
        self.ranks = dict(ranks)
        for name, one in ranks.items():
            matrix, rank = matrices[name], one.rank
            slots, rows, columns = matrix.shape
            dtype = matrix.dtype if matrix.dtype == torch.float64 else torch.float32
            a = torch.empty(slots, rank, columns, dtype=dtype, device="cpu")
            for slot, seed in enumerate(seeds):
                generator = torch.Generator("cpu").manual_seed(seed)
                a[slot].uniform_(-1 / math.sqrt(columns), 1 / math.sqrt(columns), generator=generator)
            self.register_parameter(f"lora_A_{name}", nn.Parameter(a.to(matrix.device)))
            b = torch.zeros(slots, rows, rank, dtype=dtype, device=matrix.device)
            self.register_parameter(f"lora_B_{name}", nn.Parameter(b))

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """A and B of a stored matrix."""
        return self.get_parameter(f"lora_A_{name}"), self.get_parameter(f"lora_B_{name}")

    def forward(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the stored tensors [L, ...], updated: new memory for each matrix that has factors."""
        found = dict(stored)
        for name, one in self.ranks.items():
            a, b = (factor.to(found[name].dtype) for factor in self.factors(name))
            with torch.autocast(found[name].device.type, enabled=False):
                found[name] = torch.baddbmm(found[name], b, a, alpha=one.scaling)
        return found
