"""ExpertBalancer on one rank: what a step leaves behind, whatever it raises."""

import time

import pytest
import torch

from ep_moe import EPContext, EPLBConfig, ExpertBalancer, ExpertMap, RebalanceError
from ep_moe.eplb.migration.consensus import State
from tests.fixtures.eplb_cases import CONFIG, ROW, make_layers

CPU = torch.device("cpu")


@pytest.fixture
def layers():
    with EPContext.local(CPU) as context:
        yield make_layers(context, redundant=0)


def balancer_of(layers, planner=None, **options):
    return ExpertBalancer(layers, layers[0].context, EPLBConfig(sync_every=1, **options), planner=planner)


def test_a_step_that_raises_counts_in_its_window(layers, monkeypatch):
    balancer = balancer_of(layers, interval=4, window=4)

    def fails():
        raise RebalanceError("rolled back")

    for _ in range(3):
        balancer.step()
    monkeypatch.setattr(balancer, "_advance", fails)
    with pytest.raises(RebalanceError, match="rolled back"):
        balancer.step()  # the window's last
    monkeypatch.undo()
    assert balancer.state is State.GATHERING
    balancer.settle()


def test_windows_that_end_while_a_rebalance_is_under_way_are_counted(layers):
    balancer = balancer_of(layers, interval=1, window=1)
    for _ in range(3):  # the first begins one, which gathers, sums and then plans
        balancer.step()
    assert balancer.stats().skipped == 2
    balancer.close()


def test_the_next_plan_hears_nothing_of_one_that_failed(layers):
    """Nor the one after it of the second."""
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
    """Which is not that of a step. Ten experts change places in pairs, and no less than a pair can be in force."""
    balancer = balancer_of(layers, interval=0, **options)
    balancer.move_to([ExpertMap.from_ranks([list(reversed(range(10)))], 10)])
    balancer.settle()
    assert balancer.stats().commits == commits
    balancer.close()
