"""Rows as they travel: rounded before, where the transport does not do it itself, and widened after."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.config import Wire
from ep_moe.quant.fp8 import round_fp8, widen_blocks, widen_by
from ep_moe.quant.kernels import mxfp8_rows, nvfp4_rows
from ep_moe.quant.microscale import dequantize_mxfp8, dequantize_nvfp4
from ep_moe.quant.row_format import ROW_FORMATS


def round_rows(x: Tensor, wire: Wire) -> tuple[Tensor, Tensor | None]:
    """Round rows as they travel (`Wire.dispatch`).

    Args:
        x: [T, H].
        wire: The format, and its `input_scale` where it has one.

    Returns:
        Numbers [T, H / packed], and scales [T, scales per row], None where the format has none.
    """
    if wire.dispatch == "plain":
        return x, None
    if wire.dispatch in ("fp8_block", "fp8_row", "fp8_tensor"):
        return round_fp8(x, wire)
    form, x, hidden = ROW_FORMATS[wire.dispatch], x.detach().contiguous(), x.shape[1]
    data = torch.empty(len(x), form.columns(hidden), dtype=form.number, device=x.device)
    scale = torch.empty(len(x), form.scales(hidden), dtype=form.scale, device=x.device)
    if wire.dispatch == "mxfp8":
        mxfp8_rows(x, data, scale)
    else:
        assert wire.input_scale is not None
        nvfp4_rows(x, torch.full((), wire.input_scale, device=x.device), data, scale)
    return data, scale


def widen_rows(data: Tensor, scale: Tensor | None, wire: Wire, dtype: torch.dtype) -> Tensor:
    """Undo `round_rows`, up to rounding.

    Args:
        data: [..., H / packed].
        scale: [..., scales per row], or None.
        wire: As for `round_rows`.
        dtype: Of the result.

    Returns:
        [..., H].
    """
    if wire.dispatch == "plain":
        return data
    if wire.dispatch == "fp8_tensor":
        assert wire.input_scale is not None
        return widen_by(data, wire.input_scale, dtype)
    assert scale is not None
    if wire.dispatch in ("fp8_block", "fp8_row"):
        return widen_blocks(data, scale, dtype)
    if wire.dispatch == "mxfp8":
        return dequantize_mxfp8(data, scale).to(dtype)
    assert wire.input_scale is not None
    return dequantize_nvfp4(data, scale, wire.input_scale).to(dtype)
