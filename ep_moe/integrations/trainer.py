"""transformers' `Trainer` for expert-parallel models.

Trainer computes the norm of gradients from the parameters of each rank, saves on one rank, and resumes every rank from
one file. None of this holds for experts that differ between ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

from ep_moe.checkpoint.conversion import in_file
from ep_moe.checkpoint.source import CheckpointSource
from ep_moe.checks import shown
from ep_moe.errors import CheckpointError, ConfigError
from ep_moe.integrations.lora import load_factors, save_lora
from ep_moe.integrations.transformers import load_weights, moe_layers, save_pretrained
from ep_moe.training import clip_grad_norm_, dense_parameters, exclude_experts, sync_gradients

_LAYOUT = "expert_parallel.json"  # which experts each rank's optimizer state belongs to


class ExpertParallelTrainer(Trainer):  # type: ignore[misc]  # untyped
    """transformers' `Trainer` for a model of `expert_parallel` or `load_pretrained`, launched with torchrun.

    It takes the arguments of `Trainer`, and differs in three points. Gradients are clipped by the norm of the whole
    model. All ranks save together: a checkpoint has the files of `from_pretrained`, and the optimizer state of each
    rank, in a folder that all ranks share. A run resumes from such a checkpoint with the same ranks and expert maps.
    For a model with adapters (`add_lora`, or PEFT's own outside the experts), a checkpoint has the adapter alone, in
    PEFT's format.

    Dense parameters are averaged by `DistributedDataParallel`, which Trainer adds if some are trained. Every rank has
    its own batches, so the context must be data-parallel only (`ParallelConfig(dp=...)`, the default of
    `EPContext.from_torchrun`).

    Args:
        *args: As `Trainer` takes them.
        **options: As `Trainer` takes them. `model` is required.

    Raises:
        ConfigError: The model has no expert-parallel layers, their context has ranks with the same tokens or pipeline
            stages, the process has several GPUs, or the arguments ask for FSDP, DeepSpeed or fp16.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        layers = moe_layers(self.model)
        if not layers:
            raise ConfigError(
                f"ExpertParallelTrainer: model must have expert-parallel layers, got a {type(self.model).__name__} "
                f"without; call expert_parallel(model, context) before, or use transformers' Trainer"
            )
        self._layers, self._ep_context = layers, layers[0].context
        self._check()
        exclude_experts(self.model)  # a module around the model, such as a PeftModel, hides the model's own exclusion
        self.accelerator.clip_grad_norm_ = self._clip  # Trainer calls it also for the norm that it logs

    def _check(self) -> None:
        args, layout = self.args, self._ep_context.layout
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or args.fp16:
            option = "fsdp" if self.is_fsdp_enabled else "deepspeed" if self.is_deepspeed_enabled else "fp16"
            raise ConfigError(
                f"TrainingArguments.{option} must be off with ExpertParallelTrainer, got "
                f"{shown(getattr(args, option))}; leave it out (DistributedDataParallel averages dense gradients), or "
                f"use bf16=True for fp16"
            )
        if args.n_gpu > 1:
            raise ConfigError(
                f"ExpertParallelTrainer needs one process for each GPU, got {args.n_gpu} GPUs for one process, where "
                f"Trainer copies the model by DataParallel; launch with torchrun --nproc-per-node {args.n_gpu}"
            )
        if args.world_size != layout.world:
            raise ConfigError(
                f"TrainingArguments.world_size must be the context's {layout.world} ranks, got {args.world_size}; "
                f"launch with torchrun, and pass use_cpu=True on CPUs, where accelerate finds no other ranks without it"
            )
        if layout.token_ranks != layout.world:
            raise ConfigError(
                f"context must have ranks with different tokens only, as Trainer gives each of {layout.world} ranks "
                f"its own batches, got {layout.token_ranks} ranks with different tokens; use ParallelConfig(dp="
                f"{layout.world})"
            )

    def _clip(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        return clip_grad_norm_(self.model, self._ep_context, max_norm, norm_type)

    def _wrap_model(self, model: nn.Module, training: bool = True, *args: Any, **options: Any) -> nn.Module:
        """Have accelerate wrap the model in DDP, also after an `evaluate` or `predict` before `train`.

        Trainer calls this method before accelerate prepares the model. An earlier evaluation has prepared the model
        without DDP, and accelerate would keep it so. DDP refuses a model without trained dense parameters, so
        accelerate prepares that as for an evaluation.
        """
        model = super()._wrap_model(model, training, *args, **options)
        has_ddp = any(isinstance(module, DistributedDataParallel) for module in model.modules())
        if not training or has_ddp or self.args.world_size == 1:
            return model
        unwrapped: nn.Module = self.model
        unwrapped._is_accelerate_prepared = False  # type: ignore[assignment]  # an attribute of accelerate's
        if not any(parameter.requires_grad for parameter in dense_parameters(unwrapped)):
            sync_gradients(unwrapped, self._ep_context)  # gradients of experts become means, as beside DDP
            self.accelerator.prepare_model(unwrapped, evaluation_mode=True)
            unwrapped._is_accelerate_prepared = True  # type: ignore[assignment]
        return unwrapped

    # --- checkpoints: Trainer calls these methods on all ranks ------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        if hasattr(self.model, "ep_moe_lora"):
            save_lora(self.model, folder)
        elif _peft_alone(self.model):
            with self._ep_context.consensus.propagate_errors("ExpertParallelTrainer"):
                if self.args.process_index == 0:
                    self.model.save_pretrained(folder)
        else:
            save_pretrained(self.model, folder)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # of the first rank
        folder = Path(output_dir)
        if self.args.process_index == 0:
            (folder / _LAYOUT).write_text(json.dumps(self._layout_facts()))
        else:  # not `should_save`, which holds for a rank of each host with `save_on_each_node`
            torch.save(self.optimizer.state_dict(), self._optimizer_file(folder))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        with self._ep_context.consensus.propagate_errors("resume_from_checkpoint"):
            self._check_layout(folder)
            where = "cpu" if self.args.device.type == "cpu" else self.args.device
            file = self._optimizer_file(folder)
            self.optimizer.load_state_dict(torch.load(file, map_location=where, weights_only=True))
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_weights(self.state.best_model_checkpoint)

    def _load_weights(self, folder: str) -> None:
        if hasattr(self.model, "ep_moe_lora"):
            load_factors(self.model, folder)
            return
        if _peft_alone(self.model):
            with self._ep_context.consensus.propagate_errors("ExpertParallelTrainer"):
                self.model.load_adapter(folder, self.model.active_adapter, is_trainable=True)
            return
        with self._ep_context.consensus.propagate_errors("ExpertParallelTrainer"):
            source = CheckpointSource(folder, called=in_file)
        load_weights(self.model, ((name, source.raw(name)) for name in source.names()))

    def _optimizer_file(self, folder: Path) -> Path:
        rank = self.args.process_index
        return folder / (f"rank{rank}-{OPTIMIZER_NAME}" if rank else OPTIMIZER_NAME)

    def _layout_facts(self) -> dict[str, Any]:
        return {"ranks": self.args.world_size, "maps": [layer.placement.expert_map.digest for layer in self._layers]}

    def _check_layout(self, folder: Path) -> None:
        if hasattr(self.model, "ep_moe_lora"):
            loaded = "the adapter with load_lora(..., trainable=True)"
        elif _peft_alone(self.model):
            loaded = "the adapter with PeftModel.from_pretrained(..., is_trainable=True)"
        else:
            loaded = "its weights with load_pretrained"
        otherwise = f"load {loaded}, and train without resume_from_checkpoint"
        if not (folder / _LAYOUT).exists():
            raise CheckpointError(
                f"{folder} has no {_LAYOUT}, so it has no optimizer state of ExpertParallelTrainer: it was saved with "
                f"save_only_model=True, or by another trainer; {otherwise}"
            )
        saved, ours = json.loads((folder / _LAYOUT).read_text()), self._layout_facts()
        if saved["ranks"] != ours["ranks"]:
            raise CheckpointError(
                f"{folder} has the optimizer state of {saved['ranks']} ranks, and there are {ours['ranks']}; resume "
                f"with {saved['ranks']} ranks, or {otherwise}"
            )
        if saved["maps"] != ours["maps"]:
            raise CheckpointError(
                f"{folder} has the optimizer state of other expert maps; resume with those, or {otherwise}"
            )


def _peft_alone(model: Any) -> bool:
    """Whether PEFT itself holds all adapters of a model: it writes and reads them, and no expert has any."""
    return hasattr(model, "peft_config") and hasattr(model, "base_model") and hasattr(model, "load_adapter")
