"""Test what a folder's JSON declares of its quantization, and which tensors reveal an unsupported one."""

import json

import pytest

from ep_moe.checkpoint.quantization_config import DeclaredQuantization, read_declared_quantization, unsupported_tensors

UP = "model.layers.0.mlp.experts.0.up_proj"


@pytest.mark.parametrize(
    ("part", "called"),
    [
        ("qzeros", "AWQ or GPTQ"), ("weight.absmax", "bitsandbytes (4 bits)"),
        ("weight.quant_map", "bitsandbytes (4 bits)"), ("SCB", "bitsandbytes (LLM.int8)"),
        ("weight_format", "bitsandbytes (LLM.int8)"), ("W_q", "HQQ"), ("codebooks", "AQLM"), ("weight._data", "quanto"),
        ("_weight_qdata", "torchao"), ("weight:_data", "torchao"), ("weight_scales", "EETQ"), ("centroids", "VPTQ"),
        ("dense_weights", "SpQR"), ("weight_quantizer.scale", "Quark"), ("scales", "MLX"),
    ],
)  # fmt: skip
def test_a_quantization_is_known_by_a_tensor(part, called):
    assert unsupported_tensors([f"{UP}.weight", f"{UP}.{part}", f"{UP}.bias"], DeclaredQuantization()) == {
        f"{UP}.{part}": called
    }


def test_the_surest_of_several_tensors_comes_first():
    """The tensor that identifies a quantization best comes first. Other names are used by several quantizations."""
    names = [f"{UP}.{part}" for part in ("scales", "codebooks", "W_q")]
    assert list(unsupported_tensors(names, DeclaredQuantization())) == [f"{UP}.W_q", f"{UP}.codebooks", f"{UP}.scales"]


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_words_of_awq_and_gptq_say_themselves_whether_they_are_read(part):
    assert not unsupported_tensors([f"{UP}.qweight", f"{UP}.{part}"], DeclaredQuantization())


@pytest.mark.parametrize(
    ("method", "called"),
    [
        ("auto-round", "AutoRound"), ("awq", "AWQ"), ("gptq", "GPTQ"), ("fp_quant", "FP-Quant"), ("higgs", "HIGGS"),
        ("sinq", "SINQ"), ("metal", "Metal"), ("gguf", "GGUF"), ("another", "as its tensors say"),
    ],
)  # fmt: skip
def test_a_quantization_is_called_as_its_method(method, called):
    assert DeclaredQuantization(method=method).called("as its tensors say") == called


GROUP = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def groups(weights):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("file", "content", "stated"),
    [
        ("config.json", {"compression_config": groups(GROUP)}, {"bits": {4}, "groups": {32}}),
        ("config.json", {"quantization": GPTQ}, {"method": "gptq", "bits": {4}, "groups": {128}}),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, {"method": "NVFP4"}),
        (
            "config.json",
            {"quantization_config": {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}},
            {"bits": {4}, "groups": {64}, "packing": "gemm"},
        ),
        ("config.json", {"quantization_config": GPTQ | {"is_marlin_format": True}}, {"packing": "marlin"}),
        ("config.json", {"quantization_config": GPTQ | {"is_marlin_format": False}}, {"packing": ""}),
        (
            "config.json",
            {"quantization_config": groups({"num_bits": 8, "type": "float", "block_structure": [64, 32]})},
            {"blocks": ((64, 32),), "groups": set()},
        ),
        ("config.json", {"quantization_config": {"weight_block_size": [64, 0]}}, {"blocks": ()}),
        (
            "config.json",
            {"thinker_config": {"text_config": {"num_hidden_layers": 3}}},
            {"layers": 3, "multimodal": True},
        ),
    ],
)
def test_fields_are_read_under_the_names_of_their_writers(file, content, stated, tmp_path):
    (tmp_path / file).write_text(json.dumps(content))
    found = read_declared_quantization(tmp_path)
    assert {name: getattr(found, name) for name in stated} == stated


@pytest.mark.parametrize(("order", "reordered"), [(True, True), ("group", True), ("dynamic", True), ("weight", False)])
def test_an_order_of_columns_is_that_of_the_modules_it_is_stated_for(order, reordered, tmp_path):
    config = groups(GROUP | {"actorder": order})
    config["config_groups"]["group_0"]["targets"] = ["Linear"]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert read_declared_quantization(tmp_path).of(f"{UP}.weight_packed").reordered is reordered


@pytest.mark.parametrize(
    ("place", "rotated"), [("input", True), ("output", True), ("weight_input", False), ("weight_output", False)]
)
def test_a_rotation_is_one_while_the_model_runs_or_lies_in_the_weights(place, rotated, tmp_path):
    transforms = {"config_groups": {"u": {"apply": [{"location": place, "targets": ["Linear"]}]}}}
    config = {"quant_method": "compressed-tensors", "transform_config": transforms}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = read_declared_quantization(tmp_path).rotated
    assert found == (f"transform_config with location {place!r}" if rotated else "")


@pytest.mark.parametrize(
    ("fields", "exponents"),
    [
        ({"scale_fmt": "ue8m0"}, True), ({"scale_fmt": "UE8M0"}, True), ({"format": "mxfp4-pack-quantized"}, True),
        ({"format": "mxfp8-quantized"}, True), ({"quant_algo": "W4A8_MXFP4_FP8"}, True), ({"scale_fmt": "fp32"}, False),
        ({"format": "nvfp4-pack-quantized"}, False), ({}, False),
    ],
)  # fmt: skip
def test_bytes_are_exponents_where_a_format_says_so(fields, exponents, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": fields | {"quant_method": "any"}}))
    assert read_declared_quantization(tmp_path).exponents is exponents
