"""Batch-invariant row operations: a row's result depends, bit for bit, only on that row. It does not depend on the
number of rows, the row's index, or the number of threads.

- **Products** multiply tiles of `ROWS` rows. The last tile is padded with zeros. Each tile is the same call: the same
  shape, the same alignment of all rows, and on a CPU one thread. MKL chooses its kernel by the number of rows, and
  splits sums by the number of threads. With few columns on AMD Zen it sums a row by its alignment.
- **Functions of elements** run on blocks of `BLOCK` elements on a CPU. There torch computes the last elements of a
  tensor, and of each thread's part, by other instructions than the rest.
- **Sums over columns** add the two halves of the columns until one is left. Sums over rows (gradients of weights) add
  tiles in order.
- **Top-k** has no ties: of equal scores the lower column comes first.

A row's index within its tile must not matter either. BLAS does not guarantee this;
`tests/unit/runtime/test_batch_invariant.py` measures it.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ep_moe.runtime.batched_gradients import refuse_batch
from ep_moe.runtime.devices import on_device
from ep_moe.runtime.first_order import first_order_only
from ep_moe.runtime.launch_cache import cdiv
from ep_moe.runtime.triton_compat import tl, triton

ROWS = 32  # rows of a tile: fewer waste a CPU's throughput, more waste work on single rows
BLOCK = 4096  # elements: whole vectors on every CPU, and too few for torch to split them over threads
_ALIGNMENT = 64  # bytes: torch aligns new CPU memory at least so


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows by a matrix, as `torch.nn.functional.linear` does.

    Args:
        x: [M, in].
        weight: [out, in].
        bias: [out]. Default: none.

    Returns:
        [M, out].
    """
    return grouped_linear(x, weight.unsqueeze(0), None if bias is None else bias.unsqueeze(0), [len(x)])


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int]) -> Tensor:
    """Multiply each group of rows by its own matrix.

    The gradient of a matrix is summed over tiles of its rows in order, in float32.

    Args:
        x: [M, in], sorted by group.
        weight: [L, out, in].
        bias: [L, out]. Default: none.
        counts: Rows of each of the L groups, M in total.

    Returns:
        [M, out].
    """
    out: Tensor = _GroupedLinear.apply(x, weight, bias, tuple(counts))
    return out


def pointwise(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply an elementwise function.

    Args:
        function: Elementwise and differentiable. Takes one-dimensional tensors of one size, and returns one of that
            size.
        *tensors: Tensors of one shape.

    Returns:
        A tensor of that shape.
    """
    out: Tensor = _Pointwise.apply(function, *tensors)
    return out


def sum_columns(x: Tensor) -> Tensor:
    """Sum over the last dimension, by adding its two halves until one column is left.

    Args:
        x: [..., N].

    Returns:
        [...].
    """
    width = x.shape[-1]
    size = 1 << max(width - 1, 0).bit_length()
    if size != width:
        x = torch.nn.functional.pad(x, (0, size - width))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


def softmax(x: Tensor) -> Tensor:
    """Compute the softmax over the last dimension, in float32.

    Args:
        x: [..., N], floating point.

    Returns:
        float32 [..., N].
    """
    x = x.float()
    powers = pointwise(torch.exp, x - x.detach().amax(-1, keepdim=True))
    return powers / sum_columns(powers).unsqueeze(-1)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return the columns of the k highest scores of each row, in descending order; of equal scores the lower column.

    Args:
        scores: [..., N], dtype of at most 32 bits. NaN counts as the highest score.
        k: At most N.

    Returns:
        int64 [..., k], columns.
    """
    width = scores.shape[-1]
    found = scores.detach().float() + 0.0  # -0.0 and 0.0 are equal
    bits = found.masked_fill(found.isnan(), torch.nan).contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits)  # integers in the order of the scores
    places = 1 << max(width - 1, 0).bit_length()
    column = torch.arange(width, device=scores.device)
    best: Tensor = (ordered * places + (places - 1 - column)).topk(k).values
    return places - 1 - (best & (places - 1))


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Run with one thread on a CPU, because MKL splits sums by the number of threads."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[int, ...]) -> Tensor:
        assert sum(counts) == len(x), "counts are of all rows"
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        out = x.new_empty(len(x), weight.shape[1])
        tile = _Tile(x)
        with _one_thread(x.device):
            for group, parts in _tiles(counts):
                columns = _aligned(weight[group]).t()
                for part in parts:
                    rows = (tile.of(x, part) @ columns)[: part.stop - part.start]
                    out[part] = rows if bias is None else rows + bias[group]
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        refuse_batch(grad)
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(x.dtype, torch.float32)
        dx = torch.empty_like(x) if to_x else None
        dw = weight.new_zeros(weight.shape) if to_weight else None
        db = weight.new_zeros(weight.shape[:2]) if to_bias else None
        rows, grads = _Tile(x), _Tile(grad)
        with _one_thread(x.device):
            for group, parts in _tiles(ctx.counts):
                matrix = _aligned(weight[group]) if dx is not None else None
                of_matrix = None if dw is None else weight.new_zeros(weight.shape[1:], dtype=wide)
                of_bias = None if db is None else weight.new_zeros(weight.shape[1], dtype=wide)
                for part in parts:
                    one = grads.of(grad, part)
                    if dx is not None and matrix is not None:
                        dx[part] = (one @ matrix)[: part.stop - part.start]
                    if of_matrix is not None:
                        of_matrix += one.to(wide).t() @ rows.of(x, part).to(wide)
                    if of_bias is not None:
                        of_bias += sum_columns(one.to(wide).t())
                if dw is not None and of_matrix is not None:
                    dw[group] = of_matrix
                if db is not None and of_bias is not None:
                    db[group] = of_bias
        return dx, dw, db, None


class _Tile:
    """Memory for `ROWS` rows like those of x, all with the same alignment."""

    def __init__(self, x: Tensor) -> None:
        width, unit = x.shape[1], _ALIGNMENT // x.itemsize
        self._rows = x.new_zeros(ROWS, cdiv(width, unit) * unit)[:, :width]

    def of(self, x: Tensor, part: slice) -> Tensor:
        """Return these rows of x, padded with zeros to `ROWS`."""
        count = part.stop - part.start
        self._rows[:count] = x[part]
        if count < ROWS:
            self._rows[count:] = 0
        return self._rows


def _tiles(counts: Sequence[int]) -> Iterator[tuple[int, list[slice]]]:
    """Yield each group with rows, and its parts of at most `ROWS` rows."""
    start = 0
    for group, count in enumerate(counts):
        end = start + count
        if count:
            yield group, [slice(at, min(at + ROWS, end)) for at in range(start, end, ROWS)]
        start = end


def _aligned(matrix: Tensor) -> Tensor:
    """Return matrix, contiguous and aligned as new memory is, because libraries may choose kernels by alignment."""
    matrix = matrix.contiguous()
    return matrix.clone() if matrix.data_ptr() % _ALIGNMENT else matrix


class _Pointwise(Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return _in_blocks(lambda *parts: (function(*parts),), tensors)[0]

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batch(grad)

        def gradients(given: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
            leaves = [part.detach().requires_grad_() for part in parts]
            with torch.enable_grad():
                out = ctx.function(*leaves)
            return torch.autograd.grad(out, leaves, given)

        return (None, *_in_blocks(gradients, (grad, *ctx.saved_tensors)))


def _in_blocks(function: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Apply function to blocks of elements, and return results of the tensors' shape.

    On a GPU one block suffices, because it computes each element by the same instructions.
    """
    shape, count = tensors[0].shape, tensors[0].numel()
    if tensors[0].device.type != "cpu":
        flat = [tensor.reshape(-1) for tensor in tensors]
        return [out.view(shape) for out in function(*flat)]
    size = max(-(-count // BLOCK), 1) * BLOCK
    padded = []
    for tensor in tensors:
        whole = tensor.new_zeros(size)
        whole[:count] = tensor.reshape(-1)
        padded.append(whole.split(BLOCK))
    parts = [function(*part) for part in zip(*padded, strict=True)]
    return [torch.cat(found)[:count].view(shape) for found in zip(*parts, strict=True)]


_COLUMNS = 1024  # columns of a program


def repeat_rows(x: Tensor, top_k: int) -> Tensor:
    """Repeat each row K times. It reads each row once, unlike torch's operator, which reads a view with stride 0.

    Args:
        x: [T, H], on a GPU.
        top_k: K.

    Returns:
        [T * K, H].
    """
    x, (tokens, size) = x.contiguous(), x.shape
    out = x.new_empty(tokens * top_k, size)
    if out.numel():
        with on_device(x.device):
            _repeat_rows[(tokens, cdiv(size, _COLUMNS))](x, out, size, TOP_K=top_k, COLUMNS=_COLUMNS)
    return out


def sum_routes(rows: Tensor, top_k: int, ids: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """Add the K rows of each token in order, in float32, starting from 0.0.

    The result is bitwise equal to that of separate torch operators. These would need three launches per route; this
    needs one in total.

    Args:
        rows: [T * K, H], on a GPU.
        top_k: K.
        ids: [T, K]; a route with a negative id has weight 0. None if weights is None.
        weights: float32 [T, K], None for ones.

    Returns:
        [T, H] of the rows' dtype.
    """
    rows, tokens, size = rows.contiguous(), len(rows) // top_k, rows.shape[1]
    given = (None, None) if ids is None or weights is None else (ids.contiguous(), weights.contiguous())
    out = rows.new_empty(tokens, size)
    if out.numel():
        with on_device(rows.device):
            _sum_routes[(tokens, cdiv(size, _COLUMNS))](
                rows, *given, out, size, TOP_K=top_k, COLUMNS=_COLUMNS, enable_fp_fusion=False
            )
    return out


@triton.jit
def _repeat_rows(x, out, size, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    row = tl.load(x + token * size + column, mask=inside)
    for route in tl.static_range(TOP_K):
        tl.store(out + (token * TOP_K + route) * size + column, row, mask=inside)


@triton.jit
def _sum_routes(rows, ids, weights, out, size, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute `sum_routes`. Products are rounded before they are added, as by torch's operators."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    total = tl.zeros([COLUMNS], tl.float32)
    for route in tl.static_range(TOP_K):
        at = token * TOP_K + route
        one = tl.load(rows + at * size + column, mask=inside, other=0.0).to(tl.float32)
        if weights is not None:
            one *= tl.where(tl.load(ids + at) < 0, 0.0, tl.load(weights + at))
        total += one
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=inside)
