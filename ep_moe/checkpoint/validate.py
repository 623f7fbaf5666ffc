"""Whether a checkpoint is what a layer asks for, seen from its headers alone."""

from __future__ import annotations

from typing import Protocol

from ep_moe.checkpoint.declared import Declared, foreign_refusal
from ep_moe.checkpoint.families import CheckpointNames
from ep_moe.checkpoint.formats import ExpertFormat, Source, find_format, wrong_tensors
from ep_moe.checkpoint.kept import wrong_scheme
from ep_moe.checkpoint.unread import refusal, unread
from ep_moe.errors import CheckpointError
from ep_moe.experts.shared_experts import SharedExperts
from ep_moe.layer import MoELayer
from ep_moe.router import Router

_ASKED_BY = {"bias": "bias", "e_score_correction_bias": "correction_bias"}  # a Router's tensor -> RoutingConfig's field


Found = tuple[str, ExpertFormat, dict[str, str]]


class DeclaredSource(Source, Protocol):
    """A checkpoint on disk, or a module in memory."""

    @property
    def declared(self) -> Declared: ...


class CheckedSource(DeclaredSource, Protocol):
    """A checkpoint on disk."""

    def foreign(self, prefix: str) -> dict[str, str]: ...


def checked(source: CheckedSource, names: CheckpointNames, number: int, layer: MoELayer, family: str) -> Found:
    """The block's prefix, the form of its experts, what the caller loads -> why. Raises CheckpointError."""
    block = names.block_in(source, number)
    if others := source.foreign(block):
        name, called = next(iter(others.items()))
        raise CheckpointError(foreign_refusal(block, name, called))
    if layer.expert_weights.is_meta:
        raise CheckpointError(f"{layer.name} is on the meta device; call to_empty(device=...) before load_layers")
    return block, *checked_block(source, names, block, layer, family)


def checked_block(
    source: DeclaredSource, names: CheckpointNames, block: str, layer: MoELayer, family: str, *, in_memory: bool = False
) -> tuple[ExpertFormat, dict[str, str]]:
    """Of a block on disk or in memory, as `checked`. Raises CheckpointError.

    in_memory: the block is that of a model, whose numbers are plain whatever the file has
    """
    found = find_format(source, block, names.experts)
    if found is None:
        markers = " or ".join(known.marker() for known in names.experts)
        said = source.declared.said
        hint = "dequantise it to bf16 if these are codes of that" if said else "is it another family's checkpoint?"
        raise CheckpointError(f"{block} has no experts, {markers} is missing{said}; {hint}")
    wrong = (
        _wrong_layer(layer, found, block)
        or _wrong_router(source, names, block, layer)
        or _wrong_shared(source, names, block, layer)
        or found.wrong(source, block, layer.config)
        or (None if in_memory else wrong_scheme(found, source, block, layer.config, layer.expert_weights.scheme))
    )
    if wrong is not None:
        raise CheckpointError(wrong)
    missed, leaves = unread(source, block, names, found, layer)
    if missed:
        raise CheckpointError(refusal(missed, family))
    return found, leaves


def _wrong_layer(layer: MoELayer, found: ExpertFormat, block: str) -> str | None:
    config = layer.config
    if not config.activation.gated:
        return f"{block}'s experts have a gate, and MoEConfig.activation={config.activation.value} has none"
    if config.expert_bias != found.bias:
        has = "biases" if found.bias else "no biases"
        return f"{block}'s experts have {has}, and MoEConfig.expert_bias={config.expert_bias}"
    return None


def _wrong_router(source: Source, names: CheckpointNames, block: str, layer: MoELayer) -> str | None:
    if not isinstance(layer.router, Router):
        return None
    asked = {key: tuple(tensor.shape) for key, tensor in layer.router.state_dict().items()}
    for key in asked.keys() - names.router.keys():
        return f"{block}'s router has no {key} in this family, and RoutingConfig.{_ASKED_BY[key]}=True asks for it"
    for key in names.router.keys() - asked.keys():
        if source.has(full := f"{block}.{names.router[key]}"):
            return f"{full} is there, and RoutingConfig.{_ASKED_BY[key]}=False leaves it out"
    return wrong_tensors(source, block, {names.router[key]: shape for key, shape in asked.items()})


def _wrong_shared(source: Source, names: CheckpointNames, block: str, layer: MoELayer) -> str | None:
    shared = layer.shared_experts
    if names.shared is None:
        if isinstance(shared, SharedExperts):
            size = layer.config.shared_intermediate_size
            return f"{block} has no shared experts in this family, and MoEConfig.shared_intermediate_size={size}"
        return None
    if shared is None:
        return None
    shapes = {f"{names.shared}.{key}": tuple(tensor.shape) for key, tensor in shared.state_dict().items()}
    return wrong_tensors(source, block, shapes)
