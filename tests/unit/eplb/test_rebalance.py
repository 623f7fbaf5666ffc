"""Test the window's load in `ExpertBalancer.stats`: computed on request, from the values at the window's end."""

import inspect
from types import SimpleNamespace as Some
from typing import Any, cast

import pytest
import torch

from ep_moe import EPLBConfig, ExpertBalancer, ExpertMap
from ep_moe.eplb import rebalance as module
from ep_moe.eplb.migration.consensus import State
from ep_moe.placement.placement import LayerStats

OLD, NEW = ExpertMap.from_ranks([[0, 1], [2, 0]], 3), ExpertMap.from_ranks([[0, 1], [2, 1]], 3)
NAMES = ("layers.0", "layers.1")


def made(etp: int = 1) -> tuple[ExpertBalancer, list[Any]]:
    """Return a balancer without process groups, and the list of plans that it would start."""
    weights = Some(etp=Some(size=etp), config=None)
    layers = [Some(name=name, placement=Some(expert_map=OLD), expert_weights=weights) for name in NAMES]
    balancer, planned = cast("Any", object.__new__(ExpertBalancer)), list[Any]()
    balancer.config, balancer.layers, balancer._planner = EPLBConfig(), layers, None
    balancer._mover = Some(store=lambda _: Some(row_bytes=8), staging=Some(bytes=0))
    balancer._state, balancer._steps, balancer._price, balancer._error = State.SUMMING, 0, None, ""
    balancer._counts = dict.fromkeys(("rebalances", "commits", "rollbacks", "skipped", "restarts", "received_bytes"), 0)
    balancer._plan, balancer._window = planned.append, tuple
    return balancer, planned


def test_a_window_is_told_as_it_was():
    balancer, planned = made(etp=2)
    assert balancer.stats().layers == ()
    balancer._sums_are_in(torch.tensor([[8, 4, 6], [2, 0, 10]]))
    (call,) = planned
    load = call.args[0]
    assert load.tolist() == [[4, 2, 3], [1, 0, 5]]
    load[:] = 0  # a planner may overwrite its argument
    balancer.layers[0].placement.expert_map = NEW
    found = balancer.stats().layers
    assert found == (LayerStats(NAMES[0], (4, 2, 3), (4.0, 5.0)), LayerStats(NAMES[1], (1, 0, 5), (0.5, 5.5)))
    values = [value for layer in found for value in layer.expert_load + layer.rank_load]
    assert {type(value) for value in values} == {int, float}
    assert balancer.stats().balancedness == pytest.approx(7.5 / 10.5)
    balancer._sums_are_in(torch.tensor([[8, 4, 6], [2, 4, 10]]))
    assert balancer.stats().layers == (
        LayerStats(NAMES[0], (4, 2, 3), (5.0, 4.0)),
        LayerStats(NAMES[1], (1, 2, 5), (2.5, 5.5)),
    )


@pytest.mark.parametrize("etp", [1, 2])
def test_a_plan_is_priced_by_an_experts_bytes_on_all_its_etp_ranks(etp):
    balancer, planned = made(etp)
    balancer._sums_are_in(torch.tensor([[8, 4, 6], [2, 0, 10]]))
    (call,) = planned
    assert inspect.signature(call.func).bind(*call.args).arguments["expert_bytes"] == 8 * etp


def test_nothing_is_made_unless_asked_for_and_then_once(monkeypatch):
    balancer, _ = made()
    calls, real = [], module.layer_load_stats
    monkeypatch.setattr(module, "layer_load_stats", lambda *args: (calls.append(args), real(*args))[1])
    balancer._sums_are_in(torch.tensor([[8, 4, 6], [2, 0, 10]]))
    assert not calls
    assert balancer.stats().layers is balancer.stats().layers
    assert len(calls) == 1
    balancer._sums_are_in(torch.tensor([[8, 4, 6], [2, 0, 11]]))
    assert balancer.stats().layers[1].expert_load == (2, 0, 11)
    assert len(calls) == 2
