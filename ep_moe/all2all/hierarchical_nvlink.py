"""`hierarchical_nvlink`: as `hierarchical_static` over the network, and `nvlink_p2p` within a node.

The rail carries `max_tokens` rows of every rank to every node. Each rank hands what comes to an `nvlink_p2p` among the
ranks of its node, as tokens of its own: a row is written once into the memory of each rank that has an expert of it,
and the answers are summed in the order of ranks. A call waits for no counts, and CUDA graphs can hold it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ep_moe.all2all.base import DispatchShape
from ep_moe.all2all.hierarchical import Seats
from ep_moe.all2all.hierarchical_static import HierarchicalStaticDispatcher, StaticHandle, Unpacked
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.runtime.devices import without_peer_atomics
from ep_moe.types import PeerRows, Pending, PhysicalIds, PhysicalRouting, Received


class HierarchicalNVLinkDispatcher(HierarchicalStaticDispatcher):
    name = "hierarchical_nvlink"
    run_on = "CPU, 2 nodes of 2 and 4 ranks, 4 nodes of 2; 4 GPUs as two nodes: in bench.train alone"
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
        self._seats = Seats(self._levels, dispatch_shape.slots_per_rank)
        self._base = self._levels.rail.rank * of_node.num_physical  # the node's first id, counted by seats

    @classmethod
    def preference(cls, top_k: int, layout: RankLayout) -> tuple[int, str]:
        return 47, "max_tokens rows to every node, and there straight into peers' memory; contract not run on GPUs"

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
        ids = self._seats.of(ids) - self._base
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
