"""A run of `ExpertParallelTrainer` equals one of transformers' `Trainer` in one process, and resumes."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ep_moe import CheckpointError, EPContext, ExpertMap, ParallelConfig
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import quiet, tensors_of, tiny_model
from tests.fixtures.distributed_cases import gather_from_all_ranks, same_error

pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
BOUND = 1e-4  # a few float32 steps, whose GEMMs sum the tokens of one rank or of all in other orders
BATCH, STEPS, SAVED = 4, 6, 3
EXPERTS = 8


@contextmanager
def launched(world: int) -> Iterator[None]:
    """Set the variables of torchrun that accelerate reads, for one process or for all."""
    of_rank = {
        "RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1,  # checked only: the process group is there already
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in of_rank.items():
            patch.delenv(name, raising=False)
            if world > 1:
                patch.setenv(name, str(value))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        yield
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def made(kind, model, folder, world, **options):
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH // world, per_device_eval_batch_size=BATCH // world,
        max_steps=STEPS, lr_scheduler_type="linear", max_grad_norm=0.3, save_strategy="steps",
        save_steps=SAVED, logging_steps=1, report_to=[], use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
        seed=0, **options,
    )  # fmt: skip
    if world == 1 and arguments.device.type == "cuda":
        arguments._n_gpu = 1  # otherwise one process runs `DataParallel` over all GPUs that it sees
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, model.config.vocab_size, (8,), generator=generator) for _ in range(64)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    optimizers = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None  # not Adam, which magnifies rounding
    return kind(model=model, args=arguments, train_dataset=data, eval_dataset=data[:10], optimizers=optimizers)


def numbers(trainer) -> torch.Tensor:
    """Return the loss and the gradients' norm of each step."""
    found = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return torch.tensor(found[-STEPS:])


def expert_parallel_trainer(folder, world, expert_map=None, adapter=lambda model: model, **options):
    from ep_moe.integrations.trainer import ExpertParallelTrainer
    from ep_moe.integrations.transformers import expert_parallel

    context = EPContext.from_groups(ParallelConfig(dp=world), device=rank_device(), deadline_s=60)
    model = expert_parallel(tiny_model("qwen3_moe").train().to(rank_device()), context, expert_map=expert_map)
    return made(ExpertParallelTrainer, adapter(model), folder, world, **options)


def same_files(found: Path, wanted: Path) -> None:
    ours, theirs = tensors_of(found), tensors_of(wanted)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=BOUND * float(tensor.abs().max()), msg=name)


@distributed(1, 2)
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}], ids=str)
def test_a_run_is_that_of_one_process(world_size, options):
    from transformers import Trainer

    folder = Path(gather_from_all_ranks(tempfile.mkdtemp())[0])
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": SAVED, "greater_is_better": True}
    quiet()
    alone, ours = folder / f"plain{dist.get_rank()}", folder / "ours"
    with launched(1):
        plain = made(Trainer, tiny_model("qwen3_moe").train(), alone, 1, **options, **best)
        plain.train()
        evaluated = [entry["eval_loss"] for entry in plain.state.log_history if "eval_loss" in entry]
    with launched(world_size):
        trainer = expert_parallel_trainer(ours, world_size, **options, **best)
        trainer.train()
        torch.testing.assert_close(numbers(trainer), numbers(plain), rtol=BOUND, atol=BOUND)
        assert abs(evaluated[0] - evaluated[1]) > 0.01
        assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated[0], rel=BOUND), "the first checkpoint's"
        if dist.get_rank() == 0:  # transformers writes on this rank only
            for step in (SAVED, STEPS):
                same_files(ours / f"checkpoint-{step}", alone / f"checkpoint-{step}")
            # a file that the checkpoint does not name
            (ours / f"checkpoint-{STEPS}" / "model.safetensors").rename(ours / f"checkpoint-{SAVED}" / "z.safetensors")
        dist.barrier()
        again = expert_parallel_trainer(folder / "again", world_size, **options)
        again.train(resume_from_checkpoint=str(ours / f"checkpoint-{SAVED}"))
        torch.testing.assert_close(numbers(again)[SAVED:], numbers(plain)[SAVED:], rtol=BOUND, atol=BOUND)


def experts_alone(model):
    """Freeze all parameters but the experts'."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("expert" in name)
    return model


@distributed(2)
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_a_run_that_trains_experts_alone_is_that_of_one_process(world_size, options):
    from transformers import Trainer

    folder = Path(gather_from_all_ranks(tempfile.mkdtemp())[0])
    quiet()
    with launched(1):
        plain = made(
            Trainer, experts_alone(tiny_model("qwen3_moe").train()), folder / f"{dist.get_rank()}", 1, **options
        )
        plain.train()
    with launched(world_size):
        for evaluate in (False, True):
            trainer = expert_parallel_trainer(folder / f"ours{evaluate}", world_size, adapter=experts_alone, **options)
            if evaluate:
                trainer.evaluate()
            trainer.train()
            torch.testing.assert_close(numbers(trainer), numbers(plain), rtol=BOUND, atol=BOUND)


@distributed(2)
@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=str)
def test_a_run_after_an_evaluation_is_that_of_one_without(world_size, options):
    folder = Path(gather_from_all_ranks(tempfile.mkdtemp())[0])
    quiet()
    found = []
    with launched(world_size):
        for evaluate in (False, True):
            trainer = expert_parallel_trainer(folder / str(evaluate), world_size, **options)
            if evaluate:
                trainer.evaluate()
                trainer.predict(trainer.eval_dataset)
            trainer.train()
            found.append(numbers(trainer))
            norm = trainer.model.model.norm.weight.detach()
            assert all(torch.equal(norm, other) for other in gather_from_all_ranks(norm))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def plain_adapter(model, folder):
    """Put PEFT's own adapter on attention alone, equal on all ranks."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


def expert_adapter(model, folder):
    """Put an adapter on attention and experts; the first that has experts on ranks writes it for the others."""
    from peft import LoraConfig, PeftModel

    from ep_moe.integrations.lora import add_lora, load_lora, save_lora
    from ep_moe.integrations.transformers import moe_layers

    if not moe_layers(model):
        return PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    if (folder / "adapter").exists():
        return load_lora(model, folder / "adapter", trainable=True)
    torch.manual_seed(3)
    names = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    model = add_lora(model, LoraConfig(r=4, lora_alpha=128, **names))
    save_lora(model, folder / "adapter")
    return model


@distributed(1, 2)
@pytest.mark.parametrize("adapter", [plain_adapter, expert_adapter])
def test_adapters_are_trained_saved_and_resumed(world_size, adapter):
    pytest.importorskip("peft")
    from transformers import Trainer

    folder = Path(gather_from_all_ranks(tempfile.mkdtemp())[0])
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": SAVED, "greater_is_better": True}
    quiet()
    with launched(world_size):
        trainer = expert_parallel_trainer(folder / "ours", world_size, adapter=lambda m: adapter(m, folder), **best)
        trainer.train()
        evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert evaluated[0] - evaluated[1] > 1e-3, "the first checkpoint is the one with the largest loss"
        assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated[0], rel=1e-6), "the first checkpoint's"
        saved = folder / "ours" / f"checkpoint-{SAVED}"
        assert (saved / "adapter_model.safetensors").exists()
        assert not (saved / "model.safetensors").exists()
        again = expert_parallel_trainer(folder / "again", world_size, adapter=lambda m: adapter(m, folder))
        again.train(resume_from_checkpoint=str(saved))
        torch.testing.assert_close(numbers(again)[SAVED:], numbers(trainer)[SAVED:], rtol=BOUND, atol=BOUND)
        if dist.get_rank() == 0:
            os.remove(saved / "expert_parallel.json")
        dist.barrier()
        text = same_error(CheckpointError, lambda: again.train(resume_from_checkpoint=str(saved)))
        reader = "PeftModel.from_pretrained" if adapter is plain_adapter else "load_lora"
        assert f"load the adapter with {reader}(" in text
    with launched(1):
        model = adapter(tiny_model("qwen3_moe").train(), folder)
        plain = made(Trainer, model, folder / f"plain{dist.get_rank()}", 1, save_total_limit=1)
        plain.train()
        torch.testing.assert_close(numbers(trainer), numbers(plain), rtol=BOUND, atol=BOUND)


@distributed(2)
def test_an_adapter_that_cannot_be_read_is_refused_on_all_ranks(world_size):
    pytest.importorskip("peft")
    folder = Path(gather_from_all_ranks(tempfile.mkdtemp())[0])
    quiet()
    with launched(world_size):
        trainer = expert_parallel_trainer(folder / "ours", world_size, adapter=lambda m: expert_adapter(m, folder))
        text = same_error(CheckpointError, lambda: trainer.train(resume_from_checkpoint=str(folder)))
        assert "adapter_model.safetensors cannot be read" in text


@distributed(2)
def test_an_optimizer_state_of_other_experts_is_refused(world_size):
    folder = Path(gather_from_all_ranks(tempfile.mkdtemp())[0])
    quiet()
    with launched(world_size):
        expert_parallel_trainer(folder, world_size).train()
        saved = folder / f"checkpoint-{SAVED}"
        other = expert_parallel_trainer(folder / "other", world_size, ExpertMap.round_robin(EXPERTS, world_size))
        text = same_error(CheckpointError, lambda: other.train(resume_from_checkpoint=str(saved)))
        assert f"{saved} has the optimizer state of other expert maps; resume with those, or load" in text
        text = same_error(CheckpointError, lambda: other.train(resume_from_checkpoint=str(folder)))
        assert f"{folder} holds neither model.safetensors.index.json nor model.safetensors" in text
        if dist.get_rank() == 0:
            os.remove(saved / "expert_parallel.json")
        dist.barrier()
        text = same_error(CheckpointError, lambda: other.train(resume_from_checkpoint=str(saved)))
        assert (
            "has no expert_parallel.json, so it has no optimizer state of ExpertParallelTrainer: it was saved with"
            in text
        )
