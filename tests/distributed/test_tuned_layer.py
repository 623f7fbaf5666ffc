"""A layer that chooses by token bucket gives the same output under each token limit, by the pair in its file.

Ranks that measure different times agree. Ranks with different files raise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_moe import Activation, ConfigError, EPContext, MoEConfig, MoELayer, ParallelConfig, Wire, registry
from ep_moe.all2all.base import Dispatcher
from ep_moe.all2all.flashinfer_nvlink import FlashInferNVLinkDispatcher
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.all2all.torch_collectives import AllGatherDispatcher
from ep_moe.cli import rank_times
from ep_moe.cli import tune as tuning
from ep_moe.errors import InputError
from ep_moe.experts.base import Experts
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.quant.schemes import SCHEMES
from ep_moe.selection.tuned import Measured, Tuned, layer_facts, machine_facts, versions
from ep_moe.testing import distributed, rank_device
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.weights.initial import random_expert
from tests.fixtures.distributed_cases import check_call, gather_from_all_ranks, no_payload, same_error
from tests.fixtures.helpers import fill, integer_routing, moved
from tests.fixtures.layer_static import WIDE, emulate_on_cpu

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=6, top_k=3, activation=Activation.RELU2)
on_the_cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="over the emulation, on the CPU")


class OtherReference(ReferenceExperts):
    """A second kernel of the same layout."""

    name = "other_reference"


class Sizeless(AllGatherDispatcher):
    name = "sizeless"

    @classmethod
    def buffer_bytes(cls, dispatch_shape):
        raise ValueError("no idea")


class Unmade(AllGatherDispatcher):
    name = "unmade"

    def __init__(self, dispatch_shape, rank_group):
        raise OSError("no license left")


def bucket(tokens: int, all2all: str, experts: str = "reference", pipeline: int | None = None) -> Measured:
    return Measured(tokens=tokens, experts=experts, all2all=all2all, us=1.0, pipeline=pipeline)


def tuned(context: EPContext, *buckets: Measured, config: MoEConfig = CONFIG, dtype=torch.float32) -> Tuned:
    layout = context.layout
    return Tuned(
        machine=machine_facts(context.device, layout.ep, layout.etp),
        layer=layer_facts(config, "none", Wire(), dtype),
        versions=versions(),
        buckets=buckets,
    )


@contextlib.contextmanager
def recorded(layer: MoELayer) -> Iterator[list[str]]:
    """Record the names of the transport and the kernel of each call within; a pipelined call has several."""
    seen: list[str] = []
    dispatched, computed = Dispatcher._begin_dispatch, Experts.__call__

    def dispatch(self, *arguments):
        if self.rank_group is layer.context.rank_groups["ep"]:
            seen.append(self.name)
        return dispatched(self, *arguments)

    def compute(self, *arguments):
        if self.weights is layer.expert_weights:
            seen.append(self.name)
        return computed(self, *arguments)

    with mock.patch.object(Dispatcher, "_begin_dispatch", dispatch), mock.patch.object(Experts, "__call__", compute):
        yield seen


@distributed(2)
def test_a_transport_that_raises_is_left_out_of_tuning(world_size):
    lines: list[str] = []
    own = {"sizeless": f"{__name__}:Sizeless", "unmade": f"{__name__}:Unmade"}
    with (
        mock.patch.dict(registry._BUILT_IN["dispatchers"], own),
        EPContext.from_groups(device=rank_device(), max_tokens=4) as context,
    ):
        found = tuning.tune(context, CONFIG, [4], dtype=torch.float32, say=lines.append)
    assert {line.all2all for line in found.measured} >= {"allgather", "torch_a2a"}
    for reason in ("4 tokens, sizeless with reference: left out, .*no idea", "unmade.*: left out, .*no license left"):
        assert any(re.search(reason, line) for line in lines), lines


@distributed(4)
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}], ids=lambda sizes: f"{sizes}")
def test_each_bound_by_its_own_pair(sizes, world_size):
    """Each token limit uses the pair of its bucket: limits below, at and above each. The last bucket serves larger
    limits."""
    own = {"other_reference": f"{__name__}:OtherReference"}
    with (
        mock.patch.dict(registry._BUILT_IN["experts"], own),
        EPContext.from_groups(ParallelConfig(**sizes), device=rank_device(), max_tokens=9) as context,
    ):
        buckets = (
            bucket(2, "allgather"),
            bucket(4, "torch_a2a", "other_reference"),
            bucket(6, "allgather", "other_reference"),
        )
        layer = fill(MoELayer(CONFIG, context, tuned=tuned(context, *buckets), dtype=torch.float32))
        untuned = fill(MoELayer(CONFIG, context, dtype=torch.float32))
        assert (layer.choice.all2all, layer.choice.experts) == ("allgather", "other_reference")
        for most in (1, 2, 3, 4, 5, 6, 7, 9):
            sent = context.layout.max_dispatch_tokens(most)
            expected = buckets[0] if sent <= 2 else buckets[1] if sent <= 4 else buckets[2]
            with context.token_limit(most), recorded(layer) as seen:
                check_call(layer, context, tokens=most, what=f"at most {most}")
            assert seen == [expected.all2all, expected.experts], most
            with context.token_limit(most):
                check_call(untuned, context, tokens=most, what=f"untuned, at most {most}")
        with recorded(layer) as seen:
            check_call(layer, context, tokens=3)
        assert seen == ["allgather", "other_reference"], "the context's bound is in force, not the number of tokens"
        assert [kernel.name for kernel in layer._kernels] == ["other_reference", "reference"]
        assert all(kernel.weights is layer.expert_weights for kernel in layer._kernels)
        with context.token_limit(2), recorded(layer) as seen, pytest.raises(InputError, match=r"rank \d: x must be"):
            layer(torch.zeros(1, 3, device=context.device))
        # with etp, ranks learn of it before any row travels
        assert seen == ["allgather"] * (context.layout.etp == 1), "all ranks refuse by the transport in force"


@on_the_cpu_only
@distributed(4)
def test_fixed_buffers_and_parts(world_size):
    """Each transport's buffers are sized by its largest bucket, made once, and counted in `plan()`."""
    for kind in (FlashInferNVLinkDispatcher, NVLinkP2PDispatcher):
        emulate_on_cpu(kind)
    with EPContext.from_groups(ParallelConfig(dp=4), device=rank_device(), max_tokens=9) as context:
        buckets = (
            bucket(1, "nvlink_p2p"),
            bucket(2, "flashinfer_nvlink"),
            bucket(4, "nvlink_p2p"),
            bucket(8, "flashinfer_nvlink", pipeline=2),
            bucket(64, "nvlink_p2p", pipeline=5),
        )
        layer = fill(MoELayer(CONFIG, context, tuned=tuned(context, *buckets), dtype=torch.float32))
        planned = layer.plan()
        rooms, sent = {1: 4, 2: 2, 3: 4, 4: 4, 5: 2, 8: 2, 9: 5}, {1: 1, 2: 1, 3: 1, 4: 1, 5: 3, 8: 4, 9: 2}
        for most, room in rooms.items():
            expected = next(one for one in buckets if one.tokens >= most)
            with context.token_limit(most), recorded(layer) as seen:
                assert layer._dispatch_shape().max_tokens == room
                check_call(layer, context, tokens=most, what=f"at most {most}")
            assert [name for name in seen if name != "reference"] == [expected.all2all] * sent[most], most
        flash, ours = FlashInferNVLinkDispatcher, NVLinkP2PDispatcher
        dispatch_shape = {size: dataclasses.replace(layer._dispatch_shape(), max_tokens=size) for size in (2, 4, 5)}
        expected = {
            ("flashinfer_nvlink", dispatch_shape[2]): flash.buffer_bytes(dispatch_shape[2])
            * flash.calls_in_parts(dispatch_shape[2]),
            ("nvlink_p2p", dispatch_shape[4]): ours.buffer_bytes(dispatch_shape[4]),
            ("nvlink_p2p", dispatch_shape[5]): ours.buffer_bytes(dispatch_shape[5])
            * ours.calls_in_parts(dispatch_shape[5]),
        }
        assert layer._transport_bytes() == expected
        assert planned == layer.plan()
        assert planned["transport"] == context.plan()["transport"] == sum(expected.values())
        assert context._pool.keys() == expected.keys(), "what was made is what was planned"
        in_parts = MoELayer(CONFIG, context, all2all="nvlink_p2p", pipeline=5, dtype=torch.float32)
        assert in_parts.plan()["transport"] == expected["nvlink_p2p", dispatch_shape[5]]
        assert context.plan()["transport"] == sum(expected.values()), "shared with an untuned layer"
    with EPContext.from_groups(ParallelConfig(dp=4), device=rank_device(), max_tokens=3) as context:
        layer = fill(MoELayer(CONFIG, context, tuned=tuned(context, *buckets), dtype=torch.float32))
        with recorded(layer) as seen:
            check_call(layer, context, tokens=3)
        assert seen == ["nvlink_p2p", "reference"]
        assert layer._dispatch_shape().max_tokens == 3, "no larger than the context's calls"


@distributed(4)
def test_files_that_cannot_be_are_refused_on_all_ranks_alike(world_size):
    rank = dist.get_rank()
    with EPContext.from_groups(ParallelConfig(dp=4), device=rank_device(), max_tokens=9) as context, no_payload():
        good = tuned(context, bucket(4, "allgather"), bucket(9, "torch_a2a"))

        def refused(mine: Tuned) -> str:
            return same_error(ConfigError, lambda: MoELayer(CONFIG, context, tuned=mine, dtype=torch.float32))

        foreign = dataclasses.replace(good, machine=good.machine | {"ep": 2})
        assert "ranks 0, 1, 2, 3: tuned is for another machine or layer: machine ep is 4" in refused(foreign)
        assert "rank 2: tuned is for another machine or layer" in refused(foreign if rank == 2 else good)
        other = dataclasses.replace(good, buckets=(bucket(3, "allgather"), bucket(9, "torch_a2a")))
        sentence = refused(other if rank == 1 else good)
        assert "tuned: " in sentence
        assert "up to 4 tokens" in sentence
        assert "on rank 1" in sentence
        layer = MoELayer(CONFIG, context, tuned=good, dtype=torch.float32)
        assert layer.choice.all2all == "torch_a2a"


@distributed(4)
def test_tuning_alike_on_all_ranks(world_size):
    """All ranks choose the same pairs although their clocks differ."""
    clocks = {  # times of the ranks, per bucket, by transport
        2: {"torch_a2a": (10, 10, 10, 80), "allgather": (40, 40, 40, 40)},
        5: {"torch_a2a": (50, 10, 60, 10), "allgather": (90, 20, 20, 20)},
    }
    names = {"torch_a2a": "torch_a2a", "allgather": "allgather"}
    rank, said = dist.get_rank(), []

    def clock(calls, rounds, before):
        before()
        for call in calls:
            call()
        return [clocks[call.args[1].tokens_sent][names[call.args[1].name]][rank] for call in calls]

    def travel(layer, dispatcher, x, routing):
        dispatcher.tokens_sent = len(x)
        return measured(layer, dispatcher, x, routing)

    measured = tuning._travel
    device = rank_device()
    with (
        EPContext.from_groups(ParallelConfig(dp=4), device=device, max_tokens=5) as context,
        mock.patch.object(tuning, "_times", _by(clock)),
        mock.patch.object(tuning, "_travel", travel),
    ):
        found = tuning.tune(context, CONFIG, (5, 2), dtype=torch.float32, say=said.append)
        expected = (bucket(2, "allgather"), bucket(5, "torch_a2a"))
        assert [dataclasses.replace(one, us=1.0) for one in found.buckets] == list(expected)
        assert [one.us for one in found.buckets] == [40, 60]
        assert sorted((one.tokens, one.all2all, one.us) for one in found.measured) == [
            (2, "allgather", 40), (2, "torch_a2a", 80), (5, "allgather", 90), (5, "torch_a2a", 60),
        ]  # fmt: skip
        assert gather_from_all_ranks(found) == [found] * 4
        assert "2 tokens, allgather with reference: 40.0 us" in said
        layer = fill(MoELayer(CONFIG, context, tuned=found, dtype=torch.float32))
        for most, name in ((2, "allgather"), (5, "torch_a2a")):
            with context.token_limit(most), recorded(layer) as seen:
                check_call(layer, context, tokens=most)
            assert seen == [name, "reference"]


def _by(clock):
    """Return a `_times` that uses this clock, on GPUs too."""

    def times(context, candidates, *, trial=False):
        calls = [one.call for one in candidates]
        return rank_times.slowest(context, clock(calls, 1, lambda: rank_times.barrier(context))) if calls else []

    return times


@distributed(4)
def test_by_the_real_clock(world_size):
    config = dataclasses.replace(CONFIG, shared_intermediate_size=16)
    with EPContext.from_groups(ParallelConfig(dp=4, ep=2), device=rank_device(), max_tokens=5) as context:
        found = tuning.tune(context, config, (1, 5), dtype=torch.float32)
        assert [one.tokens for one in found.buckets] == [1, 5]
        assert {one.all2all for one in found.measured} >= {"allgather", "torch_a2a"}
        assert all(one.us > 0 for one in found.measured)
        assert (
            found.mismatch(machine_facts(context.device, 2, 1), layer_facts(config, "none", Wire(), torch.float32))
            is None
        )
        with pytest.raises(ConfigError, match="tokens"):
            tuning.tune(context, config, (1 + dist.get_rank(),), dtype=torch.float32)


@distributed(2)
def test_rows_under_one_scale_whichever_it_is(world_size):
    """A tuning file for fp8_tensor rows serves any input scale, as the scale does not change times."""
    asked = tuning.TuneOptions(model="demo", tokens=(3,), quantization="fp8_static", wire="fp8_tensor")
    rows = Wire(dispatch="fp8_tensor", input_scale=0.7)
    of_layer = {"quantization": "fp8_static", "dtype": torch.float32}
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=3) as context:
        found = tuning.tune(context, CONFIG, asked.tokens, wire=asked.dispatch_wire(), **of_layer)
        layer = MoELayer(CONFIG, context, tuned=found, wire=rows, **of_layer)
        assert layer._dispatch_shape().wire == rows
        with pytest.raises(ConfigError, match=r"layer Wire\.dispatch is 'plain' here and 'fp8_tensor' in the file"):
            MoELayer(CONFIG, context, tuned=found, **of_layer)


@distributed(2)
def test_what_fails_is_left_out_on_all_ranks(world_size):
    """A transport that fails on every rank, and a kernel that cannot be tuned on one rank, are left out on all."""
    said: list[str] = []

    def broken(self, *_):
        raise RuntimeError("no such symbol")

    def full(self, rows, cache):
        raise OSError("no space left on device")

    own = {"other_reference": f"{__name__}:OtherReference"}
    with (
        mock.patch.dict(registry._BUILT_IN["experts"], own),
        mock.patch.object(OtherReference, "tune", full),
        mock.patch.object(AllGatherDispatcher, "_dispatch", broken),
        EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=3) as context,
    ):
        found = tuning.tune(context, CONFIG, (3,), dtype=torch.float32, say=said.append)
        assert not [one for one in found.measured if one.all2all == "allgather" or one.experts == "other_reference"]
        assert found.buckets[0].all2all != "allgather"
        assert any("other_reference is left out" in line and "no space left" in line for line in said)
        assert any("3 tokens, allgather with reference: left out" in line and "no such symbol" in line for line in said)


@on_the_cpu_only
@distributed(2)
def test_parts_are_candidates_where_they_can_overlap(world_size):
    emulate_on_cpu(FlashInferNVLinkDispatcher)
    beside = dataclasses.replace(ReferenceExperts.capabilities, host_sync=False)
    with (
        mock.patch.object(ReferenceExperts, "capabilities", beside),
        mock.patch.object(tuning, "CUT_FROM", 6),
        EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=7) as context,
    ):
        found = tuning.tune(context, CONFIG, (5, 7), dtype=torch.float32)
        static = {(one.tokens, one.pipeline) for one in found.measured if one.all2all == "flashinfer_nvlink"}
        assert static == {(5, None), (7, None), (7, 4), (7, 2)}
        assert {one.pipeline for one in found.measured if one.all2all == "torch_a2a"} == {None}
        sizes = {dispatch_shape.max_tokens for name, dispatch_shape in context._pool if name == "flashinfer_nvlink"}
        assert sizes == {7, 4, 2}
    with (
        mock.patch.object(tuning, "CUT_FROM", 6),
        EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=7) as context,
    ):
        found = tuning.tune(context, CONFIG, (7,), dtype=torch.float32)
        static = {one.pipeline for one in found.measured if one.all2all == "flashinfer_nvlink"}
        assert static == {None}, "nothing runs beside a kernel that the host waits for"
    with (
        mock.patch.object(tuning, "ROOM", 100),
        EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=7) as context,
    ):
        said: list[str] = []
        found = tuning.tune(context, CONFIG, (7,), dtype=torch.float32, say=said.append)
        assert "flashinfer_nvlink" not in {one.all2all for one in found.measured}
        assert any("7 tokens, flashinfer_nvlink with reference: left out, its buffers" in line for line in said)


@distributed(2, 4)
@pytest.mark.skipif(
    not torch.cuda.is_available() or bool(FlashInferNVLinkDispatcher.available()), reason="needs GPUs and FlashInfer"
)
def test_a_capture_keeps_its_transport(world_size):
    scheme, rank = SCHEMES["none"], dist.get_rank()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device(), max_tokens=64) as context:
        pairs = (
            bucket(8, "nvlink_p2p", "flashinfer_cutlass"),
            bucket(64, "flashinfer_nvlink", "flashinfer_cutlass", pipeline=32),
        )
        made = tuned(context, *pairs, config=WIDE, dtype=torch.bfloat16)
        layer = MoELayer(WIDE, context, tuned=made, dtype=torch.bfloat16)
        tensors = [random_expert(WIDE, scheme, expert, torch.bfloat16, context.device) for expert in range(10)]
        for expert in range(10):
            layer.update_expert(expert, **tensors[expert])
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(rank)).bfloat16().to(context.device)
        routing, graph = moved(integer_routing(8, WIDE, rank), context.device), torch.cuda.CUDAGraph()
        with torch.no_grad():
            with context.token_limit(8):
                layer.forward_routed(x, routing)
                torch.cuda.synchronize(context.device)
                stream = torch.cuda.Stream(context.device)
                with recorded(layer) as seen, torch.cuda.graph(graph, stream=stream):
                    y = layer.forward_routed(x, routing)
            assert seen == ["nvlink_p2p", "flashinfer_cutlass"]
            expected, limit = expected_and_limit(WIDE, scheme, tensors, x, routing.ids, routing.weights, torch.bfloat16)
            for _ in range(3):
                with recorded(layer) as seen:
                    other = layer.forward_routed(x, routing)
                assert [name for name in seen if name != "flashinfer_cutlass"] == ["flashinfer_nvlink"] * 2
                y.fill_(torch.nan)
                graph.replay()
                for found in (y, other):
                    assert max_error_ratio(found, expected, (1 + world_size) * limit) <= 1
