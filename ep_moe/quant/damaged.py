"""Codes and scales that no scheme writes: with them a layer computes NaN, or numbers of the wrong sign."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.quant.fp8 import FP8

_E8M0_NAN = 255


def damaged(name: str, tensor: Tensor) -> str | None:
    """Look for codes and scales that mean no finite number.

    Args:
        name: Of an expert's tensor in a quantized scheme, such as `w13`, `w13_scale` or `w2_input_scale`.
        tensor: Of the scheme's dtype.

    Returns:
        None, or what it must be and is not.
    """
    if name.endswith("_scale"):
        if tensor.dtype == torch.uint8:
            return _wrong(name, tensor != _E8M0_NAN, "exponents (E8M0) below 255, which is NaN")
        scale = tensor.float()
        if name.endswith("_input_scale"):
            return _wrong(name, scale.isfinite() & (scale > 0), "finite and greater than 0", "calibrate")
        return _wrong(name, scale.isfinite() & (scale >= 0), "finite and at least 0")
    if tensor.dtype == FP8:
        return _wrong(name, (tensor.view(torch.uint8) & 0x7F) != 0x7F, "E4M3 codes other than NaN")
    return None


def _wrong(name: str, good: Tensor, wanted: str, remedy: str = "quantize the numbers") -> str | None:
    if bool(good.all()):
        return None
    return f"{name} must be {wanted}, and {int((~good).sum())} of {good.numel()} are not; {remedy} again"
