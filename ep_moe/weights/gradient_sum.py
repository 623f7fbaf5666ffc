"""Sum the gradients of a rank's experts over ranks.

Every copy of an expert gets the gradient of all tokens, so that equal copies stay equal. Copies are in other slots of
the EP group (a map with redundant experts) and in the same slots of other EP groups (ep < dp). Both sums are part of
backward. All ranks that share an expert must therefore run backward the same number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from ep_moe.errors import ConfigError
from ep_moe.parallel.checksum import checksum
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.runtime.batched_gradients import batch_problem, refuse_batch
from ep_moe.types import capturing
from ep_moe.weights.dense_checksum import DenseChecksum
from ep_moe.weights.first_backward import FirstBackward
from ep_moe.weights.parts import connect_in_autograd, local, parts_of

if TYPE_CHECKING:
    from ep_moe.weights.slots import ExpertSlots


_NOTED = 1 << 12  # leading elements of each gradient, or tensor of an optimizer, in the checksum that ranks compare


class GradientSum:
    """Sums the gradients of one layer's experts over the ranks that hold them.

    ep, etp: this rank's groups
    replicas: the group of the ranks with the same slots in other EP groups
    divisor: backward divides gradients by this. 1 gives the sum over all ranks' tokens. The number of ranks with
        different tokens gives the mean, as for dense parameters (`ep_moe.training`)
    wrapper_divisor: returns the divisor of a wrapper of dense parameters such as DDP, called in each backward; None
        without a wrapper
    sharded: whether FSDP shards the experts over `replicas`
    shard_divisor: returns the divisor that FSDP applies to the gradients of sharded experts, called in each backward
    compared: sets of names of dense parameters that `ep_moe.training` has already compared over ranks
    layout: the layer's RankLayout, or None; router: returns the layer's router, or None
    router_steps: whether an optimizer that holds experts has changed the router too
    dense_checksum: the checksum of the dense parameters of the first optimizer that holds experts, None before its
        first step
    each_sum: called before every sum, on all ranks that hold the same experts, if one of these is trained. Its
        argument is a gradient that is a batch of several, None if there is none
    stepped: checksum of the gradients at an optimizer's step, int64 []; 0 if they were all zero, or some not finite
    restored: the same of the state that an optimizer had loaded before its step
    """

    def __init__(self, weights: ExpertSlots, ep: RankGroup, etp: RankGroup, replicas: RankGroup) -> None:
        self._weights = weights
        self.ep, self.etp, self.replicas = ep, etp, replicas
        self._divisor = 1.0
        self.wrapper_divisor: Callable[[], float] | None = None
        self.sharded = False
        self.shard_divisor: Callable[[], float] = lambda: replicas.size
        self.compared: set[tuple[str, ...]] = set()
        self.layout: RankLayout | None = None
        self.router: Callable[[], Module | None] = lambda: None
        self.router_steps = False
        self.dense_checksum: DenseChecksum | None = None
        self.each_sum: Callable[[Tensor | None], None] | None = None
        self.stepped: Tensor | None = None
        self.restored: Tensor | None = None
        self._first = FirstBackward()
        self._learns_somewhere = False  # any rank of the EP group trains experts; once True, all ranks sum from then on

    @property
    def divisor(self) -> float:
        return self._divisor if self.wrapper_divisor is None else self.wrapper_divisor()

    @property
    def is_identity(self) -> bool:
        """Whether gradients need no sum and no division: all groups have one rank, and each expert has one slot."""
        return self.of_one_rank and self.divisor == 1 and not self._weights.expert_map.replicated

    @property
    def of_one_rank(self) -> bool:
        """Whether all groups have one rank, so that no other rank has rows for these experts."""
        return max(self.ep.size, self.etp.size, self.replicas.size) == 1

    @property
    def is_local(self) -> bool:
        """Whether the gradients of this rank's slots, divided by `divisor`, are those of its parameters."""
        shared = self.replicas.size > 1 or self._weights.expert_map.replicated
        return not shared and not (self.etp.size > 1 and "w2_bias" in self._weights.names)

    def check(self) -> None:
        """Raise ConfigError, on all ranks, if the map has replicas and a rank without slots, which cannot sum them."""
        expert_map = self._weights.expert_map
        if self.ep.size == 1 or not self._weights.expert_map.replicated:
            return
        for rank in range(expert_map.num_ranks):
            if not expert_map.num_slots(rank):
                raise ConfigError(
                    f"expert_map gives rank {rank} of the EP group no expert, and has replicas: a rank without "
                    "experts cannot sum their gradients; give that rank an expert to train"
                )

    @torch.no_grad()
    def divide(self, ranks: int) -> None:
        """Set the divisor of later backwards, and divide the current gradients by it.

        Does nothing if backward follows the divisor of a wrapper, which it has applied already.

        Args:
            ranks: The divisor.
        """
        if self.wrapper_divisor is None and self.divisor != ranks:
            self._first.warn(ranks)
            for gradient in self._weights.gradients():
                gradient.mul_(self.divisor / ranks)
            self._divisor = ranks

    def agree_on_sums(self, *, sums: bool) -> bool:
        """Exchange, at the start of a backward, which ranks will sum over copies. Collective over the EP group.

        Args:
            sums: Whether this rank will, in `__call__`. A rank without trainable experts does not reach it.

        Returns:
            Whether this rank must call `contribute_zeros` when its peers sum.
        """
        weights = self._weights
        if self.ep.size == 1 or not weights.expert_map.replicated or not weights.has_expert_parameters:
            return False
        if not self._learns_somewhere and not capturing(weights.device):
            with self.ep.flight_recorder.step("backward by what learns", counted=False):
                rows = self.ep.exchange(torch.tensor([sums], dtype=torch.int64, device=weights.device))
            self._learns_somewhere = any(row[0] for row in rows)
        return self._learns_somewhere and not sums

    def contribute_zeros(self) -> None:
        """Add zeros to the peers' sums over copies. Collective over the EP group."""
        for tensor in self._weights.stored_tensors().values():
            self._over_copies(_zeros(tensor, len(self._weights.expert_map.replicated)))

    def __call__(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sum gradients over the ranks and slots that hold the same experts, and divide. Collective.

        Args:
            gradients: [L, ...] by stored name, from this call's rows on this rank.

        Returns:
            The summed gradients, by the same names.
        """
        batch = next((gradient for gradient in gradients.values() if batch_problem(gradient) is not None), None)
        if self.each_sum is not None:
            self.each_sum(batch)
        refuse_batch(batch)
        divisor = self.divisor / self.shard_divisor() if self.sharded else self.divisor  # FSDP divides afterwards
        if divisor != 1:
            gradients = {name: gradient / divisor for name, gradient in gradients.items()}
        if self.etp.size > 1 and "w2_bias" in gradients:  # all etp ranks hold it, only rank 0 adds it to its output
            gradients["w2_bias"] = gradients["w2_bias"].clone()
            with self.etp.flight_recorder.step("backward by the sum over etp", counted=False):
                self.etp.all_reduce(gradients["w2_bias"])
        if not gradients or not self._weights.num_slots:
            return gradients
        redundant = self._weights.expert_map.replicated
        shared = {name: self._copies(gradient, redundant) for name, gradient in gradients.items()} if redundant else {}
        if self.replicas.size > 1 and not self.sharded:
            with self.replicas.flight_recorder.step("backward by the sum over EP groups", counted=False):
                for name in gradients:
                    gradients[name] = gradients[name].clone(memory_format=torch.contiguous_format)
                    self.replicas.all_reduce(gradients[name])
                for total in shared.values():
                    # one buffer with the same order on all ranks: copies get bitwise equal sums in any slot
                    self.replicas.all_reduce(total)
        return gradients | {name: self._put_back(gradients[name], shared[name], redundant) for name in shared}

    def connect_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors that were computed for one call, with a backward that sums their gradients.

        Args:
            tensors: [L, ...] by stored name.

        Returns:
            The same values by the same names.
        """
        needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values())
        if not needed or self.is_identity:
            return tensors
        self.check()
        duplicates = [slot for _, slot in self._weights.duplicate_slots]

        def back(gradients: list[Tensor]) -> list[Tensor]:
            summed = list(self(dict(zip(tensors, gradients, strict=True))).values())
            if not duplicates:
                return summed
            kept = [gradient.clone() for gradient in summed]  # each slot has the whole sum: keep one for the parameter
            for gradient in kept:
                gradient[duplicates] = 0
            return kept

        stored = {name: tensor.detach() for name, tensor in tensors.items()}
        return connect_in_autograd(stored, back, tensors.values())

    def make_version_check(self) -> Callable[[], None]:
        """Return a function that raises RuntimeError if parameters were written in place since this call.

        Call this in forward and the function in backward. It checks DTensors of etp > 1 only: autograd does not see
        writes through a DTensor in the stored tensor that backward uses.
        """
        held = self._weights._on_views if self.etp.size > 1 else []
        seen = [parameter._version for parameter in held]

        def check() -> None:
            if [parameter._version for parameter in held] != seen:
                raise RuntimeError(
                    "an expert's parameter needed for gradient computation has been modified by an inplace operation "
                    "between forward and backward, such as optimizer.step(); run backward before it"
                )

        return check

    def connect_parameters(self, slots: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> dict[str, Tensor]:
        """Connect the stored tensors of all slots to the parameters that view them, which get summed gradients.

        Args:
            slots: [L, ...] by stored name.
            parameters: All parameters, ordered by expert, and for each expert in the order of the tensors' parts.

        Returns:
            The tensors by the same names, as outputs of one autograd node.
        """
        self.check()
        check_versions = self.make_version_check()

        def back(gradients: list[Tensor]) -> list[Tensor]:
            check_versions()
            summed = self(dict(zip(slots, gradients, strict=True)))
            split = []  # one torch call splits each tensor: there may be hundreds of parameters
            for name, gradient in summed.items():
                parts = len(parts_of(name, self._weights.config.activation.gated))
                pieces = gradient.unflatten(1, (parts, -1)).flatten(0, 1).unbind() if len(gradient) else ()
                split.append((parts, pieces))
            firsts = [held[0] for held in self._weights.slots_of_expert.values()]
            given = [pieces[parts * first + i] for first in firsts for parts, pieces in split for i in range(parts)]
            if self.layout is not None and self.layout.token_ranks > 1 and self.divisor == 1 and given:
                self._first.note(parameters, given)
            return given

        return connect_in_autograd(slots, back, parameters)

    def note_step(self) -> None:
        """Store the checksum of the gradients in `stepped`."""
        self.stepped = self._checksum(self._weights.gradients(), self.stepped)

    def note_restored(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Store the checksum of an optimizer's tensors for the experts in `restored`. states: one of each parameter"""
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim()]
        self.restored = self._checksum(tensors, self.restored)

    @torch.no_grad()
    def _checksum(self, tensors: Iterable[Tensor], before: Tensor | None) -> Tensor | None:
        """Return the checksum of the first elements of each tensor; `before` without tensors, or in a graph capture."""
        device = self._weights.device
        if capturing(device):
            return before
        found = [local(tensor).flatten()[:_NOTED].to(device, torch.float32) for tensor in tensors]
        if not found:
            return before
        flat = torch.cat(found)
        sound = flat.isfinite().all() & flat.any()
        return checksum(flat, flat.device) * sound

    def _copies(self, gradient: Tensor, redundant: list[int]) -> Tensor:
        """Sum the gradients of redundant experts over all slots of the EP group: float32 [len(redundant), ...]."""
        total = _zeros(gradient, len(redundant))
        for place, expert in enumerate(redundant):
            for slot in self._weights.slots_of_expert.get(expert, ()):
                total[place] += gradient[slot]
        self._over_copies(total)
        return total

    def _over_copies(self, total: Tensor) -> None:
        if self.ep.size > 1:
            with self.ep.flight_recorder.step("backward by the sum over copies"):
                self.ep.all_reduce(total)

    def _put_back(self, gradient: Tensor, total: Tensor, redundant: list[int]) -> Tensor:
        gradient = gradient.clone()  # other autograd nodes may hold the same tensor
        for place, expert in enumerate(redundant):
            for slot in self._weights.slots_of_expert.get(expert, ()):
                gradient[slot] = total[place].to(gradient.dtype)
        return gradient


def _zeros(stored: Tensor, experts: int) -> Tensor:
    """Return zeros, float32 [experts, ...], with the shape of a slot of a stored tensor [L, ...]."""
    return torch.zeros(experts, *stored.shape[1:], dtype=torch.float32, device=stored.device)
