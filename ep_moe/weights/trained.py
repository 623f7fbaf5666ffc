"""What training adds to a rank's experts: sums of their copies' gradients, low-rank updates (LoRA, Hu et al. 2021), and
a guard of their optimizer's state.

- Gradients: every copy of an expert gets that of all tokens, and so copies that are equal stay equal. Copies are in
  other slots of the EP group (a redundant map), and in the same slots of other EP groups (ep < dp). Both sums are part
  of backward. All ranks that share an expert must therefore run backward equally often.
- Low-rank updates are trained while the matrices stay as they are.
- An optimizer's own `state_dict()` is refused in a distributed checkpoint. That dict numbers parameters, and ranks with
  different experts give one number to different ones: the checkpoint would keep one rank's state under it and give it
  to all, without a word. `get_optimizer_state_dict` goes by names, which is right on any ranks and under any map. The
  layer is not given the optimizer, and parameters do not know it. What sees it is torch's hook on every optimizer's
  step (`register_optimizer_step_post_hook`); it is installed with the first expert parameters that differ between
  ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ep_moe.errors import ConfigError
from ep_moe.parallel.rank_group import RankGroup, checksum
from ep_moe.placement.expert_map import EMPTY
from ep_moe.types import capturing
from ep_moe.weights.full_state import refuse_full_state
from ep_moe.weights.parts import local

if TYPE_CHECKING:
    from ep_moe.weights.slots import ExpertSlots


_NOTED = 1 << 12  # numbers of a parameter's gradient that tell ranks apart


class GradientSum:
    """Of one layer's experts on this rank.

    ep, etp: the groups of this rank; replicas: to the ranks with the same slots in other EP groups
    divisor: what backward divides gradients by: 1 for the sum over all ranks' tokens; the number of ranks with tokens
        of their own for the mean, as dense parameters have it (`ep_moe.training`)
    sharded: FSDP cuts the experts over `replicas` and averages over them
    compared: `ep_moe.training` has compared what ranks hold alike
    each_sum: called ahead of every sum: on all ranks that hold the same experts, where one of these learns
    stepped: a checksum of the gradients that an optimizer's step took, int64 []; 0 where they were zero or not finite
    """

    def __init__(self, weights: ExpertSlots, ep: RankGroup, etp: RankGroup, replicas: RankGroup) -> None:
        self._weights = weights
        self.ep, self.etp, self.replicas = ep, etp, replicas
        self.divisor = 1
        self.sharded = False
        self.compared = False
        self.each_sum: Callable[[], None] | None = None
        self.stepped: Tensor | None = None
        self._learns_somewhere: bool | None = None  # in the EP group, as of the first backward

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

    def meet(self, *, sums: bool) -> None:
        """Take part in the peers' sums over copies where none of this rank's experts learns, and so `__call__` is not
        reached. Collective over the EP group. sums: whether it will be, in the backward that begins"""
        weights = self._weights
        redundant = weights.expert_map.replicated
        if self.ep.size == 1 or not redundant or not weights.named:
            return
        if self._learns_somewhere is None and not capturing(weights.device):
            with self.ep.flight_recorder.step("backward by what learns", counted=False):
                rows = self.ep.exchange(torch.tensor([sums], dtype=torch.int64, device=weights.device))
            self._learns_somewhere = any(row[0] for row in rows)
        if self._learns_somewhere and not sums:
            for tensor in weights.stored_tensors().values():
                self._over_copies(_zeros(tensor, len(redundant)))

    def __call__(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """gradients: [L, ...] by stored name, of this call's rows. Returns the same, summed. Collective."""
        if self.each_sum is not None:
            self.each_sum()
        divisor = self.divisor / self.replicas.size if self.sharded else self.divisor  # FSDP takes the mean itself
        if divisor != 1:
            gradients = {name: gradient / divisor for name, gradient in gradients.items()}
        if self.etp.size > 1 and "w2_bias" in gradients:  # etp rank 0 alone used it, all hold it
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
                    # the same places in the same buffer on all ranks: copies get the same bits in whatever slot
                    self.replicas.all_reduce(total)
        return gradients | {name: self._put_back(gradients[name], shared[name], redundant) for name in shared}

    @torch.no_grad()
    def note_step(self) -> None:
        """Take the checksum of the gradients, of a part of each."""
        device = self._weights.device
        found = [local(p.grad).flatten()[:_NOTED].float() for p in self._weights.parameters() if p.grad is not None]
        if found and not capturing(device):
            flat = torch.cat(found)
            told = flat.isfinite().all() & flat.any()
            self.stepped = checksum(flat, flat.device) * told

    def _copies(self, gradient: Tensor, redundant: list[int]) -> Tensor:
        """float32 [len(redundant), ...], summed over all slots of the EP group."""
        total = _zeros(gradient, len(redundant))
        for place, expert in enumerate(redundant):
            for slot in self._weights.held.get(expert, ()):
                total[place] += gradient[slot]
        self._over_copies(total)
        return total

    def _over_copies(self, total: Tensor) -> None:
        if self.ep.size > 1:
            with self.ep.flight_recorder.step("backward by the sum over copies"):
                self.ep.all_reduce(total)

    def _put_back(self, gradient: Tensor, total: Tensor, redundant: list[int]) -> Tensor:
        gradient = gradient.clone()  # it may be another's too
        for place, expert in enumerate(redundant):
            for slot in self._weights.held.get(expert, ()):
                gradient[slot] = total[place].to(gradient.dtype)
        return gradient


def _zeros(stored: Tensor, experts: int) -> Tensor:
    """float32 [experts, ...] for a stored tensor [L, ...]."""
    return torch.zeros(experts, *stored.shape[1:], dtype=torch.float32, device=stored.device)


@dataclass(frozen=True)
class LowRank:
    """Of one stored matrix: W + scaling * B @ A.

    Args:
        rank: Rows of A and columns of B.
        scaling: alpha / rank.
    """

    rank: int
    scaling: float


def lora_refusal(weights: ExpertSlots) -> str | None:
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


def _factor_dtype(matrix: Tensor) -> torch.dtype:
    return matrix.dtype if matrix.dtype == torch.float64 else torch.float32


class ExpertLora(nn.Module):
    """The factors of the experts in a rank's slots, as functions of which a kernel reads the matrices.

    Of each expert `lora_A_w13` [r, H] and `lora_B_w13` [2I, r], `lora_A_w2` [r, I] and `lora_B_w2` [H, r], whose names
    begin with its logical id, as its matrices' do: a distributed checkpoint keeps what has one name once. They are
    float32 where the matrices have 16 bits. A is drawn as `nn.Linear` draws its weight, B is zero.

    Args:
        matrices: [L, out, in] by stored name, of which those in `ranks` get factors.
        ranks: By stored name.
        experts: The logical expert in each slot, -1 for an empty one.
        seed: Of the layer; an expert's numbers depend on it and on the logical id.
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
            for name, one in ranks.items():
                _, rows, columns = matrices[name].shape
                device, dtype = matrices[name].device, _factor_dtype(matrices[name])
                a = torch.empty(one.rank, columns, dtype=dtype, device="cpu")
                generator = torch.Generator("cpu").manual_seed(seed * num_experts + expert)
                a.uniform_(-1 / math.sqrt(columns), 1 / math.sqrt(columns), generator=generator)
                module.register_parameter(f"lora_A_{name}", nn.Parameter(a.to(device)))
                b = torch.zeros(rows, one.rank, dtype=dtype, device=device)
                module.register_parameter(f"lora_B_{name}", nn.Parameter(b))
            self.add_module(str(expert), module)

    @property
    def kinds(self) -> list[str]:
        """Of an expert's factors, by name: the same list on all ranks."""
        return [f"lora_{factor}_{name}" for name in self.ranks for factor in "AB"]

    def factors(self, name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """A [L, r, in] and B [L, out, r] of a stored matrix [L, out, in], stacked: zeros for an empty slot."""
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
        """Copy factors of all experts, [E, r, in] and [E, out, r], into those of the experts here."""
        for expert, module in self.named_children():
            for factor, tensor in (("A", a), ("B", b)):
                module.get_parameter(f"lora_{factor}_{name}").copy_(tensor[int(expert)])

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        """Each expert loads its own; a dict may have other ranks' too."""

    def forward(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the stored tensors [L, ...], updated where `enabled`: new memory for each matrix that has factors."""
        found = dict(stored)
        for name, one in self.ranks.items() if self.enabled else ():
            a, b = (factor.to(found[name].dtype) for factor in self.factors(name, found[name]))
            with torch.autocast(found[name].device.type, enabled=False):
                found[name] = torch.baddbmm(found[name], b, a, alpha=one.scaling)
        return found


KEY = "parameters differ between ranks"
_REFUSAL = (
    "optimizer.state_dict() numbers parameters, and ranks hold different experts under one number: a checkpoint would "
    "keep {fqn} of one rank alone; save get_optimizer_state_dict(model, optimizer) of "
    "torch.distributed.checkpoint.state_dict, and load with set_optimizer_state_dict"
)


class _Refused:
    """A value that torch.distributed.checkpoint asks how it is to be written or read. A file of torch.save, one for
    each rank, keeps a plain empty set in its place."""

    def __create_write_items__(self, fqn: str, value: Any) -> Any:
        raise ConfigError(_REFUSAL.format(fqn=fqn.rpartition(".")[0] or fqn))

    def __create_chunk_list__(self) -> Any:
        raise ConfigError(_REFUSAL.format(fqn="the optimizer"))

    def __get_tensor_shard__(self, index: Any) -> Any:
        raise ConfigError(_REFUSAL.format(fqn="the optimizer"))

    def __reduce__(self) -> Any:
        return set, ()


class _Owner:
    """The expert weights of a parameter, held weakly. A file of torch.save keeps a plain empty set in its place."""

    def __init__(self, weights: ExpertSlots) -> None:
        self._weights = weakref.ref(weights)

    def __call__(self) -> ExpertSlots | None:
        return self._weights()

    def __reduce__(self) -> Any:
        return set, ()


def _owners(optimizer: Optimizer, attribute: str) -> set[ExpertSlots]:
    """Those that an optimizer's parameters name."""
    named = (getattr(p, attribute, None) for group in optimizer.param_groups for p in group["params"])
    return {weights for owner in named if isinstance(owner, _Owner) and (weights := owner()) is not None}


def guard_optimizers(parameter: Parameter, weights: ExpertSlots) -> None:
    """This parameter is another expert's on other ranks."""
    parameter.differs_between_ranks = _Owner(weights)  # type: ignore[attr-defined]
    _install()


def leave_behind(parameters: Iterable[Parameter], weights: ExpertSlots) -> None:
    """These are the layer's no more: it made others when experts moved, which no optimizer knows that was made before.
    From then on such an optimizer's step is refused, unless the layer's experts are frozen."""
    owner = _Owner(weights)
    for parameter in parameters:
        parameter.left_behind_by = owner  # type: ignore[attr-defined]
    _look_before_steps()


@cache
def _look_before_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for weights in _owners(optimizer, "left_behind_by"):
        if weights.trained:
            raise ConfigError(
                "the optimizer holds expert parameters that are their layer's no more, and would train no expert: "
                "experts moved since (load_state_dict of another expert map, EPLB), and the layer made others; make "
                "the optimizer after load_state_dict, and load its state then"
            )


@cache
def _install() -> None:
    register_optimizer_step_pre_hook(_note_gradients)
    register_optimizer_step_post_hook(_after_step)


def _note_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """In an optimizer's steps 1, 2, 4, 8 and so on, for a comparison of ranks in a later backward."""
    steps = optimizer.__dict__.get("_steps_noted_by_ep_moe", 0) + 1
    optimizer._steps_noted_by_ep_moe = steps  # type: ignore[attr-defined]
    if not steps & (steps - 1):
        for weights in _owners(optimizer, "differs_between_ranks"):
            weights.gradient_sum.note_step()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer.__dict__.get("_guarded_by_ep_moe"):
        return
    optimizer._guarded_by_ep_moe = True  # type: ignore[attr-defined]
    if any(hasattr(p, "differs_between_ranks") for group in optimizer.param_groups for p in group["params"]):
        optimizer.register_state_dict_post_hook(_guard)


def _guard(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    for weights in _owners(optimizer, "differs_between_ranks"):
        refuse_full_state(weights.expert_map)
    state_dict[KEY] = _Refused()
