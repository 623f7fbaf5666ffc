"""The emulation equals a loop over tokens and routes, and the CUDA interleave kernels run thread by thread."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.emulations.cutlass import (
    GEGLU,
    RELU2,
    SWIGLU,
    decode_fp4_bf16,
    decode_fp4_fp8,
    decode_int4_fp8,
    emulate,
    unfold_scale,
)

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FLAGS = {
    "dense": {},
    "fp8": {},
    "block": {"use_deepseek_fp8_block_scale": True},
    "w4a16": {"use_w4_group_scaling": True},
    "w4a8": {"use_w4_group_scaling": True, "use_packed_weights": True},
    "humming": {"use_w4_group_scaling": True, "use_wfp4afp8_humming": True},
}
IDS = torch.tensor([[0, 1], [1, -1], [-1, -1], [2, 0], [1, 5], [-7, 9]], dtype=torch.int32)
GATES = torch.tensor([[0.6, 0.4], [1.0, float("nan")], [0.5, 0.5], [0.3, 0.7], [0.9, 0.1], [0.5, 0.5]])


def call(scheme: str, x: Tensor, fc1: Tensor, fc2: Tensor, scales=None, ids=IDS, gates=GATES, **changes) -> Tensor:
    """Return the output, fp16 for fp16 input and else bf16. It starts as NaN, so that an unwritten row shows."""
    dtype = torch.float16 if x.dtype == torch.float16 else BF16
    output = torch.full((ids.shape[0], fc2.shape[1]), float("nan"), dtype=dtype)
    kwargs = {
        "fc1_expert_biases": None,
        "fc2_expert_biases": None,
        "swiglu_alpha": None,
        "swiglu_beta": None,
        "swiglu_limit": None,
        "tp_size": 1,
        "tp_rank": 0,
        "ep_size": 1,
        "ep_rank": 0,
        "activation_type": SWIGLU,
        "use_deepseek_fp8_block_scale": False,
        "use_w4_group_scaling": False,
        "use_packed_weights": False,
        "use_wfp4afp8_humming": False,
        "output_dtype": dtype,
    }
    emulate(
        output=output,
        input=x,
        token_selected_experts=ids,
        token_final_scales=gates,
        fc1_expert_weights=fc1,
        fc2_expert_weights=fc2,
        quant_scales=scales,
        **{**kwargs, **FLAGS[scheme], **changes},
    )
    return output


def swiglu(gate, up, e):
    return gate / (1 + torch.exp(-gate)) * up


def loop(x, w_gate, w_up, w_down, act=swiglu, biases=None, ids=IDS, first=0) -> Tensor:
    """Compute one token and one route at a time, in float64, with gate and up as two matrices."""
    output = torch.zeros(ids.shape[0], w_down.shape[1], dtype=torch.float64)
    for t in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k]) - first
            if not 0 <= e < w_down.shape[0]:
                continue
            row = x[t].double()
            gate, up = w_gate[e].double() @ row, None if w_up is None else w_up[e].double() @ row
            if biases is not None:
                gate, up = gate + biases[0][e].double(), None if up is None else up + biases[1][e].double()
            y = w_down[e].double() @ act(gate, up, e)
            output[t] += float(GATES[t, k]) * (y if biases is None else y + biases[2][e].double())
    return output


def close(ours: Tensor, expected: Tensor, tolerance: float) -> None:
    assert not ours[(expected == 0).all(-1)].any()
    assert (expected != 0).any(-1).sum() >= 3
    assert (ours.double() - expected).norm() < tolerance * expected.norm()


def matrices(experts: int, hidden: int, inter: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, gate, up = torch.randn(6, hidden), torch.randn(experts, inter, hidden), torch.randn(experts, inter, hidden)
    return x, gate / hidden**0.5, up / hidden**0.5, torch.randn(experts, hidden, inter) / inter**0.5


# --- (a)

ALPHA, BETA, LIMIT = torch.tensor([1.7, 1.0, 0.5]), torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1.0, 0.5, 7.0])


def clamped_swiglu(gate, up, e):
    gate, up = gate.clamp(max=float(LIMIT[e])), up.clamp(-float(LIMIT[e]), float(LIMIT[e]))
    return gate / (1 + torch.exp(-gate * float(ALPHA[e]))) * (up + float(BETA[e]))


ACTIVATIONS = {
    "swiglu": (SWIGLU, swiglu, {}),
    "swiglu_bias": (SWIGLU, clamped_swiglu, {"swiglu_alpha": ALPHA, "swiglu_beta": BETA, "swiglu_limit": LIMIT}),
    "geglu": (GEGLU, lambda gate, up, e: 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up, {}),
    "relu2": (RELU2, lambda x, up, e: x.clamp(min=0) ** 2, {}),
}


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ranks", [(1, 0), (2, 1)])
def test_dense(dtype, name, bias, ranks):
    kind, act, params = ACTIVATIONS[name]
    x, gate, up, down = (t.to(dtype) for t in matrices(3, 64, 32))
    b_gate, b_up, b_down = (torch.randn(3, n).to(dtype) for n in (32, 32, 64))
    fc1, b1 = torch.cat([up, gate], 1), torch.cat([b_up, b_gate], 1)  # up first
    if kind == RELU2:
        fc1, b1, up = gate, b_gate, None
    ep_size, ep_rank = ranks
    ids = torch.where(IDS >= 0, IDS + 3 * ep_rank, IDS)
    biases = {"fc1_expert_biases": b1, "fc2_expert_biases": b_down} if bias else {}
    settings = {**params, **biases, "ids": ids, "activation_type": kind, "ep_size": ep_size, "ep_rank": ep_rank}
    expected = loop(x, gate, up, down, act, (b_gate, b_up, b_down) if bias else None, ids, 3 * ep_rank)
    close(call("dense", x, fc1, down, **settings), expected, 0.01)
    if bias:  # only the first etp rank adds fc2's bias
        expected = loop(x, gate, up, down, act, (b_gate, b_up, torch.zeros_like(b_down)), ids, 3 * ep_rank)
        close(call("dense", x, fc1, down, **settings, tp_size=2, tp_rank=1), expected, 0.01)


def test_gemm1_rounds_before_its_bias():
    x = torch.zeros(1, 8, dtype=BF16)
    x[0, 0], x[0, 1] = 1, 2**-9
    fc1, b1, b2 = torch.ones(1, 8, 8, dtype=BF16), torch.full((1, 8), -1.0, dtype=BF16), torch.zeros(1, 8, dtype=BF16)
    biases = {"fc1_expert_biases": b1, "fc2_expert_biases": b2}
    one = {"ids": torch.zeros(1, 1, dtype=torch.int32), "gates": torch.ones(1, 1), "activation_type": RELU2}
    assert not call("dense", x, fc1, fc1, **one, **biases).any()


# --- (b), (c)


@pytest.mark.parametrize("per_expert", [False, True])
def test_fp8_per_tensor(per_expert):
    x, gate, up, down = matrices(3, 128, 128)
    s1, s2 = torch.tensor([0.01, 0.004, 0.02]), torch.tensor([0.02, 0.005, 0.01])
    s_x, s_h = torch.tensor(0.02), torch.tensor([0.05, 0.1, 0.03]) if per_expert else torch.tensor(0.04)
    q = [(w / s.view(3, 1, 1)).to(FP8) for w, s in ((gate, s1), (up, s1), (down, s2))]
    q_x = (x / s_x).to(FP8)
    scales = [s1 * s_x, 1 / s_h, s2 * s_h, s_x]
    ours = call("fp8", q_x, torch.cat([q[1], q[0]], 1), q[2], scales)
    real = [w.float() * s.view(3, 1, 1) for w, s in zip(q, (s1, s1, s2), strict=True)]
    close(ours, loop(q_x.float() * s_x, *real), 0.06)


def test_fp8_block():
    x, gate, up, down = matrices(3, 256, 128)
    # One scale for a whole row would lose its first half.
    x, gate, up = x.clone(), gate.clone(), up.clone()
    x[:, :128] *= 2.0**-20
    gate[:, :, :128] *= 2.0**20
    up[:, :, :128] *= 2.0**20
    x = x.to(BF16)

    def quantize(w):
        scale = w.unflatten(1, (-1, 128)).unflatten(3, (-1, 128)).abs().amax((2, 4)) / torch.randint(
            100, 448, (3, 1, 1)
        )
        full = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        q = (w / full).to(FP8)
        return q, scale, q.float() * full

    (q_gate, s_gate, gate), (q_up, s_up, up), (q_down, s_down, down) = map(quantize, (gate, up, down))
    scales = [torch.cat([s_up, s_gate], 1), s_down]
    close(call("block", x, torch.cat([q_up, q_gate], 1), q_down, scales), loop(x, gate, up, down), 0.06)


# --- (d), (e), (f): the interleave kernels of moe_gemm_mixed_utils.cu, one thread after the other


def pack(codes: Tensor) -> Tensor:
    codes = codes & 15
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def threads(rows: int, cols: int):
    for block in range(rows // 2):
        for partition in range(cols // 64):
            for buffer_slot in range(16):
                yield block // 8 * 16 + block % 8, partition, buffer_slot


FP4_MOVES = [  # (mask, shift to the left), in the order of the kernel
    *[(0x80, 24), (0x70, 18), (0x08, 12), (0x07, 6)],
    *[(0x8000, 13), (0x7000, 7), (0x0800, 1), (0x0700, -5)],
    *[(0x800000, 2), (0x700000, -4), (0x080000, -10), (0x070000, -16)],
    *[(0x80000000, -1), (0x10000000, 1), (0x60000000, -3), (0x08000000, -13), (0x01000000, -11), (0x06000000, -15)],
]


def interleave_fp4(data: Tensor) -> Tensor:
    experts = []
    for expert in data:
        rows, cols, src = expert.shape[0], expert.shape[1] * 2, expert.flatten().tolist()
        dst = bytearray(len(src))
        for row, partition, buffer_slot in threads(rows, cols):
            mma = buffer_slot // 4
            first = row * cols // 2 + partition * 32 + mma * 8 + buffer_slot % 4
            second = first + 8 * cols // 2
            raw = src[first] | src[second] << 8 | src[first + 4] << 16 | src[second + 4] << 24
            word = sum((raw & mask) << by if by > 0 else (raw & mask) >> -by for mask, by in FP4_MOVES)
            at = (row + mma % 2 * 8) * cols // 2 + partition * 32 + buffer_slot // 8 * 16 + buffer_slot % 4 * 4
            dst[at : at + 4] = word.to_bytes(4, "little")
        experts.append(torch.frombuffer(dst, dtype=torch.uint8).view_as(expert))
    return torch.stack(experts)


SIGN_MOVES = [(3, 7), (7, 15), (11, 23), (15, 31), (19, 3), (23, 11), (27, 19), (31, 27)]


def interleave_fp8(data: Tensor, move_signs: bool) -> Tensor:
    experts = []
    for expert in data:
        rows, cols, src = expert.shape[0], expert.shape[1] * 2, bytes(expert.flatten().tolist())
        dst = bytearray(len(src))
        for row, partition, buffer_slot in threads(rows, cols):
            a = 2 * (row * cols // 4 + partition * 16 + buffer_slot)
            b = a + 2 * (8 * cols // 4)
            raw = int.from_bytes(src[a : a + 2] + src[b : b + 2], "little")
            if move_signs:
                raw = (raw & 0x77777777) + sum((raw >> old & 1) << new for old, new in SIGN_MOVES)
            column = partition * 16 + buffer_slot // 8 * 8 + buffer_slot % 4 * 2
            at = 2 * ((row + buffer_slot % 8 // 4 * 8) * cols // 4 + column)
            dst[at : at + 4] = raw.to_bytes(4, "little")
        experts.append(torch.frombuffer(dst, dtype=torch.uint8).view_as(expert))
    return torch.stack(experts)


def fold(scale: Tensor, group: int) -> Tensor:
    """Fold scales element by element, in blocks of 64 rows and 128 columns."""
    experts, rows, groups = scale.shape
    per_block, slices = 128 // group, 16 // scale.itemsize // (128 // group)
    folded = torch.empty(
        experts, rows // 64, groups // per_block, 64 // slices, 16 // scale.itemsize, dtype=scale.dtype
    )
    for r in range(rows):
        slice_, m = divmod(r % 64, 64 // slices)
        for g in range(groups):
            folded[:, r // 64, g // per_block, m, slice_ * per_block + g % per_block] = scale[:, r, g]
    return folded


def test_interleaved_weights():
    codes = torch.randint(0, 16, (2, 48, 192))
    data = pack(codes)
    assert torch.equal(decode_fp4_bf16(interleave_fp4(data)), codes)
    assert torch.equal(decode_fp4_fp8(interleave_fp8(data, True)), codes)
    assert torch.equal(decode_int4_fp8(interleave_fp8(data, False)), torch.where(codes > 7, codes - 16, codes))


def test_folded_scales():
    scale = torch.randint(0, 255, (2, 128, 8), dtype=torch.uint8)
    assert torch.equal(unfold_scale("s", fold(scale, 32), 2, 128, 256, 32), scale)
    assert torch.equal(unfold_scale("s", fold(scale, 32).view(torch.int32), 2, 128, 256, 32), scale)
    scale = torch.randn(2, 128, 2).to(BF16)
    assert torch.equal(unfold_scale("s", fold(scale, 128), 2, 128, 256, 128), scale)


def mxfp4(shape: tuple[int, int, int], low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale = torch.randint(0, 16, shape), torch.randint(low, high, (*shape[:2], shape[2] // 32))
    return codes, scale.to(torch.uint8), E2M1[codes] * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)


def test_w4a16():
    x = torch.randn(6, 128).to(BF16)
    (c1, s1, w1), (c2, s2, w2) = mxfp4((2, 256, 128), 120, 126), mxfp4((2, 128, 128), 120, 126)
    scales = [fold(s1, 32).view(torch.int32), fold(s2, 32)]
    ours = call("w4a16", x, interleave_fp4(pack(c1)), interleave_fp4(pack(c2)), scales)
    close(ours, loop(x, w1[:, 128:], w1[:, :128], w2), 0.01)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_w4a8(dtype):
    x = (torch.randn(6, 128) * torch.linspace(0.1, 3, 128)).to(dtype)
    c1, c2 = torch.randint(-8, 8, (2, 256, 128)), torch.randint(-8, 8, (2, 128, 128))
    s1, s2 = (torch.rand(2, n, 1).to(BF16) * 0.02 + 0.01 for n in (256, 128))
    a1, a2 = (torch.linspace(4, 1, 128).to(dtype), torch.linspace(1, 4, 128).to(dtype))
    alpha1, alpha2, none = torch.tensor([1.0, 0.5]), torch.tensor([0.5, 2.0]), torch.empty(0)
    scales = [fold(s1, 128), fold(s2, 128), a1, a2, none, none, alpha1, alpha2]
    ours = call("w4a8", x, interleave_fp8(pack(c1), False), interleave_fp8(pack(c2), False), scales)
    w1 = c1 * s1.float() * a1.float() * alpha1.view(2, 1, 1)
    w2 = c2 * s2.float() * a2.float() * alpha2.view(2, 1, 1)
    close(ours, loop(x, w1[:, 128:], w1[:, :128], w2), 0.1)


@pytest.mark.parametrize("kind", [SWIGLU, RELU2])
def test_humming(kind):
    x = (torch.randn(6, 128) * torch.tensor([[1e-3], [1.0], [1.0], [100.0], [1.0], [1.0]])).to(BF16)
    (c1, s1, w1), (c2, s2, w2) = mxfp4((2, 256, 128), 116, 128), mxfp4((2, 128, 128), 119, 125)
    if kind == RELU2:
        c1, s1, w1 = c1[:, :128], s1[:, :128].contiguous(), w1[:, :128]

    def split(scale):
        least = scale.flatten(1).amin(1)
        offset = scale - least.view(2, 1, 1) + 1
        return fold(offset, 32).view(torch.int32), torch.exp2(least.float() - 127) * 0.5 * 2**6

    (f1, r1), (f2, r2) = split(s1), split(s2)
    scales = [f1, r1, torch.tensor(1.0), f2, r2]
    data = interleave_fp8(pack(c1), True), interleave_fp8(pack(c2), True)
    ours = call("humming", x, *data, scales, activation_type=kind)
    if kind == RELU2:
        expected = loop(x, w1, None, w2, ACTIVATIONS["relu2"][1])
    else:
        expected = loop(x, w1[:, 128:], w1[:, :128], w2)
    for t in (0, 1, 3, 4):  # compare rows separately: their magnitudes differ by powers of ten
        assert (ours[t].double() - expected[t]).norm() < 0.1 * expected[t].norm()


# --- calls that the kernel refuses, or answers with wrong numbers


def bias(e: int, n: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(e, n, dtype=dtype)


REFUSED = {
    "int32": {"ids": IDS.long()},
    "token_final_scales must be torch.float32": {"gates": GATES.to(BF16)},
    "has an expert twice": {"ids": torch.where(IDS == 2, 0, IDS)},
    "both biases": {"fc1_expert_biases": bias(2, 128)},
    "biases must be": {"fc1_expert_biases": bias(2, 128, torch.float32), "fc2_expert_biases": bias(2, 64)},
    "fc2_expert_biases must have shape": {"fc1_expert_biases": bias(2, 128), "fc2_expert_biases": bias(2, 128)},
    "fc1_expert_weights must have shape": {"activation_type": RELU2},
    "not emulated": {"activation_type": 8},
    "no effect": {"activation_type": GEGLU, "swiglu_limit": torch.ones(2)},
    "swiglu_alpha must be": {"swiglu_alpha": torch.ones(2, dtype=BF16)},
    "below its size": {"ep_size": 2, "ep_rank": 2},
    "0 tokens": {"ids": IDS[:0], "gates": GATES[:0], "x": torch.zeros(0, 64, dtype=BF16)},
    "output_dtype": {"output_dtype": torch.float16},
    "input must have shape": {"x": torch.zeros(6, 128, dtype=BF16)},
    "input must be contiguous": {"x": torch.zeros(64, 6, dtype=BF16).T},
    "multiple of 16 bytes": {"x": torch.zeros(6 * 64 + 1, dtype=BF16)[1:].view(6, 64)},
    "fc2_expert_weights must be contiguous": {"fc2": torch.zeros(2, 64, 64, dtype=BF16).mT},
    "I 60 must be a multiple of 8": {
        "fc1": torch.zeros(2, 120, 64, dtype=BF16),
        "fc2": bias(2, 64 * 60).view(2, 64, 60),
    },
    "takes 0 quant_scales": {"scales": [torch.ones(2)] * 4},
    "no sm90 kernel": {"fc1": torch.zeros(2, 128, 64, dtype=FP8), "fc2": torch.zeros(2, 64, 64, dtype=FP8)},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused(sentence):
    zeros = {"x": (6, 64), "fc1": (2, 128, 64), "fc2": (2, 64, 64)}
    arguments = {name: torch.zeros(shape, dtype=BF16) for name, shape in zeros.items()}
    call("dense", **arguments)
    with pytest.raises(AssertionError, match=sentence):
        call("dense", **{**arguments, **REFUSED[sentence]})


def test_refused_scales():
    q1, q2, e = torch.zeros(2, 256, 128, dtype=FP8), torch.zeros(2, 128, 128, dtype=FP8), torch.ones(2)
    one, fp8 = torch.tensor(1.0), torch.zeros(6, 128, dtype=FP8)
    call("fp8", fp8, q1, q2, [e, one, e, one])
    for wrong, sentence in (
        ([e, one, e, e], r"fc1_input_dequant must have shape \(\), it has \(2,\)"),
        ([e, one, e], "takes 4 quant_scales, there are 3"),
        ([e, one, e[:1], one], r"fc2_dequant must have shape \(2,\), it has \(1,\)"),
        ([e.double(), one, e, one], "fc1_dequant must be torch.float32, it is torch.float64"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            call("fp8", fp8, q1, q2, wrong)
    x = torch.zeros(6, 128, dtype=BF16)
    with pytest.raises(AssertionError, match="scale of fc1 must have shape"):
        call("block", x, q1, q2, [torch.ones(2, 1, 2), torch.ones(2, 1, 1)])
    d1, d2 = torch.zeros(2, 256, 64, dtype=torch.uint8), torch.zeros(2, 128, 64, dtype=torch.uint8)
    f1, f2 = (torch.ones(2, n // 64, 1, 16, 16, dtype=torch.uint8) for n in (256, 128))
    call("w4a16", x, d1, d2, [f1, f2])
    with pytest.raises(AssertionError, match="times 16 bytes"):
        call("w4a16", x, d1, d2, [f1.flatten(3), f2])
    with pytest.raises(AssertionError, match=r"torch.int32"):
        call("humming", x, d1, d2, [f1, e, e, f2, e])
    with pytest.raises(AssertionError, match="offsets from 1 to 12"):
        call("humming", x, d1, d2, [(f1 * 13).view(torch.int32), e, e, f2.view(torch.int32), e])
