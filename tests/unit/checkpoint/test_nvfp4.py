"""Test NVFP4 checkpoints as ModelOpt exports them.

A layer in the same scheme keeps the bytes, and any other layer keeps the values.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.checkpoint.source import SINGLE, CheckpointSource
from ep_moe.errors import CheckpointError
from ep_moe.quant.microscale import dequantize_nvfp4, quantize_nvfp4
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


def linear(rows: int, columns: int, seed: int, global_scale: float, input_scale: float) -> dict[str, Tensor]:
    """Return one quantized matrix under its names in a file, with random bytes: any code, any finite scale."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(0, 127, (rows, columns // 16), dtype=torch.uint8, generator=generator)
    return {
        "weight": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator),
        "weight_scale": scale.view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(global_scale),
        "input_scale": torch.tensor(input_scale),
    }


def experts(global_scales: tuple[float, float] = (0.003, 0.003)) -> list[dict[str, dict[str, Tensor]]]:
    """Return random experts.

    Gate and up share a global scale by default, and each projection has its own input scale.
    """
    found = []
    for e in range(EXPERTS):
        scales = dict(zip(PROJECTIONS, (*global_scales, 0.007), strict=True))
        found.append({
            name: linear(*shape, 10 * e + i, (1 + e) * scales[name], 0.01 * (1 + e) + 0.001 * i)
            for i, (name, shape) in enumerate(PROJECTIONS.items())
        })  # fmt: skip
    return found


def save(folder, matrices=None, *, without: str = "", more: dict[str, Tensor] | None = None) -> list:
    return save_matrices(folder, matrices or experts(), without=without, more=more)


def load(folder, quantization: str, config: MoEConfig = CONFIG) -> MoELayer:
    return load_one(config, folder, quantization)


def as_ours(projections: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the canonical tensors of a file's expert whose gate and up share a global scale, gate first."""
    gate, up, down = (projections[name] for name in PROJECTIONS)
    scales = torch.cat([m["weight_scale"].view(torch.uint8) for m in (gate, up)]).view(torch.float8_e4m3fn)
    return {
        "w13": torch.cat([gate["weight"], up["weight"]]),
        "w13_scale": scales,
        "w13_global_scale": gate["weight_scale_2"],
        "w13_input_scale": max(gate["input_scale"], up["input_scale"]),
        "w2": down["weight"],
        "w2_scale": down["weight_scale"],
        "w2_global_scale": down["weight_scale_2"],
        "w2_input_scale": down["input_scale"],
    }


def numbers(matrix: dict[str, Tensor]) -> Tensor:
    return dequantize_nvfp4(matrix["weight"], matrix["weight_scale"], matrix["weight_scale_2"])


def test_bytes_are_kept(tmp_path):
    matrices = save(tmp_path)
    layer = load(tmp_path, "nvfp4")
    for e, projections in enumerate(matrices):
        found, wanted = stored(layer, e), as_ours(projections)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert same_bytes(found[name], tensor), (e, name)


def test_scalars_may_have_one_dimension(tmp_path):
    matrices = experts()
    for projections in matrices:
        for parts in projections.values():
            parts |= {name: tensor.reshape(1) for name, tensor in parts.items() if tensor.dim() == 0}
    save(tmp_path, matrices)
    layer = load(tmp_path, "nvfp4")
    for e, projections in enumerate(experts()):
        assert same_bytes(stored(layer, e)["w13_input_scale"], as_ours(projections)["w13_input_scale"])
        assert same_bytes(stored(layer, e)["w2_global_scale"], as_ours(projections)["w2_global_scale"])


@pytest.mark.parametrize("etp", [2, 4])
def test_a_rank_of_etp_reads_its_piece_alone(etp, tmp_path):
    whole = as_ours(save(tmp_path)[1])
    matrices = sum(whole[name].numel() for name in ("w13", "w2", "w13_scale", "w2_scale")) // etp
    for _, read in check_etp_pieces(tmp_path, "nvfp4", whole, etp):
        assert read == matrices + 6 * 4


@pytest.mark.parametrize("columns", [(0, 64), (16, 48), (3, 21), (31, 32), (17, 18)])
def test_any_part_of_a_matrix_is_read(columns, tmp_path):
    """Any part of a matrix can be read, including parts that start inside a block of 16 or inside a byte."""
    whole = numbers(save(tmp_path)[0]["down_proj"])
    source, name = CheckpointSource(tmp_path), f"{BLOCK}.experts.0.down_proj.weight"
    assert source.shape(name) == (HIDDEN, INNER)
    assert torch.equal(source.read(name, slice(5, 9), slice(*columns)), whole[5:9, slice(*columns)])
    assert torch.equal(source.read(name), whole)


@pytest.mark.parametrize("quantization", ["none", "fp8_dynamic", "mxfp4_mxfp8", "mxfp8", "mxint4"])
def test_numbers_are_kept_in_another_scheme(quantization, tmp_path):
    matrices = save(tmp_path)
    layer, scheme = load(tmp_path, quantization), SCHEMES[quantization]
    for e, projections in enumerate(matrices):
        gate, up, down = (numbers(projections[name]) for name in PROJECTIONS)
        for name, tensor in (("w13", torch.cat([gate, up])), ("w2", down)):
            parts = scheme.weights.quantize(tensor, torch.bfloat16)
            assert torch.equal(scheme.dequantize(stored(layer, e), name), scheme.weights.dequantize(parts)), (e, name)


@pytest.mark.parametrize("larger", ["gate", "up"])
def test_gate_and_up_under_two_global_scales(larger, tmp_path):
    """If gate and up have different global scales, the half with the larger one keeps its bytes.

    The other half is rounded to the larger scale. Its error is at most half a step of E2M1, plus the rounding of the
    block
    scale. That rounding is 2**-4 of the block scale, or 2**-10 of the global scale.
    """
    pair = (0.006, 0.005) if larger == "gate" else (0.005, 0.006)
    matrices = save(tmp_path, experts(pair))
    layer = load(tmp_path, "nvfp4")
    kept = 0 if larger == "gate" else 1
    for e, projections in enumerate(matrices):
        own = stored(layer, e)
        halves = [projections[name] for name in ("gate_proj", "up_proj")]
        assert own["w13_global_scale"] == halves[kept]["weight_scale_2"]
        for name, part in (("w13", "weight"), ("w13_scale", "weight_scale")):
            found = own[name].view(torch.uint8).chunk(2)
            assert torch.equal(found[kept], halves[kept][part].view(torch.uint8))
        wanted = numbers(halves[1 - kept])
        found = SCHEMES["nvfp4"].dequantize(own, "w13").chunk(2)[1 - kept]
        again = dequantize_nvfp4(*quantize_nvfp4(wanted, own["w13_global_scale"]), own["w13_global_scale"])
        assert torch.equal(found, again)
        amax = wanted.unflatten(1, (-1, 16)).abs().amax(2).repeat_interleave(16, 1)
        step = torch.maximum(wanted.abs() / 4, amax / 6 * (1 + 2.0**-4) / 4)
        assert ((found - wanted).abs() <= step.clamp(min=6 * 2.0**-10 * float(own["w13_global_scale"]))).all()


# --- what is refused ------------------------------------------------------------------------------------------------


def test_an_expert_that_calibration_never_reached_is_named(tmp_path):
    missing = f"{BLOCK}.experts.2.up_proj.input_scale"
    save(tmp_path, without=missing)
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.input_scale is missing.*calibrate with more data"):
        load(tmp_path, "nvfp4")
    load(tmp_path, "none")  # needs no input scale


def test_other_checkpoints_have_no_input_scales(tmp_path):
    tensors = {f"{BLOCK}.gate.weight": torch.randn(EXPERTS, HIDDEN)}
    for e in range(EXPERTS):
        tensors |= {f"{BLOCK}.experts.{e}.{n}.weight": torch.randn(shape) for n, shape in PROJECTIONS.items()}
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"quantization nvfp4 needs calibrated input scales.*or choose mxfp8"):
        load(tmp_path, "nvfp4")


def test_a_model_in_memory_has_no_input_scales():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from ep_moe.integrations.transformers import expert_parallel
    from tests.fixtures.checkpoint_files import tiny_model

    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp: quantization nvfp4 needs calibrated input scales"):
        expert_parallel(tiny_model("qwen3_moe", hidden_size=64), EPContext.local(CPU), quantization="nvfp4")


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("weight_scale", lambda t: t[:, :-1].clone(), r"NVFP4 of shape \[64, 48\]; only matrices with .*weight_scale of"
         r" shape \[64, 6\], one factor per 16 columns, can be read, got \[64, 5\] there"),
        ("weight", lambda t: t[:-1].clone(), r"can be read, got \[64, 6\] there"),
        ("input_scale", lambda t: torch.ones(2), r"input_scale must have shape \[\], got \[2\]"),
    ],
)  # fmt: skip
def test_other_shapes_are_refused(name, change, sentence, tmp_path):
    matrices = experts()
    matrices[1]["gate_proj"][name] = change(matrices[1]["gate_proj"][name])
    save(tmp_path, matrices)
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path, "nvfp4")


def test_factors_of_the_input_are_refused(tmp_path):
    """Input factors (NVFP4_AWQ's pre_quant_scale) are refused, because the weights are wrong without them."""
    save(tmp_path, more={f"{BLOCK}.experts.1.down_proj.pre_quant_scale": torch.ones(INNER)})
    for quantization in ("nvfp4", "none"):
        with pytest.raises(CheckpointError, match=r"down_proj\.pre_quant_scale is a factor of the layer's input"):
            load(tmp_path, quantization)


# --- a whole model --------------------------------------------------------------------------------------------------


def exported(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Quantize all matrices of the layers except routers as ModelOpt does.

    Return (tensors of the file, their values).
    """
    file, plain = {}, {}
    for name, tensor in tensors.items():
        file[name] = plain[name] = tensor
        if ".layers." not in name or tensor.dim() != 2 or name.endswith("mlp.gate.weight") or tensor.shape[1] % 16:
            continue
        other = tensors[name.replace("up_proj", "gate_proj")] if "up_proj" in name else tensor
        other = tensors.get(name.replace("gate_proj", "up_proj"), other) if "gate_proj" in name else other
        global_scale = torch.maximum(tensor.abs().max(), other.abs().max()) / (448 * 6)
        file[name], file[f"{name}_scale"] = quantize_nvfp4(tensor, global_scale)
        file[f"{name}_scale_2"] = global_scale
        file[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.01)
        plain[name] = dequantize_nvfp4(file[name], file[f"{name}_scale"], global_scale)
    return file, plain


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_load_pretrained(family, tmp_path):
    """A model with NVFP4 in all matrices of its layers loads whole.

    Plain blocks give the logits that transformers computes from the values, and quantized ones keep the file's bytes.
    Shared experts and attention are dequantized.
    """
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import AutoModelForCausalLM

    from ep_moe.integrations.transformers import calibrated_wire, load_pretrained, moe_layers
    from tests.fixtures.checkpoint_files import quiet, saved_twice, tiny_model
    from tests.fixtures.checkpoint_files import save as save_model

    quiet()
    model = tiny_model(family, hidden_size=64)
    save_model(model, tmp_path / "source")
    file, plain = exported(load_file(tmp_path / "source" / SINGLE))
    how = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    saved_twice(tmp_path, file, plain, how)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()(tokens).logits
        found = load_pretrained(tmp_path / "quantised", EPContext.local(CPU), dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    quantised = load_pretrained(
        tmp_path / "quantised", EPContext.local(CPU), quantization="nvfp4", dtype=torch.bfloat16
    )
    # E4M3 rows get the same range: 448 times their scale equals NVFP4's 2688 times its own
    for dispatch, scale in (("nvfp4", 0.01), ("fp8_tensor", 0.06)):
        wire = calibrated_wire(tmp_path / "quantised", EPContext.local(CPU), dispatch)
        assert wire.input_scale == pytest.approx(scale, rel=1e-6)
    layer = moe_layers(quantised)[-1]
    number = max(int(name.split(".")[2]) for name in file if ".experts.1." in name)
    own = stored(layer, 1)
    names = f"model.layers.{number}.mlp.experts.1"
    data = torch.cat([file[f"{names}.{half}.weight"] for half in ("gate_proj", "up_proj")])
    assert torch.equal(own["w13"], data)
    assert torch.equal(own["w2_global_scale"], file[f"{names}.down_proj.weight_scale_2"])


def test_scales_move_with_their_expert(tmp_path):
    """Scales move with their expert, through a state dict and through `update_expert`."""
    save(tmp_path)
    layer = load(tmp_path, "nvfp4")
    other = MoELayer(CONFIG, EPContext.local(CPU), quantization="nvfp4", dtype=torch.bfloat16)
    other.load_state_dict(layer.state_dict())
    for e in range(EXPERTS):
        for name, tensor in stored(layer, e).items():
            assert same_bytes(stored(other, e)[name], tensor), name
    other.update_expert(1, w13_global_scale=torch.tensor(0.5))
    assert stored(other, 1)["w13_global_scale"] == 0.5
    assert torch.equal(stored(other, 0)["w13_global_scale"], stored(layer, 0)["w13_global_scale"])
    assert torch.equal(stored(other, 1)["w13"], stored(layer, 1)["w13"])
