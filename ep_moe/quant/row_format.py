"""The formats of rows during transport (`Wire.dispatch`): dtype of the elements, and scales.

plain       the layer's dtype
fp8_block   E4M3, a float32 scale per 128 columns (DeepSeek-V3's activations)
fp8_row     E4M3, a float32 scale per row (per-tensor fp8 without calibration)
fp8_tensor  E4M3, one scale `Wire.input_scale`, which is not sent (calibrated per-tensor fp8)
mxfp8       E4M3, an E8M0 scale per 32 columns
nvfp4       E2M1, two per byte, an E4M3 scale per 16 columns, and one global scale `Wire.input_scale`

Scales are linear. Rows are quantized once: before they are sent (`quantize_for_wire`), or by the transport as it writes
them. A kernel must read the format from `Received.format`: the presence of scales does not identify it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_moe.config import Wire
from ep_moe.quant.fp8 import FP8_BLOCK, round_fp8, widen_blocks, widen_by
from ep_moe.quant.kernels import mxfp8_rows, nvfp4_rows
from ep_moe.quant.microscale import dequantize_mxfp8, dequantize_nvfp4

WHOLE_ROW = -1  # value of `block` if all columns of a row share a scale


@dataclass(frozen=True)
class RowFormat:
    """The storage of a row and its scales.

    Args:
        number: The dtype of a row's elements, None for the layer's.
        packed: The number of columns in one element.
        block: The number of columns that share a scale, 0 for no scales, WHOLE_ROW for all columns.
        scale: The dtype of the scales.
    """

    number: torch.dtype | None = None
    packed: int = 1
    block: int = 0
    scale: torch.dtype = torch.float32

    def columns(self, hidden: int) -> int:
        """Return the number of elements of a row.

        Args:
            hidden: H.

        Returns:
            H / packed.
        """
        return hidden // self.packed

    def scales(self, hidden: int) -> int:
        """Return the number of scales of a row.

        Args:
            hidden: H.

        Returns:
            The number, 0 for a format without scales.
        """
        return 1 if self.block == WHOLE_ROW else hidden // self.block if self.block else 0


ROW_FORMATS = {
    "plain": RowFormat(),
    "fp8_block": RowFormat(torch.float8_e4m3fn, block=FP8_BLOCK),
    "fp8_row": RowFormat(torch.float8_e4m3fn, block=WHOLE_ROW),
    "fp8_tensor": RowFormat(torch.float8_e4m3fn),
    "mxfp8": RowFormat(torch.float8_e4m3fn, block=32, scale=torch.uint8),
    "nvfp4": RowFormat(torch.uint8, packed=2, block=16, scale=torch.float8_e4m3fn),
}


def quantize_for_wire(x: Tensor, wire: Wire) -> tuple[Tensor, Tensor | None]:
    """Quantize rows for transport, in the format of `Wire.dispatch`.

    Args:
        x: [T, H].
        wire: The format, and its `input_scale` if it has one.

    Returns:
        Elements [T, H / packed], and scales [T, scales per row] or None for a format without scales.
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
        nvfp4_rows(x, torch.full((), wire.input_scale, dtype=torch.float32, device=x.device), data, scale)
    return data, scale


def dequantize_from_wire(data: Tensor, scale: Tensor | None, wire: Wire, dtype: torch.dtype) -> Tensor:
    """Dequantize rows of `quantize_for_wire`.

    Args:
        data: [..., H / packed].
        scale: [..., scales per row], or None.
        wire: The wire passed to `quantize_for_wire`.
        dtype: The dtype of the result.

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
