"""Test, without ranks and a GPU, when calls with gradients are recorded, and what ends a recording."""

from types import SimpleNamespace as Some

import pytest
import torch

from ep_moe import PeerTimeout
from ep_moe.execution import trained_graphs
from ep_moe.execution.trained_graphs import TrainedCall, TrainedGraphs


@pytest.mark.parametrize("timed", [False, True])
def test_calls_whose_stages_are_timed_are_not_recorded(timed, monkeypatch):
    graphs = TrainedGraphs(Some(_stage_times=Some(timed=timed)))
    monkeypatch.setattr(trained_graphs, "TrainedCall", lambda *_: "recorded")
    monkeypatch.setattr(graphs, "_can", lambda *_: True)
    transports = type("Transports", (), {"bound": 3})
    assert graphs.call(transports, object(), torch.ones(1)) == (None if timed else "recorded")


def test_a_torch_that_does_not_tell_its_hooks_records_no_calls(monkeypatch):
    assert trained_graphs._autograd_saves()
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    assert not trained_graphs._autograd_saves()


@pytest.mark.parametrize(
    ("shape", "dtype", "now"),
    [((2, 3), torch.float32, None), ((3, 2), torch.float32, r"\[3, 2\] of torch.float32"),
     ((2, 3), torch.float64, r"\[2, 3\] of torch.float64")],
)  # fmt: skip
def test_a_recording_asks_for_the_tensors_of_the_call_before(shape, dtype, now):
    held = torch.ones(2, 3)
    take = trained_graphs._allocator_of({"kept": held})
    if now is None:
        assert take("kept", shape, dtype) is held
        return
    with pytest.raises(RuntimeError, match=rf"kept was \[2, 3\] of torch.float32, and is now {now}"):
        take("kept", shape, dtype)


def test_a_lost_peer_is_no_failed_recording():
    def record():
        raise PeerTimeout("lost")

    steps = []
    call = Some(_context=Some(flight_recorder=Some(newest="before", set_newest_step=steps.append)))
    with pytest.raises(PeerTimeout, match="lost"):
        TrainedCall._record(call, record)
    assert steps == ["before"]
