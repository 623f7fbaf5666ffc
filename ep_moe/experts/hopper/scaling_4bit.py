"""The scalings of 4-bit weights, with rows in bf16 or E4M3. `scaling` has a table of all scalings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from ep_moe.experts.hopper import fused_4bit, gemm_4bit, gemm_grouped_4bit, gemm_skinny_4bit
from ep_moe.experts.hopper.gemm_skinny import FEWEST, TileConfig
from ep_moe.experts.hopper.gemm_streaming import Ring
from ep_moe.experts.hopper.numbers_4bit import Weights
from ep_moe.experts.hopper.route_sort import Lists
from ep_moe.experts.hopper.scaling import Rows, Scaling, Unscaled
from ep_moe.experts.hopper.scaling_fp8 import RowScaled


class Packed(Scaling):
    """4-bit weights with a scale for each `group` columns of a row."""

    names: ClassVar[tuple[str, ...]] = ("w13_scale", "w2_scale")
    format: ClassVar[str]  # `Weights.format`
    group: ClassVar[int]
    # mean rows per expert up to which `gemm_4bit` computes the first and the second product, on an H200
    listed_up_to: ClassVar[tuple[float, float]] = (0.0, 0.0)

    @property
    def sizes(self) -> tuple[int, int, int]:
        p = self.products
        return len(p.w2), p.w2.shape[2], p.w13.shape[2] // (1 + p.activation.gated)

    def ring(self, each: float) -> Ring | None:
        return None

    def weights(self, which: int) -> Weights:
        """Return the weights of the first product (0) or the second (1)."""
        p = self.products
        scales = dict(zip(self.names[which::2], p.scales[which::2], strict=True))
        scale, *_ = scales.values()
        found = {name.partition("_")[2]: tensor for name, tensor in scales.items()}
        return Weights(
            (p.w13, p.w2)[which], scale, self.format, self.group, found.get("global_scale"), p.bias(which),
            isinstance(self, RowScaled), found.get("row_scale"),
        )  # fmt: skip

    def activated(self) -> dict[str, Any]:
        """Return the arguments of the activation that the first product applies."""
        p = self.products
        return {"activation": p.activation, "alpha": p.alpha, "limit": p.limit}

    def by_gemm_grouped(self, rows: Rows, lists: Lists, each: float, scratch: Mapping[str, Tensor]) -> None:
        self._multiply(0, rows, lists, each, scratch["act"])
        self._multiply(1, self.second_input(scratch, lists.ends[-1:], False), lists, each, scratch["y"])

    def _multiply(self, which: int, rows: Rows, lists: Lists, each: float, out: Tensor) -> None:
        """Compute the first (0) or second (1) product of sorted rows."""
        p, w = self.products, self.weights(which)
        how: dict[str, Any] = {"launch": p.launch, **(self.activated() if which == 0 else {})}
        addresses = lists.addresses if which == 1 else None
        if each <= self.listed_up_to[which] and addresses is None and not p.exact:
            gather = rows.source is not None
            gemm_4bit.product(rows.x, w, lists, out, gemm_4bit.tile_for(each), gather=gather, **how)
        else:
            gemm_grouped_4bit.product(
                rows.x, w, lists.ends, out, gemm_grouped_4bit.tiles_for(each, w, p.spare_sms), a_scale=_scale(rows),
                source=rows.source, addresses=addresses, spare_sms=p.spare_sms, **how,
            )  # fmt: skip


class FourBits(Packed, Unscaled):
    """4-bit weights, bf16 rows."""

    def skinny_tiles(self, routes: int, each: float) -> TileConfig | None:
        return fused_4bit.tiles_for(routes, each, self.weights(0), self.weights(1))

    def run_skinny(
        self, rows: Rows, routing_args: tuple[Tensor, Tensor | None, int], tiles: TileConfig, lists: Lists | None,
        scratch: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        fused_4bit.products(
            rows.x, *routing_args, self.weights(0), self.weights(1), scratch["act"], scratch["y"], tiles.first,
            launch=self.products.launch, **self.activated(),
        )  # fmt: skip

    def copies_rows_first(self, each: float) -> bool:
        return False  # not measured


class Mxfp4(FourBits):
    """`mxfp4`: E2M1 with E8M0 scales."""

    format, group, listed_up_to = "mxfp4", 32, (20.0, 8.0)


class Nvfp4(FourBits):
    """`nvfp4a16`: E2M1 with E4M3 scales, and one float32 scale per matrix."""

    names = ("w13_scale", "w2_scale", "w13_global_scale", "w2_global_scale")
    format, group, listed_up_to = "nvfp4", 16, (1.0, 1.0)


class Int4(FourBits):
    """`int4`: two's complement with bf16 scales, one per 128 columns of a row."""

    format, group, listed_up_to = "int4", 128, (20.0, 1.0)


class Mxint4(Int4):
    """`mxint4`: `int4` with one scale per 32 columns of a row."""

    group = 32


class FourBitsFp8(Packed, RowScaled):
    """4-bit weights, E4M3 rows with one scale each. Rows arrive rounded, or are rounded here."""

    names: ClassVar[tuple[str, ...]] = Packed.names

    def skinny_tiles(self, routes: int, each: float) -> TileConfig | None:
        return gemm_skinny_4bit.tiles_for(routes) if routes <= FEWEST else None

    def run_skinny(
        self, rows: Rows, routing_args: tuple[Tensor, Tensor | None, int], tiles: TileConfig, lists: Lists | None,
        scratch: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        launch = self.products.launch
        gemm_skinny_4bit.product(
            rows.x, *routing_args, self.weights(0), scratch["act"], tiles.first, x_scale=_row_scale(rows), gather=True,
            launch=launch, **self.activated(),
        )  # fmt: skip
        act = self._round(Rows(scratch["act"]), Rows(scratch["act_numbers"], scratch["act_scale"]))
        gemm_skinny_4bit.product(
            act.x, *routing_args, self.weights(1), scratch["y"], tiles.second, x_scale=_row_scale(act), launch=launch
        )


class Mxfp4Fp8(FourBitsFp8):
    """`mxfp4_fp8`: E2M1 with E8M0 scales. Weights become E4M3 relative to the largest scale of their row."""

    names = ("w13_scale", "w2_scale", "w13_row_scale", "w2_row_scale")
    format, group = "mxfp4", 32


class Int4Fp8(FourBitsFp8):
    """`int4_fp8`: two's complement with bf16 scales, one per 128 columns of a row."""

    format, group = "int4", 128


class Mxint4Fp8(Int4Fp8):
    """`mxint4_fp8`: `int4_fp8` with one scale per 32 columns of a row."""

    group = 32


def _row_scale(rows: Rows) -> Tensor:
    assert isinstance(rows.scale, Tensor)
    return rows.scale


def _scale(rows: Rows) -> Tensor | None:
    assert not isinstance(rows.scale, float)
    return rows.scale
