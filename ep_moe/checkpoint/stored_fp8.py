"""Matrices stored in E4M3, with floating-point or power-of-two scales."""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor

from ep_moe.checkpoint.stored import (
    ALL,
    EXPONENTS,
    StoredMatrix,
    Tensors,
    check_codes,
    check_lost,
    check_products,
    companion_names,
    read_scalar_scale,
    read_scales,
    span,
    wrong_dtype,
)
from ep_moe.quant.fp8 import FP8_BLOCK, FP8_MAX, dequantize_fp8_blocks, dequantize_fp8_rows
from ep_moe.quant.microscale import MX_BLOCK

_MATRIX, _ROWS, _BLOCKS = "matrix", "rows", "blocks"
_DEFAULT = ((FP8_BLOCK, FP8_BLOCK),)
_OTHER_FLOAT8 = re.compile(r"fnuz|e5m2")


class ScaledFp8(StoredMatrix):
    """E4M3 with one scale per matrix or row in `_scale`, or one per block in `_scale_inv` or `_scale`.

    NVIDIA's Model Optimizer, compressed-tensors (float-quantized), AutoFP8 and FBGEMM write the former. DeepSeek-V3,
    transformers and compressed-tensors' strategy "block" write the latter.
    """

    def __init__(self, tensors: Tensors, name: str, *, transposed: bool = False, stacked: int = 1) -> None:
        super().__init__(tensors, name, name, transposed=transposed, stacked=stacked)
        candidates = [each for end in ("_scale_inv", "_scale") for each in companion_names(name, end)]
        self._found = [each for each in candidates if tensors.holds(each)]
        self.scale = self._found[0] if self._found else ""
        self._block = (0, 0)
        self._apart = False  # blocks start anew at each of the stacked matrices, so that none contains rows of both
        self._either = False  # ambiguous: blocks that continue across the matrices would have the same number of scales
        self._each = self._layout() if self.scale else ""

    @property
    def description(self) -> str:  # type: ignore[override]
        block = " x ".join(map(str, self._block))
        each = {_MATRIX: "the matrix", _ROWS: "each row", _BLOCKS: f"each block of {block}"}.get(self._each, "nothing")
        return f"E4M3 with a factor for {each}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self._seen(self.tensors.header(self.data)[1])

    def parts(self) -> tuple[str, ...]:
        return (self.data, *self._found)

    @property
    def row_block(self) -> int:  # type: ignore[override]
        return self._block[0] if self._each == _BLOCKS else 1

    @property
    def _exponents(self) -> bool:
        return self.tensors.header(self.scale)[0] in (EXPONENTS, "U8")

    def _layout(self) -> str:
        """Return what shares a scale (matrix, rows or blocks), by the shape of the scales; "" if no layout fits."""
        shape, whole, inverse = self.tensors.header(self.scale)[1], self.shape, self.scale.endswith("_inv")
        if len(whole) < 2:
            return ""
        lead, rows = whole[:-2], whole[-2]
        if shape[: len(lead)] != lead or shape in ((), (1,)):
            return _MATRIX if torch.Size(shape).numel() == 1 and not (inverse and len(shape) == 2) else ""
        own = shape[len(lead) :]
        if own == () or (own == (1, 1) and not inverse):
            return _MATRIX
        if not inverse and (own in ((rows,), (rows, 1)) or (lead and own == (1, rows))):
            return _ROWS
        if len(own) == 2 and self._find_block(self._seen(own)):
            return _BLOCKS
        return _MATRIX if lead and own == (1, 1) else ""

    def _find_block(self, grid: tuple[int, ...]) -> bool:
        *_, rows, columns = self.shape
        each = rows // self.stacked
        blocks = [*(self.tensors.declared.blocks or _DEFAULT), *([(1, MX_BLOCK)] if self._exponents else [])]
        for row, column in blocks:
            apart = (self.stacked * -(-each // row), -(-columns // column))
            together = (-(-rows // row), apart[1])
            if grid in (apart, together):
                self._block, self._apart = (row, column), grid == apart and each % row != 0
                self._either = self._apart and self.stacked > 1 and apart == together
                return True
        # transformers writes one scale for each of gate and up
        if self.stacked > 1 and grid == (self.stacked, 1):
            self._block = (each, columns)
        return self._block != (0, 0)

    def unreadable_reason(self) -> str | None:
        location = self.tensors.location(self.data)
        if len(self._found) > 1:
            return f"{location} has two sets of factors, {' and '.join(self._found)}; remove the one that is not meant"
        if _OTHER_FLOAT8.search(self.tensors.declared.float8):
            return (
                f"{location} is float8_e4m3fn, and config.json states fmt {self.tensors.declared.float8!r}, of which "
                f"the same bytes are other numbers; correct config.json, or dequantize the checkpoint to bf16 first"
            )
        if self._either:
            each, row = self.shape[-2] // self.stacked, self._block[0]
            return (
                f"{location} has gate and up of {each} rows each in one tensor, and the number of factors in "
                f"{self.scale} does not tell if blocks of {row} rows restart at up; store gate and up in separate "
                "tensors, or dequantize the checkpoint to bf16 first"
            )
        if self._each:
            return wrong_dtype(self.tensors, self.scale)
        *_, rows, columns = (1, 1, *self.shape)
        row, column = (self.tensors.declared.blocks or _DEFAULT)[0]
        blocked, single = companion_names(self.name, "_scale_inv")[-1], companion_names(self.name, "_scale")[-1]
        found = list(self.tensors.header(self.scale)[1]) if self.scale else "nothing"
        return (
            f"{location} is float8 of shape {list(self.tensors.header(self.data)[1])}; only matrices with {blocked} of "
            f"shape {[-(-rows // row), -(-columns // column)]}, one factor per {row} x {column} block, or with "
            f"{single}, one factor or one per row or block, can be read, got {found} in "
            f"{self.scale or f'{blocked} and {single}'}"
        )

    def matches_scheme(self, scheme: str) -> bool:
        if self._each == _MATRIX:
            return scheme in ("fp8_static", "fp8_dynamic")
        if self._each == _ROWS:
            return scheme == "fp8_channel"
        if self._each == _BLOCKS and not self._apart:
            # a scale that is no power of two has no E8M0; powers of two stored as floats are quantized without loss
            mxfp8 = "mxfp8" if self._exponents else None
            return scheme == {(FP8_BLOCK, FP8_BLOCK): "fp8_block", (1, MX_BLOCK): mxfp8}.get(self._block)
        return False

    def differs(self, scheme: str) -> str:
        if scheme in ("fp8_static", "fp8_dynamic"):
            shape = self.tensors.header(self.scale)[1]
            return f"{self.tensors.location(self.scale)} must have shape [], got {list(shape)}"
        return super().differs(scheme)

    def read_values(self, rows: slice = ALL, columns: slice = ALL, expert: int | None = None) -> Tensor:
        codes = self._raw(self.data, rows, columns, expert)
        check_codes(self.tensors, self.data, codes)
        scale = self._scale(rows, columns, expert)
        self._check_zeros(codes, scale, rows, columns)
        numbers = self._spread(codes, scale, rows, columns)
        check_products(self.tensors, self.scale, self.data, scale, FP8_MAX, lambda: numbers)
        return numbers

    def codes(self, rows: slice, columns: slice, expert: int | None = None) -> dict[str, Tensor]:
        codes, scale = self._raw(self.data, rows, columns, expert), self._scale(rows, columns, expert)
        check_codes(self.tensors, self.data, codes)
        self._check_zeros(codes, scale, rows, columns)
        made = partial(self._spread, codes, scale, rows, columns)
        check_products(self.tensors, self.scale, self.data, scale, FP8_MAX, made)
        if self._block == (1, MX_BLOCK):  # stored as E8M0 (`matches_scheme`), so E8M0 represents them exactly
            scale = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
        return {"": codes, "_scale": scale}

    def _scale(self, rows: slice, columns: slice, expert: int | None) -> Tensor:
        """Read the scales of a part in float32."""
        if self._each == _MATRIX:
            return read_scalar_scale(self.tensors, self.scale, expert)
        if self._each == _ROWS:
            lead = () if expert is None else (expert,)
            return read_scales(self.tensors, self.scale, *lead).reshape(-1)[rows]
        (row, column), (first, start, stop) = self._block, self._rows(rows)
        left, right = span(columns, self.shape[-1])
        across = slice(left // column, -(-right // column))
        return self._read_scales(self.scale, slice(first + start // row, first + -(-stop // row)), across, expert)

    def _rows(self, rows: slice) -> tuple[int, int, int]:
        """Return the number of row blocks in the preceding matrices, and the span of rows within their own matrix."""
        start, stop = span(rows, self.shape[-2])
        if not self._apart:
            return 0, start, stop
        each = self.shape[-2] // self.stacked
        before = start // each
        assert stop <= (before + 1) * each, "rows of one matrix"
        return before * -(-each // self._block[0]), start - before * each, stop - before * each

    def _spread(self, codes: Tensor, scale: Tensor, rows: slice, columns: slice) -> Tensor:
        if self._each == _BLOCKS:
            (_, start, _), (left, _) = self._rows(rows), span(columns, self.shape[-1])
            return dequantize_fp8_blocks(codes, scale, row=start, column=left, block=self._block)
        return dequantize_fp8_rows(codes, scale.reshape(-1))

    def _check_zeros(self, codes: Tensor, scale: Tensor, rows: slice, columns: slice) -> None:
        """Raise CheckpointError if a scale of 0 belongs to a code that is not 0."""
        if (scale == 0).any():
            lost = self._spread((codes.float() != 0).float(), (scale == 0).float(), rows, columns)
            check_lost(self.tensors, self.scale, self.data, int(lost.sum()))
