"""Bad input on one rank raises the same error on all ranks before any row travels, and the next good call works."""

import dataclasses
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ep_moe import (
    Activation,
    ConfigError,
    EPContext,
    ExpertMap,
    InputError,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    Routing,
    RoutingConfig,
    Tokens,
)
from ep_moe.testing import distributed, rank_device
from ep_moe.types import PhysicalIds, PhysicalRouting
from tests.fixtures.distributed_cases import batch_of, check_call, no_payload, same_error
from tests.fixtures.helpers import fill, integer_routing, integer_rows, moved
from tests.fixtures.p2p_on_cpu import p2p_on_cpu

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2, activation=Activation.RELU2)
BAD = 1  # the rank that passes bad input
LAYOUTS = {
    "dp=4": ParallelConfig(dp=4),
    "tp=4": ParallelConfig(tp=4),
    "tp=4 sharded": ParallelConfig(tp=4, tokens=Tokens.SHARDED),
    "dp=2 tp=2 etp=2": ParallelConfig(dp=2, tp=2, ep=2, etp=2),
    "dp=4 etp=2": ParallelConfig(dp=4, ep=2, etp=2),
    "tp=4 ep=2": ParallelConfig(tp=4, ep=2),
}
every_layout = pytest.mark.parametrize("parallel", list(LAYOUTS.values()), ids=list(LAYOUTS))


def made(parallel: ParallelConfig, deadline_s: float = 10) -> EPContext:
    return EPContext.from_groups(parallel, device=rank_device(), deadline_s=deadline_s)


def bad_calls(x: torch.Tensor, routing: Routing) -> list[tuple[tuple, str]]:
    """Return arguments of `forward_routed` (a single one is for `forward`), each with the message that it must
    raise."""
    ids, weights = routing.ids, routing.weights
    far, low = ids.clone(), ids.clone()
    far[1, 0], low[2, 1] = 8, -2
    return [
        ((x[:, :15],), "x must be [..., 16] (hidden_size), got [3, 15]"),
        ((x.double(),), "x must be float32 as the layer is, got float64"),
        ((x.tolist(),), "x must be a Tensor, got list"),
        ((torch.tensor(1.0, device=x.device),), "x must be [..., 16] (hidden_size), got []"),
        ((x, Routing(ids[:2], weights)), "routing.ids must be [T, K] = [3, 2], got [2, 2]"),
        ((x, Routing(ids, weights[:, :1])), "routing.weights must be [T, K] = [3, 2], got [3, 1]"),
        ((x, Routing(ids.float(), weights)), "routing.ids must be int32 or int64, got float32"),
        ((x, Routing(ids, weights.half())), "routing.weights must be float32, got float16; call .float()"),
        ((x, Routing(ids.tolist(), weights)), "routing.ids must be a Tensor, got list"),
        ((x, (ids, weights)), "routing must be a Routing of logical ids, got tuple"),
        ((x, PhysicalRouting(PhysicalIds(ids), weights)), "routing must be a Routing of logical ids"),
        ((x, Routing(far, weights)), "routing.ids must be -1 or in [0, 8), got 8 (1 ids out of range)"),
        ((x, Routing(low, weights)), "routing.ids must be -1 or in [0, 8), got -2 (1 ids out of range)"),
    ]


@distributed(4)
@every_layout
def test_bad_arguments(parallel, world_size):
    rank = dist.get_rank()
    with made(parallel) as context:
        layers = [fill(MoELayer(CONFIG, context, all2all=all2all)) for all2all in ("allgather", "torch_a2a")]
        batch = batch_of(context.layout, rank)
        x = integer_rows(3, 16, batch).to(context.device)
        routing = moved(integer_routing(3, CONFIG, batch), context.device)
        for index, (arguments, sentence) in enumerate(bad_calls(x, routing)):
            layer = layers[index % 2]
            mine = arguments if rank == BAD else (x, routing) if len(arguments) > 1 else (x,)
            call = layer.forward_routed if len(arguments) > 1 else layer.forward
            with no_payload():
                text = same_error(InputError, lambda call=call, mine=mine: call(*mine))
            assert f"rank {BAD}: {sentence}" in text, text
            if index % 4 == 3:
                check_call(layer, context, what=f"after {text}")
        for layer in layers:
            check_call(layer, context)


@distributed(4, deadline_s=20)
@every_layout
def test_a_users_router_that_errs(parallel, world_size):
    """A wrong routing from a custom router on one rank raises on all ranks.

    The router runs after the ranks agreed on the call, so its result is checked later than other arguments.
    """
    rank = dist.get_rank()
    wrong: list[Callable[[Routing], Routing]] = [
        lambda r: Routing(r.ids + 8, r.weights),
        lambda r: Routing(r.ids[:, :1], r.weights),
        lambda r: Routing(r.ids, r.weights.double()),
        lambda r: (r.ids, r.weights),
    ]
    with made(parallel) as context:
        turn = [-1]

        def router(x: torch.Tensor) -> Routing:
            ids = torch.arange(2, device=x.device).expand(len(x), 2)
            good = Routing(ids, torch.ones(len(x), 2, device=x.device))
            return wrong[turn[0]](good) if rank == BAD and turn[0] >= 0 else good

        # use allgather: nvlink_p2p, the default on GPUs, does not wait for the device to check ids
        layer = fill(MoELayer(CONFIG, context, router=router, all2all="allgather"))
        x = integer_rows(8, 16, batch_of(context.layout, rank)).to(context.device)
        for turn[0] in range(len(wrong)):
            text = same_error(InputError, lambda: layer(x))
            assert f"rank {BAD}" in text, text
            assert "routing" in text, text
        turn[0] = -1
        layer(x)
        check_call(layer, context)


@distributed(4)
@pytest.mark.parametrize("layout", ["tp=4", "dp=2 tp=2 etp=2", "tp=4 ep=2"])
def test_different_token_counts_where_they_are_replicated(layout, world_size):
    with made(LAYOUTS[layout]) as context, no_payload():
        layer = fill(MoELayer(CONFIG, context))
        x = torch.zeros(2 if dist.get_rank() == BAD else 3, 16, device=context.device)
        text = same_error(InputError, lambda: layer(x))
        assert "needs the same tokens on all tp ranks, got x with 3 on rank 0, 2 on rank 1" in text, text
        assert "tokens=sharded" in text, text


def unlike(x: torch.Tensor, routing: Routing) -> dict[str, tuple[tuple, str]]:
    """Return arguments for the bad rank that differ from its peers', each with the expected message. Each is a valid
    call."""
    ids, weights = routing.ids, routing.weights
    one = x.clone()
    one[1, 3] += 1
    return {
        "another row": ((one,), "x on rank 0 differs from rank 1 in 1 of 4 rows"),
        "other rows": ((x + 1,), "in 4 of 4 rows"),
        "negated": ((-x,), "in 4 of 4 rows"),
        "another order": ((x.flip(0),), "x on rank 0 differs from rank 1"),
        "NaN": ((x.masked_fill(x == x[2, 0], torch.nan),), "x on rank 0 differs from rank 1"),
        "ids": ((x, Routing((ids + 1) % 8, weights)), "routing.ids on rank 0 differs"),
        "weights": ((x, Routing(ids, weights * 2)), "routing.weights on rank 0 differs"),
        "a routing": ((x,), "got x, routing.ids, routing.weights on rank 0; x on rank 1"),
    }


@distributed(4)
@pytest.mark.parametrize("layout", ["tp=4", "dp=2 tp=2 etp=2", "tp=4 ep=2"])
def test_different_tokens_where_they_are_replicated(layout, world_size):
    with made(LAYOUTS[layout]) as context, torch.no_grad():
        layer = fill(MoELayer(CONFIG, context))
        rank, batch = dist.get_rank(), batch_of(context.layout, dist.get_rank())
        x = integer_rows(4, 16, batch).to(context.device) * 2 + 1  # no zero, so no row equals its negative
        routing = moved(integer_routing(4, CONFIG, batch), context.device)
        for name, (arguments, sentence) in unlike(x, routing).items():
            given = arguments if rank == BAD else (x, routing) if "routing" in sentence else (x,)
            call = layer.forward_routed if len(given) > 1 else layer.forward
            text = same_error(InputError, lambda call=call, given=given: call(*given))
            assert "needs the same tokens on all tp ranks" in text, (name, text)
            assert sentence in text, (name, text)
            assert "torch.manual_seed" in text, text
        check_call(layer, context)
        layer(x[:0])


@distributed(2)
def test_tp_ranks_that_differ_by_rounding_go_on(world_size):
    """tp ranks whose rows differ only by rounding warn once and go on.

    Two kernels for the same attention may round differently.
    """
    for dtype, step in ((torch.float32, 2**-20), (torch.bfloat16, 2**-7)):
        with made(ParallelConfig(tp=2)) as context, torch.no_grad():
            layer = fill(MoELayer(CONFIG, context, dtype=dtype))
            x = integer_rows(4, 16, 0).to(context.device, dtype)
            rounded = x + x * step * dist.get_rank()
            with pytest.warns(UserWarning, match="tp ranks 0, 1 are not bitwise equal"):
                layer(rounded)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                layer(rounded)
                layer(x)


@distributed(4)
@pytest.mark.parametrize("layout", ["dp=4", "tp=4", "dp=4 etp=2"])
def test_ranks_in_different_layers(layout, world_size):
    """Ranks that call different layers are named in the error, even if the two layers exchange different amounts."""
    with made(LAYOUTS[layout]) as context:
        config = dataclasses.replace(CONFIG, top_k=3)
        a = fill(MoELayer(CONFIG, context, all2all="allgather", name="a"))
        b = fill(MoELayer(config, context, all2all="torch_a2a", name="b"))
        x = torch.zeros(3, 16, device=context.device)
        with no_payload():
            text = same_error(InputError, lambda: (b if dist.get_rank() == BAD else a)(x))
        assert "rank 0 is in 'a', rank 1 in 'b'; call the layers in the same order on all ranks" in text, text
        check_call(a, context)
        check_call(b, context)


@distributed(2)
@pytest.mark.parametrize("all2all", ["torch_a2a", "allgather"])
def test_gradients_that_one_rank_alone_wants(all2all, world_size):
    """A gradient that only one rank requires is refused in forward.

    The backward of one rank would wait for the others. The usual cause is a rank without rows.
    """
    with made(ParallelConfig(dp=2)) as context:
        layer, rank, device = fill(MoELayer(CONFIG, context, all2all=all2all)), dist.get_rank(), context.device
        x = torch.zeros(0 if rank else 3, 16, device=device, requires_grad=rank == 0)
        text = same_error(InputError, lambda: layer(x))
        assert "x requires a gradient on rank 0 and not on rank 1" in text
        routing = moved(integer_routing(len(x), CONFIG, 0), device)
        routing.weights.requires_grad_(rank == 1)
        text = same_error(InputError, lambda: layer.forward_routed(x.detach(), routing))
        assert "routing.weights requires a gradient on rank 1 and not on rank 0" in text
        with torch.no_grad():
            layer(x)
        x = x.detach().requires_grad_()
        layer(x).sum().backward()
        assert x.grad is not None


@distributed(2)
@pytest.mark.parametrize("all2all", ["torch_a2a", "allgather"])
def test_a_backward_that_one_rank_leaves_out(all2all, world_size):
    """A rank that skips a backward is named in the error.

    A loop that skips a batch with a non-finite loss does this. gloo itself would end the process of a rank.
    """
    if rank_device().type != "cpu":
        pytest.skip("compared on CPUs alone")
    with made(ParallelConfig(dp=2)) as context:
        layer, rank = fill(MoELayer(CONFIG, context, all2all=all2all)), dist.get_rank()
        x = torch.ones(3 + rank, 16)
        loss = layer(x).sum()
        text = same_error(InputError, lambda: layer(x) if rank else loss.backward())
        name = layer.name
        assert f"rank 0 is in 'the backward of {name}', rank 1 in '{name}'" in text, text
        assert "backward equally often" in text, text
        layer(x).sum().backward()


@distributed(2)
@pytest.mark.parametrize("all2all", ["torch_a2a", "allgather", "nvlink_p2p"])
@pytest.mark.parametrize("summed", [False, True])
def test_backward_of_calls_in_another_order(summed, all2all, world_size):
    """Ranks whose backwards run in different orders are named in the error, at the latest in the second backward.

    Calls of equal sizes would otherwise exchange their gradients.
    """
    with p2p_on_cpu(), made(ParallelConfig(dp=2)) as context:
        layer, rank = fill(MoELayer(CONFIG, context, all2all=all2all)), dist.get_rank()
        x = torch.ones(3, 16, device=context.device)
        first, second = layer(x).sum(), layer(x).square().sum()
        in_order = [first, second]
        other = [first + second] if summed else [second, first]  # autograd runs a sum's last call first

        def backward():
            for loss in other if rank else in_order:
                loss.backward()

        text = same_error(InputError, backward)
        assert "run backward of different calls, at least rank 0 and rank 1" in text, text
        layer(x).sum().backward()


CONVERTED = {
    "bfloat16": lambda layer: layer.to(torch.bfloat16),
    "half": lambda layer: layer.half(),
    "double": lambda layer: layer.double(),
    "experts alone": lambda layer: layer.expert_weights.bfloat16(),
}


@distributed(4)
@every_layout
def test_a_layer_that_one_rank_converted(parallel, world_size):
    """A layer that only one rank converted to another dtype or device is refused.

    Its rows would have another size than the buffers of its peers.
    """
    bad = dist.get_rank() == BAD
    with made(parallel) as context, torch.no_grad():
        for number, (what, convert) in enumerate(CONVERTED.items()):
            layer = fill(MoELayer(CONFIG, context, all2all=("allgather", "torch_a2a")[number % 2], experts="reference"))
            x = integer_rows(4, 16, batch_of(context.layout, dist.get_rank())).to(context.device)
            routing = moved(integer_routing(4, CONFIG, batch_of(context.layout, dist.get_rank())), context.device)
            check_call(layer, context)
            if bad:
                convert(layer)
            with no_payload():
                text = same_error(
                    InputError, lambda layer=layer, x=x, r=routing: layer.forward_routed(x.to(layer.dtype), r)
                )
            named = "rank 1: the layer was converted to float64" if what == "double" else "on rank 0, and dtype="
            assert named in text, (what, text)
            layer.float()
            check_call(layer, context, what=f"after {what}")
            layer.to("meta" if bad else "cpu")
            with no_payload():
                text = same_error(InputError, lambda layer=layer, x=x: layer(x))
            assert text.startswith("rank 1: the layer is on the meta device"), text


@distributed(2)
@pytest.mark.parametrize("all2all", ["torch_a2a", "allgather"])
def test_a_layer_that_all_ranks_converted(all2all, world_size):
    with made(ParallelConfig(dp=2)) as context, torch.no_grad():
        layer = fill(MoELayer(CONFIG, context, all2all=all2all, experts="reference"))
        check_call(layer, context)
        x, routing = integer_rows(4, 16, 0).to(context.device), moved(integer_routing(4, CONFIG, 0), context.device)
        expected = layer.forward_routed(x, routing)
        y = layer.bfloat16().forward_routed(x.bfloat16(), routing)
        assert y.dtype == torch.bfloat16
        # integers below 2**8 are exact in bfloat16; only the activated rows and each rank's partial sum are rounded
        torch.testing.assert_close(y.float(), expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))
        text = same_error(InputError, lambda: layer.double().forward_routed(x.double(), routing))
        assert text == (
            "rank 0: the layer was converted to float64, and experts=reference does not compute in it: dtype float64 "
            "is not among bfloat16, float16, float32; convert it back to float32, or build another for float64"
        )
        fill(layer.float())
        check_call(layer, context)


@distributed(4, deadline_s=30)
@pytest.mark.parametrize("layout", ["tp=4", "dp=2 tp=2 etp=2", "dp=4 etp=2"])
def test_gradients_that_one_rank_alone_wants_where_tokens_are_split(layout, world_size):
    """Where tokens are split over tp or etp, all ranks of the lockstep group must require the same gradients."""
    bad = dist.get_rank() == BAD
    with made(LAYOUTS[layout]) as context:
        layer = fill(MoELayer(CONFIG, context))
        x = torch.ones(4, 16, device=context.device)

        def no_grad():
            with torch.no_grad() if bad else torch.enable_grad():
                return layer(x)

        with no_payload():
            text = same_error(InputError, no_grad)
            assert "router.weight requires a gradient on rank " in text, text
            assert text.index("not on rank 1") > 0
            text = same_error(InputError, lambda: layer(x.clone().requires_grad_(bad)))
            assert "x requires a gradient on rank 1 and not on rank " in text, text
        check_call(layer, context)


@distributed(4, deadline_s=30)
@pytest.mark.parametrize("layout", ["dp=4", "dp=4 etp=2"])
def test_ids_may_be_int32_on_one_rank(layout, world_size):
    with made(LAYOUTS[layout]) as context, torch.no_grad():
        layer = fill(MoELayer(CONFIG, context, all2all="allgather"))
        batch = batch_of(context.layout, dist.get_rank())
        x, routing = (
            integer_rows(5, 16, batch).to(context.device),
            moved(integer_routing(5, CONFIG, batch), context.device),
        )
        expected = layer.forward_routed(x, routing)
        ids = routing.ids.int() if dist.get_rank() == BAD else routing.ids
        assert torch.equal(layer.forward_routed(x, Routing(ids, routing.weights)), expected)


@distributed(4)
def test_layers_that_were_given_different_things(world_size):
    bad = dist.get_rank() == BAD
    with made(LAYOUTS["dp=4"]) as context:
        good = {"config": CONFIG, "expert_map": None, "all2all": "torch_a2a", "dtype": torch.float32}

        def change(**what):
            return good | what

        routing = RoutingConfig(renormalize=True)
        for other, sentence in (
            (change(config=dataclasses.replace(CONFIG, top_k=1)), "MoEConfig.top_k: 2 on ranks 0, 2, 3, 1 on rank 1"),
            (change(config=dataclasses.replace(CONFIG, routing=routing)), "MoEConfig.routing.renormalize: false on"),
            (change(expert_map=ExpertMap.round_robin(8, 4)), "expert_map: "),
            (change(all2all="allgather"), 'all2all: "torch_a2a" on ranks 0, 2, 3, "allgather" on rank 1'),
            (change(dtype=torch.bfloat16), 'dtype: "float32" on ranks 0, 2, 3, "bfloat16" on rank 1'),
            (change(expert_map=ExpertMap.linear(6, 4)), "rank 1: expert_map.num_experts must be 8"),
            (change(expert_map=ExpertMap.linear(8, 2)), "rank 1: expert_map.num_ranks must be 4"),
            (change(all2all="pigeon"), "rank 1: no backend among dispatchers is named 'pigeon'"),
            (change(router=torch.nn.Identity()), 'router: "the layer\'s own" on ranks 0, 2, 3, "given" on rank 1'),
            (change(wire="fp8_block"), "rank 1: wire must be a Wire, got 'fp8_block'; give Wire(dispatch=...)"),
            (change(dtype="bfloat16"), "rank 1: dtype must be a dtype, got 'bfloat16'; give torch.bfloat16"),
            (change(expert_map="map.json"), "rank 1: expert_map must be an ExpertMap, got 'map.json'"),
            (change(options={}), "rank 1: options must be an ExpertsOptions, got {}"),
            (change(tuned="tuned.json"), "rank 1: tuned must be a Tuned, got 'tuned.json'; give Tuned.load(path)"),
        ):
            given = other if bad else good

            text = same_error(ConfigError, lambda given=given: MoELayer(context=context, **given))
            assert text.startswith("MoELayer moe"), text
            assert sentence in text, text
        layer = fill(MoELayer(CONFIG, context))
        check_call(layer, context)
        assert context.plan() == layer.plan()


@distributed(4)
def test_contexts_that_were_given_different_things(world_size):
    bad = dist.get_rank() == BAD
    config = ParallelConfig
    for good, other, sentence in (
        (config(dp=4), config(tp=4), "ParallelConfig.dp: 4 on ranks 0, 2, 3, 1 on rank 1"),
        (config(dp=4), config(dp=4, ep=2), "ParallelConfig.ep: null on ranks 0, 2, 3, 2 on rank 1"),
        (config(tp=4), config(tp=4, tokens=Tokens.SHARDED), 'ParallelConfig.tokens: "replicated" on ranks 0, 2, 3'),
        (config(dp=3), None, "world must equal pp * dp * tp, got world=4 and pp=1 * dp=3 * tp=1 = 3"),
        (config(dp=4, ep=3), None, "ep * etp must divide dp * tp, got ep=3 * etp=1 = 3 and dp=4 * tp=1 = 4"),
        (config(dp=4, etp=3), None, "ParallelConfig.etp must divide dp * tp, got etp=3"),
    ):
        text = same_error(ConfigError, lambda given=other if other and bad else good: made(given))
        assert sentence in text, text
    text = same_error(ConfigError, lambda: made(ParallelConfig(dp=4), deadline_s=20 if bad else 10))
    assert "deadline_s: 10 on ranks 0, 2, 3, 20 on rank 1" in text, text
    with made(ParallelConfig(dp=4)) as context:
        check_call(fill(MoELayer(CONFIG, context)), context)


def group_of(*blocks: list[int]) -> dist.ProcessGroup:
    groups = [dist.new_group(ranks) for ranks in blocks]
    return next(group for group, ranks in zip(groups, blocks, strict=True) if dist.get_rank() in ranks)


def with_groups(**groups: dist.ProcessGroup) -> EPContext:
    return EPContext.from_groups(LAYOUTS["dp=2 tp=2 etp=2"], groups, device=rank_device(), deadline_s=10)


@distributed(4)
def test_given_groups(world_size):
    pairs, strides, two = group_of([0, 1], [2, 3]), group_of([0, 2], [1, 3]), group_of([0, 3], [1, 2])
    with with_groups(tp=pairs, ep=strides, etp=pairs) as context:
        for kind, group in (("tp", pairs), ("ep", strides), ("etp", pairs)):
            assert context.rank_groups[kind].group is group
        check_call(fill(MoELayer(CONFIG, context)), context)
    assert dist.get_process_group_ranks(pairs)  # destroy does not destroy the caller's groups

    text = same_error(ConfigError, lambda: with_groups(ep=two))
    assert "groups['ep'] holds ranks [0, 3], but rank 0 of 4" in text, text
    assert "build the group from RankLayout.groups['ep']" in text, text
    text = same_error(ConfigError, lambda: with_groups(expert=pairs))
    assert "groups['expert'] is no kind of group that can be given; those are tp, etp, ep" in text, text
    with with_groups(ep=strides) as context:
        check_call(fill(MoELayer(CONFIG, context)), context)


@distributed(4, deadline_s=20)
@pytest.mark.parametrize("wrong", [True, False])
def test_one_rank_was_given_other_groups(wrong, world_size):
    """A rank that was given other groups is named in the error, and its peers do not wait for it in new_group."""
    bad = dist.get_rank() == BAD
    strides, two = group_of([0, 2], [1, 3]), group_of([0, 3], [1, 2])
    mine = {"ep": two} if wrong else {}
    text = same_error(ConfigError, lambda: with_groups(**(mine if bad else {"ep": strides})))
    sentence = "rank 1: groups['ep'] holds ranks [1, 2]" if wrong else '["ep"] on ranks 0, 2, 3, [] on rank 1'
    assert sentence in text, text


BOUNDS = "at least 0.001 and at most 604800"  # the allowed range of deadline_s


@distributed(2)
def test_a_bad_deadline_is_refused_on_all_ranks(world_size):
    text = same_error(ConfigError, lambda: made(ParallelConfig(dp=2), deadline_s=0))
    assert text == f"EPContext: ranks 0, 1: deadline_s must be a number of seconds, {BOUNDS}, got 0"
    text = same_error(ConfigError, lambda: made(ParallelConfig(dp=2), deadline_s=-1 if dist.get_rank() == BAD else 10))
    assert text == f"EPContext: rank 1: deadline_s must be a number of seconds, {BOUNDS}, got -1"
    with made(ParallelConfig(dp=2)) as context:  # new_group calls of both ranks match again
        check_call(fill(MoELayer(CONFIG, context)), context)
