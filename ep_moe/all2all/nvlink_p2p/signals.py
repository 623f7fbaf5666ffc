"""What ranks tell each other through the peers' memory: flags, and the numbers within packets.

A flag holds the number of a call, set by one rank and awaited by another. Order in memory (PTX's model): a program's
stores to peers, a barrier of the program, its release of a count; the last one to count has acquired all of them and
releases its number to each peer; a peer that acquires the number sees the stores. Numbers may overflow.

A packet has 8 bytes: 4 of data and the number of a call. It arrives whole, and needs no flag."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from ep_moe.runtime.triton_compat import tl, triton


@triton.jit
def last_to_count(count, programs):
    """Whether all of them have stored what they store before it, this one too. The count is ready for the next then."""
    tl.debug_barrier()
    last = tl.atomic_add(count, 1, sem="acq_rel", scope="sys") == programs - 1
    if last:
        tl.store(count, 0)
    return last


@triton.jit
def grid_barrier(count, programs):
    """Until all programs have come here, which must all run at once for it; what they have stored can be read then. The
    count is left at zero."""
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release", scope="gpu")
    seen = 0
    while seen < programs:
        seen = tl.atomic_add(count, 0, sem="acquire", scope="gpu")
    if tl.atomic_add(count, 1, sem="relaxed", scope="gpu") == 2 * programs - 1:
        tl.store(count, 0)


@triton.jit
def tell(peers, place, number, RANKS: tl.constexpr, LANES: tl.constexpr):
    """place: bytes, of this rank's flag in each peer's memory"""
    lane = tl.arange(0, LANES)
    theirs = (tl.load(peers + lane, mask=lane < RANKS, other=0) + place).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs, tl.zeros([LANES], tl.int32) + number, mask=lane < RANKS, sem="release", scope="sys")


@triton.jit
def wait(flags, number, RANKS: tl.constexpr, LANES: tl.constexpr):
    """For exactly this number: no rank is a call ahead, and a larger one may be as old as the numbers' last round,
    since calls by packets count and do not tell."""
    lane = tl.arange(0, LANES)
    missing = 1
    while missing > 0:
        seen = tl.atomic_add(flags + lane, 0, mask=lane < RANKS, sem="acquire", scope="sys")
        missing = tl.sum(((seen != number) & (lane < RANKS)).to(tl.int32), axis=0)


@triton.jit
def put_packets(at, value, number, mask):
    """value: 32 bits each"""
    packet = (value.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
    tl.store(at, packet, mask=mask, cache_modifier=".wt")  # to the peer, past caches


@triton.jit
def late_packets(packet, number, mask):
    """Which are of another call."""
    return ((packet >> 32).to(tl.int32) != number) & mask


@triton.jit
def any_of(late):
    """Whether any is; of few, which each warp has for itself, it may be another answer in each."""
    return tl.max(late.to(tl.int32), axis=0) > 0


@triton.jit
def still_missing(late, others):
    """Above 0 while a program that awaits packets has to go on: the same in all its warps, since one sum goes through
    all of them. Warps with different answers would leave the loop one by one, and meet at different barriers from then
    on.

    late: of all that the program awaits, the many; others: whether any of the few is late, as a warp has it"""
    return tl.sum((late | others).to(tl.int32))


@triton.jit
def packets_of(peers, peer, packets_at, first, PACKETS: tl.constexpr):
    """Of a peer, from row `first` on: two packets are stored at once, and rows have an even number."""
    start = tl.load(peers + peer) + packets_at + first * (8 * PACKETS)
    return tl.multiple_of(start.to(tl.pointer_type(tl.int64)), 16)
