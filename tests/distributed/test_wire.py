"""Layers whose rows travel in other formats than the layer's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ep_moe import Activation, EPContext, MoEConfig, MoELayer, ParallelConfig, Wire
from ep_moe.errors import BackendUnavailable, ConfigError, InputError
from ep_moe.experts.fp8_rows import round_blocks, widen_blocks
from ep_moe.experts.wire_rows import round_rows, widen_rows
from ep_moe.row_formats import ROW_FORMATS
from ep_moe.testing import distributed
from tests.distributed.cases import everywhere, same_error
from tests.helpers import assert_same, fill, integer_routing, integer_rows, oracle

CONFIG = MoEConfig(hidden_size=256, intermediate_size=16, num_experts=6, top_k=3, activation=Activation.RELU2)
FP8 = Wire(dispatch="fp8_block")
WIRES = [FP8, Wire(dispatch="mxfp8"), Wire(dispatch="nvfp4", input_scale=1.0)]
CPU = torch.device("cpu")


def exact_rows(tokens: int, seed: int, wire: Wire) -> torch.Tensor:
    """A number in each block that makes its scale a power of two, under which small integers are exact."""
    x = integer_rows(tokens, CONFIG.hidden_size, seed)
    x[:, :: ROW_FORMATS[wire.dispatch].block] = 6 if wire.dispatch == "nvfp4" else 7
    return x


@pytest.mark.skipif(torch.cuda.is_available(), reason="in float32, on the CPU")
@distributed(2, 4)
@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.dispatch)
@pytest.mark.parametrize("all2all", ["torch_a2a", "allgather"])
@pytest.mark.parametrize("sizes", [{"dp": 0}, {"tp": 0}, {"dp": 0, "ep": 1, "etp": 0}], ids=["dp", "tp", "etp"])
def test_rows_are_rounded_once_before_the_wire(all2all, sizes, wire, world_size):
    sizes = {name: size or world_size for name, size in sizes.items()}
    with EPContext.from_groups(ParallelConfig(**sizes), device=CPU) as context:
        layer = fill(MoELayer(CONFIG, context, all2all=all2all if context.layout.ep > 1 else "local", wire=wire))
        seed = 0 if context.layout.tp > 1 else dist.get_rank()
        for tokens in (5, 0) if context.layout.tp > 1 else (5 + seed, 3 * (1 - seed % 2)):
            routing = integer_routing(tokens, CONFIG, seed)
            x = exact_rows(tokens, seed, wire)
            with torch.no_grad():
                assert_same(layer.forward_routed(x, routing), oracle(CONFIG, x, routing), "exact rows")
                x = torch.randn(tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))
                y = layer.forward_routed(x, routing)
            rounded = oracle(CONFIG, widen_rows(*round_rows(x, wire), wire, torch.float32), routing)
            if tokens:  # sums of the same numbers in another order, and those of other numbers
                most = float(rounded.abs().max())
                assert (y - rounded).abs().max() < 1e-5 * most
                assert (y - oracle(CONFIG, x, routing)).abs().max() > 1e-3 * most


@pytest.mark.skipif(torch.cuda.is_available(), reason="in float32, on the CPU")
@distributed(2)
def test_what_cannot_be_is_said_on_all_ranks(world_size):
    with EPContext.from_groups(ParallelConfig(dp=2), device=CPU) as context:
        wires = [Wire(), FP8]
        text = same_error(ConfigError, lambda: MoELayer(CONFIG, context, wire=wires[dist.get_rank()]))
        assert 'Wire.dispatch: "plain" on rank 0, "fp8_block" on rank 1' in text
        text = same_error(BackendUnavailable, lambda: MoELayer(CONFIG, context, wire=Wire(combine="fp8")))
        assert "allgather carries plain rows in combine, not fp8 (Wire)" in text
        layer = MoELayer(CONFIG, context, wire=FP8)
        x = torch.ones(2, CONFIG.hidden_size, requires_grad=True)
        assert "has no backward" in same_error(InputError, lambda: layer(x))
        assert everywhere("alive") == ["alive"] * 2


def test_formats_that_do_not_exist():
    with pytest.raises(ConfigError, match=r"Wire\.dispatch must be one of plain, fp8_block, mxfp8, nvfp4, got 'fp4'"):
        Wire(dispatch="fp4")
    with pytest.raises(ConfigError, match=r"Wire\.combine must be one of plain, fp8, got 'fp8_block'"):
        Wire(combine="fp8_block")
    for scale in (None, 0.0, float("inf"), "1"):
        with pytest.raises(ConfigError, match=r"Wire\(dispatch='nvfp4'\) needs input_scale, a positive number"):
            Wire(dispatch="nvfp4", input_scale=scale)
    with pytest.raises(ConfigError, match=r"Wire\.input_scale is for nvfp4 rows only, got 1\.0 with mxfp8"):
        Wire(dispatch="mxfp8", input_scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype):
    x = torch.randn(7, 384, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[2], x[3, 130], x[4, 5] = 0, torch.nan, 3e4
    data, scale = round_blocks(x)
    assert (data.dtype, scale.dtype, list(scale.shape)) == (torch.float8_e4m3fn, torch.float32, [7, 3])
    back = widen_blocks(data, scale, torch.float32)
    assert (back[2] == 0).all()
    assert back[3, 128:256].isnan().any()
    assert not back[3, :128].isnan().any()
    fine = torch.ones(7, dtype=torch.bool).index_fill(0, torch.tensor([3]), False)
    error = (back - x.float())[fine].abs().unflatten(1, (3, 128))
    largest = x.float()[fine].abs().unflatten(1, (3, 128))
    # half a unit in the fourth bit, or half of the smallest step, 2**-9, of numbers that end at 448
    assert (error <= torch.maximum(largest * 2**-4, largest.amax(-1, keepdim=True) * 2**-10 / 448) * 1.001).all()
