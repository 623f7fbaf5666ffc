"""Test the checksum of the dense parameters that an optimizer steps together with experts."""

import torch
from torch import nn

from ep_moe.weights.beside import Beside


def parameter(**attributes):
    made = nn.Parameter(torch.ones(2, 3))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def moves(beside, change):
    """Return whether a write to these parameters changes the checksum."""
    before = beside.now().clone()
    with torch.no_grad():
        change.add_(1)
    return not torch.equal(beside.now(), before)


def test_plain_dense_parameters_that_learn_are_read():
    dense, frozen = parameter(), parameter().requires_grad_(False)
    expert, piece = parameter(summed_over_ranks=None), parameter(placements=())
    with torch.inference_mode():
        inferred = parameter()
    optimizer = torch.optim.SGD([expert, piece, inferred, dense], lr=0.1)
    optimizer.add_param_group({"params": [frozen]})
    beside = Beside(optimizer)
    assert [moves(beside, each) for each in (dense, frozen, expert, piece)] == [True, False, False, False]
    assert not torch.equal(beside.before, beside.now())


def test_an_optimizer_of_experts_alone_has_nothing_beside_them():
    beside = Beside(torch.optim.SGD([parameter(summed_over_ranks=None)], lr=0.1))
    assert beside.before == beside.now() == 0


def test_parameters_are_not_kept():
    dense, gone = parameter(), parameter()
    optimizer = torch.optim.SGD([dense, gone], lr=0.1)
    beside = Beside(optimizer)
    optimizer.param_groups.clear()
    del gone
    assert moves(beside, dense)
    last = beside.now()
    del dense
    assert torch.equal(beside.now(), last)
