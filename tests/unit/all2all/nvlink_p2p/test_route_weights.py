"""Test how the gradients of route weights return to the tokens' ranks, in Triton and in torch.

One process runs all ranks in turn.
"""

from __future__ import annotations

import pytest
import torch

from ep_moe.all2all.base import DispatchShape
from ep_moe.all2all.nvlink_p2p import reference
from tests.fixtures.fp8_block_kernels import DEVICE

pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe.all2all.nvlink_p2p import route_weights
from tests.fixtures.p2p_kernels import workspaces

STALE = 7 << 32 | 5
BOUND = 37


@pytest.mark.parametrize("form", ["torch", "triton"])
@pytest.mark.parametrize(("ranks", "top_k"), [(2, 8), (3, 3), (4, 1)])
def test_each_route_gets_the_number_of_its_rank(ranks, top_k, form):
    """Each route gets the number that its expert's rank sent; nothing else is written.

    Packets of an earlier call are ignored.
    """
    device = DEVICE if form == "triton" else "cpu"
    functions = route_weights if form == "triton" else reference
    shape = DispatchShape(
        hidden_size=128, top_k=top_k, slots_per_rank=3, num_ranks=ranks, dtype=torch.bfloat16, max_tokens=BOUND + 2
    )
    generator = torch.Generator().manual_seed(ranks)
    ids = torch.randint(-1, shape.num_physical, (ranks, BOUND, top_k), generator=generator, dtype=torch.int32)
    tokens = [BOUND, 0, 5, 9][:ranks]
    for rank, count in enumerate(tokens):
        ids[rank, count:] = -1
    made = workspaces(shape, device)
    for rank, workspace in enumerate(made):
        workspace.sequence[:1] = -(2**31) + 3
        workspace.local_tensors["weight_packets"].fill_(STALE)
        workspace.local_tensors["ids"][: ranks * BOUND] = ids.view(-1, top_k).to(device)
        workspace.sent_ids[:BOUND] = ids[rank].to(device)
        workspace.sent_ids[BOUND:] = 0  # left by an earlier, larger call
    numbers = torch.randn(ranks, ranks * BOUND, top_k, generator=generator)
    for workspace, own in zip(made, numbers, strict=True):
        functions.send_route_values(workspace, own.to(device), BOUND)
    for rank, (workspace, count) in enumerate(zip(made, tokens, strict=True)):
        packets = workspace.local_tensors["weight_packets"]
        untouched = torch.ones(BOUND + 2, top_k, dtype=torch.bool)
        untouched[:BOUND] = ids[rank] < 0
        assert (packets.cpu()[untouched] == STALE).all()
        out = torch.full((count, top_k), torch.nan, device=device)
        functions.receive_route_values(workspace, out)
        owner = (ids[rank, :count].long() // shape.slots_per_rank).clamp_min(0)
        rows = rank * BOUND + torch.arange(count).unsqueeze(1).expand(-1, top_k)
        expected = numbers[owner, rows, torch.arange(top_k)].where(ids[rank, :count] >= 0, 0.0)
        assert torch.equal(out.cpu(), expected)
