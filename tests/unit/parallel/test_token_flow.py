"""Rows of tp ranks that are not equal bit for bit, without ranks."""

import pytest
import torch

from ep_moe.parallel import token_flow
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup, checksum
from ep_moe.parallel.token_flow import RowComparison

X = torch.ones(2, 4)


@pytest.fixture
def comparison():
    return RowComparison(RankGroup(None, (4, 5, 6), 0, FlightRecorder()))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_largest_difference_of_all_ranks_is_told_once(comparison, monkeypatch, order):
    apart = [torch.tensor([0.0, 1e-3]), torch.tensor([2e-5, 0.0])]
    monkeypatch.setattr(token_flow, "_distances", lambda rows, group: [apart[at] for at in order])
    with pytest.warns(UserWarning, match=r"tp ranks 4, 5, 6 are not equal .* by up to 1\.0e-03 of a row's norm"):
        assert comparison.problem({"x": X}) is None
    assert comparison.problem({"x": X}) is None, "without a further warning"


def test_the_pair_of_ranks_that_differs_is_named(comparison, monkeypatch):
    monkeypatch.setattr(token_flow, "_distances", lambda rows, group: [torch.zeros(2), torch.tensor([0.0, torch.inf])])
    assert "x on rank 5 differs from that on rank 6 in 1 of 2 rows" in comparison.problem({"x": X})


def test_more_tokens_than_before_are_weighed_as_by_a_new_one(comparison):
    """The factors of few tokens are kept, and made anew for many."""
    for tokens in (1, 40, 3, 700):
        passed = {"x": torch.randn(tokens, 24, generator=torch.Generator().manual_seed(tokens))}
        new = RowComparison(RankGroup(None, (4, 5, 6), 0, FlightRecorder()))
        kept, fresh = (one.facts(passed, torch.device("cpu"), compared=True) for one in (comparison, new))
        assert [int(number) for number in kept] == [int(number) for number in fresh]
        assert int(kept[1]) == int(checksum(passed["x"], torch.device("cpu")))
