"""Routers: from hidden states to logical expert ids and weights.

The methods are plain functions of the logits, so that a model with its own linear map can use them alone. A router
of the user's is any callable `x [T, H] -> Routing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ep_moe.config import MoEConfig, RoutingConfig, RoutingMethod
from ep_moe.types import Routing


def softmax_topk(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Take the softmax over all experts in float32, then the top-k.

    Args:
        logits: [T, E], floating point.
        top_k: K.
        renormalize: Divide the K weights by their sum.

    Returns:
        Weights, float32 [T, K], and ids, int64 [T, K].
    """
    weights, ids = logits.float().softmax(-1).topk(top_k)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


def topk_softmax(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Take the top-k of the logits, then the softmax over these K.

    Args:
        logits: [T, E], floating point.
        top_k: K.

    Returns:
        Weights [T, K] of the logits' dtype, and ids, int64 [T, K].
    """
    best, ids = logits.topk(top_k)
    return best.softmax(-1), ids


def topk_sigmoid(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Take the top-k of the logits, then the sigmoid of each.

    Args:
        logits: [T, E], floating point.
        top_k: K.

    Returns:
        Weights, float32 [T, K], and ids, int64 [T, K].
    """
    best, ids = logits.topk(top_k)
    return best.float().sigmoid(), ids


def sigmoid_topk(
    logits: Tensor,
    top_k: int,
    *,
    renormalize: bool,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Choose as DeepSeek-V3 (arXiv:2412.19437, 2.1.2): by sigmoid scores plus a bias, within the best groups.

    The choice looks first at groups, by the sum of their two best experts, then at the experts of the best groups. The
    weights are the scores without bias.

    Args:
        logits: [T, E], floating point.
        top_k: K.
        renormalize: Divide the K weights by their sum.
        correction_bias: float32 [E], added to the scores for the choice. Default: none.
        num_groups: Groups of E / num_groups consecutive experts.
        top_groups: Groups whose experts can be chosen.

    Returns:
        Weights, float32 [T, K], and ids, int64 [T, K], in no order.
    """
    scores = logits.float().sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias
    if num_groups > 1:
        grouped = choice.unflatten(-1, (num_groups, -1))
        best_groups = grouped.topk(2, dim=-1).values.sum(-1).topk(top_groups, sorted=False).indices
        allowed = torch.zeros_like(grouped[..., 0]).scatter_(-1, best_groups, 1).bool()
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(-2)
    ids = choice.topk(top_k, sorted=False).indices
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights, ids


def route(logits: Tensor, top_k: int, config: RoutingConfig, correction_bias: Tensor | None = None) -> Routing:
    """Choose experts by the configured method.

    Args:
        logits: [T, E], floating point.
        top_k: K.
        config: The method and its constants.
        correction_bias: float32 [E], for SIGMOID_TOPK. Default: none.

    Returns:
        Ids, int64 [T, K], and weights, float32 [T, K].
    """
    match config.method:
        case RoutingMethod.SOFTMAX_TOPK:
            weights, ids = softmax_topk(logits, top_k, renormalize=config.renormalize)
        case RoutingMethod.TOPK_SOFTMAX:
            weights, ids = topk_softmax(logits, top_k)
        case RoutingMethod.TOPK_SIGMOID:
            weights, ids = topk_sigmoid(logits, top_k)
        case RoutingMethod.SIGMOID_TOPK:
            weights, ids = sigmoid_topk(
                logits,
                top_k,
                renormalize=config.renormalize,
                correction_bias=correction_bias,
                num_groups=config.num_groups,
                top_groups=config.top_groups,
            )
    weights = weights.float()
    if config.scaling_factor != 1.0:
        weights = weights * config.scaling_factor
    return Routing(ids, weights)


class Router(nn.Module):
    """A linear map [E, H] and a routing method.

    Args:
        config: The layer.
        device: Of the parameters. Default: torch's.
        dtype: Of the parameters; float32 where `float32_logits` is set and this has fewer bits. Default: torch's.

    Attributes:
        weight: [E, H].
        bias: [E] where configured, else None.
        e_score_correction_bias: float32 [E], a buffer, where configured; the name of DeepSeek-V3's checkpoints.
        keeps_logits: Whether `forward` returns logits in `Routing.logits`.
    """

    e_score_correction_bias: Tensor | None
    keeps_logits = False

    def __init__(
        self, config: MoEConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config.routing
        self.top_k = config.top_k
        if config.routing.float32_logits:
            dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, device=device, dtype=dtype))
        bias = torch.empty(config.num_experts, device=device, dtype=dtype) if config.routing.bias else None
        self.bias = nn.Parameter(bias) if bias is not None else None
        shape = config.num_experts if config.routing.correction_bias else 0
        correction = torch.empty(shape, device=device, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", correction if shape else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weight as `nn.Linear` does, and the biases with zeros."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        for tensor in (self.bias, self.e_score_correction_bias):
            if tensor is not None:
                nn.init.zeros_(tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """`.to(torch.bfloat16)` leaves the correction bias in float32, and with float32 logits weight and bias too: the
        scores of experts differ by less than bfloat16's steps."""
        bias = self.e_score_correction_bias

        def applied(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            kept = self.config.float32_logits or tensor is bias
            rounded = found.dtype != tensor.dtype and found.itemsize < torch.float32.itemsize
            return tensor.to(found.device) if kept and rounded else found

        super()._apply(applied, recurse)
        return self

    def forward(self, x: Tensor) -> Routing:
        """Choose experts for rows.

        Args:
            x: [T, H] of the weight's dtype; any floating point with `float32_logits`.

        Returns:
            Ids, int64 [T, K], and weights, float32 [T, K].
        """
        logits = self.logits(x)
        routing = route(logits, self.top_k, self.config, self.e_score_correction_bias)
        return Routing(routing.ids, routing.weights, logits) if self.keeps_logits else routing

    def logits(self, x: Tensor) -> Tensor:
        """Compute the scores that experts are chosen by.

        Args:
            x: [T, H].

        Returns:
            [T, E], float32 with `float32_logits`, else of x's dtype.
        """
        if not self.config.float32_logits:
            return linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return linear(x.float(), self.weight.float(), bias)

    def extra_repr(self) -> str:
        """Describe the router in one line, for `print`."""
        experts, hidden = self.weight.shape
        return f"H={hidden}, E={experts}, K={self.top_k}, method={self.config.method.value}"
