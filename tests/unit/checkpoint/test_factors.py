"""Test the scales beside codes in a checkpoint: exponents are decoded, and invalid scales are refused by name."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ep_moe import Activation, CheckpointError, MoEConfig, MoELayer, RoutingConfig
from ep_moe.checkpoint.source import SINGLE
from ep_moe.checkpoint.stored import check_fits, read_scalar_scale
from ep_moe.config import RoutingMethod
from ep_moe.quant.schemes import SCHEMES
from tests.fixtures.checkpoint_files import load_one, same_bytes, stored

CPU = torch.device("cpu")
FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
HIDDEN, INNER, EXPERTS = 256, 128, 2
BLOCK = "model.layers.0.mlp"
SIZES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
UE8M0 = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
CALIBRATED = [name for name, scheme in SCHEMES.items() if scheme.activations.calibrated]
ONE = f"{BLOCK}.experts.1.up_proj"


def config(**fields) -> MoEConfig:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_experts": EXPERTS, "top_k": 1}
    return MoEConfig(**(sizes | fields))


def each(make) -> dict[str, Tensor]:
    """Return the tensors of every expert matrix. `make` returns name suffix -> tensor from a shape and a generator."""
    tensors = {f"{BLOCK}.gate.weight": torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(0))}
    for expert in range(EXPERTS):
        for number, (name, shape) in enumerate(SIZES.items()):
            parts = make(*shape, torch.Generator().manual_seed(10 * expert + number))
            tensors |= {f"{BLOCK}.experts.{expert}.{name}.{end}": tensor for end, tensor in parts.items()}
    return tensors


def codes(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return (100 * torch.randn(rows, columns, generator=generator)).clamp(-448, 448).to(FP8)


def exponents(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randint(115, 123, shape, dtype=torch.uint8, generator=generator)


def blocks(rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
    scale = exponents(-(-rows // 128), -(-columns // 128), generator=generator)
    return {"weight": codes(rows, columns, generator), "weight_scale_inv": scale}


def groups(rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
    scale = exponents(rows, columns // 32, generator=generator)
    return {"weight": codes(rows, columns, generator), "weight_scale": scale}


def as_e8m0(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.view(E8M0) if "_scale" in n and t.dtype == torch.uint8 else t for n, t in tensors.items()}


def power_of_two(exponent: Tensor) -> Tensor:
    return torch.pow(2.0, exponent.double() - 127).float()


def matrix(tensors: dict[str, Tensor], expert: int, name: str) -> Tensor:
    """Return a matrix's values by the format's definition."""
    full = f"{BLOCK}.experts.{expert}.{name}.weight"
    weight = tensors[full].float()
    scale = tensors.get(f"{full}_scale_inv", tensors.get(f"{full}_scale"))
    rows, columns = (size // count for size, count in zip(weight.shape, scale.shape, strict=True))
    return weight * power_of_two(scale).repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def write(folder, tensors: dict[str, Tensor], quantization: dict | None = None) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE)
    stated = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"} | stated))


def load(folder, quantization: str, dtype=torch.float32, family="qwen3_moe", **fields) -> MoELayer:
    return load_one(config(**fields), folder, quantization, family, dtype=dtype)


@pytest.mark.parametrize("make", [blocks, groups], ids=["128 x 128", "1 x 32"])
@pytest.mark.parametrize(
    ("way", "quantization"),
    [("bytes", "none"), ("bytes", "fp8_block"), *(("E8M0", name) for name in SCHEMES if name not in CALIBRATED)],
)
@pytest.mark.filterwarnings("ignore:.*a second time")
def test_exponents_are_powers_of_two(quantization, way, make, tmp_path):
    tensors = each(make)
    write(tmp_path, as_e8m0(tensors) if way == "E8M0" else tensors, UE8M0 if way == "bytes" else None)
    dtype = torch.float32 if quantization == "none" else torch.bfloat16
    layer, scheme = load(tmp_path, quantization, dtype), SCHEMES[quantization]
    for expert in range(EXPERTS):
        gate, up, down = (matrix(tensors, expert, name) for name in SIZES)
        for name, wanted in (("w13", torch.cat([gate, up])), ("w2", down)):
            if (make, quantization) not in ((blocks, "fp8_block"), (groups, "mxfp8")):
                wanted = scheme.weights.dequantize(scheme.weights.quantize(wanted, dtype))
            assert torch.equal(scheme.dequantize(stored(layer, expert), name), wanted), (expert, name)


@pytest.mark.parametrize(("make", "quantization"), [(blocks, "fp8_block"), (groups, "mxfp8")])
def test_bytes_are_kept_under_exponents(make, quantization, tmp_path):
    tensors = each(make)
    write(tmp_path, as_e8m0(tensors))
    layer = load(tmp_path, quantization, torch.bfloat16)
    for expert in range(EXPERTS):
        own = stored(layer, expert)
        assert same_bytes(own["w2"], tensors[f"{BLOCK}.experts.{expert}.down_proj.weight"])
        halves = own["w13"].view(torch.uint8).chunk(2)
        for half, name in zip(halves, ("gate_proj", "up_proj"), strict=True):
            assert torch.equal(half, tensors[f"{BLOCK}.experts.{expert}.{name}.weight"].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mantissa", [1.0, 1.25], ids=["powers of two", "other numbers"])
def test_factors_in_floats_are_not_kept_as_exponents(mantissa, dtype, tmp_path):
    """mxfp8 has no other scales than powers of two: 1.25 would become 1. Powers of two as floats lose nothing."""

    def floats(rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
        scale = mantissa * power_of_two(exponents(rows, columns // 32, generator=generator))
        return {"weight": codes(rows, columns, generator), "weight_scale_inv": scale.to(dtype)}

    tensors = each(floats)
    write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [1, 32]})
    sentence = "a factor for each block of 1 x 32, and quantization mxfp8 quantizes .* a second time; quantization none"
    with pytest.warns(UserWarning, match=sentence):
        layer = load(tmp_path, "mxfp8", torch.bfloat16)
    scheme = SCHEMES["mxfp8"]
    for expert in range(EXPERTS):
        full = {name: f"{BLOCK}.experts.{expert}.{name}.weight" for name in SIZES}
        spread = {name: tensors[f"{at}_scale_inv"].float().repeat_interleave(32, 1) for name, at in full.items()}
        gate, up, down = (tensors[at].float() * spread[name] for name, at in full.items())
        for name, wanted in (("w13", torch.cat([gate, up])), ("w2", down)):
            rounding = 0.0 if mantissa == 1.0 else 2.0**-4  # half a step of E4M3
            found = scheme.dequantize(stored(layer, expert), name)
            largest = wanted.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)
            assert ((found - wanted).abs() <= rounding * largest).all(), (expert, name)


def test_the_smallest_and_the_largest_exponent(tmp_path):
    tensors = each(blocks)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name.removesuffix("_scale_inv")] = torch.ones_like(tensors[name.removesuffix("_scale_inv")].float())
        tensors[name.removesuffix("_scale_inv")] = tensors[name.removesuffix("_scale_inv")].to(FP8)
        tensors[name] = torch.full_like(tensors[name], 254 if "down" in name else 0)
    write(tmp_path, as_e8m0(tensors))
    own = stored(load(tmp_path, "none"), 0)
    assert (own["w2"] == 2.0**127).all()
    assert (own["w13"] == 2.0**-127).all()


@pytest.mark.parametrize("quantization", ["none", "fp8_block", "fp8_dynamic", "mxfp4"])
def test_bytes_that_nothing_states_to_be_exponents_are_refused(quantization, tmp_path):
    write(tmp_path, each(blocks), {"quant_method": "fp8", "weight_block_size": [128, 128]})
    sentence = r"model\.safetensors: .*gate_proj\.weight_scale_inv must be factors in .*, got uint8; .*scale_fmt"
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path, quantization, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, FP8, torch.float8_e5m2, torch.bool], ids=str)
@pytest.mark.parametrize("end", ["weight_scale_inv", "weight_scale"])
def test_factors_that_are_no_numbers_are_refused(end, dtype, tmp_path):
    tensors = as_e8m0(each(blocks if end.endswith("_inv") else groups))
    name = f"{ONE}.{end}"
    shape = tensors[name].shape if end.endswith("_inv") else (INNER, 1)
    tensors[name] = torch.ones(shape, dtype=torch.uint8).to(dtype)
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"up_proj\.{end} must be factors in float32, .*, got"):
        load(tmp_path, "none")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [(float("nan"), "got nan"), (float("inf"), "got inf"), (-0.5, r"at least 0, got -0\.5"), (0.0, "factors of 0")],
)
@pytest.mark.parametrize("quantization", ["none", "fp8_block", "fp8_dynamic"])
@pytest.mark.filterwarnings("ignore:.*a second time")
def test_factors_that_scale_nothing_are_refused(quantization, value, sentence, tmp_path):
    tensors = as_e8m0(each(blocks))
    tensors[f"{ONE}.weight_scale_inv"] = torch.tensor([[0.5, value]])
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*experts\.1\.up_proj.*{sentence}"):
        load(tmp_path, quantization, torch.bfloat16)


def test_a_factor_whose_numbers_no_float32_holds_is_refused(tmp_path):
    tensors = as_e8m0(each(blocks))
    tensors[f"{ONE}.weight_scale_inv"] = torch.tensor([[0.5, 3e38]])
    write(tmp_path, tensors)
    sentence = r"experts\.1\.up_proj\.weight times .*experts\.1\.up_proj\.weight_scale_inv must be finite, got -?inf"
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path, "none")


def test_a_factor_of_0_for_zeros_alone(tmp_path):
    """A scale of 0 is accepted for a block of zeros, as exporters write it, and only there."""
    tensors = each(
        lambda r, c, g: {"weight": codes(r, c, g), "weight_scale_inv": torch.ones(-(-r // 128), -(-c // 128))}
    )
    tensors[f"{ONE}.weight"].view(torch.uint8)[:, 128:] = 0
    tensors[f"{ONE}.weight_scale_inv"][0, 1] = 0
    write(tmp_path, tensors)
    for quantization in ("none", "fp8_block"):
        load(tmp_path, quantization, torch.bfloat16)
    assert (stored(load(tmp_path, "none"), 1)["w13"][INNER:, 128:] == 0).all()


@pytest.mark.parametrize("quantization", ["none", "fp8_block", "mxfp4"])
@pytest.mark.filterwarnings("ignore:.*a second time")
def test_the_exponent_and_the_code_that_are_nan(quantization, tmp_path):
    tensors = as_e8m0(each(blocks))
    tensors[f"{ONE}.weight_scale_inv"].view(torch.uint8)[0, 1] = 255
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.weight_scale_inv must be finite .*got nan"):
        load(tmp_path, quantization, torch.bfloat16)
    tensors = as_e8m0(each(blocks))
    tensors[f"{ONE}.weight"].view(torch.uint8)[3, 5] = 0xFF
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.weight must be finite, got NaN at 1 of"):
        load(tmp_path, quantization, torch.bfloat16)


@pytest.mark.parametrize("quantization", ["fp8_block", "mxfp4", "int4_fp8"])
def test_numbers_that_are_quantised_are_finite(quantization, tmp_path):
    """Numbers to quantize must be finite, because a NaN would become a number in 4 bits."""
    tensors = each(lambda r, c, g: {"weight": torch.randn(r, c, generator=g)})
    tensors[f"{ONE}.weight"][1, 2] = float("nan")
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp, expert 1, w13 must be finite, got nan at 1 of"):
        load(tmp_path, quantization, torch.bfloat16)


def int4(rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
    words = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=generator).int()
    return {"weight_packed": words, "weight_scale": torch.rand(rows, columns // 128, generator=generator).bfloat16()}


def nvfp4(rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "weight": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator),
        "weight_scale": torch.rand(rows, columns // 16, generator=generator).to(FP8),
        "weight_scale_2": torch.rand((), generator=generator),
        "input_scale": torch.rand((), generator=generator),
    }


@pytest.mark.parametrize(
    ("make", "end", "value", "quantization", "sentence"),
    [
        (int4, "weight_scale", torch.full((INNER, 2), float("nan")).bfloat16(), "int4_fp8", "must be finite.*got nan"),
        (int4, "weight_scale", torch.ones(INNER, 2).int(), "none", "must be factors in float32.*got I32"),
        (
            int4,
            "weight_scale",
            torch.full((INNER, 2), 127).byte().view(E8M0),
            "none",
            "must be factors.*got float8_e8m0",
        ),
        (nvfp4, "weight_scale", torch.full((INNER, 16), float("nan")).to(FP8), "nvfp4", "must be finite.*got nan"),
        (nvfp4, "weight_scale", torch.ones(INNER, 16), "none", "must be float8_e4m3fn, got F32"),
        (nvfp4, "weight_scale_2", torch.tensor(float("inf")), "nvfp4", "must be finite.*got inf"),
        (nvfp4, "weight_scale_2", torch.ones(2), "none", r"must have shape \[\], got \[2\]"),
        (nvfp4, "weight_scale_2", torch.ones((), dtype=torch.int32), "none", "must be factors in float32"),
        (int4, "weight_scale", torch.zeros(INNER, 2).bfloat16(), "none", "has factors of 0 for .* that are not 0"),
        (int4, "weight_scale", torch.zeros(INNER, 2).bfloat16(), "int4_fp8", "has factors of 0 for .* that are not 0"),
        (nvfp4, "weight_scale", torch.zeros(INNER, 16).to(FP8), "none", "has factors of 0 for .* that are not 0"),
        (nvfp4, "weight_scale_2", torch.tensor(0.0), "none", "has factors of 0 for .* that are not 0"),
        (nvfp4, "weight_scale_2", torch.tensor(0.0), "nvfp4", "has factors of 0 for .* that are not 0"),
        (nvfp4, "input_scale", torch.tensor(0.0), "nvfp4", "must be finite and greater than 0, got 0"),
        (nvfp4, "input_scale", torch.tensor(float("nan")), "nvfp4", "must be finite.*got nan"),
        (nvfp4, "input_scale", torch.ones((), dtype=torch.uint8), "nvfp4", "must be factors in float32.*got U8"),
    ],
)
def test_each_companion_is_looked_at(make, end, value, quantization, sentence, tmp_path):
    tensors = each(make)
    tensors[f"{ONE}.{end}"] = value
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*experts\.1\.up_proj\.{end} {sentence}"):
        load(tmp_path, quantization, torch.bfloat16)


def test_a_scale_of_nvfp4_that_rounds_to_0(tmp_path):
    """An NVFP4 scale that rounded to 0 is accepted. It occurs in blocks much smaller than the matrix's maximum."""
    tensors = each(nvfp4)
    tensors[f"{ONE}.weight_scale"].view(torch.uint8)[:, 3] = 0
    write(tmp_path, tensors)
    assert (stored(load(tmp_path, "none"), 1)["w13"][INNER:, 48:64] == 0).all()


def test_routers_and_biases_are_finite(tmp_path):
    tensors = each(lambda r, c, g: {"weight": torch.randn(r, c, generator=g)})
    tensors[f"{BLOCK}.gate.weight"][1, 2] = float("inf")
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"mlp\.gate\.weight must be finite, got inf at 1 of 512"):
        load(tmp_path, "none")
    tensors = each(lambda r, c, g: {"weight": torch.randn(r, c, generator=g)})
    name = f"{BLOCK}.gate.e_score_correction_bias"
    routing = RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, correction_bias=True)
    for value, sentence in ((torch.full((EXPERTS,), float("nan")), "finite"), (torch.ones(EXPERTS).int(), "got int32")):
        write(tmp_path, tensors | {name: value})
        with pytest.raises(CheckpointError, match=rf"e_score_correction_bias must be .*{sentence}"):
            load(tmp_path, "none", family="deepseek_v3", routing=routing)


@pytest.mark.parametrize("quantization", ["none", "mxfp4"])
@pytest.mark.parametrize(
    ("end", "change", "sentence"),
    [
        ("up_proj_scales", lambda t: t.fill_(255), r"gate_up_proj_scales has the exponent 255 \(NaN\)"),
        ("up_proj_scales", lambda t: t.float(), r"gate_up_proj_scales must be exponents \(E8M0\).*got F32"),
        ("up_proj_blocks", lambda t: t.view(torch.int8), r"gate_up_proj_blocks must be uint8"),
        ("down_proj_bias", lambda t: t.fill_(float("nan")), r"down_proj_bias must be finite, got nan"),
    ],
)
def test_mxfp4_as_gpt_oss(end, change, sentence, quantization, tmp_path):
    tensors = gpt_oss()
    name = next(name for name in tensors if name.endswith(end))
    tensors[name] = change(tensors[name])
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=sentence):
        load_gpt_oss(tmp_path, quantization)


@pytest.mark.parametrize("quantization", ["none", "mxfp4"])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_two_sets_of_codes_are_refused(name, quantization, tmp_path):
    """A file with quantized blocks and plain numbers of one matrix is refused.

    The plain numbers used to be ignored silently.
    """
    shape = {"gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER), "down_proj": (EXPERTS, INNER, HIDDEN)}[name]
    write(tmp_path, gpt_oss() | {f"{BLOCK}.experts.{name}": torch.randn(shape)})
    with pytest.raises(CheckpointError, match=rf"{name}_blocks is there, and .*experts\.{name} too; remove the one"):
        load_gpt_oss(tmp_path, quantization)


def gpt_oss() -> dict[str, Tensor]:
    tensors = {f"{BLOCK}.router.weight": torch.randn(EXPERTS, HIDDEN), f"{BLOCK}.router.bias": torch.randn(EXPERTS)}
    for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        tensors |= {
            f"{BLOCK}.experts.{name}_blocks": torch.full((EXPERTS, rows, columns // 32, 16), 0x21, dtype=torch.uint8),
            f"{BLOCK}.experts.{name}_scales": torch.full((EXPERTS, rows, columns // 32), 124, dtype=torch.uint8),
            f"{BLOCK}.experts.{name}_bias": torch.randn(EXPERTS, rows),
        }
    return tensors


def load_gpt_oss(folder, quantization: str) -> MoELayer:
    routing = RoutingConfig(method=RoutingMethod.TOPK_SOFTMAX, bias=True)
    fields = {"activation": Activation.SWIGLU_CLAMPED, "expert_bias": True, "routing": routing}
    return load(folder, quantization, torch.bfloat16, "gpt_oss", **fields)


@pytest.mark.parametrize("quantization", ["none", "fp8_block"])
def test_factors_beside_plain_numbers_are_refused(quantization, tmp_path):
    tensors = each(lambda r, c, g: {"weight": torch.randn(r, c, generator=g)})
    tensors[f"{ONE}.weight_scale_inv"] = torch.ones(1, 2)
    write(tmp_path, tensors)
    with pytest.raises(
        CheckpointError, match=r"experts\.1\.up_proj\.weight has plain numbers \(F32\), and .*_scale_inv"
    ):
        load(tmp_path, quantization, torch.bfloat16)


def test_other_sizes_of_blocks_are_those_of_the_configuration(tmp_path):
    def smaller(rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
        scale = exponents(rows // 64, columns // 32, generator=generator)
        return {"weight": codes(rows, columns, generator), "weight_scale_inv": power_of_two(scale)}

    tensors = each(smaller)
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"one factor per 128 x 128 block.*can be read, got \[2, 8\]"):
        load(tmp_path, "none")
    write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [64, 32]})
    own = stored(load(tmp_path, "none"), 1)
    name = f"{BLOCK}.experts.1.down_proj.weight"
    spread = tensors[f"{name}_scale_inv"].repeat_interleave(64, 0).repeat_interleave(32, 1)
    assert torch.equal(own["w2"], tensors[name].float() * spread)
    with pytest.warns(UserWarning, match=r"a factor for each block of 64 x 32, and quantization fp8_block"):
        load(tmp_path, "fp8_block", torch.bfloat16)


def test_two_sets_of_factors_are_refused(tmp_path):
    tensors = as_e8m0(each(blocks)) | {f"{ONE}.weight_scale": torch.ones(())}
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"two sets of factors, .*weight_scale_inv and .*weight_scale"):
        load(tmp_path, "none")


@pytest.mark.parametrize(("shape", "expert", "found"), [((), 3, 2.0), ((1,), None, 2.0), ((8,), 3, 2.0)])
def test_a_factor_is_one_number_or_one_for_each_expert(shape, expert, found):
    held = torch.full(shape, 2.0)
    tensors = SimpleNamespace(
        header=lambda name: ("F32", shape), raw=lambda name, *index: held[index], location=lambda name: name
    )
    assert read_scalar_scale(tensors, "scale", expert) == found


@pytest.mark.parametrize(("shape", "expert"), [((8, 2), 3), ((2, 4), 1), ((8,), None)])
def test_more_factors_than_one_are_refused(shape, expert):
    tensors = SimpleNamespace(header=lambda name: ("F32", shape), location=lambda name: name)
    with pytest.raises(CheckpointError, match=r"scale must have shape \[\], got \[(8|2)"):
        read_scalar_scale(tensors, "scale", expert)


@pytest.mark.parametrize(
    ("given", "dtype", "largest"),
    [
        (torch.float32, torch.float16, 65504.0),
        (torch.bfloat16, torch.float16, 65504.0),
        (torch.float64, torch.float16, 65504.0),
        (torch.float64, torch.float32, float(torch.finfo(torch.float32).max)),
        (torch.float64, torch.bfloat16, float(torch.finfo(torch.bfloat16).max)),
    ],
)
def test_numbers_beyond_a_narrower_dtype_are_refused(given, dtype, largest):
    fits = torch.tensor([1.0, -largest / 2], dtype=given)
    assert check_fits("w", fits, dtype) is fits
    with pytest.raises(CheckpointError, match=r"w has numbers up to .*choose another dtype"):
        check_fits("w", fits * 4, dtype)
