"""The memory of a rank's expert weights: tensors of all slots, as kernels read them, and parameters that view them."""

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
from ep_moe.weights.gradient_sum import GradientSum
from ep_moe.weights.layouts.base import WeightLayout
from ep_moe.weights.optimizers import guard_optimizers, mark_replaced_parameters
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
from ep_moe.weights.replaced import (
    Balancer,
    attach_assigned_parameters,
    copy_parameters_to_slots,
    offloaded_problem,
    rebind_parameters,
    refuse_conversion,
    stored_problem,
    substituted_problem,
    tied_problem,
)

if TYPE_CHECKING:
    from ep_moe.weights.lora import ExpertLora
    from ep_moe.weights.main_grads import MainGrads

Result = TypeVar("Result")


class ExpertSlots(nn.Module):
    """Stored tensors [L, ...] and, if they are trainable and canonical, parameters by logical expert that view them.

    The arguments are those of `ExpertWeights`.
    """

    sharded = False  # set by `ep_moe.training.fully_shard`: each call gathers the parameters

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
        self.updates = 0  # calls that may have written weights; equal on all ranks
        self.steps = 0  # optimizer steps that updated parameters of the layer
        self.calls = 0  # calls of the layer with gradients enabled
        self.balancer: Callable[[], Balancer | None] = lambda: None  # the ExpertBalancer in use for this layer
        self._dtype = dtype or torch.get_default_dtype()
        self.weight_layout = weight_layout(config, scheme, self._dtype, self.etp.size)
        self.names = tuple(self.weight_layout.canonical)
        self.gradient_sum = GradientSum(self, ep or RankGroup.alone(), self.etp, replicas or RankGroup.alone())
        # called with the call's number in the backward of every call, on all ranks, even if none of their experts train
        self.each_backward: Callable[[int], None] | None = None
        self.trainable = trainable and scheme.plain
        self.has_expert_parameters = self.trainable and type(self.weight_layout) is WeightLayout
        self._slots: dict[str, Tensor] = {}
        self._changes = Changes()
        self._seen = 0  # `_changes.count` when the views were last made
        self._joined: dict[str, Tensor] | None = None
        self._mesh: DeviceMesh | None = None
        self.lora: ExpertLora | None = None
        self.main_grads: MainGrads | None = None  # set by `ep_moe.training.use_main_grads`
        self._specs = self.weight_layout.specs()
        for name, spec in self._specs.items():
            data = torch.zeros(self.num_slots, *spec.shape, dtype=spec.dtype, device=device)
            if self.has_expert_parameters:
                self._slots[name] = data
            else:
                self.register_parameter(name, nn.Parameter(data, requires_grad=self.trainable))
        # keeps ranks without experts in the autograd graph, so that their backward enters the same collectives
        self.anchor = (
            torch.zeros(0, dtype=torch.float32, device=self.device, requires_grad=True)
            if self.has_expert_parameters
            else None
        )
        self._name_experts(requires_grad=True)
        self.reset_parameters()

    def __reduce__(self) -> Any:
        raise ConfigError(
            "expert_weights cannot be copied or pickled, nor can its process groups; copy its state_dict() or "
            "named_parameters()"
        )

    def reset_parameters(self) -> None:
        """Initialize the experts."""
        raise NotImplementedError

    def stored_tensors(self) -> Mapping[str, Tensor]:
        """Return the stored tensors of all slots, [L, ...] each.

        While a kernel runs, they are connected to the parameters in the autograd graph. At other times, this method
        first copies the values of replaced parameters into them. `get_parameter` does not.
        """
        if self._joined is None and self._slots and not torch.compiler.is_compiling():
            self._reattach()
        return self._present

    @property
    def _raw_tensors(self) -> dict[str, Any]:
        """The stored tensors by name, without autograd; empty if FSDP2 has sharded the parameters."""
        found: dict[str, Any] = self._slots if self.has_expert_parameters else self._parameters
        return found

    @property
    def _present(self) -> Mapping[str, Any]:
        """The tensors of `stored_tensors`, without copying replaced parameters into them."""
        return self._raw_tensors if self._joined is None else self._joined

    def get_parameter(self, target: str) -> Any:
        """Return a stored tensor of all slots, such as "w13", or a parameter by its path, such as "3.w1".

        Unlike `stored_tensors`, this does not copy the values of replaced parameters into the stored tensor first.
        Stored tensors are looked up without the walk through submodules of `nn.Module`, which would cost host time in
        each call.
        """
        found = self._parameters.get(target)
        if found is not None:
            return found
        present = self._present
        if target in present:
            return present[target]
        return super().get_parameter(target)

    def __getattr__(self, name: str) -> Any:
        """Return a stored tensor by its name, as `get_parameter` does."""
        own = self.__dict__
        if own.get("has_expert_parameters") and name in (present := own.get("_joined") or own.get("_slots", {})):
            return present[name]
        return super().__getattr__(name)

    def forward(self, compute: Callable[..., Result], *arguments: Any) -> Result:
        """Run a kernel on the parameters.

        During `compute`, `stored_tensors` returns tensors that autograd connects to the parameters. Sharded parameters
        are gathered first: this is the module's forward, so FSDP2's hooks run before and after it.

        Args:
            compute: The function that runs the kernel.
            arguments: Its arguments.

        Returns:
            The result of `compute`.
        """
        out = self.run_with_tensors(self._join(), compute, *arguments)
        if self.sharded and isinstance(out, Tensor):  # a view would lose the backward hook that FSDP2 registers on it
            return cast("Result", torch.ops.aten._unsafe_view.default(out, out.shape))
        return out

    def run_with_tensors(self, stored: dict[str, Tensor], compute: Callable[..., Result], *arguments: Any) -> Result:
        """Run `compute` while `stored_tensors` returns `stored`."""
        own = self.__dict__  # setting an attribute of an nn.Module costs three Python calls
        before, own["_joined"] = self._joined, stored
        try:
            return compute(*arguments)
        finally:
            own["_joined"] = before

    def _join(self) -> dict[str, Tensor]:
        if not self.has_expert_parameters:  # no named parameters to connect
            return self._raw_tensors
        apart = not self._slots or torch.compiler.is_compiling()
        if not apart:
            self._reattach()
            apart = self._changes.count != self._seen  # parameters substituted for one call, such as by functional_call
        if apart or self.lora is not None:
            tensors = self._stacked() if apart else self._slots
            return self.gradient_sum.connect_tensors(tensors if self.lora is None else self.lora(tensors))
        if not torch.is_grad_enabled() or not self.any_requires_grad:
            return self._slots
        if self.main_grads is not None:
            return self.main_grads.connect_slots(self._slots)
        own = self._on_views if self._mesh is None else [local(parameter) for parameter in self._on_views]
        return self.gradient_sum.connect_parameters(self._slots, own)

    @property
    def any_requires_grad(self) -> bool:
        """Whether any parameter requires a gradient."""
        own = self.parameters() if self.lora is not None else self._on_views or self.parameters()
        return any(parameter.requires_grad for parameter in own)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's gradient: its `main_grad` if `use_main_grads` set a dtype, else its `grad`."""
        name = "grad" if self.main_grads is None else self.main_grads.attribute
        found: Tensor | None = getattr(parameter, name, None)
        return found

    def gradients(self) -> list[Tensor]:
        """Return the gradients of all parameters that have one."""
        return [found for p in self.parameters() if (found := self.gradient(p)) is not None]

    def _stacked(self) -> dict[str, Tensor]:
        """Return differentiable copies [L, ...] of the parameters, used where the slots do not hold their values."""
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
        """Make slots and parameters consistent before kernels read the slots.

        Values of replaced parameters are copied into the slots. If a stored tensor was replaced, parameters become
        views of the new one. An expert in several slots of this rank has parameters on its first slot only, which is
        copied to the others.
        """
        if self._last_addresses != self.addresses:
            rebind_parameters(self, lambda tensor: tensor)
        # DTensors are always checked one by one in `copy_parameters_to_slots`, which compares their local addresses
        moved = self._mesh is not None or list(map(Tensor.data_ptr, self._on_views)) != self._view_places
        if moved or self._changes.count != self._seen:
            copy_parameters_to_slots(self, moved=moved)
        for first, other in self.duplicate_slots:
            # written through `data`, which leaves the version of tensors that earlier calls saved for backward
            for tensor in self._slots.values():
                tensor.data[other].copy_(tensor.data[first])

    def replaced_problem(self) -> str | None:
        """Return why a replaced parameter cannot be used, or None."""
        if not self.has_expert_parameters:
            return stored_problem(self)
        if not self._slots:
            return None
        changed = self._changes.count != self._seen
        problem = tied_problem(self) if changed or self._tied else None
        return problem or (offloaded_problem(self) or substituted_problem(self) if changed else None)

    def lora_problem(self) -> str | None:
        """Return an error if matrices require gradients while LoRA factors exist, or None. Only factors are trained."""
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
        self._tied = len({*map(id, self._on_views)}) < len(views)
        self._seen = self._changes.count

    def _name_experts(self, *, requires_grad: bool) -> None:
        """Create the parameters by logical expert for the current map."""
        self.slots_of_expert: dict[int, list[int]] = {}
        for slot, expert in sorted(enumerate(self.local_experts), key=lambda at: at[1]):
            if expert != EMPTY:
                self.slots_of_expert.setdefault(expert, []).append(slot)
        # copied before each call, since versions do not show writes by fused optimizers or through `data`
        self.duplicate_slots = [(first, other) for first, *others in self.slots_of_expert.values() for other in others]
        views: list[tuple[nn.Parameter, Tensor]] = []
        self._set_views(views)
        if not self.has_expert_parameters:
            return
        self._last_addresses = self.addresses
        if self.etp.size > 1 and self.etp.group is not None and self._mesh is None and not self.is_meta:
            device = self._slots["w13"].device.type
            ranks = torch.tensor(self.etp.ranks, dtype=torch.int64, device="cpu")
            self._mesh = DeviceMesh.from_group(self.etp.group, device, mesh=ranks, mesh_dim_names=("etp",))
        modules: dict[str, Expert] = {}
        for expert, (first, *_) in self.slots_of_expert.items():
            module = Expert(self._changes)
            for name, tensor in self._slots.items():
                for part, view in split_parts(name, tensor[first], self.config.activation.gated).items():
                    parameter = etp_parameter(view, part, self._mesh, requires_grad)
                    module.register_parameter(part, parameter)
                    guard_optimizers(parameter, self)
                    views.append((parameter, view))
            modules[str(expert)] = module
        cast("ExpertModules", self._modules).hold(modules)
        self._set_views(views)

    def set_expert_map(self, expert_map: ExpertMap) -> None:
        """Change the expert map, without moving weights. Parameters are created anew for its logical experts."""
        assert self.lora is None, "factors do not move"
        self.expert_map, before = expert_map, dict(self.named_parameters())
        if self.main_grads is not None:
            self.main_grads.warn_of_move()
        learns = {name: parameter.requires_grad for name, parameter in before.items()}
        self._name_experts(requires_grad=any(learns.values()))
        if self.has_expert_parameters:
            kinds = {name.partition(".")[2] for name, wanted in learns.items() if wanted}
            # an arriving expert's parameter is trainable if any parameter with the same last name (w1, w2) was
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(learns.get(name, name.partition(".")[2] in kinds))
            mark_replaced_parameters(before.values(), self)
        if self.main_grads is not None:
            self.main_grads.lay_out()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn` to stored tensors and parameters. Quantized tensors change device only, never their dtype."""
        refuse_conversion(self, fn)
        if not self.scheme.plain:
            return self._move(fn, recurse)
        if not self._slots:
            super()._apply(fn, recurse)
            return self
        if self._changes.count != self._seen:
            attach_assigned_parameters(self)
        self._slots.update({name: fn(tensor) for name, tensor in self._slots.items()})
        self.anchor = torch.zeros(0, dtype=torch.float32, device=self.device, requires_grad=True)
        rebind_parameters(self, fn)
        if self.lora is not None:
            self.lora._apply(fn)
        return self

    @property
    def parameter_kinds(self) -> list[str]:
        """The last components of parameter names, such as "w1". The list is the same on all ranks."""
        kinds = part_names(self.names, self.config.activation.gated) if self.has_expert_parameters else list(self.names)
        return kinds if self.lora is None else [*kinds, *self.lora.kinds]

    def _of_experts(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of experts by name, without LoRA factors."""
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
        """Free the slots and give each parameter its own memory, for FSDP to shard over ranks with the same experts."""
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
        """The dtype of activations."""
        if not self._plain:
            return self._dtype
        found: torch.dtype = self._raw_tensors["w13"].dtype if self._raw_tensors else next(self.parameters()).dtype
        return found

    @property
    def device(self) -> torch.device:
        found: torch.device = self._raw_tensors["w13"].device if self._raw_tensors else self._device
        return found

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the stored tensors. They change when tensors are replaced, not when they are written."""
        return tuple([tensor.data_ptr() for tensor in self._present.values() if tensor is not None])

    @property
    def slots_are_current(self) -> bool:
        """Whether `refresh_slots` has nothing to copy. Kept short: it costs host time in each replayed call."""
        if not self._slots:
            return True
        if self._changes.count != self._seen:
            return False
        if self._mesh is not None or self.duplicate_slots:
            return False
        return list(map(Tensor.data_ptr, self._on_views)) == self._view_places

    def refresh_slots(self) -> tuple[int, ...]:
        """Copy values of replaced parameters, and of an expert's other slots, into the memory that kernels read.

        Call this before a replay of a CUDA graph.

        Returns:
            `addresses`, which is empty if parameters are sharded.
        """
        if self._slots:
            self._reattach()
        return self.addresses

    def version_key(self) -> tuple[int, ...]:
        """Call `refresh_slots`, and return a key that changes with each write to the weights on this rank.

        In-place writes and replaced parameters change it. Writes through a tensor's `data` do not.

        Returns:
            Addresses and versions of the tensors.
        """
        addresses = self.refresh_slots()
        seen = [*self._raw_tensors.values(), *(self._on_views if self._mesh is not None else ())]
        return (*addresses, *[0 if tensor.is_inference() else tensor._version for tensor in seen])

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The logical expert in each slot, -1 for an empty one."""
        return self.expert_map.local(self.ep_rank)[: self.num_slots]

    @property
    def is_meta(self) -> bool:
        return self.device.type == "meta"
