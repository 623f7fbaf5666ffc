"""The layouts of each scheme for FlashInfer's TRTLLM MoE on Blackwell.

They reproduce `prepare_trtllm_*_weights` of FlashInfer 0.7.2 (fused_moe/prepare.py), which takes weights with up first.
These functions convert canonical tensors, one expert at a time:

scheme                      data                                      scales
none                        rows shuffled, block-major                -
fp8_static                  rows shuffled                             scalars, unchanged
fp8_block                   up first, otherwise unchanged             up first, linear
mxfp8, nvfp4,               rows shuffled                             rows shuffled, then swizzled 128 x 4
mxfp4, mxfp4_mxfp8
mxint4                      rows shuffled, block-major                rows shuffled, then swizzled 128 x 4

Biases are float32, in the order of their matrix's rows. The call computes the kernel's other arguments from the scalars
of each slot (`experts/flashinfer/trtllm_op.py`), so that an expert can move to another slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.quant.schemes import Scheme
from ep_moe.quant.weight_formats import TensorSpec
from ep_moe.weights.layouts.base import ScaleLayout, WeightLayout, arrange, linearize_scales, swap_halves


@dataclass(frozen=True)
class Layout:
    """The storage of one scheme's matrices.

    shuffled: rows and their scales are permuted; otherwise a gated w13 is up first
    blocked: data are block-major
    swizzled: scales are stored in 128 x 4 tiles
    unit: H and I must be multiples of this
    """

    shuffled: bool = True
    blocked: bool = False
    swizzled: bool = False
    unit: int = 128


LAYOUTS = {
    "none": Layout(blocked=True),
    "fp8_static": Layout(),
    "fp8_block": Layout(shuffled=False),
    "mxfp8": Layout(swizzled=True),
    "nvfp4": Layout(swizzled=True),
    "mxfp4": Layout(swizzled=True),
    "mxfp4_mxfp8": Layout(swizzled=True),
    "mxint4": Layout(blocked=True, swizzled=True, unit=256),
}


class Trtllm(WeightLayout):
    """Stores an expert's tensors under their canonical names, in the layout of the table above."""

    def __init__(self, config: MoEConfig, scheme: Scheme, dtype: torch.dtype, etp: int = 1) -> None:
        super().__init__(config, scheme, dtype, etp)
        self.layout = LAYOUTS[scheme.name]

    def specs(self) -> dict[str, TensorSpec]:
        return {name: self._spec(name, spec) for name, spec in self.canonical.items()}

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._stored(name, tensor) for name, tensor in tensors.items()}

    def restore(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._canonical(name, tensor) for name, tensor in stored.items()}

    def _spec(self, name: str, spec: TensorSpec) -> TensorSpec:
        if name.endswith("_bias"):
            return TensorSpec(spec.shape, torch.float32)
        if name in ("w13", "w2") and self.layout.blocked:
            rows, columns = spec.shape
            width = BLOCK_BYTES // spec.dtype.itemsize
            return TensorSpec((columns // width, rows, width), spec.dtype)
        return spec

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        if self.layout.shuffled:
            tensor = shuffle_rows(tensor, gated=self._gated(name))
        elif self._gated(name):
            tensor = swap_halves(tensor)
        if name.endswith("_bias"):
            return tensor.float()
        if name.endswith("_scale"):
            return arrange(tensor, ScaleLayout.SWIZZLED_128X4) if self.layout.swizzled else tensor
        return block_major(tensor) if self.layout.blocked else tensor

    def _canonical(self, name: str, stored: Tensor) -> Tensor:
        if stored.dim() == 0:
            return stored
        if name.endswith("_bias"):
            stored = stored.to(self.dtype)
        elif name.endswith("_scale"):
            if self.layout.swizzled:
                stored = linearize_scales(stored, ScaleLayout.SWIZZLED_128X4, *stored.shape)
        elif self.layout.blocked:
            stored = row_major(stored)
        if self.layout.shuffled:
            return unshuffle_rows(stored, gated=self._gated(name))
        return swap_halves(stored) if self._gated(name) else stored

    def _gated(self, name: str) -> bool:
        return name.startswith("w13") and self.config.activation.gated


# --- FlashInfer's shuffle of rows -------------------------------------------------------------------------------------
# The order of rows and bytes that FlashInfer's TRTLLM kernels read, as index arithmetic.
#
# The kernels compute w @ x with the weights as the first operand. They assign the accumulator's rows to threads in a
# fixed pattern, so stored rows are permuted in blocks of 32. The gated activation is fused into the epilogue, so each
# up row is stored beside its gate row. Source, FlashInfer 0.7.2: `get_shuffle_matrix_a_row_indices` (utils.py) with the
# tile of 128 rows, `get_reorder_rows_for_gated_act_gemm_row_indices` and `convert_to_block_layout`
# (fused_moe/core.py).

BLOCK_ROWS = 32
BLOCK_BYTES = 128  # of a row, in the block-major layout


def row_order(rows: int, *, gated: bool, device: torch.device | None = None) -> Tensor:
    """Return the permutation of rows, int64 [rows]: stored row n is the canonical row `row_order[n]`.

    rows: a multiple of 32
    gated: canonical rows are gate first, then up; they are first interleaved, each up row before its gate row
    """
    stored = torch.arange(rows, device=device)
    place = stored % BLOCK_ROWS
    interleaved = stored - place + place % 8 * 4 + place // 8
    if not gated:
        return interleaved
    return interleaved // 2 + (1 - interleaved % 2) * (rows // 2)


def shuffle_rows(tensor: Tensor, *, gated: bool) -> Tensor:
    """Permute canonical rows [rows, ...] to the stored order."""
    return _picked(tensor, row_order(len(tensor), gated=gated, device=tensor.device))


def unshuffle_rows(stored: Tensor, *, gated: bool) -> Tensor:
    """The inverse of `shuffle_rows`."""
    return _picked(stored, row_order(len(stored), gated=gated, device=stored.device).argsort())


def block_major(tensor: Tensor) -> Tensor:
    """Convert [rows, columns] to [blocks, rows, columns of a block], with 128 bytes of each row in a block."""
    blocks: Tensor = tensor.unflatten(1, (-1, BLOCK_BYTES // tensor.itemsize))
    return blocks.transpose(0, 1).contiguous()


def row_major(stored: Tensor) -> Tensor:
    """The inverse of `block_major`."""
    return stored.transpose(0, 1).flatten(1).contiguous()


def _picked(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return tensor[rows]. One-byte dtypes are indexed as uint8: torch cannot index all of them on all devices."""
    if tensor.itemsize > 1:
        return tensor[rows]
    return tensor.view(torch.uint8)[rows].view(tensor.dtype)
