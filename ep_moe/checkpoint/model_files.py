"""Read a transformers model from a checkpoint: single experts, and the rest of the model by transformers' own rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist
from transformers.modeling_utils import LoadStateDictConfig

from ep_moe.checkpoint.conversion import Destinations, ExpertRecipe
from ep_moe.checkpoint.formats import PLAIN_DTYPES, ExpertFormat, Fused, PerExpert
from ep_moe.checkpoint.model_names import ModuleLayout
from ep_moe.checkpoint.quantization_config import unsupported_message, unsupported_tensors
from ep_moe.checkpoint.source import TensorSource
from ep_moe.checkpoint.stored import check_fits
from ep_moe.checkpoint.unexpected_tensors import HARMLESS_NAMES, summarize_names
from ep_moe.errors import CheckpointError


class ExpertFiles:
    """The experts of a model in the files of a checkpoint, and the recipes of the rest of the model.

    modules: full name of each module of experts -> its layout
    rest: recipes of all parameters that are not experts'
    left_out: tensors outside the MoE blocks that the model has no parameter for
    formats: name of each module -> its block and the `ExpertFormat` of its experts, None if none of them fits
    made: full names of the experts' parameters
    """

    def __init__(
        self,
        model: PreTrainedModel,
        source: TensorSource,
        modules: Mapping[str, ModuleLayout],
        *,
        partial: bool = False,
    ) -> None:
        """Find all experts of all modules. Reads headers only.

        Args:
            model: The model as transformers creates it, on the meta device, with the final dtypes of its parameters.
            source: The checkpoint, with names by `in_file`.
            modules: Name of each module of experts -> its layout.
            partial: Allow the source to lack modules.

        Raises:
            CheckpointError: A tensor is missing, superfluous, or of another shape or dtype, or transformers creates
                one by an operation that does not treat experts independently.
        """
        self.source, self.model = source, model
        self.destinations = Destinations(model, source)
        self.modules = dict(modules)
        self.formats: dict[str, tuple[str, ExpertFormat] | None] = {}
        self._made: dict[str, list[ExpertRecipe]] = {}
        self._dtypes: dict[str, torch.dtype] = {}  # the modules may be removed from the model before `read`
        taken: set[str] = set()
        self.made: set[str] = set()
        for module_name, layout in modules.items():
            full = {f"{module_name}.{one.name}": one for one in layout.tensors}
            wanted = {name: model.get_parameter_or_buffer(name) for name in full}
            self._dtypes |= {name: tensor.dtype for name, tensor in wanted.items()}
            found = [self.destinations.recipes[name] for name in wanted if name in self.destinations.recipes]
            if partial and not found:
                continue
            recipes = [
                ExpertRecipe(one, wanted, source, model.config, experts=layout.experts, flat=full[one.target].flat)
                for one in found
            ]
            self.formats[module_name] = known = known_format(layout, module_name, recipes)
            # codes are read in known formats only, which check them on their own
            trusted = known is not None and any(one.quantized() for one in recipes)
            made = {name for one in recipes for name in ([one.recipe.target] if trusted else one.check())}
            if missing := [name for name in wanted if name not in made]:
                raise CheckpointError(self._missing(missing, module_name))
            self._made[module_name] = recipes
            self.made |= set(wanted)
            taken |= {one.recipe.target for one in recipes}
        self.rest = {name: one for name, one in self.destinations.recipes.items() if name not in taken}
        self.left_out = self._left_out()

    def read(self, module: str, expert: int) -> dict[str, Tensor]:
        """Read one expert's tensors, by the module's parameter names, without the expert dimension.

        Other experts are not read. Raises CheckpointError.
        """
        read: dict[str, Tensor] = {}
        for one in self._made[module]:
            for name, tensor in one.read(expert).items():
                dtype = self._dtypes[name]
                where = f"{name}, expert {expert}"
                read[name.removeprefix(f"{module}.")] = check_fits(where, tensor, dtype).to(dtype)
        return read

    def _missing(self, missing: list[str], module: str) -> str:
        unknown = [name for name, target in self.destinations.unknown.items() if target.startswith(_block(module))]
        self._refuse_unsupported(module, unknown)
        unknown = unknown or list(self.destinations.unknown)
        said = f"; {summarize_names(unknown)} is there instead" if unknown else ""
        return (
            f"{summarize_names(missing)} is missing in {self.source.origin}, under that name and each that "
            f"transformers has for it{said}{self.source.declared.said}; fetch the checkpoint that belongs to "
            f"config.json, or dequantize it to bf16 if it has codes"
        )

    def _refuse_unsupported(self, what: str, unknown: list[str]) -> None:
        for name, called in unsupported_tensors(unknown, self.source.declared).items():
            raise CheckpointError(unsupported_message(what, name, called))

    def _left_out(self) -> list[str]:
        """Return tensors that the model has no parameter for. Raise CheckpointError if one is in a MoE block."""
        ignored = [HARMLESS_NAMES, *map(re.compile, self.model._keys_to_ignore_on_load_unexpected or ())]
        unknown = {
            name: target
            for name, target in self.destinations.unknown.items()
            if not any(each.search(name) or each.search(target) for each in ignored)
        }
        blocks = tuple(_block(module) for module in self.modules)
        if inside := [name for name, target in unknown.items() if target.startswith(blocks)]:
            self._refuse_unsupported(str(self.source.origin), inside)
            raise CheckpointError(
                f"{self.source.origin} has {summarize_names(inside)}, which {type(self.model).__name__} has no place "
                f"for: outputs would be wrong without{self.source.declared.said}; fetch the checkpoint that belongs to "
                f"config.json, or dequantize it to bf16 if these are codes"
            )
        return list(unknown)


def _block(module: str) -> str:
    """Return the prefix of the block that contains a module of experts."""
    return f"{module.rpartition('.')[0]}."


def known_format(layout: ModuleLayout, name: str, recipes: Iterable[ExpertRecipe]) -> tuple[str, ExpertFormat] | None:
    """Return the block and the `ExpertFormat` of a module's experts in the files, or None if no format fits.

    Experts in a known format can be read as unchanged codes if the layer has the same scheme. An etp rank reads only
    its part of them.
    """
    by_name = {one.recipe.target.removeprefix(f"{name}."): one for one in recipes}
    parts = {one.part: by_name.get(one.name) for one in layout.tensors}
    gate_up, down = parts.get("w13"), parts.get("w2")
    if gate_up is None or down is None or None in parts.values():
        return None
    if not layout.gated or any(one.flat or one.unused for one in layout.tensors):
        return None
    straight = not any(one.transposed or one.interleaved for one in layout.tensors)
    if all(one.recipe.converter is None for one in by_name.values()):
        return _fused(layout, {part: one.recipe.names()[0] for part, one in parts.items() if one is not None})
    if straight and len(parts) == 2 and _stacks(gate_up, 2) and _stacks(down, 1):
        return _per_expert([*gate_up.recipe.sources.values(), *down.recipe.sources.values()], gate_up.column)
    return None


def _stacks(one: ExpertRecipe, sources: int) -> bool:
    """Return whether a recipe stacks the experts of each source, and then concatenates the sources along rows."""
    converter = one.recipe.converter
    if converter is None or len(converter.source_patterns) != sources or len(converter.target_patterns) != 1:
        return False
    kinds = [type(operation) for operation in converter.operations]
    dims = [getattr(operation, "dim", None) for operation in converter.operations]
    return (kinds, dims) == (([MergeModulelist, Concatenate], [0, 1]) if sources == 2 else ([MergeModulelist], [0]))


def _per_expert(sources: list[list[str]], column: int) -> tuple[str, ExpertFormat] | None:
    """Return the block and the `PerExpert` format, or None. sources: the names of all experts' gate, up and down"""
    prefix = sources[0][0].split(".")[:column]
    ends = [names[0].split(".")[column + 1 :] for names in sources]
    block, relative = ".".join(prefix), [".".join(["{e}", *end]) for end in ends]
    for names, each in zip(sources, relative, strict=True):
        if names != [f"{block}.{each.format(e=expert)}" for expert in range(len(names))]:
            return None
    return block, PerExpert(*relative)


def _fused(layout: ModuleLayout, names: Mapping[str, str]) -> tuple[str, ExpertFormat] | None:
    """Return the block and the `Fused` format, or None. names: the tensors' names by canonical tensor (w13, w2)"""
    split = [names[part].split(".") for part in ("w13", "w2")]
    length = next(i for i, pair in enumerate(zip(*split, strict=False)) if pair[0] != pair[1])
    block, (gate_up, down) = ".".join(split[0][:length]), (".".join(one[length:]) for one in split)
    if any(names[part] != f"{names[part.removesuffix('_bias')]}_bias" for part in names if part.endswith("_bias")):
        return None
    fused = Fused(
        gate_up=gate_up,
        down=down,
        transposed=layout.tensors[0].transposed,
        interleaved=layout.tensors[0].interleaved,
        bias="w13_bias" in names,
    )
    return (block, fused) if block else None


# --- the rest of a model ----------------------------------------------------------------------------------------------
# Load a transformers model without its experts, by transformers' own rules: names, dtypes, tied weights, buffers.


def keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert the parameters that from_pretrained keeps in float32. model: on the meta device, in `dtype`"""
    kept = [re.compile(name.replace("*", ".*")) for name in model._get_dtype_plan(dtype)]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dtype == dtype and any(pattern.search(name) for pattern in kept):
            tensor.data = tensor.data.float()


def load_dense_parameters(
    model: PreTrainedModel,
    files: ExpertFiles,
    apart: Iterable[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    fresh: Set[str] = frozenset(),
) -> set[str]:
    """Load a model except for its experts.

    Args:
        model: The model, on the meta device.
        files: The files of the same model.
        apart: Names of the modules to skip, which hold the experts.
        device: The device of the loaded parameters.
        dtype: The dtype of the model. Parameters of another dtype keep it.
        fresh: Names that the files may lack.

    Returns:
        The names of `fresh` that the files lack. These parameters are randomly initialized.

    Raises:
        CheckpointError: A tensor is missing or has another shape, or transformers cannot convert it.
    """
    source = files.source
    tensors = {name: _Lazy(source, name) for recipe in files.rest.values() for name in recipe.names()}
    for name, recipe in files.rest.items():
        check_dtype(source, name, model.get_parameter_or_buffer(name), recipe.names())
    config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(source.origin),
        device_map={"": device},
        dtype=dtype,
        weight_mapping=get_model_conversion_mapping(model),
    )
    with swapped(model, {name: nn.Module() for name in apart}):
        info, _ = model._load_pretrained_model(model, tensors, None, config)
        _check(source, info)
        model._finalize_model_loading(model, config, info)
        if missing := set(info.missing_keys) - fresh:  # transformers has initialized them randomly
            raise CheckpointError(f"{summarize_names(sorted(missing))} is missing in {source.origin}; fetch it again")
    # save_pretrained inverts these. transformers' own list lacks the experts' conversions, whose names it has not seen
    model._weight_conversions = files.destinations.used
    return set(info.missing_keys)


def _check(source: TensorSource, info: Any) -> None:
    """Raise CheckpointError for problems that transformers only reports, keeping random values."""
    for name, error in info.conversion_errors.items():
        raise CheckpointError(f"{name} cannot be made of the tensors of {source.origin}: {error}")
    for name, found, wanted in sorted(info.mismatched_keys):
        raise CheckpointError(f"{name} must have shape {list(wanted)}, got {list(found)} in {source.origin}")


def check_dtype(source: TensorSource, name: str, tensor: Tensor, sources: list[str]) -> None:
    """Raise CheckpointError if a floating-point parameter outside the experts is created from unreadable codes."""
    for each in sources:
        if tensor.is_floating_point() and source.dtype(each) not in PLAIN_DTYPES:
            if others := source.unsupported_tensors(each.rpartition(".")[0]):
                raise CheckpointError(unsupported_message(name, *next(iter(others.items()))))
            raise CheckpointError(
                f"{source.location(each)} is {source.dtype(each)}{source.declared.said}; outside the experts only "
                f"bf16, fp16, fp32 and fp8, NVFP4, MXFP4 and symmetric INT4 with their scales can be read"
            )


@contextmanager
def swapped(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace modules of a model by others inside the `with` block."""
    held = {name: model.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            _put(model, name, module)
        yield
    finally:
        for name, module in held.items():
            _put(model, name, module)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


class _Lazy:
    """A tensor that is read when transformers indexes it. Has the interface of a safetensors slice."""

    def __init__(self, source: TensorSource, name: str) -> None:
        self._source, self._name = source, name

    def __getitem__(self, index: Any) -> _Cast:
        return _Cast(self._source, self._name, index)

    def get_shape(self) -> list[int]:
        return list(self._source.shape(self._name))

    def get_dtype(self) -> str:
        return self._source.header(self._name)[0] if self._source.holds(self._name) else "F32"


class _Cast:
    """The result of indexing a `_Lazy`. `to` reads and casts it, and refuses values that the dtype cannot represent."""

    def __init__(self, source: TensorSource, name: str, index: Any) -> None:
        self._source, self._name, self._index = source, name, index

    def to(self, *, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._source.read(self._name)[self._index]
        if dtype is not None and tensor.is_floating_point():
            check_fits(self._source.location(self._name), tensor, dtype)
        return tensor.to(device=device, dtype=dtype)
