"""The host that holds the store is lost: survivors get a PeerTimeout that names it.

A rank that holds the store may also end normally before the others.
"""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from ep_moe import EPContext, MoEConfig, MoELayer, PeerTimeout
from ep_moe.testing import distributed, rank_device

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=3)
DEADLINE_S = 3.0  # heartbeats come every 0.375 s
HELD = (
    r"the process of rank 0 on host node 0 \(ranks 0, 1\) held it, "
    r"so this process, its host, or the network to it is lost\."
)


def store_in_rank_0() -> None:
    """Restart torch.distributed with the store in rank 0, as torchrun does if no agent holds it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    port = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None]
    kept, port[0] = port[0], None if port[0] is None else port[0].port
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = kept or TCPStore("127.0.0.1", port[0], is_master=False, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))


def on_two_nodes() -> tuple[EPContext, MoELayer]:
    store_in_rank_0()
    context = EPContext.from_groups(device=rank_device(), deadline_s=DEADLINE_S, ranks_per_node=2)
    layer = MoELayer(CONFIG, context, name="block")
    with torch.no_grad():
        layer(torch.ones(4, 16))
    return context, layer


def until_unwatched(context: EPContext) -> None:
    """Wait until a heartbeat has missed the store."""
    limit = time.monotonic() + 30
    while context.flight_recorder._watched:
        assert time.monotonic() < limit, "the store still answers"
        time.sleep(0.05)


@distributed(4, deadline_s=90, expect_dead=[0, 1])
@pytest.mark.parametrize("stage", ["within a call", "between calls", "frozen"])
def test_the_host_of_the_store_is_named(stage, world_size):
    """The error names the host of the store, if its processes end or stop answering as after a power loss."""
    context, layer = on_two_nodes()
    if dist.get_rank() < 2:
        if stage == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        if stage != "within a call":
            os._exit(7)
        layer.experts.compute = lambda *_: os._exit(7)
    if stage == "between calls":
        until_unwatched(context)
        context.flight_recorder.check()  # no failure until something waits for that host
    how = "does not answer" if stage == "frozen" else "is gone"
    sentence = rf"of block \(step \d+\): .* The store of the job {how}: {HELD}$"
    start = time.monotonic()
    with torch.no_grad(), pytest.raises(PeerTimeout, match=sentence) as first:
        layer(torch.ones(4, 16))
    assert time.monotonic() - start < DEADLINE_S + 4
    with torch.no_grad(), pytest.raises(PeerTimeout) as again:
        layer(torch.ones(4, 16))
    assert str(again.value) == str(first.value)
    with pytest.raises(PeerTimeout, match=HELD):
        context.consensus.require_equal("later", {})
    context.destroy()
    assert time.monotonic() - start < 3 * DEADLINE_S + 6


@distributed(4, deadline_s=90, expect_dead=[0, 1])
def test_a_rank_with_the_store_may_end_first(world_size):
    context, _ = on_two_nodes()
    if dist.get_rank() < 2:
        os._exit(0)
    until_unwatched(context)
    assert context.flight_recorder._thread.is_alive()
    context.flight_recorder.check()
    context.destroy()
