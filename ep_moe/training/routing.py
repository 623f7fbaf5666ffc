"""Routes of a whole model's calls: recorded in a rollout, kept in a file, given to a trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ep_moe.checks import check_kind, check_path
from ep_moe.errors import ConfigError, InputError
from ep_moe.execution.routing_replay import RoutingBuffer
from ep_moe.layer import MoELayer

_IDS, _WEIGHTS = ".ids", ".weights"
_FORMAT = {"format": "ep_moe.routing", "version": "1"}
# modules that wrappers put between a model and its layers
_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


class RoutingRecord:
    """The routes of a model's layers.

    Args:
        buffers: By name of a layer in the model, without the names of wrappers.
    """

    def __init__(self, buffers: Mapping[str, RoutingBuffer]) -> None:
        self.buffers = dict(buffers)

    def reset(self) -> None:
        """Begin at the first row again. Does not wait for the device."""
        for buffer in self.buffers.values():
            buffer.reset()

    def ids(self) -> dict[str, Tensor]:
        """Read ids by name of a layer, as `replay_routing` takes them. Waits for the device.

        Returns:
            int32 [N, K] each, the N rows in the order in which they were recorded.

        Raises:
            InputError: more rows were recorded than there is room for.
        """
        return {name: self._read(name)[0] for name in self.buffers}

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: `<layer>.ids`, int32 [N, K], and `<layer>.weights`, float32 [N, K], if recorded.

        Args:
            path: Of the file. Each rank has rows of its own, and writes a file of its own.

        Raises:
            InputError: more rows were recorded than there is room for.
        """
        check_path("path", path)
        tensors = {}
        for name in self.buffers:
            ids, weights = self._read(name)
            tensors[name + _IDS] = ids.cpu().contiguous()
            if weights is not None:
                tensors[name + _WEIGHTS] = weights.cpu().contiguous()
        save_file(tensors, path, metadata=_FORMAT)

    def _read(self, name: str) -> tuple[Tensor, Tensor | None]:
        try:
            return self.buffers[name].read()
        except InputError as error:
            raise InputError(f"{name}: {error}") from None


def load_routing(path: str | Path) -> dict[str, Tensor]:
    """Read ids of a file that `RoutingRecord.save` wrote.

    Args:
        path: Of the file.

    Returns:
        int32 [N, K] by name of a layer, on the CPU.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    check_path("path", path)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"path={str(path)!r} cannot be read as safetensors: {error}") from None
    found = {name.removesuffix(_IDS): tensor for name, tensor in tensors.items() if name.endswith(_IDS)}
    if not found or len(found) + sum(name.endswith(_WEIGHTS) for name in tensors) != len(tensors):
        raise ConfigError(
            f"path={str(path)!r} holds {', '.join(sorted(tensors)[:4]) or 'nothing'}, and no record of routing; give "
            f"a file that RoutingRecord.save wrote"
        )
    return found


@contextmanager
def record_routing(model: nn.Module, rows: int, *, weights: bool = False) -> Iterator[RoutingRecord]:
    """Record the routes of every `MoELayer` of a model that is called in a block.

        with record_routing(model, rows=4096) as record:
            model.generate(...)
        record.save("routing-0.safetensors")

    As `MoELayer.record_routing`.

    Args:
        model: Holds the layers.
        rows: Rows of all calls of a layer together that there is room for.
        weights: Record weights beside ids.

    Yields:
        The record.

    Raises:
        ConfigError: the model holds no `MoELayer`.
    """
    layers = _layers(model, "record_routing")
    made = {
        name: RoutingBuffer(rows, layer.config.top_k, weights=weights, device=layer.device)
        for name, layer in layers.items()
    }
    with ExitStack() as undo:
        for name, layer in layers.items():
            undo.enter_context(layer.record_routing(made[name]))
        yield RoutingRecord(made)


@contextmanager
def replay_routing(model: nn.Module, ids: Mapping[str, Tensor], mask: Tensor | None = None) -> Iterator[None]:
    """Give recorded ids to every `MoELayer` of a model, for each of its calls in a block.

        with replay_routing(model, load_routing("routing-0.safetensors"), mask=recorded):
            model(tokens).logits.sum().backward()

    As `MoELayer.replay_routing`. Ids on another device are copied to the layer's.

    Args:
        model: Holds the layers.
        ids: Integer [..., K] of T rows by name of a layer. Names of other layers are not used, so that a pipeline
            stage may be given the whole model's.
        mask: bool [...] of T elements, True for rows that take these ids: by sequence, or by token. Default: all.

    Yields:
        Nothing.

    Raises:
        ConfigError: the model holds no `MoELayer`, or ids is no mapping.
    """
    layers = _layers(model, "replay_routing")
    check_kind("replay_routing: ids", ids, Mapping)
    with ExitStack() as undo:
        for name, layer in layers.items():
            given = ids.get(name)
            here = given.to(layer.device) if isinstance(given, Tensor) else given
            kept = mask.to(layer.device) if isinstance(mask, Tensor) else mask
            undo.enter_context(layer.replay_routing(here, kept))  # None is refused in the call, on all ranks
        yield


def _layers(model: nn.Module, what: str) -> dict[str, MoELayer]:
    check_kind(f"{what}: model", model, nn.Module)
    found = {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): module
        for name, module in model.named_modules()
        if isinstance(module, MoELayer)
    }
    if not found:
        raise ConfigError(f"{what} needs a model with MoELayers, got {type(model).__name__} without any")
    return found
