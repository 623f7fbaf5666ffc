"""Cells of 8 bytes, 4 of data and the number of a call: each arrives whole, so that who reads one knows by itself
whether it is this call's."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from ep_moe.runtime.triton_compat import tl, triton


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
