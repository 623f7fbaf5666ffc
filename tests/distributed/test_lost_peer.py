"""A peer that dies, hangs or goes another way: the others get a PeerTimeout that names it and the phase, in time."""

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from ep_moe import (
    Activation,
    BackendUnavailable,
    ConfigError,
    EPContext,
    EPMoEError,
    InputError,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    PeerTimeout,
)
from ep_moe.parallel import device_watch as device_watch_module
from ep_moe.parallel import flight_recorder as recorder_module
from ep_moe.parallel.consensus import StoreConsensus
from ep_moe.parallel.device_watch import DeviceMark
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.heartbeats import _FEWER_CALLS, Step, compare
from ep_moe.parallel.step_board import PeerBoard, StepBoard
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import check_call
from tests.fixtures.helpers import fill

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2, activation=Activation.RELU2)
DEADLINE_S = 2.0  # heartbeats come every 0.25 s then; a loaded machine delays them
LOST = 1
LAYOUTS = {"dp=4": ParallelConfig(dp=4), "dp=2 tp=2 etp=2": ParallelConfig(dp=2, tp=2, ep=2, etp=2)}


def die() -> None:
    os._exit(7)


def hang() -> None:
    """For ever; the harness ends those that are expected to die once the others are through."""
    threading.Event().wait()


def survivors_raise(call: Callable[[], Any], sentence: str) -> None:
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=sentence):
        call()
    assert time.monotonic() - start < DEADLINE_S + 4


def lose(parallel: ParallelConfig, all2all: str, stage: str, how: Callable[[], None]) -> None:
    """One good call, then one in which rank LOST goes at `stage`."""
    context = EPContext.from_groups(parallel, device=rank_device(), deadline_s=DEADLINE_S)
    layer = fill(MoELayer(CONFIG, context, all2all=all2all, name="block"))
    x = torch.ones(4, 16, device=context.device)
    layer(x)
    if dist.get_rank() == LOST:
        if stage == "call":
            how()
        elif stage == "router":
            layer.router.register_forward_pre_hook(lambda *_: how())
        elif stage == "experts":
            capabilities = layer.experts.capabilities
            layer.experts = lambda received, out: how()
            layer.experts.capabilities = capabilities
        elif stage == "combine":
            layer._dispatcher()._combine = lambda *_: how()
        layer(x)
    # where the EP group is whole, the first to miss the lost rank may be its etp peer
    phase = {"call": "enter" if parallel.tp > 1 else "dispatch", "router": "dispatch"}.get(stage, "combine")
    later = "" if parallel.etp == 1 or stage == "call" else "|etp reduce"
    verdict = "shows no sign of life" if how is die else "is alive but behind"
    sentence = (
        rf"^rank \d lost its peers in ({phase}{later})( wait)? of block \(step \d+\): .*"
        rf"Rank {LOST} {verdict}.*Raise deadline_s \(now 2 s\) if it was only slow\.$"
    )
    survivors_raise(lambda: layer(x), sentence)


@distributed(4, deadline_s=20, expect_dead=[LOST])
@pytest.mark.parametrize(
    ("layout", "all2all", "stage"),
    [
        ("dp=4", "torch_a2a", "call"),
        ("dp=4", "allgather", "experts"),
        ("dp=2 tp=2 etp=2", "allgather", "router"),
        ("dp=2 tp=2 etp=2", "torch_a2a", "combine"),
    ],
)
def test_a_rank_dies(layout, all2all, stage, world_size):
    lose(LAYOUTS[layout], all2all, stage, die)


@distributed(2, deadline_s=40, expect_dead=[LOST])
def test_the_last_step_of_a_rank_that_dies_is_named(world_size):
    """Heartbeats come once a second here, and all calls are made within one."""
    context = EPContext.from_groups(device=rank_device(), deadline_s=8)
    layer = fill(MoELayer(CONFIG, context, all2all="torch_a2a", name="block"))
    x = torch.ones(4, 16, device=context.device)
    for _ in range(3):
        layer(x)
    if dist.get_rank() == LOST:
        compute = layer.experts.compute
        layer.experts.compute = lambda *args: (die(), compute(*args))
    last = context.flight_recorder.newest.number + 2  # dispatch and its wait are left, experts run
    with pytest.raises(PeerTimeout) as caught:
        layer(x)
    text = str(caught.value)
    assert f"Rank {LOST} shows no sign of life, last seen finished dispatch wait of block (step {last})." in text, text


@distributed(4, deadline_s=20, expect_dead=[LOST])
@pytest.mark.parametrize(("layout", "stage"), [("dp=4", "call"), ("dp=2 tp=2 etp=2", "experts")])
def test_a_rank_hangs(layout, stage, world_size):
    lose(LAYOUTS[layout], "torch_a2a", stage, hang)


@distributed(4, deadline_s=20, expect_dead=[LOST])
def test_a_rank_skips_backward(world_size):
    context = EPContext.from_groups(device=rank_device(), deadline_s=DEADLINE_S)
    layer = fill(MoELayer(CONFIG, context, name="block"))
    y = layer(torch.ones(4, 16, device=context.device, requires_grad=True))
    if dist.get_rank() == LOST:
        hang()
    sentence = rf"lost its peers in backward by (all|reduce)_.*Rank {LOST} is alive but behind"
    survivors_raise(lambda: y.sum().backward(), sentence)


@distributed(4, deadline_s=20, expect_dead=[LOST])
def test_a_rank_makes_no_layer_and_no_context(world_size):
    device = rank_device()
    context = EPContext.from_groups(device=device, deadline_s=0.9)
    if dist.get_rank() == LOST:
        hang()
    for call, what in (
        (lambda: MoELayer(CONFIG, context, name="block"), "MoELayer block"),
        (lambda: EPContext.from_groups(device=device, deadline_s=0.9), "EPContext"),
    ):
        survivors_raise(call, rf"^{what}: rank 1 did not arrive within 0\.9 s; all ranks must make the same calls")


@distributed(2)
def test_a_slow_rank_is_waited_for(world_size):
    """Slower than a heartbeat, faster than the deadline."""
    with EPContext.from_groups(device=rank_device(), deadline_s=10) as context:
        layer = fill(MoELayer(CONFIG, context))
        if dist.get_rank() == LOST:
            time.sleep(1)
        check_call(layer, context)


# --- boards, without ranks -----------------------------------------------------------------------------------------


def test_a_board_tells_the_newest_step_after_its_process_is_gone():
    reader, writer = os.pipe()
    mapped, map_done = os.pipe()
    child = os.fork()
    if child == 0:
        board = StepBoard()
        board.put(1, ("block", "dispatch", "torch_a2a"), False)
        os.write(writer, board.address.encode())
        os.read(mapped, 1)
        board.put(7, ("block", "combine", "torch_a2a"), True)
        os._exit(0)
    board = PeerBoard.at(os.read(reader, 1000).decode())
    assert board is not None
    assert board.read() == (1, ("block", "dispatch", "torch_a2a"), False)
    os.write(map_done, b".")
    os.waitpid(child, 0)
    assert board.read() == (7, ("block", "combine", "torch_a2a"), True)


def test_a_board_without_room_for_a_name_says_nothing():
    board = StepBoard()
    peer = PeerBoard.at(board.address)
    assert peer is not None
    assert peer.read() is None
    for number in range(2000):
        board.put(number, ("block", f"phase {number}", ""), False)
    assert peer.read() is None
    board.put(5, ("block", "phase 3", ""), True)
    assert peer.read() == (5, ("block", "phase 3", ""), True)
    board.close()


@pytest.mark.parametrize("change", [{"host": "another"}, {"path": "/proc/self/fd/9999"}, {"token": 1}])
def test_a_board_that_is_not_here_is_not_read(change):
    board = StepBoard()
    assert PeerBoard.at(json.dumps(json.loads(board.address) | change)) is None
    board.close()


def test_what_a_heartbeat_does_not_know_is_said():
    dead, mine = (5, step(7)), (9, step(9))
    text = compare(step(9), 0, {0: mine, 1: dead}, {0: mine, 1: dead}, {}, {1: time.time() - 3})
    assert text == (
        "Rank 1 shows no sign of life, last seen in dispatch of moe3 (step 7) 3 s ago, from where it may have come "
        "further."
    )
    text = compare(step(9), 0, {0: mine, 1: dead}, {0: mine, 1: dead}, {1: step(8)}, {1: 0.0})
    assert text == "Rank 1 shows no sign of life, last seen in dispatch of moe3 (step 8)."


# --- agreement, without ranks ----------------------------------------------------------------------------------


def agree(*turns: Callable[[StoreConsensus], None] | None, deadline_s: float = 5.0) -> list[EPMoEError | None]:
    """Run one call of a StoreConsensus per rank in threads (None: that rank does not come); what each raised."""
    store = HashStore()
    outcome: list[EPMoEError | None] = [None] * len(turns)

    def run(rank: int) -> None:
        try:
            turns[rank](StoreConsensus(store, range(len(turns)), rank, deadline_s))
        except EPMoEError as error:
            outcome[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(turns)) if turns[rank] is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def test_agreement_on_equal_facts():
    assert agree(*[lambda a: a.same("layer", {"x": 1, "y": [2, None]})] * 3) == [None] * 3


def test_agreement_names_every_field_that_differs():
    outcome = agree(
        lambda a: a.same("layer", {"x": 1, "y": "a", "z": 0}),
        lambda a: a.same("layer", {"x": 2, "y": "a", "z": 0}),
        lambda a: a.same("layer", {"x": 1, "y": "b", "z": 0}),
    )
    assert {type(error) for error in outcome} == {ConfigError}
    assert {str(error) for error in outcome} == {
        "layer: the ranks were given different values; give all the same. "
        'x: 1 on ranks 0, 2, 2 on rank 1; y: "a" on ranks 0, 1, "b" on rank 2'
    }


def test_agreement_names_a_field_that_one_rank_lacks():
    outcome = agree(lambda a: a.same("layer", {"x": 1}), lambda a: a.same("layer", {}))
    assert "x: 1 on rank 0, null on rank 1" in str(outcome[0])


def test_agreement_of_ranks_that_are_elsewhere():
    outcome = agree(lambda a: a.healthy("EPContext.destroy", None), lambda a: a.same("MoELayer moe0", {}))
    assert {str(error) for error in outcome} == {
        "EPContext.destroy: the ranks were given different values; give all the same. "
        'what: "EPContext.destroy" on rank 0, "MoELayer moe0" on rank 1'
    }


@pytest.mark.parametrize("kind", [ConfigError, BackendUnavailable])
def test_agreement_passes_a_problem_on(kind):
    fine = lambda a: a.same("layer", {})  # noqa: E731
    outcome = agree(fine, lambda a: a.same("layer", {}, kind("no such thing")), fine)
    assert {(type(error), str(error)) for error in outcome} == {(kind, "layer: rank 1: no such thing")}


def test_a_problem_that_fewer_ranks_agreed_on_is_named_once():
    found = ConfigError("layer: rank 1: no such thing")
    outcome = agree(*[lambda a: a.healthy("layer", found)] * 2)
    assert {str(error) for error in outcome} == {"layer: rank 1: no such thing"}
    outcome = agree(lambda a: a.healthy("layer", None), lambda a: a.healthy("layer", ConfigError("layer: no such")))
    assert {str(error) for error in outcome} == {"layer: rank 1: no such"}


def test_agreement_on_a_problem_that_is_not_ours():
    outcome = agree(lambda a: a.healthy("groups", None), lambda a: a.healthy("groups", OSError("disk")))
    assert {(type(error), str(error)) for error in outcome} == {(ConfigError, "groups: rank 1: disk")}


def test_agreement_of_one_rank_needs_no_store():
    alone = StoreConsensus(None, [0], 0, 1.0)
    alone.same("layer", {})
    with pytest.raises(BackendUnavailable, match="no such thing"):
        alone.healthy("layer", BackendUnavailable("no such thing"))


def test_agreements_come_in_order():
    def three(a: StoreConsensus) -> None:
        for turn in range(3):
            a.same("layer", {"turn": turn})

    assert agree(three, three) == [None, None]


def test_agreement_names_who_did_not_come():
    comes = lambda a: a.healthy("destroy", None)  # noqa: E731
    outcome = agree(comes, None, comes, None, deadline_s=0.2)
    sentence = "destroy: ranks 1, 3 did not arrive within 0.2 s; all ranks must make the same calls in the same order"
    assert {str(error) for error in outcome if error} == {sentence}


def test_agreement_without_the_rank_that_decides():
    outcome = agree(None, lambda a: a.healthy("destroy", None), deadline_s=0.2)
    assert isinstance(outcome[1], PeerTimeout)
    assert str(outcome[1]) == "destroy: no verdict from rank 0 within 0.4 s; it died or never got here"


# --- the flight recorder's comparison ---------------------------------------------------------------------------------


def step(number: int, phase: str = "dispatch", where: str = "moe3", done: bool = False) -> Step:
    return Step(number, where, phase, "torch_a2a", done)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ((5, step(7)), (9, step(7)), "Every peer is alive and in the same step."),
        ((5, step(7)), (5, step(7)), "Rank 1 shows no sign of life, last seen in dispatch of moe3 (step 7)."),
        (None, None, "Rank 1 shows no sign of life."),
        (
            (5, step(6)),
            (9, step(6, done=True)),
            f"Rank 1 is alive but behind: finished dispatch of moe3 (step 6). {_FEWER_CALLS}",
        ),
        ((5, step(7, "combine")), (9, step(7, "combine")), "Rank 1 went another way: in combine of moe3 (step 7)."),
        ((5, step(7, where="")), (9, step(7, where="")), "Rank 1 went another way: in dispatch (step 7)."),
        ((5, step(8, "combine")), (9, step(8, "combine")), "Every peer is alive and in the same step."),
    ],
)
def test_comparison_of_heartbeats(before, after, sentence):
    mine = (1, step(7))
    assert compare(step(7), 0, {0: mine, 1: before}, {0: mine, 1: after}) == sentence


def test_comparison_names_every_rank():
    before = {0: (1, step(7)), 1: (1, step(7)), 2: None, 3: (4, step(5))}
    after = {0: (2, step(7)), 1: (2, step(7)), 2: None, 3: (9, step(5))}
    sentence = "Rank 2 shows no sign of life. Rank 3 is alive but behind: in dispatch of moe3 (step 5)."
    assert compare(step(7), 0, before, after) == sentence


def test_a_flight_recorder_turns_communication_failures_only():
    flight_recorder = FlightRecorder()
    flight_recorder.where = "moe0"
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


@pytest.mark.parametrize("left", [RuntimeError("NCCL communicator was aborted"), InputError("noise"), None])
def test_what_the_watch_found_is_what_an_aborted_step_raises(left):
    """What a collective raises or leaves behind after the abort is no news of its own."""
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
    """A balancer may lose a rank that was only late, and the layers go on."""
    store = HashStore()
    recorders = [FlightRecorder(store, [0, 1, 2], rank, deadline_s=0.4) for rank in range(3)]

    def diagnosed(by, numbers):
        for flight_recorder, number in zip(recorders, numbers, strict=True):
            flight_recorder.leave_at(Step(number, "moe0", "combine", "", True))
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
        recorders[0].close()  # as one whose process ended with that sentence
        assert "Rank 0" not in str(recorders[1]._diagnose("no answer"))
    finally:
        recorders[1].close()


def test_an_overdue_step_is_aborted_and_named(monkeypatch):
    """The watch thread frees a rank that waits on a device: here an event instead of the device."""
    freed = threading.Event()
    monkeypatch.setattr(recorder_module.os, "_exit", lambda code: None)  # a host slower than two deadlines
    flight_recorder = FlightRecorder(HashStore(), [0, 1], 0, deadline_s=0.2, abort=freed.set)
    try:
        sentence = r"in combine \(step 1\): no progress for 0.2 s\. Rank 1 shows no sign"
        with pytest.raises(PeerTimeout, match=sentence), flight_recorder.step("combine"):
            assert freed.wait(5)
        with pytest.raises(PeerTimeout, match="no progress"), flight_recorder.step("dispatch"):
            pass
    finally:
        flight_recorder.close()


class Reached:
    """A mark that the device reaches when the test says so."""

    def __init__(self, device):
        self.reached = True

    def set(self):
        self.reached = False


def device_watch(monkeypatch, deadline_s):
    ended = threading.Event()
    monkeypatch.setattr(device_watch_module, "DeviceMark", Reached)
    monkeypatch.setattr(recorder_module.os, "_exit", lambda code: ended.set())
    flight_recorder = FlightRecorder(HashStore(), [0, 1], 0, deadline_s=deadline_s, abort=lambda: None)
    time.sleep(flight_recorder._period)  # from one mark to the next
    with flight_recorder.step("combine"):
        pass
    flight_recorder.device_watch.mark(torch.device("cpu"))
    return flight_recorder, ended


def test_a_device_that_waits_is_seen_after_the_host_went_on(monkeypatch, capfd):
    flight_recorder, ended = device_watch(monkeypatch, 0.4)
    try:
        until(lambda: flight_recorder._failure is not None)
        sentence = r"finished combine \(step 1\): no progress for 0.4 s\. Rank 1 shows no sign"
        with pytest.raises(PeerTimeout, match=sentence), flight_recorder.step("dispatch"):
            pass
        assert ended.wait(5)
    finally:
        flight_recorder.close()
    printed = capfd.readouterr().err
    assert "PeerTimeout: rank 0 lost its peers finished combine" in printed
    assert "The device still waits: ending." in printed


def test_a_device_that_comes_to_its_mark_is_not_ended(monkeypatch):
    flight_recorder, ended = device_watch(monkeypatch, 0.3)
    try:
        flight_recorder.device_watch.newest.reached = True
        assert not ended.wait(1)
        flight_recorder.check()
    finally:
        flight_recorder.close()


def test_marks_are_far_apart(monkeypatch):
    flight_recorder, _ = device_watch(monkeypatch, 40.0)
    try:
        flight_recorder.device_watch.newest.reached = True
        flight_recorder.device_watch.mark(torch.device("cpu"))
        assert flight_recorder.device_watch.newest.reached, "a second mark was set at once"
    finally:
        flight_recorder.close()


def test_a_mark_counts():
    mark = DeviceMark(torch.device("cpu"))
    assert mark.reached
    mark.set()
    assert mark.reached
    mark._asked += 1
    assert not mark.reached


def until(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
