"""Test E4M3 checkpoints with a scale per matrix or per row.

A layer in the same scheme keeps the bytes, and any other layer keeps the values.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ep_moe import EPContext, MoELayer, Wire
from ep_moe.checkpoint.reader import largest_input_scale
from ep_moe.checkpoint.source import SINGLE, CheckpointSource
from ep_moe.errors import CheckpointError
from ep_moe.quant.schemes import SCHEMES
from tests.fixtures.checkpoint_files import load_one, same_bytes, stored
from tests.fixtures.per_expert_files import (
    BLOCK,
    CONFIG,
    EXPERTS,
    HIDDEN,
    INNER,
    PROJECTIONS,
    check_etp_pieces,
    save_matrices,
)

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
SCALES = {"gate_proj": 0.5, "up_proj": 0.5, "down_proj": 0.75}


def linear(rows: int, columns: int, seed: int, scale: Tensor, input_scale: float | None) -> dict[str, Tensor]:
    """Return one quantized matrix under its names in a file."""
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 40
    found = {"weight": numbers.clamp(-448, 448).to(FP8), "weight_scale": scale}
    return found if input_scale is None else found | {"input_scale": torch.tensor(input_scale)}


def experts(up: float = 0.5, *, by_row: bool = False, calibrated: bool = True) -> list[dict[str, dict[str, Tensor]]]:
    found = []
    for e in range(EXPERTS):
        matrices = {}
        for i, (name, shape) in enumerate(PROJECTIONS.items()):
            scale = torch.tensor((1 + e) * (up if name == "up_proj" else SCALES[name]))
            if by_row:
                scale = (scale * (1 + torch.arange(shape[0]) % 5)).unsqueeze(1).bfloat16()
            matrices[name] = linear(*shape, 10 * e + i, scale, 0.01 * (1 + e) + 0.001 * i if calibrated else None)
        found.append(matrices)
    return found


def save(folder, matrices=None, *, without: str = "") -> list:
    return save_matrices(folder, matrices or experts(), without=without)


def load(folder, quantization: str) -> MoELayer:
    return load_one(CONFIG, folder, quantization)


def numbers(matrix: dict[str, Tensor]) -> Tensor:
    scale = matrix["weight_scale"].float()
    return matrix["weight"].float() * (scale.reshape(-1, 1) if scale.numel() > 1 else scale)


def as_ours(projections: dict[str, dict[str, Tensor]], scheme: str) -> dict[str, Tensor]:
    """Return the canonical tensors of a file's expert, gate first. With one scale per matrix, gate and up share it."""
    gate, up, down = (projections[name] for name in PROJECTIONS)
    whole = {
        "w13": torch.cat([m["weight"].view(torch.uint8) for m in (gate, up)]).view(FP8),
        "w13_scale": gate["weight_scale"],
        "w2": down["weight"],
        "w2_scale": down["weight_scale"],
    }
    if scheme == "fp8_channel":
        whole["w13_scale"] = torch.cat([gate["weight_scale"], up["weight_scale"]])
        whole |= {name: whole[name].float().flatten() for name in ("w13_scale", "w2_scale")}
    if scheme == "fp8_static":
        whole |= {"w13_input_scale": max(gate["input_scale"], up["input_scale"])}
        whole |= {"w2_input_scale": down["input_scale"]}
    return whole


@pytest.mark.parametrize("one", [(), (1,)], ids=["[]", "[1]"])
@pytest.mark.parametrize(
    ("scheme", "calibrated"), [("fp8_static", True), ("fp8_dynamic", True), ("fp8_dynamic", False)]
)
def test_bytes_are_kept(scheme, calibrated, one, tmp_path):
    given = experts(calibrated=calibrated)
    matrices = [{n: {p: t.reshape(t.shape or one) for p, t in m.items()} for n, m in e.items()} for e in given]
    save(tmp_path, matrices)
    layer = load(tmp_path, scheme)
    for e, projections in enumerate(given):
        found, wanted = stored(layer, e), as_ours(projections, scheme)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert same_bytes(found[name], tensor), (e, name)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("end", [(1,), ()], ids=["[rows, 1]", "[rows]"])
def test_bytes_with_a_scale_a_row_are_kept(end, calibrated, tmp_path, recwarn):
    """Codes with a scale per row keep their bytes.

    bf16 scales, as compressed-tensors writes them, become the same numbers in float32. Input scales are not needed,
    because
    each row of activations gets its own.
    """
    given = experts(0.7, by_row=True, calibrated=calibrated)
    for each in given:
        for matrix in each.values():
            matrix["weight_scale"] = matrix["weight_scale"].reshape(-1, *end)
    save(tmp_path, given)
    layer = load(tmp_path, "fp8_channel")
    assert not [each for each in recwarn if "second time" in str(each.message)]
    for e, projections in enumerate(given):
        found, wanted = stored(layer, e), as_ours(projections, "fp8_channel")
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert same_bytes(found[name], tensor), (e, name)


@pytest.mark.parametrize("etp", [2, 4])
def test_a_rank_of_etp_reads_its_piece_with_the_scales_of_its_rows(etp, tmp_path):
    """An etp rank reads its piece with the scales of its rows.

    w13 is cut along its rows, and its scales with it. w2 is cut along its columns, so each rank has the scales of all
    rows.
    """
    whole = as_ours(save(tmp_path, experts(by_row=True))[1], "fp8_channel")
    gate, up = whole["w13_scale"].chunk(2)
    for rank, (piece, _) in enumerate(check_etp_pieces(tmp_path, "fp8_channel", whole, etp)):
        inner = slice(rank * INNER // etp, (rank + 1) * INNER // etp)
        assert torch.equal(piece["w2_scale"], whole["w2_scale"])
        assert torch.equal(piece["w13_scale"], torch.cat([gate[inner], up[inner]]))


@pytest.mark.parametrize("etp", [2, 4])
def test_a_rank_of_etp_reads_its_piece_alone(etp, tmp_path):
    whole = as_ours(save(tmp_path)[1], "fp8_static")
    matrices = (whole["w13"].numel() + whole["w2"].numel()) // etp
    for _, read in check_etp_pieces(tmp_path, "fp8_static", whole, etp):
        assert read == matrices + 6 * 4


@pytest.mark.parametrize("larger", ["gate", "up"])
def test_gate_and_up_under_two_scales(larger, tmp_path):
    """If gate and up have different scales, the half with the larger scale keeps its bytes.

    The other half is rounded to the larger scale, within half a step of E4M3: 2**-4 of the value, or half of the
    smallest
    number.
    """
    matrices = save(tmp_path, experts(0.4 if larger == "gate" else 0.7))
    layer = load(tmp_path, "fp8_static")
    kept = 0 if larger == "gate" else 1
    for e, projections in enumerate(matrices):
        own = stored(layer, e)
        halves = [projections[name] for name in ("gate_proj", "up_proj")]
        assert own["w13_scale"] == halves[kept]["weight_scale"]
        assert same_bytes(own["w13"].chunk(2)[kept], halves[kept]["weight"])
        wanted = numbers(halves[1 - kept])
        found = SCHEMES["fp8_static"].dequantize(own, "w13").chunk(2)[1 - kept]
        assert not torch.equal(found, wanted)
        least = 2.0**-10 * float(own["w13_scale"])
        assert ((found - wanted).abs() <= (wanted.abs() * 2.0**-4).clamp(min=least) * (1 + 1e-6)).all()


@pytest.mark.parametrize("by_row", [False, True], ids=["a matrix", "a row"])
@pytest.mark.parametrize("quantization", ["none", "fp8_dynamic", "mxfp8"])
def test_numbers_are_kept_in_another_scheme(quantization, by_row, tmp_path):
    """A layer in another scheme gets the checkpoint's values.

    With a scale per row, fp8_dynamic is another scheme too.
    """
    matrices = save(tmp_path, experts(by_row=by_row))
    layer, scheme = load(tmp_path, quantization), SCHEMES[quantization]
    for e, projections in enumerate(matrices):
        gate, up, down = (numbers(projections[name]) for name in PROJECTIONS)
        for name, tensor in (("w13", torch.cat([gate, up])), ("w2", down)):
            wanted = tensor
            if by_row or quantization != "fp8_dynamic":
                wanted = scheme.weights.dequantize(scheme.weights.quantize(tensor, torch.bfloat16))
            assert torch.equal(scheme.dequantize(stored(layer, e), name), wanted), (e, name)


@pytest.mark.parametrize("shape", [(), (1,), (HIDDEN,), (HIDDEN, 1)], ids=str)
def test_any_part_of_a_matrix_is_read(shape, tmp_path):
    scale = (1 + torch.arange(HIDDEN) % 7).float()[: 1 if len(shape) == 0 or shape == (1,) else HIDDEN].reshape(shape)
    matrices = experts()
    matrices[0]["down_proj"]["weight_scale"] = scale
    whole = numbers(save(tmp_path, matrices)[0]["down_proj"])
    source, name = CheckpointSource(tmp_path), f"{BLOCK}.experts.0.down_proj.weight"
    assert source.shape(name) == (HIDDEN, INNER)
    assert torch.equal(source.read(name, slice(5, 9), slice(3, 21)), whole[5:9, 3:21])
    assert torch.equal(source.read(name), whole)


def test_the_scale_that_rows_travel_under(tmp_path):
    """`largest_input_scale` returns the largest input scale of gate and up over all layers, and ignores others."""
    matrices = save(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors |= {f"{BLOCK.replace('0', '11')}.experts.7.up_proj.input_scale": torch.tensor([0.25])}
    others = ("mlp.shared_experts.gate_proj", "self_attn.q_proj", "mlp.experts.1.down_proj", "mlp.gate_proj")
    tensors |= {f"model.layers.0.{name}.input_scale": torch.tensor(9.0) for name in others}
    save_file(tensors, tmp_path / SINGLE)
    assert largest_input_scale(tmp_path, "qwen3_moe") == 0.25
    del tensors[f"{BLOCK.replace('0', '11')}.experts.7.up_proj.input_scale"]
    save_file(tensors, tmp_path / SINGLE)
    expected = max(float(e[name]["input_scale"]) for e in matrices for name in ("gate_proj", "up_proj"))
    assert largest_input_scale(tmp_path, "qwen3_moe") == expected
    # input_global_scale is a reciprocal
    tensors[f"{BLOCK.replace('0', '11')}.experts.7.up_proj.input_global_scale"] = torch.tensor(0.5)
    save_file(tensors, tmp_path / SINGLE)
    assert largest_input_scale(tmp_path, "qwen3_moe") == 2.0


def scales_of_others(block: str, experts: int) -> dict[str, Tensor]:
    """Return input scales that must be ignored.

    They belong to a layer that predicts additional tokens, to an expert index beyond the last, and to names with the
    same
    ending.
    """
    names = (
        "model.layers.3.mlp.experts.0.gate_proj",
        f"{block}.experts.{experts}.up_proj",
        f"{block}.experts.0.down_proj",
        f"{block}.shared_experts.gate_proj",
        f"model.mtp.layers.0.{block.removeprefix('model.layers.0.')}.experts.0.gate_proj",
        f"mtp.{block}.experts.0.gate_proj",
        f"{block}.experts.0.lora.gate_proj",
        "model.layers.0.self_attn.q_proj",
    )
    return {f"{name}.input_scale": torch.tensor(5.0) for name in names}


def test_layers_that_the_model_has_not(tmp_path):
    matrices = save(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    expected = max(float(e[name]["input_scale"]) for e in matrices for name in ("gate_proj", "up_proj"))
    save_file(tensors | {"model.layers.3.mlp.experts.0.up_proj.input_scale": torch.tensor(5.0)}, tmp_path / SINGLE)
    assert largest_input_scale(tmp_path, "qwen3_moe") == 5.0
    assert largest_input_scale(tmp_path, "qwen3_moe", layers=[0]) == expected
    inner = {"text_config": {"num_hidden_layers": 3}}  # the innermost text_config describes the model
    for config in (
        {"num_hidden_layers": 3},
        inner,
        {"num_hidden_layers": 40} | inner,
        {"num_hidden_layers": 1} | inner,
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert largest_input_scale(tmp_path, "qwen3_moe") == expected
    save_file(tensors | scales_of_others(BLOCK, EXPERTS), tmp_path / SINGLE)
    assert largest_input_scale(tmp_path, "qwen3_moe", num_experts=EXPERTS) == expected


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (torch.tensor(float("nan")), "must be finite"),
        (torch.tensor(float("inf")), "must be finite"),
        (torch.tensor(-1.0), "must be finite and at least 0"),
        (torch.tensor(1, dtype=torch.uint8), "must be factors in float32, .*got U8"),
        (torch.tensor(1).to(FP8), "must be factors in float32, .*got F8_E4M3"),
    ],
)
def test_input_scales_are_numbers(number, sentence, tmp_path):
    matrices = experts()
    matrices[1]["gate_proj"]["input_scale"] = number
    save(tmp_path, matrices)
    with pytest.raises(CheckpointError, match=rf"experts\.1\.gate_proj\.input_scale {sentence}"):
        largest_input_scale(tmp_path, "qwen3_moe")


def test_one_input_scale_for_each_matrix(tmp_path):
    """Several input scales for one matrix are refused. The larger one used to be taken."""
    matrices = experts()
    matrices[1]["gate_proj"]["input_scale"] = torch.tensor([0.25, 5.0])
    save(tmp_path, matrices)
    with pytest.raises(CheckpointError, match=r"experts\.1\.gate_proj\.input_scale must have shape \[\], got \[2\]"):
        largest_input_scale(tmp_path, "qwen3_moe")
    matrices = experts()
    matrices[1]["gate_proj"]["activation_scale"] = torch.tensor(5.0)
    save(tmp_path, matrices)
    with pytest.raises(CheckpointError, match=r"gate_proj\.input_scale is there, and .*activation_scale too; remove"):
        largest_input_scale(tmp_path, "qwen3_moe")


@pytest.mark.parametrize(("dtype", "shape"), [(torch.bfloat16, ()), (torch.float64, (1,)), (torch.float16, (1, 1))])
def test_input_scales_of_any_float_dtype(dtype, shape, tmp_path):
    matrices = experts()
    matrices[1]["gate_proj"]["input_scale"] = torch.tensor(0.25, dtype=dtype).reshape(shape)
    save(tmp_path, matrices)
    assert largest_input_scale(tmp_path, "qwen3_moe") == 0.25


@pytest.mark.parametrize(("name", "found"), [("gate_up_proj", True), ("down_proj", False)])
def test_input_scales_of_experts_in_one_tensor(name, found, tmp_path):
    """Input scales of all experts in one tensor are read for gate and up, which multiply the dispatched rows."""
    save_file({f"{BLOCK}.experts.{name}_input_scale": torch.tensor([0.125, 0.5, 0.25])}, tmp_path / SINGLE)
    if found:
        assert largest_input_scale(tmp_path, "qwen3_moe") == 0.5
        return
    with pytest.raises(CheckpointError, match="has no input scales of experts"):
        largest_input_scale(tmp_path, "qwen3_moe")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_what_was_not_calibrated_has_no_such_scale(family, tmp_path):
    save(tmp_path, experts(calibrated=False))
    with pytest.raises(CheckpointError, match="has no input scales of experts: it was not calibrated"):
        largest_input_scale(tmp_path, family)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_an_expert_that_calibration_never_reached_is_named(tmp_path):
    save(tmp_path, without=f"{BLOCK}.experts.2.up_proj.input_scale")
    sentence = r"experts\.2\.up_proj\.input_scale is missing.*calibrate with more data, or choose fp8_dynamic"
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path, "fp8_static")
    load(tmp_path, "fp8_dynamic")  # needs no input scale


@pytest.mark.parametrize("options", [{"calibrated": False}, {"by_row": True}], ids=["no input scales", "a scale a row"])
def test_what_was_not_calibrated_so_is_refused(options, tmp_path):
    save(tmp_path, experts(**options))
    with pytest.raises(CheckpointError, match=r"quantization fp8_static needs calibrated input scales.*fp8_dynamic"):
        load(tmp_path, "fp8_static")


@pytest.mark.parametrize("quantization", ["none", "fp8_dynamic", "fp8_static"])
@pytest.mark.parametrize(("change", "found"), [
    (lambda parts: parts.update(weight_scale=torch.ones(INNER, 3)), r"\[64, 3\]"),
    (lambda parts: parts.update(weight_scale=torch.ones(HIDDEN)), r"\[96\]"),
    (lambda parts: parts.pop("weight_scale"), "nothing"),
])  # fmt: skip
def test_other_shapes_of_scales_are_refused(change, found, quantization, tmp_path):
    matrices = experts()
    change(matrices[1]["gate_proj"])
    save(tmp_path, matrices)
    sentence = rf"experts\.1\.gate_proj\.weight is float8 of shape \[64, 96\].*can be read, got {found} in .*_scale"
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path, quantization)


def test_one_matrix_with_scales_of_rows_is_refused_where_bytes_are_kept(tmp_path):
    matrices = experts()
    matrices[2]["down_proj"]["weight_scale"] = torch.ones(HIDDEN, 1)
    save(tmp_path, matrices)
    with pytest.raises(
        CheckpointError, match=r"experts\.2\.down_proj\.weight_scale must have shape \[\], got \[96, 1\]"
    ):
        load(tmp_path, "fp8_dynamic")
    load(tmp_path, "none")


# --- a whole model --------------------------------------------------------------------------------------------------


def exported(tensors: dict[str, Tensor], *, by_row: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Quantize all matrices of the layers except routers to E4M3. Return (tensors of the file, their values)."""
    file, plain = {}, {}
    for name, tensor in tensors.items():
        file[name] = plain[name] = tensor
        if ".layers." not in name or tensor.dim() != 2 or name.endswith("mlp.gate.weight"):
            continue
        scale = tensor.abs().amax(1, keepdim=True) / 448 if by_row else tensor.abs().amax() / 448
        file[name], file[f"{name}_scale"] = (tensor / scale).to(FP8), scale
        file[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.01)
        plain[name] = file[name].float() * scale
    return file, plain


@pytest.mark.parametrize("by_row", [False, True], ids=["a matrix", "a row"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_load_pretrained(family, by_row, tmp_path):
    """A quantized model loads whole: plain blocks give the logits that transformers computes from the values.

    Shared experts and attention are dequantized.
    """
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import AutoModelForCausalLM

    from ep_moe.integrations.transformers import calibrated_wire, load_pretrained, moe_layers
    from tests.fixtures.checkpoint_files import quiet, saved_twice, tiny_model
    from tests.fixtures.checkpoint_files import save as save_model

    quiet()
    save_model(tiny_model(family, hidden_size=64), tmp_path / "source")
    file, plain = exported(load_file(tmp_path / "source" / SINGLE), by_row=by_row)
    how = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    if not by_row:
        file |= scales_of_others("model.layers.0.mlp", 8)
        # a layer that is dense in the model
        file |= {"model.layers.0.mlp.experts.0.gate_proj.input_scale": torch.tensor(5.0)} if "deep" in family else {}
    saved_twice(tmp_path, file, plain, how)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()(tokens).logits
        found = load_pretrained(tmp_path / "quantised", EPContext.local(CPU), dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    if not by_row:
        context = EPContext.local(CPU)
        wire = calibrated_wire(tmp_path / "quantised", context)
        assert wire == Wire(dispatch="fp8_tensor", input_scale=float(torch.tensor(0.01)))
        assert calibrated_wire(tmp_path / "quantised", context, combine="fp8").combine == "fp8"
        asked = {"quantization": "fp8_static", "wire": wire, "dtype": torch.bfloat16}
        model = load_pretrained(tmp_path / "quantised", context, **asked)
        own = stored(moe_layers(model)[-1], 1)
        number = max(int(name.split(".")[2]) for name in file if ".experts.1.up" in name)
        assert torch.equal(own["w2_scale"], file[f"model.layers.{number}.mlp.experts.1.down_proj.weight_scale"])
        assert same_bytes(own["w2"], file[f"model.layers.{number}.mlp.experts.1.down_proj.weight"])
