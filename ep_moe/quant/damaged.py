"""Detect damaged codes and scales, with which a layer would compute NaN or values of the wrong sign."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ep_moe.quant.fp8 import FP8, FP8_MAX
from ep_moe.quant.microscale import e8m0_values
from ep_moe.quant.weight_formats import WeightFormat

_E8M0_NAN = 255


def damaged(name: str, tensor: Tensor) -> str | None:
    """Check a tensor for codes and scales that do not represent finite values.

    Args:
        name: The name of an expert's tensor in a quantized scheme, such as `w13`, `w13_scale` or `w2_input_scale`.
        tensor: The tensor, of the scheme's dtype.

    Returns:
        The violated requirement, or None.
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


def damaged_products(name: str, tensors: Mapping[str, Tensor], weights: WeightFormat) -> str | None:
    """Check a matrix for scales that make codes 0 or infinite.

    Args:
        name: "w13" or "w2".
        tensors: The codes of the matrix and all their scales, by name. `damaged` must have accepted each of them.
        weights: The format of the matrix.

    Returns:
        The violated requirement, or None.
    """
    codes = tensors[name]
    scales = {
        part: tensors[name + part].to(codes.device) for part in ("_scale", "_global_scale") if name + part in tensors
    }
    zero = {part: scale.float() == 0 for part, scale in scales.items() if scale.dtype != torch.uint8}
    # the scale of an NVFP4 block of small values may round to 0, but not those of a whole matrix
    if "_global_scale" in scales and not bool(zero["_scale"].all()):
        del zero["_scale"]
    for part, where in zero.items():
        if bool(where.any()):
            ones = {other: torch.ones_like(scale) for other, scale in scales.items()}
            lost = weights.dequantize({"": codes} | ones | {part: where.to(scales[part].dtype)})
            if count := int((lost != 0).sum()):
                wanted = f"must not be 0 for {count} codes of {name} that are not"
                return f"{name}{part} {wanted}; quantize the numbers again"
    largest = 1.0
    for scale in scales.values():
        largest *= (e8m0_values(scale) if scale.dtype == torch.uint8 else scale.float()).amax().item()
    if largest <= torch.finfo(torch.float32).max / FP8_MAX:
        return None
    return _wrong(f"{name} times its scales", weights.dequantize({"": codes} | scales).isfinite(), "finite in float32")


def _wrong(name: str, good: Tensor, wanted: str, remedy: str = "quantize the numbers") -> str | None:
    if bool(good.all()):
        return None
    return f"{name} must be {wanted}, and {int((~good).sum())} of {good.numel()} are not; {remedy} again"
