"""A router on a GPU in two launches: the logits of few rows, and the choice from logits of any number of rows.

By torch's operators the same are six to ten launches of a few microseconds each, more than the exchange of one token
takes. The first kernel cuts the sum over H into slices, so that a single row is read by the whole GPU, and leaves their
sums in float32; the second one adds them in order. The cut depends on H and E alone: a row's logits are the same
bits whatever rows are beside it.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_moe.config import MoEConfig, RoutingMethod
from ep_moe.runtime.devices import on_device, starts_early
from ep_moe.runtime.launch_cache import (
    Launch,
    LaunchCache,
    LaunchSpec,
    cdiv,
    next_power_of_2,
    pdl_launch,
    pdl_trigger,
    pdl_wait,
)
from ep_moe.runtime.triton_compat import Missing, tl, triton
from ep_moe.types import Routing

MOST = 256  # rows whose logits are computed here; of more, torch's product is faster
_MOST_FLOAT32 = 32  # where tensor cores do not serve, as `_add_product` says
_ROWS, _EXPERTS, _WIDTH = 16, 16, 128  # of a program: rows, experts, numbers of a row at once
_PROGRAMS = 256  # about so many share one block of rows
_WIDEST = 1024  # experts that one warp holds


def most_rows(x: Tensor, weight: Tensor) -> int:
    """Rows whose logits `RouterKernels.route` computes faster than torch does.

    Args:
        x: [T, H].
        weight: [E, H].

    Returns:
        Their number.
    """
    halves = x.itemsize == 2 and (x.dtype == weight.dtype or x.dtype == torch.bfloat16)
    return MOST if halves else _MOST_FLOAT32


class RouterKernels:
    """One router's launches.

    Args:
        config: The layer.

    Attributes:
        slices: Of the sum over H.
    """

    def __init__(self, config: MoEConfig) -> None:
        self.config = config
        most = min(_PROGRAMS // min(cdiv(config.num_experts, _EXPERTS), _PROGRAMS), cdiv(config.hidden_size, _WIDTH))
        self.slices = next_power_of_2(most + 1) // 2
        self._launches = LaunchCache()

    def __deepcopy__(self, memo: dict[int, Any]) -> RouterKernels:
        return RouterKernels(self.config)  # compiled kernels are no data

    def __reduce__(self) -> Any:
        return RouterKernels, (self.config,)

    @staticmethod
    def unsupported_reason(config: MoEConfig) -> str | None:
        """Say why a router cannot be served.

        Args:
            config: The layer.

        Returns:
            None, or a reason.
        """
        if isinstance(triton, Missing):
            return "Triton is not installed"
        experts, groups = config.num_experts, config.routing.num_groups
        if experts > _WIDEST:
            return f"{experts} experts are more than {_WIDEST}"
        if groups > 1 and (next_power_of_2(experts), next_power_of_2(groups)) != (experts, groups):
            return f"{experts} experts in {groups} groups: both must be powers of two"
        return None

    def route(self, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None) -> Routing:
        """Choose experts for few rows, without gradients.

        Args:
            x: [T, H] with T of at most `most_rows`, on a GPU.
            weight: [E, H].
            bias: [E], or None.
            correction: float32 [E], or None.

        Returns:
            Ids, int64 [T, K], and weights, float32 [T, K].
        """
        x, tokens, experts = x.contiguous(), len(x), self.config.num_experts
        parts = torch.empty(self.slices, tokens, experts, dtype=torch.float32, device=x.device)
        if tokens:
            changing, blocks = (x, tokens, weight, parts, tokens), cdiv(tokens, _ROWS)
            key = ("logits", blocks, x.dtype, weight.dtype, x.device)
            with on_device(x.device):
                self._launches.launch(key, changing, lambda: self._logits_spec(changing, blocks))
        return self._chosen(parts, bias, correction, self._logits_dtype(x))

    def choose(self, logits: Tensor, correction: Tensor | None) -> Routing:
        """Choose experts by logits, without gradients.

        Args:
            logits: [T, E], of a linear map with its bias, on a GPU.
            correction: float32 [E], or None.

        Returns:
            Ids, int64 [T, K], and weights, float32 [T, K].
        """
        return self._chosen(logits.contiguous().unsqueeze(0), None, correction, logits.dtype)

    def _chosen(self, parts: Tensor, bias: Tensor | None, correction: Tensor | None, dtype: torch.dtype) -> Routing:
        """parts: [slices, T, E]; dtype: of their sum"""
        tokens, top_k, device = parts.shape[1], self.config.top_k, parts.device
        ids = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
        routing = Routing(ids, torch.empty(tokens, top_k, dtype=torch.float32, device=device))
        if tokens:
            changing = parts, tokens, routing.ids, routing.weights, bias, correction
            rows = next_power_of_2(tokens)
            key = (rows, len(parts), parts.dtype, dtype, None if bias is None else bias.dtype, device)
            with on_device(device):
                self._launches.launch(key, changing, lambda: self._choice_spec(changing, rows, dtype))
        return routing

    def _logits_dtype(self, x: Tensor) -> torch.dtype:
        """Of the logits of x. They are rounded to it, as a linear map rounds its results."""
        return torch.float32 if self.config.routing.float32_logits else x.dtype

    def parts(self, rows: int, device: torch.device) -> Tensor:
        """Memory for the sums over slices of H: float32 [slices, rows, E]."""
        return torch.zeros(self.slices, rows, self.config.num_experts, device=device)

    def launch_fixed(self, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, parts: Tensor,
                     chosen: Routing, launch: Launch) -> None:  # fmt: skip
        """Two launches for a graph, whose first one begins with x's address and the number of rows.

        Args:
            x: [T, H], on a GPU; a replay's own may have as many rows as `parts` has.
            weight: [E, H].
            bias: [E], or None.
            correction: float32 [E], or None.
            parts: As `RouterKernels.parts` makes it.
            chosen: What is written; a replay writes all rows, those behind its tokens anyhow.
            launch: How kernels are launched.
        """
        room = parts.shape[1]
        logits = self._logits_spec((x, len(x), weight, parts, room), cdiv(room, _ROWS))
        given = (parts, room, chosen.ids, chosen.weights, bias, correction)
        for spec in (logits, self._choice_spec(given, room, self._logits_dtype(x))):
            launch(spec.kernel, spec.grid, *spec.changing, *spec.fixed, **spec.constants)

    def _logits_spec(self, changing: tuple[Any, ...], blocks: int) -> LaunchSpec:
        c = self.config
        constants = {
            "EXPERTS": c.num_experts,
            "HIDDEN": c.hidden_size,
            "SLICE": cdiv(cdiv(c.hidden_size, self.slices), _WIDTH) * _WIDTH,
            "ROWS": _ROWS,
            "SIDE": _EXPERTS,
            "WIDTH": _WIDTH,
            "PDL": starts_early(changing[0].device),
        }
        grid = (blocks, cdiv(c.num_experts, _EXPERTS), self.slices)
        return LaunchSpec(_partial_logits, grid, changing, (), constants)

    def _choice_spec(self, changing: tuple[Any, ...], rows: int, dtype: torch.dtype) -> LaunchSpec:
        c, r = self.config, self.config.routing
        constants = {
            "SLICES": len(changing[0]),
            "EXPERTS": c.num_experts,
            "LANES": next_power_of_2(c.num_experts),
            "TOP_K": c.top_k,
            "WIDTH": next_power_of_2(c.top_k),
            "METHOD": r.method.value,
            "RENORMALIZE": r.renormalize,
            "LEAST": 1e-20 if r.method is RoutingMethod.SIGMOID_TOPK else 0.0,
            "SCALING": r.scaling_factor,
            "GROUPS": r.num_groups,
            "TOP_GROUPS": r.top_groups,
            "DTYPE": getattr(tl, str(dtype).removeprefix("torch.")),
            "num_warps": 1,
            **pdl_launch(changing[0].device, len(changing[0]) > 1),  # behind `_partial_logits`
        }
        return LaunchSpec(_choose, (rows,), changing, (), constants)


@triton.jit(do_not_specialize=["tokens", "room"])
def _partial_logits(
    x, tokens, weight, parts, room,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, SLICE: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """parts[slice, row, expert] for a block of rows and of experts."""
    pdl_trigger(PDL)
    row, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    cut = tl.program_id(2)
    if tl.program_id(0) * ROWS < tokens:
        total = tl.zeros([ROWS, SIDE], tl.float32)
        for at in range(0, SLICE, WIDTH):
            hidden = cut * SLICE + at + tl.arange(0, WIDTH)
            inside = hidden < HIDDEN
            left = tl.load(
                x + row[:, None] * HIDDEN + hidden[None, :], mask=(row < tokens)[:, None] & inside[None, :], other=0.0
            )
            right = tl.load(
                weight + expert[None, :] * HIDDEN + hidden[:, None],
                mask=(expert < EXPERTS)[None, :] & inside[:, None],
                other=0.0,
            )
            total = _add_product(left, right, total)
        to = (cut * room + row)[:, None] * EXPERTS + expert[None, :]
        tl.store(parts + to, total, mask=(row < tokens)[:, None] & (expert < EXPERTS)[None, :])


@triton.jit
def _add_product(left, right, total):
    """total + left @ right. A float32 number is the sum of three bfloat16, which tensor cores multiply without a
    rounding: with rows of bfloat16 they are several times faster than products of float32."""
    if left.dtype == right.dtype:
        total = tl.dot(left, right, total, input_precision="ieee")
    elif left.dtype == tl.bfloat16 and right.dtype == tl.float32:
        high = right.to(tl.bfloat16)
        rest = right - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        total = tl.dot(left, (rest - middle.to(tl.float32)).to(tl.bfloat16), total)
        total = tl.dot(left, middle, total)
        total = tl.dot(left, high, total)
    else:
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    logits, tokens, ids, weights, bias, correction,
    SLICES: tl.constexpr, EXPERTS: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    METHOD: tl.constexpr, RENORMALIZE: tl.constexpr, LEAST: tl.constexpr, SCALING: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row's experts, by one warp. logits: [SLICES, tokens, E], whose sum is the row's"""
    pdl_wait(PDL)
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    if row < tokens:
        inside = expert < EXPERTS
        logit = tl.zeros([LANES], tl.float32)
        for cut in tl.static_range(SLICES):  # all loads at once
            at = (cut * tokens.to(tl.int64) + row) * EXPERTS + expert
            logit += tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            logit += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
        logit = logit.to(DTYPE).to(tl.float32)
        score = logit
        if METHOD == "softmax_topk":
            score = _softmax(logit, inside)
        if METHOD == "sigmoid_topk":
            score = 1 / (1 + tl.exp(-logit))
        best = score if METHOD == "sigmoid_topk" else logit  # a softmax has the order of its logits
        if correction is not None:
            best += tl.load(correction + expert, mask=inside, other=0.0)
        key = tl.where(inside, _key(best, LANES - 1 - expert), _NONE)
        if GROUPS > 1:
            key = _within_groups(key, LANES, GROUPS, TOP_GROUPS)
        lane = tl.arange(0, WIDTH)
        chosen, weight = tl.zeros([WIDTH], tl.int64), tl.zeros([WIDTH], tl.float32)
        for k in range(TOP_K):
            top = tl.max(key, 0)
            taken = key == top
            chosen = tl.where(lane == k, LANES - 1 - (top & 0xFFFFFFFF), chosen)
            weight = tl.where(lane == k, tl.sum(tl.where(taken, score, 0.0), 0), weight)
            key = tl.where(taken, _NONE, key)
        used = lane < TOP_K
        if METHOD == "topk_softmax":
            weight = _softmax(weight, used).to(DTYPE).to(tl.float32)
        if METHOD == "topk_sigmoid":
            weight = 1 / (1 + tl.exp(-weight))
        if RENORMALIZE:
            weight /= tl.sum(tl.where(used, weight, 0.0), 0) + LEAST
        tl.store(ids + row * TOP_K + lane, chosen, mask=used)
        tl.store(weights + row * TOP_K + lane, weight * SCALING, mask=used)


_NONE: tl.constexpr = tl.constexpr(-(2**63))  # less than every key


@triton.jit
def _softmax(value, inside):
    power = tl.where(inside, tl.exp(value - tl.max(tl.where(inside, value, -float("inf")), 0)), 0.0)
    return power / tl.sum(power, 0)


@triton.jit
def _key(value, rest):
    """int64, in the order of the values; of equal ones in that of `rest`, which is not negative. NaN is above all."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    bits = tl.where(value != value, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    return (bits.to(tl.int64) << 32) | rest.to(tl.int64)


@triton.jit
def _value(key):
    """Of `_key`."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _within_groups(key, LANES: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """Keys of experts outside of the best groups become those of -inf. A group's score is the sum of its two best."""
    grouped = tl.reshape(key, [GROUPS, LANES // GROUPS])
    first = tl.max(grouped, 1)
    second = tl.max(tl.where(grouped == first[:, None], _NONE, grouped), 1)
    group = tl.arange(0, GROUPS)
    of_group = _key(_value(first) + _value(second), GROUPS - 1 - group)
    allowed = group < 0
    for _ in range(TOP_GROUPS):
        top = tl.max(of_group, 0)
        allowed |= of_group == top
        of_group = tl.where(of_group == top, _NONE, of_group)
    low = _key(tl.full([GROUPS, LANES // GROUPS], -float("inf"), tl.float32), (grouped & 0xFFFFFFFF))
    return tl.reshape(tl.where(allowed[:, None], grouped, low), [LANES])
