"""Test the checksum of the dense parameters that an optimizer steps together with experts."""

import torch
from torch import nn

from ep_moe.weights.dense_checksum import DenseChecksum


def parameter(**attributes):
    made = nn.Parameter(torch.ones(2, 3))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def moves(checksum, change):
    """Return whether a write to these parameters changes the checksum."""
    before = checksum.now().clone()
    with torch.no_grad():
        change.add_(1)
    return not torch.equal(checksum.now(), before)


def test_plain_dense_parameters_that_learn_are_read():
    dense, frozen = parameter(), parameter().requires_grad_(False)
    expert, piece = parameter(summed_over_ranks=None), parameter(placements=())
    with torch.inference_mode():
        inferred = parameter()
    optimizer = torch.optim.SGD([expert, piece, inferred, dense], lr=0.1)
    optimizer.add_param_group({"params": [frozen]})
    checksum = DenseChecksum(optimizer)
    assert [moves(checksum, each) for each in (dense, frozen, expert, piece)] == [True, False, False, False]
    assert not torch.equal(checksum.before, checksum.now())


def test_the_checksum_of_an_optimizer_of_experts_alone_is_zero():
    checksum = DenseChecksum(torch.optim.SGD([parameter(summed_over_ranks=None)], lr=0.1))
    assert checksum.before == checksum.now() == 0


def test_parameters_are_not_kept():
    dense, gone = parameter(), parameter()
    optimizer = torch.optim.SGD([dense, gone], lr=0.1)
    checksum = DenseChecksum(optimizer)
    optimizer.param_groups.clear()
    del gone
    assert moves(checksum, dense)
    last = checksum.now()
    del dense
    assert torch.equal(checksum.now(), last)
