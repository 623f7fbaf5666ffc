"""`nvlink_p2p` without `max_tokens`: buffers grow with the calls, on all ranks together."""

import contextlib
import dataclasses
import logging
import re
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, ExpertBalancer, ExpertMap, MoELayer, ParallelConfig, Tokens
from ep_moe.all2all import base
from ep_moe.all2all.nvlink_p2p import buffers
from ep_moe.all2all.nvlink_p2p import dispatcher as nvlink_p2p
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.bench.harness import host
from ep_moe.errors import BackendUnavailable, InputError, PeerTimeout
from ep_moe.parallel.rank_group import barrier
from ep_moe.placement.deferred import NO_ID
from ep_moe.testing import distributed, rank_device
from ep_moe.testing.transport_case import (
    dispatch_shape,
    expected,
    hold_back,
    identity,
    moved,
    routes,
    rows,
    same,
    wait_for_input_error,
)
from ep_moe.types import Routing
from tests.fixtures import p2p_bodies
from tests.fixtures.captured_layer import WIDE, built, on_gpus
from tests.fixtures.captured_layer import routes as wide_routes
from tests.fixtures.captured_layer import rows as wide_rows
from tests.fixtures.distributed_cases import check_call, gather_from_all_ranks, run_eager, same_error
from tests.fixtures.eplb_cases import drive, make_layers, on_request, random_map
from tests.fixtures.helpers import assert_same, fill, integer_routing, integer_rows
from tests.fixtures.layer_static import CONFIG
from tests.fixtures.p2p_bodies import LEAST, growing, rooms
from tests.fixtures.p2p_on_cpu import p2p_on_cpu

LAYOUTS = {
    "dp 4": {"dp": 4},
    "dp 4 ep 2": {"dp": 4, "ep": 2},
    "dp 2 tp 2": {"dp": 2, "tp": 2},
    "dp 2 tp 2 etp 2": {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
    "sharded": {"dp": 2, "tp": 2, "tokens": Tokens.SHARDED},
}
on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="over memory that ranks of a CPU share")


def made(context, **options) -> MoELayer:
    layer = fill(MoELayer(CONFIG, context, experts="reference", **options))
    assert layer.choice.all2all == "nvlink_p2p", "by itself"
    return layer


@distributed(2, 4)
@pytest.mark.parametrize("low_latency_bytes", [0, 256], ids=["by flags", "by packets"])
def test_all_ranks_grow_together(low_latency_bytes, world_size):
    """Buffers grow to the power of two that holds the most tokens of any rank, and never shrink."""
    rank = dist.get_rank()
    with growing(low_latency_bytes=low_latency_bytes) as context:
        layer, second = made(context), made(context)
        assert context.plan()["transport"] == 0
        most = LEAST
        for step, tokens in enumerate((0, 1, 3, 9, 2, 33, 0, 32, 64, 5, 65)):
            here = tokens if rank == step % world_size else (0, tokens // 3)[rank % 2]
            check_call((layer, second)[step % 2], context, tokens=here, what=f"{tokens} tokens")
            most = max(most, 1 << max(tokens - 1, 0).bit_length())
            assert rooms(layer) == rooms(second) == [most]
            assert layer._dispatcher().newest_bound == 1 << max(tokens - 1, 0).bit_length()
            sized = layer._dispatcher().buffer_pool.buffer_slots[0].workspace.dispatch_shape
            assert sized.max_tokens == most
            held = NVLinkP2PDispatcher.buffer_bytes(sized)
            assert layer.plan()["transport"] == context.plan()["transport"] == held > 0, "two layers share one"


@on_the_cpu
@distributed(4)
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_every_layout_equals_one_process(sizes, world_size):
    with growing(**LAYOUTS[sizes]) as context:
        for make in (ExpertMap.linear, lambda experts, ranks: ExpertMap.redundant(experts, ranks, 2 * ranks)):
            layer = made(context, expert_map=make(6, context.layout.ep))
            for tokens in (3, 0, 9, 30, 2):
                check_call(layer, context, tokens=tokens, what=f"{sizes}, T={tokens}")


@distributed(2)
def test_it_is_said_once_and_explained(world_size):
    with growing() as context:
        heard = []
        handler = logging.Handler()
        handler.emit = lambda record: heard.append(record.getMessage())
        logging.getLogger("ep_moe").addHandler(handler)
        layers = [made(context), fill(MoELayer(CONFIG, context, experts="reference", dtype=torch.float16))]
        (chosen,) = (row.reason for row in layers[0].explain() if row.status == "chosen")
        assert "its buffers grow with the calls, and max_tokens makes them once, for CUDA graphs" in chosen
        for tokens in (2, 9, 40, 90):
            for layer in layers:
                layer(torch.zeros(tokens, 16, dtype=layer.dtype, device=context.device))
        said = gather_from_all_ranks([text for text in heard if "has allocated buffers" in text])
        assert [len(lines) for lines in said] == [1, 0], "once, on one rank"
        assert re.search(r"nvlink_p2p has allocated buffers for 16 tokens per rank \([\d.]+ MiB\)", said[0][0])
        assert "EPContext.from_torchrun(max_tokens=...)" in said[0][0]
        (chosen,) = (row.reason for row in layers[0].explain() if row.status == "chosen")
        assert chosen.endswith(f"they hold {layers[0].plan()['transport'] / 2**20:.1f} MiB now")


@distributed(2)
def test_one_rank_refuses_where_others_would_grow(world_size):
    """A bad call on one rank raises on all before a row travels; no buffer has grown, and the context goes on."""
    rank = dist.get_rank()
    with growing() as context:
        layer = made(context)
        check_call(layer, context, tokens=2)
        for bad, sentence in (
            (lambda x: x[:, :15], "rank 1: x must be [..., 16] (hidden_size), got [40, 15]"),
            (lambda x: x.double(), "rank 1: x must be float32 as the layer is, got float64"),
        ):
            x = integer_rows(40, 16, rank).to(context.device)
            x = bad(x) if rank else x
            assert sentence in same_error(InputError, lambda: layer(x))  # noqa: B023
            assert rooms(layer) == [LEAST]
        check_call(layer, context, tokens=40 * rank, what="after")
        assert rooms(layer) == [64]
        if rank:
            layer.to(torch.bfloat16)
        x = torch.zeros(3, 16, dtype=layer.dtype, device=context.device)
        text = same_error(InputError, lambda: layer(x))
        assert "has dtype=float32 on rank 0, and dtype=bfloat16 on rank 1" in text
        if rank:
            layer.to(torch.float32)
            fill(layer)
        check_call(layer, context, tokens=100, what="converted back")


@distributed(2)
@torch.no_grad()
def test_ids_that_name_no_expert_raise_in_a_later_call(world_size):
    """Ids out of range on one rank raise in a later call on all ranks, by packets, by flags and in replays."""
    rank, gpu = dist.get_rank(), torch.cuda.is_available()
    with growing(low_latency_bytes=1 << 16) as context:
        layer = built(context) if gpu else fill(MoELayer(WIDE, context, experts="reference", dtype=torch.bfloat16))
        experts = layer.config.num_experts
        layer.forward_routed(wide_rows(layer, 1, 0), wide_routes(layer, 1, 0))  # the first call checks ids at once
        for step, tokens in enumerate((2, 2, 100, 100)):
            x, routing = wide_rows(layer, tokens, rank), wide_routes(layer, tokens, rank)
            for _ in range(4 * (step % 2)):  # often enough to be recorded
                layer.forward_routed(x, routing)
            if gpu:
                ids = routing.ids.clone()
                ids[-1, 0] = experts + 300 if rank else -1
                y = layer.forward_routed(x, Routing(ids, routing.weights))
                ids[-1, 0] = -1
                assert torch.equal(y, run_eager(layer, x, Routing(ids, routing.weights)))
                torch.cuda.synchronize(layer.device)
            else:
                layer.placement.invalid_ids.word.value = experts + 300 if rank else NO_ID  # as GPU kernels write it
            barrier(layer.device)
            text = same_error(InputError, lambda: layer.forward_routed(x, routing))  # noqa: B023
            wanted = f"rank 1: routing.ids must be -1 or in [0, {experts}), got {experts + 300} in an earlier call of "
            assert text.startswith(wanted + layer.name), text
            assert torch.equal(layer.forward_routed(x, routing), run_eager(layer, x, routing)), "it raises once"


@distributed(2)
def test_ids_of_the_last_call_warn_as_a_context_ends(world_size):
    warned = (
        pytest.warns(UserWarning, match="got 9 in an earlier call") if dist.get_rank() else contextlib.nullcontext()
    )
    with warned, growing() as context:
        layer = made(context)
        check_call(layer, context, tokens=2)
        layer.placement.invalid_ids.word.value = 9 if dist.get_rank() else NO_ID


@distributed(2)
def test_a_users_router_that_errs_where_others_would_grow(world_size):
    rank = dist.get_rank()
    with growing() as context:
        wrong = [True]

        def router(x):
            ids = torch.arange(3, device=x.device).expand(len(x), 3)
            weights = torch.ones(len(x), 3, device=x.device)
            return Routing(ids, weights.double() if rank and wrong[0] else weights)

        layer = made(context, router=router)
        x = integer_rows(20, 16, rank).to(context.device)
        text = same_error(InputError, lambda: layer(x))
        assert "rank 1: routing.weights must be float32, got float64" in text
        assert layer._dispatcher().buffer_pool.buffer_slots == []
        wrong[0] = False
        layer(x)
        assert rooms(layer) == [32]


@distributed(2, set_device=True)
def test_a_refusal_after_the_ranks_agreed(world_size):
    """A rank that refuses after the token limit was agreed still grows its buffers, and sends NaN to its peers.

    The peers have sent their rows by then.
    """
    rank, device = dist.get_rank(), rank_device()
    with growing(deadline_s=8) as context:
        shape = dispatch_shape(2, 3, torch.float32)
        made = nvlink_p2p.NVLinkP2PDispatcher(_without_bound(shape), context.rank_groups["ep"])
        x, routing = rows(rank, 20, torch.float32).to(device), moved(routes(rank, 20, 2, 3), device)
        if rank:
            with pytest.raises(InputError, match="rank 1: planted"):
                made.dispatch_start(x[:0], routing, "planted", max_tokens=32)
        else:
            received = made.dispatch(x, routing, max_tokens=32)
            y = made.combine(identity(received, x.dtype), received.handle)
            touched = (routing.ids >= 4).any(1)
            assert y[touched].isnan().all()
            assert not y[~touched].isnan().any()
        assert [slot.workspace.room for slot in made.buffer_pool.buffer_slots] == [32]
        barrier(device)
        assert "rank 1: planted" in wait_for_input_error(2, context.flight_recorder.check)
        barrier(device)
        made.destroy()


def _without_bound(shape):
    return dataclasses.replace(shape, max_tokens=None)


@distributed(2, 4, set_device=True)
def test_calls_in_flight_keep_their_buffers(world_size):
    """A larger call beside one in flight gets other buffers; the first ones grow when a later call needs it."""
    rank, device = dist.get_rank(), rank_device()
    with growing() as context:
        shape = _without_bound(dispatch_shape(world_size, 3, torch.float32))
        made = nvlink_p2p.NVLinkP2PDispatcher(shape, context.rank_groups["ep"])

        def sent(tokens, seed):
            x, routing = rows(seed + rank, tokens, torch.float32), routes(seed + rank, tokens, world_size, 3)
            received = made.dispatch(x.to(device), moved(routing, device))
            return received, expected(x, routing)

        def answered(call, what):
            received, wanted = call
            same(made.combine(identity(received, torch.float32), received.handle), wanted, what)

        def held():
            return [slot.workspace.room for slot in made.buffer_pool.buffer_slots]

        first, second = sent(2 + rank % 2, 0), sent(17, 10)
        assert held() == [4, 32]
        third = sent(3, 20)
        assert held() == [4, 32, 32]
        answered(second, "second")
        answered(first, "first")
        before = made.buffer_pool.buffer_slots[0]
        fourth = sent(9, 30)
        assert held() == [32, 32, 32]
        assert before.is_freed
        answered(third, "third")
        answered(fourth, "fourth")
        assert made.held_bytes() == 3 * made.buffer_bytes(made.buffer_pool.buffer_slots[0].workspace.dispatch_shape)
        barrier(device)
        made.destroy()
        assert made.held_bytes() == 0


@on_the_cpu
@distributed(2)
def test_gradients(world_size):
    """Backward uses the token limit of its forward, also if later calls have grown the buffers."""
    rank = dist.get_rank()
    with growing() as context:
        layers = [made(context), fill(MoELayer(CONFIG, context, all2all="torch_a2a", experts="reference"))]
        found = []
        for layer in layers:
            outs, given = [], []
            for step, tokens in enumerate((3 + rank, 40 * rank, 0, 130)):
                x = integer_rows(tokens, 16, 10 * step + rank).requires_grad_()
                routing = integer_routing(tokens, CONFIG, 10 * step + rank)
                weights = routing.weights.requires_grad_()
                outs.append(layer.forward_routed(x, Routing(routing.ids, weights)))
                given += [x, weights]
            sum((step + 1) * y.sum() for step, y in enumerate(outs)).backward()
            found.append(
                [*outs, *(tensor.grad for tensor in given), *(p.grad for p in layer.expert_weights.parameters())]
            )
        for at, (ours, theirs) in enumerate(zip(*found, strict=True)):
            assert_same(ours, theirs, at)
        x = integer_rows(3, 16, rank).requires_grad_(rank == 0)
        layers[0].expert_weights.requires_grad_(False)
        assert "x requires a gradient on rank 0 and not on rank 1" in same_error(InputError, lambda: layers[0](x))


@on_the_cpu
@distributed(2, 4)
def test_experts_move_beside_it(world_size):
    """EPLB migrates experts between calls that grow the buffers."""
    with growing() as context:
        layers = make_layers(context, 2, experts="reference")
        assert layers[0].choice.all2all == "nvlink_p2p"
        slots_per_rank = layers[0].placement.expert_map.slots_per_rank
        with ExpertBalancer(layers, context, on_request(bytes_per_step=900)) as balancer:
            for turn, tokens in enumerate((2, 9, 40)):
                balancer.move_to([random_map(world_size, slots_per_rank, 10 * turn + at) for at in range(2)])
                check_call(layers[0], context, tokens=tokens)
                drive(balancer, layers, context)
                check_call(layers[1], context, tokens=tokens + 30)


@distributed(2)
def test_layers_in_another_order(world_size):
    with growing() as context:
        layers = [made(context) for _ in range(2)]
        x = torch.zeros(9, 16, device=context.device)
        text = same_error(InputError, lambda: layers[dist.get_rank()](x))
        assert "the ranks are not in the same layer: rank 0 is in 'moe0', rank 1 in 'moe1'" in text
        check_call(layers[0], context)


@distributed(2)
def test_a_peer_that_makes_fewer_calls(world_size):
    """A peer that makes fewer calls is named at the deadline, also if the call would grow the buffers."""
    with p2p_on_cpu():
        context = EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=3)
        layer = made(context)
        check_call(layer, context, tokens=2)
        if dist.get_rank() == 0:
            with pytest.raises(PeerTimeout, match="Rank 1 is alive but behind"):
                layer(torch.zeros(1000, 16, device=context.device))
        hold_back(context.rank_groups["ep"], 1, 6)
        context.flight_recorder.close()


@distributed(2)
def test_no_memory_on_one_rank(world_size):
    """If one rank cannot allocate, all ranks raise, keep their buffers, and go on with calls that fit."""
    rank = dist.get_rank()
    with growing() as context:
        layer = made(context)
        check_call(layer, context, tokens=2)
        symmetric = mock.Mock()
        symmetric.empty.side_effect = RuntimeError("out of memory") if rank else lambda size, **how: torch.empty(1)
        symmetric.rendezvous.side_effect = AssertionError("a rank that has none does not come here")
        x = torch.zeros(900, 16, device=context.device)
        with (
            mock.patch.object(nvlink_p2p, "make_memory", buffers.PeerMemory),
            mock.patch.dict("sys.modules", {"torch.distributed._symmetric_memory": symmetric}),
            mock.patch.object(torch.distributed, "_symmetric_memory", symmetric, create=True),
        ):
            text = same_error(BackendUnavailable, lambda: layer(x))
        assert "could not allocate buffers for 1024 tokens per rank, rank 1: " in text
        assert "out of memory; pass fewer tokens in a call" in text
        check_call(layer, context, tokens=3, what="after")
        assert rooms(layer) == [LEAST]
        check_call(layer, context, tokens=30, what="after")
        assert rooms(layer) == [32]


@on_the_cpu
@distributed(2)
def test_captures_name_max_tokens(world_size):
    with growing() as context:
        layer = made(context)
        check_call(layer, context, tokens=2)
        with mock.patch.object(base, "capturing", return_value=True):
            text = same_error(InputError, lambda: layer(torch.zeros(2, 16)))
        assert "a captured call has one size; set the token limit with EPContext.from_torchrun(max_tokens" in text
        check_call(layer, context, tokens=2, what="after")


# --- on GPUs --------------------------------------------------------------------------------------------------------


@on_gpus
@distributed(2, 4)
@pytest.mark.parametrize("pair", ["bf16", "fp8", "answers given"])
@pytest.mark.parametrize("low_latency_bytes", [0, 1 << 18], ids=["by flags", "by packets"])
def test_replays_beside_calls_that_run_and_that_grow(low_latency_bytes, pair, world_size):
    p2p_bodies.replays_beside_calls_that_run_and_that_grow(low_latency_bytes, pair, world_size)


@on_gpus
@distributed(1, 2, 4, set_device=True)  # the timer uses the current device
@torch.no_grad()
def test_the_host_of_a_default_call(world_size):
    """An eager call of one token takes at most 1.5 times the host time of a call over fixed buffers."""
    config = ParallelConfig(dp=world_size)
    with (
        EPContext.from_groups(config, device=rank_device()) as growing,
        EPContext.from_groups(config, device=rank_device(), max_tokens=8) as fixed,
    ):
        calls = []
        for layer in (MoELayer(WIDE, context, dtype=torch.bfloat16) for context in (growing, fixed)):
            assert layer.choice.all2all == ("nvlink_p2p" if world_size > 1 else "local")
            x, routing = wide_rows(layer, 1, 0), wide_routes(layer, 1, 0)
            calls += [partial(layer.forward_routed, x, routing), partial(layer, x)]
        turns = []
        for _ in range(3):  # measure in turns and drop the first, as the first measurement in a process is slow
            times = [gather_from_all_ranks(round(host(call, before=lambda: barrier(rank_device())))) for call in calls]
            turns.append([max(ranks) for ranks in times])
    found = [min(times) for times in zip(*turns[1:], strict=True)]
    if dist.get_rank() == 0:
        print(f"host, us, with a routing and with the layer's router; of fixed buffers: {found}")  # noqa: T201
    assert found[0] <= 1.5 * found[2], turns
    assert found[1] <= 1.5 * found[3], turns


def outside_of_torch(device: torch.device) -> int:
    """Return the bytes in use on a GPU outside torch's allocator, less a constant.

    torch's allocator holds the workspaces, which are not counted.
    """
    torch.cuda.synchronize(device)
    return -torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)


@on_gpus
@distributed(2, 4)
@torch.no_grad()
def test_smaller_buffers_are_freed(world_size):
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device()) as context:
        layer = built(context)
        layer.forward_routed(wide_rows(layer, 1, 0), wide_routes(layer, 1, 0))
        before = outside_of_torch(layer.device)
        for tokens in (1 << 14, 1 << 15, 1 << 16):
            call = torch.zeros(tokens, 256, dtype=torch.bfloat16, device=layer.device), wide_routes(layer, tokens, 0)
            layer.forward_routed(*call)
        del call
        held = layer.plan()["transport"]
        taken = outside_of_torch(layer.device) - before
        assert held < taken + (64 << 20), "it is counted"
        assert taken < 1.3 * held + (64 << 20), (taken, held)


@on_gpus
@distributed(2)
@torch.no_grad()
def test_a_capture_around_a_layer_names_max_tokens(world_size):
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
        layer = built(context)
        x, routing = wide_rows(layer, 4, 0), wide_routes(layer, 4, 0)
        y = [layer.forward_routed(x, routing) for _ in range(3)][-1]
        stream = torch.cuda.Stream(layer.device)
        with (
            pytest.raises(InputError, match=r"a captured call has one size; .*\(max_tokens=\.\.\.\)"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
        ):
            layer.forward_routed(x, routing)
        torch.cuda.synchronize(layer.device)
        assert torch.equal(layer.forward_routed(x, routing), y)
