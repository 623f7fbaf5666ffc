"""The contract of a transport: checks for any class.

    @distributed(2, 4)
    def test_my_transport(world_size):
        check_dispatcher(MyDispatcher)

Most checks use rows of small integers. Their sums are exact in every dtype and order, so results are compared bitwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe.all2all.base import DispatcherCapabilities, DispatchShape
from ep_moe.config import Wire
from ep_moe.context import EPContext
from ep_moe.experts.layouts import as_rank_major, with_local_ids
from ep_moe.parallel.rank_group import RankGroup, barrier
from ep_moe.runtime.devices import on_device_of
from ep_moe.testing.distributed import made_on_the_host, rank_device
from ep_moe.testing.transport_case import (
    COUNTS,
    FP8_TENSOR,
    HIDDEN,
    MAX_TOKENS,
    NVFP4,
    SLOTS,
    Case,
    DispatcherFactory,
    call_and_share_errors,
    dispatch_shape,
    moved,
    rounded,
    routes,
    rows,
    run,
)
from ep_moe.testing.transport_promises import (
    a_peer_that_comes_too_late,
    a_peer_that_never_comes,
    captured_and_replayed,
    equal_calls_give_equal_bits,
    gradients_are_wanted_alike,
    gradients_flow,
    one_token_too_many,
    single_rows_keep_their_order_and_bits,
    what_is_wrong_on_one_rank_is_raised_on_all,
)
from ep_moe.types import PeerRows, PhysicalIds, PhysicalRouting, Received, RowLayout


@made_on_the_host
@on_device_of(lambda *_, **__: rank_device())
def check_dispatcher(
    factory: DispatcherFactory,
    *,
    top_ks: Sequence[int] = (1, 2, 3, 4, 8),
    dtypes: Sequence[torch.dtype] | None = None,
    wires: Sequence[Wire] | None = None,
    deadline_s: float = 60.0,
    ranks_per_node: int | None = None,
) -> None:
    """Check a transport against its contract, on the ranks of the default process group as one EP group.

    Args:
        factory: The class, or a collective function (dispatch_shape, rank_group) -> dispatcher.
        top_ks: Values of K. All but the last are checked with the first dtype only.
        dtypes: Dtypes of rows, checked with the last of `top_ks`. Default: those of the capabilities.
        wires: Wire formats, checked with the first dtype. Default: each format of the capabilities except plain.
        deadline_s: Seconds for a collective step.
        ranks_per_node: As `EPContext.from_groups` takes it: number of consecutive ranks that count as one node.

    Raises:
        AssertionError: On all ranks. It names the check, the dtype and the top-k.
    """
    device = rank_device()
    with EPContext.from_groups(device=device, deadline_s=deadline_s, ranks_per_node=ranks_per_node) as context:
        can, grows = _promised(factory, context)
        can.check()
        dtypes = dtypes or sorted(can.dtypes or {torch.bfloat16, torch.float16, torch.float32}, key=str)
        for top_k in top_ks:
            for dtype in dtypes if top_k == top_ks[-1] else dtypes[:1]:
                shape = dispatch_shape(context.layout.ep, top_k, dtype)
                _check_shape(factory, shape, context.rank_groups["ep"], device)
        for wire in _wires(can) if wires is None else wires:
            _check_shape(
                factory,
                dispatch_shape(context.layout.ep, top_ks[-1], dtypes[0], wire),
                context.rank_groups["ep"],
                device,
            )
        if can.per_route:
            shape = replace(dispatch_shape(context.layout.ep, top_ks[-1], dtypes[0]), per_route=True)
            _check_shape(factory, shape, context.rank_groups["ep"], device)
    last = dispatch_shape(dist.get_world_size(), top_ks[-1], dtypes[0])
    if (can.host_sync or grows) and dist.get_world_size() > 1:
        a_peer_that_never_comes(factory, last, device, ranks_per_node)
    elif device.type == "cuda" and dist.get_world_size() > 1:
        a_peer_that_comes_too_late(factory, last, device, ranks_per_node)
    if can.static and not grows:
        one_token_too_many(factory, last, device, ranks_per_node)


def _promised(factory: DispatcherFactory, context: EPContext) -> tuple[DispatcherCapabilities, bool]:
    """Return the capabilities of the factory's transports, and whether their buffers grow."""
    rank_group = context.rank_groups["ep"]
    probe = call_and_share_errors(
        "made", rank_group, lambda: factory(dispatch_shape(context.layout.ep, 2, torch.bfloat16), rank_group)
    )
    call_and_share_errors(f"{probe.name}: destroy", rank_group, probe.destroy)
    return probe.capabilities, probe.grows


def _wires(can: DispatcherCapabilities) -> list[Wire]:
    """Return a wire for each dispatch format and each combine format except plain; the other direction is plain."""
    given = {wire.dispatch: wire for wire in (FP8_TENSOR, NVFP4)}
    dispatch = [given.get(name) or Wire(dispatch=name) for name in sorted(can.dispatch_formats - {"plain"})]
    return dispatch + [Wire(combine=name) for name in sorted(can.combine_formats - {"plain"})]


def _check_shape(factory: DispatcherFactory, shape: DispatchShape, rank_group: RankGroup, device: torch.device) -> None:
    dispatcher = call_and_share_errors("made", rank_group, lambda: factory(shape, rank_group))
    for check in CHECKS:
        run(check, dispatcher, device)
    if dispatcher.capabilities.peer_out:
        # the format of dispatch hardly affects combine, so two checks suffice for formats that are not plain
        for check in CHECKS if shape.wire.dispatch == "plain" else (uneven_and_empty_ranks, poisoned_buffers):
            run(check, dispatcher, device, to_peers=True)
    call_and_share_errors(f"{dispatcher.name}: destroy", rank_group, dispatcher.destroy)
    call_and_share_errors(f"{dispatcher.name}: destroy, again", rank_group, dispatcher.destroy)
    again = call_and_share_errors(f"{dispatcher.name}: made, again", rank_group, lambda: factory(shape, rank_group))
    run(uneven_and_empty_ranks, again, device)
    call_and_share_errors(f"{dispatcher.name}: destroy", rank_group, again.destroy)


# --- the checks -----------------------------------------------------------------------------------------------------


def uneven_and_empty_ranks(case: Case) -> None:
    for counts in COUNTS:
        x, routing, wanted = case.call(counts[case.rank % 4])
        given = [t.clone() for t in (x, routing.ids, routing.weights)]
        case.same(case.dispatch_and_combine(x, routing), wanted, f"T={counts}")
        for name, now, was in zip(("x", "ids", "weights"), (x, routing.ids, routing.weights), given, strict=True):
            case.add_fault_unless(torch.equal(now, was), f"T={counts}: {name} must be left as they were")


def rows_go_where_they_belong(case: Case) -> None:
    """Check calls in which all tokens of all ranks go to three experts of one rank, to one expert, and to none."""
    g, first_id = case.shape, (case.ranks - 1) * SLOTS
    x = rows(case.rank, MAX_TOKENS, g.dtype, g.wire)
    for chosen, what in (([0, 1, 2], "three experts of one rank"), ([1], "one expert"), ([], "no expert")):
        local = (chosen + [-1] * g.top_k)[: g.top_k]
        ids = torch.tensor([[i + first_id if i >= 0 else -1 for i in local]] * MAX_TOKENS)
        weights = torch.arange(1, g.top_k + 1).float().expand(MAX_TOKENS, -1).contiguous()
        routing = PhysicalRouting(PhysicalIds(ids), weights)
        received = with_local_ids(case.dispatch(x.to(case.device), moved(routing, case.device)), SLOTS)
        if received.layout is RowLayout.RANK_MAJOR and case.dispatcher.capabilities.dedup:
            assert received.local_ids is not None
            carried = int((received.local_ids >= 0).any(1).sum())
            here = MAX_TOKENS * case.ranks if case.rank == case.ranks - 1 and max(local) >= 0 else 0
            case.add_fault_unless(carried == here, f"{what}: {carried} rows with experts arrived, not {here}")
        y = case.dispatcher.combine(case.experts(received), received.handle)
        case.same(y, case.expected(x, routing), what)


def views_are_taken(case: Case) -> None:
    """Check rows, ids and weights that are views of wider tensors, and int32 ids."""
    x, routing, wanted = case.call(6)
    wide = torch.cat([x, x + 1], 1)[:, :HIDDEN]
    ids = torch.cat([routing.ids, routing.ids], 1).int()[:, : case.shape.top_k]
    weights = torch.cat([routing.weights, routing.weights], 1)[:, : case.shape.top_k]
    case.same(case.dispatch_and_combine(wide, PhysicalRouting(PhysicalIds(ids), weights)), wanted, "views")


def rows_that_come_plain_are_rounded_as_before_the_wire(case: Case) -> None:
    """Check that a transport that rounds plain rows delivers the same bits as for rows rounded by the caller.

    Values range from small to large, and include NaN and infinity. Both `dispatch` and `dispatch_start` are checked.
    """
    if not case.rounds:
        return
    g, tokens = case.shape, MAX_TOKENS - case.rank
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(case.rank))
    x = x.mul(torch.logspace(-4, 2, HIDDEN))
    x[0], x[1, 3], x[2, 200], x[3] = 0, torch.nan, torch.inf, -6e4
    x = x.to(g.dtype).to(case.device)
    routing = moved(routes(case.rank, tokens, case.ranks, g.top_k), case.device)
    for what in ("alone", "beside other work"):
        arrived = []
        for data, scale in ((x, None), rounded(x, g)):
            if what == "alone":
                received = case.dispatcher.dispatch(data, routing, scale)
            else:
                received = case.dispatcher.dispatch_start(data, routing, x_scale=scale).wait()
            arrived.append(_bits(received))
            case.dispatcher.combine(case.experts(received), received.handle)
        case.add_fault_unless(torch.equal(*arrived), f"other bits than those of rows that were rounded before, {what}")


def _bits(received: Received) -> Tensor:
    """Return the bytes of all received rows, and of their scales, that have an expert on this rank."""
    received = as_rank_major(with_local_ids(received, SLOTS), SLOTS)
    assert received.local_ids is not None
    here = (received.local_ids >= 0).any(1)
    parts = [part for part in (received.x, received.x_scale) if part is not None]
    return torch.cat([part[here].contiguous().view(torch.uint8).flatten() for part in parts])


def two_in_flight(case: Case) -> None:
    a, to_a, wanted_a = case.call(3 + case.rank % 4)
    b, to_b, wanted_b = case.call(2, seed=50)
    dispatcher = case.dispatcher
    first, second = case.dispatch_start(a, to_a), case.dispatch_start(b, to_b)
    got_a, got_b = first.wait(), second.wait()
    room = torch.full((len(b) + 2, HIDDEN), 7.0, dtype=case.shape.dtype, device=case.device)
    wide = torch.full((len(a), 2 * HIDDEN), 7.0, dtype=case.shape.dtype, device=case.device)
    back_a = dispatcher.combine_start(case.experts(got_a), got_a.handle, wide[:, :HIDDEN])
    back_b = dispatcher.combine_start(case.experts(got_b), got_b.handle, room[1:-1])
    case.same(back_b.wait(), wanted_b, "second call")
    case.same(room[1:-1], wanted_b, "second call, where it was wanted")
    case.same(back_a.wait(), wanted_a, "first call")
    case.same(wide[:, :HIDDEN], wanted_a, "first call, where it was wanted")
    case.add_fault_unless(
        bool((room[[0, -1]] == 7).all() & (wide[:, HIDDEN:] == 7).all()), "combine wrote beside `out`"
    )


def nan_stays_with_its_owner(case: Case) -> None:
    """Check that NaN in rank 0's rows, and in weights of absent routes, does not reach ranks that share its experts."""
    x, routing, wanted = case.call(5)
    absent = routing.ids < 0
    routing = PhysicalRouting(routing.ids, routing.weights.masked_fill(absent, torch.nan))
    y = case.dispatch_and_combine(torch.full_like(x, torch.nan) if case.rank == 0 else x, routing)
    if case.rank:
        case.same(y, wanted, "beside NaN")
    else:
        nothing = absent.all(1)
        case.add_fault_unless(bool(y[~nothing].isnan().all()), "NaN rows came back as numbers")
        case.add_fault_unless(bool((y[nothing] == 0).all()), "rows without an expert must be zero")


@contextmanager
def _uninitialised_is_nan(device: torch.device) -> Iterator[None]:
    """Fill uninitialized memory with NaN, within this context manager."""
    if device.type == "cuda":
        # fill the allocator's blocks beforehand: torch's own filling would race with a transport's other stream
        torch.full((1 << 24,), torch.nan, device=device)
        yield
        return
    memory: Any = torch.utils.deterministic
    was = memory.fill_uninitialized_memory
    # called directly, because torch.use_deterministic_algorithms imports inductor, which takes a second on each rank
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)
        memory.fill_uninitialized_memory = was


def poisoned_buffers(case: Case) -> None:
    """Check that data which a call leaves in its buffers (received rows and results) does not affect the next call."""
    with _uninitialised_is_nan(case.device):
        for turn in range(4):
            tokens = (MAX_TOKENS, 3, 0, 11)[(turn + case.rank) % 4]
            x, routing, wanted = case.call(tokens, seed=turn)
            received = case.dispatch(x, routing)
            y = case.experts(received)
            out = case.dispatcher.combine(y, received.handle)
            case.same(out, wanted, f"turn {turn}")
            # wait until all ranks have read: peers may fetch rows from this rank's memory
            barrier(case.device)
            for part in y.blocks if isinstance(y, PeerRows) else (y,):
                part.fill_(torch.nan)
            if received.out is not None:
                received.x.copy_(torch.full_like(received.x, torch.nan, dtype=case.shape.dtype))
            barrier(case.device)


def random_delays(case: Case) -> None:
    """Check calls with random delays: no rank may read data before it is written, or overwrite it before it is read."""
    generator = torch.Generator().manual_seed(case.rank + 5)
    results = []
    for turn in range(6):
        x, routing, wanted = case.call(1 + turn, seed=10 * turn)
        _delay(case.device, generator)
        received = case.dispatch(x, routing)
        _delay(case.device, generator)
        results.append((case.dispatcher.combine(case.experts(received), received.handle), wanted))
    for turn, (y, wanted) in enumerate(results):
        case.same(y, wanted, f"turn {turn}")


def bounds_that_change(case: Case) -> None:
    """Check calls with different token limits. A transport may lay out fixed buffers by the limit of each call.

    A rank that is ahead must not change the layout while others still use the former one.
    """
    if not case.dispatcher.capabilities.static:
        return
    generator = torch.Generator().manual_seed(case.rank + 6)
    results = []
    for turn in range(12):
        bound = (MAX_TOKENS, 4, 9, 1)[turn % 4]
        x, routing, wanted = case.call((bound, 0, bound - 1)[(turn + case.rank) % 3], seed=10 * turn)
        _delay(case.device, generator)
        received = case.dispatch(x, routing, bound)
        results.append((case.dispatcher.combine(case.experts(received), received.handle), wanted))
    for turn, (y, wanted) in enumerate(results):
        case.same(y, wanted, f"turn {turn}")


def numbers_of_routes_come_back(case: Case) -> None:
    """Check `combine_with_weights`: each route gets back the number that its expert's rank returned for it.

    A rank returns NaN for routes whose expert is on another rank. This NaN must not reach any result.
    """
    if not case.dispatcher.capabilities.returns_weights or case.shape.wire.dispatch != "plain":
        return
    generator = torch.Generator().manual_seed(case.rank + 7)
    results = []
    for turn, bound in enumerate((MAX_TOKENS, 4, 9, 1, MAX_TOKENS)):
        x, routing, wanted = case.call((bound, 0, bound - 1)[(turn + case.rank) % 3], seed=10 * turn)
        limit = bound if case.dispatcher.capabilities.static else None
        _delay(case.device, generator)
        received = case.dispatch(x, routing, limit)
        ids = as_rank_major(with_local_ids(received, SLOTS), SLOTS).local_ids
        assert ids is not None
        found = (1 + ids + case.rank * SLOTS + 100 * received.x[:, :1].float()).where(ids >= 0, torch.nan)
        found = torch.cat([found, found], 1)[:, : case.shape.top_k]
        mine = 1 + routing.ids + 100 * x[:, :1].float()
        outs: tuple[Tensor | None, Tensor | None] = (None, None)
        if turn % 2:
            outs = torch.full_like(wanted, 7.0, device=case.device), torch.full_like(routing.weights, 7.0)
        y, numbers = case.dispatcher.combine_with_weights(case.experts(received), found, received.handle, *outs)
        case.add_fault_unless(
            outs[0] is None or (y is outs[0] and numbers is outs[1]), "results are not where they were wanted"
        )
        results.append((y, wanted, numbers, mine.where(routing.ids >= 0, 0.0)))
    for turn, (y, wanted, numbers, meant) in enumerate(results):
        case.same(y, wanted, f"turn {turn}")
        case.same(numbers, meant, f"turn {turn}, numbers of routes")


def _delay(device: torch.device, generator: torch.Generator) -> None:
    share = float(torch.rand(1, generator=generator))
    if device.type == "cuda":
        torch.cuda._sleep(int(share * 4e6))  # cycles: 2 ms at most
    else:
        time.sleep(share * 0.002)


CHECKS: tuple[Callable[[Case], None], ...] = (
    uneven_and_empty_ranks,
    rows_go_where_they_belong,
    views_are_taken,
    rows_that_come_plain_are_rounded_as_before_the_wire,
    what_is_wrong_on_one_rank_is_raised_on_all,
    gradients_flow,
    gradients_are_wanted_alike,
    two_in_flight,
    nan_stays_with_its_owner,
    equal_calls_give_equal_bits,
    single_rows_keep_their_order_and_bits,
    poisoned_buffers,
    random_delays,
    bounds_that_change,
    numbers_of_routes_come_back,
    captured_and_replayed,
)
