"""Test what this project passes to FlashInfer against FlashInfer's own source, wherever it is installed."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from ep_moe.all2all.flashinfer_nvlink import TOP_KS
from ep_moe.experts.flashinfer import cutedsl, cutlass_op
from ep_moe.experts.flashinfer import cutedsl as flashinfer_cutedsl
from ep_moe.experts.flashinfer.cutedsl import FlashInferCuteDslExperts
from ep_moe.experts.flashinfer.cutlass import ACTIVATIONS, FlashInferCutlassExperts
from ep_moe.types import Activation
from ep_moe.weights.layouts.base import ScaleLayout, arrange
from ep_moe.weights.layouts.cutedsl import interleave, mma_view

pytest.importorskip("flashinfer", reason="FlashInfer is not installed")

import flashinfer
from flashinfer.comm.comm_backend import TorchDistBackend
from flashinfer.comm.mnnvl import MnnvlMemory
from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout
from flashinfer.fused_moe import api, core, prepare
from flashinfer.moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpDispatchResult,
    NVLinkOneSidedAlltoAll,
    NVLinkOneSidedConfig,
    create_communication,
)
from flashinfer.tllm_enums import ActivationType

SOURCE = Path(inspect.getfile(core)).read_text()
CUTLASS = Path(flashinfer.__file__).parent / "data/csrc/fused_moe/cutlass_backend"
BINDING = CUTLASS / "flashinfer_cutlass_fused_moe_binding.cu"
CUTE_DSL = Path(flashinfer.__file__).parent / "fused_moe/cute_dsl"
FLAGS = cutlass_op.runner_of(torch.bfloat16, torch.bfloat16, "none", True).flags.keys()


def test_arguments_of_run_moe_and_their_order():
    """RUN_MOE has the C++ parameters of the compiled function that `cutlass_op` calls, in their order."""
    (declared,) = re.findall(r"void runMoe\((.*?)\)\s*\{", BINDING.read_text(), re.DOTALL)
    flat = re.sub(r"=\s*[^,]*?\{\}|=\s*[\w:]+", "", declared)
    names = [part.split()[-1] for part in re.sub(r"<[^()]*?>+", "", flat).split(",")]
    assert tuple(names) == cutlass_op.RUN_MOE


def test_python_hands_them_over_in_that_order():
    """FlashInfer's own Python passes the same arguments in that order, except min-latency outputs."""
    (call,) = re.findall(r"\n        run_moe\((.*?)\n        \)", SOURCE, re.DOTALL)
    names = [part.strip() for part in call.split(",") if part.strip() and not part.strip().startswith("*")]
    names = [re.sub(r"\s+", " ", name) for name in names]
    renamed = {"activation_type": "base_activation_type", "[gemm_tactic_1": "profile_ids"}
    names = [renamed.get(name, name) for name in names if name != "gemm_tactic_2]"]
    assert tuple(names) == cutlass_op.RUN_MOE


def test_runner_takes_the_flags():
    (signature,) = re.findall(r"class MoERunner\(TunableRunner\):.*?def __init__\(\s*self,(.*?)\):", SOURCE, re.DOTALL)
    wanted = {part.split(":")[0].strip() for part in signature.split(",") if part.strip()}
    given = {
        "x_dtype", "weight_dtype", "output_dtype", "top_k", "tp_size", "tp_rank", "ep_size", "ep_rank",
        "cluster_size", "cluster_rank", "enable_alltoall", "min_latency_mode", "enable_pdl", "activation_type",
    }  # fmt: skip
    assert wanted == given | FLAGS


def test_workspace_size_takes_the_flags():
    parameters = inspect.signature(core.cutlass_fused_moe_workspace_size).parameters
    assert parameters.keys() >= FLAGS
    assert list(parameters)[:5] == [
        "max_num_tokens", "hidden_size", "intermediate_size", "num_experts_total", "top_k",
    ]  # fmt: skip
    assert {"x_dtype", "weight_dtype", "output_dtype", "activation_type", "device"} <= parameters.keys()


def test_activation_numbers():
    assert {
        Activation.SWIGLU: ActivationType.Swiglu,
        Activation.SWIGLU_CLAMPED: ActivationType.Swiglu,
        Activation.GEGLU: ActivationType.Geglu,
        Activation.RELU2: ActivationType.Relu2,
    } == ACTIVATIONS


# --- Blackwell

QUANT_SCALES = {
    "nvfp4": ["fc1_act_global", "fc1_weight_block", "fc1_global", "fc2_act_global", "fc2_weight_block", "fc2_global"],
    "mxfp4_mxfp8": ["fc1_weight_block", "fc1_global", "fc2_weight_block", "fc2_global"],
    "mxfp8": ["fc1_weight_block", "fc1_global", "fc2_weight_block", "fc2_global"],
}
PREDICATES = {"nvfp4": "isNvfp4Quant", "mxfp4_mxfp8": "isWMxfp4AMxfp8Quant", "mxfp8": "isWMxfp8AMxfp8Quant"}


@pytest.mark.parametrize("scheme", QUANT_SCALES)
def test_order_of_the_block_scales(scheme):
    """Each tensor of ours is at the index of `quant_scales` that the binding gives its name."""
    body = BINDING.read_text().split("QuantParams getQuantParams(")[1]
    branch = body.split(f"if ({PREDICATES[scheme]}())")[1].split("return kernels::")[0]
    named = re.findall(r"(\w+) = quant_scales\.value\(\)\[(\d)\]", branch)
    assert [name for name, _ in sorted(named, key=lambda found: int(found[1]))] == QUANT_SCALES[scheme]
    scratch = {name: torch.empty(0) for name in ("quant1", "alpha1", "quant2", "alpha2", "ones")}
    stored = {name: torch.zeros(1, 128, 4, dtype=torch.uint8) for name in ("w13_scale", "w2_scale")}
    known = {id(tensor): name for name, tensor in scratch.items()}
    known |= {tensor.data_ptr(): name for name, tensor in stored.items()}
    given = [known.get(id(t)) or known[t.data_ptr()] for t in cutlass_op.quant_scales(scheme, stored, scratch)]
    ours = {"fc1_act_global": "quant1", "fc2_act_global": "quant2", "fc1_weight_block": "w13_scale"}
    ours |= {"fc2_weight_block": "w2_scale", "fc1_global": "alpha1", "fc2_global": "alpha2"}
    if scheme != "nvfp4":
        ours |= {"fc1_global": "ones", "fc2_global": "ones"}
    assert given == [ours[name] for name in QUANT_SCALES[scheme]]


def predicate(name: str, runner: cutlass_op.Runner) -> bool:
    """Evaluate one of the binding's `is...Quant` predicates for a runner."""
    (text,) = re.findall(rf"bool {name}\(\) const \{{\s*return (.*?);", BINDING.read_text(), re.DOTALL)
    text = re.sub(r"//.*", "", text).replace("&&", " and ").replace("||", " or ").replace("!m", " not m")
    dtypes = {"dl_float8_e4m3fn": torch.float8_e4m3fn, "dl_int64": torch.int64, "dl_uint8": torch.uint8}
    dtypes |= {"dl_float16": torch.float16, "dl_bfloat16": torch.bfloat16}
    flags = {
        "mUseDeepSeekFP8BlockScaling": "use_deepseek_fp8_block_scale", "mUseMxfp8ActScaling": "use_mxfp8_act_scaling",
        "mUseW4GroupScaling": "use_w4_group_scaling", "mUsePackedWeights": "use_packed_weights",
        "mUseWfp4Afp8Humming": "use_wfp4afp8_humming",
    }  # fmt: skip
    names = {name: runner.flags[flag] for name, flag in flags.items()} | dtypes
    text = " ".join(text.split())
    return bool(eval(text, {}, names | {"mActivationDtype": runner.input, "mWeightDtype": runner.weight}))


@pytest.mark.parametrize("scheme", PREDICATES)
def test_the_binding_knows_our_runners(scheme):
    """Each scheme satisfies only its own predicate."""
    stored = torch.float8_e4m3fn if scheme == "mxfp8" else torch.uint8
    runner = cutlass_op.runner_of(torch.bfloat16, stored, scheme, True)
    kinds = (*PREDICATES.values(), "isFp8Quant", "isWMxfp4AFp8Quant", "isWFP4A16Quant")
    assert [kind for kind in kinds if predicate(kind, runner)] == [PREDICATES[scheme]]


def test_architectures_of_the_cutlass_kernels():
    lists = {
        "none": api._CUTLASS_BF16_ARCHS, "fp8_static": api._CUTLASS_FP8_ARCHS, "fp8_dynamic": api._CUTLASS_FP8_ARCHS,
        "nvfp4": api._CUTLASS_NVFP4_ARCHS, "mxfp4_mxfp8": api._CUTLASS_MXFP8_MXFP4_ARCHS,
        "mxfp8": api._CUTLASS_MXFP8_ARCHS, "fp8_block": api._CUTLASS_FP8_BLOCK_ARCHS,
        "mxfp4": api._CUTLASS_W4A16_ARCHS, "mxfp4_fp8": api._CUTLASS_HUMMING_ARCHS, "int4_fp8": api._CUTLASS_W4A8_ARCHS,
    }  # fmt: skip
    assert lists.keys() == FlashInferCutlassExperts.capabilities.schemes
    for scheme, known in lists.items():
        low, high = FlashInferCutlassExperts.compute_capability(scheme)
        ours = [arch for arch in known if 90 <= arch < 110]
        assert (10 * low[0] + low[1], 10 * high[0] + high[1]) == (ours[0], ours[-1]), scheme


def test_the_layouts_of_flashinfers_own_helpers():
    scales = torch.randint(0, 256, (3, 256, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    swizzled = arrange(scales, ScaleLayout.SWIZZLED_128X4)
    theirs = prepare._swizzle_cutile_fp4_scales(scales, scale_block_size=16)
    assert torch.equal(swizzled.flatten(), theirs.flatten())
    wanted = convert_sf_to_mma_layout(swizzled.reshape(-1, 12), m=256, k=12 * 16, num_groups=3, sf_vec_size=16)
    found = mma_view(swizzled)
    assert (found.shape, found.stride()) == (wanted.shape, wanted.stride())
    assert torch.equal(found, wanted)
    rows = torch.arange(512).unsqueeze(1)
    assert torch.equal(interleave(rows), prepare._interleave_linear_and_gate(rows, group_size=64, dim=0))


def parameters_of(function: str) -> tuple[set[str], set[str]]:
    """Return (all, required) parameters of a method of `CuteDslMoEWrapper`.

    Its file is parsed and not imported, because it needs Triton.
    """
    tree = ast.parse((CUTE_DSL / "fused_moe.py").read_text())
    (kind,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "CuteDslMoEWrapper")
    (found,) = (n for n in kind.body if isinstance(n, ast.FunctionDef) and n.name == function)
    names = [argument.arg for argument in found.args.args][1:]
    return set(names) | {a.arg for a in found.args.kwonlyargs}, set(names[: len(names) - len(found.args.defaults)])


def test_calls_of_the_cutedsl_wrapper():
    kernel = cutedsl.Kernel(4, 2, 256, 128, torch.bfloat16, 3, 1.0, 0.0, 1.0, True)
    made = cutedsl.arguments(kernel, torch.device("cpu")).keys()
    known, needed = parameters_of("__init__")
    assert needed <= made <= known
    (call,) = (n for n in ast.walk(ast.parse(inspect.getsource(cutedsl)))
               if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "run")  # fmt: skip
    given = {keyword.arg for keyword in call.keywords}
    known, needed = parameters_of("run")
    assert not call.args
    assert needed <= given <= known


def test_bounds_of_the_cutedsl_kernels():
    source = (CUTE_DSL / "fused_moe.py").read_text()
    assert (
        re.findall(r"@supported_compute_capability\((\[.*?\])\)\s*@\w+\s*def __init__", source)[0] == "[100, 103, 107]"
    )
    able = FlashInferCuteDslExperts.capabilities
    assert (able.min_compute_capability, able.max_compute_capability) == ((10, 0), (10, 3))
    policy = Path(flashinfer.__file__).parent / "data/include/flashinfer/trtllm/fused_moe/RoutingCustomPolicy.cuh"
    tiers = re.findall(r"Tier<(\d+), (\d+)>", policy.read_text())
    assert (max(int(e) for e, _ in tiers), max(int(k) for _, k in tiers)) == (
        flashinfer_cutedsl.MAX_EXPERTS, flashinfer_cutedsl.MAX_TOP_K,
    )  # fmt: skip
    names = {Activation.SWIGLU: "Swiglu", Activation.SWIGLU_CLAMPED: "Swiglu", Activation.RELU2: "Relu2"}
    assert {a: int(ActivationType[name]) for a, name in names.items()} == flashinfer_cutedsl.ACTIVATIONS
    utils = (CUTE_DSL / "moe_utils.py").read_text()
    (able_to,) = re.findall(r"SUPPORTED_CUTE_DSL_MOE_ACTIVATION_TYPES = \((.*?)\)", utils, re.DOTALL)
    assert set(re.findall(r"ActivationType\.(\w+)", able_to)) == {"Swiglu", "GegluTanh", "Relu2"}


def test_top_ks_of_the_one_sided_all2all():
    """TOP_KS has the cases of the switch that compiles the kernels."""
    folder = Path(flashinfer.__file__).parent / "data/csrc/nv_internal/tensorrt_llm/kernels/communicationKernels"
    source = (folder / "moeAlltoAllKernels.cu").read_text()
    (switch,) = re.findall(r"#define SWITCH_TOP_K(.*?)default:", source, re.DOTALL)
    assert sorted(map(int, re.findall(r"case (\d+):", switch))) == list(TOP_KS)


def test_the_group_that_the_one_sided_all2all_is_given():
    """The one-sided all2all splits the communication backend that it is given. Ours returns itself."""
    assert list(inspect.signature(TorchDistBackend.__init__).parameters) == ["self", "group"]
    assert list(inspect.signature(TorchDistBackend.Split).parameters) == ["self", "color", "key"]
    assert NVLinkOneSidedConfig(comm_backend=None).comm_backend is None
    assert "comm_backend.Split(" in inspect.getsource(MnnvlMemory.set_comm_from_config)


def test_calls_of_the_one_sided_all2all():
    """The dispatcher's calls bind to FlashInfer's own classes."""
    nothing = object()
    BootstrapConfig(world_size=4, rank=1, device=1, process_group=None)
    MoEEpCommParams(num_experts=12, top_k=4, max_tokens_per_rank=24, hidden_size=256, dtype=torch.bfloat16)
    assert NVLinkOneSidedConfig(extra_payload_bytes_per_token=16).use_low_precision_combine is False
    inspect.signature(create_communication).bind(nothing, nothing, nothing)
    kind = NVLinkOneSidedAlltoAll
    inspect.signature(kind.dispatch).bind(nothing, nothing, nothing, nothing, max_tokens_per_rank=24)
    inspect.signature(kind.get_combine_input_buffer).bind(nothing, torch.bfloat16)
    inspect.signature(kind.combine).bind(nothing, nothing)
    inspect.signature(kind.destroy).bind(nothing)
    assert {"hidden_states", "topk_ids", "topk_weights"} <= {field.name for field in fields(MoEEpDispatchResult)}
