"""Kernels launched early (PDL) give the same bits as kernels that wait for their predecessors."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ep_moe.testing import distributed
from tests.fixtures import p2p_bodies


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="needs GPUs and Triton"
)
@distributed(2, 4)
@pytest.mark.parametrize("tokens", [1, 24, 150, 1500], ids=["one", "by packets", "by flags", "many"])
@pytest.mark.parametrize("kind", p2p_bodies.EARLY_KINDS)
def test_the_bits_of_kernels_that_wait(kind, tokens, world_size):
    p2p_bodies.kernels_that_start_early(kind, tokens, world_size)
