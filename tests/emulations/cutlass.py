"""FlashInfer 0.7.2.post1's `cutlass_fused_moe` on sm90, in plain torch on the CPU.

It takes the tensors that the kernel takes, so a test without a GPU finds a wrong row order, interleave or scale. It
imports nothing from ep_moe. The layouts were read independently from FlashInfer's CUDA sources: here from the code that
consumes them (the register converters), in ep_moe from the code that produces them.

Names in the comments are below flashinfer/data/csrc:

- K = fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh
- B = flashinfer_cutlass_fused_moe_binding.cu next to it
- M = mixed_input_utils.hpp of TensorRT-LLM's cutlass_extensions/detail/collective

The reduction over the routes is the unfused one (K:1965): fp32 in the order of the routes, one rounding at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SWIGLU, GEGLU, RELU2 = 3, 4, 6  # tllm_enums.py ActivationType
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0


def check(condition: bool, sentence: str) -> None:
    # Not the assert statement: python -O would drop the checks.
    if not condition:
        raise AssertionError(sentence)


def check_tensor(name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int, ...], *, aligned: bool = False) -> None:
    """Check dtype, shape and strides of a tensor.

    The binding checks most dtypes and sizes. It checks strides for humming only, and otherwise reads wrong numbers.
    """
    check(t.dtype == dtype, f"{name} must be {dtype}, it is {t.dtype}")
    check(tuple(t.shape) == shape, f"{name} must have shape {shape}, it has {tuple(t.shape)}")
    check(t.is_contiguous(), f"{name} must be contiguous: the kernel reads from the bare pointer")
    check(not aligned or t.data_ptr() % 16 == 0, f"{name} must start at a multiple of 16 bytes")


# --- Numbers


def _fp8(x: Tensor) -> Tensor:
    """Round to e4m3, as float32. All conversions of these kernels saturate and make no NaN."""
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(FP8).float()


def _quantize_1x128(x: Tensor) -> Tensor:
    """Quantize bf16 rows for DeepGEMM: a scale per 128 columns (fp8_blockscale_gemm_kernel.cuh:979-1000)."""
    blocks = x.float().unflatten(-1, (-1, 128))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, FP8_MAX / amax, torch.ones_like(amax))
    return (_fp8(blocks * scale) * (1.0 / scale)).flatten(-2)


def _quantize_token(x: Tensor, residual: Tensor) -> Tensor:
    """Quantize humming's activations (K:83, K:1752-1790, K:2538-2570): a dynamic scale per row, times the residual.

    The residual of the weights travels in the row's dequantization scale, by which the epilogue multiplies.
    """
    amax = x.float().abs().amax(-1, keepdim=True)
    floor = FP8_MAX / torch.finfo(torch.float32).max
    scale = torch.where(amax > 0, FP8_MAX / amax.clamp(min=floor), torch.ones_like(amax))
    return _fp8(x.float() * scale) * ((1.0 / scale) * residual)


# --- Layouts of the mixed-input GEMM: bytes [E, N, K/2] to codes [E, N, K]


def _words(data: Tensor) -> Tensor:
    """Return little-endian 32-bit words, in int64 so that shifts are unsigned: [E, N/16, 2, 8, K/64, 2, 4].

    The dimensions: E; block of 16 rows; half of it; row in the half; block of 64 columns; half of it; thread of four.
    """
    experts, rows, half_cols = data.shape
    words = data.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return words.reshape(experts, rows // 16, 2, 8, half_cols // 32, 2, 4)


def decode_fp4_bf16(data: Tensor) -> Tensor:
    """Decode scheme d, from the converter M:50-102 and the m64k16 A fragment of WGMMA.

    Each half of a word (the even and the odd column) holds four codes s eem. Three have s at bits 15, 12, 9 and eem
    from bits 8, 5, 2 on. The fourth has s at 14, m at 13 and ee from 11 on. The codes are (row, row+8) x (column,
    column+8). The half of the 16 rows in which the word lies is not a row index. It is the bit of the column that is
    worth 16.
    """
    words = _words(data)
    half = torch.stack([words & 0xFFFF, words >> 16], -1)  # columns 2t and 2t+1
    first = (half >> 12 & 8) | (half >> 6 & 7)
    second = (half >> 9 & 8) | (half >> 3 & 7)
    third = (half >> 6 & 8) | (half & 7)
    fourth = (half >> 11 & 8) | (half >> 9 & 6) | (half >> 13 & 1)
    codes = torch.stack([first, second, third, fourth], -1).unflatten(-1, (2, 2))
    # E, R, c16, r, c64, c32, t, parity, c8, r8 -> E, R, r8, r, c64, c32, c16, c8, t, parity
    return codes.permute(0, 1, 9, 3, 4, 5, 2, 8, 6, 7).reshape(data.shape[0], data.shape[1], -1)


def _place_fp8(codes: Tensor, data: Tensor) -> Tensor:
    """Place the eight codes of each word in the m64k32 A fragment: four columns of `row`, four of `row+8`."""
    codes = codes.unflatten(-1, (2, 4))
    # E, R, c16, r, c64, c32, t, r8, j -> E, R, r8, r, c64, c32, c16, t, j
    return codes.permute(0, 1, 7, 3, 4, 5, 2, 6, 8).reshape(data.shape[0], data.shape[1], -1)


def decode_int4_fp8(data: Tensor) -> Tensor:
    """Decode scheme e, from M:228-290: nibble i of a word is code i, in two's complement."""
    nibbles = _words(data).unsqueeze(-1) >> torch.arange(0, 32, 4) & 15
    return _place_fp8(torch.where(nibbles > 7, nibbles - 16, nibbles), data)


def decode_fp4_fp8(data: Tensor) -> Tensor:
    """Decode scheme f, from M:189-211: nibble i of a word has eem of code i, but its bit 3 is the sign of another
    code."""
    words = _words(data).unsqueeze(-1)
    eem = words >> torch.arange(0, 32, 4) & 7
    sign = words >> torch.tensor([7, 15, 23, 31, 3, 11, 19, 27]) & 1
    return _place_fp8(eem | sign << 3, data)


def unfold_scale(name: str, scale: Tensor, experts: int, rows: int, cols: int, group: int) -> Tensor:
    """Unfold scales [E, N/64, K/128, folded rows, 16 bytes] to [E, N, K/group].

    They are bf16 for group 128, and bytes for group 32. 16 bytes hold the scales of rows r, r+F, r+2F, ... of a block
    of 64, each with those of its 128 columns side by side (SmemLayoutWeightScaleExpanded of
    sm90_mma_array_tma_gmma_rs_warpspecialized_mixed_input_.hpp).
    """
    dtype = torch.uint8 if group == 32 else torch.bfloat16
    slices = 16 // dtype.itemsize // (128 // group)
    shape = (experts, rows // 64, cols // 128, 64 // slices)
    check(scale.is_contiguous(), f"{name} must be contiguous: the kernel reads from the bare pointer")
    fits = scale.dim() == 5 and tuple(scale.shape[:4]) == shape and scale.shape[4] * scale.itemsize == 16
    check(fits, f"{name} must be {shape} times 16 bytes, it is {tuple(scale.shape)} of {scale.dtype}")
    parts = scale.view(dtype).unflatten(-1, (slices, 128 // group))
    return parts.permute(0, 1, 4, 3, 2, 5).reshape(experts, rows, cols // group)


def _e2m1(codes: Tensor) -> Tensor:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat([values, -values])[codes]


def _weight_w4a16(name: str, data: Tensor, scale: Tensor) -> Tensor:
    exponent = unfold_scale(name, scale, data.shape[0], data.shape[1], data.shape[2] * 2, 32)
    # The kernel shifts the byte into a float's exponent, so byte 0 is the number 0, not 2^-127 (scale_convertor).
    factor = (exponent.to(torch.int32) << 23).view(torch.float32)
    return _e2m1(decode_fp4_bf16(data)) * factor.repeat_interleave(32, -1)


def _weight_w4a8(name: str, data: Tensor, scale: Tensor) -> Tensor:
    # The two bytes are read as bf16 also where the activations are fp16 (moe_gemm_kernels.h:210).
    factor = unfold_scale(name, scale, data.shape[0], data.shape[1], data.shape[2] * 2, 128).float()
    return decode_int4_fp8(data).float() * factor.repeat_interleave(128, -1)


def _weight_humming(name: str, data: Tensor, scale: Tensor) -> Tensor:
    check(scale.dtype == torch.int32, f"{name} must be torch.int32, it is {scale.dtype}")
    offset = unfold_scale(name, scale, data.shape[0], data.shape[1], data.shape[2] * 2, 32).to(torch.int64)
    # Below 1 the code 0.5 reads as 0; above 12 the exponent of the codes 4 and 6 runs into the sign bit.
    filled = (offset != 0).flatten(1).any(1)  # an empty slot holds zeros, which no row uses
    check(bool(((offset >= 1) & (offset <= 12))[filled].all()), f"{name} must hold offsets from 1 to 12")
    codes = decode_fp4_fp8(data)
    eem = codes & 7
    base = torch.tensor([0x00, 0x00, 0x08, 0x0C, 0x10, 0x14, 0x18, 0x1C])[eem]  # M:615-622
    byte = base + (offset.repeat_interleave(32, -1) << 3) * (eem > 0) | (codes & 8) << 4
    return byte.to(torch.uint8).view(FP8).float()


# --- Schemes


@dataclass
class Gemms:
    """One scheme's weights as the tensor cores multiply them, and the conversion of the operands around them."""

    fc1: Tensor
    fc2: Tensor
    in1: Callable[[Tensor, int], Tensor]  # rows of the input, local expert -> what GEMM1 multiplies
    in2: Callable[[Tensor, int], Tensor]  # fp32 results of the activation, local expert -> what GEMM2 multiplies
    alpha1: Tensor | None = None  # fp32 [E], times the fp32 sums of GEMM1
    alpha2: Tensor | None = None


def _dense(dtype: torch.dtype, fc1: Tensor, fc2: Tensor) -> Gemms:
    return Gemms(fc1, fc2, lambda x, e: x.float(), lambda h, e: h.to(dtype).float())


def _fp8_per_tensor(fc1: Tensor, fc2: Tensor, scales: list[Tensor]) -> Gemms:
    dequant1, quant2, dequant2, input_dequant = scales
    check_tensor("fc1_dequant", dequant1, torch.float32, (fc1.shape[0],))
    check_tensor("fc2_quant", quant2, torch.float32, (fc1.shape[0],) if quant2.dim() else ())
    check_tensor("fc2_dequant", dequant2, torch.float32, (fc1.shape[0],))
    check_tensor("fc1_input_dequant", input_dequant, torch.float32, ())  # only LoRA reads it
    per_expert = quant2.expand(fc1.shape[0])
    in2 = lambda h, e: _fp8(h * per_expert[e])  # noqa: E731 (fp32 until here: no rounding to bf16 between)
    return Gemms(fc1.float(), fc2.float(), lambda x, e: x.float(), in2, dequant1, dequant2)


def _fp8_block(fc1: Tensor, fc2: Tensor, scales: list[Tensor]) -> Gemms:
    weights = []
    for name, data, scale in (("fc1", fc1, scales[0]), ("fc2", fc2, scales[1])):
        experts, rows, cols = data.shape
        check_tensor(f"the scale of {name}", scale, torch.float32, (experts, -(-rows // 128), cols // 128))
        factor = scale.repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)
        weights.append(data.float() * factor)
    # The activation's result is stored in bf16, and only then quantized.
    return Gemms(*weights, lambda x, e: _quantize_1x128(x), lambda h, e: _quantize_1x128(h.to(torch.bfloat16)))


def _w4a16(fc1: Tensor, fc2: Tensor, scales: list[Tensor]) -> Gemms:
    fc1, fc2 = _weight_w4a16("the scale of fc1", fc1, scales[0]), _weight_w4a16("the scale of fc2", fc2, scales[1])
    return _dense(torch.bfloat16, fc1, fc2)


def _w4a8(dtype: torch.dtype, fc1: Tensor, fc2: Tensor, scales: list[Tensor]) -> Gemms:
    scale1, scale2, act1, act2, zero1, zero2, alpha1, alpha2 = scales
    experts, hidden, inter = fc1.shape[0], fc1.shape[2] * 2, fc2.shape[2] * 2
    # The binding allows empty act_scales (B:1572-1579). Without fc1's the kernel refuses (K:1859). Without fc2's
    # nothing quantizes (K:4252, K:3430), and GEMM2 reads the bytes of bf16 numbers as fp8.
    check_tensor("fc1_act_scales", act1, dtype, (hidden,), aligned=True)
    check_tensor("fc2_act_scales", act2, dtype, (inter,), aligned=True)
    for name, zero in (("fc1", zero1), ("fc2", zero2)):
        check(not zero.any(), f"the zero points of {name} are not read on sm90: they must be empty or 0")
    check_tensor("fc1_alpha", alpha1, torch.float32, (experts,))  # without it the kernel multiplies by 0
    check_tensor("fc2_alpha", alpha2, torch.float32, (experts,))
    fc1, fc2 = _weight_w4a8("the scale of fc1", fc1, scale1), _weight_w4a8("the scale of fc2", fc2, scale2)
    # Static: x * act_scales rounds to the 16-bit dtype (K:1744; preQuantScaleKernel.cu), then to fp8.
    return Gemms(fc1, fc2, lambda x, e: _fp8(x * act1), lambda h, e: _fp8(h.to(dtype) * act2), alpha1, alpha2)


def _humming(fc1: Tensor, fc2: Tensor, scales: list[Tensor]) -> Gemms:
    scale1, residual1, act2, scale2, residual2 = scales
    check_tensor("the residual of fc1", residual1, torch.float32, (fc1.shape[0],))
    check_tensor("the residual of fc2", residual2, torch.float32, (fc1.shape[0],))
    check_tensor("fc2_act_global", act2, torch.float32, (fc1.shape[0],) if act2.dim() else ())  # not read
    fc1, fc2 = _weight_humming("the scale of fc1", fc1, scale1), _weight_humming("the scale of fc2", fc2, scale2)
    in1, in2 = (lambda x, e, r=r: _quantize_token(x, r[e]) for r in (residual1, residual2))
    return Gemms(fc1, fc2, in1, in2)


_HALF = (torch.bfloat16, torch.float16)
# Input dtypes, weight dtype (None: the input's), (deepseek, w4 group, packed, humming); name, number of quant_scales,
# what H and I must be multiples of (B:150-318, B:1600-1640; in w4a16, w4a8 and fp8_block the GEMMs ask for the 128).
_SCHEMES = [
    (_HALF, None, (False, False, False, False), ("dense", 0, 8)),
    ((FP8,), FP8, (False, False, False, False), ("fp8_per_tensor", 4, 16)),
    ((torch.bfloat16,), FP8, (True, False, False, False), ("fp8_block", 2, 128)),
    ((torch.bfloat16,), torch.uint8, (False, True, False, False), ("w4a16", 2, 128)),
    (_HALF, torch.uint8, (False, True, True, False), ("w4a8", 8, 128)),
    (_HALF, torch.uint8, (False, True, False, True), ("humming", 5, 128)),
]


def _scheme(dtype: torch.dtype, weight: torch.dtype, flags: tuple[bool, ...]) -> tuple[str, int, int]:
    for dtypes, of_weight, of_flags, found in _SCHEMES:
        if dtype in dtypes and weight == (of_weight or dtype) and tuple(map(bool, flags)) == of_flags:
            return found
    raise AssertionError(f"no sm90 kernel takes {dtype} rows and {weight} weights with flags (see _SCHEMES) {flags}")


def _activation(kind: int, x: Tensor, params: dict[str, float | None]) -> Tensor:
    """Activate in fp32 (K:2407-2545). The first half of the columns is up, the second half gate."""
    if kind == RELU2:
        return x.relu().square()
    up, gate = x.chunk(2, -1)
    if kind == GEGLU:
        return torch.nn.functional.gelu(gate, approximate="none") * up  # erf: GLUAdaptor<GELU>; 8 would be tanh
    alpha, beta, limit = (params[name] for name in ("alpha", "beta", "limit"))
    limit = float("inf") if limit is None else limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    # A missing argument has the adaptor's own default, so beta alone is 0, not GPT-OSS's 1 (K:2253).
    return gate * torch.sigmoid(gate * (1.0 if alpha is None else alpha)) * (up + (0.0 if beta is None else beta))


def emulate(
    output: Tensor,
    input: Tensor,  # noqa: A002 (the kernel's own names)
    token_selected_experts: Tensor,
    token_final_scales: Tensor | None,
    fc1_expert_weights: Tensor,
    fc1_expert_biases: Tensor | None,
    fc2_expert_weights: Tensor,
    fc2_expert_biases: Tensor | None,
    quant_scales: list[Tensor] | None,
    swiglu_alpha: Tensor | None,
    swiglu_beta: Tensor | None,
    swiglu_limit: Tensor | None,
    *,
    tp_size: int,
    tp_rank: int,
    ep_size: int,
    ep_rank: int,
    activation_type: int,
    use_deepseek_fp8_block_scale: bool,
    use_w4_group_scaling: bool,
    use_packed_weights: bool,
    use_wfp4afp8_humming: bool,
    output_dtype: torch.dtype,
) -> None:
    """Write what the kernel writes to `output`. Raise AssertionError where it refuses or misbehaves."""
    fc1, fc2, ids, dtype = fc1_expert_weights, fc2_expert_weights, token_selected_experts, input.dtype
    flags = (use_deepseek_fp8_block_scale, use_w4_group_scaling, use_packed_weights, use_wfp4afp8_humming)
    name, num_scales, multiple = _scheme(dtype, fc1.dtype, flags)
    scales = list(quant_scales or [])
    check(len(scales) == num_scales, f"{name} takes {num_scales} quant_scales, there are {len(scales)}")
    check(activation_type in (SWIGLU, GEGLU, RELU2), f"activation_type {activation_type} is not emulated")
    check(0 <= tp_rank < tp_size and 0 <= ep_rank < ep_size, "a rank must be below its size")
    check(input.dim() == 2 and ids.dim() == 2, "input and token_selected_experts must have 2 dimensions")
    check(fc1.dim() == 3 and fc2.dim() == 3, "the weights must have 3 dimensions")

    (tokens, top_k), packing = ids.shape, 2 if fc1.dtype == torch.uint8 else 1
    experts, hidden, inter = fc2.shape[0], fc2.shape[1], fc2.shape[2] * packing
    fc1_rows = inter * (1 if activation_type == RELU2 else 2)
    check(tokens > 0, "0 tokens: the kernel that sorts them wants exactly one block")
    check(hidden % multiple == 0, f"H {hidden} must be a multiple of {multiple}")
    check(inter % multiple == 0, f"I {inter} must be a multiple of {multiple}")
    check_tensor("fc1_expert_weights", fc1, fc1.dtype, (experts, fc1_rows, hidden // packing), aligned=True)
    check_tensor("fc2_expert_weights", fc2, fc1.dtype, (experts, hidden, inter // packing), aligned=True)
    check_tensor("input", input, dtype, (tokens, hidden), aligned=True)
    check_tensor("token_selected_experts", ids, torch.int32, (tokens, top_k))
    if token_final_scales is not None:
        check_tensor("token_final_scales", token_final_scales, torch.float32, (tokens, top_k))
    check(output_dtype in (torch.float16, torch.bfloat16), f"an output of {output_dtype} is not possible")
    # Only fp8 input has a choice: other runners are built for the input's dtype, whatever output_dtype says.
    check(dtype in (FP8, output_dtype), f"output_dtype {output_dtype} must be the input's, {dtype}")
    check_tensor("output", output, output_dtype, (tokens, hidden), aligned=True)
    check((fc1_expert_biases is None) == (fc2_expert_biases is None), "there must be both biases or none")
    if fc1_expert_biases is not None and fc2_expert_biases is not None:
        check_tensor("fc1_expert_biases", fc1_expert_biases, output_dtype, (experts, fc1_rows), aligned=True)
        check_tensor("fc2_expert_biases", fc2_expert_biases, output_dtype, (experts, hidden), aligned=True)
    swiglu = {"alpha": swiglu_alpha, "beta": swiglu_beta, "limit": swiglu_limit}
    for key, values in swiglu.items():
        if values is not None:
            check(activation_type == SWIGLU, f"swiglu_{key} has no effect on activation_type {activation_type}")
            check_tensor(f"swiglu_{key}", values, torch.float32, (experts,))

    build = {"fp8_per_tensor": _fp8_per_tensor, "fp8_block": _fp8_block, "w4a16": _w4a16, "humming": _humming}
    build |= {"dense": lambda *w: _dense(dtype, w[0].float(), w[1].float()), "w4a8": lambda *w: _w4a8(dtype, *w)}
    biases = (fc1_expert_biases, fc2_expert_biases if tp_rank == 0 else None)
    local = ids.long() - experts * ep_rank
    run_experts(
        output, input, local, token_final_scales, build[name](fc1, fc2, scales), biases, activation_type, swiglu
    )


def run_experts(
    output: Tensor,
    rows: Tensor,
    local: Tensor,
    weights: Tensor | None,
    gemms: Gemms,
    biases: tuple[Tensor | None, Tensor | None],
    activation_type: int,
    swiglu: dict[str, Tensor | None],
) -> None:
    """Run the kernel's computation on decoded operands.

    `rows` are [T, H] as `gemms.in1` takes them. `local` are ids of this rank's experts [T, K]; other ids are below 0 or
    too large.
    """
    (tokens, top_k), (experts, hidden) = local.shape, gemms.fc2.shape[:2]
    mine = (local >= 0) & (local < experts)
    for row, keep in zip(local.tolist(), mine.tolist(), strict=True):
        routes = [e for e, k in zip(row, keep, strict=True) if k]
        check(len(set(routes)) == len(routes), "one row has an expert twice: the kernel reads rows it never wrote")

    def gemm(x: Tensor, weight: Tensor, alpha: Tensor | None, e: int) -> Tensor:
        result = x @ weight[e].T
        # Both GEMMs store their result in 16 bits before the next kernel adds a bias (UnfusedGemmOutputType).
        return (result if alpha is None else result * alpha[e]).to(output.dtype).float()

    results = torch.zeros(tokens, top_k, hidden)
    for e in range(experts):
        at, routes = (local == e).nonzero(as_tuple=True)
        x = gemm(gemms.in1(rows[at], e), gemms.fc1, gemms.alpha1, e)
        if biases[0] is not None:
            x = x + biases[0][e].float()
        params = {key: None if values is None else float(values[e]) for key, values in swiglu.items()}
        y = gemm(gemms.in2(_activation(activation_type, x, params), e), gemms.fc2, gemms.alpha2, e)
        if biases[1] is not None:
            y = y + biases[1][e].float()
        results[at, routes] = y

    scales = torch.ones(tokens, top_k) if weights is None else weights
    total = torch.zeros(tokens, hidden)
    for route in range(top_k):  # routes of other ranks are skipped, even with a NaN weight
        total = total + torch.where(mine[:, route], scales[:, route], 0.0).unsqueeze(-1) * results[:, route]
    output.copy_(total.to(output.dtype))
