"""Quantization schemes: the storage format of an expert's matrices, and the quantization of activations.

Tests compare every quantized kernel with the reference experts on dequantized weights.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_moe.checks import did_you_mean
from ep_moe.config import MoEConfig
from ep_moe.errors import ConfigError
from ep_moe.quant.microscale import INT4_GROUP
from ep_moe.quant.weight_formats import (
    Fp8Blocks,
    Fp8Channels,
    Fp8Tensor,
    Int4Groups,
    Mxfp4,
    Mxfp8,
    MxInt4,
    Nvfp4,
    Plain,
    TensorSpec,
    WeightFormat,
)
from ep_moe.renamed import renamed


class Rounding(enum.Enum):
    """How a quantized kernel quantizes activations before a GEMM.

    NONE         not quantized
    FP8_STATIC   E4M3, one scale per matrix, from calibration: tensors `w13_input_scale`, `w2_input_scale`
    FP8_DYNAMIC  E4M3, one scale per matrix, from the rows of the call
    FP8_ROWS     E4M3, one scale per row
    FP8_BLOCKS   E4M3, one scale per row and 128 columns
    NVFP4        E2M1, an E4M3 scale per row and 16 columns, and one calibrated global scale per matrix, as FP8_STATIC
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
        """Whether it needs `w13_input_scale` and `w2_input_scale` of each expert, float32 scalars.

        A call uses one scale for the first GEMM, the largest of the rank's slots. The second GEMM uses each expert's
        own scale.
        """
        return self in (Rounding.FP8_STATIC, Rounding.NVFP4)


@dataclass(frozen=True)
class Scheme:
    """A quantization of a layer's experts: the format of both matrices, and the quantization of activations.

    Args:
        name: The value of `MoELayer(quantization=)`.
        weights: The format of both matrices.
        activations: How a kernel quantizes rows before a GEMM.
    """

    name: str
    weights: WeightFormat
    activations: Rounding = Rounding.NONE

    problem = renamed("problem", "unsupported_reason")

    @property
    def plain(self) -> bool:
        """Whether weights have the layer's dtype, without quantization."""
        return isinstance(self.weights, Plain)

    def expert(self, config: MoEConfig, dtype: torch.dtype, etp: int = 1) -> dict[str, TensorSpec]:
        """Return the specs of one expert's tensors, whole or of an etp rank's shard.

        Args:
            config: The layer's configuration.
            dtype: The layer's dtype.
            etp: The number of ranks that share an expert.

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
            tensors: w13 and w2 in floating point, or one of them. Biases and input scales are returned unchanged.
            dtype: The layer's dtype.

        Returns:
            The scheme's tensors by name.
        """
        parts = {name: tensor for name, tensor in tensors.items() if name not in ("w13", "w2")}
        for name in tensors.keys() & {"w13", "w2"}:
            parts |= {name + part: tensor for part, tensor in self.weights.quantize(tensors[name], dtype).items()}
        return parts

    def dequantize(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        """Dequantize one matrix.

        Args:
            tensors: The scheme's tensors by name.
            name: "w13" or "w2".

        Returns:
            float32, with the matrix's shape.
        """
        return self.weights.dequantize(
            {part: tensors[name + part] for part in ("", "_scale", "_global_scale") if name + part in tensors}
        )

    def unsupported_reason(self, config: MoEConfig, etp: int) -> str | None:
        """Return why the scheme does not support a layer's sizes.

        Args:
            config: The layer's configuration.
            etp: The number of ranks that share an expert.

        Returns:
            The reason, or None if the scheme supports them.
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
    """Return the scheme of a name.

    Args:
        name: A key of `SCHEMES`.

    Returns:
        The scheme.

    Raises:
        ConfigError: No scheme has this name. The message lists all names.
    """
    if name not in SCHEMES:
        hint = did_you_mean(name, SCHEMES)
        raise ConfigError(f"quantization must be one of {', '.join(SCHEMES)}, got {name!r}{hint}")
    return SCHEMES[name]
