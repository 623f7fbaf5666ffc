"""Ranks agree before a call whose buffers grow: on the most tokens of any rank, or on one error."""

import logging
import random
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, ParallelConfig, PeerTimeout
from ep_moe.errors import InputError
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.testing import distributed, rank_device
from ep_moe.testing.transport_case import hold_back
from tests.fixtures.distributed_cases import gather_from_all_ranks, same_error


def made(deadline_s: float = 10, **sizes: int) -> EPContext:
    return EPContext.from_groups(ParallelConfig(**sizes), device=rank_device(), deadline_s=deadline_s)


def most(context: EPContext, tokens: int, problem: str | None = None, **given) -> int:
    return context.rank_groups["ep"].most_tokens(tokens, problem, context.device, "mine", **given)


@distributed(2, 4)
@pytest.mark.parametrize("blind", [False, True], ids=["by the host's memory", "where one rank sees none"])
def test_the_most_of_all_ranks(blind, world_size):
    """All ranks get the most tokens of any rank.

    If one rank cannot see the others' host memory, all ranks use the process group instead.
    """
    rank, heard = dist.get_rank(), logging.Handler()
    heard.emit = mock.Mock()
    logging.getLogger("ep_moe").addHandler(heard)
    with made(dp=world_size) as context:
        if blind and rank == 1:
            context.flight_recorder._boards.clear()
        assert most(context, 1 + rank) == world_size
        with mock.patch.object(RankGroup, "agree", autospec=True, side_effect=RankGroup.agree) as agree:
            for turn in range(200):
                tokens = [random.Random(turn * 8 + other).choice((0, 1, 5, 2**31 - 1)) for other in range(world_size)]
                if (turn + rank) % 50 == 0:
                    time.sleep(0.01)
                assert most(context, tokens[rank]) == max(tokens), turn
        assert agree.call_count == (200 if blind else 0)
        assert heard.emit.call_count == (blind and rank == 0), "said once"
        assert context.flight_recorder.number == 0, "it is part of a dispatch, which is counted"


@distributed(4)
def test_groups_beside_each_other_agree_by_themselves(world_size):
    rank = dist.get_rank()
    with made(dp=4, ep=2) as pairs, made(dp=4) as everyone:
        for turn in range(40):
            assert most(pairs, rank + turn) == rank // 2 * 2 + 1 + turn
            assert most(everyone, rank * turn) == 3 * turn


@distributed(2)
def test_one_error_on_all_ranks_and_the_next_call_works(world_size):
    rank = dist.get_rank()
    x, wanting = (torch.zeros(1, device=rank_device(), requires_grad=flag) for flag in (False, True))
    with made(dp=2) as context:
        recorder = context.flight_recorder
        for turn in range(3):
            problem = "planted" if rank == turn % 2 else None
            assert same_error(InputError, lambda p=problem: most(context, 3, p)) == f"rank {turn % 2}: planted"
            assert most(context, 3 + rank) == 4
            recorder.call_name = f"moe{rank}"
            text = same_error(InputError, lambda: most(context, 3))
            assert "not in the same layer: rank 0 is in 'moe0', rank 1 in 'moe1'" in text
            recorder.call_name, recorder.call_facts = "moe", f"dtype={rank}, top_k=2"
            text = same_error(InputError, lambda: most(context, 3))
            assert "moe has dtype=0 on rank 0, and dtype=1 on rank 1" in text
            recorder.call_name = recorder.call_facts = ""
            gradients = {"x": wanting if rank else x}
            text = same_error(InputError, lambda: most(context, 3, gradients=gradients))  # noqa: B023
            assert "x requires a gradient on rank 1 and not on rank 0" in text
            assert most(context, rank) == 1
            assert most(context, 2, gradients={"x": wanting}) == 2
        assert len(set(gather_from_all_ranks(recorder.number))) == 1


@distributed(2)
def test_a_rank_that_never_comes(world_size):
    context = made(dp=2, deadline_s=3)
    recorder = context.flight_recorder
    most(context, 1)
    with recorder.step("dispatch", "mine"):
        pass
    start = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(PeerTimeout, match=r"rank 1 did not enter this call.*Rank 1 is alive but behind"):
            most(context, 1)
        assert time.monotonic() - start < 6
    hold_back(context.rank_groups["ep"], 1, 6)
    recorder.close()


@distributed(2)
def test_a_rank_that_fails_elsewhere(world_size):
    """A rank that waits for the agreement raises if its peer fails elsewhere."""
    context = made(dp=2, deadline_s=20)
    most(context, 1)
    start = time.monotonic()
    if dist.get_rank():
        context._report_exception(KeyError("planted"), "moe0", users=True)
    else:
        with pytest.raises(RuntimeError, match="rank 1 raised KeyError in a call of moe0: 'planted'"):
            most(context, 1)
        assert time.monotonic() - start < 10
    hold_back(context.rank_groups["ep"], 1, 10)
    context.flight_recorder.close()
