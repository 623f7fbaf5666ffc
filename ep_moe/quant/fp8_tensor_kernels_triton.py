"""The Triton kernel behind `fp8_tensor_kernels`."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def saturated(value):
    """Within E4M3's finite numbers; what is no number stays none."""
    value = tl.where(value > 448.0, 448.0, value)
    return tl.where(value < -448.0, -448.0, value)


@triton.jit
def round_rows(
    x, input_scales, slots, out, scale_out, experts, rows_out, size,
    SLOTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    lane = tl.arange(0, SLOTS)
    scale = tl.max(tl.load(input_scales + lane, mask=lane < experts, other=0.0))
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scale_out, scale)
    used = n >= 0
    if slots is not None:
        used = n < 0
        for i in tl.static_range(TOP_K):
            slot = tl.load(slots + n * TOP_K + i)
            used = used | ((slot >= 0) & (slot < rows_out))
    value = tl.load(x + n * size + at, mask=inside & used, other=0.0).to(tl.float32)
    # exact division, so that rows rounded before they travelled have the same bits
    number = saturated(tl.div_rn(value, scale)).to(tl.float8e4nv)
    if slots is None:
        tl.store(out + n * size + at, number, mask=inside)
    else:
        for i in tl.static_range(TOP_K):
            slot = tl.load(slots + n * TOP_K + i).to(tl.int64)
            tl.store(out + slot * size + at, number, mask=inside & (slot >= 0) & (slot < rows_out))
