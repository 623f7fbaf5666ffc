"""Layers whose rows travel in another format than the layer's dtype."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from ep_moe import Activation, EPContext, MoEConfig, MoELayer, ParallelConfig, Wire
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.errors import BackendUnavailable, ConfigError, InputError
from ep_moe.quant.row_format import ROW_FORMATS, dequantize_from_wire, quantize_for_wire
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import distributed
from ep_moe.weights.initial import random_expert
from tests.fixtures import layer_static as test_layer_static
from tests.fixtures.blackwell_layer import on_the_cpu
from tests.fixtures.distributed_cases import gather_from_all_ranks, same_error
from tests.fixtures.helpers import assert_same, fill, integer_routing, integer_rows, oracle

CONFIG = MoEConfig(hidden_size=256, intermediate_size=16, num_experts=6, top_k=3, activation=Activation.RELU2)
FP8 = Wire(dispatch="fp8_block")
FP8_TENSOR = Wire(dispatch="fp8_tensor", input_scale=0.25)
WIRES = [FP8, Wire(dispatch="fp8_row"), FP8_TENSOR, Wire(dispatch="mxfp8"), Wire(dispatch="nvfp4", input_scale=1.0)]
CPU = torch.device("cpu")


def exact_rows(tokens: int, seed: int, wire: Wire) -> torch.Tensor:
    """Return integer rows in which one number per block makes the scale a power of two, so that rounding is exact."""
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
        rounded = oracle(CONFIG, dequantize_from_wire(*quantize_for_wire(x, wire), wire, torch.float32), routing)
        if tokens:  # equal to rounded rows except for summation order, and different from unrounded rows
            most = float(rounded.abs().max())
            assert (y - rounded).abs().max() < 1e-5 * most, wire
            assert (y - oracle(CONFIG, x, routing)).abs().max() > 1e-3 * most, wire


@pytest.mark.skipif(torch.cuda.is_available(), reason="over an emulation, on the CPU")
@distributed(2)
@pytest.mark.parametrize("all2all", ["torch_a2a", "allgather"])
def test_calibrated_rows_have_the_same_bits_on_either_side_of_the_wire(all2all, world_size):
    """Rows rounded before the wire by the kernel's own scale give the bits of plain rows.

    Each rank's kernel uses the largest input scale of its slots.
    """
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
    """A transport that rounds rows itself gives the numbers of one that does not.

    In whole calls, in pipelined calls, and beside shared experts.
    """
    test_layer_static.emulate_on_cpu(NVLinkP2PDispatcher)
    given, dispatch = [], NVLinkP2PDispatcher._dispatch

    def noted(self, x, *arguments):
        given.append((x.dtype, self._uses_copy_engines(arguments[-1])))
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
        assert gather_from_all_ranks("alive") == ["alive"] * 2
