"""Test, without ranks, how experts that were averaged over ranks are told apart from independent ones."""

from types import SimpleNamespace as Some

import pytest
import torch

from ep_moe import ExpertMap
from ep_moe.execution.similarity import Similarity, _pairs, _sample, excess
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup

SLOTS, NUMBERS = 4, 256
LINEAR = ExpertMap.linear(2 * SLOTS, 2)


def drawn(seed):
    return torch.randn(SLOTS, NUMBERS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_one_dense_layer(seed):
    """Return experts that began as copies of one layer."""
    return drawn(9)[:1] + 0.3 * drawn(seed)


@pytest.mark.parametrize(
    ("first", "other", "expected"),
    [
        (drawn(0), drawn(1), 0.0),
        (drawn(0), drawn(0), 1.0),
        (drawn(0) + 0.5 * drawn(1), drawn(0) + 0.5 * drawn(2), 0.8),  # averaged, and then trained separately
        (of_one_dense_layer(0), of_one_dense_layer(1), 0.0),
        (drawn(0), drawn(0).roll(2, 0), 0.0),
    ],
    ids=["independent", "averaged", "trained since", "of one dense layer", "in other slots"],
)
def test_pairs_of_slots_that_are_more_alike_than_others(first, other, expected):
    assert excess((first, other), LINEAR, (0, 1)) == pytest.approx(expected, abs=0.16)


def test_slots_of_one_expert_and_empty_slots_are_left_out():
    alike = torch.cat([drawn(0)[:2], drawn(1)[2:]])
    copies = ExpertMap.from_ranks([[0, 1, 2, 3], [0, 1, 4, 5]], 6)
    empty = ExpertMap.from_ranks([[0, 1, 2, 3], [4, -1, -1, 5]], 6)
    assert excess((drawn(0), alike), copies, (0, 1)) == pytest.approx(0, abs=0.16)
    assert excess((drawn(0), alike), empty, (0, 1)) == pytest.approx(0.5, abs=0.16)
    assert excess((drawn(0), drawn(0)), ExpertMap.from_ranks([range(4), range(4)], 4), (0, 1)) == 0


def test_one_slot_is_compared_alone():
    one = ExpertMap.linear(2, 2)
    assert excess((drawn(0)[:1], drawn(0)[:1]), one, (0, 1)) == pytest.approx(1)
    assert excess((drawn(0)[:1, :8], drawn(0)[:1, :8]), one, (0, 1)) == 0, "too few numbers to tell"


def test_an_average_of_some_ranks_alone_is_looked_for():
    assert _pairs(RankGroup(None, (4, 6, 8, 9), 0, FlightRecorder())) == [(0, 1), (0, 2), (1, 2), (0, 3), (2, 3)]


class Experts:
    """A stand-in for two ranks' experts with given weights."""

    def __init__(self, first, other):
        self.updates, self.has_expert_parameters, self.sharded, self.is_meta, self.num_slots = (
            0,
            True,
            False,
            False,
            SLOTS,
        )
        self.local_experts, self.held = LINEAR.local(0), (first, other)

    def stored_tensors(self):
        return {"w13": self.held[0].float(), "w13_bias": torch.zeros(SLOTS, 1)}

    def exchange(self, sample):
        flat = [held.float().view(torch.int32).flatten().tolist() for held in self.held]
        assert sample.tolist() == flat[0], "all of this rank's numbers, where they are few"
        return flat


def compared(monkeypatch, experts):
    monkeypatch.setattr(RankGroup, "exchange", lambda _, sample: experts.exchange(sample))
    context = Some(device=torch.device("cpu"))
    layer = Some(name="moe0", context=context, expert_weights=experts, placement=Some(expert_map=LINEAR))
    return layer, RankGroup(None, (4, 6), 0, FlightRecorder())


def test_what_became_alike_since_is_named_by_the_ranks_of_the_job(monkeypatch):
    experts = Experts(drawn(0), drawn(1))
    layer, rank_group = compared(monkeypatch, experts)
    similarity = Similarity()
    similarity.begin(layer, rank_group, "first call")
    assert similarity.problem(layer, rank_group, "backward") is None
    mean = (drawn(0) + drawn(1)) / 2
    experts.held = mean + 0.01 * drawn(2), mean + 0.01 * drawn(3)
    found = similarity.problem(layer, rank_group, "backward")
    assert found.startswith("moe0: the experts of rank 6 became similar to those of rank 4 (cosine ")
    assert found == similarity.problem(layer, rank_group, "backward"), "until weights are loaded"
    experts.updates += 1
    assert similarity.problem(layer, rank_group, "backward") is None, "written on purpose, as copies to begin with"
    assert similarity.problem(layer, rank_group, "backward") is None


def test_experts_that_were_sharded_since_are_not_compared(monkeypatch):
    experts = Experts(drawn(0), drawn(1))
    layer, rank_group = compared(monkeypatch, experts)
    similarity = Similarity()
    similarity.begin(layer, rank_group, "first call")
    experts.held, experts.sharded = (drawn(2), drawn(2)), True
    assert similarity.problem(layer, rank_group, "backward") is None


def test_numbers_are_taken_from_all_of_a_matrix():
    """The sample covers all of a matrix, because its first rows may be a part that does not learn."""
    w13 = torch.arange(2 * 4096, dtype=torch.float32).view(2, 64, 64)
    weights = Some(stored_tensors=lambda: {"w13": w13}, is_meta=False, num_slots=2, local_experts=(0, -1))
    found = _sample(weights, 3, torch.device("cpu"))
    assert found.shape[0] == 3
    assert found[0].max() > 4000
    assert found[0].numel() <= 1024 // 3
    assert not found[1:].any(), "an empty slot, and one that another rank alone has"
    weights.is_meta = True
    assert torch.equal(_sample(weights, 3, torch.device("cpu")), torch.zeros_like(found))
