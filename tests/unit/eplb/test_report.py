"""Test the planning of a recorded trace for other numbers of ranks."""

import dataclasses

import numpy as np
import pytest

from ep_moe import ExpertMap, MoEConfig
from ep_moe.eplb import H200, LayerTime, Price
from ep_moe.eplb.planner.plan import plan
from ep_moe.eplb.planner.score import Traffic, balancedness, loads_by_rank
from ep_moe.eplb.report import COLUMNS, Question, what_if
from ep_moe.eplb.trace import LoadTrace

CONFIG = MoEConfig(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2)
TRACE = LoadTrace(np.random.default_rng(0).integers(0, 1000, (6, 1, 8)), np.full(6, 4000))
OLD = [ExpertMap.linear(8, 4)]


def answer(**question):
    (found,) = what_if(TRACE, [4], [0], Question(**question), CONFIG)
    return found


def test_the_held_out_half_is_under_a_plan_that_has_not_seen_it():
    blind, seeing = (plan(load, OLD) for load in (TRACE.window(0, 3), TRACE.window()))
    assert blind != seeing
    assert answer().held_out == balancedness(loads_by_rank(TRACE.window(3), blind)).mean()


@pytest.mark.parametrize("nodes", [1, 2])
def test_prices_are_by_the_links_between_nodes(nodes):
    time = LayerTime.of(CONFIG, H200)
    assert answer(nodes=nodes).price.before_ms == time.ms(TRACE.window() / 6, OLD, ranks_per_node=4 // nodes).sum()


def test_a_row_has_bytes_within_a_rank_within_a_node_and_between_nodes():
    moved = Traffic(*(np.full((1, 4), experts) for experts in (1, 2, 5, 0)), expert_bytes=1 << 20)
    found = dataclasses.replace(answer(nodes=2), moved=moved)
    facts = found.facts()
    wanted = [facts[f"{where}_bytes"] for where in ("local", "same_node", "other_node")]
    assert len(set(wanted)) == 3
    assert found.cells()[-3:] == [f"{size / 1e9:.3g}" for size in wanted]


def test_an_experts_bytes_are_those_asked_about():
    assert answer().moved.expert_bytes == 2 * 3 * 64 * 32
    assert answer(bytes_per_weight=0.5).moved.expert_bytes == 3 * 64 * 32 // 2


def test_a_row_has_its_numbers_under_their_titles():
    loads = {"before": np.array([[1.0, 1.0, 1.0, 5.0]]), "after": np.array([[1.0, 1.0, 1.0, 2.0]])}
    found = dataclasses.replace(answer(), **loads, held_out=0.25, price=Price(3.0, 2.0, 1.0, 10))
    row = dict(zip(COLUMNS, found.cells(), strict=True))
    titles = ("ranks", "redundant", "before", "after", "held", "ms before", "ms after")
    assert [row[title] for title in titles] == ["4", "0", "0.400", "0.625", "0.250", "3", "2"]
    facts = found.facts()
    names = ("ranks", "redundant", *(f"balancedness_{when}" for when in ("before", "after", "held_out")))
    assert [facts[name] for name in (*names, "before_ms", "after_ms")] == [4, 0, 0.4, 0.625, 0.25, 3.0, 2.0]
