"""The model of larger EP groups against enumeration, simulation with the real expert maps, and measured times."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_moe import ConfigError, ExpertMap, MoEConfig
from ep_moe.bench import all2all, scaling
from ep_moe.bench.floors import (
    KINDS,
    Floor,
    experts_touched,
    faster_between,
    floor,
    saved_by_dedup,
    tokens_text,
    two_levels_beside_flat,
    wire_bound_from,
)
from ep_moe.bench.wire_rows import (
    WAYS,
    deduplicated,
    filling,
    gathered,
    gathered_in_turn,
    per_route,
    reached,
    remote_ranks,
    row_bytes,
    two_level,
)
from ep_moe.config import Wire, load_model_config
from ep_moe.eplb.cost import Machine
from ep_moe.types import PhysicalIds, PhysicalRouting

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "benchmarks"
SMALL = [(6, 2, 2), (8, 3, 4), (7, 3, 4), (9, 2, 4), (5, 4, 4), (6, 1, 6), (5, 5, 2)]  # E, K, R


def config_of(experts: int, top_k: int) -> MoEConfig:
    return MoEConfig(hidden_size=256, intermediate_size=128, num_experts=experts, top_k=top_k)


def hit(experts: int, held: int, top_k: int) -> float:
    """Probability that a token has one of `held` experts, in closed form."""
    return 1 - math.comb(experts - held, top_k) / math.comb(experts, top_k)


def owners(experts: int, ranks: int) -> torch.Tensor:
    """[E]: the rank of each expert."""
    held = ExpertMap.linear(experts, ranks)
    return torch.tensor([held.primary_owner(expert) for expert in range(experts)])


def wanted(ids: torch.Tensor, owner: torch.Tensor, ranks: int) -> torch.Tensor:
    """[T, R] bool: ranks with an expert of a token. ids: [T, K], logical."""
    found = torch.zeros(len(ids), ranks, dtype=torch.bool)
    return found.scatter_(1, owner[ids], True)


# --- exactly, over all choices of few experts ----------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "top_k", "ranks"), SMALL)
def test_rows_are_the_mean_over_all_choices(experts, top_k, ranks):
    ids = torch.tensor(list(itertools.combinations(range(experts), top_k)))
    reached = wanted(ids, owners(experts, ranks), ranks).double().mean(0)  # [R], from any sender
    sent = [reached.sum() - reached[rank] for rank in range(ranks)]
    assert remote_ranks(experts, top_k, ranks) == pytest.approx(float(sum(sent) / ranks), rel=1e-12)
    received = [(ranks - 1) * float(one) for one in reached]
    rows = deduplicated(config_of(experts, top_k), ranks, ranks)
    assert rows.near == pytest.approx(max(*map(float, sent), *received), rel=1e-12)
    assert rows.far == 0


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [case for case in SMALL if case[2] > 2])
def test_rows_between_hosts_are_those_whose_sender_is_elsewhere(experts, top_k, ranks):
    ids, owner = torch.tensor(list(itertools.combinations(range(experts), top_k))), owners(experts, ranks)
    full = max(range(ranks), key=lambda rank: int((owner == rank).sum()))
    for way, count in (
        (deduplicated, (owner[ids] == full).any(1).double().mean()),
        (per_route, (owner[ids] == full).sum(1).double().mean()),
    ):
        rows = way(config_of(experts, top_k), ranks, 2)
        near = sum(float(count) for sender in range(ranks) if sender != full and sender // 2 == full // 2)
        far = sum(float(count) for sender in range(ranks) if sender // 2 != full // 2)
        assert (rows.near, rows.far) == pytest.approx((near, far), rel=1e-12)


@pytest.mark.parametrize(("ranks", "per_host"), [(1, 8), (2, 8), (8, 8), (8, 2), (64, 8), (4, 1)])
def test_gathered_rows_cross_the_network_once_per_host(ranks, per_host):
    rows = gathered(config_of(64, 2), ranks, per_host)
    assert rows.near + rows.far == ranks - 1
    assert rows.far == -(-ranks // per_host) - 1


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(4, 2, 2), (5, 2, 2), (5, 1, 3)])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_experts_touched_are_the_mean_over_all_choices_of_all_tokens(experts, top_k, ranks, tokens):
    choices = list(itertools.combinations(range(experts), top_k))
    held = int((owners(experts, ranks) == 0).sum())
    counts = [len({e for one in all_ for e in one if e < held}) for all_ in itertools.product(choices, repeat=tokens)]
    assert experts_touched(experts, top_k, held, tokens) == pytest.approx(sum(counts) / len(counts), rel=1e-12)


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(6, 2, 4), (4, 2, 6), (4, 3, 6), (3, 1, 4), (5, 2, 2)])
@pytest.mark.parametrize("redundant", [0, 2, 3])
@pytest.mark.parametrize("together", [1, 2])
def test_a_token_takes_any_replica_equally_often(experts, top_k, ranks, redundant, together):
    expert_map = ExpertMap.redundant(experts, ranks, redundant)
    slots = expert_map.slots_per_rank * together
    shares = [Fraction(0)] * (ranks // together)
    choices = list(itertools.combinations(expert_map.logical_to_physical, top_k))
    for choice in choices:
        for replicas in itertools.product(*choice):
            for there in {slot // slots for slot in replicas}:
                shares[there] += Fraction(1, math.prod(map(len, choice)))
    expected = tuple(float(share / len(choices)) for share in shares)
    assert reached(experts, top_k, ranks, redundant, together) == expected


def test_ranks_without_experts_change_nothing_for_the_others():
    config = load_model_config("deepseek-v3").moe
    few, many = deduplicated(config, 256, 8), deduplicated(config, 320, 8)
    assert many.near == few.near
    assert many.far / (320 - 8) == pytest.approx(few.far / (256 - 8), rel=1e-12)
    assert reached(256, 8, 320, 0, together=1)[256:] == (0,) * 64
    idle, filled = floor(config, KINDS["fp8"], 320, 128), floor(config, KINDS["fp8"], 320, 128, redundant=64)
    assert (idle.weights, idle.products) == (filled.weights, filled.products)  # the other 192 experts have one replica
    assert remote_ranks(256, 8, 320, 64) == pytest.approx(remote_ranks(256, 8, 320), rel=0.01)


@pytest.mark.parametrize(
    ("experts", "ranks", "slots"), [(256, 320, 320), (256, 144, 288), (256, 64, 256), (128, 320, 320)]
)
def test_filling_gives_all_ranks_as_many_slots(experts, ranks, slots):
    assert filling(experts, ranks) == slots - experts
    expert_map = ExpertMap.redundant(experts, ranks, slots - experts)
    assert {expert_map.num_slots(rank) for rank in range(ranks)} == {slots // ranks}


def test_replicas_share_the_work_of_an_expert():
    """Two ranks, two experts: with two replicas of each, a rank holds both, and has half of the routes of each."""
    config = config_of(2, 1)
    one, two = floor(config, KINDS["bf16"], 2, 50), floor(config, KINDS["bf16"], 2, 50, redundant=2)
    assert two.products == pytest.approx(one.products)
    assert two.weights == pytest.approx(2 * one.weights, rel=1e-6)
    few = floor(config, KINDS["bf16"], 2, 0.5, redundant=2)  # one token, of both ranks together
    assert few.weights == pytest.approx(
        floor(config, KINDS["bf16"], 2, 0.5).weights
    )  # one expert is read, in one place


# --- by simulation, at real sizes ----------------------------------------------------------------------------------


def bernstein(variance: float, most: float, draws: int) -> float:
    """How far the mean of independent draws in [0, most] is from its expectation at most, but for one case in 1e9
    (Bernstein's inequality)."""
    log = math.log(2e9)
    third = most * log / 3
    return (third + math.sqrt(third**2 + 2 * draws * variance * log)) / draws


@given(
    experts=st.integers(8, 256),
    top_k=st.integers(1, 8),
    ranks=st.sampled_from([2, 4, 8, 32]),
    tokens=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_uniform_routing_reaches_as_many_ranks_and_experts(experts, top_k, ranks, tokens, seed):
    """Whether a token reaches rank r, and whether expert e is touched, are negatively associated over r and over e
    (choices without replacement; Joag-Dev and Proschan, 1983), so the variance of their number is at most
    sum p (1 - p)."""
    ranks = min(ranks, experts)
    draws = 2000 // tokens
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(draws * tokens, experts, generator=generator).topk(top_k).indices
    owner = owners(experts, ranks)
    even = ids[: len(ids) // ranks * ranks]  # as many tokens from each sender
    reached = wanted(even, owner, ranks)
    itself = torch.arange(len(even)) % ranks
    remote = reached.sum(1) - reached[torch.arange(len(even)), itself].long()
    shares = [hit(experts, int((owner == rank).sum()), top_k) for rank in range(ranks)]
    bound = bernstein(sum(p * (1 - p) for p in shares), min(top_k, ranks), len(even))
    assert abs(float(remote.double().mean()) - remote_ranks(experts, top_k, ranks)) <= bound

    touched = torch.zeros(draws, experts, dtype=torch.bool)
    touched.scatter_(1, ids.view(draws, -1), True)
    held = int((owner == 0).sum())
    expected = experts_touched(experts, top_k, held, tokens)
    share = expected / held
    bound = bernstein(held * share * (1 - share), held, draws)
    assert abs(float(touched[:, owner == 0].sum(1).double().mean()) - expected) <= bound


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("rows", ["plain", "fp8_block", "mxfp8"])
def test_wire_bytes_are_those_that_the_all2all_bench_counts(ranks, rows):
    """The mean over draws, within four standard errors of it."""
    hidden, tokens, draws = 512, 64, 200
    config = MoEConfig(hidden_size=hidden, intermediate_size=128, num_experts=all2all.EXPERTS, top_k=all2all.TOP_K)
    wire = Wire(dispatch=rows)
    generator = torch.Generator().manual_seed(ranks)
    counted = []
    for draw in range(draws):
        context = SimpleNamespace(layout=SimpleNamespace(ep=ranks, ep_rank=draw % ranks))
        ids = torch.rand(tokens, config.num_experts, generator=generator).topk(config.top_k).indices
        routing = PhysicalRouting(PhysicalIds(ids), torch.ones(ids.shape))
        counted.append(all2all.wire_bytes(context, routing, all2all.dispatch_shape_of(context, hidden, tokens, wire)))
    out, back = deduplicated(config, ranks, ranks).bytes(config, wire)
    share = hit(config.num_experts, config.num_experts // ranks, config.top_k)
    error = math.sqrt(tokens * (ranks - 1) * share * (1 - share) / draws) * sum(row_bytes(config, wire, config.top_k))
    assert abs(sum(counted) / draws - tokens * (out + back)) <= 4 * error


# --- floors --------------------------------------------------------------------------------------------------------

# bf16 on 4 ranks at 4.3 TB/s, 800 TFLOP/s, 389 GB/s, reckoned apart from this code: T, in turn, overlapped; in these
# figures ids and weights do not travel
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
    rows = deduplicated(config, 4, 2)  # 1/4 of a row from one near rank, and from two far ones
    assert rows.us(config, Wire(), machine) == pytest.approx((0.5 * out / 10, 0.5 * back / 10))
    slow = dataclasses.replace(machine, link_bytes_per_s=1e6)
    assert rows.us(config, Wire(), slow) == pytest.approx((0.25 * out / 1, 0.25 * back / 1))


def test_levels_in_turn_take_their_sum():
    config = config_of(8, 1)
    machine = Machine(hbm_bytes_per_s=1, flops=1, link_bytes_per_s=100e6, node_link_bytes_per_s=10e6)
    out, back = row_bytes(config, Wire(), 1)
    rows = two_level(config, 4, 2)  # 1/4 of a row from the 2 ranks of another number, 1/2 over the rail
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


@pytest.mark.parametrize(("ranks", "per_host", "field"), [(0, 8, "ranks"), (12, 8, "per_host"), (4, 0, "per_host")])
def test_ranks_that_cannot_be_are_refused(ranks, per_host, field):
    for way in {*WAYS.values()}:
        with pytest.raises(ConfigError, match=f"^{field}"):
            way(config_of(64, 2), ranks, per_host)


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
    """A token of DeepSeek-V3 has 8 experts, which 32 hosts or more seldom have two of."""
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


# --- measured times ------------------------------------------------------------------------------------------------


def test_no_layer_was_measured_below_its_floor():
    lines = scaling.layer_lines(DOCS / "layer-h200.csv", 4)
    assert lines
    for cells in lines:
        assert float(cells[-1]) >= float(cells[-2]) >= 1, cells


def test_transports_were_measured_a_little_above_their_bytes():
    """None below what the model says must travel, and FlashInfer's not far above, which it could not be if bytes that
    do travel were missing from the model."""
    lines = scaling.slopes(DOCS / "all2all-h200.csv", 4)
    assert all(line.slope / line.model >= 1 for line in lines)
    best = [line.slope / line.model for line in lines if line.transport == "flashinfer_nvlink"]
    assert best
    assert max(best) < 1.15  # what the project takes for close to the floor


def write(file: Path, *lines: str) -> Path:
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize(
    "text",
    [
        "model,tokens,us\ndemo,abc,5\n",
        "model,tokens,us,ranks\ndemo,0,5,2\n",
        "transport,rows,hidden,tokens,us,captured,wire_bytes,floor_us\n"
        + "".join(f"local,plain,2048,{count},9,True,0,0.0\n" for count in (1, 16, 128)),
    ],
    ids=["no number", "no tokens", "one rank"],
)
def test_a_file_of_other_cells_is_refused(tmp_path, monkeypatch, capsys, text):
    file = tmp_path / "times.csv"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["scaling", "--models", "qwen3-30b-a3b", "--measured", str(file)])
    with pytest.raises(SystemExit) as end:
        scaling.main()
    assert end.value.code == 2
    assert "times.csv holds no times of two ranks or more" in capsys.readouterr().err


def test_ranks_weights_and_rows_of_a_measured_line_are_its_own(tmp_path):
    file = write(
        tmp_path / "layer.csv",
        "model,ranks,tokens,name,weights,rows,us",
        "qwen3-30b-a3b,2,128,ours,fp8,bf16 / bf16,100",
        "qwen3-30b-a3b,2,64,peer,fp8,fp8 / bf16,100",
        "qwen3-30b-a3b,2,16,peer,fp8,fp8 / fp8,100",
        "qwen3-30b-a3b,2,16,ours,bf16,plain,",
        "qwen3-30b-a3b,2,16,ours,mxfp4,plain,100",
    )
    config, expected = load_model_config("qwen3-30b-a3b").moe, []
    for tokens, name, rows, wire in (
        (16, "peer", "fp8 / fp8", Wire(dispatch="fp8_block", combine="fp8")),
        (64, "peer", "fp8 / bf16", Wire(dispatch="fp8_block")),
        (128, "ours", "bf16 / bf16", Wire()),
    ):
        least = floor(config, dataclasses.replace(KINDS["fp8"], wire=wire), 2, tokens)
        cells = ["qwen3-30b-a3b", "2", str(tokens), name, "fp8", rows, "100", str(least)]
        expected.append([*cells, f"{100 / least.in_turn:.2f}", f"{100 / least.overlapped:.2f}"])
    assert scaling.layer_lines(file, 4) == expected


def test_lines_that_name_a_kernel_a_transport_and_a_scheme_are_read_too(tmp_path):
    head = "model,tokens,experts,scheme,rows,all2all,us"
    lines = [
        "qwen3-30b-a3b,128,a,none,plain,b,100",
        "qwen3-30b-a3b,128,a,fp8_block,fp8_block,b,100",
    ]
    found = scaling.layer_lines(write(tmp_path / "layer.csv", head, *lines), 4)
    config = load_model_config("qwen3-30b-a3b").moe
    assert [cells[1:5] for cells in found] == [["4", "128", "a b", "bf16"], ["4", "128", "a b", "fp8"]]
    assert [cells[7] for cells in found] == [str(floor(config, KINDS[name], 4, 128)) for name in ("bf16", "fp8")]


def test_slopes_leave_out_eager_lines_and_use_the_rate_of_the_run(tmp_path):
    head = "transport,rows,hidden,tokens,us,captured,wire_bytes,floor_us,raw_us"
    one = [f"nvlink_p2p,plain,256,{tokens},{10 + 2 * tokens},True,1000,10," for tokens in (100, 1, 10)]
    eager = [f"torch_a2a,plain,256,{tokens},{500},False,1000,10," for tokens in (1, 10, 100)]
    (found,) = scaling.slopes(write(tmp_path / "a2a.csv", head, *one, *eager), 4)
    assert (found.fixed, found.slope) == (12, pytest.approx(2))
    config = MoEConfig(hidden_size=256, intermediate_size=1, num_experts=all2all.EXPERTS, top_k=all2all.TOP_K)
    assert found.model == pytest.approx(sum(deduplicated(config, 4, 4).bytes(config, Wire())) / 100)  # 1000 / 10 us


def test_a_file_without_a_column_or_none_is_refused(tmp_path):
    for text in ("model,us\na,1", "model,tokens,us"):
        with pytest.raises(ConfigError, match="has no column"):
            scaling.layer_lines(write(tmp_path / "broken.csv", text), 4)
    with pytest.raises(ConfigError, match=r"none\.csv does not exist"):
        scaling.layer_lines(tmp_path / "none.csv", 4)


# --- the command ---------------------------------------------------------------------------------------------------


def run(monkeypatch, *words: object) -> list[dict[str, str]]:
    """Lines of the CSV that the command writes to the last of `words`."""
    monkeypatch.setattr(sys, "argv", ["scaling", *map(str, words)])
    scaling.main()
    with Path(words[-1]).open(newline="") as text:
        return list(csv.DictReader(text))


def test_command_prints_tables_and_writes_files(tmp_path, monkeypatch, capsys):
    picture = tmp_path / "scaling.png"
    words = ["--models", "qwen3-30b-a3b", "--ranks", 1, 4, "--ep", "--tokens", 128, "--totals", 64]
    files = [DOCS / name for name in ("layer-h200.csv", "all2all-h200.csv")]
    lines = run(monkeypatch, *words, "--measured", *files, "--plot", picture, "--csv", tmp_path / "scaling.csv")
    printed = capsys.readouterr().out
    config = load_model_config("qwen3-30b-a3b").moe
    for kind in KINDS.values():
        for ranks, tokens in ((1, 128), (4, 128), (1, 64), (4, 16)):
            assert str(floor(config, kind, ranks, tokens)) in printed
    assert "flashinfer_mega_bf16" in printed
    assert [(line["weights"], line["ranks"], float(line["tokens"]), line["all2all"]) for line in lines] == [
        (weights, ranks, tokens, "flat")
        for weights in ("bf16", "fp8")
        for ranks, both in (("1", (64, 128)), ("4", (16, 128)))
        for tokens in both
    ]
    for line in lines:
        parts = [float(line[name]) for name in ("weights_us", "products_us", "out_us", "back_us")]
        assert float(line["in_turn_us"]) == pytest.approx(max(parts[:2]) + sum(parts[2:]))
    assert picture.stat().st_size > 0


def test_command_answers_for_320_ranks_in_two_levels(tmp_path, monkeypatch, capsys):
    words = ["--models", "deepseek-v3", "--ranks", 8, "--ep", 16, 320, "--tokens", 128, "--totals", 64]
    lines = run(monkeypatch, *words, "--csv", tmp_path / "scaling.csv")
    printed = capsys.readouterr().out
    assert "320 + 64" in printed
    config = load_model_config("deepseek-v3").moe
    (line,) = (one for one in lines if (one["ranks"], one["all2all"], one["weights"]) == ("320", "two_level", "fp8"))
    rows, row = two_level(config, 320, 8, 64), sum(row_bytes(config, KINDS["fp8"].wire, 8))
    assert line["redundant"] == "64"
    assert float(line["nvlink_bytes"]) == pytest.approx(128 * rows.near * row)
    assert float(line["nic_bytes"]) == pytest.approx(128 * rows.far * row)
    flat, two = (
        floor(config, KINDS["fp8"], 320, 128, way=way, redundant=64).in_turn for way in (deduplicated, two_level)
    )
    assert f"{flat:.0f} / {two:.0f}" in printed
    assert {one["ranks"] for one in lines} == {"8", "16", "320"}
    assert [one["all2all"] for one in lines if one["ranks"] == "8"] == ["flat"] * 4
    fixed = run(monkeypatch, *words, "--redundant", 0, "--csv", tmp_path / "fixed.csv")
    assert {one["redundant"] for one in fixed} == {"0"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ep", "12"], "per_host=8 must divide ranks=12 or be larger"),
        (["--redundant", "-1"], "--redundant: must be an integer of at least 0, got '-1'"),
        (["--ranks", "2", "--ep", "--redundant", "999"], "num_redundant=999"),
    ],
)
def test_command_refuses_groups_that_cannot_be(words, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling", "--models", "deepseek-v3", *words])
    with pytest.raises(SystemExit) as end:
        scaling.main()
    assert end.value.code == 2
    assert says in capsys.readouterr().err
