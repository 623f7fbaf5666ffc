"""Expected results of an expert kernel, in float64 on the dequantized weights, and bounds of their rounding errors.

The bound accounts for these roundings:

- of the activations before each matrix product, as the scheme defines it, with its scale;
- of INT4 weights times their scales to the layer's dtype, if products are in that dtype (as compressed-tensors
  dequantizes);
- of each intermediate result to the layer's dtype;
- of sums in float32;
- of each addition to the output.

One rounding has an error of at most half a step c. Errors of random data are taken as independent with mean zero. A sum
of n of them with factors f then exceeds z * sqrt(sum (f * c)**2) with probability at most 2 exp(-z*z / 2) (Hoeffding's
inequality). z = 7 gives 5e-11 for an element.

For block-scaled activations (NVFP4, MXFP8), the first product's input is known exactly, so its rounding is part of the
expected value and not an error. A step of E2M1 is wide. The error within it is taken as uniform, with c**2 / 3 instead
of c**2, because a bound of whole half steps would accept a wrong scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe import Activation, MoEConfig
from ep_moe.experts.shared_experts import activate
from ep_moe.quant.fp8 import FP8_BLOCK, FP8_MAX
from ep_moe.quant.microscale import (
    E2M1_MAX,
    MX_BLOCK,
    NVFP4_BLOCK,
    dequantize_mxfp8,
    dequantize_nvfp4,
    quantize_mxfp8,
    quantize_nvfp4,
)
from ep_moe.quant.schemes import Rounding, Scheme
from ep_moe.quant.weight_formats import Int4Groups
from ep_moe.weights.layouts.cutlass import activation_bound

Z = 7.0


def half_step(values: Tensor, scale: Tensor | float, rounding: Rounding, dtype: torch.dtype) -> Tensor:
    """Return half the distance of neighboring numbers of a format at the given values.

    E4M3 has 3 mantissa bits, and a smallest step of 2**-9 * scale. E2M1's numbers are 1/2 * scale apart up to
    2 * scale, 1 * scale up to 4 * scale, and 2 * scale beyond. A kernel's scale s may be smaller than `scale` by
    2 / 17. A value between 2 * s and 2 * scale, or 4 * s and 4 * scale, is still within half this step of 2 * s or
    4 * s. scale: see `scale_of_rows`
    """
    if rounding is Rounding.NONE:
        return values.abs() * (torch.finfo(dtype).eps / 2)
    if rounding is Rounding.NVFP4:
        size, scale = values.abs(), torch.as_tensor(scale, device=values.device)
        return scale / 4 * (1 + (size > 2 * scale).double()) * (1 + (size > 4 * scale).double())
    return torch.maximum(values.abs() * 2.0**-4, torch.as_tensor(scale, device=values.device) * 2.0**-10)


def rounded(values: Tensor, rounding: Rounding, global_scale: float) -> Tensor:
    """Quantize to a block-scaled format by `quant.microscale`, and return the dequantized values in float64."""
    if rounding is Rounding.NVFP4:
        return dequantize_nvfp4(*quantize_nvfp4(values, global_scale), global_scale).double()
    return dequantize_mxfp8(*quantize_mxfp8(values)).double()


def power_of_two(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an upper bound of the scale rounded up to a power of two.

    With float16 it is at least 2**-15, so that its reciprocal is finite.
    """
    return (2 * scale).clamp(min=2.0**-15 if dtype == torch.float16 else 0.0)


def scale_of_rows(values: Tensor, rounding: Rounding, global_scale: float = 1.0) -> Tensor:
    """Return the scale of each value, or an upper bound of it, if a kernel derives scales from the values.

    A scale belongs to a row, or to a row and a block of columns.

    MXFP8: amax / 448 rounded up to a power of two, so less than twice that.
    NVFP4: the global scale g times the E4M3 number nearest to amax / (6 * g). Its relative error is at most 2**-4, and
    a value that then saturates lies within half a step of the largest number. For amax < 6 * 2**-6 * g the E4M3 number
    is subnormal, with an absolute error of at most 2**-10. The scale is then at most 17 * 2**-10 * g, which is half its
    largest step, and the error of saturation is at most 6 * 2**-10 * g. Four times the former lets `half_step` cover
    both.
    """
    sizes = values.abs()
    match rounding:
        case Rounding.FP8_ROWS:
            return sizes.amax(1, keepdim=True) / FP8_MAX
        case Rounding.NVFP4:
            largest = sizes.unflatten(1, (-1, NVFP4_BLOCK)).amax(2)
            scale = largest / E2M1_MAX * (1 + 2.0**-4)
            scale = torch.where(largest < E2M1_MAX * 2.0**-6 * global_scale, 68 * 2.0**-10 * global_scale, scale)
        case Rounding.MXFP8:
            scale = sizes.unflatten(1, (-1, MX_BLOCK)).amax(2) / FP8_MAX * 2
        case _:
            scale = sizes.unflatten(1, (-1, FP8_BLOCK)).amax(2) / FP8_MAX
    spread: Tensor = scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)
    return spread


def numbers_of(scheme: Scheme, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Dequantize w13 and w2 of an expert's canonical tensors to float64."""
    return scheme.dequantize(tensors, "w13").double(), scheme.dequantize(tensors, "w2").double()


def expected_and_limit(
    config: MoEConfig,
    scheme: Scheme,
    experts: list[dict[str, Tensor]],
    x: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    dtype: torch.dtype,
    *,
    output_bias: bool = True,
    rounds: bool = True,
    numbers: list[tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the expected output and the limit of its error, float64 [N, H] each.

    experts: canonical tensors of the expert in each slot
    ids: [N, K], local; weights: [N, K], or None
    rounds: whether the kernel rounds activations as the scheme says; the reference, for example, does not
    numbers: `numbers_of` of the experts, for a caller that computes them once for several calls
    """
    rounding = scheme.activations if rounds else Rounding.NONE
    half = torch.finfo(dtype).eps / 2
    of_weights = half if rounds and rounding is Rounding.NONE and isinstance(scheme.weights, Int4Groups) else 0.0
    rows = x.double()
    value, variance = torch.zeros_like(rows), torch.zeros_like(rows)
    size, routes = torch.zeros_like(rows), torch.zeros(len(rows), 1, device=x.device)
    used = (ids >= 0).any(1)
    largest = rows[used].abs().max() if used.any() else torch.zeros((), device=x.device)
    longest = rows[used].square().sum(1).max() if used.any() else torch.zeros((), device=x.device)
    static = [float(tensors["w13_input_scale"]) for tensors in experts] if rounding.calibrated else []
    bounds = dynamic_scales(config, scheme, experts, longest)
    for slot, tensors in enumerate(experts):
        at, column = (ids == slot).nonzero(as_tuple=True)
        if not len(at):
            continue
        weight = (
            torch.ones(len(at), 1, device=x.device) if weights is None else weights[at, column].unsqueeze(1).double()
        )
        w13, w2 = numbers[slot] if numbers is not None else numbers_of(scheme, tensors)
        inputs, step = _as_read(rows[at], rounding, static, largest, dtype)
        h = inputs @ w13.T
        step = step.square() + (of_weights * inputs).square()
        h_variance = (step + summing(inputs)) @ w13.square().T + (half * h).square()
        if config.expert_bias:
            h = h + tensors["w13_bias"].double()
        a, a_variance = through_activation(config, h, h_variance)
        step = _step_between(a, rounding, tensors, bounds[slot] if bounds else None, dtype)
        # some schemes round once to the dtype in between, and the activation rounds inside
        a_variance = a_variance + step.square() + 4 * (half * a).square() + (of_weights * a).square() + summing(a)
        y = a @ w2.T
        y_variance = a_variance @ w2.square().T + (half * y).square()
        if config.expert_bias and output_bias:
            y = y + tensors["w2_bias"].double()
        value.index_add_(0, at, weight * y)
        variance.index_add_(0, at, weight.square() * y_variance)
        size.index_add_(0, at, (weight * y).abs())
        routes.index_add_(0, at, torch.ones_like(routes[at]))
    # a fused finalize kernel adds routes one by one in the output's dtype, and each addition rounds
    return value, Z * variance.sqrt() + half * (routes + 1) * size


def _as_read(
    inputs: Tensor, rounding: Rounding, static: list[float], largest: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return rows [n, H] as the first product reads them, and half a rounding step of each value.

    static: calibrated scales of the experts
    largest: largest magnitude in the rows of all experts
    """
    match rounding:
        case Rounding.NONE:
            return inputs, torch.zeros_like(inputs)
        case Rounding.NVFP4 | Rounding.MXFP8:
            inputs = rounded(inputs, rounding, max(static, default=1.0))
            return inputs, torch.zeros_like(inputs)
        case Rounding.FP8_STATIC:
            return inputs, half_step(inputs, max(static), rounding, dtype)
        case Rounding.FP8_DYNAMIC:
            return inputs, half_step(inputs, power_of_two(largest / FP8_MAX, dtype), rounding, dtype)
        case _:
            return inputs, half_step(inputs, scale_of_rows(inputs, rounding), rounding, dtype)


def _step_between(
    a: Tensor, rounding: Rounding, tensors: dict[str, Tensor], bound: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return half a rounding step of the second product's input a [n, I]. bound: from `dynamic_scales`, if any"""
    match rounding:
        case Rounding.NONE:
            return half_step(a, 0.0, Rounding.NONE, dtype)
        case Rounding.FP8_STATIC:
            return half_step(a, tensors["w2_input_scale"], rounding, dtype)
        case Rounding.FP8_DYNAMIC:
            assert bound is not None
            return half_step(a, power_of_two(bound, dtype), rounding, dtype)
        case Rounding.NVFP4:
            own = scale_of_rows(a, rounding, float(tensors["w2_input_scale"]))
            return half_step(a, own, rounding, dtype) / 3**0.5
        case _:
            return half_step(a, scale_of_rows(a, rounding), rounding, dtype)


def summing(a: Tensor) -> Tensor:
    """Return a variance of a product's inputs a [n, K] that accounts for summing its K terms in float32.

    Each partial sum is rounded by at most 2**-24 of itself, and is below z * sqrt(sum of squares).
    """
    sizes: Tensor = a.square()
    return a.shape[1] * (Z * 2.0**-24) ** 2 * sizes


def dynamic_scales(
    config: MoEConfig, scheme: Scheme, experts: list[dict[str, Tensor]], longest: Tensor
) -> list[Tensor]:
    """Return for each slot the scale of the second product's input; [] if the scheme does not derive it from a bound.

    See `weights.layouts.cutlass`.
    """
    if scheme.activations is not Rounding.FP8_DYNAMIC:
        return []
    cap = torch.inf
    if config.activation is Activation.SWIGLU_CLAMPED:
        below = torch.linspace(-10, 0, 10_001, dtype=torch.float64)
        lowest = float((below * below.sigmoid()).min()) / config.activation_alpha
        cap = max(config.activation_limit, -1.001 * lowest) * (config.activation_limit + 1)
    found = [(activation_bound(config, scheme, t).double() * (longest + 1)).clamp(max=cap) / FP8_MAX for t in experts]
    return [torch.stack(found).max()] * len(found) if scheme.name == "int4_fp8" else found


def through_activation(config: MoEConfig, h: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the activation of h and its variance: first order by the slopes, plus a bound of the second order."""
    parts = [part.detach().requires_grad_() for part in (h.chunk(2, 1) if config.activation.gated else (h,))]
    with torch.enable_grad():
        a = activate(torch.cat(parts, 1), config)
        slopes = torch.autograd.grad(a.sum(), parts)
    spread = torch.stack(variance.chunk(2, 1) if config.activation.gated else (variance,))
    first = (torch.stack(slopes).square() * spread).sum(0)
    return a.detach(), first + 2 * (Z * spread.sum(0)).square()


def max_error_ratio(y: Tensor, expected: Tensor, limit: Tensor) -> float:
    """Return the largest error as a multiple of its limit; infinity for a NaN."""
    ratio = (y.double() - expected).abs() / limit.clamp(min=1e-30)
    ratio = torch.where((limit == 0) & (y == expected), 0.0, ratio)
    return float("inf") if ratio.isnan().any() else float(ratio.max()) if ratio.numel() else 0.0
