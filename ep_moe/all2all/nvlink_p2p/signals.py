"""Signals between ranks through peer memory: flags, and sequence numbers within packets.

A flag holds the sequence number of a call. One rank sets it, and another waits for it. The order in PTX's memory model:

1. A program stores to its peers, passes a barrier of the program, and increments a counter with release semantics.
2. The last program to increment has acquired all increments. It releases the sequence number to each peer.
3. A peer that acquires the number sees the stores.

Sequence numbers may overflow.

A packet has 8 bytes: 4 of data and 4 of sequence number. It arrives whole, and needs no flag.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from ep_moe.runtime.triton_compat import tl, triton


@triton.jit
def last_to_count(count, programs):
    """Increment a counter, and return whether this is the last of `programs` to do so.

    The stores that all programs made before are visible to the last one, which resets the counter for the next use.
    """
    tl.debug_barrier()
    last = tl.atomic_add(count, 1, sem="acq_rel", scope="sys") == programs - 1
    if last:
        tl.store(count, 0)
    return last


@triton.jit
def grid_barrier(count, programs):
    """Wait until all programs of the grid have arrived. All of them must run at once.

    Their earlier stores can be read afterwards. The counter is left at zero.
    """
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release", scope="gpu")
    seen = 0
    while seen < programs:
        seen = tl.atomic_add(count, 0, sem="acquire", scope="gpu")
    if tl.atomic_add(count, 1, sem="relaxed", scope="gpu") == 2 * programs - 1:
        tl.store(count, 0)


@triton.jit
def tell(peers, place, number, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Set this rank's flag on each peer to `number`. place: byte offset of the flag in a peer's memory"""
    lane = tl.arange(0, LANES)
    theirs = (tl.load(peers + lane, mask=lane < RANKS, other=0) + place).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs, tl.zeros([LANES], tl.int32) + number, mask=lane < RANKS, sem="release", scope="sys")


@triton.jit
def wait(flags, number, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Wait until all ranks' flags equal `number`.

    Equality suffices, because no rank is a call ahead. A comparison by size would be wrong: calls by packets increase
    the number and set no flag, so a flag may be so old that the number has overflowed since.
    """
    lane = tl.arange(0, LANES)
    missing = 1
    while missing > 0:
        seen = tl.atomic_add(flags + lane, 0, mask=lane < RANKS, sem="acquire", scope="sys")
        missing = tl.sum(((seen != number) & (lane < RANKS)).to(tl.int32), axis=0)


@triton.jit
def put_packets(at, value, number, mask):
    """Store packets of a 32-bit value and the sequence number."""
    packet = (value.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
    tl.store(at, packet, mask=mask, cache_modifier=".wt")  # write through the caches to the peer


@triton.jit
def late_packets(packet, number, mask):
    """Return which packets belong to another call, and so have not arrived."""
    return ((packet >> 32).to(tl.int32) != number) & mask


@triton.jit
def any_of(late):
    """Return whether any packet is late. For few packets, which each warp loads itself, so warps may differ."""
    return tl.max(late.to(tl.int32), axis=0) > 0


@triton.jit
def still_missing(late, others):
    """Return a number above 0 while a program must keep polling for packets.

    The sum spans all warps of the program, so the result is the same in each. Warps with different results would leave
    the loop at different times, and then meet at different barriers.

    late: whether each packet of the program's large part is late
    others: whether any of its few other packets is late, as seen by each warp (`any_of`)
    """
    return tl.sum((late | others).to(tl.int32))


@triton.jit
def packets_of(peers, peer, packets_at, first, PACKETS: tl.constexpr):
    """Return the address of a peer's packets from row `first` on.

    It is a multiple of 16, because a row has an even number of packets. Two packets are stored at once.
    """
    start = tl.load(peers + peer) + packets_at + first * (8 * PACKETS)
    return tl.multiple_of(start.to(tl.pointer_type(tl.int64)), 16)
