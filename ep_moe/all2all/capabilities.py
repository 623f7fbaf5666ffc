"""What a transport says of itself before one is made: what it can do (`DispatcherCapabilities`), which shapes and hosts
this excludes, its place in "auto", the bytes that it will hold."""

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
    """What a transport can do; one constant per class. Defaults promise nothing.

    Args:
        layout: How it delivers rows.
        weighting: Who multiplies by the routing weights.
        dedup: A token travels once to a rank, however many of its experts are there.
        cuda_graph: A CUDA graph can hold dispatch and combine.
        host_sync: Dispatch or combine waits for the device.
        deterministic: Equal inputs give equal bits.
        exact: Rows that go to one rank arrive bitwise unchanged, ordered by source rank, then by token. Results return
            bitwise unchanged. Exception: -0.0 may return as 0.0.
        differentiable: Autograd follows dispatch and combine.
        adjoint: Autograd does not follow them. A layer's backward is a dispatch and a combine of its own
            (`execution.exchange`): one call of the transport with the routes of the forward, whose rows arrive in the
            same order.
        returns_weights: It has `combine_with_weights`, for backward. The layer of another transport with `adjoint`
            makes a second, narrow one, which brings back the gradients of routing weights.
        max_ranks: The most ranks of the EP group, None for no limit.
        max_top_k: The largest K, None for no limit.
        alignment_bytes: The bytes of a row must be a multiple of this.
        dtypes: Of the layer, None for any.
        devices: Device types.
        dispatch_formats: Values of `Wire.dispatch`.
        combine_formats: Values of `Wire.combine`.
        scale_alignment_bytes: The bytes of a row's scales must be a multiple of this.
        to_all: Every row goes to every rank, whatever the routing.
        rounds: Dispatch formats whose rounding is part of its own write. Such rows may come plain.
        static: Its buffers are made once, for `DispatchShape.max_tokens`, and as many rows arrive as could come.
        grows: It is static, and without `max_tokens` its buffers grow. The ranks agree on the most tokens of each call.
        peer_out: Experts can write their rows straight to the ranks that wait for them (`Received.peer_out`).
        per_route: It takes `DispatchShape.per_route`, and such rows from experts (`Received.per_route`).
        places: It takes a `DeferredRouting`, and places it while it sends.
        ahead_of: For transports of other packages: names of transports that it goes before where "auto" chooses.
            Without a name it comes last.
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
        """Check the fields. The registry calls this when it looks a class up, so that one wrong class of a module
        leaves the others usable.

        Raises:
            ConfigError: A field is of a wrong kind or out of range.
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
            name: Of the transport, for the sentence.
            hidden_size: H.
            top_k: K.
            ranks: R, ranks of the EP group.
            dtype: Of the layer.
            max_tokens: The most tokens of a rank in one call, None for any number.
            wire: How rows are written.

        Returns:
            None if it can, else the reason.
        """
        for way, formats in (("dispatch", self.dispatch_formats), ("combine", self.combine_formats)):
            asked = getattr(wire, way)
            if asked not in formats:
                return f"{name} carries {', '.join(sorted(formats))} rows in {way}, not {asked} (Wire)"
        form = ROW_FORMATS[wire.dispatch]
        scales = self.scale_alignment_bytes // gcd(self.scale_alignment_bytes, form.scale.itemsize)
        unit = form.block * scales  # columns with so many scales
        if form.block > 0 and hidden_size % unit:
            wanted = f"a multiple of {unit} with {wire.dispatch} rows"
            return f"{name} needs hidden_size to be {wanted}, got {hidden_size}"
        if form.block == WHOLE_ROW and form.scale.itemsize % self.scale_alignment_bytes:
            wanted = f"a multiple of {self.scale_alignment_bytes} bytes of scales"
            return f"{name} wants {wanted} in a row, and {wire.dispatch} rows have {form.scale.itemsize}"
        if self.max_ranks is not None and ranks > self.max_ranks:
            return f"{name} serves at most {self.max_ranks} rank{'s' if self.max_ranks > 1 else ''}, ep={ranks}"
        if self.max_top_k is not None and top_k > self.max_top_k:
            return f"{name} serves top_k of at most {self.max_top_k}, got {top_k}"
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"{name} carries {', '.join(sorted(map(dtype_name, self.dtypes)))}, not {dtype_name(dtype)}"
        back = torch.float8_e4m3fn if wire.combine == "fp8" else dtype
        for number, packed in ((form.number or dtype, form.packed), (back, 1)):  # rows of both ways
            unit = self.alignment_bytes * packed // gcd(self.alignment_bytes * packed, number.itemsize)
            if hidden_size % unit:
                wanted = f"a multiple of {unit} in {dtype_name(number)}"
                return f"{name} needs hidden_size to be {wanted}, got {hidden_size}"
        if self.static and not self.grows and max_tokens is None:
            return f"{name} has fixed buffers; say how large by EPContext.from_torchrun(max_tokens=...)"
        return None


class DeclaredTransport:
    """What a transport's class says before one is made: no device and no peer takes part."""

    name: ClassVar[str]
    capabilities: ClassVar[DispatcherCapabilities]
    tested_machines: ClassVar[str] = "not run"  # for docs/reference/backends.md
    once_per_node: ClassVar[bool] = False  # a token goes once to each node that has an expert of it

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        """The transport's place in "auto", and why.

        Args:
            top_k: Experts of a token.
            layout: Of the ranks.

        Returns:
            A number, of which the smallest comes first, and the reason that `explain` prints.
        """
        return 80, "it states no place"

    @classmethod
    def available(cls) -> str | None:
        """Say why the transport cannot run in this installation. Touches no device and no group.

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
            dtype: Of the layer.
            max_tokens: The most tokens of a rank in one call, None for any number.
            wire: How rows are written.

        Returns:
            None if it can, else the reason.
        """
        return cls.capabilities.unsupported_reason(cls.name, hidden_size, top_k, ranks, dtype, max_tokens, wire)

    @classmethod
    def unsupported_platform(cls, layout: RankLayout) -> str | None:
        """Say why the transport cannot run on this machine with these ranks. Asks the driver at most; not collective.

        Args:
            layout: Of the ranks.

        Returns:
            None if it can, else the reason.
        """
        return None

    @classmethod
    def buffer_bytes(cls, dispatch_shape: DispatchShape) -> int:
        """Count the rows that the transport keeps room for between calls, for one call in flight. A library's own
        bookkeeping is not counted.

        Args:
            dispatch_shape: The shape of what travels.

        Returns:
            Bytes.
        """
        return 0

    @classmethod
    def room_for(cls, bound: int) -> int:
        """Say for how many tokens growing buffers are made.

        Args:
            bound: The bound of a call.

        Returns:
            Tokens, at least `bound`.
        """
        return bound

    @classmethod
    def calls_in_parts(cls, dispatch_shape: DispatchShape) -> int:
        """Say how many calls are in flight when a layer call travels in parts.

        Args:
            dispatch_shape: The shape of what travels.

        Returns:
            Calls in flight.
        """
        return 2


def one_host_problem(name: str, layout: RankLayout) -> str | None:
    """For transports that reach their peers' memory: None, or that the ranks do not fit on this host."""
    if layout.across_nodes is not None:
        return f"{name} is for one host, and the ranks of an EP group are on several: {layout.across_nodes}"
    ranks, here = layout.ep * layout.etp, layout.paper_gpus
    here = torch.cuda.device_count() if here is None else here
    if here >= ranks:
        return None
    return f"{name} is for one host here: ep * etp is {ranks}, and this host shows {here} GPUs"


def capturable() -> str:
    """Name the transports that a CUDA graph can hold, for an error about one that it cannot."""
    names = [
        name
        for name in registry.targets("dispatchers")
        if registry.unsupported_reason("dispatchers", name) is None
        and registry.load("dispatchers", name).capabilities.cuda_graph
    ]
    where = "with EPContext.from_torchrun(max_tokens=...) where buffers are fixed"
    return f"of those available here {', '.join(names)} can ({where})"
