"""Record the routes of a model's calls, such as a rollout, save them to a file, and replay them in training."""

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
# attributes of wrappers, which are removed from the names of layers
_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


class RoutingRecord:
    """The recorded routes of a model's layers.

    Args:
        buffers: The buffers, by the name of the layer in the model, without the names of wrappers.
    """

    def __init__(self, buffers: Mapping[str, RoutingBuffer]) -> None:
        self.buffers = dict(buffers)

    def reset(self) -> None:
        """Discard all recorded rows. Does not synchronize the device."""
        for buffer in self.buffers.values():
            buffer.reset()

    def ids(self) -> dict[str, Tensor]:
        """Return the recorded ids by layer name, as `replay_routing` takes them. Synchronizes the device.

        Returns:
            int32 [N, K] for each layer, in the order in which the N rows were recorded.

        Raises:
            InputError: More rows were recorded than the buffers hold.
        """
        return {name: self._read(name)[0] for name in self.buffers}

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: `<layer>.ids`, int32 [N, K], and `<layer>.weights`, float32 [N, K], if recorded.

        Args:
            path: The path of the file. Each rank has its own rows, and must write its own file.

        Raises:
            InputError: More rows were recorded than the buffers hold.
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
    """Read the ids of a file that `RoutingRecord.save` wrote.

    Args:
        path: The path of the file.

    Returns:
        int32 [N, K] by layer name, on the CPU.

    Raises:
        ConfigError: The file cannot be read, or is not a record of routing.
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
    """Record the routes of every `MoELayer` of a model that is called in the `with` block.

        with record_routing(model, rows=4096) as record:
            model.generate(...)
        record.save("routing-0.safetensors")

    See `MoELayer.record_routing`.

    Args:
        model: The model with the layers.
        rows: The capacity: the total number of rows of all calls of one layer.
        weights: Record weights in addition to ids.

    Yields:
        The record.

    Raises:
        ConfigError: The model has no `MoELayer`.
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
    """Let every `MoELayer` of a model use recorded ids in each of its calls in the `with` block.

        with replay_routing(model, load_routing("routing-0.safetensors"), mask=recorded):
            model(tokens).logits.sum().backward()

    See `MoELayer.replay_routing`. Ids on another device are copied to that of the layer.

    Args:
        model: The model with the layers.
        ids: Integer [..., K] of T rows, by layer name. Names of other layers are ignored, so that a pipeline stage can
            be given the ids of the whole model.
        mask: bool [...] of T elements, True for rows that use these ids. Default: all rows.

    Yields:
        Nothing.

    Raises:
        ConfigError: The model has no `MoELayer`, or ids is not a mapping.
    """
    layers = _layers(model, "replay_routing")
    check_kind("replay_routing: ids", ids, Mapping)
    with ExitStack() as undo:
        for name, layer in layers.items():
            given = ids.get(name)
            here = given.to(layer.device) if isinstance(given, Tensor) else given
            kept = mask.to(layer.device) if isinstance(mask, Tensor) else mask
            undo.enter_context(layer.replay_routing(here, kept))  # the layer's call raises on all ranks if this is None
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
