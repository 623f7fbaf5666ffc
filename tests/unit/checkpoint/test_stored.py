"""Test the scales beside a checkpoint's matrices."""

import contextlib

import pytest
import torch
from safetensors.torch import save_file

from ep_moe import CheckpointError
from ep_moe.checkpoint.quantization_config import DeclaredQuantization
from ep_moe.checkpoint.source import SINGLE, CheckpointSource, MemorySource, stored_matrix
from ep_moe.checkpoint.stored import PlainMatrix, check_fits, read_scalar_scale, read_scales
from ep_moe.checkpoint.stored_4bit import Int4Matrix, Mxfp4Matrix, Nvfp4Matrix
from ep_moe.checkpoint.stored_fp8 import ScaledFp8
from ep_moe.quant.schemes import SCHEMES


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize(("scales", "expert"), [([0.0], None), ([2.0, 0.0], 1)])
def test_a_scale_of_0_is_refused_where_it_must_be_positive(scales, expert, positive, tmp_path):
    """A scale of 0 is refused where it must be positive, for all experts or for one."""
    save_file({"input_scale": torch.tensor(scales)}, tmp_path / SINGLE)
    source = CheckpointSource(tmp_path)
    with pytest.raises(CheckpointError, match="input_scale") if positive else contextlib.nullcontext():
        assert read_scalar_scale(source, "input_scale", expert, positive=positive) == 0


def test_scales_are_numbers_or_exponents(tmp_path):
    save_file({"scale": torch.ones(2, dtype=torch.int32), "bytes": torch.tensor([127, 128]).byte()}, tmp_path / SINGLE)
    source = CheckpointSource(tmp_path)
    assert read_scales(source, "bytes").tolist() == [1.0, 2.0]
    with pytest.raises(CheckpointError, match=r"scale must be factors in .*, got"):
        read_scales(source, "scale")


def test_numbers_that_are_infinite_already_are_kept():
    numbers = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0], dtype=torch.float64)
    assert check_fits("here", numbers, torch.float16) is numbers


def test_codes_alone_are_those_of_nvfp4(tmp_path):
    """Only codes are read as NVFP4. Plain numbers are not, whatever tensors lie beside them."""
    beside = {"w.weight_scale_2": torch.ones(()), "w.weight_scale": torch.ones(4, 1).to(torch.float8_e4m3fn)}
    for weight, kind in ((torch.zeros(4, 8).byte(), Nvfp4Matrix), (torch.zeros(4, 16).bfloat16(), PlainMatrix)):
        save_file({"w.weight": weight} | beside, tmp_path / SINGLE)
        assert type(stored_matrix(CheckpointSource(tmp_path), "w.weight")) is kind


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((3, 4, 2, 16), True), ((4, 2, 16), False), ((1, 3, 4, 2, 16), False), ((3, 4, 2, 8), False), ((3, 32), False)],
    ids=str,
)
def test_blocks_of_mxfp4_are_of_all_experts(shape, fits):
    """[E, rows, columns / 32, 16], whatever exponents lie beside them."""
    tensors = {"w_blocks": torch.zeros(shape).byte(), "w_scales": torch.full(shape[:-1], 127).byte()}
    matrix = Mxfp4Matrix(MemorySource(tensors, "here"), "w", blocks=True, transposed=False, stacked=1)
    wrong = matrix.unreadable_reason()
    assert wrong is None if fits else "w_blocks must be uint8 of shape [..., 16], got U8" in wrong


def test_codes_of_mxfp4_without_exponents_are_refused():
    source = MemorySource({"w_packed": torch.zeros(4, 16).byte()}, "here")
    wrong = Mxfp4Matrix(source, "w", blocks=False, transposed=False, stacked=1).unreadable_reason()
    assert wrong == "w_scale is missing; w_packed is MXFP4"


@pytest.mark.parametrize(
    ("scales", "stacked", "blocks", "row_block", "kept"),
    [
        ((), 1, (), 1, ["fp8_static", "fp8_dynamic"]),
        ((384, 1), 1, (), 1, ["fp8_channel"]),
        ((3, 1), 1, (), 128, ["fp8_block"]),
        ((4, 1), 2, (), 128, []),  # blocks restart at the second matrix
        ((6, 1), 1, ((64, 128),), 64, []),
    ],
    ids=str,
)
def test_only_fp8_codes_with_the_scales_of_a_scheme_are_kept(scales, stacked, blocks, row_block, kept):
    source = MemorySource({"w": torch.zeros(384, 128).to(torch.float8_e4m3fn), "w_scale": torch.ones(scales)}, "here")
    source.declared = DeclaredQuantization(blocks=blocks)
    matrix = ScaledFp8(source, "w", stacked=stacked)
    assert matrix.row_block == row_block
    assert [name for name in SCHEMES if matrix.matches_scheme(name)] == kept


@pytest.mark.parametrize(
    ("name", "words"), [("w", "^w cannot be read from w: IndexError: too many"), ("v", "^v is missing in here$")]
)
def test_a_tensor_that_cannot_be_read_is_named(name, words):
    with pytest.raises(CheckpointError, match=words):
        MemorySource({"w": torch.ones(2)}, "here").raw(name, 0, 0)


PACKED = {
    "nvfp4": (
        lambda *given, **how: Nvfp4Matrix(*given, packed=True, stacked=1, **how),
        {"w_packed": torch.uint8, "w_scale": torch.float8_e4m3fn}, (2, 16),
    ),
    "mxfp4": (
        lambda *given, **how: Mxfp4Matrix(*given, blocks=False, stacked=1, **how),
        {"w_packed": torch.uint8, "w_scale": torch.float8_e8m0fnu}, (2, 32),
    ),
    "int4": (Int4Matrix, {"w_packed": torch.int32, "w_scale": torch.float32}, (8, 64)),
}  # fmt: skip


@pytest.mark.parametrize("lead", [(), (3,)], ids=["one", "all experts"])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_codes_are_seen_in_rows_however_they_lie(kind, lead):
    make, dtypes, (per_element, block) = PACKED[kind]
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (*lead, 24, 128 // per_element * dtypes["w_packed"].itemsize), generator=generator)
    scales = torch.randint(1, 9, (*lead, 24, 128 // block), generator=generator)
    rows = {"w_packed": codes.byte().view(dtypes["w_packed"]), "w_scale": scales.to(dtypes["w_scale"])}
    lying = {name: tensor.mT.contiguous() for name, tensor in rows.items()}
    found = []
    for tensors, transposed in ((rows, False), (lying, True)):
        source = MemorySource(tensors | {"w_global_scale": torch.ones(1)}, "here")
        matrix = make(source, "w", transposed=transposed)
        assert matrix.unreadable_reason() is None
        assert matrix.shape == (*lead, 24, 128)
        found.append(matrix.read_values(slice(8, 20), slice(64, 128), 1 if lead else None))
    assert found[0].shape == (12, 64)
    assert torch.equal(*found)


@pytest.mark.parametrize("lead", [(), (3,)], ids=["one", "all experts"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_matrix_is_seen_in_rows_however_it_lies(transposed, lead, tmp_path):
    whole = torch.randn(*lead, 4, 6)
    save_file({"w.weight": whole.mT.contiguous() if transposed else whole}, tmp_path / SINGLE)
    matrix = PlainMatrix(CheckpointSource(tmp_path), "w.weight", "w.weight", transposed=transposed)
    assert matrix.shape == (*lead, 4, 6)
    expert, own = (2, whole[2]) if lead else (None, whole)
    assert torch.equal(matrix.read_values(expert=expert), own)
    assert torch.equal(matrix.read_values(slice(1, 3), slice(2, 6), expert), own[1:3, 2:6])


@pytest.mark.parametrize("transposed", [False, True])
def test_a_bias_has_one_dimension_however_matrices_lie(transposed, tmp_path):
    save_file({"w.bias": torch.randn(4)}, tmp_path / SINGLE)
    assert PlainMatrix(CheckpointSource(tmp_path), "w.bias", "w.bias", transposed=transposed).shape == (4,)


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64]
CODES = [*INTEGERS, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz]
NUMBERS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_codes_of_any_dtype_are_no_numbers(dtype, tmp_path):
    save_file({"w.weight": torch.zeros(4, 4).to(dtype)}, tmp_path / SINGLE)
    wrong = PlainMatrix(CheckpointSource(tmp_path), "w.weight", "w.weight").unreadable_reason()
    name = str(dtype).removeprefix("torch.")
    assert wrong is not None
    assert f"must be bfloat16 or float16 or float32 or float64, got {name}, codes of a quantization" in wrong


@pytest.mark.parametrize("dtype", [*CODES, *NUMBERS, torch.float8_e4m3fn, torch.bool, torch.uint64], ids=str)
def test_a_tensor_in_memory_has_the_header_that_it_has_in_a_file(dtype, tmp_path):
    tensors = {"w": torch.ones(4, 2).to(dtype)}
    save_file(tensors, tmp_path / SINGLE)
    in_file, in_memory = CheckpointSource(tmp_path), MemorySource(tensors, "here")
    assert in_memory.header("w") == in_file.header("w")
    assert torch.equal(in_file.raw("w").view(torch.uint8), in_memory.raw("w").view(torch.uint8))
    if dtype != torch.float8_e4m3fn:  # fp8 codes are read as float32
        assert in_memory.dtype("w") == in_file.dtype("w") == dtype


@pytest.mark.parametrize("end", ["_scale_inv", "_scale", "_scale_2", "_zero_point", "_global_scale"])
def test_plain_numbers_have_nothing_of_codes_beside_them(end, tmp_path):
    """Plain numbers with a scale or zero point beside them are refused.

    It would change what they mean, or belongs to another matrix.
    """
    save_file({"w.weight": torch.ones(4, 4), f"w.weight{end}": torch.ones(4)}, tmp_path / SINGLE)
    wrong = PlainMatrix(CheckpointSource(tmp_path), "w.weight", "w.weight").unreadable_reason()
    assert wrong is not None
    assert f"has plain numbers (F32), and w.weight{end} beside it would scale them" in wrong
