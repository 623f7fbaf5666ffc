"""Test the values that flow between the parts of a layer."""

import dataclasses

import pytest
import torch

from ep_moe.types import PeerPackets, PeerRows, Pending, Received, RowLayout, Weighting, recomputing


def test_a_pending_result_is_given_once():
    pending = Pending(lambda: 3)
    assert pending.wait() == 3
    with pytest.raises(RuntimeError, match="waited for already; keep the result of the first"):
        pending.wait()


def test_received_rows_become_dense_in_each_tensor():
    names = ("x", "x_scale", "local_ids", "weights", "expert_offsets", "expert_counts")
    views = {name: torch.arange(12).view(3, 4).t() for name in names}
    rows = Received(layout=RowLayout.RANK_MAJOR, weighting=Weighting.EXPERTS, handle=None, **views)
    dense = rows.dense()
    for name, view in views.items():
        assert getattr(dense, name).is_contiguous(), name
        assert torch.equal(getattr(dense, name), view)
    assert dense.dense() is dense
    assert dataclasses.replace(rows, **dict.fromkeys(names)).dense().weights is None


def test_rows_to_peers_are_packets_with_the_calls_number():
    number, words = 7, 3
    blocks = tuple(torch.full((2, 6), -1, dtype=torch.int64) for _ in range(3))
    packets = PeerPackets(blocks, torch.tensor([number, 99], dtype=torch.int32), words)
    rows = torch.tensor([[1.0, -2.0, 0.0], [torch.nan, -0.0, 5.0]])
    packets.write((rows, rows[:, :0], rows.flip(0)))
    for place, given in ((blocks[0], rows), (blocks[2], rows.flip(0))):
        assert ((place[:, : words + 1] >> 32) == number).all(), "one more, also where there is no answer"
        assert torch.equal((place[:, :words] & 0xFFFFFFFF).to(torch.int32), given.view(torch.int32))
        assert (place[:, words + 1 :] == -1).all()
    assert (blocks[1][:, words] >> 32 == number).all()
    assert (blocks[1][:, :words] == -1).all(), "no row is wanted there"


def test_rows_of_peers_are_written_as_packets_where_there_are_some():
    rows, number = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]), torch.tensor([9], dtype=torch.int32)
    plain = tuple(torch.full((2, 2), -1.0) for _ in range(2))
    packets = PeerPackets(tuple(torch.zeros(2, 3, dtype=torch.int64) for _ in range(2)), number, 2)
    peers = PeerRows(plain, torch.zeros(2, dtype=torch.int64), 0, 0, packets)

    def arrived(word):
        return torch.stack([place[:, word] >> 32 for place in packets.blocks]).eq(9).all()

    peers.write_nothing()
    assert arrived(2)
    assert not any(place[:, :2].any() for place in packets.blocks)
    packets.blocks[1].zero_()
    peers.write(rows)
    assert arrived(0)
    assert arrived(2)
    for place, given in zip(packets.blocks, rows.split(2), strict=True):
        assert torch.equal((place[:, :2] & 0xFFFFFFFF).to(torch.int32), given.view(torch.int32))
    assert all((block == -1).all() for block in plain), "packets take the place of rows"
    plain_rows = dataclasses.replace(peers, packets=None)
    plain_rows.write_nothing()
    plain_rows.write(rows)
    assert torch.equal(torch.cat(plain), rows)


def test_each_backward_of_a_process_counts_the_first_one_too(monkeypatch):
    """`recomputing` is True in every backward, the first one included. torch numbers them from 0; -1 means none."""
    assert not recomputing()
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 0)
    assert recomputing()


def test_a_result_that_failed_is_not_waited_for_again():
    """A failed result cannot be waited for again, because its collective would be entered twice."""
    waits = []

    def fails():
        waits.append(1)
        raise ValueError("a peer is gone")

    pending = Pending(fails)
    with pytest.raises(ValueError, match="gone"):
        pending.wait()
    with pytest.raises(RuntimeError, match="waited for already"):
        pending.wait()
    assert waits == [1]


def test_memory_of_peers_is_told_apart_by_all_that_a_kernel_is_given():
    """`place` differs if any argument that a kernel gets differs.

    A kernel compiled or recorded for one place would write into another.
    """
    rows, more = torch.zeros(4, 8), torch.zeros(5, 8)
    packets = PeerPackets((torch.zeros(4, 10, dtype=torch.int64),), torch.zeros(1, dtype=torch.int32), 8)
    one = PeerRows((rows,), torch.zeros(1, dtype=torch.int64), 0, 0, packets)
    others = [
        dataclasses.replace(one, blocks=(more,)),
        dataclasses.replace(one, addresses=torch.zeros(1, dtype=torch.int64)),
        dataclasses.replace(one, offset=64),
        dataclasses.replace(one, rank=1),
        dataclasses.replace(one, packets=None),
        dataclasses.replace(one, packets=dataclasses.replace(packets, number=torch.zeros(1, dtype=torch.int32))),
        dataclasses.replace(one, packets=dataclasses.replace(packets, blocks=(torch.zeros(4, 12, dtype=torch.int64),))),
    ]
    assert len({found.place for found in [one, *others]}) == 1 + len(others)
    assert dataclasses.replace(one).place == one.place
