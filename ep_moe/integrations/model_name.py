"""Resolves model names of commands and benchmarks: a folder, a Hub id, a bundled configuration, or a TOML file."""

from __future__ import annotations

import functools
import importlib.util
from enum import Enum
from pathlib import Path

from ep_moe.checkpoint.hub import model_folder
from ep_moe.checks import did_you_mean
from ep_moe.config import MoEConfig, load_model_config, model_configs
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError

FORMS = "a folder with config.json, a Hub id (org/model), a bundled config, or a path that ends in .toml"
DEMO = "demo"


class ModelKind(Enum):
    """What a name denotes: a checkpoint (folder or Hub id), or sizes without weights."""

    CHECKPOINT = "checkpoint"
    SIZES = "sizes"


def kind_of(model: str) -> ModelKind:
    """Return what a name denotes. A folder takes precedence over a bundled configuration of the same name.

    Args:
        model: The name.

    Returns:
        Its kind. A name with a slash counts as a checkpoint, whether or not it exists.

    Raises:
        ConfigError: The name has none of the four forms. The message lists the bundled configurations.
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
    """Return the checkpoint that a name denotes, for a caller that needs weights.

    Args:
        model: The name.

    Returns:
        A folder or Hub id. None for the bundled demo, the only bundled configuration with weights.

    Raises:
        ConfigError: The name denotes sizes without weights.
    """
    if kind_of(model) is ModelKind.CHECKPOINT:
        return model
    if model == DEMO:
        return None
    raise ConfigError(
        f"{model} is a config: it has sizes and no weights; give a folder, a Hub id (org/model), or {DEMO}"
    )


def sizes_named(model: str) -> str | MoEConfig:
    """Find the sizes of a model's MoE layers, without other ranks.

    Args:
        model: The name.

    Returns:
        For a bundled configuration or TOML file, the name itself, which `load_model_config` reads. For a checkpoint,
        the configuration of its layers.

    Raises:
        ConfigError: There is no such model, or it is of no known family.
        CheckpointError: The folder or Hub id cannot be read.
    """
    if kind_of(model) is ModelKind.SIZES:
        return model
    _need_transformers(model)
    from ep_moe.integrations.families import checked_config

    return checked_config(model_folder(model, weights=False))[1]


@functools.cache
def config_named(model: str) -> MoEConfig:
    """Read the configuration of a model's MoE layers, without other ranks.

    Args:
        model: The name.

    Returns:
        The layers' configuration.

    Raises:
        ConfigError: As `sizes_named`.
        CheckpointError: As `sizes_named`.
    """
    sizes = sizes_named(model)
    return load_model_config(sizes).moe if isinstance(sizes, str) else sizes


def layer_config(model: str, context: EPContext) -> MoEConfig:
    """Read the configuration of a model's MoE layers. Called by all ranks.

    Args:
        model: The same name on all ranks.
        context: The ranks.

    Returns:
        The layers' configuration.

    Raises:
        ConfigError: On all ranks, as `sizes_named`.
        CheckpointError: On all ranks, as `sizes_named`.
    """
    if kind_of(model) is ModelKind.SIZES:
        return load_model_config(model).moe
    from ep_moe.integrations.transformers import read_moe_config

    return read_moe_config(model, context)


def _need_transformers(model: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"{model} is a checkpoint, whose config.json needs transformers; install ep-moe[hf]")
