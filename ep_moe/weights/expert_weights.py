"""The expert weights of one rank.

Slots are stored in the layout of the kernel. Parameters and the state dict are named by logical expert and are in the
canonical layout. Canonical tensors of one whole expert in the `PLAIN` scheme, before it is split over etp:

    w13 [2I, H]  gate rows first, then up rows (as Hugging Face and vLLM); [I, H] without a gate
    w2  [H, I]
    w13_bias [2I], w2_bias [H] if the layer has biases; only etp rank 0 adds w2_bias

Quantized schemes add the tensors that `quant.schemes` names, such as `w13_scale`.

Parameters and saved tensors of the plain scheme hold the two halves of w13 separately, as w1 [I, H] (gate) and w3
[I, H] (up). An etp rank then holds one contiguous shard of each, which a distributed checkpoint can describe.
Initializers compute the right fan-in from the shape of each half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_moe.checks import as_id, shown
from ep_moe.errors import InputError
from ep_moe.quant.damaged import damaged, damaged_products
from ep_moe.quant.schemes import PLAIN
from ep_moe.types import dtype_name
from ep_moe.weights.data_parallel import refuse_data_parallel
from ep_moe.weights.full_state import unshare_storages
from ep_moe.weights.initial import initial_expert
from ep_moe.weights.layouts.base import WeightLayout
from ep_moe.weights.parts import etp_shard, full, join_etp_shards, part_names, parts_of, split_parts
from ep_moe.weights.slots import ExpertSlots

Result = TypeVar("Result")


class ExpertWeights(ExpertSlots):
    """The weights of this rank's slots: one tensor [L, ...] for each tensor that `weight_layout` stores.

    `state_dict` holds whole, canonical tensors of this rank's experts, named by logical id (`3.w1`). The union over
    ranks is a checkpoint that depends on neither placement nor kernel. With etp > 1, `state_dict` is collective over
    the etp group. `load_state_dict` takes any dict that contains at least this rank's experts, either quantized by the
    scheme or in floating point.

    Args:
        config: The layer's configuration.
        expert_map: The placement of experts.
        ep_rank: This rank in the EP group.
        ep: The EP group.
        etp: The ranks that share each expert.
        replicas: The ranks with the same slots in other EP groups.
        dtype: The dtype of activations and of tensors that are not quantized.
        scheme: How matrices are stored.
        weight_layout: The layout of the kernel that reads the weights. Default: canonical.
        trainable: Whether the kernel has a backward. If so, plain canonical weights are parameters by logical expert,
            such as `3.w1`, that are views of the memory that kernels read. Otherwise each stored tensor [L, ...] is one
            parameter, which is frozen unless `trainable` and the scheme is plain.
    """

    def __getattr__(self, name: str) -> Any:
        # torch.distributed.checkpoint resolves the keys of `state_dict` as attributes
        if name.isdigit() and not self.has_expert_parameters and int(name) in self.slots_of_expert:
            return SimpleNamespace(**self._parts(self.slot(self.slots_of_expert[int(name)][0])))
        return super().__getattr__(name)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters. Raise ConfigError for a `DistributedDataParallel` that would overwrite them."""
        if not recurse:  # as the wrapper asks each module
            refuse_data_parallel(self)
        return super().named_parameters(prefix, recurse, remove_duplicate)

    # --- reading -----------------------------------------------------------------------------------------------

    def dense(self, name: str) -> Tensor:
        """Return a matrix of all slots in the canonical layout.

        Args:
            name: "w13" or "w2".

        Returns:
            [L, rows, columns]. The stored tensor itself if it is plain and canonical, otherwise a copy, dequantized to
            `dtype`.
        """
        if self.scheme.plain and type(self.weight_layout) is WeightLayout:
            return self.stored_tensors()[name]
        slots = [self.slot(slot) for slot in range(self.num_slots)]
        whole = {part: torch.stack([tensors[part] for tensors in slots]) for part in self.names} if slots else {}
        if not whole:
            rows, columns = PLAIN.expert(self.config, self.dtype, self.etp.size)[name].shape
            return torch.empty(0, rows, columns, dtype=self.dtype, device=self.device)
        return self.scheme.dequantize(whole, name).to(self.dtype)

    def slot_tensors(self) -> dict[str, Tensor]:
        """Return all tensors that move with an expert: every stored tensor and buffer, including scales.

        Returns:
            Tensors [L, ...] by name, in the kernel's layout.

        Raises:
            AssertionError: The first dimension of a registered tensor is not the number of slots.
        """
        found = dict([*self.stored_tensors().items(), *self.named_buffers()])
        odd = [name for name, tensor in found.items() if tensor.dim() == 0 or len(tensor) != self.num_slots]
        assert not odd, f"{odd} of ExpertWeights are not [{self.num_slots} slots, ...]"
        return {name: found[name].detach() for name in sorted(found)}

    def slot(self, slot: int) -> dict[str, Tensor]:
        """Return the canonical tensors of one slot."""
        return self.weight_layout.restore(
            {name: tensor.detach()[slot] for name, tensor in self.stored_tensors().items()}
        )

    @property
    def adds_output_bias(self) -> bool:
        """Whether this rank adds w2_bias. Outputs are summed over etp, so only etp rank 0 does."""
        return self.etp.rank == 0

    # --- writing -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw matrices uniformly in +-1/sqrt(fan in), as `nn.Linear` does, set biases to zero, and quantize.

        An expert's values depend on the state of torch's default CPU generator and on its logical id. With the same
        seed, the model is the same under every layout and map, and replicas of an expert are equal.
        """
        self.updates += 1
        if self.is_meta:
            return
        for tensor in self.stored_tensors().values():
            tensor.zero_()
        seeds = torch.randint(2**62, (self.config.num_experts,), device="cpu").tolist()
        for expert, slots in self.slots_of_expert.items():
            whole = initial_expert(self.config, self.scheme, self._dtype, seeds[expert], self.device)
            self.write(slots, self._etp_shards(whole))

    def _etp_shards(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        size, rank = self.etp.size, self.etp.rank
        return {name: etp_shard(self.config, name, tensor, size, rank) for name, tensor in tensors.items()}

    @torch.no_grad()
    def update_expert(self, logical_id: int, tensors: Mapping[str, Tensor]) -> int:
        """Write an expert's whole tensors into every slot of this rank that holds it.

        Not collective, but call it with the same tensors on all ranks.

        Args:
            logical_id: The expert.
            tensors: Some or all of its whole canonical tensors. In a quantized layer, a matrix may be floating point.
                It is quantized before it is split over etp, so that all etp ranks use the scales of the whole matrix.

        Returns:
            The number of slots written on this rank.

        Raises:
            InputError: See `MoELayer.update_expert`. Raised on this rank only.
        """
        if self.is_meta:
            raise InputError("the layer is on the meta device; call to_empty(device=...) before update_expert")
        if self.has_expert_parameters and not self._slots:
            raise InputError("expert parameters are sharded by fully_shard; load them with load_state_dict")
        expert = as_id(logical_id)
        if expert is None or not 0 <= expert < self.config.num_experts:
            raise InputError(
                f"logical_id must be an integer in [0, {self.config.num_experts}), got {shown(logical_id)}"
            )
        logical_id = expert
        self._check_expert(logical_id, tensors)
        self.updates += 1
        slots = self.slots_of_expert.get(int(logical_id), [])
        if slots:
            numbers = {name: tensors[name].to(self.device) for name in tensors if self._is_numbers(name, tensors[name])}
            codes = {name: tensor for name, tensor in tensors.items() if name not in numbers}
            self.write(slots, self._etp_shards(codes | self.scheme.quantize(numbers, self._dtype)))
        return len(slots)

    def _is_numbers(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor is a floating-point matrix that this layer must quantize."""
        return not self.scheme.plain and name in ("w13", "w2") and tensor.is_floating_point() and tensor.itemsize > 1

    @torch.no_grad()
    def write(self, slots: list[int], pieces: Mapping[str, Tensor]) -> None:
        """Write this etp rank's shards of some or all of an expert's canonical tensors into `slots`."""
        specs = self.weight_layout.canonical
        canonical = {
            name: piece.to(self.device, self.dtype if self.scheme.plain else specs[name].dtype)
            for name, piece in pieces.items()
        }
        if canonical.keys() != self.weight_layout.canonical.keys():
            canonical = self.slot(slots[0]) | canonical  # a stored tensor may depend on several canonical ones
        stored = self.stored_tensors()
        for name, tensor in self.weight_layout.prepare(canonical).items():
            for slot in slots:
                stored[name][slot].copy_(tensor)

    def _check_expert(self, logical_id: int, tensors: Mapping[str, Tensor]) -> None:
        specs = self.scheme.expert(self.config, self._dtype)
        for name, tensor in tensors.items():
            if name not in specs:
                raise InputError(f"expert {logical_id} has no tensor {name!r}; it has {', '.join(specs)}")
            if not isinstance(tensor, Tensor):
                raise InputError(f"expert {logical_id}: {name} must be a Tensor, got {type(tensor).__name__}")
            if tensor.layout is not torch.strided or tensor.is_meta:
                what = "on the meta device" if tensor.is_meta else str(tensor.layout)
                raise InputError(f"expert {logical_id}: {name} must be a dense tensor with numbers, got one {what}")
            numbers = self._is_numbers(name, tensor)
            spec = PLAIN.expert(self.config, self._dtype)[name] if numbers else specs[name]
            shape, dtype = spec.shape, spec.dtype
            if tuple(tensor.shape) != shape:
                raise InputError(f"expert {logical_id}: {name} must be {list(shape)}, got {list(tensor.shape)}")
            # floating-point values may be rounded to the layer's dtype; codes and scales must have the scheme's dtype
            if self.scheme.plain or name.endswith("_bias"):
                _refuse_codes(logical_id, name, tensor, dtype)
            elif numbers:
                codes = sorted(other for other in tensors if other in (f"{name}_scale", f"{name}_global_scale"))
                if codes:
                    raise InputError(
                        f"expert {logical_id}: {name} has values in {dtype_name(tensor.dtype)}, and {codes[0]} "
                        "belongs to codes; give the values alone, or codes with their scales"
                    )
                if not bool(tensor.isfinite().all()):
                    raise InputError(f"expert {logical_id}: {name} must be finite to be quantized")
            elif tensor.dtype != dtype:
                raise InputError(
                    f"expert {logical_id}: {name} must be {dtype_name(dtype)} under quantization={self.scheme.name}, "
                    f"got {dtype_name(tensor.dtype)}; give numbers, which are quantized here, or codes of the scheme"
                )
            elif name in ("w13", "w2"):
                scales = [other for other in (f"{name}_scale", f"{name}_global_scale") if other in specs]
                missing = [other for other in scales if other not in tensors]
                if missing:
                    raise InputError(
                        f"expert {logical_id}: {name} has codes, and their scale {missing[0]} is missing; give "
                        f"{' and '.join([name, *scales])} in one call, or numbers"
                    )
            if not self.scheme.plain and not numbers and (wrong := damaged(name, tensor)) is not None:
                raise InputError(f"expert {logical_id}: {wrong}")
        for name in () if self.scheme.plain else sorted(tensors.keys() & {"w13", "w2"}):
            if self._is_numbers(name, tensors[name]):
                continue
            if (wrong := damaged_products(name, tensors, self.scheme.weights)) is not None:
                raise InputError(f"expert {logical_id}: {wrong}")

    # --- saving and loading ------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_slot(self, slot: int) -> dict[str, Tensor]:
        """Return a slot's whole canonical tensors. Collective over the etp group, and over FSDP2's mesh if sharded."""
        if self.has_expert_parameters and not self._slots:
            module, gated = self._modules[str(self.local_experts[slot])], self.config.activation.gated
            assert module is not None
            parts = {name: full(parameter) for name, parameter in module.named_parameters()}
            return {name: torch.cat([parts[part] for part in parts_of(name, gated)]) for name in self.names}
        return {name: self._join_pieces(name, piece) for name, piece in self.slot(slot).items()}

    def _join_pieces(self, name: str, piece: Tensor) -> Tensor:
        if self.etp.size == 1:
            return piece
        wire = piece.contiguous().view(torch.uint8) if piece.dtype.itemsize == 1 else piece.contiguous()
        pieces = [torch.empty_like(wire) for _ in range(self.etp.size)]
        with self.etp.flight_recorder.step(
            "gather an expert over etp", counted=False
        ):  # not counted: ranks hold different numbers of experts, so the number of these calls differs
            dist.all_gather(pieces, wire, group=self.etp.group)
        return join_etp_shards(self.config, name, [part.view(piece.dtype) for part in pieces])

    @property
    def saved_names(self) -> list[str]:
        """Names of an expert's tensors in `state_dict`: of parameters (w1, w3) if plain, else canonical (w13)."""
        return part_names(self.names, self.config.activation.gated) if self.scheme.plain else list(self.names)

    def _parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename canonical tensors to `saved_names`; splits w13 into w1 and w3 in the plain scheme."""
        if not self.scheme.plain:
            return dict(tensors)
        gated = self.config.activation.gated
        return {part: view for name, t in tensors.items() for part, view in split_parts(name, t, gated).items()}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.etp.size > 1 and self.slots_of_expert and (self._slots or not self.has_expert_parameters):
            self.etp.flight_recorder.monitored_barrier(
                f"{prefix}state_dict", self.etp.ranks, "state_dict() of a layer with etp > 1"
            )
        for expert, slots in self.slots_of_expert.items():
            if self.has_expert_parameters and (self.etp.size == 1 or not self._slots):
                module = self._modules[str(expert)]
                assert module is not None
                found: dict[str, Tensor] = dict(module.named_parameters())
            else:
                found = self._parts(self.gather_slot(slots[0]))
            for name, tensor in found.items() if keep_vars else unshare_storages(found).items():
                destination[f"{prefix}{expert}.{name}"] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self.is_meta:
            error_msgs.append(
                f"{prefix.rstrip('.')} is on the meta device; call to_empty(device=...) before load_state_dict"
            )
            return
        self.updates += 1  # also on ranks without experts, so that the count is equal on all ranks
        names = {*self.saved_names, *self.names, *self._number_names}
        known = {f"{prefix}{e}.{name}" for e in range(self.config.num_experts) for name in names}
        factors = () if self.lora is None else self.lora.kinds
        known |= {f"{prefix}lora.{e}.{name}" for e in range(self.config.num_experts) for name in factors}
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]
        for expert in self.slots_of_expert:
            own = {name: state_dict[key] for name in names if (key := f"{prefix}{expert}.{name}") in state_dict}
            odd = {name: value for name, value in own.items() if not isinstance(value, Tensor)}
            error_msgs += [f"{prefix}{expert}.{n} must be a Tensor, got {type(v).__name__}" for n, v in odd.items()]
            if odd:
                continue
            missing_keys += [f"{prefix}{expert}.{name}" for name in self._missing(own)]
            try:
                self._load_expert(expert, own)
            except (InputError, RuntimeError) as error:
                error_msgs.append(str(error))

    @property
    def _number_names(self) -> list[str]:
        """Names of an expert's tensors in the state dict of a layer that is not quantized."""
        names = tuple(PLAIN.expert(self.config, self._dtype))
        return part_names(names, self.config.activation.gated)

    def _missing(self, found: Mapping[str, Tensor]) -> list[str]:
        """Return the names of an expert's tensors that `found` lacks.

        A floating-point matrix replaces the codes and scales that it is quantized to.
        """
        gated, plain = self.config.activation.gated, self.scheme.plain
        given = {name for name in ("w13", "w2") if not plain and self._has_numbers(name, found)}
        made = {f"{name}{part}" for name in given for part in ("", "_scale", "_global_scale")}
        missing = []
        for name in self.names:
            if name not in found and name not in made:
                parts = parts_of(name, gated) if plain or name.endswith("_bias") else (name,)
                missing += [part for part in parts if part not in found]
        return missing

    def _has_numbers(self, name: str, found: Mapping[str, Tensor]) -> bool:
        if name in found:
            return self._is_numbers(name, found[name])
        return all(part in found for part in parts_of(name, self.config.activation.gated))

    @torch.no_grad()
    def _load_expert(self, expert: int, found: Mapping[str, Tensor]) -> None:
        """Load an expert from `found`, by parameter names (w1) or canonical names (w13), which take precedence."""
        if self.has_expert_parameters and not self._slots:
            parts = {**found, **self._parts({name: found[name] for name in self.names if name in found})}
            module = self._modules[str(expert)]
            assert module is not None
            for name, parameter in module.named_parameters():
                if name in parts:
                    if parts[name].shape != parameter.shape:  # `copy_` would broadcast
                        raise InputError(
                            f"expert {expert}: {name} must be {list(parameter.shape)}, got {list(parts[name].shape)}"
                        )
                    _refuse_codes(expert, name, parts[name], parameter.dtype)
                    _copy_into(parameter, parts[name])
            return
        whole, specs = {}, PLAIN.expert(self.config, self._dtype)
        for name in self.names:
            parts_here = parts_of(name, self.config.activation.gated) if name in specs else ()
            if name in found:
                whole[name] = full(found[name])
            elif any(part in found for part in parts_here):
                rows, *columns = specs[name].shape
                shape = [rows // len(parts_here), *columns]
                halves = []
                for part in parts_here:
                    half = full(found[part]) if part in found else self._own_half(expert, name, part, shape)
                    if list(half.shape) != shape:
                        raise InputError(f"expert {expert}: {part} must be {shape}, got {list(half.shape)}")
                    halves.append(half.to(self.device))
                whole[name] = torch.cat(halves)
        for name in whole:
            matrix, _, kind = name.partition("_")
            if kind in ("scale", "global_scale") and matrix not in whole:
                raise InputError(
                    f"expert {expert}: {name} belongs to codes of its own, and {matrix} is missing; give {matrix} too, "
                    f"or leave out its scales"
                )
        self.update_expert(expert, whole)

    def _own_half(self, expert: int, name: str, part: str, shape: list[int]) -> Tensor:
        """Return the half of w13 that a state dict lacks: this etp rank's current rows, placed in a whole half."""
        if not self.scheme.plain and not name.endswith("_bias"):
            raise InputError(
                f"expert {expert}: {part} is missing, and {name} is quantized as a whole; give both halves"
            )
        kept = split_parts(name, self.slot(self.slots_of_expert[expert][0])[name], self.config.activation.gated)[part]
        half = kept.new_zeros(shape)
        half.chunk(self.etp.size)[self.etp.rank].copy_(kept)
        return half

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"  # without one line for each expert's module

    def extra_repr(self) -> str:
        plain = self.scheme.plain
        shapes = [
            f"{name} {list(tensor.shape)}" + ("" if plain else f" {dtype_name(tensor.dtype)}")
            for name, tensor in self.stored_tensors().items()
        ]
        return f"{', '.join(shapes)}, experts {list(self.local_experts)}"


def _refuse_codes(expert: int, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise InputError if a tensor holds codes instead of floating-point values. dtype: the destination's"""
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        raise InputError(
            f"expert {expert}: {name} must be numbers that are rounded to {dtype_name(dtype)}, got "
            f"{dtype_name(tensor.dtype)}; multiply codes by their scales first"
        )


def _copy_into(parameter: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, or a DTensor, into a parameter that may be a DTensor. Not collective for whole tensors."""
    if hasattr(parameter, "placements") and not hasattr(value, "placements"):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        value = distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
    parameter.copy_(value)
