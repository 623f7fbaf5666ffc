"""Test how ranks of `ep-moe doctor --cluster` meet and time transfers, on one rank without a network."""

import threading
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from ep_moe.cli import cluster
from ep_moe.cli.cluster import ClusterReport, LaunchEnvironment
from ep_moe.parallel.nodes import NodeLayout

ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "head", "MASTER_PORT": "5"}
TWO = NodeLayout.from_hosts(range(2), [("a", "a")] * 2)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rank", "more", "serve", "serves"),
    [
        ("0", {}, True, True),
        ("1", {}, True, False),
        ("0", {}, False, False),
        ("0", {"TORCHELASTIC_USE_AGENT_STORE": "True"}, True, False),
        ("0", {"TORCHELASTIC_USE_AGENT_STORE": "False"}, True, True),
    ],
)
def test_rank_0_serves_the_store_unless_the_agent_does(rank, more, serve, serves, monkeypatch):
    """Rank 0 serves the store unless torchrun's agent does.

    A rank waits for the store up to its deadline, and not for all ranks to connect.
    """
    made = []
    monkeypatch.setattr(cluster, "TCPStore", lambda *given, **how: made.append((given, how)) or HashStore())
    LaunchEnvironment.read(ENVIRONMENT | {"RANK": rank} | more).store(7.0, serve=serve)
    assert made == [(("head", 5, None, serves, timedelta(seconds=7)), {"wait_for_workers": False})]


def test_what_an_earlier_attempt_left_in_the_store_is_not_read(monkeypatch):
    """Entries that an earlier attempt left in the store are not read.

    torchrun's agent keeps its store over restarts.
    """
    kept = HashStore()
    monkeypatch.setattr(cluster, "TCPStore", lambda *_, **__: kept)
    first, second = (
        LaunchEnvironment.read(ENVIRONMENT | {"TORCHELASTIC_RESTART_COUNT": count}).store(5.0) for count in "01"
    )
    first.set("facts", "of the first")
    assert not second.check(["facts"])


@pytest.mark.parametrize(
    ("may_bind_gpus", "visible", "gpu"), [(False, 8, 5), (False, 4, 5), (True, 8, 5), (True, 1, 0), (False, 0, None)]
)
def test_a_rank_takes_the_gpu_of_its_local_rank(may_bind_gpus, visible, gpu, monkeypatch):
    """A rank takes the GPU with its local rank, visible or not, unless srun shows each process only its own GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    launch = LaunchEnvironment(0, 8, 5, "head", 5, False, "0", may_bind_gpus)
    assert launch.gpu() == gpu


def test_a_rate_is_that_of_the_best_transfer_after_the_first(monkeypatch):
    """A rate is that of the best transfer after the first.

    The first one connects, and is not counted however fast it was.
    """
    seconds = iter([0.001, 4.0, 3.0, 5.0, 6.0, 2.0])
    now, made = [0.0], []

    def exchange(operations):
        made.append(operations)
        now[0] += next(seconds)
        return [SimpleNamespace(wait=lambda: None)] * 2

    monkeypatch.setattr(cluster.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(cluster.dist, "P2POp", lambda *what: what)
    monkeypatch.setattr(cluster.dist, "batch_isend_irecv", exchange)
    assert cluster.pair_rate(CPU, 3, 4 * 10**6) == pytest.approx(4e6 / 2.0 / 1e9)
    (send, rows, to), (receive, arrived, source) = made[0]
    assert (send, receive, to, source) == (cluster.dist.isend, cluster.dist.irecv, 3, 3)
    assert len(rows) == len(arrived) == 4 * 10**6


def store_exchange(answers, world=2, lost=()):
    """Return a fake of rank 0's `_StoreExchange`, whose peers give these answers in each pass."""
    passes = iter(answers)
    return SimpleNamespace(
        launch=SimpleNamespace(world=world), deadline_s=60.0, publish=lambda *_: None, missing=lambda _: list(lost),
        answers=lambda _: next(passes),
    )  # fmt: skip


def measured(monkeypatch, answers, **more):
    monkeypatch.setattr(cluster, "_own_rates", lambda *_: None)
    return cluster._measure(store_exchange(answers, **more), TWO, "gloo", CPU, None, None)


def test_a_link_has_the_rate_of_its_slower_end(monkeypatch):
    """A link has the rate of its slower end, since both ends time the same transfers.

    One pass suffices if no link is slow.
    """
    assert measured(monkeypatch, [[("", [(1, 9.0)]), ("", [(0, 7.0)])]]) == ({(0, 1): 7.0}, [], [])
    assert measured(monkeypatch, [[("", [(1, 5.0)]), ("", [(0, 7.0)])]]) == ({(0, 1): 5.0}, [], [])


def test_a_failed_transfer_is_told_of_the_rank_and_ends_the_measurement(monkeypatch):
    answers = [[("", [(1, 9.0)]), ("transfers over gloo failed: x", [])]]
    assert measured(monkeypatch, answers) == ({}, ["rank 1 (host a): transfers over gloo failed: x"], [])


def test_a_lost_rank_is_told_and_ends_the_measurement(monkeypatch):
    rates, failures, lost = measured(monkeypatch, [], lost=[1])
    assert (rates, lost) == ({}, [1])
    assert failures == ["rank 1: lost during transfers, no rates within 60 s"]


def test_one_rank_has_no_transfers(monkeypatch):
    assert measured(monkeypatch, [], world=1) == ({}, [], [])


def test_the_watch_over_transfers_ends_with_them(monkeypatch):
    """The timer that watches transfers is cancelled after them, because it would end the process.

    It is a daemon thread, so it does not delay the exit.
    """
    made = []

    class Watch(threading.Timer):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(cluster.threading, "Timer", Watch)
    measured(monkeypatch, [[("", [(1, 9.0)]), ("", [(0, 9.0)])]])
    (watch,) = made
    assert (watch.interval, watch.daemon, watch.finished.is_set()) == (60.0, True, True)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_times_its_pairs_with_the_other_end(rank, monkeypatch):
    nodes = NodeLayout.from_hosts(range(3), [("a", "a")] * 3)
    steps, timed = [], []
    monkeypatch.setattr(cluster.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster, "barrier", lambda device: steps.append("barrier"))
    ranks = SimpleNamespace(launch=SimpleNamespace(rank=rank, world=3), step=lambda: steps.append("step"))
    found = cluster._own_rates(ranks, nodes, "nccl", CPU, lambda *given: timed.append(given) or 5.0)
    others = [other for other in range(3) if other != rank]
    assert found[0] == ""
    assert sorted(found[1]) == [(other, 5.0) for other in others]
    assert {(str(device), size) for device, _, size in timed} == {("cpu", cluster._BYTES["nccl"])}
    assert steps == ["step", "barrier", "step"] * 3, "who is behind in a hang has counted fewer"


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_transfers_outlast_the_watch_that_names_who_is_behind(device, monkeypatch):
    """The process group's timeout is longer than the watch, which names the ranks that are behind.

    On a GPU the process group is bound to it, and connects at once.
    """
    made = []
    monkeypatch.setattr(cluster.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.dist, "init_process_group", lambda backend, **how: made.append((backend, how)))
    monkeypatch.setattr(cluster, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(cluster, "transfer_rounds", lambda nodes: [])
    ranks = SimpleNamespace(launch=SimpleNamespace(rank=1, world=2), deadline_s=50.0, transfers="a store")
    assert cluster._own_rates(ranks, TWO, "nccl", torch.device(device), None) == ("", [])
    ((backend, how),) = made
    assert how.pop("timeout") > timedelta(seconds=100), "the deadline of coming, and that of transfers"
    bound = None if device == "cpu" else torch.device(device)
    assert (backend, how) == ("nccl", {"store": "a store", "rank": 1, "world_size": 2, "device_id": bound})


def test_a_transfer_that_raises_is_told_and_gives_no_rates(monkeypatch):
    def fails(*_):
        raise RuntimeError("NCCL error\nat a line")

    monkeypatch.setattr(cluster.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster, "barrier", lambda device: None)
    ranks = SimpleNamespace(launch=SimpleNamespace(rank=0, world=2), step=lambda: None)
    found = cluster._own_rates(ranks, TWO, "nccl", CPU, fails)
    assert found == ("transfers over nccl failed: NCCL error", [])


@pytest.mark.parametrize(
    ("rank", "missing", "shows"), [(0, [], True), (1, [], False), (1, [0], True), (1, [1], False)], ids=str
)
def test_the_first_rank_that_is_here_shows_the_report(rank, missing, shows, monkeypatch):
    """The first rank that is present shows the report.

    A rank that came after the others gave up shows nothing, and waits for none of them.
    """
    store, shown = HashStore(), []
    if rank not in missing:
        store.set("shown", "")
        store.add("left", 1)  # the other rank has left
    launch = LaunchEnvironment(rank, 2, 0, "head", 5, False, "0", False)
    report = ClusterReport(["odd"])
    assert cluster._StoreExchange(launch, store, 1.0).show_and_leave(report, shown.append, missing) is report
    assert shown == [report] * shows


@pytest.mark.parametrize(("rates", "ends"), [({(0, 1): 9.0}, True), ({}, False)], ids=["measured", "failed"])
def test_the_process_group_of_transfers_that_failed_is_left_alone(rates, ends, monkeypatch):
    """The process group is not destroyed after failed transfers, because NCCL may wait for them."""
    ended = []
    monkeypatch.setattr(cluster.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster.dist, "destroy_process_group", lambda: ended.append(True))
    launch = LaunchEnvironment(0, 1, 0, "head", 5, False, "0", False)
    report = ClusterReport([], rates=rates)
    cluster._StoreExchange(launch, HashStore(), 1.0).show_and_leave(report, lambda _: None, [])
    assert ended == [True] * ends


@pytest.mark.parametrize(("error", "line"), [(RuntimeError("a\nb"), "a"), (RuntimeError(), "RuntimeError")], ids=repr)
def test_an_error_is_told_in_one_line(error, line):
    assert cluster._line(error) == line


@pytest.mark.parametrize(("missing", "absent"), [([1], [1]), ([], [0])], ids=["never came", "lost in transfers"])
def test_a_report_of_lost_ranks_waits_for_none_of_them(missing, absent, monkeypatch):
    waited = []
    monkeypatch.setattr(LaunchEnvironment, "store", lambda self, deadline_s: HashStore())
    monkeypatch.setattr(cluster._StoreExchange, "missing", lambda self, what: missing)
    monkeypatch.setattr(
        cluster._StoreExchange, "show_and_leave", lambda self, report, show, lost: (waited.append(lost), report)[1]
    )
    monkeypatch.setattr(cluster, "_measure", lambda *_: ({}, ["rank 0 failed"], [0]))
    environment = ENVIRONMENT | {"WORLD_SIZE": "2" if missing else "1"}
    report = cluster.run(5.0, lambda _: None, environment=environment)
    assert waited == [absent]
    assert report.odd == (["rank 1 did not come within 5 s, of 2 ranks"] if missing else ["rank 0 failed"])
