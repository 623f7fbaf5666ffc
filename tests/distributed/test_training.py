"""Training on ranks equals training in one process: gradient tools, torch's wrappers, and refusals."""

from __future__ import annotations

import os
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ep_moe import EPContext, ExpertMap, MoEConfig, MoELayer, ParallelConfig, RoutingConfig, Tokens, training
from ep_moe.config import RoutingMethod
from ep_moe.errors import ConfigError, InputError
from ep_moe.testing import distributed, rank_device
from ep_moe.weights.parts import local
from tests.fixtures.distributed_cases import gather_from_all_ranks
from tests.fixtures.distributed_cases import same_error as same_error_of
from tests.fixtures.training_model import (
    CONFIG,
    EXPERTS,
    OPTIMIZERS,
    WIDTH,
    batch,
    furthest,
    loss_of,
    made,
    one_process,
    run,
)

P = ParallelConfig
LAYOUTS = {
    2: [P(dp=2), P(tp=2), P(tp=2, tokens=Tokens.SHARDED), P(dp=2, ep=1), P(dp=2, ep=1, etp=2)],
    4: [P(dp=4), P(dp=2, tp=2), P(dp=4, ep=2), P(dp=4, ep=2, etp=2), P(dp=2, tp=2, ep=2, etp=2), P(dp=4, ep=1, etp=2)],
}
# the optimizer's state affects the third loss first
STEPS, BOUND, MAX_NORM = 3, 1e-5, 0.5  # relative; the losses are float32 means of some hundred numbers


def same_error(call):
    return same_error_of(InputError, call)


def contexts(layouts):
    for parallel in layouts:
        with EPContext.from_groups(parallel, device=rank_device(), deadline_s=30) as context:
            yield context


def redundant(context: EPContext) -> ExpertMap | None:
    return ExpertMap.redundant(EXPERTS, context.layout.ep, 2) if context.layout.ep > 1 else None


def by_hand(model, context):
    return model, lambda: training.sync_gradients(model, context)


def by_ddp(model, context):
    return DistributedDataParallel(training.exclude_experts(model)), lambda: None


def by_fsdp(model, context):
    return training.fully_shard(model, context), lambda: None


WAYS = {"by hand": by_hand, "DDP": by_ddp, "FSDP2": by_fsdp}


@distributed(2, 4, deadline_s=280)
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_one_process(way, world_size):
    """Losses equal one process, by hand and under torch's wrappers.

    Wrappers leave experts to the code of `sync_gradients`, so under them each layout runs with one of the optimizers.
    """
    # clip under SGD, whose steps are proportional to the gradients; AdamW hardly depends on their scale
    runs = (("sgd", MAX_NORM, [lambda context: None]), ("adamw", None, [redundant]))
    for at, (optimizer, max_norm, maps) in enumerate(runs):
        wanted = one_process(optimizer, STEPS, max_norm, rank_device())
        for context in contexts(LAYOUTS[world_size] if way == "by hand" else LAYOUTS[world_size][at::2]):
            for expert_map in [found(context) for found in maps]:
                if way == "FSDP2" and context.device.type == "cuda":
                    torch.cuda.set_device(context.device)  # needed by FSDP2
                model, after = WAYS[way](made(context, expert_map), context)

                def finish(model=model, after=after, context=context, max_norm=max_norm):
                    after()
                    if max_norm is not None:
                        training.clip_grad_norm_(model, context, max_norm)

                found = run(
                    model, context, OPTIMIZERS[optimizer](training.parameter_groups(model)), finish, range(STEPS)
                )
                what = f"{way}, {optimizer}, {context.layout}, {expert_map}"
                assert furthest(found, wanted) <= BOUND, what
                check_copies(model, context, what)


@distributed(2)
@pytest.mark.parametrize("ep", [1, 2])
def test_means_of_the_users_own_beside_sums_are_warned_of(ep, world_size):
    """A loop that averages dense gradients by its own `all_reduce` is warned.

    Expert gradients are sums, so twice as large as the user expects.
    """
    with EPContext.from_groups(P(dp=2, ep=ep), device=rank_device(), deadline_s=30) as context:
        for own in (True, False):
            layer = MoELayer(CONFIG, context)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in range(4):
                    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + context.layout.rank))
                    layer(x.to(context.device)).square().sum().backward()
                    if own:
                        for parameter in training.dense_parameters(layer):
                            dist.all_reduce(parameter.grad)
                            parameter.grad /= 2
                    else:
                        training.sync_gradients(layer, context)
                    optimizer.step()
                    optimizer.zero_grad()
            found = [str(one.message) for one in caught if "are sums over 2 ranks: they are" in str(one.message)]
            assert len(found) == own, caught


@distributed(2)
def test_the_mean_of_tokens_that_tp_ranks_share_is_one_rank_s(world_size):
    with EPContext.from_groups(P(tp=2), device=rank_device(), deadline_s=30) as context:
        layer = MoELayer(CONFIG, context)
        layer(torch.ones(3, WIDTH, device=context.device)).sum().backward()
        before = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
        training.sync_gradients(layer, context)
        assert any(name.startswith("expert_weights") for name in before)
        for name, gradient in before.items():
            assert torch.allclose(local(layer.get_parameter(name).grad), local(gradient)), name


@distributed(2, 4, deadline_s=120)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_whose_experts_do_not_learn(way, world_size):
    """A rank without experts, or with frozen ones, goes backward as often as its peers and takes part there."""

    def frozen(model):
        for name, parameter in model.named_parameters():
            if ".expert_weights." in name and int(name.split(".expert_weights.")[1].split(".")[0]) < EXPERTS // 2:
                parameter.requires_grad_(False)
        return model

    alone = EPContext.local(rank_device())
    wanted = {}
    for change in (None, frozen):
        model = made(alone) if change is None else change(made(alone))
        wanted[change] = run(model, alone, OPTIMIZERS["sgd"](model.parameters()), lambda: None, range(STEPS))
    for context in contexts([P(dp=2)] if world_size == 2 else [P(dp=4), P(dp=4, ep=2), P(dp=2, tp=2, ep=2)]):
        empty, copies = ExpertMap.uneven([EXPERTS, 0]), ExpertMap.from_ranks([[0, 1, 2, 3], [4, 5, 6, 7, 0]], EXPERTS)
        if context.layout.ep == 4:
            empty = ExpertMap.uneven([EXPERTS - 2, 0, 2, 0])
            copies = ExpertMap.from_ranks([[0, 1], [2, 3], [4, 5, 0], [6, 7, 4]], EXPERTS)
        for change, expert_map in ((None, empty), (frozen, None), (frozen, empty), (frozen, copies)):
            if way == "FSDP2" and context.device.type == "cuda":
                torch.cuda.set_device(context.device)
            model = made(context, expert_map)
            model, after = WAYS[way](model if change is None else change(model), context)
            optimizer = OPTIMIZERS["sgd"](training.parameter_groups(model))
            found = run(model, context, optimizer, after, range(STEPS))
            assert furthest(found, wanted[change]) <= BOUND, f"{way}, {context.layout}, {expert_map}, {change}"
    alone.destroy()


def check_copies(model, context, what):
    """Check that all ranks that hold an expert, or the same piece of it, hold the same bits."""
    own = {
        name: getattr(parameter, "_local_tensor", parameter).detach().cpu()
        for name, parameter in model.named_parameters()
        if "expert_weights" in name
    }
    cut = any(weights.gradient_sum.sharded for weights in training.parameters.expert_weights_of(model))
    for rank, theirs in enumerate(gather_from_all_ranks(own)):
        if not cut and rank % context.layout.etp == context.layout.etp_rank:
            for name in own.keys() & theirs.keys():
                assert torch.equal(own[name], theirs[name]), f"{what}: {name} of rank {rank}"


@distributed(4, deadline_s=120)
def test_hybrid_sharding(world_size):
    with EPContext.from_groups(P(dp=4, ep=2), device=rank_device(), deadline_s=30) as context:
        mesh = init_device_mesh(context.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
        if context.device.type == "cuda":
            torch.cuda.set_device(context.device)
        model = training.fully_shard(made(context), context, mesh=mesh)
        held = [p for p in training.expert_parameters(model) if p.device_mesh.size() == 2]
        assert len(held) == len(training.expert_parameters(model)), "experts are cut over the ranks that hold them"
        found = run(model, context, OPTIMIZERS["sgd"](training.parameter_groups(model)), lambda: None, range(STEPS))
        assert furthest(found, one_process("sgd", STEPS, device=rank_device())) <= BOUND
        copied = training.fully_shard(made(context, redundant(context)), context)
        assert not any(hasattr(p, "device_mesh") for p in training.expert_parameters(copied)), "copies are summed whole"


@distributed(2, set_device=True)
def test_a_mesh_has_all_ranks_with_tokens_of_their_own(world_size):
    with EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=30) as context:
        mesh = init_device_mesh(context.device.type, (2, 1), mesh_dim_names=("replicate", "shard"))["shard"]
        with pytest.raises(ConfigError, match=r"mesh must have the 2 ranks with different tokens.*, got 1"):
            training.fully_shard(made(context), context, mesh=mesh)


@distributed(2, deadline_s=60)
def test_a_router_in_float32_under_fsdp(world_size):
    """A float32 router in a 16-bit model is refused by `fully_shard`, and the remedy in the error works.

    FSDP2 shards one dtype per module.
    """
    routing = RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, correction_bias=True, float32_logits=True)
    config = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2, routing=routing)
    with EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=30) as context:
        if context.device.type == "cuda":
            torch.cuda.set_device(context.device)
        layer = MoELayer(config, context, experts="reference", dtype=torch.bfloat16)
        model = nn.Sequential(nn.Linear(16, 16, dtype=torch.bfloat16), layer).to(context.device)
        with pytest.raises(ConfigError, match=r"routers with .*float32_logits=True are float32.*call model.float\(\)"):
            training.fully_shard(model, context)
        training.fully_shard(model.float(), context)
        model(torch.ones(6, 16, device=context.device)).sum().backward()
        assert layer.router.weight.grad.full_tensor().dtype == torch.float32


@distributed(2, deadline_s=60)
def test_norms_are_those_of_one_process(world_size):
    alone = EPContext.local(rank_device())
    model = made(alone)
    loss_of(model, batch(0).to(alone.device)).backward()
    for parallel in (P(dp=2), P(dp=2, ep=1, etp=2), P(dp=2, ep=1)):
        with EPContext.from_groups(parallel, device=rank_device(), deadline_s=30) as context:
            own = made(context, redundant(context))
            loss_of(own, batch(0).chunk(2)[dist.get_rank()].to(context.device)).backward()
            training.sync_gradients(own, context)
            assert all(block.moe.expert_weights.gradient_sum.compared for block in own.blocks), "once for a model"
            for kind in (2.0, 1.0, float("inf")):
                wanted = nn.utils.get_total_norm([p.grad for p in model.parameters()], kind)
                found = training.clip_grad_norm_(own, context, 1e9, kind)
                assert abs(float(found) - float(wanted)) <= BOUND * float(wanted), (parallel, kind)


@distributed(2, deadline_s=60)
def test_what_would_mix_experts_is_refused(world_size):
    """Wrappers that would mix ranks' experts are refused by name, on all ranks."""
    with EPContext.from_groups(device=rank_device(), deadline_s=10) as context:
        x = torch.ones(4, WIDTH, device=context.device)

        def layer(seed=0, expert_map=None):
            torch.manual_seed(seed)
            return MoELayer(CONFIG, context, expert_map=expert_map)

        inner = nn.Sequential(layer())
        for parameter in inner.parameters():
            dist.broadcast(parameter.data, 0)
        assert "something has broadcast one rank's parameters" in same_error(lambda: inner(x))
        with pytest.raises(ConfigError, match=r"ep_moe.training.fully_shard\(model, context\)"):
            fully_shard(nn.Sequential(layer()))
        other = layer(seed=dist.get_rank())
        assert other(x).isfinite().all(), "ranks with seeds of their own get the first one's layer"
        other = layer()
        with torch.no_grad():
            other.router.weight.add_(dist.get_rank())
        assert "router.weight on rank 1 differs" in same_error(lambda: other(x))
        assert "router.weight on rank 1 differs" in same_error(lambda: other(x)), "and again"
        with torch.no_grad():
            for part in (other.router, other.shared_experts):
                for parameter in part.parameters():
                    dist.broadcast(parameter, 0)
        torch.manual_seed(0)
        other.expert_weights.reset_parameters()
        assert other(x).isfinite().all(), "mended, it computes"
        twice = layer(expert_map=ExpertMap.redundant(EXPERTS, 2, 2))
        if dist.get_rank():
            twice.expert_weights.w13.add_(1)
        assert "copies of expert 0 on ranks 0, 1 differ" in same_error(lambda: twice(x))


@distributed(2, deadline_s=60)
def test_dense_parameters_that_differ_are_found(world_size):
    """Dense parameters outside the layers that differ between ranks are found by the training tools.

    No layer call compares them, and gradients of different models would be averaged.
    """
    with EPContext.from_groups(device=rank_device(), deadline_s=10) as context:
        model = made(context, seed=dist.get_rank())
        loss_of(model, batch(0).to(context.device)).backward()
        before = [local(p.grad).clone() for p in training.expert_parameters(model)]
        text = same_error(lambda: training.sync_gradients(model, context))
        assert "embedding.weight differs between rank 0 and 1" in text
        assert "fully_shard: embedding.weight differs" in same_error(lambda: training.fully_shard(model, context))
        model.zero_grad()
        loss_of(model, batch(0).to(context.device)).backward()
        for parameter, gradient in zip(training.expert_parameters(model), before, strict=True):
            assert torch.equal(local(parameter.grad), gradient), "a sum as before: nothing was refused in part"
        with torch.no_grad():
            for parameter in training.dense_parameters(model):
                dist.broadcast(parameter, 0)
        training.sync_gradients(model, context)
        torch.manual_seed(dist.get_rank())
        model.other = torch.nn.Linear(1, 1, device=context.device)  # added after the rest was compared
        assert "other.weight differs between rank 0" in same_error(lambda: training.sync_gradients(model, context))
    with EPContext.from_groups(P(dp=2, ep=1), device=rank_device(), deadline_s=10) as context:
        model = made(context)
        if dist.get_rank():
            model.blocks[1].moe.expert_weights.w2[3].add_(1)
        loss_of(model, batch(0).to(context.device)).backward()
        text = same_error(lambda: training.sync_gradients(model, context))
        assert "blocks.1.moe.expert_weights.3.w2 differs" in text
        for parameter in training.expert_parameters(model):
            assert parameter.grad is not None
    with EPContext.from_groups(P(dp=2, ep=1), device=rank_device(), deadline_s=10) as context:
        model = made(context)
        model.head.requires_grad_(not dist.get_rank())
        text = same_error(lambda: training.sync_gradients(model, context))
        assert "names, shapes, dtypes or requires_grad; make the same model on all ranks" in text


@distributed(4, deadline_s=60)
def test_experts_that_differ_in_one_expert_group_are_found_by_all(world_size):
    """Replicas that differ in one group are found by all ranks, also by those whose own copies are equal.

    Pieces of experts are compared too.
    """
    for parallel in (P(dp=4, ep=2), P(dp=4, ep=1, etp=2)):
        with EPContext.from_groups(parallel, device=rank_device(), deadline_s=10) as context:
            model = made(context)
            if dist.get_rank() == 3:
                model.blocks[1].moe.expert_weights.w2[3].add_(1)
            loss_of(model, batch(0).to(context.device)).backward()
            before = [local(p.grad).clone() for p in training.expert_parameters(model)]
            text = same_error(partial(training.sync_gradients, model, context))
            assert "w2 differs between rank 1 and 3" in text
            for parameter, gradient in zip(training.expert_parameters(model), before, strict=True):
                assert torch.equal(local(parameter.grad), gradient), "a refused call changes nothing"


@distributed(2, deadline_s=60)
def test_gradients_may_be_averaged_after_each_micro_batch_and_twice(world_size):
    with EPContext.from_groups(device=rank_device(), deadline_s=30) as context:

        def gradients(after_each: int) -> list[torch.Tensor]:
            model = made(context)
            for step in range(3):
                loss_of(model, batch(step).chunk(2)[dist.get_rank()].to(context.device)).backward()
                for _ in range(after_each):
                    training.sync_gradients(model, context)
            training.sync_gradients(model, context)
            return [local(parameter.grad) for parameter in model.parameters()]

        wanted = gradients(0)
        for after_each in (1, 2):
            for found, once in zip(gradients(after_each), wanted, strict=True):
                torch.testing.assert_close(found, once, rtol=1e-5, atol=1e-6 * float(once.abs().max()))


@distributed(4, deadline_s=60)
def test_a_norm_counts_every_pipeline_stage(world_size):
    with EPContext.from_groups(P(pp=2, dp=2), device=rank_device(), deadline_s=30) as context:
        model = made(context, seed=context.layout.pp_rank)  # each stage has another model
        loss_of(model, batch(0).chunk(2)[context.layout.dp_rank].to(context.device)).backward()
        training.sync_gradients(model, context)
        alone = EPContext.local(rank_device())
        stages = [made(alone, seed=stage) for stage in range(2)]
        for stage in stages:
            loss_of(stage, batch(0).to(alone.device)).backward()
        for kind in (2.0, float("inf")):
            wanted = nn.utils.get_total_norm([p.grad for stage in stages for p in stage.parameters()], kind)
            found = training.clip_grad_norm_(model, context, 1e9, kind)
            assert abs(float(found) - float(wanted)) <= BOUND * float(wanted)


@distributed(4, deadline_s=60)
def test_a_wrapper_over_some_ranks_is_refused(world_size):
    """DDP over only some ranks is refused.

    It would average dense gradients over two ranks, where those of experts are sums of four.
    """
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with EPContext.from_groups(device=rank_device(), deadline_s=10) as context:
        layer = training.exclude_experts(nn.Sequential(MoELayer(CONFIG, context)))
        wrapped = DistributedDataParallel(layer, process_group=pairs[dist.get_rank() // 2])
        x = torch.ones(4, WIDTH, device=context.device)
        with pytest.raises(InputError, match="averages over ranks"):
            wrapped(x)


@distributed(2, deadline_s=60)
def test_ranks_that_train_apart_are_warned(world_size):
    """A loop without sync_gradients is warned under every layout, as the ranks' routers drift apart."""
    for parallel in (P(dp=2), P(dp=2, ep=1), P(dp=2, ep=1, etp=2)):
        for synced in (False, True):
            with EPContext.from_groups(parallel, device=rank_device(), deadline_s=10) as context:
                model = made(context)
                after = partial(training.sync_gradients, model, context) if synced else lambda: None
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    run(model, context, OPTIMIZERS["sgd"](training.parameter_groups(model)), after, range(9))
                texts = [str(warning.message) for warning in caught if "sync_gradients" in str(warning.message)]
                assert len(texts) == (0 if synced else 2), f"{parallel}: once for each of two layers, got {texts}"
                assert all("after 2 backward calls" in text for text in texts)


@distributed(2, deadline_s=100)
def test_accelerate_gives_the_losses_of_one_process(world_size):
    accelerate = pytest.importorskip("accelerate")
    # accelerate reads torchrun's variables; this process ends with the test
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.setdefault(name, str(dist.get_rank()))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.setdefault(name, str(world_size))
    with EPContext.from_groups(device=rank_device(), deadline_s=30) as context:
        accelerator = accelerate.Accelerator(cpu=context.device.type == "cpu")
        model = training.exclude_experts(made(context))
        model, optimizer = accelerator.prepare(model, OPTIMIZERS["adamw"](model.parameters()))
        found = run(model, context, optimizer, lambda: None, range(STEPS))
        assert furthest(found, one_process("adamw", STEPS, device=rank_device())) <= BOUND


@distributed(4, deadline_s=60)
def test_a_layers_numbers_depend_on_the_seed_and_the_expert_alone(world_size):
    torch.manual_seed(3)
    alone = MoELayer(CONFIG, EPContext.local(rank_device()))
    wanted = {name: tensor.cpu() for name, tensor in alone.state_dict().items()}
    assert not torch.equal(wanted["expert_weights.0.w1"], wanted["expert_weights.4.w1"])
    for parallel in (P(dp=4), P(dp=2, tp=2, ep=2, etp=2), P(dp=4, ep=2)):
        with EPContext.from_groups(parallel, device=rank_device(), deadline_s=30) as context:
            for expert_map in (None, redundant(context), ExpertMap.round_robin(EXPERTS, context.layout.ep)):
                torch.manual_seed(3)
                layer = MoELayer(CONFIG, context, expert_map=expert_map)
                for name, tensor in layer.state_dict().items():
                    assert torch.equal(tensor.cpu(), wanted[name]), (parallel, name)


@distributed(2, deadline_s=60)
def test_a_rank_without_rows_has_zeros(world_size):
    """A rank without rows has zero gradients, not None, so a loop of collectives over gradients works."""
    with EPContext.from_groups(P(dp=2, ep=1), device=rank_device(), deadline_s=10) as context:
        model = made(context)
        layer = model.blocks[0].moe
        rows = torch.ones(0 if dist.get_rank() else 4, WIDTH, device=context.device)
        layer(rows).sum().backward()
        for parameter in layer.expert_weights.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
