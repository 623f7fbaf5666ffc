"""A DeviceMesh read by the names of its axes, and made from a RankLayout."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ep_moe.config import ParallelConfig, Tokens
from ep_moe.errors import ConfigError
from ep_moe.parallel.layout import RankLayout

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
