"""Reads config.json and generation_config.json of a checkpoint folder by transformers, and checks their fields."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from ep_moe.checkpoint.formats import PLAIN_DTYPES
from ep_moe.checkpoint.hub import HubOptions, model_folder, read_object
from ep_moe.checkpoint.model_names import ALIASES
from ep_moe.checks import shown
from ep_moe.errors import CheckpointError, ConfigError
from ep_moe.types import dtype_name

ADAPTER = "adapter_config.json"  # PEFT's configuration of an adapter
_UNREADABLE = "is nothing that transformers can read"
_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
_SIZES_IF_ANY = (
    "head_dim", "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "num_key_value_heads",
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "max_position_embeddings",
)  # fmt: skip


def read_config(path: str | Path, **hub: Unpack[HubOptions]) -> Any:
    """Read the configuration of the (text) model in a checkpoint.

    Args:
        path: A folder, or the name of a model on the Hugging Face Hub.
        hub: `revision`, `token`, `cache_dir`, `local_files_only` and `subfolder`, as in `from_pretrained`.

    Returns:
        The configuration, a `PretrainedConfig`.

    Raises:
        CheckpointError: There is no config.json, transformers cannot read it, or a field has an invalid value.
    """
    return read_whole_config(model_folder(path, weights=False, **hub))[1]


def read_whole_config(folder: Path) -> tuple[Any, Any]:
    """Read the configuration of a model and that of its text model. They are one object for a text-only model.

    Raises:
        CheckpointError: As `read_config`.
    """
    file = folder / "config.json"
    if not file.is_file():
        remedy = "give the folder of a Hugging Face checkpoint"
        if (folder / ADAPTER).is_file():
            remedy = f"it has an adapter: {remedy}, and put it on by ep_moe.integrations.lora.load_lora(model, folder)"
        raise CheckpointError(f"{folder} holds no config.json; {remedy}")
    raw = read_object(file, _UNREADABLE)
    try:
        _refuse_nan(raw, file)
        _check_dtype(raw, file)
        whole = _by_transformers(folder, raw, file)
        text = _text_config(whole)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{file} {_UNREADABLE}: {type(error).__name__}: {error}") from error
    _check_sizes(text, file)
    return whole, text


def check_given_config(config: Any) -> tuple[Any, Any]:
    """Return a copy of a configuration that the user gives, and that of its text model.

    Raises:
        ConfigError: It is no configuration of transformers, or a field has an invalid value.
    """
    if not isinstance(config, PreTrainedConfig):
        raise ConfigError(
            f"config must be a configuration, such as AutoConfig.from_pretrained(path) returns, got {shown(config)}"
        )
    whole = copy.deepcopy(config)
    try:
        _refuse_nan(whole.to_dict(), "config")
        text = _text_config(whole)
        _check_sizes(text, "config")
    except CheckpointError as error:
        raise ConfigError(str(error).replace("mend the file", "pass another value")) from error
    return whole, text


def _text_config(whole: Any) -> Any:
    text = whole.get_text_config()
    text.dtype = text.dtype or whole.dtype
    return text


def class_of(whole: Any, where: str) -> type[PreTrainedModel]:
    """Return the class that config.json names for a multimodal model.

    Raises:
        ConfigError: `architectures` names no class of this configuration.
    """
    known: dict[str, type[PreTrainedModel]] = {}
    for mapping in (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        found = mapping.get(type(whole), ())
        known |= {one.__name__: one for one in (found if isinstance(found, tuple) else (found,))}
    named = [name for name in whole.architectures or () if name in known]
    if not named:
        raise ConfigError(
            f"{where}: architectures must name the class of a model_type {whole.model_type!r}, one of "
            f"{', '.join(known) or 'none that transformers has'}, got {whole.architectures!r}"
        )
    return known[named[0]]


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """Read generation_config.json; None if the folder has none. Raise CheckpointError if it cannot be read."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return None
    read_object(file, _UNREADABLE)
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:
        raise CheckpointError(f"{file} {_UNREADABLE}: {type(error).__name__}: {error}; mend or remove it") from error


def _by_transformers(folder: Path, raw: dict[str, Any], file: Path) -> Any:
    kind = raw.get("model_type")
    if kind in ALIASES:
        rest = {name: value for name, value in raw.items() if name not in ("auto_map", "model_type")}
        return CONFIG_MAPPING[ALIASES[kind]].from_dict(rest | {"model_type": ALIASES[kind]})
    if "auto_map" in raw and kind not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{file}: model_type {kind!r} is not in transformers {_version()}, and needs code of its repository "
            f"(auto_map), which ep_moe does not run; install a transformers that has it"
        )
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _refuse_nan(value: Any, file: Path | str) -> None:
    """Raise CheckpointError for NaN or infinity. Python's JSON parser accepts them, and outputs would become NaN."""
    for where, number in _numbers(value, ""):
        if not math.isfinite(number):
            raise CheckpointError(f"{file}: {where} must be a finite number, got {number}; mend the file")


def _numbers(value: Any, where: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield where, value
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(inner, f"{where}.{key}".lstrip("."))


def _check_dtype(raw: dict[str, Any], file: Path) -> None:
    """Check the dtypes of the model and of its text model. transformers would accept any attribute of torch."""
    for part in (raw, raw.get("text_config")):
        for name in ("dtype", "torch_dtype"):
            value = part.get(name) if isinstance(part, dict) else None
            if value is None or isinstance(value, dict):  # a dict has one dtype for each part of a multimodal model
                continue
            if not isinstance(value, str) or getattr(torch, value.removeprefix("torch."), None) not in PLAIN_DTYPES:
                known = ", ".join(map(dtype_name, PLAIN_DTYPES))
                raise CheckpointError(f"{file}: {name} must be one of {known}, got {value!r}; mend the file")


def _check_sizes(config: Any, file: Path | str) -> None:
    """Raise CheckpointError for a size that is no positive integer. torch's own error would not name the field."""
    for each in (*_SIZES, *_SIZES_IF_ANY):
        name = config.attribute_map.get(each, each)
        size = getattr(config, name, None)
        if size is None and each in _SIZES_IF_ANY:
            continue
        sizes: list[Any] = [size]
        if isinstance(size, list) and isinstance(getattr(type(config)(), name, None), list | tuple):
            sizes = size or [None]  # the class has several sizes: ERNIE 4.5 VL's of experts for text and for images
        if any(type(one) is not int or one < 1 for one in sizes):
            raise CheckpointError(f"{file}: {name} must be a positive integer, got {size!r}; mend the file")
