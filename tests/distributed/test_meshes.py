"""Contexts over DeviceMeshes: axes of any name and order, submeshes side by side, ranks in any order, refusals."""

import math

import pytest
import torch
import torch.distributed as dist

from ep_moe import (
    Activation,
    ConfigError,
    EPContext,
    ExpertBalancer,
    InputError,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    Tokens,
)
from ep_moe.parallel.connected_ranks import device_mesh
from ep_moe.testing import distributed, rank_device
from tests.fixtures.eplb_cases import assert_slots, make_layers, on_request, random_map
from tests.fixtures.helpers import assert_same, fill, integer_routing, integer_rows, moved, oracle, oracle_layer

CONFIG = MoEConfig(
    hidden_size=16, intermediate_size=16, num_experts=6, top_k=2, activation=Activation.RELU2, expert_bias=True
)


def mesh_of(names, *shape, ranks=None) -> dist.DeviceMesh:
    ranks = torch.arange(math.prod(shape)) if ranks is None else torch.tensor(ranks)
    return dist.DeviceMesh(rank_device().type, ranks.view(shape), mesh_dim_names=tuple(names.split()))


def made(mesh, **options) -> EPContext:
    return EPContext.from_mesh(mesh, device=rank_device(), deadline_s=20, **options)


def along(mesh, axis: str) -> tuple[int, ...]:
    """Return the ranks that differ from this one only in that axis, from the mesh's own tensor."""
    rows = mesh.mesh.movedim(mesh.mesh_dim_names.index(axis), -1).reshape(
        -1, mesh.size(mesh.mesh_dim_names.index(axis))
    )
    return next(tuple(row) for row in rows.tolist() if dist.get_rank() in row)


def check(layer: MoELayer, mesh, *, replicated: bool = True) -> None:
    """Check one call and its backward against the oracle. tp ranks share a batch, all others have their own."""
    shared = replicated and "tp" in mesh.mesh_dim_names
    batch = along(mesh, "tp")[0] if shared else dist.get_rank()
    tokens, config = (5, 0, 3, 6)[batch % 4], layer.config
    x, routing = integer_rows(tokens, config.hidden_size, batch), integer_routing(tokens, config, batch)
    device = layer.context.device
    given = x.to(device, copy=True).requires_grad_()
    y = layer.forward_routed(given, moved(routing, device))
    assert_same(y, oracle(config, x, routing), f"{mesh}, {layer.context.layout}")
    y.sum().backward()
    alone = x.clone().requires_grad_()
    oracle_layer(config).forward_routed(alone, routing).sum().backward()
    assert_same(given.grad, alone.grad, f"gradient over {mesh}, {layer.context.layout}")


def check_mesh(mesh, sizes: str, **options) -> None:
    """Check the context of a mesh. `sizes` holds pp, dp, tp, ep and etp of the layout as digits."""
    replicated = options.get("tokens") is not Tokens.SHARDED
    with made(mesh, **options) as context:
        layout = context.layout
        assert [layout.pp, layout.dp, layout.tp, layout.ep, layout.etp] == [int(digit) for digit in sizes], mesh
        assert sorted(layout.ranks) == sorted(mesh.mesh.flatten().tolist())
        for kind in {"tp", "ep", "etp"} & set(mesh.mesh_dim_names):
            rank_group, ranks = context.rank_groups[kind], along(mesh, kind)
            assert rank_group.ranks == ranks, kind
            if rank_group.size > 1 and mesh.mesh.tolist() == mesh.mesh.sort().values.tolist():
                assert rank_group.group is mesh.get_group(kind), kind
        if "pp" in mesh.mesh_dim_names:  # no layer spans two stages
            assert {*along(mesh, "pp")} & {*context.rank_groups["lockstep"].ranks} == {dist.get_rank()}
        for kind in ("tp", "ep", "etp", "lockstep"):
            rank_group = context.rank_groups[kind]
            assert rank_group.size == 1 or tuple(dist.get_process_group_ranks(rank_group.group)) == rank_group.ranks
            assert rank_group.ranks[rank_group.rank] == dist.get_rank()
        check(fill(MoELayer(CONFIG, context)), mesh, replicated=replicated)


# names; shape; pp dp tp ep etp; other arguments
MESHES = [
    ("dp tp", (2, 2), "12241", {}),
    ("dp tp", (2, 2), "12222", {"etp": 2, "tokens": Tokens.SHARDED}),
    ("dp tp", (2, 2), "12222", {"etp": 2}),
    ("tp dp", (2, 2), "12241", {}),
    ("tp dp", (2, 2), "12222", {"etp": 2}),
    ("tp dp", (2, 2), "12212", {"ep": 1, "etp": 2}),
    ("tp dp", (2, 2), "12221", {"ep": 2}),
    ("tp pp", (2, 2), "21221", {}),
    ("dp pp", (2, 2), "22121", {}),
    ("tp", (4,), "11441", {}),
    ("cp dp_shard", (2, 2), "14121", {"ep": 2}),
    ("ep", (4,), "14141", {}),
    ("ep etp", (2, 2), "14122", {}),
    ("etp ep", (2, 2), "14122", {}),
    ("replica ep", (2, 2), "14121", {}),
    ("ep efsdp", (2, 2), "14121", {"ep": 2, "etp": 1}),
    ("edp etp", (2, 2), "14112", {}),
    ("ep dp_shard", (2, 2), "14121", {}),
    ("etp dp", (2, 2), "14122", {}),
]


@distributed(4)
@pytest.mark.parametrize("part", range(4))
def test_axes_by_name_in_any_order(part, world_size):
    for names, shape, sizes, options in MESHES[part::4]:
        check_mesh(mesh_of(names, *shape), sizes, **options)


@distributed(8)
@pytest.mark.parametrize(
    ("names", "sizes", "options"),
    [
        ("pp dp tp", "22241", {}),
        ("dp pp tp", "22241", {}),
        ("tp dp_shard dp_replicate", "14242", {"etp": 2}),
        ("dp_replicate fsdp tp", "14241", {"ep": 4}),
        ("cp tp dp_shard", "14222", {"ep": 2, "etp": 2}),
        ("dp_replicate efsdp ep", "18121", {}),
        ("pp dp_shard ep", "24121", {}),
        ("etp ep dp_replicate", "18122", {}),
    ],
)
def test_three_axes(names, sizes, options, world_size):
    check_mesh(mesh_of(names, 2, 2, 2), sizes, **options)


@distributed(8)
def test_submeshes_side_by_side(world_size):
    rank = dist.get_rank()
    whole = mesh_of("tp pp dp", 2, 2, 2)
    check_mesh(whole["pp", "dp"], "22121")  # two contexts of four ranks each
    check_mesh(whole["tp"], "11221", ep=2)
    check_mesh(mesh_of("pp dp_shard tp", 2, 2, 2)["dp_shard", "tp"], "12241")
    check_mesh(mesh_of("ep dp_replicate", 4, 2)["ep"], "14141")
    halves = [mesh_of("tp dp", 2, 2, ranks=[4 * half + at for at in range(4)]) for half in (0, 1)]
    middle = mesh_of("dp", 4, ranks=[2, 3, 4, 5])
    if rank < 4:  # one half makes one context more: ranks then differ in the groups they have made
        check_mesh(halves[0], "12241")
    with made(halves[rank // 4]) as context:
        layer = fill(MoELayer(CONFIG, context))
        if 2 <= rank < 6:
            check_mesh(middle, "14141")
            check_mesh(middle, "14122", etp=2)
        with EPContext.from_groups(ParallelConfig(dp=8), device=rank_device(), deadline_s=20) as other:
            check(fill(MoELayer(CONFIG, other)), whole, replicated=False)
        check(layer, halves[rank // 4])
        with pytest.raises(ConfigError) if not 2 <= rank < 6 else made(middle) as refused:
            if not 2 <= rank < 6:
                made(middle)
        if not 2 <= rank < 6:
            assert f"must hold the rank that calls from_mesh, got {middle} on rank {rank}; let" in str(refused.value)


@distributed(4)
def test_ranks_in_any_order(world_size):
    """Meshes work with ranks in any order.

    torch sorts the ranks of a new group, so a context makes groups of its own where another order is needed.
    """
    for ranks in ([3, 1, 0, 2], [1, 0, 3, 2], [0, 1, 3, 2]):
        check_mesh(mesh_of("dp", 4, ranks=ranks), "14141")
        check_mesh(mesh_of("tp dp", 2, 2, ranks=ranks), "12222", etp=2)
        check_mesh(mesh_of("etp ep", 2, 2, ranks=ranks), "14122")


@distributed(4)
def test_errors_name_ranks_of_the_job(world_size):
    rank = dist.get_rank()
    mesh = mesh_of("tp dp", 2, 2)
    with made(mesh) as context:
        layer = fill(MoELayer(CONFIG, context))
        assert str(context.layout).startswith(f"rank {rank} of ranks 0, 2, 1, 3 (pp=1 dp=2 tp=2 ep=4")
        for bad in range(4):
            with pytest.raises(InputError, match=rf"^rank {bad}: x must be \[..., 16\] \(hidden_size\), got \[3, 15\]"):
                layer(torch.zeros(3, 15 if rank == bad else 16, device=context.device))
        with pytest.raises(InputError, match="got x with 3 on rank 0, 4 on rank 2 rows"):
            layer(torch.zeros(3 + (rank == 2), 16, device=context.device))
        check(layer, mesh)


@distributed(8)
def test_experts_move_in_submeshes(world_size):
    half = dist.get_rank() // 4
    meshes = [mesh_of("ep", 4, ranks=ranks) for ranks in ([2, 0, 3, 1], [4, 5, 6, 7])]
    with made(meshes[half]) as context:
        (layer,) = make_layers(context, redundant=2)
        with ExpertBalancer([layer], context, on_request()) as balancer:
            for turn in range(2 + half):
                balancer.move_to([random_map(4, 3, turn)])
                balancer.settle()
                assert_slots(layer)
                check(layer, meshes[half])


@distributed(4)
def test_what_cannot_be_served_is_refused_alike(world_size):
    for names, shape, options, text in [
        ("x tp", (2, 2), {}, r"mesh.mesh_dim_names must be among pp, .*, got \('x', 'tp'\); name the mesh's axes so"),
        (None, (4,), {}, "mesh.mesh_dim_names must be among .*, got None; name"),
        ("dp dp_shard", (2, 2), {}, r"must have one of dp, .* at most, got .*; flatten dp and dp_shard into one axis"),
        ("replica efsdp", (2, 2), {}, "must have one of replica, efsdp, edp at most, .*; flatten replica and efsdp"),
        ("tp ep", (2, 2), {}, "must be of one view, got .*: tp of attention's and ep of the experts'; pass the mesh"),
        ("dp_shard efsdp", (2, 2), {}, "must be of one view, .*: dp_shard of attention's and efsdp of the experts'"),
        ("dp tp", (2, 2), {"ep": 3}, "ep \\* etp must divide dp \\* tp, got ep=3 .*; change ep or etp"),
        ("dp tp", (2, 2), {"ep": 0}, "ParallelConfig.ep must be an integer of at least 1, got 0"),
        ("dp ep", (2, 2), {"ep": 4}, r"ep must be 2 as in the mesh of axes \('dp', 'ep'\), got ep=4; leave it out"),
        ("dp ep", (2, 2), {"etp": 2}, r"etp must be 1 as in the mesh of axes \('dp', 'ep'\), got etp=2; leave"),
        ("dp etp", (2, 2), {"etp": 4}, "etp must be 2 as in the mesh .*, got etp=4; leave it out"),
        ("efsdp", (4,), {"ep": 2}, "ep must be 1 as in the mesh .*, got ep=2; leave it out"),
    ]:
        grid = torch.arange(4).view(shape)
        axes = None if names is None else tuple(names.split())
        mesh = dist.DeviceMesh(rank_device().type, grid, mesh_dim_names=axes)
        with pytest.raises(ConfigError, match=text):
            made(mesh, **options)
    alike = mesh_of("dp tp", 2, 2)
    odd = mesh_of("dp dp_shard", 2, 2)
    with pytest.raises(ConfigError, match=r"EPContext: rank 3: mesh\.mesh_dim_names must have one of"):
        made(odd if dist.get_rank() == 3 else alike)
    with pytest.raises(ConfigError, match=r"given different values; .* ParallelConfig.etp: 1 on ranks 0"):
        made(alike, etp=2 if dist.get_rank() == 3 else 1)


@distributed(4)
def test_meshes_of_a_layout(world_size):
    device, rank = rank_device(), dist.get_rank()
    parallel = ParallelConfig(dp=2, tp=2, ep=2, etp=2)
    with (
        EPContext.from_groups(parallel, device=device, deadline_s=20) as plain,
        made(mesh_of("tp dp", 2, 2), etp=2) as turned,
    ):
        for context in (plain, turned):
            for view, axis in (("attention", "tp"), ("experts", "ep"), ("experts", "etp")):
                mesh = device_mesh(context.layout, view, device.type)
                assert along(mesh, axis) == context.rank_groups[axis].ranks
        assert list(device_mesh(plain.layout, "attention", device.type).get_coordinate()) == [0, rank // 2, rank % 2]
        assert list(device_mesh(turned.layout, "attention", device.type).get_coordinate()) == [0, rank % 2, rank // 2]
        with pytest.raises(ConfigError, match="view must be one of attention, experts, got 'rows'"):
            device_mesh(plain.layout, "rows", device.type)
