"""The bf16 expert step as one torch operator on caller-owned memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.experts.operator import operator
from ep_moe.types import Activation
from ep_moe.workspace import Shapes, carve, carved_bytes

BF16 = torch.bfloat16


def shapes(picks: int, hidden: int, inner: int, slots: int) -> Shapes:
    """Scratch for received rows with so many picks in all."""
    from ep_moe.experts.bf16_kernels import UNSORTED
    from ep_moe.experts.pair_kernels import group_workspace

    return {
        "act": ((picks, inner), BF16),
        "y": ((picks, hidden), torch.float32 if picks <= UNSORTED else BF16),
        "source": ((picks,), torch.int32),
        "slots": ((picks,), torch.int32),
        "ends": ((slots,), torch.int32),
        "sorting": ((group_workspace(picks, slots),), torch.int32),
    }


def scratch_bytes(picks: int, hidden: int, inner: int, slots: int) -> int:
    """For passes of as many picks, and of fewer."""
    from ep_moe.experts.bf16_kernels import UNSORTED

    few = min(picks, UNSORTED)  # a pick takes more there
    return max(carved_bytes(shapes(count, hidden, inner, slots)) for count in (picks, few))


@operator("bf16_moe")
def bf16_moe(
    out: Tensor,
    workspace: Tensor,
    x: Tensor,
    ids: Tensor,
    base: int,
    weights: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    alpha: float,
    limit: float,
    expected: float,
    chunk: int,
    spare_sms: int,
) -> None:
    """x, out: bf16 [N, H]; ids: int [N, K], local ones counted from `base`, others are none; weights: float32 [N, K],
    None for 1, a pick of weight 0 is none; w13: bf16 [L, 2 * I, H] ([L, I, H] without a gate), w2: bf16 [L, H, I]

    expected: pairs per row that tiles are chosen for; chunk: picks of one pass
    spare_sms: multiprocessors that the large products leave free
    """
    rows = max(1, chunk // ids.shape[1])
    for start in range(0, len(x), rows):
        part = slice(start, min(start + rows, len(x)))
        picked = None if weights is None else weights[part]
        _pass(
            out[part], workspace, x[part], ids[part], base, picked, w13, w2, Activation(activation), alpha, limit,
            expected, spare_sms,
        )  # fmt: skip


def _pass(
    out: Tensor, workspace: Tensor, x: Tensor, ids: Tensor, base: int, weights: Tensor | None, w13: Tensor, w2: Tensor,
    activation: Activation, alpha: float, limit: float, expected: float, spare_sms: int,
) -> None:  # fmt: skip
    from ep_moe.experts import bf16_kernels as kernels
    from ep_moe.experts import pair_kernels
    from ep_moe.experts.fp8_block_kernels import has_hopper

    rows, top_k = ids.shape
    slots, hidden, inner = w2.shape
    own = carve(workspace, shapes(rows * top_k, hidden, inner, slots))
    act, y, ends, places = own["act"], own["y"], own["ends"], own["slots"].view(rows, top_k)
    cut = kernels.Cut.of(rows * top_k, rows * expected / slots, hopper=has_hopper(x.device))
    found = (ids, weights, base)
    if not cut.sort:
        assert isinstance(cut.first, kernels.Streams)
        assert isinstance(cut.second, kernels.Streams)
        kernels.first_product(x, *found, w13, act, activation, cut.first, alpha=alpha, limit=limit)
        kernels.second_product(act, *found, w2, y, cut.second)
        kernels.reduce_unsorted(y, *found, slots, out)
        return
    pair_kernels.group_pairs(ids, slots, own["source"], places, ends, own["sorting"], base=base, weights=weights)
    lists = kernels.Lists(own["source"], ends)
    if isinstance(cut.first, kernels.Tiles):
        pair_kernels.copy_rows(x, places, y)  # y's room: the second product comes after
        kernels.grouped_gemm(
            y, w13, ends, act, cut.first, activation=activation, alpha=alpha, limit=limit, spare_sms=spare_sms
        )
    else:
        kernels.first_product(x, *found, w13, act, activation, cut.first, lists=lists, alpha=alpha, limit=limit)
    if isinstance(cut.second, kernels.Tiles):
        kernels.grouped_gemm(act, w2, ends, y, cut.second, spare_sms=spare_sms)
    else:
        kernels.second_product(act, *found, w2, y, cut.second, lists=lists)
    pair_kernels.reduce_pairs(y, places, weights, out)
