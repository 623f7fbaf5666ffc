"""What a quantised expert kernel should give, and how far it may be off: float64 on the dequantised weights.

Errors are those of rounding: of the activations before each matrix product (the scheme's own, with its scale), of each
intermediate result to the layer's dtype, of sums in float32, of each addition of the output. One rounding is off by at
most half a step c. A sum of n of them with factors f is off by at most z * sqrt(sum (f * c)**2) but for a probability
of 2 exp(-z*z / 2) (Hoeffding, errors of random data being independent with mean zero); z = 7 leaves 5e-11 an element.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe import Activation, MoEConfig
from ep_moe.experts.activations import activate
from ep_moe.weights.cutlass_sm90 import activation_bound
from ep_moe.weights.schemes import Rounding, Scheme

Z = 7.0
FP8_MAX = 448.0


def random_expert(
    config: MoEConfig, scheme: Scheme, expert: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Canonical quantised tensors of one expert, of the size that keeps activations near 1. Static input scales are
    wide enough for normal rows: a saturated number has no bound."""
    # far from the seeds of rows: rows equal to weights would have products as large as nowhere else
    generator = torch.Generator(device=device).manual_seed(1_000_003 + expert)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    tensors = {
        "w13": normal(config.w13_rows, config.hidden_size) / config.hidden_size**0.5,
        "w2": normal(config.hidden_size, config.intermediate_size) / config.intermediate_size**0.5,
    }
    if config.expert_bias:
        tensors |= {"w13_bias": 0.3 * normal(config.w13_rows), "w2_bias": 0.3 * normal(config.hidden_size)}
        tensors = {name: t.to(dtype) if name.endswith("bias") else t for name, t in tensors.items()}
    if scheme.activations is Rounding.FP8_STATIC:
        tensors |= {
            "w13_input_scale": torch.tensor(0.014 + 0.0005 * (expert % 3), device=device),
            "w2_input_scale": torch.tensor(0.1 + 0.001 * (expert % 5), device=device),
        }
    return scheme.quantize(tensors, dtype)


def half_step(values: Tensor, scale: Tensor | float, rounding: Rounding, dtype: torch.dtype) -> Tensor:
    """Half the distance of neighbouring numbers; E4M3 has 3 bits behind the point, and 2**-9 * scale at least."""
    if rounding is Rounding.NONE:
        return values.abs() * (torch.finfo(dtype).eps / 2)
    return torch.maximum(values.abs() * 2.0**-4, torch.as_tensor(scale, device=values.device) * 2.0**-10)


def power_of_two(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """No less than the next power of two above; in half precision also its reciprocal is a number."""
    return (2 * scale).clamp(min=2.0**-15 if dtype == torch.float16 else 0.0)


def scale_of_rows(values: Tensor, rounding: Rounding) -> Tensor:
    """Where a kernel finds the scale in the values themselves: per row, or per row and 128 columns."""
    if rounding is Rounding.FP8_ROWS:
        return values.abs().amax(1, keepdim=True) / FP8_MAX
    groups: Tensor = values.abs().unflatten(1, (-1, 128)).amax(2) / FP8_MAX
    return groups.repeat_interleave(128, 1)


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
) -> tuple[Tensor, Tensor]:
    """(value, limit), float64 [N, H]. experts: canonical tensors by slot; ids [N, K] local; weights [N, K] or None."""
    half = torch.finfo(dtype).eps / 2
    rows = x.double()
    value, variance = torch.zeros_like(rows), torch.zeros_like(rows)
    size, routes = torch.zeros_like(rows), torch.zeros(len(rows), 1, device=x.device)
    used = (ids >= 0).any(1)
    largest = rows[used].abs().max() if used.any() else torch.zeros((), device=x.device)
    longest = rows[used].square().sum(1).max() if used.any() else torch.zeros((), device=x.device)
    static = [tensors["w13_input_scale"] for tensors in experts] if scheme.activations is Rounding.FP8_STATIC else []
    bounds = dynamic_scales(config, scheme, experts, longest)
    for slot, tensors in enumerate(experts):
        at, column = (ids == slot).nonzero(as_tuple=True)
        if not len(at):
            continue
        weight = (
            torch.ones(len(at), 1, device=x.device) if weights is None else weights[at, column].unsqueeze(1).double()
        )
        w13, w2 = (scheme.dequantize(tensors, name).double() for name in ("w13", "w2"))
        inputs = rows[at]
        match scheme.activations:
            case Rounding.NONE:
                step = torch.zeros_like(inputs)
            case Rounding.FP8_STATIC:
                step = half_step(inputs, max(static), scheme.activations, dtype)
            case Rounding.FP8_DYNAMIC:
                step = half_step(inputs, power_of_two(largest / FP8_MAX, dtype), scheme.activations, dtype)
            case other:
                step = half_step(inputs, scale_of_rows(inputs, other), other, dtype)
        h = inputs @ w13.T
        h_variance = step.square() @ w13.square().T + (half * h).square() + summing(inputs, w13)
        if config.expert_bias:
            h = h + tensors["w13_bias"].double()
        a, a_variance = through_activation(config, h, h_variance)
        match scheme.activations:
            case Rounding.NONE:
                step = half_step(a, 0.0, Rounding.NONE, dtype)
            case Rounding.FP8_STATIC:
                step = half_step(a, tensors["w2_input_scale"], scheme.activations, dtype)
            case Rounding.FP8_DYNAMIC:
                step = half_step(a, power_of_two(bounds[slot], dtype), scheme.activations, dtype)
            case other:
                step = half_step(a, scale_of_rows(a, other), other, dtype)
        # to the dtype once on the way (some schemes), and inside the activation
        a_variance = a_variance + step.square() + 4 * (half * a).square()
        y = a @ w2.T
        y_variance = a_variance @ w2.square().T + (half * y).square() + summing(a, w2)
        if config.expert_bias and output_bias:
            y = y + tensors["w2_bias"].double()
        value.index_add_(0, at, weight * y)
        variance.index_add_(0, at, weight.square() * y_variance)
        size.index_add_(0, at, (weight * y).abs())
        routes.index_add_(0, at, torch.ones_like(routes[at]))
    # a fused finalize adds route by route in the output's dtype: every addition rounds
    return value, Z * variance.sqrt() + half * (routes + 1) * size


def summing(a: Tensor, w: Tensor) -> Tensor:
    """Variance of adding up a product's K terms in float32: each partial sum is rounded by 2**-24 of itself at most,
    and is itself below z * sqrt(sum of squares)."""
    sizes: Tensor = a.square() @ w.square().T
    return a.shape[1] * (Z * 2.0**-24) ** 2 * sizes


def dynamic_scales(
    config: MoEConfig, scheme: Scheme, experts: list[dict[str, Tensor]], longest: Tensor
) -> list[Tensor]:
    """Per slot, the scale of the second product's input where the scheme derives it; see `cutlass_sm90`."""
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
    """The activation, and its variance: first order by the slopes, and the second where it is not small."""
    parts = [part.detach().requires_grad_() for part in (h.chunk(2, 1) if config.activation.gated else (h,))]
    with torch.enable_grad():
        a = activate(torch.cat(parts, 1), config)
        slopes = torch.autograd.grad(a.sum(), parts)
    spread = torch.stack(variance.chunk(2, 1) if config.activation.gated else (variance,))
    first = (torch.stack(slopes).square() * spread).sum(0)
    return a.detach(), first + 2 * (Z * spread.sum(0)).square()


def worst(y: Tensor, expected: Tensor, limit: Tensor) -> float:
    """The largest error as a multiple of its limit; infinite for a NaN."""
    ratio = (y.double() - expected).abs() / limit.clamp(min=1e-30)
    ratio = torch.where((limit == 0) & (y == expected), 0.0, ratio)
    return float("inf") if ratio.isnan().any() else float(ratio.max()) if ratio.numel() else 0.0
