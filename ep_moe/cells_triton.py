"""Cells of 8 bytes, 4 of data and the number of a call: each arrives whole, so that who reads one knows by itself
whether it is this call's."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def put_cells(at, value, number, mask):
    """value: 32 bits each"""
    cell = (value.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
    tl.store(at, cell, mask=mask, cache_modifier=".wt")  # to the peer, past caches


@triton.jit
def late_cells(cell, number, mask):
    """How many are of another call."""
    return tl.sum((((cell >> 32).to(tl.int32) != number) & mask).to(tl.int32), axis=0)
