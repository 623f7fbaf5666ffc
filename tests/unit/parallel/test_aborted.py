"""Test the outputs of a collective that was aborted because a peer is lost."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from ep_moe import PeerTimeout
from ep_moe.parallel import collectives
from ep_moe.parallel import flight_recorder as recorder_module
from ep_moe.parallel import rank_group as rank_group_module
from ep_moe.parallel.collectives import (
    all_to_all_rows,
    gather_replicated,
    gather_rows,
    reduce_scatter_rows,
    sum_gradients,
)
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.groups import RankGroups
from ep_moe.parallel.rank_group import RankGroup

CPU = torch.device("cpu")


class Work:
    """A collective that ends because it is aborted, and writes nothing."""

    def __init__(self, aborted):
        self.aborted = aborted

    def wait(self):
        assert self.aborted.wait(5)


@pytest.fixture
def rank_group(monkeypatch):
    """Return rank 0 of two, whose peer never comes. The group has the watchdog of a job on GPUs."""
    aborted = threading.Event()
    monkeypatch.setattr(recorder_module.os, "_exit", lambda code: None)  # on a slow host, two deadlines may pass
    flight_recorder = FlightRecorder(HashStore(), [0, 1], 0, deadline_s=0.2, abort=aborted.set)
    flight_recorder.device_watch.prepare(CPU)

    def started(*_, async_op=False, **__):
        work = Work(aborted)
        return work if async_op else work.wait()

    monkeypatch.setattr(dist, "all_to_all_single", started)
    monkeypatch.setattr(dist, "all_reduce", started)
    for name in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.setattr(collectives, name, started)
    yield RankGroup(None, (0, 1), 0, flight_recorder)
    flight_recorder.close()


def leaf():
    return torch.ones(4, 3, requires_grad=True)


COLLECTIVES = {
    "all-to-all": lambda x, rank_group: all_to_all_rows(x, [2, 2], [2, 2], rank_group).wait(),
    "all-gather": lambda x, rank_group: gather_rows(x, [4, 4], rank_group).wait(),
    "reduce-scatter": lambda x, rank_group: reduce_scatter_rows(x, [2, 2], rank_group).wait(),
    "of replicated rows": lambda x, rank_group: gather_replicated(x, [4, 4], rank_group),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_rows_are_nan(name, rank_group):
    with pytest.raises(PeerTimeout), rank_group.flight_recorder.step("combine"):
        found = COLLECTIVES[name](leaf(), rank_group)
    assert found.isnan().all()


# the gradient of replicated rows needs no peer
BACKWARD = {"sum": sum_gradients} | {name: call for name, call in COLLECTIVES.items() if "replicated" not in name}


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_are_nan(name, rank_group, monkeypatch):
    """A collective that is aborted in backward leaves NaN in the gradients. In forward its peer was present."""
    with monkeypatch.context() as there:
        there.setattr(Work, "wait", lambda self: None)
        out = BACKWARD[name](leaf(), rank_group)
    monkeypatch.setattr(RankGroup, "meet_in_backward", lambda *_: None)  # GPUs do not meet on the host either
    written, put = [], RankGroup.nan_if_aborted

    def seen(self, out):
        put(self, out)
        written.append(out)

    monkeypatch.setattr(RankGroup, "nan_if_aborted", seen)
    with pytest.raises(PeerTimeout):
        out.sum().backward()
    assert written
    assert written[0].isnan().all()


def test_integers_stay(rank_group):
    counts = torch.ones(3, dtype=torch.int64)
    with pytest.raises(PeerTimeout), rank_group.flight_recorder.step("count"):
        rank_group.all_reduce(counts)
    assert counts.tolist() == [1, 1, 1]


def test_what_was_not_aborted_stays(rank_group):
    out = leaf().detach()
    rank_group.nan_if_aborted(out)
    assert torch.equal(out, torch.ones(4, 3))
    counts = torch.ones(3, dtype=torch.int64)
    rank_group.nan_if_aborted(counts)  # integers have no NaN
    assert counts.tolist() == [1, 1, 1]


@pytest.mark.parametrize("ranks", [0, 1])
def test_an_exchange_takes_no_old_numbers(ranks, rank_group, monkeypatch):
    """An exchange that is aborted raises instead of returning old numbers.

    A peer may abort it before this rank's watchdog has noticed anything. ranks: how many ranks' numbers have arrived.
    """

    def gather(out, values, **_):
        out.view(2, 2)[:ranks] = values

    monkeypatch.setattr(rank_group_module, "all_gather_single", gather)
    with pytest.raises(PeerTimeout), rank_group.flight_recorder.step("dispatch"):
        rank_group.exchange(torch.tensor([3, 4]))


def test_a_rank_that_comes_late_has_heard_of_it(monkeypatch):
    """A rank that comes late learns of its peers' abort, because its own collective returns what the abort left."""
    monkeypatch.setattr(recorder_module.os, "_exit", lambda code: None)
    store, heard, seen = HashStore(), threading.Event(), []
    late = FlightRecorder(store, [0, 1], 1, deadline_s=2.0, abort=lambda: None)

    def abort():
        seen.append(bool(late.device_watch.aborted(CPU)))
        heard.set()

    waits = FlightRecorder(store, [0, 1], 0, deadline_s=2.0, abort=abort)
    try:
        for flight_recorder in (late, waits):
            flight_recorder.device_watch.prepare(CPU)
        with pytest.raises(PeerTimeout), waits.step("combine"):
            assert heard.wait(10)
        assert seen == [True]
        assert not late.failed, "its own step raises later"
    finally:
        late.close()
        waits.close()


def test_groups_are_aborted_at_once():
    """All groups are aborted at the same time.

    An abort waits for the device, and so for the kernels of other groups.
    """
    barrier = threading.Barrier(3, timeout=5)

    class Group:
        def abort(self):
            barrier.wait()

    groups = object.__new__(RankGroups)
    groups._made, groups._device = [Group(), Group(), Group()], CPU
    groups.abort()
    assert not barrier.broken
