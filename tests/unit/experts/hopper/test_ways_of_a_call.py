"""Test how a call of the Hopper kernels is split, by its rows and the GPU's memory. Nothing is launched."""

import torch

from ep_moe.experts.hopper import gemm_skinny
from ep_moe.experts.hopper.gemm_streaming import FEW_BLOCKS, H100, H200, Ring, ring_for

BF16 = torch.bfloat16


def test_how_a_call_is_cut(monkeypatch):
    of, of_blocks = gemm_skinny.TileConfig.of, gemm_skinny.TileConfig.of_blocks
    assert [of(count, 0).first.stages for count in (gemm_skinny.FEWEST, gemm_skinny.FEWEST + 1)] == [6, 4]
    assert [of_blocks(count, 0).first.block_n for count in (gemm_skinny.FEWEST, gemm_skinny.FEWEST + 1)] == [64, 128]
    assert of_blocks(gemm_skinny.FEWEST + 1, gemm_skinny.DENSE_BLOCKS) is None
    assert of_blocks(gemm_skinny.UNSORTED + 1, 0) is None
    assert of(gemm_skinny.FEWEST, 1000) is not None
    assert of(gemm_skinny.FEWEST + 1, gemm_skinny.DENSE) is None
    assert of(gemm_skinny.UNSORTED, 0) is not None
    assert of(gemm_skinny.UNSORTED + 1, 0) is None
    qwen, deepseek = (1, 1536, 2048), (1, 4096, 7168)
    fp8, rate = torch.float8_e4m3fn, "ep_moe.experts.hopper.gemm_streaming.memory_rate"
    for memory, limits in ((3.35e12, H100), (4.8e12, H200), (0, H200)):
        monkeypatch.setattr(rate, lambda device, memory=memory: memory)
        for shape, dtype, few in (
            (qwen, BF16, limits.bf16), (qwen, fp8, limits.e4m3), (deepseek, BF16, limits.large),
            (deepseek, fp8, limits.large),
        ):  # fmt: skip
            w13 = torch.empty(shape, dtype=dtype, device="meta")
            rings = [ring_for(count, w13) for count in (10, 22, 23, few, few + 1)]
            assert [None if ring is None else ring.rows for ring in rings] == [
                16, 32 if few >= 22 else None, 64 if few >= 23 else None, 64 if few >= 23 else 32, None
            ]  # fmt: skip
            few = min(few, FEW_BLOCKS)
            found = [ring_for(count, w13, blocks=True) for count in (10, few, few + 1)]
            assert found == [Ring(16, 12), Ring(32, 11), None]
