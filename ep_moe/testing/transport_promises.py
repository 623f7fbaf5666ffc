"""Checks of further promises of a transport: errors on all ranks, gradients, deterministic results, CUDA graphs."""

from __future__ import annotations

import dataclasses
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe.all2all.base import DispatchShape
from ep_moe.config import PLAIN_WIRE
from ep_moe.context import EPContext
from ep_moe.errors import PeerTimeout
from ep_moe.experts.layouts import as_rank_major, with_local_ids
from ep_moe.parallel.rank_group import barrier
from ep_moe.testing.transport_case import (
    COUNTS,
    HIDDEN,
    MAX_TOKENS,
    SLOTS,
    Case,
    DispatcherFactory,
    factors,
    hold_back,
    identity,
    input_error_message,
    moved,
    multiplied,
    raise_faults_on_all_ranks,
    routes,
    rows,
    tolerance,
    wait_for_input_error,
)
from ep_moe.types import PhysicalIds, PhysicalRouting, RowLayout, Weighting

REPLAYS = 1000


def what_is_wrong_on_one_rank_is_raised_on_all(case: Case) -> None:
    """Check that a caller's problem, or an id out of range, is raised on all ranks, and that later calls work.

    It applies to transports that wait on the host; `one_token_too_many` covers the others. Transports that grow wait
    only for the other hosts and do not check ids, so only the caller's problem applies to them.
    """
    if not case.dispatcher.capabilities.host_sync and not case.dispatcher.grows:
        return
    for odd in {0, case.ranks - 1}:
        x, routing, wanted = case.call(4, seed=odd)
        here = case.rank == odd
        problem = "planted by the caller" if here else None
        message = input_error_message(partial(_waited, case, x, routing, problem))
        case.add_fault_unless(
            "planted by the caller" in message, f"rank {odd}'s problem was not raised, got {message!r}"
        )
        for beyond in () if case.dispatcher.grows else (case.shape.num_physical, -2):
            ids = routing.ids.clone()
            if here:
                ids[-1, -1] = beyond
            wrong = PhysicalRouting(PhysicalIds(ids), routing.weights)
            message = input_error_message(partial(_waited, case, x, wrong))
            case.add_fault_unless(bool(message), f"rank {odd}'s id {beyond} was not refused")
        case.same(case.dispatch_and_combine(x, routing), wanted, "after a refusal")


def _waited(case: Case, x: Tensor, routing: PhysicalRouting, problem: str | None = None) -> None:
    case.dispatch_start(x, routing, problem=problem).wait()


def gradients_flow(case: Case) -> None:
    """Check the gradients of rows and weights.

    Only three columns have a gradient. So sums have few terms, small integers, and are exact in any dtype and order.
    """
    if not case.dispatcher.capabilities.differentiable or case.shape.wire != PLAIN_WIRE:
        return
    for counts in COUNTS[:4]:
        x, routing, _ = case.call(counts[case.rank % 4])
        x, weights = x.requires_grad_(), routing.weights.requires_grad_()
        slope = torch.zeros_like(x).detach()
        slope[:, :3] = torch.tensor([1.0, -1.0, 2.0])
        out = case.dispatch_and_combine(x, routing)
        out.backward(slope)
        chosen = routing.ids >= 0
        factor = factors(routing.ids % SLOTS, routing.ids // SLOTS).masked_fill(~chosen, 0)
        case.same(_grad(x), slope * (weights * factor).sum(1, keepdim=True).to(x.dtype), "gradient of x")
        own = (x * slope).float().sum(1, keepdim=True) * factor
        case.same(_grad(weights), own.detach(), "gradient of the weights")


def gradients_are_wanted_alike(case: Case) -> None:
    """Check that all ranks raise if only one of them requires gradients, because its backward would wait for theirs.

    It applies to transports that wait on the host, which can compare the ranks.
    """
    can = case.dispatcher.capabilities
    if not (can.differentiable and can.host_sync) or case.ranks == 1 or case.shape.wire != PLAIN_WIRE:
        return
    for odd in {0, case.ranks - 1}:
        for name in ("x", "weights"):
            x, routing, _ = case.call(4, seed=odd)
            given = x if name == "x" else routing.weights
            given.requires_grad_(case.rank == odd)
            message = input_error_message(partial(_waited, case, x, routing))
            case.add_fault_unless(bool(message), f"rank {odd} alone wants a gradient of {name}, which was not refused")
    x, routing, wanted = case.call(4)
    case.same(case.dispatch_and_combine(x, routing), wanted, "after a refusal")


def _grad(given: Tensor) -> Tensor:
    return torch.zeros_like(given) if given.grad is None else given.grad


def equal_calls_give_equal_bits(case: Case) -> None:
    if not case.dispatcher.capabilities.deterministic:
        return
    x = torch.randn(MAX_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(case.rank))
    x = x.to(case.shape.dtype).to(case.device)
    routing = moved(routes(case.rank, MAX_TOKENS, case.ranks, case.shape.top_k), case.device)
    first = case.dispatch_and_combine(x, routing)
    for _ in range(5):
        case.same(case.dispatch_and_combine(x, routing), first, "again")


def single_rows_keep_their_order_and_bits(case: Case) -> None:
    """Check that plain rows with one route arrive and return bit for bit, and that weights arrive bit for bit.

    In any dtype, the sum of a single row is that row. A transport that claims `exact` must deliver rows in the order of
    ranks and tokens.
    """
    g, can = case.shape, case.dispatcher.capabilities
    if g.wire != PLAIN_WIRE:
        return
    for counts in COUNTS[:4]:
        x, routing = _single_rows(case, counts[case.rank % 4])
        received = case.dispatch(x, routing)
        flat = as_rank_major(with_local_ids(received, SLOTS), SLOTS)
        assert flat.local_ids is not None
        mine = flat.local_ids >= 0
        here = flat.x[mine.any(1)].cpu()
        places = here[:, :2].long() - torch.tensor([1, 0])  # rank and token
        numbers = (places[:, 0] * MAX_TOKENS + places[:, 1]).tolist()
        if can.exact and received.layout is RowLayout.RANK_MAJOR:
            case.add_fault_unless(numbers == sorted(numbers), f"single rows arrive in another order, got {numbers}")
        if received.weighting is Weighting.COMBINE:
            back = case.dispatcher.combine(identity(received, g.dtype, to_peers=case.to_peers), received.handle)
            _weighted_once(case, x, routing.weights[:, -1:], back)
            continue
        assert flat.weights is not None
        sent = torch.stack([_single_weights(rank) for rank in range(case.ranks)])
        wanted = sent[places[:, 0].clamp(0, case.ranks - 1), places[:, 1].clamp(0, MAX_TOKENS - 1)]
        case.add_fault_unless(torch.equal(flat.weights[mine].cpu(), wanted), "weights arrive with other bits")
        unweighted = dataclasses.replace(received, weighting=Weighting.COMBINE)
        back = case.dispatcher.combine(identity(unweighted, g.dtype, to_peers=case.to_peers), received.handle)
        case.add_fault_unless(torch.equal(back, x), "single rows come back with other bits")


def _single_rows(case: Case, tokens: int) -> tuple[Tensor, PhysicalRouting]:
    """Return random rows with one route each, in the last column. The first columns hold the rank and the token."""
    g, generator = case.shape, torch.Generator().manual_seed(case.rank)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    x[:, 0], x[:, 1] = case.rank + 1, torch.arange(tokens)
    ids = torch.full((tokens, g.top_k), -1)
    ids[:, -1] = torch.randint(g.num_physical, (tokens,), generator=generator)
    weights = _single_weights(case.rank)[:tokens].unsqueeze(1).expand(-1, g.top_k).contiguous()
    return x.to(g.dtype).to(case.device), moved(PhysicalRouting(PhysicalIds(ids), weights), case.device)


def _single_weights(rank: int) -> Tensor:
    """Return a weight for each token of a rank. Every second one is 1."""
    weights = torch.rand(MAX_TOKENS, generator=torch.Generator().manual_seed(rank)) / 2 + 0.5
    weights[::2] = 1
    return weights


def _weighted_once(case: Case, x: Tensor, weights: Tensor, back: Tensor) -> None:
    """Check that combine multiplies by the weight and rounds once.

    A weight of 1 must not change any bit. Another product is rounded in float32, by 2**-24 of itself, and then to the
    layer's dtype, by half a step. The check allows twice the former.
    """
    ones = (weights == 1).squeeze(1)
    case.add_fault_unless(torch.equal(back[ones], x[ones]), "single rows come back with other bits")
    numbers = torch.finfo(case.shape.dtype)
    product = x.double() * weights.double()
    step = product.abs() * (numbers.eps / 2 + 2**-23) + numbers.smallest_normal * numbers.eps
    case.add_fault_unless(
        bool(((back.double() - product).abs() <= step).all()), "a weighted row was rounded more than once"
    )


def captured_and_replayed(case: Case) -> None:
    """Check 1,000 graph replays with different rows, routes and numbers of tokens.

    A transport that cannot be captured must raise an error in a capture.
    """
    if case.device.type != "cuda":
        return
    g, device = case.shape, case.device
    x = torch.zeros(MAX_TOKENS, HIDDEN, dtype=g.dtype, device=device)
    ids = torch.full((MAX_TOKENS, g.top_k), -1, dtype=torch.int64, device=device)
    routing = PhysicalRouting(PhysicalIds(ids), torch.zeros(ids.shape, device=device))
    graph = torch.cuda.CUDAGraph()
    if not case.dispatcher.capabilities.cuda_graph or case.dispatcher.grows:
        _refuses_capture(case, graph, x, routing)
        return
    case.dispatch_and_combine(x, routing)
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
        y = case.dispatch_and_combine(x, routing)
    batches = []
    for seed in range(8):
        tokens = (0, 1, MAX_TOKENS, 7)[(seed + case.rank) % 4]
        new = rows(case.rank + seed, MAX_TOKENS, g.dtype, g.wire)
        to = routes(case.rank + seed, MAX_TOKENS, case.ranks, g.top_k)
        to.ids[tokens:] = -1  # rows that pad a batch to its captured size
        batches.append((new.to(device), moved(to, device), case.expected(new, to).to(device)))
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for replay in range(REPLAYS):
        new, to, wanted = batches[replay % len(batches)]
        x.copy_(new)
        routing.ids.copy_(to.ids)
        routing.weights.copy_(to.weights)
        graph.replay()
        wrong += ((y.float() - wanted.float()).abs() > tolerance(g) * wanted.float().abs()).any()
    case.add_fault_unless(int(wrong) == 0, f"{int(wrong)} of {REPLAYS} replays differ")


def _refuses_capture(case: Case, graph: torch.cuda.CUDAGraph, x: Tensor, routing: PhysicalRouting) -> None:
    def capture() -> None:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(case.device)):
            case.dispatch(x, routing)

    sentence = input_error_message(capture)
    remedy = "max_tokens" if case.dispatcher.grows else "cannot be captured"
    case.add_fault_unless(remedy in sentence, f"a capture must name those that can be captured, got {sentence!r}")


# --- how calls end ----------------------------------------------------------------------------------------------------
# Checks that leave their context unusable: a call that one rank refuses, and a rank that does not enter a call.


def one_token_too_many(
    factory: DispatcherFactory, shape: DispatchShape, device: torch.device, ranks_per_node: int | None = None
) -> None:
    """Check that a rank with more than max_tokens tokens raises at once.

    The other ranks get NaN for its experts' results, and raise the same message at a later step.
    """
    deadline_s = 20.0 if device.type == "cuda" else 8.0
    with EPContext.from_groups(device=device, deadline_s=deadline_s, ranks_per_node=ranks_per_node) as context:
        case = Case(factory(shape, context.rank_groups["ep"]), device)
        x, routing, wanted = case.call(MAX_TOKENS)
        case.same(case.dispatch_and_combine(x, routing), wanted, "at capacity")
        odd = case.ranks - 1
        sentence = f"rank {odd}: x has {MAX_TOKENS + 1} tokens to dispatch, more than max_tokens={MAX_TOKENS}"
        if case.rank == odd:
            more, to, _ = case.call(MAX_TOKENS + 1)
            case.add_fault_unless(
                sentence in input_error_message(lambda: case.dispatcher.dispatch(more, to)),
                "one too many was not refused",
            )
        else:
            ids = routing.ids.cpu()
            theirs = (ids // shape.slots_per_rank == odd) & (ids >= 0)
            touched = theirs.any(1)
            if case.dispatcher.capabilities.returns_weights:
                received = case.dispatch(x, routing)
                ones = received.x.new_ones(len(received.x), shape.top_k, dtype=torch.float32)
                y, numbers = case.dispatcher.combine_with_weights(case.experts(received), ones, received.handle)
                case.add_fault_unless(
                    bool(numbers.cpu()[theirs].isnan().all()), "numbers of a rank's routes must be NaN"
                )
                case.same(numbers.cpu()[~theirs], (ids >= 0).float()[~theirs], "numbers of other ranks' routes")
            else:
                y = case.dispatch_and_combine(x, routing)
            y = y.cpu()
            case.add_fault_unless(bool(y[touched].isnan().all()), "rows that miss a rank's experts must be NaN")
            case.same(y[~touched], wanted[~touched], "rows that the refusing rank has no part in")
        barrier(device)
        refusal = wait_for_input_error(2 * deadline_s / 8, context.flight_recorder.check)
        case.add_fault_unless(sentence in refusal, "the refusal did not reach the other ranks")
        case.dispatcher.destroy()
        raise_faults_on_all_ranks(one_token_too_many, case)


def a_peer_that_never_comes(
    factory: DispatcherFactory, shape: DispatchShape, device: torch.device, ranks_per_node: int | None = None
) -> None:
    """Check that ranks waiting for a missing rank raise a PeerTimeout that names it, before twice the deadline.

    It applies to transports that wait on the host.
    """
    deadline_s, lost = 4.0, dist.get_world_size() - 1
    context = EPContext.from_groups(device=device, deadline_s=deadline_s, ranks_per_node=ranks_per_node)
    case = Case(factory(shape, context.rank_groups["ep"]), device)
    x, routing, wanted = case.call(3)
    case.same(case.dispatch_and_combine(x, routing), wanted, "before")
    start, message = time.monotonic(), ""
    if case.rank != lost:
        try:
            case.dispatch_and_combine(x, routing)
        except PeerTimeout as error:
            message = str(error)
        case.add_fault_unless(
            f"Rank {lost} is alive but behind" in message, f"rank {lost} was not named in {message!r}"
        )
        case.add_fault_unless(time.monotonic() - start < 2 * deadline_s, "it waited past the deadline")
    hold_back(case.dispatcher.rank_group, lost, 2 * deadline_s)
    context.flight_recorder.close()  # the dispatcher is not destroyed: that is collective, and would wait for peers
    raise_faults_on_all_ranks(a_peer_that_never_comes, case)


def a_peer_that_comes_too_late(
    factory: DispatcherFactory, shape: DispatchShape, device: torch.device, ranks_per_node: int | None = None
) -> None:
    """Check that a late rank is named by a PeerTimeout at the next step, while kernels still wait on the GPU.

    It applies to transports that do not wait on the host. The result must be NaN or, after the rank's arrival, correct.
    The rank arrives before the process would be ended, so that both can be checked.
    """
    deadline_s, lost = 6.0, dist.get_world_size() - 1
    context = EPContext.from_groups(device=device, deadline_s=deadline_s, ranks_per_node=ranks_per_node)
    case = Case(factory(shape, context.rank_groups["ep"]), device)
    x, routing, wanted = case.call(3)
    case.same(case.dispatch_and_combine(x, routing), wanted, "before")
    barrier(device)
    time.sleep(deadline_s / 8)  # the interval of the flight recorder's heartbeat
    start, message = time.monotonic(), ""
    if case.rank == lost:
        time.sleep(1.7 * deadline_s)
    # other data than before, so that old contents after an aborted collective are not taken for the result
    x, routing, wanted = case.call(3, seed=1)
    received = case.dispatch(x, routing)
    # `multiplied` directly, because the checks of `case.experts` would wait for the device
    late = case.dispatcher.combine(multiplied(received, x.dtype, case.rank), received.handle)
    while case.rank != lost and not message and time.monotonic() - start < 1.7 * deadline_s:
        time.sleep(0.1)
        try:
            context.flight_recorder.check()
        except PeerTimeout as error:
            message = str(error)
    if case.rank != lost:
        case.add_fault_unless(
            f"Rank {lost} is alive but behind" in message, f"rank {lost} was not named in {message!r}"
        )
    if not bool(late.isnan().all()):  # all NaN if collectives were aborted
        case.same(late, wanted, "when it came after all")
    context.flight_recorder.close()
    raise_faults_on_all_ranks(a_peer_that_comes_too_late, case)
