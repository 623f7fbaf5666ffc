"""What the class of a transport declares, before an instance exists.

It declares its capabilities (`DispatcherCapabilities`), the shapes and hosts that it refuses, its place in "auto", and
the bytes that it will hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar

import torch

from ep_moe import registry
from ep_moe.all2all.dispatch_shape import DispatchShape
from ep_moe.checks import check_count, check_fields
from ep_moe.config import PLAIN_WIRE, Wire
from ep_moe.parallel.layout import RankLayout
from ep_moe.quant.row_format import ROW_FORMATS, WHOLE_ROW
from ep_moe.types import RowLayout, Weighting, dtype_name


@dataclass(frozen=True, kw_only=True)
class DispatcherCapabilities:
    """What a transport can do; one constant per class. The defaults promise nothing.

    Args:
        layout: How it arranges received rows.
        weighting: Who multiplies by the routing weights.
        dedup: A token travels once to a rank, even if several of its experts are there.
        cuda_graph: A CUDA graph can hold dispatch and combine.
        host_sync: Dispatch or combine waits for the device.
        deterministic: Equal inputs give equal bits.
        exact: Rows that go to one rank arrive bitwise unchanged, ordered by source rank, then by token. Results return
            bitwise unchanged. Exception: -0.0 may return as 0.0.
        differentiable: Autograd records dispatch and combine.
        adjoint: Autograd does not record them. The layer's backward is one more dispatch and combine, with the routes
            of the forward, and its rows arrive in the same order (`execution.exchange`).
        returns_weights: It defines `combine_with_weights`, for backward. For a transport with `adjoint` but without
            this, the layer makes a second transport with narrow rows, which returns the gradients of routing weights.
        max_ranks: The most ranks of the EP group, None for no limit.
        max_top_k: The largest K, None for no limit.
        alignment_bytes: The bytes of a row must be a multiple of this.
        dtypes: Dtypes of the layer, None for any.
        devices: Device types.
        dispatch_formats: Supported values of `Wire.dispatch`.
        combine_formats: Supported values of `Wire.combine`.
        scale_alignment_bytes: The bytes of a row's scales must be a multiple of this.
        to_all: Every row goes to every rank, whatever the routing.
        rounds: Dispatch formats to which it rounds plain rows while it sends them.
        static: Its buffers are allocated once, for `DispatchShape.max_tokens`. Received rows have the size of the worst
            case, whatever the routing.
        grows: It is static, and without `max_tokens` its buffers grow. The ranks agree on the token limit of each call.
        peer_out: Experts can write their rows directly to the ranks that sent the tokens (`Received.peer_out`).
        per_route: It supports `DispatchShape.per_route`: experts return one row per route (`Received.per_route`).
        places: It takes a `DeferredRouting`, and maps logical to physical ids while it sends.
        ahead_of: For transports of other packages: names of transports before which "auto" tries this one. If empty,
            "auto" tries it last.
    """

    layout: RowLayout = RowLayout.RANK_MAJOR
    weighting: Weighting = Weighting.EXPERTS
    dedup: bool = False
    cuda_graph: bool = False
    host_sync: bool = True
    deterministic: bool = False
    exact: bool = False
    differentiable: bool = False
    adjoint: bool = False
    returns_weights: bool = False
    max_ranks: int | None = None
    max_top_k: int | None = None
    alignment_bytes: int = 1
    dtypes: frozenset[torch.dtype] | None = None
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    dispatch_formats: frozenset[str] = frozenset({"plain"})
    combine_formats: frozenset[str] = frozenset({"plain"})
    scale_alignment_bytes: int = 4
    to_all: bool = False
    rounds: frozenset[str] = frozenset()
    static: bool = False
    grows: bool = False
    peer_out: bool = False
    per_route: bool = False
    places: bool = False
    ahead_of: frozenset[str] = frozenset()

    def check(self) -> None:
        """Check the fields. The registry calls this on lookup, so one wrong class does not disable its whole module.

        Raises:
            ConfigError: A field has a wrong type or is out of range.
        """
        check_fields(self, DispatcherCapabilities)
        check_count("DispatcherCapabilities.alignment_bytes", self.alignment_bytes, at_least=1)
        check_count("DispatcherCapabilities.scale_alignment_bytes", self.scale_alignment_bytes, at_least=1)
        for name in ("max_ranks", "max_top_k"):
            if getattr(self, name) is not None:
                check_count(f"DispatcherCapabilities.{name}", getattr(self, name), at_least=1)

    def unsupported_reason(
        self,
        name: str,
        hidden_size: int,
        top_k: int,
        ranks: int,
        dtype: torch.dtype,
        max_tokens: int | None,
        wire: Wire,
    ) -> str | None:
        """Say why a transport of these capabilities cannot carry rows of a shape.

        Args:
            name: The transport's name, for the message.
            hidden_size: H.
            top_k: K.
            ranks: R, ranks of the EP group.
            dtype: Dtype of the layer.
            max_tokens: The most tokens of a rank in one call, None for any number.
            wire: How rows are written while they travel.

        Returns:
            None if it can, else the reason.
        """
        for way, formats in (("dispatch", self.dispatch_formats), ("combine", self.combine_formats)):
            asked = getattr(wire, way)
            if asked not in formats:
                return f"{name} carries {', '.join(sorted(formats))} rows in {way}, not {asked} (Wire)"
        form = ROW_FORMATS[wire.dispatch]
        scales = self.scale_alignment_bytes // gcd(self.scale_alignment_bytes, form.scale.itemsize)
        unit = form.block * scales  # columns whose scales fill whole alignment units
        if form.block > 0 and hidden_size % unit:
            wanted = f"a multiple of {unit} with {wire.dispatch} rows"
            return f"{name} needs hidden_size to be {wanted}, got {hidden_size}"
        if form.block == WHOLE_ROW and form.scale.itemsize % self.scale_alignment_bytes:
            wanted = f"a multiple of {self.scale_alignment_bytes} bytes of scales"
            return f"{name} needs {wanted} in a row, and {wire.dispatch} rows have {form.scale.itemsize}"
        if self.max_ranks is not None and ranks > self.max_ranks:
            return f"{name} serves at most {self.max_ranks} rank{'s' if self.max_ranks > 1 else ''}, ep={ranks}"
        if self.max_top_k is not None and top_k > self.max_top_k:
            return f"{name} serves top_k of at most {self.max_top_k}, got {top_k}"
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"{name} carries {', '.join(sorted(map(dtype_name, self.dtypes)))}, not {dtype_name(dtype)}"
        back = torch.float8_e4m3fn if wire.combine == "fp8" else dtype
        for number, packed in ((form.number or dtype, form.packed), (back, 1)):  # dispatched, combined rows
            unit = self.alignment_bytes * packed // gcd(self.alignment_bytes * packed, number.itemsize)
            if hidden_size % unit:
                wanted = f"a multiple of {unit} in {dtype_name(number)}"
                return f"{name} needs hidden_size to be {wanted}, got {hidden_size}"
        if self.static and not self.grows and max_tokens is None:
            return f"{name} has fixed buffers; set their size with EPContext.from_torchrun(max_tokens=...)"
        return None


class DeclaredTransport:
    """What the class of a transport declares before an instance exists, without a device or a peer."""

    name: ClassVar[str]
    capabilities: ClassVar[DispatcherCapabilities]
    tested_machines: ClassVar[str] = "not run"  # for docs/reference/backends.md
    once_per_node: ClassVar[bool] = False  # a token travels once to each node that holds one of its experts

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        """Return the transport's place in the order of "auto", and the reason.

        Args:
            top_k: K, experts of a token.
            layout: The layout of the ranks.

        Returns:
            A rank in the order (the smallest is tried first), and the reason that `explain` prints.
        """
        return 80, "it states no place"

    @classmethod
    def available(cls) -> str | None:
        """Say why the transport cannot run in this installation. Uses no device and no process group.

        Returns:
            None if it can run, else the reason.
        """
        return None

    @classmethod
    def unsupported_reason(
        cls,
        hidden_size: int,
        top_k: int,
        ranks: int,
        dtype: torch.dtype,
        max_tokens: int | None,
        wire: Wire = PLAIN_WIRE,
    ) -> str | None:
        """Say why the transport cannot carry rows of a shape.

        Args:
            hidden_size: H.
            top_k: K.
            ranks: R, ranks of the EP group.
            dtype: Dtype of the layer.
            max_tokens: The most tokens of a rank in one call, None for any number.
            wire: How rows are written while they travel.

        Returns:
            None if it can, else the reason.
        """
        return cls.capabilities.unsupported_reason(cls.name, hidden_size, top_k, ranks, dtype, max_tokens, wire)

    @classmethod
    def unsupported_platform(cls, layout: RankLayout) -> str | None:
        """Say why the transport cannot run on this machine with these ranks. May query the driver; not collective.

        Args:
            layout: The layout of the ranks.

        Returns:
            None if it can, else the reason.
        """
        return None

    @classmethod
    def buffer_bytes(cls, dispatch_shape: DispatchShape) -> int:
        """Count the bytes of row buffers that the transport keeps between calls, for one call in flight.

        The bookkeeping of an external library is not counted.

        Args:
            dispatch_shape: The shape of the rows that travel.

        Returns:
            Bytes.
        """
        return 0

    @classmethod
    def room_for(cls, bound: int) -> int:
        """Return the tokens per rank for which growing buffers are allocated.

        Args:
            bound: The token limit of a call.

        Returns:
            Tokens, at least `bound`.
        """
        return bound

    @classmethod
    def calls_in_parts(cls, dispatch_shape: DispatchShape) -> int:
        """Return how many transport calls are in flight when a layer call travels in parts.

        Args:
            dispatch_shape: The shape of the rows that travel.

        Returns:
            Calls in flight.
        """
        return 2


def one_host_problem(name: str, layout: RankLayout) -> str | None:
    """Return why the ranks do not fit on this host, or None. For transports that access their peers' memory."""
    if layout.across_nodes is not None:
        return f"{name} is for one host, and the ranks of an EP group are on several: {layout.across_nodes}"
    ranks, here = layout.ep * layout.etp, layout.paper_gpus
    here = torch.cuda.device_count() if here is None else here
    if here >= ranks:
        return None
    return f"{name} is for one host here: ep * etp is {ranks}, and this host shows {here} GPUs"


def capturable() -> str:
    """Name the available transports that can be captured in a CUDA graph, for the error about one that cannot."""
    names = [
        name
        for name in registry.targets("dispatchers")
        if registry.unsupported_reason("dispatchers", name) is None
        and registry.load("dispatchers", name).capabilities.cuda_graph
    ]
    where = "with EPContext.from_torchrun(max_tokens=...) where buffers are fixed"
    return f"of those available here {', '.join(names)} can ({where})"
