"""What training adds to a rank's experts: sums of their copies' gradients, and a guard of their optimizers.

- Gradients: every copy of an expert gets that of all tokens, and so copies that are equal stay equal. Copies are in
  other slots of the EP group (a redundant map), and in the same slots of other EP groups (ep < dp). Both sums are part
  of backward. All ranks that share an expert must therefore run backward equally often.
- An optimizer's own `state_dict()` is refused in a distributed checkpoint. That dict numbers parameters, and ranks with
  different experts give one number to different ones: the checkpoint would keep one rank's state under it and give it
  to all, without a word. `get_optimizer_state_dict` goes by names, which is right on any ranks and under any map. The
  layer is not given the optimizer, and parameters do not know it. What sees it is torch's hook on every optimizer's
  step (`register_optimizer_step_post_hook`); it is installed with the first expert parameters that differ between
  ranks. Another one notes gradients before steps, from which a later backward tells that ranks' experts were mixed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ep_moe.errors import ConfigError
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup, checksum
from ep_moe.types import capturing
from ep_moe.weights.full_state import refuse_full_state
from ep_moe.weights.parts import Joined, local, parts_of

if TYPE_CHECKING:
    from ep_moe.weights.slots import ExpertSlots


_NOTED = 1 << 12  # numbers of a parameter's gradient that tell ranks apart


class GradientSum:
    """Sums the gradients of one layer's experts over the ranks that hold them.

    ep, etp: the groups of this rank; replicas: to the ranks with the same slots in other EP groups
    divisor: what backward divides gradients by: 1 for the sum over all ranks' tokens; the number of ranks with tokens
        of their own for the mean, as dense parameters have it (`ep_moe.training`)
    sharded: FSDP cuts the experts over `replicas` and averages over them
    compared: names of dense parameters beside the experts, which `ep_moe.training` has compared over ranks with these
    layout, router: the layer's; None where there is none
    router_steps: whether an optimizer that holds experts has changed the router too
    each_sum: called ahead of every sum: on all ranks that hold the same experts, where one of these learns
    stepped: a checksum of the gradients that an optimizer's step took, int64 []; 0 where they were zero or not finite
    """

    def __init__(self, weights: ExpertSlots, ep: RankGroup, etp: RankGroup, replicas: RankGroup) -> None:
        self._weights = weights
        self.ep, self.etp, self.replicas = ep, etp, replicas
        self.divisor = 1
        self.sharded = False
        self.compared: set[tuple[str, ...]] = set()
        self.layout: RankLayout | None = None
        self.router: Callable[[], Module | None] = lambda: None
        self.router_steps = False
        self.each_sum: Callable[[], None] | None = None
        self.stepped: Tensor | None = None
        self._learns_somewhere = False  # in the EP group; once it does, all ranks sum from then on

    @property
    def alone(self) -> bool:
        """Nothing is summed or divided: one rank of everything, and each expert in one slot."""
        return self.of_one_rank and self.divisor == 1 and not self._weights.expert_map.replicated

    @property
    def of_one_rank(self) -> bool:
        """No other rank has rows for these experts."""
        return max(self.ep.size, self.etp.size, self.replicas.size) == 1

    @property
    def is_local(self) -> bool:
        """Whether the gradients of this rank's slots are those of its parameters, but for `divisor`."""
        shared = self.replicas.size > 1 or self._weights.expert_map.replicated
        return not shared and not (self.etp.size > 1 and "w2_bias" in self._weights.names)

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

    @torch.no_grad()
    def divide(self, ranks: int) -> None:
        """Have backward divide by this from now on, and divide the gradients that are here by the same."""
        if self.divisor != ranks:
            for gradient in self._weights.gradients():
                gradient.mul_(self.divisor / ranks)
            self.divisor = ranks

    def meet(self, *, sums: bool) -> bool:
        """Learn at the begin of a backward whether peers will sum over copies. Collective over the EP group.

        sums: whether this rank will, in `__call__`, which is not reached where none of its experts learns
        Returns whether `take_part` is due where the peers' sums are.
        """
        weights = self._weights
        if self.ep.size == 1 or not weights.expert_map.replicated or not weights.named:
            return False
        if not self._learns_somewhere and not capturing(weights.device):
            with self.ep.flight_recorder.step("backward by what learns", counted=False):
                rows = self.ep.exchange(torch.tensor([sums], dtype=torch.int64, device=weights.device))
            self._learns_somewhere = any(row[0] for row in rows)
        return self._learns_somewhere and not sums

    def take_part(self) -> None:
        """Take part with zeros in the peers' sums over copies. Collective over the EP group."""
        for tensor in self._weights.stored_tensors().values():
            self._over_copies(_zeros(tensor, len(self._weights.expert_map.replicated)))

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

    def of_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """tensors: [L, ...] by stored name, made for a call. Returns the same, whose gradients are summed."""
        needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values())
        if not needed or self.alone:
            return tensors
        self.check()
        twice = [slot for _, slot in self._weights.twice]

        def back(gradients: list[Tensor]) -> list[Tensor]:
            summed = list(self(dict(zip(tensors, gradients, strict=True))).values())
            if not twice:
                return summed
            kept = [gradient.clone() for gradient in summed]  # each slot has the sum, of which a parameter wants one
            for gradient in kept:
                gradient[twice] = 0
            return kept

        stored = tuple(tensor.detach() for tensor in tensors.values())
        return dict(zip(tensors, Joined.apply(stored, back, *tensors.values()), strict=True))

    def pieces_unwritten(self) -> Callable[[], None]:
        """A check for a call's backward, from forward: RuntimeError where a parameter was written in place meanwhile.
        Of etp ranks' pieces, whose memory does not tell autograd of writes that go through their DTensors."""
        held = self._weights._on_views if self.etp.size > 1 else []
        seen = [parameter._version for parameter in held]

        def check() -> None:
            if [parameter._version for parameter in held] != seen:
                raise RuntimeError(
                    "an expert's parameter needed for gradient computation has been modified by an inplace operation "
                    "between forward and backward, such as optimizer.step(); run backward before it"
                )

        return check

    def of_parameters(self, slots: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors of all slots [L, ...], by stored name, as functions of the parameters that lie in them, which get
        summed gradients. parameters: by expert, and of each in the order of the tensors' parts"""
        self.check()
        unwritten = self.pieces_unwritten()

        def back(gradients: list[Tensor]) -> list[Tensor]:
            unwritten()
            summed = self(dict(zip(slots, gradients, strict=True)))
            split = []  # by one call of torch's for each tensor: there may be hundreds of parameters
            for name, gradient in summed.items():
                parts = len(parts_of(name, self._weights.config.activation.gated))
                pieces = gradient.unflatten(1, (parts, -1)).flatten(0, 1).unbind() if len(gradient) else ()
                split.append((parts, pieces))
            firsts = [held[0] for held in self._weights.held.values()]
            return [pieces[parts * first + i] for first in firsts for parts, pieces in split for i in range(parts)]

        return dict(zip(slots, Joined.apply(tuple(slots.values()), back, *parameters), strict=True))

    @torch.no_grad()
    def note_step(self) -> None:
        """Take the checksum of the gradients, of a part of each."""
        device = self._weights.device
        found = [local(gradient).flatten()[:_NOTED].float() for gradient in self._weights.gradients()]
        if found and not capturing(device):
            flat = torch.cat(found)
            sound = flat.isfinite().all() & flat.any()
            self.stepped = checksum(flat, flat.device) * sound

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
    """This parameter's gradient is a sum over ranks, and in an EP group of several it is another expert's on others."""
    parameter.summed_over_ranks = owner = _Owner(weights)  # type: ignore[attr-defined]
    if weights.gradient_sum.ep.size > 1:
        parameter.differs_between_ranks = owner  # type: ignore[attr-defined]
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
                "experts moved since (load_state_dict of another expert map, EPLB), the layer was converted with "
                "etp > 1 (.to, .half), or fully_shard has cut its model, and made others; make the optimizer "
                "afterwards, and load its state then"
            )


@cache
def _install() -> None:
    register_optimizer_step_pre_hook(_refuse_whole_steps)
    register_optimizer_step_pre_hook(_note_gradients)
    register_optimizer_step_post_hook(_after_step)


def _refuse_whole_steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """LBFGS finds one direction and length for all parameters by their inner products, which on a rank would lack other
    ranks' experts."""
    if isinstance(optimizer, LBFGS) and _owners(optimizer, "differs_between_ranks"):
        raise ConfigError(
            "LBFGS takes one step of all its parameters by their inner products, and this rank's optimizer has the "
            "experts of this rank alone, so that ranks would train different models; use an optimizer that steps "
            "each parameter by itself, such as AdamW, or give LBFGS ep_moe.training.dense_parameters(model)"
        )


def _note_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """In an optimizer's steps 1, 2, 4, 8 and so on, for a comparison of ranks in a later backward."""
    steps = optimizer.__dict__.get("_steps_noted_by_ep_moe", 0) + 1
    optimizer._steps_noted_by_ep_moe = steps  # type: ignore[attr-defined]
    if not steps & (steps - 1):
        found = _owners(optimizer, "summed_over_ranks")
        if found:
            _refuse_mixed_groups(optimizer)
        for weights in found:
            _refuse_sums_beside_means(optimizer, weights)
            _note_router(optimizer, weights)
        for weights in _owners(optimizer, "differs_between_ranks"):
            weights.gradient_sum.note_step()


def _refuse_mixed_groups(optimizer: Optimizer) -> None:
    """Raise ConfigError where torch would update DTensors and plain tensors in one call, which it cannot."""
    for group in optimizer.param_groups:
        stepped = [p for p in group["params"] if p.grad is not None]
        if "foreach" not in group or len({hasattr(p, "placements") for p in stepped}) < 2:
            continue
        by_default = group["foreach"] is None and not group.get("differentiable") and any(p.is_cuda for p in stepped)
        if group["foreach"] or group.get("fused") or by_default:
            raise ConfigError(
                f"a group of {type(optimizer).__name__} has DTensors (FSDP2, tensor parallelism and etp > 1 make them) "
                f"and plain tensors, and torch updates a group in one call; give the optimizer "
                f"ep_moe.training.parameter_groups(model), or foreach=False, which is slower"
            )


def _note_router(optimizer: Optimizer, weights: ExpertSlots) -> None:
    """Set `router_steps` where this step changes the router: waits for the device, until it is set."""
    found, router = weights.gradient_sum, weights.gradient_sum.router()
    if found.router_steps or router is None or capturing(weights.device):
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    gradients = [p.grad for p in router.parameters() if id(p) in stepped and p.grad is not None]
    found.router_steps = any(bool(local(gradient).any()) for gradient in gradients)


def _refuse_sums_beside_means(optimizer: Optimizer, weights: ExpertSlots) -> None:
    """Raise ConfigError where dense gradients are means over ranks, and those of experts still sums.

    torch's FSDP2 averages the gradients of the parameters that it shards.
    """
    found, router = weights.gradient_sum, weights.gradient_sum.router()
    if found.layout is None or found.layout.token_ranks == 1 or found.divisor != 1:
        return
    own = {id(parameter) for parameter in weights.parameters()}
    dense = [p for group in optimizer.param_groups for p in group["params"]]
    dense += [] if router is None else router.parameters()
    tp = set(found.layout.group("tp"))
    for parameter in dense:
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or id(parameter) in own or hasattr(parameter, "summed_over_ranks"):
            continue
        if not set(mesh.mesh.flatten().tolist()) <= tp:  # else it is cut over tp, whose ranks have the same tokens
            ranks = found.layout.token_ranks
            raise ConfigError(
                f"torch's fully_shard averages dense gradients over ranks, and experts' are sums of {ranks} ranks: "
                f"they would take steps {ranks} times too large; use ep_moe.training.fully_shard(model, context), or "
                f"call sync_gradients(model, context) of ep_moe.training after each backward"
            )


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
