"""The layouts of each scheme for FlashInfer's CUTLASS MoE on Hopper and, below, on Blackwell.

Rows of w13 are up first, then gate (`flashinfer.fused_moe.cutlass_fused_moe`: fc1 is [up; gate]). Swapping equal halves
commutes with every interleave of 4-bit weights (`cutlass_mixed`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.quant.schemes import Rounding, Scheme
from ep_moe.quant.weight_formats import TensorSpec
from ep_moe.weights.layouts import cutlass_mixed as mixed
from ep_moe.weights.layouts.base import ScaleLayout, WeightLayout, arrange, linearize_scales, swap_halves

BOUND = "w13_bound"
SM90_SCHEMES = ("none", "fp8_static", "fp8_dynamic", "fp8_block", "mxfp4", "mxfp4_fp8", "int4_fp8")


class _Layout(ABC):
    """A mixed-input layout of a packed matrix: the data (suffix ""), "_scale" and sometimes "_residual"."""

    def parts(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """Return the specs of a matrix's parts by suffix. Only scales differ from the canonical specs or are added."""
        return {"": TensorSpec((rows, columns // 2), torch.uint8)} | self.scales(rows // 64, columns // 128)

    def scales(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        return {"_scale": TensorSpec((rows, columns, 16, 4), torch.int32)}

    @abstractmethod
    def fold(self, data: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Convert canonical data and scales to the parts."""

    @abstractmethod
    def unfold(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Convert the parts to canonical data and scales: the inverse of `fold`."""


class _Mxfp4Bf16(_Layout):
    def fold(self, data: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"": mixed.interleave_mxfp4_bf16(data), "_scale": mixed.fold_mxfp4_scale(scale)}

    def unfold(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return mixed.deinterleave_mxfp4_bf16(parts[""]), mixed.unfold_mxfp4_scale(parts["_scale"])


class _Mxfp4Fp8(_Layout):
    """Exact if a matrix's block exponents span at most `cutlass_mixed.HUMMING_RANGE`. Otherwise the blocks with smaller
    exponents are rounded."""

    def scales(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        return super().scales(rows, columns) | {"_residual": TensorSpec((), torch.float32)}

    def fold(self, data: Tensor, scale: Tensor) -> dict[str, Tensor]:
        weight, offset, residual = mixed.fold_humming(data, scale)
        return {"": weight, "_scale": offset, "_residual": residual * mixed.HUMMING_COMPENSATION}

    def unfold(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return mixed.unfold_humming(parts[""], parts["_scale"], parts["_residual"] / mixed.HUMMING_COMPENSATION)


class _Int4Fp8(_Layout):
    def scales(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        return {"_scale": TensorSpec((rows, columns, 8, 8), torch.bfloat16)}

    def fold(self, data: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"": mixed.interleave_int4_fp8(data), "_scale": mixed.fold_int4_scale(scale)}

    def unfold(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return mixed.deinterleave_int4_fp8(parts[""]), mixed.unfold_int4_scale(parts["_scale"])


_LAYOUTS: dict[str, _Layout] = {"mxfp4": _Mxfp4Bf16(), "mxfp4_fp8": _Mxfp4Fp8(), "int4_fp8": _Int4Fp8()}


class CutlassSm90(WeightLayout):
    """The layout on Hopper: up first, MXFP4 and INT4 interleaved, and `w13_bound` for dynamically quantized FP8.

    w13_bound is a float32 scalar b with |activation(w13 @ x + bias)| <= b * (|x|**2 + 1) for every x, by Cauchy-Schwarz
    on the rows of gate and up. The kernel quantizes this activation with a scale that must be known before the call.
    """

    def __init__(self, config: MoEConfig, scheme: Scheme, dtype: torch.dtype, etp: int = 1) -> None:
        super().__init__(config, scheme, dtype, etp)
        rows, inner, hidden = config.w13_rows // etp, config.intermediate_size // etp, config.hidden_size
        self._layout = _LAYOUTS.get(scheme.name)
        self._specs = dict(self.canonical)
        if self._layout is not None:
            for name, (out, contracted) in {"w13": (rows, hidden), "w2": (hidden, inner)}.items():
                self._specs |= {name + part: spec for part, spec in self._layout.parts(out, contracted).items()}
        if scheme.activations is Rounding.FP8_DYNAMIC:
            self._specs[BOUND] = TensorSpec((), torch.float32)

    def specs(self) -> dict[str, TensorSpec]:
        return self._specs

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stored = self._swapped(tensors)
        if self._layout is not None:
            for name in ("w13", "w2"):
                parts = self._layout.fold(stored[name], stored[f"{name}_scale"])
                stored |= {name + part: tensor for part, tensor in parts.items()}
        if BOUND in self._specs:
            stored[BOUND] = activation_bound(self.config, self.scheme, tensors)
        return stored

    def restore(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = {name: tensor for name, tensor in stored.items() if name in self.canonical}
        if self._layout is not None:
            for name in ("w13", "w2"):
                parts = {part: stored[name + part] for part in self._layout.parts(64, 128)}
                tensors[name], tensors[f"{name}_scale"] = self._layout.unfold(parts)
        return self._swapped(tensors)

    def _swapped(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Swap gate and up in all tensors of w13, if it has a gate."""
        gated = self.config.activation.gated
        return {
            name: swap_halves(tensor) if gated and name.startswith("w13") and tensor.dim() else tensor
            for name, tensor in tensors.items()
        }


def activation_bound(config: MoEConfig, scheme: Scheme, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return b such that |activation| <= b * (|x|**2 + 1), a float32 scalar, from one expert's canonical tensors.

    The magnitude of every activation is at most |gate| * |up|: silu and gelu shrink their argument, and squared relu is
    relu * relu. With a row w and bias c, |w @ x + c| <= |(w, c)| * sqrt(|x|**2 + 1). The clamped SwiGLU multiplies by
    up + 1 instead of up, which |(wu, cu)| + 1 bounds.
    """
    w13 = scheme.dequantize(tensors, "w13")
    square = w13.square().sum(1)
    if "w13_bias" in tensors:
        square = square + tensors["w13_bias"].float().square()
    length = square.sqrt()
    if not config.activation.gated:
        return length.square().max()
    gate, up = length.chunk(2)
    from_one = 1.0 if config.activation.value == "swiglu_clamped" else 0.0
    return (gate * (up + from_one)).max()


# --- Blackwell --------------------------------------------------------------------------------------------------------
# Data are unchanged. Block scales are swizzled as tensor cores load them, and padded with zeros to whole tiles of 128
# rows x 4 blocks. The binding reads 4-bit data as int64 and scales as int32 (getQuantParams in
# flashinfer_cutlass_fused_moe_binding.cu of 0.7.2). The call creates these views.

SM100_SCHEMES = ("nvfp4", "mxfp4_mxfp8", "mxfp8")


class CutlassSm100(CutlassSm90):
    """The layouts of Blackwell's schemes, and those of `CutlassSm90`: a scheme has one layout on all GPUs.

    Global and input scales stay as in the checkpoint. The scales that the kernel reads depend on which experts a rank
    holds, so the call computes them.
    """

    def __init__(self, config: MoEConfig, scheme: Scheme, dtype: torch.dtype, etp: int = 1) -> None:
        super().__init__(config, scheme, dtype, etp)
        self._swizzled = ("w13_scale", "w2_scale") if scheme.name in SM100_SCHEMES else ()
        for name in self._swizzled:
            (rows, blocks), stored = self.canonical[name].shape, self.canonical[name].dtype
            self._specs[name] = TensorSpec((-(-rows // 128) * 128, -(-blocks // 4) * 4), stored)

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stored = super().prepare(tensors)
        return stored | {name: arrange(stored[name], ScaleLayout.SWIZZLED_128X4) for name in self._swizzled}

    def restore(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scales = {
            name: linearize_scales(stored[name], ScaleLayout.SWIZZLED_128X4, *self.canonical[name].shape)
            for name in self._swizzled
        }
        return super().restore({**stored, **scales})
