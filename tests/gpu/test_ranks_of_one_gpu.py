"""`nvlink_p2p` between ranks that share one GPU, to test their memory protocol without a second GPU.

The GPU serves ranks in turns. A wait for a peer takes a turn of some milliseconds, and no link is used, so times mean
nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from ep_moe.all2all.nvlink_p2p import dispatcher
from ep_moe.parallel.local_launch import run_local_ranks
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.testing import rank_device
from tests.fixtures import p2p_bodies
from tests.fixtures.captured_layer import need

DEADLINE_S = 100.0  # less than pytest's own
GPU = torch.device("cuda", 0)


class SharedMemory:
    """A `PeerMemory` over CUDA IPC handles."""

    def __init__(self, rank_group: RankGroup, device: torch.device, size: int) -> None:
        self.local = torch.zeros(size, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        handles = [None] * rank_group.size
        dist.all_gather_object(handles, reduce_tensor(self.local), group=rank_group.group)
        opened = [self.local if rank == rank_group.rank else make(*given) for rank, (make, given) in enumerate(handles)]
        self.peers = opened
        self.addresses = torch.tensor([peer.data_ptr() for peer in opened], device=device)
        dist.barrier(rank_group.group)


def rank(body: Callable[..., None], given: dict) -> None:
    """Run a test's body on each rank, with this GPU for all."""
    dispatcher.make_memory = SharedMemory
    dispatcher.NVLinkP2PDispatcher.unsupported_platform = classmethod(lambda cls, layout: None)
    for module in list(sys.modules.values()):
        if getattr(module, "rank_device", None) is rank_device and module.__name__ != __name__:
            module.rank_device = lambda: GPU
    body(**given)
    torch.cuda.synchronize(GPU)
    dist.barrier()


def run(world: int, body: Callable[..., None], **given: object) -> None:
    run_local_ranks(f"{__name__}:rank", world, {"body": body, "given": given}, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("pair", ["bf16", "fp8", "answers given"])
@pytest.mark.parametrize("bound", [40, 200], ids=["by packets", "by flags"])
@pytest.mark.parametrize("world", [2, 4])
def test_automatic_graphs(world, bound, pair):
    need(pair)  # skip here, because a forked rank that skips counts as failed
    run(world, p2p_bodies.other_rows_routes_tokens_and_maps, bound=bound, pair=pair, world_size=world)


def test_automatic_graphs_with_shared_experts():
    run(2, p2p_bodies.shared_experts, world_size=2)


def test_automatic_graphs_beside_other_streams_and_captures():
    run(2, p2p_bodies.other_streams_and_a_capture_around_it, world_size=2)


@pytest.mark.parametrize("tokens", [1, 24, 150, 1500], ids=["one", "by packets", "by flags", "many"])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_kernels_that_start_early(kind, tokens):
    run(2, p2p_bodies.kernels_that_start_early, kind=kind, tokens=tokens, world_size=2)


@pytest.mark.parametrize("low_latency_bytes", [0, 1 << 18], ids=["by flags", "by packets"])
def test_automatic_graphs_over_buffers_that_grow(low_latency_bytes):
    body = p2p_bodies.replays_beside_calls_that_run_and_that_grow
    run(2, body, low_latency_bytes=low_latency_bytes, pair="bf16", world_size=2)
