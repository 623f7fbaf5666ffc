"""Checks after which a context is at its end: a call that one rank refuses, and a rank that never comes."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ep_moe.all2all.base import DispatchShape
from ep_moe.context import EPContext
from ep_moe.errors import PeerTimeout
from ep_moe.parallel.rank_group import barrier
from ep_moe.testing.transport_case import Case, DispatcherFactory, hold_back, said, said_within, tell
from ep_moe.testing.transport_rows import MAX_TOKENS, identity


def one_token_too_many(factory: DispatcherFactory, shape: DispatchShape, device: torch.device) -> None:
    """It raises at once where it is; the others get NaN, not numbers, and the same sentence at a later step."""
    deadline_s = 20.0 if device.type == "cuda" else 8.0
    with EPContext.from_groups(device=device, deadline_s=deadline_s) as context:
        case = Case(factory(shape, context.rank_groups["ep"]), device)
        x, routing, wanted = case.call(MAX_TOKENS)
        case.same(case.once(x, routing), wanted, "at capacity")
        odd = case.ranks - 1
        sentence = f"rank {odd}: x has {MAX_TOKENS + 1} tokens on their way, more than max_tokens={MAX_TOKENS}"
        if case.rank == odd:
            more, to, _ = case.call(MAX_TOKENS + 1)
            case.that(sentence in said(lambda: case.dispatcher.dispatch(more, to)), "one too many was not refused")
        else:
            y = case.once(x, routing).cpu()
            ids = routing.ids.cpu()
            touched = ((ids // shape.slots_per_rank == odd) & (ids >= 0)).any(1)
            case.that(bool(y[touched].isnan().all()), "rows that miss a rank's experts must be NaN")
            case.same(y[~touched], wanted[~touched], "rows that the refusing rank has no part in")
        barrier(device)
        refusal = said_within(2 * deadline_s / 8, context.flight_recorder.check)
        case.that(sentence in refusal, "the refusal did not reach the other ranks")
        case.dispatcher.destroy()
        tell(one_token_too_many, case)


def a_peer_that_never_comes(factory: DispatcherFactory, shape: DispatchShape, device: torch.device) -> None:
    """On a transport that waits on the host: who waits gets a PeerTimeout that names the rank, in time."""
    deadline_s, lost = 4.0, dist.get_world_size() - 1
    context = EPContext.from_groups(device=device, deadline_s=deadline_s)
    case = Case(factory(shape, context.rank_groups["ep"]), device)
    x, routing, wanted = case.call(3)
    case.same(case.once(x, routing), wanted, "before")
    start, message = time.monotonic(), ""
    if case.rank != lost:
        try:
            case.once(x, routing)
        except PeerTimeout as error:
            message = str(error)
        case.that(f"Rank {lost} is alive but behind" in message, f"rank {lost} was not named in {message!r}")
        case.that(time.monotonic() - start < 2 * deadline_s, "it waited past the deadline")
    hold_back(case.dispatcher.rank_group, lost, 2 * deadline_s)
    context.flight_recorder.close()  # this context is at its end: its dispatcher cannot meet its peers to be destroyed
    tell(a_peer_that_never_comes, case)


def a_peer_that_comes_too_late(factory: DispatcherFactory, shape: DispatchShape, device: torch.device) -> None:
    """On a transport whose kernels wait on a GPU, while the host goes on: the next step is a PeerTimeout that names the
    rank. It comes before the process would be ended, and so both can be seen."""
    deadline_s, lost = 6.0, dist.get_world_size() - 1
    context = EPContext.from_groups(device=device, deadline_s=deadline_s)
    case = Case(factory(shape, context.rank_groups["ep"]), device)
    x, routing, wanted = case.call(3)
    case.same(case.once(x, routing), wanted, "before")
    barrier(device)
    time.sleep(deadline_s / 8)  # from one mark to the next
    start, message = time.monotonic(), ""
    if case.rank == lost:
        time.sleep(1.7 * deadline_s)
    received = case.dispatch(x, routing)
    late = case.dispatcher.combine(identity(received, x.dtype), received.handle)
    while case.rank != lost and not message and time.monotonic() - start < 1.7 * deadline_s:
        time.sleep(0.1)
        try:
            context.flight_recorder.check()
        except PeerTimeout as error:
            message = str(error)
    if case.rank != lost:
        case.that(f"Rank {lost} is alive but behind" in message, f"rank {lost} was not named in {message!r}")
    case.same(late, wanted, "when it came after all")
    context.flight_recorder.close()
    tell(a_peer_that_comes_too_late, case)
