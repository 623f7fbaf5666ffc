"""Exceptions that leave a call: what they come from."""

from types import SimpleNamespace

import pytest
import torch

from ep_moe import EPContext
from ep_moe.errors import InputError, PeerTimeout
from ep_moe.parallel.failed import causes, is_out_of_memory, with_cause

CPU = torch.device("cpu")


@pytest.mark.parametrize("users", [False, True])
def test_an_error_of_ours_from_a_users_module_is_reported_to_peers(users, monkeypatch):
    reported = []
    with EPContext.local(CPU) as context:
        of_many = SimpleNamespace(alone=False, failed=None, fail=lambda error, _: reported.append(str(error)))
        monkeypatch.setattr(context, "flight_recorder", of_many)
        context._broken_by(InputError("raised by a router"), users=users)
        monkeypatch.undo()
    assert reported == ["raised by a router"] * users, "what ep_moe raises itself, all ranks raise"


def test_causes_in_a_circle_come_to_an_end():
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert list(causes(first)) == [first, second]
    assert not is_out_of_memory(first, CPU)


def test_out_of_memory_is_found_below_other_errors():
    origin = RuntimeError("CUDA error: out of memory")
    error = RuntimeError("a collective failed")
    error.__cause__ = origin
    assert is_out_of_memory(error, CPU)
    error.__cause__ = ValueError("x")
    error.__cause__.__cause__ = origin
    assert not is_out_of_memory(error, CPU), "an error of the user's is not the device's"


def test_a_failure_that_is_met_as_itself_keeps_its_cause():
    failure, aborted = PeerTimeout("rank 1 is gone"), RuntimeError("aborted")
    assert with_cause(failure, aborted) is failure
    assert failure.__cause__ is aborted
    with_cause(failure, failure)
    below = RuntimeError("left behind")
    below.__cause__ = failure
    with_cause(failure, below)
    assert failure.__cause__ is aborted


def test_a_step_left_by_the_recorded_failure():
    """What the watch found is raised inside of a step, by a wait for the device, and leaves it."""
    with EPContext.local(CPU) as context:
        recorder = context.flight_recorder
        recorder._failure = found = PeerTimeout("rank 1 is gone")
        for error in (found, RuntimeError("aborted"), found):
            with pytest.raises(PeerTimeout) as raised:
                recorder.leave(error)
            assert raised.value is found
            assert found.__cause__ is not found
            assert found.__cause__ is None or found.__cause__.__cause__ is None
