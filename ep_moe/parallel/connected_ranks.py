"""The ranks of a context, and how they meet: from torchrun, from process groups, from a DeviceMesh, or one alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh

from ep_moe.checks import shown
from ep_moe.config import ParallelConfig, Tokens
from ep_moe.errors import ConfigError
from ep_moe.parallel.consensus import StoreConsensus
from ep_moe.parallel.flight_recorder import COMPILING_S, FlightRecorder
from ep_moe.parallel.groups import (
    DEADLINE_S,
    RankGroups,
    agreed_layout,
    check_groups,
    default_store,
    init_from_torchrun,
    local_device,
    numbered,
)
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.token_flow import TokenFlow
from ep_moe.runtime.devices import as_device, gpu_index, on_device


class ConnectedRanks:
    """Rank layout, groups, flight recorder and consensus of one context: what `EPContext` shares between layers rests
    on it.

    Args:
        layout: This rank's coordinates and groups.
        device: Where the layers compute.
        store: Shared by the ranks; None for a single process.
        rank_groups: Process groups by kind.
        flight_recorder: Follows the steps of this rank and its peers.
        max_tokens: The most tokens that any rank passes to a layer in one call. Default: any number.
    """

    def __init__(
        self,
        layout: RankLayout,
        device: torch.device,
        store: Store | None,
        rank_groups: RankGroups,
        flight_recorder: FlightRecorder,
        max_tokens: int | None = None,
    ) -> None:
        self.layout = layout
        self.device, self._gpu = device, gpu_index(device)
        self.flight_recorder = flight_recorder
        self.rank_groups = rank_groups
        self._tokens = TokenFlow(layout, tp=rank_groups["tp"], etp=rank_groups["etp"], lockstep=rank_groups["lockstep"])
        self.max_tokens = max_tokens
        self._seeds = None if store is None else PrefixStore(f"seeds/stage{layout.pp_rank}", store)
        peers = layout.group("lockstep")
        scope = None if store is None else PrefixStore(f"block{peers[0]}", store)
        held = "" if layout.nodes is None else layout.nodes.store
        self.consensus = StoreConsensus(scope, peers, layout.rank, flight_recorder.deadline_s, held)

    @classmethod
    def from_torchrun(
        cls,
        parallel: ParallelConfig | None = None,
        *,
        device: torch.device | str | int | None = None,
        deadline_s: float = DEADLINE_S,
        max_tokens: int | None = None,
        ranks_per_node: int | None = None,
    ) -> Self:
        """Make a context from torchrun's environment, and the default process group unless there is one.

        Args:
            parallel: Sizes of dp, tp, ep, etp and pp. Default: expert parallel over all ranks (dp = world).
            device: Where the layers compute. Default: this rank's GPU, else the CPU.
            deadline_s: Seconds that a collective step may last before its peers are examined.
            max_tokens: The most tokens (rows of x) that any rank passes to a layer in one call. Transports then make
                their buffers once, which CUDA graphs and some of them need. Default: any number; the buffers of
                `nvlink_p2p` grow with the calls.
            ranks_per_node: Take so many consecutive ranks for one node. Default: ranks share a node where they share a
                host (its name and boot id, or the environment variable NCCL_HOSTID).

        Returns:
            The context, on every rank.

        Raises:
            ConfigError: on all ranks, where the sizes do not fit the world or the ranks do not agree.
        """
        device = local_device() if device is None else as_device(device)
        init_from_torchrun(device, deadline_s=deadline_s)
        return cls.from_groups(
            parallel, device=device, deadline_s=deadline_s, max_tokens=max_tokens, ranks_per_node=ranks_per_node
        )

    @classmethod
    def from_groups(
        cls,
        parallel: ParallelConfig | None = None,
        groups: Mapping[str, ProcessGroup] | None = None,
        *,
        device: torch.device | str | int,
        deadline_s: float = DEADLINE_S,
        max_tokens: int | None = None,
        ranks_per_node: int | None = None,
    ) -> Self:
        """Make a context within an initialized torch.distributed.

        Args:
            parallel: Sizes of dp, tp, ep, etp and pp. Default: expert parallel over all ranks (dp = world).
            groups: Process groups by "ep", "tp" and "etp". Each must hold the ranks that `RankLayout` gives it; a group
                that is not given is made.
            device: Where the layers compute.
            deadline_s: Seconds that a collective step may last before its peers are examined.
            max_tokens: The most tokens that any rank passes to a layer in one call. Default: any number.
            ranks_per_node: Take so many consecutive ranks for one node. Default: by the ranks' hosts.

        Returns:
            The context, on every rank.

        Raises:
            ConfigError: on all ranks, where the sizes or groups do not fit or the ranks do not agree.
        """
        _check_initialized()
        ranks = range(dist.get_world_size())
        problem = None
        if not isinstance(parallel, ParallelConfig | None):
            problem = ConfigError(
                f"parallel must be a ParallelConfig, got {shown(parallel)}; give ParallelConfig(dp=...)"
            )
            parallel = None
        parallel = parallel or ParallelConfig(dp=len(ranks))
        try:
            device = as_device(device)
        except ConfigError as error:  # all ranks raise it, once they have met
            device, problem = torch.device("cpu"), error
        return cls._connect(parallel, ranks, groups, device, deadline_s, max_tokens, ranks_per_node, problem)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        tokens: Tokens = Tokens.REPLICATED,
        ep: int | None = None,
        etp: int | None = None,
        device: torch.device | str | int | None = None,
        deadline_s: float = DEADLINE_S,
        max_tokens: int | None = None,
        ranks_per_node: int | None = None,
    ) -> Self:
        """Make a context over the ranks of a DeviceMesh, whose axes it knows by their names.

        The axes may stand in any order. Attention's are `pp`, `dp_replicate`, one of `dp`, `dp_shard`, `fsdp` and
        `batch`, `cp`, and `tp`. The experts' are `pp`, `dp_replicate`, one of `replica`, `efsdp` and `edp` (ranks that
        hold the same experts), `ep` and `etp`. All axes but `pp`, `tp`, `ep` and `etp` hold different tokens: together
        they are the layer's dp. With an `ep` or `etp` axis each rank has its own tokens (tp = 1).

        The ranks of the mesh call this and no others. A submesh is served: contexts of several live side by side.
        The groups of `tp`, `ep` and `etp` are the mesh's own; those that it lacks are made.

        Args:
            mesh: A mesh with axis names, for example `init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))`.
            tokens: Whether the tp ranks of one dp rank pass the same tokens.
            ep: The size of an EP group, for a mesh of attention's axes. Its ranks follow each other in the order
                `pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`. Default: dp * tp / etp.
            etp: The number of ranks over which an expert is cut, for a mesh of attention's axes. Default: 1.
            device: Where the layers compute. Default: this process's device of the mesh's type.
            deadline_s: Seconds that a collective step may last before its peers are examined.
            max_tokens: The most tokens that any rank passes to a layer in one call. Default: any number.
            ranks_per_node: Take so many consecutive ranks for one node. Default: by the ranks' hosts.

        Returns:
            The context. Its `layout.ranks` are the mesh's ranks in the order of the layout.

        Raises:
            ConfigError: The mesh cannot be served, or the ranks do not agree. All its ranks raise alike.
        """
        _check_initialized()
        ranks, parallel, problem = members(mesh), ParallelConfig(), None
        try:
            parallel, ranks = read_mesh(mesh, tokens=tokens, ep=ep, etp=etp)
            if device is None:
                device = local_device() if mesh.device_type == "cuda" else torch.device(mesh.device_type)
            device = as_device(device)
        except ConfigError as error:
            device, problem = torch.device("cpu"), error
        groups = {} if problem else axis_groups(mesh)
        return cls._connect(parallel, ranks, groups, device, deadline_s, max_tokens, ranks_per_node, problem)

    @classmethod
    def _connect(
        cls,
        parallel: ParallelConfig,
        ranks: Sequence[int],
        groups: Mapping[str, ProcessGroup] | None,
        device: torch.device,
        deadline_s: float,
        max_tokens: int | None,
        ranks_per_node: int | None = None,
        problem: ConfigError | None = None,
    ) -> Self:
        """ranks: those of the context, as the layout orders them; problem: why this rank cannot make one"""
        name = numbered("context", ranks)
        store = PrefixStore(name, default_store())
        layout = agreed_layout(parallel, ranks, store, device, deadline_s, max_tokens, ranks_per_node, problem)
        deadline_s, max_tokens = float(deadline_s), None if max_tokens is None else int(max_tokens)  # of NumPy perhaps
        with on_device(device):
            return cls._linked(layout, name, store, groups, device, max_tokens, deadline_s, problem)

    @classmethod
    def _linked(
        cls,
        layout: RankLayout,
        name: str,
        store: Store,
        groups: Mapping[str, ProcessGroup] | None,
        device: torch.device,
        max_tokens: int | None,
        deadline_s: float,
        problem: ConfigError | None,
    ) -> Self:
        consensus = StoreConsensus(PrefixStore("connect", store), layout.ranks, layout.rank, deadline_s)
        try:
            check_groups(layout, groups or {})
        except ConfigError as error:
            problem = error
        # before any group is made: a rank that makes another set of them would leave the others waiting
        consensus.same("EPContext groups", {"groups given": sorted(groups or {})}, problem)
        made: list[RankGroups] = []

        def abort() -> None:
            for rank_groups in made:
                rank_groups.abort()

        peers = layout.group("lockstep")  # only these share a layer's collectives
        others = [rank for rank in layout.group("stage") if rank not in peers]  # which sum gradients with them
        frees = abort if device.type == "cuda" else None  # gloo has timeouts of its own
        flight_recorder = FlightRecorder(
            PrefixStore("flight_recorder", store),
            peers,
            layout.rank,
            others=others,
            deadline_s=deadline_s,
            abort=frees,
            device=device,
            nodes=layout.nodes,
        )
        try:
            if device.type == "cuda":
                flight_recorder.device_watch.prepare(device)
            with flight_recorder.step("connect", "process groups", counted=False, more_s=COMPILING_S):
                made.append(RankGroups(layout, flight_recorder, device, groups, name))
            consensus.healthy("EPContext", None)  # all have their groups before any uses one
            flight_recorder.attach()
        except BaseException:
            flight_recorder.close(wait=False)  # no context will
            raise
        return cls(layout, device, store, made[0], flight_recorder, max_tokens)

    @classmethod
    def local(cls, device: torch.device | str | int | None = None) -> Self:
        """Make a context of one process, without torch.distributed.

        Args:
            device: Where the layers compute. Default: this process's GPU, else the CPU.

        Returns:
            The context.
        """
        layout = RankLayout(world=1, rank=0)
        flight_recorder = FlightRecorder()
        device = local_device() if device is None else as_device(device)
        return cls(layout, device, None, RankGroups(layout, flight_recorder, device), flight_recorder)


def _check_initialized() -> None:
    if not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialized; call EPContext.from_torchrun, or init_process_group first"
        )


# --- a DeviceMesh, read by the names of its axes and made from a RankLayout -------------------------------------------

MESH_AXES = {"attention": ("pp", "dp", "tp"), "experts": ("pp", "replica", "ep", "etp")}
# Other names are torchtitan's (torchtitan/distributed/parallel_dims.py): of one line a mesh has one axis at most.
_DATA = ("dp", "dp_shard", "fsdp", "batch")
_SAME_EXPERTS = ("replica", "efsdp", "edp")
_ATTENTION, _EXPERTS = (*_DATA, "cp", "tp"), (*_SAME_EXPERTS, "ep", "etp")
_ORDER = ("pp", "dp_replicate", *_DATA, *_SAME_EXPERTS, "cp", "ep", "tp", "etp")  # of the layout, the last one fastest


def device_mesh(layout: RankLayout, view: str, device_type: str) -> DeviceMesh:
    """A DeviceMesh over all ranks. view: "attention" (pp, dp, tp) or "experts" (pp, replica, ep, etp)."""
    if view not in MESH_AXES:
        raise ConfigError(f"view must be one of {', '.join(MESH_AXES)}, got {view!r}")
    sizes = {
        "pp": layout.pp,
        "dp": layout.dp,
        "tp": layout.tp,
        "replica": layout.replicas,
        "ep": layout.ep,
        "etp": layout.etp,
    }
    axes = MESH_AXES[view]
    ranks = torch.tensor(layout.ranks, device="cpu").view([sizes[axis] for axis in axes])
    return DeviceMesh(device_type, ranks, mesh_dim_names=axes)


def members(mesh: DeviceMesh) -> tuple[int, ...]:
    """The mesh's ranks in torch.distributed, in its own order. Raises ConfigError where this rank is none of them."""
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"mesh must hold the rank that calls from_mesh, got {mesh} on rank {dist.get_rank()}; let "
            f"its own ranks call from_mesh and no others"
        )
    return tuple(mesh.mesh.flatten().tolist())


def read_mesh(
    mesh: DeviceMesh, *, tokens: Tokens, ep: int | None, etp: int | None
) -> tuple[ParallelConfig, tuple[int, ...]]:
    """Sizes, and the rank at each place of the layout. Raises ConfigError where the mesh cannot be served."""
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(_ORDER):
        raise ConfigError(
            f"mesh.mesh_dim_names must be among {', '.join(_ORDER)}, got {names or None}; name the mesh's axes so"
        )
    _check_views(names)
    sizes = {name: mesh.size(index) for index, name in enumerate(names)}
    if set(names) & {"ep", *_SAME_EXPERTS}:  # what is no such axis has one rank
        ep = _same("ep", ep, sizes.get("ep", 1), names)
        etp = _same("etp", etp, sizes.get("etp", 1), names)
    elif "etp" in names:
        etp = _same("etp", etp, sizes["etp"], names)
    pp, tp = sizes.get("pp", 1), sizes.get("tp", 1)
    parallel = ParallelConfig(
        pp=pp, dp=mesh.size() // (pp * tp), tp=tp, ep=ep, etp=1 if etp is None else etp, tokens=tokens
    )
    order = sorted(range(len(names)), key=lambda index: _ORDER.index(names[index]))
    return parallel, tuple(mesh.mesh.permute(order).flatten().tolist())


def axis_groups(mesh: DeviceMesh) -> dict[str, ProcessGroup]:
    """The mesh's groups of the axes tp, ep and etp, where they have more than one rank.

    Not those of an axis along which ranks do not ascend: torch sorts the ranks of a group, the layout does not.
    """
    groups = {}
    for index, name in enumerate(mesh.mesh_dim_names or ()):
        along = mesh.mesh.movedim(index, -1)
        if name in ("tp", "ep", "etp") and along.shape[-1] > 1 and bool((along.diff() > 0).all()):
            groups[name] = mesh.get_group(name)
    return groups


def _check_views(names: tuple[str, ...]) -> None:
    """Raise ConfigError unless all axes can be those of one mesh."""
    for alike in (_DATA, _SAME_EXPERTS):
        both = [name for name in names if name in alike]
        if len(both) > 1:
            raise ConfigError(
                f"mesh.mesh_dim_names must have one of {', '.join(alike)} at most, got {names}; flatten "
                f"{' and '.join(both)} into one axis"
            )
    experts = [name for name in names if name in _EXPERTS]
    attention = [name for name in names if name in _ATTENTION]
    if {"ep", "etp"}.issuperset(experts) and "tp" not in attention:
        return  # EP groups side by side, as many as there are ranks along the other axes
    if experts and attention:
        raise ConfigError(
            f"mesh.mesh_dim_names must be of one view, got {names}: {', '.join(attention)} of attention's and "
            f"{', '.join(experts)} of the experts'; pass the mesh of one view, and for attention's the sizes ep and etp"
        )


def _same(name: str, given: int | None, size: int, axes: tuple[str, ...]) -> int:
    if given not in (None, size):
        raise ConfigError(f"{name} must be {size} as in the mesh of axes {axes}, got {name}={given}; leave it out")
    return size
