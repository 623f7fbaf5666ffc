"""`hierarchical_static` and `hierarchical_nvlink`: `hierarchical` with buffers for all tokens on every rank, so that no
rank waits for counts.

Each call moves `max_tokens` rows per rank, whatever the routing: by all-gather over the rail and then within the node.
Results return by all-to-alls of equal parts, summed in the same order as by `hierarchical`. No buffer can overflow, and
CUDA graphs can capture a call. With few tokens per rank the surplus is small, because nearly each token has an expert
on each node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ep_moe.all2all.base import Dispatcher, DispatcherCapabilities, DispatchShape
from ep_moe.all2all.fan_out import in_order
from ep_moe.all2all.hierarchical import NodeMajorIds, levels_of, without_rails
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.parallel.collectives import all_to_all_rows, gather_rows
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.quant.row_format import ROW_FORMATS
from ep_moe.runtime.devices import without_peer_atomics
from ep_moe.types import (
    LocalIds,
    PeerRows,
    Pending,
    PhysicalIds,
    PhysicalRouting,
    Received,
    RowLayout,
    Weighting,
    capturing,
)

# message -> rows, physical ids of the EP group, weights, scales
Unpacked: TypeAlias = "Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor | None]]"


@dataclass(frozen=True)
class StaticHandle:
    """State of a call.

    tokens: T of this rank
    bound: rows per rank, the token limit
    invalid: bool [T, 1], tokens with an id out of range
    node: the rows received by the transport within the node, for `hierarchical_nvlink`
    """

    tokens: int
    bound: int
    invalid: Tensor
    node: Received | None = None


class HierarchicalStaticDispatcher(Dispatcher):
    """`hierarchical` with buffers for all tokens on every rank, so that no rank waits for counts."""

    name = "hierarchical_static"
    tested_machines = "CPU, gloo, 2 nodes of 2 and 4 ranks, 4 nodes of 2; 4 H100, 4 H200 as two nodes"
    capabilities = DispatcherCapabilities(
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        dedup=True,
        cuda_graph=True,
        host_sync=False,
        deterministic=True,
        adjoint=True,
        dispatch_formats=frozenset(ROW_FORMATS),
        static=True,
        to_all=True,
    )

    def __init__(self, dispatch_shape: DispatchShape, rank_group: RankGroup) -> None:
        super().__init__(dispatch_shape, rank_group)
        self._levels = levels_of(rank_group)
        self._first = rank_group.rank * dispatch_shape.slots_per_rank

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        return 48, "max_tokens rows to every rank, once to each node, without a wait for the host"

    @classmethod
    def unsupported_platform(cls, layout: RankLayout) -> str | None:
        return without_rails(cls.name, layout)

    def _dispatch(
        self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, problem: str | None, max_tokens: int | None
    ) -> Pending[Received]:
        assert max_tokens is not None, "the base class checks it"
        if problem is not None:
            self._poison(x.device, max_tokens)
            self.refuse(problem)
        return self._send(x, x_scale, routing, max_tokens)

    def _send(self, x: Tensor, x_scale: Tensor | None, routing: PhysicalRouting, bound: int) -> Pending[Received]:
        ids = routing.ids.int()
        invalid = ((ids < -1) | (ids >= self.dispatch_shape.num_physical)).any(1, keepdim=True)
        parts = [x, ids, routing.weights] if x_scale is None else [x, ids, routing.weights, x_scale]
        in_bytes = [_bytes(part) for part in parts]
        # the rows after the last token have all bits set: their ids read as -1, so they belong to no expert
        widths = [part.shape[1] for part in in_bytes]
        message = torch.full((bound, sum(widths)), 255, dtype=torch.uint8, device=x.device)
        torch.cat(in_bytes, dim=1, out=message[: len(x)])
        over_rail = _all_gather_rows(message, self._levels.rail)

        def finish() -> Received:
            handle = StaticHandle(len(x), bound, invalid)
            return self._within_node(over_rail.wait(), handle, partial(_unpacked, widths=widths, like=parts))

        return Pending(finish)

    def _within_node(self, message: Tensor, handle: StaticHandle, unpacked: Unpacked) -> Received:
        """Gather the rail's rows within the node. message: uint8 [nodes * bound, bytes of a row]"""
        found = _all_gather_rows(message, self._levels.node)
        rows, ids, weights, scale = unpacked(found.wait())
        local = ids - self._first
        return Received(
            x=rows,
            x_scale=scale,
            layout=RowLayout.RANK_MAJOR,
            weighting=Weighting.EXPERTS,
            handle=handle,
            local_ids=LocalIds(local.where((local >= 0) & (local < self.dispatch_shape.slots_per_rank), -1)),
            weights=weights,
        )

    def _combine(self, y: Tensor, handle: StaticHandle, out: Tensor | None) -> Pending[Tensor]:
        return self._over_rail(_reduce_scatter_rows(y, self._levels.node), handle)

    def _over_rail(self, of_node: Pending[Tensor], handle: StaticHandle) -> Pending[Tensor]:
        """Return the node's sums [nodes * bound, H] over the rail, and sum over nodes."""

        def finish() -> Tensor:
            total = _reduce_scatter_rows(of_node.wait(), self._levels.rail).wait()
            # the host does not check ids on the device here: mark tokens with an invalid id by NaN
            return total[: handle.tokens].masked_fill(handle.invalid, torch.nan)

        return Pending(finish)

    def _poison(self, device: torch.device, bound: int) -> None:
        """Make this call without rows, and answer the peers' rows with NaN.

        The peers have already started the call, and would otherwise wait for this rank.
        """
        if capturing(device):
            return
        g = self.dispatch_shape
        x, x_scale = g.no_rows(device)
        ids = torch.empty(0, g.top_k, dtype=torch.int32, device=device)
        received = self._send(x, x_scale, PhysicalRouting(PhysicalIds(ids), ids.float()), bound).wait()
        self._combine(self._nans(received), received.handle, None).wait()

    def _nans(self, received: Received) -> Tensor:
        """Return NaN for rows with an expert on this rank, and 0 for other rows."""
        assert received.local_ids is not None
        here = (received.local_ids >= 0).any(1, keepdim=True)
        y = torch.zeros(len(here), self.dispatch_shape.hidden_size, dtype=self.dispatch_shape.dtype, device=here.device)
        return y.masked_fill(here, torch.nan)


def _bytes(x: Tensor) -> Tensor:
    """Return x as uint8 [rows, bytes of a row].

    An expanded tensor without elements counts as contiguous with any strides. Its last stride may differ from 1, which
    `view(dtype)` refuses.
    """
    x = x.contiguous()
    return (x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def _unpacked(message: Tensor, widths: list[int], like: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Split a message into rows, ids, weights and scales. widths, like: bytes and a tensor of the dtype of each part"""
    columns = zip(_columns(message, widths), like, strict=True)
    rows, ids, weights, *scale = (column.view(part.dtype) for column, part in columns)
    return rows, ids, weights, scale[0] if scale else None


def _columns(message: Tensor, widths: list[int]) -> list[Tensor]:
    """Copy the columns of a message, of `widths` bytes each.

    Uses the widest word that divides all widths, because torch copies strided bytes one at a time.
    """
    word = next(kind for kind in (torch.int64, torch.int32, torch.uint8) if not any(w % kind.itemsize for w in widths))
    columns = message.view(word).split([width // word.itemsize for width in widths], dim=1)
    return [column.clone(memory_format=torch.contiguous_format) for column in columns]


def _all_gather_rows(x: Tensor, rank_group: RankGroup) -> Pending[Tensor]:
    """All-gather x. All ranks have equally many rows."""
    return gather_rows(x, [len(x)] * rank_group.size, rank_group)


def _reduce_scatter_rows(y: Tensor, rank_group: RankGroup) -> Pending[Tensor]:
    """Send an equal part of y to every rank, and sum the received parts in the order of ranks."""
    size = rank_group.size
    each = [len(y) // size] * size
    pending = all_to_all_rows(y, each, each, rank_group)
    return Pending(lambda: in_order(pending.wait().reshape(size, -1, y.shape[1])))


class HierarchicalNVLinkDispatcher(HierarchicalStaticDispatcher):
    """`hierarchical_static` over the network, `nvlink_p2p` within a node.

    The rail carries `max_tokens` rows of every rank to every node. Each rank dispatches these rows to the ranks of its
    node with `nvlink_p2p`, as if they were its own tokens. A row is written once into the memory of each rank that
    holds one of its experts. The results are summed in the order of ranks.
    """

    name = "hierarchical_nvlink"
    tested_machines = "CPU, 2 nodes of 2 and 4 ranks, 4 nodes of 2; 4 H200 as two nodes; 4 H100 in bench.train alone"
    capabilities = dataclasses.replace(
        HierarchicalStaticDispatcher.capabilities,
        alignment_bytes=NVLinkP2PDispatcher.capabilities.alignment_bytes,
        dtypes=NVLinkP2PDispatcher.capabilities.dtypes,
        devices=NVLinkP2PDispatcher.capabilities.devices,
        to_all=False,
        peer_out=True,
    )

    def __init__(self, dispatch_shape: DispatchShape, rank_group: RankGroup) -> None:
        super().__init__(dispatch_shape, rank_group)
        node, nodes = self._levels.node, self._levels.rail.size
        assert dispatch_shape.max_tokens is not None, "the base class checks it"
        of_node = dataclasses.replace(dispatch_shape, num_ranks=node.size, max_tokens=nodes * dispatch_shape.max_tokens)
        self._node = NVLinkP2PDispatcher(of_node, node)
        self._node_major_ids = NodeMajorIds(self._levels, dispatch_shape.slots_per_rank)
        self._base = self._levels.rail.rank * of_node.num_physical  # the node's first id, node-major

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        return 47, "max_tokens rows to every node, and there straight into peers' memory"

    @classmethod
    def available(cls) -> str | None:
        return NVLinkP2PDispatcher.available()

    @classmethod
    def unsupported_platform(cls, layout: RankLayout) -> str | None:
        problem = super().unsupported_platform(layout)
        if problem is not None:
            return problem
        here, most = layout.ep // layout.ep_node_count, NVLinkP2PDispatcher.capabilities.max_ranks
        if most is not None and here > most:
            return f"{cls.name} serves at most {most} ranks of an EP group on a node, here are {here}"
        gpus = here * layout.etp
        found = torch.cuda.device_count() if layout.paper_gpus is None else layout.paper_gpus
        if found < gpus:
            return f"{cls.name} needs {gpus} GPUs for the ranks of an EP group on a node, and this host shows {found}"
        if layout.paper_gpus is None and (apart := without_peer_atomics(gpus)) is not None:
            return f"{cls.name} needs NVLink between the GPUs of a node, and {apart[0]} and {apart[1]} have none"
        return None

    @classmethod
    def buffer_bytes(cls, dispatch_shape: DispatchShape) -> int:
        """Count the bytes of `nvlink_p2p` over all ranks: as many rows, and more flags and packets than are used."""
        return NVLinkP2PDispatcher.buffer_bytes(dispatch_shape)

    def _within_node(self, message: Tensor, handle: StaticHandle, unpacked: Unpacked) -> Received:
        rows, ids, weights, scale = unpacked(message)
        ids = self._node_major_ids.of(ids) - self._base
        ids = ids.where((ids >= 0) & (ids < self._node.dispatch_shape.num_physical), -1)
        received = self._node.dispatch(rows, PhysicalRouting(PhysicalIds(ids), weights), scale, max_tokens=len(rows))
        return dataclasses.replace(received, handle=dataclasses.replace(handle, node=received))

    def _combine(self, y: Tensor | PeerRows, handle: StaticHandle, out: Tensor | None) -> Pending[Tensor]:
        assert handle.node is not None
        return self._over_rail(Pending.of(self._node.combine(y, handle.node.handle)), handle)

    def _combine_written(self, handle: StaticHandle, out: Tensor | None) -> Pending[Tensor]:
        assert handle.node is not None
        assert handle.node.peer_out is not None
        return self._combine(handle.node.peer_out, handle, out)

    def _nans(self, received: Received) -> Tensor:
        """Return NaN for all rows. `nvlink_p2p` sums only the rows of experts."""
        g = self.dispatch_shape
        return torch.full((len(received.x), g.hidden_size), torch.nan, dtype=g.dtype, device=received.x.device)

    def destroy(self) -> None:
        self._node.destroy()
