"""Test which exception leaves a failed call."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch

from ep_moe import Activation, EPContext, MoEConfig, MoELayer
from ep_moe.errors import EPMoEError, InputError, OutOfMemory, PeerTimeout, RankFailed
from ep_moe.parallel import failed
from ep_moe.parallel.failed import (
    causes,
    failure_text,
    is_communication_error,
    is_out_of_memory,
    published_failure,
    with_cause,
)
from tests.fixtures.helpers import fill
from tests.fixtures.planted_errors import FULL, plant

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2, activation=Activation.RELU2)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("users", [False, True])
def test_an_error_of_ours_from_a_users_module_is_reported_to_peers(users, monkeypatch):
    reported = []
    with EPContext.local(CPU) as context:
        of_many = SimpleNamespace(
            has_no_peers=False, failed=None, publish_failure=lambda error, _: reported.append(str(error))
        )
        monkeypatch.setattr(context, "flight_recorder", of_many)
        context._report_exception(InputError("raised by a router"), users=users)
        monkeypatch.undo()
    assert reported == ["raised by a router"] * users, "what ep_moe raises itself, all ranks raise"


@pytest.mark.parametrize(
    ("before", "failure", "raised"),
    [
        (True, RankFailed("rank 1 failed"), True),
        (False, OutOfMemory("rank 0 ran out"), True),
        (False, RankFailed("f"), False),
    ],
)
def test_what_is_raised_in_place_of_a_users_error(before, failure, raised, monkeypatch):
    """An earlier failure and an out-of-memory error replace a user's error. Otherwise it is raised with a note."""
    error = KeyError("of the user's")
    with EPContext.local(CPU) as context:
        of_many = SimpleNamespace(has_no_peers=False, failed=before, publish_failure=lambda error, _: failure)
        monkeypatch.setattr(context, "flight_recorder", of_many)
        with pytest.raises(type(failure)) if raised else contextlib.nullcontext() as caught:
            context._report_exception(error, users=True)
        monkeypatch.undo()
    assert caught.value is failure if raised else error.__notes__ == ["ep_moe: f"]


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


def test_a_failure_that_is_raised_again_has_no_trace_of_the_last_time():
    failure = RankFailed("rank 1 failed")
    with contextlib.suppress(RankFailed):
        raise failure
    assert with_cause(failure, RuntimeError("aborted")).__traceback__ is None


def test_a_step_left_by_the_recorded_failure():
    """A step that the recorded failure itself left raises it again, without a cycle of causes.

    The watchdog's failure is raised inside the step, by a wait for the device.
    """
    with EPContext.local(CPU) as context:
        recorder = context.flight_recorder
        recorder._failure = found = PeerTimeout("rank 1 is gone")
        for error in (found, RuntimeError("aborted"), found):
            with pytest.raises(PeerTimeout) as raised:
                recorder.end_step(error)
            assert raised.value is found
            assert found.__cause__ is not found
            assert found.__cause__ is None or found.__cause__.__cause__ is None


def test_one_process_has_no_peers_to_tell():
    layer = fill(MoELayer(CONFIG, EPContext.local(CPU)))
    plant(layer, "experts", torch.OutOfMemoryError(FULL))
    with pytest.raises(torch.OutOfMemoryError, match="total capacity") as caught:
        layer(torch.ones(2, 16))
    assert not isinstance(caught.value, EPMoEError)
    assert layer(torch.ones(2, 16)).shape == (2, 16)


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (ValueError("out of memory"), False),
        (RuntimeError("shapes"), False),
        (RuntimeError("NCCL error in: x.cpp:1, unhandled cuda error"), True),
    ],
)
def test_what_is_memory(error, memory, monkeypatch):
    monkeypatch.setattr(failed, "memory_left", lambda device: (1 << 20, 80 << 30))
    assert is_out_of_memory(error, GPU) is memory


def test_an_nccl_error_beside_free_memory_is_none_of_memory(monkeypatch):
    monkeypatch.setattr(failed, "memory_left", lambda device: (2 << 30, 80 << 30))
    assert not is_out_of_memory(RuntimeError("NCCL error in: x.cpp:1, unhandled cuda error"), GPU)


def test_what_comes_from_memory_is_memory():
    error = RuntimeError("cannot run here")
    error.__cause__ = torch.OutOfMemoryError("x")
    assert is_out_of_memory(error, CPU)


@pytest.mark.parametrize(
    ("error", "communication"),
    [
        (RuntimeError("Connection closed by peer [127.0.0.1]:40000"), True),
        (RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:1]"), True),
        (RuntimeError("NCCL error in: x.cpp:1, remote process exited"), True),
        (torch.distributed.DistBackendError("timed out"), True),
        (RuntimeError("shapes"), False),
    ],
)
def test_what_is_of_a_peer(error, communication):
    assert is_communication_error(error) is communication


@pytest.mark.parametrize(("size", "said"), [(400, "x" * 400), (401, "x" * 400 + "...")])
def test_long_words_of_an_exception_are_cut(size, said):
    text = failure_text(RuntimeError("x" * size), 1, "in combine (step 2)", "", CPU, memory=False)
    assert f"raised RuntimeError between calls: {said} (it was last seen in combine (step 2))" in text


@pytest.mark.parametrize(("memory", "kind"), [(False, RankFailed), (True, OutOfMemory)])
def test_a_failure_is_read_as_it_was_published(memory, kind):
    found = published_failure(json.dumps({"memory": memory, "text": "rank 1 failed"}).encode())
    assert (type(found), str(found)) == (kind, "rank 1 failed")
    assert published_failure(b"") is None
