"""Load Hugging Face safetensors into layers. Each rank reads the bytes of its own experts only."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor

from ep_moe.checkpoint.formats import ExpertFormat, Fused, PerExpert, Source, Stacked, find_format, wrong_tensors
from ep_moe.checkpoint.hub import HubOptions, model_folder
from ep_moe.checkpoint.model_names import CheckpointNames, names_of
from ep_moe.checkpoint.quantization_config import DeclaredQuantization, unsupported_message
from ep_moe.checkpoint.quantized_experts import matrix_to_requantize, read_quantized, wrong_scheme
from ep_moe.checkpoint.source import CheckpointSource, TensorSource
from ep_moe.checkpoint.stored import check_finite, check_fits, input_scales, read_scales, wrong_dtype
from ep_moe.checkpoint.unexpected_tensors import left_out, other_family, refusal, unread
from ep_moe.checks import shown
from ep_moe.errors import CheckpointError, ConfigError, EPMoEError, InputError, OutOfMemory, PeerTimeout
from ep_moe.experts.shared_experts import SharedExperts
from ep_moe.layer import MoELayer
from ep_moe.parallel.consensus import StoreConsensus
from ep_moe.parallel.layout import split_range
from ep_moe.placement.expert_map import EMPTY
from ep_moe.quant.schemes import PLAIN, SCHEMES
from ep_moe.router import Router
from ep_moe.runtime.progress import Progress


def load_layers(
    layers: Mapping[int, MoELayer],
    path: str | Path,
    family: str | CheckpointNames,
    *,
    progress: bool = True,
    **hub: Unpack[HubOptions],
) -> CheckpointSource:
    """Load experts, router and shared experts of layers from a checkpoint.

    Every rank first checks names, shapes and dtypes of all experts from the files' headers. Once all ranks agree, each
    rank reads its own experts. Each tensor of a layer's block is read, known to be harmless, or refused. Tensors that
    the caller must load are named in one warning: shared experts if the layer has none, and the weights of a custom
    router. If loading fails after weights were written, the layers refuse calls until a later loading succeeds.

    Args:
        layers: The layers, by their number in the checkpoint.
        path: The folder of a checkpoint, or the name of a model on the Hugging Face Hub.
        family: A name in `ep_moe.checkpoint.model_names.CHECKPOINT_NAMES`, or the names themselves.
        progress: Show the progress on rank 0: a bar on a terminal, otherwise lines on stderr.
        hub: `revision`, `token`, `cache_dir`, `local_files_only` and `subfolder`, as in `from_pretrained`.

    Returns:
        The source, for its `bytes_read`.

    Raises:
        CheckpointError: A rank cannot load. All ranks raise.
        ConfigError: The family is not known.
    """
    names = names_of(family)
    check_layers(layers)
    consensus = next(iter(layers.values())).context.consensus
    folder = model_folder(path, consensus, **hub)
    called = family if isinstance(family, str) else "of the caller's"
    with load_errors_on_all_ranks(folder, consensus):
        source = CheckpointSource(folder)
        plan = [(layer, *check_layer_block(source, names, number, layer, called)) for number, layer in layers.items()]
        leaves = [leaf for *_, found in plan for leaf in found.items()]
        said = [left_out(leaves)] if leaves else []
        said += other_family(folder, family) if isinstance(family, str) else []
        said += requantization_warnings(source, ((layer, block, form) for layer, block, form, _ in plan))
        if said:
            warnings.warn(f"{folder}: {'; '.join(said)}", stacklevel=2)
    first = plan[0][0].context.layout.place == 0
    total = sum(_slots(layer) for layer, *_ in plan)
    with (
        refuse_calls_while_writing(layers.values(), str(folder)) as replaced,
        load_errors_on_all_ranks(folder, consensus),
        Progress(total, "loading", "expert", shown=progress and first) as bar,
    ):
        replaced.written = True
        for layer, block, form, _ in plan:
            read_experts(layer, source, block, form, bar)
            read_rest(layer, source, block, names)
    return source


def check_layers(layers: object) -> None:
    """Raise InputError unless a mapping gives at least one layer."""
    if not isinstance(layers, Mapping) or not layers:
        got = "none" if isinstance(layers, Mapping) else shown(layers)
        raise InputError(f"layers must have at least one layer, as {{0: layer}} by its number, got {got}")
    for number, layer in layers.items():
        if not isinstance(layer, MoELayer):
            raise InputError(f"layers[{number!r}] must be a MoELayer, got {type(layer).__name__}")


@contextmanager
def load_errors_on_all_ranks(path: str | Path, consensus: StoreConsensus) -> Iterator[None]:
    """Raise an exception of the `with` block on all ranks, as an error of `ep_moe` that names the path.

    Args:
        path: The checkpoint, for messages.
        consensus: The consensus of the ranks that load.

    Raises:
        OutOfMemory: The device of a rank has too little memory.
        CheckpointError: A rank raised it, or an exception that is not in `ep_moe.errors`.
        EPMoEError: A rank raised it.
    """
    with consensus.propagate_errors("checkpoint"):
        try:
            yield
        except CheckpointError as error:
            if error.agreed_by is not None or str(path) in str(error):
                raise
            raise CheckpointError(f"{path}: {error}") from error
        except EPMoEError:
            raise
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{path}: the device has no room for the weights: {error}; use more ranks, or quantization"
            ) from error
        except Exception as error:
            raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error


@dataclass
class Replaced:
    """The state of `refuse_calls_while_writing`. written: whether this rank has written any weight"""

    written: bool = False


@contextmanager
def refuse_calls_while_writing(layers: Collection[MoELayer], origin: str) -> Iterator[Replaced]:
    """Refuse calls of the layers while the `with` block replaces their weights.

    An exception in the block must be raised on all ranks, as `load_errors_on_all_ranks` does. Calls are allowed again
    when the block ends, or if it raised before any rank wrote a weight, so that the old weights are intact. A migration
    of EPLB that is in progress starts again.

    Args:
        layers: The layers whose weights are replaced.
        origin: The source of the new weights, for messages.
    """
    context = next(iter(layers)).context
    served = {layer: layer._unfinished for layer in layers}
    for layer in layers:
        layer._unfinished = origin
        layer.expert_weights.updates += 1  # once here, equal on all ranks: they may fail after different writes
    replaced = Replaced()
    _settled(context.device)
    try:
        yield replaced
    except EPMoEError as error:
        agreed = error.agreed_by is not None and not isinstance(error, PeerTimeout)
        if agreed and not _any_rank(context.consensus, replaced.written):
            for layer, before in served.items():
                layer._unfinished = before
        raise
    _settled(context.device)
    for layer in layers:
        layer._unfinished = ""


def _any_rank(consensus: StoreConsensus, here: bool) -> bool:
    try:
        consensus.raise_on_all_ranks("weights", ConfigError("written") if here else None)
    except ConfigError:
        return True
    return False


def _settled(device: torch.device) -> None:
    """Synchronize all streams of a GPU. Earlier calls, on any stream, read the old weights, and later calls the new."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def requantization_warnings(source: TensorSource, plan: Iterable[tuple[MoELayer, str, ExpertFormat]]) -> list[str]:
    """Return a warning if a layer's scheme requantizes experts that the checkpoint has in another scheme, or []."""
    for layer, block, form in plan:
        scheme = layer.expert_weights.scheme
        matrix = matrix_to_requantize(form, source, block, layer.config, scheme)
        if matrix is not None:
            ranges = matrix.has_input_scale()
            readable = [name for name, one in SCHEMES.items() if ranges or not one.activations.calibrated]
            keep = [name for name in readable if matrix.matches_scheme(name)]
            return [
                f"experts are {matrix.description}, and quantization {scheme.name} quantizes their numbers a second "
                f"time; quantization {' or '.join([*keep, PLAIN.name])} does not"
            ]
    return []


def largest_input_scale(
    path: str | Path,
    family: str,
    *,
    layers: Collection[int] | None = None,
    num_experts: int | None = None,
    top: float | None = None,
) -> float:
    """Return the largest calibrated input scale of a checkpoint, for rows sent in fp8_tensor or nvfp4.

    Use the result as `Wire.input_scale`. Only the scales of the experts' gate and up projections are read.

    Args:
        path: The folder of a calibrated checkpoint.
        family: A name in `ep_moe.checkpoint.model_names.CHECKPOINT_NAMES`.
        layers: Numbers of the model's MoE layers. Default: all below `num_hidden_layers` in config.json. A checkpoint
            may have further layers after them, for multi-token prediction (MTP).
        num_experts: Number of experts of a layer. Default: all in the checkpoint.
        top: The largest number of the rows' format, 448 for E4M3 and 2688 for NVFP4. Scales that were calibrated for
            another format are converted. Default: no conversion.

    Returns:
        The largest scale of all these layers.

    Raises:
        CheckpointError: A scale is not a positive number, or the checkpoint has no scales.
    """
    names, source = names_of(family), CheckpointSource(path)
    known = [each for each in names.experts if isinstance(each, PerExpert | Stacked)]
    ours = {each.gate for each in known} | {each.up for each in known}
    ours |= {each.gate_up for each in names.experts if isinstance(each, Fused)}
    if layers is None:
        layers = range(source.declared.layers) if source.declared.layers is not None else None
    found = []
    for name, weight, reciprocal, layer, expert in input_scales(source.names(), names.block, ours):
        if (layers is None or layer in layers) and (num_experts is None or expert is None or expert < num_experts):
            matrix = source.matrix(weight) if source.has(weight) else None
            wrong = wrong_dtype(source, name, exponents=False) if matrix is None else matrix.wrong_input_scale()
            if wrong is not None:
                raise CheckpointError(f"{path}: {wrong}")
            scales = read_scales(source, name, positive=reciprocal)
            ratio = 1.0 if top is None or matrix is None else matrix.input_range / top
            found.append(float((1 / scales if reciprocal else scales).max()) * ratio)
    if not found or max(found) == 0:
        raise CheckpointError(f"{path} has no input scales of experts: it was not calibrated; choose another wire")
    return max(found)


def _slots(layer: MoELayer) -> int:
    return sum(expert != EMPTY for expert in layer.expert_weights.local_experts)


@torch.no_grad()
def read_experts(layer: MoELayer, source: Source, block: str, found: ExpertFormat, bar: Any = None) -> None:
    """Read this rank's shards of its experts into their slots. An expert with several slots is read once."""
    weights, config = layer.expert_weights, layer.config
    if weights.scheme.activations.calibrated:
        wrong = wrong_scheme(found, source, block, config, weights.scheme)
        if wrong is not None:
            raise CheckpointError(f"{block}: {wrong}")
    weights.updates += 1
    inner = split_range(config.intermediate_size, weights.etp.size, weights.etp.rank)
    by_expert: dict[int, list[int]] = {}
    for slot, expert in enumerate(weights.local_experts):
        if expert != EMPTY:
            by_expert.setdefault(expert, []).append(slot)
    for expert, slots in by_expert.items():
        tensors = _expert(layer, source, block, found, expert, inner)
        assert tensors.keys() == weights.weight_layout.canonical.keys(), "format and configuration disagree"
        weights.write(slots, tensors)
        if bar is not None:
            bar.update(len(slots))


def _expert(
    layer: MoELayer, source: Source, block: str, found: ExpertFormat, expert: int, inner: tuple[int, int]
) -> dict[str, Tensor]:
    """Read this etp rank's shard of one expert's canonical tensors.

    Codes of the layer's scheme are kept. Other tensors are dequantized, and quantized if the layer is.
    """
    weights, config, etp = layer.expert_weights, layer.config, layer.expert_weights.etp
    if weights.scheme.plain:
        plain = found.read(source, block, config, expert, inner)
        return {n: check_fits(f"{block}, expert {expert}, {n}", numbers, weights.dtype) for n, numbers in plain.items()}
    return read_quantized(
        found,
        source,
        block,
        config,
        expert,
        weights.scheme,
        dtype=weights.dtype,
        device=weights.device,
        etp=(etp.size, etp.rank),
    )


@torch.no_grad()
def read_rest(layer: MoELayer, source: Source, block: str, names: CheckpointNames) -> None:
    if isinstance(layer.router, Router):
        for key, tensor in layer.router.state_dict().items():
            full = f"{block}.{names.router[key]}"
            numbers = check_finite(source.location(full), source.read(full))
            tensor.copy_(check_fits(source.location(full), numbers, tensor.dtype))
    if layer.shared_experts is not None and names.shared is not None:
        for key, tensor in layer.shared_experts.state_dict().items():
            full = f"{block}.{names.shared}.{key}"
            tensor.copy_(check_fits(source.location(full), source.read(full), tensor.dtype))


# --- checks before reading --------------------------------------------------------------------------------------------
# Compare a checkpoint with a layer's configuration. Reads headers only.

_ASKED_BY = {"bias": "bias", "e_score_correction_bias": "correction_bias"}  # a Router's tensor -> RoutingConfig's field


Found = tuple[str, ExpertFormat, dict[str, str]]


class DeclaredSource(Source, Protocol):
    """A source with the quantization that its checkpoint declares: a checkpoint on disk, or a module in memory."""

    @property
    def declared(self) -> DeclaredQuantization: ...


class CheckedSource(DeclaredSource, Protocol):
    """A source that also finds tensors of unsupported quantizations: a checkpoint on disk."""

    def unsupported_tensors(self, prefix: str) -> dict[str, str]: ...


def check_layer_block(
    source: CheckedSource, names: CheckpointNames, number: int, layer: MoELayer, family: str
) -> Found:
    """Check the block of a layer in a checkpoint. Raises CheckpointError.

    Args:
        source: The checkpoint.
        names: The names of the family.
        number: The layer's number in the checkpoint.
        layer: The layer to load.
        family: The family's name, for messages.

    Returns:
        The block's prefix, the format of its experts, and a dict from the names that the caller loads to the reason.
    """
    block = names.block_in(source, number)
    if others := source.unsupported_tensors(block):
        name, called = next(iter(others.items()))
        raise CheckpointError(unsupported_message(block, name, called))
    if layer.expert_weights.is_meta:
        raise CheckpointError(f"{layer.name} is on the meta device; call to_empty(device=...) before load_layers")
    return block, *check_block(source, names, block, layer, family)


def check_block(
    source: DeclaredSource, names: CheckpointNames, block: str, layer: MoELayer, family: str, *, in_memory: bool = False
) -> tuple[ExpertFormat, dict[str, str]]:
    """Check a block on disk or in memory, like `check_layer_block`. Raises CheckpointError.

    Args:
        source: The checkpoint or module.
        names: The names of the family.
        block: The prefix of the block.
        layer: The layer to load.
        family: The family's name, for messages.
        in_memory: The block belongs to a model in memory, which is not quantized even if its files are.

    Returns:
        The format of the block's experts, and a dict from the names that the caller loads to the reason.
    """
    found = find_format(source, block, names.experts)
    if found is None:
        markers = " or ".join(known.marker() for known in names.experts)
        said = source.declared.said
        hint = "dequantize it to bf16 if these are codes of that" if said else "is it another family's checkpoint?"
        raise CheckpointError(f"{block} has no experts, {markers} is missing{said}; {hint}")
    wrong = (
        _wrong_layer(layer, found, block)
        or _wrong_router(source, names, block, layer)
        or _wrong_shared(source, names, block, layer)
        or found.unreadable_reason(source, block, layer.config)
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
