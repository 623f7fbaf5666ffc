"""Reading Hugging Face safetensors: each rank reads its own experts' bytes and nothing of the others'."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import torch
from safetensors import safe_open
from torch import Tensor, nn
from tqdm import tqdm

from ep_moe.errors import CheckpointError, EPMoEError, InputError, OutOfMemory
from ep_moe.layer import MoELayer
from ep_moe.parallel.agree import Agreement
from ep_moe.parallel.layout import share
from ep_moe.placement.expert_map import EMPTY
from ep_moe.router import Router
from ep_moe.weights.checkpoint_checks import checked, not_calibrated
from ep_moe.weights.cutting import cut
from ep_moe.weights.dequantize import FP8_BLOCK, dequantize_fp8_blocks, dequantize_fp8_rows
from ep_moe.weights.families import CheckpointNames, names_of
from ep_moe.weights.folder import file_inside, weight_map
from ep_moe.weights.formats import ExpertFormat, PerExpert, Source, input_scale, scalar
from ep_moe.weights.hub import HubOptions, model_folder
from ep_moe.weights.microscale import NVFP4_BLOCK, dequantize_nvfp4
from ep_moe.weights.unread import left_out, other_family

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# checkpoints of multimodal models keep the text model one level deeper
_WRAPPERS = ("language_model.",)
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E8M0": torch.uint8,  # as `raw` gives it
    "F8_E5M2": torch.float8_e5m2,
}


class CheckpointSource:
    """A folder with `model.safetensors.index.json` and its shards, or with one `model.safetensors`.

    Opens only the shards that are asked for. bytes_read: bytes of tensor data read so far.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.bytes_read = 0
        self._open: dict[str, Any] = {}
        self._slices: dict[str, Any] = {}
        self._where = self._index()

    def _index(self) -> dict[str, tuple[str, str]]:
        """Our name of a tensor -> (file, name in the file)."""
        if (self.folder / INDEX).is_file():
            files = weight_map(self.folder / INDEX)
        elif (self.folder / SINGLE).is_file():
            files = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise CheckpointError(f"{self.folder} holds neither {INDEX} nor {SINGLE}; give the folder of a checkpoint")
        where: dict[str, tuple[str, str]] = {}
        for name, file in files.items():
            ours = name.removeprefix(next((w for w in _WRAPPERS if name.startswith(w)), ""))
            if ours in where:
                raise CheckpointError(f"{self.folder} has {ours} twice, as {where[ours][1]} and as {name}; remove one")
            where[ours] = file, name
        for file in set(files.values()):
            file_inside(self.folder, file)
        return where

    def _file(self, file: str) -> Any:
        if file not in self._open:
            path = file_inside(self.folder, file)
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, though {INDEX} names it; fetch the checkpoint again")
            try:
                self._open[file] = safe_open(path, framework="pt")
            except Exception as error:
                raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
        return self._open[file]

    def has(self, name: str) -> bool:
        return name in self._where

    def names(self) -> list[str]:
        return list(self._where)

    def under(self, block: str) -> list[str]:
        return [name for name in self._where if name.startswith(f"{block}.")]

    def companions(self, name: str) -> tuple[str, ...]:
        if not self.has(name):
            return ()
        if self._is_nvfp4(name):
            return f"{name}_scale", f"{name}_scale_2"
        if self._slice(name).get_dtype() != "F8_E4M3":
            return ()
        return (_scale_of(name) if self.has(_scale_of(name)) else f"{name}_scale",)

    def _slice(self, name: str) -> Any:
        if name not in self._slices:
            if name not in self._where:
                raise CheckpointError(f"{name} is missing in {self.folder}")
            file, name_in_file = self._where[name]
            handle = self._file(file)
            try:
                self._slices[name] = handle.get_slice(name_in_file)
            except Exception as error:
                raise CheckpointError(
                    f"{name_in_file} is not in {self.folder / file}, though {INDEX} says so"
                ) from error
        return self._slices[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the numbers that `read` gives. Raises CheckpointError for fp8 and NVFP4 tensors without their scales."""
        shape = self._shape(name)
        if self._slice(name).get_dtype() == "F8_E4M3":
            self._check_scale(name, shape)
        if self._is_nvfp4(name):
            self._check_nvfp4(name, shape)
            return shape[0], 2 * shape[1]
        return shape

    def dtype(self, name: str) -> torch.dtype | None:
        stored = str(self._slice(name).get_dtype())
        return torch.float32 if stored == "F8_E4M3" or self._is_nvfp4(name) else _DTYPES.get(stored)

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def _check_scale(self, name: str, shape: tuple[int, ...]) -> None:
        blocked, single = _scale_of(name), f"{name}_scale"
        scale = blocked if self.has(blocked) or not self.has(single) else single
        blocks = [-(-size // FP8_BLOCK) for size in shape]
        known = [blocks] if scale == blocked else [[], [1], [shape[0]], [shape[0], 1]]
        found = list(self._shape(scale)) if self.has(scale) else "nothing"
        if len(shape) != 2 or found not in known:
            raise CheckpointError(
                f"{self.folder}: {name} is float8 of shape {list(shape)}; only matrices with {blocked} of shape "
                f"{blocks}, one factor per {FP8_BLOCK} x {FP8_BLOCK} block, or with {single}, one factor or one per "
                f"row, can be read, got {found} in {scale}"
            )

    def _is_nvfp4(self, name: str) -> bool:
        return bool(self._slice(name).get_dtype() == "U8") and self.has(f"{name}_scale_2")

    def _check_nvfp4(self, name: str, shape: tuple[int, ...]) -> None:
        """NVFP4 as `weights.modelopt` describes it, and nothing else that goes by these names."""
        scale, blocks = f"{name}_scale", [*shape[:-1], shape[-1] * 2 // NVFP4_BLOCK]
        found = list(self._shape(scale)) if self.has(scale) else "nothing"
        if len(shape) != 2 or shape[-1] % (NVFP4_BLOCK // 2) or found != blocks:
            raise CheckpointError(
                f"{self.folder}: {name} is NVFP4 of shape {list(shape)}; only matrices with {scale} of shape {blocks}, "
                f"one factor per {NVFP4_BLOCK} columns, can be read, got {found} there"
            )
        smoothing = f"{name.removesuffix('weight')}pre_quant_scale"
        if self.has(smoothing):
            raise CheckpointError(
                f"{self.folder}: {smoothing} is a factor of the layer's input (NVFP4_AWQ), which is not supported; "
                f"export the model with the algorithm NVFP4"
            )

    def read(self, name: str, *index: int | slice) -> Tensor:
        """The part at `index`; fp8 comes as float32, multiplied by the `_scale_inv` block factors beside it or by its
        `_scale`, NVFP4 by `_scale` and `_scale_2`."""
        if self._is_nvfp4(name):
            return self._read_nvfp4(name, *index)
        part = self.raw(name, *index)
        if part.dtype != torch.float8_e4m3fn:
            return part
        rows, columns = (list(index) + [slice(None)] * 2)[:2]
        spans = [_span(axis, size) for axis, size in zip((rows, columns), self._shape(name), strict=True)]
        if not self.has(_scale_of(name)):
            scale = self.raw(f"{name}_scale").reshape(-1)
            return dequantize_fp8_rows(part, scale if len(scale) == 1 else scale[slice(*spans[0])])
        blocks = [slice(start // FP8_BLOCK, -(-stop // FP8_BLOCK)) for start, stop in spans]
        return dequantize_fp8_blocks(part, self.raw(_scale_of(name), *blocks), row=spans[0][0], column=spans[1][0])

    def _read_nvfp4(self, name: str, *index: int | slice) -> Tensor:
        rows, columns = (list(index) + [slice(None)] * 2)[:2]
        start, stop = _span(columns, 2 * self._shape(name)[1])
        # a piece may begin inside a block: read whole ones, then cut
        first, last, half = start // NVFP4_BLOCK, -(-stop // NVFP4_BLOCK), NVFP4_BLOCK // 2
        data = self.raw(name, rows, slice(first * half, last * half))
        scale = self.raw(f"{name}_scale", rows, slice(first, last))
        whole = dequantize_nvfp4(data, scale, self.raw(f"{name}_scale_2").reshape(()))
        return whole[:, start - first * NVFP4_BLOCK : stop - first * NVFP4_BLOCK]

    def fp8_scales(self, name: str) -> str:
        if self._slice(name).get_dtype() != "F8_E4M3":
            return ""
        if self.has(_scale_of(name)):
            return "blocks"
        if not self.has(single := f"{name}_scale"):
            return ""
        return "matrix" if self._shape(single) in ((), (1,)) else "rows"

    def raw(self, name: str, *index: int | slice) -> Tensor:
        """The part at `index`, as it is stored; exponents (E8M0) as their bytes."""
        try:
            part: Tensor = self._slice(name)[index if index else ...]
        except CheckpointError:
            raise
        except Exception as error:  # a dtype that this torch has not, or bytes that are gone
            file = self.folder / self._where[name][0]
            raise CheckpointError(f"{name} cannot be read from {file}: {type(error).__name__}: {error}") from error
        self.bytes_read += part.numel() * part.itemsize
        return part.view(torch.uint8) if part.dtype == torch.float8_e8m0fnu else part


class ModuleSource:
    """A module in memory, read as a checkpoint is: names are those of its state dict behind `prefix`."""

    def __init__(self, module: nn.Module, prefix: str) -> None:
        self._tensors: dict[str, Tensor] = {f"{prefix}.{name}": tensor for name, tensor in module.state_dict().items()}

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype | None:
        return self._tensors[name].dtype

    def read(self, name: str, *index: int | slice) -> Tensor:
        tensor: Tensor = self._tensors[name]
        return tensor[index] if index else tensor

    def raw(self, name: str, *index: int | slice) -> Tensor:
        return self.read(name, *index)

    def under(self, block: str) -> list[str]:
        return [name for name in self._tensors if name.startswith(f"{block}.")]

    def companions(self, name: str) -> tuple[str, ...]:
        return ()

    def fp8_scales(self, name: str) -> str:
        return ""  # `expert_parallel` takes numbers alone


def _scale_of(name: str) -> str:
    return f"{name}_scale_inv"


def _span(axis: int | slice, size: int) -> tuple[int, int]:
    assert isinstance(axis, slice), "matrices are cut by slices"
    start, stop, _ = axis.indices(size)
    return start, stop


def load_layers(
    layers: Mapping[int, MoELayer],
    path: str | Path,
    family: str | CheckpointNames,
    *,
    progress: bool = True,
    **hub: Unpack[HubOptions],
) -> CheckpointSource:
    """Fill layers from a checkpoint: experts, router, shared expert.

    Every rank checks names, shapes and dtypes of all experts first (headers only), all ranks agree, then each reads its
    own experts. Under the block of a layer every tensor is read, known to be harmless, or a reason to refuse. What the
    caller loads is named in one warning: shared experts of a layer without, the linear map of a router of the caller's.

    Args:
        layers: number in the checkpoint -> layer.
        path: the folder of a checkpoint, or the name of a model on the Hugging Face Hub.
        family: a name in `ep_moe.weights.families.FAMILIES`, or names of the caller's.
        progress: show a bar on rank 0.
        hub: `revision`, `token`, `cache_dir` and `local_files_only`, as in `from_pretrained`.

    Returns:
        The source, for its `bytes_read`.

    Raises:
        CheckpointError: on all ranks, when any of them cannot load.
        ConfigError: the family is not known.
    """
    names = names_of(family)
    if not layers:
        raise InputError("layers must have at least one layer, got none")
    agreement = next(iter(layers.values())).context.agreement
    folder = model_folder(path, agreement, **hub)
    called = family if isinstance(family, str) else "of the caller's"
    with loading(folder, agreement):
        source = CheckpointSource(folder)
        plan = [(layer, *checked(source, names, number, layer, called)) for number, layer in layers.items()]
        leaves = [leaf for *_, found in plan for leaf in found.items()]
        said = [left_out(leaves)] if leaves else []
        said += other_family(folder, family) if isinstance(family, str) else []
        if said:
            warnings.warn(f"{folder}: {'; '.join(said)}", stacklevel=2)
    first = plan[0][0].context.layout.place == 0
    total = sum(_slots(layer) for layer, *_ in plan)
    with (
        loading(folder, agreement),
        tqdm(total=total, unit="expert", desc="experts", disable=None if progress and first else True) as bar,
    ):
        for layer, block, form, _ in plan:
            read_experts(layer, source, block, form, bar)
            _read_rest(layer, source, block, names)
    return source


@contextmanager
def loading(path: str | Path, agreement: Agreement) -> Iterator[None]:
    """Raise on all ranks what loading raises on any, whatever it is, as an error of `ep_moe` that names the path.

    Raises:
        OutOfMemory: a rank's device has no room.
        CheckpointError: a rank raised another exception that is none of `ep_moe.errors`.
        EPMoEError: a rank raised it.
    """
    with agreement.together("checkpoint"):
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


def largest_input_scale(path: str | Path, family: str) -> float:
    """Of all experts' gate and up projections in a calibrated checkpoint, all layers': what rows in fp8_tensor or nvfp4
    may travel under (`Wire.input_scale`). Reads these scalars alone. Raises CheckpointError where there are none."""
    names, source = names_of(family), CheckpointSource(path)
    formats = [known for known in names.experts if isinstance(known, PerExpert)]
    ends = {input_scale(name) for known in formats for name in (known.gate, known.up)}
    numbered = {
        re.escape(f"{names.block}.{end}").replace(r"\{layer\}", r"\d+").replace(r"\{e\}", r"\d+") for end in ends
    }
    pattern = re.compile("|".join(sorted(numbered)) or r"\b\B")
    found = [float(scalar(source, name)) for name in source.names() if pattern.fullmatch(name)]
    if not found:
        raise CheckpointError(f"{path} has no input scales of experts: it was not calibrated; choose another wire")
    return max(found)


def _slots(layer: MoELayer) -> int:
    return sum(expert != EMPTY for expert in layer.expert_weights.local_experts)


@torch.no_grad()
def read_experts(layer: MoELayer, source: Source, block: str, found: ExpertFormat, bar: Any = None) -> None:
    """Copy this rank's experts, cut over etp, into their slots. An expert is read once, whatever its replicas."""
    weights, config = layer.expert_weights, layer.config
    if weights.scheme.activations.calibrated and not found.holds(source, block, weights.scheme.name):
        raise CheckpointError(f"{block}: {not_calibrated(weights.scheme)}")
    weights.updates += 1
    inner = share(config.intermediate_size, weights.etp.size, weights.etp.rank)
    by_expert: dict[int, list[int]] = {}
    for slot, expert in enumerate(weights.local_experts):
        if expert != EMPTY:
            by_expert.setdefault(expert, []).append(slot)
    for expert, slots in by_expert.items():
        tensors = _expert(layer, source, block, found, expert, inner)
        assert tensors.keys() == weights.preparation.canonical.keys(), "format and configuration disagree"
        weights.write(slots, tensors)
        if bar is not None:
            bar.update(len(slots))


def _expert(
    layer: MoELayer, source: Source, block: str, found: ExpertFormat, expert: int, inner: tuple[int, int]
) -> dict[str, Tensor]:
    """One expert's canonical tensors of this etp rank: the checkpoint's own bytes where it is quantised as the layer
    is, else its numbers, quantised here where the layer is."""
    weights, config = layer.expert_weights, layer.config
    if found.holds(source, block, weights.scheme.name):
        return found.read_stored(source, block, config, expert, inner, weights.scheme.name)
    if weights.scheme.plain:
        return found.read(source, block, config, expert, inner)
    # whole, so that a scale that belongs to a whole matrix is the same on every etp rank
    whole = found.read(source, block, config, expert, (0, config.intermediate_size))
    whole = weights.scheme.quantize({name: tensor.to(weights.device) for name, tensor in whole.items()}, weights.dtype)
    etp = weights.etp
    return {name: cut(config, name, tensor, etp.size, etp.rank) for name, tensor in whole.items()}


@torch.no_grad()
def _read_rest(layer: MoELayer, source: Source, block: str, names: CheckpointNames) -> None:
    if isinstance(layer.router, Router):
        for key, tensor in layer.router.state_dict().items():
            tensor.copy_(source.read(f"{block}.{names.router[key]}"))
    if layer.shared_experts is not None and names.shared is not None:
        for key, tensor in layer.shared_experts.state_dict().items():
            tensor.copy_(source.read(f"{block}.{names.shared}.{key}"))
