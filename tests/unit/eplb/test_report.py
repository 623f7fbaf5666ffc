"""What if: a trace planned for other ranks."""

import dataclasses

import numpy as np
import pytest

from ep_moe import ExpertMap, MoEConfig
from ep_moe.eplb import H200, LayerTime
from ep_moe.eplb.planner.plan import plan
from ep_moe.eplb.planner.score import Traffic, balancedness, loads_by_rank
from ep_moe.eplb.report import Question, what_if
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
