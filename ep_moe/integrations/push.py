"""Copies the weights of a whole model from a trainer into a serving model of another layout, without files.

load_weights(serving, export_weights(trainer))       # both models of ep_moe
load_weights(serving, trainer.state_dict())          # a trainer of transformers, with FSDP2 or without
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ep_moe.checkpoint.conversion import Recipe, converted
from ep_moe.checkpoint.model_files import ExpertFiles, check_dtype, swapped
from ep_moe.checkpoint.push import ORIGIN, Staged, Target, Weights, layer_prefix, push
from ep_moe.checkpoint.source import MemorySource
from ep_moe.checkpoint.stored import check_fits
from ep_moe.checkpoint.unexpected_tensors import summarize_names
from ep_moe.errors import CheckpointError, ConfigError
from ep_moe.integrations.blocks import model_parts
from ep_moe.integrations.load import check_files, write_local_experts
from ep_moe.integrations.save import (
    LayerWithLayout,
    ModelParts,
    check_plain,
    gather_experts,
    untied,
    warn_of_differences,
)
from ep_moe.weights.parts import full

_Renamed = Callable[[dict[str, Tensor]], dict[str, Tensor]]
_CHUNK_BYTES = 1 << 28  # size of the experts that are gathered at a time


def load_weights(model: PreTrainedModel, weights: Weights) -> set[str]:
    """Write a trainer's weights into a serving model. No file is written or read.

    Collective: all ranks pass the same tensors, between two calls of the model. The trainer may have any layout, and
    the model any layout, expert map and scheme. A quantized layer quantizes plain values, and keeps codes of its own
    scheme as they are. Names are those of published checkpoints, or of transformers' modules. The checks are those of
    `load_pretrained`. Weights are written in place, so captured CUDA graphs compute with the new ones.

    From the first write on, calls of the model are refused until all weights are written. After an error, calls are
    allowed again only if nothing was written. For a mapping, all names, shapes and dtypes are checked before the first
    write. For an iterable, they are checked layer by layer.

    Args:
        model: A model of `expert_parallel` or `load_pretrained`.
        weights: Whole tensors by name, as a mapping or as pairs, such as those of `export_weights`. DTensors are
            gathered one at a time. Pairs of one layer should be adjacent: until a layer is complete, a rank keeps its
            own experts, the rest of the layer, and tensors of all experts whole. The tensor of a pair may be
            overwritten once the next pair is requested.

    Returns:
        The names that were loaded.

    Raises:
        CheckpointError: On all ranks, if a tensor of any rank is missing or wrong, or has no counterpart in a replaced
            block. Tensors without a counterpart elsewhere in the model are skipped with a warning.
        InputError: On all ranks, if an item is not a pair of name and tensor, or ranks hold different weights.
        ConfigError: The model has no expert-parallel layers.
    """
    return push(weights, ModelTarget(model_parts(model)))


def export_weights(model: PreTrainedModel, *, save_original_format: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Gather the weights of a model layer by layer, whole tensors by name on every rank.

    Collective: all ranks consume all tensors, in the same order. Experts come from the ranks that hold them, and
    DTensors (FSDP2) are gathered. A rank holds up to 256 MiB of experts at a time. Where one tensor of the checkpoint
    holds all experts, it holds all of a layer. Names and tensors are those that `save_pretrained` writes, so other
    engines can load them too. The ranks compare their weights before, and warn, as in `save_pretrained`.

    Args:
        model: A model of `expert_parallel` or `load_pretrained`, with plain weights.
        save_original_format: Use the tensor names of the model's published checkpoints, else those of its modules.

    Yields:
        Name and tensor, on the model's device. Tensors outside the experts are the model's own memory.

    Raises:
        ConfigError: The model has no expert-parallel layers, they are quantized or have LoRA factors, or there are
            pipeline stages.
    """
    parts = model_parts(model)
    check_plain(parts.experts, "export_weights")
    warn_of_differences(parts.experts, "export_weights")

    def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not save_original_format:
            return tensors
        with swapped(model, parts.places), torch.no_grad():
            found: dict[str, Tensor] = revert_weight_conversion(model, tensors)
        return found

    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in untied(model, parts.rest()).items():
        layers.setdefault(layer_prefix(name), {})[name] = tensor
    for layer in dict.fromkeys([*layers, *(layer_prefix(one.name) for one in parts.experts)]):
        yield from renamed({name: full(tensor) for name, tensor in layers.get(layer, {}).items()}).items()
        modules = [each for each in parts.experts if layer_prefix(each.name) == layer]
        if len(modules) == 1:
            yield from _exported(modules[0], renamed)
            continue
        together = dict[str, Tensor]()  # transformers converts a layer's experts for text and for images at once
        for one in modules:
            together |= gather_experts(one, range(one.layout.experts))
        yield from renamed(together).items()


def _exported(
    one: LayerWithLayout, renamed: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a layer's experts: in chunks if each expert has tensors of its own, else all together."""
    experts, sizes = one.layout.experts, one.sizes()
    most = max(1, _CHUNK_BYTES // sum(tensor.nbytes for tensor in sizes.values()))
    numbered = _numbered_names(one, renamed) if most < experts else None
    if numbered is None:
        yield from renamed(gather_experts(one, range(experts))).items()
        return
    for start in range(0, experts, most):
        chunk = range(start, min(start + most, experts))
        found = renamed(gather_experts(one, chunk))
        for place, expert in enumerate(chunk):
            for before, behind in numbered:
                yield f"{before}{expert}{behind}", found[f"{before}{place}{behind}"]


def _numbered_names(one: LayerWithLayout, renamed: _Renamed) -> list[tuple[str, str]] | None:
    """Return the prefix and suffix around the expert's number in each name of its tensors.

    None if a tensor holds more than one expert.
    """

    def names(experts: int) -> set[str]:
        stacked = {name: tensor.new_empty((experts, *tensor.shape)) for name, tensor in one.sizes().items()}
        return set(renamed(one.joined(stacked)))

    experts, found = one.layout.experts, list[tuple[str, str]]()
    whole = names(experts)
    for name in sorted(names(1)):
        places = [(name[: match.start()], name[match.end() :]) for match in re.finditer(r"(?<=\.)0(?=\.)", name)]
        fits = [(a, b) for a, b in places if all(f"{a}{expert}{b}" in whole for expert in range(experts))]
        if len(fits) != 1:
            return None
        found += fits
    return found if len(found) * experts == len(whole) else None


class _Plan(NamedTuple):
    """How a part of the pushed weights is written: the source of its experts, and the tensors outside the experts."""

    files: ExpertFiles
    dense: dict[str, Tensor]


class ModelTarget(Target):
    """A model with expert-parallel layers, as a target of `ep_moe.checkpoint.push.push`."""

    def __init__(self, parts: ModelParts) -> None:
        super().__init__([one.layer for one in parts.experts])
        self._model, self._places = parts.model, parts.places
        self._experts = {one.name: one for one in parts.experts}
        self._live = parts.rest()
        if sharded := [name for name, tensor in self._live.items() if hasattr(tensor, "placements")]:
            raise ConfigError(
                f"{summarize_names(sharded)} is sharded over ranks, and load_weights writes whole tensors; serve a "
                f"model that is not sharded outside its experts"
            )
        if any(layer.expert_weights.lora is not None for layer in self.layers):
            raise ConfigError(
                "the experts have LoRA factors, and load_weights would replace the weights that they belong to; call "
                "ep_moe.integrations.lora.merge_lora(model) first"
            )
        if any(layer.expert_weights.is_meta for layer in self.layers):
            raise ConfigError("the model is on the meta device; load it with load_pretrained")
        held = {f"{name}.{each}" for name, one in self._experts.items() for each in one.layout.names}
        self._alike: dict[tuple[int, ...], str] = {}  # first name by address and shape: tied tensors share both
        self._place = {name: self._alike.setdefault(_place(tensor), name) for name, tensor in self._live.items()}
        self._wanted = held | set(self._place.values())
        self._written: dict[str, str] = {}

    def part(self, name: str) -> str:
        return layer_prefix(name)

    def stage(self, tensors: Mapping[str, Tensor], *, headers: bool) -> Staged:
        source = MemorySource(tensors, ORIGIN)
        layouts = {name: one.layout for name, one in self._experts.items()}
        with swapped(self._model, self._places), torch.no_grad():
            files = ExpertFiles(self._model, source, layouts, partial=True)
            said = check_files({name: one.layer for name, one in self._experts.items()}, files)
            dense: dict[str, Tensor] = {}
            for recipe in files.rest.values():
                dense |= self._converted(recipe, source, headers=headers)
        covers = files.made | {self._place[name] for name in dense}
        layer = {layer_prefix(name) for name in (*files.made, *dense)}
        if missing := sorted(name for name in self._wanted - covers if layer_prefix(name) in layer):
            raise CheckpointError(f"{summarize_names(missing)} is missing in {ORIGIN}")
        if files.left_out:
            said.append(
                f"{summarize_names(files.left_out)} is not loaded: {type(self._model).__name__} has no such weights"
            )
        self.said |= dict.fromkeys(said)
        names = tensors.keys() - files.destinations.unknown.keys()
        return Staged(frozenset(covers), names, _Plan(files, dense))

    def _converted(self, recipe: Recipe, source: MemorySource, *, headers: bool) -> dict[str, Tensor]:
        """Return tensors outside the experts by transformers' names, and check their shapes. headers: on meta alone"""
        live = self._live[recipe.target]
        check_dtype(source, recipe.target, live, recipe.names())

        def numbers(name: str) -> Tensor:
            if headers:
                return torch.empty(source.shape(name), dtype=source.dtype(name), device="meta")
            tensor = source.read(name).to(live.device)
            return check_fits(source.location(name), tensor, live.dtype) if tensor.is_floating_point() else tensor

        given = {pattern: [numbers(name) for name in names] for pattern, names in recipe.sources.items()}
        try:
            made = converted(recipe, given, self._model, self._model.config)
        except Exception as error:  # an operation cannot join tensors of these sizes
            raise CheckpointError(
                f"{recipe.target} cannot be made of {summarize_names(recipe.names())}: {error}"
            ) from error
        for name, tensor in made.items():
            wanted = list(self._live[name].shape) if name in self._live else None
            if wanted != list(tensor.shape):
                raise CheckpointError(f"{name} must have shape {wanted}, got {list(tensor.shape)} in {ORIGIN}")
        return made

    @torch.no_grad()
    def write(self, plan: _Plan) -> None:
        for name in plan.files.formats:
            write_local_experts(self._experts[name].layer, self._experts[name].layout, name, plan.files)
        for name, tensor in plan.dense.items():
            live, first = self._live[name], self._written.setdefault(self._place[name], name)
            if first != name and not torch.equal(live, tensor.to(live.dtype)):
                raise CheckpointError(
                    f"{first} and {name} are one tensor in {type(self._model).__name__}, and differ in {ORIGIN}; push "
                    f"one of them, or equal ones"
                )
            live.copy_(tensor)

    def check_whole(self, covered: Set[Any]) -> None:
        if missing := sorted(self._wanted - covered):
            raise CheckpointError(f"{summarize_names(missing)} is missing in {ORIGIN}")


def _place(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.data_ptr(), *tensor.shape) if tensor.numel() else (id(tensor),)
