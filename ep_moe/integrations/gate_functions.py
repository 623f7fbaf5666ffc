"""Which `Activation` the experts of a transformers model compute, found from numbers that their class computes.

Names of classes and of configuration fields say nothing here: each known activation is computed beside the class's own,
in float32, from values so small and so large that every clamp is reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ep_moe.config import MoEConfig
from ep_moe.errors import ConfigError
from ep_moe.experts.activations import activate
from ep_moe.types import Activation

LARGEST = 1e6  # of the values that are tried; a clamp beyond it is none
WIDTH = 16  # I of the values that are tried
_RTOL, _ATOL = 1e-5, 1e-6  # float32's rounding of a few operations; gelu's two forms differ by 5e-4
_DIGITS = 6  # significant ones of a constant that is read off the class's results


class FoundActivation(NamedTuple):
    """alpha, limit: as `MoEConfig`'s `activation_alpha` and `activation_limit`."""

    activation: Activation
    alpha: float
    limit: float


_PLAIN = (1.702, 7.0)  # constants that an activation without any leaves at MoEConfig's defaults


def find_activation(experts: Any, name: str) -> FoundActivation:
    """Find what stands between the two matrices of a module of transformers' experts interface.

    Args:
        experts: the module; its class computes on the CPU, the module may be on the meta device.
        name: of the module, for the error.

    Raises:
        ConfigError: the class computes something else than every `Activation`, or cannot be asked.
    """
    h = _values(experts.has_gate)
    try:
        with torch.device("cpu"), torch.no_grad():
            got = _computed(experts, h)
            candidates = list(_candidates(experts))
    except Exception as error:
        raise ConfigError(
            f"{name}: the activation of {type(experts).__name__} cannot be computed alone "
            f"({type(error).__name__}: {error}), so it is compared with no Activation of ep_moe; {_REMEDY}"
        ) from error
    with torch.no_grad():
        for found in candidates:
            want = activate(h, config_of(found))
            if got.shape == want.shape and torch.allclose(got, want, rtol=_RTOL, atol=_ATOL):
                return found
    compared = ", ".join(activation.value for activation in Activation if activation.gated == experts.has_gate)
    raise ConfigError(
        f"{name}: {type(experts).__name__} computes none of {compared} between its two matrices (ep_moe.Activation, "
        f"compared on numbers up to {LARGEST:g}); {_REMEDY}"
    )


def computes(experts: Any, config: MoEConfig) -> bool:
    """Whether the activation of a configuration is what stands between the two matrices of a module."""
    if config.activation.gated != experts.has_gate:
        return False
    h = _values(experts.has_gate)
    with torch.device("cpu"), torch.no_grad():
        got, want = _computed(experts, h), activate(h, config)
    return got.shape == want.shape and torch.allclose(got, want, rtol=_RTOL, atol=_ATOL)


_REMEDY = "add its activation to ep_moe.types.Activation and ep_moe.experts.activations, or keep this model as it is"


def _values(gated: bool) -> Tensor:
    """[M, 2I] of gates and ups, each with each, or [M, I]; in an order in which no column is like the next."""
    small = torch.linspace(-12.0, 12.0, 97, device="cpu")
    wide = torch.logspace(-3, math.log10(LARGEST), 31, device="cpu")
    own = torch.cat([small, wide, -wide])
    if not gated:
        return own[: len(own) // WIDTH * WIDTH].view(-1, WIDTH)
    pairs = torch.cartesian_prod(own, own)
    order = torch.randperm(len(pairs), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    gate, up = (part[: len(part) // WIDTH * WIDTH].view(-1, WIDTH) for part in pairs[order].unbind(1))
    return torch.cat([gate, up], 1)


def _computed(experts: Any, h: Tensor) -> Tensor:
    """The class's own result for h [M, 2I], gates first, or [M, I]."""
    if experts.has_gate and not experts.is_concatenated:
        h = torch.stack(h.chunk(2, -1), -1).flatten(-2)  # gate, up, gate, up
    out: Tensor = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
    return out


def _candidates(experts: Any) -> Iterator[FoundActivation]:
    for activation in Activation:
        if activation.gated != experts.has_gate:
            continue
        read = _CONSTANTS.get(activation)
        constants = _PLAIN if read is None else read(lambda gate, up: _at(experts, gate, up))
        if constants is not None and all(math.isfinite(value) and value > 0 for value in constants):
            yield FoundActivation(activation, *(float(f"{value:.{_DIGITS}g}") for value in constants))


def _at(experts: Any, gate: float, up: float) -> float:
    h = torch.tensor([[gate] * WIDTH + [up] * WIDTH], dtype=torch.float64, device="cpu")
    return float(_computed(experts, h)[0, 0])


def _clamped(at: Callable[[float, float], float]) -> tuple[float, float] | None:
    """alpha and limit, from (up + 1) * gate * sigmoid(alpha * gate) where both clamps of up are reached."""
    gate = 0.5
    above, below = at(gate, LARGEST), at(gate, -LARGEST)
    sigmoid = (above + below) / (2 * gate)
    if not 0 < sigmoid < 1 or above == below:
        return None
    return math.log(sigmoid / (1 - sigmoid)) / gate, (above - below) / (above + below)


def _limited(at: Callable[[float, float], float]) -> tuple[float, float] | None:
    """The limit, from silu(gate) * up where the clamp of up is reached, and that of gate is not."""
    gate = 1e-3
    return _PLAIN[0], at(gate, LARGEST) / (gate / (1 + math.exp(-gate)))


def _limited_after(at: Callable[[float, float], float]) -> tuple[float, float] | None:
    """The limit, where both clamps are reached."""
    return _PLAIN[0], math.sqrt(max(at(LARGEST, LARGEST), 0.0))


def _softcapped(at: Callable[[float, float], float]) -> tuple[float, float] | None:
    """Both caps, from their product and from an up far below its cap."""
    both, ratio = at(LARGEST, LARGEST), at(LARGEST, 1.0) / at(LARGEST, LARGEST)
    if not 0 < ratio < 1:
        return None
    cap = 1 / math.atanh(ratio)  # tanh(1 / cap) = ratio
    return both / cap, cap


_CONSTANTS = {
    Activation.SWIGLU_CLAMPED: _clamped,
    Activation.SWIGLU_LIMITED: _limited,
    Activation.SWIGLU_LIMITED_AFTER: _limited_after,
    Activation.SWIGLU_SOFTCAPPED: _softcapped,
}


def config_of(found: FoundActivation, inner: int = WIDTH) -> MoEConfig:
    """For `activate`. inner: I of what it is given"""
    return MoEConfig(
        hidden_size=1,
        intermediate_size=inner,
        num_experts=1,
        top_k=1,
        activation=found.activation,
        activation_alpha=found.alpha,
        activation_limit=found.limit,
    )


def is_experts(module: nn.Module) -> bool:
    """Whether a module is on transformers' experts interface (`use_experts_implementation`)."""
    return hasattr(type(module), "_apply_gate") and all(hasattr(module, flag) for flag in FLAGS)


FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
