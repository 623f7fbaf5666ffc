"""Process groups: torchrun's environment, the `RankLayout` that ranks agree on, and the groups of that layout.

Only this module and the command line read environment variables.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import platform
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from ep_moe._version import __version__
from ep_moe.checks import INT32_MAX, as_number, as_whole, deadline_problem, shown
from ep_moe.config import ParallelConfig
from ep_moe.errors import ConfigError
from ep_moe.parallel.consensus import StoreConsensus
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.nodes import NodeLayout
from ep_moe.parallel.rank_group import Levels, RankGroup
from ep_moe.parallel.timeout_store import holder
from ep_moe.runtime.devices import on_device
from ep_moe.runtime.versions import installed

DEADLINE_S = 300.0
GROUP_KINDS = ("tp", "etp", "ep", "lockstep", "expert_data", "stage", "dp", "pp", "ep_node", "ep_rail")


@dataclass(frozen=True)
class TorchrunEnv:
    """The environment variables of torchrun. Ranks and sizes count processes."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def present(cls) -> bool:
        return "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()

    @classmethod
    def read(cls) -> TorchrunEnv:
        values = {}
        for name, fallback in (
            ("RANK", None),
            ("LOCAL_RANK", "RANK"),
            ("WORLD_SIZE", None),
            ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
        ):
            text = os.environ.get(name) or os.environ.get(fallback or "")
            if text is None or not text.isdigit():
                raise ConfigError(
                    f"environment variable {name} must be a number, got {text!r}; launch with torchrun, or use "
                    f"EPContext.local() for one process"
                )
            values[name.lower()] = int(text)
        return cls(**values)


def init_from_torchrun(device: torch.device, *, deadline_s: float) -> None:
    """Create the default process group from torchrun's environment, unless there is one already.

    A group that is created here ends with the process: users who did not create it do not end it, and NCCL warns of
    groups that are left at exit.
    """
    if not dist.is_initialized():
        TorchrunEnv.read()  # raises an error that names a missing variable
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=seconds_or_default(deadline_s)),
            device_id=device if device.type == "cuda" else None,
        )
        atexit.register(_end_group, dist.group.WORLD)


def _end_group(group: ProcessGroup | None) -> None:
    """End the default process group, unless the user did, or the process ends by an exception.

    After an exception peers may be within an exchange, and end by its error.
    """
    if dist.is_initialized() and dist.group.WORLD is group and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def seconds_or_default(deadline_s: object) -> float:
    """Return the deadline, or `DEADLINE_S` if it is invalid.

    All ranks learn of an invalid deadline by an exchange, which needs a deadline itself.
    """
    seconds = as_number(deadline_s)
    return DEADLINE_S if seconds is None or deadline_problem("", seconds) else seconds


def default_store() -> Store:
    """Return the store of the default process group, by a private function of torch.distributed."""
    return dist.distributed_c10d._get_default_store()


def numbered(what: str, ranks: Sequence[int]) -> str:
    """Return a name for the next object of a kind that these ranks create together, the same on all of them.

    The number is a counter of each rank in the store, not a global variable. All ranks create objects of a kind in the
    same order.
    """
    members = hashlib.sha1("-".join(map(str, sorted(ranks))).encode()).hexdigest()[:16]
    number = default_store().add(f"ep_moe/{members}/{what}s/{dist.get_rank()}", 1)
    return f"ep_moe/{members}/{what}{number}"


def host_identity() -> tuple[str, str]:
    """Return the identity of this host, and a name for it.

    The identity is host name and boot id, as in NCCL. So containers with different host names count as different hosts.
    The environment variable NCCL_HOSTID replaces both, as in NCCL."""
    if given := os.environ.get("NCCL_HOSTID"):
        return given, given
    name = socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        boot = ""
    return f"{name} {boot}", name


def agreed_layout(
    parallel: ParallelConfig,
    ranks: Sequence[int],
    store: Store,
    device: torch.device,
    deadline_s: float,
    max_tokens: int | None,
    ranks_per_node: int | None = None,
    problem: ConfigError | None = None,
) -> RankLayout:
    """Return this rank's layout, after all ranks published the same versions, sizes and limits.

    Collective. Raises ConfigError on all ranks if they differ or if one is invalid. ranks: the rank at each place
    """
    facts = {
        "ep_moe version": __version__,
        "torch version": torch.__version__,
        "Triton version": installed("triton"),
        "python version": platform.python_version(),
        "device type": device.type,
        "deadline_s": as_number(deadline_s),
        "max_tokens": as_whole(max_tokens),
        "ranks_per_node": as_whole(ranks_per_node),
        **{f"ParallelConfig.{name}": getattr(parallel, name) for name in ("pp", "dp", "tp", "ep", "etp")},
        "ParallelConfig.tokens": parallel.tokens.value,
        "ranks": list(ranks),
    }
    wrong = deadline_problem("deadline_s", deadline_s)
    if wrong is not None:
        problem = ConfigError(wrong)
    if max_tokens is not None and not 1 <= (as_whole(max_tokens) or 0) <= INT32_MAX:
        problem = ConfigError(f"max_tokens must be an integer in [1, {INT32_MAX}] or None, got {shown(max_tokens)}")
    if ranks_per_node is not None and not 1 <= (as_whole(ranks_per_node) or 0) <= INT32_MAX:
        problem = ConfigError(
            f"ranks_per_node must be an integer in [1, {INT32_MAX}] or None, got {shown(ranks_per_node)}"
        )
    patience = seconds_or_default(deadline_s)
    rank = dist.get_rank()
    consensus = StoreConsensus(PrefixStore("create", store), sorted(ranks), rank, patience)
    store.set(f"host/{rank}", json.dumps([*host_identity(), holder(store)]))
    # also a barrier, after which the hosts can be read
    consensus.require_equal("EPContext", facts, problem)
    # the facts are equal, so this raises on all ranks or on none
    layout = RankLayout.from_config(parallel, world=len(ranks), rank=rank, ranks=ranks)
    found = consensus.compute_on_owner(
        "EPContext hosts", lambda: [json.loads(store.get(f"host/{rank}")) for rank in ranks]
    )
    size, hosts = as_whole(ranks_per_node), [(identity, name) for identity, name, _ in found]
    nodes = NodeLayout.from_hosts(ranks, hosts) if size is None else NodeLayout.from_ranks_per_node(ranks, size)
    return replace(layout, nodes=nodes.with_store([kind for _, _, kind in found]))


def make_group(
    layout: RankLayout, kind: str, name: str, timeout: timedelta, backend: str | None = None, options: Any = None
) -> ProcessGroup:
    """Create this rank's process group of a kind, in the order of the layout. All ranks of the layout call it.

    name: unique among the groups of the job, and the same on the group's ranks
    """
    mine = layout.group(kind)
    if layout.ranks == tuple(range(dist.get_world_size())):
        # every rank creates every group of a kind in the same order, as new_group requires
        made = {
            tuple(ranks): dist.new_group(ranks, timeout=timeout, backend=backend, pg_options=options)
            for ranks in layout.groups[kind]
        }
        own: ProcessGroup = made[tuple(mine)]
        return own
    # The steps of new_group, run by the members only. new_group(use_local_synchronization=True) cannot be used: it
    # names a group by the number of the process's groups, which may differ between members. Older versions sort ranks.
    c10d: Any = dist.distributed_c10d
    default = c10d._get_default_group()
    bound = default.bound_device_id
    default.bound_device_id = None  # otherwise NCCL splits the default communicator, which all ranks must call
    try:
        own, _ = c10d._new_process_group_helper(
            len(mine),
            mine.index(layout.rank),
            mine,
            c10d.Backend(backend or dist.get_backend()),
            default_store(),
            f"{name}/{kind}{mine[0]}",
            backend_options=options,
            timeout=timeout,
        )
    finally:
        default.bound_device_id = bound
    c10d._world.pg_group_ranks[own] = {rank: at for at, rank in enumerate(mine)}
    return own


def backend_for(device: torch.device) -> str | None:
    """Return "gloo" for a CPU that the default group does not support, as after `init_process_group("nccl")`.

    Return None, for the default group's backends, otherwise.
    """
    served = {pair.partition(":")[0] for pair in dist.get_backend_config().split(",")}
    return "gloo" if device.type == "cpu" and "cpu" not in served else None


def local_device() -> torch.device:
    """Return this process's GPU, by LOCAL_RANK; the CPU if there are no GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = TorchrunEnv.read().local_rank if TorchrunEnv.present() else 0
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"LOCAL_RANK={local_rank} has no GPU of its own, there are {torch.cuda.device_count()}; start one process "
            f"a GPU (torchrun --nproc-per-node {torch.cuda.device_count()}), or pass device=torch.device('cpu')"
        )
    return torch.device("cuda", local_rank)


class RankGroups:
    """This rank's groups of every kind, and the process groups that it created for them.

    given: the caller's groups by kind, checked with `check_groups`. They are not destroyed here
    name: the context's name, unique in the job. Created groups are named after it
    """

    def __init__(
        self,
        layout: RankLayout,
        flight_recorder: FlightRecorder,
        device: torch.device,
        given: Mapping[str, ProcessGroup] | None = None,
        name: str = "",
    ) -> None:
        self._made: list[ProcessGroup] = []
        self._groups: list[ProcessGroup] = []  # of all kinds, without duplicates
        self._device = device
        self._links: dict[str, RankGroup] = {}
        # With gloo its timeout ends a step. NCCL's timeout would end the whole process, so it is longer: the flight
        # recorder must first raise in the caller
        seconds = 2 * flight_recorder.deadline_s + 60 if device.type == "cuda" else flight_recorder.deadline_s
        known: list[tuple[list[list[int]], ProcessGroup | None]] = []
        # given ones first: kinds share groups
        for kind in sorted(GROUP_KINDS, key=lambda kind: kind not in (given or {})):
            every, mine = layout.groups[kind], layout.group(kind)
            group = next((group for lists, group in known if lists == every), None)
            if group is None and len(mine) > 1:
                group = (given or {}).get(kind)
                if group is None:
                    group = make_group(layout, kind, name, timedelta(seconds=seconds), backend_for(device))
                    self._made.append(group)
            known.append((every, group))
            if group is not None and group not in self._groups:
                self._groups.append(group)
            self._links[kind] = RankGroup(group, tuple(mine), mine.index(layout.rank), flight_recorder)
        if layout.across_nodes is not None and layout.without_rails is None:
            self._links["ep"] = replace(self._links["ep"], levels=self._levels(layout))

    def _levels(self, layout: RankLayout) -> Levels:
        nodes = layout.ep_nodes
        node_major = {rank: place for place, rank in enumerate(rank for part in nodes for rank in part)}
        return Levels(self["ep_node"], self["ep_rail"], tuple(node_major[rank] for rank in self["ep"].ranks))

    def __getitem__(self, kind: str) -> RankGroup:
        return self._links[kind]

    @property
    def ended(self) -> bool:
        """Whether one of the groups was destroyed in torch.distributed, by itself or with all others."""
        known = dist.distributed_c10d._world.pg_map
        return not all(group in known for group in self._groups)

    def abort(self) -> None:
        """Abort the created groups, to free threads that wait on a device for one of their collectives.

        All groups are aborted at the same time, each on a thread. An abort may wait for the device, where a kernel of
        another group waits for the lost peer.
        """

        def one(group: ProcessGroup) -> None:
            with on_device(self._device):
                group.abort()

        threads = [threading.Thread(target=one, args=(group,), daemon=True) for group in self._made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def destroy(self) -> None:
        for group in self._made:
            if group in dist.distributed_c10d._world.pg_map:  # otherwise the caller destroyed it
                dist.destroy_process_group(group)
        if self._made:
            _forget_meshes()
        self._made, self._groups = [], []


def _forget_meshes() -> None:
    """Clear torch's cache of DTensor sharding results.

    The cache is keyed by the ranks of a mesh, and its entries hold the first mesh with these ranks. A later mesh of the
    same ranks would get results with a mesh whose groups are destroyed.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import debug

    clear: Callable[[], None] | None = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def check_groups(layout: RankLayout, groups: Mapping[str, ProcessGroup]) -> None:
    """Raise ConfigError unless each given group holds the ranks that the layout gives it."""
    for kind, group in groups.items():
        if kind not in GROUP_KINDS:
            raise ConfigError(
                f"groups[{kind!r}] is no kind of group that can be given; those are {', '.join(GROUP_KINDS)}"
            )
        ranks = dist.get_process_group_ranks(group)
        if ranks != layout.group(kind):
            raise ConfigError(
                f"groups[{kind!r}] holds ranks {ranks}, but {layout} puts rank {layout.rank} into "
                f"{layout.group(kind)}; build the group from RankLayout.groups[{kind!r}]"
            )
