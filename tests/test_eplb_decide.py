"""What the planning thread does beside the plan: the digest, the ways, and breaths between them."""

import threading
import time
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_moe import ExpertMap
from ep_moe.eplb import decide
from ep_moe.eplb.decide import Background, Decision, laid_out
from ep_moe.eplb.pieces import pieces
from ep_moe.eplb.schedule import itinerary
from tests.test_eplb_pieces import pairs

unhurried = settings(deadline=None)
BASE = ExpertMap(3, 2, (0, 1, 2, -1))


@pytest.mark.parametrize(
    "maps",
    [
        (BASE,),
        (BASE, BASE, BASE),
        (BASE, ExpertMap(3, 2, (0, 1, -1, 2))),
        (ExpertMap(3, 2, (0, 1, -1, 2)), BASE),
        (BASE, ExpertMap(3, 2, (0, 1, 2, -1), allow_duplicates=True)),
        (BASE, ExpertMap(3, 1, (0, 1, 2, -1))),
        (BASE, ExpertMap(3, 2, (0, 1, 2, -1, -1, -1))),
    ],
)
def test_a_digest_is_of_all_maps(maps):
    digest = Decision((BASE, BASE)).digest
    assert digest == Decision((BASE, ExpertMap(3, 2, (0, 1, 2, -1)))).digest
    assert -(2**63) <= digest < 2**63
    assert Decision(maps).digest != digest


@unhurried
@given(pairs(), st.integers(1, 4), st.integers(1, 3))
def test_laid_out_breathes_and_that_changes_nothing(maps, most, layers):
    old, new = maps
    way = [old, *pieces(old, new, most)]
    expected = tuple(itinerary(a, b, 0, row_bytes=8, budget=16) for a, b in pairwise(way))
    placement, slept = mock.Mock(), []
    with mock.patch.object(decide, "_STRETCH_S", 0.0), mock.patch.object(decide.time, "sleep", slept.append):
        found = laid_out(
            lambda: Decision((new,) * layers),
            [(placement, old, 8)] * layers,
            rank=0,
            budget=16,
            commit=8 * most,
            ranks_per_node=old.num_ranks,
        )
    assert found.itineraries == (expected,) * layers
    assert placement.check.mock_calls == [mock.call(new)] * layers
    assert len(slept) >= layers * (2 + 2 * len(expected))


def test_who_starts_a_thread_does_not_wait_for_it():
    """Its first act is a breath: Python would run it for milliseconds else, before `Thread.start` returns."""
    order = []
    real = time.sleep
    with mock.patch.object(decide.time, "sleep", lambda seconds: (order.append("breath"), real(seconds))):
        background = Background(lambda: order.append("call") or threading.current_thread().name)
        background._thread.join()
    assert order == ["breath", "call"]
    assert background.result() == "ep_moe eplb plan"
