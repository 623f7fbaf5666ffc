"""Test how ranks compare their experts, on one rank."""

from types import SimpleNamespace as Some

import pytest
import torch

from ep_moe import ExpertMap, InputError
from ep_moe.execution.expert_comparison import compare_experts
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup


@pytest.mark.parametrize(
    ("slots", "facts", "sentence"),
    [
        ([[0, 1], [2, 0]], [[11, 1, 0, 12, 0, 0], [13, 0, 0, 11, 2, 0]], "copies of expert 0 on ranks 4, 6 differ"),
        (
            [[0, 1], [2, 0]],
            [[11, 1, 15, 12, 0, 0], [13, 0, 0, 11, 1, 7]],
            "some parameters of expert 0 have requires_grad=True on one of the ranks 4, 6",
        ),
        (
            [[0, 1], [2, 3]],
            [[11, 0, 0, 12, 0, 0], [11, 0, 0, 12, 0, 0]],
            "the experts of rank 6 have the values of rank 4's experts",
        ),
    ],
    ids=["copies", "frozen", "broadcast"],
)
def test_what_should_or_should_not_be_equal_is_named_by_the_ranks_of_the_job(slots, facts, sentence, monkeypatch):
    """Experts that should be equal, or should differ, raise an error that names the ranks of the job.

    facts: for each rank and slot, two checksums, of a sample and of a replica, and which parameters learn.
    """
    expert_map = ExpertMap.from_ranks(slots, 1 + max(map(max, slots)))
    weights = Some(sharded=False, is_meta=False, local_experts=expert_map.local(0))
    weights.stored_tensors = lambda: {"w13": torch.zeros(2, 1, 1)}
    layer = Some(name="moe0", expert_weights=weights, placement=Some(expert_map=expert_map))
    monkeypatch.setattr(RankGroup, "exchange", lambda *_: facts)
    with pytest.raises(InputError, match=f"^moe0: {sentence}"):
        compare_experts(layer, RankGroup(None, (4, 6), 0, FlightRecorder()), torch.device("cpu"), "first call")
