"""What a recorder makes of the counts of ranks that see the same rows."""

from types import SimpleNamespace

import torch

from ep_moe import ExpertMap, Placement
from ep_moe.eplb.load import LoadRecorder
from ep_moe.parallel.rank_group import RankGroup


def test_members_of_an_etp_group_count_a_row_once():
    placement = Placement(ExpertMap.linear(4, 1))
    weights = SimpleNamespace(etp=SimpleNamespace(size=2), config=SimpleNamespace(top_k=2))
    layer = SimpleNamespace(name="moe", placement=placement, expert_weights=weights)
    recorder = LoadRecorder([layer], RankGroup.alone(), steps=2)
    placement.expert_load += torch.tensor([4, 0, 2, 2])  # of both members together
    recorder.step()
    trace = recorder.finish()
    assert trace.counts.tolist() == [[[2, 0, 1, 1]]]
    assert trace.tokens.tolist() == [2], "routes by the experts of a token"
