"""Entries of `bench.train`: layers of ours and by hand with equal weights, their input, and a step of each.

`ByHand` is a routed layer with its backward in plain torch, as a trainer without this package would write it. A row is
sent once for each of its K experts (`all_to_all_single`). Rows are sorted by expert, multiplied by `grouped_mm`, and
summed by `index_add`. In the compiled variant, each stage between two collectives is one `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import grouped_mm, silu

from ep_moe.bench import overlap
from ep_moe.bench.harness import attempt, relative_error
from ep_moe.bench.libraries import require_plain_swiglu, transformers_all_to_all
from ep_moe.bench.train_report import ERROR, FLOAT8_ERROR
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.experts.base import ExpertsOptions
from ep_moe.layer import MoELayer
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.selection.explain import AUTO
from ep_moe.training.main_grads import use_main_grads
from ep_moe.types import LocalIds, Received, Routing, RowLayout, Weighting


class ByHand:
    """A routed layer by hand. In a group of one rank it exchanges nothing.

    w13: [L, 2 * I, H], gate first; w2: [L, H, I]. The parameters are leaves that share the given memory. Experts are
    placed in order over the ranks, L on each.
    """

    def __init__(self, config: MoEConfig, w13: Tensor, w2: Tensor, rank_group: RankGroup, *, compiled: bool) -> None:
        require_plain_swiglu(config, "by hand")
        self.w13, self.w2 = w13.detach().requires_grad_(), w2.detach().requires_grad_()
        self.rank_group, self.experts = rank_group, len(w2) * rank_group.size
        stage: Callable[[Any], Any] = partial(torch.compile, dynamic=False) if compiled else lambda function: function
        self.spread, self.compute, self.merge = stage(spread), stage(by_rank), stage(merge)
        self.alone = stage(by_one_rank)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute the layer. x: [T, H]; ids: int64 [T, K]; weights: float32 [T, K]. Returns [T, H]."""
        group = self.rank_group
        if group.size == 1:
            out: Tensor = self.alone(x, ids, weights, self.w13, self.w2)
            return out
        rows, order, sent = self.spread(x, ids, self.experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group.group)
        send, receive = (counts.view(group.size, -1).sum(1).tolist() for counts in (sent, received))
        arrived = Exchange.apply(rows, send, receive, group.group)
        y = self.compute(arrived, received.view(group.size, -1), self.w13, self.w2)
        merged: Tensor = self.merge(Exchange.apply(y, receive, send, group.group), order, weights)
        return merged


class Exchange(Function):
    """Exchanges rows: input grouped by destination rank, output grouped by source rank. Backward reverses it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Tensor:
        ctx.back = receive, send, group
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return Exchange.apply(grad, *ctx.back), None, None, None


def spread(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return K copies of each row [T * K, H], sorted by expert, the route of each, and the number of each expert."""
    expert, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(num_experts, device=x.device), right=True)
    return x.index_select(0, order // ids.shape[1]), order, ends.diff(prepend=ends.new_zeros(1))


def by_rank(rows: Tensor, counts: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Compute experts on rows sorted by source rank and then by expert; keep this order. counts: int64 [R, L]"""
    ranks, held = counts.shape
    slots = torch.arange(held, device=rows.device).repeat(ranks)
    order = slots.repeat_interleave(counts.flatten(), output_size=len(rows)).argsort(stable=True)
    y = multiplied(rows.index_select(0, order), counts.sum(0), w13, w2)
    return torch.empty_like(y).index_copy(0, order, y)


def multiplied(rows: Tensor, counts: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Compute experts on rows that are sorted by expert. counts: int64 [L]"""
    ends = counts.cumsum(0).int()
    gate, up = grouped_mm(rows, w13.mT, offs=ends).chunk(2, 1)
    return grouped_mm(silu(gate) * up, w2.mT, offs=ends)


def merge(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows, summed in float32."""
    tokens, top_k = weights.shape
    scaled = rows * weights.flatten()[order].unsqueeze(1)
    out = torch.zeros(tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    return out.index_add(0, order // top_k, scaled).to(rows.dtype)


def by_one_rank(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Compute the layer on a rank that holds all experts."""
    rows, order, counts = spread(x, ids, len(w2))
    return merge(multiplied(rows, counts, w13, w2), order, weights)


BY_HAND = {"eager": False, "compiled": True}
MAIN_GRADS = {"main_grad": None, "main_grad float32": torch.float32}
COMPARED = 8  # experts whose gradients are compared, spread over the slots: all of them would need a second copy


@dataclass(frozen=True)
class Options:
    """The options of `bench.train`.

    experts: a kernel's name or "auto"
    transports: transports in addition to "auto"
    by_hand: names of `BY_HAND`
    steps: number of timed steps
    float8: also the "auto" pair with products in E4M3
    torchtitan: names of `train_torchtitan.WAYS`
    exact: also the "auto" pair with `ExpertsOptions.exact`, for whole layers
    main_grad: also the "auto" pair after `use_main_grads`, in bf16 and in float32
    accumulate: a timed step adds to the gradients of the previous step
    sonic: a name of `train_sonic.WAYS`, or "none"
    transformers: also transformers' experts over its `all_to_all`, for whole layers
    frozen: the experts of all lines are frozen
    """

    experts: str = AUTO
    transports: Sequence[str] = ()
    by_hand: Sequence[str] = tuple(BY_HAND)
    steps: int = 10
    float8: bool = False
    torchtitan: Sequence[str] = ()
    exact: bool = False
    main_grad: bool = False
    accumulate: bool = False
    sonic: str = "none"
    transformers: bool = False
    frozen: bool = False

    @property
    def eager(self) -> bool:
        """Whether steps are only run eagerly, without CUDA graphs."""
        return self.accumulate or self.frozen


@dataclass(frozen=True)
class Batch:
    """The input of a step.

    x, grad: bf16 [T, H], rows and the gradient of the result
    ids: int64 [T, K]
    weights: float32 [T, K]
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    grad: Tensor

    @classmethod
    def make(cls, context: EPContext, config: MoEConfig, tokens: int) -> Batch:
        x, routing = overlap.batch(context, config, tokens)
        generator = torch.Generator(device=x.device).manual_seed(1_000_003 + context.layout.rank)
        weights = torch.randn(routing.ids.shape, generator=generator, device=x.device).softmax(1)
        return cls(x, routing.ids, weights, torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype))


@dataclass(frozen=True)
class Entry:
    """A layer that a line of the benchmark trains.

    call: maps x, ids and weights to rows [T, H]
    parameters: all parameters that get gradients
    gradients: returns the gradients of a slot's w13 [2 * I, H] and w2 [H, I] after a step
    slots: number of slots
    buffers: bytes of buffers
    allowed: as in `TrainLine`
    adds: timed steps add to existing gradients
    kept_bytes: returns the bytes that calls keep between steps
    """

    owner: str
    name: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    parameters: Sequence[Tensor]
    gradients: Callable[[int], tuple[Tensor, Tensor]]
    slots: int
    buffers: int = 0
    allowed: float = ERROR
    adds: bool = False
    kept_bytes: Callable[[], int] = lambda: 0


def layer_entries(context: EPContext, config: MoEConfig, options: Options) -> tuple[list[Entry], MoELayer | None]:
    """Make the entries of whole layers. Collective.

    They are the "auto" pair, the other transports, and layers by hand and of transformers on the first layer's weights.
    Returns the first layer too; None if no layer can be built.
    """
    layers: dict[tuple[str, str], MoELayer] = {}
    entries = []
    for transport in (AUTO, *options.transports):
        layer = attempt(context, f"a layer over {transport}", partial(built, context, config, transport, options))
        if layer is None:
            continue
        pair = (layer.choice.experts, layer.choice.all2all)
        if pair not in layers:
            layers[pair] = layer
            entries.append(
                ours(f"{' + '.join(pair)}{', auto' if transport == AUTO else ''}", layer, layer_call(layer), options)
            )
    first = next(iter(layers.values()), None)
    if first is not None:
        entries += auto_entries(context, context, config, options, layer_call, exact=options.exact)
        entries += by_hand(context, config, context, first, options)
        entries += over_transformers(context, config, first, options)
    return entries, first


def experts_entries(
    context: EPContext, own: EPContext, config: MoEConfig, options: Options
) -> tuple[list[Entry], MoELayer | None]:
    """Make the entries of one rank that holds all experts of `config`. Return the first line's layer too.

    own: this rank's context; context: that of all ranks
    """
    layer = attempt(context, "a layer of one rank", partial(built, own, config, AUTO, options))
    if layer is None:
        return [], None
    entries = [ours(layer.choice.experts, layer, kernel_call(layer), options)]
    entries += auto_entries(context, own, config, options, kernel_call)
    return [*entries, *by_hand(context, config, own, layer, options)], layer


Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def auto_entries(
    outer: EPContext, context: EPContext, config: MoEConfig, options: Options, call: Callable[[MoELayer], Call], *,
    exact: bool = False,
) -> list[Entry]:  # fmt: skip
    """Make the requested variants of the "auto" pair: main gradients, products in E4M3, and exact=True.

    outer: the context of all ranks; context: that of the layer
    """
    ways = [(name, ExpertsOptions(), ERROR) for name in MAIN_GRADS] if options.main_grad else []
    ways += [("float8", ExpertsOptions(float8=True), FLOAT8_ERROR)] if options.float8 else []
    ways += [("exact", ExpertsOptions(exact=True), ERROR)] if exact else []
    entries = []
    for name, how, allowed in ways:
        layer = attempt(outer, f"a layer with {name}", partial(built, context, config, AUTO, options, how))
        if layer is not None:
            if name in MAIN_GRADS:
                use_main_grads(layer, MAIN_GRADS[name])
            entry = ours(f"{layer.choice.experts} + {layer.choice.all2all}, {name}", layer, call(layer), options)
            entries.append(replace(entry, allowed=allowed))
    return entries


def built(
    context: EPContext, config: MoEConfig, transport: str, options: Options, how: ExpertsOptions | None = None
) -> MoELayer:
    """Make a layer. Its weights do not depend on the transport."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return MoELayer(config, context, all2all=transport, experts=options.experts, dtype=torch.bfloat16, options=how)


def layer_call(layer: MoELayer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the call of the whole layer."""
    return lambda x, ids, weights: layer.forward_routed(x, Routing(ids, weights))


def kernel_call(layer: MoELayer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the call of the kernel alone, without transport."""
    kernel: Any = layer.experts

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        received = Received(
            x=x, layout=RowLayout.RANK_MAJOR, weighting=Weighting.EXPERTS, handle=None, local_ids=LocalIds(ids.int()),
            weights=weights,
        )  # fmt: skip
        out: Tensor = kernel(received)
        return out

    return call


def ours(name: str, layer: MoELayer, call: Call, options: Options) -> Entry:
    held = layer.expert_weights

    def gradients(slot: int) -> tuple[Tensor, Tensor]:
        expert = held.get_submodule(str(held.local_experts[slot]))
        parts: dict[str, Any] = {name: gradient_of(parameter) for name, parameter in expert.named_parameters()}
        if any(part is None for part in parts.values()):
            raise ConfigError(f"{name} leaves expert {held.local_experts[slot]} without a gradient")
        return torch.cat([parts["w1"], parts["w3"]]), parts["w2"]

    plan = layer.plan()
    own = 0 if held.main_grads is None else held.main_grads.bytes
    buffers = plan["transport"] + plan["workspace"] + own
    parameters = list(layer.parameters())
    return Entry(
        "ours", name, call, parameters, gradients, held.num_slots, buffers, adds=options.accumulate,
        kept_bytes=lambda: layer._graphs.trained.held_bytes,
    )  # fmt: skip


def gradient_of(parameter: Tensor) -> Tensor | None:
    return getattr(parameter, "main_grad", parameter.grad)


def by_hand(outer: EPContext, config: MoEConfig, context: EPContext, layer: MoELayer, options: Options) -> list[Entry]:
    """Make the layers by hand, on a layer's weights. context: that of the layer; outer: the context of all ranks"""
    stored = layer.expert_weights.stored_tensors()
    entries = []
    for name in options.by_hand:
        make = partial(
            ByHand, config, stored["w13"], stored["w2"], context.rank_groups["ep"], compiled=BY_HAND[name]
        )  # fmt: skip
        peer = attempt(outer, f"by hand, {name}", make)
        if peer is not None:
            entries.append(stacked("by hand", name, peer, peer.w13, peer.w2, options))
    return entries


def over_transformers(context: EPContext, config: MoEConfig, layer: MoELayer, options: Options) -> list[Entry]:
    """Make the entry of transformers' experts, on a layer's weights, if requested. Collective."""
    if not options.transformers:
        return []
    stored = layer.expert_weights.stored_tensors()
    w13, w2 = (nn.Parameter(stored[name].detach()) for name in ("w13", "w2"))

    def make() -> Entry:
        require_plain_swiglu(config, "transformers")
        call = transformers_all_to_all(w13, w2, config, context.device)
        return stacked("transformers", "all_to_all, eager", call, w13, w2, options)

    found = attempt(context, "transformers' all_to_all", make)
    return [] if found is None else [found]


def stacked(owner: str, name: str, call: Call, w13: Tensor, w2: Tensor, options: Options) -> Entry:
    """Make the entry of a peer whose experts are parameters w13 [L, 2 * I, H] and w2 [L, H, I]."""

    def gradients(slot: int) -> tuple[Tensor, Tensor]:
        if w13.grad is None or w2.grad is None:
            raise ConfigError(f"{owner} leaves its experts without a gradient")
        return w13.grad[slot], w2.grad[slot]

    return Entry(owner, name, call, (w13, w2), gradients, len(w2), adds=options.accumulate)


def run_forward_backward(entry: Entry, batch: Batch) -> dict[str, Tensor]:
    """Run forward and backward. Return the result and the gradients of x and weights. Parameters keep theirs."""
    x, weights = batch.x.detach().requires_grad_(), batch.weights.detach().requires_grad_()
    out = entry.call(x, batch.ids, weights)
    out.backward(batch.grad)
    assert x.grad is not None
    assert weights.grad is not None
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad}


def step(entry: Entry, batch: Batch) -> None:
    run_forward_backward(entry, batch)
    if not entry.adds:
        drop_gradients(entry)


def forward(entry: Entry, batch: Batch) -> None:
    """Run the forward of a step, which keeps all that backward would need."""
    entry.call(batch.x.detach().requires_grad_(), batch.ids, batch.weights.detach().requires_grad_())


def drop_gradients(entry: Entry) -> None:
    for parameter in entry.parameters:
        parameter.grad = None
        if hasattr(parameter, "main_grad"):
            parameter.main_grad = None


def results(entry: Entry, batch: Batch) -> dict[str, Tensor]:
    """Return the results of a step that starts without gradients, including gradients of some experts."""
    drop_gradients(entry)
    try:
        return with_experts(entry, run_forward_backward(entry, batch))
    finally:
        drop_gradients(entry)


def with_experts(entry: Entry, found: dict[str, Tensor]) -> dict[str, Tensor]:
    if not any(parameter.requires_grad for parameter in entry.parameters):
        return found
    some = range(0, entry.slots, max(1, entry.slots // COMPARED))
    w13, w2 = zip(*map(entry.gradients, some), strict=True)
    return found | {"w13": torch.stack(w13), "w2": torch.stack(w2)}


def max_relative_error(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    return max(relative_error(found[name], reference[name]) for name in reference)
