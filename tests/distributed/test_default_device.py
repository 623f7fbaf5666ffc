"""Layers where torch makes new tensors elsewhere than on the host by default, as after
`torch.set_default_device("cuda")` or under `torch.device("cuda")`: what is kept on the host says so itself."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ep_moe import Activation, EPContext, ExpertBalancer, ExpertMap, MoELayer, ParallelConfig, Wire
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.all2all.torch_collectives import TorchAll2AllDispatcher
from ep_moe.eplb.load import LoadRecorder
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.quant.fp8 import dequantize_fp8_blocks
from ep_moe.quant.row_format import round_to_travel, widen_arrived
from ep_moe.testing import check_dispatcher, check_experts, distributed, kernel_contract, rank_device
from tests.fixtures.eplb_cases import CONFIG, on_request, random_map
from tests.fixtures.helpers import assert_same, fill, integer_routing, integer_rows, moved, oracle
from tests.fixtures.layer_static import on_the_cpu


@distributed(2)
@pytest.mark.parametrize("all2all", ["allgather", "torch_a2a", "nvlink_p2p"])
@torch.no_grad()
def test_calls_and_moves(all2all, world_size):
    device, rank = rank_device(), dist.get_rank()
    elsewhere = torch.device("meta") if device.type == "cpu" else device  # memory that the host cannot read
    if device.type == "cpu":
        on_the_cpu(NVLinkP2PDispatcher)
    elif all2all == "nvlink_p2p" and (why := NVLinkP2PDispatcher.available()):
        pytest.skip(why)
    x, routing = integer_rows(5 - rank, CONFIG.hidden_size, rank), integer_routing(5 - rank, CONFIG, rank)
    expected, x, routing = oracle(CONFIG, x, routing), x.to(device), moved(routing, device)
    with elsewhere, EPContext.from_groups(ParallelConfig(dp=2), device=device, max_tokens=8) as context:
        placed = ExpertMap.redundant(CONFIG.num_experts, 2, 2)
        layer = MoELayer(CONFIG, context, expert_map=placed, all2all=all2all, device=device).requires_grad_(False)
        with torch.device("cpu"):
            fill(layer)
        assert_same(layer.forward_routed(x, routing), expected, "made there")
        with ExpertBalancer([layer], context, on_request()) as balancer:
            balancer.move_to([random_map(2, placed.slots_per_rank, 3)])
            while balancer.stats().rebalances == 0:
                assert_same(layer.forward_routed(x, routing), expected, "while experts move")
                balancer.step()
        assert layer.placement.expert_map != placed
        recorder = LoadRecorder([layer], context.rank_groups["lockstep"], steps=1)
        assert_same(layer.forward_routed(x, routing), expected, "after they moved")
        recorder.step()
        assert recorder.finish().counts.sum() == sum(layer.stats().rank_load) > 0


@pytest.mark.parametrize(
    "wire",
    [Wire(dispatch="fp8_block"), Wire(dispatch="fp8_row"), Wire(dispatch="fp8_tensor", input_scale=0.1),
     Wire(dispatch="mxfp8"), Wire(dispatch="nvfp4", input_scale=0.1)],
    ids=lambda wire: wire.dispatch,
)  # fmt: skip
def test_rows_of_the_wire(wire):
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    expected = widen_arrived(*round_to_travel(x, wire), wire, torch.float32)
    with torch.device("meta"):
        assert_same(widen_arrived(*round_to_travel(x, wire), wire, torch.float32), expected)


def test_checkpoints_blocks():
    weight, scale = torch.ones(130, 200).to(torch.float8_e4m3fn), torch.arange(4.0).view(2, 2)
    expected = dequantize_fp8_blocks(weight, scale)
    with torch.device("meta"):
        assert_same(dequantize_fp8_blocks(weight, scale), expected)


def test_the_contract_of_kernels(monkeypatch):
    monkeypatch.setattr(kernel_contract, "ROWS", (33, 1, 0))  # where a tensor is made is the same for any number
    with torch.device("meta"):
        asked = {"schemes": ["none", "fp8_block"], "activations": [Activation.SWIGLU], "hidden": 128}
        assert check_experts(ReferenceExperts, device=torch.device("cpu"), **asked) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU")
@distributed(2)
def test_the_contract_of_transports(world_size):
    with torch.device("meta"):
        check_dispatcher(TorchAll2AllDispatcher, top_ks=(2,), dtypes=(torch.bfloat16,))
