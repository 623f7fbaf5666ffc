"""The parts of the Hopper expert step (`step`) that depend on the quantization scheme: how rows are rounded, and by
which scales the products multiply their sums.

| scaling | weights | rows | between the products |
|---|---|---|---|
| `none` | bf16 | bf16 | bf16 |
| `trained` | bf16 | bf16 | bf16, before and after the activation |
| `matrix` | E4M3, one scale per expert | E4M3, a calibrated scale | E4M3, a calibrated scale |
| `row` | E4M3, one scale per expert | E4M3, one scale per row | E4M3, one scale per row |
| `channel` | E4M3, one scale per row | E4M3, one scale per row | E4M3, one scale per row |
| `block` | E4M3, one scale per 128 x 128 | E4M3, one scale per 128 columns | E4M3, one scale per 128 columns |
| `mxfp4` | E2M1, an E8M0 scale per 32 columns of a row | bf16 | bf16 |
| `nvfp4a16` | E2M1, an E4M3 scale per 16 columns of a row, one scale per expert | bf16 | bf16 |
| `int4`, `mxint4` | INT4, a bf16 scale per 128 or 32 columns of a row | bf16 | bf16 |
| `mxfp4_fp8`, `int4_fp8`, `mxint4_fp8` | as without `_fp8` | E4M3, one scale per row | E4M3, one scale per row |

The caller provides scratch memory. Nothing here allocates or waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ep_moe.experts.hopper import gemm_grouped, gemm_skinny, gemm_streaming, gradients_triton
from ep_moe.experts.hopper.gemm_skinny import TileConfig
from ep_moe.experts.hopper.gemm_streaming import Ring, ring_for
from ep_moe.experts.hopper.route_sort import Lists, copy_rows
from ep_moe.runtime.launch_cache import Launch
from ep_moe.runtime.workspace import Shapes
from ep_moe.types import Activation

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Rows:
    """The row operand of a product.

    x: [M, H]
    scale: as the scaling defines it; None for plain rows, or rows that are not rounded yet
    source: int32 [M] or None. If given, x is [any, H], and row r is x[source[r]]
    """

    x: Tensor
    scale: Tensor | float | None = None
    source: Tensor | None = None

    def part(self, part: slice) -> Rows:
        return Rows(self.x[part], self.scale[part] if isinstance(self.scale, Tensor) else self.scale)


@dataclass(frozen=True)
class Products:
    """The arguments of both matrix products of a call.

    w13: [L, 2 * I, H], gate first ([L, I, H] without a gate); w2: [L, H, I]. 4-bit weights: as stored by
        `weights.layouts.hopper_4bit`
    scales: the tensors of `Scaling.names`
    biases: [], [w13's] or [w13's, w2's]: bf16 [L, 2 * I] and [L, H]
    dtype: dtype of the layer and of plain rows
    spare_sms: multiprocessors that the large products leave free
    exact: use products with the same order of sums for any number of rows
    """

    w13: Tensor
    w2: Tensor
    scales: Sequence[Tensor]
    dtype: torch.dtype
    activation: Activation
    alpha: float
    limit: float
    spare_sms: int
    launch: Launch
    biases: Sequence[Tensor] = ()
    exact: bool = False

    def bias(self, which: int) -> Tensor | None:
        """Return the bias of the first product (0) or the second (1)."""
        return self.biases[which] if which < len(self.biases) else None


class Scaling(ABC):
    """The part of a step that depends on the scheme, for one call. `scratch` has the tensors of `scratch_shapes`."""

    names: ClassVar[tuple[str, ...]] = ()  # names of the parameters in `Products.scales`, in order
    writes_to_peers: ClassVar[bool] = True  # `grouped` supports `Lists.addresses`
    blocks: ClassVar[bool] = False  # blocks of 128 along K have scales

    def __init__(self, products: Products) -> None:
        self.products = products

    @property
    def same_bits(self) -> bool:
        """Whether `streamed` and `grouped` give a row the same bits (checked by `tests/gpu/test_exact_gpu.py`)."""
        return False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """L, H and I."""
        slots, hidden, inner = self.products.w2.shape
        return slots, hidden, inner

    @classmethod
    @abstractmethod
    def scratch_shapes(cls, routes: int, hidden: int, inner: int, gated: bool, dtype: torch.dtype) -> Shapes:
        """Return the scratch tensors for a number of routes, without those of the sort. `reduce` sums y [routes, H]."""

    @abstractmethod
    def skinny_tiles(self, routes: int, each: float) -> TileConfig | None:
        """Return the tiles of `gemm_skinny`, or None for too many rows. each: mean rows per expert"""

    def ring(self, each: float) -> Ring | None:
        """Return the ring of `gemm_streaming`, or None for too many rows. each: mean rows per expert"""
        return ring_for(each, self.products.w13)

    @abstractmethod
    def prepare_rows(self, rows: Rows, scratch: Mapping[str, Tensor]) -> Rows:
        """Return the rows as the products read them, in the order received."""

    @abstractmethod
    def prepare_sorted_rows(self, rows: Rows, lists: Lists, scratch: Mapping[str, Tensor]) -> Rows:
        """Return the rows as the products read them, in the order of `lists`."""

    def first_result(self, scratch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """Return the output of the first product, and the arguments of the activation that it applies."""
        p = self.products
        return scratch["act"], {"activation": p.activation, "alpha": p.alpha, "limit": p.limit}

    def second_input(self, scratch: Mapping[str, Tensor], counts: Tensor, pdl: bool) -> Rows:
        """Return the second product's rows. counts: int32 [1], the number of rows; pdl: as in `quant.kernels`"""
        return Rows(scratch["act"])

    def first_product_args(self, rows: Rows) -> dict[str, Any]:
        """Return the scale and bias arguments of the first product in `gemm_streaming` and `gemm_grouped`."""
        return {}

    def second_product_args(self, rows: Rows) -> dict[str, Any]:
        """Return the scale and bias arguments of the second product."""
        return {}

    def run_skinny(
        self, rows: Rows, routing_args: tuple[Tensor, Tensor | None, int], tiles: TileConfig, lists: Lists | None,
        scratch: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        """Compute both products of few rows into scratch["y"]. routing_args: ids, weights and base"""
        p, act = self.products, scratch["act"]
        gemm_skinny.first_product(
            rows.x, *routing_args, p.w13, act, p.activation, tiles.first, lists=lists, alpha=p.alpha, limit=p.limit,
            launch=p.launch, **self.first_product_args(rows),
        )  # fmt: skip
        gemm_skinny.second_product(
            act,
            *routing_args,
            p.w2,
            scratch["y"],
            tiles.second,
            lists=lists,
            launch=p.launch,
            **self.second_product_args(Rows(act)),
        )

    def streamed(self, rows: Rows, lists: Lists, ring: Ring, scratch: Mapping[str, Tensor]) -> None:
        """Compute both products into scratch["y"] by `gemm_streaming`. The first product gathers its rows."""
        p, (first, how) = self.products, self.first_result(scratch)
        gemm_streaming.product(
            rows.x, p.w13, lists, first, ring, gather=True, **how, **self.first_product_args(rows), launch=p.launch
        )
        act = self.second_input(scratch, lists.ends[-1:], True)
        gemm_streaming.product(act.x, p.w2, lists, scratch["y"], ring, **self.second_product_args(act), launch=p.launch)

    def grouped(self, rows: Rows, lists: Lists, each: float, expected: float, scratch: Mapping[str, Tensor]) -> None:
        """Compute both products of many rows into scratch["y"] or `lists.addresses`. expected: rows of all experts"""
        self.by_gemm_grouped(self.prepare_sorted_rows(rows, lists, scratch), lists, each, scratch)

    def by_gemm_grouped(self, rows: Rows, lists: Lists, each: float, scratch: Mapping[str, Tensor]) -> None:
        """Compute both products by `gemm_grouped`. rows: as `prepare_sorted_rows` returns them"""
        p, spare = self.products, self.products.spare_sms
        first = gemm_grouped.tiles_for(each, p.w13, spare, gathered=rows.source is not None, blocks=self.blocks)
        second = gemm_grouped.tiles_for(each, p.w2, spare, blocks=self.blocks)
        how: dict[str, Any] = {"spare_sms": spare, "launch": p.launch}
        out, activated = self.first_result(scratch)
        given = {**activated, **self.first_product_args(rows), **how, "source": rows.source}
        gemm_grouped.grouped_gemm(rows.x, p.w13, lists.ends, out, first, **given)
        act = self.second_input(scratch, lists.ends[-1:], False)
        gemm_grouped.grouped_gemm(
            act.x,
            p.w2,
            lists.ends,
            scratch["y"],
            second,
            addresses=lists.addresses,
            **self.second_product_args(act),
            **how,
        )


class Unscaled(Scaling):
    """Weights, rows and biases in bf16."""

    @classmethod
    def scratch_shapes(cls, routes: int, hidden: int, inner: int, gated: bool, dtype: torch.dtype) -> Shapes:
        return {"act": ((routes, inner), BF16), "y": ((routes, hidden), BF16)}

    def skinny_tiles(self, routes: int, each: float) -> TileConfig | None:
        return TileConfig.of(routes, each)

    def prepare_rows(self, rows: Rows, scratch: Mapping[str, Tensor]) -> Rows:
        return rows

    def prepare_sorted_rows(self, rows: Rows, lists: Lists, scratch: Mapping[str, Tensor]) -> Rows:
        return Rows(rows.x, source=lists.source)  # the product gathers the rows

    def copies_rows_first(self, each: float) -> bool:
        """Return whether to copy rows into the experts' order, before the first product, rather than gather them."""
        return gemm_grouped.copies_rows_first(each, self.products.w13, self.products.spare_sms)

    def grouped(self, rows: Rows, lists: Lists, each: float, expected: float, scratch: Mapping[str, Tensor]) -> None:
        if not self.copies_rows_first(each):
            super().grouped(rows, lists, each, expected, scratch)
            return
        copied = scratch["y"]  # the second product's results take this memory later
        copy_rows(rows.x, lists.slots, copied, launch=self.products.launch)
        self.by_gemm_grouped(Rows(copied), lists, each, scratch)

    def first_product_args(self, rows: Rows) -> dict[str, Any]:
        return {"bias": self.products.bias(0)}

    def second_product_args(self, rows: Rows) -> dict[str, Any]:
        return {"bias": self.products.bias(1)}


class Trained(Unscaled):
    """`Unscaled` with the same bits as `gradients.TrainedStep`, which rounds the first product's results to bf16."""

    @property
    def same_bits(self) -> bool:
        return True  # both products sum in blocks of 128 bytes, in order, and no activation is part of them

    @classmethod
    def scratch_shapes(cls, routes: int, hidden: int, inner: int, gated: bool, dtype: torch.dtype) -> Shapes:
        return {
            "h": ((routes, inner * (1 + gated)), BF16),
            **super().scratch_shapes(routes, hidden, inner, gated, dtype),
        }

    def first_result(self, scratch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        return scratch["h"], {}

    def second_input(self, scratch: Mapping[str, Tensor], counts: Tensor, pdl: bool) -> Rows:
        p, act = self.products, scratch["act"]
        gradients_triton.activate_rows(scratch["h"], act, counts, p.activation, p.alpha, p.limit, launch=p.launch)
        return Rows(act)
