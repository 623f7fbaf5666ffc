"""Per-tensor fp8 scales of one call of `cutlass_op`: where they come from, and where they go."""

from __future__ import annotations

from dataclasses import dataclass

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
