"""Whole layers over transports with fixed buffers, which do not wait on the host and have constant shapes.

All layouts run on the CPU over emulations; on GPUs, layers are captured into CUDA graphs.
"""

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ep_moe import EPContext, ExpertMap, MoELayer, ParallelConfig, Wire
from ep_moe.all2all.flashinfer_nvlink import FlashInferNVLinkDispatcher
from ep_moe.all2all.nvlink_p2p import dispatcher
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.all2all.pplx import PplxDispatcher
from ep_moe.errors import ConfigError, InputError
from ep_moe.parallel.rank_group import barrier
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import distributed, rank_device
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.testing.transport_case import wait_for_input_error
from ep_moe.types import Routing
from ep_moe.weights.initial import random_expert
from tests.fixtures.distributed_cases import check_call
from tests.fixtures.helpers import fill, integer_routing, integer_rows, oracle
from tests.fixtures.layer_static import CONFIG, LAYOUTS, TOKENS, WIDE, Captured, as_it_arrives, emulate_on_cpu

WAYS = {
    "flashinfer_nvlink": (FlashInferNVLinkDispatcher,),
    "nvlink_p2p": (NVLinkP2PDispatcher,),
    "nvlink_p2p, to peers": (NVLinkP2PDispatcher, True),
    "nvlink_p2p, by packets": (NVLinkP2PDispatcher, False, 256),  # calls of at most 4 tokens go by packets
    "pplx": (PplxDispatcher,),
}
# A transport depends on its EP group, of two or four ranks, and on the token limit. One transport runs all layouts, and
# every transport runs groups of both sizes, alone and two side by side.
OTHERS = {
    "nvlink_p2p": ("dp 4", "dp 2 tp 2 etp 2", "sharded"),
    "nvlink_p2p, to peers": ("tp 4", "dp 4 etp 2"),
    "nvlink_p2p, by packets": ("dp 2 tp 2", "dp 2 tp 2 etp 2"),
    "pplx": ("dp 4", "dp 4 etp 2"),
}
PAIRS = [("flashinfer_nvlink", name) for name in LAYOUTS]
PAIRS += [(way, name) for way, names in OTHERS.items() for name in names]


@pytest.mark.skipif(torch.cuda.is_available(), reason="in float32 over the emulation, on the CPU")
@distributed(4)
@pytest.mark.parametrize(("way", "sizes"), PAIRS)
def test_every_layout_equals_one_process(way, sizes, world_size):
    """Layers over each transport equal one process.

    pplx delivers BATCHED rows, which the layer converts for kernels that take RANK_MAJOR rows.
    """
    kind = WAYS[way][0]
    emulate_on_cpu(*WAYS[way])
    device = rank_device()
    with EPContext.from_groups(ParallelConfig(**LAYOUTS[sizes]), device=device, max_tokens=9) as context:
        for make in (ExpertMap.linear, lambda experts, ranks: ExpertMap.redundant(experts, ranks, 2 * ranks)):
            layer = fill(MoELayer(CONFIG, context, expert_map=make(6, context.layout.ep), all2all=kind.name))
            for tokens in (9, 0, 5):
                check_call(layer, context, tokens=tokens, what=f"{sizes}, T={tokens}")
            with context.token_limit(4):
                check_call(layer, context, tokens=4, what=f"{sizes}, at most 4")
            check_call(layer, context, tokens=9, what=f"{sizes}, after")
            twin = MoELayer(CONFIG, context, expert_map=layer.placement.expert_map, all2all=kind.name)
            assert (
                twin.plan()["transport"] == layer.plan()["transport"] == kind.buffer_bytes(layer._dispatch_shape()) > 0
            )
            assert context.plan()["transport"] == layer.plan()["transport"], "equal layers share their buffers"
            del twin, layer
        parts = fill(MoELayer(CONFIG, context, all2all=kind.name, pipeline=2))
        assert parts._dispatch_shape().max_tokens == 2
        each = kind.buffer_bytes(parts._dispatch_shape())
        assert parts.plan()["transport"] == each * kind.calls_in_parts(parts._dispatch_shape())
        for tokens in (9, 0, 5, 1):
            check_call(parts, context, tokens=tokens, what=f"{sizes}, T={tokens}, in parts")
        with context.token_limit(2):
            check_call(parts, context, tokens=2, what=f"{sizes}, at most 2, in parts")
        buffer_pool = context._pool[kind.name, parts._dispatch_shape()].buffer_pool
        planned = kind.calls_in_parts(parts._dispatch_shape())
        assert len(buffer_pool.buffer_slots) == min(planned, -(-context.layout.max_dispatch_tokens(9) // 2)), (
            "workspaces as planned"
        )
        shared = dataclasses.replace(CONFIG, shared_intermediate_size=16)
        for pipeline in (None, 2):
            layer = fill(MoELayer(shared, context, all2all=kind.name, pipeline=pipeline))
            for number, weight in enumerate(layer.shared_experts.parameters()):
                nn.init.trunc_normal_(weight, generator=torch.Generator().manual_seed(number))
            x, routing = integer_rows(4, 16, 0), integer_routing(4, CONFIG, 0)
            with torch.no_grad():
                y = layer.forward_routed(x, routing) - layer.shared_experts(x)
            expected = oracle(CONFIG, x, routing)
            torch.testing.assert_close(y, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@distributed(1)
@pytest.mark.parametrize("way", ["nvlink_p2p", "nvlink_p2p, by packets"])
def test_one_rank_is_its_own_peer(way, world_size):
    """A single rank runs the same transport without a group and without symmetric memory.

    A script for many GPUs then also runs on one.
    """
    own = dispatcher.make_memory
    if not torch.cuda.is_available():
        emulate_on_cpu(*WAYS[way])
    NVLinkP2PDispatcher.low_latency_bytes, dispatcher.make_memory = 256 if "packets" in way else 0, own
    with EPContext.from_groups(ParallelConfig(dp=1), device=rank_device(), max_tokens=9) as context:
        layer = fill(MoELayer(CONFIG, context, all2all="nvlink_p2p"))
        for tokens in (9, 0, 3):
            check_call(layer, context, tokens=tokens, what=f"T={tokens}")
        with context.token_limit(4):
            check_call(layer, context, tokens=4, what="at most 4")


@pytest.mark.skipif(torch.cuda.is_available(), reason="over the emulation, on the CPU")
@distributed(2)
@pytest.mark.parametrize("way", list(WAYS))
def test_a_first_call_in_inference_mode_is_one_like_any_other(way, world_size):
    """Buffers made by a first call in inference mode can be written by calls outside of it."""
    kind = WAYS[way][0]
    emulate_on_cpu(*WAYS[way])
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=9) as context:
        layer = fill(MoELayer(CONFIG, context, all2all=kind.name))
        with torch.inference_mode():
            layer.forward_routed(integer_rows(9, CONFIG.hidden_size, 0), integer_routing(9, CONFIG, 0))
        check_call(layer, context, tokens=9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="over the emulation, on the CPU")
@distributed(2)
@pytest.mark.parametrize("way", list(WAYS)[:4])
@pytest.mark.parametrize("fault", ["tokens", "dtype"])
@pytest.mark.parametrize(
    ("pipeline", "most", "shared"), [(2, 9, 0), (None, 9, 0), (None, 4, 0), (2, 4, 0), (None, 9, 16)]
)
def test_a_rank_that_refuses_takes_part_all_the_same(pipeline, most, shared, fault, way, world_size):
    """A rank that refuses a call raises at once; its peer, which has sent its rows, gets NaN, and the error at a later
    step."""
    kind = WAYS[way][0]
    emulate_on_cpu(*WAYS[way])
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=9, deadline_s=8) as context:
        config = dataclasses.replace(CONFIG, shared_intermediate_size=shared)
        layer = fill(MoELayer(config, context, all2all=kind.name, pipeline=pipeline))
        rank = dist.get_rank()
        tokens = most + rank * (fault == "tokens")
        x, routing = integer_rows(tokens, 16, rank), integer_routing(tokens, CONFIG, rank)
        sentence = f"rank 1: x has {most + 1} tokens to dispatch, more than max_tokens={most}"
        if fault == "dtype":
            x, sentence = x.to((torch.float32, torch.float64)[rank]), "rank 1: x must be float32 as the layer is"
        with context.token_limit(most), torch.no_grad():
            if rank:
                with pytest.raises(InputError, match=sentence):
                    layer.forward_routed(x, routing)
            else:
                y = layer.forward_routed(x, routing)
                theirs = (routing.ids >= 3).any(1)  # rank 1's experts
                assert y[theirs].isnan().all()
                assert not y[~theirs].isnan().any()
        barrier(context.device)
        refusal = wait_for_input_error(2, context.flight_recorder.check)
        assert re.search(sentence, refusal), f"the peer's refusal did not arrive, got {refusal!r}"
        barrier(context.device)  # no rank leaves before its peers have heard


@pytest.mark.skipif(torch.cuda.is_available(), reason="over the emulation, on the CPU")
@distributed(2)
@pytest.mark.parametrize("way", list(WAYS)[:4])
def test_a_rank_that_converted_its_layer_takes_part_in_the_old_dtype(way, world_size):
    """A rank that converted its layer refuses the call, but takes part in the old dtype.

    Its peer has sent rows of that size; buffers of another size would lie where the peer writes.
    """
    kind = WAYS[way][0]
    emulate_on_cpu(*WAYS[way])
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=9, deadline_s=8) as context:
        layer = fill(MoELayer(CONFIG, context, all2all=kind.name))
        check_call(layer, context, tokens=9)
        rank = dist.get_rank()
        x, routing = integer_rows(9, 16, rank), integer_routing(9, CONFIG, rank)
        sentence = (
            f"rank 1: the layer was converted to bfloat16 after its first call in float32, and all2all={kind.name}"
        )
        with torch.no_grad():
            if rank:
                layer.to(torch.bfloat16)
                with pytest.raises(InputError, match=sentence):
                    layer.forward_routed(x.bfloat16(), routing)
            else:
                y = layer.forward_routed(x, routing)
                theirs = (routing.ids >= 3).any(1)  # rank 1's experts
                assert y[theirs].isnan().all()
                assert not y[~theirs].isnan().any()
        barrier(context.device)
        refusal = wait_for_input_error(2, context.flight_recorder.check)
        assert re.search(sentence, refusal), f"the peer's refusal did not arrive, got {refusal!r}"
        barrier(context.device)  # no rank leaves before its peers have heard


@pytest.mark.skipif(torch.cuda.is_available(), reason="over the emulation, on the CPU")
@distributed(2)
def test_a_layer_is_converted_before_its_first_call(world_size):
    emulate_on_cpu(NVLinkP2PDispatcher)
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=9) as context:
        layer = fill(MoELayer(CONFIG, context, all2all="nvlink_p2p", experts="reference"))
        odd = MoELayer(CONFIG, context, all2all="nvlink_p2p", experts="reference")
        x = integer_rows(9, 16, dist.get_rank()).bfloat16()
        with torch.no_grad():
            assert layer.bfloat16()(x).dtype == torch.bfloat16
            if dist.get_rank():
                odd.bfloat16()
            with pytest.raises(InputError, match="has dtype=float32 on rank 0, and dtype=bfloat16 on rank 1"):
                odd(x.to(odd.dtype))


@pytest.mark.skipif(torch.cuda.is_available(), reason="over the emulation, on the CPU")
@distributed(2)
def test_pipelines_that_cannot_be(world_size):
    device = rank_device()
    with EPContext.from_groups(ParallelConfig(dp=2), device=device, max_tokens=9) as context:
        for pipeline, all2all, sentence in (
            (4, "torch_a2a", "pipeline=4 needs a transport with fixed buffers"),
            (4 + dist.get_rank(), "auto", "pipeline"),
        ):
            with pytest.raises(ConfigError, match=sentence):
                MoELayer(CONFIG, context, all2all=all2all, pipeline=pipeline, experts="reference")
    emulate_on_cpu(FlashInferNVLinkDispatcher)  # a context reads the registry once
    with EPContext.from_groups(ParallelConfig(dp=2), device=device, max_tokens=9) as context:
        for pipeline in (0, 10, 2.5):
            with pytest.raises(ConfigError, match=r"pipeline must be an integer in \[1, 9\]"):
                MoELayer(CONFIG, context, all2all="flashinfer_nvlink", pipeline=pipeline, experts="reference")


@distributed(2)
def test_ranks_that_disagree_about_a_step_are_told(world_size):
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=9) as context:
        asked = 4 + dist.get_rank()
        with pytest.raises(ConfigError, match="max_tokens: 4 on rank 0, 5 on rank 1"), context.token_limit(asked):
            pass
        with pytest.raises(ConfigError, match=r"rank 1: token_limit: max_tokens must be an integer in \[1, 9\]"):
            context.token_limit((4, 10)[dist.get_rank()]).__enter__()
        with context.token_limit(4):
            assert context._current_limit == 4
        assert context._current_limit == 9


# --- on GPUs --------------------------------------------------------------------------------------------------------


on_gpus = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(FlashInferNVLinkDispatcher.available()), reason="needs GPUs and FlashInfer"
)


@on_gpus
@distributed(2, 4)
@pytest.mark.parametrize(
    ("scheme", "experts", "options"),
    [
        ("none", "flashinfer_cutlass", {"all2all": "flashinfer_nvlink"}),
        ("none", "bf16_triton", {}),
        ("none", "bf16_triton", {"pipeline": 8}),
        ("fp8_block", "fp8_block_triton", {"pipeline": 8, "wire": Wire(dispatch="fp8_block")}),
        ("none", "flashinfer_cutlass", {"pipeline": 8, "all2all": "flashinfer_nvlink"}),
        ("fp8_block", "fp8_block_triton", {}),
        (
            "fp8_block",
            "fp8_block_triton",
            {"pipeline": 8, "all2all": "flashinfer_nvlink", "wire": Wire(dispatch="fp8_block")},
        ),
        ("mxfp4", "flashinfer_cutlass", {"wire": Wire(dispatch="fp8_block")}),
        ("mxfp4", "w4a16_triton", {}),
        ("mxint4", "w4a16_triton", {"pipeline": 8}),
        ("fp8_dynamic", "fp8_dynamic_triton", {"wire": Wire(dispatch="fp8_row")}),
        ("fp8_channel", "fp8_channel_triton", {"wire": Wire(dispatch="fp8_row")}),
    ],
)
def test_captured_with_other_routes_tokens_and_placements(scheme, experts, options, world_size):
    rank, device = dist.get_rank(), rank_device()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=device, max_tokens=64) as context:
        placed = ExpertMap.redundant(10, world_size, 2)  # equally many slots on all ranks
        names = {"quantization": scheme, "experts": experts}
        layer = MoELayer(WIDE, context, expert_map=placed, **names, **options, dtype=torch.bfloat16)
        assert layer.choice.all2all == options.get("all2all", "nvlink_p2p")
        tensors = [random_expert(WIDE, SCHEMES[scheme], expert, torch.bfloat16, device) for expert in range(10)]
        for expert in range(10):
            layer.update_expert(expert, **tensors[expert])
        with context.token_limit(TOKENS):
            captured = Captured(layer, tensors, scheme)
        for seed, tokens in enumerate((TOKENS, 0, 1, 17)):
            found = captured.replay(tokens if rank % 2 else TOKENS - tokens, 10 * seed + rank)
            assert found <= 1, (seed, found)
        rotated = (
            placed.physical_to_logical[placed.slots_per_rank :] + placed.physical_to_logical[: placed.slots_per_rank]
        )
        moved = ExpertMap(physical_to_logical=rotated, num_experts=10, num_ranks=world_size)
        layer.placement.update(moved)
        layer.expert_weights.set_expert_map(moved)
        for expert in range(10):
            layer.update_expert(expert, **tensors[expert])
        assert captured.replay(TOKENS, 77 + rank) <= 1, "after the placement changed"
        check_call_eagerly(layer, tensors, scheme)


def check_call_eagerly(layer: MoELayer, tensors: list[dict[str, torch.Tensor]], scheme: str) -> None:
    """Check the layer outside the graph, with uneven numbers of tokens."""
    rank, device = dist.get_rank(), layer.device
    tokens = (33, 0, 64, 7)[rank]
    x = torch.randn(tokens, WIDE.hidden_size, generator=torch.Generator().manual_seed(rank)).bfloat16().to(device)
    routing = integer_routing(tokens, WIDE, rank)
    routing = Routing(routing.ids.to(device), routing.weights.to(device))
    with torch.no_grad():
        y = layer.forward_routed(x, routing)
    x = as_it_arrives(layer, x)
    expected, limit = expected_and_limit(
        WIDE, SCHEMES[scheme], tensors, x, routing.ids, routing.weights, torch.bfloat16
    )
    assert max_error_ratio(y, expected, (1 + dist.get_world_size()) * limit) <= 1


@on_gpus
@distributed(2, 4)
def test_a_transport_that_waits_refuses_a_capture(world_size):
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device(), max_tokens=64) as context:
        layer = MoELayer(WIDE, context, all2all="torch_a2a", experts="reference", dtype=torch.bfloat16)
        x = torch.zeros(4, WIDE.hidden_size, dtype=torch.bfloat16, device=context.device)
        sentence = (
            "torch_a2a waits for the device and cannot be captured in a CUDA graph; of those available here .*local"
        )
        with torch.no_grad():
            layer(x)
            torch.cuda.synchronize(context.device)
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(context.device)
            with pytest.raises(InputError, match=sentence), torch.cuda.graph(graph, stream=stream):
                layer(x)
