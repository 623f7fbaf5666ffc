"""EPLB while layers serve: every forward before, during and after a migration is right."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from ep_moe import (
    EPContext,
    EPLBConfig,
    ExpertBalancer,
    ExpertMap,
    MoEConfig,
)
from ep_moe.eplb.cost import H200
from ep_moe.eplb.migration.consensus import State
from ep_moe.eplb.migration.schedule import sub_plans
from ep_moe.placement.placement import Replicas
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import distributed, rank_device
from ep_moe.types import Routing
from ep_moe.weights.initial import random_expert
from tests.fixtures.distributed_cases import batch_of, check_call, gather_from_all_ranks
from tests.fixtures.eplb_cases import (
    CONFIG,
    ROW,
    all_alike,
    assert_slots,
    context_of,
    drive,
    make_layers,
    on_request,
    random_map,
)
from tests.fixtures.helpers import assert_same, integer_expert, moved


@distributed(2, 4)
@pytest.mark.parametrize(
    ("budget", "commit"),
    [(ROW // 3, 1 << 30), (2 * ROW + 5, 1), (1 << 30, 2 * ROW + 5), (1 << 30, 1 << 30)],
    ids=["parts of rows", "two rows, one put in force", "two put in force", "all at once"],
)
def test_random_plans_one_after_the_other(budget, commit, world_size):
    with context_of() as context:
        layers = make_layers(context, 2)
        slots_per_rank = layers[0].placement.expert_map.slots_per_rank
        with ExpertBalancer(layers, context, on_request(bytes_per_step=budget, bytes_per_commit=commit)) as balancer:
            counted, held = 0, balancer.stats().staging_bytes
            for turn in range(2):
                maps = [random_map(world_size, slots_per_rank, 10 * turn + index) for index in range(2)]
                addresses = [layer.expert_weights.addresses for layer in layers]
                for layer, new in zip(layers, maps, strict=True):
                    counted += len(sub_plans(layer.placement.expert_map, new, max(1, commit // ROW)))
                balancer.move_to(maps)
                all_alike(drive(balancer, layers, context))
                assert [layer.placement.expert_map for layer in layers] == maps
                assert addresses == [layer.expert_weights.addresses for layer in layers]
                for layer in layers:
                    assert_slots(layer)
                    check_call(layer, context, what=f"after plan {turn}")
            stats = balancer.stats()
            assert (stats.commits, stats.rebalances, stats.rollbacks, stats.error) == (counted, 2, 0, "")
            assert stats.staging_bytes == held
            assert sum(gather_from_all_ranks(stats.received_bytes)) > 0


@distributed(2)
def test_what_a_rank_copies_from_itself_is_not_received(world_size):
    with context_of() as context:
        layers = make_layers(context, 1, redundant=0)
        old = layers[0].placement.expert_map
        new = ExpertMap.from_ranks([old.local(rank)[::-1] for rank in range(world_size)], 10)
        with ExpertBalancer(layers, context, on_request(bytes_per_step=1 << 30)) as balancer:
            balancer.move_to([new])
            drive(balancer, layers, context)
            assert layers[0].placement.expert_map == new
            assert_slots(layers[0])
            assert balancer.stats().received_bytes == 0


@distributed(2, 4)
def test_a_layer_is_put_in_force_in_pieces(world_size):
    """A layer with a small `bytes_per_commit` changes its map slot by slot, and every intermediate map serves."""
    with context_of() as context:
        layers = make_layers(context, 2, redundant=0)
        old = layers[0].placement.expert_map
        table = [list(old.local(rank)) for rank in range(world_size)]
        for slot in range(old.slots_per_rank):
            ranks = [rank for rank in range(world_size) if table[rank][slot] >= 0]
            turned = [table[rank][slot] for rank in ranks[1:] + ranks[:1]]
            for rank, expert in zip(ranks, turned, strict=True):
                table[rank][slot] = expert
        new = ExpertMap.from_ranks(table, 10)
        with ExpertBalancer(layers, context, on_request(bytes_per_commit=2 * ROW - 1)) as balancer:
            balancer.move_to([new, new])
            seen = [old.to_json()]
            while balancer.state is not State.IDLE:
                check_call(layers[0], context, tokens=7, what=f"map {len(seen)}")
                assert_slots(layers[0])
                balancer.step()
                now = layers[0].placement.expert_map.to_json()
                seen += [now] if now != seen[-1] else []
            all_alike(seen)
            assert len(seen) == 1 + old.slots_per_rank, "a slot of all ranks at a time"
            assert balancer.stats().commits == 2 * old.slots_per_rank
            for layer in layers:
                assert layer.placement.expert_map == new
                assert_slots(layer)
                check_call(layer, context)


@distributed(2)
def test_slots_that_are_empty_or_hold_an_expert_twice(world_size):
    """Maps with empty slots and with duplicates on one rank are reached.

    An expert in two slots of a rank travels once and is written twice. The content of empty slots is free.
    """
    with context_of() as context:
        (layer,) = make_layers(context)
        with ExpertBalancer([layer], context, on_request(bytes_per_step=ROW)) as balancer:
            for ranks in (
                [[9, 8, 9, 1, 0, -1, 2, 2], [3, -1, 4, 5, 6, 7, 3, 1]],
                [[-1, -1, 3, 1, 3, 4, 5, 0], [0, 2, 9, 8, 7, 6, -1, 6]],
                [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 0, 1, 2, 3, 4, 5]],
            ):
                placed = ExpertMap.from_ranks(ranks, 10, allow_duplicates=True)
                balancer.move_to([placed])
                drive(balancer, [layer], context)
                assert layer.placement.expert_map == placed
                assert_slots(layer)
                check_call(layer, context, tokens=9)


LAYOUTS = {
    "dp 2 tp 2 etp 2": {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
    "dp 4 etp 2": {"dp": 4, "ep": 2, "etp": 2},
    "tp 4": {"tp": 4},
    "tp 4 ep 2, two EP groups in step": {"tp": 4, "ep": 2},
    "dp 4 ep 2, two EP groups out of step": {"dp": 4, "ep": 2},
    "etp 4, nothing to move": {"dp": 4, "ep": 1, "etp": 4},
    "pp 2": {"pp": 2, "dp": 2},
}


@distributed(4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name, world_size):
    """Under every layout, all ranks of an EP group end with one map.

    Each layout counts load in its own way, and the planner here depends on the counted load.
    """
    with context_of(**LAYOUTS[name]) as context:
        ep = context.layout.ep
        layers = make_layers(context, 2, redundant=6 if ep > 1 else 0)
        seen = []

        def planner(load, current):
            seen.append(load.tolist())
            seed = int(load[0] @ range(10)) + 100 * len(seen)  # ranks that counted another load would get another plan
            return [random_map(ep, placed.slots_per_rank, seed + index) for index, placed in enumerate(current)]

        config = EPLBConfig(interval=6, window=4, sync_every=2, bytes_per_step=ROW)
        with ExpertBalancer(layers, context, config, planner=planner) as balancer:
            priced, plan = [], balancer._plan
            balancer._plan = lambda call: (priced.append(call.args[-1]), plan(call))[1]
            for step in range(40):
                for layer in layers:
                    check_call(layer, context, tokens=5, what=f"step {step}")
                balancer.step()
            balancer.settle()
            held = layers[0].expert_weights
            whole = (
                sum(tensor[0].numel() * tensor.itemsize for tensor in held.stored_tensors().values()) * held.etp.size
            )
            assert all(whole <= size < 1.2 * whole for size in priced), "an expert is priced with all of its pieces"
            stats = balancer.stats()
            assert stats.rebalances >= 2 or ep == 1
            for layer in layers:
                assert_slots(layer)
                check_call(layer, context)
            block = context.layout.group("lockstep")
            mine = (seen, [layer.placement.expert_map.to_json() for layer in layers])
            found = gather_from_all_ranks(mine)
            assert all(found[rank] == mine for rank in block), "all ranks that run together plan alike"
            # two layers, 4 steps of 5 tokens with 3 routes, of which a fifth is -1, as `check_call` passes them
            passed = len({batch_of(context.layout, rank) for rank in block})
            (first, *_) = seen
            assert 0.5 < sum(first[0]) / (4 * 5 * 3 * passed) < 1
            assert first[0] == first[1]


@distributed(2)
def test_a_window_counts_its_steps_and_nothing_else(world_size):
    """The planner's load covers exactly the routes of the window's steps.

    Earlier steps, padding (-1), calls under `no_stats` and resets of the counters by others do not count.
    """
    with context_of() as context:
        (layer,) = make_layers(context)
        rank, windows = dist.get_rank(), []

        def planner(load, current):
            windows.append(load[0].tolist())
            return current

        def forward(expert):
            ids = torch.tensor([[expert, -1, -1], [expert, 9, -1], [-1, -1, -1]], device=context.device)
            x = torch.zeros(3, 16, device=context.device)
            layer.forward_routed(x, Routing(ids, torch.ones(3, 3, device=context.device)))

        config = EPLBConfig(interval=8, window=3, sync_every=1)
        with ExpertBalancer([layer], context, config, planner=planner) as balancer:
            for number in range(1, 18):
                forward(rank if number > 5 else 5)
                with balancer.no_stats():
                    forward(7)
                if number == 6:
                    layer.placement.reset_load()
                balancer.step()
                if number in (12, 17):
                    balancer.settle()
            # of steps 7 and 8 only, as the counters were reset in step 6; then of steps 14 to 16
            assert windows == [[4, 4, 0, 0, 0, 0, 0, 0, 0, 4], [6, 6, 0, 0, 0, 0, 0, 0, 0, 6]]
            (stats,) = balancer.stats().layers
            assert stats.expert_load == (6, 6, 0, 0, 0, 0, 0, 0, 0, 6)
            assert sum(stats.rank_load) == 18
            layer.placement.reset_load()
            forward(1)
            stats = layer.stats()
            assert stats.expert_load == (0, 4, 0, 0, 0, 0, 0, 0, 0, 2)
            assert sum(stats.rank_load) == 6
            assert stats.balancedness == 3 / max(stats.rank_load)


@distributed(2, 4)
def test_by_itself_with_the_planner_and_a_price(world_size):
    """With one hot expert, the default planner adds replicas and evens the load; on a very slow machine it declines."""
    with context_of() as context:
        (layer,) = make_layers(context, redundant=2 * world_size - 10 % world_size)

        def forward():
            for _ in range(2):
                ids = torch.tensor([[0, 1, 2], [0, 3, 4], [0, 5, 6]], device=context.device)
                layer.forward_routed(
                    torch.zeros(3, 16, device=context.device),
                    Routing(ids, torch.ones(3, 3, device=context.device)),
                )

        slow = dataclasses.replace(H200, link_bytes_per_s=1e-3, node_link_bytes_per_s=1e-3)
        for machine in (slow, H200, None):
            before = layer.placement.expert_map
            config = EPLBConfig(interval=5, window=5, sync_every=1, machine=machine)
            with ExpertBalancer([layer], context, config) as balancer:
                for _ in range(3):  # run each window to its end, so that the last window is counted under the last map
                    for _ in range(5):
                        forward()
                        balancer.step()
                    balancer.settle()
                stats = balancer.stats()
            if machine is None:
                assert stats.price == ""
            elif machine is slow:
                assert stats.price.startswith("refused"), stats.price
                assert layer.placement.expert_map == before
                assert stats.commits == 0
            check_call(layer, context)
            assert_slots(layer)
        even = stats.layers[0].rank_load
        assert max(even) / (sum(even) / len(even)) < 1.35, even
        assert layer.placement.expert_map.replica_count[0] > 1


@distributed(2)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme, world_size):
    move_in_scheme(scheme, world_size)


@distributed(4)
@pytest.mark.parametrize("scheme", ["none", "nvfp4"])  # one kind of tensor, and all kinds
def test_schemes_on_more_ranks(scheme, world_size):
    move_in_scheme(scheme, world_size)


def move_in_scheme(scheme, world_size):
    """Check that slots equal the checkpoint byte for byte, and outputs equal those of one process.

    Calls have one row with one expert, so that summation order cannot differ.
    """
    config = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=10, top_k=1)
    device = rank_device()
    tensors = [random_expert(config, SCHEMES[scheme], expert, torch.bfloat16, device) for expert in range(10)]

    def make(_config, expert, _seed):
        return tensors[expert]

    options = {"config": config, "quantization": scheme, "dtype": torch.bfloat16, "experts": "reference"}
    alone = make_layers(EPContext.local(device), redundant=0, make=make, **options)[0]
    with context_of() as context:
        (layer,) = make_layers(context, redundant=2 * world_size - 10 % world_size, make=make, **options)
        slots_per_rank = layer.placement.expert_map.slots_per_rank
        with ExpertBalancer([layer], context, on_request(bytes_per_step=60_000)) as balancer:
            for turn in range(2):
                balancer.move_to([random_map(world_size, slots_per_rank, turn + 3)])
                while balancer.state is State.PLANNING:
                    balancer.step()
                same_rows(layer, alone, f"{scheme} meanwhile")
                balancer.settle()
                assert_slots(layer, make)
                same_rows(layer, alone, f"{scheme} after plan {turn}")


def same_rows(layer, alone, what):
    rank = dist.get_rank()
    for first in range(0, 10, dist.get_world_size()):
        expert = (first + rank) % 10
        x = torch.randn(1, 128, generator=torch.Generator().manual_seed(expert)).bfloat16().to(layer.device)
        routing = moved(Routing(torch.tensor([[expert]]), torch.ones(1, 1)), layer.device)
        with torch.no_grad():
            assert_same(layer.forward_routed(x, routing), alone.forward_routed(x, routing), what)


@distributed(2, deadline_s=120)
@pytest.mark.parametrize("row_bytes_per_step", [ROW, ROW // 3])
def test_weights_written_on_the_way_are_not_lost(row_bytes_per_step, world_size):
    """An `update_expert` at any time of a migration reaches all replicas, also in the middle of a row's transfer."""
    with context_of() as context:
        (layer,) = make_layers(context)
        restarts = 0
        for turn in range(12):
            with ExpertBalancer(
                [layer], context, on_request(bytes_per_step=row_bytes_per_step, sync_every=2)
            ) as balancer:
                balancer.move_to([random_map(2, 8, turn)])
                number = 0
                while balancer.state is not State.IDLE:
                    if number == turn:
                        for expert in range(10):
                            layer.update_expert(expert, **integer_expert(CONFIG, expert, turn))
                    seed = turn if number >= turn else turn - 1
                    if turn or number:
                        check_call(layer, context, tokens=3, seed=max(seed, 0), what=f"turn {turn}, step {number}")
                    balancer.step()
                    number += 1
                if number <= turn:
                    for expert in range(10):
                        layer.update_expert(expert, **integer_expert(CONFIG, expert, turn))
                assert_slots(layer, seed=turn)
                restarts += balancer.stats().restarts
        assert restarts > 2


@distributed(2)
def test_a_state_dict_does_not_depend_on_the_moves(world_size):
    with context_of() as context:
        (layer,) = make_layers(context)
        before = gather_from_all_ranks(
            {name: tensor.cpu() for name, tensor in layer.expert_weights.state_dict().items()}
        )
        with ExpertBalancer([layer], context, on_request()) as balancer:
            balancer.move_to([random_map(2, 8, 5)])
            balancer.settle()
        after = gather_from_all_ranks(
            {name: tensor.cpu() for name, tensor in layer.expert_weights.state_dict().items()}
        )
        before, after = ({k: v for part in parts for k, v in part.items()} for parts in (before, after))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


@distributed(2)
def test_a_model_and_a_second_balancer(world_size):
    """A balancer finds the layers of a model, and a closed balancer leaves nothing that disturbs the next one."""
    with context_of() as context:
        layers = make_layers(context, 2)
        model = torch.nn.Sequential(torch.nn.Identity(), *layers)
        for turn in range(3):
            with ExpertBalancer(model, context, on_request()) as balancer:
                assert balancer.layers == layers
                balancer.move_to([random_map(2, 8, turn), random_map(2, 8, turn + 9)])
                drive(balancer, layers, context)
        for layer in layers:
            assert_slots(layer)


@distributed(4)
@pytest.mark.parametrize("found", [False, True], ids=["stated", "found"])
def test_nearest_replicas_first(found, world_size):
    """`Replicas.NEAREST` takes a replica of the own rank, then of the own node, then any; outputs stay the same."""
    with EPContext.from_groups(device=rank_device(), deadline_s=20, ranks_per_node=2 if found else None) as context:
        (layer,) = make_layers(context)
        maps = [ExpertMap.from_ranks([[0, 1, 2, 9], [0, 3, 4, 8], [0, 5, 6, 1], [7, 2, 9, 8]], 10)]
        config = on_request(nodes=None if found else 2, replicas=Replicas.NEAREST)
        with ExpertBalancer([layer], context, config) as balancer:
            assert balancer.config.nodes == 2
            balancer.move_to(maps)
            drive(balancer, [layer], context)
            layer.placement.reset_load()
            for _ in range(3):
                check_call(layer, context, tokens=20)
            held = layer.placement.slot_load.view(4, 4).cpu().tolist()
            rank = dist.get_rank()
            assert held[2][0] == 0 or rank > 1, "expert 0 of the other node"
            if rank == 0:
                assert held[0][0] > 0 == held[1][0] == held[2][0]
                assert held[0][3] > 0 == held[3][2]
            if rank == 3:  # expert 0 is on rank 2 of the same node
                assert held[2][0] > 0 == held[0][0] == held[1][0]
                assert held[0][3] == 0


@distributed(2)
def test_slots_that_a_user_emptied_are_used_again(world_size):
    with context_of() as context:
        (layer,) = make_layers(context)
        lean = ExpertMap.from_ranks([[*range(5), -1, -1, -1], [*range(5, 10), -1, -1, -1]], 10)
        config = EPLBConfig(interval=4, window=4, sync_every=1, tolerance=0.0)
        with ExpertBalancer([layer], context, config) as balancer:
            balancer.move_to([lean])
            balancer.settle()
            assert layer.placement.expert_map.num_redundant == 0
            ids = torch.tensor([[0, 1, 2]] * 8, device=context.device)
            routing = Routing(ids, torch.ones(8, 3, device=context.device))
            for _ in range(40):
                layer.forward_routed(torch.zeros(8, 16, device=context.device), routing)
                balancer.step()
        assert layer.placement.expert_map.num_redundant >= 3
        assert_slots(layer)
