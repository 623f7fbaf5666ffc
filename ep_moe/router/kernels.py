"""Triton kernels of a router: one computes the logits of few rows, one chooses experts from logits of any number.

With torch operators the same work takes six to ten launches of a few microseconds each, longer than the exchange of one
token. The first kernel splits the sum over H into slices (split-K), so that the whole GPU works on a single row. It
writes the float32 sum of each slice, and the second kernel adds them in order. The split depends only on H and E, so a
row's logits are bitwise equal in every batch.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_moe.config import MoEConfig, RoutingMethod
from ep_moe.runtime.devices import on_device, supports_pdl
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

MOST = 256  # the most rows whose logits are computed here; for more rows torch's matmul is faster
_MOST_FLOAT32 = 32  # the same where `_add_product` cannot use tensor cores
_ROWS, _EXPERTS, _WIDTH = 16, 16, 128  # the tile of a program: rows, experts, columns of H per step
_PROGRAMS = 256  # about the number of programs that share one block of rows
_WIDEST = 1024  # the most experts: one warp holds all scores of a row


def most_rows(x: Tensor, weight: Tensor) -> int:
    """Return the most rows for which `RouterKernels.route` is faster than torch's matmul.

    Args:
        x: [T, H].
        weight: [E, H].

    Returns:
        The number of rows, by the dtypes of x and weight.
    """
    halves = x.itemsize == 2 and (x.dtype == weight.dtype or x.dtype == torch.bfloat16)
    return MOST if halves else _MOST_FLOAT32


class RouterKernels:
    """The kernel launches of one router.

    Args:
        config: The layer.

    Attributes:
        slices: The number of slices of the sum over H.
    """

    def __init__(self, config: MoEConfig) -> None:
        self.config = config
        most = min(_PROGRAMS // min(cdiv(config.num_experts, _EXPERTS), _PROGRAMS), cdiv(config.hidden_size, _WIDTH))
        self.slices = next_power_of_2(most + 1) // 2
        self._launches = LaunchCache()

    def __deepcopy__(self, memo: dict[int, Any]) -> RouterKernels:
        return RouterKernels(self.config)  # compiled kernels cannot be copied

    def __reduce__(self) -> Any:
        return RouterKernels, (self.config,)

    @staticmethod
    def unsupported_reason(config: MoEConfig) -> str | None:
        """Return why the kernels cannot run a router.

        Args:
            config: The layer.

        Returns:
            None if they can, else the reason.
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
            x: [T, H] on a GPU, with T of at most `most_rows`.
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
        """Choose experts from logits, without gradients.

        Args:
            logits: [T, E] on a GPU, the linear map's output including its bias.
            correction: float32 [E], or None.

        Returns:
            Ids, int64 [T, K], and weights, float32 [T, K].
        """
        return self._chosen(logits.contiguous().unsqueeze(0), None, correction, logits.dtype)

    def _chosen(self, parts: Tensor, bias: Tensor | None, correction: Tensor | None, dtype: torch.dtype) -> Routing:
        """Choose experts from partial logits. parts: [slices, T, E]; dtype: to which the summed logits are rounded"""
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
        """Return the dtype of the logits of x. The float32 sums are rounded to it, like the result of `nn.Linear`."""
        return torch.float32 if self.config.routing.float32_logits else x.dtype

    def parts(self, rows: int, device: torch.device) -> Tensor:
        """Allocate memory for the sums over slices of H: float32 [slices, rows, E]."""
        return torch.zeros(self.slices, rows, self.config.num_experts, dtype=torch.float32, device=device)

    def launch_fixed(self, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, parts: Tensor,
                     chosen: Routing, launch: Launch) -> None:  # fmt: skip
        """Launch both kernels for a CUDA graph whose replays have their own x and number of rows.

        The first kernel's arguments begin with the address of x and the number of rows, which a replay replaces.

        Args:
            x: [T, H] on a GPU. The x of a replay may have as many rows as `parts`.
            weight: [E, H].
            bias: [E], or None.
            correction: float32 [E], or None.
            parts: The result of `RouterKernels.parts`.
            chosen: The output. A replay writes all its rows; those after its tokens are arbitrary.
            launch: The function that launches kernels.
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
            "PDL": supports_pdl(changing[0].device),
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
            **pdl_launch(changing[0].device, len(changing[0]) > 1),  # several slices: it follows `_partial_logits`
        }
        return LaunchSpec(_choose, (rows,), changing, (), constants)


@triton.jit(do_not_specialize=["tokens", "room"])
def _partial_logits(
    x, tokens, weight, parts, room,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, SLICE: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write parts[slice, row, expert] for a block of rows, a block of experts and one slice of H."""
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
    """Return total + left @ right.

    For bfloat16 rows and float32 weights, each weight is split into three bfloat16 numbers whose sum it is. Tensor
    cores multiply these without rounding, several times faster than a float32 product.
    """
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
    """Choose the experts of one row, by one warp. logits: [SLICES, tokens, E], to be summed over slices"""
    pdl_wait(PDL)
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    if row < tokens:
        inside = expert < EXPERTS
        logit = tl.zeros([LANES], tl.float32)
        for cut in tl.static_range(SLICES):  # unrolled, so that all loads are issued at once
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
        best = score if METHOD == "sigmoid_topk" else logit  # softmax keeps the order of the logits
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
    """Return int64 sort keys: ordered by value, then by `rest`, which must not be negative. NaN sorts above all."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    bits = tl.where(value != value, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    return (bits.to(tl.int64) << 32) | rest.to(tl.int64)


@triton.jit
def _value(key):
    """Return the value of a key of `_key`."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _within_groups(key, LANES: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """Replace the keys of experts outside the best groups by those of -inf.

    A group's score is the sum of its two best experts.
    """
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
