"""Storage formats of one matrix of an expert.

Values are `data * scale`, in NVFP4 also times a global scale. Scales are linear (row-major, not swizzled).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_moe.quant.fp8 import FP8, FP8_BLOCK, FP8_MAX, to_fp8
from ep_moe.quant.microscale import (
    MX_BLOCK,
    NVFP4_BLOCK,
    NVFP4_RANGE,
    dequantize_int4,
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_nvfp4,
    quantize_int4,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
    scale_to,
)


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one expert's tensor.

    Args:
        shape: The shape.
        dtype: The dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFormat(ABC):
    """The storage of one matrix [rows, columns]: the parts "" (data), "_scale" and "_global_scale", if it has them.

    unit: (rows, columns) of the smallest block that has its own scale
    """

    unit: tuple[int, int] = (1, 1)

    @abstractmethod
    def parts(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Return the specs of one matrix's tensors.

        Args:
            rows: The rows of the matrix.
            columns: The columns of the matrix.
            dtype: The dtype of activations.

        Returns:
            Shapes and dtypes by part.
        """

    @abstractmethod
    def quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Quantize matrices.

        Args:
            weight: A floating-point tensor [..., rows, columns].
            dtype: The dtype of activations.

        Returns:
            The parts, with the same leading dimensions.
        """

    @abstractmethod
    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Dequantize matrices.

        Args:
            parts: The result of `quantize`.

        Returns:
            float32 [..., rows, columns].
        """


class Plain(WeightFormat):
    """The layer's own dtype, without quantization."""

    def parts(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"": TensorSpec((rows, columns), dtype)}

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"": weight.to(dtype)}

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts[""].float()


class Fp8Tensor(WeightFormat):
    """E4M3 with one float32 scale per matrix (gate and up share one)."""

    def parts(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"": TensorSpec((rows, columns), FP8), "_scale": TensorSpec((), torch.float32)}

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        scale = scale_to(weight.float().abs().amax((-2, -1)), FP8_MAX)
        return {"": to_fp8(weight, scale[..., None, None]), "_scale": scale}

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts[""].float() * parts["_scale"][..., None, None]


class Fp8Channels(WeightFormat):
    """E4M3 with a float32 scale per row, or output channel (strategy "channel" of compressed-tensors)."""

    def parts(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"": TensorSpec((rows, columns), FP8), "_scale": TensorSpec((rows,), torch.float32)}

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        scale = scale_to(weight.float().abs().amax(-1), FP8_MAX)
        return {"": to_fp8(weight, scale.unsqueeze(-1)), "_scale": scale}

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts[""].float() * parts["_scale"].unsqueeze(-1)


class Fp8Blocks(WeightFormat):
    """E4M3 with a float32 scale per 128 x 128 block (DeepSeek-V3)."""

    unit = (FP8_BLOCK, FP8_BLOCK)

    def parts(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        blocks = (rows // FP8_BLOCK, columns // FP8_BLOCK)
        return {"": TensorSpec((rows, columns), FP8), "_scale": TensorSpec(blocks, torch.float32)}

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        tiles = _tiles(weight.float())
        scale = scale_to(tiles.abs().amax((-3, -1)), FP8_MAX)
        return {"": to_fp8(tiles, scale[..., :, None, :, None]).flatten(-4, -3).flatten(-2), "_scale": scale}

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        return (_tiles(parts[""].float()) * parts["_scale"][..., :, None, :, None]).flatten(-4, -3).flatten(-2)


class Mxfp4(WeightFormat):
    """E2M1, two per byte (even column in the low nibble), with an E8M0 scale per 32 columns."""

    unit = (1, MX_BLOCK)

    def parts(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {
            "": TensorSpec((rows, columns // 2), torch.uint8),
            "_scale": TensorSpec((rows, columns // MX_BLOCK), torch.uint8),
        }

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        data, scale = quantize_mxfp4(weight)
        return {"": data, "_scale": scale}

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        return dequantize_mxfp4(parts[""], parts["_scale"])


class Mxfp8(WeightFormat):
    """E4M3 with an E8M0 scale per 32 columns."""

    unit = (1, MX_BLOCK)

    def parts(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {
            "": TensorSpec((rows, columns), FP8),
            "_scale": TensorSpec((rows, columns // MX_BLOCK), torch.uint8),
        }

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        data, scale = quantize_mxfp8(weight)
        return {"": data, "_scale": scale}

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        return dequantize_mxfp8(parts[""], parts["_scale"])


class Nvfp4(WeightFormat):
    """E2M1, two per byte (even column in the low nibble), with an E4M3 scale per 16 columns and a float32 global scale.

    The global scale is that of a matrix (gate and up share one).
    """

    unit = (1, NVFP4_BLOCK)

    def parts(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {
            "": TensorSpec((rows, columns // 2), torch.uint8),
            "_scale": TensorSpec((rows, columns // NVFP4_BLOCK), FP8),
            "_global_scale": TensorSpec((), torch.float32),
        }

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        global_scale = scale_to(weight.float().abs().amax((-2, -1)), NVFP4_RANGE)
        data, scale = quantize_nvfp4(weight, global_scale[..., None, None])
        return {"": data, "_scale": scale, "_global_scale": global_scale}

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        return dequantize_nvfp4(parts[""], parts["_scale"], parts["_global_scale"][..., None, None])


class Int4Groups(WeightFormat):
    """Two's complement INT4, two per byte (even column in the low nibble), with a bf16 scale per group of columns.

    Args:
        group: The number of columns that share a scale.
    """

    def __init__(self, group: int) -> None:
        self.group = group
        self.unit = (1, group)

    def parts(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {
            "": TensorSpec((rows, columns // 2), torch.uint8),
            "_scale": TensorSpec((rows, columns // self.group), torch.bfloat16),
        }

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        data, scale = quantize_int4(weight, self.group)
        return {"": data, "_scale": scale}

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        return dequantize_int4(parts[""], parts["_scale"])


class MxInt4(Int4Groups):
    """Two's complement INT4, two per byte (even column in the low nibble), with a bf16 scale per 32 columns."""

    def __init__(self) -> None:
        super().__init__(MX_BLOCK)


def _tiles(weight: Tensor) -> Tensor:
    """Reshape [..., r, c] to [..., r / 128, 128, c / 128, 128]."""
    tiles: Tensor = weight.unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))
    return tiles
