"""Which calls of `nvlink_p2p` go by packets."""

from __future__ import annotations

import pytest
import torch

from ep_moe.all2all.base import DispatchShape
from ep_moe.all2all.nvlink_p2p.buffers import pieces
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher


@pytest.mark.parametrize(("hidden", "ranks", "most"), [(2048, 2, 64), (2048, 4, 64), (7168, 4, 18), (2048, 8, 32)])
def test_few_tokens_go_by_packets(hidden, ranks, most):
    assert NVLinkP2PDispatcher._low_latency_tokens(dispatch_shape(hidden, ranks)) == most


@pytest.mark.parametrize("hidden", [8, 64, 1000, 1024, 1032, 7168, 1 << 17, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_all_programs_of_a_call_by_packets_run_at_once(hidden, ranks):
    """They wait for those of other ranks, which must not wait for room."""
    most = NVLinkP2PDispatcher._low_latency_tokens(dispatch_shape(hidden, ranks))
    assert most * ranks * pieces(2 * hidden) <= 512
    assert pieces(2 * hidden) * 512 * 4 >= 2 * hidden


@pytest.mark.parametrize(("hidden", "calls"), [(1024, 2), (8192, 3)])
def test_answers_that_come_by_copies_take_a_third_call(hidden, calls):
    """64 tokens are 1 MiB of the wider rows, which copy engines carry beside other work."""
    assert NVLinkP2PDispatcher.calls_in_parts(dispatch_shape(hidden, 8)) == calls


def dispatch_shape(hidden: int, ranks: int) -> DispatchShape:
    return DispatchShape(
        hidden_size=hidden, top_k=2, slots_per_rank=4, num_ranks=ranks, dtype=torch.bfloat16, max_tokens=64
    )
