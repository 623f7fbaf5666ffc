"""Test why a GPU kernel is refused, with the exact sentence, and that the best kernel for a scheme comes first."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from ep_moe import (
    Activation,
    BackendUnavailable,
    ConfigError,
    EPContext,
    MoEConfig,
    MoELayer,
    RankLayout,
    Wire,
    registry,
)
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.flashinfer.cutlass import FlashInferCutlassExperts
from ep_moe.experts.hopper.experts import Bf16TritonExperts
from ep_moe.experts.hopper.experts_4bit import W4A8TritonExperts, W4A16TritonExperts
from ep_moe.experts.hopper.experts_fp8 import Fp8BlockTritonExperts, Fp8ChannelTritonExperts, Fp8TensorTritonExperts
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.quant.schemes import SCHEMES
from ep_moe.selection.explain import choose, explain
from ep_moe.selection.resolve import LayerRequest, resolve_backends
from ep_moe.weights.layouts.cutlass import SM90_SCHEMES

GPU = torch.device("cuda")
BF16 = torch.bfloat16


def config(hidden: int = 256, inner: int = 256, **fields) -> MoEConfig:
    return MoEConfig(hidden_size=hidden, intermediate_size=inner, num_experts=8, top_k=2, **fields)


def layout(etp: int = 1) -> RankLayout:
    return RankLayout(world=etp, rank=0, dp=etp, ep=1, etp=etp)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Pretend to have an H200 with both libraries. Only the choice reads this; nothing runs."""
    here = {"capability": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: here["capability"])
    own = (Bf16TritonExperts, Fp8BlockTritonExperts, Fp8ChannelTritonExperts, Fp8TensorTritonExperts)
    for kernel in (*own, W4A8TritonExperts, W4A16TritonExperts, FlashInferCutlassExperts):
        monkeypatch.setattr(kernel, "available", classmethod(lambda cls: None))
    return here


def reason(kernel: str, scheme: str = "none", dtype: torch.dtype = BF16, *, device=GPU, options=None, etp=1, **fields):
    rows = explain(config(**fields), layout(etp), device, dtype, scheme=SCHEMES[scheme], options=options)
    (row,) = (row for row in rows if (row.all2all, row.experts) == ("local", kernel))
    return row.reason if row.status == "refused" else None


@pytest.mark.parametrize("scheme", SM90_SCHEMES)
def test_hopper_has_a_kernel_for_every_scheme(scheme):
    found = choose(config(), layout(), GPU, BF16, scheme=SCHEMES[scheme])
    own = {"none": "bf16", "fp8_block": "fp8_block", "fp8_static": "fp8_tensor", "fp8_dynamic": "fp8_dynamic"}
    own |= {"mxfp4": "w4a16", "mxfp4_fp8": "w4a8", "int4_fp8": "w4a8"}
    assert found.experts == f"{own[scheme]}_triton"
    assert reason("flashinfer_cutlass", scheme) is None
    assert reason("reference", scheme) is None


@pytest.mark.parametrize("scheme", ["none", "nvfp4", "mxfp8"])
def test_what_was_not_run_on_a_gpu_says_so(scheme, hopper):
    hopper["capability"] = (10, 0)
    doubt = "flashinfer_cutlass was NOT RUN on compute capability 10.0 yet"
    found = choose(config(), layout(), GPU, BF16, scheme=SCHEMES[scheme])
    assert found.experts == "flashinfer_cutlass"
    assert found.reason.endswith(f"; {doubt}")
    context = EPContext.local(torch.device("cpu"))
    context.device = GPU
    rest = {"all2all": "auto", "wire": Wire(), "pipeline": None, "options": ExpertsOptions(), "dtype": BF16}
    with pytest.warns(UserWarning, match=f"{doubt}; see whether tests/gpu of"):
        resolve_backends(
            context, "layer", config(), LayerRequest(experts="auto", quantization=scheme, router=None, **rest), None
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = LayerRequest(experts="flashinfer_cutlass", quantization=scheme, router=None, **rest)
        resolve_backends(context, "layer", config(), named, None)
        hopper["capability"] = (9, 0)
        resolve_backends(
            context, "layer", config(), LayerRequest(experts="auto", quantization="none", router=None, **rest), None
        )


def test_a_scale_for_each_channel_has_one_fast_kernel():
    """fp8_channel has one fast kernel. FlashInfer's CUTLASS kernels support no scale per channel of weights."""
    found = choose(config(), layout(), GPU, BF16, scheme=SCHEMES["fp8_channel"])
    assert found.experts == "fp8_channel_triton"
    for kernel in ("flashinfer_cutlass", "fp8_dynamic_triton", "fp8_block_triton"):
        assert "quantization fp8_channel is not among" in str(reason(kernel, "fp8_channel"))
    assert reason("reference", "fp8_channel") is None


def test_what_the_fast_kernels_lack_goes_to_the_next():
    def chosen(scheme: str, dtype: torch.dtype = BF16, **fields) -> str:
        return choose(config(**fields), layout(), GPU, dtype, scheme=SCHEMES[scheme]).experts

    assert chosen("fp8_block", expert_bias=True) == "flashinfer_cutlass"
    assert chosen("none", inner=192, expert_bias=True) == "bf16_triton"
    assert chosen("none", torch.float16) == "flashinfer_cutlass"
    assert chosen("none", inner=200) == "flashinfer_cutlass"
    assert chosen("fp8_static", inner=192) == "flashinfer_cutlass"
    assert chosen("fp8_dynamic", inner=192) == "flashinfer_cutlass"
    assert chosen("fp8_dynamic", expert_bias=True) == "flashinfer_cutlass"
    assert chosen("fp8_dynamic", torch.float16) == "fp8_dynamic_triton"
    assert chosen("fp8_block", torch.float16) == "fp8_block_triton"
    assert chosen("fp8_channel", expert_bias=True) == "fp8_channel_triton"
    assert chosen("fp8_channel", torch.float16) == "reference"
    assert chosen("none", torch.float32) == "reference"
    assert chosen("mxfp4", torch.float16) == "reference"
    assert chosen("mxfp4") == chosen("mxfp4", inner=192, expert_bias=True) == "w4a16_triton"
    for scheme in ("mxint4", "int4", "nvfp4a16"):
        assert chosen(scheme, expert_bias=True) == "w4a16_triton"
    for scheme in ("mxfp4_fp8", "int4_fp8", "mxint4_fp8"):
        assert chosen(scheme, expert_bias=True) == "w4a8_triton"
    assert chosen("mxfp4_fp8", torch.float16) == "flashinfer_cutlass"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
@pytest.mark.parametrize("kernel", ["flashinfer_cutlass", "fp8_block_triton"])
def test_other_gpus(kernel, capability, hopper):
    hopper["capability"] = capability
    here = ".".join(map(str, capability))
    sentence = f"{kernel} needs a GPU of compute capability 9.0 for quantization fp8_block, this one has {here}"
    assert reason(kernel, "fp8_block") == sentence


def test_products_in_e4m3_read_128_numbers_at_once():
    options = ExpertsOptions(float8=True)
    for fields, problem in (
        ({}, None),
        ({"hidden": 192}, "hidden_size must be a multiple of 128 in float8_e4m3fn, got 192"),
        ({"inner": 384, "etp": 2}, "intermediate_size / etp must be a multiple of 128 in float8_e4m3fn, got 192"),
    ):
        assert reason("bf16_triton", "none", options=options, **fields) == problem


def test_no_gpu():
    assert reason("flashinfer_cutlass", device=torch.device("cpu")) == "flashinfer_cutlass runs on cuda, not on cpu"


def test_missing_libraries(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert FlashInferCutlassExperts.available() == "FlashInfer is not installed; pip install ep-moe[gpu]"
    assert Fp8BlockTritonExperts.available() == "Triton is not installed; use a CUDA build of torch"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert FlashInferCutlassExperts.available() is None
    assert Fp8BlockTritonExperts.available() is None


@pytest.mark.parametrize(
    ("kernel", "scheme", "dtype", "fields", "sentence"),
    [
        ("flashinfer_cutlass", "none", BF16, {"hidden": 20}, "hidden_size must be a multiple of 8 in bfloat16, got 20"),
        ("flashinfer_cutlass", "none", BF16, {"inner": 20, "etp": 2},
         "intermediate_size / etp must be a multiple of 8 in bfloat16, got 10"),
        ("flashinfer_cutlass", "fp8_static", BF16, {"hidden": 24},
         "hidden_size must be a multiple of 16 with quantization fp8_static, got 24"),
        ("flashinfer_cutlass", "fp8_dynamic", BF16, {"inner": 24},
         "intermediate_size / etp must be a multiple of 16 with quantization fp8_dynamic, got 24"),
        ("flashinfer_cutlass", "mxfp4", BF16, {"hidden": 96},
         "hidden_size must be a multiple of 128 with quantization mxfp4, got 96"),
        ("flashinfer_cutlass", "mxfp4_fp8", BF16, {"inner": 128, "etp": 2},
         "intermediate_size / etp must be a multiple of 128 with quantization mxfp4_fp8, got 64"),
        ("flashinfer_cutlass", "int4_fp8", BF16, {"inner": 64},
         "quantization int4_fp8 needs intermediate_size / etp to be a multiple of 128, got 64"),
        ("flashinfer_cutlass", "none", torch.float32, {}, "dtype float32 is not among bfloat16, float16"),
        ("flashinfer_cutlass", "mxfp4", torch.float16, {}, "quantization mxfp4 needs bfloat16"),
        ("flashinfer_cutlass", "fp8_block", torch.float16, {}, "quantization fp8_block needs bfloat16"),
        ("bf16_triton", "fp8_block", BF16, {}, "quantization fp8_block is not among none"),
        ("bf16_triton", "none", torch.float16, {}, "dtype float16 is not among bfloat16"),
        ("bf16_triton", "none", BF16, {"inner": 192, "etp": 2},
         "intermediate_size / etp must be a multiple of 64 in bfloat16, got 96"),
        ("fp8_tensor_triton", "fp8_block", BF16, {}, "quantization fp8_block is not among fp8_static"),
        ("fp8_tensor_triton", "fp8_static", torch.float16, {}, "dtype float16 is not among bfloat16"),
        ("fp8_tensor_triton", "fp8_static", BF16, {"hidden": 192},
         "hidden_size must be a multiple of 128 in bfloat16, got 192"),
        ("fp8_channel_triton", "fp8_channel", torch.float16, {}, "dtype float16 is not among bfloat16"),
        ("fp8_channel_triton", "fp8_channel", BF16, {"inner": 256, "etp": 4},
         "intermediate_size / etp must be a multiple of 128 in bfloat16, got 64"),
        ("w4a16_triton", "mxfp4", torch.float16, {}, "dtype float16 is not among bfloat16"),
        ("w4a16_triton", "mxfp4", BF16, {"inner": 224},
         "intermediate_size / etp must be a multiple of 64 in bfloat16, got 224"),
        ("w4a16_triton", "int4", BF16, {"inner": 192},
         "quantization int4 needs intermediate_size / etp to be a multiple of 128, got 192"),
        ("w4a16_triton", "nvfp4", BF16, {}, "quantization nvfp4 is not among int4, mxfp4, mxint4, nvfp4a16"),
        ("fp8_block_triton", "none", BF16, {}, "quantization none is not among fp8_block"),
        ("fp8_dynamic_triton", "fp8_block", BF16, {}, "quantization fp8_block is not among fp8_dynamic"),
        ("fp8_dynamic_triton", "fp8_dynamic", torch.float16, {"inner": 192},
         "intermediate_size / etp must be a multiple of 128 in float16, got 192"),
        ("fp8_block_triton", "fp8_block", BF16, {"expert_bias": True},
         "it has no expert biases (expert_bias=True)"),
        ("fp8_block_triton", "fp8_block", torch.float32, {}, "dtype float32 is not among bfloat16, float16"),
        ("fp8_block_triton", "fp8_block", BF16, {"hidden": 192},
         "quantization fp8_block needs hidden_size to be a multiple of 128, got 192"),
    ],
)  # fmt: skip
def test_shapes_dtypes_and_schemes(kernel, scheme, dtype, fields, sentence):
    assert reason(kernel, scheme, dtype, **fields) == sentence


@pytest.mark.parametrize("kernel", [FlashInferCutlassExperts, Fp8BlockTritonExperts], ids=lambda k: k.name)
def test_every_activation_is_served_or_refused(kernel):
    for activation in Activation:
        why = reason(kernel.name, "fp8_block", activation=activation)
        served = "geglu, relu2, swiglu, swiglu_clamped"
        lacks = f"activation {activation.value} is not among {served}"
        assert why == (None if activation.value in served.split(", ") else lacks)


@pytest.mark.parametrize("kind", ["experts", "fused"])
def test_each_kernel_computes_what_its_program_has(kind):
    """Each kernel declares exactly the activations that its program computes.

    All kernels except the reference must refuse a new activation, because programs treat an unknown one as their last
    case.
    """
    programs = {
        "reference": set(Activation),
        "flashinfer_cutedsl": {Activation.SWIGLU, Activation.SWIGLU_CLAMPED, Activation.RELU2},
        "flashinfer_trtllm": {Activation.SWIGLU, Activation.SWIGLU_CLAMPED, Activation.RELU2},
        "flashinfer_trtllm_monolithic": {Activation.SWIGLU, Activation.SWIGLU_CLAMPED, Activation.RELU2},
        **{name: {Activation.SWIGLU} for name in registry.built_in("fused") if "mega" in name},
    }
    four = {Activation.SWIGLU, Activation.GEGLU, Activation.SWIGLU_CLAMPED, Activation.RELU2}
    for name in registry.built_in(kind):
        can = registry.load(kind, name).capabilities
        assert can.activations == programs.get(name, four), name
        for activation in Activation:
            shape = config(activation=activation)
            scheme = SCHEMES[sorted(can.schemes)[0]]
            dtype = next(iter(can.dtypes))
            why = can.unsupported_reason(shape, dtype, 1, scheme, None)
            assert (activation in can.activations) != (why or "").startswith(f"activation {activation.value} is not"), (
                name
            )


def test_an_activation_that_a_kernel_lacks(monkeypatch):
    narrow = dataclasses.replace(FlashInferCutlassExperts.capabilities, activations=frozenset({Activation.SWIGLU}))
    monkeypatch.setattr(FlashInferCutlassExperts, "capabilities", narrow)
    assert reason("flashinfer_cutlass", activation=Activation.RELU2) == "activation relu2 is not among swiglu"


def test_deterministic_is_served_or_refused(monkeypatch):
    wanted = ExpertsOptions(deterministic=True)
    assert reason("flashinfer_cutlass", options=wanted) is None
    able = dataclasses.replace(FlashInferCutlassExperts.capabilities, deterministic=False)
    monkeypatch.setattr(FlashInferCutlassExperts, "capabilities", able)
    assert reason("flashinfer_cutlass", options=wanted) == "it is not deterministic"
    assert reason("flashinfer_cutlass") is None


def test_a_named_kernel_that_cannot_run_lists_those_that_can(hopper):
    hopper["capability"] = (8, 0)
    with pytest.raises(BackendUnavailable) as error:
        choose(config(), layout(), GPU, BF16, experts="flashinfer_cutlass")
    text = str(error.value)
    assert "needs a GPU of compute capability 9.0 to 10.7, this one has 8.0" in text
    assert "Pairs that can: local with reference" in text


@pytest.mark.parametrize("chunk", [0, -1, 1.5, "many", True])
def test_chunk_rows_is_checked(chunk):
    with pytest.raises(ConfigError, match="chunk_rows must be an integer of at least 1, got"):
        ExpertsOptions(chunk_rows=chunk)


def test_bad_fields_of_a_layer():
    context = EPContext.local(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"quantization must be one of none, fp8_static, .* got 'fp3'"):
        MoELayer(config(), context, quantization="fp3", dtype=BF16)
    with pytest.raises(BackendUnavailable, match=r"flashinfer_cutlass runs on cuda, not on cpu|is not installed"):
        MoELayer(config(), context, experts="flashinfer_cutlass", dtype=BF16)
    layer = MoELayer(config(), context, dtype=BF16)
    for bad in (0, -5, 2.5, True):
        with pytest.raises(ConfigError, match="tune: rows must be integers of at least 1, got"):
            layer.tune((8, bad))
    with pytest.raises(ConfigError, match=r"tune: rows must be a list of integers of at least 1, got 8$"):
        layer.tune(8)
    for call in (layer.tune, layer.capture):
        with pytest.raises(ConfigError, match=r"must be .*integers of at least .*, got .*\.\.\. \(Tensor\)$"):
            call(torch.zeros(1, 64))
    assert layer.tune((8,)) == []


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda y: y.double(), r"float64 \[12, 32\]"),
        (lambda y: y[1:], r"float32 \[11, 32\]"),
        (lambda y: y[:, 1:], r"float32 \[12, 31\]"),
        (lambda y: (y,), "tuple"),
        (lambda y: None, "NoneType"),
    ],
)
def test_what_a_kernel_of_others_returns_is_looked_at(returned, got, monkeypatch):
    """The result of an external kernel is checked for type, dtype and shape.

    Rows of another dtype would become the layer's result. If only one rank had them, gloo would end a process.
    """
    config = MoEConfig(hidden_size=32, intermediate_size=32, num_experts=4, top_k=2)
    with EPContext.local(torch.device("cpu")) as context:
        layer, honest = MoELayer(config, context, experts="reference"), ReferenceExperts.compute
        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(ReferenceExperts, "compute", lambda *given: returned(honest(*given)))
            words = rf"experts=reference: compute must return a Tensor, float32 \[12, 32\], got {got}; .*check_experts"
            with pytest.raises(TypeError, match=words):
                layer(torch.ones(12, 32))
        layer(torch.ones(12, 32))
