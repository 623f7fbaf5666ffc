"""Test what the mega kernels' adapter passes to FlashInfer, against FlashInfer's own classes.

The tests run wherever FlashInfer is installed, without a GPU. The emulation used on CPUs has the same fields and
methods.
"""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch

from ep_moe.experts.fused import flashinfer_mega
from ep_moe.experts.fused.base import FusedDispatchShape
from ep_moe.experts.fused.flashinfer_mega import FlashInferMegaBf16, FlashInferMegaFp8

pytest.importorskip("flashinfer", reason="FlashInfer is not installed")

from flashinfer.moe_ep.core.kernel import MegaKernelBackend
from flashinfer.moe_ep.kernel_src.sm90.cake_bf16_megamoe.shim import cake_gemm, cake_runner, cake_weights
from flashinfer.moe_ep.kernel_src.sm90.push_style_megamoe.shim import protocol, runner

from ep_moe.weights.layouts.base import GROUP
from tests.emulations import mega as mega_emulation

BOTH = [FlashInferMegaBf16, FlashInferMegaFp8]
each = pytest.mark.parametrize("kind", BOTH, ids=lambda kind: kind.name)


def dispatch_shape(kind, max_tokens: int = 64) -> FusedDispatchShape:
    sizes = {"hidden_size": 512, "top_k": 3, "slots_per_rank": 3, "num_ranks": 4, "dtype": torch.bfloat16}
    return FusedDispatchShape(**sizes, max_tokens=max_tokens, kernel=kind.name, intermediate_size=256)


def required(function) -> set[str]:
    parameters = list(inspect.signature(function).parameters.values())
    return {p.name for p in parameters if p.default is p.empty and p.name != "self"}


@each
def test_configurations_take_what_is_stated(kind):
    own = flashinfer_mega.library(kind.name)
    for max_tokens in (4, 64):
        config = own.config(
            intermediate_size=256, top_k=4, capacity_factor=1.0, dedup_dispatch=True, allow_unverified_p2p=True,
            init_timeout_s=600.0, **kind.settings(dispatch_shape(kind, max_tokens)),
        )  # fmt: skip
        kernel = own.kernel(config)
        assert isinstance(kernel, MegaKernelBackend)
        bootstrap = own.bootstrap(world_size=4, rank=1, auto_bootstrap=False, device=1, process_group=None)
        fleet = own.fleet(num_experts=12, max_tokens_per_rank=max_tokens, token_hidden_size=512)
        kernel.validate_init(bootstrap, fleet)
        assert kernel._workspace_pool_key(fleet) is None, "contexts would meet in one workspace"


@each
def test_methods_that_are_called(kind):
    kernel, nothing = flashinfer_mega.library(kind.name).kernel, object()
    inspect.signature(kernel.bind_ep_bootstrap).bind(nothing, nothing)
    inspect.signature(kernel.validate_transformed_weights).bind(nothing, nothing, nothing, nothing)
    inspect.signature(kernel.prepare_workspace).bind(nothing, nothing, nothing)
    inspect.signature(kernel.stage_inputs).bind(nothing, nothing, nothing, quantize_input=True)
    inspect.signature(kernel.compute).bind(nothing, nothing, nothing, output=nothing)
    inspect.signature(kernel.destroy).bind(nothing, nothing)
    tensors = flashinfer_mega.library(kind.name).tensors
    assert required(tensors) == {"hidden_states", "topk_ids", "topk_weights"}


def test_weights_refer_to_the_tensors():
    own = flashinfer_mega.library("flashinfer_mega_fp8").weights
    tensors = torch.zeros(3, 512, 512).to(torch.float8_e4m3fn), torch.zeros(3, 4, 4), \
        torch.zeros(3, 512, 256).to(torch.float8_e4m3fn), torch.zeros(3, 4, 2)  # fmt: skip
    bundle = own(*tensors)
    assert [f.name for f in dataclasses.fields(own)][:4] == ["w13_fp8", "w13_sf", "w2_fp8", "w2_sf"]
    assert bundle.w13_fp8 is tensors[0]
    assert bundle.w2_sf is tensors[3]
    assert bundle.w13_interleaved is False
    names = [field.name for field in dataclasses.fields(cake_weights.Sm90CakeBf16Weights)]
    assert names[:5] == ["w13", "w2", "num_local_experts", "hidden_size", "intermediate_size"]


@each
def test_the_emulation_has_the_same_fields_and_methods(kind):
    real, stand_in = flashinfer_mega.library(kind.name), mega_emulation.library(kind.name)
    for name in ("config", "weights", "bootstrap", "fleet", "tensors"):
        theirs, ours = (inspect.signature(getattr(own, name)).parameters for own in (real, stand_in))
        assert set(ours) <= set(theirs), name
        assert {p for p in theirs if theirs[p].default is inspect.Parameter.empty} <= set(ours), name
        for field in ours:
            if name != "fleet" and field not in ("process_group", "device"):
                assert ours[field].default == theirs[field].default, (name, field)
    for method in ("bind_ep_bootstrap", "validate_init", "validate_transformed_weights", "prepare_workspace"):
        theirs, ours = (len(inspect.signature(getattr(own.kernel, method)).parameters) for own in (real, stand_in))
        assert ours == theirs, method


def test_numbers_that_are_stated_here():
    assert f"top_k not in {flashinfer_mega.TOP_KS}" in inspect.getsource(protocol.Sm90PushPipe.__init__)
    assert cake_weights.GATE_UP_GROUP == GROUP
    assert cake_gemm.MAX_OUTPUT_ELEMENTS == 1 << 32 > flashinfer_mega.ELEMENTS
    assert cake_runner.COMBINE_WIRE_PER_SHAPE_MAX_TOKENS == 8
    assert FlashInferMegaBf16.settings(dispatch_shape(FlashInferMegaBf16, 8))["combine_wire"] == "per_route"
    assert FlashInferMegaBf16.settings(dispatch_shape(FlashInferMegaBf16, 9))["combine_wire"] == "prereduced"
    own = inspect.getsource(flashinfer_mega.library("flashinfer_mega_fp8").kernel.__bases__[0].validate_init)
    assert f"kcfg.intermediate_size > {flashinfer_mega.INNER}" in own


def test_memory_is_that_of_what_they_allocate():
    """FlashInfer's buffers are still those that `buffer_bytes` adds up."""
    source = inspect.getsource(cake_runner.Sm90CakeBf16MoERunner._init_buffers)
    found = re.findall(r"self\.(\w+) = torch\.empty\(\s*self\.m_buf,\s*(\w+|self\.I)?,? ?dtype=torch\.(\w+)", source)
    assert [name for name, *_ in found] == ["a1", "meta", "row_expert", "h2", "y"]
    source = inspect.getsource(runner.Sm90PushMoERunner._init_gemm_resources)
    assert re.findall(r"self\.(\w+) = \(?\s*(?:None|torch\.empty\()", source) == [
        "a1", "sfa1", "meta", "row_expert", "h", "a2", "sfa2", "y", "_g",
    ]  # fmt: skip


def test_which_half_is_the_gate_and_what_is_skipped():
    """FlashInfer's CUDA sources still treat halves, ids and capacity as the adapter expects.

    SiLU applies to the first half. Ids below zero are no routes, and ids from E on trap. At a capacity factor of 1
    there is
    room for every route.
    """
    cuda = (Path(inspect.getfile(protocol)).parents[1] / "src/a2a/sm90_push_a2a_ops.cu").read_text()
    assert "const __nv_bfloat16* hb = ha + I;" in cuda
    assert re.search(
        r"float a = __bfloat162float\(pa\[j\]\);.*?\(a / \(1\.0f \+ __expf\(-a\)\)\) \* b", cuda, re.DOTALL
    )
    assert "if (eid < 0) {  // masked route" in cuda
    assert "if (eid >= num_experts_total) {" in cuda
    pipe = inspect.getsource(protocol.Sm90PushPipe.__init__)
    assert "max_recv_routes = ep_size * token_capacity * top_k" in pipe
    assert "self.meta_rows = max(int(config.capacity_factor * max_recv_routes), 1)" in pipe
