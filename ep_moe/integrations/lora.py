"""LoRA on models with expert-parallel layers: factors of experts by ep_moe, all others by PEFT itself.

    model = add_lora(model, LoraConfig(r=8, target_modules=["q_proj"], target_parameters=["experts.down_proj"]))
    save_lora(model, folder)        # an adapter that PeftModel.from_pretrained loads
    model = merge_lora(model)       # into the weights

PEFT would wrap the module that holds all experts. Here each rank holds only its own experts, and their factors.
"""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ep_moe.context import EPContext
from ep_moe.errors import CheckpointError, ConfigError
from ep_moe.integrations.blocks import layers_with_layout, shared_names
from ep_moe.integrations.lora_guard import accept_adapter, guard_scales
from ep_moe.integrations.lora_targets import (
    PREFIX,
    check_config,
    check_modules,
    config_facts,
    converted,
    converted_adapter,
    expert_targets,
    is_named,
    meta_copy,
    moved_modules,
    patterns_of_peft,
)
from ep_moe.training.wrappers import exclude_experts
from ep_moe.weights import lora
from ep_moe.weights.expert_weights import ExpertWeights

_FILE = "adapter_model.safetensors"
# values of init_lora_weights that only draw factors, which a file overwrites; "pissa" and others change the weights too
_DRAWN = (False, "gaussian", "orthogonal", "eva")


def add_lora(model: nn.Module, config: Any, *, seed: int = 0) -> Any:
    """Freeze a model and add trainable LoRA factors to the targets of PEFT's `LoraConfig`. Called by all ranks.

    - `target_parameters` may name matrices of experts as transformers' module holds them (`experts.gate_up_proj`,
      `experts.down_proj`). Each rank gets the factors of its own experts.
    - `target_modules` may name the linear layers of single experts (`gate_proj`, `up_proj`, `down_proj`). PEFT rewrites
      these to the parameters above.
    - All other targets are handled by PEFT's `get_peft_model`.

    `sync_gradients`, `clip_grad_norm_` and DDP treat factors of experts as they treat the experts.

    Args:
        model: A model of `expert_parallel` or `load_pretrained`, with a kernel that has a backward
            (experts="reference").
        config: `peft.LoraConfig`.
        seed: The seed of the factors of experts, the same on all ranks.

    Returns:
        A `PeftModel` around the model if PEFT handles a target, else the model.

    Raises:
        ConfigError: peft is not installed, the configuration requests something unsupported or differs between ranks,
            or the experts cannot have factors (quantized, sharded by etp, or redundant).
    """
    _compare("add_lora", model, config, {"seed": seed})
    return _add(model, config, seed)


def _compare(what: str, model: Any, config: Any, facts: dict[str, Any]) -> None:
    """Raise ConfigError on all ranks if one cannot add factors by this configuration, or if ranks have others.

    facts: what must be equal on all ranks beside the configuration
    """
    peft, layers = _peft(), layers_with_layout(model)
    problem = _second_problem(what, model, peft)
    if not isinstance(config, peft.LoraConfig):
        problem = ConfigError(
            f"{what} takes a LoraConfig of peft, got a {type(config).__name__}; for adapters without experts call "
            "get_peft_model or PeftModel.from_pretrained of peft"
        )
    if layers:
        facts = {} if problem is not None else config_facts(config) | facts
        layers[0].layer.context.consensus.require_equal(what, facts, problem)
    elif problem is not None:
        raise problem


def _add(model: Any, config: Any, seed: int) -> Any:
    """Add factors, as `add_lora` does, by a configuration that was compared."""
    peft, layers = _peft(), layers_with_layout(model)
    config = converted(config, model)
    wanted = list(config.target_parameters or [])
    targets = list(expert_targets(model, wanted))
    others = [name for name in wanted if not any(one.matches(name) for one in targets)]
    names = [name for name, _ in model.named_parameters()]
    if absent := [name for name in others if not any(is_named(each, name) for each in names)]:
        raise ConfigError(
            f"LoraConfig.target_parameters names {absent[0]!r}, which is no parameter of {type(model).__name__} with "
            f"expert-parallel layers; name experts' matrices as transformers does, and leave out the router"
        )
    of_peft = bool(config.target_modules or others or not targets)
    if targets:
        check_config(config, of_peft=of_peft)
    ranks = {target: target.low_rank(config) for target in targets}
    of_layers = [
        (one, {target.stored: ranks[target] for target in targets if target.of.name == one.name}) for one in layers
    ]
    for one, of_layer in of_layers:
        if of_layer:  # before PEFT wraps and freezes the model
            lora.check_lora(one.layer.expert_weights)
    if of_peft:
        dense = copy.deepcopy(config)
        dense.target_parameters = others or None
        dense.target_modules = moved_modules(config.target_modules, model)
        dense.modules_to_save = moved_modules(config.modules_to_save, model)
        named = copy.deepcopy(config)
        named.target_parameters = others or None  # PEFT does not handle those of experts
        check_modules(named, model, dense)
        for pattern in ("rank_pattern", "alpha_pattern"):
            setattr(dense, pattern, patterns_of_peft(getattr(config, pattern) or {}, dense, model, targets))
        accept_adapter(model, dense)
        model = peft.get_peft_model(model, dense)
    else:
        model.requires_grad_(False)
    for one, of_layer in of_layers:
        if of_layer:
            own_seed = seed * 2**20 + zlib.crc32(one.name.encode()) % 2**20
            lora.add_lora(one.layer.expert_weights, of_layer, own_seed)
    exclude_experts(model)
    model.ep_moe_lora = config
    if targets:
        setattr(model, "save_pretrained", _no_save)  # noqa: B010 (a method, of this model alone)
        if isinstance(model, peft.PeftModel):
            _join_adapters(model, [one.layer.expert_weights for one in layers])
            guard_scales(model, peft.tuners.lora.LoraLayer, [one.layer.expert_weights for one in layers])
    return model


def _second_problem(what: str, model: Any, peft: Any) -> ConfigError | None:
    """Return the error for a model that has an adapter already. Experts can have the factors of one adapter only."""
    factors = [one.layer.expert_weights.lora for one in layers_with_layout(model)]
    if not isinstance(model, peft.PeftModel) and all(found is None for found in factors):
        return None
    return ConfigError(
        f"{what}: model must be without an adapter, got a {type(model).__name__} that has one; call "
        f"ep_moe.integrations.lora.merge_lora(model) first, or load the model anew"
    )


def _join_adapters(model: Any, experts: list[ExpertWeights]) -> None:
    """Wrap PEFT's methods that change adapters.

    Enabling and disabling also switch the factors of experts. The others are refused while experts have factors.
    """
    base = model.base_model
    for name, enabled in (("disable_adapter_layers", False), ("enable_adapter_layers", True)):
        setattr(base, name, partial(_switch, getattr(base, name), experts, enabled))
    merging = ("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload", "add_weighted_adapter")
    for owner, names in ((base, merging), (model, ("add_adapter", "load_adapter", "delete_adapter"))):
        for name in names:
            setattr(owner, name, partial(_unless_factors, getattr(owner, name), name, experts))


def _switch(peft_method: Callable[[], None], experts: list[ExpertWeights], enabled: bool) -> None:
    peft_method()
    for weights in experts:
        if weights.lora is not None:
            weights.lora.enabled = enabled


def _unless_factors(
    peft_method: Callable[..., Any], name: str, experts: list[ExpertWeights], *args: Any, **options: Any
) -> Any:
    if any(weights.lora is not None for weights in experts):
        raise ConfigError(
            f"{name} of PEFT would leave out the factors of experts; call ep_moe.integrations.lora.merge_lora(model), "
            f"or load_lora on a model without factors"
        )
    return peft_method(*args, **options)


def merge_lora(model: Any) -> nn.Module:
    """Add the low-rank updates to the weights and remove the factors. Called by all ranks.

    Args:
        model: A model of `add_lora` or `load_lora`.

    Returns:
        The model without factors. `ep_moe.integrations.transformers.save_pretrained` can save it.
    """
    if hasattr(model, "ep_moe_scales"):
        model.ep_moe_scales()
    for one in layers_with_layout(model):
        lora.merge_lora(one.layer.expert_weights)
    merged: nn.Module = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    if hasattr(merged, "ep_moe_lora"):
        del merged.ep_moe_lora
    return merged


@torch.no_grad()
def save_lora(model: Any, folder: str | Path) -> None:
    """Write an adapter that PEFT loads onto transformers' own model. Called by all ranks; the first one writes.

    Args:
        model: A model of `add_lora` or `load_lora`.
        folder: Created if it is missing.

    Raises:
        ConfigError: The model has no factors.
        CheckpointError: On all ranks, if the first one cannot write.
    """
    peft, layers = _peft(), layers_with_layout(model)
    config = getattr(model, "ep_moe_lora", None)
    if config is None:
        raise ConfigError("save_lora needs a model of add_lora or load_lora; its factors may be merged already")
    context: EPContext = layers[0].layer.context
    tensors: dict[str, Tensor] = {}
    for target in expert_targets(model, list(config.target_parameters or [])):
        tensors |= target.in_file(*target.whole_factors())
    with context.consensus.propagate_errors("save_lora"):
        if context.layout.place == 0:
            try:
                _write(peft, model, config, tensors, Path(folder))
            except OSError as error:
                raise CheckpointError(f"{folder}: the adapter cannot be written: {error}") from error


def load_lora(model: nn.Module, folder: str | Path, *, trainable: bool = False) -> Any:
    """Load a PEFT adapter into an expert-parallel model. Each rank keeps the factors of its own experts.

    Args:
        model: A model of `expert_parallel` or `load_pretrained`, without factors.
        folder: The adapter's folder. It may have one tensor for all experts of a layer, or one for each expert.
        trainable: Whether the factors require gradients.

    Returns:
        As `add_lora`.

    Raises:
        CheckpointError: On all ranks, if the adapter's tensors differ from what its configuration says.
        ConfigError: As `add_lora`; or ranks read different adapters.
    """
    peft, folder = _peft(), Path(folder)
    consensus = layers_with_layout(model)[0].layer.context.consensus
    with consensus.propagate_errors("load_lora"):
        try:
            config = peft.LoraConfig.from_pretrained(str(folder))
        except Exception as error:
            raise CheckpointError(f"{folder}/adapter_config.json cannot be read: {error}") from error
        tensors = _read(folder)
    config.inference_mode, initial = not trainable, getattr(config, "init_lora_weights", True)
    if initial in _DRAWN:
        config.init_lora_weights = True
    _compare("load_lora", model, config, {_FILE: _checksum(tensors)})
    with consensus.propagate_errors("load_lora"):
        if any(re.search(r"experts\.\d+\.", name) for name in tensors):
            joined = converted_adapter(config, model, tensors)
            tensors, config = _fused(tensors, config, model, folder), joined
        base = model
        model = _add(model, config, 0)
        kept: Any = model.ep_moe_lora
        kept.init_lora_weights = initial  # as save_lora writes it
        _load_all(peft, model, base, tensors, folder)
    if not trainable:
        model.requires_grad_(False)
    return model


def load_factors(model: Any, folder: str | Path) -> None:
    """Load an adapter of `save_lora` into the factors that a model has. Called by all ranks.

    Args:
        model: A model of `add_lora` or `load_lora`, with the targets that the adapter has.
        folder: The adapter's folder.

    Raises:
        CheckpointError: On all ranks, if the adapter's tensors differ from the model's factors.
        ConfigError: On all ranks, if they read different adapters.
    """
    peft, folder = _peft(), Path(folder)
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    consensus = layers_with_layout(model)[0].layer.context.consensus
    with consensus.propagate_errors("load_factors"):
        tensors = _read(folder)
        consensus.require_equal("load_factors", {_FILE: _checksum(tensors)})
        _load_all(peft, model, base, tensors, folder)


def _read(folder: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(folder / _FILE)
    except Exception as error:
        raise CheckpointError(f"{folder / _FILE} cannot be read: {error}") from error
    return tensors


def _checksum(tensors: dict[str, Tensor]) -> str:
    """Return a checksum of names, sizes, dtypes and values."""
    found = 0
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data, found)
    return f"checksum {found:08x}"


def _load_all(peft: Any, model: Any, base: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Copy the tensors of an adapter's file into all factors of a model."""
    tensors = _load_experts(model, model.ep_moe_lora, tensors, folder)
    tensors = _renamed(tensors, base, to_file=False)
    expected = set(_of_peft(peft, model))
    if odd := sorted(expected ^ tensors.keys()):
        what = "is missing" if odd[0] in expected else "is in no module of the model"
        raise CheckpointError(f"{folder}: {odd[0]} {what}")
    if expected:
        peft.set_peft_model_state_dict(model, tensors)


@torch.no_grad()
def _load_experts(model: nn.Module, config: Any, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Copy the factors of this rank's experts. Return the remaining tensors, which PEFT loads."""
    left = dict(tensors)
    for target in expert_targets(model, list(config.target_parameters or [])):
        keys = [target.key(factor) for factor in "AB"]
        if absent := [key for key in keys if key not in left]:
            raise CheckpointError(f"{folder}: {absent[0]} is missing")
        a, b = (left.pop(key) for key in keys)
        found, own = target.from_file(a, b), target.factors()
        if found is None or any(one.shape[1:] != mine.shape[1:] for one, mine in zip(found, own, strict=True)):
            raise CheckpointError(
                f"{folder}: {' and '.join(keys)} must be of {list(own[0].shape[1:])} and {list(own[1].shape[1:])} for "
                f"each expert, got {list(a.shape)} and {list(b.shape)} in all"
            )
        target.lora.write(target.stored, *found)
    return left


def _write(peft: Any, model: Any, config: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    tensors = tensors | _renamed(_of_peft(peft, model), model, to_file=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / _FILE, {"format": "pt"})
    saved = copy.deepcopy(config)
    saved.inference_mode, saved.target_modules = True, saved.target_modules or []
    saved.save_pretrained(str(folder))


def _of_peft(peft: Any, model: Any) -> dict[str, Tensor]:
    """Return the tensors that PEFT would save in an adapter: all except experts' factors."""
    if not hasattr(model, "peft_config"):
        return {}
    return dict(peft.get_peft_model_state_dict(model, state_dict=model.state_dict()))


def _fused(tensors: dict[str, Tensor], config: Any, model: Any, folder: Path) -> dict[str, Tensor]:
    """Let PEFT fuse factors of single experts to one tensor for all experts of a layer."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
    except ImportError as error:
        raise CheckpointError(
            f"{folder} has separate factors of each expert, which this peft cannot join ({error}); install peft 0.21 "
            "or newer"
        ) from error
    try:
        found: dict[str, Tensor] = convert_peft_adapter_state_dict_for_transformers(meta_copy(model), config, tensors)
    except Exception as error:  # PEFT does not validate an adapter's tensors, so it may fail in any way
        raise CheckpointError(
            f"{folder}: PEFT cannot join the factors of each expert ({type(error).__name__}: {error}); every expert "
            "of a layer must have them"
        ) from error
    return found


def _renamed(tensors: dict[str, Tensor], model: Any, *, to_file: bool) -> dict[str, Tensor]:
    """Rename tensors of shared experts between our model and the file, which has transformers' names."""
    for block, ours, theirs in shared_names(model):
        old, new = (f"{PREFIX}{block}.{each}." for each in ((ours, theirs) if to_file else (theirs, ours)))
        tensors = {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in tensors.items()}
    return tensors


def _no_save(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "save_pretrained would leave out the factors of experts; call ep_moe.integrations.lora.save_lora(model, "
        "folder) on all ranks, or merge_lora(model) and then ep_moe.integrations.transformers.save_pretrained"
    )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"LoRA needs peft, which is not installed ({error}); pip install peft") from error
    return peft
