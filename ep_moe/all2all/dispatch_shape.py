"""The shape of the rows that a transport carries, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ep_moe.checks import flat_facts
from ep_moe.config import PLAIN_WIRE, Wire
from ep_moe.quant.row_format import ROW_FORMATS, RowFormat
from ep_moe.runtime.launch_cache import next_power_of_2
from ep_moe.types import dtype_name

_LANES = 4  # float32 numbers in 16 bytes: transports need rows of a multiple of 16 bytes


@dataclass(frozen=True, kw_only=True)
class DispatchShape:
    """The shape of the rows that travel. Layers of equal shape in a context share one dispatcher.

    Values that each call reads are computed once, at construction, because a property costs the host one Python call.

    Args:
        hidden_size: H.
        top_k: K.
        slots_per_rank: L, slots of a rank.
        num_ranks: R, ranks of the EP group.
        dtype: Dtype of the layer.
        max_tokens: The most tokens that a rank dispatches in one call. None: any number, on transports that are not
            static, or whose buffers grow.
        wire: How rows are written while they travel.
        per_route: Each route's result returns as its own row. The token's rank multiplies its K rows by their routing
            weights and adds them in the order of routes, in float32. Each product and each sum is rounded.
    """

    hidden_size: int
    top_k: int
    slots_per_rank: int
    num_ranks: int
    dtype: torch.dtype
    max_tokens: int | None = None
    wire: Wire = PLAIN_WIRE
    per_route: bool = False

    def __post_init__(self) -> None:
        for name in ("num_physical", "row_format", "row_dtype", "scales", "columns"):
            getattr(self, name)  # torch.compile does not trace cached_property, but reads a value cached before

    @cached_property
    def described(self) -> str:
        """The fields as text that ranks compare: "name=value, name=value"."""
        facts = flat_facts(self, "layer") | {"layer.dtype": dtype_name(self.dtype)}
        return ", ".join(f"{name.removeprefix('layer.')}={value}" for name, value in facts.items())

    @cached_property
    def num_physical(self) -> int:
        """P, physical experts."""
        return self.num_ranks * self.slots_per_rank

    @cached_property
    def row_format(self) -> RowFormat:
        """How a dispatched row is written."""
        return ROW_FORMATS[self.wire.dispatch]

    @cached_property
    def row_dtype(self) -> torch.dtype:
        """The dtype of dispatched rows."""
        return self.row_format.number or self.dtype

    @cached_property
    def scales(self) -> int:
        """The number of scales of a dispatched row."""
        return self.row_format.scales(self.hidden_size)

    @cached_property
    def columns(self) -> int:
        """Elements of a dispatched row."""
        return self.row_format.columns(self.hidden_size)

    @cached_property
    def of_weights(self) -> DispatchShape:
        """The shape of the dispatcher that returns gradients of routing weights: rows of top_k float32, padded."""
        columns = -(-self.top_k // _LANES) * _LANES
        return replace(self, hidden_size=columns, dtype=torch.float32)

    @property
    def returned(self) -> int:
        """The number of rows that return for a dispatched row."""
        return self.top_k if self.per_route else 1

    @property
    def row_bytes(self) -> int:
        """The bytes of a dispatched row, without scales."""
        return self.columns * self.row_dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        """The bytes of a dispatched row's scales."""
        return self.scales * self.row_format.scale.itemsize

    def no_rows(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Make the rows of a call without tokens.

        Args:
            device: The device of the rows.

        Returns:
            x [0, columns], and x_scale [0, scales] or None where the format has no scales.
        """
        x = torch.empty(0, self.columns, dtype=self.row_dtype, device=device)
        scale = torch.empty(0, self.scales, dtype=self.row_format.scale, device=device)
        return x, scale if self.scales else None


def whole_bound(tokens: int) -> int:
    """Return the power of two at or above a number of tokens, so that kernels are launched for few sizes."""
    return next_power_of_2(tokens)
