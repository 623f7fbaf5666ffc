"""Captured calls over memory that forked ranks share: replays beside eager calls, refusals, and captures that fail."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_moe import ConfigError, EPContext, ExpertMap, InputError, MoEConfig, MoELayer, ParallelConfig, Tokens
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.execution import graphs, recorded_calls
from ep_moe.experts.fused.flashinfer_mega import FlashInferMegaBf16
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.parallel.rank_group import barrier
from ep_moe.runtime.profiling import StageTimes
from ep_moe.testing import distributed, rank_device
from ep_moe.testing.transport_case import wait_for_input_error
from tests.emulations import mega as mega_emulation
from tests.emulations.graph import GRAPHS, EmulatedRecorder, stand_in
from tests.fixtures.distributed_cases import gather_from_all_ranks, same_error
from tests.fixtures.helpers import fill, integer_routing, integer_rows, oracle

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for CUDA graphs on the CPU")
CPU = torch.device("cpu")
PLAIN = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=6, top_k=3)


def built(context: EPContext, config: MoEConfig = PLAIN, **asked: object) -> MoELayer:
    return fill(MoELayer(config, context, all2all="nvlink_p2p", **asked))


def check(layer: MoELayer, tokens: int, seed: int, *, replays: bool) -> None:
    """Check a call against the oracle, and whether it was a replay on this rank."""
    x, routing = integer_rows(tokens, 16, seed), integer_routing(tokens, PLAIN, seed)
    before = EmulatedRecorder.replays
    with torch.no_grad():
        y = layer.forward_routed(x, routing)
    assert (EmulatedRecorder.replays - before == 1) is replays, (tokens, seed)
    expected = oracle(PLAIN, x, routing)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5 * float(expected.abs().max()) if tokens else 0)


@distributed(2, 4)
def test_ranks_with_captured_and_other_numbers_of_tokens(world_size):
    """Ranks that replay beside ranks that run eagerly get right results, and their flight recorders stay in step."""
    stand_in()
    rank = dist.get_rank()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=CPU, max_tokens=9) as context:
        layer = built(context, expert_map=ExpertMap.redundant(6, world_size, 2))
        layer.capture_routed([4])
        with context.token_limit(5):
            layer.capture_routed([5])
        for step in range(2 * world_size):
            tokens = (4, 3, 9, 0)[(rank + step) % 4]
            check(layer, tokens, 10 * step + rank, replays=tokens <= 4)
            assert len(set(gather_from_all_ranks(context.flight_recorder._step))) == 1, (
                "a rank that replays is neither behind nor elsewhere"
            )
        with context.token_limit(5):
            check(layer, 5, rank, replays=True)
            check(layer, 2, rank, replays=True)
        check(layer, 5, rank, replays=False)
        placed = layer.placement.expert_map
        turned = (
            placed.physical_to_logical[placed.slots_per_rank :] + placed.physical_to_logical[: placed.slots_per_rank]
        )
        moved = ExpertMap(physical_to_logical=turned, num_experts=6, num_ranks=world_size)
        layer.placement.update(moved)
        layer.expert_weights.set_expert_map(moved)
        fill(layer)
        check(layer, 4, 99 + rank, replays=True)
        assert max(gather_from_all_ranks(sum(layer.stats().expert_load))) > 0


@distributed(2)
def test_calls_in_parts(world_size):
    """With `pipeline=`, a replay and a peer's eager call use the same workspaces in the same order."""
    stand_in()
    rank = dist.get_rank()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=CPU, max_tokens=9) as context:
        layer = built(context, pipeline=2)
        for step in range(4):
            layer.capture_routed([9, 4])
            buffer_slots = layer._dispatcher().buffer_pool.buffer_slots
            assert len(buffer_slots) > 1
            tokens = (9, 0, 6, 3)[(rank + step) % 4]
            check(layer, tokens, 10 * step + rank, replays=True)
            if step % 2 == rank:
                layer._graphs.drop()
            check(layer, tokens, 11 * step + rank, replays=step % 2 != rank)
            assert len(set(gather_from_all_ranks(context.flight_recorder._step))) == 1
            assert not any(buffer_slot.busy for buffer_slot in buffer_slots)
        with context.token_limit(2):
            layer.capture_routed([2])
            check(layer, 2, rank, replays=True)


@distributed(4)
@pytest.mark.parametrize("sizes", [{"dp": 4, "ep": 2}, {"dp": 2, "tp": 2, "tokens": Tokens.SHARDED}])
def test_layouts_that_exchange_nothing(sizes, world_size):
    stand_in()
    with EPContext.from_groups(ParallelConfig(**sizes), device=CPU, max_tokens=9) as context:
        layer = built(context)
        layer.capture_routed([4])
        check(layer, 4, dist.get_rank(), replays=True)


@distributed(2)
@pytest.mark.parametrize("fault", ["dtype", "tokens"])
def test_a_rank_that_refuses_takes_part_with_replays(fault, world_size):
    """A rank that refuses a call raises at once; its peer's replay returns NaN, and its next call raises the same
    error."""
    stand_in()
    with EPContext.from_groups(ParallelConfig(dp=2), device=CPU, max_tokens=9, deadline_s=4) as context:
        layer = built(context)
        layer.capture_routed([9])
        rank = dist.get_rank()
        tokens = 9 + rank * (fault == "tokens")
        x, routing = integer_rows(tokens, 16, rank), integer_routing(tokens, PLAIN, rank)
        sentence = "rank 1: x has 10 tokens to dispatch, more than max_tokens=9"
        if fault == "dtype":
            x, sentence = x.to((torch.float32, torch.float64)[rank]), "rank 1: x must be float32 as the layer is"
        with torch.no_grad():
            if rank:
                with pytest.raises(InputError, match=sentence):
                    layer.forward_routed(x, routing)
            else:
                y = layer.forward_routed(x, routing)
                assert y[(routing.ids >= 3).any(1)].isnan().all()
                assert EmulatedRecorder.replays == 1
            barrier(rank_device())
            refusal = wait_for_input_error(1.5, context.flight_recorder.check)
            assert sentence in refusal, f"the peer's refusal did not arrive, got {refusal!r}"
            barrier(rank_device())
            with pytest.raises(InputError, match=sentence):
                layer.forward_routed(integer_rows(9, 16, rank), integer_routing(9, PLAIN, rank))
        assert EmulatedRecorder.replays == (1 - rank), "raised before anything set out"


@distributed(2)
def test_a_replay_marks_how_far_the_device_is(world_size):
    stand_in()
    with EPContext.from_groups(ParallelConfig(dp=2), device=CPU, max_tokens=9) as context:
        layer = built(context)
        layer.capture_routed([4])
        marked = []
        context.flight_recorder.device_watch.mark = lambda device: marked.append((device, EmulatedRecorder.replays))
        check(layer, 4, 0, replays=True)
        assert marked == [(CPU, 1)], "behind the replay"


@distributed(2)
def test_captures_that_cannot_be(world_size):
    """Each refused capture raises the same error on all ranks, and the layer runs afterwards."""
    stand_in()
    rank = dist.get_rank()
    with EPContext.from_groups(ParallelConfig(dp=2), device=CPU, max_tokens=9) as context:
        layer = built(context, name="block")
        calls = "tokens must be a list of integers of at least 0 and at most 9 (the token limit), got "
        waits = MoELayer(PLAIN, context, all2all="torch_a2a")

        def recording_fails(self, call):
            before = context.flight_recorder._step
            call()  # run the call: the peers' emulation needs it
            context.flight_recorder._step = before  # as if the capture had failed at once
            pool = context._dispatcher("nvlink_p2p", layer._dispatch_shape()).buffer_pool
            pool.buffer_slots[0].busy = True  # as after a dispatch
            raise RuntimeError("operation not permitted when stream is capturing")

        def on_one_rank(value, other):
            return value if rank else other

        refusals = [
            (layer, [], calls + "[]"),
            (layer, 4, calls + "4"),
            (layer, on_one_rank([True], [4]), "block.capture_routed: rank 1: " + calls + "[True]"),
            (layer, on_one_rank([4, -1], [4]), "block.capture_routed: rank 1: " + calls + "[4, -1]"),
            (layer, [10], calls + "[10]"),
            (layer, on_one_rank([4], [5]), "tokens: [5] on rank 0, [4] on rank 1"),
            (waits, [4], "all2all=torch_a2a cannot be captured in a CUDA graph; choose another"),
        ]
        for which, tokens, sentence in refusals:
            found = same_error(ConfigError, lambda which=which, tokens=tokens: which.capture_routed(tokens))
            assert sentence in found, found
        context._stage_times = on_one_rank(StageTimes(CPU), None)
        assert "block.capture_routed: rank 1: metrics.stages is active" in same_error(
            ConfigError, lambda: layer.capture_routed([4])
        )
        context._stage_times = StageTimes(CPU, timed=False)  # disabled
        busy = context._dispatcher("nvlink_p2p", layer._dispatch_shape()).buffer_pool
        layer.capture_routed([4])
        context._stage_times = None
        busy.buffer_slots[0].busy = True
        assert "a call of all2all=nvlink_p2p is not finished" in same_error(ConfigError, lambda: layer.capture([4]))
        busy.buffer_slots[0].busy = False
        recorded_calls.capturing = lambda device: device == CPU
        assert "this stream is being captured" in same_error(ConfigError, lambda: layer.capture([4]))
        recorded_calls.capturing = lambda device: False
        transport, buffer_pool = layer._dispatcher(), layer._dispatcher().buffer_pool
        transport.buffer_pool = None
        found = same_error(ConfigError, lambda: layer.capture([4]))
        assert "all2all=nvlink_p2p orders its calls on a stream that a replay does not use" in found
        transport.buffer_pool = buffer_pool
        with mock.patch.object(NVLinkP2PDispatcher, "grows", True):
            found = same_error(ConfigError, lambda: layer.capture([4]))
        assert "all2all=nvlink_p2p has buffers that grow with the calls, and a replay has one size" in found
        layer.capture([2])
        assert len(context._recorders) == 1, "one for all captures on a stream"
        record = EmulatedRecorder.record
        EmulatedRecorder.record = on_one_rank(recording_fails, record)
        found = same_error(ConfigError, lambda: layer.capture_routed([3]))
        assert not context._recorders or not rank, "its memory may be lost"
        assert "rank 1: the call could not be captured, RuntimeError: operation not permitted" in found
        EmulatedRecorder.record = record
        assert len(set(gather_from_all_ranks(context.flight_recorder.number))) == 1
        check(layer, 4, rank, replays=True)
        check(layer, 5, rank, replays=False)
        buffer_pool = NVLinkP2PDispatcher.capabilities
        NVLinkP2PDispatcher.capabilities = dataclasses.replace(buffer_pool, cuda_graph=False)
        assert "all2all=nvlink_p2p cannot be captured" in same_error(ConfigError, lambda: layer.capture([4]))
        NVLinkP2PDispatcher.capabilities = buffer_pool
        ReferenceExperts.capabilities = dataclasses.replace(ReferenceExperts.capabilities, cuda_graph=False)
        assert "experts=reference cannot be captured" in same_error(ConfigError, lambda: layer.capture([4]))
        graphs.Recorder = GRAPHS
        found = same_error(ConfigError, lambda: layer.capture([4]))
        assert "the layer is on cpu, and CUDA graphs need a GPU" in found


@distributed(2)
def test_fused_kernels_are_not_captured(world_size):
    stand_in()
    mega_emulation.on_the_cpu(FlashInferMegaBf16)
    with EPContext.from_groups(ParallelConfig(dp=2), device=CPU, max_tokens=9) as context:
        sizes = {"hidden_size": 256, "intermediate_size": 256, "num_experts": 10, "top_k": 2}
        layer = MoELayer(MoEConfig(**sizes), context, experts="flashinfer_mega_bf16", dtype=torch.bfloat16)
        found = same_error(ConfigError, lambda: layer.capture([4]))
        assert "experts=flashinfer_mega_bf16 orders its rounds on the host" in found


@distributed(4)
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 4, "ep": 2, "etp": 2}])
def test_layouts_whose_ranks_exchange_numbers_first(sizes, world_size):
    stand_in()
    with EPContext.from_groups(ParallelConfig(**sizes), device=CPU, max_tokens=9) as context:
        layer = built(context)
        found = same_error(ConfigError, lambda: layer.capture([4]))
        assert "all ranks exchange their token counts before each call" in found
