"""Test the job's store, which a separate thread calls, and the error if the store is lost."""

import os
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

from ep_moe import PeerTimeout
from ep_moe.parallel import timeout_store
from ep_moe.parallel.consensus import StoreConsensus
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.nodes import NodeLayout
from ep_moe.parallel.timeout_store import StoreLost, TimeoutStore, holder, holder_of_port


def test_a_store_answers_where_its_thread_is_gone():
    """A store answers without its thread, as in a forked process, which has only the thread that forked."""
    store = TimeoutStore(HashStore(), 5.0, "this process")
    store.set("key", "value")
    store._calls.put(None)
    store._thread.join()
    assert store.get("key") == b"value"


def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(of: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", of.port, is_master=False, wait_for_workers=False)


def test_a_device_that_waits_is_freed_without_the_store():
    """A waiting device is freed without the store. As with NCCL, only the watchdog can end its wait."""
    held, freed = server(), threading.Event()
    nodes = NodeLayout.from_ranks_per_node([0, 1], 1).with_store(["rank", ""])
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
            lambda: recorder.monitored_barrier("x", [0, 1], "capture"),
            lambda: recorder.broadcast_text(None, owner=0, group=(0, 1)),
            lambda: consensus.require_equal("x", {}),
            lambda: consensus.raise_on_all_ranks("x", None),
            lambda: consensus.compute_on_owner("x", dict),
            lambda: consensus.first("x", "y"),
        ):
            with pytest.raises(PeerTimeout, match=at):
                call()
        recorder.refuse("no rank hears this")
    finally:
        recorder.close()


class Slow:
    """A store that does not answer until the test allows it."""

    def __init__(self):
        self.let = threading.Event()

    def check(self, keys):
        self.let.wait()
        return True


def test_a_store_that_was_slow_is_asked_again():
    slow, before = Slow(), set(threading.enumerate())
    store = TimeoutStore(slow, 0.2)
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


@pytest.mark.parametrize("error", [dist.DistNetworkError, dist.DistStoreError, RuntimeError])
def test_a_store_that_raises_is_lost(error):
    """A store that raises counts as lost, whatever its class of errors.

    A broken connection is not used again, because torch prints a stack for each call.
    """
    asked = []

    def raises(store):
        asked.append(error)
        raise error("no answer")

    store = TimeoutStore(HashStore(), 5.0)
    for _ in range(2):
        with pytest.raises(StoreLost, match=r"^The store of the job is gone\.$"):
            store.ask(raises)
    assert len(asked) == (1 if error is dist.DistNetworkError else 2)


def test_a_key_that_does_not_come_is_no_lost_store():
    held = server()
    store = TimeoutStore(client(held), 5.0)
    assert not store.wait(["x"], 0.2)
    store.set("x", "y")
    assert store.wait(["x"], 0.2)
    assert store.get("x") == store.set_if_absent("x", "z") == b"y"


def test_the_process_that_holds_a_store_is_found():
    held = server()
    assert holder(dist.PrefixStore("a", dist.PrefixStore("b", held))) == holder(client(held)) == "rank"
    assert holder(dist.HashStore()) == ""
    port = held.port
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.closerange(3, writer)  # as after exec: the server's socket belongs to the parent only
            os.write(writer, holder_of_port(port).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert os.read(reader, 100) == b"agent"
    del held
    assert holder_of_port(port) == ""


def test_the_agent_may_be_the_first_process_of_a_container(monkeypatch):
    """torchrun's agent may be process 1 of a container whose command is torchrun. It is then a rank's parent."""
    links = {"/proc/7/fd": {"3": "socket:[5]"}, "/proc/1/fd": {"8": "socket:[77]"}}
    texts = {
        "/proc/net/tcp": "  sl  local_address\n   0: 00000000:1F90 00000000:0000 0A 0 0 0 0 0 77\n",
        "/proc/7/stat": "7 (python) S 1 7",
        "/proc/1/stat": "1 (torchrun) S 0 1",
    }

    class Paths:
        def __init__(self, path):
            self.path = path

        def read_text(self):
            if self.path not in texts:
                raise FileNotFoundError(self.path)
            return texts[self.path]

    @contextmanager
    def scandir(path):
        yield [SimpleNamespace(path=f"{path}/{name}") for name in links[path]]

    def readlink(path):
        folder, _, name = path.rpartition("/")
        return links[folder][name]

    system = SimpleNamespace(getpid=lambda: 7, scandir=scandir, readlink=readlink)
    monkeypatch.setattr(timeout_store, "os", system)
    monkeypatch.setattr(timeout_store, "Path", Paths)
    assert holder_of_port(8080) == "agent"
    assert holder_of_port(8081) == ""
    del texts["/proc/7/stat"]
    assert holder_of_port(8080) == "", "without its parents' numbers, only the process itself is looked at"
