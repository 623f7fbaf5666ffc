"""The Hopper expert step in bf16 for training: a forward that saves the first product's results, and its backward.

Forward saves the received rows, the first product's results (before the activation) and the sorted routes. The first
product gathers its rows, unless a copy of them costs less (`copies_rows_first`). For the gradients of weights, rows are
copied into the experts' order, because these products would lose more time by gathering than the copies take. The next
product reuses the memory of the copies.

With h = w13 x, a = act(h) and y = weight * (w2 a), and dy the gradient of a row:

    da = w2^T dy        dweight = <a, da>        dh = act'(h) * (weight * da)        dx = w13^T dh
    dw2 = sum of dy (weight * a)^T               dw13 = sum of dh x^T

With biases, h = w13 x + b13 and y = weight * (w2 a + b2). Then dweight also includes <b2, dy>, and:

    db2 = sum of weight * dy                     db13 = sum of dh

So backward needs no result of the second product (method of SonicMoE, arXiv 2512.14080).

With `ExpertsOptions.float8` all products except dw2 and dw13 multiply E4M3. Each row of w13 and w2 (in backward, of
their transposes) and each pair's row has a scale, computed from its current largest magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.experts.differentiable import Allocator, WeightProduct, new_tensors
from ep_moe.experts.hopper import gradients_triton as kernels
from ep_moe.experts.hopper import route_sort
from ep_moe.experts.hopper.gemm_grouped import copies_rows_first, grouped_gemm, tiles_for, weight_gradient
from ep_moe.experts.hopper.gradients_triton import Float8Rows
from ep_moe.experts.layouts import expected_pairs
from ep_moe.quant.kernels import RowScales, round_columns, round_rows
from ep_moe.runtime.launch_cache import Launch, RecordedLaunches, launch_directly
from ep_moe.types import Activation, PeerRows, capturing
from ep_moe.weights.main_grads import GradientOut

_ROUTES = 1024  # routes per program of `number_routes`
_MAX_RECORDED_TARGETS = 8  # most targets whose launches a `_WeightGradient` keeps
# If the first product's results of all possible pairs have at most this many bytes, they are all allocated, and the
# host does not wait for the number of pairs
UNCOUNTED = 64 << 20


@dataclass(frozen=True)
class Routes:
    """Pairs of a row and a local expert, sorted by expert.

    ids: int32 [N, K], local, -1 for none; slots, ends: as of `route_sort.Lists`
    source: int32 [at least count], the row of each pair
    count: the number of pairs; if the host did not wait for it, the largest possible number
    launch: how kernels are launched
    """

    ids: Tensor
    slots: Tensor
    ends: Tensor
    source: Tensor
    count: int
    launch: Launch = launch_directly

    @classmethod
    def sort(
        cls, ids: Tensor, num_experts: int, pair_bytes: int, launch: Launch = launch_directly, *,
        all_here: bool = False, allocate: Allocator | None = None,
    ) -> Routes:  # fmt: skip
        """Sort routes by expert.

        The host waits for the number of pairs only if the memory for all possible pairs would exceed `UNCOUNTED`, other
        ranks have experts too, and no CUDA graph is being captured.

        pair_bytes: bytes that are saved per pair; all_here: other ranks have no experts
        """
        allocate = allocate or new_tensors(ids.device)
        pairs = ids.numel()
        if not pairs or not num_experts:
            none = torch.full_like(ids, -1)
            return cls(ids, none, ids.new_zeros(num_experts, dtype=torch.int32), none, 0, launch)
        scratch = {name: allocate(name, *how) for name, how in route_sort.list_shapes(pairs, num_experts).items()}
        lists = route_sort.list_pairs(scratch, ids, None, 0, num_experts, launch=launch)
        uncounted = all_here or pairs * pair_bytes <= UNCOUNTED or capturing(ids.device)
        count = pairs if uncounted else int(lists.ends[-1])
        return cls(ids, lists.slots, lists.ends, lists.source, count, launch)

    def numbers(self, allocate: Allocator) -> Tensor:
        """Return for each pair the index of its route in N * K: int32 [count]."""
        found = allocate("numbers", (self.count,), torch.int32)
        routes = self.slots.numel()
        self.launch(kernels.number_routes, (-(-routes // _ROUTES),), self.slots, found, routes, BLOCK=_ROUTES)
        return found

    def gather(self, x: Tensor, out: Tensor) -> Tensor:
        route_sort.copy_rows(x, self.slots, out, launch=self.launch)
        return out

    def sum(self, pairs: Tensor, weights: Tensor | None, out: Tensor | PeerRows) -> Tensor | PeerRows:
        """Sum the rows of each token's pairs into `out`, and return it."""
        peer_out = route_sort.PeerAddresses.of(out) if isinstance(out, PeerRows) else None
        to = out.blocks[out.rank] if isinstance(out, PeerRows) else out
        route_sort.reduce(
            pairs, self.ids, weights, 0, len(self.ends), to, slots=self.slots, peer_out=peer_out, launch=self.launch
        )
        return out


@dataclass(frozen=True)
class TrainedStep:
    """The products of a call, forward and backward.

    w13: [L, 2 * I, H], gate first ([L, I, H] without a gate); w2: [L, H, I]; biases: [L, 2 * I] and [L, H], or None
    spare_sms: multiprocessors that products leave free
    float8: multiply in E4M3, except for the gradients of matrices
    launch: how kernels are launched
    """

    config: MoEConfig
    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    spare_sms: int = 0
    float8: bool = False
    launch: Launch = launch_directly

    def forward(
        self, x: Tensor, weights: Tensor | None, ids: Tensor, allocate: Allocator | None = None,
        peer_out: PeerRows | None = None, *, keeps: bool = True,
    ) -> tuple[Tensor | PeerRows, Routes, Tensor]:  # fmt: skip
        """Return the experts' rows [N, H], the sorted routes, and the first product's results [count, 2 * I].

        x: bf16 [N, H]; weights: float32 [N, K], None for ones; ids: int32 [N, K], local, -1 for none
        allocate: allocates saved tensors: the routes, and with `keeps` the first product's results
        peer_out: if given, the rows are written there, and it is returned instead of them
        """
        slots, _, inner = self.w2.shape
        allocate = allocate or new_tensors(x.device)
        all_here = slots >= self.config.num_experts
        routes = Routes.sort(
            ids, slots, self.w13.shape[1] * x.itemsize, self.launch, all_here=all_here, allocate=allocate
        )
        if routes.count == 0:
            return _no_results(x, peer_out), routes, x.new_empty(0, self.w13.shape[1])
        h = self._first(x, routes, allocate if keeps else new_tensors(x.device))
        act = Float8Rows.empty(x, routes.count, inner) if self.float8 else x.new_empty(routes.count, inner)
        kernels.activate_rows(h, act, routes.ends[-1:], *_activation(self.config), launch=self.launch)
        rows = self._product(act, self.w2, routes, x.new_empty(routes.count, x.shape[1]), bias=self.w2_bias)
        del act
        return routes.sum(rows, weights, _results(x, peer_out)), routes, h

    def backward(
        self, grad: Tensor, x: Tensor, weights: Tensor | None, routes: Routes, h: Tensor | None,
        wanted: Collection[str], emit: Callable[[str, WeightProduct], None], allocate: Allocator | None = None,
        peer_out: PeerRows | None = None, *, overwrites: bool = False,
    ) -> tuple[Tensor | PeerRows, Tensor]:  # fmt: skip
        """Return the gradients of x, [N, H], and of weights, float32 [N, K].

        grad: bf16 [N, H]; rows without a pair may hold anything; h: None to compute it again
        wanted: names of the matrices and biases that need a gradient
        emit: called for each of these with a function that writes the gradient
        allocate: allocates the tensors that these functions read. Some are overwritten after `emit` returns, unless
            `allocate` gives each name its own memory
        peer_out: if given, the gradients of x are written there, and it is returned instead of them
        overwrites: h may be overwritten with its gradient
        """
        _, hidden, inner = self.w2.shape
        allocate = allocate or new_tensors(x.device)
        dweights = torch.zeros(routes.ids.shape, dtype=torch.float32, device=x.device)
        if routes.count == 0:
            for name in wanted:
                emit(name, _no_rows)
            return _no_results(x, peer_out), dweights
        if h is None:
            h = self._first(x, routes, new_tensors(x.device))
        pairs, numbers = routes.count, routes.numbers(allocate)
        # with float8 only the gradients of matrices and biases read bf16 rows
        reads_dy = not self.float8 or "w2" in wanted or self.w2_bias is not None
        reads_dh = not self.float8 or "w13" in wanted or "w13_bias" in wanted
        rows = allocate("dy", (pairs if reads_dy else 0, hidden), x.dtype)
        if reads_dy:
            routes.gather(grad, rows)
        da = allocate("da", (pairs, inner), x.dtype)
        self._product(self._rounded(grad, routes) if self.float8 else rows, self.w2, routes, da, turned=True)
        dh = h if overwrites else allocate("dh", (pairs if reads_dh else 0, h.shape[1]), x.dtype)
        rounded = Float8Rows.empty(x, *h.shape) if self.float8 else None
        if overwrites:  # autograd then refuses to run this node again, such as after an exception within it
            torch.autograd.graph.increment_version(h)
        kernels.differentiate(
            h, da, numbers, weights, routes.ends, *_activation(self.config), grad_weights=dweights,
            weighted=da if "w2" in wanted else None, grad_h=dh if reads_dh else None, rounded=rounded,
            launch=self.launch,
        )  # fmt: skip
        if self.w2_bias is not None:
            kernels.add_dots(rows, self.w2_bias, numbers, dweights, routes.ends, launch=self.launch)
        if "w2_bias" in wanted:
            emit("w2_bias", partial(_sum_rows, rows, routes, numbers=numbers, weights=weights))
        if "w2" in wanted:
            emit("w2", _WeightGradient(rows, da, routes.ends, self.spare_sms))
        del da, rows
        if "w13_bias" in wanted:
            emit("w13_bias", partial(_sum_rows, dh, routes))
        rows = allocate("x", (pairs, hidden), x.dtype)
        self._product(dh if rounded is None else rounded, self.w13, routes, rows, turned=True)
        dx = routes.sum(rows, None, _results(x, peer_out))
        if "w13" in wanted:
            emit("w13", _WeightGradient(dh, routes.gather(x, rows), routes.ends, self.spare_sms))
        return dx, dweights

    def _first(self, x: Tensor, routes: Routes, allocate: Allocator) -> Tensor:
        """Return the first product's results [count, 2 * I], before the activation."""
        h = allocate("h", (routes.count, self.w13.shape[1]), x.dtype)
        if self.float8:
            return self._product(self._rounded(x, routes), self.w13, routes, h, bias=self.w13_bias)
        each = _each(routes, self.config)
        if copies_rows_first(each, self.w13, self.spare_sms):
            rows = routes.gather(x, x.new_empty(routes.count, x.shape[1]))
            return self._product(rows, self.w13, routes, h, bias=self.w13_bias)
        tiles = tiles_for(each, self.w13, self.spare_sms, gathered=True)
        grouped_gemm(
            x, self.w13, routes.ends, h, tiles, spare_sms=self.spare_sms, source=routes.source, bias=self.w13_bias
        )
        return h

    def _product(
        self, pairs: Tensor | Float8Rows, w: Tensor, routes: Routes, out: Tensor, *, turned: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Multiply pairs [count, K] by w [L, N, K] into out [count, N]. turned: w is [L, K, N]"""
        scales = None
        if isinstance(pairs, Float8Rows):
            w, of_w = self._rounded_matrices(w, turned=turned)
            scales, pairs, turned = RowScales(pairs.scale, of_w), pairs.numbers, False
        tiles = tiles_for(_each(routes, self.config), w.mT if turned else w, self.spare_sms)
        grouped_gemm(
            pairs, w, routes.ends, out, tiles, spare_sms=self.spare_sms, turned=turned, scales=scales, bias=bias
        )
        return out

    def _rounded(self, x: Tensor, routes: Routes) -> Float8Rows:
        """Return the row of each pair, of x [N, K], rounded to E4M3."""
        rows = Float8Rows.empty(x, routes.count, x.shape[1])
        round_rows(x, rows.numbers, rows.scale, slots=routes.slots, launch=self.launch)
        return rows

    def _rounded_matrices(self, w: Tensor, *, turned: bool) -> tuple[Tensor, Tensor]:
        """Round w [L, N, K] (turned: [L, K, N]) to E4M3 [L, N, K], with scales float32 [L, N]."""
        numbers = w.new_empty(w.mT.shape if turned else w.shape, dtype=torch.float8_e4m3fn)
        scale = w.new_empty(numbers.shape[:2], dtype=torch.float32)
        if turned:
            round_columns(w, numbers, scale, launch=self.launch)
        else:
            round_rows(w.reshape(-1, w.shape[2]), numbers.view(-1, w.shape[2]), scale.view(-1), launch=self.launch)
        return numbers, scale


class _WeightGradient:
    """A function that computes `weight_gradient` of fixed operands.

    It repeats recorded launches for a target that it has written before. This saves host time in recorded calls, whose
    operands keep their addresses.
    """

    def __init__(self, a: Tensor, b: Tensor, ends: Tensor, spare_sms: int) -> None:
        self._operands, self._spare_sms = (a, b, ends), spare_sms
        self._made: dict[Any, RecordedLaunches] = {}

    def __call__(self, to: GradientOut) -> None:
        key = to.out.data_ptr(), to.out.dtype, to.accumulate, to.factor
        if key in self._made:
            self._made[key].replay()
            return
        if len(self._made) == _MAX_RECORDED_TARGETS:
            self._made.clear()
        launch = self._made[key] = RecordedLaunches()
        weight_gradient(*self._operands, *to, spare_sms=self._spare_sms, launch=launch)


def _results(x: Tensor, peer_out: PeerRows | None) -> Tensor | PeerRows:
    """Return memory for results, one row for each row of x. Call this after operands are freed."""
    return torch.empty_like(x) if peer_out is None else peer_out


def _no_results(x: Tensor, peer_out: PeerRows | None) -> Tensor | PeerRows:
    if peer_out is None:
        return torch.zeros_like(x)
    peer_out.write_nothing()
    return peer_out


def _no_rows(to: GradientOut) -> None:
    """Write the gradient of a tensor that no row used: zero."""
    if not to.accumulate:
        to.out.zero_()


def _sum_rows(
    rows: Tensor, routes: Routes, to: GradientOut, *, numbers: Tensor | None = None, weights: Tensor | None = None
) -> None:
    """Compute a bias's gradient by `kernels.sum_rows`. Torch operators apply factor and addition: biases are small."""
    out, accumulate, factor = to
    if not accumulate and factor == 1:
        kernels.sum_rows(rows, routes.ends, out, numbers, weights, launch=routes.launch)
        return
    total = torch.empty_like(out, dtype=torch.float32)
    kernels.sum_rows(rows, routes.ends, total, numbers, weights, launch=routes.launch)
    out.add_(total, alpha=factor) if accumulate else out.copy_(total.mul_(factor))


def _each(routes: Routes, config: MoEConfig) -> float:
    """Return the mean pairs per expert: the actual number if it is known, else that of a uniform router."""
    slots, counted = max(1, len(routes.ends)), routes.count < routes.ids.numel()
    pairs = routes.count if counted else len(routes.ids) * expected_pairs(config, slots, routes.ids.shape[1])
    return pairs / slots


def _activation(config: MoEConfig) -> tuple[Activation, float, float]:
    return config.activation, config.activation_alpha, config.activation_limit
