"""How commands name a model: a folder, a name on the Hugging Face Hub, a bundled configuration, or a TOML file."""

from __future__ import annotations

import importlib.util
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ep_moe.checkpoint.hub import model_folder
from ep_moe.checks import did_you_mean
from ep_moe.cli.output import note
from ep_moe.config import MoEConfig, load_model_config, model_configs
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError

FORMS = "a folder with config.json, a Hub id (org/model), a bundled config, or a path that ends in .toml"
DEMO = "demo"

ModelArgument = Annotated[str | None, typer.Argument(metavar="[MODEL]", help=f"{FORMS[0].upper()}{FORMS[1:]}.")]


class ModelKind(Enum):
    """What a name stands for: a folder or Hub id, or sizes alone."""

    CHECKPOINT = "checkpoint"
    SIZES = "sizes"


def model_named(command: str, model: str | None, default: str | None = None, /, **old: str | None) -> str:
    """Take the model of a command from its first argument, or from an option of an earlier release.

    Args:
        command: Its name, for errors.
        model: The argument.
        default: Where nothing is given. None: an error.
        **old: Values of options that an earlier release had, by name.

    Returns:
        The name.

    Raises:
        ConfigError: no model, or more than one.
    """
    found = [] if model is None else [model]
    for option, value in old.items():
        if value is not None:
            found.append(value)
            note(f"note: --{option} is deprecated, the next release has none; write ep-moe {command} {value}")
    if len(found) > 1:
        raise ConfigError(f"{command} takes one model, got {' and '.join(found)}; leave out one of them")
    if not found and default is None:
        raise ConfigError(f"{command} needs a model as its first argument: {FORMS}")
    return found[0] if found else str(default)


def kind_of(model: str) -> ModelKind:
    """Say what a name stands for. A folder comes before a bundled configuration of the same name.

    Args:
        model: The name.

    Returns:
        Its kind. A name with a slash is a checkpoint's, whether there is one or not.

    Raises:
        ConfigError: it has none of the four forms; lists the bundled configurations.
    """
    if Path(model).is_dir():
        return ModelKind.CHECKPOINT
    if model.endswith(".toml") or model in (known := model_configs()):
        return ModelKind.SIZES
    if "/" in model:
        return ModelKind.CHECKPOINT
    raise ConfigError(
        f"no bundled config is named {model!r}{did_you_mean(model, known)}; there are {', '.join(known)}, or give a "
        f"folder with config.json, a Hub id (org/model), or a path that ends in .toml"
    )


def checkpoint_named(model: str) -> str | None:
    """Check a model whose weights are needed.

    Args:
        model: The name.

    Returns:
        A folder or Hub id; None for the bundled demo, the only configuration that has weights.

    Raises:
        ConfigError: it has sizes alone.
    """
    if kind_of(model) is ModelKind.CHECKPOINT:
        return model
    if model == DEMO:
        return None
    raise ConfigError(
        f"{model} is a config: it has sizes and no weights; give a folder, a Hub id (org/model), or {DEMO}"
    )


def sizes_named(model: str) -> str | MoEConfig:
    """Find the sizes of a model's MoE layers in this process alone.

    Args:
        model: The name.

    Returns:
        What `load_model_config` takes; of a checkpoint, the layers' configuration.

    Raises:
        ConfigError: no such model, or its layers have no configuration of ours.
        CheckpointError: the folder or Hub id cannot be had.
    """
    if kind_of(model) is ModelKind.SIZES:
        return model
    _need_transformers(model)
    from ep_moe.integrations.families import checked_config

    return checked_config(model_folder(model, weights=False))[1]


def layer_config(model: str, context: EPContext) -> MoEConfig:
    """As `sizes_named`, on all ranks together.

    Args:
        model: The same name on all ranks.
        context: The ranks.

    Returns:
        The layers' configuration.

    Raises:
        ConfigError: on all ranks, as `sizes_named`.
        CheckpointError: on all ranks, as `sizes_named`.
    """
    if kind_of(model) is ModelKind.SIZES:
        return load_model_config(model).moe
    from ep_moe.integrations.transformers import read_moe_config

    return read_moe_config(model, context)


def _need_transformers(model: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"{model} is a checkpoint, whose config.json needs transformers; install ep-moe[hf]")
