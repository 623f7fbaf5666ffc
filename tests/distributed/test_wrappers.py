"""Training wrappers of other libraries around a model with expert parallelism equal one process."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import SequentialSampler

from ep_moe import ConfigError, EPContext, ExpertMap, InputError, MoELayer, ParallelConfig, training
from ep_moe.integrations.transformers import expert_parallel
from ep_moe.testing import distributed, rank_device
from ep_moe.weights.parts import local
from tests.fixtures.checkpoint_files import quiet, tiny_model
from tests.fixtures.pipelines import refused_within, splits_backward_of_functions
from tests.fixtures.training_model import CONFIG, OPTIMIZERS, WIDTH, batch, furthest, loss_of, made, one_process, run


@distributed(2, deadline_s=60)
def test_a_call_before_the_wrapper_counts_as_those_through_it(world_size):
    """A backward before DDP wraps the model counts like one through DDP.

    DDP averages whatever a parameter's gradient holds.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=20) as context:
        found = []
        for early in (True, False):
            model = made(context)
            own = [batch(step).chunk(2)[context.layout.dp_rank].to(context.device) for step in range(2)]
            if early:
                loss_of(model, own[0]).backward()
            wrapped = DistributedDataParallel(training.exclude_experts(model))
            if not early:
                with wrapped.no_sync():
                    loss_of(wrapped, own[0]).backward()
            loss_of(wrapped, own[1]).backward()
            found.append([parameter.grad for parameter in model.parameters()])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)  # the same sums, divided before or after


@distributed(2, deadline_s=60)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("kind", ["trained", "frozen", "quantized"])
def test_a_wrapper_that_would_overwrite_experts_is_refused_before(kind, uneven, compiled, world_size):
    """DDP without `exclude_experts` is refused on all ranks, also on one without experts, and changes no weight.

    Afterwards the model can be wrapped as the message says.
    """
    with EPContext.from_groups(device=rank_device(), deadline_s=20) as context:
        held = ExpertMap.uneven([CONFIG.num_experts, 0]) if uneven else None
        options = {"quantization": "fp8_dynamic"} if kind == "quantized" else {}
        layer = MoELayer(CONFIG, context, expert_map=held, **options)
        if kind == "frozen":
            layer.expert_weights.requires_grad_(False)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, device=context.device), layer)
        before = [parameter.clone() for parameter in model.parameters()]
        whole = torch.compile(model, backend="eager") if compiled else model
        with pytest.raises(ConfigError, match=r"would overwrite the experts .*exclude_experts\(model\)\)"):
            DistributedDataParallel(whole)
        for parameter, kept in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.view(torch.uint8), kept.view(torch.uint8))
        wrapped = DistributedDataParallel(training.exclude_experts(whole))
        with torch.no_grad():
            assert wrapped(torch.ones(4, WIDTH, device=context.device)).isfinite().all()


def torchs_fsdp(model):
    """Shard as torch's tutorial does, with experts excluded."""
    fully_shard(model, ignored_params=set(training.expert_parameters(model)))


def torchs_fsdp_of_submodules(model):
    for block in model.blocks:
        fully_shard(block.linear)
        fully_shard(block.moe.router)


@distributed(2, set_device=True, deadline_s=60)
@pytest.mark.parametrize("shard", [torchs_fsdp, torchs_fsdp_of_submodules])
@pytest.mark.parametrize("ep", [1, 2])
def test_sums_of_experts_beside_torchs_means_are_refused(shard, ep, world_size):
    """torch's own `fully_shard` beside experts is refused at the optimizer step.

    Expert gradients are sums over ranks, so experts would take steps of twice the size.
    """
    with EPContext.from_groups(ParallelConfig(dp=2, ep=ep), device=rank_device(), deadline_s=20) as context:
        model = made(context)
        shard(model)
        optimizers = [
            torch.optim.SGD(parameters, lr=0.1, foreach=False)  # torch 2.11 cannot mix tensors and DTensors in foreach
            for parameters in (list(training.expert_parameters(model)), list(training.dense_parameters(model)))
        ]
        tokens = batch(0).to(context.device)
        for step in range(2):  # in the second one, ranks are compared too
            loss_of(model, tokens).backward()
            if step == 0:
                with pytest.raises(ConfigError, match=r"2 times too large; use ep_moe.training.fully_shard"):
                    optimizers[0].step()
            training.sync_gradients(model, context)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@distributed(2, set_device=True, deadline_s=60)
@pytest.mark.parametrize("ep", [1, 2])
def test_parameters_that_the_user_keeps_from_fsdp(ep, world_size):
    """`ignored_params` of `fully_shard`, dense and experts, are averaged by `sync_gradients` instead."""
    with EPContext.from_groups(ParallelConfig(dp=2, ep=ep), device=rank_device(), deadline_s=30) as context:
        model = made(context)
        ignored = {model.head.weight, *model.blocks[0].moe.expert_weights.parameters()}
        training.fully_shard(model, context, ignored_params=ignored)
        whole = {parameter for parameter in model.parameters() if not hasattr(parameter, "device_mesh")}
        assert whole == (ignored if ep == 1 else ignored | set(training.expert_parameters(model)))
        optimizer = OPTIMIZERS["sgd"](training.parameter_groups(model))
        losses = run(model, context, optimizer, lambda: training.sync_gradients(model, context), range(5))
        assert furthest(losses, one_process("sgd", 5, device=rank_device())) <= 1e-5


@distributed(2, set_device=True, deadline_s=60)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("ep", [1, 2])
def test_fsdp1_beside_experts_serves_and_does_not_train(ep, flat, world_size):
    """FSDP1 beside experts works in inference and is refused in training, also with a frozen router.

    It averages all other gradients.
    """
    refusal = r"FullyShardedDataParallel averages .* are sums over ranks; shard with ep_moe.training.fully_shard"
    with EPContext.from_groups(ParallelConfig(dp=2, ep=ep), device=rank_device(), deadline_s=20) as context:
        model, tokens = made(context), batch(0).to(context.device)
        for block in [] if flat else model.blocks:
            block.moe.router.requires_grad_(False)
        with torch.no_grad():
            wanted = model(tokens)
        experts = list(training.expert_parameters(model))
        wrapped = FullyShardedDataParallel(
            model, ignored_states=experts, use_orig_params=not flat, device_id=context.device
        )
        with torch.no_grad():
            torch.testing.assert_close(wrapped(tokens), wanted)
        if flat:
            with pytest.raises(InputError, match=refusal):
                wrapped(tokens)
        else:
            loss_of(wrapped, tokens).backward()
            with pytest.raises(ConfigError, match=refusal):
                torch.optim.SGD(wrapped.parameters(), lr=0.1).step()
        with pytest.raises(ConfigError, match=f"^sync_gradients: {refusal}"):
            training.sync_gradients(wrapped, context)
        with pytest.raises(ConfigError, match=f"^clip_grad_norm_: {refusal}"):
            training.clip_grad_norm_(wrapped, context, 1.0)


@distributed(2, set_device=True, deadline_s=60)
def test_blocks_and_then_the_model_are_sharded(world_size):
    """Sharding blocks first, then the model, FSDP2's usual order, gives the same losses.

    Experts of both ranks are sharded with their block.
    """
    with EPContext.from_groups(ParallelConfig(dp=2, ep=1), device=rank_device(), deadline_s=20) as context:
        losses = []
        for by_block in (False, True):
            model = made(context)
            before = torch.optim.SGD(model.parameters(), lr=0.1)
            for block in model.blocks if by_block else ():
                training.fully_shard(block, context)
            training.fully_shard(model, context)
            optimizer = torch.optim.SGD(training.parameter_groups(model), lr=0.1)
            for step in range(2):
                loss = loss_of(model, batch(step).to(context.device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            with pytest.raises(ConfigError, match=r"fully_shard has sharded the model.*make the optimizer after that"):
                before.step()
        assert torch.equal(*losses)


@distributed(2, set_device=True, deadline_s=60)
def test_a_group_of_dtensors_and_plain_tensors_is_refused(world_size):
    """A parameter group that mixes DTensors and plain tensors is refused where torch updates it in one call.

    That is with `foreach` or `fused`, and by default on GPUs.
    """
    on_gpu = rank_device().type == "cuda"
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=20) as context:
        model = training.fully_shard(made(context), context)
        loss_of(model, batch(0).to(context.device)).backward()
        ways = [({}, on_gpu), ({"foreach": True}, True), ({"fused": True}, True), ({"foreach": False}, False)]
        for how, refused in ways:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **how)
            if refused:
                with pytest.raises(ConfigError, match=r"give the optimizer ep_moe.training.parameter_groups\(model\)"):
                    optimizer.step()
            else:
                optimizer.step()
        torch.optim.AdamW(training.parameter_groups(model), lr=0.1, foreach=True).step()


@distributed(2)
def test_ranks_that_may_end_before_others_are_refused(world_size):
    """`join()` of DDP is refused. Ranks that go on would wait for the experts of a rank that ended."""
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=20) as context:
        wrapped = DistributedDataParallel(training.exclude_experts(made(context)))
        own = batch(0).chunk(2)[context.layout.dp_rank].to(context.device)
        with pytest.raises(InputError, match=r"join\(\) lets a rank end while the others wait"), wrapped.join():
            loss_of(wrapped, own)


def root_alone(model):
    return [model]


def each_fsdp_module(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@distributed(2, set_device=True, deadline_s=60)
@pytest.mark.parametrize("chosen", [root_alone, each_fsdp_module])
@pytest.mark.parametrize("ep", [1, 2])
def test_experts_are_divided_by_the_factor_of_fsdp(chosen, ep, world_size):
    """FSDP's gradient divide factor applies to experts too.

    Loops that divide by the number of tokens themselves set it, so that all gradients are sums.
    """
    with EPContext.from_groups(ParallelConfig(dp=2, ep=ep), device=rank_device(), deadline_s=20) as context:
        model = training.fully_shard(made(context), context)
        found = []
        own = batch(0).chunk(2)[context.layout.dp_rank].to(context.device)
        for factor in (None, 1.0):
            for module in chosen(model) if factor else ():
                module.set_force_sum_reduction_for_comms(True)  # gloo supports a factor only this way
                module.set_gradient_divide_factor(factor)
            loss_of(model, own).backward()
            training.sync_gradients(model, context)  # no effect
            found.append([local(parameter.grad).clone() for parameter in model.parameters()])
            model.zero_grad()
        for mean, total in zip(*found, strict=True):
            torch.testing.assert_close(total, 2 * mean)
        loss_of(model, own).backward()
        torch.optim.SGD(training.parameter_groups(model), lr=0.1).step()


@distributed(2, set_device=True, deadline_s=60)
@pytest.mark.parametrize("shard_experts", [False, True])
def test_cut_experts_under_a_pipeline_that_splits_backward_are_refused(shard_experts, world_size):
    """Sharded experts under a pipeline schedule that splits backward are refused.

    FSDP2 reduces the gradients of its shards wrongly there. Each rank has a pipeline of two stages of its own.
    """
    alone = [dist.new_group([rank]) for rank in range(world_size)][dist.get_rank()]
    with EPContext.from_groups(ParallelConfig(dp=2, ep=1), device=rank_device(), deadline_s=20) as context:
        x = torch.randn(4, WIDTH, device=context.device)
        torch.manual_seed(0)
        layers = [MoELayer(CONFIG, context).to(context.device) for _ in range(2)]
        layers[1](layers[0](x)).square().mean().backward()
        wanted = [[p.grad / 2 for p in layer.expert_weights.parameters()] for layer in layers]
        for layer in layers:
            layer.zero_grad()
            training.fully_shard(layer, context, shard_experts=shard_experts)
        stages = [PipelineStage(layer, i, 2, context.device, group=alone) for i, layer in enumerate(layers)]
        schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=lambda y, _: y.square().mean())
        if shard_experts:
            with refused_within(InputError, "ScheduleInterleavedZeroBubble splits backward, and FSDP2"):
                schedule.step(x, target=x)
            return
        if not splits_backward_of_functions():
            return
        schedule.step(x, target=x)
        for layer, gradients in zip(layers, wanted, strict=True):
            for parameter, gradient in zip(layer.expert_weights.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)


@distributed(2)
def test_a_compiled_model_leaves_its_experts_out_too(world_size):
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=20) as context:
        model = torch.compile(training.exclude_experts(made(context)), backend="eager")
        wrapped = DistributedDataParallel(model)
        loss_of(wrapped, batch(0).to(context.device)).backward()
        managed = {id(parameter) for parameter in wrapped._module_parameters}
        assert not any(id(parameter) in managed for parameter in training.expert_parameters(model))


STEPS, RATE, MAX_NORM = 4, 0.2, 0.3


def clipped_losses_of_one_process(ids):
    model = tiny_model("qwen3_moe").train()
    optimizer, found = torch.optim.SGD(model.parameters(), lr=RATE), []
    for rows in ids.split(4):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > 2 * MAX_NORM
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@distributed(2, deadline_s=120)
def test_the_trainer_of_transformers_clips_by_the_norm_of_all_ranks(tmp_path, world_size):
    """transformers' Trainer clips by the global norm through a callback, as docs/how-to/training.md shows.

    The Trainer's own norm covers one rank's experts.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    # accelerate reads torchrun's variables; this process ends with the test
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.setdefault(name, str(dist.get_rank()))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.setdefault(name, str(world_size))
    quiet()
    ids = torch.randint(0, 64, (4 * STEPS, 12), generator=torch.Generator().manual_seed(0))

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

    with EPContext.from_groups(device=rank_device(), deadline_s=30) as context:

        class Clip(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **_):
                training.clip_grad_norm_(model, context, MAX_NORM)

        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            max_steps=STEPS,
            max_grad_norm=0,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=context.device.type == "cpu",
            disable_tqdm=True,
        )
        model = expert_parallel(tiny_model("qwen3_moe").to(context.device), context)
        rows = [{"input_ids": row, "labels": row} for row in ids]
        trainer = InOrder(model=model, args=arguments, train_dataset=rows, callbacks=[Clip()])
        trainer.train()
        if dist.get_rank() == 0:
            found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            wanted = clipped_losses_of_one_process(ids)
            torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-4)
