"""Hugging Face models with expert-parallel MoE blocks.

    model = load_pretrained(path, context)        # from disk: no rank ever holds another's experts
    model = expert_parallel(model, context)       # a model in memory, or one on the meta device
    load_weights(model, export_weights(trainer))  # from a trainer of another layout, into a serving model

All three support every model whose experts are a module of their own (`ep_moe.integrations.generic`). Models of known
families (`ep_moe.integrations.families`) run faster, because their whole blocks are replaced.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Set
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ep_moe.checkpoint.formats import PLAIN_DTYPES
from ep_moe.checkpoint.hub import HubOptions, model_folder
from ep_moe.checkpoint.model_files import keep_in_float32
from ep_moe.checkpoint.model_names import names_of
from ep_moe.checkpoint.quantization_config import unsupported_message
from ep_moe.checkpoint.reader import largest_input_scale, load_errors_on_all_ranks, load_layers
from ep_moe.checkpoint.source import CheckpointSource
from ep_moe.checkpoint.stored import check_fits
from ep_moe.checkpoint.unexpected_tensors import summarize_names, unexpected
from ep_moe.checks import check_kind, check_path
from ep_moe.config import ONE_SCALE, MoEConfig, Wire
from ep_moe.context import EPContext
from ep_moe.errors import CheckpointError, ConfigError
from ep_moe.experts.base import ExpertsOptions
from ep_moe.integrations.blocks import ExpertParallelBlock as ExpertParallelBlock
from ep_moe.integrations.blocks import check_context, check_model, model_parts, replace_blocks
from ep_moe.integrations.config_file import read_generation_config
from ep_moe.integrations.ep_implementation import register_ep_implementation as register_ep_implementation
from ep_moe.integrations.families import FAMILIES, Family, blocks_of, checked_config
from ep_moe.integrations.find_experts import find_experts
from ep_moe.integrations.forward_sync import GenerationSync
from ep_moe.integrations.forward_sync import idle_step as idle_step
from ep_moe.integrations.generic import replace_experts
from ep_moe.integrations.load import (
    build_model_on_meta,
    draw_head,
    head_names,
    load_model,
    mark_initialized,
    model_files,
    on_meta,
    warn_of_adapter,
)
from ep_moe.integrations.lora_guard import guard_adapters
from ep_moe.integrations.model_hooks import RouterLogitsHook
from ep_moe.integrations.pretrained_arguments import FromPretrainedOptions, check_arguments, dtype_asked_for
from ep_moe.integrations.push import export_weights as export_weights
from ep_moe.integrations.push import load_weights as load_weights
from ep_moe.integrations.save import save_model
from ep_moe.integrations.user_changes import family_to_replace
from ep_moe.layer import MoELayer
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.quant.schemes import PLAIN
from ep_moe.selection import explain
from ep_moe.selection.tuned import Tuned
from ep_moe.training.wrappers import exclude_experts
from ep_moe.weights.optimizers import mark_parameters_of_replaced_modules

_log = logging.getLogger("ep_moe.integrations")


def expert_parallel(
    model: PreTrainedModel,
    context: EPContext,
    *,
    expert_map: ExpertMap | None = None,
    all2all: str = explain.AUTO,
    experts: str = explain.AUTO,
    quantization: str = PLAIN.name,
    wire: Wire | None = None,
    pipeline: int | None = None,
    options: ExpertsOptions | None = None,
    tuned: Tuned | None = None,
) -> PreTrainedModel:
    """Make the MoE layers of a model expert-parallel, in place. All ranks call it with the same arguments.

    In a model of a known family, a `MoELayer` replaces each MoE block. In every other model, only the experts are
    replaced, if they are a module of their own. The same holds, with a warning, if blocks were changed in memory.

    Weights of a model in memory are copied layer by layer. All ranks must hold the same ones. A model on the meta
    device stays there, and you load its weights afterwards. Frozen parameters stay frozen. The model's own
    `save_pretrained` is refused from then on, because each rank's `state_dict()` has only its own experts.

    Args:
        model: A transformers model, such as `AutoModelForCausalLM.from_pretrained` returns.
        context: The ranks and what their layers share.
        expert_map: As `MoELayer` takes it.
        all2all: As `MoELayer` takes it.
        experts: As `MoELayer` takes it.
        quantization: As `MoELayer` takes it.
        wire: As `MoELayer` takes it.
        pipeline: As `MoELayer` takes it.
        options: As `MoELayer` takes it.
        tuned: As `MoELayer` takes it.

    Returns:
        The same model.

    Raises:
        ConfigError: On all ranks, if the model has no experts that can be replaced, or a layer cannot compute what
            they do.
    """
    layer_options: dict[str, Any] = {
        "expert_map": expert_map, "all2all": all2all, "experts": experts, "quantization": quantization, "wire": wire,
        "pipeline": pipeline, "options": options, "tuned": tuned,
    }  # fmt: skip
    check_context("expert_parallel", context)
    check_model("expert_parallel", model)
    family = family_to_replace(model, FAMILIES.get(model.config.get_text_config().model_type))
    return _parallel(model, context, family, layer_options)


def _parallel(
    model: PreTrainedModel, context: EPContext, family: Family | None, layer_options: dict[str, Any]
) -> PreTrainedModel:
    """Replace the blocks of a family, or with None only the experts, and register the hooks on the model."""
    made: dict[str, Any]
    before = [weakref.ref(parameter) for parameter in model.parameters()]  # each block is freed once it is replaced
    if family is None:
        made = dict(replace_experts(model, context, **layer_options))
    else:
        made = dict(replace_blocks(model, context, family, layer_options))
    kept = set(model.parameters())
    alive = (parameter for one in before if (parameter := one()) is not None)
    mark_parameters_of_replaced_modules(parameter for parameter in alive if parameter not in kept)
    exclude_experts(model)  # from the gradient averaging of DistributedDataParallel, which accelerate and Trainer add
    setattr(model, "save_pretrained", _no_save)  # noqa: B010 (a method, of this model alone)
    guard_adapters(model)
    # transformers reads `_can_record_outputs` of the innermost model
    inner = _innermost(model, list(made))
    first = next(iter(made.values()))
    if family is not None:
        RouterLogitsHook().attach(inner)
    first.masks.attach(model, inner, first.moe)
    if model.can_generate():
        GenerationSync.of(context).attach(model, inner)
    return model


def _innermost(model: PreTrainedModel, names: list[str]) -> PreTrainedModel:
    """Return the innermost PreTrainedModel that contains all of these modules."""
    found = model
    for prefix, module in model.named_modules():
        within = f"{prefix}." if prefix else ""
        if isinstance(module, PreTrainedModel) and all(name.startswith(within) for name in names):
            found = module
    return found


def _no_save(*_: Any, **__: Any) -> None:
    raise ConfigError(
        "model.save_pretrained would write this rank's experts alone; call "
        "ep_moe.integrations.transformers.save_pretrained(model, folder) on all ranks, or save state_dict() on every "
        "rank, each to a file of its own, and give it to load_state_dict on the same layout. With transformers' "
        "Trainer, use ep_moe.integrations.trainer.ExpertParallelTrainer"
    )


def save_pretrained(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    save_original_format: bool = True,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a model with expert-parallel layers as a checkpoint that `from_pretrained` loads. Called by all ranks.

    One rank writes. The others send it their experts, one layer after another. All weights outside the experts must be
    whole on that rank, and equal on all. The ranks compare routers, shared experts and experts before. If they differ
    where they must be equal, or experts of different ranks were mixed, all ranks warn, and the files are still written.

    Args:
        model: A model of `expert_parallel` or `load_pretrained`, with plain weights.
        folder: A folder on the file system of the job's first rank. An earlier checkpoint in it is replaced.
        save_original_format: Use the tensor names of the model's published checkpoints, else those of its modules, as
            in transformers' own `save_pretrained`.
        max_shard_bytes: The largest size of a file. A single larger tensor gets a file of its own.

    Raises:
        ConfigError: The model has no expert-parallel layers, they are quantized, or there are pipeline stages.
        CheckpointError: On all ranks, if the writing rank fails.
    """
    check_path("save_pretrained: folder", folder)
    save_model(model_parts(model), Path(folder), original=save_original_format, shard_bytes=max_shard_bytes)


def load_pretrained(
    path: str | Path,
    context: EPContext,
    *,
    dtype: torch.dtype | str | None = None,
    expert_map: ExpertMap | None = None,
    all2all: str = explain.AUTO,
    experts: str = explain.AUTO,
    quantization: str = PLAIN.name,
    wire: Wire | None = None,
    pipeline: int | None = None,
    options: ExpertsOptions | None = None,
    tuned: Tuned | None = None,
    model_class: Any = None,
    num_labels: int | None = None,
    config: PreTrainedConfig | None = None,
    attn_implementation: str | dict[str, str] | None = None,
    progress: bool = True,
    **hub: Unpack[FromPretrainedOptions],
) -> PreTrainedModel:
    """Load a model from a checkpoint, with expert-parallel MoE layers.

    Each rank reads its own experts, and everything outside the experts. Code of the checkpoint's repository is not run.

    Args:
        path: The folder of a checkpoint, or the name of a model on the Hugging Face Hub, such as "org/model". One rank
            of each host downloads what the cache lacks.
        context: The ranks and what their layers share. All ranks call this.
        dtype: The model's dtype, or its name. Default, and "auto": that of the configuration, or of the files if it
            states none.
        expert_map: As `MoELayer` takes it.
        all2all: As `MoELayer` takes it.
        experts: As `MoELayer` takes it.
        quantization: How the experts are stored. If the checkpoint has this scheme already, its bytes are kept.
        wire: As `MoELayer` takes it.
        pipeline: As `MoELayer` takes it.
        options: As `MoELayer` takes it.
        tuned: As `MoELayer` takes it.
        model_class: An auto class of transformers, such as `AutoModelForSequenceClassification`, or a model's class. A
            head that the checkpoint lacks is initialized, equal on all ranks, with a warning. Default: a causal
            language model.
        num_labels: The number of labels of a classification head. Default: that of config.json.
        config: A configuration instead of the folder's config.json, as in `from_pretrained`.
        attn_implementation: As in `from_pretrained`.
        progress: Show progress on rank 0: a bar on a terminal, else lines on stderr.
        hub: `revision`, `token`, `cache_dir`, `local_files_only` and `subfolder`, as in `from_pretrained`. Other
            arguments of `from_pretrained` are refused if they would change the result.

    Returns:
        The model in eval mode, on the context's device.

    Raises:
        CheckpointError: On all ranks, if a file of any rank is missing, unreadable or of another model.
        ConfigError: On all ranks, if the model or an argument is not supported.
    """
    check_context("load_pretrained", context)
    with context.consensus.propagate_errors("load_pretrained"):
        asked_dtype = dtype_asked_for(dtype, hub.get("torch_dtype"))
        lookup = check_arguments(hub, load_pretrained.__annotations__)
    folder = model_folder(path, context.consensus, **lookup)
    layer_options: dict[str, Any] = {
        "expert_map": expert_map, "all2all": all2all, "experts": experts, "quantization": quantization, "wire": wire,
        "pipeline": pipeline, "options": options, "tuned": tuned,
    }  # fmt: skip
    with load_errors_on_all_ranks(folder, context.consensus):
        model, known, dtype = build_model_on_meta(
            folder, asked_dtype, model_class, num_labels, config, attn_implementation
        )
        facts = {f"config.{name}": value for name, value in model.config.to_dict().items() if name[0] != "_"}
        context.consensus.require_equal("load_pretrained", facts, None)
        family, fresh = family_to_replace(model, known, fresh=True), set(head_names(model) if model_class else ())
        keep_in_float32(model, dtype)
        files = model_files(model, folder) if family is None else None
        _parallel(model, context, family, layer_options)
        if files is None:
            missing = _load_family(model, model.config.model_type, folder, context, progress, fresh)
        else:
            missing = load_model(model, files, device=context.device, dtype=dtype, progress=progress, fresh=fresh)
        if missing:
            draw_head(model, missing)
            warnings.warn(
                f"{folder}: {summarize_names(sorted(missing))} of {type(model).__name__} is missing and was newly "
                "initialized; train it",
                stacklevel=2,
            )
        warn_of_adapter(folder)
        mark_initialized(model)
        if model.can_generate():
            model.generation_config = read_generation_config(folder) or model.generation_config
    if context.layout.rank == 0:
        held = sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})
        _log.info("%s: weights loaded, %.2f GiB on rank 0", folder, held / 2**30)
    return model.eval()


def _load_family(
    model: PreTrainedModel, family: str, folder: Path, context: EPContext, progress: bool, fresh: Set[str]
) -> set[str]:
    """Load a model whose blocks were replaced. Return the names of `fresh` that the checkpoint lacks."""
    model.to_empty(device=context.device)
    blocks = {n: m for n, m in model.named_modules() if isinstance(m, ExpertParallelBlock)}
    layers = {_number(name): block.moe for name, block in blocks.items()}
    source = load_layers(layers, folder, family, progress=progress)
    missing = _load_rest(model, source, tuple(f"{name}." for name in blocks), fresh)
    in_file = [names_of(family).block_in(source, number) for number in layers]
    if (found := unexpected(model, source, [*blocks, *in_file])) is not None:
        warnings.warn(f"{folder}: {found}", stacklevel=2)
    return missing


def read_moe_config(path: str | Path, context: EPContext, **hub: Unpack[HubOptions]) -> MoEConfig:
    """Read the configuration of a checkpoint's MoE blocks. Collective. Downloads no weights.

    Args:
        path: A folder, or a name on the Hugging Face Hub.
        context: The ranks. All of them call this.
        hub: `revision`, `token`, `cache_dir`, `local_files_only` and `subfolder`, as in `from_pretrained`.

    Returns:
        The configuration.

    Raises:
        CheckpointError: On all ranks, if a rank finds no config.json.
        ConfigError: On all ranks, if the model is of no known family.
    """
    check_context("read_moe_config", context)
    folder = model_folder(path, context.consensus, weights=False, **hub)
    with load_errors_on_all_ranks(folder, context.consensus):
        return checked_config(folder)[1]


def num_experts(path: str | Path, context: EPContext, **hub: Unpack[HubOptions]) -> int:
    """Return the number of experts of a MoE layer, of any checkpoint that `load_pretrained` supports. Collective.

    Raises CheckpointError or ConfigError on all ranks.
    """
    folder = model_folder(path, context.consensus, weights=False, **hub)
    with load_errors_on_all_ranks(folder, context.consensus):
        model, family, _ = build_model_on_meta(folder, torch.float32, None, None)
        if family is not None:
            return checked_config(folder)[1].num_experts
        found = {one.layout.experts for one in find_experts(model).values()}
        if len(found) != 1:
            raise ConfigError(f"{folder}: layers have {sorted(found)} experts, and one number for all is asked")
        return found.pop()


def calibrated_wire(
    path: str | Path,
    context: EPContext,
    dispatch: str = "fp8_tensor",
    combine: str = "plain",
    **hub: Unpack[HubOptions],
) -> Wire:
    """Return the wire format of a calibrated checkpoint: its scale is the largest input scale of all experts.

    Collective. A checkpoint may have layers that the model lacks, such as those for multi-token prediction (MTP).
    Their scales are ignored.

    Args:
        path: A folder, or a name on the Hugging Face Hub.
        context: The ranks. All of them call this.
        dispatch: `Wire.dispatch`, a format with one scale.
        combine: `Wire.combine`.
        hub: `revision`, `token`, `cache_dir`, `local_files_only` and `subfolder`, as in `from_pretrained`.

    Returns:
        The wire, for `load_pretrained`.

    Raises:
        CheckpointError: On all ranks, if the checkpoint has no input scales.
    """
    folder = model_folder(path, context.consensus, **hub)
    with load_errors_on_all_ranks(folder, context.consensus):
        scale = _largest_input_scale(folder, ONE_SCALE.get(dispatch))
    return Wire(dispatch=dispatch, combine=combine, input_scale=scale)


def _largest_input_scale(folder: Path, top: float | None) -> float:
    """Return the largest input scale in the MoE layers that the model of a folder's configuration has."""
    config, moe_config = checked_config(folder)
    model = on_meta(folder, config, config.dtype or torch.float32)
    layers = {_number(name) for name, _ in blocks_of(model, FAMILIES[config.model_type])}
    experts = moe_config.num_experts
    return largest_input_scale(folder, config.model_type, layers=layers, num_experts=experts, top=top)


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """List the expert-parallel layers of a model.

    Args:
        model: Any module.

    Returns:
        Its layers in order.
    """
    check_kind("moe_layers: model", model, nn.Module)
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def _number(block: str) -> int:
    """Return a layer's number from the name of its block: the first number in it."""
    return int(next(part for part in block.split(".") if part.isdigit()))


@torch.no_grad()
def _load_rest(model: PreTrainedModel, source: CheckpointSource, blocks: tuple[str, ...], fresh: Set[str]) -> set[str]:
    """Load everything outside the MoE blocks, tie weights, and compute buffers that no checkpoint stores.

    Returns the names of `fresh` that the checkpoint lacks.
    """
    drawn: set[str] = set()
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    missing: set[str] = set()
    for name, tensor in model.state_dict().items():
        if name.startswith(blocks):
            continue
        found = source.shape(name) if source.has(name) else None
        if found != tuple(tensor.shape):
            if others := source.unsupported_tensors(name.rpartition(".")[0]):
                raise CheckpointError(unsupported_message(name, *next(iter(others.items()))))
            if found is None and name in fresh:
                drawn.add(name)
                continue
            if found is None and name in tied.keys() | tied.values():
                missing.add(name)
                continue
            got = "nothing" if found is None else list(found)
            raise CheckpointError(f"{name} must have shape {list(tensor.shape)}, got {got} in {source.origin}")
        if tensor.is_floating_point() and source.dtype(name) not in PLAIN_DTYPES:
            raise CheckpointError(
                f"{name} is {source.dtype(name)} in {source.origin}; outside the experts only bf16, fp16, fp32 and "
                f"fp8, NVFP4, MXFP4 and symmetric INT4 with their scales can be read"
            )
        tensor.copy_(check_fits(source.location(name), source.read(name), tensor.dtype))
    # ties missing weights to those in the file; tied weights that differ in the file stay separate, with a warning
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    if missing:
        raise CheckpointError(f"{' and '.join(sorted(missing))} are missing in {source.origin}; fetch it again")
    for name, module in model.named_modules():
        if module._non_persistent_buffers_set and not name.startswith(blocks):
            model._init_weights(module)  # rotary tables and the like are computed, not stored
    return drawn
