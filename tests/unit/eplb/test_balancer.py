"""Test `ExpertBalancer` on one rank: its state after each step, including steps that raise."""

import dataclasses
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ep_moe import ConfigError, EPContext, EPLBConfig, ExpertBalancer, ExpertMap, MoELayer, PeerTimeout, RebalanceError
from ep_moe.eplb import H200, rebalance
from ep_moe.eplb.migration import consensus
from ep_moe.eplb.migration.consensus import State
from tests.fixtures.eplb_cases import CONFIG, ROW, make_layers

CPU = torch.device("cpu")


@pytest.fixture
def layers():
    with EPContext.local(CPU) as context:
        yield make_layers(context, redundant=0)


def balancer_of(layers, planner=None, **options):
    return ExpertBalancer(layers, layers[0].context, EPLBConfig(sync_every=1, **options), planner=planner)


def step(balancer, times):
    for _ in range(times):
        balancer.step()


@pytest.mark.parametrize("context", [None, CPU, "cpu"], ids=str)
def test_what_is_no_context_is_refused(layers, context):
    with pytest.raises(ConfigError, match="ExpertBalancer: context must be an EPContext, got"):
        ExpertBalancer(layers, context)


def test_a_step_that_raises_counts_in_its_window(layers, monkeypatch):
    balancer = balancer_of(layers, interval=4, window=4)

    def fails():
        raise RebalanceError("rolled back")

    step(balancer, 3)
    monkeypatch.setattr(balancer, "_advance", fails)
    with pytest.raises(RebalanceError, match="rolled back"):
        balancer.step()  # the last step of the window
    monkeypatch.undo()
    assert balancer.state is State.GATHERING
    balancer.settle()


def test_windows_that_end_while_a_rebalance_is_under_way_are_counted(layers):
    balancer = balancer_of(layers, interval=1, window=1)
    step(balancer, 3)  # the first window starts a rebalance, which gathers, sums and then plans
    assert balancer.stats().skipped == 2
    balancer.close()


def test_the_next_plan_hears_nothing_of_one_that_failed(layers):
    """A failed plan, or two in a row, does not affect the next one."""
    plans = []

    def planner(load, current):
        plans.append(load)
        if len(plans) < 3:
            raise ZeroDivisionError
        return [ExpertMap.from_ranks([list(reversed(range(10)))], 10)]

    balancer, failures = balancer_of(layers, planner, interval=1, window=1), 0
    for _ in range(2000):
        layers[0](torch.ones(2, CONFIG.hidden_size))
        try:
            balancer.step()
        except RebalanceError:
            failures += 1
            assert balancer.state in (State.IDLE, State.GATHERING)
        if balancer.stats().commits:
            break
        time.sleep(1e-3)
    assert failures == balancer.stats().rollbacks == 2
    assert layers[0].placement.expert_map.local(0)[0] == 9
    balancer.close()


@pytest.mark.parametrize(("options", "commits"), [({"bytes_per_commit": ROW}, 5), ({"bytes_per_step": ROW}, 1)])
def test_a_commit_rewrites_no_more_than_its_own_bound(layers, options, commits):
    """A commit rewrites at most `bytes_per_commit`, independently of `bytes_per_step`.

    Ten experts change places in pairs, and a pair is the least that a commit can put in force.
    """
    balancer = balancer_of(layers, interval=0, **options)
    balancer.move_to([ExpertMap.from_ranks([list(reversed(range(10)))], 10)])
    balancer.settle()
    assert balancer.stats().commits == commits
    balancer.close()


def test_a_stage_has_half_of_the_contexts_deadline(layers, monkeypatch):
    limit, answer = layers[0].context.flight_recorder.deadline_s / 2, threading.Event()
    balancer = balancer_of(layers, lambda *_: answer.wait(), interval=1, window=1)
    layers[0](torch.ones(2, CONFIG.hidden_size))
    while balancer.state is not State.PLANNING:
        balancer.step()
    now = time.monotonic()
    monkeypatch.setattr(rebalance, "time", SimpleNamespace(monotonic=lambda: now + 0.9 * limit))
    step(balancer, 3)
    assert balancer.state is State.PLANNING
    monkeypatch.setattr(rebalance, "time", SimpleNamespace(monotonic=lambda: now + 1.1 * limit))
    with pytest.raises(RebalanceError, match=f"PLANNING took longer than {limit:g} s"):
        step(balancer, 3)
    answer.set()


@pytest.mark.parametrize(
    ("vote", "fate"), [("commit", "was applied"), ("rollback", "was rolled back"), (None, "is undecided")], ids=str
)
def test_the_layer_under_way_ends_as_other_ranks_voted(vote, fate, layers, monkeypatch):
    """A balancer that fails puts the layer under way in force if ranks did so before they were lost."""
    before, new = layers[0].placement.expert_map, ExpertMap.from_ranks([list(reversed(range(10)))], 10)
    balancer = balancer_of(layers, interval=0)
    balancer.move_to([new])
    while not (balancer.state is State.MOVING and balancer._migration.done):
        balancer.step()

    def voted(own, forward):
        if vote is None:
            raise PeerTimeout("no store")
        return vote, forward

    monkeypatch.setattr(balancer, "_vote", voted)
    with pytest.raises(PeerTimeout, match=f"of moe0.* {fate}, and the balancer is off: lost"):
        balancer._disable_and_raise(PeerTimeout("lost"))
    assert balancer.state is State.OFF
    assert layers[0].placement.expert_map == (new if vote == "commit" else before)


def test_a_layer_whose_vote_is_lost_is_undecided(layers, monkeypatch):
    before, balancer = layers[0].placement.expert_map, balancer_of(layers, interval=0)
    balancer.move_to([ExpertMap.from_ranks([list(reversed(range(10)))], 10)])

    def lost(own, forward):
        raise PeerTimeout("no store")

    monkeypatch.setattr(balancer, "_vote", lost)
    with pytest.raises(PeerTimeout, match=r"of moe0.* is undecided, and the balancer is off: no store"):
        balancer.settle()
    assert balancer.state is State.OFF
    assert layers[0].placement.expert_map == before


# --- what is refused ------------------------------------------------------------------------------------------------


def other_layer(layers, **fields):
    return MoELayer(dataclasses.replace(CONFIG, **fields), layers[0].context).requires_grad_(False)


def test_layers_of_other_numbers_of_experts_have_balancers_of_their_own(layers):
    with pytest.raises(ConfigError, match=r"layer moe1 has 4 experts and moe0 10; make a balancer for those"):
        balancer_of([*layers, other_layer(layers, num_experts=4)], interval=0)


def test_one_price_is_for_layers_that_are_alike(layers):
    both = [*layers, other_layer(layers, intermediate_size=32)]
    with pytest.raises(ConfigError, match=r"layer moe1 differs from moe0, and one price is for layers that are alike"):
        balancer_of(both, interval=0, machine=H200)
    balancer_of(both, interval=0).close()


def test_layers_of_another_context_are_refused(layers):
    with EPContext.local(CPU) as context, pytest.raises(ConfigError, match="layer moe0 belongs to another EPContext"):
        ExpertBalancer(layers, context, EPLBConfig(interval=0))


def test_layers_without_memory_are_refused(layers):
    layers[0].to("meta")
    with pytest.raises(ConfigError, match=r"layer moe0 is on the meta device; call to_empty"):
        balancer_of(layers, interval=0)


def test_a_deadline_may_be_that_of_the_context(layers):
    limit = layers[0].context.flight_recorder.deadline_s
    balancer_of(layers, interval=0, deadline_s=limit).close()
    with pytest.raises(ConfigError, match=r"EPLBConfig\.deadline_s must be at most the context's"):
        balancer_of(layers, interval=0, deadline_s=limit + 1)


def test_bounds_that_there_is_no_memory_for_are_named(layers, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(consensus, "Staging", full)
    size = 8 * ROW + 2 * ROW  # of a commit's experts, and of a step's sends
    words = f"bytes_per_commit=1 and bytes_per_step={2 * ROW} need {size} bytes of memory on cpu"
    with pytest.raises(ConfigError, match=words):
        balancer_of(layers, interval=0, bytes_per_commit=1, bytes_per_step=2 * ROW)


def test_no_layer_counts_load_within_no_stats(layers):
    balancer, x = balancer_of(layers, interval=4, window=4), torch.ones(3, CONFIG.hidden_size)

    def counted():
        return [int(layer.placement.expert_load.sum()) for layer in layers]

    with balancer.no_stats():
        for layer in layers:
            layer(x)
    assert counted() == [0] * len(layers)
    for layer in layers:
        layer(x)
    assert counted() == [3 * CONFIG.top_k] * len(layers)
    balancer.close()
