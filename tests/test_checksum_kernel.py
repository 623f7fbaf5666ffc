"""The Triton form of EPLB's checksums against the torch form; on a CPU in Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read as the kernel is imported
pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available() and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
    pytest.skip("Triton's interpreter (3.6) takes arrays for numbers, NumPy 2.4 does not", allow_module_level=True)

from ep_moe.eplb import checksum_triton
from ep_moe.eplb.store import Checksum

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("words", [[1], [7, 4096], [5000, 1, 8192, 3], [(1 << 20) + 5, 9], [(1 << 21) + 4096]], ids=str)
def test_same_as_torch(words):
    generator = torch.Generator().manual_seed(sum(words))
    parts = [torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator) for count in words]
    bytes_of = [part.view(torch.uint8) for part in parts]
    expected = Checksum(torch.device("cpu")).of_parts(bytes_of)
    here = Checksum(DEVICE)
    found = checksum_triton.of_parts([part.to(DEVICE) for part in parts], here._factors, here._powers)
    assert int(found) == int(expected)
    if DEVICE.type == "cuda":
        assert int(here.of_parts([part.to(DEVICE) for part in bytes_of])) == int(expected)
