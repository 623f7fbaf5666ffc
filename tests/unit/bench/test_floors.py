"""Test the floor of a layer's time, what bounds it, and from which tokens and ranks another transport is faster."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_moe import ConfigError
from ep_moe.bench import floors, scaling
from ep_moe.bench.floors import (
    KINDS,
    Floor,
    faster_between,
    floor,
    saved_by_dedup,
    tokens_text,
    two_levels_beside_flat,
    wire_bound_from,
)
from ep_moe.bench.wire_rows import deduplicated, filling, gathered_in_turn, remote_ranks, row_bytes, two_level
from ep_moe.config import MoEConfig, Wire, load_model_config
from ep_moe.eplb.cost import Machine
from tests.fixtures.scaling_model import config_of

# --- floors --------------------------------------------------------------------------------------------------------

# bf16 on 4 ranks at 4.3 TB/s, 800 TFLOP/s, 389 GB/s, computed without this code: (T, in turn, overlapped). These
# figures do not count ids and weights on the wire.
FIGURES = {
    "qwen3-30b-a3b": [(1, 16, 16), (16, 70, 69), (128, 78, 70), (1024, 155, 97), (8192, 1243, 773)],
    "deepseek-v3": [(1, 157, 156), (16, 1142, 1139), (128, 1337, 1311), (1024, 1516, 1311), (8192, 8852, 7216)],
}


@pytest.mark.parametrize("model", FIGURES)
def test_floors_are_the_figures_reckoned_apart(model):
    machine = Machine(hbm_bytes_per_s=4.3e12, flops=800e12, link_bytes_per_s=389e9, node_link_bytes_per_s=1)
    kind, config = dataclasses.replace(KINDS["bf16"], machine=machine), load_model_config(model).moe
    for tokens, in_turn, overlapped in FIGURES[model]:
        found = floor(config, kind, 4, tokens)
        ids = tokens * deduplicated(config, 4, 8).near * 8 * config.top_k / 389e9 * 1e6
        assert found.in_turn - ids == pytest.approx(in_turn, abs=0.5)
        assert found.overlapped == pytest.approx(overlapped, abs=0.5)


def test_fp8_halves_weights_and_rows_out_but_not_rows_back():
    config = load_model_config("qwen3-30b-a3b").moe
    assert row_bytes(config, Wire(), 8) == (4096 + 64, 4096)
    assert row_bytes(config, Wire(dispatch="fp8_block"), 8) == (2048 + 16 * 4 + 64, 4096)
    assert row_bytes(config, Wire(combine="fp8"), 1) == (4096 + 8, 2048)
    ours, other = (floor(config, KINDS[name], 4, 1) for name in ("fp8", "bf16"))
    assert ours.weights / other.weights == pytest.approx((1 + 4 / 128**2) / 2, rel=1e-3)
    assert ours.back == other.back


def test_links_work_side_by_side_and_the_slower_counts():
    config = config_of(8, 1)
    machine = Machine(hbm_bytes_per_s=1, flops=1, link_bytes_per_s=100e6, node_link_bytes_per_s=10e6)
    out, back = row_bytes(config, Wire(), 1)
    rows = deduplicated(config, 4, 2)  # 1/4 of a row from one rank of the same host, and from each of two on the other
    assert rows.us(config, Wire(), machine) == pytest.approx((0.5 * out / 10, 0.5 * back / 10))
    slow = dataclasses.replace(machine, link_bytes_per_s=1e6)
    assert rows.us(config, Wire(), slow) == pytest.approx((0.25 * out / 1, 0.25 * back / 1))


def test_levels_in_turn_take_their_sum():
    config = config_of(8, 1)
    machine = Machine(hbm_bytes_per_s=1, flops=1, link_bytes_per_s=100e6, node_link_bytes_per_s=10e6)
    out, back = row_bytes(config, Wire(), 1)
    rows = two_level(config, 4, 2)  # 1/4 of a row from each of the 2 ranks with another local rank, 1/2 over the rail
    assert (rows.near, rows.far) == (0.5, 0.5)
    assert rows.us(config, Wire(), machine) == pytest.approx((0.55 * out / 10, 0.55 * back / 10))
    assert rows.busy_us(config, Wire(), machine) == pytest.approx(0.5 * (out + back) / 10)
    kind = dataclasses.replace(KINDS["bf16"], machine=machine)
    found = floor(config, kind, 4, 3, per_host=2, way=two_level)
    assert found.wire == pytest.approx(3 * 0.55 * (out + back) / 10)
    assert dataclasses.replace(found, weights=0, products=0).overlapped == pytest.approx(3 * 0.5 * (out + back) / 10)
    assert sum(gathered_in_turn(config, 4, 2).us(config, Wire(), machine)) == pytest.approx(1.2 * (out + back) / 10)


def test_one_rank_has_no_wire_and_what_binds_is_named():
    config = load_model_config("qwen3-30b-a3b").moe
    assert floor(config, KINDS["bf16"], 1, 16).wire == 0
    assert [Floor(*times).bound for times in ((3, 2, 1, 1), (2, 3, 1, 1), (2, 3, 2, 2))] == ["w", "p", "n"]
    assert str(Floor(2, 3, 2, 2)) == "7/4 n"


def test_no_tokens_are_refused():
    with pytest.raises(ConfigError, match="tokens must be positive, got 0"):
        floor(config_of(64, 2), KINDS["bf16"], 4, 0)


# --- crossovers ----------------------------------------------------------------------------------------------------


@given(extra=st.floats(-100, 100), saved=st.floats(-10, 10))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_faster_between_is_where_the_saving_outweighs_the_extra(extra, saved):
    first, last = faster_between(extra, saved)
    for tokens in (1, 2, 10, 1000, 10**6):
        gain = saved * tokens - extra
        if abs(gain) > 1e-6:
            assert (first <= tokens <= last) == (gain > 0)


@pytest.mark.parametrize(
    ("extra", "saved", "text"),
    [(-1, 0, "always"), (1, 5, "always"), (3, 2, "from 2"), (-15, -2, "to 7"), (-1, -5, "never"), (1, -5, "never")],
)
def test_tokens_are_whole_and_at_least_one(extra, saved, text):
    assert tokens_text(faster_between(extra, saved)) == text
    assert faster_between(extra, saved)[0] >= 1


def test_deduplication_saves_within_a_host_but_not_across_few():
    config = load_model_config("deepseek-v3").moe
    assert [saved_by_dedup(config, KINDS["bf16"], ranks) > 0 for ranks in (2, 4, 8, 16, 32, 64)] == [
        *[True] * 3,
        *[False] * 2,
        True,
    ]
    assert all(saved_by_dedup(config, KINDS["bf16"], ranks, per_host=64) > 0 for ranks in (2, 4, 8, 16, 32, 64))
    out, back = row_bytes(config, Wire(), 8)
    saved = (3 - remote_ranks(256, 8, 4)) * (out + back) / KINDS["bf16"].machine.link_bytes_per_s * 1e6
    assert saved_by_dedup(config, KINDS["bf16"], 4) == pytest.approx(saved, rel=1e-9)


def test_two_levels_pay_until_a_host_holds_few_experts():
    """The two-level transport is faster until a host holds few experts.

    A token of DeepSeek-V3 has 8 experts. With 32 hosts or more, a host rarely has two of them.
    """
    config = scaling.uniform("deepseek-v3")
    found = {
        ranks: two_levels_beside_flat(config, KINDS["fp8"], ranks, 8, filling(256, ranks))
        for ranks in (16, 32, 64, 128, 144, 256, 320)
    }
    pays = {ranks: one.two_level_us < one.flat_us for ranks, one in found.items()}
    assert pays == {16: True, 32: True, 64: True, 128: True, 144: True, 256: False, 320: False}
    for ranks, one in found.items():
        assert (one.two_level_pays == "never") == (not pays[ranks])
        tokens = 10 / (one.flat_us - one.two_level_us)
        assert one.two_level_pays == ("never" if tokens < 0 else f"from {math.ceil(tokens)}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 16, 128, 1024])
def test_wire_binds_from_that_number_of_ranks_on(kind, tokens):
    config = load_model_config("qwen3-30b-a3b").moe
    bounds = {ranks: floor(config, KINDS[kind], ranks, tokens).bound for ranks in (1, 2, 4, 8, 16, 32, 64, 128)}
    found = wire_bound_from(config, KINDS[kind], tokens)
    assert all(bounds[ranks] == "n" for ranks in bounds if found is not None and ranks >= found)
    last = max(ranks for ranks in bounds if found is None or ranks < found)
    assert bounds[last] != "n"


@pytest.mark.parametrize("experts", [12, 96])
@pytest.mark.parametrize("bound_from", [1, 3, 8, 12, 97])
def test_only_numbers_of_ranks_that_divide_the_experts_are_asked(experts, bound_from, monkeypatch):
    """`wire_bound_from` tries only rank counts that divide the experts, and whole hosts where they exceed one host."""
    asked = []

    def floor_of(config, kind, ranks, tokens, *, per_host):
        asked.append(ranks)
        return SimpleNamespace(bound="n" if ranks >= bound_from else "w")

    monkeypatch.setattr(floors, "floor", floor_of)
    config = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=experts, top_k=2)
    found = wire_bound_from(config, next(iter(KINDS.values())), 16, per_host=4)
    possible = [ranks for ranks in range(1, experts + 1) if experts % ranks == 0 and (ranks <= 4 or ranks % 4 == 0)]
    assert set(asked) <= set(possible)
    assert found == min((ranks for ranks in possible if ranks >= bound_from), default=None)
