"""Test `BufferPool`: one workspace for each call in flight, reused after its release."""

from types import SimpleNamespace

import pytest
import torch

from ep_moe import InputError
from ep_moe.all2all import buffer_slots
from ep_moe.all2all.buffer_slots import BufferPool

CPU = torch.device("cpu")


def test_as_many_as_calls_are_in_flight():
    destroyed = []
    pool = BufferPool("mine", lambda device: SimpleNamespace(destroy=lambda: destroyed.append(device)))
    first = pool.take(CPU)
    first.busy = True
    second = pool.take(CPU)
    assert second is not first
    second.busy = True
    first.release(CPU)
    assert pool.take(CPU) is first
    assert pool.buffer_slots == [first, second]
    pool.destroy()
    assert (destroyed, pool.buffer_slots) == ([CPU, CPU], [])


def test_a_slot_that_does_not_fit_is_freed():
    """A slot that does not fit is destroyed and marked `is_freed`, so a graph recorded on it is not replayed."""
    destroyed = []
    pool = BufferPool("mine", lambda device: SimpleNamespace(destroy=lambda: destroyed.append(device)))
    first = pool.take(CPU)
    assert pool.take(CPU, fits=lambda workspace: True) is first
    assert not first.is_freed
    second = pool.take(CPU, fits=lambda workspace: False)
    assert (first.is_freed, second.is_freed, destroyed, pool.buffer_slots) == (True, False, [CPU], [second])


def test_what_a_first_call_of_inference_mode_makes_is_written_outside():
    pool = BufferPool("mine", lambda device: torch.zeros(1, device=device))
    with torch.inference_mode():
        made = pool.take(CPU).workspace
    made.fill_(1)
    assert made.item() == 1


def test_none_is_made_in_a_capture(monkeypatch):
    monkeypatch.setattr(buffer_slots, "capturing", lambda device: True)
    pool = BufferPool("mine", lambda device: SimpleNamespace())
    with pytest.raises(InputError, match="mine makes its buffers in the first call: run the layer once before a capt"):
        pool.take(CPU)
    monkeypatch.undo()
    made = pool.take(CPU)
    monkeypatch.setattr(buffer_slots, "capturing", lambda device: True)
    assert pool.take(CPU) is made


class Stream:
    def __init__(self, handle):
        self.cuda_stream, self.waited = handle, []

    def wait_stream(self, other):
        self.waited.append(other)


def test_a_call_waits_for_the_last_one_on_another_stream(monkeypatch):
    """A call that takes a slot waits for the last call that used it, if that ran on another stream.

    Otherwise it would overwrite rows that the earlier call still reads.
    """
    gpu, here, there = torch.device("cuda", 0), Stream(1), Stream(2)
    now, captured = [here], [False]
    monkeypatch.setattr(buffer_slots, "current_stream", lambda device: {gpu: now[0].cuda_stream}[device])
    monkeypatch.setattr(buffer_slots, "capturing", lambda device: {gpu: captured[0]}[device])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: {gpu: now[0]}[device])
    pool = BufferPool("mine", lambda device: SimpleNamespace())
    slot = pool.take(gpu)
    slot.release(gpu)
    assert pool.take(gpu) is slot
    assert here.waited == []
    now[0], captured[0] = there, True
    pool.take(gpu)
    assert there.waited == [], "a capture begins with a device that has done all"
    captured[0] = False
    pool.take(gpu)
    assert there.waited == [here]
    slot.release(gpu)
    now[0] = here
    pool.take(gpu)
    assert here.waited == [there]
