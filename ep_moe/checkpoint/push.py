"""Load weights that a trainer pushes into serving layers: tensors in memory, one by one, under published names.

Tensors are collected layer by layer and then read like those of a checkpoint folder. A rank keeps the matrices of its
own experts. Of other experts' matrices it keeps only dtype and shape.
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
from ep_moe.checkpoint.reader import (
    check_layer_block,
    check_layers,
    load_errors_on_all_ranks,
    read_experts,
    read_rest,
    refuse_calls_while_writing,
    requantization_warnings,
)
from ep_moe.checkpoint.source import MemorySource, common_name
from ep_moe.checkpoint.unexpected_tensors import left_out
from ep_moe.errors import CheckpointError, InputError
from ep_moe.layer import MoELayer
from ep_moe.renamed import renamed_in
from ep_moe.runtime.devices import on_device
from ep_moe.weights.parts import full

ORIGIN = "the pushed weights"
Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
_OF_HEADERS = "weight_shape"  # suffix of tensors whose values are needed to check shapes
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")


def load_layer_weights(layers: Mapping[int, MoELayer], weights: Weights, family: str | CheckpointNames) -> set[str]:
    """Write a trainer's weights into serving layers: experts, router and shared experts. Uses no files.

    Collective: all ranks pass the same tensors, between two calls of the layers. The trainer's parallel layout may
    differ from that of the layers. A quantized layer quantizes floating-point tensors, and keeps codes of its own
    scheme. The checks are those of `load_layers`. Addresses do not change, so captured CUDA graphs use the new weights.

    Calls of the layers are refused until all weights are loaded. After an error, the layers can be called again only if
    nothing was written. Names, shapes and dtypes of a mapping are all checked before the first write. Those of an
    iterable are checked layer by layer.

    Args:
        layers: The layers, by their number in the names.
        weights: Whole tensors by published name, as a mapping or as pairs. DTensors are gathered, one at a time.
            Keep the tensors of a layer adjacent: a complete layer is written when the next one starts, and refuses
            later tensors. Until then, a rank holds the matrices of its own experts, and whole tensors of all experts.
            The tensor of a pair may be overwritten once the next pair is requested.
        family: A name in `ep_moe.checkpoint.model_names.CHECKPOINT_NAMES`, or the names themselves.

    Returns:
        The names that were loaded. All other names belong to no block of `layers`, and are left to the caller.

    Raises:
        CheckpointError: A tensor of any rank is missing, superfluous or wrong. All ranks raise.
        InputError: An item is not a pair of name and tensor, or ranks hold different weights. All ranks raise.
        ConfigError: The family is not known.
    """
    check_layers(layers)
    called = family if isinstance(family, str) else "of the caller's"
    return push(weights, LayerTarget(layers, names_of(family), called))


class Staged(NamedTuple):
    """A part (usually a layer) whose tensors were checked.

    covers: the pieces of the target that it fills, such as layer numbers
    names: the tensors that are read
    plan: the argument of `Target.write`
    """

    covers: frozenset[Any]
    names: Collection[str]
    plan: Any


class Target(ABC):
    """The destination of pushed weights.

    layers: layers whose calls are refused during the push
    said: sentences of the warning at its end
    """

    def __init__(self, layers: Collection[MoELayer]) -> None:
        self.layers, self.said = layers, dict[str, None]()
        context = next(iter(layers)).context
        if any(layer.context is not context for layer in layers):
            raise InputError("layers must belong to one EPContext; push to the layers of each context separately")
        context._check_alive()
        if not context._idle:
            raise InputError(
                f"weights must be loaded between calls, and {context._running_call} is running; load them afterwards"
            )
        self.context = context
        self.own = {expert for layer in layers for expert in layer.expert_weights.slots_of_expert}

    @abstractmethod
    def part(self, name: str) -> str | None:
        """Return the part that a tensor is written with, such as its layer, or None if the tensor is not wanted."""

    @abstractmethod
    def stage(self, tensors: Mapping[str, Tensor], *, headers: bool) -> Staged:
        """Check the tensors of a part, and the values of those outside the experts.

        Args:
            tensors: The tensors of the part that have arrived.
            headers: The tensors are on the meta device, so that only shapes and dtypes are checked.

        Raises:
            CheckpointError: A tensor is missing or wrong.
        """

    @abstractmethod
    def write(self, plan: Any) -> None:
        """Write a part that `stage` has checked. Raises CheckpointError for values that cannot be written."""

    @abstractmethod
    def check_whole(self, covered: Set[Any]) -> None:
        """Raise CheckpointError unless `covered` is the whole target."""


def push(weights: Weights, target: Target) -> set[str]:
    """Write weights into a target, as `load_layer_weights` does. Return the names that were loaded."""
    context = target.context
    with on_device(context.device):
        if isinstance(weights, Mapping):
            with load_errors_on_all_ranks(ORIGIN, context.consensus):
                _check(weights, target)
        with refuse_calls_while_writing(target.layers, ORIGIN) as replaced:
            arrived = _Arrived(target, replaced, copies=not isinstance(weights, Mapping))
            with load_errors_on_all_ranks(ORIGIN, context.consensus):
                _receive(weights, arrived)
            with load_errors_on_all_ranks(ORIGIN, context.consensus):
                for layer in target.layers:
                    layer._checks.compare_again(layer)
    if target.said:
        warnings.warn(f"{ORIGIN}: {'; '.join(target.said)}", stacklevel=3)
    return arrived.loaded


def _check(weights: Mapping[str, Tensor], target: Target) -> None:
    """Check names, shapes and dtypes of a whole mapping, before anything is written."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in weights.items():
        part = target.part(_checked_name(name))
        if part is not None:
            tensor = _checked_tensor(name, value)
            parts.setdefault(part, {})[name] = tensor if name.endswith(_OF_HEADERS) else _header(tensor)
    staged = [target.stage(tensors, headers=True) for tensors in parts.values()]
    target.check_whole(frozenset().union(*(one.covers for one in staged)))


def _receive(weights: Weights, arrived: _Arrived) -> None:
    """Pass all weights to `arrived`. After an error, still gather the remaining DTensors, as the peers do."""
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
    """Holds tensors until their part is complete, and then writes the part.

    copies: copy tensors, because their owner may overwrite them
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
            raise CheckpointError(
                f"{name} arrived after all tensors of {part}; remove it, or push the tensors of {part} one after "
                "another"
            )
        self._pending.setdefault(part, {})[name] = self._kept(name, _checked_tensor(name, tensor))

    def _kept(self, name: str, tensor: Tensor) -> Tensor:
        found = _EXPERT.search(name)
        if found is not None and int(found[1]) not in self._target.own and tensor.dim() > 1:
            return _header(tensor)
        return tensor.detach().to(self._target.context.device, copy=True) if self._copies else tensor.detach()

    def _try(self, part: str) -> None:
        """Write a part if it is complete. If not, more of its tensors may follow; `end` raises if none do."""
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
        if staged.covers:  # otherwise nothing of the part was placed yet, and more tensors may follow
            self._written.add(part)
        self._covered |= staged.covers
        self.loaded |= set(staged.names)

    def end(self) -> None:
        for part in list(self._pending):
            self._write(part, self._target.stage(self._pending[part], headers=False))
        self._target.check_whole(self._covered)


def layer_prefix(name: str) -> str:
    """Return the prefix of the layer that a tensor belongs to, or its module's name outside the layers."""
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
    """The target of `load_layer_weights`: layers of a family.

    Args:
        layers: The layers, by their number in the names.
        names: The tensor names of the family.
        called: The family's name in messages.
    """

    def __init__(self, layers: Mapping[int, MoELayer], names: CheckpointNames, called: str) -> None:
        super().__init__(list(layers.values()))
        self._by_number, self._names, self._called = dict(layers), names, called
        prefixes = [prefix for prefix in (names.block, names.resaved) if prefix is not None]
        self._blocks = {
            number: tuple(f"{prefix.format(layer=number)}." for prefix in prefixes) for number in self._by_number
        }
        self._numbers = {layer_prefix(block): number for number, blocks in self._blocks.items() for block in blocks}

    def part(self, name: str) -> str | None:
        name = common_name(name, ())
        part = layer_prefix(name)
        number = self._numbers.get(part)
        return part if number is not None and name.startswith(self._blocks[number]) else None

    def stage(self, tensors: Mapping[str, Tensor], *, headers: bool) -> Staged:
        source = MemorySource(tensors, ORIGIN, called=common_name)
        number = self._numbers[layer_prefix(common_name(next(iter(tensors)), ()))]
        layer = self._by_number[number]
        block, form, leaves = check_layer_block(source, self._names, number, layer, self._called)
        said = [left_out(leaves.items())] if leaves else []
        self.said |= dict.fromkeys(said + requantization_warnings(source, [(layer, block, form)]))
        return Staged(frozenset([number]), tensors.keys(), (number, source, block, form))

    def write(self, plan: tuple[int, MemorySource, str, ExpertFormat]) -> None:
        number, source, block, form = plan
        read_experts(self._by_number[number], source, block, form)
        read_rest(self._by_number[number], source, block, self._names)

    def check_whole(self, covered: Set[Any]) -> None:
        for number in sorted(self._by_number.keys() - covered):
            check_layer_block(MemorySource({}, ORIGIN), self._names, number, self._by_number[number], self._called)


if not TYPE_CHECKING:  # type checkers see only the new names
    __getattr__ = renamed_in(__name__, {"load_weights": ("load_layer_weights", load_layer_weights)})
