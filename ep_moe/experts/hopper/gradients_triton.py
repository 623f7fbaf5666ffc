"""What stands between the products of a training step (`gradients`): the activation, and its derivatives."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

from torch import Tensor

from ep_moe.runtime.launch_cache import Launch, at_once, cdiv, next_power_of_2
from ep_moe.runtime.triton_compat import tl, triton
from ep_moe.types import Activation

_ROWS, _COLUMNS = 32, 128  # of a program at once


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _value_and_slopes(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """The activation and its derivatives by gate and by up; without a gate, up is what it is computed of."""
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
    """routes[m]: which of all routes the pair m is."""
    route = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + route, mask=route < count, other=-1)
    tl.store(routes + slot, route, mask=slot >= 0)


@triton.jit
def _activate(h, out, count, size, alpha, limit, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
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
        tl.store(out + m * size + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def differentiate(
    h, grad, routes, weights, grad_h, grad_weights, ends, experts, size, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each row m: grad, of the activation without its weight, becomes weight * activation; grad_h; and the gradient
    of its route's weight, the sum of activation * grad. routes: of `number_routes`; weights: None for ones"""
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
            tl.store(grad + m * size + at, (value * weight).to(grad.dtype.element_ty), mask=inside)
            kind: tl.constexpr = grad_h.dtype.element_ty
            if GATED:
                tl.store(grad_h + m * width + at, (by_gate * given).to(kind), mask=inside)
                tl.store(grad_h + m * width + size + at, (by_up * given).to(kind), mask=inside)
            else:
                tl.store(grad_h + m * width + at, (by_up * given).to(kind), mask=inside)
        tl.store(grad_weights + route, tl.sum(total))


def activate_rows(
    h: Tensor, out: Tensor, count: Tensor, activation: Activation, alpha: float, limit: float, *,
    launch: Launch = at_once,
) -> None:  # fmt: skip
    """out[m] = the activation of h[m], for the first rows.

    h: [M, 2 * I], gate first ([M, I] without a gate); out: [M, I]; count: int32 [1], of the rows
    """
    rows, size = out.shape
    block = min(1024, next_power_of_2(size))
    launch(
        _activate, (rows, cdiv(size, block)), h, out, count, size, alpha, limit, ACTIVATION=activation.value,
        GATED=activation.gated, BLOCK=block,
    )  # fmt: skip


def sum_rows(
    rows: Tensor, ends: Tensor, out: Tensor, routes: Tensor | None = None, weights: Tensor | None = None, *,
    launch: Launch = at_once,
) -> None:  # fmt: skip
    """out[e] = the sum of expert e's rows, each times its route's weight, in their order.

    rows: bf16 [M, N], sorted by expert; ends: int32 [L]; out: bf16 [L, N], zeros for an expert without rows
    routes: of `number_routes`; weights: float32, of all routes; None for ones
    """
    experts, size = out.shape
    given: tuple[Any, ...] = (rows, ends, out, None if weights is None else routes, weights, size)
    launch(_sum_rows, (experts, cdiv(size, _COLUMNS)), *given, ROWS=_ROWS, COLUMNS=_COLUMNS)


def add_dots(
    rows: Tensor, bias: Tensor, routes: Tensor, out: Tensor, ends: Tensor, *, launch: Launch = at_once
) -> None:
    """To out, of all routes, <bias of its expert, its row>. rows: bf16 [M, N], sorted by expert; bias: [L, N]"""
    experts, size = bias.shape
    given = (rows, ends, bias, routes, out, size)
    launch(_add_dots, (experts, _SHARES), *given, SHARES=_SHARES, ROWS=_ROWS, COLUMNS=_COLUMNS)


_SHARES = 8  # of an expert's rows


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
    """A row is one program's alone."""
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
