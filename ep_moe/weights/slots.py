"""The memory of a rank's expert weights: all slots in one tensor each, as kernels read them, and parameters on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ep_moe.config import MoEConfig
from ep_moe.errors import ConfigError
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.placement.expert_map import EMPTY, ExpertMap
from ep_moe.quant.schemes import PLAIN, Scheme
from ep_moe.types import dtype_name
from ep_moe.weights.layouts.base import WeightLayout
from ep_moe.weights.optimizers import guard_optimizers, leave_behind
from ep_moe.weights.parts import (
    Changes,
    Expert,
    ExpertModules,
    etp_parameter,
    local,
    part_names,
    parts_of,
    split_parts,
)
from ep_moe.weights.replaced import follow, offloaded_problem, stored_problem, take_over, take_replaced
from ep_moe.weights.trained import GradientSum

if TYPE_CHECKING:
    from ep_moe.weights.lora import ExpertLora
    from ep_moe.weights.main_grads import MainGrads

Result = TypeVar("Result")


class ExpertSlots(nn.Module):
    """Stored tensors [L, ...] and, where they can be trained, parameters by logical expert on the same memory.

    Arguments as `ExpertWeights` has them.
    """

    sharded = False  # by `ep_moe.training.fully_shard`: each call gathers its parameters anew

    def __init__(
        self,
        config: MoEConfig,
        expert_map: ExpertMap,
        *,
        ep_rank: int = 0,
        ep: RankGroup | None = None,
        etp: RankGroup | None = None,
        replicas: RankGroup | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        scheme: Scheme = PLAIN,
        weight_layout: Callable[[MoEConfig, Scheme, torch.dtype, int], WeightLayout] = WeightLayout,
        trainable: bool = True,
    ) -> None:
        super().__init__()
        self.__dict__["_modules"] = ExpertModules()
        self.config = config
        self.ep_rank = ep_rank
        self.etp = etp or RankGroup.alone()
        self.scheme, self._plain = scheme, scheme.plain
        if config.intermediate_size % self.etp.size:
            raise ConfigError(
                f"ParallelConfig.etp must divide MoEConfig.intermediate_size, got etp={self.etp.size}, "
                f"intermediate_size={config.intermediate_size}"
            )
        problem = scheme.unsupported_reason(config, self.etp.size)
        if problem is not None:
            raise ConfigError(problem)
        self.expert_map = expert_map
        self.num_slots = expert_map.num_slots(ep_rank)
        self.updates = 0  # calls that may have written weights, alike on all ranks
        self.calls = 0  # of the layer, with gradients on
        self._dtype = dtype or torch.get_default_dtype()
        self.weight_layout = weight_layout(config, scheme, self._dtype, self.etp.size)
        self.names = tuple(self.weight_layout.canonical)
        self.gradient_sum = GradientSum(self, ep or RankGroup.alone(), self.etp, replicas or RankGroup.alone())
        # called in the backward of every call, with its number, on all ranks of the call alike: whether or not a rank's
        # experts learn
        self.each_backward: Callable[[int], None] | None = None
        self.trainable = trainable and scheme.plain
        self.named = self.trainable and type(self.weight_layout) is WeightLayout
        self._slots: dict[str, Tensor] = {}
        self._changes = Changes()
        self._seen = 0  # of these
        self._joined: dict[str, Tensor] | None = None
        self._mesh: DeviceMesh | None = None
        self.lora: ExpertLora | None = None
        self.main_grads: MainGrads | None = None  # of `ep_moe.training.use_main_grads`
        self._specs = self.weight_layout.specs()
        for name, spec in self._specs.items():
            data = torch.zeros(self.num_slots, *spec.shape, dtype=spec.dtype, device=device)
            if self.named:
                self._slots[name] = data
            else:
                self.register_parameter(name, nn.Parameter(data, requires_grad=self.trainable))
        # what keeps a rank without experts in the graph, so that its backward enters what the peers' do
        self.anchor = torch.zeros(0, device=self.device, requires_grad=True) if self.named else None
        self._name_experts(requires_grad=True)
        self.reset_parameters()

    def __reduce__(self) -> Any:
        raise ConfigError(
            "expert_weights is neither copied nor pickled: its groups are not; copy its state_dict() or "
            "named_parameters()"
        )

    def reset_parameters(self) -> None:
        """What fresh experts hold."""
        raise NotImplementedError

    def stored_tensors(self) -> Mapping[str, Tensor]:
        """Return the stored tensors of all slots, [L, ...] each.

        While a kernel runs they are functions of the parameters. At other times a method, and no property: numbers of
        parameters that were replaced are first written into them.
        """
        if self._joined is None and self._slots and not torch.compiler.is_compiling():
            self._reattach()
        return self._present

    @property
    def _held(self) -> dict[str, Any]:
        """As they lie there; empty where parameters are sharded."""
        found: dict[str, Any] = self._slots if self.named else self._parameters
        return found

    @property
    def _present(self) -> Mapping[str, Any]:
        """Those of `stored_tensors`, without a write to them."""
        return self._held if self._joined is None else self._joined

    def get_parameter(self, target: str) -> Any:
        """A stored tensor of all slots, such as "w13", or a parameter by its path, such as "3.w1". Writes nothing:
        between calls parameters that were replaced are not in it yet, which `stored_tensors` writes there first.
        Without a module's walk through submodules, which layers would pay for at each call."""
        found = self._parameters.get(target)
        if found is not None:
            return found
        present = self._present
        if target in present:
            return present[target]
        return super().get_parameter(target)

    def __getattr__(self, name: str) -> Any:
        """A stored tensor by its name, as `get_parameter` gives it."""
        own = self.__dict__
        if own.get("named") and name in (present := own.get("_joined") or own.get("_slots", {})):
            return present[name]
        return super().__getattr__(name)

    def forward(self, compute: Callable[..., Result], *arguments: Any) -> Result:
        """Run a kernel on the parameters: within, `stored_tensors` gives functions of them, gathered first where they
        are sharded. A module's call, so that wrappers' hooks come before and behind it."""
        out = self.given(self._join(), compute, *arguments)
        if self.sharded and isinstance(out, Tensor):  # FSDP2's hook is lost on a view
            return cast("Result", torch.ops.aten._unsafe_view.default(out, out.shape))
        return out

    def given(self, stored: dict[str, Tensor], compute: Callable[..., Result], *arguments: Any) -> Result:
        """Run a kernel on stored tensors that are given."""
        own = self.__dict__  # an attribute of a Module takes the host three calls of Python
        before, own["_joined"] = self._joined, stored
        try:
            return compute(*arguments)
        finally:
            own["_joined"] = before

    def _join(self) -> dict[str, Tensor]:
        if not self.named:  # nothing here is trained
            return self._held
        apart = not self._slots or torch.compiler.is_compiling()
        if not apart:
            self._reattach()
            apart = self._changes.count != self._seen  # others for a call, which leave the slots as they are
        if apart or self.lora is not None:
            tensors = self._stacked() if apart else self._slots
            return self.gradient_sum.of_tensors(tensors if self.lora is None else self.lora(tensors))
        if not torch.is_grad_enabled() or not self.trained:
            return self._slots
        if self.main_grads is not None:
            return self.main_grads.of_slots(self._slots)
        own = self._on_views if self._mesh is None else [local(parameter) for parameter in self._on_views]
        return self.gradient_sum.of_parameters(self._slots, own)

    @property
    def trained(self) -> bool:
        """Whether any parameter wants a gradient."""
        own = self.parameters() if self.lora is not None else self._on_views or self.parameters()
        return any(parameter.requires_grad for parameter in own)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """That of one of the parameters, wherever it is kept."""
        name = "grad" if self.main_grads is None else self.main_grads.attribute
        found: Tensor | None = getattr(parameter, name, None)
        return found

    def gradients(self) -> list[Tensor]:
        """Those that parameters have."""
        return [found for p in self.parameters() if (found := self.gradient(p)) is not None]

    def _stacked(self) -> dict[str, Tensor]:
        """Copies of the parameters, differentiable: where they lie elsewhere than in the slots."""
        found, gated = {}, self.config.activation.gated
        for name, spec in self.weight_layout.canonical.items():
            slots = []
            for expert in self.local_experts:
                if expert == EMPTY:
                    slots.append(torch.zeros(spec.shape, dtype=self.dtype, device=self.device))
                    continue
                module = self._modules[str(expert)]
                assert module is not None
                slots.append(torch.cat([local(getattr(module, part)) for part in parts_of(name, gated)]))
            empty = torch.empty(0, *spec.shape, dtype=self.dtype, device=self.device)
            found[name] = torch.stack(slots) if slots else empty
        return found

    @torch.no_grad()
    def _reattach(self) -> None:
        """A replaced parameter's numbers are meant: they go to where kernels read them. One who replaced
        a stored tensor's takes the parameters along. An expert that this rank holds twice has one parameter, and its
        other slot follows it."""
        if self._place != self.place:
            follow(self, lambda tensor: tensor)
        # a DTensor's address is that of its piece
        moved = self._mesh is not None or list(map(Tensor.data_ptr, self._on_views)) != self._view_places
        if moved or self._changes.count != self._seen:
            take_over(self, moved=moved)
        for first, other in self.twice:
            for tensor in self._slots.values():  # `data`: what an earlier call keeps for backward is as it was
                tensor.data[other].copy_(tensor.data[first])

    def replaced_problem(self) -> str | None:
        """None, or why a parameter that was replaced cannot be used."""
        if not self.named:
            return stored_problem(self)
        if not self._slots or self._changes.count == self._seen:
            return None
        return offloaded_problem(self)

    def lora_problem(self) -> str | None:
        """None, or that a call would leave out gradients that are asked for: with factors, these alone have some."""
        if self.lora is None or not torch.is_grad_enabled() or not any(p.requires_grad for p in self._on_views):
            return None
        return (
            "expert_weights has LoRA factors, which are trained without the matrices, and some matrices require "
            "gradients; call requires_grad_(False) on these, or merge_lora of ep_moe.integrations.lora before training"
        )

    def _set_views(self, views: list[tuple[nn.Parameter, Tensor]]) -> None:
        self._views = views
        self._on_views = [parameter for parameter, _ in views]
        self._view_places = [view.data_ptr() for _, view in views]
        self._seen = self._changes.count

    def _name_experts(self, *, requires_grad: bool) -> None:
        """Make the parameters by logical expert, of the map in force."""
        self.held: dict[int, list[int]] = {}
        for slot, expert in sorted(enumerate(self.local_experts), key=lambda at: at[1]):
            if expert != EMPTY:
                self.held.setdefault(expert, []).append(slot)
        # copied before each call: fused optimizers and writes through `data` leave tensors' versions as they were
        self.twice = [(first, other) for first, *others in self.held.values() for other in others]
        views: list[tuple[nn.Parameter, Tensor]] = []
        self._set_views(views)
        if not self.named:
            return
        self._place = self.place
        if self.etp.size > 1 and self.etp.group is not None and self._mesh is None and not self.is_meta:
            device = self._slots["w13"].device.type
            ranks = torch.tensor(self.etp.ranks, device="cpu")
            self._mesh = DeviceMesh.from_group(self.etp.group, device, mesh=ranks, mesh_dim_names=("etp",))
        modules: dict[str, Expert] = {}
        for expert, (first, *_) in self.held.items():
            module = Expert(self._changes)
            for name, tensor in self._slots.items():
                for part, view in split_parts(name, tensor[first], self.config.activation.gated).items():
                    parameter = etp_parameter(view, part, self._mesh, requires_grad)
                    module.register_parameter(part, parameter)
                    if not self.gradient_sum.of_one_rank:
                        guard_optimizers(parameter, self)
                    views.append((parameter, view))
            modules[str(expert)] = module
        cast("ExpertModules", self._modules).hold(modules)
        self._set_views(views)

    def set_expert_map(self, expert_map: ExpertMap) -> None:
        """Take the slots for those of another map from now on: parameters are made again, by its logical experts."""
        assert self.lora is None, "factors do not move"
        self.expert_map, before = expert_map, dict(self.named_parameters())
        if self.main_grads is not None:
            self.main_grads.warn_of_move()
        learns = {name: parameter.requires_grad for name, parameter in before.items()}
        self._name_experts(requires_grad=any(learns.values()))
        if self.named:
            kinds = {name.partition(".")[2] for name, wanted in learns.items() if wanted}
            for name, parameter in self.named_parameters():  # an expert that arrives learns as those here did
                parameter.requires_grad_(learns.get(name, name.partition(".")[2] in kinds))
            leave_behind(before.values(), self)
        if self.main_grads is not None:
            self.main_grads.lay_out()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`.to(dtype)` would turn quantized numbers and their scales into something else: only the device changes."""
        if not self.scheme.plain:
            return self._move(fn, recurse)
        if not self._slots:
            super()._apply(fn, recurse)
            return self
        if self._changes.count != self._seen:
            take_replaced(self)
        self._slots.update({name: fn(tensor) for name, tensor in self._slots.items()})
        self.anchor = torch.zeros(0, device=self.device, requires_grad=True)
        follow(self, fn)
        if self.lora is not None:
            self.lora._apply(fn)
        return self

    @property
    def parameter_kinds(self) -> list[str]:
        """The last part of parameters' names, such as "w1": the same list on all ranks."""
        kinds = part_names(self.names, self.config.activation.gated) if self.named else list(self.names)
        return kinds if self.lora is None else [*kinds, *self.lora.kinds]

    def _of_experts(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of experts by name, without factors beside them."""
        return ((name, p) for name, p in self.named_parameters() if not name.startswith("lora."))

    def _move(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> Self:
        wanted = fn(torch.empty(0, dtype=self._dtype, device=self.device)).dtype
        if wanted != self._dtype:
            raise ConfigError(
                f"quantization={self.scheme.name} was built for dtype {dtype_name(self._dtype)} and cannot become "
                f"{dtype_name(wanted)}; build the layer with dtype={dtype_name(wanted)}"
            )

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)
        return self

    def unstack(self) -> None:
        """Give the slots' memory back. From now on each parameter has its own, which FSDP shards over the ranks that
        hold the same experts."""
        assert self.lora is None, "factors are not sharded"
        assert self.main_grads is None, "FSDP2 holds gradients itself"
        for module in self.children():
            assert isinstance(module, Expert)
            module.sharded = True
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()
        self._device, self._slots, self.sharded = self.device, {}, True
        self._set_views([])

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        if not self._plain:
            return self._dtype
        found: torch.dtype = self._held["w13"].dtype if self._held else next(self.parameters()).dtype
        return found

    @property
    def device(self) -> torch.device:
        found: torch.device = self._held["w13"].device if self._held else self._device
        return found

    @property
    def place(self) -> tuple[int, ...]:
        """Addresses of all that kernels read: other ones once tensors are replaced, the same while they are written."""
        return tuple([tensor.data_ptr() for tensor in self._present.values() if tensor is not None])

    @property
    def settled(self) -> bool:
        """Whether `settle` has nothing to write. Each line of it is host time of a replayed call."""
        if not self._slots:
            return True
        if self._changes.count != self._seen:
            return False
        if self._mesh is not None or self.twice:
            return False
        return list(map(Tensor.data_ptr, self._on_views)) == self._view_places

    def settle(self) -> tuple[int, ...]:
        """Write the numbers of parameters that were replaced, and of an expert's copies, to where kernels read them.

        For calls that launch what was recorded. Returns `place`, which is empty where parameters are sharded.
        """
        if self._slots:
            self._reattach()
        return self.place

    def written(self) -> tuple[int, ...]:
        """Settle, and return what changes with each write on this rank, in place or by replaced parameters. Writes into
        `data` of a tensor are not seen."""
        place = self.settle()
        seen = [*self._held.values(), *(self._on_views if self._mesh is not None else ())]
        return (*place, *[0 if tensor.is_inference() else tensor._version for tensor in seen])

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The logical expert in each slot, -1 for an empty one."""
        return self.expert_map.local(self.ep_rank)[: self.num_slots]

    @property
    def is_meta(self) -> bool:
        return self.device.type == "meta"
