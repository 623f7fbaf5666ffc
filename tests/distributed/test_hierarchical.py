"""`hierarchical` on ranks that stand for several nodes, and what it sends between them."""

import pytest
import torch

from ep_moe.all2all.hierarchical import HierarchicalDispatcher
from ep_moe.testing import check_dispatcher, distributed

BF16 = torch.bfloat16


@distributed(4, 8, deadline_s=120)
@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_contract(ranks_per_node, world_size):
    check_dispatcher(HierarchicalDispatcher, top_ks=(1, 3), dtypes=(BF16,), ranks_per_node=ranks_per_node)
