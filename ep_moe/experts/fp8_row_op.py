"""The expert step in fp8 with one scale a matrix and one a row, for many rows, as one torch operator on caller-owned
memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ep_moe.experts.operator import launching_operator
from ep_moe.kernels.launches import Launch
from ep_moe.types import Activation
from ep_moe.workspace import Shapes, carve, carved_bytes

if TYPE_CHECKING:
    from ep_moe.experts.pair_kernels import Home, Told

FP8 = torch.float8_e4m3fn


def shapes(picks: int, hidden: int, inner: int, slots: int) -> Shapes:
    """Scratch for received rows with so many picks in all. E4M3 rows lie in the room of y, which is written after they
    are read."""
    from ep_moe.experts.pair_kernels import list_shapes

    return {
        "row_scale": ((picks,), torch.float32),
        "act": ((picks, inner), torch.bfloat16),
        "act_numbers": ((picks, inner), FP8),
        "act_scale": ((picks,), torch.float32),
        "y": ((picks, hidden), torch.bfloat16),
    } | list_shapes(picks, slots)


def scratch_bytes(picks: int, hidden: int, inner: int, slots: int) -> int:
    return carved_bytes(shapes(picks, hidden, inner, slots))


@launching_operator("fp8_row_moe")
def fp8_row_moe(
    launch: Launch,
    out: Tensor,
    workspace: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    ids: Tensor,
    base: int,
    told: Tensor | None,
    calls: Tensor | None,
    weights: Tensor | None,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    activation: str,
    alpha: float,
    limit: float,
    expected: float,
    chunk: int,
    spare_sms: int,
    peers: Tensor | None,
    offset: int,
    bound: int,
    rank: int,
    number: Tensor | None,
    stride: int,
) -> None:
    """x: bf16 [N, H], or E4M3 with x_scale, float32 [N, 1]; out: bf16 [N, H]
    ids: int [N, K], local ones counted from `base`, others are none
    weights: float32 [N, K], None for 1, a pick of weight 0 is none
    w13: E4M3 [L, 2 * I, H] ([L, I, H] without a gate); w2: E4M3 [L, H, I]; scales: float32 [L], of any stride

    The rest as in `fp8_tensor_moe`.
    """
    from ep_moe.experts.pair_kernels import Home, passes

    home = None if peers is None else Home(peers, offset, bound, rank, number, stride)
    coming = None if told is None or calls is None else (told, calls)
    for part, to in passes(len(x), max(1, chunk // ids.shape[1]), home):
        found = (ids[part], None if weights is None else weights[part], base)
        came = (x[part], None if x_scale is None else x_scale[part])
        _pass(
            launch, out if to else out[part], to, workspace, came, found, coming, w13, w13_scale, w2, w2_scale,
            Activation(activation), alpha, limit, expected, spare_sms,
        )  # fmt: skip
        coming = None  # what comes later is here by then


def _pass(
    launch: Launch, out: Tensor, home: Home | None, workspace: Tensor, came: tuple[Tensor, Tensor | None],
    found: tuple[Tensor, Tensor | None, int], coming: Told | None, w13: Tensor, w13_scale: Tensor, w2: Tensor,
    w2_scale: Tensor, activation: Activation, alpha: float, limit: float, expected: float, spare_sms: int,
) -> None:  # fmt: skip
    """came: x and x_scale; found: ids [N, K], weights and base; coming: `told` of `group_pairs`"""
    from ep_moe.experts import pair_kernels
    from ep_moe.experts.fp8_row_kernels import RowScales, round_rows
    from ep_moe.experts.hopper_gemm import grouped_gemm, tiles_for

    (x, x_scale), picks, (slots, hidden, inner) = came, found[0].numel(), w2.shape
    own = carve(workspace, shapes(picks, hidden, inner, slots))
    act, numbers, y = own["act"], own["act_numbers"], own["y"]
    lists = pair_kernels.list_pairs(own, *found, slots, told=coming, launch=launch)
    rows = y.view(FP8).view(-1, hidden)[:picks]
    round_rows(x, rows, own["row_scale"], x_scale=x_scale, slots=lists.slots, launch=launch)
    first, second = (tiles_for(len(x) * expected / slots, w, spare_sms) for w in (w13, w2))
    grouped_gemm(
        rows, w13, lists.ends, act, first, activation=activation, alpha=alpha, limit=limit, spare_sms=spare_sms,
        scales=RowScales(own["row_scale"], w13_scale), launch=launch,
    )  # fmt: skip
    round_rows(act, numbers, own["act_scale"], counts=lists.ends[-1:], launch=launch)
    grouped_gemm(
        numbers, w2, lists.ends, y, second, spare_sms=spare_sms, scales=RowScales(own["act_scale"], w2_scale),
        launch=launch,
    )  # fmt: skip
    pair_kernels.reduce(y, *found, slots, out, slots=lists.slots, home=home, launch=launch)
