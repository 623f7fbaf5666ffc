"""Whole layers around a fused kernel: all layouts and maps, the features of a layer, and migrating experts.

FlashInfer's mega kernels, emulated on the CPU, real on Hopper GPUs.
"""

import dataclasses
import functools
import os
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, ExpertBalancer, ExpertMap, MoEConfig, MoELayer, ParallelConfig, Wire
from ep_moe.errors import BackendUnavailable, ConfigError, InputError, PeerTimeout
from ep_moe.experts.fused.flashinfer_mega import FlashInferMega, FlashInferMegaBf16, FlashInferMegaFp8, Window
from ep_moe.parallel.rank_group import barrier
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import distributed, rank_device
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.testing.transport_case import wait_for_input_error
from ep_moe.types import PhysicalIds, PhysicalRouting
from ep_moe.weights.initial import random_expert
from ep_moe.weights.layouts.base import MegaBf16
from tests.fixtures.distributed_cases import batch_of, gather_from_all_ranks, same_error
from tests.fixtures.eplb_cases import all_alike, assert_slots, on_request, random_map
from tests.fixtures.fused_conformance import ready
from tests.fixtures.helpers import integer_routing, moved
from tests.fixtures.layer_static import LAYOUTS, TOKENS, WIDE, Captured

pytestmark = pytest.mark.timeout(600)  # FlashInfer's fp8 kernel compiles its GEMMs at first use
BF16 = {"experts": "flashinfer_mega_bf16", "quantization": "none", "dtype": torch.bfloat16}
FP8 = {"experts": "flashinfer_mega_fp8", "quantization": "fp8_block", "dtype": torch.bfloat16}
CONFIG = MoEConfig(hidden_size=256, intermediate_size=256, num_experts=10, top_k=3)
MOST = 24


def kinds() -> None:
    for kind in (FlashInferMegaBf16, FlashInferMegaFp8):
        ready(kind)


@functools.cache
def checkpoint(config: MoEConfig, expert: int, seed: int = 0, scheme: str = "none", device=None) -> dict:
    """Return an expert's tensors, whose scale blocks differ by factors, so that a wrong block shows."""
    tensors = random_expert(config, SCHEMES[scheme], 100 * seed + expert, torch.bfloat16, device or "cpu")
    for name in ("w13_scale", "w2_scale"):
        if name in tensors:
            rows, columns = (torch.arange(size, device=device) for size in tensors[name].shape)
            tensors[name] = tensors[name] * (1 + rows.unsqueeze(1) % 2 * 2) / (1 + columns % 2)
    return tensors


def build(context: EPContext, names: dict = BF16, config: MoEConfig = CONFIG, seed: int = 0, **options) -> MoELayer:
    """Return a filled layer with equally many slots on every rank."""
    ranks = context.layout.ep
    spare = -config.num_experts % ranks + ranks
    options = {"expert_map": ExpertMap.redundant(config.num_experts, ranks, spare)} | names | options
    layer = MoELayer(config, context, **options)
    for expert in range(config.num_experts):
        layer.update_expert(expert, **checkpoint(config, expert, seed, names["quantization"], context.device))
    return layer.requires_grad_(False)


def error_of(layer: MoELayer, context: EPContext, tokens: int, seed: int = 0, weights: int = 0) -> float:
    """Return the error of one call as a multiple of what rounding may cause.

    tp ranks share a batch if tokens are replicated. `weights` is the seed of the layer's weights.
    """
    batch = 10 * seed + batch_of(context.layout, dist.get_rank())
    generator, config, device = torch.Generator().manual_seed(batch), layer.config, context.device
    x = torch.randn(tokens, config.hidden_size, generator=generator).bfloat16().to(device)
    routing = moved(integer_routing(tokens, config, batch), device)
    scheme = layer.expert_weights.scheme
    tensors = [checkpoint(config, expert, weights, scheme.name, device) for expert in range(config.num_experts)]
    value, limit = expected_and_limit(config, scheme, tensors, x, routing.ids, routing.weights, torch.bfloat16)
    with torch.no_grad():
        y = layer.forward_routed(x, routing)
    # etp ranks' partial sums are rounded and added in bf16
    return max_error_ratio(y, value, limit * (1 if context.layout.etp == 1 else 1 + context.layout.etp))


@distributed(4)
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_every_layout(sizes, world_size):
    kinds()
    with EPContext.from_groups(ParallelConfig(**LAYOUTS[sizes]), device=rank_device(), max_tokens=MOST) as context:
        layer = build(context)
        rank = dist.get_rank()
        for turn, counts in enumerate(((MOST, 0, 5, 9), (0, 0, 0, 0))):
            tokens = counts[batch_of(context.layout, rank) % 4]
            found = error_of(layer, context, tokens, turn)
            assert found <= 1, f"{sizes}, T={counts}: {found}"
        with context.token_limit(4):
            assert error_of(layer, context, 4, 5) <= 1, "at most 4"
        assert error_of(layer, context, MOST, 6) <= 1, "after"


@distributed(4)
@pytest.mark.parametrize("names", [BF16, FP8], ids=["bf16", "fp8"])
def test_any_map_and_experts_that_move(names, world_size):
    """A balancer migrates the stored tensors; calls during and after the migration are right."""
    kinds()
    rank, device = dist.get_rank(), rank_device()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=device, max_tokens=MOST) as context:
        placed = random_map(world_size, 4, 1)
        layers = [build(context, names, expert_map=placed, seed=seed) for seed in range(2)]
        with ExpertBalancer(layers, context, on_request(bytes_per_step=2_000_000, sync_every=2)) as balancer:
            balancer.move_to([random_map(world_size, 4, 20 + number) for number in range(2)])
            for step in range(200):
                if balancer.state.name == "IDLE":
                    break
                if step % 5 == 0:
                    for seed, layer in enumerate(layers):
                        assert error_of(layer, context, (7, 0, 3, 12)[rank], step, seed) <= 1, (step, seed)
                balancer.step()
        for seed, layer in enumerate(layers):
            assert layer.placement.expert_map == random_map(world_size, 4, 20 + seed)
            assert_slots(
                layer, lambda config, expert, at: checkpoint(config, expert, at, names["quantization"], device), seed
            )
            assert error_of(layer, context, 9, 3, seed) <= 1
        assert all_alike([layer.placement.expert_map.to_json() for layer in layers])


@distributed(2)
def test_what_a_user_asks_of_the_layer(world_size):
    kinds()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=MOST) as context:
        layer = build(context)
        assert (layer.choice.all2all, layer.choice.experts) == ("inside", "flashinfer_mega_bf16")
        assert "all2all=inside, experts=flashinfer_mega_bf16" in repr(layer)
        assert [row for row in layer.explain() if row.status == "chosen"] == [layer.choice]
        with pytest.raises(ConfigError, match="experts=flashinfer_mega_bf16 has a built-in all2all"):
            _ = layer._dispatcher()
        planned = layer.plan()
        assert planned["transport"] == FlashInferMegaBf16.buffer_bytes(layer._dispatch_shape()) > 0
        assert planned["experts"] == sum(p.numel() * p.itemsize for p in layer.expert_weights.parameters())
        twin, other = build(context, seed=1), build(context, FP8)
        narrow = build(context, config=dataclasses.replace(CONFIG, intermediate_size=128))
        buffers = [each.plan()["transport"] for each in (layer, other, narrow)]
        assert context.plan()["transport"] == sum(buffers), "equal layers share"
        for each, seed in ((layer, 0), (twin, 1), (other, 0), (narrow, 0), (layer, 0)):
            assert error_of(each, context, 5, weights=seed) <= 1
        assert len(context._pool) == 3
        assert layer.tune([8]) == []
        context.tune([8])
        assert layer.plan() == planned
        step = context.flight_recorder.number
        error_of(layer, context, 4)
        assert context.flight_recorder.number == step + 1, "a fused call is one step"
        layer.placement.reset_load()
        error_of(layer, context, 6, seed=3)
        routes = sum((integer_routing(6, CONFIG, 30 + rank).ids >= 0).sum() for rank in range(2))
        assert sum(layer.stats().expert_load) == routes
    with pytest.raises(RuntimeError, match="was destroyed"):
        error_of(layer, context, 4)


@distributed(2)
def test_the_layers_own_router_and_shared_experts(world_size):
    kinds()
    config = dataclasses.replace(CONFIG, shared_intermediate_size=256)
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=MOST) as context:
        torch.manual_seed(0)
        layer = build(context, config=config)
        tensors = [checkpoint(config, expert, device=context.device) for expert in range(10)]
        x = torch.randn(2, 5 + dist.get_rank(), 256).bfloat16().to(context.device)
        layer.router.requires_grad_(True)  # FlashInfer takes no tensor that requires a gradient
        y = layer(x).view(-1, 256).detach()
        with torch.no_grad():
            routing, own = layer.router(x.view(-1, 256)), layer.shared_experts(x.view(-1, 256))
        value, limit = expected_and_limit(
            config, SCHEMES["none"], tensors, x.view(-1, 256), routing.ids, routing.weights, torch.bfloat16
        )
        assert max_error_ratio(y, value + own.double(), limit + 2**-8 * (value + own.double()).abs()) <= 1


@distributed(2)
def test_what_a_layer_with_one_refuses(world_size):
    kinds()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=MOST) as context:
        for options, kind, sentence in (
            ({"all2all": "torch_a2a"}, BackendUnavailable, "has a built-in all2all; leave all2all='auto'"),
            ({"wire": Wire(dispatch="fp8_block")}, BackendUnavailable, "its own row format for dispatch and combine"),
            ({"pipeline": 8}, ConfigError, "pipeline=8 is not supported by experts=flashinfer_mega_bf16"),
            ({"expert_map": ExpertMap.uneven([4, 6])}, BackendUnavailable, r"slots on every rank, got \[4, 6\]"),
            ({"dtype": torch.float32}, BackendUnavailable, "dtype float32 is not among bfloat16"),
        ):
            said = same_error(kind, lambda options=options: MoELayer(CONFIG, context, **BF16 | options))
            assert re.search(sentence, said), said
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
        said = same_error(BackendUnavailable, lambda: MoELayer(CONFIG, context, **BF16))
        assert "it has fixed buffers; set their size with EPContext.from_torchrun(max_tokens=...)" in said


FAULTS = {
    "one too many": (lambda x: x.new_zeros(8, 256), "x has 8 tokens to dispatch, more than max_tokens=7"),
    "a dtype": (lambda x: x.double(), "x must be bfloat16 as the layer is, got float64"),
    "a gradient": (lambda x: x.requires_grad_(), "experts=flashinfer_mega_bf16 has no backward"),
}


@distributed(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_refuses_a_call(fault, world_size):
    """A rank that refuses a call raises at once; its peer's call still gets right results and learns of the refusal
    later."""
    kinds()
    spoil, sentence = FAULTS[fault]
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=MOST, deadline_s=8) as context:
        layer = build(context)
        with context.token_limit(7):
            if dist.get_rank():
                with pytest.raises(InputError, match=f"rank 1: .*{sentence}"):
                    layer(spoil(torch.zeros(2, 256, device=context.device).bfloat16()))
            else:
                assert error_of(layer, context, 6) <= 1
        barrier(context.device)
        refusal = wait_for_input_error(2, context.flight_recorder.check)
        assert re.search(sentence, refusal), f"the peer's refusal did not arrive, got {refusal!r}"
        barrier(context.device)  # no rank ends before its peers have heard


@distributed(2, expect_dead={1})
def test_a_rank_that_dies_is_named(world_size):
    kinds()
    context = EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=MOST, deadline_s=2)
    layer = build(context, name="block")
    error_of(layer, context, 3)
    if dist.get_rank():
        os._exit(7)
    with pytest.raises(PeerTimeout, match=r"in fused of block .*Rank 1 shows no sign of life"):
        error_of(layer, context, 3)


@distributed(2)
def test_a_pick_of_none_travels_nowhere(world_size):
    """A route of -1 stays -1 for the kernel, from the routing as well as from padding K to a compiled top-k."""
    kinds()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=MOST) as context:
        layer, seen, run = build(context), [], Window.run
        with mock.patch.object(Window, "run", lambda *given: seen.append(given[3]) or run(*given)):
            assert error_of(layer, context, 9) <= 1
        (ids,) = seen
        assert (ids.shape, ids.dtype) == ((9, 4), torch.int32)
        asked = integer_routing(9, CONFIG, dist.get_rank()).ids
        assert torch.equal((ids >= 0).sum(1).cpu(), (asked >= 0).sum(1))


@distributed(4)
def test_contexts_beside_each_other(world_size):
    """Contexts on all ranks, on pairs of them, and a second one on the same group have buffers of their own."""
    kinds()
    device = rank_device()
    with (
        EPContext.from_groups(ParallelConfig(dp=4), device=device, max_tokens=MOST) as wide,
        EPContext.from_groups(ParallelConfig(dp=4, ep=2), device=device, max_tokens=MOST) as pairs,
        EPContext.from_groups(
            ParallelConfig(dp=4), {"ep": wide.rank_groups["ep"].group}, device=device, max_tokens=MOST
        ) as same,
    ):
        made = [(context, build(context, seed=seed), seed) for seed, context in enumerate((wide, pairs, same))]
        for turn in range(2):
            for context, layer, seed in made:
                assert error_of(layer, context, 3 + turn, turn, seed) <= 1, (context, turn)
        windows = [window for context in (wide, pairs, same) for window in context._pool.values()]
        assert len(set(map(id, windows))) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@distributed(4)
def test_replays_while_experts_move(world_size):
    """Two layers captured in graphs of their own, over the same buffers, replay rightly while experts migrate."""
    kinds()
    rank, device = dist.get_rank(), rank_device()
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=device, max_tokens=64) as context:
        layers = [build(context, config=WIDE) for _ in range(2)]
        tensors = [checkpoint(WIDE, expert, device=device) for expert in range(10)]
        with context.token_limit(TOKENS):
            captured = [Captured(layer, tensors, "none") for layer in layers]
        slots_per_rank = layers[0].placement.expert_map.slots_per_rank
        with ExpertBalancer(layers, context, on_request(bytes_per_step=2_000_000, sync_every=2)) as balancer:
            balancer.move_to([random_map(world_size, slots_per_rank, 30 + index) for index in range(2)])
            for step in range(400):
                for index, graph in enumerate(captured):
                    found = graph.replay(TOKENS - rank, 10 * step + index + 7 * rank)
                    assert found <= 1, (balancer.state.name, step, index, found)
                if balancer.state.name == "IDLE":
                    break
                balancer.step()
        assert [layer.placement.expert_map for layer in layers] == [
            random_map(world_size, slots_per_rank, 30 + i) for i in (0, 1)
        ]
        assert error_of(layers[0], context, 9) <= 1, "an eager call after replays"


# --- planted errors: the comparison above must see each ---------------------------------------------------------------


def fused_ids_off_by_one(layer: MoELayer) -> None:
    compute, last = layer.experts.compute, layer._dispatch_shape().num_physical
    layer.experts.compute = lambda x, routing: compute(
        x, PhysicalRouting(PhysicalIds(torch.where(routing.ids < 0, -1, (routing.ids + 1) % last)), routing.weights)
    )


def logical_ids_for_physical(layer: MoELayer) -> None:
    layer.placement.forward = lambda routing, *_: PhysicalRouting(PhysicalIds(routing.ids), routing.weights)


def weights_forgotten(layer: MoELayer) -> None:
    compute = layer.experts.compute
    layer.experts.compute = lambda x, routing: compute(
        x, PhysicalRouting(routing.ids, torch.ones_like(routing.weights))
    )


def gate_and_up_swapped(layer: MoELayer) -> None:
    w13 = layer.expert_weights.w13
    turned = w13.view(torch.uint8) if w13.dtype.itemsize == 1 else w13
    turned.copy_(turned.roll(32 if w13.dtype.itemsize == 2 else 256, dims=1))


def one_scale_wrong(layer: MoELayer) -> None:
    layer.expert_weights.w2_scale[0, 1, 0] *= 8


def scales_transposed(layer: MoELayer) -> None:
    layer.expert_weights.w2_scale.copy_(layer.expert_weights.w2_scale.clone().transpose(1, 2))


def one_slot_stale(layer: MoELayer) -> None:
    layer.expert_weights.w2.data[0].view(torch.uint8).zero_()


@distributed(2)
@pytest.mark.parametrize("names", [BF16, FP8], ids=["bf16", "fp8"])
def test_planted(names, world_size):
    kinds()
    plants = [fused_ids_off_by_one, logical_ids_for_physical, weights_forgotten, gate_and_up_swapped, one_slot_stale]
    plants += [one_scale_wrong, scales_transposed] if names["quantization"] != "none" else []
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=MOST) as context:
        placed = ExpertMap.from_ranks([[7, 1, 2, 3, 0, 4], [6, 5, 8, 9, 3, 1]], 10)
        for plant in plants:
            layer = build(context, names, expert_map=placed)
            assert error_of(layer, context, 12) <= 1, "before"
            with torch.no_grad():
                plant(layer)
            assert max(gather_from_all_ranks(error_of(layer, context, 12))) > 1, f"{plant.__name__} went unseen"


@distributed(2)
def test_planted_in_the_preparation_and_in_memory(world_size):
    """The comparison finds w13 rows that are not interleaved, and stale addresses of tensors that were reallocated."""
    kinds()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=MOST) as context:
        layer = build(context)
        assert error_of(layer, context, 12) <= 1
        for parameter in layer.expert_weights.parameters():
            parameter.data = parameter.data.clone()
        for expert in range(10):
            layer.update_expert(expert, **checkpoint(CONFIG, expert, 1, device=context.device))
        assert error_of(layer, context, 12, weights=1) <= 1, "after the tensors moved"
        layer.experts._places = tuple(p.data_ptr() for p in layer.expert_weights.parameters())
        prepare = MegaBf16.prepare
        try:
            MegaBf16.prepare = lambda self, tensors: dict(tensors)
            assert max(gather_from_all_ranks(error_of(build(context), context, 12))) > 1
        finally:
            MegaBf16.prepare = prepare
        stale = FlashInferMega._bundle
        layer = build(context)
        error_of(layer, context, 3)
        try:
            FlashInferMega._bundle = lambda self: self._held
            for parameter in layer.expert_weights.parameters():
                parameter.data = parameter.data.clone()
            for expert in range(10):
                layer.update_expert(expert, **checkpoint(CONFIG, expert, 1, device=context.device))
            assert max(gather_from_all_ranks(error_of(layer, context, 12, weights=1))) > 1
        finally:
            FlashInferMega._bundle = stale
