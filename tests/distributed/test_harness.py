"""The test harness: a rank that raises, exits or hangs fails the test at once, and the report says where."""

import os
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from ep_moe import InputError
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.parallel.local_launch import RanksFailed, run_local_ranks
from ep_moe.parallel.rank_group import barrier
from ep_moe.testing import distributed, rank_device

pytestmark = pytest.mark.skipif(TorchrunEnv.present(), reason="starts ranks of its own")


def run(body, world: int = 2, **options):
    return run_local_ranks(f"{__name__}:{body.__name__}", world, **options)


def answers(number: int) -> list[int]:
    return [dist.get_rank(), dist.get_world_size(), number]


def returns_a_tensor() -> torch.Tensor:
    return torch.full((3,), float(dist.get_rank()))


def threads() -> int:
    return torch.get_num_threads()


def raises() -> None:
    if dist.get_rank() == 1:
        raise InputError("rank one is cross")
    barrier(rank_device())


def raises_beside_one_that_loiters() -> None:
    if dist.get_rank() == 1:
        raise InputError("rank one is cross")
    loiters()


def exits() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    barrier(rank_device())


def leaves() -> None:
    if dist.get_rank() == 1:
        sys.exit("enough")
    barrier(rank_device())


def loiters() -> None:
    time.sleep(60)


def hangs() -> None:
    if dist.get_rank() == 0:
        loiters()
    lock = threading.Lock()
    with lock:
        lock.acquire()  # blocks outside of Python code


def leaves_a_thread() -> None:
    if dist.get_rank() == 1:
        threading.Thread(target=time.sleep, args=(60,)).start()


def returns_what_cannot_travel():
    return threading.Lock()


def test_results_come_in_rank_order():
    assert run(answers, 3, kwargs={"number": 5}) == [[0, 3, 5], [1, 3, 5], [2, 3, 5]]


def test_results_may_be_tensors():
    assert torch.stack(run(returns_a_tensor)).tolist() == [[0, 0, 0], [1, 1, 1]]


def test_ranks_have_as_many_threads_as_were_asked_for():
    assert (run(threads), run(threads, threads=2)) == ([1, 1], [2, 2])


def test_a_rank_that_raises():
    start = time.monotonic()
    sentence = r"(?s)--- rank 1 ---\nTraceback.*in raises\n.*InputError: rank one is cross"
    with pytest.raises(RanksFailed, match=sentence) as caught:
        run(raises)
    assert time.monotonic() - start < 10
    assert list(caught.value.errors) == [1]
    assert isinstance(caught.value.errors[1], InputError)


def test_peers_of_a_rank_that_raised_are_not_waited_for():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 ---\nhangs .or was stopped.*in loiters\n.*rank one is cross"):
        run(raises_beside_one_that_loiters, deadline_s=40)
    assert time.monotonic() - start < 20


def test_a_rank_that_exits():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="--- rank 1 ---\nexited with code 7"):
        run(exits)
    assert time.monotonic() - start < 10


def test_a_rank_that_leaves_by_sys_exit():
    with pytest.raises(RanksFailed, match=r"(?s)--- rank 1 ---\nTraceback.*SystemExit: enough"):
        run(leaves)


def test_ranks_that_hang():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="2 of 2 ranks failed") as caught:
        run(hangs, deadline_s=2)
    assert time.monotonic() - start < 10
    ranks = str(caught.value).split("--- rank ")[1:]
    for text, place in zip(ranks, ("in loiters\n", "in hangs\n"), strict=True):
        assert "hangs (or was stopped after another rank failed) at" in text
        assert place in text


def test_a_rank_that_leaves_a_thread_behind():
    start = time.monotonic()
    run(leaves_a_thread)
    assert time.monotonic() - start < 10


def test_a_result_that_cannot_travel():
    with pytest.raises(RanksFailed, match="cannot pickle"):
        run(returns_what_cannot_travel)


def test_a_rank_that_is_expected_to_die():
    assert run(dies_alone, 3, expect_dead=[1]) == [0, None, 2]


def test_an_unexpected_death_beside_an_expected_one():
    with pytest.raises(RanksFailed, match="1 of 3 ranks failed") as caught:
        run(dies_alone, 3, expect_dead=[0])
    assert "--- rank 1 ---\nexited with code 7" in str(caught.value)


def dies_alone() -> int:
    if dist.get_rank() == 1:
        os._exit(7)
    return dist.get_rank()


def test_no_such_body():
    with pytest.raises(RanksFailed, match="has no attribute 'nothing'"):
        run_local_ranks(f"{__name__}:nothing", 2)


seen = []


@distributed(2)
@pytest.mark.parametrize("word", ["a", "b"])
def test_the_decorator_hands_arguments_on(word, world_size):
    assert (word in "ab", world_size, dist.get_world_size()) == (True, 2, 2)
    assert not seen, "ranks are processes of their own"
    seen.append(word)
