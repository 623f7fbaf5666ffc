"""The scalings of weights of 4 bits (`scaling` has the table), under rows in bf16 or in E4M3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from ep_moe.experts.hopper import gemm_4bit, gemm_few_4bit, gemm_grouped_4bit
from ep_moe.experts.hopper.gemm_skinny import FEWEST, TileConfig
from ep_moe.experts.hopper.gemm_streaming import Ring
from ep_moe.experts.hopper.numbers_4bit import Weights
from ep_moe.experts.hopper.route_sort import Lists
from ep_moe.experts.hopper.scaling import Rows, Scaling, Unscaled
from ep_moe.experts.hopper.scaling_fp8 import RowScaled


class Packed(Scaling):
    """Weights with a scale for each `group` columns of a row."""

    names: ClassVar[tuple[str, ...]] = ("w13_scale", "w2_scale")
    format: ClassVar[str]  # of `Weights`
    group: ClassVar[int]
    few_up_to: ClassVar[float] = math.inf  # rows of an expert, of which products of few rows take those that they can

    @property
    def sizes(self) -> tuple[int, int, int]:
        p = self.products
        return len(p.w2), p.w2.shape[2], p.w13.shape[2] // (1 + p.activation.gated)

    def ring(self, each: float) -> Ring | None:
        return None

    def weights(self, which: int) -> Weights:
        """Of the first product (0) or the second (1)."""
        p = self.products
        own = dict(zip(self.names[which::2], p.scales[which::2], strict=True))
        scale, *_ = own.values()
        found = {name.partition("_")[2]: tensor for name, tensor in own.items()}
        return Weights(
            (p.w13, p.w2)[which], scale, self.format, self.group, found.get("global_scale"), p.bias(which),
            isinstance(self, RowScaled), found.get("row_scale"),
        )  # fmt: skip

    def activated(self) -> dict[str, Any]:
        """What the first product does with its sums."""
        p = self.products
        return {"activation": p.activation, "alpha": p.alpha, "limit": p.limit}

    def by_gemm_grouped(self, rows: Rows, lists: Lists, each: float, own: Mapping[str, Tensor]) -> None:
        p, first, second = self.products, self.weights(0), self.weights(1)
        how: dict[str, Any] = {"spare_sms": p.spare_sms, "launch": p.launch}
        tiles = gemm_grouped_4bit.tiles_for(each, first, p.spare_sms)
        gemm_grouped_4bit.product(
            rows.x, first, lists.ends, own["act"], tiles, a_scale=_scale(rows), source=rows.source, **self.activated(),
            **how,
        )  # fmt: skip
        act = self.between(own, lists.ends[-1:], False)
        tiles = gemm_grouped_4bit.tiles_for(each, second, p.spare_sms)
        gemm_grouped_4bit.product(
            act.x, second, lists.ends, own["y"], tiles, a_scale=_scale(act), addresses=lists.addresses, **how
        )


class FourBits(Packed, Unscaled):
    """Rows in bf16."""

    listed_up_to: ClassVar[float] = 20.0  # rows of an expert that `gemm_4bit` takes, on an H200

    def skinny(self, routes: int, each: float) -> TileConfig | None:
        if each > self.few_up_to:
            return None
        if routes <= FEWEST:
            return gemm_few_4bit.tiles_for(routes)
        return gemm_4bit.tiles_for(each) if each <= self.listed_up_to else None

    def few(
        self, rows: Rows, found: tuple[Tensor, Tensor | None, int], cut: TileConfig, lists: Lists | None,
        own: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        launch, act, first, second = self.products.launch, own["act"], self.weights(0), self.weights(1)
        how: dict[str, Any] = {"gather": True, "launch": launch, **self.activated()}
        if lists is None:
            ids, routing, base = found
            gemm_few_4bit.product(rows.x, ids, routing, base, first, act, cut.first, **how)
            gemm_few_4bit.product(act, ids, routing, base, second, own["y"], cut.second, launch=launch)
        else:
            gemm_4bit.product(rows.x, first, lists, act, cut.first, **how)
            gemm_4bit.product(act, second, lists, own["y"], cut.second, launch=launch)


class Mxfp4(FourBits):
    """`mxfp4`: E2M1 with an E8M0 scale."""

    format, group = "mxfp4", 32


class Nvfp4(FourBits):
    """`nvfp4a16`: E2M1 with an E4M3 scale, and a float32 one a matrix."""

    names = ("w13_scale", "w2_scale", "w13_global_scale", "w2_global_scale")
    format, group, listed_up_to = "nvfp4", 16, 0.5


class Int4(FourBits):
    """`int4`: two's complement with a bf16 scale."""

    format, group, listed_up_to = "int4", 128, 24.0


class Mxint4(Int4):
    """`mxint4`: the same with more scales."""

    group = 32


class FourBitsFp8(Packed, RowScaled):
    """Rows in E4M3 with a scale each, found here or come with the rows."""

    names: ClassVar[tuple[str, ...]] = Packed.names

    def skinny(self, routes: int, each: float) -> TileConfig | None:
        return None if routes > FEWEST or each > self.few_up_to else gemm_few_4bit.tiles_for(routes)

    def few(
        self, rows: Rows, found: tuple[Tensor, Tensor | None, int], cut: TileConfig, lists: Lists | None,
        own: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        p, act = self.products, own["act"]
        gemm_few_4bit.product(
            rows.x, *found, self.weights(0), act, cut.first, x_scale=_scale(rows), gather=True, launch=p.launch,
            **self.activated(),
        )  # fmt: skip
        read = self._round(Rows(act), Rows(own["act_numbers"], own["act_scale"]))
        gemm_few_4bit.product(
            read.x, *found, self.weights(1), own["y"], cut.second, x_scale=_scale(read), launch=p.launch
        )


class Mxfp4Fp8(FourBitsFp8):
    """`mxfp4_fp8`: E2M1 with an E8M0 scale, which becomes E4M3 by the row's largest."""

    names = ("w13_scale", "w2_scale", "w13_row_scale", "w2_row_scale")
    format, group = "mxfp4", 32


class Int4Fp8(FourBitsFp8):
    """`int4_fp8`: two's complement with a bf16 scale."""

    format, group = "int4", 128


class Mxint4Fp8(Int4Fp8):
    """`mxint4_fp8`: the same with more scales."""

    group = 32


def _scale(rows: Rows) -> Tensor | None:
    assert not isinstance(rows.scale, float)
    return rows.scale
