"""What `bench.train` trains: layers of ours and by hand on equal weights, the rows they get, and one step of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ep_moe.bench import overlap
from ep_moe.bench.layer import attempt, relative_error
from ep_moe.bench.train_peers import ByHand
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.layer import MoELayer
from ep_moe.selection.explain import AUTO
from ep_moe.types import LocalIds, Received, Routing, RowLayout, Weighting

BY_HAND = {"eager": False, "compiled": True}
COMPARED = 8  # experts, spread over the slots: gradients of all of them would take a second copy


@dataclass(frozen=True)
class Options:
    """experts: a kernel's name or "auto"; transports: beside "auto"; by_hand: names of `BY_HAND`"""

    experts: str = AUTO
    transports: Sequence[str] = ()
    by_hand: Sequence[str] = tuple(BY_HAND)
    steps: int = 10


@dataclass(frozen=True)
class Batch:
    """x, grad: bf16 [T, H], rows and the result's gradient; ids: int64 [T, K]; weights: float32 [T, K]"""

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
    """What a line trains.

    call: from x, ids and weights to rows [T, H]; parameters: all that a step leaves gradients in
    gradients: of a slot's w13 [2 * I, H] and w2 [H, I], after a step; buffers: bytes
    """

    owner: str
    name: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    parameters: Sequence[Tensor]
    gradients: Callable[[int], tuple[Tensor, Tensor]]
    slots: int
    buffers: int = 0


def layer_entries(context: EPContext, config: MoEConfig, options: Options) -> list[Entry]:
    """The "auto" pair, the other transports, and the layers by hand on the first layer's weights. Collective."""
    layers: dict[tuple[str, str], MoELayer] = {}
    entries = []
    for transport in (AUTO, *options.transports):
        layer = attempt(context, f"a layer over {transport}", partial(built, context, config, transport, options))
        if layer is None:
            continue
        pair = (layer.choice.experts, layer.choice.all2all)
        if pair not in layers:
            layers[pair] = layer
            entries.append(ours(f"{' + '.join(pair)}{', auto' if transport == AUTO else ''}", layer, over(layer)))
    if layers:
        entries += by_hand(context, config, context, next(iter(layers.values())), options)
    return entries


def experts_entries(context: EPContext, own: EPContext, config: MoEConfig, options: Options) -> list[Entry]:
    """Of one rank that holds all experts of config. own: this rank's context; context: of all ranks"""
    layer = attempt(context, "a layer of one rank", partial(built, own, config, AUTO, options))
    if layer is None:
        return []
    return [ours(layer.choice.experts, layer, alone(layer)), *by_hand(context, config, own, layer, options)]


def built(context: EPContext, config: MoEConfig, transport: str, options: Options) -> MoELayer:
    """Equal weights, whatever the transport is."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return MoELayer(config, context, all2all=transport, experts=options.experts, dtype=torch.bfloat16)


def over(layer: MoELayer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, ids, weights: layer.forward_routed(x, Routing(ids, weights))


def alone(layer: MoELayer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The kernel's own step."""
    kernel: Any = layer.experts

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        received = Received(
            x=x, layout=RowLayout.RANK_MAJOR, weighting=Weighting.EXPERTS, handle=None, local_ids=LocalIds(ids.int()),
            weights=weights,
        )  # fmt: skip
        out: Tensor = kernel(received)
        return out

    return call


def ours(name: str, layer: MoELayer, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Entry:
    held = layer.expert_weights

    def gradients(slot: int) -> tuple[Tensor, Tensor]:
        expert = held.get_submodule(str(held.local_experts[slot]))
        parts: dict[str, Any] = {name: parameter.grad for name, parameter in expert.named_parameters()}
        if any(part is None for part in parts.values()):
            raise ConfigError(f"{name} leaves expert {held.local_experts[slot]} without a gradient")
        return torch.cat([parts["w1"], parts["w3"]]), parts["w2"]

    plan = layer.plan()
    buffers = plan["transport"] + plan["workspace"]
    return Entry("ours", name, call, list(layer.parameters()), gradients, held.num_slots, buffers)


def by_hand(outer: EPContext, config: MoEConfig, context: EPContext, layer: MoELayer, options: Options) -> list[Entry]:
    """context: of the layer, whose weights they read; outer: of all ranks"""
    stored = layer.expert_weights.stored_tensors()
    entries = []
    for name in options.by_hand:
        make = partial(
            ByHand, config, stored["w13"], stored["w2"], context.rank_groups["ep"], compiled=BY_HAND[name]
        )  # fmt: skip
        peer = attempt(outer, f"by hand, {name}", make)
        if peer is not None:
            entries.append(Entry("by hand", name, peer, (peer.w13, peer.w2), peer.gradients, len(peer.w2)))
    return entries


def trained(entry: Entry, batch: Batch) -> dict[str, Tensor]:
    """Forward and backward. Returns the result and the gradients of x and weights; parameters keep theirs."""
    x, weights = batch.x.detach().requires_grad_(), batch.weights.detach().requires_grad_()
    out = entry.call(x, batch.ids, weights)
    out.backward(batch.grad)
    assert x.grad is not None
    assert weights.grad is not None
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad}


def step(entry: Entry, batch: Batch) -> None:
    trained(entry, batch)
    dropped(entry)


def forward(entry: Entry, batch: Batch) -> None:
    """As a step's, with all that its backward would need."""
    entry.call(batch.x.detach().requires_grad_(), batch.ids, batch.weights.detach().requires_grad_())


def dropped(entry: Entry) -> None:
    for parameter in entry.parameters:
        parameter.grad = None


def results(entry: Entry, batch: Batch) -> dict[str, Tensor]:
    """Of a step, those of some experts too."""
    try:
        return with_experts(entry, trained(entry, batch))
    finally:
        dropped(entry)


def with_experts(entry: Entry, found: dict[str, Tensor]) -> dict[str, Tensor]:
    some = range(0, entry.slots, max(1, entry.slots // COMPARED))
    w13, w2 = zip(*map(entry.gradients, some), strict=True)
    return found | {"w13": torch.stack(w13), "w2": torch.stack(w2)}


def apart(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    return max(relative_error(found[name], reference[name]) for name in reference)
