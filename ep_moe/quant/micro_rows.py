"""Rows rounded with linear block scales, as Blackwell's kernels take them. Plain torch, and Triton on GPUs.

The torch forms are the definition, and what runs on a CPU; the Triton forms are one launch each, allocate nothing and
never wait.
"""

from __future__ import annotations

from torch import Tensor

from ep_moe.quant.microscale import quantize_mxfp8, quantize_nvfp4
from ep_moe.runtime.devices import on_device


def nvfp4_rows(x: Tensor, global_scale: Tensor, data: Tensor, scale: Tensor) -> None:
    """`quantize_nvfp4` in place. x: [N, H]; global_scale: float32 scalar; data: uint8 [N, H / 2]; scale:
    float8_e4m3fn [N, H / 16]; all contiguous"""
    if x.is_cuda:
        with on_device(x.device):
            _triton().nvfp4_rows(x, global_scale, data, scale)
        return
    for out, rounded in zip((data, scale), quantize_nvfp4(x, global_scale), strict=True):
        out.copy_(rounded)


def mxfp8_rows(x: Tensor, data: Tensor, scale: Tensor) -> None:
    """`quantize_mxfp8` in place. x: [N, H]; data: float8_e4m3fn [N, H]; scale: uint8 [N, H / 32]; all contiguous"""
    if x.is_cuda:
        with on_device(x.device):
            _triton().mxfp8_rows(x, data, scale)
        return
    for out, rounded in zip((data, scale), quantize_mxfp8(x), strict=True):
        out.copy_(rounded)


def _triton():  # type: ignore[no-untyped-def]
    from ep_moe.quant import micro_rows_triton

    return micro_rows_triton
