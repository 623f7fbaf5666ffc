"""Expert weights of one rank: parameters per slot in its kernel's layout, a state dict per logical expert in ours.

Canonical, of one whole expert (all of it where etp = 1; `PLAIN` scheme; other schemes have the parts that
`weights.schemes` names, such as `w13_scale`):

    w13 [2I, H]  gate rows first, then up rows (as Hugging Face and vLLM); [I, H] without a gate
    w2  [H, I]
    w13_bias [2I], w2_bias [H] where the layer has them; w2_bias is added by etp rank 0 alone
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_moe.config import MoEConfig
from ep_moe.errors import ConfigError, InputError
from ep_moe.parallel.link import Link
from ep_moe.placement.expert_map import EMPTY, ExpertMap
from ep_moe.types import dtype_name
from ep_moe.weights.prepare import Preparation
from ep_moe.weights.schemes import PLAIN, Scheme


def expert_shapes(config: MoEConfig, scheme: Scheme = PLAIN) -> dict[str, tuple[int, ...]]:
    """Shapes of one whole expert's tensors, by canonical name."""
    return {name: spec.shape for name, spec in scheme.expert(config, torch.float32).items()}


def cut_dim(name: str, dims: int) -> int | None:
    """Which dimension of an expert's tensor is cut over etp; None: not at all."""
    if dims == 0 or name == "w2_bias":
        return None
    return 0 if name.startswith("w13") else 1


def cut(config: MoEConfig, name: str, tensor: Tensor, etp: int, etp_rank: int) -> Tensor:
    """The etp rank's piece of a whole expert's tensor; gate and up are cut alike, so that a piece has both."""
    dim = cut_dim(name, tensor.dim())
    if etp == 1 or dim is None:
        return tensor
    halves = tensor.chunk(2, dim) if name.startswith("w13") and config.activation.gated else (tensor,)
    return torch.cat([half.chunk(etp, dim)[etp_rank] for half in halves], dim)


def join(config: MoEConfig, name: str, pieces: list[Tensor]) -> Tensor:
    """The inverse of `cut`: all etp ranks' pieces in order to the whole tensor. What is not cut is etp rank 0's: it
    alone uses w2_bias, and alone trains it."""
    dim = cut_dim(name, pieces[0].dim())
    if len(pieces) == 1 or dim is None:
        return pieces[0]
    if name.startswith("w13") and config.activation.gated:
        gates, ups = zip(*(piece.chunk(2, dim) for piece in pieces), strict=True)
        return torch.cat([*gates, *ups], dim)
    return torch.cat(pieces, dim)


class ExpertWeights(nn.Module):
    """The parameters of this rank's slots: one [L, ...] per tensor that `preparation` stores.

    scheme: how the numbers are stored; preparation: in what layout, by the kernel that reads them (default canonical)
    trainable: whether floating-point parameters require gradients; quantised ones never do
    dtype: of the activations, and of what is not quantised

    `state_dict` has the keys `{logical id}.w13` and so on, whole canonical tensors, each expert on the rank that owns
    its first replica: the union over ranks is a checkpoint that depends on no placement and no kernel. With etp > 1 it
    is collective over the etp group. `load_state_dict` takes any dict that has (at least) this rank's experts.
    """

    def __init__(
        self,
        config: MoEConfig,
        expert_map: ExpertMap,
        *,
        ep_rank: int = 0,
        etp: Link | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        scheme: Scheme = PLAIN,
        preparation: Callable[[MoEConfig, Scheme, torch.dtype, int], Preparation] = Preparation,
        trainable: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.expert_map = expert_map
        self.ep_rank = ep_rank
        self.etp = etp or Link.alone()
        self.scheme = scheme
        if config.intermediate_size % self.etp.size:
            raise ConfigError(
                f"ParallelConfig.etp must divide MoEConfig.intermediate_size, got etp={self.etp.size}, "
                f"intermediate_size={config.intermediate_size}"
            )
        problem = scheme.problem(config, self.etp.size)
        if problem is not None:
            raise ConfigError(problem)
        self.num_slots = expert_map.num_slots(ep_rank)
        self.updates = 0  # calls that may have written weights, alike on all ranks
        self._dtype = dtype or torch.get_default_dtype()
        self.preparation = preparation(config, scheme, self._dtype, self.etp.size)
        self.names = tuple(self.preparation.canonical)
        for name, spec in self.preparation.specs().items():
            data = torch.zeros(self.num_slots, *spec.shape, dtype=spec.dtype, device=device)
            self.register_parameter(name, nn.Parameter(data, requires_grad=trainable and scheme.plain))
        self.reset_parameters()

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        return self.get_parameter("w13").dtype if self.scheme.plain else self._dtype

    @property
    def device(self) -> torch.device:
        return self.get_parameter("w13").device

    def get_parameter(self, target: str) -> nn.Parameter:
        """As any module's; without its walk through submodules, which layers would pay for at each call."""
        found = self._parameters.get(target)
        return super().get_parameter(target) if found is None else found

    @property
    def place(self) -> tuple[int, ...]:
        """Addresses of all that kernels read: other ones once tensors are replaced, the same while they are written."""
        return tuple([tensor.data_ptr() for tensor in self._parameters.values() if tensor is not None])

    def stored(self, name: str) -> Tensor | None:
        """A stored tensor of all slots [L, ...], None where the layer has none of that name."""
        return self._parameters.get(name)

    def dense(self, name: str) -> Tensor:
        """w13 or w2 of all slots [L, rows, columns] in the canonical layout: the parameter itself where it is plain and
        canonical, dequantised to `dtype` otherwise."""
        if self.scheme.plain and type(self.preparation) is Preparation:
            return self.get_parameter(name)
        slots = [self.slot(slot) for slot in range(self.num_slots)]
        whole = {part: torch.stack([tensors[part] for tensors in slots]) for part in self.names} if slots else {}
        if not whole:
            rows, columns = PLAIN.expert(self.config, self.dtype, self.etp.size)[name].shape
            return torch.empty(0, rows, columns, dtype=self.dtype, device=self.get_parameter("w13").device)
        return self.scheme.dequantize(whole, name).to(self.dtype)

    def slot_tensors(self) -> dict[str, Tensor]:
        """Everything that belongs to slots, [L, ...] each, in the kernel's layout: what moves when an expert moves. All
        that is registered, so that no scale can be forgotten; a tensor that is not per slot has no place here."""
        found = dict([*self.named_parameters(), *self.named_buffers()])
        odd = [name for name, tensor in found.items() if tensor.dim() == 0 or len(tensor) != self.num_slots]
        assert not odd, f"{odd} of ExpertWeights are not [{self.num_slots} slots, ...]"
        return {name: found[name].detach() for name in sorted(found)}

    def slot(self, slot: int) -> dict[str, Tensor]:
        """One slot's canonical tensors."""
        return self.preparation.restore({name: p.detach()[slot] for name, p in self.named_parameters()})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertWeights:
        """`.to(dtype)` would turn quantised numbers and their scales into something else: only the device changes."""
        if self.scheme.plain:
            super()._apply(fn, recurse)
            return self
        wanted = fn(torch.empty(0, dtype=self._dtype, device=self.get_parameter("w13").device)).dtype
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

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The logical expert in each slot, -1 for an empty one."""
        return self.expert_map.local(self.ep_rank)[: self.num_slots]

    @property
    def is_meta(self) -> bool:
        return self.get_parameter("w13").is_meta

    @property
    def adds_output_bias(self) -> bool:
        """Outputs are summed over etp: one rank of it adds w2_bias."""
        return self.etp.rank == 0

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan in), as `nn.Linear`, in the canonical as in any kernel's order of rows; biases zero.
        Replicas differ until weights are loaded. Quantised numbers become zero: they are loaded, not trained."""
        self.updates += 1
        for parameter in self.parameters():
            parameter.zero_()
        if not self.scheme.plain:
            return
        for name, fan_in in (("w13", self.config.hidden_size), ("w2", self.config.intermediate_size)):
            bound = 1 / math.sqrt(fan_in)
            self.get_parameter(name).uniform_(-bound, bound)

    @torch.no_grad()
    def update_expert(self, logical_id: int, tensors: Mapping[str, Tensor]) -> int:
        """Write an expert's whole tensors (some or all of them) into every slot that holds it here.

        Local: call it on all ranks with the same tensors. Returns the number of slots written on this rank.
        """
        if self.is_meta:
            raise InputError("the layer is on the meta device; call to_empty(device=...) before update_expert")
        if not isinstance(logical_id, SupportsIndex) or not 0 <= logical_id < self.config.num_experts:
            raise InputError(f"logical_id must be an integer in [0, {self.config.num_experts}), got {logical_id!r}")
        self._check_expert(logical_id, tensors)
        self.updates += 1
        slots = [slot for slot, expert in enumerate(self.local_experts) if expert == logical_id]
        if slots:
            size, rank = self.etp.size, self.etp.rank
            self.write(slots, {name: cut(self.config, name, tensor, size, rank) for name, tensor in tensors.items()})
        return len(slots)

    @torch.no_grad()
    def write(self, slots: list[int], pieces: Mapping[str, Tensor]) -> None:
        """Write an expert's canonical tensors (some or all of them), cut to this etp rank, into `slots`."""
        device, specs = self.get_parameter("w13").device, self.preparation.canonical
        canonical = {
            name: piece.to(device, self.dtype if self.scheme.plain else specs[name].dtype)
            for name, piece in pieces.items()
        }
        if canonical.keys() != self.preparation.canonical.keys():
            canonical = self.slot(slots[0]) | canonical  # a kernel's tensor may be made of several of ours
        for name, tensor in self.preparation.prepare(canonical).items():
            for slot in slots:
                self.get_parameter(name)[slot].copy_(tensor)

    def _check_expert(self, logical_id: int, tensors: Mapping[str, Tensor]) -> None:
        specs = self.scheme.expert(self.config, self._dtype)
        for name, tensor in tensors.items():
            if name not in specs:
                raise InputError(f"expert {logical_id} has no tensor {name!r}; it has {', '.join(specs)}")
            if not isinstance(tensor, Tensor):
                raise InputError(f"expert {logical_id}: {name} must be a Tensor, got {type(tensor).__name__}")
            shape, dtype = specs[name].shape, specs[name].dtype
            if tuple(tensor.shape) != shape:
                raise InputError(f"expert {logical_id}: {name} must be {list(shape)}, got {list(tensor.shape)}")
            # numbers may be rounded to the layer's dtype; codes and their scales mean nothing in another
            if self.scheme.plain or name.endswith("_bias"):
                if not tensor.is_floating_point() or tensor.itemsize == 1:
                    raise InputError(
                        f"expert {logical_id}: {name} must be numbers that are rounded to {dtype_name(dtype)}, got "
                        f"{dtype_name(tensor.dtype)}; multiply codes by their scales first"
                    )
            elif tensor.dtype != dtype:
                raise InputError(
                    f"expert {logical_id}: {name} must be {dtype_name(dtype)} under quantization={self.scheme.name}, "
                    f"got {dtype_name(tensor.dtype)}; quantize it with ep_moe.weights.schemes first"
                )

    @torch.no_grad()
    def whole(self, slot: int) -> dict[str, Tensor]:
        """A slot's whole canonical tensors. Collective over the etp group."""
        return {name: self._join(name, piece) for name, piece in self.slot(slot).items()}

    def _join(self, name: str, piece: Tensor) -> Tensor:
        if self.etp.size == 1:
            return piece
        wire = piece.contiguous().view(torch.uint8) if piece.dtype.itemsize == 1 else piece.contiguous()
        pieces = [torch.empty_like(wire) for _ in range(self.etp.size)]
        with self.etp.ledger.step("gather an expert over etp", counted=False):  # ranks differ in how many they hold
            dist.all_gather(pieces, wire, group=self.etp.group)
        return join(self.config, name, [part.view(piece.dtype) for part in pieces])

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        first_slot = self.ep_rank * self.expert_map.cap
        for expert, physical in sorted(
            (expert, first_slot + slot) for slot, expert in enumerate(self.local_experts) if expert != EMPTY
        ):
            if self.expert_map.logical_to_physical[expert][0] == physical:
                for name, tensor in self.whole(physical - first_slot).items():
                    destination[f"{prefix}{expert}.{name}"] = tensor

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
        self.updates += 1  # also where this rank has no experts
        known = {f"{prefix}{e}.{name}" for e in range(self.config.num_experts) for name in self.names}
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]
        for expert in sorted(set(self.local_experts) - {EMPTY}):
            keys = {name: f"{prefix}{expert}.{name}" for name in self.names}
            missing_keys += [key for key in keys.values() if key not in state_dict]
            tensors = {name: state_dict[key] for name, key in keys.items() if key in state_dict}
            try:
                self.update_expert(expert, tensors)
            except InputError as error:
                error_msgs.append(str(error))

    def extra_repr(self) -> str:
        plain = self.scheme.plain
        shapes = [
            f"{name} {list(p.shape)}" + ("" if plain else f" {dtype_name(p.dtype)}")
            for name, p in self.named_parameters()
        ]
        return f"{', '.join(shapes)}, experts {list(self.local_experts)}"
