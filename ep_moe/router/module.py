"""Routers: they compute logical expert ids and weights from hidden states.

The routing methods are plain functions of the logits, so a model with its own linear map can use them without
`Router`. A user's router is any callable `x [T, H] -> Routing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ep_moe.checks import check_kind
from ep_moe.config import MoEConfig, RoutingConfig, RoutingMethod
from ep_moe.errors import InputError
from ep_moe.router.kernels import RouterKernels, most_rows
from ep_moe.runtime import batch_invariant
from ep_moe.types import Routing


def softmax_topk(logits: Tensor, top_k: int, *, renormalize: bool, exact: bool = False) -> tuple[Tensor, Tensor]:
    """Take the softmax over all experts in float32, then the top-k.

    Args:
        logits: [T, E], floating point.
        top_k: K.
        renormalize: Divide the K weights by their sum.
        exact: Make a token's ids and weights bitwise independent of the other rows. Of equal scores the lower id comes
            first.

    Returns:
        Weights, float32 [T, K], and ids, int64 [T, K].
    """
    scores = _softmax(logits.float(), exact)
    weights, ids = _top_k(scores, top_k, exact)
    if renormalize:
        weights = weights / _sum(weights, exact)
    return weights, ids


def topk_softmax(logits: Tensor, top_k: int, *, exact: bool = False) -> tuple[Tensor, Tensor]:
    """Take the top-k of the logits, then the softmax over these K.

    Args:
        logits: [T, E], floating point.
        top_k: K.
        exact: As in `softmax_topk`.

    Returns:
        Weights [T, K] of the logits' dtype, and ids, int64 [T, K].
    """
    best, ids = _top_k(logits, top_k, exact)
    return _softmax(best, exact), ids


def topk_sigmoid(logits: Tensor, top_k: int, *, exact: bool = False) -> tuple[Tensor, Tensor]:
    """Take the top-k of the logits, then the sigmoid of each.

    Args:
        logits: [T, E], floating point.
        top_k: K.
        exact: As in `softmax_topk`.

    Returns:
        Weights, float32 [T, K], and ids, int64 [T, K].
    """
    best, ids = _top_k(logits, top_k, exact)
    return _sigmoid(best.float(), exact), ids


def sigmoid_topk(
    logits: Tensor,
    top_k: int,
    *,
    renormalize: bool,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose experts by sigmoid scores plus a bias, within the best groups (DeepSeek-V3, arXiv:2412.19437, 2.1.2).

    The score of a group is the sum of its two best experts. The top-k is taken over the experts of the best groups. The
    weights are the scores without bias.

    Args:
        logits: [T, E], floating point.
        top_k: K.
        renormalize: Divide the K weights by their sum.
        correction_bias: float32 [E], added to the scores for the choice. Default: none.
        num_groups: Groups of E / num_groups consecutive experts.
        top_groups: The number of groups whose experts can be chosen.
        exact: As in `softmax_topk`, for groups too.

    Returns:
        Weights, float32 [T, K], and ids, int64 [T, K]. Unsorted unless `exact`.
    """
    scores = _sigmoid(logits.float(), exact)
    choice = scores if correction_bias is None else scores + correction_bias
    if num_groups > 1:
        grouped = choice.unflatten(-1, (num_groups, -1))
        of_groups = grouped.topk(2, dim=-1).values.sum(-1)
        best_groups = _top_k(of_groups, top_groups, exact)[1]
        allowed = torch.zeros_like(grouped[..., 0]).scatter_(-1, best_groups, 1).bool()
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(-2)
    ids = batch_invariant.top_k(choice, top_k) if exact else choice.topk(top_k, sorted=False).indices
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (_sum(weights, exact) + 1e-20)
    return weights, ids


def routing_weights(logits: Tensor, ids: Tensor, config: RoutingConfig, *, exact: bool = False) -> Tensor:
    """Compute the weights that `route` would give to experts that are already chosen.

    Args:
        logits: [T, E], floating point.
        ids: int64 [T, K], distinct in a row, -1 for no expert. An id of at least E also counts as no expert, because a
            gather with it would end a GPU process. On a GPU `InvalidIds` reports it.
        config: The method and its constants.
        exact: As in `softmax_topk`.

    Returns:
        Weights, float32 [T, K], 0 for no expert.
    """
    named = (ids >= 0) & (ids < logits.shape[-1])
    at = ids.where(named, 0)
    match config.method:
        case RoutingMethod.SOFTMAX_TOPK:
            weights = _softmax(logits.float(), exact).gather(-1, at)
        case RoutingMethod.TOPK_SOFTMAX:
            none = torch.where(named.any(-1, keepdim=True), -math.inf, 0.0).to(logits.dtype)
            weights = _softmax(torch.where(named, logits.gather(-1, at), none), exact)
        case RoutingMethod.TOPK_SIGMOID:
            weights = _sigmoid(logits.gather(-1, at).float(), exact)
        case RoutingMethod.SIGMOID_TOPK:
            weights = _sigmoid(logits.float(), exact).gather(-1, at)
    weights = weights.masked_fill(~named, 0.0)
    if config.renormalize:
        total = _sum(weights, exact)
        least = 1e-20 if config.method is RoutingMethod.SIGMOID_TOPK else 0.0
        weights = weights / (total.masked_fill(~named.any(-1, keepdim=True), 1.0) + least)
    weights = weights.float()
    return weights * config.scaling_factor if config.scaling_factor != 1.0 else weights


def _softmax(x: Tensor, exact: bool) -> Tensor:
    return batch_invariant.softmax(x).to(x.dtype) if exact else x.softmax(-1)


def _sigmoid(x: Tensor, exact: bool) -> Tensor:
    return batch_invariant.pointwise(torch.sigmoid, x) if exact else x.sigmoid()


def _sum(weights: Tensor, exact: bool) -> Tensor:
    """Sum weights [T, K] over K, to [T, 1]."""
    return batch_invariant.sum_columns(weights).unsqueeze(-1) if exact else weights.sum(-1, keepdim=True)


def _top_k(scores: Tensor, k: int, exact: bool) -> tuple[Tensor, Tensor]:
    """Return the k largest scores and their indices, like `Tensor.topk`."""
    if not exact:
        best, ids = scores.topk(k)
        return best, ids
    ids = batch_invariant.top_k(scores, k)
    return scores.gather(-1, ids), ids


def route(
    logits: Tensor,
    top_k: int,
    config: RoutingConfig,
    correction_bias: Tensor | None = None,
    *,
    exact: bool = False,
) -> Routing:
    """Choose experts by the configured method.

    Args:
        logits: [T, E], floating point.
        top_k: K.
        config: The method and its constants.
        correction_bias: float32 [E], for SIGMOID_TOPK. Default: none.
        exact: As in `softmax_topk`.

    Returns:
        Ids, int64 [T, K], and weights, float32 [T, K].
    """
    match config.method:
        case RoutingMethod.SOFTMAX_TOPK:
            weights, ids = softmax_topk(logits, top_k, renormalize=config.renormalize, exact=exact)
        case RoutingMethod.TOPK_SOFTMAX:
            weights, ids = topk_softmax(logits, top_k, exact=exact)
        case RoutingMethod.TOPK_SIGMOID:
            weights, ids = topk_sigmoid(logits, top_k, exact=exact)
        case RoutingMethod.SIGMOID_TOPK:
            weights, ids = sigmoid_topk(
                logits,
                top_k,
                renormalize=config.renormalize,
                correction_bias=correction_bias,
                num_groups=config.num_groups,
                top_groups=config.top_groups,
                exact=exact,
            )
    weights = weights.float()
    if config.scaling_factor != 1.0:
        weights = weights * config.scaling_factor
    return Routing(ids, weights)


CHOOSE_BY_ROUTER = -2  # in the ids that `Router.forward` takes: the router chooses the experts of this row


class Router(nn.Module):
    """A linear map [E, H] and a routing method.

    Args:
        config: The layer.
        device: The device of the parameters. Default: torch's default device.
        dtype: The dtype of the parameters. With `float32_logits`, a smaller dtype becomes float32. Default: torch's
            default dtype.
        exact: Make a row's logits, ids and weights bitwise equal in every batch. Of equal scores the lower id wins.

    Attributes:
        weight: [E, H].
        bias: [E] if configured, else None.
        e_score_correction_bias: float32 [E], a buffer, if configured, else None. DeepSeek-V3's checkpoints use this
            name.
        keeps_logits: Whether `forward` returns logits in `Routing.logits`.
    """

    e_score_correction_bias: Tensor | None
    keeps_logits = False

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        exact: bool = False,
    ) -> None:
        super().__init__()
        check_kind("Router: config", config, MoEConfig)
        self.config, self.exact = config.routing, exact
        self.top_k = config.top_k
        self.num_experts, self.hidden_size = config.num_experts, config.hidden_size
        if config.routing.float32_logits:
            dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, device=device, dtype=dtype))
        bias = torch.empty(config.num_experts, device=device, dtype=dtype) if config.routing.bias else None
        self.bias = nn.Parameter(bias) if bias is not None else None
        shape = config.num_experts if config.routing.correction_bias else 0
        correction = torch.empty(shape, device=device, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", correction if shape else None)
        served = not exact and RouterKernels.unsupported_reason(config) is None
        self.kernels = RouterKernels(config) if served else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight like `nn.Linear`, and the biases with zeros."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        for tensor in (self.bias, self.e_score_correction_bias):
            if tensor is not None:
                nn.init.zeros_(tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Apply fn, but keep the correction bias in float32, and with `float32_logits` weight and bias too.

        After `.to(torch.bfloat16)` they would be too coarse: the scores of experts differ by less than bfloat16's
        resolution.
        """
        bias = self.e_score_correction_bias

        def applied(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            kept = self.config.float32_logits or tensor is bias
            rounded = found.dtype != tensor.dtype and found.itemsize < torch.float32.itemsize
            return tensor.to(found.device) if kept and rounded else found

        super()._apply(applied, recurse)
        return self

    def forward(self, x: Tensor, ids: Tensor | None = None, *, partial: bool = False) -> Routing:
        """Choose experts for rows.

        Args:
            x: [T, H] of the weight's dtype; with `float32_logits` of any floating-point dtype.
            ids: int64 [T, K], experts that were chosen before. Only their weights are computed. Default: none.
            partial: Whether ids has rows of `CHOOSE_BY_ROUTER`, for which experts are chosen.

        Returns:
            Ids, int64 [T, K], and weights, float32 [T, K].
        """
        if ids is None and self.fused(x):
            return self._by_kernels(x)
        logits = self.logits(x)
        if ids is None or partial:
            routing = route(logits, self.top_k, self.config, self.e_score_correction_bias, exact=self.exact)
        if ids is not None:
            ids = torch.where(ids == CHOOSE_BY_ROUTER, routing.ids, ids) if partial else ids
            routing = Routing(ids, routing_weights(logits, ids, self.config, exact=self.exact))
        return Routing(routing.ids, routing.weights, logits) if self.keeps_logits else routing

    def _by_kernels(self, x: Tensor) -> Routing:
        """Choose experts by the kernels, with and without gradients.

        Both cases choose the same experts, because activation checkpointing repeats a forward without gradients with
        them.
        """
        kernels, correction, weight = self.kernels, self.e_score_correction_bias, self.weight
        self._check_shapes(weight)
        few = len(x) <= most_rows(x, weight)
        assert kernels is not None
        differentiable = torch.is_grad_enabled()
        if few:
            routing = kernels.route(x, weight, self.bias, correction)
            if not (differentiable or self.keeps_logits):
                return routing
        logits = self._logits(x, weight)
        if not few:
            routing = kernels.choose(logits.detach(), correction)
        weights = routing_weights(logits, routing.ids, self.config) if differentiable else routing.weights
        return Routing(routing.ids, weights, logits if self.keeps_logits else None)

    def fused(self, x: Tensor) -> bool:
        """Return whether the Triton kernels choose the experts of such rows.

        Args:
            x: [T, H].

        Returns:
            False for torch operators.
        """
        return (
            self.kernels is not None
            and x.is_cuda
            and type(x) is Tensor
            and type(self.held_weight) in (Tensor, nn.Parameter)  # torch's operators gather a sharded weight
            and (self.config.float32_logits or x.dtype == self.held_weight.dtype)
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled("cuda")
        )

    @property
    def held_weight(self) -> Tensor:
        """The parameter from which `weight` is computed, for checks of its class and dtype.

        If `weight` has a parametrization, reading it runs the parametrization. Some change state each time, such as
        spectral_norm, so a call reads `weight` once, like `nn.Linear`. If the module has no parameters, because FSDP1
        holds them, this is `weight`.
        """
        found = self._parameters.get("weight")
        found = next(self.parameters(), None) if found is None else found
        return self.weight if found is None else found

    @property
    def hooked(self) -> bool:
        """Whether the module has forward hooks or forward pre-hooks."""
        return bool(self._forward_hooks or self._forward_pre_hooks)

    def logits(self, x: Tensor) -> Tensor:
        """Compute the router's scores.

        Args:
            x: [T, H].

        Returns:
            [T, E], float32 with `float32_logits`, else of x's dtype.
        """
        return self._logits(x, self.weight)

    def _logits(self, x: Tensor, weight: Tensor) -> Tensor:
        self._check_shapes(weight)
        product = batch_invariant.linear if self.exact else linear
        if not self.config.float32_logits:
            return product(x, weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return product(x.float(), weight.float(), bias)

    def _check_shapes(self, weight: Tensor) -> None:
        """Raise InputError if a tensor that user code replaced has another shape.

        Without rows for all experts, the others would get no token without an error, and the kernels would read beyond
        the tensor.
        """
        if weight.shape != (self.num_experts, self.hidden_size):
            name, tensor, wanted = "weight", weight, [self.num_experts, self.hidden_size]
        else:
            vectors = (("bias", self.bias), ("e_score_correction_bias", self.e_score_correction_bias))
            wanted = [self.num_experts]
            wrong = [(n, t) for n, t in vectors if t is not None and t.shape != (self.num_experts,)]
            if not wrong:
                return
            name, tensor = wrong[0]
        raise InputError(
            f"router.{name} must be {wanted}, for num_experts={self.num_experts} and hidden_size={self.hidden_size} of "
            f"the layer's configuration, got {list(tensor.shape)}; assign a tensor of this shape, or build a layer of "
            f"another MoEConfig"
        )

    def extra_repr(self) -> str:
        """Describe the router in one line, for `print`."""
        experts, hidden = self.weight.shape
        return f"H={hidden}, E={experts}, K={self.top_k}, method={self.config.method.value}"
