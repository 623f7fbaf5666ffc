"""The Triton forms of `fp8_tensor_rows`."""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ep_moe.experts.flashinfer.tensor_scales import TensorScales
from ep_moe.runtime.grids import next_power_of_2


def fill_scales(input_scale: float, w13: Tensor, w2: Tensor, second: Tensor, scales: TensorScales) -> None:
    _fill_scales[(1,)](
        input_scale, w13, w2, second, scales.alpha1, scales.quant2, scales.alpha2, scales.input_scale, len(w13),
        SLOTS=next_power_of_2(len(w13)),
    )  # fmt: skip


@triton.jit
def _fill_scales(
    input_scale, w13, w2, second, alpha1, quant2, alpha2, out_scale, slots, SLOTS: tl.constexpr
):  # fmt: skip
    slot = tl.arange(0, SLOTS)
    inside = slot < slots
    inner = tl.load(second + slot, mask=inside, other=1.0)
    tl.store(alpha1 + slot, tl.load(w13 + slot, mask=inside, other=0.0) * input_scale, mask=inside)
    tl.store(quant2 + slot, tl.div_rn(1.0, inner), mask=inside)
    tl.store(alpha2 + slot, tl.load(w2 + slot, mask=inside, other=0.0) * inner, mask=inside)
    tl.store(out_scale, input_scale)
