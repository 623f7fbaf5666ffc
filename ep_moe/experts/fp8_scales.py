"""Per-tensor fp8 scales of one call of `cutlass_op`, and rows rounded by them. Plain torch, and Triton on GPUs.

The torch forms are the definition, and what runs on a CPU; the Triton forms are one launch each, allocate nothing and
never wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX = 448.0
TINY = 1e-12  # the scale of rows that are all zeros


@dataclass(frozen=True)
class Inputs:
    """Where the scales of both products' inputs come from.

    Static: `first` and `second` are the checkpoint's, float32 [L] each, and the first product takes the largest.
    Dynamic: `first` holds the rows' extremes (float32 [2], as `row_extremes` leaves them), `second` is `w13_bound`
    (float32 [L]: what an activation cannot exceed per squared length), `cap` what it cannot exceed at all, 0 for none.
    """

    first: Tensor
    second: Tensor
    dynamic: bool
    cap: float = 0.0

    def scales(self) -> tuple[Tensor, Tensor]:
        """float32 scalar and float32 [L]: value = fp8 * scale."""
        if not self.dynamic:
            return self.first.amax(0), self.second
        largest, square = self.first
        bound = self.second * (square + 1)
        if self.cap > 0:
            bound = bound.clamp(max=self.cap)
        return (largest / FP8_MAX).clamp(min=TINY), (bound / FP8_MAX).clamp(min=TINY)


@dataclass(frozen=True)
class TensorScales:
    """`cutlass_fused_moe`'s quant_scales of weights and rows that are fp8: what `round_rows` fills."""

    alpha1: Tensor  # float32 [L]: scale of w13 times scale of the rows
    quant2: Tensor  # float32 [L]: one over the scale of the second product's input
    alpha2: Tensor  # float32 [L]: scale of w2 times that scale
    input_scale: Tensor  # float32 scalar: of the rows


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
    from ep_moe.experts import fp8_scales_triton

    return fp8_scales_triton
