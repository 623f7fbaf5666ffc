"""Router losses and bias updates on ranks equal one process on all ranks' tokens."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ep_moe import EPContext, MoEConfig, MoELayer, ParallelConfig, Routing, RoutingConfig, RoutingMethod, Tokens
from ep_moe.testing import distributed, rank_device
from ep_moe.training import BiasUpdate, load_balancing_loss, parameter_groups, router_logits, router_z_loss
from tests.fixtures.distributed_cases import batch_of, batches, gather_from_all_ranks
from tests.fixtures.helpers import assert_same, fill

P = ParallelConfig
LAYOUTS = {
    2: [P(dp=2), P(dp=2, ep=1), P(tp=2), P(tp=2, ep=1, etp=2), P(tp=2, tokens=Tokens.SHARDED), P(dp=2, ep=1, etp=2)],
    4: [
        P(dp=4, ep=2),
        P(dp=2, tp=2),
        P(dp=2, tp=2, ep=2, etp=2),
        P(dp=2, tp=2, ep=1, etp=4),
        P(tp=4, ep=2),
        P(dp=2, tp=2, ep=2, tokens=Tokens.SHARDED),
    ],
}
COUNTS = (5, 9, 0, 6)  # tokens of each batch
HIDDEN, EXPERTS, TOP_K = 16, 6, 2
METHOD = RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, correction_bias=True)
CONFIG = MoEConfig(hidden_size=HIDDEN, intermediate_size=16, num_experts=EXPERTS, top_k=TOP_K, routing=METHOD)
# sums of at most 40 tokens times 16 columns in another order: n roundings of 2^-24 each, of the largest entry
BOUND = 40 * HIDDEN * 2.0**-24


def rows(batch, step=0):
    generator = torch.Generator().manual_seed(100 * step + batch)
    return torch.randn(COUNTS[batch], HIDDEN, generator=generator).to(rank_device())


class Gate(torch.nn.Module):
    """A custom router."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(EXPERTS, HIDDEN))
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))

    def forward(self, x):
        logits = x @ self.weight.T
        weights, ids = logits.softmax(-1).topk(TOP_K)
        return Routing(ids, weights, logits)


def two_layers(context, own_router=False):
    made = []
    for number in range(2):
        router = Gate().to(rank_device()) if own_router else None
        layer = fill(MoELayer(CONFIG, context, router=router), seed=number)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            layer.router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator) / 4)
        made.append(layer)
    return torch.nn.ModuleList(made)


def run(layers, x, again=False):
    for layer in layers:
        step = lambda rows, layer=layer: rows + layer(rows) / 64  # noqa: E731
        x = checkpoint(step, x, use_reentrant=False) if again else step(x)
    return x


def losses(layers, x, weight, context, again=False):
    """Return the whole loss and its load balancing part. `weight` scales the rest."""
    with router_logits(layers) as recorded:
        y = run(layers, x, again)
    assert [tuple(logits.shape) for logits in recorded] == [(len(x), EXPERTS)] * 2
    balance = load_balancing_loss(recorded, TOP_K, context=context)
    return weight * y.square().sum() + balance, balance


@functools.cache
def one_process(number, own_router):
    """Return the balancing loss and the gradients of x and of the routers, for `number` batches together."""
    device = rank_device()
    layers = two_layers(EPContext.local(device), own_router)
    x = torch.cat([rows(batch) for batch in range(number)]).requires_grad_()
    whole, balance = losses(layers, x, 1e-3 / number, None)
    whole.backward()
    return balance.detach(), x.grad, [layer.router.weight.grad for layer in layers]


@distributed(2, 4)
@pytest.mark.parametrize("own_router", [False, True])
def test_the_mean_over_ranks_is_one_process(world_size, own_router):
    for parallel in LAYOUTS[world_size]:
        for again in (False, True):
            with EPContext.from_groups(parallel, device=rank_device(), deadline_s=30) as context:
                layout = context.layout
                batch, number = batch_of(layout, dist.get_rank()), batches(layout)
                layers = two_layers(context, own_router)
                x = rows(batch).requires_grad_()
                whole, balance = losses(layers, x, 1e-3, context, again)
                whole.backward()
                wanted, x_gradient, router_gradients = one_process(number, own_router)
                found = gather_from_all_ranks((balance.item(), [layer.router.weight.grad.cpu() for layer in layers]))
                for base in range(0, world_size, layout.split):  # tp ranks with the same tokens
                    same = {loss for loss, _ in found[base : base + layout.split]}
                    assert len(same) == 1, f"{layout}: {same}"
                ranks = found[:: layout.split]
                assert len(ranks) == number
                mean = torch.tensor(sum(loss for loss, _ in ranks) / number)
                torch.testing.assert_close(
                    mean, wanted.cpu(), rtol=BOUND, atol=0, msg=lambda m, at=layout: f"{at}: {m}"
                )
                for at, expected in enumerate(router_gradients):
                    total = sum(gradients[at] for _, gradients in ranks) / number
                    largest = float(expected.abs().max())
                    assert_same(total, expected, f"{layout}, router {at}", atol=4 * BOUND * largest)
                expected = x_gradient.split(COUNTS[:number])[batch]
                assert_same(x.grad / number, expected, f"{layout}, x", atol=4 * BOUND * float(x_gradient.abs().max()))


@distributed(2)
def test_the_balance_alone_of_one_rank(world_size):
    """The balance and z-loss of a rank's own tokens, without an output gradient, equal those of one process.

    Logits recorded on tp ranks carry the gradient of all tokens exactly once.
    """
    device = rank_device()
    plain = two_layers(EPContext.local(device))
    for parallel in (P(tp=2), P(tp=2, ep=1, etp=2), P(dp=2)):
        with EPContext.from_groups(parallel, device=device, deadline_s=30) as context:
            batch = batch_of(context.layout, dist.get_rank())
            gradients = []
            for layers in (plain, two_layers(context)):
                layers.zero_grad()
                with router_logits(layers) as recorded:
                    run(layers, rows(batch))
                (load_balancing_loss(recorded, TOP_K) + router_z_loss(recorded)).backward()
                gradients.append([layer.router.weight.grad for layer in layers])
            for expected, found in zip(*gradients, strict=True):
                assert_same(found, expected, str(parallel), atol=4 * BOUND * float(expected.abs().max()))


@distributed(2)
def test_recording_on_a_part_of_the_ranks(world_size):
    """One dp rank may record router logits while the other does not; the ranks stay in step."""
    with EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=20) as context, torch.no_grad():
        layers, x = two_layers(context), rows(0)
        expected = run(layers, x)
        if dist.get_rank() == 0:
            with router_logits(layers) as recorded:
                found = run(layers, x)
            assert len(recorded) == 2
        else:
            found = run(layers, x)
        assert torch.equal(found, expected)


def trained(layers, context, batches_of, steps=3):
    """Return the biases after `steps` optimizer steps of two micro-batches each."""
    optimizer = torch.optim.SGD(parameter_groups(layers), lr=0.0)
    optimizer.register_step_pre_hook(BiasUpdate(layers, context, speed=0.125))
    for step in range(steps):
        for micro in range(2):
            for batch in batches_of:
                run(layers, rows(batch, 2 * step + micro)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [layer.router.e_score_correction_bias.cpu() for layer in layers]


@distributed(2, 4)
def test_biases_are_those_of_one_process(world_size):
    expected = {}
    for parallel in LAYOUTS[world_size]:
        with EPContext.from_groups(parallel, device=rank_device(), deadline_s=30) as context:
            number = batches(context.layout)
            if number not in expected:
                local = EPContext.local(rank_device())
                expected[number] = trained(two_layers(local), local, range(number))
            batch = batch_of(context.layout, dist.get_rank())
            for biases in gather_from_all_ranks(trained(two_layers(context), context, [batch])):
                for found, wanted in zip(biases, expected[number], strict=True):
                    assert torch.equal(found, wanted), f"{context.layout}: {found} for {wanted}"
    for biases in expected.values():
        assert all(bias.any() for bias in biases)
        assert not torch.equal(*biases)
