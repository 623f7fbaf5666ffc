"""Which steps of an optimizer are refused, seen in one process."""

import contextlib

import pytest
import torch
from torch import nn

from ep_moe import ConfigError
from ep_moe.weights.optimizers import _refuse_mixed_groups


def parameter(piece):
    made = nn.Parameter(torch.ones(2))
    made.grad = torch.ones(2)
    if piece:
        made.placements = ()  # as a DTensor
    return made


@pytest.mark.parametrize(
    ("options", "at_once"),
    [({}, False), ({"foreach": False}, False), ({"foreach": True}, True), ({"fused": True}, True)],
)
@pytest.mark.parametrize("kinds", [(False, False), (True, True), (False, True)])
def test_a_group_of_both_kinds_is_refused_where_it_is_updated_in_one_call(kinds, options, at_once):
    """On CPUs by name alone."""
    optimizer = torch.optim.AdamW([parameter(piece) for piece in kinds], **options)
    refused = at_once and len(set(kinds)) == 2
    with pytest.raises(ConfigError, match="a group of AdamW has DTensors") if refused else contextlib.nullcontext():
        _refuse_mixed_groups(optimizer)
