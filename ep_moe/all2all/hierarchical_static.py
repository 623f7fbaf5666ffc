"""`hierarchical_static` and `hierarchical_nvlink`: as `hierarchical`, with room for every token everywhere, so that no
rank waits for counts.

Each call moves `max_tokens` rows per rank, whatever the routing: by all-gather over the rail and then within the node;
results come back by all-to-alls of equal parts. Sums have the order of `hierarchical`. Nothing can overflow, and CUDA
graphs can hold a call. Few tokens per rank hardly move more rows than must: nearly each has an expert on each node.
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

# A message to rows, ids of the EP group, weights and scales
Unpacked: TypeAlias = "Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor | None]]"


@dataclass(frozen=True)
class StaticHandle:
    """tokens: of this rank; bound: of every rank; invalid: bool [T, 1], which have an id of no expert; node: what a
    transport of its own within the node received."""

    tokens: int
    bound: int
    invalid: Tensor
    node: Received | None = None


class HierarchicalStaticDispatcher(Dispatcher):
    """As `hierarchical`, with room for every token everywhere, so that no rank waits for counts."""

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
        # rows behind the last token: all bits are set, so that ids are -1, and rows are of no expert
        widths = [part.shape[1] for part in in_bytes]
        message = torch.full((bound, sum(widths)), 255, dtype=torch.uint8, device=x.device)
        torch.cat(in_bytes, dim=1, out=message[: len(x)])
        over_rail = _everybodys(message, self._levels.rail)

        def finish() -> Received:
            handle = StaticHandle(len(x), bound, invalid)
            return self._within_node(over_rail.wait(), handle, partial(_unpacked, widths=widths, like=parts))

        return Pending(finish)

    def _within_node(self, message: Tensor, handle: StaticHandle, unpacked: Unpacked) -> Received:
        """Pass on what came over the rail. message: uint8 [nodes * bound, bytes of a row]"""
        found = _everybodys(message, self._levels.node)
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
        return self._over_rail(_returned(y, self._levels.node), handle)

    def _over_rail(self, of_node: Pending[Tensor], handle: StaticHandle) -> Pending[Tensor]:
        """Send sums of the node [nodes * bound, H] back, and add those of all nodes."""

        def finish() -> Tensor:
            total = _returned(of_node.wait(), self._levels.rail).wait()
            # nothing has waited for the device to refuse such an id; its token must not look like a result
            return total[: handle.tokens].masked_fill(handle.invalid, torch.nan)

        return Pending(finish)

    def _poison(self, device: torch.device, bound: int) -> None:
        """Take part with no rows, and give NaN to the peers' rows: they have started and cannot be called back."""
        if capturing(device):
            return
        g = self.dispatch_shape
        x, x_scale = g.no_rows(device)
        ids = torch.empty(0, g.top_k, dtype=torch.int32, device=device)
        received = self._send(x, x_scale, PhysicalRouting(PhysicalIds(ids), ids.float()), bound).wait()
        self._combine(self._nans(received), received.handle, None).wait()

    def _nans(self, received: Received) -> Tensor:
        """What an expert that refuses returns: NaN for its rows, and nothing for others."""
        assert received.local_ids is not None
        here = (received.local_ids >= 0).any(1, keepdim=True)
        y = torch.zeros(len(here), self.dispatch_shape.hidden_size, dtype=self.dispatch_shape.dtype, device=here.device)
        return y.masked_fill(here, torch.nan)


def _bytes(x: Tensor) -> Tensor:
    """[rows, bytes of a row]. An expanded tensor without elements is contiguous whatever its strides, which a view by
    dtype refuses."""
    x = x.contiguous()
    return (x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def _unpacked(message: Tensor, widths: list[int], like: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Rows, ids, weights and scales of a message, which were written as `like`."""
    columns = zip(_columns(message, widths), like, strict=True)
    rows, ids, weights, *scale = (column.view(part.dtype) for column, part in columns)
    return rows, ids, weights, scale[0] if scale else None


def _columns(message: Tensor, widths: list[int]) -> list[Tensor]:
    """Copies of its columns of so many bytes, in the widest words that all of them are made of: a copy of strided bytes
    moves them one by one."""
    word = next(kind for kind in (torch.int64, torch.int32, torch.uint8) if not any(w % kind.itemsize for w in widths))
    columns = message.view(word).split([width // word.itemsize for width in widths], dim=1)
    return [column.clone(memory_format=torch.contiguous_format) for column in columns]


def _everybodys(x: Tensor, rank_group: RankGroup) -> Pending[Tensor]:
    """As many rows of every rank, one behind the other."""
    return gather_rows(x, [len(x)] * rank_group.size, rank_group)


def _returned(y: Tensor, rank_group: RankGroup) -> Pending[Tensor]:
    """As many rows to every rank, and the sum of what comes back in the order of ranks."""
    size = rank_group.size
    each = [len(y) // size] * size
    pending = all_to_all_rows(y, each, each, rank_group)
    return Pending(lambda: in_order(pending.wait().reshape(size, -1, y.shape[1])))


class HierarchicalNVLinkDispatcher(HierarchicalStaticDispatcher):
    """As `hierarchical_static` over the network, and `nvlink_p2p` within a node.

    The rail carries `max_tokens` rows of every rank to every node. Each rank hands what comes to an `nvlink_p2p` among
    the ranks of its node, as tokens of its own: a row is written once into the memory of each rank that has an expert
    of it, and the answers are summed in the order of ranks.
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
        """Those of `nvlink_p2p` over all ranks, which has as many rows; of flags and packets it has more."""
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
        """For all rows: `nvlink_p2p` adds those of experts alone."""
        g = self.dispatch_shape
        return torch.full((len(received.x), g.hidden_size), torch.nan, dtype=g.dtype, device=received.x.device)

    def destroy(self) -> None:
        self._node.destroy()
