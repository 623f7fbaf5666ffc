"""Weights that a trainer pushes into serving layers: tensors in memory, one after another, under published names.

They are put together layer by layer, and read as those of a folder are. A rank keeps the matrices of its own experts,
and of others the dtype and shape alone.
"""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ep_moe.checkpoint.formats import ExpertFormat
from ep_moe.checkpoint.model_names import CheckpointNames, names_of
from ep_moe.checkpoint.reader import checked, loading, quantised_again, read_experts, read_rest, replacing
from ep_moe.checkpoint.source import MemorySource, our_name
from ep_moe.checkpoint.unexpected_tensors import left_out
from ep_moe.errors import CheckpointError, InputError
from ep_moe.layer import MoELayer
from ep_moe.renamed import renamed_in
from ep_moe.runtime.devices import on_device
from ep_moe.weights.parts import full

ORIGIN = "the pushed weights"
Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
_OF_HEADERS = "weight_shape"  # numbers that are looked at together with shapes and dtypes
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")


def load_layer_weights(layers: Mapping[int, MoELayer], weights: Weights, family: str | CheckpointNames) -> set[str]:
    """Write a trainer's weights into layers that serve: experts, router, shared experts. No file is written or read.

    Collective: all ranks pass the same tensors, between two calls. The trainer's layout does not matter, nor do the
    layers' map and scheme: a quantized layer quantizes numbers, and keeps codes of its own scheme. What is checked and
    refused is that of `load_layers`. Addresses stay, so that captured CUDA graphs compute with the new weights.

    From the first write on, calls of the layers are refused until all weights are there. After an error they are served
    again only if nothing was written. Names, shapes and dtypes of a mapping are all checked before the first write.
    Those of an iterable are checked layer by layer.

    Args:
        layers: Number in the names -> layer.
        weights: Whole tensors by published name, as a mapping or as pairs. DTensors are gathered, one at a time.
            Tensors of one layer come side by side: of a layer that is not complete yet, a rank holds its own experts,
            and tensors of all experts whole. A tensor of a pair may be overwritten once the next one is asked for.
        family: A name in `ep_moe.checkpoint.model_names.CHECKPOINT_NAMES`, or names of the caller's.

    Returns:
        The names that were loaded. Others belong to no block of `layers`, and are left to the caller.

    Raises:
        CheckpointError: on all ranks, where a tensor of any of them is missing, superfluous or wrong.
        InputError: on all ranks, where something is no pair of name and tensor, or ranks hold different weights.
        ConfigError: the family is not known.
    """
    if not layers:
        raise InputError("layers must have at least one layer, got none")
    called = family if isinstance(family, str) else "of the caller's"
    return push(weights, LayerTarget(layers, names_of(family), called))


class Staged(NamedTuple):
    """A part that was looked at.

    covers: what of the target it fills; names: of its tensors that are read; plan: for `Target.write`
    """

    covers: frozenset[Any]
    names: Collection[str]
    plan: Any


class Target(ABC):
    """What weights are pushed into.

    layers: whose calls are refused meanwhile; said: sentences of the one warning
    """

    def __init__(self, layers: Collection[MoELayer]) -> None:
        self.layers, self.said = layers, dict[str, None]()
        context = next(iter(layers)).context
        if any(layer.context is not context for layer in layers):
            raise InputError("layers must be of one EPContext; push into those of each context by itself")
        context._check_alive()
        if not context._idle:
            raise InputError(f"weights are loaded between two calls, and {context._inside} is in one; call it behind")
        self.context = context
        self.own = {expert for layer in layers for expert in layer.expert_weights.held}

    @abstractmethod
    def part(self, name: str) -> str | None:
        """What is written together with a tensor of this name; None for a tensor that is not wanted."""

    @abstractmethod
    def stage(self, tensors: Mapping[str, Tensor], *, headers: bool) -> Staged:
        """Look at the tensors of a part, and at all numbers that are wanted outside the experts.

        Raises CheckpointError, also where some are missing. headers: the tensors have no numbers
        """

    @abstractmethod
    def write(self, plan: Any) -> None:
        """What `stage` found. Raises CheckpointError for numbers that cannot be written."""

    @abstractmethod
    def check_whole(self, covered: Set[Any]) -> None:
        """Raise CheckpointError unless these are all that is to be filled."""


def push(weights: Weights, target: Target) -> set[str]:
    """As `load_layer_weights`. Returns the names that were loaded."""
    context = target.context
    with on_device(context.device):
        if isinstance(weights, Mapping):
            with loading(ORIGIN, context.consensus):
                _check(weights, target)
        with replacing(target.layers, ORIGIN) as replaced:
            arrived = _Arrived(target, replaced, copies=not isinstance(weights, Mapping))
            with loading(ORIGIN, context.consensus):
                _receive(weights, arrived)
            with loading(ORIGIN, context.consensus):
                for layer in target.layers:
                    layer._checks.look_again(layer)
    if target.said:
        warnings.warn(f"{ORIGIN}: {'; '.join(target.said)}", stacklevel=3)
    return arrived.loaded


def _check(weights: Mapping[str, Tensor], target: Target) -> None:
    """All that a mapping says without its numbers."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in weights.items():
        part = target.part(_checked_name(name))
        if part is not None:
            tensor = _checked_tensor(name, value)
            parts.setdefault(part, {})[name] = tensor if name.endswith(_OF_HEADERS) else _header(tensor)
    staged = [target.stage(tensors, headers=True) for tensors in parts.values()]
    target.check_whole(frozenset().union(*(one.covers for one in staged)))


def _receive(weights: Weights, arrived: _Arrived) -> None:
    """A rank that meets a problem takes the rest all the same: peers may gather each tensor together with it."""
    problem: Exception | None = None
    for pair in weights.items() if isinstance(weights, Mapping) else weights:
        try:
            name, value = _pair(pair)
            tensor = full(value)
            if problem is None:
                arrived.take(name, tensor)
        except Exception as error:
            problem = problem or error
    if problem is not None:
        raise problem
    arrived.end()


class _Arrived:
    """Tensors until their part is complete, and then written.

    copies: of tensors that may be overwritten afterwards
    """

    def __init__(self, target: Target, replaced: Any, *, copies: bool) -> None:
        self._target, self._replaced, self._copies = target, replaced, copies
        self._pending: dict[str, dict[str, Tensor]] = {}
        self._written: set[str] = set()
        self._covered: set[Any] = set()
        self._newest: str | None = None
        self.loaded: set[str] = set()

    def take(self, name: str, tensor: Tensor) -> None:
        part = self._target.part(_checked_name(name))
        if part is None:
            return
        if self._newest is not None and part != self._newest:
            self._try(self._newest)
        self._newest = part
        if name in self.loaded or name in self._pending.get(part, ()):
            raise CheckpointError(f"{name} is there twice; push each tensor once")
        if part in self._written:
            raise CheckpointError(f"{name} comes behind all that {part} has; remove it, or push {part} in one piece")
        self._pending.setdefault(part, {})[name] = self._kept(name, _checked_tensor(name, tensor))

    def _kept(self, name: str, tensor: Tensor) -> Tensor:
        found = _EXPERT.search(name)
        if found is not None and int(found[1]) not in self._target.own and tensor.dim() > 1:
            return _header(tensor)
        return tensor.detach().to(self._target.context.device, copy=True) if self._copies else tensor.detach()

    def _try(self, part: str) -> None:
        """Write a part if it is complete. If not, more of it may come, or the end, which says what is wrong."""
        if part in self._pending:
            try:
                staged = self._target.stage(self._pending[part], headers=False)
            except CheckpointError:
                return
            self._write(part, staged)

    def _write(self, part: str, staged: Staged) -> None:
        self._replaced.written |= bool(staged.covers)
        self._target.write(staged.plan)
        del self._pending[part]
        if staged.covers:  # else more of the part may come: nothing of it has a place so far
            self._written.add(part)
        self._covered |= staged.covers
        self.loaded |= set(staged.names)

    def end(self) -> None:
        for part in list(self._pending):
            self._write(part, self._target.stage(self._pending[part], headers=False))
        self._target.check_whole(self._covered)


def part_of(name: str) -> str:
    """The layer that a tensor of a model belongs to, else its module."""
    found = _LAYER.match(name)
    return name.rpartition(".")[0] if found is None else found[0]


def _pair(pair: Any) -> tuple[str, Any]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InputError(f"weights must be pairs of name and tensor, got {type(pair).__name__}")
    return _checked_name(pair[0]), pair[1]


def _checked_name(name: Any) -> str:
    if not isinstance(name, str):
        raise InputError(f"the name of a weight must be a str, got {type(name).__name__}")
    return name


def _checked_tensor(name: str, tensor: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_meta:
        what = "on the meta device" if tensor.is_meta else str(tensor.layout)
        raise InputError(f"{name} must be a dense tensor with numbers, got one {what}")
    return tensor


def _header(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class LayerTarget(Target):
    """Layers of a family, as `load_layers` fills them.

    Args:
        layers: Number in the names -> layer.
        names: Of the family.
        called: The family, for a sentence.
    """

    def __init__(self, layers: Mapping[int, MoELayer], names: CheckpointNames, called: str) -> None:
        super().__init__(list(layers.values()))
        self._by_number, self._names, self._called = dict(layers), names, called
        prefixes = [prefix for prefix in (names.block, names.resaved) if prefix is not None]
        self._blocks = {
            number: tuple(f"{prefix.format(layer=number)}." for prefix in prefixes) for number in self._by_number
        }
        self._numbers = {part_of(block): number for number, blocks in self._blocks.items() for block in blocks}

    def part(self, name: str) -> str | None:
        name = our_name(name, ())
        part = part_of(name)
        number = self._numbers.get(part)
        return part if number is not None and name.startswith(self._blocks[number]) else None

    def stage(self, tensors: Mapping[str, Tensor], *, headers: bool) -> Staged:
        source = MemorySource(tensors, ORIGIN, called=our_name)
        number = self._numbers[part_of(our_name(next(iter(tensors)), ()))]
        layer = self._by_number[number]
        block, form, leaves = checked(source, self._names, number, layer, self._called)
        said = [left_out(leaves.items())] if leaves else []
        self.said |= dict.fromkeys(said + quantised_again(source, [(layer, block, form)]))
        return Staged(frozenset([number]), tensors.keys(), (number, source, block, form))

    def write(self, plan: tuple[int, MemorySource, str, ExpertFormat]) -> None:
        number, source, block, form = plan
        read_experts(self._by_number[number], source, block, form)
        read_rest(self._by_number[number], source, block, self._names)

    def check_whole(self, covered: Set[Any]) -> None:
        for number in sorted(self._by_number.keys() - covered):
            checked(MemorySource({}, ORIGIN), self._names, number, self._by_number[number], self._called)


if not TYPE_CHECKING:  # checkers know the new names alone
    __getattr__ = renamed_in(__name__, {"load_weights": ("load_layer_weights", load_layer_weights)})
