"""Random uses of a layer on ranks, as a trainer would, against a dense layer in plain torch that sees all tokens.

Every rank draws the same uses in the same order. State that one use leaves behind meets the next one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

from ep_moe import EPContext, ExpertMap, MoEConfig, MoELayer, ParallelConfig, Routing, Tokens
from ep_moe.testing import distributed, rank_device
from ep_moe.training import parameter_groups, sync_gradients, use_main_grads
from ep_moe.weights.parts import full
from tests.fixtures.distributed_cases import batch_of, batches, gather_from_all_ranks
from tests.fixtures.helpers import assert_same

P = ParallelConfig
CONFIG = MoEConfig(hidden_size=8, intermediate_size=16, num_experts=6, top_k=2)
LAYOUTS = {
    2: [P(dp=2), P(tp=2), P(tp=2, tokens=Tokens.SHARDED), P(dp=2, ep=1), P(dp=2, ep=1, etp=2)],
    4: [P(dp=4), P(dp=2, tp=2), P(dp=4, ep=2), P(dp=2, tp=2, ep=2, etp=2)],
}
STEPS, RATE = 14, 0.05
BOUND = 1e-4  # relative to the largest magnitude: sums of some hundred float32 numbers, over STEPS updates
KINDS = {"w1": (16, 8), "w3": (16, 8), "w2": (8, 16)}


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Dense:
    """Hold all experts and the router as leaf tensors on the CPU."""

    def __init__(self, seed: int) -> None:
        experts = range(CONFIG.num_experts)
        self.experts = {
            (e, kind): drawn(shape, 100 * seed + 10 * e + at).div(4).requires_grad_()
            for e in experts
            for at, (kind, shape) in enumerate(KINDS.items())
        }
        self.router = drawn((CONFIG.num_experts, CONFIG.hidden_size), seed).requires_grad_()

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.experts.values(), self.router]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = linear(x, self.router).softmax(1).topk(CONFIG.top_k)
        return ids, weights

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(CONFIG.num_experts):
            share = torch.where(ids == e, weights, 0.0).sum(1, keepdim=True)
            w1, w3, w2 = (self.experts[e, kind] for kind in KINDS)
            out = out + share * linear(silu(linear(x, w1)) * linear(x, w3), w2)
        return out


@dataclass
class Use:
    """Hold a layer, its dense reference, and a log of the uses."""

    context: EPContext
    layer: MoELayer
    dense: Dense
    rng: random.Random
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(parameter_groups(self.layer), lr=RATE)
        self.own = batch_of(self.context.layout, dist.get_rank())
        self.count = batches(self.context.layout)

    def seed(self) -> int:
        return self.rng.randrange(1 << 20)

    def rows(self) -> list[Tensor]:
        """Return the rows of each batch."""
        seed = self.seed()
        return [drawn((self.rng.choice([0, 1, 3, 7]), 8), seed + at) for at in range(self.count)]

    def given(self, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return routes for x, some of which are -1."""
        ids = drawn((len(x), CONFIG.num_experts), seed).topk(CONFIG.top_k).indices
        return ids.masked_fill(drawn(ids.shape, seed + 1) > 1, -1), drawn(ids.shape, seed + 2)

    def same(self, found: Tensor, wanted: Tensor, what: str) -> str | None:
        largest = float(wanted.detach().abs().max()) if wanted.numel() else 0.0
        try:
            assert_same(found, wanted, what, atol=BOUND * max(1.0, largest))
        except AssertionError as error:
            return str(error)
        return None

    def check(self, problems: list[str | None]) -> None:
        found = [
            f"rank {rank}: {one}" for rank, own in enumerate(gather_from_all_ranks(problems)) for one in own if one
        ]
        assert not found, f"{self.context.layout}, after {self.done}: {found[0]}"

    # --- uses ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def infer(self) -> None:
        """Call without gradients: any shape, strides and mask, by the layer's router or by given routes."""
        x, seed, masked = self.rows()[self.own], self.seed(), self.rng.random() < 0.3
        routed, strided, cube = (self.rng.random() < 0.5 for _ in range(3))
        ids, weights = self.given(x, seed) if routed else self.dense.route(x)
        mask = drawn((len(x),), seed + 3) > 0 if masked else None
        wanted = self.dense(x, ids, weights)
        wanted = wanted if mask is None else wanted.where(mask.unsqueeze(1), 0.0)
        rows = torch.stack([x, x], 2)[:, :, 0] if strided else x
        rows = rows.to(self.context.device)
        mask = mask if mask is None else mask.to(self.context.device)
        if routed:
            routing = Routing(ids.to(rows.device), weights.to(rows.device))
            y = self.layer.forward_routed(rows, routing, mask)
        else:
            shaped = rows.unsqueeze(0) if cube else rows
            y = self.layer(shaped, mask if mask is None else mask.view(shaped.shape[:-1])).view(x.shape)
        self.check([self.same(y, wanted, "a result")])

    def train(self) -> None:
        """Train one or two micro-batches, average over ranks, and step."""
        problems: list[str | None] = []
        for _ in range(self.rng.choice([1, 1, 2])):
            problems += self.micro_batch(self.rows(), self.seed())
        sync_gradients(self.layer, self.context)
        if self.rng.random() < 0.2:  # a second one changes nothing
            sync_gradients(self.layer, self.context)
        for leaf in self.dense.leaves:
            leaf.grad = None if leaf.grad is None else leaf.grad / self.count
        problems += self.gradients()
        self.check(problems)
        self.optimizer.step()
        with torch.no_grad():
            for leaf in self.dense.leaves:
                if leaf.grad is not None:
                    leaf -= RATE * leaf.grad
        self.optimizer.zero_grad(set_to_none=self.rng.random() < 0.7)
        for leaf in self.dense.leaves:
            leaf.grad = None

    def micro_batch(self, rows: list[Tensor], seed: int) -> list[str | None]:
        routed, again = self.rng.random() < 0.5, self.rng.random() < 0.3
        problems: list[str | None] = []
        for at, x in enumerate(rows):
            x.requires_grad_()
            ids, weights = self.given(x, seed + 10 * at) if routed else self.dense.route(x)
            if routed:
                weights.requires_grad_()
            wanted, direction = self.dense(x, ids, weights), drawn(tuple(x.shape), seed + 5)
            (wanted * direction).sum().backward()
            if at == self.own:
                y, inputs = self.trained(x, Routing(ids, weights) if routed else None, direction, again=again)
                problems += [self.same(y, wanted, "a trained result"), self.same(inputs[0].grad, x.grad, "x.grad")]
                if routed:
                    problems.append(self.same(inputs[1].grad, weights.grad, "weights.grad"))
        return problems

    def trained(
        self, x: Tensor, given: Routing | None, direction: Tensor, *, again: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Run forward and backward, with recomputation if `again`."""
        device = self.context.device
        inputs = [t.detach().to(device).requires_grad_() for t in ([x] if given is None else [x, given.weights])]

        def call(rows: Tensor, *weights: Tensor) -> Tensor:
            if given is None:
                return self.layer(rows)
            return self.layer.forward_routed(rows, Routing(given.ids.to(device), *weights))

        y = checkpoint(call, *inputs, use_reentrant=False) if again else call(*inputs)
        (y * direction.to(device)).sum().backward()
        return y, inputs

    def gradients(self) -> list[str | None]:
        found = []
        for (e, kind), leaf in self.dense.experts.items():
            parameter = self.held(e, kind)
            if parameter is None:
                continue
            if not leaf.requires_grad:
                found.append(None if parameter.grad is None else f"experts.{e}.{kind} learns, and is frozen")
                continue
            wanted = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found.append(self.same(full(grad), wanted, f"the gradient of experts.{e}.{kind}"))
        router = self.layer.router.weight
        if self.dense.router.grad is not None and router.grad is not None:
            found.append(self.same(router.grad, self.dense.router.grad, "the router's gradient"))
        return found

    def parameters(self) -> list[str | None]:
        held = {key: self.held(*key) for key in self.dense.experts}
        found = [
            self.same(full(parameter), self.dense.experts[key], f"experts.{key}")
            for key, parameter in held.items()
            if parameter is not None
        ]
        return [*found, self.same(self.layer.router.weight, self.dense.router, "the router")]

    def held(self, expert: int, kind: str) -> Tensor | None:
        return dict(self.layer.expert_weights.named_parameters()).get(f"{expert}.{kind}")

    @torch.no_grad()
    def update(self) -> None:
        """Update all tensors of one expert by `update_expert`."""
        e, seed = self.rng.randrange(CONFIG.num_experts), self.seed()
        fresh = {kind: drawn(shape, seed + at).div(4) for at, (kind, shape) in enumerate(KINDS.items())}
        self.layer.update_expert(e, w13=torch.cat([fresh["w1"], fresh["w3"]]), w2=fresh["w2"])
        for kind, numbers in fresh.items():
            self.dense.experts[e, kind].copy_(numbers)

    @torch.no_grad()
    def replace(self) -> None:
        """Scale some parameters in place, or by new `.data` where the parameter is no DTensor."""
        factor, own = self.rng.choice([0.5, 2.0]), self.context.layout.etp == 1 and self.rng.random() < 0.5
        for (e, kind), leaf in self.dense.experts.items():
            if self.rng.random() < 0.3:
                leaf.mul_(factor)
                parameter = self.held(e, kind)
                if parameter is not None and own:
                    parameter.data = parameter.data * factor
                elif parameter is not None:
                    parameter.mul_(factor)

    def reload(self) -> None:
        """Zero the parameters, then load the state dict."""
        state = {name: tensor.clone() for name, tensor in self.layer.state_dict().items()}
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.zero_()
        self.layer.load_state_dict(state)

    def freeze(self) -> None:
        """Freeze one kind of matrix, or unfreeze it."""
        kind = self.rng.choice(list(KINDS))
        for (e, name), leaf in self.dense.experts.items():
            if name == kind:
                leaf.requires_grad_(not leaf.requires_grad)
                if (parameter := self.held(e, name)) is not None:
                    parameter.requires_grad_(leaf.requires_grad)
                    parameter.grad = None

    def main_grads(self) -> None:
        """Use main gradients from now on."""
        if self.context.layout.etp == 1 and self.layer.expert_weights.main_grads is None:
            self.optimizer.zero_grad()
            use_main_grads(self.layer)


USES = ["infer", "infer", "train", "train", "train", "update", "replace", "reload", "freeze", "main_grads"]


@distributed(2, 4, deadline_s=120)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_layer_gives_what_a_dense_one_gives(seed, world_size):
    for at, parallel in enumerate(LAYOUTS[world_size]):
        rng = random.Random(100 * seed + at)
        with EPContext.from_groups(parallel, device=rank_device(), deadline_s=30) as context:
            ranks = context.layout.ep
            copies = rng.randrange(0, 3) if ranks > 1 else 0
            layer = MoELayer(CONFIG, context, expert_map=ExpertMap.redundant(CONFIG.num_experts, ranks, copies))
            dense = Dense(rng.randrange(1 << 20))
            for e in range(CONFIG.num_experts):
                w1, w3, w2 = (dense.experts[e, kind].detach() for kind in KINDS)
                layer.update_expert(e, w13=torch.cat([w1, w3]), w2=w2)
            with torch.no_grad():
                layer.router.weight.copy_(dense.router)
            use = Use(context, layer, dense, rng)
            for _ in range(STEPS):
                name = rng.choice(USES)
                use.done.append(name)
                getattr(use, name)()
                use.check(use.parameters())
