"""The contract of a fused kernel: checks for any class.

    @distributed(2, 4)
    def test_my_fused_kernel(world_size):
        check_fused(MyFusedExperts)

Outputs are compared with float64 results on the dequantized weights, within the bound of `expert_oracle`. Each rank's
part of a row may be rounded once, and their sum once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import lcm

import torch
import torch.distributed as dist

from ep_moe.config import MoEConfig, ParallelConfig
from ep_moe.context import EPContext
from ep_moe.errors import PeerTimeout
from ep_moe.experts.fused.base import FusedExperts
from ep_moe.parallel.rank_group import barrier
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.quant.schemes import SCHEMES
from ep_moe.runtime.devices import on_device_of
from ep_moe.testing.distributed import made_on_the_host, rank_device
from ep_moe.testing.fused_case import EXPERTS, Call, Case, Shared, maps, out_of_range, raise_faults_on_all_ranks
from ep_moe.testing.transport_case import input_error_message, wait_for_input_error
from ep_moe.types import PhysicalIds, PhysicalRouting, capturing

COUNTS = ((7, 5, 1, 3), (0, 4, 0, 0), (0, 0, 0, 0), (1, 0, 9, 2))
REPLAYS = 60
Make = Callable[..., Case]  # (shared, expert_map=..., seed=...)


@on_device_of(lambda *_, **__: rank_device())
@made_on_the_host
def check_fused(
    kind: type[FusedExperts],
    *,
    top_ks: Sequence[int] = (1, 2, 3, 8),
    max_tokens: Sequence[int] = (24, 8, 200),
    deadline_s: float = 60.0,
) -> int:
    """Check a fused kernel against its contract, on the ranks of the default process group as one EP group.

    A kernel without dispatch and combine inside (`travels` is False) is checked on each rank separately.

    Args:
        kind: The kernel's class. Every scheme of its capabilities is checked.
        top_ks: Values of K, each with the first of `max_tokens`.
        max_tokens: Token limits, at least 8 each. All after the first are checked with the last of `top_ks`.
        deadline_s: Seconds for a collective step.

    Returns:
        The number of shapes that were checked.

    Raises:
        AssertionError: On all ranks. It names the check and the shape.
    """
    can, device, checked = kind.capabilities, rank_device(), 0
    can.check()
    sizes = ParallelConfig(dp=dist.get_world_size(), ep=None if can.travels else 1)
    bounds = [(top_k, max_tokens[0]) for top_k in top_ks] + [(top_ks[-1], bound) for bound in max_tokens[1:]]
    with EPContext.from_groups(sizes, device=device, deadline_s=deadline_s) as context:
        for scheme in sorted(can.schemes):
            for top_k, bound in bounds:
                make = maker(kind, scheme, top_k, bound, context)
                if make is not None:
                    _check_shape(make, context.layout.ep)
                    checked += 1
    assert checked, f"{kind.name}: its capabilities name nothing that it serves"
    if can.travels:
        one_token_too_many(kind, top_ks[-1], max_tokens[0], device)
        if device.type == "cuda":
            a_peer_that_comes_too_late(kind, top_ks[-1], max_tokens[0], device)
    return checked


def maker(kind: type[FusedExperts], scheme: str, top_k: int, bound: int, context: EPContext) -> Make | None:
    """Return a function that makes cases of a shape; None if the kernel does not support the shape."""
    can = kind.capabilities
    config = MoEConfig(
        hidden_size=lcm(256, can.hidden_unit),
        intermediate_size=lcm(256, can.inner_unit),
        num_experts=EXPERTS,
        top_k=top_k,
        activation=sorted(can.activations, key=lambda activation: activation.value)[0],
    )
    if kind.unsupported_reason(
        config, context.layout, sorted(can.dtypes, key=str)[0], SCHEMES[scheme], max_tokens=bound
    ):
        return None
    usual = maps(context.layout.ep)["replicas"] if can.any_map else ExpertMap.linear(EXPERTS, context.layout.ep)

    def make(shared: Shared, expert_map: ExpertMap = usual, seed: int = 0) -> Case:
        return Case(kind, config, scheme, context.rank_groups["ep"], expert_map, bound, context.device, shared, seed)

    return make


def _check_shape(make: Make, ranks: int) -> None:
    shared = Shared()
    case = make(shared)
    can = case.kernel.capabilities
    for check in ANY_KERNEL if can.routes else CHECKS:
        _run(check, case)
    for name, expert_map in maps(ranks).items() if can.any_map else ():
        _run(partial(under_any_map, name=name), make(shared, expert_map))
    _run(partial(layers_that_share, other=make(shared, seed=1)), case)
    shared.destroy()
    again = Shared()  # a kernel must work again after all shared buffers were destroyed
    _run(uneven_and_empty_ranks, make(again))
    again.destroy()


def _run(check: Callable[[Case], None], case: Case) -> None:
    try:
        check(case)
    except PeerTimeout:
        raise
    except Exception as error:
        case.faults.append(f"{type(error).__name__}: {error}")
    name = check.func.__name__ if isinstance(check, partial) else check.__name__
    raise_faults_on_all_ranks(name.replace("_", " "), case)


# --- the checks -----------------------------------------------------------------------------------------------------


def uneven_and_empty_ranks(case: Case) -> None:
    for turn, counts in enumerate((*COUNTS, (case.max_tokens,) * 4, (case.max_tokens, 0, 1, case.max_tokens - 1))):
        tokens = min(counts[case.rank_group.rank % 4], case.max_tokens)
        case.check(case.call(tokens, turn), f"T={counts}")


def all_to_one_rank(case: Case) -> None:
    """Check calls in which all tokens of all ranks go to slots of one rank, to one expert, and to none."""
    slots_per_rank, top_k = case.kernel.dispatch_shape.slots_per_rank, case.config.top_k
    last = case.placement.expert_map.local(case.rank_group.size - 1)
    for routes, what in ((min(slots_per_rank, top_k), "one rank"), (1, "one expert"), (0, "no expert")):
        call = case.call(case.max_tokens, 7, drop=0.0)
        assert isinstance(call.routed, PhysicalRouting)
        row = [*range((case.rank_group.size - 1) * slots_per_rank, case.rank_group.size * slots_per_rank)][:routes] + [
            -1
        ] * (top_k - routes)
        logical = [last[i % slots_per_rank] if i >= 0 else -1 for i in row]
        shape = call.routed.ids.shape
        ids, slots = (torch.tensor(ids, device=case.device).expand(shape) for ids in (logical, row))
        wanted = case.routed(call.x, ids, call.routed.weights)
        to = PhysicalRouting(PhysicalIds(slots), call.routed.weights)
        y = case.kernel(call.x, to)
        case.check(wanted, f"all to {what}", y)
        case.add_fault_unless(routes or not y.any(), "rows without an expert must be zero")


def ids_that_no_expert_has(case: Case) -> None:
    call = case.call(6, 1, drop=0.5)
    assert isinstance(call.routed, PhysicalRouting)
    odd = out_of_range(call.routed, case.kernel.dispatch_shape.num_physical)
    case.check(Call(call.x, odd, call.value, call.limit), "ids out of range")


def views_are_taken(case: Case) -> None:
    """Check rows, ids and weights that are views of wider tensors, int32 ids, and rows at an odd address."""
    call = case.call(6, 2)
    assert isinstance(call.routed, PhysicalRouting)
    width, top_k = call.x.shape[1], case.config.top_k
    ids = torch.cat([call.routed.ids] * 2, 1).int()[:, :top_k]
    weights = torch.cat([call.routed.weights] * 2, 1)[:, :top_k]
    wide = torch.cat([call.x, call.x + 1], 1)[:, :width]
    case.check(Call(wide, PhysicalRouting(PhysicalIds(ids), weights), call.value, call.limit), "views")
    buffer = torch.cat([call.x.new_zeros(1), call.x.flatten()])
    case.check(Call(buffer[1:].view(call.x.shape), call.routed, call.value, call.limit), "rows at an odd address")


def nan_stays_with_its_owner(case: Case) -> None:
    """Check that NaN in rank 0's rows does not reach other ranks, which share experts with it.

    The weights of absent routes are NaN too, on all ranks. Rank 0 gets NaN back if the scheme does not quantize rows.
    """
    call = case.call(5, 3)
    assert isinstance(call.routed, PhysicalRouting)
    absent = call.routed.ids < 0
    routed = PhysicalRouting(call.routed.ids, call.routed.weights.masked_fill(absent, torch.nan))
    if case.rank_group.rank:
        case.check(Call(call.x, routed, call.value, call.limit), "beside NaN")
    else:
        y = case.kernel(torch.full_like(call.x, torch.nan), routed)
        nothing = absent.all(1)
        case.add_fault_unless(not case.scheme.plain or y[~nothing].isnan().all(), "NaN rows came back as numbers")
        case.add_fault_unless((y[nothing] == 0).all(), "rows without an expert must be zero")


def equal_calls_give_equal_bits(case: Case) -> None:
    if not case.kernel.capabilities.deterministic:
        return
    call = case.call(case.max_tokens, 4)
    first = case.kernel(call.x, call.routed)
    for _ in range(3):
        case.add_fault_unless(torch.equal(case.kernel(call.x, call.routed), first), "equal calls must give equal bits")


def weights_rewritten_in_place(case: Case) -> None:
    """Check calls after weights were rewritten, as a migration of experts or `update_expert` does."""
    case.load(1)
    case.check(case.call(7, 5), "after other weights were written")
    case.load(0)
    case.check(case.call(7, 6), "after the first ones came back")


def random_delays(case: Case) -> None:
    """Check calls with random delays: no rank may read data before it is written, or overwrite it before it is read."""
    generator = torch.Generator().manual_seed(case.rank_group.rank)
    calls = [case.call(1 + turn, 10 + turn) for turn in range(6)]
    found = []
    for call in calls:
        share = float(torch.rand(1, generator=generator))
        if case.device.type == "cuda":
            torch.cuda._sleep(int(share * 4e6))  # cycles: 2 ms at most
        else:
            time.sleep(share * 0.002)
        found.append(case.kernel(call.x, call.routed))
    for turn, (call, y) in enumerate(zip(calls, found, strict=True)):
        case.check(call, f"turn {turn}", y)


def under_any_map(case: Case, name: str) -> None:
    case.check(case.call(8, 20), f"map: {name}")


def layers_that_share(case: Case, other: Case) -> None:
    """Check two layers of one dispatch shape that use the same buffers in turn; on GPUs also as CUDA graphs."""
    for turn in range(3):
        for layer in (case, other):
            layer.check(layer.call(4 + turn, 30 + turn), f"turn {turn}")
    if case.device.type == "cuda" and case.kernel.capabilities.cuda_graph:
        _replayed([case, other])
    case.faults += other.faults


def _replayed(cases: list[Case]) -> None:
    """Check graph replays with different rows, routes and numbers of tokens, and eager calls between them."""
    graphs = []
    for case in cases:
        first = case.call(case.max_tokens)
        case.kernel(first.x, first.routed)
        torch.cuda.synchronize(case.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(case.device)):
            assert capturing(case.device)
            y = case.kernel(first.x, first.routed)
        graphs.append((graph, first, y))
    for replay in range(REPLAYS):
        case, (graph, static, y) = cases[replay % len(cases)], graphs[replay % len(cases)]
        # rows that pad a batch to its captured size have no expert; a kernel that routes itself gets no such rows
        fresh = case.call(case.max_tokens, 40 + replay % 8, drop=(0.0, 0.3, 1.0)[(replay + case.rank_group.rank) % 3])
        static.x.copy_(fresh.x)
        if isinstance(static.routed, PhysicalRouting):
            assert isinstance(fresh.routed, PhysicalRouting)
            static.routed.ids.copy_(fresh.routed.ids)
            static.routed.weights.copy_(fresh.routed.weights)
        else:
            assert not isinstance(fresh.routed, PhysicalRouting)
            static.routed.logits.copy_(fresh.routed.logits)
        graph.replay()
        case.check(fresh, f"replay {replay}", y)
        if replay % 10 == 0:
            case.check(case.call(3, 50 + replay), f"a call of its own after replay {replay}")


ANY_KERNEL = (
    uneven_and_empty_ranks,
    equal_calls_give_equal_bits,
    weights_rewritten_in_place,
    random_delays,
)
CHECKS: tuple[Callable[[Case], None], ...] = (
    *ANY_KERNEL,
    all_to_one_rank,
    ids_that_no_expert_has,
    views_are_taken,
    nan_stays_with_its_owner,
)


# --- checks that leave their context unusable -------------------------------------------------------------------------


def one_token_too_many(kind: type[FusedExperts], top_k: int, bound: int, device: torch.device) -> None:
    """Check that a rank with more than max_tokens tokens raises at once, and the others at a later step.

    The rank that raises still serves its experts, so the other ranks' results are correct.
    """
    deadline_s = 20.0 if device.type == "cuda" else 8.0
    with EPContext.from_groups(device=device, deadline_s=deadline_s) as context:
        shared = Shared()
        make = maker(kind, sorted(kind.capabilities.schemes)[0], top_k, bound, context)
        assert make is not None
        case = make(shared)
        sentence = f"rank 1: x has {bound + 1} tokens to dispatch, more than max_tokens={bound}"
        if case.rank_group.rank == 1:
            more = case.call(bound + 1)
            case.add_fault_unless(
                sentence in input_error_message(lambda: case.kernel(more.x, more.routed)),
                "one too many was not refused",
            )
        else:
            case.check(case.call(bound), "beside a rank that refuses")
        barrier(device)
        refusal = wait_for_input_error(2 * deadline_s / 8, context.flight_recorder.check)
        case.add_fault_unless(sentence in refusal, "the refusal did not reach the other ranks")
        shared.destroy()
        raise_faults_on_all_ranks("one token too many", case)


def a_peer_that_comes_too_late(kind: type[FusedExperts], top_k: int, bound: int, device: torch.device) -> None:
    """Check that a late rank is named by a PeerTimeout at the next step, while the kernel still waits on the GPU."""
    deadline_s, lost = 6.0, dist.get_world_size() - 1
    context = EPContext.from_groups(device=device, deadline_s=deadline_s)
    make = maker(kind, sorted(kind.capabilities.schemes)[0], top_k, bound, context)
    assert make is not None
    case = make(Shared())
    case.check(case.call(3), "before")
    barrier(device)
    time.sleep(deadline_s / 8)  # the interval of the flight recorder's heartbeat
    start, message = time.monotonic(), ""
    if case.rank_group.rank == lost:
        time.sleep(1.7 * deadline_s)
    call = case.call(3, 1)
    late = case.kernel(call.x, call.routed)
    while case.rank_group.rank != lost and not message and time.monotonic() - start < 1.7 * deadline_s:
        time.sleep(0.1)
        try:
            context.flight_recorder.check()
        except PeerTimeout as error:
            message = str(error)
    if case.rank_group.rank != lost:
        case.add_fault_unless(
            f"Rank {lost} is alive but behind" in message, f"rank {lost} was not named in {message!r}"
        )
    case.check(call, "when it came after all", late)
    context.flight_recorder.close()
    raise_faults_on_all_ranks("a peer that comes too late", case)
