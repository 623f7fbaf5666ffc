"""The order of rows and bytes that FlashInfer's TRTLLM kernels read, as index arithmetic.

The kernels compute w @ x with the weights as the first operand and hand the accumulator's rows to threads in a fixed
pattern, so that stored rows are permuted in blocks of 32. A gated activation is fused into that step: each up row lies
beside its gate row. Facts of FlashInfer 0.7.2: `get_shuffle_matrix_a_row_indices` (utils.py) with the tile of 128 rows,
`get_reorder_rows_for_gated_act_gemm_row_indices` and `convert_to_block_layout` (fused_moe/core.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 32
BLOCK_BYTES = 128  # of a row, in the block-major layout


def row_order(rows: int, *, gated: bool, device: torch.device | None = None) -> Tensor:
    """int64 [rows]: stored row n is the canonical row `row_order[n]`.

    rows: a multiple of 32. gated: canonical rows are gate first, then up; they are interleaved first, up before gate.
    """
    stored = torch.arange(rows, device=device)
    place = stored % BLOCK_ROWS
    interleaved = stored - place + place % 8 * 4 + place // 8
    if not gated:
        return interleaved
    return interleaved // 2 + (1 - interleaved % 2) * (rows // 2)


def shuffle_rows(tensor: Tensor, *, gated: bool) -> Tensor:
    """Canonical rows [rows, ...] to stored ones."""
    return _picked(tensor, row_order(len(tensor), gated=gated, device=tensor.device))


def unshuffle_rows(stored: Tensor, *, gated: bool) -> Tensor:
    """The inverse of `shuffle_rows`."""
    return _picked(stored, row_order(len(stored), gated=gated, device=stored.device).argsort())


def block_major(tensor: Tensor) -> Tensor:
    """[rows, columns] to [blocks, rows, columns of a block]: 128 bytes of each row side by side."""
    blocks: Tensor = tensor.unflatten(1, (-1, BLOCK_BYTES // tensor.itemsize))
    return blocks.transpose(0, 1).contiguous()


def row_major(stored: Tensor) -> Tensor:
    """The inverse of `block_major`."""
    return stored.transpose(0, 1).flatten(1).contiguous()


def _picked(tensor: Tensor, rows: Tensor) -> Tensor:
    """tensor[rows]; as bytes where a number is one, for torch does not index every such dtype on every device."""
    if tensor.itemsize > 1:
        return tensor[rows]
    return tensor.view(torch.uint8)[rows].view(tensor.dtype)
