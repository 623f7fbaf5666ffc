"""Test what config.json declares about codes, for a whole checkpoint or some modules, and how scales apply."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.checkpoint.push import load_layer_weights
from ep_moe.checkpoint.quantization_config import DeclaredQuantization
from ep_moe.checkpoint.reader import load_layers
from ep_moe.checkpoint.source import MemorySource
from ep_moe.errors import CheckpointError
from tests.fixtures.packed_codes import E2M1, awq, channel, factors, gptq, int4, nvfp4, random

BLOCK = "model.layers.0.mlp"
CONFIG = MoEConfig(hidden_size=128, intermediate_size=64, num_experts=2, top_k=2)
SHAPES = {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def groups(*found, **more):
    """Return compressed-tensors' configuration for pairs of (target, weights)."""
    config_groups = {
        f"group_{n}": {"targets": [target], "weights": weights} for n, (target, weights) in enumerate(found)
    }
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": config_groups} | more


def write(folder, make, how, *, block=BLOCK, **options):
    """Write a layer's checkpoint. Return the values of its matrices."""
    generator, tensors, numbers = torch.Generator().manual_seed(0), {}, {}
    for expert in range(CONFIG.num_experts):
        for name, shape in SHAPES.items():
            parts, numbers[expert, name] = make(*shape, generator, **options)
            tensors |= {f"{block}.experts.{expert}.{name}.{part}": tensor for part, tensor in parts.items()}
    tensors[f"{block}.gate.weight"] = torch.randn(CONFIG.num_experts, CONFIG.hidden_size, generator=generator)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "quantization_config": how}))
    return numbers


def check_read(folder, numbers):
    layer = MoELayer(CONFIG, EPContext.local(torch.device("cpu")), dtype=torch.float32)
    load_layers({0: layer}, folder, "qwen3_moe", progress=False)
    check_numbers(layer, numbers)


def check_numbers(layer, numbers):
    for expert in range(CONFIG.num_experts):
        weights = layer.expert_weights.gather_slot(layer.expert_weights.slots_of_expert[expert][0])
        gate, up = weights["w13"].chunk(2)
        for name, found in (("gate_proj", gate), ("up_proj", up), ("down_proj", weights["w2"])):
            assert torch.equal(found, numbers[expert, name]), (expert, name)


def check_refused(folder, match, quantization="none"):
    context, dtype = EPContext.local(torch.device("cpu")), torch.float32 if quantization == "none" else torch.bfloat16
    layer = MoELayer(CONFIG, context, quantization=quantization, dtype=dtype)
    with pytest.raises(CheckpointError, match=match):
        load_layers({0: layer}, folder, "qwen3_moe", progress=False)


# --- the packing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["format", "checkpoint_format"])
def test_gptq_v2_under_both_names_of_the_field(key, tmp_path):
    how = GPTQ | {"sym": False, key: "GPTQ_v2"}
    check_read(tmp_path, write(tmp_path, gptq, how, group=32, symmetric=False, less=0))


def with_zeros(folder, zeros):
    """Write these zero points, as they are stored, for one matrix of the checkpoint."""
    file, name = folder / "model.safetensors", f"{BLOCK}.experts.1.up_proj.qzeros"
    tensors = load_file(file)
    codes = torch.tensor(zeros).repeat(tensors[name].numel() * 8 // len(zeros)).view(*tensors[name].shape, 8)
    tensors[name] = sum((codes[..., at] << 4 * at) for at in range(8)).int()
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("stated", "zeros", "match"),
    [
        ({}, [3, 15], r"up_proj\.qzeros has zero points 4 to 16 in checkpoint_format 'gptq', .*'gptq_v2' in"),
        (
            {"sym": None},
            [8, 8],
            r"zero points 9 to 9 in checkpoint_format 'gptq', .*8 if all are equal",
        ),
        ({"checkpoint_format": "gptq"}, [8, 8], r"zero points 9 to 9 in checkpoint_format 'gptq'"),
        ({"checkpoint_format": "gptq_v2"}, [7, 7], r"zero points 7 to 7 in checkpoint_format 'gptq_v2', .*'gptq' in"),
    ],
)
def test_zero_points_of_the_other_format_of_gptq(stated, zeros, match, tmp_path):
    """Zero points that no quantizer makes are refused: 16, and equal ones that are symmetric in the other format."""
    write(tmp_path, gptq, GPTQ | {"sym": False} | stated, group=32, symmetric=False)
    with_zeros(tmp_path, zeros)
    check_refused(tmp_path, match)


@pytest.mark.parametrize("written", [0, 1], ids=["gptq_v2", "gptq"])
@pytest.mark.parametrize("stated", ["gptq_v2", "gptq", ""])
def test_a_mean_one_step_from_zero_is_a_sign_of_the_other_format(written, stated, recwarn):
    """A warning names zero points that are likely read one off. Weights of a trained matrix are zero on average."""
    rows, columns = 256, 512
    weights = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).view(rows, -1, 64)
    low, high = weights.amin(2, keepdim=True), weights.amax(2, keepdim=True)
    scales = (high - low) / 15
    zeros = (-low / scales).round()
    codes = (weights / scales + zeros).round().clamp(0, 15).view(rows, columns).T.int()
    zeros = zeros.squeeze(2).T.int() - written

    def words(tensor):
        return sum(part.contiguous() << 4 * at for at, part in enumerate(tensor.unflatten(-1, (-1, 8)).unbind(-1)))

    source = MemorySource(
        {"x.qweight": words(codes.T).T.contiguous(), "x.qzeros": words(zeros), "x.scales": scales.squeeze(2).T}, "m"
    )
    source.declared = DeclaredQuantization(method="gptq", bits=frozenset({4}), packing=stated)
    found = source.matrix("x.weight").read_values()
    wrong = (stated != "gptq_v2") != bool(written)
    assert abs(float((found - weights.view(rows, columns)).mean() / scales.mean())) == pytest.approx(
        float(wrong), abs=0.1
    )
    said = [str(one.message) for one in recwarn]
    assert len(said) == wrong
    assert not said or re.search(rf"as if checkpoint_format '{stated or 'gptq'}' were 'gptq", said[0])


@pytest.mark.parametrize(
    ("make", "how", "match"),
    [
        (
            gptq,
            GPTQ | {"format": "gptq_v2", "checkpoint_format": "gptq"},
            r"states the packings gptq and gptq_v2; leave",
        ),
        (gptq, GPTQ | {"format": "marlin"}, r"is GPTQ in the packing 'marlin', which is not read"),
        (awq, AWQ | {"format": "gemv"}, r"is AWQ in the packing 'gemv', which is not read"),
        (awq, AWQ | {"backend": "llm-awq"}, r"is AWQ in the packing 'llm-awq', which is not read"),
    ],
)
def test_packings_that_are_not_read(make, how, match, tmp_path):
    write(tmp_path, make, how, group=32)
    check_refused(tmp_path, match)


# --- modules apart ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "options"),
    [
        ({"sym": False}, {"group": 32, "symmetric": False}),
        ({"group_size": 64}, {"group": 64}),
        ({"desc_act": True}, {"group": 32, "reordered": True}),
    ],
)
def test_gptq_modules_of_their_own(own, options, tmp_path):
    """Modules with their own settings in GPTQModel's `dynamic` are read by these settings."""
    rules = {"-:.*self_attn.*": {}, "+:.*experts.*": own, ".*": {"bits": 8}}
    check_read(tmp_path, write(tmp_path, gptq, GPTQ | {"dynamic": rules}, **options))


def test_patterns_are_of_names_in_the_file(tmp_path):
    block, rules = "model.language_model.layers.0.mlp", {r"+:model\.language_model\..*experts": {"sym": False}}
    how = GPTQ | {"dynamic": rules}
    check_read(tmp_path, write(tmp_path, gptq, how, block=block, group=32, symmetric=False))


def test_patterns_that_are_none_fit_no_module(tmp_path):
    rules = {"+:*.experts.*": {"bits": 8}, "-:(": {}}
    check_read(tmp_path, write(tmp_path, gptq, GPTQ | {"dynamic": rules}, group=32))


def test_gptq_modules_of_other_bits_are_named(tmp_path):
    write(tmp_path, gptq, GPTQ | {"dynamic": {r"+:.*experts\.1\.up_proj": {"bits": 8}}}, group=32)
    check_refused(tmp_path, r"experts\.1\.up_proj\.qweight is GPTQ with 8 bits, and 4 bits alone are read")


def test_groups_of_compressed_tensors_by_their_targets(tmp_path):
    experts, rest = ("re:.*experts.*", INT4), ("Linear", INT4 | {"num_bits": 8, "group_size": 128, "symmetric": False})
    check_read(tmp_path, write(tmp_path, int4, groups(rest, experts), group=32))


@pytest.mark.parametrize(
    ("own", "match"),
    [
        ({"symmetric": False}, r"experts\.0\.gate_proj\.weight_packed has no zero points, and config\.json states"),
        ({"actorder": "group"}, r"has no \S*gate_proj\.weight_g_idx, and config\.json states an actorder"),
        ({"actorder": "dynamic"}, r"has no \S*gate_proj\.weight_g_idx, and config\.json states an actorder"),
        ({"group_size": 64}, r"has a factor for each 32 columns, and config\.json states group_size 64"),
    ],
)
def test_a_group_that_contradicts_its_tensors(own, match, tmp_path):
    write(tmp_path, int4, groups(("Linear", INT4), ("re:.*experts.*", INT4 | own)), group=32)
    check_refused(tmp_path, match)


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (int4, groups(("Linear", INT4 | {"strategy": "channel", "group_size": -1}))),
        (awq, AWQ | {"group_size": -1}),
        (gptq, GPTQ | {"group_size": -1}),
    ],
)
def test_a_factor_for_a_whole_row_whatever_its_length(make, how, tmp_path):
    """A scale per whole row is read for rows of any length: 128 columns of gate and up, 64 of down."""

    def rows_alone(rows, columns, generator):
        return make(rows, columns, generator, group=columns)

    check_read(tmp_path, write(tmp_path, rows_alone, how))


def test_an_order_that_is_not_stored_is_no_order(tmp_path):
    check_read(tmp_path, write(tmp_path, int4, groups(("Linear", INT4 | {"actorder": "weight"})), group=32))


@pytest.mark.parametrize("given", [dict, lambda tensors: iter(tensors.items())])
def test_int4_is_pushed_with_the_shape_beside_it(given, tmp_path):
    numbers = write(tmp_path, int4, groups(("Linear", INT4)), group=32)
    layer = MoELayer(CONFIG, EPContext.local(torch.device("cpu")), dtype=torch.float32)
    load_layer_weights({0: layer}, given(load_file(tmp_path / "model.safetensors")), "qwen3_moe")
    check_numbers(layer, numbers)


def test_a_pushed_shape_that_contradicts_is_refused(tmp_path):
    write(tmp_path, int4, groups(("Linear", INT4)), group=32)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{BLOCK}.experts.1.up_proj.weight_shape"] = torch.tensor([64, 126])
    layer = MoELayer(CONFIG, EPContext.local(torch.device("cpu")), dtype=torch.float32)
    with pytest.raises(
        CheckpointError, match=r"up_proj\.weight_packed is .* with the shape \[64, 126\], which is not read"
    ):
        load_layer_weights({0: layer}, tensors, "qwen3_moe")


# --- what the weights are for -----------------------------------------------------------------------------------------


def hadamard(*places):
    applied = [{"targets": ["Linear"], "location": place} for place in places]
    return {"config_groups": {"u": {"type": "hadamard", "apply": applied}}}


def test_rotated_activations_are_refused(tmp_path):
    how = groups(("Linear", INT4), transform_config=hadamard("weight_input", "input"))
    write(tmp_path, int4, how, group=32)
    check_refused(
        tmp_path, r"config\.json states transform_config with location 'weight_input' and 'input': its weights"
    )


def test_rotation_of_gptq_is_refused(tmp_path):
    write(tmp_path, gptq, GPTQ | {"rotation": "hadamard"}, group=32)
    check_refused(tmp_path, r"config\.json states rotation: 'hadamard': its weights belong to activations")


@pytest.mark.parametrize("transform", [{}, None, hadamard("weight_input", "weight_output")])
def test_rotations_within_the_weights_are_read(transform, tmp_path):
    check_read(tmp_path, write(tmp_path, int4, groups(("Linear", INT4), transform_config=transform), group=32))


@pytest.mark.parametrize("fmt", ["e4m3fnuz", "e5m2"])
def test_another_format_of_8_bits_than_that_of_the_tensors(fmt, tmp_path):
    write(tmp_path, channel, {"quant_method": "fp8", "fmt": fmt})
    check_refused(
        tmp_path, rf"is float8_e4m3fn, and config\.json states fmt '{fmt}', of which the same bytes are other"
    )


def test_another_float8_is_named(tmp_path):
    def fnuz(rows, columns, generator):
        parts, numbers = channel(rows, columns, generator)
        return parts | {"weight": parts["weight"].view(torch.uint8).view(torch.float8_e4m3fnuz)}, numbers

    write(tmp_path, fnuz, None)
    check_refused(tmp_path, r"got float8_e4m3fnuz, codes of a quantization that is not read")


@pytest.mark.parametrize(
    ("method", "part", "called"),
    [
        ("fp_quant", "qweight", "FP-Quant"),
        ("higgs", "scales", "HIGGS"),
        ("metal", "scales", "Metal"),
        ("sinq", "W_q", "SINQ"),
    ],
)
def test_quantisations_are_called_by_their_names(method, part, called, tmp_path):
    def make(rows, columns, generator):
        return {"weight" if part == "scales" else "meta": torch.zeros(rows, 2), part: torch.ones(rows, 2)}, None

    write(tmp_path, make, {"quant_method": method})
    with pytest.raises(CheckpointError, match=rf"is quantized by {called}, which is not read"):
        load_layers({0: MoELayer(CONFIG, EPContext.local(torch.device("cpu")))}, tmp_path, "qwen3_moe", progress=False)


# --- numbers that float32 does not hold -------------------------------------------------------------------------------


def mxfp4(rows, columns, generator):
    codes, scale = random(generator, 0, 16, rows, columns), random(generator, 118, 122, rows, columns // 32)
    parts = {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), "weight_scale": scale.byte()}
    return parts, E2M1[codes] * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)


MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
# format: (maker, its options, config.json, name of the scales, a scale that is too large, schemes that keep it)
LARGE = {
    "nvfp4": (nvfp4, {"packed": False}, {"quant_method": "modelopt"}, "weight_scale_2", 1e38, "nvfp4a16"),
    "nvfp4 packed": (nvfp4, {"packed": True}, {"quant_method": "x"}, "weight_global_scale", 1e-40, "nvfp4a16"),
    "mxfp4": (mxfp4, {}, MXFP4, "weight_scale", 253, "mxfp4"),
    "int4": (int4, {"group": 32}, groups(("Linear", INT4)), "weight_scale", 1e38, "mxint4"),
    "gptq": (gptq, {"group": 32}, GPTQ, "scales", 1e38, "mxint4"),
    "awq": (awq, {"group": 32}, AWQ, "scales", 1e38, None),
    "channel": (channel, {}, {"quant_method": "fp8"}, "weight_scale", 1e38, "fp8_channel"),
}


@pytest.mark.filterwarnings("ignore:.*rounded to bfloat16")
@pytest.mark.parametrize(
    ("kind", "kept"), [(kind, kept) for kind in LARGE for kept in (False, True) if kind != "awq" or not kept]
)
def test_codes_times_factors_that_are_infinite(kind, kept, tmp_path):
    make, options, how, end, value, scheme = LARGE[kind]

    def large(rows, columns, generator):
        parts, numbers = make(rows, columns, generator, **options)
        own = parts[end] if parts[end].dtype == torch.uint8 else parts[end].float()
        return parts | {end: torch.full_like(own, value)}, numbers

    write(tmp_path, large, how)
    match = r"gate_proj\.\S+ times \S+gate_proj\.\S+ must be finite, got -?inf at"
    check_refused(tmp_path, match, scheme if kept else "none")


def test_the_largest_numbers_that_are_finite(tmp_path):
    def large(rows, columns, generator):
        parts, _ = mxfp4(rows, columns, generator)
        numbers = E2M1[torch.stack([parts["weight_packed"] & 0xF, parts["weight_packed"] >> 4], -1).flatten(-2).long()]
        return parts | {"weight_scale": torch.full_like(parts["weight_scale"], 252)}, numbers * 2.0**125

    check_read(tmp_path, write(tmp_path, large, MXFP4))


# --- gate and up in one tensor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inner", "ambiguous"), [(96, True), (224, True), (64, False), (192, False), (128, False)])
def test_blocks_over_gate_and_up_that_can_be_two_things(inner, ambiguous, tmp_path):
    """A fused gate_up tensor in fp8 blocks is refused if the blocks are ambiguous.

    Blocks of 128 rows may start again at up, or continue from gate into up. The number of blocks is the same in both
    cases
    if gate fills more than half of its last block.
    """
    config = MoEConfig(hidden_size=128, intermediate_size=inner, num_experts=1, top_k=1)
    generator, blocks = torch.Generator().manual_seed(0), 2 * -(-inner // 128)
    tensors = {f"{BLOCK}.gate.weight": torch.randn(1, 128)}
    for name, shape, grid in (
        ("gate_up_proj", (1, 2 * inner, 128), (1, blocks, 1)),
        ("down_proj", (1, 128, inner), (1, 1, blocks // 2)),
    ):
        codes = (torch.randn(shape, generator=generator) * 100).to(torch.float8_e4m3fn)
        tensors |= {
            f"{BLOCK}.experts.{name}": codes,
            f"{BLOCK}.experts.{name}_scale_inv": factors(generator, *grid),
        }
    save_file(tensors, tmp_path / "model.safetensors")
    layer = MoELayer(config, EPContext.local(torch.device("cpu")), dtype=torch.float32)
    if ambiguous:
        with pytest.raises(CheckpointError, match=rf"has gate and up of {inner} rows each in one tensor, and"):
            load_layers({0: layer}, tmp_path, "qwen3_moe", progress=False)
        return
    load_layers({0: layer}, tmp_path, "qwen3_moe", progress=False)
    codes, scale = (tensors[f"{BLOCK}.experts.gate_up_proj{end}"][0].float() for end in ("", "_scale_inv"))
    gate, up = codes.chunk(2)
    spread = scale.repeat_interleave(128, 0)
    half = 128 * (blocks // 2)
    wanted = torch.cat([gate * spread[:inner], up * spread[half : half + inner]])
    assert torch.equal(layer.expert_weights.gather_slot(0)["w13"], wanted)
