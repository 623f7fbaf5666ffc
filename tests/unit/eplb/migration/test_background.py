"""Test what the planning thread does after the plan: digest, transfer schedules, price, and pauses between them."""

import dataclasses
import threading
import time
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_moe import ConfigError, EPLBConfig, ExpertMap, MoEConfig
from ep_moe.eplb import H200, LayerTime, traffic, verdict
from ep_moe.eplb.migration import background as decide
from ep_moe.eplb.migration.background import Background, Decision, add_transfer_schedules, default_planner
from ep_moe.eplb.migration.schedule import sub_plans, transfer_schedule
from ep_moe.eplb.planner.plan import plan
from tests.fixtures.sub_plans import pairs

unhurried = settings(deadline=None)
BASE = ExpertMap(3, 2, (0, 1, 2, -1))


@pytest.mark.parametrize(
    "maps",
    [
        (BASE,),
        (BASE, BASE, BASE),
        (BASE, ExpertMap(3, 2, (0, 1, -1, 2))),
        (ExpertMap(3, 2, (0, 1, -1, 2)), BASE),
        (BASE, ExpertMap(3, 2, (0, 1, 2, -1), allow_duplicates=True)),
        (BASE, ExpertMap(3, 1, (0, 1, 2, -1))),
        (BASE, ExpertMap(3, 2, (0, 1, 2, -1, -1, -1))),
    ],
)
def test_a_digest_is_of_all_maps(maps):
    digest = Decision((BASE, BASE)).digest
    assert digest == Decision((BASE, ExpertMap(3, 2, (0, 1, 2, -1)))).digest
    assert -(2**63) <= digest < 2**63
    assert Decision(maps).digest != digest


@unhurried
@given(pairs(), st.integers(1, 4), st.integers(1, 3))
def test_add_transfer_schedules_pauses_and_that_changes_nothing(maps, most, layers):
    old, new = maps
    way = [old, *sub_plans(old, new, most)]
    expected = tuple(transfer_schedule(a, b, 0, row_bytes=8, budget=16) for a, b in pairwise(way))
    placement, slept = mock.Mock(), []
    with mock.patch.object(decide, "_STRETCH_S", 0.0), mock.patch.object(decide.time, "sleep", slept.append):
        found = add_transfer_schedules(
            lambda: Decision((new,) * layers),
            [(placement, old, 8)] * layers,
            rank=0,
            budget=16,
            commit=8 * most,
            ranks_per_node=old.num_ranks,
        )
    assert found.schedules == (expected,) * layers
    assert placement.check.mock_calls == [mock.call(new)] * layers
    assert len(slept) >= layers * (2 + 2 * len(expected))


def test_who_starts_a_thread_does_not_wait_for_it():
    """The planning thread sleeps first, so `Thread.start` returns at once.

    Otherwise Python would run the new thread for milliseconds before `Thread.start` returns.
    """
    order = []
    real = time.sleep
    with mock.patch.object(decide.time, "sleep", lambda seconds: (order.append("breath"), real(seconds))):
        background = Background(lambda: order.append("call") or threading.current_thread().name)
        background._thread.join()
    assert order == ["breath", "call"]
    assert background.result() == "ep_moe eplb plan"


# --- the decision ---------------------------------------------------------------------------------------------------

MOE = MoEConfig(hidden_size=2048, intermediate_size=768, num_experts=8, top_k=2)
NOW = [ExpertMap.linear(8, 4)] * 2
THEN = [ExpertMap.redundant(8, 4, 0), ExpertMap.from_ranks([[0, 2], [1, 3], [4, 6], [5, 7]], 8)]
SIZE = 1000
LOAD = np.zeros((2, 8), np.int64)
LOAD[:, :2] = 1_000_000  # both on rank 0; the second layer's new map halves its load


def decided(load=LOAD, planner=lambda load, current: THEN, **config):
    return decide.decide(load, NOW, planner, EPLBConfig(interval=100, window=50, **config), MOE, SIZE)


def test_without_a_machine_a_plan_is_carried_out():
    assert decided() == Decision(tuple(THEN))
    assert decided(planner=lambda load, current: iter(THEN)).maps == tuple(THEN)


def test_without_load_nothing_is_planned():
    def planner(load, current):
        raise AssertionError("it has nothing to go by")

    assert decided(np.zeros_like(LOAD), planner) == Decision(tuple(NOW))


@pytest.mark.parametrize("maps", [[], THEN[:1], [*THEN, BASE]])
def test_a_planner_returns_a_map_for_each_layer(maps):
    with pytest.raises(ConfigError, match=f"the planner must return a map per layer, 2, got {len(maps)}"):
        decided(planner=lambda load, current: maps)


@pytest.mark.parametrize("found", [None, 7, [1, 2]], ids=str)
def test_what_is_no_map_is_no_plan(found):
    got = "1 among them" if isinstance(found, list) else found
    with pytest.raises(ConfigError, match=f"the planner must return an ExpertMap per layer, got {got}"):
        decided(planner=lambda load, current: found)


@pytest.mark.parametrize("nodes", [None, 1, 2])
def test_the_price_is_that_of_a_step(nodes):
    """The price uses the load of one step, and counts consecutive ranks as a node.

    The loads here are sums over a window of 50 steps.
    """
    found = decided(machine=H200, nodes=nodes)
    rest = {"ranks_per_node": 4 // (nodes or 1)}
    time = dataclasses.replace(LayerTime.of(MOE, H200), expert_bytes=SIZE)
    moved = traffic(NOW, THEN, expert_bytes=SIZE, **rest)
    assert found.price == verdict(LOAD / 50, NOW, THEN, moved=moved, time=time, within_steps=100, **rest)
    assert found.price.accepted
    assert found.maps == tuple(THEN)


def test_the_planning_thread_pauses_before_each_part_of_the_price(monkeypatch):
    """The planning thread sleeps before each part of the price.

    It therefore delays the host's other threads by one part at most.
    """
    order = []

    def noted(name, part):
        return lambda *args, **options: order.append(name) or part(*args, **options)

    for name in ("traffic", "verdict"):
        monkeypatch.setattr(decide, name, noted(name, getattr(decide, name)))
    monkeypatch.setattr(decide.time, "sleep", lambda seconds: order.append("pause"))
    decided(machine=H200)
    assert order == ["pause", "traffic", "pause", "verdict"]


def test_experts_that_go_to_another_node_are_priced_by_its_link():
    """Experts that move to another node are priced at the bandwidth between nodes.

    Both maps have the same load on each rank.
    """
    crossed = [ExpertMap.from_ranks([[4, 5], [2, 3], [0, 1], [6, 7]], 8)] * 2
    costs = [decided(machine=H200, nodes=nodes, planner=lambda *_: crossed).price.cost_ms for nodes in (1, 2)]
    assert costs[1] / costs[0] == pytest.approx(H200.link_bytes_per_s / H200.node_link_bytes_per_s)


def test_experts_come_from_a_rank_of_the_own_node():
    old = ExpertMap.from_ranks([[0, 1], [2, 3], [0, 2], [1, -1]], 4)
    new = ExpertMap.from_ranks([[0, 1], [2, 3], [0, 2], [1, 0]], 4)
    for per_node, source in ((4, 0), (2, 2)):
        rest = {"budget": 16, "commit": 16, "ranks_per_node": per_node}
        ((part,),) = add_transfer_schedules(lambda: Decision((new,)), [(mock.Mock(), old, 8)], rank=3, **rest).schedules
        assert [move.source for move in part.moves.transfers] == [source]


@pytest.mark.parametrize(
    "options",
    [{"groups": 2, "nodes": 2}, {"groups": 4, "nodes": 2}, {"tolerance": 0.3}, {"enough": 0.7}],
    ids=str,
)
def test_without_a_planner_of_the_user_the_options_are_those_of_plan(options):
    load, current = np.random.default_rng(0).integers(1, 1000, (1, 8)), [ExpertMap.redundant(8, 4, 4)]
    room = [[3, 3, 3, 3]]
    found = default_planner(EPLBConfig(**options), room)(load, current)
    assert found == plan(load, current, slots=room, **options)
    assert found != plan(load, current, slots=room), "or the case would show nothing"


def test_a_plan_fills_slots_that_there_is_memory_for():
    load, current = np.array([[8, 1, 1, 1]]), [ExpertMap.from_ranks([[0, 1], [2, 3]], 4)]
    (found,) = default_planner(EPLBConfig(), [[2, 3]])(load, current)
    assert found.num_redundant == 1


def test_the_price_of_few_rows_is_by_the_bytes_of_experts_as_they_are_held():
    config = EPLBConfig(interval=100, window=50, machine=H200)
    once, twice = (decide.decide(LOAD // 10**4, NOW, lambda *_: THEN, config, MOE, n * 10**8).price for n in (1, 2))
    assert twice.before_ms > 1.9 * once.before_ms
    assert twice.after_ms > 1.9 * once.after_ms


def test_what_does_not_pay_is_not_carried_out():
    found = decided(planner=lambda load, current: [ExpertMap.round_robin(8, 4)] * 2, machine=H200, load=LOAD * 0 + 1)
    assert not found.price.accepted
    assert found.maps == tuple(NOW)


def test_a_planner_that_writes_into_its_load_does_not_change_the_price():
    def careless(load, current):
        load[:] = load[:, ::-1]
        return [ExpertMap.round_robin(8, 4)] * 2

    kept = LOAD.copy()
    assert decided(planner=careless, machine=H200) == decided(planner=lambda *_: careless(LOAD.copy(), 0), machine=H200)
    assert (kept == LOAD).all()


@pytest.mark.parametrize("maps", [[BASE], [BASE, BASE, BASE], [BASE, None], "ab", None, BASE])
def test_maps_of_the_user_are_one_for_each_layer(maps):
    got = f"{len(maps)}: " if isinstance(maps, list | str) else ""
    with pytest.raises(ConfigError, match=f"move_to needs an ExpertMap per layer, 2, got {got}"):
        decide.decision_for_user_maps(maps, 2)
    assert decide.decision_for_user_maps([BASE, BASE], 2) == Decision((BASE, BASE))
