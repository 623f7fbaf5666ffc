"""Quantization schemes as data: how an expert's matrices are stored, and how its kernels round the activations.

Values are `data * scale`, in NVFP4 times a global scale. Scales are linear (row-major, no kernel's swizzle). The
dequantized weights through the reference experts are the oracle of every quantized kernel.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_moe.checks import did_you_mean
from ep_moe.config import MoEConfig
from ep_moe.errors import ConfigError
from ep_moe.quant.fp8 import FP8, FP8_BLOCK, FP8_MAX, to_fp8
from ep_moe.quant.microscale import (
    INT4_GROUP,
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
from ep_moe.renamed import renamed


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one expert's tensor.

    Args:
        shape: Its sizes.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFormat(ABC):
    """How one matrix [rows, columns] is stored: a part "" (the data) and, where it has them, "_scale" and, of the whole
    matrix, "_global_scale".

    unit: (rows, columns) of the smallest piece that has scales of its own
    """

    unit: tuple[int, int] = (1, 1)

    @abstractmethod
    def parts(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Describe the tensors of one matrix.

        Args:
            rows: Of the matrix.
            columns: Of the matrix.
            dtype: Of the activations.

        Returns:
            Their shapes and dtypes by part.
        """

    @abstractmethod
    def quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Quantize matrices.

        Args:
            weight: Any float [..., rows, columns].
            dtype: Of the activations.

        Returns:
            The parts, with the same leading sizes.
        """

    @abstractmethod
    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Undo `quantize`, up to rounding.

        Args:
            parts: As `quantize` returns them.

        Returns:
            float32 [..., rows, columns].
        """


class Plain(WeightFormat):
    """Numbers of the layer's own dtype."""

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
    """E4M3 with a float32 scale per row, which is an output channel (compressed-tensors' strategy "channel")."""

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
    """E2M1, two to a byte (even column in the low nibble), with an E8M0 scale per 32 columns."""

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
    """E2M1, two to a byte (even column in the low nibble), with an E4M3 scale per 16 columns and a float32 scale per
    matrix (gate and up share one)."""

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
    """Two's complement INT4, two to a byte (even column in the low nibble), with a bf16 scale per group of columns.

    Args:
        group: Columns with a scale of their own.
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
    """Two's complement INT4, two to a byte (even column in the low nibble), with a bf16 scale per 32 columns."""

    def __init__(self) -> None:
        super().__init__(MX_BLOCK)


class Rounding(enum.Enum):
    """How a quantized kernel rounds its activations before a matrix product.

    NONE         not at all
    FP8_STATIC   E4M3, one scale per matrix, from calibration: tensors `w13_input_scale`, `w2_input_scale`
    FP8_DYNAMIC  E4M3, one scale per matrix, from the rows of the call
    FP8_ROWS     E4M3, one scale per row
    FP8_BLOCKS   E4M3, one scale per row and 128 columns
    NVFP4        E2M1, an E4M3 scale per row and 16 columns, under one global scale per matrix as in FP8_STATIC
    MXFP8        E4M3, an E8M0 scale per row and 32 columns
    """

    NONE = "none"
    FP8_STATIC = "fp8_static"
    FP8_DYNAMIC = "fp8_dynamic"
    FP8_ROWS = "fp8_rows"
    FP8_BLOCKS = "fp8_blocks"
    NVFP4 = "nvfp4"
    MXFP8 = "mxfp8"

    @property
    def calibrated(self) -> bool:
        """Whether it needs the tensors `w13_input_scale` and `w2_input_scale`, float32 scalars, of each expert. One
        call has one scale for the first product, the largest of its slots, and each expert's own for the second."""
        return self in (Rounding.FP8_STATIC, Rounding.NVFP4)


@dataclass(frozen=True)
class Scheme:
    """One quantization of a layer's experts: a weight format for both matrices, and the rounding of activations.

    Args:
        name: As `MoELayer(quantization=)` takes it.
        weights: The format of both matrices.
        activations: How a kernel rounds rows before a matrix product.
    """

    name: str
    weights: WeightFormat
    activations: Rounding = Rounding.NONE

    problem = renamed("problem", "unsupported_reason")

    @property
    def plain(self) -> bool:
        """Whether weights are numbers of the layer's own dtype."""
        return isinstance(self.weights, Plain)

    def expert(self, config: MoEConfig, dtype: torch.dtype, etp: int = 1) -> dict[str, TensorSpec]:
        """Describe one expert's tensors: whole, or an etp rank's piece.

        Args:
            config: The layer.
            dtype: Of the layer.
            etp: Ranks that share an expert.

        Returns:
            Shapes and dtypes by canonical name.
        """
        rows, inner, hidden = config.w13_rows // etp, config.intermediate_size // etp, config.hidden_size
        specs: dict[str, TensorSpec] = {}
        for name, shape in (("w13", (rows, hidden)), ("w2", (hidden, inner))):
            specs |= {name + part: spec for part, spec in self.weights.parts(*shape, dtype).items()}
        if self.activations.calibrated:
            specs |= {f"{name}_input_scale": TensorSpec((), torch.float32) for name in ("w13", "w2")}
        if config.expert_bias:
            specs |= {"w13_bias": TensorSpec((rows,), dtype), "w2_bias": TensorSpec((hidden,), dtype)}
        return specs

    def quantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Quantize the matrices of experts.

        Args:
            tensors: Float w13 and w2, or one of them; biases and input scales are kept as they are.
            dtype: Of the layer.

        Returns:
            This scheme's tensors by name.
        """
        parts = {name: tensor for name, tensor in tensors.items() if name not in ("w13", "w2")}
        for name in tensors.keys() & {"w13", "w2"}:
            parts |= {name + part: tensor for part, tensor in self.weights.quantize(tensors[name], dtype).items()}
        return parts

    def dequantize(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        """Undo `quantize` for one matrix, up to rounding.

        Args:
            tensors: This scheme's, by name.
            name: "w13" or "w2".

        Returns:
            float32, of the matrix's shape.
        """
        return self.weights.dequantize(
            {part: tensors[name + part] for part in ("", "_scale", "_global_scale") if name + part in tensors}
        )

    def unsupported_reason(self, config: MoEConfig, etp: int) -> str | None:
        """Say why a layer of this shape cannot be stored so.

        Args:
            config: The layer.
            etp: Ranks that share an expert.

        Returns:
            None, or the reason.
        """
        row, column = self.weights.unit
        inner = config.intermediate_size // etp
        for name, size, unit in (
            ("hidden_size", config.hidden_size, max(row, column)),
            ("intermediate_size / etp", inner, max(row, column)),
        ):
            if size % unit:
                return f"quantization {self.name} needs {name} to be a multiple of {unit}, got {size}"
        return None


PLAIN = Scheme("none", Plain())
SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        PLAIN,
        Scheme("fp8_static", Fp8Tensor(), Rounding.FP8_STATIC),
        Scheme("fp8_dynamic", Fp8Tensor(), Rounding.FP8_DYNAMIC),
        Scheme("fp8_channel", Fp8Channels(), Rounding.FP8_ROWS),
        Scheme("fp8_block", Fp8Blocks(), Rounding.FP8_BLOCKS),
        Scheme("mxfp4", Mxfp4()),
        Scheme("mxfp4_fp8", Mxfp4(), Rounding.FP8_ROWS),
        Scheme("mxfp4_mxfp8", Mxfp4(), Rounding.MXFP8),
        Scheme("int4_fp8", Int4Groups(INT4_GROUP), Rounding.FP8_DYNAMIC),
        Scheme("int4", Int4Groups(INT4_GROUP)),
        Scheme("mxint4", MxInt4()),
        Scheme("mxint4_fp8", MxInt4(), Rounding.FP8_ROWS),
        Scheme("mxfp8", Mxfp8(), Rounding.MXFP8),
        Scheme("nvfp4", Nvfp4(), Rounding.NVFP4),
        Scheme("nvfp4a16", Nvfp4()),
    )
}


def scheme_of(name: str) -> Scheme:
    """Look up a scheme.

    Args:
        name: One of `SCHEMES`.

    Returns:
        The scheme.

    Raises:
        ConfigError: there is none of this name; lists those that there are.
    """
    if name not in SCHEMES:
        hint = did_you_mean(name, SCHEMES)
        raise ConfigError(f"quantization must be one of {', '.join(SCHEMES)}, got {name!r}{hint}")
    return SCHEMES[name]


def _tiles(weight: Tensor) -> Tensor:
    """[..., r, c] as [..., r / 128, 128, c / 128, 128]."""
    tiles: Tensor = weight.unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))
    return tiles
