"""The host of the store is lost: survivors get a PeerTimeout that names it. A rank with the store may end first."""

import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from ep_moe import EPContext, MoEConfig, MoELayer, PeerTimeout
from ep_moe.parallel.answering_store import AnsweringStore, StoreLost, holder, holder_of_port
from ep_moe.parallel.consensus import StoreConsensus
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.nodes import NodeLayout
from ep_moe.testing import distributed, rank_device

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=3)
DEADLINE_S = 3.0  # heartbeats come every 0.375 s
HELD = (
    r"the process of rank 0 on host node 0 \(ranks 0, 1\) held it, so this process, its host or the way to it is lost\."
)


def store_in_rank_0() -> None:
    """Begin torch.distributed anew, as torchrun does without an agent that holds the store."""
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
    """Until a heartbeat has missed the store."""
    limit = time.monotonic() + 30
    while context.flight_recorder._watched:
        assert time.monotonic() < limit, "the store still answers"
        time.sleep(0.05)


@distributed(4, deadline_s=90, expect_dead=[0, 1])
@pytest.mark.parametrize("stage", ["within a call", "between calls", "frozen"])
def test_the_host_of_the_store_is_named(stage, world_size):
    """Whether its processes end, or answer no more as those of a host without power."""
    context, layer = on_two_nodes()
    if dist.get_rank() < 2:
        if stage == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        if stage != "within a call":
            os._exit(7)
        layer.experts.compute = lambda *_: os._exit(7)
    if stage == "between calls":
        until_unwatched(context)
        context.flight_recorder.check()  # it is no failure before something waits for that host
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
        context.consensus.same("later", {})
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


# --- without ranks ----------------------------------------------------------------------------------------------------


def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(of: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", of.port, is_master=False, wait_for_workers=False)


def test_a_device_that_waits_is_freed_without_the_store():
    """As NCCL does: nothing but the watch ends the wait."""
    held, freed = server(), threading.Event()
    nodes = NodeLayout.counted([0, 1], 1).with_store(["rank", ""])
    flight_recorder = FlightRecorder(client(held), [0, 1], 1, deadline_s=1.0, abort=freed.set, nodes=nodes)
    try:
        del held
        sentence = (
            r"^rank 1 lost its peers in combine \(step 1\): no progress for 1 s\. The store of the job is gone: the "
            r"process of rank 0 on host node 0 \(rank 0\) held it"
        )
        with pytest.raises(PeerTimeout, match=sentence), flight_recorder.step("combine"):
            assert freed.wait(5)
    finally:
        flight_recorder.close()


def test_every_wait_for_a_lost_store_raises_the_same():
    held = server()
    recorder = FlightRecorder(client(held), [0, 1], 1, deadline_s=2.0)
    consensus = StoreConsensus(client(held), [0, 1], 1, 2.0)
    at = rf"The store of the job is gone: it was at 127\.0\.0\.1:{held.port}\.$"
    del held
    try:
        for call in (
            lambda: recorder.meet("x", [0, 1], "capture"),
            lambda: recorder.share(None, owner=0, group=(0, 1)),
            lambda: consensus.same("x", {}),
            lambda: consensus.healthy("x", None),
            lambda: consensus.share("x", dict),
            lambda: consensus.first("x", "y"),
        ):
            with pytest.raises(PeerTimeout, match=at):
                call()
        recorder.refuse("no rank hears this")
    finally:
        recorder.close()


class Slow:
    """A store that answers when it is let."""

    def __init__(self):
        self.let = threading.Event()

    def check(self, keys):
        self.let.wait()
        return True


def test_a_store_that_was_slow_is_asked_again():
    slow, before = Slow(), set(threading.enumerate())
    store = AnsweringStore(slow, 0.2)
    for _ in range(2):
        with pytest.raises(StoreLost, match=r"^The store of the job does not answer\.$"):
            store.has("x")
    (thread,) = set(threading.enumerate()) - before
    slow.let.set()
    assert store.has("x")
    assert set(threading.enumerate()) - before == {thread}
    del store
    thread.join(5)
    assert not thread.is_alive(), "it ends with the store"


def test_a_key_that_does_not_come_is_no_lost_store():
    held = server()
    store = AnsweringStore(client(held), 5.0)
    assert not store.wait(["x"], 0.2)
    store.set("x", "y")
    assert store.wait(["x"], 0.2)
    assert store.get("x") == store.first("x", "z") == b"y"


def test_the_process_that_holds_a_store_is_found():
    held = server()
    assert holder(dist.PrefixStore("a", dist.PrefixStore("b", held))) == holder(client(held)) == "rank"
    assert holder(dist.HashStore()) == ""
    port = held.port
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.closerange(3, writer)  # as after exec: the server's socket is its parent's alone
            os.write(writer, holder_of_port(port).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert os.read(reader, 100) == b"agent"
    del held
    assert holder_of_port(port) == ""


@pytest.mark.parametrize(
    ("hosts", "holders", "words"),
    [
        ("aabb", ["", "", "", ""], ""),
        ("aabb", ["rank", "", "", ""], "the process of rank 0 on host a (ranks 0, 1) held it, so this process"),
        ("aabb", ["", "", "agent", "agent"], "the agent that started ranks 2, 3 on host b held it, so this process"),
        ("aaaa", ["rank", "", "", ""], "the process of rank 0 held it, so this process is lost"),
        ("aaaa", ["agent"] * 4, "the agent that started ranks 0, 1, 2, 3 held it, so this process is lost"),
    ],
    ids=str,
)
def test_what_holds_the_store_in_words(hosts, holders, words):
    nodes = NodeLayout.found(range(4), [(host, host) for host in hosts])
    assert re.match(re.escape(words), nodes.with_store(holders).store)
    assert bool(words) == bool(nodes.with_store(holders).store)
