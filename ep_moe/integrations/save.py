"""Saves a model with expert-parallel layers as a checkpoint that transformers loads. One rank writes it.

The other ranks send it the experts of one layer at a time, so no rank ever holds the experts of all layers.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from ep_moe.checkpoint.model_files import swapped
from ep_moe.checkpoint.model_names import ModuleLayout
from ep_moe.checkpoint.source import INDEX, SINGLE
from ep_moe.errors import CheckpointError, ConfigError, PeerTimeout
from ep_moe.layer import MoELayer
from ep_moe.parallel.rank_group import barrier

_LONGEST_S = 86400.0  # longest time that the other ranks wait for the writing rank
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True)
class LayerWithLayout:
    """A layer, and the layout of its experts in transformers' module.

    name: transformers' name of the module of experts
    kept: what else that module holds
    """

    name: str
    layer: MoELayer
    layout: ModuleLayout
    kept: Mapping[str, nn.Module | nn.Parameter] = field(default_factory=dict)

    def sizes(self) -> dict[str, Tensor]:
        """Return meta tensors of one expert in the module's layout, by parameter name. They have shapes and dtypes."""
        config, dtype = self.layer.config, self.layer.expert_weights.dtype
        sizes: dict[str, tuple[int, ...]] = {
            "w13": (config.w13_rows, config.hidden_size),
            "w2": (config.hidden_size, config.intermediate_size),
        }
        sizes |= {"w13_bias": (config.w13_rows,), "w2_bias": (config.hidden_size,)} if config.expert_bias else {}
        return self.layout.from_canonical(
            {name: torch.empty(size, dtype=dtype, device="meta") for name, size in sizes.items()}
        )

    def joined(self, stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert stacked tensors of experts, [E, ...] by parameter name, to the module's parameters by full name."""
        layouts = {each.name: each for each in self.layout.tensors}
        return {f"{self.name}.{name}": layouts[name].join(tensor) for name, tensor in stacked.items()}

    def stand_in(self) -> nn.Module:
        """Return a module with the parameters of all experts on the meta device, and with what is kept."""
        module, sizes = nn.Module(), self.sizes()
        for layout in self.layout.tensors:
            one = sizes[layout.name]
            put_tensor(module, layout.name, layout.join(one.new_empty((self.layout.experts, *one.shape))))
        for name, each in self.kept.items():
            setattr(module, name, each)
        return module


@dataclass(frozen=True)
class ModelParts:
    """A model with expert-parallel layers, seen as transformers' own model.

    experts: of all layers, in the model's order
    places: by name, the modules that `swapped` puts into the model to show it as transformers': parameters have
        transformers' names; those of experts are on the meta device, all others are live
    """

    model: Any
    experts: list[LayerWithLayout]
    places: dict[str, nn.Module]

    def rest(self) -> dict[str, Tensor]:
        """Return all tensors outside the experts by transformers' names. They are the model's own memory."""
        of_experts = {f"{one.name}.{each}" for one in self.experts for each in one.layout.names}
        with swapped(self.model, self.places):
            return {name: tensor for name, tensor in self.model.state_dict().items() if name not in of_experts}


def put_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a tensor as a frozen parameter under a dotted name. Missing inner modules are created."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, nn.Parameter(tensor, requires_grad=False))


def save_model(parts: ModelParts, folder: Path, *, original: bool, shard_bytes: int) -> None:
    """Write a model's configuration and weights. Called by all ranks of the layers' context.

    Args:
        parts: The parts of the model.
        folder: Created if it is missing. An earlier checkpoint in it is replaced.
        original: Use the tensor names of the model's published checkpoints, else those of its modules.
        shard_bytes: The largest size of a file. A single larger tensor gets a file of its own.

    Raises:
        ConfigError: The layers are quantized, divided over pipeline stages, or sharded by FSDP2.
        CheckpointError: On all ranks, if the writing rank fails.
    """
    model, experts = parts.model, parts.experts
    context = experts[0].layer.context
    check_plain(experts, "save_pretrained")
    warn_of_differences(experts, "save_pretrained")
    rest = parts.rest()
    _check_whole(rest)
    writer = _Writer(folder, shard_bytes) if context.layout.place == 0 else None
    problem: Exception | None = None
    try:
        with swapped(model, parts.places):
            if writer is not None:
                problem = _tried(lambda: _write(writer, model, untied(model, rest), original))
            for _, group in groupby(experts, _decoder_layer):
                whole = dict[str, Tensor]()
                for one in group:  # transformers joins the experts for text and for images of a layer (ERNIE 4.5 VL)
                    whole |= _gathered(one)
                if writer is not None and problem is None:
                    problem = _tried(partial(_write, writer, model, whole, original))
        if writer is not None and problem is None:
            problem = _tried(lambda: writer.close(model))
    except PeerTimeout:
        raise
    except Exception as error:
        problem = error
    if writer is not None:
        writer.remove_unfinished()
    context.consensus.raise_on_all_ranks("save", problem, deadline_s=_LONGEST_S)
    stage = context.rank_groups["stage"]
    if stage.size > 1:  # ranks of other EP groups return after the files are complete
        with stage.flight_recorder.step("wait for the checkpoint", more_s=_LONGEST_S):
            barrier(context.device, stage.group)


def check_plain(experts: list[LayerWithLayout], call: str) -> None:
    """Raise ConfigError, on all ranks, if `call` cannot gather whole experts of these layers."""
    layout = experts[0].layer.context.layout
    if layout.pp > 1:
        raise ConfigError(f"ParallelConfig.pp must be 1 for {call}, got {layout.pp}; save state_dict()")
    for one in experts:
        here, there = one.layer.expert_weights.device, one.layer.context.device
        if layout.ep * layout.etp > 1 and here.type != there.type:
            raise ConfigError(
                f"{one.layer.name} is on {here} and its EPContext on {there}, where experts travel between ranks; call "
                f"model.to({str(there)!r}) before {call}"
            )
        if one.layer.expert_weights.lora is not None:
            raise ConfigError(
                f"the experts have LoRA factors, which {call} would leave out; call "
                f"ep_moe.integrations.lora.save_lora(model, folder), or merge_lora(model) first"
            )
        scheme = one.layer.expert_weights.scheme
        if not scheme.plain:
            raise ConfigError(
                f"quantization must be none for {call}, got {scheme.name} in {one.layer.name}; keep the "
                f"checkpoint that the model was loaded from, or save state_dict() on every rank"
            )


def warn_of_differences(experts: list[LayerWithLayout], call: str) -> None:
    """Warn on all ranks if their weights are inconsistent. Collective.

    Either ranks hold different values where they should be equal, and `call` gives those of one rank. Or experts were
    mixed, such as by an average over ranks that hold different experts.
    """
    for one in experts:
        found = one.layer._checks.difference(one.layer)
        if found is not None:
            warnings.warn(f"{call} continues, but its weights are wrong: {found}", UserWarning, stacklevel=4)


def _tried(act: Callable[[], None]) -> Exception | None:
    """Run `act` and return its exception. The peers still send their experts, so the caller raises it at the end."""
    try:
        act()
    except Exception as error:
        return error if isinstance(error, ConfigError) else CheckpointError(f"the model cannot be saved: {error}")
    return None


def _check_whole(tensors: dict[str, Tensor]) -> None:
    """Raise ConfigError, on all ranks, if a tensor is a DTensor: FSDP2 has sharded it, so no rank holds it whole."""
    sharded = [name for name, tensor in tensors.items() if hasattr(tensor, "full_tensor")]
    if sharded:
        raise ConfigError(
            f"{sharded[0]} is sharded over ranks, and save_pretrained writes whole tensors; gather it, or use "
            f"torch.distributed.checkpoint"
        )


def untied(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that transformers would save: one of each group of tied weights, and none that it ignores."""
    kept = {name: tensor for name, tensor in tensors.items() if name not in (model._keys_to_ignore_on_save or ())}
    found: dict[str, Tensor] = remove_tied_weights_from_state_dict(kept, model)
    return found


def _write(writer: _Writer, model: Any, tensors: dict[str, Tensor], original: bool) -> None:
    writer.write(revert_weight_conversion(model, tensors) if original else tensors)


def _decoder_layer(one: LayerWithLayout) -> str:
    """Return the name of a layer's experts up to its first number, or the whole name."""
    found = re.match(r"(.*?\.\d+)\.", one.name)
    return found[1] if found else one.name


@torch.no_grad()
def _gathered(one: LayerWithLayout) -> dict[str, Tensor]:
    """Return the tensors of all experts of a layer on the CPU of the writing rank; {} on the others."""
    layer, layout = one.layer, one.layer.context.layout
    if layout.replica_rank != 0:
        return {}
    writes, found = layout.place == 0, dict[str, Tensor]()
    with layer.context.flight_recorder.step("gather experts to save", layer.name, counted=False, more_s=_LONGEST_S):
        for expert, tensors in _each(one):
            if writes:
                for name, tensor in tensors.items():
                    if name not in found:
                        shape = (layer.config.num_experts, *tensor.shape)
                        found[name] = torch.empty(shape, dtype=tensor.dtype, device="cpu")
                    found[name][expert].copy_(tensor)
    return one.joined(found) if found else {}


def _each(one: LayerWithLayout) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Send each expert from its owner to the writing rank. Yield it there and on its owner, and {} elsewhere."""
    layer, layout = one.layer, one.layer.context.layout
    weights, ep = layer.expert_weights, layer.context.rank_groups["ep"]
    expert_map = layer.placement.expert_map
    sizes = one.sizes()
    for expert in range(layer.config.num_experts):
        owner = expert_map.primary_owner(expert)
        tensors: dict[str, Tensor] = {}
        if layout.ep_rank == owner:  # `gather_slot` is collective over the etp group
            tensors = one.layout.from_canonical(weights.gather_slot(weights.slots_of_expert[expert][0]))
        if layout.etp_rank == 0 and owner != 0 and layout.ep_rank in (0, owner):
            if layout.ep_rank == 0:
                tensors = {n: torch.empty(t.shape, dtype=t.dtype, device=weights.device) for n, t in sizes.items()}
            act, peer = (dist.irecv, owner) if layout.ep_rank == 0 else (dist.isend, 0)
            wires = {name: tensor.contiguous() for name, tensor in tensors.items()}
            for work in dist.batch_isend_irecv([dist.P2POp(act, t, ep.ranks[peer], ep.group) for t in wires.values()]):
                work.wait()
            tensors = wires
        yield expert, tensors


@torch.no_grad()
def gather_experts(one: LayerWithLayout, experts: range) -> dict[str, Tensor]:
    """Return the parameters of a range of experts, [len(experts), ...] by full name, on all ranks. Collective."""
    layer, layout = one.layer, one.layer.context.layout
    weights, ep = layer.expert_weights, layer.context.rank_groups["ep"]
    owners = [layer.placement.expert_map.primary_owner(expert) for expert in experts]
    found = {
        name: torch.empty((len(experts), *tensor.shape), dtype=tensor.dtype, device=weights.device)
        for name, tensor in one.sizes().items()
    }
    for place, (expert, owner) in enumerate(zip(experts, owners, strict=True)):
        if layout.ep_rank == owner:  # `gather_slot` is collective over the etp group
            for name, tensor in one.layout.from_canonical(
                weights.gather_slot(weights.slots_of_expert[expert][0])
            ).items():
                found[name][place].copy_(tensor)
    if ep.size > 1:
        with layer.context.flight_recorder.step("gather experts", layer.name, counted=False):
            for start, stop, owner in _runs(owners):
                for tensor in found.values():
                    dist.broadcast(tensor[start:stop], src=ep.ranks[owner], group=ep.group)
    return one.joined(found)


def _runs(owners: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, owner) of each run of consecutive experts with one owner."""
    start = 0
    for owner, run in groupby(owners):
        stop = start + len(list(run))
        yield start, stop, owner
        start = stop


class _Writer:
    """Writes tensors into files of bounded size. File names contain the number of files, so `close` sets them."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._files: list[list[str]] = []  # names of the tensors in each
        self._bytes = 0

    def write(self, tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensor = tensors.pop(name)
            if self._pending and sum(map(_size, self._pending.values())) + _size(tensor) > self._shard_bytes:
                self._flush()
            self._pending[name] = tensor.detach().to("cpu").contiguous()
        self._pending = {name: _own(tensor) for name, tensor in self._pending.items()}

    def close(self, model: Any) -> None:
        """Rename the files, and write the index, the configuration and the generation configuration."""
        self._flush()
        for old in self._folder.iterdir():
            if _OURS.fullmatch(old.name) or old.name == INDEX:
                old.unlink()
        count = len(self._files)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files, 1):
            file = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            self._unfinished(number).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        config = deepcopy(model.config)
        config.dtype, config.architectures = str(model.dtype).removeprefix("torch."), [type(model).__name__]
        for part in (config, config.get_text_config()):
            # it describes the files that were loaded; these have plain floating-point values
            vars(part).pop("quantization_config", None)
        config.save_pretrained(self._folder)
        if model.can_generate():
            model.generation_config.save_pretrained(self._folder)

    def remove_unfinished(self) -> None:
        for number in range(1, len(self._files) + 1):
            with suppress(OSError):
                self._unfinished(number).unlink()

    def _unfinished(self, number: int) -> Path:
        return self._folder / f".unfinished-{number:05}.safetensors"

    def _flush(self) -> None:
        if self._pending:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files.append(list(self._pending))
            self._bytes += sum(map(_size, self._pending.values()))
            save_file(self._pending, self._unfinished(len(self._files)), {"format": "pt"})
            self._pending = {}


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _own(tensor: Tensor) -> Tensor:
    """Return a copy of a view, so that a pending tensor does not keep the storage of all of a layer's experts."""
    return tensor if tensor.untyped_storage().nbytes() == _size(tensor) else tensor.clone()
