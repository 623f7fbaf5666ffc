"""Sources of tensors that can be read in part: a folder of safetensors, and tensors in memory."""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ep_moe.checkpoint.hub import file_inside, weight_map
from ep_moe.checkpoint.quantization_config import DeclaredQuantization, read_declared_quantization, unsupported_tensors
from ep_moe.checkpoint.stored import PlainMatrix, StoredMatrix, Tensors, companion_names
from ep_moe.checkpoint.stored_4bit import Int4Matrix, Mxfp4Matrix, Nvfp4Matrix
from ep_moe.checkpoint.stored_awq_gptq import AwqMatrix, GptqMatrix
from ep_moe.checkpoint.stored_fp8 import ScaledFp8
from ep_moe.checkpoint.unexpected_tensors import unused_in_shard
from ep_moe.errors import CheckpointError

# --- names ------------------------------------------------------------------------------------------------------------
# Common names of a checkpoint's tensors: those of transformers' causal language models, without wrappers.

# multimodal models nest the text model; base models have no prefix `model.`
_TEXT = re.compile(r"^(?:(?:thinker|model|language_model|text_model|llm)\.)*(?=(?:layers\.\d+|embed_tokens|norm)\.)")
_HEAD = re.compile(r"^(?:(?:thinker|model|language_model|text_model|llm)\.)+(?=lm_head\.)")
_BLOCK = r"(?P<block>\.(?:mlp|block_sparse_moe|feed_forward)\.)"
_RENAMED = (
    # Hunyuan
    (re.compile(rf"{_BLOCK}gate\.wg\.weight"), r"\g<block>gate.weight"),
    # Granite
    (re.compile(rf"{_BLOCK}router\.layer\.weight"), r"\g<block>gate.weight"),
    (re.compile(rf"{_BLOCK}input_linear\.weight"), r"\g<block>experts.gate_up_proj"),
    (re.compile(rf"{_BLOCK}output_linear\.weight"), r"\g<block>experts.down_proj"),
)
_MARKS = (".wg.", ".router.layer.", "put_linear.")
_FACTORS = (".scale", ".qscale_weight")  # other names of `.weight_scale_inv`


def common_name(name: str, names: Container[str]) -> str:
    """Return the common name of a tensor. names: all names of the checkpoint"""
    if name.endswith(_FACTORS) and f"{name.rpartition('.')[0]}.weight" in names:
        name = f"{name.rpartition('.')[0]}.weight_scale_inv"
    if not name.startswith("model.layers."):
        name = _HEAD.sub("", _TEXT.sub("model.", name)).removeprefix("language_model.")
    if any(mark in name for mark in _MARKS):
        for pattern, common in _RENAMED:
            name = pattern.sub(common, name)
    return name


# --- a folder, and memory ---------------------------------------------------------------------------------------------

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ROTATED = "its weights belong to activations that are rotated, which is not supported; take a checkpoint without it"
_POINTER = b"version https://git-lfs"
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool, "U8": torch.uint8,
    "F8_E8M0": torch.uint8,  # `raw` returns it as bytes
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
}  # fmt: skip
_CALLED = {dtype: called for called, dtype in _DTYPES.items()} | {torch.uint8: "U8", torch.float8_e8m0fnu: "F8_E8M0"}


class TensorSource(ABC):
    """Named tensors that can be read in part, and the storage format of each matrix.

    origin: where they are from, for messages; bytes_read: bytes of tensor data read so far
    """

    declared = DeclaredQuantization()
    origin: str

    def __init__(self) -> None:
        self.bytes_read = 0
        self._slices: dict[str, Any] = {}
        self._matrices: dict[tuple[str, bool, int], StoredMatrix] = {}
        self._unsupported: dict[str, str] | None = None

    @abstractmethod
    def names(self) -> Collection[str]:
        """Return the common names of all tensors."""

    @abstractmethod
    def holds(self, name: str) -> bool:
        """Return whether a tensor has exactly this name. `has` also accepts the name of a quantized matrix."""

    @abstractmethod
    def location(self, name: str) -> str:
        """Return the tensor's name and file, for messages."""

    @abstractmethod
    def _opened(self, name: str) -> Any:
        """Return an existing tensor with the interface of a safetensors slice. Raises CheckpointError."""

    def has(self, name: str) -> bool:
        return self.holds(name) or any(map(self.holds, code_names(name)))

    def under(self, block: str) -> list[str]:
        return [name for name in self.names() if name.startswith(f"{block}.")]

    def _slice(self, name: str) -> Any:
        if name not in self._slices:
            if not self.holds(name):
                raise CheckpointError(f"{name} is missing in {self.origin}")
            self._slices[name] = self._opened(name)
        return self._slices[name]

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        stored = self._slice(name)
        return str(stored.get_dtype()), tuple(stored.get_shape())

    def matrix(self, name: str, *, transposed: bool = False, stacked: int = 1) -> StoredMatrix:
        key = (name, transposed, stacked)
        if key not in self._matrices:
            self._matrices[key] = stored_matrix(self, name, transposed=transposed, stacked=stacked)
        return self._matrices[key]

    def companions(self, name: str) -> tuple[str, ...]:
        """Return the tensors that `read` and `matrix` use for a name, other than itself, and its input scale."""
        if not self.has(name):
            return ()
        matrix = self.matrix(name)
        inputs = (matrix.input_scale_name,) if matrix.has_input_scale() else ()
        return tuple(part for part in (*matrix.parts(), *inputs) if part != name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of `read`'s result. Raises CheckpointError for codes that cannot be read."""
        matrix = self.matrix(name)
        if (wrong := matrix.unreadable_reason()) is not None:
            raise CheckpointError(wrong)
        return matrix.shape

    def dtype(self, name: str) -> torch.dtype | None:
        matrix = self.matrix(name)
        return torch.float32 if matrix.quantized else _DTYPES.get(self.header(name)[0])

    def read(self, name: str, *index: int | slice) -> Tensor:
        """Read the part at `index`: unquantized tensors as they are stored, quantized ones dequantized to float32."""
        matrix = self.matrix(name)
        if not matrix.quantized:
            return self.raw(name, *index)
        rows, columns = (list(index) + [slice(None)] * 2)[:2]
        assert isinstance(rows, slice) and isinstance(columns, slice), "matrices are cut by slices"  # noqa: PT018
        return matrix.read_values(rows, columns)

    def unsupported_tensors(self, prefix: str) -> dict[str, str]:
        """Find tensors under a prefix that belong to an unsupported quantization. Return its name by tensor name."""
        if self._unsupported is None:
            self._unsupported = unsupported_tensors(self.names(), self.declared)
        return {name: called for name, called in self._unsupported.items() if name.startswith(f"{prefix}.")}

    def raw(self, name: str, *index: int | slice) -> Tensor:
        """Read the part at `index` as it is stored. E8M0 is returned as uint8."""
        try:
            part: Tensor = self._slice(name)[index if index else ...]
        except CheckpointError:
            raise
        except Exception as error:  # a dtype that this torch does not have, or a truncated file
            raise CheckpointError(
                f"{name} cannot be read from {self.location(name)}: {type(error).__name__}: {error}"
            ) from error
        self.bytes_read += part.numel() * part.itemsize
        return part.view(torch.uint8) if part.dtype == torch.float8_e8m0fnu else part


class CheckpointSource(TensorSource):
    """A folder with `model.safetensors.index.json` and its shards, or with one `model.safetensors`.

    Shards are opened when a tensor of them is first read.

    called: maps a tensor's name in the files, and all names in the files, to its name in this source
    """

    def __init__(self, folder: str | Path, *, called: Callable[[str, Container[str]], str] = common_name) -> None:
        super().__init__()
        self.folder, self.origin = Path(folder), str(folder)
        self._called = called
        self._open: dict[str, Any] = {}
        self._listed: dict[str, str] | None = None  # tensor -> file, by the index
        self.declared = read_declared_quantization(self.folder)
        if self.declared.rotated:
            raise CheckpointError(f"{self.folder / 'config.json'} states {self.declared.rotated}: {_ROTATED}")
        self._where = self._index()

    def _index(self) -> dict[str, tuple[str, str]]:
        """Return a dict from common names to (file, name in the file)."""
        if (self.folder / INDEX).is_file():
            files = self._listed = weight_map(self.folder / INDEX)
        elif (self.folder / SINGLE).is_file():
            files = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            pickled = sorted(path.name for path in self.folder.glob("pytorch_model*.bin*"))
            remedy = f"save {pickled[0]} as safetensors" if pickled else "give the folder of a checkpoint"
            raise CheckpointError(f"{self.folder} holds neither {INDEX} nor {SINGLE}; {remedy}")
        where = {common: (files[name], name) for common, name in renamed(files, self._called, self.origin).items()}
        for file in set(files.values()):
            file_inside(self.folder, file)
        if (self.folder / SINGLE).is_file() and SINGLE not in files.values():
            raise CheckpointError(
                f"{self.folder} holds {SINGLE}, and {INDEX} with other files; remove the one that is not meant"
            )
        return where

    def _file(self, file: str) -> Any:
        if file not in self._open:
            path = file_inside(self.folder, file)
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, though {INDEX} names it; fetch the checkpoint again")
            try:
                self._open[file] = safe_open(path, framework="pt")
            except Exception as error:
                with path.open("rb") as opened:
                    pointer = opened.read(len(_POINTER)) == _POINTER
                why = "it is a pointer of Git LFS; run git lfs pull in the folder" if pointer else error
                raise CheckpointError(f"{path} is not a readable safetensors file: {why}") from error
            for said in unused_in_shard(self._open[file].keys(), file, self._listed or {}, INDEX):
                warnings.warn(f"{path}: {said}", stacklevel=2)
        return self._open[file]

    def names(self) -> Collection[str]:
        return self._where.keys()

    def holds(self, name: str) -> bool:
        return name in self._where

    def _opened(self, name: str) -> Any:
        file, name_in_file = self._where[name]
        handle = self._file(file)
        try:
            return handle.get_slice(name_in_file)
        except Exception as error:
            raise CheckpointError(f"{name_in_file} is not in {self.folder / file}, though {INDEX} says so") from error

    def location(self, name: str) -> str:
        if name not in self._where:
            return next((self.location(each) for each in code_names(name) if self.holds(each)), name)
        file, name_in_file = self._where[name]
        return f"{file}: {name_in_file}"


def renamed(names: Collection[str], called: Callable[[str, Container[str]], str], origin: str) -> dict[str, str]:
    """Return a dict from the names by `called` to the given names. Raises CheckpointError if two names coincide."""
    found: dict[str, str] = {}
    for name in names:
        common = called(name, names)
        if common in found:
            raise CheckpointError(f"{origin} has {common} twice, as {found[common]} and as {name}; remove one")
        found[common] = name
    return found


class MemorySource(TensorSource):
    """Tensors in memory, with the interface of a checkpoint.

    Args:
        tensors: The tensors by name. Those on the meta device have only a shape and dtype, and cannot be read.
        origin: Where they are from, for messages.
        called: See `CheckpointSource`. Default: names are unchanged.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        origin: str,
        *,
        called: Callable[[str, Container[str]], str] = lambda name, _: name,
    ) -> None:
        super().__init__()
        self.origin = origin
        self._given = renamed(tensors.keys(), called, origin)
        self._tensors = {common: tensors[name] for common, name in self._given.items()}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def holds(self, name: str) -> bool:
        return name in self._tensors

    def location(self, name: str) -> str:
        return self._given.get(name, name)

    def _opened(self, name: str) -> Any:
        return _InMemory(self._tensors[name])


class _InMemory:
    """A tensor in memory with the interface of a safetensors slice."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_dtype(self) -> str:
        return _CALLED.get(self._tensor.dtype, str(self._tensor.dtype).removeprefix("torch."))

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        assert not self._tensor.is_meta, "only the header was kept"
        return self._tensor[index]


class ModuleSource(MemorySource):
    """A module in memory. Names are those of its state dict, prefixed by `prefix` and a dot."""

    def __init__(self, module: nn.Module, prefix: str) -> None:
        super().__init__({f"{prefix}.{name}": tensor for name, tensor in module.state_dict().items()}, prefix)

    def matrix(self, name: str, *, transposed: bool = False, stacked: int = 1) -> StoredMatrix:
        """Return an unquantized matrix: `expert_parallel` supports no others."""
        return PlainMatrix(self, name, name, transposed=transposed, stacked=stacked)

    def companions(self, name: str) -> tuple[str, ...]:
        return ()


# --- how a matrix is stored -------------------------------------------------------------------------------------------
# Choose the class of a stored matrix by the tensors that exist.

# suffixes that turn the name of a matrix into that of its codes
_CODES = ("_packed", "_blocks")
_WORDS = "qweight"  # replaces `weight` in AWQ and GPTQ


def code_names(name: str) -> list[str]:
    """Return the possible names of a matrix's codes, besides the matrix's own name."""
    words = f"{name.removesuffix('weight')}{_WORDS}"
    return [*(f"{name}{end}" for end in _CODES), *([words] if name.split(".")[-1] == "weight" else [])]


def matrix_name(name: str) -> str:
    """Return the name of the matrix whose codes a tensor holds, or the same name for other tensors."""
    if name.split(".")[-1] == _WORDS:
        return f"{name.removesuffix(_WORDS)}weight"
    return next((name.removesuffix(end) for end in _CODES if name.endswith(end)), name)


def stored_matrix(tensors: Tensors, name: str, *, transposed: bool = False, stacked: int = 1) -> StoredMatrix:
    """Return the matrix `name`, or the matrices of all experts. Raises CheckpointError if its storage is ambiguous."""
    packed, words = f"{name}_packed", code_names(name)[-1]
    present = [each for each in (name, *code_names(name)) if tensors.holds(each)]
    if len(present) > 1:
        raise CheckpointError(
            f"{tensors.location(present[1])} is there, and {present[0]} too; remove the one that is not meant"
        )
    if tensors.holds(f"{name}_blocks"):
        return Mxfp4Matrix(tensors, name, blocks=True, transposed=transposed, stacked=stacked)
    if tensors.holds(packed):
        return _packed_matrix(tensors, name, packed, transposed, stacked)
    if not tensors.holds(name) and words.endswith(_WORDS) and tensors.holds(words):
        return _words_matrix(tensors, name, words, transposed, stacked)
    dtype, shape = tensors.header(name)
    if dtype == "F8_E4M3":
        return ScaledFp8(tensors, name, transposed=transposed, stacked=stacked)
    if dtype == "U8" and len(shape) > 1 and any(map(tensors.holds, companion_names(name, "_scale_2"))):
        return Nvfp4Matrix(tensors, name, packed=False, transposed=transposed, stacked=stacked)
    return PlainMatrix(tensors, name, name, transposed=transposed, stacked=stacked)


def _words_matrix(tensors: Tensors, name: str, words: str, transposed: bool, stacked: int) -> StoredMatrix:
    """Return an AWQ or GPTQ matrix, by config.json or else by shape: AWQ packs along outputs, GPTQ along inputs."""
    method, scale = tensors.declared.method, f"{name.removesuffix('weight')}scales"
    wide = tensors.holds(scale) and tensors.header(words)[1][-1:] != tensors.header(scale)[1][-1:]
    awq = "awq" in method.split() or ("gptq" not in method.split() and wide)
    kind = AwqMatrix if awq else GptqMatrix
    return kind(tensors, name, transposed=transposed, stacked=stacked)


def _packed_matrix(tensors: Tensors, name: str, packed: str, transposed: bool, stacked: int) -> StoredMatrix:
    dtype, shape = tensors.header(packed)
    if len(shape) > 1 and any(map(tensors.holds, companion_names(name, "_global_scale"))) and dtype == "U8":
        return Nvfp4Matrix(tensors, name, packed=True, transposed=transposed, stacked=stacked)
    if len(shape) > 1 and dtype == "I32":
        return Int4Matrix(tensors, name, transposed=transposed, stacked=stacked)
    if len(shape) > 1 and dtype == "U8":
        return Mxfp4Matrix(tensors, name, blocks=False, transposed=transposed, stacked=stacked)
    raise CheckpointError(
        f"{tensors.location(packed)} is {dtype} of shape {list(shape)}; of packed matrices INT4 (int32), NVFP4 and "
        f"MXFP4 (uint8) are read: dequantize the checkpoint to bf16 first"
    )
