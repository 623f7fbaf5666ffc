"""`allgather` and `torch_a2a` with identity experts.

`check_dispatcher` checks the general contract of transports. These tests check what these two transports promise beyond
it: the order of received rows, how many rows travel, and the same error on all ranks for a bad call.
"""

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch

from ep_moe import EPContext
from ep_moe.all2all.base import Dispatcher
from ep_moe.errors import InputError
from ep_moe.testing import distributed, rank_device
from ep_moe.testing.transport_case import HIDDEN, SLOTS, dispatch_shape, expected, moved, routes, rows
from ep_moe.types import PhysicalIds, PhysicalRouting, Routing
from tests.fixtures.distributed_cases import no_payload, same_error
from tests.fixtures.helpers import assert_same
from tests.fixtures.identity_experts import dispatch_and_combine

TOP_K = 4
F32 = torch.float32
TRANSPORTS = ["allgather", "torch_a2a"]


def arrivals(counts: tuple[int, ...], ranks: int, mine: int, name: str) -> list[list[float]]:
    """Return the rows that rank `mine` must receive, in order."""
    found = []
    for rank in range(ranks):
        ids = routes(rank, counts[rank], ranks, TOP_K).ids
        here = ((ids // SLOTS == mine) & (ids >= 0)).any(1)
        wanted = here if name == "torch_a2a" else torch.ones_like(here)
        found += rows(rank, counts[rank], F32)[wanted].tolist()
    return found


@contextmanager
def poisoned():
    """Fill new memory with NaN within the block."""
    was = torch.utils.deterministic.fill_uninitialized_memory
    # called directly: torch.use_deterministic_algorithms imports inductor, which takes a second per rank
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = was


def for_each_transport(check: Callable[[Dispatcher, torch.device], None]) -> None:
    device = rank_device()
    with EPContext.from_groups(device=device, deadline_s=30) as context, poisoned():
        for name in TRANSPORTS:
            check(context._dispatcher(name, dispatch_shape(context.layout.world, TOP_K, F32)), device)


@distributed(2, 4, set_device=True)
def test_identity_experts_give_x_times_the_weights(world_size):
    for_each_transport(gives_x_times_the_weights)


def gives_x_times_the_weights(dispatcher: Dispatcher, device: torch.device) -> None:
    rank, ranks = dispatcher.rank_group.rank, dispatcher.rank_group.size
    for counts in ((7, 5, 1, 3), (0, 4, 0, 0), (0, 0, 0, 0), (1, 0, 9, 2)):
        x, routing = rows(rank, counts[rank], F32), routes(rank, counts[rank], ranks, TOP_K)
        y, received = dispatch_and_combine(dispatcher, x.to(device), moved(routing, device))
        assert_same(y, expected(x, routing), f"{dispatcher.name}, T={counts}")
        arrived = received.x.tolist()
        assert arrived == arrivals(counts, ranks, rank, dispatcher.name), f"{dispatcher.name}: {received.x[:, :3]}"


@distributed(2, 4, set_device=True)
def test_where_rows_go(world_size):
    for_each_transport(sends_rows_where_they_belong)


def sends_rows_where_they_belong(dispatcher: Dispatcher, device: torch.device) -> None:
    rank, ranks = dispatcher.rank_group.rank, dispatcher.rank_group.size
    first_id, x = (ranks - 1) * SLOTS, rows(rank, 4, F32)
    for local, what in (
        ([0, 1, 2, -1], "three experts of one rank: the row travels once"),
        ([-1, -1, 0, -1], "all tokens to one expert"),
        ([-1, -1, -1, -1], "no expert at all"),
    ):
        ids = torch.tensor([[i + first_id if i >= 0 else -1 for i in local]] * 4)
        weights = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 4)
        routing = PhysicalRouting(PhysicalIds(ids), weights)
        y, received = dispatch_and_combine(dispatcher, x.to(device), moved(routing, device))
        what = f"{dispatcher.name}, {what}"
        assert_same(y, expected(x, routing), what)
        here = 4 * ranks if rank == ranks - 1 and max(local) >= 0 else 0
        carried = (received.local_ids >= 0).any(1)
        assert int(carried.sum()) == here, what
        if dispatcher.name == "torch_a2a":
            assert len(received.x) == here, what
        assert received.local_ids[carried].tolist() == [local] * here, what
        mine = torch.tensor(local) >= 0
        assert_same(received.weights[carried].cpu()[:, mine], weights[:1, mine].expand(here, -1), what)


@distributed(2, 4, set_device=True)
def test_bad_calls_are_refused_on_all_ranks(world_size):
    for_each_transport(refuses_bad_calls)


def refuses_bad_calls(dispatcher: Dispatcher, device: torch.device) -> None:
    rank, ranks = dispatcher.rank_group.rank, dispatcher.rank_group.size
    x, good = rows(rank, 3, F32).to(device), moved(routes(rank, 3, ranks, TOP_K), device)
    ids, weights = good.ids, good.weights
    for call, sentence in (
        ((x, Routing(ids, weights)), "routing must be a PhysicalRouting (pass it through Placement)"),
        ((x[:, :4], good), f"x must be [T, {HIDDEN}], got [3, 4]"),
        ((x, good, x[:, :4]), "x_scale must be None with rows in plain, got (torch.float32, [3, 4])"),
        ((x.double(), good), "x must be float32, got float64"),
        ((x, PhysicalRouting(ids[:2], weights)), "routing.ids must be [T, K] = [3, 4], got [2, 4]"),
        ((x, PhysicalRouting(ids.float(), weights)), "routing.ids must be int32 or int64, got float32"),
        ((x, PhysicalRouting(ids, weights.double())), "routing.weights must be float32, got float64"),
        ((x, PhysicalRouting(ids.tolist(), weights)), "routing.ids must be a Tensor, got list"),
        ((x, PhysicalRouting(ids + ranks * SLOTS, weights)), None),
    ):
        arguments = call if rank == 1 else (x, good)
        with no_payload():
            text = same_error(InputError, lambda arguments=arguments: dispatcher.dispatch(*arguments))
        assert (f"rank 1: {sentence}" if sentence else "got ids out of range: ") in text, text
        assert sentence or text.endswith("on rank 1"), text
        y, _ = dispatch_and_combine(dispatcher, x, good)
        assert_same(y, expected(x.cpu(), moved(good, torch.device("cpu"))), f"after: {text}")


@distributed(2)
def test_an_exchange_has_one_width():
    """`RankGroup.agree` refuses more than R + 1 numbers.

    Ranks in different layers meet in this exchange, so all exchanges must have one size.
    """
    with EPContext.from_groups(device=rank_device(), deadline_s=20) as context:
        group = context.rank_groups["ep"]
        with context.flight_recorder.step("counts"):
            assert group.agree([1, 2, 3], None, context.device) == [[1, 2, 3]] * 2
        with context.flight_recorder.step("counts"), pytest.raises(ValueError, match=r"at most R \+ 1 = 3 .*, got 4"):
            group.agree([1, 2, 3, 4], None, context.device)


@distributed(2)
@pytest.mark.parametrize("all2all", TRANSPORTS)
def test_what_is_no_routing_is_said_on_both(all2all):
    with EPContext.from_groups(device=rank_device(), deadline_s=20) as context:
        dispatcher = context._dispatcher(all2all, dispatch_shape(2, TOP_K, F32))
        given = routes(0, 3, 2, TOP_K) if context.layout.rank else None
        text = same_error(InputError, lambda: dispatcher.dispatch(rows(0, 3, F32).to(rank_device()), given))
    assert "rank 0: routing must be a PhysicalRouting" in text
