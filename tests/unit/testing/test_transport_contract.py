"""The contract of transports: what a check leaves behind for the next one, and in the caller's process."""

import contextlib

import pytest
import torch

from ep_moe.testing import transport_case
from ep_moe.testing.transport_contract import _uninitialised_is_nan


@pytest.mark.parametrize("fill", [False, True])
def test_torchs_switches_are_as_they_were(monkeypatch, fill):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
    with contextlib.suppress(KeyError), _uninitialised_is_nan(torch.device("cpu")):
        assert torch.empty(3).isnan().all()
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is fill


def test_a_transport_that_writes_to_its_rows_changes_none_of_the_next_check():
    for _ in range(2):
        x, routing = transport_case.rows(0, 3, torch.float32), transport_case.routes(0, 3, 2, 2)
        assert x.any()
        assert routing.weights.all()
        assert (routing.ids < 99).all()
        x.zero_(), routing.weights.zero_(), routing.ids.fill_(99)
