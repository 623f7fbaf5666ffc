"""Backward on ranks against backward in one process.

With a given routing and integer data, all gradients are exact. With the layer's router they are floats, and the bound
is BOUND times the largest entry, for a few hundred float32 additions in another order.
"""

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ep_moe import (
    Activation,
    EPContext,
    ExpertMap,
    ExpertsOptions,
    InputError,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    Routing,
    Tokens,
    training,
)
from ep_moe.execution import rank_comparison
from ep_moe.parallel.collectives import sum_gradients
from ep_moe.testing import distributed, rank_device
from ep_moe.weights.parts import etp_shard
from tests.fixtures.distributed_cases import batch_of, batches, gather_from_all_ranks, same_error
from tests.fixtures.helpers import assert_same, fill, integer_routing, integer_rows
from tests.fixtures.p2p_on_cpu import p2p_on_cpu

BOUND = 1e-5
INTEGER = MoEConfig(
    hidden_size=16, intermediate_size=16, num_experts=6, top_k=2, activation=Activation.RELU2, expert_bias=True
)
FLOAT = MoEConfig(
    hidden_size=16,
    intermediate_size=16,
    num_experts=6,
    top_k=3,
    expert_bias=True,
    shared_intermediate_size=16,
    shared_gate=True,
)
P = ParallelConfig
LAYOUTS = {
    2: [
        P(dp=2),
        P(tp=2),
        P(tp=2, tokens=Tokens.SHARDED),
        P(dp=2, ep=1, etp=2),
        P(tp=2, ep=1, etp=2),
        P(dp=2, ep=1),
    ],
    4: [
        P(dp=4),
        P(tp=4),
        P(dp=2, tp=2),
        P(dp=4, ep=2, etp=2),
        P(tp=4, ep=2, etp=2),
        P(dp=2, tp=2, ep=2, etp=2),
        P(dp=2, tp=2, ep=1, etp=4),
        P(tp=4, tokens=Tokens.SHARDED),
        P(dp=2, tp=2, ep=2, etp=2, tokens=Tokens.SHARDED),
        P(dp=4, ep=2),
        P(tp=4, ep=2),
    ],
}
REPLICATED_EXPERTS = {2: [P(dp=2)], 4: [P(dp=4), P(dp=2, tp=2, ep=2, etp=2)]}  # with a redundant map
UNEVEN, ONE_ONLY = (5, 3, 0, 7), (0, 6, 0, 0)


def make(config: MoEConfig, context: EPContext, all2all: str = "auto", expert_map: ExpertMap | None = None) -> MoELayer:
    """Return a layer with the same weights on all ranks: integer experts for INTEGER, floats otherwise."""
    layer = MoELayer(config, context, all2all=all2all, expert_map=expert_map)
    if config == INTEGER:
        return fill(layer)
    generator = torch.Generator().manual_seed(1)
    for expert in range(config.num_experts):
        sizes = {"w13": (32, 16), "w2": (16, 16), "w13_bias": (32,), "w2_bias": (16,)}
        layer.update_expert(expert, **{n: torch.randn(s, generator=generator) / 4 for n, s in sizes.items()})
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not name.startswith("expert_weights"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return layer


def data(config: MoEConfig, batch: int, tokens: int) -> tuple[Tensor, Routing | None, Tensor]:
    """Return x, the routing (None: the layer routes) and the gradient of the output."""
    if config == INTEGER:
        x, behind = integer_rows(tokens, 16, batch), integer_rows(tokens, 16, batch + 50)
        return x, integer_routing(tokens, config, batch), behind
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(tokens, 16, generator=generator), None, torch.randn(tokens, 16, generator=generator)


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


@distributed(2)
@pytest.mark.parametrize("of", ["x", "parameters"])
def test_gradients_of_gradients_are_refused(of, world_size):
    """Double backward is refused.

    Second derivatives would lack what the backward of a collective or of a sum contributes.
    """
    for parallel in LAYOUTS[2]:
        with EPContext.from_groups(parallel, device=rank_device(), deadline_s=30) as context:
            if of == "x" and context.layout.lockstep == 1:
                continue  # no collective for rows
            if of == "parameters" and context.layout.etp > 1 and torch.__version__ < "2.13":
                continue  # before torch 2.13, `DTensor.to_local` silently has no second derivative
            layer = make(FLOAT, context, "torch_a2a")
            x = data(FLOAT, dist.get_rank() // context.layout.tp, 4)[0].to(context.device)
            wanted = [x.requires_grad_()] if of == "x" else list(layer.expert_weights.parameters())
            for loss in (lambda y: y.square().sum(), torch.sum):
                with pytest.raises(InputError, match="second-order gradients"):
                    torch.autograd.grad(loss(layer(x)), wanted, create_graph=True)
            layer(x).sum().backward()


@distributed(2)
@pytest.mark.parametrize("who", ["all ranks", "rank 1"])
def test_a_batch_of_gradients_is_refused(who, world_size):
    """`is_grads_batched=True` is refused on all ranks, as no collective supports it.

    If only one rank asks for it, the others raise instead of waiting.
    """
    if who == "rank 1" and rank_device().type != "cpu":
        pytest.skip("on GPUs ranks exchange nothing ahead of a collective of backward")
    batched = who == "all ranks" or dist.get_rank() == 1
    for parallel in LAYOUTS[2]:
        with EPContext.from_groups(parallel, device=rank_device(), deadline_s=30) as context:
            apart = context.layout.tp > 1 and context.layout.ep == 1  # ranks do not compare ahead of a sum
            if context.layout.lockstep == 1 or (apart and who == "rank 1"):
                continue
            layer = make(FLOAT, context, "torch_a2a")
            x = data(FLOAT, dist.get_rank() // context.layout.tp, 4)[0].to(context.device).requires_grad_()

            def ask(layer=layer, x=x):
                y = layer(x)
                given = torch.ones(2, *y.shape, device=y.device) if batched else torch.ones_like(y)
                torch.autograd.grad(y, x, given, is_grads_batched=batched)

            assert "is_grads_batched=True" in same_error(InputError, ask)
            layer(x).sum().backward()


@distributed(2)
@pytest.mark.parametrize(("ep", "exact"), [(1, False), (2, False), (2, True)])
def test_a_batch_of_gradients_of_one_rank_is_refused_on_all(ep, exact, world_size):
    """With ep < dp ranks meet in the sum of the experts' gradients only."""
    if rank_device().type != "cpu":
        pytest.skip("on GPUs ranks exchange nothing ahead of a collective of backward")
    batched = dist.get_rank() == 1
    with EPContext.from_groups(P(dp=2, ep=ep), device=rank_device(), deadline_s=30) as context:
        config = dataclasses.replace(FLOAT, expert_bias=False) if exact else FLOAT
        layer = fill(MoELayer(config, context, options=ExpertsOptions(exact=exact)))
        x = integer_rows(3, 16, dist.get_rank()).requires_grad_()

        def ask():
            y = layer(x)
            given = torch.ones(2, *y.shape) if batched else torch.ones_like(y)
            torch.autograd.grad(y, [x, *layer.expert_weights.parameters()], given, is_grads_batched=batched)

        assert "is_grads_batched=True" in same_error(InputError, ask)
        layer(x).sum().backward()


@distributed(2)
def test_a_batch_of_gradients_is_refused_by_a_transport_with_a_backward_of_its_own(world_size):
    with p2p_on_cpu(), EPContext.from_groups(device=rank_device(), deadline_s=30, max_tokens=8) as context:
        layer = make(FLOAT, context, "nvlink_p2p")
        x = data(FLOAT, dist.get_rank(), 4)[0].to(context.device).requires_grad_()
        y = layer(x)
        given = torch.ones(2, *y.shape, device=y.device)
        assert "is_grads_batched=True" in same_error(
            InputError, lambda: torch.autograd.grad(y, x, given, is_grads_batched=True)
        )
        layer(x).sum().backward()


@distributed(2)
def test_forward_mode_is_refused(world_size):
    with EPContext.from_groups(device=rank_device(), deadline_s=30) as context:
        layer = make(FLOAT, context)
        x = data(FLOAT, dist.get_rank(), 4)[0].to(context.device)
        with forward_ad.dual_level(), pytest.raises(InputError, match="forward-mode AD"):
            layer(forward_ad.make_dual(x, x))
        layer(x)


@distributed(2)
def test_ranks_with_other_numbers_of_micro_batches_are_named(world_size):
    """Ranks with different numbers of micro-batches are named in the error.

    One averages gradients while the other is in a layer's call. gloo would end the process over sizes that differ.
    """
    if rank_device().type != "cpu":
        pytest.skip("on GPUs the comparison would wait for the device")
    rank = dist.get_rank()
    with EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=20) as context:
        layer, x = fill(MoELayer(FLOAT, context)), integer_rows(3, 16, rank)
        for after in (training.sync_gradients, functools.partial(training.clip_grad_norm_, max_norm=1.0)):
            layer(x).sum().backward()
            training.sync_gradients(layer, context)

            def longer_on_one(after=after):
                if rank:
                    layer(x).sum().backward()
                after(layer, context)

            text = same_error(InputError, longer_on_one)
            assert "rank 0 is in 'sync_gradients', rank 1 in 'moe0'" in text.replace(
                "clip_grad_norm_", "sync_gradients"
            )


@distributed(2)
@pytest.mark.parametrize("ep", [1, 2])
def test_ranks_in_the_backward_of_different_layers_are_named(ep, world_size):
    """A model may skip a layer on some ranks.

    With ep < dp forward exchanges nothing, and the sum over EP groups would add gradients of two layers.
    """
    if rank_device().type != "cpu":
        pytest.skip("on GPUs the comparison would wait for the device")
    with EPContext.from_groups(P(dp=2, ep=ep), device=rank_device(), deadline_s=20) as context:
        layers, x = [MoELayer(FLOAT, context) for _ in range(2)], integer_rows(3, 16, dist.get_rank()).to(rank_device())
        losses = [layer(x).sum() for layer in layers]
        text = same_error(InputError, losses[dist.get_rank()].backward)
        assert "rank 0 is in 'the backward of moe0', rank 1 in 'the backward of moe1'" in text


@distributed(2)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_norm": 0.5}, "clip_grad_norm_ got max_norm=1.0 on rank 0, and max_norm=0.5 on rank 1"),
        ({"max_norm": -1}, "clip_grad_norm_ got max_norm=1.0 on rank 0, and max_norm=-1.0 on rank 1"),
        ({"norm_type": 1}, "clip_grad_norm_ got norm_type=2.0 on rank 0, and norm_type=1.0 on rank 1"),
        ({"norm_type": "inf"}, "clip_grad_norm_ got norm_type=2.0 on rank 0, and norm_type='inf' on rank 1"),
    ],
)
def test_ranks_that_clip_otherwise_are_named(given, words, world_size):
    """Ranks that pass different arguments to `clip_grad_norm_` are named in the error.

    They would train different models, or one would raise while its peer waits.
    """
    if rank_device().type != "cpu":
        pytest.skip("on GPUs the comparison would wait for the device")
    with EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=20) as context:
        layer = fill(MoELayer(FLOAT, context))
        layer(integer_rows(3, 16, dist.get_rank())).sum().backward()
        own = {"max_norm": 1.0} | (given if dist.get_rank() else {})
        assert words in same_error(InputError, lambda: training.clip_grad_norm_(layer, context, **own))
        assert training.clip_grad_norm_(layer, context, 1 if dist.get_rank() else 1.0).isfinite()


@distributed(2)
@pytest.mark.parametrize("first", [True, False])
def test_gpus_in_the_backward_of_different_layers_are_named(first, world_size, monkeypatch):
    """GPUs compare the first sum of each layer on the host, and the order of sums in later backwards.

    They compare nothing in the third sum. The fourth names the ranks.
    """
    monkeypatch.setattr(rank_comparison, "meets_before_sums", lambda device: False)
    with EPContext.from_groups(P(dp=2, ep=1), device=rank_device(), deadline_s=20) as context:
        layers, x = [MoELayer(FLOAT, context) for _ in range(2)], integer_rows(3, 16, dist.get_rank()).to(rank_device())
        other = dist.get_rank()

        def backward(odd):
            losses = [layer(x).sum() for layer in layers]
            for at in range(2):
                losses[at ^ odd].backward()

        if first:
            text = same_error(InputError, lambda: backward(other))
            assert "rank 0 is in 'the backward of moe0', rank 1 in 'the backward of moe1'" in text
        else:
            for odd in (0, 0, other):
                backward(odd)
            text = same_error(InputError, lambda: backward(0))
            assert text.startswith("the backward of moe0: the ranks run backward of different calls")
        backward(0)


class Counted(torch.nn.Module):
    """A parametrization whose state changes with each access, as that of spectral_norm."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight


@distributed(1, 2)
def test_a_call_runs_the_parametrization_of_a_router_once(world_size):
    for sizes in [{"dp": 2}, {"tp": 2}] if world_size == 2 else [{}]:
        with EPContext.from_groups(P(**sizes), device=rank_device(), deadline_s=20) as context:
            layer, counted = fill(MoELayer(FLOAT, context)), Counted()
            parametrize.register_parametrization(layer.router, "weight", counted)
            x = integer_rows(3, 16, 0).to(context.device)
            layer(x)
            for number in range(2):
                counted.calls = 0
                with torch.set_grad_enabled(bool(number)):
                    layer(x)
                assert counted.calls == 1, sizes


class OwnRouter(torch.nn.Module):
    """A custom router whose parameters are its own, or another module's."""

    def __init__(self, gate, *, owned):
        super().__init__()
        self.gates = [gate]
        if owned:
            self.gate = gate

    def forward(self, x):
        weights, ids = self.gates[0](x).softmax(-1).topk(FLOAT.top_k)
        return Routing(ids, weights)


@distributed(2)
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2}], ids=str)
def test_a_router_trains_what_it_holds(sizes, world_size):
    """A custom router under tp that trains tensors other than its parameters is refused.

    Under tp each rank routes a share of the rows, and the layer sums the gradients of the router's parameters only.
    """
    torch.manual_seed(0)
    gate = torch.nn.Linear(16, FLOAT.num_experts, bias=False)
    x = integer_rows(6, 16, 0) / 8
    with EPContext.local(torch.device("cpu")) as alone:
        layer = fill(MoELayer(FLOAT, alone, router=OwnRouter(gate, owned=True)))
        layer(x).sum().backward()
    wanted = gate.weight.grad.clone()
    with EPContext.from_groups(P(**sizes), device=rank_device(), deadline_s=20) as context:
        gate, x = gate.to(context.device), x.to(context.device)
        for router in (OwnRouter(gate, owned=False), OwnRouter(gate, owned=False).forward):
            layer = fill(MoELayer(FLOAT, context, router=router))
            with torch.no_grad():
                layer(x)
            given = x + torch.zeros_like(x, requires_grad=True)  # what precedes the rows is no part of it
            if "tp" in sizes:
                with pytest.raises(
                    InputError, match=r"router= trains a tensor of shape \[\d+, 16\] that is not one of its parameters"
                ):
                    layer(given)
            else:
                layer(given).sum().backward()
            fixed = OwnRouter(lambda x: x @ gate.weight.detach().T, owned=False)
            fill(MoELayer(FLOAT, context, router=fixed))(given).sum().backward()
        gate.weight.grad = None
        fill(MoELayer(FLOAT, context, router=OwnRouter(gate, owned=True)))(x).sum().backward()
        torch.testing.assert_close(gate.weight.grad.cpu(), wanted, rtol=0, atol=BOUND * float(wanted.abs().max()))


class Operations(TorchDispatchMode):
    """Record the names of operations, as selective checkpointing counts them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is not torch.ops.aten.detach.default:  # selective checkpointing ignores it too
            self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


@distributed(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["in torch", "by kernels where they run"])
def test_a_repeated_call_has_the_operations_of_the_first_one(dtype, world_size):
    """A recomputed call runs the same operations as the first one.

    The first call compares ranks in addition. Selective checkpointing finds saved results by operation number.
    """
    config = dataclasses.replace(FLOAT, hidden_size=256, intermediate_size=128, expert_bias=False)
    for parallel in LAYOUTS[2] if world_size == 2 else [P()]:
        with EPContext.from_groups(parallel, device=rank_device(), deadline_s=20) as context:
            torch.manual_seed(0)
            layer = MoELayer(config, context, dtype=dtype)
            x = torch.randn(4, 256, device=context.device, dtype=dtype).requires_grad_()
            forward, again = Operations(), Operations()
            modes = functools.partial(lambda *both: both, forward, again)
            checkpoint(layer, x, use_reentrant=False, context_fn=modes).sum().backward()
            assert again.names, parallel
            assert again.names == forward.names[: len(again.names)], parallel
