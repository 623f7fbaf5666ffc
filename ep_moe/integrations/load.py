"""Builds the model of a checkpoint folder on the meta device, and loads models of which only the experts are replaced.

Each rank reads its own experts. The rest is loaded as transformers loads it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ep_moe.checkpoint.conversion import in_file
from ep_moe.checkpoint.formats import PLAIN_DTYPES
from ep_moe.checkpoint.model_files import ExpertFiles, load_dense_parameters
from ep_moe.checkpoint.model_names import ModuleLayout
from ep_moe.checkpoint.quantized_experts import wrong_scheme
from ep_moe.checkpoint.reader import read_experts, requantization_warnings
from ep_moe.checkpoint.source import CheckpointSource
from ep_moe.checkpoint.unexpected_tensors import summarize_names
from ep_moe.errors import CheckpointError, ConfigError
from ep_moe.integrations.config_file import ADAPTER, check_given_config, class_of, read_whole_config
from ep_moe.integrations.families import FAMILIES, Family, checked_config
from ep_moe.integrations.find_experts import find_experts
from ep_moe.integrations.generic import ExpertParallelExperts, write_expert
from ep_moe.integrations.pretrained_arguments import as_dtype
from ep_moe.layer import MoELayer
from ep_moe.runtime.progress import Progress

_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def build_model_on_meta(
    folder: Path,
    dtype: torch.dtype | None,
    model_class: Any,
    num_labels: int | None,
    config: Any = None,
    attn_implementation: Any = None,
) -> tuple[PreTrainedModel, Family | None, torch.dtype]:
    """Build the model of a folder on the meta device.

    A multimodal model is built whole if its experts are modules of their own. If they can only be replaced as blocks
    of a known family, its text model alone is built, with a warning.

    Args:
        folder: The folder of the checkpoint.
        dtype: Default: the configuration's. If that states none, the first one of a float tensor in the files.
        model_class: As `load_pretrained` takes it.
        num_labels: As `load_pretrained` takes it.
        config: A configuration to use instead of config.json.
        attn_implementation: As `load_pretrained` takes it.

    Returns:
        The model, the family whose blocks are to be replaced (None: experts only), and the dtype.
    """
    whole, text = read_whole_config(folder) if config is None else check_given_config(config)
    dtype = dtype or as_dtype("config.dtype", whole.dtype or text.dtype) or _stored_dtype(folder)
    asked = config is not None or attn_implementation is not None

    def built(config: Any) -> PreTrainedModel:
        if num_labels is not None:
            config.num_labels = num_labels
        if attn_implementation is not None:
            config._attn_implementation = attn_implementation
        return on_meta(folder, config, dtype, model_class, asked=asked)

    if text.model_type not in FAMILIES:
        return built(whole), None, dtype
    if whole.get_text_config() is not whole:
        with suppress(ConfigError, CheckpointError):  # config.json names no class, or one that transformers lacks
            model = built(whole)
            if find_experts(model):
                return model, None, dtype
        warnings.warn(
            f"{folder}: of the model {whole.model_type!r} its text model {text.model_type!r} alone is loaded",
            stacklevel=3,
        )
    if config is None:
        text = checked_config(folder)[0]
    return built(text), FAMILIES[text.model_type], dtype


def _stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of the first float tensor of a checkpoint that is not quantized, as transformers does."""
    source = CheckpointSource(folder)
    kinds = (source.header(name)[0] for name in source.names())
    return next((_FLOATS[kind] for kind in kinds if kind in _FLOATS), torch.float32)


def warn_of_adapter(folder: Path) -> None:
    """Warn if a folder has a PEFT adapter. transformers' `from_pretrained` would apply it, and we do not."""
    if (folder / ADAPTER).is_file():
        warnings.warn(
            f"{folder}: transformers puts the adapter of {ADAPTER} on the model, and load_pretrained does not; call "
            f"ep_moe.integrations.lora.load_lora(model, folder), or remove the file if its weights are merged",
            stacklevel=3,
        )


def on_meta(
    folder: Path, config: Any, dtype: torch.dtype, model_class: Any = None, *, asked: bool = False
) -> PreTrainedModel:
    """Build a model on the meta device.

    asked: whether the user gives a configuration or an attention implementation, for messages
    """
    where = "config" if asked else str(folder / "config.json")
    if dtype not in PLAIN_DTYPES:
        raise ConfigError(f"dtype must be torch.bfloat16, float16, float32 or float64, got {dtype!r}")
    if model_class is None and (task := classifies(config)) is not None:
        raise ConfigError(
            f"{where}: architectures names a model with another head, {task[0]}; call load_pretrained "
            f"with model_class=transformers.AutoModel{task[1]}"
        )
    try:
        with torch.device("meta"):
            if model_class is not None:
                return made_by(model_class, config, dtype)
            if config.get_text_config() is not config:
                return class_of(config, where)._from_config(config, dtype=dtype)
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except ConfigError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if asked:
            raise ConfigError(
                f"transformers cannot build the model of config and attn_implementation: {said}; pass other values"
            ) from error
        raise CheckpointError(
            f"{where}: transformers cannot build the model that it describes: {said}; mend the file"
        ) from error


# --- heads ------------------------------------------------------------------------------------------------------------
# Heads of transformers models: the one that a checkpoint names, and one that it lacks and that is initialized here.

_TASKS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_SEED = 0  # seed of a new head, so that all ranks hold the same one


def classifies(config: Any) -> tuple[str, str] | None:
    """Return the class in config.json that is not a language model, and its task suffix; None for a language model."""
    for name in config.architectures or ():
        for task in _TASKS:
            if name.endswith(task):
                return name, task
    return None


def made_by(model_class: Any, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model by a model class or an auto class. Raise ConfigError for another class or configuration."""
    if hasattr(model_class, "_from_config"):
        made: PreTrainedModel = model_class._from_config(config, dtype=dtype)
        return made
    if not hasattr(model_class, "from_config"):
        raise ConfigError(f"model_class must be a model class of transformers or an auto class, got {model_class!r}")
    try:
        made = model_class.from_config(config, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        raise ConfigError(f"model_class={model_class.__name__}: {str(error).splitlines()[0]}") from error
    return made


def head_names(model: PreTrainedModel) -> list[str]:
    """Return the names of tensors outside the base model, which a checkpoint with another head may lack."""
    base = f"{model.base_model_prefix}."
    return [name for name in model.state_dict() if not name.startswith(base)]


def draw_head(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Initialize the modules of these tensors as transformers does, with equal values on all ranks."""
    gpus = [index for index in [model.device.index] if index is not None and model.device.type == "cuda"]
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(_SEED)
        for path in dict.fromkeys(name.rpartition(".")[0] for name in sorted(names)):
            module = model.get_submodule(path)
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                if hasattr(tensor, "_is_hf_initialized"):
                    del tensor._is_hf_initialized
            model._init_weights(module)


def mark_initialized(module: nn.Module) -> None:
    """Mark a module as initialized, as transformers' `from_pretrained` does.

    Otherwise `post_init` of the model, or of a model that contains it, would initialize its weights again.
    """
    for one in module.modules():
        one._is_hf_initialized = True  # type: ignore[assignment]


def model_files(model: Any, folder: Path) -> ExpertFiles:
    """Return the files of a model, which is on the meta device with its experts in place. Raises CheckpointError."""
    layouts = {name: found.layout for name, found in find_experts(model).items()}
    return ExpertFiles(model, CheckpointSource(folder, called=in_file), layouts)


def load_model(
    model: Any,
    files: ExpertFiles,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: bool,
    fresh: Set[str] = frozenset(),
) -> set[str]:
    """Load a model whose experts were replaced. Model and experts are on the meta device before.

    Args:
        model: The model. Its modules of experts are `ExpertParallelExperts`, which hold this rank's experts.
        files: The files of the model as it was before the replacement.
        device: The device of the loaded model.
        dtype: The dtype of the model.
        progress: Show progress on the job's first rank.
        fresh: Names that the files may lack.

    Returns:
        The names of `fresh` that the files lack.

    Raises:
        CheckpointError: On this rank only; call it under `reader.load_errors_on_all_ranks`, which raises on all ranks.
    """
    replaced = {name: one for name, one in model.named_modules() if isinstance(one, ExpertParallelExperts)}
    assert replaced.keys() == files.modules.keys(), "experts of the files and of the model differ"
    said = check_files({name: one.moe for name, one in replaced.items()}, files)
    if files.left_out:
        said.append(
            f"{summarize_names(files.left_out)} is not loaded: {type(files.model).__name__} has no such weights"
        )
    if said:
        warnings.warn(f"{files.source.origin}: {'; '.join(said)}", stacklevel=2)
    for one in replaced.values():
        one.moe.to_empty(device=device)
    apart = [f"{name}.moe" for name in replaced]
    missing = load_dense_parameters(model, files, apart, device=device, dtype=dtype, fresh=fresh)
    first = next(iter(replaced.values())).moe.context.layout.place == 0
    total = sum(len(one.local_experts) for one in replaced.values())
    with Progress(total, "loading", "expert", shown=progress and first) as bar:
        for name, one in replaced.items():
            write_local_experts(one.moe, one.layout, name, files, bar)
    return missing


def check_files(layers: Mapping[str, MoELayer], files: ExpertFiles) -> list[str]:
    """Check from file headers that the layers can load their experts. Raise CheckpointError if one cannot.

    layers: by the names of their modules of experts

    Returns warnings about tensors that will be quantized a second time.
    """
    plan = [(layers[name], *known) for name, known in files.formats.items() if known is not None]
    for layer, block, form in plan:
        wrong = form.unreadable_reason(files.source, block, layer.config)
        wrong = wrong or wrong_scheme(form, files.source, block, layer.config, layer.expert_weights.scheme)
        if wrong is not None:
            raise CheckpointError(wrong)
    return requantization_warnings(files.source, plan)


@torch.no_grad()
def write_local_experts(layer: MoELayer, layout: ModuleLayout, name: str, files: ExpertFiles, bar: Any = None) -> None:
    """Write this rank's experts of the module `name`."""
    known = files.formats[name]
    if known is not None:
        read_experts(layer, files.source, *known, bar)
        return
    for expert in layer.expert_weights.slots_of_expert:
        write_expert(layer, layout, expert, files.read(name, expert))
        if bar is not None:
            bar.update(1)
