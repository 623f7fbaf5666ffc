"""Test what `trtllm_op` passes to FlashInfer and what `Trtllm` stores, against FlashInfer's own code.

The tests run wherever FlashInfer is installed. Its quantizers and scale swizzle are CUDA kernels, which torch replaces.
All other preparation code is FlashInfer's own.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from ep_moe import Activation, MoEConfig
from ep_moe.experts.flashinfer import trtllm_op
from ep_moe.experts.flashinfer.base import clamp_constants
from ep_moe.experts.flashinfer.trtllm import ACTIVATIONS, MAX_TOP_K, shape_problem
from ep_moe.experts.fused import flashinfer_trtllm as monolithic
from ep_moe.quant.microscale import quantize_mxfp4, quantize_mxfp8, quantize_nvfp4
from ep_moe.quant.schemes import SCHEMES
from ep_moe.weights.layouts.trtllm import LAYOUTS, Trtllm, block_major, row_order, shuffle_rows
from tests.emulations.trtllm import row_places, scale_places

pytest.importorskip("flashinfer", reason="FlashInfer is not installed")

from pathlib import Path

import flashinfer
from flashinfer import fused_moe
from flashinfer.fused_moe import core, prepare
from flashinfer.fused_moe.api import QuantConfig, QuantFormat, ReLU2, SwiGLU
from flashinfer.quantization import fp4_quantization, fp8_quantization
from flashinfer.tllm_enums import (
    ActivationType,
    Fp8QuantizationType,
    RoutingMethodType,
    SfLayout,
    WeightLayout,
)
from flashinfer.utils import srcToDstBlk32RowMap

HIDDEN, INNER, SLOTS, ROWS, TOP_K = 512, 256, 3, 5, 2
BF16 = torch.bfloat16
LAUNCHER = (Path(flashinfer.__file__).parent / "data/csrc/trtllm_fused_moe_kernel_launcher.cu").read_text()
each_gate = pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])

# parameters left to FlashInfer's defaults; all others are passed
LEFT = {
    "trtllm_bf16_routed_moe": {"enable_pdl", "gemm1_lora_delta", "tune_max_num_tokens", "routing_replay_out"},
    "trtllm_fp8_per_tensor_scale_routed_moe": {
        "enable_pdl", "tune_max_num_tokens", "routing_replay_out", "gemm1_clamp_limit",
    },
    "trtllm_fp8_block_scale_routed_moe": {
        "enable_pdl", "gemm1_lora_delta", "tune_max_num_tokens", "valid_hidden_size", "valid_intermediate_size",
    },
    "trtllm_fp4_block_scale_routed_moe": {
        "enable_pdl", "gemm1_lora_delta", "tune_max_num_tokens", "valid_hidden_size", "valid_intermediate_size",
        "per_token_scale", "num_fused_shared_experts",
    },
    "trtllm_mxint4_block_scale_routed_moe": {
        "enable_pdl", "gemm1_lora_delta", "tune_max_num_tokens", "valid_hidden_size", "valid_intermediate_size",
    },
}  # fmt: skip


def shape(activation: Activation = Activation.SWIGLU, *, bias: bool = False) -> MoEConfig:
    return MoEConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_experts=8,
        top_k=TOP_K,
        activation=activation,
        expert_bias=bias,
    )


def call_arguments(config: MoEConfig, name: str, routing: dict, **rest) -> dict:
    """Return the arguments of one call, with empty weights."""
    specs = Trtllm(config, SCHEMES[name], BF16).specs()
    stored = {key: torch.ones(SLOTS, *spec.shape).to(spec.dtype) for key, spec in specs.items()}
    scratch = {
        key: torch.zeros(*size, dtype=dtype) for key, (size, dtype) in trtllm_op.row_shapes(name, ROWS, HIDDEN).items()
    }
    first = stored["w13_input_scale"].amax(0) if "w13_input_scale" in stored else None
    x, x_scale = trtllm_op.quantize_rows(torch.ones(ROWS, HIDDEN, dtype=BF16), name, first, scratch)
    return trtllm_op.arguments(
        name,
        routing=routing,
        x=x,
        x_scale=x_scale,
        weights={key: stored.get(key) for key in ("w13", "w2", "w13_bias", "w2_bias")},
        scales={key: stored[key] for key in trtllm_op.scale_names(name)},
        clamp=clamp_constants(config, SLOTS, torch.device("cpu")),
        activation=ACTIVATIONS[config.activation],
        inner=INNER,
        output=torch.empty(ROWS, HIDDEN, dtype=BF16),
        **rest,
    )


# --- calls ----------------------------------------------------------------------------------------------------------


SERVED = [
    pytest.param(name, shape(activation, bias=bias), id=f"{name}-{activation.value}" + bias * "-bias")
    for name in trtllm_op.ENTRIES
    for activation in ACTIVATIONS
    for bias in (False, True)
    if shape_problem(shape(activation, bias=bias), 1, SCHEMES[name]) is None
]


@pytest.mark.parametrize(("name", "config"), SERVED)
def test_a_call_binds_to_flashinfers_function(name, config):
    given = call_arguments(config, name, trtllm_op.routed(torch.zeros(ROWS, TOP_K, dtype=torch.int32), SLOTS))
    entry = trtllm_op.ENTRIES[name]
    signature = inspect.signature(getattr(fused_moe, entry))
    signature.bind(**given)
    assert signature.parameters.keys() - given.keys() == LEFT[entry]


@pytest.mark.parametrize(("name", "config"), SERVED)
def test_flashinfers_own_function_takes_it(name, config, monkeypatch):
    """FlashInfer's Python accepts each call, down to the compiled module, which is replaced.

    It recognizes packed ids as such.
    """
    taken: list[tuple] = []

    class Module:
        def __getattr__(self, function: str):
            return lambda *given: taken.append((function, given)) or [given]

    monkeypatch.setattr(core, "get_trtllm_moe_sm100_module", Module)
    packed = torch.zeros(ROWS, TOP_K, dtype=torch.int32)
    given = call_arguments(config, name, trtllm_op.routed(packed, SLOTS))
    trtllm_op.call(trtllm_op.ENTRIES[name], **given)
    ((function, handed),) = taken
    assert function == trtllm_op.ENTRIES[name] or function == monolithic.ENTRIES[name]
    for tensor in (value for value in given.values() if isinstance(value, torch.Tensor)):
        assert any(tensor is other for other in handed)
    if name != "mxint4":  # the mxint4 entry has only this mode
        assert core.RoutingInputMode.PackedPrecomputed in handed


@pytest.mark.parametrize(("name", "config"), SERVED)
def test_a_monolithic_call_binds_too(name, config):
    """A monolithic call binds too.

    It takes no LoRA argument, and has defaults that normalize weights and record ids.
    """
    logits = torch.zeros(ROWS, config.num_experts, dtype=BF16)
    on_input = name == "fp8_static"
    given = call_arguments(config, name, monolithic.routing_arguments(config, logits, None), on_input=on_input)
    entry = monolithic.ENTRIES[name]
    signature = inspect.signature(getattr(fused_moe, entry))
    signature.bind(**given)
    added = {"trtllm_fp8_block_scale_moe": {"num_fused_shared_experts", "gemm1_bias", "gemm2_bias"}}
    left = LEFT[trtllm_op.ENTRIES[name]] - {"gemm1_lora_delta"} | {"norm_topk_prob", "routing_replay_out"}
    assert signature.parameters.keys() - given.keys() == left | added.get(entry, set())


def test_numbers_of_enums():
    assert (ActivationType.Swiglu, ActivationType.Relu2) == (trtllm_op.SWIGLU, trtllm_op.RELU2)
    assert RoutingMethodType.Renormalize == trtllm_op.RENORMALIZE
    for number, name in monolithic.NAMES.items():
        assert RoutingMethodType(number).name == name
    assert (WeightLayout.MajorK, WeightLayout.BlockMajorK) == (trtllm_op.MAJOR_K, trtllm_op.BLOCK_MAJOR_K)
    assert (Fp8QuantizationType.DeepSeekFp8, Fp8QuantizationType.MxFp8) == (trtllm_op.DEEPSEEK_FP8, trtllm_op.MXFP8)
    assert SfLayout.layout_linear == trtllm_op.LINEAR_SCALES


def test_limits_of_routing():
    """The limits that `routing_problem` states are still in FlashInfer's source."""
    folder = Path(flashinfer.__file__).parent / "data/csrc/fused_moe/trtllm_backend"
    llama4 = (folder / "trtllm_fused_moe_routing_llama4.cu").read_text()
    deepseek = (folder / "trtllm_fused_moe_routing_deepseek.cu").read_text()
    assert f"MaxSupportedExperts = {monolithic.LLAMA4_EXPERTS};" in llama4
    for line in ("NumNemotronExperts = 512;", "MaxNumTopGroups = 4;", "MaxNumGroups = 8;"):
        assert line in deepseek
    assert "max_supported_top_k = args->num_experts <= kNumKimiK2Experts ? 8 : 22" in LAUNCHER
    assert "TVM_FFI_ICHECK_LT(args->top_k, (args->topk_group * args->num_experts / args->n_group))" in LAUNCHER


def test_limits_of_the_launcher():
    """The checks that `expert_count` and `MAX_TOP_K` satisfy are still in FlashInfer's source."""
    assert "TVM_FFI_ICHECK_EQ(args->num_experts % 4, 0)" in LAUNCHER
    assert "TVM_FFI_ICHECK_GT(args->num_experts, args->top_k)" in LAUNCHER
    assert f"args->top_k <= {MAX_TOP_K} && args->top_k > 0" in LAUNCHER
    assert "args->local_expert_offset + args->local_num_experts <= args->num_experts" in LAUNCHER


@pytest.mark.parametrize("kernel", ["routingIndicesBlockKernel", "routingPermutation"])
def test_picks_outside_of_the_local_experts_are_left_out(kernel):
    """FlashInfer's routing compares each id with the local range, and `pack` relies on that."""
    folder = Path(flashinfer.__file__).parent / "data"
    texts = [
        (folder / "csrc/fused_moe/trtllm_backend/trtllm_fused_moe_routing_custom.cuh").read_text(),
        (folder / "include/flashinfer/trtllm/fused_moe/RoutingKernel.cuh").read_text(),
    ]
    (text,) = [text for text in texts if f"void {kernel}(" in text or f"{kernel}(KernelParams" in text]
    assert "int32_t{-1}" in text
    assert "localExpertExtent" in text
    finalize = (folder / "csrc/fused_moe/trtllm_backend/trtllm_fused_moe_dev_kernel.cu").read_text()
    assert finalize.count("permutedIdx == -1") >= 3


# --- rows -----------------------------------------------------------------------------------------------------------


def flashinfers_order(rows: int, gated: bool) -> Tensor:
    """Return FlashInfer's permutation of [up; gate] rows, applied to canonical rows [gate; up]."""
    weight = torch.zeros(rows, 8, dtype=torch.uint8)
    order = core._maybe_get_cached_w3_w1_permute_indices({}, weight, 128, is_gated_act_gemm=gated)
    return (order + rows // 2) % rows if gated else order


@each_gate
@pytest.mark.parametrize("rows", [128, 384])
def test_the_order_of_rows(rows, gated):
    assert torch.equal(row_order(rows, gated=gated), flashinfers_order(rows, gated))
    scales = torch.zeros(rows, 8, dtype=torch.uint8)
    for per_scale in (16, 32):
        moved = core._maybe_get_cached_w3_w1_permute_indices(
            {}, scales, 128, num_elts_per_sf=per_scale, is_gated_act_gemm=gated
        )
        assert torch.equal(
            moved, core._maybe_get_cached_w3_w1_permute_indices({}, scales, 128, is_gated_act_gemm=gated)
        )
        second = core.get_w2_permute_indices_with_cache({}, scales, 128, num_elts_per_sf=per_scale)
        assert torch.equal(second, row_order(rows, gated=False))


@each_gate
def test_the_emulations_order_of_rows(gated):
    weight = torch.arange(256).view(-1, 1)
    stored = fused_moe.reorder_rows_for_gated_act_gemm(weight) if gated else weight
    stored = flashinfer.shuffle_matrix_a(stored, 128)
    assert torch.equal(stored[row_places(256, gated)], weight)


def test_the_table_of_rows():
    assert [int(place) for place in row_places(32, False)] == list(srcToDstBlk32RowMap)


def test_the_helpers_of_one_matrix():
    weight = torch.randint(0, 255, (256, 512), dtype=torch.uint8)
    assert torch.equal(flashinfer.shuffle_matrix_a(weight, 128), shuffle_rows(weight, gated=False))
    assert torch.equal(fused_moe.convert_to_block_layout(weight, 128), block_major(weight))


# --- whole preparations ---------------------------------------------------------------------------------------------


def swizzled(scale: Tensor) -> Tensor:
    """Compute `block_scale_interleave` by the emulation's formula."""
    flat = torch.empty_like(scale).flatten()
    flat[scale_places(*scale.shape).flatten()] = scale.flatten()
    return flat


def fp4(x: Tensor, global_scale: Tensor, sf_vec_size: int, sf_use_ue8m0: bool, is_sf_swizzled_layout: bool):
    assert not is_sf_swizzled_layout
    assert global_scale.tolist() == [1.0]
    return quantize_mxfp4(x) if sf_use_ue8m0 else quantize_nvfp4(x, 1.0)


@pytest.fixture
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(fp4_quantization, "block_scale_interleave", swizzled)
    monkeypatch.setattr("flashinfer.fp4_quantization.fp4_quantize", fp4)
    monkeypatch.setattr(fp8_quantization, "mxfp8_quantize", lambda x, is_sf_swizzled_layout: quantize_mxfp8(x))


def flashinfers(name: str, w13: Tensor, w2: Tensor, gated: bool) -> dict[str, Tensor]:
    """Run FlashInfer's preparation of bf16 weights, [E, up; gate, H] and [E, H, I]."""
    sizes = {"num_local_experts": SLOTS, "hidden_size": HIDDEN, "intermediate_size": INNER}
    rest = {**sizes, "activation": SwiGLU() if gated else ReLU2()}
    pairs = {
        "nvfp4": (QuantFormat.NVFP4, QuantFormat.NVFP4),
        "mxfp4": (QuantFormat.MXFP4, QuantFormat.BF16),
        "mxfp4_mxfp8": (QuantFormat.MXFP4, QuantFormat.MXFP8),
        "fp8_block": (QuantFormat.DeepSeekFp8, QuantFormat.DeepSeekFp8),
        "mxfp8": (QuantFormat.MXFP8, QuantFormat.MXFP8),
    }
    if name in pairs:
        rest["quant"] = QuantConfig(*pairs[name])
    match name:
        case "none":
            return prepare.prepare_trtllm_bf16_weights(w13, w2, **rest)
        case "fp8_static":
            one = torch.tensor(1.0)
            return prepare.prepare_trtllm_fp8_per_tensor_weights(
                w13, w2, hidden_states_scale_global=2 * one, intermediate_scale_global=4 * one, **rest
            )
        case "fp8_block" | "mxfp8":
            return prepare.prepare_trtllm_fp8_block_weights(w13, w2, **rest)
        case "mxint4":
            return prepare.prepare_trtllm_mxint4_weights(w13, w2, **rest)
        case _:
            return prepare.prepare_trtllm_fp4_weights(w13, w2, **rest)


def weights(name: str, rows: int, columns: int, seed: int) -> Tensor:
    """Return bf16 weights that a scheme stores exactly, with scales that both sides compute equally.

    Scales are powers of two, and each block contains the largest number of the format.
    """
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-4, 3, (SLOTS, rows, columns // 32, 1), generator=generator)
    if name in ("none", "fp8_static", "fp8_block"):
        exponents = torch.zeros_like(exponents)
    values = torch.randint(-3, 4, (SLOTS, rows, columns // 32, 32), generator=generator).float()
    largest = {"none": 3.0, "mxint4": 7.0, "nvfp4": 6.0, "mxfp4": 6.0, "mxfp4_mxfp8": 6.0}.get(name, 448.0)
    values[..., 0] = largest
    values[..., 16] = largest
    return (values * 2.0**exponents).flatten(2).to(BF16)


PREPARED = [
    (name, gated) for name in LAYOUTS for gated in (True, False) if gated or name not in ("fp8_block", "mxint4")
]


@pytest.mark.parametrize(("name", "gated"), PREPARED)
def test_whole_experts_as_flashinfer_prepares_them(name, gated, on_the_cpu):
    config = shape(Activation.SWIGLU if gated else Activation.RELU2)
    w13, w2 = weights(name, config.w13_rows, HIDDEN, 1), weights(name, HIDDEN, INNER, 2)
    if gated:
        up, gate = w13.chunk(2, 1)
        canonical = torch.cat([gate, up], 1)
    else:
        canonical = w13
    theirs = flashinfers(name, w13, w2, gated)
    weight_layout = Trtllm(config, SCHEMES[name], BF16)
    for e in range(SLOTS):
        tensors = {"w13": canonical[e], "w2": w2[e]}
        tensors = SCHEMES[name].quantize(tensors, BF16)
        if name == "nvfp4":  # FlashInfer's preparation supports only a global scale of 1
            for key, whole in (("w13", canonical[e]), ("w2", w2[e])):
                tensors[key], tensors[f"{key}_scale"] = quantize_nvfp4(whole, 1.0)
        ours = weight_layout.prepare(tensors)
        for key, other in (("w13", "gemm1_weights"), ("w2", "gemm2_weights")):
            assert torch.equal(raw(ours[key]), raw(theirs[other][e])), key
            assert ours[key].shape == theirs[other][e].shape, key
            if f"{key}_scale" in ours and name != "fp8_static":
                assert torch.equal(raw(ours[f"{key}_scale"]), raw(theirs[f"{other}_scale"][e])), key


@each_gate
def test_output_scales_of_fp8_as_flashinfer_derives_them(gated):
    """Output scales equal FlashInfer's. Its multipliers are the reciprocals of our scales."""
    config = shape(Activation.SWIGLU if gated else Activation.RELU2)
    w13, w2 = weights("fp8_static", config.w13_rows, HIDDEN, 1) * 2, weights("fp8_static", HIDDEN, INNER, 2) * 8
    theirs = flashinfers("fp8_static", w13, w2, gated)
    stored = {
        "w13_scale": torch.full((SLOTS,), 2.0),
        "w2_scale": torch.full((SLOTS,), 8.0),
        "w13_input_scale": torch.full((SLOTS,), 0.5),
        "w2_input_scale": torch.full((SLOTS,), 0.25),
    }
    ours = trtllm_op.output_scales("fp8_static", stored, gated)
    for scale, name in zip(ours, ("1_scales_scalar", "1_scales_gate_scalar", "2_scales_scalar"), strict=True):
        torch.testing.assert_close(scale, theirs[f"output{name}"], rtol=1e-6, atol=0)


def raw(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def test_every_scheme_has_a_layout():
    assert LAYOUTS.keys() == trtllm_op.ENTRIES.keys()
