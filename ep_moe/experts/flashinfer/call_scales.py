"""The scales of one call (`tensor_scales`), and rows rounded by them. Plain torch, and Triton on GPUs.

The torch forms are the definition, and what runs on a CPU; the Triton forms are one launch each, allocate nothing and
never wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.experts.flashinfer.tensor_scales import FP8_MAX, Inputs, TensorScales


def round_rows(x: Tensor, w13: Tensor, w2: Tensor, inputs: Inputs, out: Tensor, scales: TensorScales) -> None:
    """x / scale in E4M3, saturating, and all of `scales`.

    x: [N, H]; w13, w2: float32 [L], scales of the weights; out: float8_e4m3fn [N, H]
    """
    if x.is_cuda:
        _triton().round_rows(x, w13, w2, inputs, out, scales)
        return
    first, second = inputs.scales()
    out.copy_((x.float() / first).clamp(-FP8_MAX, FP8_MAX).to(out.dtype))
    scales.alpha1.copy_(w13 * first)
    scales.quant2.copy_(1 / second)
    scales.alpha2.copy_(w2 * second)
    scales.input_scale.copy_(first)


def column_scales(inputs: Inputs, act1: Tensor, act2: Tensor, alpha1: Tensor, alpha2: Tensor) -> None:
    """INT4 weights: the kernel multiplies rows by `act` in bf16 or fp16 and sums by `alpha` in float32, per layer.

    Scales are rounded up to powers of two, so that both cancel exactly.
    act1: [H]; act2: [I]; alpha1, alpha2: float32 [L]
    """
    if act1.is_cuda:
        _triton().column_scales(inputs, act1, act2, alpha1, alpha2)
        return
    first, second = inputs.scales()
    for scale, act, alpha in ((first, act1, alpha1), (second.amax(), act2, alpha2)):
        rounded = _power_of_two(scale)
        if act.dtype == torch.float16:
            rounded = rounded.clamp(2.0**-15, 2.0**14)  # its reciprocal is a normal number of half precision
        act.fill_(1 / rounded)
        alpha.fill_(rounded)


def _power_of_two(scale: Tensor) -> Tensor:
    """The least power of two that is not below `scale` (float32, normal): round the mantissa's bits up."""
    return ((scale.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)


def _triton():  # type: ignore[no-untyped-def]
    from ep_moe.experts.flashinfer import call_scales_triton

    return call_scales_triton
