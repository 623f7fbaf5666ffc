"""From integers to process groups: torchrun's environment, `RankLayout` to links, and DeviceMesh both ways.

The only module that reads environment variables (beside the CLI).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh

from ep_moe.errors import ConfigError
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.ledger import Ledger
from ep_moe.parallel.link import Link

LINKED = ("tp", "etp", "ep", "lockstep", "expert_data")
MESH_AXES = {"attention": ("pp", "dp", "tp"), "experts": ("pp", "replica", "ep", "etp")}


@dataclass(frozen=True)
class TorchrunEnv:
    """What torchrun tells a process. Ranks and sizes are counts of processes."""

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
    """Create the default process group from torchrun's environment, unless there is one already."""
    if not dist.is_initialized():
        TorchrunEnv.read()  # says what is missing
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=deadline_s),
            device_id=device if device.type == "cuda" else None,
        )


def default_store() -> Store:
    """The store of the default process group: the one private call into torch.distributed."""
    return dist.distributed_c10d._get_default_store()


def local_device() -> torch.device:
    """This process's GPU by LOCAL_RANK where there are GPUs, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = TorchrunEnv.read().local_rank if TorchrunEnv.present() else 0
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"LOCAL_RANK={local_rank} has no GPU of its own, there are {torch.cuda.device_count()}; start one process "
            f"a GPU (torchrun --nproc-per-node {torch.cuda.device_count()}), or pass device=torch.device('cpu')"
        )
    return torch.device("cuda", local_rank)


class Links:
    """This rank's links of every kind, and the process groups that were made for them.

    given: groups of the caller's by kind, checked with `check_groups`; they are not destroyed here.
    """

    def __init__(
        self,
        layout: RankLayout,
        ledger: Ledger,
        device: torch.device,
        given: Mapping[str, ProcessGroup] | None = None,
    ) -> None:
        self._made: list[ProcessGroup] = []
        self._links: dict[str, Link] = {}
        # gloo's own timeout is what ends a step there. NCCL's would end the whole process: the ledger, which raises
        # in the caller instead, must come first
        seconds = 2 * ledger.deadline_s + 60 if device.type == "cuda" else ledger.deadline_s
        known: list[tuple[list[list[int]], ProcessGroup | None]] = []
        for kind in sorted(LINKED, key=lambda kind: kind not in (given or {})):  # given ones first, to be shared
            every, mine = layout.groups[kind], layout.group(kind)
            group = next((group for lists, group in known if lists == every), None)
            if group is None and len(mine) > 1:
                group = (given or {}).get(kind) or self._make(every, mine, timedelta(seconds=seconds))
            known.append((every, group))
            self._links[kind] = Link(group, tuple(mine), mine.index(layout.rank), ledger)

    def _make(self, every: list[list[int]], mine: list[int], timeout: timedelta) -> ProcessGroup:
        """Every rank makes every group of a kind in the same order; torch.distributed requires it."""
        groups = {tuple(ranks): dist.new_group(ranks, timeout=timeout) for ranks in every}
        own: ProcessGroup = groups[tuple(mine)]
        self._made.append(own)
        return own

    def __getitem__(self, kind: str) -> Link:
        return self._links[kind]

    def abort(self) -> None:
        """Free whoever waits on a device for a collective of these groups."""
        for group in self._made:
            group.abort()

    def destroy(self) -> None:
        for group in self._made:
            dist.destroy_process_group(group)
        self._made = []


def check_groups(layout: RankLayout, groups: Mapping[str, ProcessGroup]) -> None:
    """Raise ConfigError unless each given group holds the ranks that the layout gives it."""
    for kind, group in groups.items():
        if kind not in LINKED:
            raise ConfigError(f"groups[{kind!r}] is no kind of group that can be given; those are {', '.join(LINKED)}")
        ranks = dist.get_process_group_ranks(group)
        if ranks != layout.group(kind):
            raise ConfigError(
                f"groups[{kind!r}] holds ranks {ranks}, but {layout} puts rank {layout.rank} into "
                f"{layout.group(kind)}; build the group from RankLayout.groups[{kind!r}]"
            )


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
    ranks = torch.arange(layout.world, device="cpu").view([sizes[axis] for axis in axes])
    return DeviceMesh(device_type, ranks, mesh_dim_names=axes)


def sizes_from_mesh(mesh: DeviceMesh) -> tuple[dict[str, int], dict[str, ProcessGroup]]:
    """Sizes and groups of a mesh whose axes bear names of ours."""
    names = mesh.mesh_dim_names or ()
    known = {"pp", "dp", "tp", "ep", "etp", "replica"}
    if not names or not set(names) <= known:
        raise ConfigError(f"mesh.mesh_dim_names must be among {', '.join(sorted(known))}, got {names}")
    orders = [tuple(axis for axis in axes if axis in names) for axes in MESH_AXES.values()]
    ranks = mesh.mesh.flatten().tolist()
    if tuple(names) not in orders or ranks != list(range(len(ranks))):
        raise ConfigError(
            f"a mesh's axes must be {' or '.join(', '.join(axes) for axes in MESH_AXES.values())}, in this order, and "
            f"its ranks 0, 1, 2, ..., the last axis running fastest, got {', '.join(names)} and ranks {ranks}"
        )
    sizes = {name: mesh.size(index) for index, name in enumerate(names)}
    groups = {name: mesh.get_group(name) for name in names if name in LINKED and sizes[name] > 1}
    return sizes, groups
