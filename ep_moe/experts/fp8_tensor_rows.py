"""Rows in fp8_tensor: E4M3 under one scale that is known beforehand. Plain torch, and Triton on GPUs.

The torch forms are the definition, and what runs on a CPU; the Triton forms are one launch each and never wait. The
scale is a number of the launch, so that none has to be made on the device. Numbers and scales are those of
`fp8_scales.round_rows`, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.experts.fp8_scales import FP8_MAX, TensorScales


def round_by(x: Tensor, input_scale: float) -> Tensor:
    """x / input_scale in E4M3 [..., H], saturating at 448; a NaN stays one."""
    x = x.detach().contiguous()
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if x.is_cuda:
        _triton().round_by(x, input_scale, out)
        return out
    return out.copy_((x.float() / torch.tensor(input_scale)).clamp(-FP8_MAX, FP8_MAX))


def widen_by(x: Tensor, input_scale: float, dtype: torch.dtype) -> Tensor:
    """The inverse, rounded to `dtype`."""
    return (x.float() * input_scale).to(dtype)


def fill_scales(input_scale: float, w13: Tensor, w2: Tensor, second: Tensor, scales: TensorScales) -> None:
    """All of `scales`, as `fp8_scales.round_rows` leaves them, for rows that came rounded.

    w13, w2, second: float32 [L], scales of the weights and of the second product's input
    """
    if w13.is_cuda:
        _triton().fill_scales(input_scale, w13, w2, second, scales)
        return
    scales.alpha1.copy_(w13 * input_scale)
    scales.quant2.copy_(1 / second)
    scales.alpha2.copy_(w2 * second)
    scales.input_scale.fill_(input_scale)


def _triton():  # type: ignore[no-untyped-def]
    from ep_moe.experts import fp8_tensor_rows_triton

    return fp8_tensor_rows_triton
