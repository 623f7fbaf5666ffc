"""Heads of transformers models: which a checkpoint names, and those that it has not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from ep_moe.errors import ConfigError

_TASKS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_SEED = 0  # of a head that is drawn: all ranks hold the same one


def classifies(config: Any) -> tuple[str, str] | None:
    """The class of config.json that is no language model, and the end of its auto class's name."""
    for name in config.architectures or ():
        for task in _TASKS:
            if name.endswith(task):
                return name, task
    return None


def made_by(model_class: Any, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A model of a class, or of an auto class. Raises ConfigError."""
    if hasattr(model_class, "_from_config"):
        made: PreTrainedModel = model_class._from_config(config, dtype=dtype)
        return made
    if not hasattr(model_class, "from_config"):
        raise ConfigError(f"model_class must be a model class of transformers or an auto class, got {model_class!r}")
    try:
        made = model_class.from_config(config, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        raise ConfigError(f"model_class={model_class.__name__}: {str(error).splitlines()[0]}") from error
    return made


def head_names(model: PreTrainedModel) -> list[str]:
    """Tensors outside the base model, that a checkpoint of another head may not have."""
    base = f"{model.base_model_prefix}."
    return [name for name in model.state_dict() if not name.startswith(base)]


def draw_head(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Initialise the modules of these tensors as transformers does, alike on all ranks."""
    gpus = [index for index in [model.device.index] if index is not None and model.device.type == "cuda"]
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(_SEED)
        for path in dict.fromkeys(name.rpartition(".")[0] for name in sorted(names)):
            module = model.get_submodule(path)
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                if hasattr(tensor, "_is_hf_initialized"):
                    del tensor._is_hf_initialized
            if hasattr(module, "_is_hf_initialized"):
                del module._is_hf_initialized
            model._init_weights(module)
