"""Finds out whether a module computes experts by running a small copy of it (a probe).

The probe has the module's class and attributes, and small parameters. It runs in float64 on the CPU. A module counts as
experts only if the probe's results equal those of a known layout and activation.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ep_moe.checkpoint.model_names import ModuleLayout
from ep_moe.errors import ConfigError
from ep_moe.experts.shared_experts import activate
from ep_moe.integrations.activation_probe import LARGEST, WIDTH, FoundActivation, config_of, find_activation

_ROWS = 12
_TOLERANCE = 1e-5  # some classes compute a part in float32


def identify(module: nn.Module, layout: ModuleLayout, hidden: int, inner: int) -> tuple[FoundActivation, bool] | None:
    """Test whether a module computes experts in a given layout.

    Args:
        module: A module of any size, on any device.
        layout: The layout to test.
        hidden: H of its parameters.
        inner: I of its parameters.

    Returns:
        The activation, and whether an id >= E returns the row itself. None if the module computes something else.
    """
    return _asked(_Probe, module, layout, (hidden, inner))


def identify_block(module: nn.Module, layout: ModuleLayout, hidden: int, inner: int) -> FoundActivation | None:
    """As `identify`, for a block that sorts its rows by its child `router` (`sorted_routes`). Return the activation."""
    found = _asked(_BlockProbe, module, layout, (hidden, inner))
    return None if found is None else found[0]


def _asked(
    kind: type[_Probe], module: nn.Module, layout: ModuleLayout, real: tuple[int, int]
) -> tuple[FoundActivation, bool] | None:
    sizes = _small(layout.experts, *real)
    if sizes is None:
        return None
    probe = kind(module, layout, real, sizes)
    try:
        with torch.no_grad(), torch.device("cpu"):
            found = find_activation(probe, type(module).__name__)
            return (found, probe.zero_experts()) if probe.agrees(found) else None
    except Exception:  # a module that is not experts may fail in any way on such inputs
        return None


def _small(experts: int, hidden: int, inner: int) -> tuple[int, int] | None:
    """Return H and I of the probe; None if E forces one of them to be too small.

    The probe's integer attributes are replaced by value: those that equal H or I get the small size. So sizes that are
    equal stay equal, sizes that differ stay different, and E does not change.
    """
    small_hidden = hidden if hidden == experts else 2 * WIDTH + (experts == 2 * WIDTH)
    small_inner = inner if inner == experts else WIDTH + (experts == WIDTH)
    if hidden == inner:
        small_inner = small_hidden
    return (small_hidden, small_inner) if small_hidden >= 2 * WIDTH and small_inner >= WIDTH else None


def differs_in_training(
    module: nn.Module, layout: ModuleLayout, real: tuple[int, int], activation: FoundActivation, *, block: bool
) -> bool:
    """Whether a module that was identified computes something else in training, such as dropout or noise."""
    sizes = _small(layout.experts, *real)
    assert sizes is not None, "it was identified"
    probe = (_BlockProbe if block else _Probe)(module, layout, real, sizes)
    probe.training = True
    try:
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            return not probe.agrees(activation)
    except Exception:  # it may do anything
        return True


class _Probe:
    """Runs a small copy of a module with given experts.

    It has the attributes of transformers' experts interface, so `find_activation` accepts it as such a module.
    """

    has_bias, is_transposed, is_concatenated = False, False, True
    training = False

    def __init__(self, module: nn.Module, layout: ModuleLayout, real: tuple[int, int], sizes: tuple[int, int]) -> None:
        self._module, self._layout, self.has_gate = module, layout, layout.gated
        self._hidden, self._inner = sizes
        self._attributes = dict(zip(real, sizes, strict=True))
        self._generator = torch.Generator("cpu").manual_seed(0)
        self._tried: tuple[dict[str, Tensor], Tensor]

    def _apply_gate(self, h: Tensor) -> Tensor:
        """Return the activation of h, by an expert whose matrices are identities on a range of columns."""
        width = h.shape[-1] // (2 if self.has_gate else 1)
        starts = (0, self._inner) if self.has_gate else (0,)
        w13 = h.new_zeros(len(starts) * self._inner, self._hidden)
        for at, start in enumerate(starts):
            w13[start : start + width, at * width : (at + 1) * width] = torch.eye(width, dtype=h.dtype, device=h.device)
        w2 = h.new_zeros(self._hidden, self._inner)
        w2[:width, :width] = torch.eye(width, dtype=h.dtype, device=h.device)
        x = h.new_zeros(len(h), self._hidden)
        x[:, : h.shape[-1]] = h
        experts = self._layout.experts
        one = {"w13": w13.expand(experts, -1, -1), "w2": w2.expand(experts, -1, -1)}
        return self._call(one, x, *_one_choice(x, 0, 1.0))[:, :width]

    act_fn = _apply_gate

    def agrees(self, activation: FoundActivation) -> bool:
        """Return whether the probe, with random experts, computes each row's weighted sum of experts.

        Some numbers are large, where bounds on activations act.
        """
        count, rows = self._layout.experts, self._inner * (2 if self.has_gate else 1)
        x, chosen = self._random(_ROWS, self._hidden), min(2, count)
        ids = self._random(_ROWS, count).topk(chosen).indices
        ids[0, 0], ids[0, -1] = 0, count - 1
        weights = self._random(_ROWS, chosen)
        w13, w2 = self._random(count, rows, self._hidden) / 4, self._random(count, self._hidden, self._inner) / 4
        for size in (LARGEST, 1.0):
            self._tried = {"w13": w13, "w2": w2}, x * size
            found, expected = self._call(*self._tried, ids, weights), self._expected(activation, ids, weights)
            largest = expected.abs().max().clamp(min=1.0)
            if not _close(found / largest, expected / largest):
                return False
        return True

    def _expected(self, activation: FoundActivation, ids: Tensor, weights: Tensor) -> Tensor:
        experts, x = self._tried
        h = torch.einsum("tkrh,th->tkr", experts["w13"][ids], x)
        out = torch.einsum("tkhi,tki->tkh", experts["w2"][ids], activate(h, config_of(activation, self._inner)))
        return (out * weights.unsqueeze(-1)).sum(1)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self._generator, device="cpu")

    def zero_experts(self) -> bool:
        """Return True if the id E returns the row itself, False if it contributes nothing or fails.

        Raises ConfigError if it does anything else.
        """
        experts, x = self._tried
        try:
            found = self._call(experts, x, *_one_choice(x, self._layout.experts, 0.5))
        except Exception:  # no such id
            return False
        if _close(found, 0.5 * x):
            return True
        if found.any():
            raise ConfigError(f"{type(self._module).__name__} gives ids of no expert a meaning")
        return False

    def _call(self, experts: Mapping[str, Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        probe = self._made(self._parameters(experts))
        out: Tensor = type(self._module).forward(probe, x, ids, weights)
        return out.reshape(x.shape)

    def _made(self, tensors: Mapping[str, Tensor]) -> Any:
        return _copied(self._module, tensors, self._attributes, training=self.training)

    def _parameters(self, experts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        held = self._layout.from_canonical(experts)
        return {one.name: one.join(held[one.name]) for one in self._layout.tensors}


class _BlockProbe(_Probe):
    """A probe of a block with a router of its own, and optionally a `bias` that is added to its output."""

    def agrees(self, activation: FoundActivation) -> bool:
        self._rest = {name: self._random(*shape) for name, shape in self._shapes().items()}
        count, rows = self._layout.experts, self._inner * (2 if self.has_gate else 1)
        w13, w2 = self._random(count, rows, self._hidden) / 4, self._random(count, self._hidden, self._inner) / 4
        self._tried = {"w13": w13, "w2": w2}, self._random(_ROWS, self._hidden)
        probe = self._probe(self._tried[0])
        found = type(self._module).forward(probe, self._tried[1].unsqueeze(0))
        ids, weights = sorted_routes(probe.router(self._tried[1]), _ROWS)
        expected = self._expected(activation, ids, weights) + self._rest.get("bias", 0.0)
        return _close(found, expected.unsqueeze(0))

    def zero_experts(self) -> bool:
        return False

    def _call(self, experts: Mapping[str, Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Call the block with equal experts; ids and weights are ignored.

        The router's parameters are 0. If its weights then sum to 1, every row gets the output of one expert.
        """
        self._rest = {name: x.new_zeros(shape) for name, shape in self._shapes().items()}
        out: Tensor = type(self._module).forward(self._probe(experts), x.unsqueeze(0))
        return out.squeeze(0)

    def _probe(self, experts: Mapping[str, Tensor]) -> Any:
        return self._made(self._parameters(experts) | self._rest)

    def _shapes(self) -> dict[str, list[int]]:
        """Return the probe's shapes of the parameters outside the experts."""
        return {
            name: [self._attributes.get(size, size) for size in parameter.shape]
            for name, parameter in self._module.named_parameters()
            if name not in self._layout.names
        }


def sorted_routes(routed: tuple[Tensor, Tensor, Tensor, list[int], Tensor], rows: int) -> tuple[Tensor, Tensor]:
    """Convert the output of a router that sorts its choices by expert to ids and weights.

    Args:
        routed: The indices [T * K] of the choices (row * K + k) in the order of experts, the row of each, the weight
            of each, the number of choices of each expert, and the logits.
        rows: T.

    Returns:
        Ids and weights, [T, K] each.
    """
    places, _, weights, counts, _ = routed
    experts = torch.arange(len(counts), device=places.device)
    by_expert = experts.repeat_interleave(
        torch.tensor(counts, dtype=torch.int64, device=places.device), output_size=len(places)
    )
    order = places.argsort()
    return by_expert[order].view(rows, -1), weights[order].view(rows, -1)


def _close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)


def _one_choice(x: Tensor, expert: int, weight: float) -> tuple[Tensor, Tensor]:
    """Return ids and weights [T, 2] of one expert. Some classes need two choices or more: the second has weight 0."""
    ids = torch.full((len(x), 2), expert, dtype=torch.int64, device="cpu")
    return ids, x.new_tensor([weight, 0.0]).expand(len(x), 2)


def _copied(
    module: nn.Module, tensors: Mapping[str, Tensor], sizes: Mapping[int, int], prefix: str = "", *, training: bool
) -> Any:
    """Copy a module with other parameters, and with its integer attributes mapped by `sizes`.

    The copy has no hooks, and uses the `forward` of its class.
    """
    probe = copy.copy(module)
    own = probe.__dict__
    for name, value in own.items():
        if type(value) is int:
            own[name] = sizes.get(value, value)
        elif name.endswith("_hooks") and isinstance(value, dict):
            own[name] = OrderedDict()
    own.pop("forward", None)
    own["_parameters"] = {
        name: None if one is None else tensors[f"{prefix}{name}"] for name, one in module._parameters.items()
    }
    own["_modules"] = {
        name: None if one is None else _copied(one, tensors, sizes, f"{prefix}{name}.", training=training)
        for name, one in module._modules.items()
    }
    own["training"] = training
    return probe
