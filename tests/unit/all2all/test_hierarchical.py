"""Ids of the `hierarchical` transports, whose ranks may not follow their nodes."""

import pytest
import torch

from ep_moe.all2all.hierarchical import NodeMajorIds
from ep_moe.parallel.rank_group import Levels, RankGroup


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_ranks_that_do_not_follow_their_nodes(dtype):
    """Those of no expert, on either side, stay what they are: all ranks refuse them later, together."""
    alone = RankGroup.alone()
    node_major = NodeMajorIds(Levels(alone, alone, (0, 2, 1, 3)), slots_per_rank=2)
    ids = torch.tensor([[-1, 0, 1, 2, 3], [4, 5, 6, 7, 8], [9, 100, -7, 2**31 - 1, -(2**31)]], dtype=dtype)
    found = node_major.of(ids)
    assert found.dtype == dtype
    assert found.tolist() == [[-1, 0, 1, 4, 5], [2, 3, 6, 7, 8], [9, 100, -7, 2**31 - 1, -(2**31)]]
