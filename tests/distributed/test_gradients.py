"""Backward on ranks against backward in one process.

With a given routing and integer data, all gradients are exact. With the layer's router they are floats, and the bound
is BOUND times the largest entry, for a few hundred float32 additions in another order.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe import EPContext, ExpertMap, MoEConfig, MoELayer, ParallelConfig, Routing, Tokens
from ep_moe.parallel.collectives import sum_gradients
from ep_moe.testing import distributed, rank_device
from ep_moe.weights.parts import etp_shard
from tests.fixtures.distributed_cases import batch_of, batches, gather_from_all_ranks
from tests.fixtures.gradient_cases import BOUND, FLOAT, INTEGER, LAYOUTS, P, data, make
from tests.fixtures.helpers import assert_same, integer_rows

REPLICATED_EXPERTS = {2: [P(dp=2)], 4: [P(dp=4), P(dp=2, tp=2, ep=2, etp=2)]}  # with a redundant map
UNEVEN, ONE_ONLY = (5, 3, 0, 7), (0, 6, 0, 0)


def backward(layer: MoELayer, x: Tensor, routing: Routing | None, behind: Tensor) -> dict[str, Tensor]:
    """Return gradients by name: the parameters', "x" and, if routing is given, "weights"."""
    layer.zero_grad()
    device = layer.device
    x = x.detach().to(device).requires_grad_()
    leaves = {"x": x}
    if routing is None:
        y = layer(x)
    else:
        leaves["weights"] = routing.weights.detach().to(device).requires_grad_()
        y = layer.forward_routed(x, Routing(routing.ids.to(device), leaves["weights"]))
    y.backward(behind.to(device))
    leaves |= dict(layer.named_parameters())
    missing = {name.split(".")[0] for name, leaf in leaves.items() if leaf.grad is None}
    assert missing <= {"router", "shared_experts"}, "of experts zeros, where no row came"
    found = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {name: getattr(gradient, "_local_tensor", gradient).cpu() for name, gradient in found.items()}


@functools.cache
def single(config: MoEConfig) -> MoELayer:
    return make(config, EPContext.local(torch.device("cpu")))


def one_process(config: MoEConfig, parts: list) -> dict[str, Tensor]:
    """Return the gradients of all batches together in one process."""
    layer = single(config)
    x, behind = torch.cat([part[0] for part in parts]), torch.cat([part[2] for part in parts])
    routing = None
    if config == INTEGER:
        routing = Routing(torch.cat([part[1].ids for part in parts]), torch.cat([part[1].weights for part in parts]))
    return backward(layer, x, routing, behind)


def check(config: MoEConfig, layer: MoELayer, counts: tuple[int, ...], what: str) -> None:
    layout, rank = layer.context.layout, dist.get_rank()
    batch, replicated = batch_of(layout, rank), layout.tokens is Tokens.REPLICATED
    parts = [data(config, batch, counts[batch]) for batch in range(batches(layout))]
    expected, found = one_process(config, parts), backward(layer, *parts[batch])

    def compare(actual: Tensor, wanted: Tensor, name: str) -> None:
        atol = 0.0 if config == INTEGER or not wanted.numel() else BOUND * float(wanted.abs().max())
        assert_same(actual, wanted, f"{what}, gradient of {name}", atol=atol)

    for name in ("x", "weights"):
        if name in found:
            compare(found[name], expected[name].split([len(part[0]) for part in parts])[batch], name)
    parameters = {name: gradient for name, gradient in found.items() if "." in name}
    ranks = gather_from_all_ranks(parameters)
    for name, gradient in parameters.items():
        if name.startswith("expert_weights"):
            part = name.split(".")[-1]
            compare(gradient, etp_shard(config, part, expected[name], layout.etp, layout.etp_rank), name)
            twins = [ranks[twin] for twin in range(layout.etp_rank, layout.world, layout.etp)]
            copies = [copy[name] for copy in twins if name in copy]
            assert all(torch.equal(copy, gradient) for copy in copies), f"{what}: copies of {name} differ"

    if config == INTEGER:
        return
    alone = one_process(config, [parts[batch]])
    for name in parameters:
        if name.startswith("expert_weights"):
            continue
        compare(found[name], alone[name], f"{name} of this batch")
        total = sum(gradients[name] for gradients in (ranks[:: layout.tp] if replicated else ranks))
        compare(total, expected[name], f"{name} summed over batches")


@distributed(2, 4)
def test_gradients_equal_one_process(world_size):
    device = rank_device()
    linear = [(parallel, 0) for parallel in LAYOUTS[world_size]]
    replicated = [(parallel, 3) for parallel in REPLICATED_EXPERTS[world_size]]
    for number, (parallel, spare) in enumerate([*linear, *replicated]):
        with EPContext.from_groups(parallel, device=device, deadline_s=30) as context:
            expert_map = ExpertMap.redundant(6, context.layout.ep, spare)
            for at, all2all in enumerate(("allgather", "torch_a2a")):
                what = f"{context.layout}, {all2all}"
                layer = make(INTEGER, context, all2all, expert_map)
                for counts in (UNEVEN, ONE_ONLY):
                    check(INTEGER, layer, counts, f"{what}, T={counts}")
                # gradients through the router depend on the layout, not on the transport
                if world_size == 2 or number % 2 == at:
                    check(FLOAT, make(FLOAT, context, all2all, expert_map), UNEVEN, what)


@distributed(2)
@pytest.mark.parametrize("all2all", ["allgather", "torch_a2a"])
def test_backward_where_only_the_experts_learn(all2all, world_size):
    """Backward works if neither x nor the routing requires a gradient and one rank's experts get no token.

    That rank's backward must still take part in the collectives.
    """
    with EPContext.from_groups(device=rank_device(), deadline_s=10) as context:
        layer = make(INTEGER, context, all2all)
        x = integer_rows(3, 16, dist.get_rank()).to(context.device)
        ids = torch.tensor([[0, -1]] * 3, device=context.device)
        y = layer.forward_routed(x, Routing(ids, torch.ones(3, 2, device=context.device)))
        y.sum().backward()
        for name, parameter in layer.expert_weights.named_parameters():
            expected = dist.get_rank() == 0 and name.startswith("0.")
            assert parameter.grad.any() == expected, f"{name}: zeros, and not None, where no row came"


@distributed(2, 4)
def test_two_calls_before_their_backwards(world_size):
    """Gradients of two calls add up in either order of backward, as each call keeps its own activations."""
    rank = dist.get_rank()
    with EPContext.from_groups(device=rank_device(), deadline_s=30) as context:
        layer = make(INTEGER, context, "torch_a2a")
        parts = [data(INTEGER, 10 * call + rank, 4) for call in range(2)]
        alone = [backward(layer, *part) for part in parts]
        layer.zero_grad()
        device = context.device
        outs = []
        for x, routing, _ in parts:
            outs.append(layer.forward_routed(x.to(device), Routing(routing.ids.to(device), routing.weights.to(device))))
        for y, (_, _, behind) in reversed(list(zip(outs, parts, strict=True))):
            y.backward(behind.to(device))
        for name, parameter in layer.expert_weights.named_parameters():
            total = alone[0][f"expert_weights.{name}"] + alone[1][f"expert_weights.{name}"]
            assert_same(parameter.grad, total, name)


@distributed(2)
def test_a_sum_of_gradients_leaves_what_it_is_given(world_size):
    """`sum_gradients` does not modify the incoming gradient, which another branch may use."""
    with EPContext.from_groups(ParallelConfig(tp=2), device=rank_device()) as context:
        rank = context.rank_groups["tp"].rank
        x = torch.ones(3, 4, device=context.device, requires_grad=True)
        given = torch.full((3, 4), 1.0 + rank, device=context.device)
        (sum_gradients(x, context.rank_groups["tp"]) + x).backward(given)
        assert_same(given, torch.full_like(given, 1.0 + rank), "what was given")
        assert_same(x.grad, torch.full_like(given, 3.0 + 1.0 + rank), "both branches")
