"""The Hopper expert step in bf16 for training: a forward that keeps the first product's results, and its backward.

Kept are the received rows, the first product's results (before the activation) and the sorted routes. The first
product gathers its rows; those that weights' gradients need are copied into the experts' order, in memory that the
next product uses again: gathering takes these products longer than the copies. With h = w13 x,
a = act(h) and y = weight * (w2 a), of a row's gradient dy:

    da = w2^T dy        dweight = <a, da>        dh = act'(h) * (weight * da)        dx = w13^T dh
    dw2 = sum of dy (weight * a)^T               dw13 = sum of dh x^T

With biases, h = w13 x + b13 and y = weight * (w2 a + b2), where dweight has <b2, dy> more:

    db2 = sum of weight * dy                     db13 = sum of dh

so that no result of the second product is needed (as SonicMoE has it, arXiv 2512.14080).

In float8 (`ExpertsOptions.float8`) all products but those of dw2 and dw13 multiply E4M3: each row of w13 and of w2, of
their transposes in backward, and each pair's row has a scale of its own, from its largest number as it is now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.experts.hopper import gradients_triton as kernels
from ep_moe.experts.hopper import route_sort
from ep_moe.experts.hopper.gemm_grouped import grouped_gemm, tiles_for, weight_gradient
from ep_moe.experts.layouts import expected_pairs
from ep_moe.quant.kernels import RowScales, round_columns, round_rows
from ep_moe.runtime.launch_cache import Launch, at_once, next_power_of_2
from ep_moe.types import capturing
from ep_moe.weights.main_grads import GradientOut

_ROUTES = 1024  # that a program numbers
_UNCOUNTED = 64 << 20  # bytes of the first product's results, up to which there is room for all pairs that could be


@dataclass(frozen=True)
class Routes:
    """Pairs of a row and a local expert, sorted by expert.

    ids: int32 [N, K], local, -1 for none; slots: int32 [N, K], where each pair is; ends: int32 [L]
    source: int32 [at least count], the row of each pair
    count: of the pairs, or where the host does not wait for it the most that there could be
    launch: how kernels are launched
    """

    ids: Tensor
    slots: Tensor
    ends: Tensor
    source: Tensor
    count: int
    launch: Launch = at_once

    @classmethod
    def sort(
        cls, ids: Tensor, num_experts: int, pair_bytes: int, launch: Launch = at_once, *, all_here: bool = False
    ) -> Routes:
        """Waits for the device, for the number of pairs, where many may be other ranks' and room for all that could be
        would cost much memory. pair_bytes: of what is kept for each; all_here: other ranks have no experts"""
        pairs = ids.numel()
        if not pairs or not num_experts:
            none = torch.full_like(ids, -1)
            return cls(ids, none, ids.new_zeros(num_experts, dtype=torch.int32), none, 0, launch)
        own = {
            name: torch.empty(shape, dtype=dtype, device=ids.device)
            for name, (shape, dtype) in route_sort.list_shapes(pairs, num_experts).items()
        }
        lists = route_sort.list_pairs(own, ids, None, 0, num_experts, launch=launch)
        uncounted = all_here or pairs * pair_bytes <= _UNCOUNTED or capturing(ids.device)
        count = pairs if uncounted else int(lists.ends[-1])
        return cls(ids, lists.slots, lists.ends, lists.source, count, launch)

    def numbers(self) -> Tensor:
        """Of each pair, which of the N * K routes it is: int32 [count]."""
        found = self.slots.new_empty(self.count)
        routes = self.slots.numel()
        self.launch(kernels.number_routes, (-(-routes // _ROUTES),), self.slots, found, routes, BLOCK=_ROUTES)
        return found

    def gather(self, x: Tensor, out: Tensor) -> Tensor:
        route_sort.copy_rows(x, self.slots, out, launch=self.launch)
        return out

    def sum(self, pairs: Tensor, weights: Tensor | None, out: Tensor) -> Tensor:
        route_sort.reduce(pairs, self.ids, weights, 0, len(self.ends), out, slots=self.slots, launch=self.launch)
        return out


@dataclass(frozen=True)
class Gradients:
    """x: [N, H]; weights: float32 [N, K]; stored: of matrices and biases by name, None where they were not wanted, or
    written elsewhere."""

    x: Tensor
    weights: Tensor
    stored: dict[str, Tensor | None]


@dataclass(frozen=True)
class TrainedStep:
    """One call's products, forward and backward.

    w13: [L, 2 * I, H], gate first ([L, I, H] without a gate); w2: [L, H, I]; their biases: [L, 2 * I] and [L, H], None
        for none
    spare_sms: multiprocessors that products leave free; float8: they multiply E4M3, but for gradients of matrices
    launch: how kernels are launched
    """

    config: MoEConfig
    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    spare_sms: int = 0
    float8: bool = False
    launch: Launch = at_once

    def forward(self, x: Tensor, weights: Tensor | None, ids: Tensor) -> tuple[Tensor, Routes, Tensor]:
        """The experts' rows [N, H], the sorted routes, and the first product's results [count, 2 * I].

        x: bf16 [N, H]; weights: float32 [N, K], None for ones; ids: int32 [N, K], local ones, -1 for none
        """
        slots, _, inner = self.w2.shape
        all_here = slots >= self.config.num_experts
        routes = Routes.sort(ids, slots, self.w13.shape[1] * x.itemsize, self.launch, all_here=all_here)
        y = torch.empty_like(x)
        if routes.count == 0:
            return y.zero_(), routes, x.new_empty(0, self.w13.shape[1])
        h = self._first(x, routes)
        act = x.new_empty(routes.count, inner)
        kernels.activate_rows(
            h, act, routes.ends[-1:], self.config.activation, *_parameters(self.config), launch=self.launch
        )
        return routes.sum(self._product(act, self.w2, routes, bias=self.w2_bias), weights, y), routes, h

    def backward(
        self, grad: Tensor, x: Tensor, weights: Tensor | None, routes: Routes, h: Tensor | None,
        wanted: Mapping[str, bool], into: Mapping[str, GradientOut] | None = None,
    ) -> Gradients:  # fmt: skip
        """Of `forward`. grad: bf16 [N, H], zeros or numbers in rows without a pair; h: None to compute it again;
        wanted: by name, whether a matrix or bias learns; into: where gradients of some of these are written"""
        slots, hidden, inner = self.w2.shape
        named = {"w13": self.w13, "w2": self.w2, "w13_bias": self.w13_bias, "w2_bias": self.w2_bias}
        stored = {name: tensor for name, tensor in named.items() if tensor is not None}
        into = into or {}
        made = {n: torch.empty_like(t) for n, t in stored.items() if wanted[n] and n not in into}
        outs = {name: GradientOut(out) for name, out in made.items()} | dict(into)
        found = {name: made.get(name) for name in stored}
        dx, dweights = torch.empty_like(x), torch.zeros(routes.ids.shape, device=x.device)
        if routes.count == 0:
            for out in outs.values():
                if not out.accumulate:
                    out.out.zero_()
            return Gradients(dx.zero_(), dweights, found)
        if h is None:
            h = self._first(x, routes)
        rows, numbers = routes.gather(grad, x.new_empty(routes.count, hidden)), routes.numbers()
        da = self._product(rows, self.w2, routes, turned=True)
        dh = torch.empty_like(h)
        self.launch(
            kernels.differentiate, (routes.count,), h, da, numbers, weights, dh, dweights, routes.ends, slots, inner,
            *_parameters(self.config), **_form(self.config), BLOCK=min(1024, next_power_of_2(inner)),
        )  # fmt: skip
        if self.w2_bias is not None:
            kernels.add_dots(rows, self.w2_bias, numbers, dweights, routes.ends, launch=self.launch)
        if "w2_bias" in outs:
            _sum_rows(rows, routes, outs["w2_bias"], numbers, weights)
        if "w2" in outs:
            weight_gradient(rows, da, routes.ends, *outs["w2"], spare_sms=self.spare_sms)
        del da, rows
        if "w13_bias" in outs:
            _sum_rows(dh, routes, outs["w13_bias"])
        rows = self._product(dh, self.w13, routes, turned=True)
        routes.sum(rows, None, dx)
        if "w13" in outs:
            weight_gradient(dh, routes.gather(x, rows), routes.ends, *outs["w13"], spare_sms=self.spare_sms)
        return Gradients(dx, dweights, found)

    def _first(self, x: Tensor, routes: Routes) -> Tensor:
        """Results [count, 2 * I] of the first product, before the activation."""
        if self.float8:
            return self._of_float8(x, self.w13, routes, routes.slots, self.w13_bias)
        h = x.new_empty(routes.count, self.w13.shape[1])
        tiles = tiles_for(_each(routes, self.config), self.w13, self.spare_sms, gathered=True)
        grouped_gemm(
            x, self.w13, routes.ends, h, tiles, spare_sms=self.spare_sms, source=routes.source, bias=self.w13_bias
        )
        return h

    def _product(
        self, pairs: Tensor, w: Tensor, routes: Routes, *, turned: bool = False, bias: Tensor | None = None
    ) -> Tensor:
        """pairs [count, K] by w [L, N, K]: [count, N]. turned: w is [L, K, N]"""
        if self.float8:
            return self._of_float8(pairs, w, routes, None, bias, turned=turned)
        across = w.mT if turned else w
        out = pairs.new_empty(len(pairs), across.shape[1])
        tiles = tiles_for(_each(routes, self.config), across, self.spare_sms)
        grouped_gemm(pairs, w, routes.ends, out, tiles, spare_sms=self.spare_sms, turned=turned, bias=bias)
        return out

    def _of_float8(
        self, x: Tensor, w: Tensor, routes: Routes, slots: Tensor | None, bias: Tensor | None, *, turned: bool = False
    ) -> Tensor:
        """slots: where x's rows go; None where they are the pairs; turned: w is [L, K, N]"""
        count = routes.ends[-1:] if slots is None else None  # rows behind the last pair are nothing
        rows, row_scales = _rounded(x, routes.count, slots, count)
        numbers = w.new_empty(w.mT.shape if turned else w.shape, dtype=torch.float8_e4m3fn)
        scales = w.new_empty(numbers.shape[:2], dtype=torch.float32)
        if turned:
            round_columns(w, numbers, scales)
        else:
            round_rows(w.reshape(-1, w.shape[2]), numbers.view(-1, w.shape[2]), scales.view(-1))
        out = x.new_empty(routes.count, numbers.shape[1])
        tiles = tiles_for(_each(routes, self.config), numbers, self.spare_sms)
        both = RowScales(row_scales, scales)
        grouped_gemm(rows, numbers, routes.ends, out, tiles, spare_sms=self.spare_sms, scales=both, bias=bias)
        return out


def _sum_rows(
    rows: Tensor, routes: Routes, to: GradientOut, numbers: Tensor | None = None, weights: Tensor | None = None
) -> None:
    """`kernels.sum_rows`, for a bias. Biases are small: what is not written as it is takes torch's operators."""
    out, accumulate, factor = to
    if not accumulate and factor == 1:
        kernels.sum_rows(rows, routes.ends, out, numbers, weights, launch=routes.launch)
        return
    total = torch.empty_like(out, dtype=torch.float32)
    kernels.sum_rows(rows, routes.ends, total, numbers, weights, launch=routes.launch)
    out.add_(total, alpha=factor) if accumulate else out.copy_(total.mul_(factor))


def _rounded(x: Tensor, rows: int, slots: Tensor | None, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """E4M3 [rows, H], and a scale for each row, float32 [rows]."""
    out, scale = x.new_empty(rows, x.shape[1], dtype=torch.float8_e4m3fn), x.new_empty(rows, dtype=torch.float32)
    round_rows(x, out, scale, slots=slots, counts=counts)
    return out, scale


def saved_bytes(rows: int, slots: int, pair_bytes: int, kept: int, config: MoEConfig) -> int:
    """Of the routes and of what is kept for each pair, with a uniform router. pair_bytes: as `Routes.sort`"""
    if not slots:
        return 0
    routes = rows * config.top_k
    counted = routes * pair_bytes > _UNCOUNTED
    pairs = round(rows * expected_pairs(config, slots, config.top_k)) if counted else routes
    return 4 * (2 * routes + slots) + pairs * kept


def _each(routes: Routes, config: MoEConfig) -> float:
    """Pairs of an expert, on average: as they are, or of a uniform router."""
    slots, counted = max(1, len(routes.ends)), routes.count < routes.ids.numel()
    pairs = routes.count if counted else len(routes.ids) * expected_pairs(config, slots, routes.ids.shape[1])
    return pairs / slots


def _parameters(config: MoEConfig) -> tuple[float, float]:
    return config.activation_alpha, config.activation_limit


def _form(config: MoEConfig) -> dict[str, object]:
    return {"ACTIVATION": config.activation.value, "GATED": config.activation.gated}
