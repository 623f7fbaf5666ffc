"""The kernels between the products of a training step (`gradients`): the activation, and its derivatives.

With float8 they also round the rows that the next product reads, to the same bits as `round_rows` of bf16 rows. A
program then handles a whole row, because it needs the row's largest magnitude.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_moe.quant.fp8 import SMALLEST, e4m3_step, e4m3_under
from ep_moe.runtime.launch_cache import Launch, cdiv, launch_directly, next_power_of_2
from ep_moe.runtime.triton_compat import tl, triton
from ep_moe.types import Activation

_ROWS, _COLUMNS = 32, 128  # rows and columns that a program loads at once


class Float8Rows(NamedTuple):
    """numbers: E4M3 [M, K]; scale: float32 [M], value = number * scale"""

    numbers: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, like: Tensor, rows: int, width: int) -> Float8Rows:
        return cls(like.new_empty(rows, width, dtype=torch.float8_e4m3fn), like.new_empty(rows, dtype=torch.float32))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _value_and_slopes(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """Return the activation and its derivatives by gate and by up. Without a gate its argument is up."""
    if ACTIVATION == "swiglu":
        s = _sigmoid(gate)
        value = gate * s
        return value * up, s * (1.0 + gate * (1.0 - s)) * up, value
    elif ACTIVATION == "geglu":  # noqa: RET505  (the compiler wants one chain)
        s = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        density = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
        return gate * s * up, (s + gate * density) * up, gate * s
    elif ACTIVATION == "swiglu_clamped":
        free_gate, free_up = gate <= limit, (up <= limit) & (up >= -limit)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        s = _sigmoid(alpha * gate)
        value = gate * s
        slope = s * (1.0 + alpha * gate * (1.0 - s))
        return (up + 1.0) * value, tl.where(free_gate, slope * (up + 1.0), 0.0), tl.where(free_up, value, 0.0)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        positive = tl.where(up < 0.0, 0.0, up)
        return positive * positive, up * 0.0, 2.0 * positive


@triton.jit
def number_routes(slots, routes, count, BLOCK: tl.constexpr):
    """Set routes[m] to the index of pair m's route."""
    route = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + route, mask=route < count, other=-1)
    tl.store(routes + slot, route, mask=slot >= 0)


@triton.jit
def _activate(
    h, out, scale, count, size, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    if m < tl.load(count):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        width = size * 2 if GATED else size
        gate = tl.load(h + m * width + at, mask=inside, other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(h + m * width + size + at, mask=inside, other=0.0).to(tl.float32)
        value, _, _ = _value_and_slopes(gate, up, alpha, limit, ACTIVATION)
        value = value.to(h.dtype.element_ty)
        if scale is not None:
            value = value.to(tl.float32)
            step = e4m3_step(tl.max(tl.abs(value)), SMALLEST)
            tl.store(scale + m, step)
            value = e4m3_under(value, step)
        tl.store(out + m * size + at, value, mask=inside)


@triton.jit
def _differentiate(
    h, grad, routes, weights, weighted, grad_h, numbers, scale, grad_weights, ends, experts, size, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    if m < tl.load(ends + experts - 1):
        route = tl.load(routes + m)
        weight = 1.0
        if weights is not None:
            weight = tl.load(weights + route)
        width = size * 2 if GATED else size
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < size
            gate = tl.load(h + m * width + at, mask=inside, other=0.0).to(tl.float32)
            up = gate
            if GATED:
                up = tl.load(h + m * width + size + at, mask=inside, other=0.0).to(tl.float32)
            given = tl.load(grad + m * size + at, mask=inside, other=0.0).to(tl.float32)
            value, by_gate, by_up = _value_and_slopes(gate, up, alpha, limit, ACTIVATION)
            total += value * given
            given *= weight
            if weighted is not None:
                tl.store(weighted + m * size + at, (value * weight).to(weighted.dtype.element_ty), mask=inside)
            by_gate, by_up = (by_gate * given).to(h.dtype.element_ty), (by_up * given).to(h.dtype.element_ty)
            first = m * width + at
            if grad_h is not None:
                if GATED:
                    tl.store(grad_h + first, by_gate, mask=inside)
                    tl.store(grad_h + first + size, by_up, mask=inside)
                else:
                    tl.store(grad_h + first, by_up, mask=inside)
            if numbers is not None:  # a block is a whole row then
                by_gate, by_up = by_gate.to(tl.float32), by_up.to(tl.float32)
                step = e4m3_step(tl.maximum(tl.max(tl.abs(by_gate)), tl.max(tl.abs(by_up))), SMALLEST)
                tl.store(scale + m, step)
                if GATED:
                    tl.store(numbers + first, e4m3_under(by_gate, step), mask=inside)
                    tl.store(numbers + first + size, e4m3_under(by_up, step), mask=inside)
                else:
                    tl.store(numbers + first, e4m3_under(by_up, step), mask=inside)
        tl.store(grad_weights + route, tl.sum(total))


def activate_rows(
    h: Tensor, out: Tensor | Float8Rows, count: Tensor, activation: Activation, alpha: float, limit: float, *,
    launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Compute out[m] = activation(h[m]) for the first count rows.

    h: bf16 [M, 2 * I], gate first ([M, I] without a gate); out: bf16 [M, I], or E4M3 rows
    count: int32 [1], the number of rows
    """
    to, scale = out if isinstance(out, Float8Rows) else (out, None)
    rows, size = to.shape
    block = _block(size, whole=scale is not None)
    launch(
        _activate, (rows, cdiv(size, block)), h, to, scale, count, size, alpha, limit, ACTIVATION=activation.value,
        GATED=activation.gated, SMALLEST=SMALLEST, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


def differentiate(
    h: Tensor, grad: Tensor, routes: Tensor, weights: Tensor | None, ends: Tensor, activation: Activation, alpha: float,
    limit: float, *, grad_weights: Tensor, weighted: Tensor | None, grad_h: Tensor | None,
    rounded: Float8Rows | None = None, launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Compute the gradients of h and of routing weights from the gradient of each row's activation.

    Inputs:
        h: bf16 [M, 2 * I], gate first ([M, I] without a gate)
        grad: bf16 [M, I], the gradient of the activation, not multiplied by the routing weight
        routes: as of `number_routes`; weights: float32 [routes], None for ones; ends: int32 [L]

    Outputs, of which those that are None are not written:
        grad_weights: float32 [routes], the sum of activation * grad
        weighted: bf16 [M, I], weight * activation; may be the memory of grad
        grad_h: bf16, shape of h; may be the memory of h; rounded: the same in E4M3
    """
    numbers, scale = (None, None) if rounded is None else rounded
    rows, size = grad.shape
    block = _block(size, whole=True) if rounded is not None else _fitting_block(size)
    launch(
        _differentiate, (rows,), h, grad, routes, weights, weighted, grad_h, numbers, scale, grad_weights, ends,
        len(ends), size, alpha, limit, ACTIVATION=activation.value, GATED=activation.gated, SMALLEST=SMALLEST,
        BLOCK=block, num_warps=_warps(block) if block > 256 else 2,
    )  # fmt: skip


def _fitting_block(size: int) -> int:
    """Return the columns of a loop's turn: as few as possible beyond the last column, and then as many at once."""
    return min((1024, 512, 256), key=lambda block: cdiv(size, block) * block)


def _block(size: int, *, whole: bool) -> int:
    """Return the columns that a program handles at once. whole: the whole row"""
    width = next_power_of_2(size)
    return width if whole else min(1024, width)


def _warps(block: int) -> int:
    return min(16, max(4, block // 256))


def sum_rows(
    rows: Tensor, ends: Tensor, out: Tensor, routes: Tensor | None = None, weights: Tensor | None = None, *,
    launch: Launch = launch_directly,
) -> None:  # fmt: skip
    """Compute out[e] = the sum of expert e's rows, each times its route's weight, in a fixed order.

    rows: bf16 [M, N], sorted by expert; ends: int32 [L]; out: bf16 or float32 [L, N], zero for an expert without rows
    routes: as of `number_routes`; weights: float32 [routes], None for ones
    """
    experts, size = out.shape
    given: tuple[Any, ...] = (rows, ends, out, None if weights is None else routes, weights, size)
    launch(_sum_rows, (experts, cdiv(size, _COLUMNS)), *given, ROWS=_ROWS, COLUMNS=_COLUMNS)


def add_dots(
    rows: Tensor, bias: Tensor, routes: Tensor, out: Tensor, ends: Tensor, *, launch: Launch = launch_directly
) -> None:
    """Add <bias of the expert, row> to out [routes] for each row's route. rows: bf16 [M, N], by expert; bias: [L, N]"""
    experts, size = bias.shape
    given = (rows, ends, bias, routes, out, size)
    launch(_add_dots, (experts, _SHARES), *given, SHARES=_SHARES, ROWS=_ROWS, COLUMNS=_COLUMNS)


_SHARES = 8  # programs that share an expert's rows


@triton.jit
def _sum_rows(rows, ends, out, routes, weights, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    expert, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    inside = column < size
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        there = row < end
        value = tl.load(
            rows + row.to(tl.int64)[:, None] * size + column[None, :], mask=there[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        if weights is not None:
            route = tl.load(routes + row, mask=there, other=0)
            value *= tl.load(weights + route, mask=there, other=0.0)[:, None]
        total += tl.sum(value, 0)
    to = out + expert.to(tl.int64) * size + column
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_dots(rows, ends, bias, routes, out, size, SHARES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute `add_dots`. One program handles a row, so it adds without atomics."""
    expert = tl.program_id(0)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    for first in range(begin + tl.program_id(1) * ROWS, end, SHARES * ROWS):
        row = first + tl.arange(0, ROWS)
        there = row < end
        total = tl.zeros([ROWS], tl.float32)
        for start in range(0, size, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < size
            value = tl.load(
                rows + row.to(tl.int64)[:, None] * size + column[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)
            own = tl.load(bias + expert.to(tl.int64) * size + column, mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(value * own[None, :], 1)
        route = tl.load(routes + row, mask=there, other=0)
        tl.store(out + route, tl.load(out + route, mask=there, other=0.0) + total, mask=there)
