"""FlashInfer 0.7.2's TRTLLM MoE entry points on sm100, in plain torch on the CPU.

Each entry takes the keyword arguments that the real one takes, so a test without a GPU finds a wrong row order,
swizzle, scale or id. It imports nothing from ep_moe. The layouts come from the code that produces them, row by row and
byte by byte: `srcToDstBlk32RowMap` (flashinfer/utils.py) places rows, `computeSFIndex`
(nv_internal/tensorrt_llm/thop/fp4Op.cpp) places scales.

Arithmetic and checks come from:

- csrc/trtllm_fused_moe_kernel_launcher.cu (L)
- csrc/fused_moe/trtllm_backend/trtllm_fused_moe_dev_kernel.cu (D), and the routing kernels next to it
- the comments on scales in trtllm-gen's BatchedGemmInterface.h

Sums are in float32. The finalize step adds routes in order and rounds once (D, `finalizeKernelVecLoad`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

SWIGLU, RELU2 = 3, 6  # tllm_enums.py ActivationType
DEFAULT, RENORMALIZE, DEEPSEEK_V3, LLAMA4, RENORMALIZE_NAIVE = 0, 1, 2, 3, 4  # RoutingMethodType
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
BF16 = torch.bfloat16


def _check(condition: object, sentence: str) -> None:
    # Not the assert statement: python -O would drop the checks.
    if not condition:
        raise AssertionError(sentence)


def _check_tensor(name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    _check(t.dtype == dtype, f"{name} must be {dtype}, it is {t.dtype}")
    _check(tuple(t.shape) == shape, f"{name} must have shape {shape}, it has {tuple(t.shape)}")
    _check(t.is_contiguous(), f"{name} must be contiguous: the kernel reads from the bare pointer")


# --- Layouts


def row_places(rows: int, gated: bool) -> Tensor:
    """Return where each row of [up; gate] (or of a matrix without a gate) is stored."""
    row = torch.arange(rows)
    if gated:  # up row i to 2i, gate row i to 2i + 1
        row = torch.where(row < rows // 2, 2 * row, 2 * (row - rows // 2) + 1)
    inside = row % 32
    return row - inside + 8 * (inside % 4) + torch.div(inside, 4, rounding_mode="floor")


def scale_places(rows: int, columns: int) -> Tensor:
    """Return the flat index of each row's and block's scale, in tiles of 128 x 4."""
    r, c = torch.arange(rows).unsqueeze(1), torch.arange(columns)
    tile = (r // 128) * (columns // 4) + c // 4
    return tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4


def _rows(stored: Tensor, gated: bool) -> Tensor:
    """Return [E, rows, ...] with the rows of [up; gate] in order."""
    return _raw(stored)[:, row_places(stored.shape[1], gated)].view(stored.dtype)


def _raw(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.itemsize == 1 else t


def _scales(stored: Tensor, rows: int, columns: int, gated: bool) -> Tensor:
    """Unswizzle scales [E, rows * columns] to [E, rows, columns]."""
    _check(rows % 128 == 0 and columns % 4 == 0, f"scales of {rows} x {columns} would need padding")
    _check(stored[0].numel() == rows * columns, f"there must be {rows} x {columns} scales, {stored[0].numel()} are")
    flat = _raw(stored).reshape(len(stored), -1)[:, scale_places(rows, columns)]
    return _rows(flat.view(stored.dtype), gated)


def _unblocked(stored: Tensor) -> Tensor:
    """Return BlockMajorK weights [E, K / block, rows, block] as [E, rows, K]."""
    _check(stored.shape[-1] * stored.itemsize == 128, "a block must be 128 bytes of a row")
    experts, blocks, rows, width = stored.shape
    k = torch.arange(blocks * width)
    row = torch.arange(rows).unsqueeze(1)
    flat = ((k // width) * rows + row) * width + k % width
    return stored.reshape(experts, -1)[:, flat]


# --- Numbers


def _codes(data: Tensor) -> Tensor:
    return torch.stack([data & 15, data >> 4], -1).flatten(-2).long()


def _e2m1(data: Tensor) -> Tensor:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat([values, -values])[_codes(data)]


def _int4(data: Tensor) -> Tensor:
    codes = _codes(data)
    return (codes - 16 * (codes > 7)).float()


def _e8m0(data: Tensor) -> Tensor:
    return torch.exp2(data.view(torch.uint8).double() - 127).float()


def _spread(values: Tensor, scale: Tensor) -> Tensor:
    return values * scale.repeat_interleave(values.shape[-1] // scale.shape[-1], -1)


def _fp8(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8).float()


def _round_mxfp8(x: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (-1, 32))
    wanted = blocks.abs().amax(-1, keepdim=True).double() / FP8_MAX
    factor = torch.exp2(torch.ceil(torch.log2(wanted.clamp(min=2.0**-120)))).float()
    return (_fp8(blocks / factor) * factor).flatten(-2)


def _round_nvfp4(x: Tensor) -> Tensor:
    """Round to NVFP4, in units of the global scale, by which the caller has divided."""
    blocks = x.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1, keepdim=True) / 6).clamp(max=FP8_MAX).to(FP8).float()
    code = torch.where(scale > 0, blocks / scale.clamp(min=1e-30), 0.0).clamp(-6, 6)
    step = torch.where(code.abs() < 2, 0.5, torch.where(code.abs() < 4, 1.0, 2.0))
    return ((code / step).round() * step * scale).flatten(-2)


def _round_blocks(x: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (-1, 128))
    scale = (blocks.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (_fp8(blocks / scale) * scale).flatten(-2)


# --- Routing


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack `PackedScoreIdx`: the id is in the upper 16 bits, the weight in bf16 below it."""
    return packed >> 16, (packed & 0xFFFF).to(torch.int16).view(BF16).float()


def _routed(given: dict, tokens: int) -> tuple[Tensor, Tensor]:
    packed, top_k = given["topk_ids"], given["top_k"]
    _check_tensor("topk_ids", packed, torch.int32, (tokens, top_k))
    return unpack(packed)


def _from_logits(given: dict, tokens: int) -> tuple[Tensor, Tensor]:
    logits, bias, method = given["routing_logits"], given["routing_bias"], given["routing_method_type"]
    experts, top_k = given["num_experts"], given["top_k"]
    _check(logits.dtype in (torch.float32, BF16), "routing_logits must be float or bfloat16")
    _check_tensor("routing_logits", logits, logits.dtype, (tokens, experts))
    if bias is not None:
        _check(method == DEEPSEEK_V3, f"routing method {method} has no bias")
        _check_tensor("routing_bias", bias, bias.dtype, (experts,))
        _check(bias.dtype in (torch.float32, BF16), "routing_bias must be bfloat16 or float")
    values = logits.float()
    if method == DEEPSEEK_V3:
        ids, weights = _deepseek(values, bias, given)
    elif method == LLAMA4:
        _check(top_k == 1, "Llama4 routing only supports top_k=1")
        best, ids = values.topk(1)
        weights = best.sigmoid()
    else:
        _check(method in (RENORMALIZE, RENORMALIZE_NAIVE), f"routing method {method} is not emulated")
        best, ids = values.topk(top_k)
        weights = best.softmax(-1)
    if method != DEEPSEEK_V3:
        _check((given["routed_scaling_factor"] or 1.0) == 1.0, "only DeepSeekV3 multiplies by a scaling factor")
        _check((given["n_group"] or 0) <= 1, "Current routing kernel (no groups) only supports n_group <= 1")
    return ids.int(), weights.to(BF16).float()


def _deepseek(values: Tensor, bias: Tensor | None, given: dict) -> tuple[Tensor, Tensor]:
    groups, top_groups, top_k = given["n_group"], given["topk_group"], given["top_k"]
    _check(groups and top_groups and 1 <= top_groups <= min(groups, 4), "n_group, topk_group for DeepSeekV3 routing")
    _check(top_k <= (8 if values.shape[1] <= 384 else 22), "top_k for DeepSeekV3 routing")
    _check(top_k < top_groups * values.shape[1] // groups, "top_k must be less than the experts in selected groups")
    scores = values.sigmoid()
    choice = scores if bias is None else scores + bias.float()
    for row, row_scores in enumerate(choice):
        if groups == 1:
            break
        sums = row_scores.view(groups, -1).topk(2).values.sum(-1)
        for group in set(range(groups)) - set(sums.topk(top_groups).indices.tolist()):
            choice[row].view(groups, -1)[group] = -torch.inf
    ids = choice.topk(top_k).indices
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * (given["routed_scaling_factor"] or 1.0)


# --- The core


@dataclass
class _Gemms:
    """One call's operands as the tensor cores multiply them, and the steps around.

    `w1` is float32 [E, rows, H] with rows [up; gate]. `inner` converts the activation before the second GEMM.
    """

    w1: Tensor
    w2: Tensor
    inner: Callable[[Tensor], Tensor]
    first: Tensor | None = None  # output1_scale_scalar, float32 [E]
    gate: Tensor | None = None
    second: Tensor | None = None
    bias1: Tensor | None = None  # added to the sums before any scale
    bias2: Tensor | None = None
    summed: Callable[[Tensor], Tensor] = field(default=lambda h: h)  # converts the first GEMM's sums
    on_input: bool = False


def _activated(h: Tensor, expert: int, gemms: _Gemms, given: dict) -> Tensor:
    kind = given.get("activation_type", SWIGLU)
    first, gate = (1.0 if s is None else s[expert] for s in (gemms.first, gemms.gate))
    alpha, beta, limit = (given.get(f"gemm1_{name}") for name in ("alpha", "beta", "clamp_limit"))
    if kind == RELU2:
        _check(alpha is None and beta is None and limit is None, "relu2 has no alpha, beta or limit")
        return (h * gate).relu().square() * first
    _check(kind == SWIGLU, f"activation_type {kind} is not emulated")
    up, glu = h.chunk(2, -1)
    if limit is not None:
        up, glu = up.clamp(-limit[expert], limit[expert]), glu.clamp(max=limit[expert])
    glu = glu * gate
    alpha, beta = 1.0 if alpha is None else alpha[expert], 0.0 if beta is None else beta[expert]
    return first * (up + beta) * (glu * torch.sigmoid(alpha * glu))


def _run(given: dict, route: Callable, rows: Tensor, gemms: _Gemms) -> None:
    """Write what the kernel writes to `output`. Raise AssertionError where it refuses or misbehaves.

    `rows` are float32 [T, H], as the first GEMM reads them.
    """
    tokens, slots, hidden = len(rows), given["local_num_experts"], gemms.w2.shape[1]
    experts, top_k, offset = given["num_experts"], given["top_k"], given["local_expert_offset"]
    _check(tokens > 0, "0 tokens")
    _check(given["do_finalize"] is True, "only finalized outputs are emulated")
    _check(0 < top_k <= min(experts, 32), f"top_k must be in [1, min(num_experts, 32)], it is {top_k}")
    _check(slots > 0 and offset >= 0 and offset + slots <= experts, "expert offset and count")
    inner = given["intermediate_size"]
    gated = given.get("activation_type", SWIGLU) != RELU2
    _check_tensor("output", given["output"], BF16, (tokens, hidden))
    _check(gemms.w1.shape == (slots, inner * (1 + gated), hidden), f"gemm1_weights hold {tuple(gemms.w1.shape)}")
    _check(gemms.w2.shape == (slots, hidden, inner), f"gemm2_weights hold {tuple(gemms.w2.shape)}")
    for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"):
        if given.get(name) is not None:
            _check_tensor(name, given[name], torch.float32, (slots,))
    ids, weights = route(given, tokens)
    _check(bool(((ids >= 0) & (ids < experts)).all()), f"ids must be in [0, {experts})")
    local = ids.long() - offset
    mine = (local >= 0) & (local < slots)
    for row, keep in zip(local.tolist(), mine.tolist(), strict=True):
        routes = [e for e, k in zip(row, keep, strict=True) if k]
        _check(len(set(routes)) == len(routes), "one row has an expert twice: the kernel for few tokens drops a route")

    results = torch.zeros(tokens, top_k, hidden)
    for e in range(slots):
        at, pick = (mine & (local == e)).nonzero(as_tuple=True)
        h = rows[at] @ gemms.w1[e].T
        if gemms.on_input:
            h = h * weights[at, pick].unsqueeze(1)
        if gemms.bias1 is not None:
            h = h + gemms.bias1[e]
        a = gemms.inner(_activated(gemms.summed(h), e, gemms, given))
        y = a @ gemms.w2[e].T
        if gemms.bias2 is not None:
            y = y + gemms.bias2[e]
        results[at, pick] = (y if gemms.second is None else y * gemms.second[e]).to(BF16).float()
    total = torch.zeros(tokens, hidden)
    for pick in range(top_k):
        factor = torch.ones(tokens) if gemms.on_input else weights[:, pick]
        total = total + torch.where(mine[:, pick], factor, 0.0).unsqueeze(-1) * results[:, pick]
    given["output"].copy_(total.to(BF16))


# --- The entries


def _bf16(given: dict, route: Callable) -> None:
    x, w1, w2 = given["hidden_states"], given["gemm1_weights"], given["gemm2_weights"]
    gated = given["activation_type"] != RELU2
    _check(given["use_shuffled_weight"] is True and given["weight_layout"] == 2, "BF16 Moe: BlockMajorK")
    _check(x.dtype == w1.dtype == w2.dtype == BF16, "BF16 Moe: operands must be bfloat16")
    _check(w1.is_contiguous() and w2.is_contiguous(), "weights must be contiguous")
    _check(given["intermediate_size"] % 128 == 0, "the second dimension of weights must be a multiple of 128")
    w1, w2 = _rows(_unblocked(w1), gated).float(), _rows(_unblocked(w2), False).float()
    _run(given, route, x.float(), _Gemms(w1, w2, lambda a: a.to(BF16).float()))


def _fp8_per_tensor(given: dict, route: Callable) -> None:
    x, w1, w2 = given["hidden_states"], given["gemm1_weights"], given["gemm2_weights"]
    gated, slots = given["activation_type"] != RELU2, given["local_num_experts"]
    _check(x.dtype == w1.dtype == w2.dtype == FP8, "FP8 MoE: operands must be float8_e4m3fn")
    _check(w1.is_contiguous() and w2.is_contiguous(), "weights must be contiguous")
    scales = [given[f"output{name}"] for name in ("1_scales_scalar", "1_scales_gate_scalar", "2_scales_scalar")]
    for scale in scales:
        _check_tensor("an output scale", scale, torch.float32, (slots,))
    on_input = given["use_routing_scales_on_input"]
    _check(not on_input or given["routing_method_type"] == LLAMA4, "token_scales are set for Llama4 alone")
    w1, w2 = _rows(w1, gated).float(), _rows(w2, False).float()
    _run(given, route, x.float(), _Gemms(w1, w2, _fp8, *scales, on_input=on_input))


def _fp8_block(given: dict, route: Callable) -> None:
    kind, x, scale = given["fp8_quantization_type"], given["hidden_states"], given["hidden_states_scale"]
    w1, w2 = given["gemm1_weights"], given["gemm2_weights"]
    s1, s2 = given["gemm1_weights_scale"], given["gemm2_weights_scale"]
    gated, slots, tokens = given["activation_type"] != RELU2, given["local_num_experts"], len(x)
    (_, rows1, hidden), inner = w1.shape, given["intermediate_size"]
    _check(x.dtype == w1.dtype == w2.dtype == FP8, "hidden_states and weights must be fp8")
    _check(w1.is_contiguous() and w2.is_contiguous() and x.is_contiguous(), "operands must be contiguous")
    _check(given["weight_layout"] == 0, "MajorK alone is emulated")
    _check(given["num_experts"] % 4 == 0, "Routing kernel expects that num_experts must be divisible by 4")
    _check(given["num_experts"] > given["top_k"], "num_experts must be greater than top_k")
    if kind == 1:
        _check(gated, "DeepSeekFp8 only supports ActivationType::Swiglu in this runner path")
        _check(given["use_shuffled_weight"] is False, "unshuffled weights alone are emulated")
        _check_tensor("hidden_states_scale", scale, torch.float32, (hidden // 128, tokens))
        _check_tensor("gemm1_weights_scale", s1, torch.float32, (slots, rows1 // 128, hidden // 128))
        _check_tensor("gemm2_weights_scale", s2, torch.float32, (slots, hidden // 128, inner // 128))
        w1, w2 = (_spread(w.float(), s.repeat_interleave(128, 1)) for w, s in ((w1, s1), (w2, s2)))
        # the activation is a kernel of its own, between two results in fp8 (D, `activationDeepSeekKernel`)
        gemms = _Gemms(w1, w2, _round_blocks, summed=_round_blocks)
        _run(given, route, _spread(x.float(), scale.T), gemms)
        return
    _check(kind == 2, f"fp8_quantization_type {kind} is not emulated")
    _check(given["use_shuffled_weight"] is True, "MxFp8 weights are shuffled")
    _check_tensor("hidden_states_scale", scale, torch.uint8, (tokens, hidden // 32))
    _check(s1.dtype == s2.dtype == torch.uint8, "weights_scale must be uint8")
    _check(s1.is_contiguous() and s2.is_contiguous(), "weights_scale must be contiguous")
    w1 = _spread(_rows(w1, gated).float(), _e8m0(_scales(s1, rows1, hidden // 32, gated)))
    w2 = _spread(_rows(w2, False).float(), _e8m0(_scales(s2, hidden, inner // 32, False)))
    _run(given, route, _spread(x.float(), _e8m0(scale)), _Gemms(w1, w2, _round_mxfp8))


def _fp4(given: dict, route: Callable) -> None:
    x, scale, w1, w2 = (given[n] for n in ("hidden_states", "hidden_states_scale", "gemm1_weights", "gemm2_weights"))
    s1, s2, slots = given["gemm1_weights_scale"], given["gemm2_weights_scale"], given["local_num_experts"]
    gated, inner, tokens = given["activation_type"] != RELU2, given["intermediate_size"], len(x)
    rows1, hidden = w1.shape[1], w1.shape[2] * 2
    _check(w1.dtype == w2.dtype == torch.uint8, "weights must be fp4 packed in uint8")
    _check(s1.dtype == s2.dtype == FP8, "weights_scale must be fp8")
    _check(all(t.is_contiguous() for t in (x, w1, w2, s1, s2)), "operands must be contiguous")
    _check(given["hidden_states_scale_layout"] == 2, "Tokens need use SF linear layout when being routed")
    block = 16 if s1.numel() * 16 == slots * rows1 * hidden else 32  # L, `weight_scale_vec_size`
    value = (lambda s: s.float()) if block == 16 else _e8m0
    w1 = _spread(_rows(_e2m1(w1), gated), value(_scales(s1, rows1, hidden // block, gated)))
    w2 = _spread(_rows(_e2m1(w2), False), value(_scales(s2, hidden, inner // block, False)))
    outputs = [given[n] for n in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")]
    biases = [given["gemm1_bias"], given["gemm2_bias"]]
    for bias, columns in zip(biases, (rows1, hidden), strict=True):
        if bias is not None:
            _check_tensor("a bias", bias, torch.float32, (slots, columns))
    bias1, bias2 = (b if b is None else _rows(b, g) for b, g in zip(biases, (gated, False), strict=True))
    if x.dtype == torch.uint8:
        _check(block == 16, "Only E2m1 weights go with E2m1 activation")
        _check_tensor("hidden_states", x, torch.uint8, (tokens, hidden // 2))
        _check_tensor("hidden_states_scale", scale, FP8, (tokens, hidden // 16))
        for output in outputs:
            _check(output is not None, "output scales are required for E2m1 activation")
            _check_tensor("an output scale", output, torch.float32, (slots,))
        rows, inner_rounding = _spread(_e2m1(x), scale.float()), _round_nvfp4
    else:
        _check(block == 32, "Only MxE2m1 weights go with Bfloat16 or MxE4m3 activation")
        _check(outputs == [None, None, None], "MXFP4 has no output scales")
        if x.dtype == BF16:
            _check(scale is None, "bfloat16 rows have no scales")
            rows, inner_rounding = x.float(), lambda a: a.to(BF16).float()
        else:
            _check_tensor("hidden_states", x, FP8, (tokens, hidden))
            _check_tensor("hidden_states_scale", scale, FP8, (tokens, hidden // 32))
            rows, inner_rounding = _spread(x.float(), _e8m0(scale)), _round_mxfp8
    _run(given, route, rows, _Gemms(w1, w2, inner_rounding, *outputs, bias1, bias2))


def _mxint4(given: dict, route: Callable) -> None:
    x, w1, w2 = given["hidden_states"], given["gemm1_weights"], given["gemm2_weights"]
    s1, s2, inner, hidden = (*(given[f"gemm{i}_weights_scale"] for i in (1, 2)), given["intermediate_size"], x.shape[1])
    _check(x.dtype == BF16 and w1.dtype == w2.dtype == torch.uint8, "bf16 rows, uint8 weights")
    _check(s1.dtype == s2.dtype == BF16, "weights_scale must be bf16")
    _check(all(t.is_contiguous() for t in (x, w1, w2, s1, s2)), "operands must be contiguous")
    _check(s1.numel() * 32 == given["local_num_experts"] * 2 * inner * hidden, "unsupported weight_scale_vec_size")
    w1 = _spread(_int4(_rows(_unblocked(w1), True)), _scales(s1, 2 * inner, hidden // 32, True).float())
    w2 = _spread(_int4(_rows(_unblocked(w2), False)), _scales(s2, hidden, inner // 32, False).float())
    _run(given, route, x.float(), _Gemms(w1, w2, lambda a: a.to(BF16).float()))


_KINDS = {
    "bf16": _bf16,
    "fp8_per_tensor_scale": _fp8_per_tensor,
    "fp8_block_scale": _fp8_block,
    "fp4_block_scale": _fp4,
    "mxint4_block_scale": _mxint4,
}


def emulate(entry: str, **given: object) -> None:
    """Emulate FlashInfer's function of this name."""
    name = entry.removeprefix("trtllm_").removesuffix("_moe")
    routed = name.endswith("_routed")
    _KINDS[name.removesuffix("_routed")](given, _routed if routed else _from_logits)
