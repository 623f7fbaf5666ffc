"""Rows in E4M3, rounded and widened: fp8_block has a linear float32 scale for each 128 columns, as DeepSeek-V3 rounds
its activations, and fp8_row one for each row; fp8_tensor has one scale that is known beforehand. Plain torch, and
Triton on GPUs.

The torch forms are the definition, and what runs on a CPU; a Triton form is one launch and never waits. The scale of
fp8_tensor is a number of the launch, so that none has to be made on the device. Numbers and scales are those of
`experts.hopper.gemm_fp8_block.quantize_rows`, `quant.fp8_row_kernels.round_rows` and
`experts.flashinfer.call_scales.round_rows`, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.config import Wire
from ep_moe.quant.row_format import BLOCK, SMALLEST
from ep_moe.runtime.devices import on_device

_FP8_MAX = 448.0


def round_fp8(x: Tensor, wire: Wire) -> tuple[Tensor, Tensor | None]:
    """x [T, H] as `wire.dispatch` says, which is one of the three: numbers [T, H], and scales [T, H / 128], [T, 1] or
    None."""
    if wire.dispatch in ("fp8_block", "fp8_row"):
        return round_blocks(x, BLOCK if wire.dispatch == "fp8_block" else x.shape[1])
    assert wire.dispatch == "fp8_tensor"
    assert wire.input_scale is not None
    return round_by(x, wire.input_scale), None


def round_blocks(x: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """x [..., H] to E4M3 [..., H] and scales [..., H / block]: value = number * scale, scale = largest value / 448."""
    x = x.detach().contiguous()
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(*x.shape[:-1], x.shape[-1] // block, device=x.device)
    if x.is_cuda:
        with on_device(x.device):
            _triton().round_blocks(x, out, scale)
        return out, scale
    blocks = x.float().unflatten(-1, (-1, block))
    scale.copy_(blocks.abs().amax(-1).clamp(min=SMALLEST) / _FP8_MAX)
    return out.copy_((blocks * (1 / scale).unsqueeze(-1)).flatten(-2)), scale


def widen_blocks(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse, rounded to `dtype`."""
    wide: Tensor = (x.float().unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)
    return wide.to(dtype)


def round_by(x: Tensor, input_scale: float, out: Tensor | None = None) -> Tensor:
    """x / input_scale in E4M3 [..., H], saturating at 448; a NaN stays one. out: where to, contiguous"""
    x = x.detach().contiguous()
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device) if out is None else out
    if x.is_cuda:
        with on_device(x.device):
            _triton().round_by(x, input_scale, out)
        return out
    return out.copy_((x.float() / x.new_tensor(input_scale, dtype=torch.float32)).clamp(-_FP8_MAX, _FP8_MAX))


def widen_by(x: Tensor, input_scale: float, dtype: torch.dtype) -> Tensor:
    """The inverse, rounded to `dtype`."""
    return (x.float() * input_scale).to(dtype)


def _triton():  # type: ignore[no-untyped-def]
    from ep_moe.quant import fp8_rows_triton

    return fp8_rows_triton
