"""Gradients in buffers (`use_main_grads`) equal ordinary gradients bit for bit.

Float32 numbers are added in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from ep_moe import (
    ConfigError,
    EPContext,
    ExpertMap,
    ExpertsOptions,
    InputError,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    Tokens,
)
from ep_moe.testing import distributed, rank_device
from ep_moe.training import (
    clip_grad_norm_,
    exclude_experts,
    expert_parameters,
    fully_shard,
    parameter_groups,
    sync_gradients,
    use_main_grads,
    zero_main_grads,
)
from ep_moe.weights.parts import local
from tests.fixtures.main_grads import writing_kernel
from tests.fixtures.p2p_on_cpu import p2p_on_cpu
from tests.fixtures.training_model import EXPERTS, OPTIMIZERS, batch, made

P = ParallelConfig
LAYOUTS = {
    2: [(P(dp=2), 0), (P(dp=2), 2), (P(tp=2, tokens=Tokens.SHARDED), 0), (P(dp=2, ep=1), 0), (P(dp=2, ep=1, etp=2), 0)],
    4: [(P(dp=4, ep=2), 0), (P(dp=4, ep=2), 2), (P(dp=2, tp=2, ep=2, etp=2), 0)],
}
STEPS, MICRO_BATCHES, MAX_NORM = 3, 2, 0.5
KERNELS = {"reference": contextlib.nullcontext, "writing": writing_kernel}
BIASED = MoEConfig(hidden_size=16, intermediate_size=32, num_experts=EXPERTS, top_k=2, expert_bias=True)


def contexts(world_size):
    for parallel, spare in LAYOUTS[world_size]:
        with EPContext.from_groups(parallel, device=rank_device(), deadline_s=30) as context:
            yield context, ExpertMap.redundant(EXPERTS, context.layout.ep, spare) if spare else None


def train(model, context, begin_anew, *, main=False):
    """Return the losses of some AdamW steps of two micro-batches each. With `main`, gradients are in `main_grad`."""
    layout, losses = context.layout, []
    optimizer = OPTIMIZERS["adamw"](parameter_groups(model))
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            own = batch(STEPS * micro + step).chunk(layout.token_ranks)[
                layout.place // layout.split % layout.token_ranks
            ]
            own = own.to(context.device)
            loss = cross_entropy(model(own)[:, :-1].flatten(0, 1), own[:, 1:].flatten()) / MICRO_BATCHES
            loss.backward()
            losses.append(float(loss.detach()))
        sync_gradients(model, context)
        clip_grad_norm_(model, context, MAX_NORM)
        if main:
            for parameter in expert_parameters(model):
                parameter.grad = parameter.main_grad.to(parameter.dtype)
        optimizer.step()
        begin_anew(optimizer)
    return losses


def to_none(optimizer):
    optimizer.zero_grad()


def to_zero(optimizer):
    optimizer.zero_grad(set_to_none=False)


@distributed(2, 4, deadline_s=200)
@pytest.mark.parametrize("kernel", KERNELS)
def test_losses_are_the_ordinary_ones(kernel, world_size):
    """Training with `use_main_grads` has the ordinary losses, also with replicas.

    With replicas, sums over ranks come between the kernel and the buffers.
    """
    for context, expert_map in contexts(world_size):
        what = f"{context.layout}, {expert_map}"
        wanted = train(made(context, expert_map), context, to_none)
        with KERNELS[kernel]() as written:
            model = made(context, expert_map)
            use_main_grads(model)
            assert train(model, context, to_none) == wanted, what
            if kernel == "writing":
                alone = expert_map is None and context.layout.replicas == 1
                assert bool(written) == alone, what
            if world_size == 2:
                model = made(context, expert_map)
                use_main_grads(model)
                assert train(model, context, to_zero) == wanted, what
                model = made(context, expert_map)
                use_main_grads(model, torch.float32)

                def anew(optimizer, model=model):
                    optimizer.zero_grad()
                    zero_main_grads(model)

                assert train(model, context, anew, main=True) == wanted, what


def pair(context, main_dtype=None, dtype=torch.float32, **options):
    """Return a layer with ordinary gradients and one with main gradients."""
    layers = []
    for _ in range(2):
        torch.manual_seed(3)
        layers.append(MoELayer(BIASED, context, dtype=dtype, **options))
    use_main_grads(layers[1], main_dtype)
    return layers


def rows(context, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(10 * seed + context.layout.dp_rank)
    return torch.randn(12, 16, generator=generator).to(context.device, dtype)


def backward(layers, x):
    for layer in layers:
        layer(x).float().square().mean().backward()


def grads(layer, attribute="grad"):
    return {name: getattr(p, attribute) for name, p in layer.expert_weights.named_parameters()}


def same(layers, what=""):
    ordinary, ours = map(grads, layers)
    for name, wanted in ordinary.items():
        found = ours[name]
        assert (found is None) == (wanted is None), f"{what}: {name}"
        assert wanted is None or torch.equal(local(found), local(wanted)), f"{what}: {name}"


@distributed(2)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("all2all", ["torch_a2a", "nvlink_p2p"])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"exact": True}], ids=str)
def test_gradients_over_transports_and_options(kernel, all2all, options, world_size):
    with p2p_on_cpu(), EPContext.from_groups(P(dp=2), device=rank_device(), max_tokens=16, deadline_s=30) as context:
        for main_dtype in (None, torch.float32):
            layers = pair(context, main_dtype, all2all=all2all, options=ExpertsOptions(**options))
            with KERNELS[kernel]():
                for seed in range(2):
                    backward(layers, rows(context, seed))
            if main_dtype is None:
                same(layers)
            else:
                for p in layers[1].expert_weights.parameters():
                    p.grad, p.main_grad = p.main_grad, None
                same(layers)


@distributed(2)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("parallel", [P(dp=2), P(dp=2, ep=1, etp=2)], ids=str)
def test_what_begins_anew(kernel, parallel, world_size):
    """Buffers follow `grad`: set to None for all, some or no parameters, replaced by another tensor, or frozen."""
    with EPContext.from_groups(parallel, device=rank_device(), deadline_s=30) as context, KERNELS[kernel]():
        layers = pair(context)

        def each(change, name=""):
            for layer in layers:
                for own, p in layer.expert_weights.named_parameters():
                    if own.endswith(name):
                        change(p)

        def forget(p):
            p.grad = None

        def replace(p):
            p.grad = p.grad * 2

        backward(layers, rows(context, 0))
        same(layers, "first")
        assert all(p.grad is not None for p in layers[1].expert_weights.parameters())
        each(forget, ".w3")
        backward(layers, rows(context, 1))
        same(layers, "some begin anew")
        each(replace, ".w2")
        each(replace, ".w1_bias")
        backward(layers, rows(context, 2))
        same(layers, "others")
        places = {id(p): local(p.grad).data_ptr() for p in layers[1].expert_weights.parameters()}
        each(forget)
        backward(layers, rows(context, 3))
        same(layers, "all begin anew")
        assert places == {id(p): local(p.grad).data_ptr() for p in layers[1].expert_weights.parameters()}, "in place"
        each(forget)
        each(lambda p: p.requires_grad_(False), ".w1")
        each(lambda p: p.requires_grad_(False), ".w2")
        each(lambda p: p.requires_grad_(False), f"{min(layers[0].expert_weights.slots_of_expert)}.w3")
        backward(layers, rows(context, 4))
        same(layers, "frozen")
        each(lambda p: p.requires_grad_(True))
        backward(layers, rows(context, 5))
        same(layers, "thawed")
        each(lambda p: p.requires_grad_(False), ".w3")
        backward(layers, rows(context, 6))
        same(layers, "frozen with a gradient")


@distributed(2)
@pytest.mark.parametrize("main_dtype", [None, torch.float32])
def test_pieces_of_experts_that_are_converted_keep_their_gradients(main_dtype, world_size):
    """With etp, converting a layer recreates its parameters and keeps their gradients."""
    with EPContext.from_groups(P(dp=2, ep=1, etp=2), device=rank_device(), deadline_s=30) as context:
        layers = pair(context, main_dtype, torch.bfloat16, experts="reference")  # for bf16, GPUs choose other kernels
        backward(layers, rows(context, 0, torch.bfloat16))
        for layer in layers:
            layer.float()
        backward(layers, rows(context, 1))
        ordinary, ours = grads(layers[0]), grads(layers[1], "grad" if main_dtype is None else "main_grad")
        for name, wanted in ordinary.items():
            assert torch.equal(local(ours[name]), local(wanted)), name


@distributed(2)
@pytest.mark.parametrize("kernel", KERNELS)
def test_float32_sums_of_bf16_gradients(kernel, world_size):
    """Float32 buffers add the bf16 gradients of each call without further rounding."""
    with EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=30) as context, KERNELS[kernel]():
        layers = pair(context, torch.float32, torch.bfloat16, experts="reference")  # as above
        total = {name: 0.0 for name, _ in layers[0].expert_weights.named_parameters()}
        for seed in range(3):
            backward(layers, rows(context, seed, torch.bfloat16))
            for name, gradient in grads(layers[0]).items():
                total[name] = total[name] + gradient.float()
            layers[0].zero_grad()
        for name, found in grads(layers[1], "main_grad").items():
            assert found.dtype == torch.float32
            assert torch.equal(found, total[name]), name
        assert all(gradient is None for gradient in grads(layers[1]).values())
        for layer in layers:
            layer.zero_grad()
        for p, q in zip(*(layer.expert_weights.parameters() for layer in layers), strict=True):
            p.grad = q.main_grad.bfloat16()
        wanted = clip_grad_norm_(layers[0], context, 1e-3)
        found = clip_grad_norm_(layers[1], context, 1e-3)
        assert abs(float(found) - float(wanted)) <= 2**-8 * float(wanted)
        assert abs(float(clip_grad_norm_(layers[1], context, 1.0)) - 1e-3) <= 1e-5, "main_grad is clipped"


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not HOPPER, reason="needs GPUs of compute capability 9.0")
@distributed(2)
@pytest.mark.parametrize("main_dtype", [None, torch.float32])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"exact": True}], ids=str)
def test_bf16_triton_adds_by_itself(options, main_dtype, world_size):
    """`bf16_triton` adds into the buffers itself.

    In bf16 the bits equal torch's sum. In float32 it rounds nothing, where ordinary gradients are rounded to bf16 once.
    The divisor, 2, is exact.
    """
    config = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=16, top_k=4)
    with EPContext.from_groups(P(dp=2), device=rank_device(), max_tokens=64, deadline_s=30) as context:
        layers = []
        for _ in range(2):
            torch.manual_seed(3)
            own = ExpertsOptions(**options)
            layers.append(MoELayer(config, context, experts="bf16_triton", dtype=torch.bfloat16, options=own))
        use_main_grads(layers[1], main_dtype)
        total = dict.fromkeys(grads(layers[0]), 0.0)
        rounded = dict.fromkeys(total, 0.0)
        for step in range(2):  # the first sync_gradients divides, later backward does
            for micro in range(3):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
                x = torch.randn(48, 256, generator=generator).to(context.device, torch.bfloat16)
                backward(layers, x)
                if main_dtype is None:
                    same(layers, f"step {step}, call {micro}")
                    continue
                for name, gradient in grads(layers[0]).items():
                    total[name] = total[name] + gradient.float()
                    rounded[name] = rounded[name] + 2**-8 * gradient.float().abs()
                layers[0].zero_grad()
                for name, found in grads(layers[1], "main_grad").items():
                    assert ((found - total[name]).abs() <= rounded[name]).all(), f"step {step}, call {micro}: {name}"
            for layer in layers:
                sync_gradients(layer, context)
                layer.zero_grad()
                zero_main_grads(layer)
            total, rounded = dict.fromkeys(total, 0.0), dict.fromkeys(total, 0.0)


@distributed(2)
def test_a_rank_whose_experts_do_not_learn(world_size):
    with EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=30) as context:
        for expert_map in (ExpertMap.uneven([EXPERTS, 0]), ExpertMap.redundant(EXPERTS, 2, 2)):
            layers = pair(context, expert_map=expert_map)
            frozen = {str(expert) for expert in expert_map.local(1)}  # with their copies on rank 0
            for layer in layers:
                for name, parameter in layer.expert_weights.named_parameters():
                    if name.split(".")[0] in frozen:
                        parameter.requires_grad_(False)
            for seed in range(2):
                backward(layers, rows(context, seed))
                same(layers)


@distributed(2)
def test_an_overflow_is_shared_and_ddp_works(world_size):
    from torch.nn.parallel import DistributedDataParallel

    with EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=30) as context:
        layers = pair(context, torch.float32)
        backward(layers, rows(context, 0))
        if dist.get_rank() == 0:
            for parameter in layers[1].expert_weights.parameters():
                parameter.main_grad.fill_(torch.inf)
        sync_gradients(layers[1], context)
        assert any(not p.main_grad.isfinite().all() for p in layers[1].expert_weights.parameters())
        layers = pair(context)
        wrapped = [DistributedDataParallel(exclude_experts(layer)) for layer in layers]
        for seed in range(2):
            backward(wrapped, rows(context, seed))
        same(layers)


@distributed(2, set_device=True)  # FSDP2 needs it
def test_what_cannot_have_them_is_refused(world_size):
    with EPContext.from_groups(P(dp=2, ep=1), device=rank_device(), deadline_s=30) as context:
        layer = MoELayer(BIASED, context)
        use_main_grads(layer)
        with pytest.raises(ConfigError, match="shard_experts=False"):
            fully_shard(layer, context)
        fully_shard(layer, context, shard_experts=False)
        layer(rows(context, 0)).square().mean().backward()
        assert all(p.grad is not None for p in layer.expert_weights.parameters())
        layer = fully_shard(MoELayer(BIASED, context), context)
        with pytest.raises(ConfigError, match="FSDP2 has sharded the experts"):
            use_main_grads(layer)
    with EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=30) as context:
        layer = MoELayer(BIASED, context)
        use_main_grads(layer)
        if dist.get_rank():  # wrong on one rank, refused on both
            next(layer.expert_weights.parameters()).register_hook(lambda grad: grad)
        with pytest.raises(InputError, match="has a hook"):
            layer(rows(context, 0))


@distributed(2)
def test_experts_that_move_say_that_gradients_are_dropped(world_size):
    config = dataclasses.replace(BIASED, expert_bias=False)
    with EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=30) as context:
        layers = [MoELayer(config, context) for _ in range(2)]
        for layer in layers:
            use_main_grads(layer)
        backward(layers, rows(context, 0))
        held = layers[0].expert_weights
        swapped = ExpertMap.from_ranks([[4, 5, 6, 7], [0, 1, 2, 3]], EXPERTS)
        loss = layers[0](rows(context, 1)).square().mean()
        with pytest.warns(UserWarning, match="are dropped"):
            held.set_expert_map(swapped)
        layers[0].placement.update(swapped)
        with pytest.raises(InputError, match="between the forward and the backward"):
            loss.backward()
    with EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=30) as context:
        layers = []
        for _ in range(2):
            torch.manual_seed(3)
            layers.append(MoELayer(config, context))
        use_main_grads(layers[1])
        backward(layers, rows(context, 0))
        for layer in layers:
            layer.zero_grad()
            layer.expert_weights.set_expert_map(swapped)
            layer.placement.update(swapped)
        backward(layers, rows(context, 1))
        same(layers)
        assert set(grads(layers[1])) == {f"{e}.{part}" for e in held.slots_of_expert for part in ("w1", "w3", "w2")}
