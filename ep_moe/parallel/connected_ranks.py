"""ConnectedRanks: the base class of EPContext, created from torchrun, process groups, a DeviceMesh or one process."""

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
    """The rank layout, process groups, flight recorder and consensus of one context: the base class of `EPContext`.

    Args:
        layout: This rank's coordinates and groups.
        device: The device on which the layers compute.
        store: The store that the ranks share; None for a single process.
        rank_groups: Process groups by kind.
        flight_recorder: Tracks the steps of this rank and its peers.
        max_tokens: The most tokens that any rank passes to a layer in one call. Default: no limit.
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
        self._token_flow = TokenFlow(
            layout, tp=rank_groups["tp"], etp=rank_groups["etp"], lockstep=rank_groups["lockstep"]
        )
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
        """Create a context from torchrun's environment. Create the default process group unless there is one.

        Collective over all ranks of the job.

        Args:
            parallel: Sizes of dp, tp, ep, etp and pp. Default: expert parallelism over all ranks (dp = world).
            device: The device on which the layers compute. Default: this rank's GPU, else the CPU.
            deadline_s: Seconds that a collective step may last before the flight recorder examines its peers.
            max_tokens: The most tokens (rows of x) that any rank passes to a layer in one call. Transports with fixed
                buffers allocate them once for this number, and need it. Default: no limit. Of these transports only
                `nvlink_p2p` then works: its buffers grow with the calls, and `MoELayer.capture` refuses such a layer.
            ranks_per_node: The number of consecutive ranks that count as one node. Default: the ranks of one host are a
                node. Ranks share a host if they have the same host name and boot id, or the same value of the
                environment variable NCCL_HOSTID.

        Returns:
            The context, on every rank.

        Raises:
            ConfigError: on all ranks, if the sizes do not fit the world, or ranks pass different arguments.
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
        """Create a context in an initialized torch.distributed.

        Collective over all ranks of the job.

        Args:
            parallel: Sizes of dp, tp, ep, etp and pp. Default: expert parallelism over all ranks (dp = world).
            groups: Existing process groups by kind, such as "ep", "tp" and "etp". Each must have the ranks of
                `RankLayout.group` for its kind. Missing groups are created.
            device: The device on which the layers compute.
            deadline_s: As in `from_torchrun`.
            max_tokens: As in `from_torchrun`.
            ranks_per_node: As in `from_torchrun`.

        Returns:
            The context, on every rank.

        Raises:
            ConfigError: on all ranks, if the sizes or groups do not fit the layout, or ranks pass different arguments.
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
        except ConfigError as error:  # `agreed_layout` raises it on all ranks
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
        """Create a context over the ranks of a DeviceMesh. The names of its axes say what they are.

        The axes may have any order:

        - A mesh for attention has the axes `pp`, `dp_replicate`, one of `dp`, `dp_shard`, `fsdp` and `batch`, `cp`, and
          `tp`.
        - A mesh for experts has the axes `pp`, `dp_replicate`, one of `replica`, `efsdp` and `edp` (ranks that hold the
          same experts), `ep` and `etp`.

        Ranks along all axes except `pp`, `tp`, `ep` and `etp` have different tokens: together these axes are the
        layer's dp. With an `ep` or `etp` axis each rank has its own tokens (tp = 1).

        Collective over the ranks of the mesh; no other rank calls it. The mesh may be a submesh, and contexts of
        several submeshes may exist at once. The context uses the mesh's groups of `tp`, `ep` and `etp`, and creates
        missing ones.

        Args:
            mesh: A mesh with axis names, for example `init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))`.
            tokens: Whether the tp ranks of one dp rank pass the same tokens.
            ep: The size of an EP group, for a mesh for attention. Its ranks are consecutive in the order
                `pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`. Default: dp * tp / etp.
            etp: The number of ranks that share one expert's intermediate size, for a mesh for attention. Default: 1.
            device: The device on which the layers compute. Default: this process's device of the mesh's type.
            deadline_s: As in `from_torchrun`.
            max_tokens: As in `from_torchrun`.
            ranks_per_node: As in `from_torchrun`.

        Returns:
            The context. Its `layout.ranks` are the mesh's ranks in the order of the layout.

        Raises:
            ConfigError: on all ranks of the mesh, if its axes do not form a layout, or ranks pass different arguments.
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
        """Agree on the layout with the other ranks, and create the context.

        ranks: the context's ranks in the order of the layout; problem: why this rank cannot create one, or None
        """
        name = numbered("context", ranks)
        store = PrefixStore(name, default_store())
        layout = agreed_layout(parallel, ranks, store, device, deadline_s, max_tokens, ranks_per_node, problem)
        deadline_s, max_tokens = float(deadline_s), None if max_tokens is None else int(max_tokens)  # may be NumPy's
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
        # before any group is created: a rank that creates another set of groups would leave the others waiting
        consensus.require_equal("EPContext groups", {"groups given": sorted(groups or {})}, problem)
        made: list[RankGroups] = []

        def abort() -> None:
            for rank_groups in made:
                rank_groups.abort()

        peers = layout.group("lockstep")  # only these share a layer's collectives
        others = [rank for rank in layout.group("stage") if rank not in peers]  # these share only sums of gradients
        frees = abort if device.type == "cuda" else None  # gloo has its own timeouts
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
            consensus.raise_on_all_ranks(
                "EPContext", None
            )  # a barrier: all ranks have their groups before one uses them
            flight_recorder.attach()
        except BaseException:
            flight_recorder.close(wait=False)  # there is no context that would close it
            raise
        return cls(layout, device, store, made[0], flight_recorder, max_tokens)

    @classmethod
    def local(cls, device: torch.device | str | int | None = None) -> Self:
        """Create a context of one process, without torch.distributed.

        Args:
            device: The device on which the layers compute. Default: this process's GPU, else the CPU.

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


# --- DeviceMesh: to a RankLayout, by the names of the axes, and from one ----------------------------------------------

MESH_AXES = {"attention": ("pp", "dp", "tp"), "experts": ("pp", "replica", "ep", "etp")}
# Other names are torchtitan's (torchtitan/distributed/parallel_dims.py). A mesh has at most one axis of each tuple.
_DATA = ("dp", "dp_shard", "fsdp", "batch")
_SAME_EXPERTS = ("replica", "efsdp", "edp")
_ATTENTION, _EXPERTS = (*_DATA, "cp", "tp"), (*_SAME_EXPERTS, "ep", "etp")
_ORDER = ("pp", "dp_replicate", *_DATA, *_SAME_EXPERTS, "cp", "ep", "tp", "etp")  # in the layout; fastest axis last


def device_mesh(layout: RankLayout, view: str, device_type: str) -> DeviceMesh:
    """Return a DeviceMesh over all ranks. view: "attention" (pp, dp, tp) or "experts" (pp, replica, ep, etp)."""
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
    ranks = torch.tensor(layout.ranks, dtype=torch.int64, device="cpu").view([sizes[axis] for axis in axes])
    return DeviceMesh(device_type, ranks, mesh_dim_names=axes)


def members(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the mesh's ranks in torch.distributed, in its order. Raise ConfigError if this rank is not in the mesh."""
    if not hasattr(mesh, "get_coordinate"):
        raise ConfigError(f"mesh must be a DeviceMesh, got {shown(mesh)}; make one with init_device_mesh")
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"mesh must hold the rank that calls from_mesh, got {mesh} on rank {dist.get_rank()}; let "
            f"its own ranks call from_mesh and no others"
        )
    return tuple(mesh.mesh.flatten().tolist())


def read_mesh(
    mesh: DeviceMesh, *, tokens: Tokens, ep: int | None, etp: int | None
) -> tuple[ParallelConfig, tuple[int, ...]]:
    """Return the sizes, and the rank at each place of the layout. Raise ConfigError if the axes form no layout."""
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(_ORDER):
        raise ConfigError(
            f"mesh.mesh_dim_names must be among {', '.join(_ORDER)}, got {names or None}; name the mesh's axes so"
        )
    _check_views(names)
    sizes = {name: mesh.size(index) for index, name in enumerate(names)}
    if set(names) & {"ep", *_SAME_EXPERTS}:  # a missing axis has size 1
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
    """Return the mesh's groups of the axes tp, ep and etp that have more than one rank.

    An axis along which ranks do not ascend is left out: torch sorts the ranks of a group, and the layout does not.
    """
    groups = {}
    for index, name in enumerate(mesh.mesh_dim_names or ()):
        along = mesh.mesh.movedim(index, -1)
        if name in ("tp", "ep", "etp") and along.shape[-1] > 1 and bool((along.diff() > 0).all()):
            groups[name] = mesh.get_group(name)
    return groups


def _check_views(names: tuple[str, ...]) -> None:
    """Raise ConfigError unless all axes can belong to one mesh."""
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
        return  # several EP groups: as many as there are ranks along the other axes
    if experts and attention:
        raise ConfigError(
            f"mesh.mesh_dim_names must be of one view, got {names}: {', '.join(attention)} of attention's and "
            f"{', '.join(experts)} of the experts'; pass the mesh of one view, and for attention's the sizes ep and etp"
        )


def _same(name: str, given: int | None, size: int, axes: tuple[str, ...]) -> int:
    if given not in (None, size):
        raise ConfigError(f"{name} must be {size} as in the mesh of axes {axes}, got {name}={given}; leave it out")
    return size
