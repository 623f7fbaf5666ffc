"""Test what `ExpertParallelTrainer` refuses."""

from types import SimpleNamespace

import pytest

from ep_moe import CheckpointError, ConfigError
from tests.fixtures.checkpoint_files import tiny_model

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import TrainingArguments

from ep_moe.integrations.trainer import ExpertParallelTrainer


def test_a_model_without_layers_is_refused(tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match=r"got a Qwen3MoeForCausalLM without; call expert_parallel\(model, context\)"):
        ExpertParallelTrainer(model=tiny_model("qwen3_moe"), args=arguments)


def trainer_with(ranks=2, token_ranks=2, gpus=1, fsdp=False, deepspeed=False, fp16=False):
    """Return what the checks read of a trainer. Most of these options cannot be set on a CPU with one rank."""
    arguments = SimpleNamespace(
        world_size=ranks, process_index=0, n_gpu=gpus, fsdp="full_shard", deepspeed="zero.json", fp16=fp16
    )
    made = object.__new__(ExpertParallelTrainer)
    made.args, made.is_fsdp_enabled, made.is_deepspeed_enabled = arguments, fsdp, deepspeed
    made._ep_context = SimpleNamespace(layout=SimpleNamespace(world=2, token_ranks=token_ranks))
    made._layers, made.model = [], SimpleNamespace()
    return made


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"fsdp": True}, r"TrainingArguments.fsdp must be off .* got 'full_shard'; leave it out"),
        ({"deepspeed": True}, r"TrainingArguments.deepspeed must be off .* got 'zero.json'; leave it out"),
        ({"fp16": True}, r"TrainingArguments.fp16 must be off .* got True; .* use bf16=True for fp16"),
        ({"gpus": 4}, r"one process for each GPU, got 4 GPUs .* torchrun --nproc-per-node 4"),
        ({"ranks": 1}, r"world_size must be the context's 2 ranks, got 1; launch with torchrun, and pass use_cpu=True"),
        ({"token_ranks": 1}, r"each of 2 ranks its own batches, got 1 ranks .*; use ParallelConfig\(dp=2\)"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(given, text):
    trainer_with()._check()
    with pytest.raises(ConfigError, match=text):
        trainer_with(**given)._check()


def test_an_optimizer_state_of_other_ranks_is_refused(tmp_path):
    (tmp_path / "expert_parallel.json").write_text('{"ranks": 4, "maps": []}')
    with pytest.raises(CheckpointError, match=r"optimizer state of 4 ranks, and there are 2; resume with 4 ranks, or"):
        trainer_with()._check_layout(tmp_path)
