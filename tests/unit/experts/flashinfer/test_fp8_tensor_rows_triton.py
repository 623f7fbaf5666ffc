"""Test the Triton kernels of `fp8_tensor_rows` against the torch functions, which define them."""

from __future__ import annotations

import pytest
import torch

from ep_moe.experts.flashinfer import call_scales
from tests.fixtures.fp8_block_kernels import DEVICE
from tests.fixtures.fp8_tensor_rows import empty_scales, scales_and_rows

pytest.importorskip("triton", reason="Triton is not installed")


def test_scales():
    _, inputs, w13, w2 = scales_and_rows()
    wanted, found = empty_scales(), empty_scales(DEVICE)
    call_scales.fill_scales(0.0137, w13, w2, inputs.second, wanted)
    there = (tensor.to(DEVICE) for tensor in (w13, w2, inputs.second))
    call_scales.launch_fill_scales(0.0137, *there, found)
    for name, value in vars(wanted).items():
        assert torch.equal(getattr(found, name).cpu(), value), name
