"""Layers whose rows travel in other formats than the layer's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from ep_moe import Activation, EPContext, MoEConfig, MoELayer, ParallelConfig, Wire, registry
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.errors import BackendUnavailable, ConfigError, InputError
from ep_moe.quant.fp8 import round_blocks, round_by, widen_blocks
from ep_moe.quant.row_format import ROW_FORMATS, round_to_travel, widen_arrived
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import distributed
from ep_moe.weights.initial import random_expert
from tests.fixtures import layer_static as test_layer_static
from tests.fixtures.blackwell_layer import on_the_cpu
from tests.fixtures.distributed_cases import everywhere, same_error
from tests.fixtures.helpers import assert_same, fill, integer_routing, integer_rows, oracle

CONFIG = MoEConfig(hidden_size=256, intermediate_size=16, num_experts=6, top_k=3, activation=Activation.RELU2)
FP8 = Wire(dispatch="fp8_block")
FP8_TENSOR = Wire(dispatch="fp8_tensor", input_scale=0.25)
WIRES = [FP8, Wire(dispatch="fp8_row"), FP8_TENSOR, Wire(dispatch="mxfp8"), Wire(dispatch="nvfp4", input_scale=1.0)]
CPU = torch.device("cpu")


def exact_rows(tokens: int, seed: int, wire: Wire) -> torch.Tensor:
    """A number in each block that makes its scale a power of two, under which small integers are exact."""
    x = integer_rows(tokens, CONFIG.hidden_size, seed)
    if scales := ROW_FORMATS[wire.dispatch].scales(CONFIG.hidden_size):
        x[:, :: CONFIG.hidden_size // scales] = 6 if wire.dispatch == "nvfp4" else 7
    return x


@pytest.mark.skipif(torch.cuda.is_available(), reason="in float32, on the CPU")
@distributed(2, 4)
@pytest.mark.parametrize(
    ("sizes", "all2all"),
    [
        ({"dp": 0}, "torch_a2a"),
        ({"dp": 0}, "allgather"),
        ({"tp": 0}, "torch_a2a"),
        ({"tp": 0}, "allgather"),
        ({"dp": 0, "ep": 1, "etp": 0}, "local"),
    ],
    ids=str,
)
def test_rows_are_rounded_once_before_the_wire(sizes, all2all, world_size):
    sizes = {name: size or world_size for name, size in sizes.items()}
    with EPContext.from_groups(ParallelConfig(**sizes), device=CPU) as context:
        for wire in WIRES:
            rounded_once(MoELayer(CONFIG, context, all2all=all2all, wire=wire), wire)


def rounded_once(layer, wire):
    fill(layer)
    seed = 0 if layer.context.layout.tp > 1 else dist.get_rank()
    for tokens in (5, 0) if layer.context.layout.tp > 1 else (5 + seed, 3 * (1 - seed % 2)):
        routing = integer_routing(tokens, CONFIG, seed)
        x = exact_rows(tokens, seed, wire)
        with torch.no_grad():
            assert_same(layer.forward_routed(x, routing), oracle(CONFIG, x, routing), f"exact rows in {wire}")
            x = torch.randn(tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))
            y = layer.forward_routed(x, routing)
        rounded = oracle(CONFIG, widen_arrived(*round_to_travel(x, wire), wire, torch.float32), routing)
        if tokens:  # sums of the same numbers in another order, and those of other numbers
            most = float(rounded.abs().max())
            assert (y - rounded).abs().max() < 1e-5 * most, wire
            assert (y - oracle(CONFIG, x, routing)).abs().max() > 1e-3 * most, wire


@pytest.mark.skipif(torch.cuda.is_available(), reason="over an emulation, on the CPU")
@distributed(2)
@pytest.mark.parametrize("all2all", ["torch_a2a", "allgather"])
def test_calibrated_rows_have_the_same_bits_on_either_side_of_the_wire(all2all, world_size):
    """Where the wire's scale is the one that each rank would take itself, the largest of its slots'."""
    on_the_cpu()
    config = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=6, top_k=3)
    tensors = [random_expert(config, SCHEMES["fp8_static"], expert, torch.bfloat16) for expert in range(6)]
    largest = [max(float(own["w13_input_scale"]) for own in half) for half in (tensors[:3], tensors[3:])]
    assert largest[0] == largest[1]
    tokens = 5 * dist.get_rank()
    routing = integer_routing(tokens, config, 1)
    x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []
    with EPContext.from_groups(ParallelConfig(dp=2), device=CPU) as context:
        for scale in (None, largest[0], 1.5 * largest[0]):
            wire = None if scale is None else Wire(dispatch="fp8_tensor", input_scale=scale)
            asked = {"all2all": all2all, "experts": "flashinfer_cutlass", "quantization": "fp8_static", "wire": wire}
            layer = MoELayer(config, context, dtype=torch.bfloat16, **asked)
            for expert in range(6):
                layer.update_expert(expert, **tensors[expert])
            with torch.no_grad():
                found.append(layer.forward_routed(x, routing))
    assert torch.equal(found[1], found[0])
    assert not tokens or not torch.equal(found[2], found[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="in float32 over an emulation, on the CPU")
@distributed(2)
@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.dispatch)
def test_rows_that_the_transport_rounds_itself(wire, world_size, monkeypatch):
    """In one go, in parts and beside shared experts; the same numbers as over a transport that does not."""
    test_layer_static.on_the_cpu(NVLinkP2PDispatcher)
    given, dispatch = [], NVLinkP2PDispatcher._dispatch

    def noted(self, x, *arguments):
        given.append((x.dtype, self._by_copies(arguments[-1])))
        return dispatch(self, x, *arguments)

    monkeypatch.setattr(NVLinkP2PDispatcher, "_dispatch", noted)
    shared = dataclasses.replace(CONFIG, shared_intermediate_size=16)
    rank = dist.get_rank()
    for config, pipeline in ((CONFIG, None), (CONFIG, 2), (shared, None)):
        found = []
        for all2all in ("torch_a2a", "nvlink_p2p"):
            asked = {"all2all": all2all, "wire": wire, "pipeline": pipeline if all2all == "nvlink_p2p" else None}
            with EPContext.from_groups(ParallelConfig(dp=2), device=CPU, max_tokens=5) as context, torch.no_grad():
                layer = fill(MoELayer(config, context, **asked))
                if layer.shared_experts is not None:
                    for weight in layer.shared_experts.parameters():
                        weight.zero_()
                x = torch.randn(5 - rank, CONFIG.hidden_size, generator=torch.Generator().manual_seed(rank))
                found.append(layer.forward_routed(x, integer_routing(len(x), CONFIG, rank)))
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5 * float(found[0].abs().max()))
    ours = wire.dispatch in ("fp8_block", "fp8_row", "fp8_tensor")
    arrives = torch.float32 if ours else ROW_FORMATS[wire.dispatch].number
    assert {dtype for dtype, _ in given} == {arrives}
    assert {copies for _, copies in given} == {False, True}


@pytest.mark.skipif(torch.cuda.is_available(), reason="in float32, on the CPU")
@distributed(2)
def test_what_cannot_be_is_said_on_all_ranks(world_size):
    with EPContext.from_groups(ParallelConfig(dp=2), device=CPU) as context:
        wires = [Wire(), FP8]
        text = same_error(ConfigError, lambda: MoELayer(CONFIG, context, wire=wires[dist.get_rank()]))
        assert 'Wire.dispatch: "plain" on rank 0, "fp8_block" on rank 1' in text
        text = same_error(BackendUnavailable, lambda: MoELayer(CONFIG, context, wire=Wire(combine="fp8")))
        assert "allgather carries plain rows in combine, not fp8 (Wire)" in text
        wires = [FP8_TENSOR, Wire(dispatch="fp8_tensor", input_scale=0.5)]
        text = same_error(ConfigError, lambda: MoELayer(CONFIG, context, wire=wires[dist.get_rank()]))
        assert "Wire.input_scale: 0.25 on rank 0, 0.5 on rank 1" in text
        layer = MoELayer(CONFIG, context, wire=FP8)
        x = torch.ones(2, CONFIG.hidden_size, requires_grad=True)
        assert "has no backward" in same_error(InputError, lambda: layer(x))
        assert everywhere("alive") == ["alive"] * 2


def test_formats_that_do_not_exist():
    with pytest.raises(
        ConfigError, match=r"dispatch must be one of plain, fp8_block, fp8_row, fp8_tensor, mxfp8, nvfp4, got 'fp4'"
    ):
        Wire(dispatch="fp4")
    with pytest.raises(ConfigError, match=r"Wire\.combine must be one of plain, fp8, got 'fp8_block'"):
        Wire(combine="fp8_block")
    for name, largest in (("fp8_tensor", 448), ("nvfp4", 2688)):
        needs = rf"Wire\(dispatch='{name}'\) needs input_scale, a positive number \(largest magnitude / {largest}, as"
        for scale in (None, 0.0, -1.0, float("inf"), float("nan"), "1"):
            with pytest.raises(ConfigError, match=rf"{needs} .*, got {scale!r}"):
                Wire(dispatch=name, input_scale=scale)
    for name in ("plain", "fp8_block", "fp8_row", "mxfp8"):
        with pytest.raises(ConfigError, match=rf"for fp8_tensor and nvfp4 rows only, got 1\.0 with {name}"):
            Wire(dispatch=name, input_scale=1.0)


def test_every_format_of_the_wire_is_one_of_rows():
    with pytest.raises(ConfigError) as refusal:
        Wire(dispatch="none")
    assert str(refusal.value).partition("one of ")[2].partition(", got")[0].split(", ") == list(ROW_FORMATS)


def test_rows_that_transports_cannot_align():
    """Numbers of one byte leave rows shorter than those of the layer's dtype."""
    for name in ("nvlink_p2p", "pplx", "flashinfer_nvlink"):
        kind = registry.load("dispatchers", name)
        assert kind.unsupported_reason(24, 1, 2, torch.bfloat16, 8) is None
        reason = kind.unsupported_reason(24, 1, 2, torch.bfloat16, 8, FP8_TENSOR)
        assert reason == f"{name} needs hidden_size to be a multiple of 16 in float8_e4m3fn, got 24"
        assert kind.unsupported_reason(32, 1, 2, torch.bfloat16, 8, FP8_TENSOR) is None
    assert "deepep carries fp8_block, plain rows in dispatch, not fp8_tensor" in (
        registry.load("dispatchers", "deepep").unsupported_reason(32, 1, 2, torch.bfloat16, 8, FP8_TENSOR) or ""
    )


def test_scales_that_a_transport_cannot_align(monkeypatch):
    kind = registry.load("dispatchers", "torch_a2a")
    assert kind.unsupported_reason(32, 1, 2, torch.bfloat16, None, Wire(dispatch="fp8_row")) is None
    able = dataclasses.replace(kind.capabilities, scale_alignment_bytes=16)
    monkeypatch.setattr(kind, "capabilities", able)
    reason = kind.unsupported_reason(32, 1, 2, torch.bfloat16, None, Wire(dispatch="fp8_row"))
    assert reason == "torch_a2a wants a multiple of 16 bytes of scales in a row, and fp8_row rows have 4"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype):
    x = torch.randn(7, 384, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[2], x[3, 130], x[4, 5] = 0, torch.nan, 3e4
    data, scale = round_blocks(x)
    assert (data.dtype, scale.dtype, list(scale.shape)) == (torch.float8_e4m3fn, torch.float32, [7, 3])
    whole, of_rows = round_to_travel(x, Wire(dispatch="fp8_row"))
    assert torch.equal(of_rows[:3], x[:3].float().abs().amax(1, keepdim=True).clamp(min=1e-10) / 448)
    assert torch.equal(whole[4, 128:].float(), round_by(x[4, 128:], float(of_rows[4])).float()), "small beside 3e4"
    back = widen_blocks(data, scale, torch.float32)
    assert (back[2] == 0).all()
    assert back[3, 128:256].isnan().any()
    assert not back[3, :128].isnan().any()
    fine = torch.ones(7, dtype=torch.bool).index_fill(0, torch.tensor([3]), False)
    error = (back - x.float())[fine].abs().unflatten(1, (3, 128))
    largest = x.float()[fine].abs().unflatten(1, (3, 128))
    # half a unit in the fourth bit, or half of the smallest step, 2**-9, of numbers that end at 448
    assert (error <= torch.maximum(largest * 2**-4, largest.amax(-1, keepdim=True) * 2**-10 / 448) * 1.001).all()
