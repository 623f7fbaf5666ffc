"""What kernels want to know of rows that came in fp8_tensor (`fp8_rows`). Plain torch, and Triton on GPUs: one launch
that never waits."""

from __future__ import annotations

from torch import Tensor

from ep_moe.experts.flashinfer.tensor_scales import TensorScales


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
    from ep_moe.experts.flashinfer import fp8_tensor_rows_triton

    return fp8_tensor_rows_triton
