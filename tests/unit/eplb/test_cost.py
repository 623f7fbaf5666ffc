"""Test the predicted time against a sum by hand, and that a plan is accepted only if it gains time."""

import contextlib
import dataclasses

import pytest

from ep_moe import ConfigError, ExpertMap, MoEConfig
from ep_moe.eplb import H200, LayerTime, Machine, Price, traffic, verdict
from ep_moe.eplb.config import EPLBConfig
from ep_moe.eplb.cost import cost_ms

SLOW = Machine(hbm_bytes_per_s=1e3, flops=1e4, link_bytes_per_s=100.0, node_link_bytes_per_s=10.0)
TIME = LayerTime(expert_bytes=50, row_bytes=20, flop_per_row=200, machine=SLOW)
LINEAR = ExpertMap.linear(4, 4)


def test_sizes_follow_from_the_config():
    config = MoEConfig(hidden_size=64, intermediate_size=32, num_experts=4, top_k=2)
    time = LayerTime.of(config, H200, bytes_per_weight=1.0, bytes_per_value=3.0)
    assert (time.expert_bytes, time.row_bytes, time.flop_per_row) == (3 * 64 * 32, 64 * 3, 6 * 64 * 32)
    bf16 = LayerTime.of(config, H200)
    assert (bf16.expert_bytes, bf16.row_bytes) == (2 * 3 * 64 * 32, (2 + 2) * 64), "out and back"


def test_many_rows_are_bound_by_operations_few_by_weights():
    many = TIME.ms([[100, 10, 10, 10]], [LINEAR])
    assert many.tolist() == pytest.approx([1e3 * (100 * 200 / 1e4 + 100 * 20 * 0.75 / 100)])
    few = TIME.ms([[1, 1, 1, 1]], [LINEAR])
    assert few.tolist() == pytest.approx([1e3 * (50 / 1e3 + 20 * 0.75 / 100)])


def test_an_expert_without_tokens_is_not_read():
    one_rank = ExpertMap.linear(4, 1)
    assert TIME.ms([[1, 1, 0, 0.5]], [one_rank]).tolist() == pytest.approx([1e3 * 2.5 * 50 / 1e3])


def test_rows_between_nodes_take_the_slower_link():
    wire = TIME.ms([[100, 0, 0, 0]], [LINEAR], ranks_per_node=2) - TIME.ms([[100, 0, 0, 0]], [ExpertMap.linear(4, 1)])
    assert wire.tolist() == pytest.approx([1e3 * 100 * 20 * (0.25 / 100 + 0.5 / 10)])


def test_cost_is_that_of_the_rank_that_receives_most():
    old = ExpertMap.from_ranks([[0, 1], [2, 3], [4, 5], [6, 7]], 8)
    new = ExpertMap.from_ranks([[1, 0], [3, 4], [2, 5], [6, 7]], 8)
    assert cost_ms(traffic([old], [new], expert_bytes=50), SLOW) == pytest.approx(1e3 * (50 / 100 + 2 * 50 / 1e3))
    apart = traffic([old, old], [new, new], expert_bytes=50, ranks_per_node=2)
    assert cost_ms(apart, SLOW) == pytest.approx(1e3 * 2 * (50 / 10 + 2 * 50 / 1e3))


def test_what_dead_ranks_held_comes_at_the_rate_between_nodes():
    moved = traffic([LINEAR], [ExpertMap.from_ranks([[0], [1], [2, 3], []], 4)], expert_bytes=50, dead_ranks=[3])
    assert cost_ms(moved, SLOW) == pytest.approx(1e3 * 50 / 10)


@pytest.mark.parametrize(
    ("price", "accepted", "words"),
    [
        (Price(10.0, 8.0, 40.0, 20), True, "accepted: 10 -> 8 ms a step, moving costs 40 ms: paid back after 20 steps"),
        (
            Price(10.0, 8.0, 40.1, 20),
            False,
            "refused: 10 -> 8 ms a step, moving costs 40.1 ms: paid back after 20 steps",
        ),
        (Price(10.0, 8.0, 60.0, 20), False, "after 30 steps, limit 20"),
        (Price(8.0, 8.0, 0.0, 20), False, "refused: 8 -> 8 ms a step, moving costs 0 ms: no gain"),
        (Price(8.0, 9.0, 1.0, 20), False, "refused: 8 -> 9 ms a step, moving costs 1 ms: no gain"),
    ],
)
def test_accepted_where_it_pays_within_the_steps(price, accepted, words):
    assert price.accepted is accepted
    assert words in str(price)


def test_verdict_weighs_all_layers():
    old, new = [LINEAR] * 2, [LINEAR, ExpertMap.from_ranks([[1], [0], [2], [3]], 4)]
    uneven = [[9, 1, 1, 1], [9, 1, 1, 1]]
    found = verdict(
        uneven, old, new, moved=traffic(old, new, expert_bytes=50), time=TIME, within_steps=10, ranks_per_node=4
    )
    assert found.before_ms == found.after_ms == pytest.approx(2 * TIME.ms(uneven[:1], old[:1])[0])
    assert found.cost_ms == pytest.approx(500.0)
    assert not found.accepted


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Machine)])
def test_rates_are_positive(name):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(H200, **{name: 0.0})
    assert f"Machine.{name} must be a positive number, got 0.0" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "must"),
    [
        ("tolerance", -0.1, "a number of at least 0"),
        ("tolerance", float("nan"), "a number of at least 0"),
        ("tolerance", "0.1", "a number of at least 0"),
        ("enough", 0.0, "a number above 0 and at most 1"),
        ("enough", 1.5, "a number above 0 and at most 1"),
        ("enough", None, "a number above 0 and at most 1"),
        ("machine", "H200", "a Machine"),
        ("deadline_s", "5", "a positive number"),
        ("deadline_s", True, "a positive number"),
        ("replicas", "spread", "one of "),
        ("window", 2.0, "an integer of at least 1"),
    ],
)
def test_what_a_plan_needs_is_checked_before_the_first(name, value, must):
    with pytest.raises(ConfigError) as error:
        EPLBConfig(**{name: value})
    assert f"EPLBConfig.{name} must be {must}" in str(error.value)
    assert f"got {value!r}" in str(error.value)


def test_within_steps_is_a_count():
    with pytest.raises(ConfigError) as error:
        verdict(
            [[1] * 4], [LINEAR], [LINEAR], moved=traffic([LINEAR], [LINEAR], expert_bytes=1), time=TIME, within_steps=0
        )
    assert "within_steps must be an integer of at least 1, got 0" in str(error.value)


@pytest.mark.parametrize(("window", "interval", "refused"), [(5, 4, True), (4, 4, False), (5, 0, False)])
def test_a_window_of_load_is_no_longer_than_the_interval(window, interval, refused):
    """`EPLBConfig` refuses a window longer than the interval, unless the interval is 0 (rebalance on request)."""
    words = "EPLBConfig.window must not exceed interval, got window=5, interval=4"
    with pytest.raises(ConfigError, match=words) if refused else contextlib.nullcontext():
        EPLBConfig(window=window, interval=interval)
