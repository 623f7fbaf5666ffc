"""Gradients of an expert's copies, summed: every copy gets that of all tokens, and so copies that are equal stay equal.

Copies of an expert are in other slots of the EP group (a redundant map), and in the same slots of other EP groups (ep <
dp). Both sums are part of backward. All ranks that share an expert must therefore run backward equally often.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe.errors import ConfigError
from ep_moe.parallel.rank_group import RankGroup

if TYPE_CHECKING:
    from ep_moe.weights.slots import ExpertSlots


class GradientSum:
    """Of one layer's experts on this rank.

    ep, etp: the links of this rank; replicas: to the ranks with the same slots in other EP groups
    divisor: what backward divides gradients by: 1 for the sum over all ranks' tokens; the number of ranks with tokens
        of their own for the mean, as dense parameters have it (`ep_moe.training`)
    sharded: FSDP cuts the experts over `replicas` and averages over them
    compared: `ep_moe.training` has compared what ranks hold alike
    each_backward: called first in every backward, on all ranks of the stage alike
    """

    def __init__(self, weights: ExpertSlots, ep: RankGroup, etp: RankGroup, replicas: RankGroup) -> None:
        self._weights = weights
        self.ep, self.etp, self.replicas = ep, etp, replicas
        self.divisor = 1
        self.sharded = False
        self.compared = False
        self.each_backward: Callable[[], None] | None = None

    @property
    def alone(self) -> bool:
        """Nothing is summed or divided: one rank of everything, and each expert in one slot."""
        one = max(self.ep.size, self.etp.size, self.replicas.size) == 1
        return one and self.divisor == 1 and not self._weights.expert_map.replicated

    def check(self) -> None:
        """Raise ConfigError, on all ranks alike, where a sum could not be made."""
        expert_map = self._weights.expert_map
        if self.ep.size == 1 or not self._weights.expert_map.replicated:
            return
        for rank in range(expert_map.num_ranks):
            if not expert_map.num_slots(rank):
                raise ConfigError(
                    f"expert_map gives rank {rank} of the EP group no expert and others twice: gradients of copies "
                    f"cannot be summed there; give that rank an expert to train"
                )

    def __call__(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """gradients: [L, ...] by stored name, of this call's rows. Returns the same, summed. Collective."""
        if self.each_backward is not None:
            self.each_backward()
        divisor = self.divisor / self.replicas.size if self.sharded else self.divisor  # FSDP takes the mean itself
        if divisor != 1:
            gradients = {name: gradient / divisor for name, gradient in gradients.items()}
        if self.etp.size > 1 and "w2_bias" in gradients:  # etp rank 0 alone used it, all hold it
            gradients["w2_bias"] = gradients["w2_bias"].clone()
            with self.etp.flight_recorder.step("backward by the sum over etp", counted=False):
                dist.all_reduce(gradients["w2_bias"], group=self.etp.group)
        if not gradients or not self._weights.num_slots:
            return gradients
        redundant = self._weights.expert_map.replicated
        shared = {name: self._copies(gradient, redundant) for name, gradient in gradients.items()} if redundant else {}
        if self.replicas.size > 1 and not self.sharded:
            with self.replicas.flight_recorder.step("backward by the sum over EP groups", counted=False):
                for name in gradients:
                    gradients[name] = gradients[name].clone(memory_format=torch.contiguous_format)
                    dist.all_reduce(gradients[name], group=self.replicas.group)
                for total in shared.values():
                    # the same places in the same buffer on all ranks: copies get the same bits in whatever slot
                    dist.all_reduce(total, group=self.replicas.group)
        return gradients | {name: self._put_back(gradients[name], shared[name], redundant) for name in shared}

    def _copies(self, gradient: Tensor, redundant: list[int]) -> Tensor:
        """float32 [len(redundant), ...], summed over all slots of the EP group."""
        total = torch.zeros(len(redundant), *gradient.shape[1:], dtype=torch.float32, device=gradient.device)
        for place, expert in enumerate(redundant):
            for slot in self._weights.held.get(expert, ()):
                total[place] += gradient[slot]
        if self.ep.size > 1:
            with self.ep.flight_recorder.step("backward by the sum over copies"):
                dist.all_reduce(total, group=self.ep.group)
        return total

    def _put_back(self, gradient: Tensor, total: Tensor, redundant: list[int]) -> Tensor:
        gradient = gradient.clone()  # it may be another's too
        for place, expert in enumerate(redundant):
            for slot in self._weights.held.get(expert, ()):
                gradient[slot] = total[place].to(gradient.dtype)
        return gradient
