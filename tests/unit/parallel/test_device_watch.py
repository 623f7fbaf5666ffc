"""Test the watch over a device that still waits after its host went on."""

import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from ep_moe import PeerTimeout
from ep_moe.parallel import device_watch as device_watch_module
from ep_moe.parallel import flight_recorder as recorder_module
from ep_moe.parallel.device_watch import DeviceMark, DeviceWatch
from ep_moe.parallel.flight_recorder import FlightRecorder


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
    time.sleep(flight_recorder._period)  # the time between two marks
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


def test_a_capture_holds_no_mark(monkeypatch):
    """A capture records no mark. Each replay would set it, and the device would seem ahead of the host."""
    cpu, watch = torch.device("cpu"), DeviceWatch(0.0, abortable=False)
    watch.active = True
    monkeypatch.setattr(device_watch_module, "DeviceMark", Reached)
    watch.prepare(cpu)
    monkeypatch.setattr(device_watch_module, "capturing", lambda device: True)
    watch.mark(cpu)
    assert watch.newest.reached, "a mark was set"
    monkeypatch.undo()
    watch.mark(cpu)
    assert not watch.newest.reached


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
