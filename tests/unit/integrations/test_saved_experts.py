"""Test what `save_pretrained` and `export_weights` refuse before a rank waits for another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_moe import ConfigError
from ep_moe.integrations.save import check_plain


def on(device: str, **sizes: int) -> list[Any]:
    """Return a layer on the CPU, whose context is on `device`."""
    context = SimpleNamespace(
        device=torch.device(device), layout=SimpleNamespace(**{"pp": 1, "ep": 1, "etp": 1} | sizes)
    )
    weights = SimpleNamespace(device=torch.device("cpu"), lora=None, scheme=SimpleNamespace(plain=True))
    return [SimpleNamespace(layer=SimpleNamespace(name="moe0", context=context, expert_weights=weights))]


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"etp": 2}], ids=str)
def test_experts_travel_on_the_contexts_device(sizes):
    sentence = r"moe0 is on cpu and its EPContext on cuda:1.*call model\.to\('cuda:1'\) before export_weights"
    with pytest.raises(ConfigError, match=sentence):
        check_plain(on("cuda:1", **sizes), "export_weights")
    check_plain(on("cpu", **sizes), "export_weights")


def test_one_rank_may_hold_them_anywhere():
    check_plain(on("cuda:0"), "save_pretrained")


def test_a_stage_of_a_pipeline_is_no_model():
    with pytest.raises(ConfigError, match=r"ParallelConfig.pp must be 1 for save_pretrained, got 2; save state_dict"):
        check_plain(on("cpu", pp=2), "save_pretrained")
