"""Test parts of the `hierarchical` transports without ranks: the renumbering of ids, and refused calls."""

import dataclasses

import pytest
import torch

from ep_moe import InputError
from ep_moe.all2all import hierarchical_static
from ep_moe.all2all.hierarchical import HierarchicalDispatcher, NodeMajorIds
from ep_moe.all2all.hierarchical_static import HierarchicalNVLinkDispatcher, HierarchicalStaticDispatcher
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.parallel.rank_group import Levels, RankGroup
from ep_moe.testing.transport_case import dispatch_shape
from ep_moe.types import PhysicalIds, PhysicalRouting


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_ranks_that_do_not_follow_their_nodes(dtype):
    """Ids are renumbered to node-major order if an EP group's ranks are not in node order.

    Ids out of range on either side stay as they are, so that all ranks refuse them later, together.
    """
    alone = RankGroup.alone()
    node_major = NodeMajorIds(Levels(alone, alone, (0, 2, 1, 3)), slots_per_rank=2)
    ids = torch.tensor([[-1, 0, 1, 2, 3], [4, 5, 6, 7, 8], [9, 100, -7, 2**31 - 1, -(2**31)]], dtype=dtype)
    found = node_major.of(ids)
    assert found.dtype == dtype
    assert found.tolist() == [[-1, 0, 1, 4, 5], [2, 3, 6, 7, 8], [9, 100, -7, 2**31 - 1, -(2**31)]]


@pytest.mark.parametrize("captures", [False, True])
def test_a_problem_within_a_capture_sends_nothing(captures, monkeypatch):
    """In a capture, a rank with a problem raises and sends nothing, because its peers have not started.

    Outside a capture its peers have started, so the rank sends, and they get NaN for its rows.
    """
    sent, gather = [], hierarchical_static.gather_rows
    monkeypatch.setattr(hierarchical_static, "capturing", lambda device: captures)
    monkeypatch.setattr(hierarchical_static, "gather_rows", lambda x, *how: (sent.append(len(x)), gather(x, *how))[1])
    shape = dispatch_shape(1, 2, torch.float32)
    dispatcher = HierarchicalStaticDispatcher(shape, RankGroup.alone())
    none = PhysicalRouting(PhysicalIds(torch.zeros(0, 2, dtype=torch.int64)), torch.zeros(0, 2))
    with pytest.raises(InputError, match="planted"):
        dispatcher.dispatch_start(torch.zeros(0, shape.hidden_size), none, "planted", max_tokens=3)
    assert sent == ([] if captures else [3, 3])


def test_a_problem_of_the_caller_is_raised_in_place_of_a_dispatch():
    shape = dispatch_shape(1, 2, torch.float32)
    routing = PhysicalRouting(PhysicalIds(torch.zeros(3, 2, dtype=torch.int64)), torch.ones(3, 2))
    with pytest.raises(InputError, match="planted"):
        HierarchicalDispatcher(shape, RankGroup.alone()).dispatch_start(
            torch.zeros(3, shape.hidden_size), routing, "planted"
        )


def test_the_transport_within_a_node_has_room_for_all_nodes_and_ends_with_the_whole(monkeypatch):
    made, ended = [], []

    class OfNode(NVLinkP2PDispatcher):
        def __init__(self, dispatch_shape, rank_group):
            made.append((dispatch_shape, rank_group))

        def destroy(self):
            ended.append(self)

    monkeypatch.setattr(hierarchical_static, "NVLinkP2PDispatcher", OfNode)
    recorder = RankGroup.alone().flight_recorder
    node, rail = RankGroup(None, (2, 3), 0, recorder), RankGroup(None, (0, 2, 4), 1, recorder)
    every = RankGroup(None, tuple(range(6)), 2, recorder, Levels(node, rail, tuple(range(6))))
    shape = dispatch_shape(6, 2, torch.bfloat16)
    dispatcher = HierarchicalNVLinkDispatcher(shape, every)
    assert made == [(dataclasses.replace(shape, num_ranks=2, max_tokens=3 * shape.max_tokens), node)]
    dispatcher.destroy()
    assert len(ended) == 1


@pytest.mark.parametrize("columns", [5, 6, 8])
def test_rows_of_any_number_of_bytes_share_a_message(columns):
    """Rows of any number of bytes share a message with ids and weights, which are aligned to whole words."""
    shape = dataclasses.replace(dispatch_shape(1, 1, torch.bfloat16), hidden_size=columns)
    x = torch.arange(3 * columns, dtype=torch.bfloat16).view(3, columns)
    routing = PhysicalRouting(PhysicalIds(torch.tensor([[0], [1], [-1]])), torch.tensor([[0.5], [2.0], [1.0]]))
    received = HierarchicalStaticDispatcher(shape, RankGroup.alone()).dispatch(x, routing, max_tokens=4)
    assert torch.equal(received.x[:3], x)
    assert received.weights[:3].tolist() == [[0.5], [2.0], [1.0]]
    assert received.local_ids.tolist() == [[0], [1], [-1], [-1]]
