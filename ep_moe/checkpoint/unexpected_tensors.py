"""Classify tensors of a loaded block that the loader does not read: harmless, left to the caller, or refused.

Outputs would be wrong without a shared expert, a gate, a bias, or an expert. A tensor that is not known to be harmless
is therefore refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ep_moe.checkpoint.formats import ExpertFormat, Source
from ep_moe.checkpoint.hub import read_object
from ep_moe.checkpoint.model_names import ALIASES, CheckpointNames
from ep_moe.checkpoint.quantization_config import DeclaredQuantization
from ep_moe.errors import CheckpointError
from ep_moe.layer import MoELayer
from ep_moe.router import Router

# suffix of a name -> why results are the same without the tensor
HARMLESS = {
    "input_scale": "the range of an input in calibration; the schemes that use it read it, others measure their own",
    "weight_shape": "the shape of a packed matrix, which the configuration gives too",
    "rotary_emb.inv_freq": "computed from the configuration",
}
HARMLESS_NAMES = re.compile(rf"[._]({'|'.join(map(re.escape, HARMLESS))})$")
_SHOWN = 8  # the most kinds of names in one message


def unread(
    source: Source, block: str, names: CheckpointNames, found: ExpertFormat, layer: MoELayer
) -> tuple[list[str], dict[str, str]]:
    """Find the tensors of a block that the loader does not read.

    Args:
        source: The checkpoint.
        block: The prefix of the block.
        names: The names of the family.
        found: The format of the block's experts.
        layer: The layer that is loaded.

    Returns:
        Full names of tensors that would have to be read, and a dict from the prefixes that the caller loads to the
        reason. Both are empty if the whole block is read.
    """
    read, left = _expected(block, names, found, layer)
    read |= {companion for name in read for companion in source.companions(name)}
    missed: list[str] = []
    leaves: dict[str, str] = {}
    for name in source.under(block):
        if name in read or HARMLESS_NAMES.search(name):
            continue
        prefix = next((prefix for prefix in left if name == prefix or name.startswith(f"{prefix}.")), None)
        if prefix is None:
            missed.append(name)
        else:
            leaves[prefix] = left[prefix]
    return missed, leaves


def _expected(
    block: str, names: CheckpointNames, found: ExpertFormat, layer: MoELayer
) -> tuple[set[str], dict[str, str]]:
    """Return the full names that the loader reads, and a dict from the prefixes that the caller loads to the reason."""
    read = set(found.shapes(layer.config))
    left = dict.fromkeys(names.elsewhere, "the family's entry leaves it to the caller")
    if isinstance(layer.router, Router):
        read |= {names.router[key] for key in layer.router.state_dict()}
    else:
        left |= dict.fromkeys(names.router.values(), "the layer has a router of the caller's")
    if names.shared is not None and layer.shared_experts is not None:
        read |= {f"{names.shared}.{key}" for key in layer.shared_experts.state_dict()}
    elif names.shared is not None:
        left[names.shared] = "the layer has no shared experts"
    return {f"{block}.{name}" for name in read}, {f"{block}.{prefix}": why for prefix, why in left.items()}


def refusal(missed: list[str], family: str) -> str:
    """Return the error message about tensors that are not read."""
    return (
        f"family {family!r} does not read {summarize_names(missed)}, and outputs would be wrong without; load with the "
        f"entry of the checkpoint's own family, or pass a ep_moe.checkpoint.model_names.CheckpointNames that names "
        f"them, under `elsewhere` if you load them yourself"
    )


def summarize_names(names: Iterable[str]) -> str:
    """Join names to one line. Names that differ only in numbers are one kind, shown with their count."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "{n}", name), []).append(name)
    parts = [found[0] if len(found) == 1 else f"{kind} ({len(found)} tensors)" for kind, found in kinds.items()]
    more = [f"{len(parts) - _SHOWN} more kinds"] if len(parts) > _SHOWN else []
    return ", ".join(parts[:_SHOWN] + more)


def unused_in_shard(here: Iterable[str], file: str, where: Mapping[str, str], index: str) -> list[str]:
    """Return warnings about tensors of a shard that the index does not assign to it.

    They are not read here, while transformers reads all tensors of each shard, regardless of the index.

    Args:
        here: The names of the tensors in `file`.
        file: The name of the shard.
        where: Tensor -> file by the index, empty without an index.
        index: The name of the index.
    """
    if not where:
        return []
    unnamed = sorted(name for name in here if name not in where)
    twice = sorted(name for name in here if where.get(name, file) != file)
    said = [f"{summarize_names(unnamed)} is not loaded: {index} does not name it"] if unnamed else []
    others = ", ".join(sorted({where[name] for name in twice}))
    return said + ([f"{summarize_names(twice)} is not loaded: {index} has it in {others}"] if twice else [])


def left_out(leaves: Iterable[tuple[str, str]]) -> str:
    """Return the warning about tensors that are not loaded. leaves: (name, reason) pairs of all layers"""
    by_reason: dict[str, list[str]] = {}
    for name, reason in leaves:
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{summarize_names(names)} is not loaded: {reason}" for reason, names in by_reason.items())


def other_family(folder: Path, family: str) -> list[str]:
    """Return a warning if config.json names another family's model, whose routing or activation may differ, or []."""
    try:
        config = read_object(folder / "config.json", "is not a configuration")
    except CheckpointError:  # layers do not need config.json
        return []
    texts = [config, config.get("text_config")]
    kinds = [text.get("model_type") for text in texts if isinstance(text, dict)]
    named = [kind for kind in kinds if isinstance(kind, str)]
    if not named or family in {ALIASES.get(kind, kind) for kind in named}:
        return []
    return [
        f"config.json says model_type {named[-1]!r}, and the names of {family!r} are read; MoEConfig must state that "
        f"model's own routing and activation"
    ]


class _Listed(Protocol):
    @property
    def declared(self) -> DeclaredQuantization: ...

    def names(self) -> Collection[str]: ...

    def companions(self, name: str) -> tuple[str, ...]: ...


def unexpected(model: Any, source: _Listed, blocks: Iterable[str]) -> str | None:
    """Return a warning about tensors outside the MoE blocks that a transformers model has no parameter for, or None.

    Tensors that the model's class ignores, and other parts of a multimodal model, are not listed.
    """
    known = set(model.state_dict())
    known |= {companion for name in known for companion in source.companions(name)}
    parts = {_part(name) for name in known}
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
    inside = tuple(f"{block}." for block in blocks)
    extra = [name for name in source.names() if name not in known and not name.startswith(inside)]
    if source.declared.multimodal:
        extra = [name for name in extra if _part(name) in parts]
    extra = [n for n in extra if not HARMLESS_NAMES.search(n) and not any(each.search(n) for each in ignored)]
    return f"{summarize_names(extra)} is not loaded: {type(model).__name__} has no such weights" if extra else None


def _part(name: str) -> str:
    """Return the part of a model that a tensor belongs to, such as `model.layers` or `lm_head.weight`."""
    return ".".join(name.split(".")[:2])
