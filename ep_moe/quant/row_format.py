"""How rows are written while they travel (`Wire.dispatch`): which numbers, and which scales beside them.

plain       the layer's dtype
fp8_block   E4M3, a float32 scale per 128 columns (DeepSeek-V3's activations)
fp8_row     E4M3, a float32 scale per row (per-tensor fp8 without calibration)
fp8_tensor  E4M3, all under `Wire.input_scale`, and nothing beside them (calibrated per-tensor fp8)
mxfp8       E4M3, an E8M0 scale per 32 columns
nvfp4       E2M1, two to a byte, an E4M3 scale per 16 columns, all under `Wire.input_scale`

Scales are linear. Rows are rounded once, before the wire or as they are written to it, and `Received.format` tells the
kernel what came: that there are scales beside them does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 128  # columns with a scale of their own in fp8_block
WHOLE_ROW = -1  # instead of their number, where all of a row's have one
SMALLEST = 1e-10  # of fp8_block and fp8_row: a smaller largest magnitude counts as this, so that zeros have a scale


@dataclass(frozen=True)
class RowFormat:
    """How the numbers of a row and its scales are stored.

    Args:
        number: dtype of a row's elements, None for the layer's.
        packed: Columns in one element.
        block: Columns with a scale of their own, 0 for no scales, WHOLE_ROW for all.
        scale: dtype of the scales.
    """

    number: torch.dtype | None = None
    packed: int = 1
    block: int = 0
    scale: torch.dtype = torch.float32

    def columns(self, hidden: int) -> int:
        """Elements of a row.

        Args:
            hidden: H.

        Returns:
            H / packed.
        """
        return hidden // self.packed

    def scales(self, hidden: int) -> int:
        """Scales of a row.

        Args:
            hidden: H.

        Returns:
            Their number, 0 for a format without.
        """
        return 1 if self.block == WHOLE_ROW else hidden // self.block if self.block else 0


ROW_FORMATS = {
    "plain": RowFormat(),
    "fp8_block": RowFormat(torch.float8_e4m3fn, block=BLOCK),
    "fp8_row": RowFormat(torch.float8_e4m3fn, block=WHOLE_ROW),
    "fp8_tensor": RowFormat(torch.float8_e4m3fn),
    "mxfp8": RowFormat(torch.float8_e4m3fn, block=32, scale=torch.uint8),
    "nvfp4": RowFormat(torch.uint8, packed=2, block=16, scale=torch.float8_e4m3fn),
}
