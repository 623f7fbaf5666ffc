"""Rows in every wire format on a GPU equal those of the CPU, also inside a captured CUDA graph."""

from __future__ import annotations

import pytest
import torch

from ep_moe import Wire
from ep_moe.quant.row_format import dequantize_from_wire, quantize_for_wire

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

WIRES = [
    Wire(),
    Wire(dispatch="fp8_block"),
    Wire(dispatch="fp8_row"),
    Wire(dispatch="fp8_tensor", input_scale=0.006),  # some rows saturate
    Wire(dispatch="mxfp8"),
    Wire(dispatch="nvfp4", input_scale=0.002),
]


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.dispatch)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_captured(wire, dtype):
    x = torch.randn(33, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    there = torch.zeros(33, 1024, dtype=dtype, device="cuda")[:, :512]  # a slice of a wider tensor

    def there_and_back() -> torch.Tensor:
        return dequantize_from_wire(*quantize_for_wire(there, wire), wire, dtype)

    there_and_back()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = there_and_back()
    there.copy_(x)
    graph.replay()
    torch.testing.assert_close(
        found.cpu(), dequantize_from_wire(*quantize_for_wire(x, wire), wire, dtype), rtol=0, atol=0
    )
