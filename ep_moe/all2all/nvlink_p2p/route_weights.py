"""The functions `send_route_values` and `receive_route_values` of `nvlink_p2p.reference`, in Triton.

They return one number per route, such as the gradient of its weight. The rank of a route's expert writes the number, as
one packet, to the token's rank. No other rank writes there, so nothing is summed.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from functools import partial

from torch import Tensor

from ep_moe.all2all.nvlink_p2p.buffers import Workspace
from ep_moe.all2all.nvlink_p2p.signals import late_packets, put_packets
from ep_moe.runtime.launch_cache import LaunchSpec, cdiv
from ep_moe.runtime.triton_compat import tl, triton
from ep_moe.runtime.waiting import Waiting

_BLOCK = 256  # routes of a program


def send_route_values(workspace: Workspace, by_route: Tensor, bound: int) -> None:
    key = ("send route values", bound)
    workspace.launch_cache.launch(key, (by_route,), partial(_give_spec, workspace, by_route, bound))


def _give_spec(workspace: Workspace, by_route: Tensor, bound: int) -> LaunchSpec:
    g = workspace.dispatch_shape
    routes = bound * g.top_k
    fixed = (
        workspace.local_tensors["ids"],
        workspace.memory.addresses,
        workspace.sequence,
        workspace.offsets["weight_packets"],
        routes,
        g.slots_per_rank,
    )
    constants = {"RANK": workspace.rank, "BLOCK": _BLOCK}
    return LaunchSpec(_give, (cdiv(routes, _BLOCK), g.num_ranks), (by_route,), fixed, constants)


@triton.jit
def _give(
    by_route, ids, peers, sequence, packets_at, routes, slots_per_rank, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write numbers to the peers. routes: token limit * K. Each rank starts at another peer, so all links are busy."""
    peer = (tl.program_id(1) + RANK) % tl.num_programs(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = peer * tl.cast(routes, tl.int64) + at
    id = tl.load(ids + place, mask=at < routes, other=-1)  # noqa: A001
    mine = (id >= 0) & (id // slots_per_rank == RANK)
    number = tl.load(by_route + place, mask=mine, other=0.0)
    theirs = (tl.load(peers + peer) + packets_at).to(tl.pointer_type(tl.int64))
    put_packets(theirs + at, number.to(tl.int32, bitcast=True), tl.load(sequence), mine)


def receive_route_values(workspace: Workspace, out: Tensor) -> None:
    workspace.launch_cache.launch("receive route values", (out, out.numel()), partial(_take_spec, workspace, out))


def _take_spec(workspace: Workspace, out: Tensor) -> LaunchSpec:
    fixed = (workspace.sent_ids, workspace.local_tensors["weight_packets"], workspace.sequence)
    grid = (cdiv(workspace.sent_ids.numel(), _BLOCK),)
    return LaunchSpec(_take_weights, grid, (out, out.numel()), fixed, {"BLOCK": _BLOCK})


@Waiting
@triton.jit(do_not_specialize=["routes"])
def _take_weights(out, routes, sent, packets, sequence, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number, inside = tl.load(sequence), at < routes
    asked = tl.load(sent + at, mask=inside, other=-1) >= 0
    packet = tl.zeros([BLOCK], tl.int64)
    missing = 1
    while missing > 0:
        packet = tl.load(packets + at, mask=asked, other=0, volatile=True)
        missing = tl.sum(late_packets(packet, number, asked).to(tl.int32))
    tl.store(out + at, packet.to(tl.int32).to(tl.float32, bitcast=True), mask=inside)
