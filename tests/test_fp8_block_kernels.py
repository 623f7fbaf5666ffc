"""The Triton kernels for fp8 blocks against plain torch in float64; on a CPU in Triton's interpreter.

The checks are functions of a device: `tests/gpu/test_fp8_block_kernels_gpu.py` calls them with other shapes.
"""

import threading

import pytest
import torch

from tests.interpreter import interpreter_problem

if problem := interpreter_problem():
    pytest.skip(problem, allow_module_level=True)

from ep_moe.experts.hopper import gemm_fp8_block as kernels
from ep_moe.experts.hopper import route_sort
from ep_moe.types import Activation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3 = torch.float8_e4m3fn
PLAIN = kernels.GemmConfig(16, 128)
TRUNCATED = 1 if DEVICE == "cuda" else 2  # the interpreter's casts cut off: a whole step, not half of one


def dequantized(x, scale):
    return (x.double().unflatten(-1, (-1, 128)) * scale.double().unsqueeze(-1)).flatten(-2)


def dequantized_weights(b, scale):
    wide = scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    return b.double() * wide


def random_operands(rows, experts, n, k, device):
    """Rows and weights whose scales differ from block to block by up to 16."""
    a = torch.randn(rows, k, device=device).clamp(-4, 4).mul(100).to(E4M3)
    b = torch.randn(experts, n, k, device=device).clamp(-4, 4).mul(100).to(E4M3)
    a_scale = torch.rand(rows, k // 128, device=device).mul(4).exp2() * 0.01
    b_scale = torch.rand(experts, n // 128, k // 128, device=device).mul(4).exp2() * 0.01
    return a, a_scale, b, b_scale


def check_gemm(counts, n, k, device=DEVICE, config=PLAIN, dtype=torch.bfloat16, batched=False, starts=False, spare=3):
    """counts: rows of each expert; spare: rows after the last expert's, or after each expert's if batched.

    How far off an output may be: 2^-8 of itself by rounding to bf16 (2^-11 to fp16), and what the sum loses. Products
    of two e4m3 are exact in float32. Hopper's tensor cores line up the 32 products of a step and the running sum by
    the largest exponent and cut off what is more than 13 bits below it: 33 cuts a step and 4 steps a block, each less
    than 2^-13 of the largest running sum, and that is at most |a| |b| (Cauchy-Schwarz; lengths of the block's 128
    values). Cuts are as often up as down: their sum over all blocks grows as the root of its squares, of which we
    allow four times. Sums in float32 are far closer.
    """
    experts = len(counts)
    if batched:
        capacity = max(counts) + spare
        rows = experts * capacity
        expert_of = torch.arange(rows, device=device) // capacity
        valid = torch.arange(rows, device=device) % capacity < torch.tensor(counts, device=device)[expert_of]
    else:
        rows = sum(counts) + spare
        expert_of = torch.repeat_interleave(torch.arange(experts + 1), torch.tensor([*counts, spare])).to(device)
        valid = expert_of < experts
        expert_of = expert_of.clamp(max=experts - 1)
    a, a_scale, b, b_scale = random_operands(rows, experts, n, k, device)
    out = torch.full((rows, n), 7.0, dtype=dtype, device=device)
    numbers = torch.tensor(counts, dtype=torch.int32, device=device)
    ends = numbers if batched else numbers.cumsum(0, dtype=torch.int32)
    shape = (experts, capacity) if batched else (rows,)
    kernels.grouped_gemm(
        a.view(*shape, k), a_scale.view(*shape, -1), b, b_scale, ends, out.view(*shape, n), config=config,
        starts=ends - numbers if starts else None,
    )  # fmt: skip
    assert bool((out[~valid] == 7.0).all())
    eps = TRUNCATED * (2.0**-8 if dtype is torch.bfloat16 else 2.0**-11)
    for e in range(experts):
        mine = valid & (expert_of == e)
        if not counts[e]:
            continue
        left, right = dequantized(a[mine], a_scale[mine]), dequantized_weights(b[e : e + 1], b_scale[e : e + 1])[0]
        expected = left @ right.T
        squares_left = left.unflatten(-1, (-1, 128)).square().sum(-1)  # [rows, blocks]
        squares_right = right.unflatten(-1, (-1, 128)).square().sum(-1)
        lost = 4 * (33 * 4) ** 0.5 * 2.0**-13 * (squares_left @ squares_right.T).sqrt()
        error = (out[mine].double() - expected).abs()
        assert bool((error <= eps * expected.abs() + lost).all())
        assert float(error.norm() / expected.norm()) < 4e-3 * TRUNCATED


def check_quantized(out, scale, expected):
    """Against values in float64: the scale to float32 rounding, values to half a step of e4m3 (2^-4 relative, 2^-10 of
    the scale among subnormals)."""
    groups = expected.unflatten(-1, (-1, 128))
    expected_scale = groups.abs().amax(-1).clamp(min=1e-10) / 448
    torch.testing.assert_close(scale.double(), expected_scale, rtol=1e-5, atol=0)
    error = (dequantized(out, scale) - expected).abs().unflatten(-1, (-1, 128))
    step = torch.maximum(groups.abs() * 2.0**-4, expected_scale.unsqueeze(-1) * 2.0**-10)
    step = step + 2.0**-22 * groups.abs().amax(-1, keepdim=True)  # of arithmetic in float32: 1 + erf(x) cancels
    if DEVICE == "cpu":  # the interpreter (3.6) loses the carry when a mantissa rounds up to the next power of two
        assert bool((error <= torch.maximum(groups.abs() * 0.51, step * 2.01)).all())
        assert int((error > step * 2.01).sum()) <= 0.1 * error.numel()
        return
    assert bool((error <= step * 1.001).all())


def quantized_like(rows, k, device):
    return (
        torch.full((rows, k), 5.0, device=device).to(E4M3),
        torch.full((rows, k // 128), 7.0, device=device),
    )


def untouched(out, scale):
    return bool((out.float() == 5.0).all()) and bool((scale == 7.0).all())


def check_quantize(rows, k, device=DEVICE, dtype=torch.bfloat16):
    x = torch.randn(rows, k, device=device).mul(torch.rand(rows, 1, device=device).mul(20).sub(10).exp2()).to(dtype)
    x[0, :128] = 0
    out, scale = quantized_like(rows, k, device)
    kernels.quantize_rows(x, out, scale)
    check_quantized(out, scale, x.double())
    # gathered, some rows left out, and a count on the device
    source = torch.randint(-1, rows, (2 * rows,), device=device, dtype=torch.int32)
    count = torch.tensor([2 * rows - rows // 2], dtype=torch.int32, device=device)
    out, scale = quantized_like(2 * rows, k, device)
    kernels.quantize_rows(x, out, scale, rows=source, counts=count)
    made = (source >= 0) & (torch.arange(2 * rows, device=device) < count)
    check_quantized(out[made], scale[made], x[source[made].long()].double())
    assert untouched(out[~made], scale[~made])


def check_quantize_pairs(rows, top_k, k, device=DEVICE):
    """Must give what `quantize_rows` gives, bit for bit."""
    x = torch.randn(rows, k, device=device).bfloat16()
    slots = torch.randperm(rows * top_k, device=device).view(rows, top_k)
    slots = torch.where(torch.rand(rows, top_k, device=device) < 0.4, slots, -1)
    out, scale = quantized_like(rows * top_k - 1, k, device)  # the last slot is one too far
    kernels.quantize_pairs(x, slots.int(), out, scale)
    source = torch.full((rows * top_k,), -1, device=device)
    for i in range(top_k):
        source[slots[:, i][slots[:, i] >= 0]] = torch.arange(rows, device=device)[slots[:, i] >= 0]
    expected, expected_scale = quantized_like(rows * top_k - 1, k, device)
    kernels.quantize_rows(x, expected, expected_scale, rows=source)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, expected_scale)
    rounded, steps = quantized_like(rows, k, device)
    kernels.quantize_rows(x, rounded, steps)
    copied, copied_scale = quantized_like(rows * top_k - 1, k, device)
    kernels.copy_pairs(rounded, steps, slots.int(), copied, copied_scale)
    assert torch.equal(copied.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(copied_scale, expected_scale)


def reference_activation(h, activation, alpha, limit, up_first):
    h = h.double()
    if activation is Activation.RELU2:
        return h.relu().square()
    first, second = h.chunk(2, -1)
    gate, up = (second, first) if up_first else (first, second)
    if activation is Activation.SWIGLU:
        return torch.nn.functional.silu(gate) * up
    if activation is Activation.GEGLU:
        return torch.nn.functional.gelu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * (alpha * gate).sigmoid()


def check_activation(rows, size, activation, up_first=False, device=DEVICE):
    h = torch.randn(rows, size * (2 if activation.gated else 1), device=device).mul(3).bfloat16()
    alpha, limit = 1.5, 4.0
    out, scale = quantized_like(rows, size, device)
    kernels.activate_and_quantize(h, out, scale, activation, alpha=alpha, limit=limit, up_first=up_first)
    expected = reference_activation(h, activation, alpha, limit, up_first)
    check_quantized(out, scale, expected)
    groups = 2 if rows % 2 == 0 else 1
    counts = torch.randint(0, rows // groups + 1, (groups,), dtype=torch.int32, device=device)
    out, scale = quantized_like(rows, size, device)
    kernels.activate_and_quantize(
        h, out, scale, activation, alpha=alpha, limit=limit, up_first=up_first, counts=counts
    )  # fmt: skip
    row = torch.arange(rows, device=device)
    made = row % (rows // groups) < counts[row // (rows // groups)]
    check_quantized(out[made], scale[made], expected[made])
    assert untouched(out[~made], scale[~made])


def check_gemm_activate(counts, inner, k, activation, device, config=None, up_first=False, batched=False):
    """The product and the activation in one kernel, against the two in float64. An output may be off by half a step of
    e4m3, and by what the products lose (see `check_gemm`), of which the activation makes at most a few times as much:
    checked is the error of all as a share of all."""
    experts = len(counts)
    capacity = max(counts) + 3
    rows = experts * capacity if batched else sum(counts) + 3
    n = inner * (2 if activation.gated else 1)
    a, a_scale, b, b_scale = random_operands(rows, experts, n, k, device)
    b_scale = b_scale * (3e-3 / k**0.5)  # products of about 1 to 10
    numbers = torch.tensor(counts, dtype=torch.int32, device=device)
    ends = numbers if batched else numbers.cumsum(0, dtype=torch.int32)
    out, scale = quantized_like(rows, inner, device)
    shape = (experts, capacity) if batched else (rows,)
    kernels.grouped_gemm_activate(
        a.view(*shape, k), a_scale.view(*shape, -1), b, b_scale, ends, out.view(*shape, inner),
        scale.view(*shape, -1), activation, alpha=1.5, limit=4.0, up_first=up_first, config=config,
    )  # fmt: skip
    untouched_rows = torch.ones(rows, dtype=torch.bool, device=device)
    for e in range(experts):
        start = e * capacity if batched else sum(counts[:e])
        mine = slice(start, start + counts[e])
        untouched_rows[mine] = False
        if not counts[e]:
            continue
        left, right = dequantized(a[mine], a_scale[mine]), dequantized_weights(b[e : e + 1], b_scale[e : e + 1])[0]
        expected = reference_activation(left @ right.T, activation, 1.5, 4.0, up_first)
        amax = expected.unflatten(-1, (-1, 128)).abs().amax(-1)
        assert float(((scale[mine] * 448 - amax).abs() / amax).max()) < 0.02
        assert float((dequantized(out[mine], scale[mine]) - expected).norm() / expected.norm()) < 0.04
        # a wrong block of columns would be lost in the norm of all
        error = (dequantized(out[mine], scale[mine]) - expected).unflatten(-1, (-1, 128)).norm(dim=(0, 2))
        assert bool((error < 0.06 * expected.unflatten(-1, (-1, 128)).norm(dim=(0, 2))).all())
    assert untouched(out[untouched_rows], scale[untouched_rows])


def check_reduce(rows, top_k, size, device=DEVICE, dtype=torch.bfloat16, weighted=True):
    y = torch.randn(rows * top_k, size, device=device).bfloat16()
    slots = torch.randperm(rows * top_k, device=device).int().view(rows, top_k)
    ids = torch.randint(5, 16, (rows, top_k), device=device)  # of which 7 to 12 are here
    ids[0] = 6
    weights = torch.rand(rows, top_k, device=device) if weighted else None
    if weights is not None:
        weights[1:2, 0] = 0.0
    out = torch.full((rows, size), float("nan"), device=device, dtype=dtype)
    valid = (ids >= 7) & (ids <= 12)
    if weights is not None:
        valid &= weights != 0
    slots = slots.where(valid, -1)
    route_sort.reduce(y, ids, weights, 7, 6, out, slots=slots)
    factor = torch.where(valid, 1.0 if weights is None else weights.double(), 0.0)
    parts = y.double()[slots.clamp(0, rows * top_k - 1).long()] * factor.unsqueeze(-1)
    expected = parts.sum(1)
    # rounding to bf16, and of top_k products and sums in float32
    allowed = TRUNCATED * 2.0**-8 * expected.abs() + 2 * top_k * 2.0**-24 * parts.abs().sum(1)
    assert bool(((out.double() - expected).abs() <= allowed).all())
    assert bool((out[~valid.any(1)] == 0).all())


def check_group(rows, top_k, experts, device=DEVICE, share=0.36, dtype=torch.int32, only=None, base=0, ids_ready=None):
    """base: ids as they travelled, among those of other ranks, and a sixth of the routes with weight 0; ids_ready: as
    `group_pairs` has it"""
    ids = torch.randint(0, experts, (rows, top_k), device=device, dtype=dtype)
    if only is not None:
        ids.fill_(only)
    ids = torch.where(torch.rand(rows, top_k, device=device) < share, ids, -1)
    pairs = rows * top_k
    source = torch.full((pairs,), -7, dtype=torch.int32, device=device)
    slots = torch.full((rows, top_k), -7, dtype=torch.int32, device=device)
    ends = torch.full((experts,), -7, dtype=torch.int32, device=device)
    space = torch.full((route_sort.group_workspace(pairs, experts),), -7, dtype=torch.int32, device=device)
    weights = None
    sent = ids
    if base:
        weights = torch.where(torch.rand(rows, top_k, device=device) < 1 / 6, 0.0, 1.0)
        others = torch.where(torch.rand(rows, top_k, device=device) < 0.5, base - 1, base + experts)
        sent = torch.where(ids < 0, others, ids + base)
        ids = torch.where(weights == 0, -1, ids)
    route_sort.group_pairs(sent, experts, source, slots, ends, space, base=base, weights=weights, ids_ready=ids_ready)
    flat = torch.where(ids < 0, experts, ids).flatten().long()
    order = flat.argsort(stable=True)
    total = int((flat < experts).sum())
    expected_source = torch.where(torch.arange(pairs, device=device) < total, order // top_k, -7)
    expected_slots = torch.empty_like(flat).scatter_(0, order, torch.arange(pairs, device=device))
    expected_slots = torch.where(flat < experts, expected_slots, -1).view(rows, top_k)
    assert torch.equal(ends.long(), torch.bincount(flat, minlength=experts + 1)[:experts].cumsum(0))
    assert torch.equal(source.long(), expected_source)
    assert torch.equal(slots.long(), expected_slots)
    assert ids_ready is None or not ids_ready[1][1], "programs of the next call meet there"


@pytest.mark.parametrize(
    ("counts", "n", "k"),
    [([5, 0, 17], 128, 256), ([1], 256, 128), ([0, 33, 0, 2], 384, 384), ([0, 0], 128, 128)],
)
@pytest.mark.parametrize("layout", ["contiguous", "starts", "batched"])
def test_gemm(counts, n, k, layout):
    check_gemm(counts, n, k, batched=layout == "batched", starts=layout == "starts")


@pytest.mark.parametrize("config", [kernels.GemmConfig(32, 64, group_m=1), kernels.GemmConfig(16, 128, group_m=2)])
def test_gemm_configs(config):
    check_gemm([40, 3], 256, 128, config=config, dtype=torch.float16)


@pytest.mark.parametrize("rows", [8, 32 * 16, 32 * 40, 32 * 1024])
@pytest.mark.parametrize("hopper", [False, True])
def test_config_for(rows, hopper):
    config = kernels.config_for(rows, 32, 1536, 2048, hopper=hopper)
    assert config.hopper == hopper
    assert config.block_n % 128 == 0
    assert kernels.config_for(rows, 32, 1536, 2048, activated=True).block_n == 256


@pytest.mark.parametrize(("rows", "k"), [(1, 128), (7, 384), (9, 1024)])
def test_quantize(rows, k):
    check_quantize(rows, k)


@pytest.mark.parametrize(("rows", "top_k", "k"), [(1, 1, 128), (13, 3, 384)])
def test_quantize_pairs(rows, top_k, k):
    check_quantize_pairs(rows, top_k, k)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("up_first", [False, True])
def test_activation(activation, up_first):
    check_activation(6, 256, activation, up_first)


@pytest.mark.parametrize(("rows", "top_k", "size"), [(1, 1, 128), (5, 3, 1280)])
@pytest.mark.parametrize("weighted", [False, True])
def test_reduce(rows, top_k, size, weighted):
    check_reduce(rows, top_k, size, weighted=weighted)


@pytest.mark.parametrize("size", [128, 1280])
def test_copy_rows(size):
    """Into all places that are named, and nowhere else."""
    x = torch.randn(5, size, device=DEVICE)
    slots = torch.tensor([[3, -1], [0, 6], [-1, -1], [7, 2], [1, -1]], dtype=torch.int32, device=DEVICE)
    room = torch.full((8, size), torch.nan, device=DEVICE)
    route_sort.copy_rows(x, slots, room[:7])  # place 7 is beyond, places 4 and 5 are nobody's
    assert torch.equal(room[[3, 0, 6, 2, 1]], x[[0, 1, 1, 3, 4]])
    assert bool(room[[4, 5, 7]].isnan().all())


@pytest.mark.parametrize(("rows", "top_k", "experts"), [(1, 1, 1), (300, 5, 6), (700, 3, 40), (600, 7, 270)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_group(rows, top_k, experts, dtype):
    """The last one is counted first."""
    check_group(rows, top_k, experts, dtype=dtype)
    check_group(rows, top_k, experts, dtype=dtype, base=64)


@pytest.mark.parametrize(("rows", "top_k", "experts"), [(1, 1, 1), (300, 5, 6), (700, 3, 40), (4097, 3, 37)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_group_beside_rows_that_still_come(ranks, rows, top_k, experts):
    """All ranks have ids_ready of their ids."""
    calls = torch.tensor([2**31 - 1, 0], dtype=torch.int32, device=DEVICE)
    ids_ready = torch.full((ranks,), -(2**31), dtype=torch.int32, device=DEVICE)
    check_group(rows, top_k, experts, ids_ready=(ids_ready, calls))
    check_group(rows, top_k, experts, ids_ready=(ids_ready, calls), base=64, dtype=torch.int64)


@pytest.mark.skipif(DEVICE != "cpu", reason="what is written while a kernel runs: in the interpreter alone")
@pytest.mark.parametrize("rows", [20, 2048, 2049])
def test_ids_are_awaited(rows):
    ids_ready, calls = torch.tensor([8, 7, 8], dtype=torch.int32), torch.tensor([7, 0], dtype=torch.int32)
    check_awaited(lambda: check_group(rows, 2, 5, ids_ready=(ids_ready, calls)), ids_ready[1], 8)


def check_awaited(call, place, number):
    waiting = threading.Thread(target=call, daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    place.fill_(number)
    waiting.join(60)
    assert not waiting.is_alive()


@pytest.mark.skipif(DEVICE != "cpu", reason="what is written while a kernel runs: in the interpreter alone")
def test_programs_wait_for_each_other():
    """One of two, for the other."""
    made, calls = [], torch.tensor([7, 0], dtype=torch.int32)
    ids, room = torch.randint(0, 5, (2049, 2), dtype=torch.int32), torch.zeros(3 * 4098, dtype=torch.int32)
    lists = room[:4098], room[4098:8196].view(2049, 2), room[8196:8201]
    ids_ready = torch.tensor([8], dtype=torch.int32), calls
    launch = lambda kernel, grid, *args, **by_name: made.append((kernel, grid, args, by_name))  # noqa: E731
    route_sort.group_pairs(ids, 5, *lists, room[8201:], ids_ready=ids_ready, launch=launch)
    ((kernel, grid, args, by_name),) = made
    assert grid == (1,)
    check_awaited(lambda: kernel[2,](*args, **by_name), calls[1], 2)


def test_group_in_few_programs(monkeypatch):
    """Each takes several parts of the pairs."""
    monkeypatch.setattr(route_sort, "PROGRAMS", 10)
    check_group(1500, 3, 40, base=64)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_group_extremes(share):
    check_group(400, 4, 5, share=share, only=3)


def test_no_rows():
    check_group(0, 2, 3)
    none = torch.empty(0, 128, device=DEVICE)
    kernels.quantize_rows(none.bfloat16(), none.to(E4M3), torch.empty(0, 1, device=DEVICE))
    route_sort.reduce(none.bfloat16(), torch.empty(0, 2, dtype=torch.int32, device=DEVICE), None, 0, 3, none)
    _, _, b, b_scale = random_operands(0, 2, 128, 128, DEVICE)
    ends = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    kernels.grouped_gemm(none.to(E4M3), torch.empty(0, 1, device=DEVICE), b, b_scale, ends, none)
