"""The contract of transports: what it leaves behind in the caller's process."""

import contextlib

import pytest
import torch

from ep_moe.testing.transport_contract import _uninitialised_is_nan


@pytest.mark.parametrize("fill", [False, True])
def test_torchs_switches_are_as_they_were(monkeypatch, fill):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
    with contextlib.suppress(KeyError), _uninitialised_is_nan(torch.device("cpu")):
        assert torch.empty(3).isnan().all()
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is fill
