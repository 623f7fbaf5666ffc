"""Test numbers exchanged through a host's memory, with several boards in one process."""

import contextlib
import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ep_moe.parallel import step_board
from ep_moe.parallel.step_board import LARGEST, HostExchange, PeerBoard, StepBoard

NO_WATCH = SimpleNamespace(deadline_s=20.0, check=lambda: None)
RANKS = 3


@pytest.fixture
def made():
    """Yield an exchange for each of three ranks."""
    own = [StepBoard() for _ in range(RANKS)]
    peers = [{at: PeerBoard.at(board.address) for at, board in enumerate(own) if at != rank} for rank in range(RANKS)]
    yield [HostExchange(board, others) for board, others in zip(own, peers, strict=True)]
    for board in (*own, *(board for others in peers for board in others.values())):
        board.close()


def put(
    exchange: HostExchange, first: int, second: int, recorder=NO_WATCH, late=contextlib.nullcontext
) -> list[tuple[int, int]]:
    """Exchange a pair of numbers. Return the pairs of all ranks, this one's first."""
    exchange.post(first, second)
    return [(first, second), *exchange.collect(recorder, late)]


def test_every_rank_gets_the_numbers_of_all(made, monkeypatch):
    """Every rank gets the numbers of all ranks.

    Ranks come at different times, and sequence numbers wrap around.
    """
    monkeypatch.setattr(step_board, "_POLLS", 2)
    for exchange in made:
        exchange._number = step_board._NUMBERS - 150
    faults = []

    def run(rank: int) -> None:
        for turn in range(300):
            if turn % (5 + rank) == 0:
                time.sleep(0.001)
            found = put(made[rank], 7 * turn + rank, LARGEST - turn - rank)
            others = [other for other in range(RANKS) if other != rank]
            wanted = [(7 * turn + other, LARGEST - turn - other) for other in (rank, *others)]
            if found != wanted:
                faults.append((rank, turn, found, wanted))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[:3]


def test_a_rank_that_is_late_is_waited_for_where_others_are_told(made, monkeypatch):
    monkeypatch.setattr(step_board, "_POLLS", 2)
    entered = []

    @contextlib.contextmanager
    def late():
        entered.append("late")
        for rank in (1, 2):
            made[rank]._own[step_board.EXCHANGED + 1] = made[rank]._own[step_board.EXCHANGED + 3] = 1
            made[rank]._own[step_board.EXCHANGED + 2] = 5 << 16 | 1
        yield
        entered.append("here")

    assert put(made[0], 4, 0, late=late) == [(4, 0), (5, 0), (5, 0)]
    assert entered == ["late", "here"]


def test_a_pair_that_is_half_written_is_waited_for(made, monkeypatch):
    monkeypatch.setattr(step_board, "_POLLS", 2)
    made[2].post(6, 7)
    made[1]._own[step_board.EXCHANGED + 2] = 5 << 16 | 1

    @contextlib.contextmanager
    def late():
        made[1]._own[step_board.EXCHANGED + 3] = 8 << 16 | 1
        yield

    assert put(made[0], 4, 0, late=late) == [(4, 0), (5, 8), (6, 7)]


def test_a_rank_that_never_comes_is_named(made, monkeypatch):
    monkeypatch.setattr(step_board, "_POLLS_IN_TURN", 2)
    made[1]._own[step_board.EXCHANGED + 2] = made[1]._own[step_board.EXCHANGED + 3] = 1
    with pytest.raises(dist.DistError, match="rank 2 did not enter this call"):
        put(made[0], 4, 0, SimpleNamespace(deadline_s=0.05, check=lambda: None))


def test_ranks_may_come_until_the_deadline(made, monkeypatch):
    waits, comes = [], [True]

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 12 and comes:
            made[1].post(1, 2)
            made[2].post(3, 4)

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: 1.5 * len(waits))
    monkeypatch.setattr(step_board, "time", clock)
    monkeypatch.setattr(step_board, "_POLLS_IN_TURN", 0)
    assert put(made[0], 5, 6) == [(5, 6), (1, 2), (3, 4)]
    assert waits == sorted(waits)
    assert waits[-1] > 100 * waits[0], "looks grow rarer"
    waits.clear()
    comes.clear()
    with pytest.raises(dist.DistError, match=r"ranks? 1.* did not enter this call"):
        put(made[0], 5, 6)
    assert len(waits) == 14, "20 s of the deadline are over"


def test_what_failed_elsewhere_ends_the_wait(made, monkeypatch):
    monkeypatch.setattr(step_board, "_POLLS_IN_TURN", 2)

    def check():
        raise KeyError("rank 2 ran out of memory")

    with pytest.raises(KeyError, match="rank 2 ran out of memory"):
        put(made[0], 4, 0, SimpleNamespace(deadline_s=20.0, check=check))


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


@pytest.mark.parametrize("error", [AttributeError, OSError])
def test_a_host_without_anonymous_files_has_no_board(error, monkeypatch):
    def memfd_create(name):
        raise error(name)

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    assert StepBoard.made() is None


def test_hosts_that_cannot_be_told_apart_read_no_boards(monkeypatch):
    board = StepBoard()
    peer = PeerBoard.at(board.address)
    assert peer is not None
    peer.close()
    board.close()

    def unreadable(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(step_board.Path, "read_text", unreadable)
    board = StepBoard()
    assert PeerBoard.at(board.address) is None
    board.close()
