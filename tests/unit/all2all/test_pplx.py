"""Test the arguments that pplx-kernels gets from the transport. Elsewhere an emulation stands for its object."""

import sys
from types import SimpleNamespace

import pytest
import torch

from ep_moe import Wire
from ep_moe.all2all import pplx
from ep_moe.all2all.dispatch_shape import DispatchShape
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup


@pytest.mark.parametrize(
    ("wire", "row_bytes", "scale_bytes"),
    [(Wire(), 1024, 0), (Wire(dispatch="fp8_block"), 512, 16)],
    ids=["plain", "fp8"],
)
def test_the_library_makes_its_buffers_for_the_shape_of_the_group(wire, row_bytes, scale_bytes, monkeypatch):
    """Sizes of which no two are equal, over ranks of the job's that are not its first ones."""
    groups, made = [], []
    monkeypatch.setattr(
        pplx.dist, "new_group", lambda ranks, **how: groups.append((ranks, how)) or SimpleNamespace(group_name="of two")
    )
    intranode = SimpleNamespace(intranode=lambda **given: made.append(given))
    monkeypatch.setitem(sys.modules, "pplx_kernels", SimpleNamespace(AllToAll=intranode))
    shape = DispatchShape(
        hidden_size=512, top_k=3, slots_per_rank=5, num_ranks=2, dtype=torch.bfloat16, max_tokens=7, wire=wire
    )
    pplx.make_all2all(shape, RankGroup(None, (4, 6), 1, FlightRecorder()))
    assert groups == [([4, 6], {"backend": "cpu:gloo,cuda:nccl", "use_local_synchronization": True})]
    assert made == [
        {
            "max_num_tokens": 7,
            "num_experts": 10,
            "experts_per_token": 3,
            "rank": 1,
            "world_size": 2,
            "dp_size": 1,
            "hidden_dim": 512,
            "hidden_dim_bytes": row_bytes,
            "hidden_dim_scale_bytes": scale_bytes,
            "group_name": "of two",
        }
    ]
