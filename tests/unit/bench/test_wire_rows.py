"""Test the counts of rows on the wire and of experts touched, by enumeration and by simulation with expert maps."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_moe import ConfigError, ExpertMap, MoEConfig
from ep_moe.bench import all2all
from ep_moe.bench.floors import KINDS, experts_touched, floor
from ep_moe.bench.wire_rows import WAYS, deduplicated, filling, gathered, per_route, reached, remote_ranks, row_bytes
from ep_moe.config import Wire, load_model_config
from ep_moe.types import PhysicalIds, PhysicalRouting
from tests.fixtures.scaling_model import config_of

SMALL = [(6, 2, 2), (8, 3, 4), (7, 3, 4), (9, 2, 4), (5, 4, 4), (6, 1, 6), (5, 5, 2)]  # E, K, R


def hit(experts: int, held: int, top_k: int) -> float:
    """Return the probability that a token has one of `held` experts, in closed form."""
    return 1 - math.comb(experts - held, top_k) / math.comb(experts, top_k)


def owners(experts: int, ranks: int) -> torch.Tensor:
    """Return the rank of each expert, [E]."""
    held = ExpertMap.linear(experts, ranks)
    return torch.tensor([held.primary_owner(expert) for expert in range(experts)])


def wanted(ids: torch.Tensor, owner: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return which ranks own an expert of each token, bool [T, R]. ids: logical, [T, K]."""
    found = torch.zeros(len(ids), ranks, dtype=torch.bool)
    return found.scatter_(1, owner[ids], True)


# --- exactly, over all choices of few experts ----------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "top_k", "ranks"), SMALL)
def test_rows_are_the_mean_over_all_choices(experts, top_k, ranks):
    ids = torch.tensor(list(itertools.combinations(range(experts), top_k)))
    reached = wanted(ids, owners(experts, ranks), ranks).double().mean(0)  # [R], the same for any sender
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
    """Replicas of an expert share its work.

    With two ranks and two replicas of two experts, a rank holds both experts and gets half of the routes of each.
    """
    config = config_of(2, 1)
    one, two = floor(config, KINDS["bf16"], 2, 50), floor(config, KINDS["bf16"], 2, 50, redundant=2)
    assert two.products == pytest.approx(one.products)
    assert two.weights == pytest.approx(2 * one.weights, rel=1e-6)
    few = floor(config, KINDS["bf16"], 2, 0.5, redundant=2)  # one token over both ranks together
    assert few.weights == pytest.approx(floor(config, KINDS["bf16"], 2, 0.5).weights)  # one expert is read, on one rank


@pytest.mark.parametrize(("ranks", "per_host", "field"), [(0, 8, "ranks"), (12, 8, "per_host"), (4, 0, "per_host")])
def test_ranks_that_cannot_be_are_refused(ranks, per_host, field):
    for way in {*WAYS.values()}:
        with pytest.raises(ConfigError, match=f"^{field}"):
            way(config_of(64, 2), ranks, per_host)


# --- by simulation, at real sizes ----------------------------------------------------------------------------------


def bernstein(variance: float, most: float, draws: int) -> float:
    """Return how far the mean of independent draws in [0, most] may be from its expectation, except in one case in 1e9.

    This is Bernstein's inequality.
    """
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
    """Under uniform routing, the closed form gives as many ranks and experts as a simulation.

    Whether a token reaches rank r, and whether expert e is touched, are negatively associated over r and over e
    (choices
    without replacement; Joag-Dev and Proschan, 1983). The variance of their number is therefore at most sum p (1 - p).
    """
    ranks = min(ranks, experts)
    draws = 2000 // tokens
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(draws * tokens, experts, generator=generator).topk(top_k).indices
    owner = owners(experts, ranks)
    even = ids[: len(ids) // ranks * ranks]  # the same number of tokens from each sender
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
    """The closed form of wire bytes agrees with `bench.all2all` within four standard errors of the mean over draws."""
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
