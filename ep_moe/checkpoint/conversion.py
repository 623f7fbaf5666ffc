"""Read single experts of any transformers model from its files, by transformers' own conversion rules.

transformers defines for each model how tensors of the files become parameters: by renamings, and by converters that run
operations such as `MergeModulelist`. This module uses the same rules. An operation that treats experts independently
gives the same result when it runs on the tensors of one expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ep_moe.checkpoint.formats import PLAIN_DTYPES
from ep_moe.checkpoint.source import TensorSource, matrix_name
from ep_moe.checkpoint.unexpected_tensors import summarize_names
from ep_moe.errors import CheckpointError
from ep_moe.types import dtype_name

_SPLIT = getattr(core_model_loading, "Split", Chunk)  # transformers before 5.18 has no such operation
_ALONG_A_DIM = (Chunk, Concatenate, Interleave, _SPLIT)


def in_file(name: str, _: object) -> str:
    """Return the name in the file, which is the name that transformers' conversion mapping expects."""
    return name


@dataclass
class Recipe:
    """How transformers creates parameters from tensors of the files.

    target: full name of the parameter; the first one of a converter with several targets
    sources: pattern of the converter -> the matching tensors, in transformers' order
    converter: None for a tensor that is only renamed
    """

    target: str
    converter: WeightConverter | None = None
    sources: dict[str, list[str]] = field(default_factory=dict)

    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]


class Destinations:
    """The destination of each tensor of a checkpoint in a model.

    recipes: parameter or buffer of the model -> how it is created
    unknown: tensors without a parameter in the model -> the name that their parameter would have
    companions: tensors that belong to another tensor, such as the scales of codes
    used: the entries of transformers' mapping that applied, in its order
    """

    def __init__(self, model: PreTrainedModel, source: TensorSource) -> None:
        self.recipes: dict[str, Recipe] = {}
        self.unknown: dict[str, str] = {}
        stems = {matrix_name(name) for name in source.names()}
        self.companions = {part for stem in stems for part in source.companions(stem)}
        mapping = get_model_conversion_mapping(model)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        state, base = model.state_dict(), model.base_model_prefix
        # in the order of transformers: some renamings keep state from earlier names
        for name in sorted(stems - self.companions, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, base, state)
            if target not in state and name in state:
                target, pattern = rename_source_key(name, [], [], base, state)
            if target not in state:
                self.unknown[name] = target
                continue
            converter = None if pattern is None else by_pattern[pattern]
            recipe = self.recipes.setdefault(target, Recipe(target, converter))
            if recipe.converter is not converter or (converter is None and recipe.sources):
                other = recipe.names()[0]
                raise CheckpointError(
                    f"{source.location(name)} and {source.location(other)} are both {target}; remove what is not meant"
                )
            recipe.sources.setdefault(pattern or name, []).append(name)
        self.used = [one for one in mapping if one.was_used()]


class ExpertRecipe:
    """Runs the recipe of a parameter that holds all experts for one expert at a time.

    Args:
        recipe: The recipe of the parameter.
        wanted: The parameters of its module, on the meta device.
        source: The checkpoint.
        config: The configuration of the model.
        experts: E. The parameter may have further entries after those of the experts.
        flat: The parameter is [E * rows, columns] instead of [E, rows, columns].

    Raises:
        CheckpointError: An operation does not treat experts independently, or tensors are missing or superfluous.
    """

    def __init__(
        self,
        recipe: Recipe,
        wanted: Mapping[str, Tensor],
        source: TensorSource,
        config: Any,
        *,
        experts: int,
        flat: bool = False,
    ) -> None:
        self.recipe, self.source, self._config = recipe, source, config
        self.experts, self._flat = experts, flat
        self.wanted = {name: tensor.unflatten(0, (experts, -1)) if flat else tensor for name, tensor in wanted.items()}
        self._entries = self.wanted[recipe.target].shape[0]
        self._model = _OneExpert(wanted)
        self.numbered = any("*" in pattern for pattern in recipe.sources)
        self.column = -1  # index of the dot-separated component of the names that is the expert's number
        if (converter := recipe.converter) is not None:
            for index, operation in enumerate(converter.operations):
                wrong = _mixes_experts(operation, first=index == 0, numbered=self.numbered)
                if wrong is not None:
                    raise CheckpointError(
                        f"{source.location(recipe.names()[0])} becomes {recipe.target} by {operation!r}, and {wrong}: "
                        f"ep_moe cannot read one expert of it; load the model with from_pretrained, write it with "
                        f"save_pretrained(..., save_original_format=False), and load that"
                    )
        self._check_numbers()

    def quantized(self) -> bool:
        """Return whether any of its tensors holds codes of a known quantization."""
        return any(self.source.matrix(name).quantized for name in self.recipe.names())

    def check(self) -> list[str]:
        """Check shapes and dtypes from the files' headers. Return the names of the parameters that it creates.

        Raises:
            CheckpointError: A tensor has a wrong shape or dtype.
        """
        shapes = {name: self._shape(name) for name in self.recipe.names()}
        for name, shape in shapes.items():
            if not self.numbered and shape[:1] not in ((self.experts,), (self._entries,)):
                raise self._wrong_shape(name, shape)
        first = self._first()
        for names in self.recipe.sources.values() if self.numbered else ():
            for name in names:
                if shapes[name] != shapes[names[0]]:
                    raise CheckpointError(
                        f"{self.source.location(name)} must have shape {list(shapes[names[0]])}, as that of the other "
                        f"experts, got {list(shapes[name])}; fetch the checkpoint again"
                    )
        lead = () if self.numbered else (1,)
        cut = slice(0 if self.numbered else 1, None)
        try:
            made = self._run({p: _on_meta(lead + shapes[name][cut]) for p, name in first.items()})
        except Exception as error:  # an operation fails for sizes that do not match
            got = ", ".join(f"{self.source.location(name)} {list(shapes[name])}" for name in first.values())
            raise CheckpointError(f"{self.recipe.target} cannot be made of {got}: {error}; fetch it again") from error
        for name, tensor in made.items():
            if name not in self.wanted or tensor.shape != self.wanted[name].shape[1:]:
                source = next(iter(first.values()))
                raise self._wrong_shape(source, shapes[source], tensor)
        return list(made)

    def read(self, expert: int) -> dict[str, Tensor]:
        """Read one expert. Return its part of each parameter, by the parameter's full name."""
        if self.numbered:
            found = {p: self._numbers(names[expert], None) for p, names in self.recipe.sources.items()}
        else:
            found = {p: self._numbers(names[0], expert) for p, names in self.recipe.sources.items()}
        return self._run(found)

    def _numbers(self, name: str, expert: int | None) -> Tensor:
        """Read a tensor of one expert (`expert` is None), or one expert's part [1, ...] of a tensor of all experts."""
        if expert is None:
            return self.source.read(name)
        matrix = self.source.matrix(name)
        if self._flat:
            rows = self.source.shape(name)[0] // self.experts
            return self.source.read(name, slice(expert * rows, (expert + 1) * rows)).unsqueeze(0)
        if matrix.quantized:
            return matrix.read_values(expert=expert).unsqueeze(0)
        return self.source.raw(name, slice(expert, expert + 1))

    def _run(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run transformers' operations on one expert's tensors, and drop the expert dimension."""
        tensors = {pattern: [tensor] for pattern, tensor in found.items()}
        made = converted(self.recipe, tensors, self._model, self._config)
        return {name: tensor[0] for name, tensor in made.items()}

    def _first(self) -> dict[str, str]:
        return {pattern: names[0] for pattern, names in self.recipe.sources.items()}

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raise CheckpointError if its dtype cannot be read."""
        shape, dtype = self.source.shape(name), self.source.dtype(name)
        if self._flat and len(shape) == 2 and shape[0] % self.experts == 0:
            shape = (self.experts, shape[0] // self.experts, shape[1])
        if dtype not in PLAIN_DTYPES:
            got = "a dtype that torch has not" if dtype is None else dtype_name(dtype)
            known = " or ".join(map(dtype_name, PLAIN_DTYPES))
            raise CheckpointError(
                f"{self.source.location(name)} must be {known}, got {got}{self.source.declared.said}; dequantize the "
                f"checkpoint to bf16 first"
            )
        return shape

    def _check_numbers(self) -> None:
        """Raise CheckpointError unless each pattern has one tensor, or one per expert.

        transformers stacks the tensors in their order, and would not notice a missing expert.
        """
        for pattern in [] if self.recipe.converter is None else self.recipe.converter.source_patterns:
            if pattern not in self.recipe.sources:
                raise CheckpointError(
                    f"{self.source.origin} has no {pattern} for {self.recipe.target}, and has "
                    f"{summarize_names(self.recipe.names())}; fetch the checkpoint again"
                )
        for pattern, names in self.recipe.sources.items():
            if "*" in pattern:
                self.recipe.sources[pattern] = self._by_number(names)
            elif len(names) > 1 or self.numbered:
                both = " and ".join(self.source.location(name) for name in self.recipe.names()[:2])
                raise CheckpointError(f"{both} become {self.recipe.target}; remove what is not meant")

    def _by_number(self, names: list[str]) -> list[str]:
        """Return a pattern's tensors, ordered by expert. Raise CheckpointError if one is missing or superfluous."""
        self.column, by_number = _numbered(names)
        if missing := sorted(set(range(self.experts)) - by_number.keys()):
            parts = names[0].split(".")
            name = ".".join([*parts[: self.column], str(missing[0]), *parts[self.column + 1 :]])
            raise CheckpointError(
                f"{name} is missing in {self.source.origin}: {len(missing)} of {self.experts} experts of "
                f"{self.recipe.target} are not there; fetch the checkpoint again"
            )
        if extra := [name for number, name in by_number.items() if number >= self._entries]:
            raise CheckpointError(
                f"{self.source.origin} has {summarize_names(extra)}, and {self.recipe.target} has {self.experts} "
                f"experts; config.json must state the number that the checkpoint has"
            )
        return [by_number[number] for number in range(self.experts)]

    def _wrong_shape(self, name: str, shape: tuple[int, ...], made: Tensor | None = None) -> CheckpointError:
        got = "" if made is None else f", which makes {[self.experts, *made.shape]}"
        return CheckpointError(
            f"{self.source.location(name)} has shape {list(shape)}{got}, and {self.recipe.target} must have "
            f"{list(self.wanted[self.recipe.target].shape)}; fetch the checkpoint that belongs to config.json"
        )


def converted(recipe: Recipe, found: Mapping[str, list[Tensor]], model: Any, config: Any) -> dict[str, Tensor]:
    """Run a recipe as transformers does, and return the tensors by the full names of their parameters.

    found: the source tensors by pattern, or by the name of a tensor that is only renamed
    """
    converter, target = recipe.converter, recipe.target
    if converter is None:
        ((tensor,),) = found.values()
        return {target: tensor}
    tensors: dict[str, Any] = dict(found)
    for operation in converter.operations:
        tensors = operation.convert(
            tensors,
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
            full_layer_name=target,
            model=model,
            config=config,
            missing_keys=None,
        )
    prefix, _, suffix = next(target.partition(name) for name in tensors if name in target)
    made = {f"{prefix}{name}{suffix}": tensor for name, tensor in tensors.items()}
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


class _OneExpert:
    """A stand-in for the model, for operations that look up a parameter's shape. Parameters have one expert."""

    def __init__(self, wanted: Mapping[str, Tensor]) -> None:
        self._wanted = wanted

    def get_parameter(self, name: str) -> Tensor:
        return _on_meta((1, *self._wanted[name].shape[1:]))


def _on_meta(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def _mixes_experts(operation: ConversionOps, *, first: bool, numbered: bool) -> str | None:
    """Return why an operation cannot run on each expert separately, or None if it can."""
    kind = type(operation)
    if numbered and first:
        stacks = kind is MergeModulelist and operation.dim == 0
        return None if stacks else "it does not stack the experts in order"
    if kind in _ALONG_A_DIM:
        return None if operation.dim > 0 else "it operates along the expert dimension"
    if kind is Transpose:
        apart = operation.dim0 > 0 and operation.dim1 > 0
        return None if apart else "it moves the expert dimension"
    return "it may mix experts"


def _numbered(names: list[str]) -> tuple[int, dict[int, str]]:
    """Return the index of the name component that is the expert's number, and the names by expert."""
    parts = [name.split(".") for name in names]
    if len({len(one) for one in parts}) == 1:
        columns = list(enumerate(zip(*parts, strict=True)))
        differ = [pair for pair in columns if len(names) == 1 or len(set(pair[1])) > 1]
        numbers = [pair for pair in differ if all(part.isdigit() for part in pair[1])]
        if numbers and (len(names) == 1 or len(differ) == 1):
            column, found = numbers[-1]
            by_number = dict(zip(map(int, found), names, strict=True))
            if len(by_number) == len(names):
                return column, by_number
    raise CheckpointError(f"{', '.join(names[:3])} must differ only in the expert number; rename them")
