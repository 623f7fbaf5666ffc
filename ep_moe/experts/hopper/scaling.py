"""What schemes differ in within the Hopper expert step (`step`): how rows are rounded, and which scales the products
multiply into their sums.

| scaling | weights | rows | between the products |
|---|---|---|---|
| `none` | bf16 | bf16 | bf16 |
| `trained` | bf16 | bf16 | bf16, before the activation and behind it |
| `matrix` | E4M3, one scale an expert | E4M3 by a calibrated scale | E4M3 by a calibrated scale |
| `row` | E4M3, one scale an expert | E4M3, one scale a row | E4M3, one scale a row |
| `channel` | E4M3, one scale a row | E4M3, one scale a row | E4M3, one scale a row |
| `block` | E4M3, one scale for 128 x 128 | E4M3, one scale for 128 columns | the same |
| `mxfp4` | E2M1, an E8M0 scale for 32 columns of a row | bf16 | bf16 |
| `nvfp4a16` | E2M1, an E4M3 scale for 16 columns of a row, one an expert | bf16 | bf16 |
| `int4`, `mxint4` | INT4, a bf16 scale for 128 or 32 columns of a row | bf16 | bf16 |
| `mxfp4_fp8`, `int4_fp8`, `mxint4_fp8` | as without `_fp8` | E4M3, one scale a row | E4M3, one scale a row |

Scratch memory is the caller's. Nothing allocates or waits for the device.
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
from ep_moe.experts.hopper.route_sort import Lists
from ep_moe.runtime.launch_cache import Launch
from ep_moe.runtime.workspace import Shapes
from ep_moe.types import Activation

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Rows:
    """Rows of a product's operand. x: [M, H]; scale: by the scaling, None where there is none (yet)

    source: int32 [M], for x of [any, H]: x[source[r]] is row r
    """

    x: Tensor
    scale: Tensor | float | None = None
    source: Tensor | None = None

    def part(self, part: slice) -> Rows:
        return Rows(self.x[part], self.scale[part] if isinstance(self.scale, Tensor) else self.scale)


@dataclass(frozen=True)
class Products:
    """What both products of a call are made with.

    w13: [L, 2 * I, H], gate first ([L, I, H] without a gate); w2: [L, H, I]; scales: as `Scaling.names` has them.
        Weights of 4 bits: as `weights.layouts.hopper_4bit` stores them
    biases: of the rows of w13 and of w2, bf16 [L, 2 * I] and [L, H], as far as there are any
    dtype: of the layer, and of plain rows
    spare_sms: multiprocessors that the large products leave free
    exact: products of one order of sums, whatever the number of rows
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
        """Of the first product (0) or the second (1)."""
        return self.biases[which] if which < len(self.biases) else None


class Scaling(ABC):
    """One scheme's part of a step, for one call. `own` is the scratch memory that `scratch` named."""

    names: ClassVar[tuple[str, ...]] = ()  # of the parameters that `Products.scales` holds, in order
    writes_to_peers: ClassVar[bool] = True  # `grouped` heeds `Lists.addresses`
    blocks: ClassVar[bool] = False  # of 128 along K have scales

    def __init__(self, products: Products) -> None:
        self.products = products

    @property
    def same_bits(self) -> bool:
        """Whether `streamed` and `grouped` give a row the same bits, as `tests/gpu/test_exact_gpu.py` compares them."""
        return False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """L, H and I."""
        slots, hidden, inner = self.products.w2.shape
        return slots, hidden, inner

    @classmethod
    @abstractmethod
    def scratch(cls, routes: int, hidden: int, inner: int, gated: bool, dtype: torch.dtype) -> Shapes:
        """Scratch for so many routes, without the lists of the sort. y [routes, H] is what `reduce` sums."""

    @abstractmethod
    def skinny_tiles(self, routes: int, each: float) -> TileConfig | None:
        """Tiles of `gemm_skinny`, None where there are too many rows for it. each: rows of an expert on average"""

    def ring(self, each: float) -> Ring | None:
        """Of `gemm_streaming`, None where there are too many rows for it, too."""
        return ring_for(each, self.products.w13)

    @abstractmethod
    def rounded(self, rows: Rows, own: Mapping[str, Tensor]) -> Rows:
        """Rows as the products read them, where they lay."""

    @abstractmethod
    def sorted(self, rows: Rows, lists: Lists, own: Mapping[str, Tensor]) -> Rows:
        """Rows as the products read them, in the order of `lists`."""

    def first_result(self, own: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """Where the first product goes, and what it does there."""
        p = self.products
        return own["act"], {"activation": p.activation, "alpha": p.alpha, "limit": p.limit}

    def between(self, own: Mapping[str, Tensor], counts: Tensor, pdl: bool) -> Rows:
        """The second product's rows. counts: int32 [1], how many there are; pdl: as `quant.kernels`"""
        return Rows(own["act"])

    def of_first(self, rows: Rows) -> dict[str, Any]:
        """Scales of the first product, as `gemm_streaming` and `gemm_grouped` take them."""
        return {}

    def of_second(self, rows: Rows) -> dict[str, Any]:
        """Scales of the second one."""
        return {}

    def run_skinny(
        self, rows: Rows, found: tuple[Tensor, Tensor | None, int], tiles: TileConfig, lists: Lists | None,
        own: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        """Both products of few rows, into own["y"]. found: ids, weights and base"""
        p, act = self.products, own["act"]
        gemm_skinny.first_product(
            rows.x, *found, p.w13, act, p.activation, tiles.first, lists=lists, alpha=p.alpha, limit=p.limit,
            launch=p.launch, **self.of_first(rows),
        )  # fmt: skip
        gemm_skinny.second_product(
            act, *found, p.w2, own["y"], tiles.second, lists=lists, launch=p.launch, **self.of_second(Rows(act))
        )

    def streamed(self, rows: Rows, lists: Lists, ring: Ring, own: Mapping[str, Tensor]) -> None:
        """Both products of some rows, which are gathered, into own["y"]."""
        p, (first, how) = self.products, self.first_result(own)
        gemm_streaming.product(
            rows.x, p.w13, lists, first, ring, gather=True, **how, **self.of_first(rows), launch=p.launch
        )
        act = self.between(own, lists.ends[-1:], True)
        gemm_streaming.product(act.x, p.w2, lists, own["y"], ring, **self.of_second(act), launch=p.launch)

    def grouped(self, rows: Rows, lists: Lists, each: float, expected: float, own: Mapping[str, Tensor]) -> None:
        """Both products of many rows, into own["y"], or to `lists.addresses`. expected: rows of all experts"""
        self.by_gemm_grouped(self.sorted(rows, lists, own), lists, each, own)

    def by_gemm_grouped(self, rows: Rows, lists: Lists, each: float, own: Mapping[str, Tensor]) -> None:
        """Both products of rows as `sorted` gives them."""
        p, spare = self.products, self.products.spare_sms
        first = gemm_grouped.tiles_for(each, p.w13, spare, gathered=rows.source is not None, blocks=self.blocks)
        second = gemm_grouped.tiles_for(each, p.w2, spare, blocks=self.blocks)
        how: dict[str, Any] = {"spare_sms": spare, "launch": p.launch}
        out, activated = self.first_result(own)
        given = {**activated, **self.of_first(rows), **how, "source": rows.source}
        gemm_grouped.grouped_gemm(rows.x, p.w13, lists.ends, out, first, **given)
        act = self.between(own, lists.ends[-1:], False)
        gemm_grouped.grouped_gemm(
            act.x, p.w2, lists.ends, own["y"], second, addresses=lists.addresses, **self.of_second(act), **how
        )


class Unscaled(Scaling):
    """Everything in bf16, biases too."""

    @classmethod
    def scratch(cls, routes: int, hidden: int, inner: int, gated: bool, dtype: torch.dtype) -> Shapes:
        return {"act": ((routes, inner), BF16), "y": ((routes, hidden), BF16)}

    def skinny_tiles(self, routes: int, each: float) -> TileConfig | None:
        return TileConfig.of(routes, each)

    def rounded(self, rows: Rows, own: Mapping[str, Tensor]) -> Rows:
        return rows

    def sorted(self, rows: Rows, lists: Lists, own: Mapping[str, Tensor]) -> Rows:
        return Rows(rows.x, source=lists.source)  # the product gathers them

    def of_first(self, rows: Rows) -> dict[str, Any]:
        return {"bias": self.products.bias(0)}

    def of_second(self, rows: Rows) -> dict[str, Any]:
        return {"bias": self.products.bias(1)}


class Trained(Unscaled):
    """To the bits of `gradients.TrainedStep`, which keeps the first product's results as bf16."""

    @property
    def same_bits(self) -> bool:
        return True  # of products alone, which both sum in blocks of 128 bytes, in order

    @classmethod
    def scratch(cls, routes: int, hidden: int, inner: int, gated: bool, dtype: torch.dtype) -> Shapes:
        return {"h": ((routes, inner * (1 + gated)), BF16), **super().scratch(routes, hidden, inner, gated, dtype)}

    def first_result(self, own: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        return own["h"], {}

    def between(self, own: Mapping[str, Tensor], counts: Tensor, pdl: bool) -> Rows:
        p, act = self.products, own["act"]
        gradients_triton.activate_rows(own["h"], act, counts, p.activation, p.alpha, p.limit, launch=p.launch)
        return Rows(act)
