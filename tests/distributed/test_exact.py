"""`ExpertsOptions(exact=True)`: a token's bits equal those of one process that gets this token alone.

Every rank draws the same examples (seeded, without a database), as in test_property.py.
"""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, seed
from hypothesis import strategies as st

from ep_moe import (
    BackendUnavailable,
    EPContext,
    ExpertMap,
    ExpertsOptions,
    InputError,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    Routing,
    RoutingConfig,
    RoutingMethod,
    Tokens,
)
from ep_moe.all2all.nvlink_p2p import reference
from ep_moe.execution import exact_exchange
from ep_moe.runtime import batch_invariant
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import batch_of, batches, gather_from_all_ranks
from tests.fixtures.helpers import same_bits
from tests.fixtures.p2p_on_cpu import p2p_on_cpu
from tests.fixtures.random_examples import random_examples

EXPERTS, POOL, HIDDEN = 7, 40, 320  # with 320 columns, MKL's kernel depends on the number of rows
EXACT = ExpertsOptions(exact=True)
SOFTMAX = MoEConfig(
    hidden_size=HIDDEN,
    intermediate_size=72,
    num_experts=EXPERTS,
    top_k=3,
    shared_intermediate_size=24,
    shared_gate=True,
    routing=RoutingConfig(method=RoutingMethod.SOFTMAX_TOPK, renormalize=True),
)
SIGMOID = dataclasses.replace(
    SOFTMAX,
    num_experts=8,
    top_k=2,
    expert_bias=True,
    shared_gate=False,
    routing=RoutingConfig(
        method=RoutingMethod.SIGMOID_TOPK, num_groups=4, top_groups=2, correction_bias=True, renormalize=True,
        scaling_factor=2.5, bias=True,
    ),
)  # fmt: skip
P = ParallelConfig
LAYOUTS = {
    1: [P()],
    2: [P(dp=2), P(tp=2), P(dp=2, ep=1)],
    4: [P(dp=4), P(tp=4), P(dp=2, tp=2), P(dp=4, ep=2)],
    8: [P(dp=8), P(dp=4, tp=2)],
}
TRANSPORTS = ("allgather", "torch_a2a", "nvlink_p2p", "local")
ROUNDS = {1: 10, 2: 16, 4: 12, 8: 5}


def rows(dtype=torch.float32):
    return torch.randn(POOL, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def build(config, context, **options):
    torch.manual_seed(0)
    return MoELayer(config, context, options=EXACT, **options).to(context.device)


def alone(config, dtype=torch.float32):
    """Return outputs and gradients of x for all tokens, from one process that gets one token per call."""
    outs, gradients = [], []
    with EPContext.local(rank_device()) as context:
        layer = build(config, context, dtype=dtype)
        x = rows(dtype).to(context.device)
        for token in x.split(1):
            leaf = token.clone().requires_grad_()
            out = layer(leaf)
            outs.append(out.detach())
            gradients += torch.autograd.grad(out, leaf, weighed(token))
    return torch.cat(outs), torch.cat(gradients)


def weighed(x):
    """Return a gradient of the output that depends on each token's own row."""
    return x.flip(-1) * 0.5


@st.composite
def expert_maps(draw, experts: int, ranks: int) -> ExpertMap:
    kind = draw(st.sampled_from(["linear", "round_robin", "redundant", "arbitrary"]))
    if kind == "linear":
        return ExpertMap.linear(experts, ranks)
    if kind == "round_robin":
        return ExpertMap.round_robin(experts, ranks)
    if kind == "redundant":
        return ExpertMap.redundant(experts, ranks, draw(st.integers(0, experts * (ranks - 1))))
    holders = [draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in range(experts)]
    slots = [draw(st.permutations([e for e in range(experts) if r in holders[e]] + [-1])) for r in range(ranks)]
    return ExpertMap.from_ranks(slots, experts)


def differences(world_size: int, examples: int, config: MoEConfig, dtype: torch.dtype) -> list[str]:
    """Return a description of each result whose bits differ from those of a token alone, on any rank."""
    device, contexts, wrong = rank_device(), {}, []
    outs, gradients = alone(config, dtype)
    x = rows(dtype).to(device)

    @seed(world_size)
    @random_examples(examples)
    @given(data=st.data())
    def example(data: st.DataObject) -> None:
        layout = data.draw(st.sampled_from(LAYOUTS[world_size]))
        parallel = dataclasses.replace(layout, tokens=data.draw(st.sampled_from(list(Tokens))))
        key = (parallel, data.draw(st.sampled_from([None, 12])))
        if key not in contexts:
            contexts[key] = EPContext.from_groups(parallel, device=device, deadline_s=60, max_tokens=key[1])
        context = contexts[key]
        ranks = context.layout.ep
        all2all = data.draw(st.sampled_from(TRANSPORTS[: 4 if ranks == 1 else 3]))
        parts = all2all == "nvlink_p2p" and key[1] is not None
        layer = build(
            config,
            context,
            dtype=dtype,
            expert_map=data.draw(expert_maps(config.num_experts, ranks)),
            all2all=all2all,
            pipeline=data.draw(st.sampled_from([None, 1, 5])) if parts else None,
        )
        sizes = st.lists(st.integers(0, POOL - 1), max_size=12)
        drawn = [data.draw(sizes) for _ in range(batches(context.layout))]
        mine = drawn[batch_of(context.layout, dist.get_rank())]
        leaf = x[mine].requires_grad_()
        y = layer(leaf)
        y.backward(weighed(leaf.detach()))
        problem = None if same_bits(y, outs[mine]) else "out"
        if not same_bits(leaf.grad, gradients[mine]):
            problem = f"{problem}, gradient of x"
        with torch.no_grad():  # the transport may combine in another way then: one row per route
            if not same_bits(layer(leaf), outs[mine]):
                problem = f"{problem}, out without gradients"
        if any(found := gather_from_all_ranks(problem)):
            wrong.append(f"{found}: {context.layout}, {layer.choice}, {layer.placement.expert_map}, {drawn}")

    with p2p_on_cpu():
        example()
        for context in contexts.values():
            context.destroy()
    return wrong


@distributed(1, 2, 4, 8, deadline_s=400)
def test_a_tokens_bits_are_its_own_under_every_layout_map_transport_and_batch(world_size):
    assert differences(world_size, ROUNDS[world_size], SOFTMAX, torch.float32) == []


@distributed(2, 4, deadline_s=400)
def test_with_groups_of_experts_and_biases_in_bf16(world_size):
    assert differences(world_size, 6, SIGMOID, torch.bfloat16) == []


# --- gradients of weights ---------------------------------------------------------------------------------------------


def of_experts(layer, x):
    """Return the gradients of this rank's experts by parameter name."""
    layer(x).backward(weighed(x))
    found = {}
    for name, parameter in layer.expert_weights.named_parameters():
        found[name] = parameter.grad
    return found


@distributed(1, 2, 4, deadline_s=300)
def test_gradients_of_experts_are_sums_in_the_order_of_ranks_and_tokens(world_size):
    device = rank_device()
    x = rows().to(device)
    with EPContext.local(device) as context:
        wanted = of_experts(build(SIGMOID, context), x)
    cuts = {1: [0, 40], 2: [0, 33, 40], 4: [0, 3, 3, 38, 40]}[world_size]
    rank = dist.get_rank()
    with p2p_on_cpu(), EPContext.from_groups(P(dp=world_size), device=device, deadline_s=60) as context:
        for all2all in ("allgather", "torch_a2a", "nvlink_p2p"):
            for expert_map in (ExpertMap.linear(8, world_size), ExpertMap.round_robin(8, world_size)):
                layer = build(SIGMOID, context, expert_map=expert_map, all2all=all2all)
                found = of_experts(layer, x[cuts[rank] : cuts[rank + 1]])
                wrong = [name for name, gradient in found.items() if not same_bits(gradient, wanted[name])]
                assert gather_from_all_ranks(wrong) == [[]] * world_size, (all2all, expert_map)


# --- faults -----------------------------------------------------------------------------------------------------------


def in_rank_order(self, work=None):
    """Combine in the order that plain transports use: routes of one rank first, then ranks in order."""
    rows, found = self._exchange.run(work)
    order = self._exchange.routing.ids.view_as(self._weights).argsort(dim=1, descending=True, stable=True)
    by_route = rows.view(*self._weights.shape, HIDDEN)
    rows = by_route.gather(1, order.unsqueeze(2).expand_as(by_route)).flatten(0, 1)
    return exact_exchange.combined(rows, self._ids.gather(1, order), self._weights.gather(1, order)), found


def few_rows(self, x, part):
    return x[part]  # a tile with as many rows as there are


def whole(function, tensors):
    return [out.view(tensors[0].shape) for out in function(*[tensor.reshape(-1) for tensor in tensors])]


def last_route_first(workspace, tokens, bound, routes=reference._routes):
    return reversed(list(routes(workspace, tokens, bound)))


PLANTED = {
    "the order within nvlink_p2p": mock.patch.object(reference, "_routes", last_route_first),
    "the order of ranks": mock.patch.object(exact_exchange.ExactExchange, "run", in_rank_order),
    "smaller tiles for few rows": mock.patch.object(batch_invariant._Tile, "of", few_rows),
    "functions without blocks": mock.patch.object(batch_invariant, "_in_blocks", whole),
}
ON_CPUS = ("the order within nvlink_p2p", "functions without blocks")


@distributed(2, deadline_s=300)
@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_seen(fault, world_size):
    if fault in ON_CPUS and rank_device().type == "cuda":
        pytest.skip("a GPU computes each number alike wherever it lies, and has kernels for the torch forms")
    with PLANTED[fault]:
        seen = "out without gradients" if "nvlink_p2p" in fault else "out"
        assert any(seen in text for text in differences(world_size, 10, SOFTMAX, torch.float32))


# --- refusals ---------------------------------------------------------------------------------------------------------


@distributed(2)
def test_what_cannot_be_promised_is_refused_by_name(world_size):
    with (
        EPContext.from_groups(P(dp=2, ep=1, etp=2), device=rank_device(), deadline_s=30) as context,
        pytest.raises(BackendUnavailable, match="etp=2 cuts a row's sum over ranks"),
    ):
        build(SOFTMAX, context)


@distributed(2)
def test_more_tokens_than_the_bound_are_refused_on_all_ranks(world_size):
    with p2p_on_cpu(), EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=30, max_tokens=4) as context:
        layer = build(SOFTMAX, context, all2all="nvlink_p2p")
        with pytest.raises(InputError, match="x has 5 tokens to dispatch, more than max_tokens=4"):
            layer(rows()[:5].to(rank_device()))


@distributed(2)
def test_given_routes_without_an_expert_add_nothing(world_size):
    device = rank_device()
    x = rows()[:3].to(device)
    ids = torch.tensor([[0, -1, 6], [-1, -1, -1], [2, 5, 1]], device=device)
    weights = torch.rand(3, 3, device=device)
    outs = []
    for each in ("allgather", "torch_a2a"):
        with EPContext.from_groups(P(dp=2), device=device, deadline_s=30) as context:
            outs.append(build(SOFTMAX, context, all2all=each).forward_routed(x, Routing(ids, weights)))
    with EPContext.local(device) as context:
        layer = build(SOFTMAX, context)
        outs += [layer.forward_routed(x, Routing(ids, weights.where(ids >= 0, torch.nan)))]
        shared = layer.shared_experts(x)
    assert same_bits(outs[0], outs[1])
    assert same_bits(outs[0], outs[2])
    assert same_bits(outs[0][1], shared[1] + 0.0)


# --- on GPUs ----------------------------------------------------------------------------------------------------------

ON_HOPPER = {"bf16_triton": "none", "fp8_channel_triton": "fp8_channel"}


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs GPUs of compute capability 9.0",
)
@distributed(2, 4)
@torch.no_grad()
def test_hopper_kernels_over_transports_in_eager_calls_and_replays(world_size):
    """Exact Hopper kernels give one process's bits for few and many rows, in eager calls and replays."""
    device = rank_device()
    config = dataclasses.replace(SOFTMAX, hidden_size=1024, intermediate_size=256, num_experts=16, top_k=6)
    x = torch.randn(600, 1024, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    for experts, scheme in ON_HOPPER.items():
        options = {"experts": experts, "quantization": scheme, "dtype": torch.bfloat16}
        with EPContext.local(device) as context:
            wanted = build(config, context, **options)(x)
        for most, all2all in ((None, "nvlink_p2p"), (600, "nvlink_p2p"), (64, "nvlink_p2p"), (None, "torch_a2a")):
            with EPContext.from_groups(P(dp=world_size), device=device, deadline_s=60, max_tokens=most) as context:
                layer = build(config, context, all2all=all2all, **options)
                for count in (1, 9, 64, 200, 600):
                    if count > (most or count):
                        continue
                    part = slice(dist.get_rank() % 2 * (600 - count), dist.get_rank() % 2 * (600 - count) + count)
                    equal = [same_bits(layer(x[part]), wanted[part]) for _ in range(4)]
                    assert gather_from_all_ranks(equal) == [[True] * 4] * world_size, (experts, most, all2all, count)
                if all2all == "nvlink_p2p":
                    assert layer._graphs._calls, "repeated calls are replayed"
