"""The way of tokens between the attention view and the expert view: masks."""

import pytest
import torch

from ep_moe import ParallelConfig, RankLayout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.parallel.token_flow import Share, TokenFlow
from ep_moe.types import TokenMask


@pytest.mark.parametrize("sent", [False, True])
def test_etp_ranks_hear_which_rows_are_padding_and_whether_it_is_sent(sent, monkeypatch):
    """Ranks without a mask have tokens alone."""
    layout = RankLayout.from_config(ParallelConfig(dp=2, ep=1, etp=2), world=2, rank=0)
    alone = RankGroup.alone()
    flow = TokenFlow(layout, tp=alone, etp=alone, lockstep=alone)
    mask = TokenMask(torch.tensor([True, False, True]), sent)
    peer = flow.mask(None, torch.zeros(2, 4), Share((0, 2), [2], [2]))
    assert peer is None  # no rank has a mask
    gathered = []

    def gather(codes, call):  # what the peer gave comes behind
        gathered.append(codes)
        return torch.cat(gathered[::-1])

    monkeypatch.setattr(flow, "etp_gather", gather)
    call = Share((0, 3), [3, 2], [3], masked=True)
    flow.mask(None, torch.zeros(2, 4), call)
    found = flow.mask(mask, torch.zeros(3, 4), call)
    assert found.tokens.tolist() == [True, False, True, True, True]
    assert found.sent.tolist() == [True, sent, True, True, True]
