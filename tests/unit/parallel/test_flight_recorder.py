"""Test the flight recorder without ranks: what an aborted step raises, its diagnosis, and what its watchdog ends."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed import FileStore, HashStore

from ep_moe import ConfigError, InputError, PeerTimeout
from ep_moe.errors import OutOfMemory, RankFailed
from ep_moe.parallel import flight_recorder as recorder_module
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.heartbeats import Step


def test_a_flight_recorder_turns_communication_failures_only():
    flight_recorder = FlightRecorder()
    flight_recorder.call_name = "moe0"
    sentence = r"^rank 0 lost its peers in dispatch of moe0 \(step 1\): gloo: closed\.$"
    with pytest.raises(PeerTimeout, match=sentence), flight_recorder.step("dispatch", keep=False):
        raise RuntimeError("gloo: closed\nmore")
    with pytest.raises(RuntimeError, match="shapes"), flight_recorder.step("dispatch"):
        raise RuntimeError("shapes")
    with pytest.raises(ConfigError), flight_recorder.step("dispatch"):
        raise ConfigError("ours")
    assert flight_recorder.number == 3
    with flight_recorder.step("gather", counted=False):
        assert str(flight_recorder._step) == "in gather of moe0 (step 3)"


def test_memory_that_ends_in_a_step_is_said_as_such():
    flight_recorder, error = FlightRecorder(), torch.OutOfMemoryError("tried to allocate 2 GiB")
    flight_recorder.call_name = "moe0"
    words = r"^rank 0 ran out of memory on cpu .*2 GiB"
    with pytest.raises(OutOfMemory, match=words) as raised, flight_recorder.step("dispatch"):
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "raised",
    [RuntimeError("gloo: closed"), RuntimeError("shapes"), InputError("ours"), KeyboardInterrupt()],
    ids=["a lost peer", "a mistake", "a refusal", "Ctrl-C"],
)
def test_a_step_is_over_however_it_was_left(raised):
    """A step is over however it was left. Otherwise the watchdog would count the time after it as a wait."""
    flight_recorder = FlightRecorder()
    with pytest.raises((RuntimeError, InputError, KeyboardInterrupt)), flight_recorder.step("eplb sum", keep=False):
        raise raised
    assert flight_recorder.newest == Step(1, "", "eplb sum", "", True)
    assert flight_recorder._late_on_host() == 0


@pytest.mark.parametrize(("deadline_s", "late"), [(300.0, 31.0), (10.0, 6.0)])
def test_a_long_wait_is_said_once_for_each_step(deadline_s, late, caplog):
    """A long wait is logged once per step. It is long beyond a tenth of the deadline and at least 5 s."""
    recorder, said = FlightRecorder(deadline_s=deadline_s), []
    for seconds in (late - 2, late, late + 1):
        for _ in range(2):
            recorder._say_slow(seconds)
        said.append(len(caplog.records))
    with recorder.step("dispatch", "a transport"):
        recorder._say_slow(late)
        recorder._say_slow(late)
    assert [*said, len(caplog.records)] == [0, 1, 1, 2]
    assert f"counts as lost after {deadline_s:g} s" in caplog.text


def test_the_host_is_late_by_its_newest_step_and_call(monkeypatch):
    """The host's lateness counts from its newest step or call, and not from earlier ones.

    Between the steps of a call it starts after `COMPILING_S`, because a library may compile kernels there.
    """
    now = [0.0]
    monkeypatch.setattr(recorder_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    flight_recorder = FlightRecorder()

    def late_after(seconds: float) -> float:
        now[0] += seconds
        return flight_recorder._late_on_host()

    assert late_after(1000) == 0
    with flight_recorder.step("combine"):
        assert late_after(5) == 5
    assert late_after(1000) == 0
    with flight_recorder.step("connect", more_s=60.0):
        assert late_after(61) == 1
    with flight_recorder.step("combine"):
        assert late_after(5) == 5
    now[0] += 1000
    flight_recorder.begin_call("moe0")
    assert late_after(recorder_module.COMPILING_S + 2) == 2


@pytest.mark.parametrize("left", [RuntimeError("NCCL communicator was aborted"), InputError("noise"), None])
def test_what_the_watch_found_is_what_an_aborted_step_raises(left):
    """An aborted step raises what the watchdog found.

    What the collective itself raises or returns after the abort is a consequence of it.
    """
    flight_recorder = FlightRecorder()

    def step():
        with flight_recorder.step("dispatch"):
            flight_recorder._failure = PeerTimeout("what the watch found")
            if left is not None:
                raise left

    with pytest.raises(PeerTimeout, match=r"^what the watch found$"):
        step()
    with pytest.raises(PeerTimeout, match=r"^what the watch found$"):
        flight_recorder.step("combine")


def test_a_failure_that_was_survived_has_no_say_in_the_next_one():
    """A failure that the job survived does not affect the next diagnosis.

    A balancer may lose a rank that was only late, and the layers go on.
    """
    store = HashStore()
    recorders = [FlightRecorder(store, [0, 1, 2], rank, deadline_s=0.4) for rank in range(3)]

    def diagnosed(by, numbers):
        for flight_recorder, number in zip(recorders, numbers, strict=True):
            flight_recorder.set_newest_step(Step(number, "moe0", "combine", "", True))
        return [str(recorders[rank]._diagnose("no answer")) for rank in by]

    try:
        behind = "Rank 1 is alive but behind: finished combine of moe0 (step 10)."
        first, again = diagnosed([0, 2], [11, 10, 11])
        assert behind in first
        assert behind in again
        for text in diagnosed([0, 1], [12, 12, 11]):
            assert "Rank 2 is alive but behind: finished combine of moe0 (step 11)." in text
            assert behind not in text
    finally:
        for flight_recorder in recorders:
            flight_recorder.close()


def test_the_first_verdict_is_everyones():
    store = HashStore()
    recorders = [FlightRecorder(store, [0, 1, 2], rank, deadline_s=0.4) for rank in range(2)]
    try:
        assert "Rank 2 shows no sign of life." in str(recorders[0]._diagnose("no answer"))
        recorders[0].close()  # as if its process had ended with that error
        assert "Rank 0" not in str(recorders[1]._diagnose("no answer"))
    finally:
        recorders[1].close()


def test_the_watch_has_a_connection_of_its_own(monkeypatch, tmp_path):
    """A call that waits for a key locks its connection to the store, and the watch must go on meanwhile."""
    used = []
    monkeypatch.setattr(FlightRecorder, "_watch", lambda self, store: used.append(store._store))
    store = FileStore(str(tmp_path / "store"), 2)
    FlightRecorder(store, [0, 1], 0).close()
    assert used[0] is not store


def test_ranks_of_other_groups_are_looked_at_where_every_peer_is_well():
    """Ranks of other groups are diagnosed if all peers are well, because a rank shares gradients with them.

    A failure in one group does not fail the other.
    """
    store = HashStore()
    recorders = [FlightRecorder(store, [rank], rank, others=[1 - rank], deadline_s=0.4) for rank in range(2)]

    def said(number):
        recorders[0].set_newest_step(Step(number, "moe0", "backward", "", False))
        return str(recorders[0]._diagnose("no answer"))

    try:
        assert "Every peer is alive and in the same step." in said(0)
        assert "Rank 1 of another EP group is alive, and finished start (step 0)." in said(3)
        recorders[1].close()
        assert "Rank 1 of another EP group shows no sign of life, last seen finished start" in said(4)
        pair = [FlightRecorder(store, ranks, ranks[0], deadline_s=0.4) for ranks in ([4, 5], [6, 7])]
        pair[0].publish_failure(ValueError("of this group"))
        pair[1]._read_peer_failures(pair[1]._store)
        assert not pair[1].failed
        for recorder in pair:
            recorder.close()
    finally:
        recorders[0].close()


def test_an_overdue_step_is_aborted_and_named(monkeypatch):
    """The watchdog aborts an overdue step, which frees a rank that waits for a device.

    An event stands in for the device.
    """
    freed = threading.Event()
    monkeypatch.setattr(recorder_module.os, "_exit", lambda code: None)  # on a slow host, two deadlines may pass
    flight_recorder = FlightRecorder(HashStore(), [0, 1], 0, deadline_s=0.2, abort=freed.set)
    try:
        sentence = r"in combine \(step 1\): no progress for 0.2 s\. Rank 1 shows no sign"
        with pytest.raises(PeerTimeout, match=sentence), flight_recorder.step("combine"):
            assert freed.wait(5)
        with pytest.raises(PeerTimeout, match="no progress"), flight_recorder.step("dispatch"):
            pass
    finally:
        flight_recorder.close()


def pair(**more):
    store = HashStore()
    return [FlightRecorder(store, [0, 1], rank, deadline_s=0.4, **more) for rank in range(2)]


def test_peers_that_wait_on_a_device_are_freed():
    freed = threading.Event()
    one, two = pair(abort=freed.set)
    try:
        one.publish_failure(ValueError("x"))
        with pytest.raises(RankFailed, match="rank 0 raised"), two.step("dispatch"):
            assert freed.wait(5)
    finally:
        one.close()
        two.close()


@pytest.mark.parametrize("inside", ["step", "call"])
def test_a_host_that_waits_for_ever_is_ended(inside, monkeypatch, capfd):
    ended = threading.Event()
    monkeypatch.setattr(recorder_module.os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(recorder_module, "COMPILING_S", 0.5)
    one, two = pair(abort=lambda: None)
    try:
        two.begin_call("moe0")
        if inside == "step":
            two.step("dispatch").__enter__()
        assert ended.wait(6)
    finally:
        one.close()
        two.close()
    text = capfd.readouterr().err
    assert "PeerTimeout: rank 1 lost its peers" in text
    assert "The host still waits: ending." in text


def test_a_host_that_left_its_call_is_not_ended(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(recorder_module.os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(recorder_module, "COMPILING_S", 0.0)
    one, two = pair(abort=lambda: None)
    try:
        two.begin_call("moe0")
        with two.step("dispatch"):
            pass
        two.call_name = ""
        assert not ended.wait(1.5)
        two.check()
    finally:
        one.close()
        two.close()


def test_the_first_of_two_failures_is_everyones():
    one, two = pair()
    try:
        with mock.patch.object(two, "_failed_elsewhere", return_value=None):  # before a heartbeat tells of it
            assert str(one.publish_failure(ValueError("first"))) == str(two.publish_failure(ValueError("second")))
    finally:
        one.close()
        two.close()


@pytest.mark.parametrize("late", [False, True], ids=["before the look", "during the look"])
def test_a_diagnosis_is_the_failure_that_a_peer_published(late, monkeypatch):
    recorder, published = FlightRecorder(HashStore(), [0], 0, deadline_s=0.4), RankFailed("rank 1 raised ValueError")
    answers = [published, None] if late else [published]
    monkeypatch.setattr(recorder, "_failed_elsewhere", lambda store: answers.pop())
    assert recorder._diagnose("no answer") is published


def test_one_group_alone_exchanges_through_the_memory_of_the_host():
    """Only one group exchanges numbers through the host's memory.

    A rank has one pair of words for its peers to read, and a second group would read the first group's numbers.
    """
    recorders = pair()
    try:
        for flight_recorder in recorders:
            flight_recorder.attach()
        assert recorders[0].host_exchange([0, 1, 2]) is None, "it does not see rank 2"
        assert recorders[0].host_exchange([0, 1]) is not None
        assert recorders[0].host_exchange([0, 1]) is None
    finally:
        for flight_recorder in recorders:
            flight_recorder.close()


def test_each_barrier_waits_for_all_of_its_ranks():
    """Each barrier waits for all of its ranks, also under a key that was used before."""
    recorders = pair()

    def barrier(flight_recorder):
        flight_recorder.monitored_barrier("layer/state_dict", [0, 1], "state_dict()")

    try:
        for _ in range(2):
            peer = threading.Thread(target=barrier, args=(recorders[1],))
            peer.start()
            barrier(recorders[0])
            peer.join()
        with (
            warnings.catch_warnings(action="error"),  # with so short a deadline, no warning comes before the error
            pytest.raises(PeerTimeout, match=r"^state_dict\(\) needs rank 1 too, which did not call it within 0.4 s"),
        ):
            barrier(recorders[0])
    finally:
        for flight_recorder in recorders:
            flight_recorder.close()


def test_a_barrier_says_whom_it_waits_for(monkeypatch):
    monkeypatch.setattr(recorder_module, "_PATIENCE_S", 0.05)
    recorder = FlightRecorder(HashStore(), [0, 1, 2], 1, deadline_s=0.2)
    words = r"capture\(\) needs ranks 0, 2 too"
    try:
        with (
            pytest.warns(UserWarning, match=rf"^{words}; rank 1 waits up to 0\.2 s$"),
            pytest.raises(PeerTimeout, match=rf"^{words}, which did not call it within 0\.2 s; call it on all ranks$"),
        ):
            recorder.monitored_barrier("layer/capture", [0, 1, 2], "capture()")
    finally:
        recorder.close()


def test_a_text_that_does_not_come_is_a_lost_peer():
    recorder = FlightRecorder(HashStore(), [0, 1], 0, deadline_s=0.1)
    try:
        with pytest.raises(
            PeerTimeout, match=r"^rank 0 lost its peers .*: rank 1 did not report its error\. Rank 1 shows"
        ):
            recorder.broadcast_text(None, owner=1, group=(0, 1))
    finally:
        recorder.close()


@pytest.mark.parametrize(("text", "shared"), [("it is wrong", "it is wrong"), (None, "")])
def test_one_ranks_text_is_shared_with_all_of_its_group(text, shared):
    """`broadcast_text` gives one rank's text to all ranks of its group.

    A single rank needs no store, and None is shared as "".
    """
    assert FlightRecorder().broadcast_text(text, owner=0, group=(0, 1)) == shared
    recorders = pair()
    try:
        assert recorders[0].broadcast_text(text, owner=0, group=(0,)) == shared
        for again in range(2):
            said = None if text is None else f"{text} {again}"
            assert recorders[1].broadcast_text(said, owner=1, group=(0, 1)) == (said or "")
            assert recorders[0].broadcast_text("another", owner=1, group=(0, 1)) == (said or "")
    finally:
        for flight_recorder in recorders:
            flight_recorder.close()


def test_texts_of_all_ranks_are_gathered():
    assert FlightRecorder().gather_texts("here", (0,)) == ["here"]
    recorders = pair()
    try:
        for texts in (["a", "b"], ["c", "d"]):
            with ThreadPoolExecutor(2) as ranks:
                found = ranks.map(lambda recorder, text: recorder.gather_texts(text, (0, 1)), recorders, texts)
            assert list(found) == [texts] * 2
    finally:
        for flight_recorder in recorders:
            flight_recorder.close()


def test_a_rank_that_reports_no_text_is_named():
    recorder = FlightRecorder(HashStore(), [0, 1], 0, deadline_s=0.1)
    try:
        with pytest.raises(PeerTimeout, match=r"^rank 0 lost its peers .*: rank 1 did not report where they are\."):
            recorder.gather_texts("here", (0, 1))
    finally:
        recorder.close()
