"""The scalings of E4M3 weights: one scale per matrix, row, channel or block. `scaling` has a table of all scalings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ep_moe.experts.hopper import gemm_fp8_block
from ep_moe.experts.hopper.gemm_skinny import TileConfig
from ep_moe.experts.hopper.gemm_streaming import Ring, ring_for
from ep_moe.experts.hopper.route_sort import Lists, copy_rows
from ep_moe.experts.hopper.scaling import BF16, Rows, Scaling
from ep_moe.quant.fp8 import FP8
from ep_moe.quant.kernels import BlockScales, MatrixScales, RowScales, round_rows, round_rows_by_tensor
from ep_moe.runtime.workspace import Shapes
from ep_moe.types import Activation

BLOCK = 128  # with the scaling `block`, a scale covers 128 columns of a row, or 128 x 128 weights


def _numbers(scratch: Mapping[str, Tensor], rows: int) -> Tensor:
    """Return E4M3 [rows, H] in the memory of y, which is written only after these rows were read."""
    y = scratch["y"]
    return y.view(FP8).view(-1, y.shape[1])[:rows]


class SameOrder(Scaling):
    """Scalings for which `gemm_streaming` and `gemm_grouped` both sum in blocks of 128 bytes, in order."""

    @property
    def same_bits(self) -> bool:
        return self.products.activation is not Activation.GEGLU  # which the two compilers contract differently


class MatrixScaled(SameOrder):
    """`fp8_static`: weights and rows in E4M3 with calibrated scales, float32 [L].

    bf16 rows are rounded by the largest of the experts' input scales. E4M3 rows arrive with their scale, a number, in
    `Rows.scale`.
    """

    names = ("w13_scale", "w13_input_scale", "w2_scale", "w2_input_scale")

    @classmethod
    def scratch_shapes(cls, routes: int, hidden: int, inner: int, gated: bool, dtype: torch.dtype) -> Shapes:
        return {"scale": ((1,), torch.float32), "act": ((routes, inner), FP8), "y": ((routes, hidden), BF16)}

    def skinny_tiles(self, routes: int, each: float) -> TileConfig | None:
        return TileConfig.of_matrices(routes, each)

    def prepare_rows(self, rows: Rows, scratch: Mapping[str, Tensor]) -> Rows:
        return rows if rows.scale is not None else self._round(rows, _numbers(scratch, len(rows.x)), scratch)

    def prepare_sorted_rows(self, rows: Rows, lists: Lists, scratch: Mapping[str, Tensor]) -> Rows:
        out = _numbers(scratch, lists.slots.numel())
        if rows.scale is None:
            return self._round(rows, out, scratch, lists.slots)
        copy_rows(rows.x, lists.slots, out, launch=self.products.launch)
        return Rows(out, rows.scale)

    def _round(self, rows: Rows, out: Tensor, scratch: Mapping[str, Tensor], slots: Tensor | None = None) -> Rows:
        round_rows_by_tensor(rows.x, self.products.scales[1], out, scratch["scale"], slots, launch=self.products.launch)
        return Rows(out, scratch["scale"])

    def first_product_args(self, rows: Rows) -> dict[str, Any]:
        assert rows.scale is not None
        w13_scale, _, _, w2_input_scale = self.products.scales
        return {"scales": MatrixScales(rows.scale, w13_scale, w2_input_scale)}

    def second_product_args(self, rows: Rows) -> dict[str, Any]:
        _, _, w2_scale, w2_input_scale = self.products.scales
        return {"scales": MatrixScales(w2_input_scale, w2_scale)}


class RowScaled(SameOrder):
    """`fp8_dynamic`: one scale per matrix of an expert and one per row, float32 [M].

    Rows arrive with their scales, or are rounded here. Scales of weights: float32 [L, rows / 128, columns / 128], all
    equal within a matrix.
    """

    names: ClassVar[tuple[str, ...]] = ("w13_scale", "w2_scale")

    @classmethod
    def scratch_shapes(cls, routes: int, hidden: int, inner: int, gated: bool, dtype: torch.dtype) -> Shapes:
        return {
            "row_scale": ((routes,), torch.float32),
            "act": ((routes, inner), BF16),
            "act_numbers": ((routes, inner), FP8),
            "act_scale": ((routes,), torch.float32),
            "y": ((routes, hidden), BF16),
        }

    def skinny_tiles(self, routes: int, each: float) -> TileConfig | None:
        return TileConfig.of_rows(routes, each)

    def prepare_rows(self, rows: Rows, scratch: Mapping[str, Tensor]) -> Rows:
        if rows.scale is not None:
            return rows
        count = len(rows.x)
        return self._round(rows, Rows(_numbers(scratch, count), scratch["row_scale"][:count]))

    def prepare_sorted_rows(self, rows: Rows, lists: Lists, scratch: Mapping[str, Tensor]) -> Rows:
        out = Rows(_numbers(scratch, lists.slots.numel()), scratch["row_scale"])
        return self._round(rows, out, x_scale=rows.scale, slots=lists.slots)

    def second_input(self, scratch: Mapping[str, Tensor], counts: Tensor, pdl: bool) -> Rows:
        return self._round(
            Rows(scratch["act"]), Rows(scratch["act_numbers"], scratch["act_scale"]), counts=counts, pdl=pdl
        )

    def _round(self, rows: Rows, to: Rows, **how: Any) -> Rows:
        assert isinstance(to.scale, Tensor)
        round_rows(rows.x, to.x, to.scale, **how, launch=self.products.launch)
        return to

    def first_product_args(self, rows: Rows) -> dict[str, Any]:
        return self._scales(rows, 0)

    def second_product_args(self, rows: Rows) -> dict[str, Any]:
        if rows.scale is None:  # `gemm_skinny` rounds them itself, by blocks
            return {"w2_scale": self.products.scales[1]}
        return self._scales(rows, 1)

    def _scales(self, rows: Rows, which: int) -> dict[str, Any]:
        assert isinstance(rows.scale, Tensor)
        return {"scales": RowScales(rows.scale, self._of_weights(self.products.scales[which]))}

    def _of_weights(self, scales: Tensor) -> Tensor:
        """Return the weights' scales as `RowScales.weights`."""
        return scales[:, 0, 0]


class ChannelScaled(RowScaled):
    """`fp8_channel`: one scale per output channel (row of weights), float32 [L, rows]; rows as with `RowScaled`."""

    def _of_weights(self, scales: Tensor) -> Tensor:
        return scales

    def first_product_args(self, rows: Rows) -> dict[str, Any]:
        return super().first_product_args(rows) | {"bias": self.products.bias(0)}

    def second_product_args(self, rows: Rows) -> dict[str, Any]:
        return super().second_product_args(rows) | {"bias": self.products.bias(1)}


class BlockScaled(Scaling):
    """`fp8_block`, as in DeepSeek-V3. Also for fp16 layers, and for rows that arrive grouped by expert.

    Scales are float32: [L, rows / 128, columns / 128] of weights, [M, H / 128] of rows. Rows arrive with their scales,
    or are rounded here.
    """

    names = ("w13_scale", "w2_scale")
    writes_to_peers = False
    blocks = True
    gemm_grouped_up_to = 88.0  # mean rows per expert; with more, `gemm_fp8_block` is faster

    @classmethod
    def scratch_shapes(cls, routes: int, hidden: int, inner: int, gated: bool, dtype: torch.dtype) -> Shapes:
        return {
            "rows": ((routes, hidden), FP8),
            "row_scale": ((routes, hidden // BLOCK), torch.float32),
            "h": ((routes, inner * (1 + gated)), dtype),
            "act_numbers": ((routes, inner), FP8),
            "act_scale": ((routes, inner // BLOCK), torch.float32),
            "y": ((routes, hidden), dtype),
        }

    def skinny_tiles(self, routes: int, each: float) -> TileConfig | None:
        return TileConfig.of_blocks(routes, each)

    def prepare_rows(self, rows: Rows, scratch: Mapping[str, Tensor]) -> Rows:
        if rows.scale is not None:
            return rows
        count = len(rows.x)
        gemm_fp8_block.quantize_rows(
            rows.x, scratch["rows"][:count], scratch["row_scale"][:count], launch=self.products.launch
        )
        return Rows(scratch["rows"][:count], scratch["row_scale"][:count])

    def prepare_sorted_rows(self, rows: Rows, lists: Lists, scratch: Mapping[str, Tensor]) -> Rows:
        out, scale = scratch["rows"], scratch["row_scale"]
        if rows.scale is None:
            gemm_fp8_block.quantize_pairs(rows.x, lists.slots, out, scale, launch=self.products.launch)
        else:
            assert isinstance(rows.scale, Tensor)
            gemm_fp8_block.copy_pairs(rows.x, rows.scale, lists.slots, out, scale, launch=self.products.launch)
        return Rows(out, scale)

    def ring(self, each: float) -> Ring | None:
        w13 = self.products.w13
        return ring_for(each, w13, blocks=True) if gemm_fp8_block.has_hopper(w13.device) else None

    def run_skinny(
        self, rows: Rows, routing_args: tuple[Tensor, Tensor | None, int], tiles: TileConfig, lists: Lists | None,
        scratch: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        super().run_skinny(rows, routing_args, tiles, lists, self._plain(scratch))

    def streamed(self, rows: Rows, lists: Lists, ring: Ring, scratch: Mapping[str, Tensor]) -> None:
        super().streamed(rows, lists, ring, self._plain(scratch))

    def second_input(self, scratch: Mapping[str, Tensor], counts: Tensor, pdl: bool) -> Rows:
        out, scale = scratch["act_numbers"], scratch["act_scale"]
        gemm_fp8_block.quantize_rows(scratch["act"], out, scale, counts=counts, pdl=pdl, launch=self.products.launch)
        return Rows(out, scale)

    def _plain(self, scratch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `scratch` with "act", unrounded activations in the memory of "h"."""
        inner = self.products.w2.shape[2]
        return {**scratch, "act": scratch["h"].view(-1)[: len(scratch["h"]) * inner].view(-1, inner)}

    def first_product_args(self, rows: Rows) -> dict[str, Any]:
        assert isinstance(rows.scale, Tensor)
        return {"scales": BlockScales(rows.scale, self.products.scales[0])}

    def second_product_args(self, rows: Rows) -> dict[str, Any]:
        if rows.scale is None:  # `gemm_skinny` rounds them itself
            return {"w2_scale": self.products.scales[1]}
        assert isinstance(rows.scale, Tensor)
        return {"scales": BlockScales(rows.scale, self.products.scales[1])}

    def grouped(self, rows: Rows, lists: Lists, each: float, expected: float, scratch: Mapping[str, Tensor]) -> None:
        p, few = self.products, each <= self.gemm_grouped_up_to
        if few and p.dtype is BF16 and not p.exact and gemm_fp8_block.has_hopper(p.w2.device):
            scratch = self._plain(scratch)
            rows = self.prepare_rows(rows, scratch)
            self.by_gemm_grouped(Rows(rows.x, rows.scale, lists.source), lists, each, scratch)
        else:
            rows = self.prepare_sorted_rows(rows, lists, scratch)
            self.multiply(rows, None, lists.ends, lists.ends[-1:], scratch["y"], expected, scratch)

    def multiply(
        self, rows: Rows, starts: Tensor | None, ends: Tensor, counts: Tensor | None, out: Tensor, expected: float,
        scratch: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        """Compute both products of rows grouped by expert into out.

        starts, ends: int32 [L], bounds of each expert's rows. Without starts, an expert's rows begin at the previous
            expert's end
        """
        p, (w13_scale, w2_scale), routes = self.products, self.products.scales, max(1, int(expected))
        hopper, slots, launch = gemm_fp8_block.has_hopper(out.device), len(p.w2), p.launch
        config = gemm_fp8_block.config_for(routes, slots, p.w13.shape[1], hopper=hopper, activated=hopper)
        config = dataclasses.replace(config, spare_sms=p.spare_sms)
        assert isinstance(rows.scale, Tensor)
        first = (rows.x, rows.scale, p.w13, w13_scale, ends)
        act = (scratch["act_numbers"], scratch["act_scale"])
        how: dict[str, Any] = {"alpha": p.alpha, "limit": p.limit, "launch": launch}
        if hopper:
            gemm_fp8_block.grouped_gemm_activate(*first, *act, p.activation, starts=starts, config=config, **how)
        else:
            gemm_fp8_block.grouped_gemm(*first, scratch["h"], starts=starts, config=config, launch=launch)
            gemm_fp8_block.activate_and_quantize(scratch["h"], *act, p.activation, counts=counts, **how)
        config = gemm_fp8_block.config_for(routes, slots, p.w2.shape[1], hopper=hopper)
        config = dataclasses.replace(config, spare_sms=p.spare_sms)
        gemm_fp8_block.grouped_gemm(*act, p.w2, w2_scale, ends, out, starts=starts, config=config, launch=launch)
