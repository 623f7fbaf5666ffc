"""A group of ranks that is not the job's first ones, without ranks."""

import pytest
import torch

from ep_moe import InputError
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup


def test_a_problem_is_told_by_the_rank_that_has_it(monkeypatch):
    recorder, asked = FlightRecorder(), []

    def share(text, *, owner, group):
        asked.append((owner, group))
        return "x is wrong"

    monkeypatch.setattr(recorder, "share", share)
    monkeypatch.setattr(RankGroup, "exchange", lambda self, own: [own.tolist(), [1, *own.tolist()[1:]]])
    with pytest.raises(InputError, match=r"^rank 6: x is wrong$"):
        RankGroup(None, (4, 6), 0, recorder).agree([0], None, torch.device("cpu"))
    assert asked == [(6, (4, 6))]
