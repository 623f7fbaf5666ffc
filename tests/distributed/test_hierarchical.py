"""`hierarchical` on ranks that stand for several nodes: results are right, and each (token, remote node) costs one
row."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_moe import Activation, EPContext, ExpertMap, MoEConfig, MoELayer, ParallelConfig, Tokens, Wire
from ep_moe.all2all.base import Dispatcher
from ep_moe.all2all.hierarchical import HierarchicalDispatcher
from ep_moe.all2all.hierarchical_static import HierarchicalNVLinkDispatcher, HierarchicalStaticDispatcher
from ep_moe.all2all.torch_collectives import TorchAll2AllDispatcher
from ep_moe.errors import BackendUnavailable
from ep_moe.quant.row_format import ROW_FORMATS
from ep_moe.testing import check_dispatcher, distributed, rank_device
from ep_moe.testing import transport_contract as contract
from ep_moe.testing.transport_case import (
    HIDDEN,
    NVFP4,
    SLOTS,
    dispatch_shape,
    expected,
    identity,
    moved,
    rounded,
    routes,
    rows,
    run,
)
from ep_moe.testing.transport_promises import one_token_too_many
from ep_moe.types import PhysicalRouting, Routing
from tests.emulations.trained_graph import recorded_kernel
from tests.fixtures.counted_links import counted_links
from tests.fixtures.distributed_cases import batch_of, batches, gather_from_all_ranks, same_error
from tests.fixtures.helpers import assert_same, fill, integer_routing, integer_rows, oracle
from tests.fixtures.helpers import moved as moved_routing
from tests.fixtures.p2p_on_cpu import p2p_on_cpu

BF16, F32 = torch.bfloat16, torch.float32
CONFIG = MoEConfig(
    hidden_size=16, intermediate_size=16, num_experts=10, top_k=3, activation=Activation.RELU2, expert_bias=True
)
COUNTS = ((7, 5, 1, 3, 0, 2, 9, 4), (0, 4, 0, 0, 0, 0, 0, 0), (0,) * 8, (9, 0, 2, 8, 1, 0, 6, 3))
TOP_K = 4


KINDS = pytest.mark.parametrize(
    "kind",
    [HierarchicalDispatcher, HierarchicalStaticDispatcher, HierarchicalNVLinkDispatcher],
    ids=lambda kind: kind.name,
)
FIXED = pytest.mark.parametrize(
    "kind", [HierarchicalStaticDispatcher, HierarchicalNVLinkDispatcher], ids=lambda kind: kind.name
)


ON_OTHER_NODES = (
    contract.uneven_and_empty_ranks,
    contract.rows_go_where_they_belong,
    contract.what_is_wrong_on_one_rank_is_raised_on_all,
    contract.gradients_flow,
    contract.two_in_flight,
    contract.random_delays,
    contract.bounds_that_change,
)
# its messages are bytes of any format: check rows with scales, and two values per byte
STATIC_WIRES = (Wire(dispatch="fp8_block"), NVFP4)


@distributed(4, deadline_s=120)
@KINDS
def test_contract_on_2_nodes_of_2(kind, world_size):
    with p2p_on_cpu():
        wires = STATIC_WIRES if kind is HierarchicalStaticDispatcher else None
        check_dispatcher(kind, top_ks=(1, 3), dtypes=(BF16,), wires=wires, ranks_per_node=2)


@distributed(8, deadline_s=240)
@KINDS
def test_contract_on_4_nodes_of_2(kind, world_size):
    with p2p_on_cpu():  # all wire formats are checked on 4 ranks
        check_dispatcher(kind, top_ks=(3,), dtypes=(BF16,), wires=[], ranks_per_node=2)


@distributed(8, deadline_s=240)
@KINDS
def test_rows_with_scales_on_2_nodes_of_4(kind, world_size):
    """The checks that depend on the numbers of nodes and of ranks per node pass on 2 nodes of 4."""
    with p2p_on_cpu(), EPContext.from_groups(device=rank_device(), ranks_per_node=4) as context:
        for wire in (Wire(), Wire(dispatch="fp8_block")):
            dispatcher = kind(dispatch_shape(world_size, 3, BF16, wire), context.rank_groups["ep"])
            for check in ON_OTHER_NODES:
                run(check, dispatcher, rank_device())
            dispatcher.destroy()


class GivesNumbers(HierarchicalStaticDispatcher):
    """Plant: a rank with too many tokens sends its peers numbers instead of NaN."""

    def _nans(self, received):
        return super()._nans(received).nan_to_num(0)


@distributed(4, deadline_s=120)
def test_numbers_of_a_call_that_does_not_fit_are_seen(world_size):
    """The contract finds this plant."""
    with pytest.raises(AssertionError, match="rows that miss a rank's experts must be NaN"):
        one_token_too_many(GivesNumbers, dispatch_shape(4, 3, BF16), rank_device(), 2)


# --- the layer ------------------------------------------------------------------------------------------------------


def maps(ranks: int) -> dict[str, ExpertMap]:
    last = [0] * (ranks - 1)
    return {
        "linear": ExpertMap.linear(10, ranks),
        "round_robin": ExpertMap.round_robin(10, ranks),
        "all on the last rank": ExpertMap.uneven([*last, 10]),
        "all on the first two ranks": ExpertMap.uneven([5, 5, *last[1:]]),
        "redundant": ExpertMap.redundant(10, ranks, 2 * ranks - 2),
    }


@functools.cache
def of_one_process(tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Return rows, ids, weights, output, and gradients of rows and weights, from one process on small integers."""
    x, routing = integer_rows(tokens, 16, seed), integer_routing(tokens, CONFIG, seed)
    given, weights = (t.clone().requires_grad_() for t in (x, routing.weights))
    one = fill(MoELayer(CONFIG, EPContext.local(torch.device("cpu"))))
    y = one.forward_routed(given, Routing(routing.ids, weights))
    y.sum().backward()
    return x, routing.ids, routing.weights, y.detach(), given.grad, weights.grad


def check_layer(
    context: EPContext, expert_map: ExpertMap | None, calls: Iterable[tuple[int, int]], what: object,
    name: str = "hierarchical",
) -> None:  # fmt: skip
    """Compare calls, given as (tokens, seed), and their backward with one process. All numbers are small integers."""
    layer = fill(MoELayer(CONFIG, context, expert_map=expert_map, all2all=name))
    for tokens, seed in calls:
        x, ids, weights, *wanted = of_one_process(tokens, seed)
        given, factors = (t.clone().to(context.device).requires_grad_() for t in (x, weights))
        y = layer.forward_routed(given, Routing(ids.to(context.device), factors))
        y.sum().backward()
        found = y, given.grad, factors.grad
        for part, one, other in zip(("y", "gradient of x", "gradient of weights"), found, wanted, strict=True):
            assert_same(one, other, f"{what}, {tokens} tokens of seed {seed}, {part}")


@distributed(4, 8, deadline_s=120)
@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_every_map_equals_one_process(ranks_per_node, world_size):
    rank = dist.get_rank()
    with EPContext.from_groups(device=rank_device(), ranks_per_node=ranks_per_node) as context:
        for name, expert_map in maps(world_size).items():
            check_layer(context, expert_map, [(counts[rank], rank) for counts in COUNTS], name)


@distributed(16, deadline_s=240)
def test_4_nodes_of_4(world_size):
    rank = dist.get_rank()
    with EPContext.from_groups(device=rank_device(), ranks_per_node=4) as context:
        assert (context.rank_groups["ep"].levels.rail.size, context.rank_groups["ep"].levels.node.size) == (4, 4)
        calls = [(counts[rank % 8], rank + 100 * seed) for seed, counts in enumerate(COUNTS)]
        check_layer(context, ExpertMap.redundant(10, 16, 22), calls, "redundant")


@distributed(4, deadline_s=120)
@pytest.mark.parametrize("tokens", list(Tokens), ids=lambda tokens: tokens.value)
def test_tp_and_etp(tokens, world_size):
    for sizes in ({"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, {"dp": 4, "ep": 2, "etp": 2}):
        parallel = ParallelConfig(**sizes, tokens=tokens)
        with EPContext.from_groups(parallel, device=rank_device(), ranks_per_node=2) as context:
            assert context.rank_groups["ep"].levels is not None
            layer = fill(MoELayer(CONFIG, context, all2all="hierarchical"))
            batch = batch_of(context.layout, dist.get_rank())
            assert batch < batches(context.layout)
            for total in (7, 1, 0):
                x, routing = integer_rows(total, 16, batch), integer_routing(total, CONFIG, batch)
                with torch.no_grad():
                    y = layer.forward_routed(x.to(context.device), moved_routing(routing, context.device))
                assert_same(y, oracle(CONFIG, x, routing), f"{sizes} T={total}")


def chosen(context: EPContext) -> str:
    return next(row.all2all for row in MoELayer(CONFIG, context).explain() if row.status == "chosen")


@distributed(4, deadline_s=120)
def test_ranks_that_are_dealt_out_over_hosts(world_size):
    """Ranks may alternate between hosts: 0 and 2 on one host, 1 and 3 on the other."""
    rank = dist.get_rank()
    os.environ["NCCL_HOSTID"] = ("even", "odd")[rank % 2]
    with EPContext.from_groups(device=rank_device()) as context:
        assert context.rank_groups["ep"].levels.node_major_ranks == (0, 2, 1, 3)
        for name, expert_map in maps(4).items():
            check_layer(context, expert_map, [(COUNTS[0][rank], rank)], name)
    with EPContext.from_groups(device=rank_device()) as context:
        assert chosen(context) == "hierarchical"


@distributed(4, deadline_s=120)
def test_calls_in_parts(world_size):
    """Parts of a pipelined call are in flight on both levels at once."""
    rank = dist.get_rank()
    with EPContext.from_groups(device=rank_device(), ranks_per_node=2, max_tokens=9) as context:
        layer = fill(MoELayer(CONFIG, context, all2all="hierarchical_static", pipeline=4))
        for tokens in (9, 2 * rank, 0):
            x, routing = integer_rows(tokens, 16, rank), integer_routing(tokens, CONFIG, rank)
            with torch.no_grad():
                y = layer.forward_routed(x.to(context.device), moved_routing(routing, context.device))
            assert_same(y, oracle(CONFIG, x, routing), f"T={tokens}")


@distributed(4)
def test_uneven_nodes_are_refused_on_all_ranks(world_size):
    with EPContext.from_groups(device=rank_device(), ranks_per_node=3, max_tokens=8) as context:
        for kind in ("hierarchical", "hierarchical_static"):
            said = same_error(BackendUnavailable, partial(MoELayer, CONFIG, context, all2all=kind))
            assert f"{kind} needs the same number of ranks of an EP group on each node, and the EP group has" in said
            assert "different numbers of ranks on its nodes: node 0 (ranks 0, 1, 2), node 1 (rank 3)" in said
        assert chosen(context) == "torch_a2a"


@distributed(4, deadline_s=120)
@pytest.mark.parametrize(
    ("name", "to_peers"),
    [("hierarchical_static", False), ("hierarchical_nvlink", False), ("hierarchical_nvlink", True)],
)
@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_the_layer_with_fixed_room(hosts, name, to_peers, world_size):
    """Layers over hierarchical transports with fixed buffers equal one process.

    With `to_peers`, trained experts write their results to the peers' memory themselves.
    """
    rank = dist.get_rank()
    os.environ["NCCL_HOSTID"] = hosts[rank]
    kernel = recorded_kernel() if to_peers else nullcontext()
    with kernel, p2p_on_cpu(), EPContext.from_groups(device=rank_device(), max_tokens=9) as context:
        for what, expert_map in maps(4).items():
            check_layer(context, expert_map, [(counts[rank], rank) for counts in COUNTS], what, name)


@distributed(4, deadline_s=120)
@FIXED
def test_fixed_room_waits_for_nobody_and_tells_of_ids_of_no_expert(kind, world_size):
    """With fixed buffers, a dispatch needs no host exchange, receives the rows of the token limit, and marks bad ids by
    NaN.

    An error cannot be raised in time, as the host does not read the ids.
    """
    ranks, rank, device, bound = 4, dist.get_rank(), rank_device(), 11
    with p2p_on_cpu(), EPContext.from_groups(device=device, ranks_per_node=2) as context:
        dispatcher = kind(dispatch_shape(ranks, TOP_K, BF16), context.rank_groups["ep"])
        x, routing = rows(rank, 5 + rank, BF16), routes(rank, 5 + rank, ranks, TOP_K)
        wanted = expected(x, routing)
        received = dispatcher.dispatch(x.to(device), moved(routing, device), max_tokens=bound)  # allocates
        dispatcher.combine(identity(received, BF16), received.handle)
        routing.ids[1, 2], routing.ids[4, 0] = ranks * SLOTS, -2
        wanted[[1, 4]] = torch.nan
        with mock.patch.object(type(context.rank_groups["ep"]), "exchange", side_effect=AssertionError("it waits")):
            received = dispatcher.dispatch(x.to(device), moved(routing, device), max_tokens=bound)
            y = dispatcher.combine(identity(received, BF16), received.handle)
        assert len(received.x) == bound * ranks
        torch.testing.assert_close(y.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


# --- traffic between nodes --------------------------------------------------------------------------------------------


def sparse_routes(rank: int, tokens: int, ranks: int) -> PhysicalRouting:
    """Return routes of which the first token has no expert."""
    routing = routes(rank, tokens, ranks, TOP_K)
    routing.ids[:1] = -1
    return routing


def pairs(ranks: int, per_node: int, counts: tuple[int, ...]) -> int:
    """Return the number of (token, remote node) pairs of all ranks."""
    total = 0
    for rank in range(ranks):
        ids = sparse_routes(rank, counts[rank % len(counts)], ranks).ids
        nodes = torch.where(ids >= 0, ids // SLOTS // per_node, -1)
        total += sum(len(set(row) - {-1, rank // per_node}) for row in nodes.tolist())
    return total


def check_bytes(kind: type[Dispatcher], per_node: int, wire: Wire) -> None:
    """Check that each pair costs one row each way, plus ids and weights, in forward and backward."""
    ranks, rank, device = dist.get_world_size(), dist.get_rank(), rank_device()
    with EPContext.from_groups(device=device, ranks_per_node=per_node) as context:
        shape = dispatch_shape(ranks, TOP_K, BF16, wire)
        dispatcher = kind(shape, context.rank_groups["ep"])
        plain = wire == Wire()
        for counts in COUNTS:
            tokens = counts[rank % len(counts)]
            x = rows(rank, tokens, BF16, wire).to(device).requires_grad_(plain)
            routing = moved(sparse_routes(rank, tokens, ranks), device)
            weights = routing.weights.requires_grad_(plain)
            with counted_links(context) as links:
                data, scale = rounded(x, shape)
                received = dispatcher.dispatch(data, PhysicalRouting(routing.ids, weights), scale)
                y = dispatcher.combine(identity(received, BF16), received.handle)
                forward = sum(gather_from_all_ranks(links.far_sent))
                links.clear()
                if plain:
                    y.backward(torch.ones_like(y))
            backward = sum(gather_from_all_ranks(links.far_sent))
            form = ROW_FORMATS[wire.dispatch]
            there = shape.row_bytes + form.scales(HIDDEN) * form.scale.itemsize + 2 * TOP_K * 4
            number = pairs(ranks, per_node, counts)
            wanted = number * (there + HIDDEN * 2)
            assert forward == wanted, f"{forward} bytes forward, not {wanted} for {number} rows, tokens {counts}"
            assert backward == (forward if plain else 0), f"{backward} bytes backward, {forward} forward"


@distributed(4, deadline_s=120)
@pytest.mark.parametrize("wire", [Wire(), Wire(dispatch="fp8_block"), Wire(dispatch="mxfp8")], ids=lambda w: w.dispatch)
def test_a_row_crosses_once_per_remote_node(wire, world_size):
    check_bytes(HierarchicalDispatcher, 2, wire)


@distributed(8, deadline_s=120)
@pytest.mark.parametrize("per_node", [2, 4])
def test_a_row_crosses_once_per_remote_node_of_8_ranks(per_node, world_size):
    check_bytes(HierarchicalDispatcher, per_node, Wire())


@distributed(16, deadline_s=240)
def test_a_row_crosses_once_per_remote_node_of_4_by_4(world_size):
    check_bytes(HierarchicalDispatcher, 4, Wire())


@distributed(4)
def test_a_row_per_rank_is_seen(world_size):
    with pytest.raises(AssertionError, match="bytes forward, not"):
        check_bytes(TorchAll2AllDispatcher, 2, Wire())


class PaddingTravels(HierarchicalDispatcher):
    """Plant: send tokens without an expert to the first node."""

    def _node_major(self, ids):
        found = super()._node_major(ids)
        return found.where((found >= 0).any(1, keepdim=True), 0)


@distributed(4)
def test_rows_of_no_expert_are_seen(world_size):
    with pytest.raises(AssertionError, match="bytes forward, not"):
        check_bytes(PaddingTravels, 2, Wire())


@distributed(4)
def test_the_host_waits_once(world_size):
    """A dispatch makes one host exchange, of R + 1 numbers for both levels."""
    with EPContext.from_groups(device=rank_device(), ranks_per_node=2) as context:
        dispatcher = HierarchicalDispatcher(dispatch_shape(4, TOP_K, BF16), context.rank_groups["ep"])
        rank = dist.get_rank()
        x, routing = rows(rank, 5, BF16).to(context.device), moved(routes(rank, 5, 4, TOP_K), context.device)
        exchanged = []

        def counted(group, values):
            exchanged.append(len(values))
            return exchange(group, values)

        kind = type(context.rank_groups["ep"])
        exchange = kind.exchange
        with mock.patch.object(kind, "exchange", counted):
            received = dispatcher.dispatch(x, routing)
            dispatcher.combine(identity(received, BF16), received.handle)
        assert len(exchanged) == 1


# --- the order of sums ----------------------------------------------------------------------------------------------


def check_order(kind: type[Dispatcher], dtype: torch.dtype) -> None:
    """Check the order of summation: float32 over a node's ranks, rounded for the rail, then over nodes, rounded."""
    ranks, rank, device = dist.get_world_size(), dist.get_rank(), rank_device()
    with p2p_on_cpu(), EPContext.from_groups(device=device, ranks_per_node=2) as context:
        dispatcher = kind(dispatch_shape(ranks, 8, dtype), context.rank_groups["ep"])
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(20, HIDDEN, generator=generator).to(dtype)
        ids = routes(rank, 20, ranks, 8).ids
        weights = torch.randn(ids.shape, generator=generator)
        received = dispatcher.dispatch(x.to(device), moved(PhysicalRouting(ids, weights), device))
        y = dispatcher.combine(identity(received, dtype), received.handle)
        owner = torch.where(ids >= 0, ids // SLOTS, -1)
        nodes = []
        for node in range(ranks // 2):
            parts = []
            for owned in (2 * node, 2 * node + 1):
                mine = owner == owned
                part = x * weights.masked_fill(~mine, 0).sum(1, keepdim=True).to(dtype)
                parts.append(part.where(mine.any(1, keepdim=True), 0).float())
            nodes.append((parts[0] + parts[1]).to(dtype).float())
        wanted = nodes[0]
        for part in nodes[1:]:
            wanted = wanted + part
        assert_same(y, wanted.to(dtype), "sums in the order of nodes")


@distributed(8, deadline_s=120)
@KINDS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sums_have_one_order(dtype, kind, world_size):
    check_order(kind, dtype)


class LastNodeFirst(HierarchicalDispatcher):
    def _combine(self, y, handle, out):
        rail = dataclasses.replace(handle.rail, slots=handle.rail.slots.flip(1))
        return super()._combine(y, dataclasses.replace(handle, rail=rail), out)


@distributed(8, deadline_s=120)
def test_another_order_is_seen(world_size):
    with pytest.raises(AssertionError, match=r"sums in the order of nodes: .*not equal"):
        check_order(LastNodeFirst, F32)
