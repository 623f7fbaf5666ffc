"""What flows between the parts of a layer."""

import dataclasses

import pytest
import torch

from ep_moe.types import Pending, Received, RowLayout, Weighting, recomputing


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


def test_each_backward_of_a_process_counts_the_first_one_too(monkeypatch):
    """torch numbers them from 0, and says -1 outside of one."""
    assert not recomputing()
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 0)
    assert recomputing()
