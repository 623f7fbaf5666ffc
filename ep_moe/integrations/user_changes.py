"""Finds changes that a user made to modules of a model, and that a layer which replaces these modules would drop."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ep_moe.errors import ConfigError
from ep_moe.integrations.families import Family, blocks_of
from ep_moe.integrations.find_experts import find_experts

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SCALARS = (bool, int, float, str, type(None), tuple, list)
_REMEDY = "change the configuration before the model is made, and register hooks afterwards"


def family_to_replace(model: PreTrainedModel, family: Family | None, *, fresh: bool = False) -> Family | None:
    """Return the family whose blocks are to be replaced whole; None, with a warning, if that would drop a change.

    A layer that replaces a whole block computes what the configuration says. A block whose router, flags or methods
    were changed therefore stays, and only its experts are replaced.

    Args:
        model: In memory or on the meta device.
        family: The model's family. None if it has none.
        fresh: The model was just made from its configuration.

    Raises:
        ConfigError: A block was changed, and its experts are not a module of their own.
    """
    if family is None or (changed := _changed_block(model, family, fresh)) is None:
        return family
    if not find_experts(model):
        raise ConfigError(f"{changed}, which a MoELayer that replaces the block would ignore; {_REMEDY}")
    warnings.warn(
        f"{changed}: the blocks stay, with their own routers, and their experts alone are replaced; for layers in "
        f"place of whole blocks {_REMEDY}",
        stacklevel=3,
    )
    return None


def changed_methods(module: nn.Module, name: str) -> str | None:
    """Describe a hook or a replaced `forward` of a module; None if it has neither. Ignores transformers' own hooks."""
    for kind in _HOOKS:
        for hook in getattr(module, kind).values():
            if not str(getattr(hook, "__module__", "")).startswith("transformers."):
                return f"{name} has a hook"
    own, written = vars(module).get("forward"), inspect.unwrap(type(module).forward)
    if own is not None or getattr(written, "__module__", None) not in [one.__module__ for one in type(module).__mro__]:
        return f"{name} has another forward than {type(module).__name__} was written with"
    return None


def _changed_block(model: PreTrainedModel, family: Family, fresh: bool) -> str | None:
    blocks = blocks_of(model, family)
    made = dict(blocks)
    if not fresh:
        try:
            with torch.device("meta"):
                made = dict(blocks_of(type(model)._from_config(copy.deepcopy(model.config)), family))
        except Exception as error:
            return f"{type(model).__name__} cannot be made of its configuration to compare its blocks: {error}"
    found = (_change(name, block, made, family.shared) for name, block in blocks)
    return next((each for each in found if each is not None), None)


def _change(name: str, block: nn.Module, made: Mapping[str, nn.Module], shared: str | None) -> str | None:
    """Describe the first difference of a block from the one that the configuration makes; None if there is none.

    shared: the attribute with the shared experts, which are not replaced and so may differ
    """
    if name not in made:
        return f"{name} is a {type(block).__name__}, and no block of its configuration"
    expected, modules = (_modules(name, one, shared) for one in (made[name], block))
    for path in sorted(expected.keys() | modules.keys()):
        module, original = modules.get(path), expected.get(path)
        if module is None or original is None or type(module) is not type(original):
            now, before = (type(one).__name__ if one is not None else "nothing" for one in (module, original))
            return f"{path} is {now}, and {before} by the configuration"
        if (changed := changed_methods(module, path)) is not None:
            return changed
        for attribute, stated in _stated(original).items():
            if (held := vars(module).get(attribute)) != stated:
                return f"{path}.{attribute} is {held!r}, and {stated!r} by the configuration"
    return None


def _modules(name: str, block: nn.Module, shared: str | None) -> dict[str, nn.Module]:
    return {
        f"{name}.{path}".removesuffix("."): module
        for path, module in block.named_modules()
        if shared is None or path.split(".")[0] != shared
    }


def _stated(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and isinstance(value, _SCALARS)
    }
