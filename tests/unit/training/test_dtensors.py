"""Test over which ranks a parameter outside of the experts may be sharded."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import Replicate, Shard

from ep_moe import ParallelConfig, RankLayout, Tokens
from ep_moe.training import dtensors


class Sharded(nn.Linear):
    """A stand-in for an FSDP2 module."""


def problem(ranks, *, of_fsdp, placements=None, trained=True, monkeypatch):
    """Return the problem of a weight sharded over ranks, in a job of 2 dp ranks with 2 tp ranks each."""
    layout = RankLayout.from_config(ParallelConfig(dp=2, tp=2, tokens=Tokens.SHARDED), world=4, rank=0)
    monkeypatch.setattr(fsdp, "FSDPModule", Sharded)
    monkeypatch.setattr(dtensors, "is_dtensor", lambda parameter: hasattr(parameter, "device_mesh"))
    model = nn.ModuleDict({"cut": (Sharded if of_fsdp else nn.Linear)(2, 2), "whole": Sharded(2, 2)})
    weight = model["cut"].weight.requires_grad_(trained)
    weight.device_mesh, weight.placements = SimpleNamespace(mesh=torch.tensor(ranks)), placements or (Shard(0),)
    return dtensors.mesh_problem(model, [name for name, _ in model.named_parameters()], layout)


@pytest.mark.parametrize(
    ("ranks", "of_fsdp", "words"),
    [
        ([0, 1, 2, 3], True, None),  # all ranks with different tokens: the gradient is their mean
        ([0, 1, 2, 3], False, "which are not in one tp group"),
        ([0, 2], False, "which are not in one tp group"),
        ([0, 2], True, "over which FSDP averages its gradient, and 4 ranks have different tokens"),
        ([0, 1], False, "and its gradient is a sum over tp ranks with different tokens"),
    ],
)
def test_a_gradient_is_a_mean_over_the_ranks_with_tokens(ranks, of_fsdp, words, monkeypatch):
    said = problem(ranks, of_fsdp=of_fsdp, monkeypatch=monkeypatch)
    if words is None:
        assert said is None
    else:
        assert said.startswith(f"cut.weight is a DTensor over ranks {', '.join(map(str, ranks))}, {words}")


def test_what_fsdp_lays_over_tensor_parallelism_is_a_sum_too(monkeypatch):
    """A parameter that FSDP shards over tensor parallelism has a gradient that is a sum over tp ranks.

    In a mesh of two dimensions, FSDP2 shards the first one.
    """
    ranks = [[0, 1], [2, 3]]
    for placements, summed in (((Shard(0), Shard(0)), True), ((Replicate(), Shard(0)), False)):
        said = problem(ranks, of_fsdp=True, placements=placements, monkeypatch=monkeypatch)
        assert (said is not None and "is a sum over tp ranks" in said) is summed


def test_what_does_not_train_may_lie_anywhere(monkeypatch):
    assert problem([0, 2], of_fsdp=False, trained=False, monkeypatch=monkeypatch) is None
