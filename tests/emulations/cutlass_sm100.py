"""FlashInfer 0.7.2.post1's `cutlass_fused_moe` on sm100 with block-scaled rows and weights, in plain torch on the CPU.

It takes the tensors that the kernel takes: rows as NVFP4 or MXFP8 with linear scales, weights as int64 or E4M3, scales
as int32 of swizzled bytes. It imports nothing from ep_moe: numbers are decoded bit by bit, scales are fetched by the
kernel's own index formula, roundings search all codes.

Names in the comments are below flashinfer/data/csrc: K and B as in `cutlass_emulation`, and Q =
nv_internal/tensorrt_llm/kernels/quantization_utils.cuh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.emulations.cutlass import FP8, RELU2, Gemms, check, check_tensor, emulate, run_experts

NAMES = (
    "output", "input", "token_selected_experts", "token_final_scales", "fc1_expert_weights", "fc1_expert_biases",
    "fc2_expert_weights", "fc2_expert_biases", "quant_scales", "swiglu_alpha", "swiglu_beta", "swiglu_limit",
    "tp_size", "tp_rank", "ep_size", "ep_rank",
)  # fmt: skip
SM90_FLAGS = ("use_deepseek_fp8_block_scale", "use_w4_group_scaling", "use_packed_weights", "use_wfp4afp8_humming")


def emulate_call(flags: dict[str, bool], output_dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    """Emulate a call of `run_moe` from all its arguments, as on the GPU whose kernels take such operands."""
    own = {name: arguments[name] for name in NAMES}
    kind = {"activation_type": arguments["base_activation_type"], "output_dtype": output_dtype}
    if arguments["fc1_expert_weights"].dtype == torch.int64 or flags["use_mxfp8_act_scaling"]:
        check(not any(flags[name] for name in SM90_FLAGS), f"{SM90_FLAGS} are Hopper's, they are {flags}")
        rows = {"input_sf": arguments["input_sf"], "swizzled_input_sf": arguments["swizzled_input_sf"]}
        emulate_sm100(**own, **kind, **rows, use_mxfp8_act_scaling=flags["use_mxfp8_act_scaling"])
    else:
        check(arguments["input_sf"] is None, "input_sf is for rows with block scales")
        emulate(**own, **kind, **{name: flags[name] for name in SM90_FLAGS})


# --- Numbers


def e4m3(data: Tensor) -> Tensor:
    """Decode s eeee mmm: (8 + m) * 2**(e - 10), or m * 2**-9 if e = 0. 0x7f is NaN."""
    bits = data.view(torch.uint8).int()
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = torch.where(exponent == 0, mantissa * 2.0**-9, (8.0 + mantissa) * 2.0 ** (exponent - 10))
    size = torch.where((bits & 0x7F) == 0x7F, torch.nan, size)
    return torch.where(bits > 127, -size, size)


def e2m1(codes: Tensor) -> Tensor:
    """Decode s ee m: (2 + m) * 2**(e - 2), or m / 2 if e = 0."""
    exponent, mantissa = codes >> 1 & 3, codes & 1
    size = torch.where(exponent == 0, mantissa / 2.0, (2.0 + mantissa) * 2.0 ** (exponent - 2))
    return torch.where(codes > 7, -size, size)


def e8m0(data: Tensor) -> Tensor:
    """Decode a scale: 2**(byte - 127). 255 is NaN."""
    bits = data.view(torch.uint8)
    return torch.where(bits == 255, torch.nan, torch.exp2(bits.double() - 127)).float()


def nearest_e2m1(values: Tensor) -> Tensor:
    """Round to the nearest of the eight magnitudes, ties to the even code, larger ones to 6."""
    codes = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # even codes first: argmin takes the first of equals
    distance = (values.abs().unsqueeze(-1) - e2m1(codes)).abs()
    return torch.copysign(e2m1(codes[distance.argmin(-1)]), values)


def _by_blocks(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    blocks = values.unflatten(-1, (-1, size))
    return blocks, blocks.abs().amax(-1, keepdim=True)


def to_nvfp4(values: Tensor, quant: Tensor) -> Tensor:
    """Return what the second GEMM multiplies: codes times block scales, `quant` times too large (Q:493-506, by
    K:1085)."""
    blocks, largest = _by_blocks(values, 16)
    scale = (quant * (largest * (1 / 6))).clamp(max=448).to(FP8).float()
    inverse = torch.where(scale == 0, 0.0, 1 / (scale * (1 / quant)))
    return (nearest_e2m1(blocks * inverse) * scale).flatten(-2)


def to_mxfp8(values: Tensor) -> Tensor:
    """Quantize as Q:853-915: the scale is the smallest power of two of at least the largest / 448."""
    blocks, largest = _by_blocks(values, 32)
    scale = torch.exp2((largest * (1 / 448)).double().log2().ceil()).float()
    rounded = (blocks / scale).clamp(-448, 448).to(FP8).float() * scale
    return torch.where(largest == 0, 0.0, rounded).flatten(-2)


# --- Layouts


def offsets(rows: int, blocks: int, *, swizzled: bool) -> Tensor:
    """Return the byte offset of each row's and block's scale (get_sf_out_offset_128x4; K:1137 for the linear
    layout)."""
    row, block = torch.arange(rows).unsqueeze(1), torch.arange(blocks).unsqueeze(0)
    if not swizzled:
        return row * blocks + block
    tile = row // 128 * -(-blocks // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def weight_scales(name: str, stored: Tensor, experts: int, rows: int, columns: int, block: int) -> Tensor:
    """Read weight scales as bytes [E, rows, columns / block] (B:1125-1165, B:1493-1530).

    They are stored as int32 [E, rows padded to 128, columns / block / 4 rounded up]. Each expert begins at a whole tile
    (K:1022).
    """
    blocks = columns // block
    check_tensor(name, stored, torch.int32, (experts, -(-rows // 128) * 128, -(-blocks // 4)))
    return stored.view(torch.uint8).reshape(experts, -1)[:, offsets(rows, blocks, swizzled=True)]


def row_scales(stored: Tensor | None, rows: int, columns: int, block: int, *, swizzled: bool) -> Tensor:
    """Read row scales as bytes [rows, columns / block]. Without them the kernel writes zeros (K:1183)."""
    check(stored is not None, "rows that are rounded already need their input_sf")
    assert stored is not None
    check(stored.dtype in (torch.uint8, FP8) and stored.is_contiguous(), "input_sf must be contiguous bytes")
    blocks = columns // block
    check(blocks % 4 == 0, "linear input_sf are read in strides of whole groups of 4 (K:1634)")
    where = offsets(rows, blocks, swizzled=swizzled)
    check(stored.numel() >= int(where.max()) + 1, f"input_sf has {stored.numel()} scales for {rows} x {blocks}")
    return stored.view(torch.uint8).flatten()[where]


def nibbles(packed: Tensor) -> Tensor:
    """Unpack bytes or 64-bit words [..., n] to codes [..., n * 2] or [..., n * 16], the lowest bits first."""
    shifts = torch.arange(0, packed.itemsize * 8, 4)
    return (packed.long().unsqueeze(-1) >> shifts & 15).flatten(-2)


# --- Schemes


def _per_expert(name: str, tensor: Tensor, experts: int, *, or_scalar: bool = False) -> Tensor:
    check_tensor(name, tensor, torch.float32, () if or_scalar and tensor.dim() == 0 else (experts,))
    return tensor.expand(experts)


Shapes = list[tuple[int, ...]]


def _nvfp4(data: tuple[Tensor, Tensor], shapes: Shapes, scales: list[Tensor], dtype: torch.dtype) -> Gemms:
    act1, block1, alpha1, act2, block2, alpha2 = scales
    experts = shapes[0][0]
    check_tensor("fc1_act_global", act1, torch.float32, ())  # per expert only for rows that the kernel rounds (K:1706)
    quant2 = _per_expert("fc2_act_global", act2, experts, or_scalar=True)
    weights = [
        e2m1(nibbles(codes)) * e4m3(weight_scales(name, block, *shape, 16)).repeat_interleave(16, -1)
        for name, codes, block, shape in zip(("fc1 scale", "fc2 scale"), data, (block1, block2), shapes, strict=True)
    ]
    in2: Callable[[Tensor, int], Tensor] = lambda h, e: to_nvfp4(h.to(dtype).float(), quant2[e])  # noqa: E731 (K:1100)
    alphas = [_per_expert(name, a, experts) for name, a in (("fc1_global", alpha1), ("fc2_global", alpha2))]
    return Gemms(*weights, lambda x, e: x, in2, *alphas)


def _mx(data: tuple[Tensor, Tensor], shapes: Shapes, scales: list[Tensor], dtype: torch.dtype) -> Gemms:
    block1, alpha1, block2, alpha2 = scales
    experts, weights = shapes[0][0], []
    for name, codes, block, shape in zip(("fc1 scale", "fc2 scale"), data, (block1, block2), shapes, strict=True):
        values = e4m3(codes) if codes.dtype == FP8 else e2m1(nibbles(codes))
        weights.append(values * e8m0(weight_scales(name, block, *shape, 32)).repeat_interleave(32, -1))
    alphas = [_per_expert(name, a, experts) for name, a in (("fc1_global", alpha1), ("fc2_global", alpha2))]
    return Gemms(*weights, lambda x, e: x, lambda h, e: to_mxfp8(h.to(dtype).float()), *alphas)


def emulate_sm100(
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
    input_sf: Tensor | None,
    swizzled_input_sf: bool,
    tp_size: int,
    tp_rank: int,
    ep_size: int,
    ep_rank: int,
    activation_type: int,
    use_mxfp8_act_scaling: bool,
    output_dtype: torch.dtype,
) -> None:
    """Write what the kernel writes to `output`. Raise AssertionError where it refuses or misbehaves."""
    fc1, fc2, ids = fc1_expert_weights, fc2_expert_weights, token_selected_experts
    nvfp4, four = not use_mxfp8_act_scaling, fc1.dtype == torch.int64
    check(fc1.dtype in (torch.int64, FP8) and fc2.dtype == fc1.dtype, f"weights are {fc1.dtype} and {fc2.dtype}")
    check(four or not nvfp4, "E4M3 weights have block scales with MXFP8 rows alone")
    check(0 <= tp_rank < tp_size and 0 <= ep_rank < ep_size, "a rank must be below its size")
    (tokens, top_k), packed = ids.shape, 16 if four else 1
    experts, hidden, inter = fc2.shape[0], fc2.shape[1], fc2.shape[2] * packed
    gated = activation_type != RELU2
    unit = (64, 64 if gated else 128) if nvfp4 else (128, 128)
    check(tokens > 0, "0 tokens: the kernel that sorts them wants exactly one block")
    check(hidden % unit[0] == 0 and inter % unit[1] == 0, f"H {hidden}, I {inter} must be multiples of {unit} (B:419)")
    rows = inter * (2 if gated else 1)
    shapes = [(experts, rows, hidden), (experts, hidden, inter)]
    for name, data, (_, out, columns) in (("fc1", fc1, shapes[0]), ("fc2", fc2, shapes[1])):
        check_tensor(f"{name}_expert_weights", data, fc1.dtype, (experts, out, columns // packed), aligned=True)
    check_tensor("input", input, torch.uint8 if nvfp4 else FP8, (tokens, hidden // (2 if nvfp4 else 1)), aligned=True)
    check_tensor("token_selected_experts", ids, torch.int32, (tokens, top_k))
    if token_final_scales is not None:
        check_tensor("token_final_scales", token_final_scales, torch.float32, (tokens, top_k))
    check_tensor("output", output, output_dtype, (tokens, hidden), aligned=True)
    check(output_dtype in (torch.float16, torch.bfloat16), f"an output of {output_dtype} is not possible")
    check((fc1_expert_biases is None) == (fc2_expert_biases is None), "there must be both biases or none")
    for name, bias, columns in (("fc1", fc1_expert_biases, rows), ("fc2", fc2_expert_biases, hidden)):
        if bias is not None:
            check_tensor(f"{name}_expert_biases", bias, output_dtype, (experts, columns), aligned=True)
    swiglu = {"alpha": swiglu_alpha, "beta": swiglu_beta, "limit": swiglu_limit}
    for name, values in swiglu.items():
        if values is not None:
            check(activation_type == 3, f"swiglu_{name} has no effect on activation_type {activation_type}")
            check_tensor(f"swiglu_{name}", values, torch.float32, (experts,))
    scales, wanted = list(quant_scales or []), 6 if nvfp4 else 4
    check(len(scales) == wanted, f"it takes {wanted} quant_scales, there are {len(scales)}")

    block = 16 if nvfp4 else 32
    factor = row_scales(input_sf, tokens, hidden, block, swizzled=swizzled_input_sf)
    values, factor = (e2m1(nibbles(input)), e4m3(factor)) if nvfp4 else (e4m3(input), e8m0(factor))
    gemms = (_nvfp4 if nvfp4 else _mx)((fc1, fc2), shapes, scales, output_dtype)
    biases = (fc1_expert_biases, fc2_expert_biases if tp_rank == 0 else None)
    local = ids.long() - experts * ep_rank
    decoded = values * factor.repeat_interleave(block, -1)
    run_experts(output, decoded, local, token_final_scales, gemms, biases, activation_type, swiglu)
