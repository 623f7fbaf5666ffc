"""Backward by the transport's own calls (`nvlink_p2p`) equals backward through autograd (`torch_a2a`) bit for bit.

All numbers are small integers.
"""

import contextlib
import dataclasses
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ep_moe import (
    Activation,
    ConfigError,
    EPContext,
    ExpertMap,
    ExpertsOptions,
    InputError,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    Routing,
)
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.bench import all2all
from ep_moe.experts.base import Experts
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.testing import distributed, rank_device
from tests.emulations.trained_graph import recorded_kernel, stand_in
from tests.fixtures.distributed_cases import same_error
from tests.fixtures.helpers import assert_same, fill, integer_expert, integer_routing, integer_rows
from tests.fixtures.p2p_on_cpu import p2p_on_cpu

CONFIG = MoEConfig(
    hidden_size=16, intermediate_size=16, num_experts=6, top_k=2, activation=Activation.RELU2, expert_bias=True
)
MOST = 8
LAYOUTS = {2: [{"dp": 2}], 4: [{"dp": 4}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}]}
COUNTS = (5, 3, 0, 7), (0, 6, 0, 0)


@contextlib.contextmanager
def pair(sizes, spare=0, **options):
    """Yield a layer over nvlink_p2p and the same layer over torch_a2a."""
    parallel, device = ParallelConfig(**sizes), rank_device()
    with (
        p2p_on_cpu(),
        EPContext.from_groups(parallel, device=device, max_tokens=MOST, deadline_s=30) as context,
    ):
        expert_map = ExpertMap.redundant(6, context.layout.ep, spare) if spare else None
        layers = [
            fill(MoELayer(CONFIG, context, all2all=name, experts="reference", expert_map=expert_map, **own))
            for name, own in (("nvlink_p2p", options), ("torch_a2a", {}))
        ]
        yield layers


def given(layer, tokens, seed):
    device = layer.device
    x = integer_rows(tokens, layer.config.hidden_size, seed).to(device).requires_grad_()
    routing = integer_routing(tokens, CONFIG, seed)
    weights = routing.weights.to(device)
    if tokens:
        weights[0, 0] = 0.0
    return (
        x,
        routing.ids.to(device),
        weights.requires_grad_(),
        integer_rows(tokens, layer.config.hidden_size, seed + 50).to(device),
    )


def run(layer, ids, x, weights):
    return layer.forward_routed(x, Routing(ids, weights))


def grads(layer, x, weights):
    found = {"x": x.grad, "weights": weights.grad}
    return found | {
        name: getattr(p.grad, "_local_tensor", p.grad) for name, p in layer.expert_weights.named_parameters()
    }


def compare(layers, tokens, seed, what):
    found = []
    for layer in layers:
        layer.zero_grad()
        x, ids, weights, behind = given(layer, tokens, seed)
        y = layer.forward_routed(x, Routing(ids, weights))
        y.backward(behind)
        found.append(grads(layer, x, weights) | {"y": y.detach()})
    for name, wanted in found[1].items():
        if found[0][name] is None and wanted is None:
            continue
        wanted = torch.zeros_like(found[0][name]) if wanted is None else wanted
        assert_same(found[0][name], wanted, f"{what}: {name}")


@distributed(2, 4)
@pytest.mark.parametrize(("spare", "to_peers"), [(0, False), (3, False), (3, True)])
def test_gradients_are_those_that_autograd_finds(spare, to_peers, world_size):
    """Gradients equal those of autograd.

    With `to_peers`, experts write results and gradients of rows to their peers' memory themselves.
    """
    for sizes in LAYOUTS[world_size]:
        if spare and sizes.get("etp"):
            continue
        with recorded_kernel() if to_peers else contextlib.nullcontext(), pair(sizes, spare) as layers:
            for counts in COUNTS:
                tokens = counts[dist.get_rank() // (world_size // sizes["dp"])]
                compare(layers, tokens, layers[0].context.layout.dp_rank, f"{sizes}, {counts}")


@distributed(2)
def test_results_and_gradients_are_both_written_to_the_peers(world_size):
    """Results and gradients are both written to the peers, in eager and in recorded calls."""
    if rank_device().type == "cpu":
        stand_in()
    written = mock.patch.object(
        NVLinkP2PDispatcher, "_combine_written", autospec=True, side_effect=NVLinkP2PDispatcher._combine_written
    )
    with recorded_kernel(), pair({"dp": 2}) as (layer, _), written as calls:
        for _ in range(3):
            x, ids, weights, behind = given(layer, 4, dist.get_rank())
            before = calls.call_count
            y = run(layer, ids, x, weights)
            between = calls.call_count
            y.backward(behind)
            assert before < between < calls.call_count
        assert len(layer._graphs.trained) == (rank_device().type == "cpu")


@distributed(2)
def test_a_kernel_of_another_package_takes_no_place_at_the_peers(world_size):
    def compute_saving(self, received):
        return self.compute(received, None), ()

    def gradients(self, received, saved, stored, grad, wanted):
        return Experts.gradients(self, received, saved, stored, grad, wanted)

    own = {"own_backward": True, "compute_saving": compute_saving, "gradients": gradients}
    with mock.patch.multiple(ReferenceExperts, create=True, **own), pair({"dp": 2}) as layers:
        compare(layers, 5, dist.get_rank(), "without peer_out")


def freeze_experts_of(rank, layer):
    """Freeze the experts that a rank holds, with their copies on other ranks."""
    held = {str(expert) for expert in layer.placement.expert_map.local(rank)}
    for name, parameter in layer.expert_weights.named_parameters():
        if name.split(".")[0] in held:
            parameter.requires_grad_(False)


@distributed(2)
@pytest.mark.parametrize("options", [{}, {"pipeline": 3}], ids=["whole", "in parts"])
def test_a_rank_whose_copies_do_not_learn(options, world_size):
    """A rank whose experts are all frozen takes part in the gradient sums of its peer.

    It does so where the peer sums: after all exchanges of backward.
    """
    with pair({"dp": 2}, 3, **options) as layers:
        for layer in layers:
            freeze_experts_of(1, layer)
        for seed in range(2):
            compare(layers, (8, 2)[dist.get_rank()], seed, "frozen on rank 1")


@distributed(2)
def test_copies_that_begin_to_learn_later(world_size):
    """Replicas may start to learn later, and stop again."""
    with pair({"dp": 2}, 3) as layers:
        for learns in (False, True, False):
            for layer in layers:
                layer.expert_weights.requires_grad_(learns)
            compare(layers, (8, 2)[dist.get_rank()], 0, f"rank {dist.get_rank()} learns: {learns}")


@distributed(2)
def test_gradients_pass_through_quantised_experts(world_size):
    """Rows and routing weights get gradients through quantized experts.

    Quantized codes have no gradient. MXFP4 represents these integers exactly.
    """
    config = dataclasses.replace(CONFIG, hidden_size=32, intermediate_size=32)
    with p2p_on_cpu(), EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        layers = [
            fill(MoELayer(config, context, all2all=name, experts="reference", quantization="mxfp4"))
            for name in ("nvlink_p2p", "torch_a2a")
        ]
        compare(layers, (4, 3)[dist.get_rank()], dist.get_rank(), "codes")


@distributed(2)
def test_parts_are_trained_one_after_the_other(world_size):
    with pair({"dp": 2}, pipeline=3) as layers:
        compare(layers, (8, 2)[dist.get_rank()], dist.get_rank(), "in parts")


@distributed(2)
def test_calls_in_flight_have_their_own_rows(world_size):
    """Two forwards before their backwards keep rows of their own, in either order of backward."""
    with pair({"dp": 2}) as (layer, _):
        rank = dist.get_rank()
        seeds = (rank, rank + 10)

        def backward(order):
            layer.zero_grad()
            calls = [given(layer, 4, seed) for seed in seeds]
            outs = [layer.forward_routed(x, Routing(ids, weights)) for x, ids, weights, _ in calls]
            for i in order:
                outs[i].backward(calls[i][3])
            return [grads(layer, x, weights) for x, _, weights, _ in calls]

        alone = []
        for i in (0, 1):
            layer.zero_grad()
            x, ids, weights, behind = given(layer, 4, seeds[i])
            layer.forward_routed(x, Routing(ids, weights)).backward(behind)
            alone.append(grads(layer, x, weights))
        for order in ((0, 1), (1, 0)):
            both = backward(order)
            for i in (0, 1):
                for name in ("x", "weights"):
                    assert_same(both[i][name], alone[i][name], f"{order}, call {i}: {name}")
            for name in alone[0].keys() - {"x", "weights"}:
                assert_same(both[0][name], alone[0][name] + alone[1][name], f"{order}: {name}")


@distributed(2)
def test_some_gradients_alone_leave_the_ranks_in_step(world_size):
    """Calls after a backward for only x, only the experts, or nothing are right."""
    with pair({"dp": 2}) as layers:
        layer, rank = layers[0], dist.get_rank()
        x, ids, weights, behind = given(layer, 4, rank)
        y = layer.forward_routed(x, Routing(ids, weights))
        (alone,) = torch.autograd.grad(y, [x], behind)
        y = layer.forward_routed(x.detach(), Routing(ids, weights.detach()))
        y.backward(behind)
        assert any(p.grad is not None for p in layer.expert_weights.parameters()) == bool(
            layer.expert_weights.slots_of_expert
        )
        layer.forward_routed(x, Routing(ids, weights))  # no backward
        with torch.no_grad():
            layer.forward_routed(x, Routing(ids, weights))
        compare(layers, 4, rank, "behind them")
        x.grad = None
        layer.forward_routed(x, Routing(ids, weights)).backward(behind)
        assert_same(x.grad, alone, "x alone")


@distributed(2)
def test_a_second_derivative_is_refused(world_size):
    """Double backward is refused. It would silently be zero, as the transport's backward is in no graph."""
    with pair({"dp": 2}) as (layer, _):
        x, ids, weights, given_behind = given(layer, 4, dist.get_rank())
        y = layer.forward_routed(x, Routing(ids, weights))
        for behind in (given_behind, given_behind.clone().requires_grad_()):
            with pytest.raises(InputError, match="second-order gradients"):
                torch.autograd.grad(y, [x], behind, create_graph=True, retain_graph=True)


@distributed(2)
def test_activation_checkpointing(world_size):
    with pair({"dp": 2}) as layers:
        rank = dist.get_rank()
        for layer in layers[:1]:
            x, ids, weights, behind = given(layer, 4, rank)
            layer.forward_routed(x, Routing(ids, weights)).backward(behind)
            plain = grads(layer, x, weights)
            layer.zero_grad()
            x, ids, weights, behind = given(layer, 4, rank)
            call = functools.partial(run, layer, ids)
            y = checkpoint(call, x, weights, use_reentrant=False)
            y.backward(behind)
            for name, wanted in grads(layer, x, weights).items():
                assert_same(wanted, plain[name], name)
        compare(layers, 4, rank, "behind it")


def kept_by(layer, tokens):
    """Return a call's result, and the bytes that autograd saves beside parameters and the caller's tensors."""
    x, ids, weights, _ = given(layer, tokens, dist.get_rank())
    held = {one.untyped_storage().data_ptr() for one in [x, *layer.parameters()]}
    kept = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in held:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer.forward_routed(x, Routing(ids, weights))
    return y, sum(kept.values())


@distributed(2)
def test_what_a_call_keeps_is_in_the_plan(world_size):
    """`plan(train_tokens=)` counts every saved tensor, with room for the rows of the token limit."""
    with pair({"dp": 2}) as layers:
        layer = layers[0]
        for tokens in (MOST, 3):
            assert layer.plan(train_tokens=tokens)["saved"] == kept_by(layer, tokens)[1], tokens
        with layer.context.token_limit(4):
            y, kept = kept_by(layer, 3)
            assert layer.plan(train_tokens=3)["saved"] == kept
        plan = layer.plan(train_tokens=MOST)
        assert plan["saved"] > kept
        assert plan["gradients"] == sum(p.numel() * p.itemsize for p in layer.parameters())
        y.sum().backward()
        (made,) = (dispatcher for (name, _), dispatcher in layer.context._pool.items() if name == "nvlink_p2p")
        assert plan["transport"] == layer.plan()["transport"] == made.buffer_bytes(made.dispatch_shape)
        with pytest.raises(
            ConfigError, match=r"train_tokens=8: the bytes that experts=reference over all2all=torch_a2a saves"
        ):
            layers[1].plan(train_tokens=MOST)
        with pytest.raises(ConfigError, match="train_tokens must be an integer of at least 1, got 0"):
            layer.plan(train_tokens=0)
        with pytest.raises(ConfigError, match="train_tokens=9 is more than the token limit, max_tokens=8"):
            layer.plan(train_tokens=MOST + 1)


@distributed(2)
def test_what_a_call_keeps_over_buffers_that_grow(world_size):
    with p2p_on_cpu(), EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        layer = fill(MoELayer(CONFIG, context, all2all="nvlink_p2p", experts="reference"))
        plan = layer.plan(train_tokens=5)
        y, kept = kept_by(layer, 5)
        assert plan["saved"] == kept
        y.sum().backward()
        assert plan["transport"] == sum(one.held_bytes() for one in context._pool.values())


@distributed(2)
def test_recomputed_steps_dispatch_once(world_size):
    """`recompute=True` gives equal gradients, and its backward sends only gradients, no row or route again."""
    with pair({"dp": 2}) as (_, plain):
        context, rank = plain.context, dist.get_rank()
        for name in ("nvlink_p2p", "allgather", "torch_a2a"):
            options = ExpertsOptions(recompute=True)
            layer = fill(MoELayer(CONFIG, context, all2all=name, experts="reference", options=options))
            compare([layer, plain], 5 + rank, rank, name)
            dispatcher = layer._dispatcher()
            with mock.patch.object(dispatcher, "_dispatch", wraps=dispatcher._dispatch) as dispatched:
                x, ids, weights, behind = given(layer, 4, rank)
                layer.forward_routed(x, Routing(ids, weights)).backward(behind)
            assert dispatched.call_count == 1 + dispatcher.capabilities.adjoint, name


@distributed(2)
def test_weights_that_are_written_between_forward_and_backward_are_named(world_size):
    """Weights written between forward and backward raise the same error on all ranks.

    The check comes before autograd's own, which says less and only on some ranks.
    """
    with pair({"dp": 2}) as (layer, _):
        x, ids, weights, grad = given(layer, 3, dist.get_rank())
        out = run(layer, ids, x, weights)
        layer.update_expert(0, **integer_expert(CONFIG, 0))
        found = same_error(InputError, lambda: out.backward(grad))
        assert "weights were written (update_expert" in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for CUDA graphs on the CPU")
@distributed(2)
def test_the_benchmark_of_transports_with_their_backward(world_size):
    """The benchmark of a transport's backward computes right values.

    Experts return their input, so each rank with an expert for a row adds the row once, and its gradient.
    """
    tokens, hidden = 5, 64

    def timed(calls, **_):
        out, (back, by_weight) = (call() for call in calls)
        owner = routing.ids // (all2all.EXPERTS // 2)
        ranks = sum((owner == rank).any(1, keepdim=True).float() for rank in range(2))
        assert_same(out.float(), x.float() * ranks)
        assert_same(back.float(), x.float() * ranks)
        assert_same(by_weight, torch.ones_like(by_weight))
        return [1.0, 3.0]

    stubs = mock.patch.object(all2all, "replayed", timed), mock.patch.object(torch.cuda, "synchronize")
    with (
        contextlib.ExitStack() as stack,
        p2p_on_cpu(),
        EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context,
    ):
        for stub in stubs:
            stack.enter_context(stub)
        _, routing = all2all.inputs(context, hidden, tokens)
        x = integer_rows(tokens, hidden, dist.get_rank()).to(all2all.DTYPE)
        line = all2all.TransportLine("nvlink_p2p", "plain", hidden, tokens, 0.0, False, 1, 1.0)
        all2all.time_transport(context, line, x, routing, backward=True)
        assert (line.us, line.backward_us, line.raw_us) == (1.0, 3.0, None)
