"""Test the recorded load of ranks that see the same rows."""

from types import SimpleNamespace

import pytest
import torch

from ep_moe import ExpertMap, InputError, Placement
from ep_moe.eplb.load import LoadRecorder, LoadWindow
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup


def layer_of(top_k, etp=1):
    placement = Placement(ExpertMap.linear(4, 1))
    weights = SimpleNamespace(etp=SimpleNamespace(size=etp), config=SimpleNamespace(top_k=top_k))
    return SimpleNamespace(name=f"moe{top_k}", placement=placement, expert_weights=weights)


def test_members_of_an_etp_group_count_a_row_once():
    layer = layer_of(2, etp=2)
    placement = layer.placement
    recorder = LoadRecorder([layer], RankGroup.alone(), steps=2)
    placement.expert_load += torch.tensor([4, 0, 2, 2])  # the sum over both members
    recorder.step()
    trace = recorder.finish()
    assert trace.counts.tolist() == [[[2, 0, 1, 1]]]
    assert trace.tokens.tolist() == [2], "routes by the experts of a token"


def test_tokens_are_those_of_the_layer_with_the_most():
    """The tokens of a trace are those of the layer with the most, by each layer's own top_k."""
    layers = [layer_of(4), layer_of(2)]
    recorder = LoadRecorder(layers, RankGroup.alone(), steps=1)
    for layer in layers:
        layer.placement.expert_load += torch.tensor([2, 2, 2, 2])
    recorder.step()
    assert recorder.finish().tokens.tolist() == [4]


def test_tokens_are_rounded_up():
    """The number of tokens is rounded up, because a token may have fewer than top_k routes."""
    layer = layer_of(2)
    recorder = LoadRecorder([layer], RankGroup.alone(), steps=1)
    layer.placement.expert_load += torch.tensor([2, 0, 1, 2])
    recorder.step()
    assert recorder.finish().tokens.tolist() == [3]


@pytest.mark.parametrize(("resets", "counted"), [(0, [5, 0, 2, 5]), (1, [1, 0, 0, 3]), (2, [1, 0, 0, 3])])
def test_a_layer_that_is_reset_within_a_window_begins_anew(resets, counted):
    layers = [layer_of(2), layer_of(3)]
    placements = [layer.placement for layer in layers]
    for placement in placements:
        placement.expert_load += 7  # counted before the window starts
    window = LoadWindow(layers, interval=2, window=2)
    for placement in placements:
        placement.expert_load += torch.tensor([4, 0, 2, 2])
    for _ in range(resets):
        placements[0].reset_load()
    for placement in placements:
        placement.expert_load += torch.tensor([1, 0, 0, 3])
    assert window.ends(2)
    window.close()
    assert window.take().tolist() == [counted, [5, 0, 2, 5]]


def test_recorders_of_other_numbers_of_steps_are_named_by_the_ranks_of_the_job(monkeypatch):
    monkeypatch.setattr(RankGroup, "agree", lambda *_: [[2], [2], [1]])
    recorder = LoadRecorder([layer_of(2)], RankGroup(None, (4, 6, 9), 0, FlightRecorder()), steps=2)
    with pytest.raises(InputError, match="recorded 2 steps on rank 4 and 1 on rank 9"):
        recorder.finish()
