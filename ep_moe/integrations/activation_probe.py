"""Finds the `Activation` of a module of experts by comparing numerical results.

Names of classes and configuration fields are not used. The class's activation and each known one are computed in
float32, on values from so small to so large that every clamp takes effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ep_moe.config import MoEConfig
from ep_moe.errors import ConfigError
from ep_moe.experts.shared_experts import activate
from ep_moe.types import Activation

LARGEST = 1e6  # largest value that is tried; a clamp beyond it is not seen
WIDTH = 16  # I of the values that are tried
_RTOL, _ATOL = 1e-5, 1e-6  # float32 rounding of a few operations; the two forms of gelu differ by 5e-4
_DIGITS = 6  # significant digits kept of a constant that is computed from the class's results


class FoundActivation(NamedTuple):
    """An activation with its constants: `activation_alpha` and `activation_limit` of `MoEConfig`."""

    activation: Activation
    alpha: float
    limit: float


_PLAIN = (1.702, 7.0)  # MoEConfig's defaults, for an activation without constants


def find_activation(experts: Any, name: str) -> FoundActivation:
    """Find the activation between the two matrices of a module on transformers' experts interface.

    Args:
        experts: The module. It may be on the meta device; its class's activation runs on the CPU.
        name: The module's name, for the error.

    Returns:
        The activation and its constants.

    Raises:
        ConfigError: The class computes no known `Activation`, or another one in training, or its activation cannot be
            called alone.
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
            if _equal(got, want):
                if not _same_in_training(experts, h, got):
                    raise ConfigError(in_training_problem(experts, name, "keep this model as it is"))
                return found
    compared = ", ".join(activation.value for activation in Activation if activation.gated == experts.has_gate)
    raise ConfigError(
        f"{name}: {type(experts).__name__} computes none of {compared} between its two matrices (ep_moe.Activation, "
        f"compared on numbers up to {LARGEST:g}); {_REMEDY}"
    )


def computes(experts: Any, config: MoEConfig) -> bool:
    """Return whether a module has the activation of a configuration between its two matrices, also in training."""
    if config.activation.gated != experts.has_gate:
        return False
    h = _values(experts.has_gate)
    with torch.device("cpu"), torch.no_grad():
        got, want = _computed(experts, h), activate(h, config)
        return _equal(got, want) and _same_in_training(experts, h, got)


def in_training_problem(experts: Any, name: str, remedy: str) -> str:
    """Return the message about a module of experts that computes something else in training."""
    return (
        f"{name}: {type(experts).__name__} computes something else in training, such as dropout or noise, which a "
        f"layer in its place would leave out; set its rate to 0, as in evaluation, or {remedy}"
    )


_REMEDY = "add its activation to ep_moe.types.Activation and ep_moe.experts.reference, or keep this model as it is"


def _values(gated: bool) -> Tensor:
    """Return test inputs: [M, 2I] with all pairs of gate and up values, or [M, I] without a gate.

    The pairs are shuffled, so that neighbouring columns differ.
    """
    small = torch.linspace(-12.0, 12.0, 97, dtype=torch.float32, device="cpu")
    wide = torch.logspace(-3, math.log10(LARGEST), 31, dtype=torch.float32, device="cpu")
    own = torch.cat([small, wide, -wide])
    if not gated:
        return own[: len(own) // WIDTH * WIDTH].view(-1, WIDTH)
    pairs = torch.cartesian_prod(own, own)
    order = torch.randperm(len(pairs), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    gate, up = (part[: len(part) // WIDTH * WIDTH].view(-1, WIDTH) for part in pairs[order].unbind(1))
    return torch.cat([gate, up], 1)


def _computed(experts: Any, h: Tensor, *, training: bool = False) -> Tensor:
    """Return the class's own activation of h: [M, 2I] with the gates first, or [M, I] without a gate.

    training: the mode of the module and its children in the call
    """
    if experts.has_gate and not experts.is_concatenated:
        h = torch.stack(h.chunk(2, -1), -1).flatten(-2)  # gate, up, gate, up
    with _mode(experts, training):
        out: Tensor = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
    return out


@contextmanager
def _mode(experts: Any, training: bool) -> Iterator[None]:
    """Put a module and its children into training or evaluation mode, and restore each one's mode and random state.

    A probe is no module. It has the mode that it was made with.
    """
    modes = {module: module.training for module in experts.modules()} if isinstance(experts, nn.Module) else {}
    with torch.random.fork_rng(devices=[]):
        try:
            for module in modes:
                module.training = training
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _same_in_training(experts: Any, h: Tensor, got: Tensor) -> bool:
    """Return whether a module's activation of h in training equals `got`, that in evaluation."""
    try:
        return _equal(_computed(experts, h, training=True), got)
    except Exception:  # it may do anything
        return False


def _equal(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and torch.allclose(got, want, rtol=_RTOL, atol=_ATOL)


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
    """Solve (up + 1) * gate * sigmoid(alpha * gate) for alpha and limit, at the upper and lower clamp of up.

    `gate` is clamped from above alone, and is negative here, where no clamp acts.
    """
    gate = -0.5
    above, below = at(gate, LARGEST), at(gate, -LARGEST)
    sigmoid = (above + below) / (2 * gate)
    if not 0 < sigmoid < 1 or above == below:
        return None
    return math.log(sigmoid / (1 - sigmoid)) / gate, (above - below) / (above + below)


def _limited(at: Callable[[float, float], float]) -> tuple[float, float] | None:
    """Solve silu(gate) * up for the limit, where up is clamped and gate is not."""
    gate = 1e-3
    return _PLAIN[0], at(gate, LARGEST) / (gate / (1 + math.exp(-gate)))


def _limited_after(at: Callable[[float, float], float]) -> tuple[float, float] | None:
    """Solve for the limit where both factors are clamped: the result is its square."""
    return _PLAIN[0], math.sqrt(max(at(LARGEST, LARGEST), 0.0))


def _softcapped(at: Callable[[float, float], float]) -> tuple[float, float] | None:
    """Solve for both caps: from their product, and from its ratio to a result with up = 1."""
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
    """Return a minimal configuration for `activate`. inner: I of its input"""
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
    """Return whether a module is on transformers' experts interface (`use_experts_implementation`)."""
    return hasattr(type(module), "_apply_gate") and all(hasattr(module, flag) for flag in FLAGS)


FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
