"""A transformers model without its experts, loaded by transformers' own rules: names, dtypes, ties, buffers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from ep_moe.checkpoint.declared import foreign_refusal
from ep_moe.checkpoint.expert_files import ExpertFiles
from ep_moe.checkpoint.factors import check_fits
from ep_moe.checkpoint.formats import NUMBERS
from ep_moe.checkpoint.source import CheckpointSource
from ep_moe.checkpoint.unread import listed
from ep_moe.errors import CheckpointError


def keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give what from_pretrained keeps in float32 that dtype. model: on the meta device, in `dtype`"""
    kept = [re.compile(name.replace("*", ".*")) for name in model._get_dtype_plan(dtype)]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dtype == dtype and any(pattern.search(name) for pattern in kept):
            tensor.data = tensor.data.float()


def load_skeleton(
    model: PreTrainedModel,
    files: ExpertFiles,
    apart: Iterable[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    fresh: Set[str] = frozenset(),
) -> set[str]:
    """Load all of a model but its experts.

    Args:
        model: on the meta device.
        files: of the same model.
        apart: names of the modules that are left alone, whatever stands there: those of the experts.
        device: where the rest goes.
        dtype: of the model. Parameters that have another keep it.
        fresh: names that the files may not have.

    Returns:
        Those of `fresh` that the files have not, which hold random numbers.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or transformers cannot convert it.
    """
    source = files.source
    tensors = {name: _Lazy(source, name) for recipe in files.rest.values() for name in recipe.names()}
    for name, recipe in files.rest.items():
        _check_dtype(source, name, model.get_parameter_or_buffer(name), recipe.names())
    config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(source.folder),
        device_map={"": device},
        dtype=dtype,
        weight_mapping=get_model_conversion_mapping(model),
    )
    with swapped(model, {name: nn.Module() for name in apart}):
        info, _ = model._load_pretrained_model(model, tensors, None, config)
        _check(source, info)
        model._finalize_model_loading(model, config, info)
        if missing := set(info.missing_keys) - fresh:  # transformers gave them random numbers
            raise CheckpointError(f"{listed(sorted(missing))} is missing in {source.folder}; fetch it again")
    model._weight_conversions = files.destinations.used  # for saving: transformers saw the names of the rest alone
    return set(info.missing_keys)


def _check(source: CheckpointSource, info: Any) -> None:
    """Refuse what transformers says in a report, and goes on with random numbers."""
    for name, error in info.conversion_errors.items():
        raise CheckpointError(f"{name} cannot be made of the tensors of {source.folder}: {error}")
    for name, found, wanted in sorted(info.mismatched_keys):
        raise CheckpointError(f"{name} must have shape {list(wanted)}, got {list(found)} in {source.folder}")


def _check_dtype(source: CheckpointSource, name: str, tensor: Tensor, sources: list[str]) -> None:
    for each in sources:
        if tensor.is_floating_point() and source.dtype(each) not in NUMBERS:
            if others := source.foreign(each.rpartition(".")[0]):
                raise CheckpointError(foreign_refusal(name, *next(iter(others.items()))))
            raise CheckpointError(
                f"{source.location(each)} is {source.dtype(each)}{source.declared.said}; outside the experts only "
                f"bf16, fp16, fp32 and fp8, NVFP4, MXFP4 and symmetric INT4 with their scales can be read"
            )


@contextmanager
def swapped(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """The model with other modules at some names."""
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
    """A tensor of the files that is read when transformers asks for it, as it asks a safetensors slice."""

    def __init__(self, source: CheckpointSource, name: str) -> None:
        self._source, self._name = source, name

    def __getitem__(self, index: Any) -> _Cast:
        return _Cast(self._source, self._name, index)

    def get_shape(self) -> list[int]:
        return list(self._source.shape(self._name))

    def get_dtype(self) -> str:
        return self._source.header(self._name)[0] if self._source.holds(self._name) else "F32"


class _Cast:
    """What transformers casts next: numbers that the dtype cannot hold are refused."""

    def __init__(self, source: CheckpointSource, name: str, index: Any) -> None:
        self._source, self._name, self._index = source, name, index

    def to(self, *, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._source.read(self._name)[self._index]
        if dtype is not None and tensor.is_floating_point():
            check_fits(self._source.location(self._name), tensor, dtype)
        return tensor.to(device=device, dtype=dtype)
