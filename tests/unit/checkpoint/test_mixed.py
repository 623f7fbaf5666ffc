"""Test quantized and plain matrices in one checkpoint.

Each keeps its bytes, is quantized once, or is refused by name.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ep_moe import CheckpointError, MoEConfig, MoELayer
from ep_moe.checkpoint.formats import Projection, find_format
from ep_moe.checkpoint.halves import join_halves
from ep_moe.checkpoint.model_names import names_of
from ep_moe.checkpoint.quantized_experts import read_quantized
from ep_moe.checkpoint.source import SINGLE, CheckpointSource
from ep_moe.quant.schemes import SCHEMES
from ep_moe.weights.parts import etp_shard
from tests.fixtures.checkpoint_files import load_one, same_bytes, stored

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
HIDDEN, INNER, EXPERTS = 256, 256, 4
BLOCK = "model.layers.0.mlp"
CONFIG = MoEConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_experts=EXPERTS, top_k=2)
SIZES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
# kind of file -> the scheme that has its bytes
SCHEME = {"blocks": "fp8_block", "int4": "int4_fp8", "matrix": "fp8_dynamic", "rows": "fp8_channel"}


def quantised(kind: str, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return codes that a quantizer would not produce: the largest is far below the maximum of its scale."""
    if kind == "int4":
        words = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=generator).int()
        scale = torch.rand(rows, columns // 128, generator=generator).bfloat16()
        return {"weight_packed": words, "weight_scale": scale}
    codes = torch.randn(rows, columns, generator=generator).to(FP8)
    if kind == "matrix":
        return {"weight": codes, "weight_scale": torch.rand((), generator=generator)}
    if kind == "rows":
        return {"weight": codes, "weight_scale": torch.rand(rows, 1, generator=generator)}
    return {"weight": codes, "weight_scale_inv": torch.rand(rows // 128, columns // 128, generator=generator)}


def write(folder, kind: str, plain=(), change=None) -> dict[str, Tensor]:
    """Write a checkpoint. plain: (expert, projection) of the matrices that are not quantized."""
    tensors = {f"{BLOCK}.gate.weight": torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(0))}
    for expert in range(EXPERTS):
        for number, (name, (rows, columns)) in enumerate(SIZES.items()):
            generator = torch.Generator().manual_seed(10 * expert + number)
            parts = quantised(kind, rows, columns, generator)
            if kind == "matrix" and name == "up_proj":  # gate and up share one scale
                gate = f"{BLOCK}.experts.{expert}.gate_proj.weight_scale"
                parts["weight_scale"] = tensors.get(gate, parts["weight_scale"]).clone()
            if (expert, name) in plain:
                parts = {"weight": torch.randn(rows, columns, generator=generator).bfloat16()}
            tensors |= {f"{BLOCK}.experts.{expert}.{name}.{end}": tensor for end, tensor in parts.items()}
    if change is not None:
        change(tensors)
    save_file(tensors, folder / SINGLE)
    return tensors


def load(folder, quantization: str) -> MoELayer:
    return load_one(CONFIG, folder, quantization)


def wanted(tensors: dict[str, Tensor], expert: int, names: tuple[str, ...], scheme: str) -> dict[str, Tensor]:
    """Return the parts of a canonical matrix: each projection's own bytes, or its values quantized once."""
    halves = []
    for name in names:
        full = f"{BLOCK}.experts.{expert}.{name}.weight"
        if f"{full}_packed" in tensors:
            data = tensors[f"{full}_packed"].view(torch.uint8) ^ 0x88
            halves.append({"": data, "_scale": tensors[f"{full}_scale"]})
        elif tensors[full].dtype == FP8:
            scale = tensors.get(f"{full}_scale_inv", tensors.get(f"{full}_scale"))
            halves.append({"": tensors[full], "_scale": scale.flatten() if scheme == "fp8_channel" else scale})
        else:
            halves.append(SCHEMES[scheme].weights.quantize(tensors[full], torch.bfloat16))
    if halves[0]["_scale"].dim() == 0:
        assert all(torch.equal(half["_scale"], halves[0]["_scale"]) for half in halves)
        scale = halves[0]["_scale"]
    else:
        scale = torch.cat([half["_scale"] for half in halves])
    data = torch.cat([half[""].view(torch.uint8) for half in halves])
    return {"": data.view(halves[0][""].dtype), "_scale": scale}


def check(layer: MoELayer, tensors: dict[str, Tensor], scheme: str) -> None:
    for expert in range(EXPERTS):
        own = stored(layer, expert)
        for name, projections in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
            for part, tensor in wanted(tensors, expert, projections, scheme).items():
                assert same_bytes(own[name + part], tensor), (expert, name + part)


WHOLE_0 = tuple((0, name) for name in SIZES)
CASES = {
    "the first expert": WHOLE_0,
    "the last expert": tuple((EXPERTS - 1, name) for name in SIZES),
    "all but the first": tuple((e, name) for e in range(1, EXPERTS) for name in SIZES),
    "down of the first": ((0, "down_proj"),),
    "down of all": tuple((e, "down_proj") for e in range(EXPERTS)),
    "gate of the first": ((0, "gate_proj"),),
    "up of one": ((2, "up_proj"),),
    "gate and up of all": tuple((e, name) for e in range(EXPERTS) for name in ("gate_proj", "up_proj")),
    "none": (),
}


@pytest.mark.parametrize("kind", ["blocks", "int4", "rows"])
@pytest.mark.parametrize("case", CASES)
def test_each_matrix_keeps_its_bytes_or_is_quantised_once(case, kind, tmp_path, recwarn):
    tensors = write(tmp_path, kind, CASES[case])
    check(load(tmp_path, SCHEME[kind]), tensors, SCHEME[kind])
    assert not [each for each in recwarn if "second time" in str(each.message)]


@pytest.mark.parametrize("case", ["the first expert", "down of all", "the last expert"])
def test_a_scale_for_each_matrix(case, tmp_path):
    tensors = write(tmp_path, "matrix", CASES[case])
    layer = load(tmp_path, "fp8_dynamic")
    for expert in range(EXPERTS):
        own = stored(layer, expert)
        if (expert, "gate_proj") in CASES[case]:
            gate, up = (tensors[f"{BLOCK}.experts.{expert}.{name}.weight"] for name in ("gate_proj", "up_proj"))
            parts = SCHEMES["fp8_dynamic"].weights.quantize(torch.cat([gate, up]), torch.bfloat16)
        else:
            parts = wanted(tensors, expert, ("gate_proj", "up_proj"), "fp8_dynamic")
        parts = {f"w13{part}": tensor for part, tensor in parts.items()}
        parts |= {f"w2{p}": t for p, t in wanted(tensors, expert, ("down_proj",), "fp8_dynamic").items()}
        for name, tensor in parts.items():
            assert same_bytes(own[name], tensor), (expert, name)


@pytest.mark.parametrize("plain", ["gate_proj", "up_proj"])
@pytest.mark.parametrize("expert", [0, EXPERTS - 1])
def test_one_scale_for_a_quantised_and_a_plain_half_is_refused(expert, plain, tmp_path):
    write(tmp_path, "matrix", ((expert, plain),))
    half = rf"{BLOCK}\.experts\.{expert}\.{plain}\.weight"
    sentence = rf"experts\.{expert}\..*, and {half} is of plain numbers; .* one scale for both"
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path, "fp8_dynamic")
    load(tmp_path, "none")


def test_a_calibrated_scheme_takes_no_plain_matrix(tmp_path):
    def calibrate(tensors):
        ends = [f"{BLOCK}.experts.{e}.{name}" for e in range(EXPERTS) for name in SIZES]
        tensors |= {f"{end}.input_scale": torch.tensor(0.01) for end in ends}

    write(tmp_path, "matrix", ((0, "down_proj"),), calibrate)
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj\.weight.*fp8_static keeps the bytes of other"):
        load(tmp_path, "fp8_static")


def other_blocks(tensors: dict[str, Tensor]) -> None:
    """Replace the block scales of a matrix by one scale per row."""
    name = f"{BLOCK}.experts.2.up_proj.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[f"{name}_scale"] = torch.rand(INNER, 1)


def test_other_factors_among_them_are_refused(tmp_path):
    write(tmp_path, "blocks", change=other_blocks)
    sentence = r"experts\.2\.up_proj\.weight is E4M3 with a factor for each row; quantization fp8_block keeps the bytes"
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path, "fp8_block")
    load(tmp_path, "none")


@pytest.mark.parametrize("expert", [0, 3])
def test_codes_without_factors_are_refused(expert, tmp_path):
    missing = f"{BLOCK}.experts.{expert}.gate_proj.weight_scale_inv"
    write(tmp_path, "blocks", change=lambda tensors: tensors.pop(missing))
    for quantization in ("fp8_block", "none"):
        with pytest.raises(CheckpointError, match=rf"experts\.{expert}\.gate_proj\.weight is float8.*got nothing in"):
            load(tmp_path, quantization)


@pytest.mark.parametrize(
    ("kind", "words", "keep"),
    [
        ("blocks", "each block of 128 x 128", "fp8_block"),
        ("rows", "each row", "fp8_channel"),
        ("int4", None, "int4_fp8 or int4"),
    ],
)
def test_another_scheme_than_the_file_s_is_said_with_those_that_keep_its_bytes(kind, words, keep, tmp_path):
    write(tmp_path, kind, WHOLE_0)
    what = "INT4.*" if words is None else f"E4M3 with a factor for {words}"
    sentence = rf"{what}, and quantization mxfp8 quantizes .* a second time; quantization {keep} or none does"
    with pytest.warns(UserWarning, match=sentence):
        load(tmp_path, "mxfp8")


def test_halves_under_two_scales_are_said(tmp_path):
    def differ(tensors):
        tensors[f"{BLOCK}.experts.1.up_proj.weight_scale"] *= 2

    write(tmp_path, "matrix", change=differ)
    with pytest.warns(UserWarning, match="one scale each, and a layer has one for both"):
        load(tmp_path, "fp8_dynamic")


@pytest.mark.parametrize("kind", ["blocks", "rows"])
@pytest.mark.parametrize("case", CASES)
def test_pieces_of_etp_are_those_of_the_whole(case, kind, tmp_path):
    write(tmp_path, kind, CASES[case])
    source, scheme = CheckpointSource(tmp_path), SCHEMES[SCHEME[kind]]
    found = find_format(source, BLOCK, names_of("qwen3_moe").experts)
    for expert in (0, 2):
        given = (found, source, BLOCK, CONFIG, expert, scheme)
        whole = read_quantized(*given, dtype=torch.bfloat16, device=CPU)
        for rank in range(2):
            piece = read_quantized(*given, dtype=torch.bfloat16, device=CPU, etp=(2, rank))
            for name, tensor in whole.items():
                assert same_bytes(piece[name], etp_shard(CONFIG, name, tensor, 2, rank)), (expert, name)


@pytest.mark.parametrize(("row_block", "step", "kept"), [(1, 1, True), (128, 1, True), (1, 2, True), (128, 2, False)])
def test_factors_of_several_rows_are_of_rows_side_by_side(row_block, step, kept):
    """A matrix keeps its codes only if each scale covers adjacent rows.

    Where gate and up rows alternate, a block of rows contains both.
    """
    matrix = SimpleNamespace(matches_scheme=lambda scheme: scheme == "fp8_block", row_block=row_block)
    projection = Projection(matrix, 256, step=step)
    assert projection.matches_scheme("fp8_block") is kept
    assert not projection.matches_scheme("mxfp8")


@pytest.mark.parametrize("scheme", ["fp8_dynamic", "nvfp4"])
@pytest.mark.parametrize("larger", [1.0, 2.0])
def test_a_half_that_is_rounded_again_is_said_in_each_scheme(larger, scheme):
    """A warning says that one half of w13 is rounded again, in each scheme.

    Under equal scales bytes are kept silently.
    """
    weights = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    gate = SCHEMES[scheme].weights.quantize(weights, torch.bfloat16)
    name = "_global_scale" if scheme == "nvfp4" else "_scale"
    up = gate | {name: gate[name] * larger}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        joined = join_halves(gate, up)
    assert ["one scale each, and a layer has one for both" in str(one.message) for one in caught] == [True] * (
        larger > 1
    )
    assert torch.equal(joined[""][32:].view(torch.uint8), up[""].view(torch.uint8))
    assert joined[name] == up[name]
