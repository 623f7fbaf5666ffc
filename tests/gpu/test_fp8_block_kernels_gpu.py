"""The Triton kernels for fp8 blocks on a GPU: shapes of real models, odd row counts, every config, CUDA graphs."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe.experts.hopper import gemm_fp8_block as kernels
from ep_moe.experts.hopper import route_sort
from ep_moe.experts.hopper.experts import ACTIVATIONS
from tests.fixtures import fp8_block_kernels as checks

COMPUTED = sorted(ACTIVATIONS, key=lambda activation: activation.value)

pytestmark = pytest.mark.timeout(900)
HOPPER = torch.cuda.get_device_capability() == (9, 0)
CONFIGS = [kernels.GemmConfig(64, 128, programs=2), kernels.GemmConfig(16, 128)]
if HOPPER:
    CONFIGS += [
        kernels.GemmConfig(64, 128, stages=4, hopper=True, programs=2),
        kernels.GemmConfig(64, 256, stages=5, hopper=True, group_m=2),
        kernels.GemmConfig(128, 128, stages=6, hopper=True),
        kernels.GemmConfig(128, 128, stages=6, hopper=True, wide=False, group_m=3),
        kernels.GemmConfig(128, 256, stages=4, hopper=True),
        kernels.GemmConfig(128, 256, stages=4, hopper=True, wide=False),
    ]
each_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


@each_config
@pytest.mark.parametrize("layout", ["contiguous", "starts", "batched"])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (384, 768), (1536, 2048)])
def test_gemm(config, layout, n, k):
    counts = [1, 0, 255, 256, 257, 7, 0]
    check = {"config": config, "batched": layout == "batched", "starts": layout == "starts"}
    checks.check_gemm(counts, n, k, "cuda", **check)


@each_config
@pytest.mark.parametrize("counts", [[4099], [0, 0, 4099, 0], [1] * 33, [0, 0]], ids=["one", "one of four", "few", "0"])
def test_gemm_uneven(config, counts):
    checks.check_gemm(counts, 512, 512, device="cuda", config=config, dtype=torch.float16)


@each_config
def test_gemm_deepseek(config):
    checks.check_gemm([300, 130, 5], 4096, 7168, device="cuda", config=config)


@pytest.mark.parametrize("rows", [1, 64, 1000, 5000])
def test_gemm_default(rows):
    checks.check_gemm([rows, rows // 2], 1024, 1024, device="cuda", config=None)


@pytest.mark.skipif(not HOPPER, reason="the fused kernel is for sm90")
@pytest.mark.parametrize("activation", COMPUTED)
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("counts", "inner", "k"), [([1, 0, 255, 256, 257, 7, 0], 384, 768), ([3000, 5], 768, 2048)])
def test_gemm_activate(activation, block_m, up_first, batched, counts, inner, k):
    config = kernels.GemmConfig(block_m, 256, stages=4, hopper=True)
    checks.check_gemm_activate(counts, inner, k, activation, "cuda", config, up_first, batched)


def test_gemm_same_bits():
    """Repeated GEMMs give the same bits, wherever and whenever a tile is computed."""
    a, a_scale, b, b_scale = checks.random_operands(3000, 4, 1024, 1024, "cuda")
    ends = torch.tensor([700, 701, 2000, 3000], dtype=torch.int32, device="cuda")
    outs = [torch.empty(3000, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(20)]
    for out in outs:
        kernels.grouped_gemm(a, a_scale, b, b_scale, ends, out)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(("rows", "k"), [(1, 128), (7, 384), (255, 2048), (4099, 7168), (257, 768)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantize(rows, k, dtype):
    checks.check_quantize(rows, k, "cuda", dtype)


@pytest.mark.parametrize(("rows", "top_k", "k"), [(1, 1, 128), (257, 8, 768), (4099, 8, 2048)])
def test_quantize_pairs(rows, top_k, k):
    checks.check_quantize_pairs(rows, top_k, k, "cuda")


@pytest.mark.parametrize("activation", COMPUTED)
@pytest.mark.parametrize(("rows", "size"), [(1, 128), (256, 768), (4099, 2048)])
@pytest.mark.parametrize("up_first", [False, True])
def test_activation(activation, rows, size, up_first):
    checks.check_activation(rows, size, activation, up_first, "cuda")


@pytest.mark.parametrize(("rows", "top_k", "size"), [(1, 1, 128), (255, 8, 2048), (4099, 8, 7168), (7, 6, 2880)])
@pytest.mark.parametrize("weighted", [False, True])
def test_reduce(rows, top_k, size, weighted):
    checks.check_reduce(rows, top_k, size, "cuda", weighted=weighted)


@pytest.mark.parametrize(
    ("rows", "top_k", "experts"), [(1, 1, 1), (257, 8, 32), (16384, 8, 32), (4099, 8, 64), (5000, 9, 257)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_group(rows, top_k, experts, dtype):
    checks.check_group(rows, top_k, experts, "cuda", dtype=dtype)
    checks.check_group(rows, top_k, experts, "cuda", dtype=dtype, base=512)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_group_extremes(share):
    checks.check_group(4099, 8, 33, "cuda", share=share, only=32)


def test_graph():
    """All kernels of a call in a CUDA graph give, on new routings, the bits of a run outside of one."""
    n, top_k, experts, hidden, inner = 1000, 4, 8, 512, 256
    pairs = n * top_k
    on = {"device": "cuda"}
    ids = torch.empty(n, top_k, dtype=torch.int32, **on)
    x = torch.empty(n, hidden, dtype=torch.bfloat16, **on)
    weights = torch.rand(n, top_k, **on)
    _, _, w13, w13_scale = checks.random_operands(1, experts, 2 * inner, hidden, "cuda")
    _, _, w2, w2_scale = checks.random_operands(1, experts, hidden, inner, "cuda")
    w13_scale, w2_scale = w13_scale * 0.01, w2_scale * 0.01
    source = torch.empty(pairs, dtype=torch.int32, **on)
    slots = torch.empty(n, top_k, dtype=torch.int32, **on)
    ends = torch.empty(experts, dtype=torch.int32, **on)
    space = torch.empty(route_sort.group_workspace(pairs, experts), dtype=torch.int32, **on)
    a, a_scale = checks.quantized_like(pairs, hidden, "cuda")
    h = torch.empty(pairs, 2 * inner, dtype=torch.bfloat16, **on)
    c, c_scale = checks.quantized_like(pairs, inner, "cuda")
    y = torch.empty(pairs, hidden, dtype=torch.bfloat16, **on)
    out = torch.empty(n, hidden, dtype=torch.bfloat16, **on)

    def run():
        route_sort.group_pairs(ids, experts, source, slots, ends, space)
        kernels.quantize_rows(x, a, a_scale, rows=source, counts=ends[-1:])
        kernels.grouped_gemm(a, a_scale, w13, w13_scale, ends, h)
        kernels.activate_and_quantize(h, c, c_scale, counts=ends[-1:])
        kernels.grouped_gemm(c, c_scale, w2, w2_scale, ends, y)
        route_sort.reduce(y, ids, weights, 0, experts, out, slots=slots)

    def fill():
        x.copy_(torch.randn(n, hidden, **on))
        ids.copy_(torch.randint(-experts, experts, (n, top_k), **on).clamp(min=-1))

    fill()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        fill()
        graph.replay()
        replayed = out.clone()
        out.fill_(float("nan"))
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(out, replayed)
        assert float(out.float().abs().max()) > 0
