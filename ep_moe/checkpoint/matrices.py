"""Which kind of stored matrix a name of a checkpoint stands for, by the tensors that are there."""

from __future__ import annotations

from ep_moe.checkpoint.factors import Tensors
from ep_moe.checkpoint.stored import PlainMatrix, StoredMatrix, beside_of
from ep_moe.checkpoint.stored_4bit import Int4Matrix, Mxfp4Matrix, Nvfp4Matrix
from ep_moe.checkpoint.stored_fp8 import ScaledFp8
from ep_moe.checkpoint.stored_words import AwqMatrix, GptqMatrix
from ep_moe.errors import CheckpointError

# ends of the name of a matrix `X` that make that of its codes
_CODES = ("_packed", "_blocks")
_WORDS = "qweight"  # in place of `weight`: AWQ, GPTQ


def code_names(name: str) -> list[str]:
    """How the codes of a matrix may be called, besides the matrix's own name."""
    words = f"{name.removesuffix('weight')}{_WORDS}"
    return [*(f"{name}{end}" for end in _CODES), *([words] if name.split(".")[-1] == "weight" else [])]


def matrix_name(name: str) -> str:
    """The name of a matrix by that of a tensor of its codes; else the same name."""
    if name.split(".")[-1] == _WORDS:
        return f"{name.removesuffix(_WORDS)}weight"
    return next((name.removesuffix(end) for end in _CODES if name.endswith(end)), name)


def stored_matrix(tensors: Tensors, name: str, *, transposed: bool = False, stacked: int = 1) -> StoredMatrix:
    """The matrix `name`, or those of all experts. Raises CheckpointError where none can be chosen."""
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
    if dtype == "U8" and len(shape) > 1 and any(map(tensors.holds, beside_of(name, "_scale_2"))):
        return Nvfp4Matrix(tensors, name, packed=False, transposed=transposed, stacked=stacked)
    return PlainMatrix(tensors, name, name, transposed=transposed, stacked=stacked)


def _words_matrix(tensors: Tensors, name: str, words: str, transposed: bool, stacked: int) -> StoredMatrix:
    """AWQ packs outputs, GPTQ inputs: as config.json states, or else as the factors' shape says."""
    method, scale = tensors.declared.method, f"{name.removesuffix('weight')}scales"
    wide = tensors.holds(scale) and tensors.header(words)[1][-1:] != tensors.header(scale)[1][-1:]
    awq = "awq" in method.split() or ("gptq" not in method.split() and wide)
    kind = AwqMatrix if awq else GptqMatrix
    return kind(tensors, name, transposed=transposed, stacked=stacked)


def _packed_matrix(tensors: Tensors, name: str, packed: str, transposed: bool, stacked: int) -> StoredMatrix:
    dtype, shape = tensors.header(packed)
    if len(shape) > 1 and any(map(tensors.holds, beside_of(name, "_global_scale"))) and dtype == "U8":
        return Nvfp4Matrix(tensors, name, packed=True, transposed=transposed, stacked=stacked)
    if len(shape) > 1 and dtype == "I32":
        return Int4Matrix(tensors, name, transposed=transposed, stacked=stacked)
    if len(shape) > 1 and dtype == "U8":
        return Mxfp4Matrix(tensors, name, blocks=False, transposed=transposed, stacked=stacked)
    raise CheckpointError(
        f"{tensors.location(packed)} is {dtype} of shape {list(shape)}; of packed matrices INT4 (int32), NVFP4 and "
        f"MXFP4 (uint8) are read: dequantise the checkpoint to bf16 first"
    )
