"""LoRA of PEFT on models with expert-parallel layers: on experts by ep_moe, on everything else by PEFT itself.

    model = add_lora(model, LoraConfig(r=8, target_modules=["q_proj"], target_parameters=["experts.down_proj"]))
    save_lora(model, folder)        # an adapter that PeftModel.from_pretrained loads
    model = merge_lora(model)       # into the weights

PEFT would put a wrapper around the module that holds all experts. Here each rank holds its own, and their factors.
"""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ep_moe.context import EPContext
from ep_moe.errors import CheckpointError, ConfigError
from ep_moe.integrations.blocks import saved_experts, shared_names
from ep_moe.integrations.save import SavedExperts
from ep_moe.training.wrappers import exclude_experts
from ep_moe.weights import lora
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.lora import ExpertLora, LowRank

_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# of LoraConfig: what PEFT refuses for parameters too, or what is not computed here
_UNSERVED = (
    "lora_dropout", "fan_in_fan_out", "lora_bias", "use_dora", "layers_to_transform", "layer_replication",
    "exclude_modules", "modules_to_save",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Target:
    """One matrix of a layer's experts. stored: our name; parameter: transformers'; depth: of PEFT's nested wrappers;
    turned: PEFT does not know that transformers holds it transposed, so that its A and B are our B and A transposed."""

    of: SavedExperts
    stored: str
    parameter: str
    depth: int
    turned: bool

    def key(self, factor: str) -> str:
        """In an adapter's file. factor: "A" or "B"."""
        return f"{_PREFIX}{self.of.name}{'.base_layer' * self.depth}.lora_{factor}.weight"

    @property
    def lora(self) -> ExpertLora:
        found = self.of.layer.expert_weights.lora
        assert found is not None
        return found

    def factors(self) -> tuple[Tensor, Tensor]:
        """Of the experts in this rank's slots."""
        return self.lora.factors(self.stored, self.of.layer.expert_weights.stored_tensors()[self.stored])

    def whole_factors(self) -> Iterator[Tensor]:
        """A and B of all experts. Collective over the EP group."""
        return (lora.gather_factor(self.of.layer.expert_weights, factor) for factor in self.factors())

    def matches(self, wanted: str) -> bool:
        return _named(f"{self.of.name}.{self.parameter}", wanted)


def add_lora(model: nn.Module, config: Any, *, seed: int = 0) -> Any:
    """Freeze a model and train LoRA factors of what PEFT's `LoraConfig` targets.

    `target_parameters` that name experts' matrices, as transformers' module holds them (`experts.gate_up_proj`,
    `experts.down_proj`), get factors on the rank that has the expert. `target_modules` that name the linear layers of
    each expert (`gate_proj`, `up_proj`, `down_proj`) are rewritten by PEFT to these. All else is PEFT's
    `get_peft_model`. Called by all ranks alike. `sync_gradients`, `clip_grad_norm_` and DDP treat these factors as the
    experts they belong to.

    Args:
        model: of `expert_parallel` or `load_pretrained`, with a kernel that has a backward (experts="reference").
        config: `peft.LoraConfig`.
        seed: of the factors of experts, the same on all ranks.

    Returns:
        A `PeftModel` around the model where PEFT targets something, else the model.

    Raises:
        ConfigError: peft is not installed, the configuration asks for what is not computed, or experts have no factors
            (quantised, cut by etp, redundant).
    """
    peft, layers = _peft(), saved_experts(model)
    config = _converted(config, model)
    wanted = list(config.target_parameters or [])
    targets = list(_targets(model, wanted))
    others = [name for name in wanted if not any(one.matches(name) for one in targets)]
    names = [name for name, _ in model.named_parameters()]
    if absent := [name for name in others if not any(_named(each, name) for each in names)]:
        raise ConfigError(
            f"LoraConfig.target_parameters names {absent[0]!r}, which is no parameter of {type(model).__name__} with "
            f"expert-parallel layers; name experts' matrices as transformers does, and leave out the router"
        )
    if targets:
        _check_config(config)
    ranks = {target: _low_rank(config, target) for target in targets}
    if config.target_modules or others or not targets:
        dense = copy.deepcopy(config)
        dense.target_parameters = others or None
        dense.target_modules = _moved(config.target_modules, model)
        for pattern in ("rank_pattern", "alpha_pattern"):
            own = {_pattern_of(getattr(config, pattern), target) for target in targets}
            setattr(dense, pattern, {k: v for k, v in (getattr(config, pattern) or {}).items() if k not in own})
        model = peft.get_peft_model(model, dense)
    else:
        model.requires_grad_(False)
    for one in layers:
        of_layer = {target.stored: ranks[target] for target in targets if target.of.name == one.name}
        if of_layer:
            own_seed = seed * 2**20 + zlib.crc32(one.name.encode()) % 2**20
            lora.add_lora(one.layer.expert_weights, of_layer, own_seed)
    exclude_experts(model)
    model.ep_moe_lora = config
    if targets:
        setattr(model, "save_pretrained", _no_save)  # noqa: B010 (a method, of this model alone)
        if isinstance(model, peft.PeftModel):
            _join_adapters(model, [one.layer.expert_weights for one in layers])
    return model


def _join_adapters(model: Any, experts: list[ExpertWeights]) -> None:
    """Let methods of PEFT that are about adapters reach experts' factors, or be refused while there are any."""
    base = model.base_model
    for name, enabled in (("disable_adapter_layers", False), ("enable_adapter_layers", True)):
        setattr(base, name, partial(_switch, getattr(base, name), experts, enabled))
    merging = ("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload")
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
    """Add the updates to the weights, on all ranks alike.

    Args:
        model: of `add_lora` or `load_lora`.

    Returns:
        The model without factors, which `ep_moe.integrations.transformers.save_pretrained` writes.
    """
    for one in saved_experts(model):
        lora.merge_lora(one.layer.expert_weights)
    merged: nn.Module = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    if hasattr(merged, "ep_moe_lora"):
        del merged.ep_moe_lora
    return merged


@torch.no_grad()
def save_lora(model: Any, folder: str | Path) -> None:
    """Write an adapter that PEFT loads onto transformers' own model. Called by all ranks; the first one writes.

    Args:
        model: of `add_lora` or `load_lora`.
        folder: made if it is not there.

    Raises:
        ConfigError: the model has no factors.
        CheckpointError: on all ranks, where the first one cannot write.
    """
    peft, layers = _peft(), saved_experts(model)
    config = getattr(model, "ep_moe_lora", None)
    if config is None:
        raise ConfigError("save_lora needs a model of add_lora or load_lora; its factors may be merged already")
    context: EPContext = layers[0].layer.context
    tensors: dict[str, Tensor] = {}
    for target in _targets(model, list(config.target_parameters or [])):
        tensors |= _in_file(target, *target.whole_factors())
    with context.consensus.together("save_lora"):
        if context.layout.place == 0:
            try:
                _write(peft, model, config, tensors, Path(folder))
            except OSError as error:
                raise CheckpointError(f"{folder}: the adapter cannot be written: {error}") from error


def load_lora(model: nn.Module, folder: str | Path, *, trainable: bool = False) -> Any:
    """Put a PEFT adapter of a model on its expert-parallel twin: each rank keeps its own experts' factors.

    Args:
        model: of `expert_parallel` or `load_pretrained`, without factors.
        folder: of the adapter, whose experts have factors in one tensor for all of them, or each its own.
        trainable: whether the factors require gradients.

    Returns:
        As `add_lora`.

    Raises:
        CheckpointError: on all ranks, where the adapter has other tensors than its configuration says.
        ConfigError: as `add_lora`.
    """
    peft, folder = _peft(), Path(folder)
    config = peft.LoraConfig.from_pretrained(str(folder))
    config.inference_mode = not trainable
    with saved_experts(model)[0].layer.context.consensus.together("load_lora"):
        try:
            tensors = load_file(folder / _FILE)
        except Exception as error:
            raise CheckpointError(f"{folder / _FILE} cannot be read: {error}") from error
        if any(re.search(r"experts\.\d+\.", name) for name in tensors):
            tensors = _fused(tensors, config, model, folder)
        base = model
        model = add_lora(model, config)
        tensors = _load_experts(model, model.ep_moe_lora, tensors, folder)
        tensors = _renamed(tensors, base, to_file=False)
        expected = set(peft.get_peft_model_state_dict(model)) if hasattr(model, "peft_config") else set()
        if odd := sorted(expected ^ tensors.keys()):
            what = "is missing" if odd[0] in expected else "is in no module of the model"
            raise CheckpointError(f"{folder}: {odd[0]} {what}")
        if expected:
            peft.set_peft_model_state_dict(model, tensors)
    if not trainable:
        model.requires_grad_(False)
    return model


@torch.no_grad()
def _load_experts(model: nn.Module, config: Any, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Copy the factors of this rank's experts; what is left is PEFT's."""
    left = dict(tensors)
    for target in _targets(model, list(config.target_parameters or [])):
        keys = [target.key(factor) for factor in "AB"]
        if absent := [key for key in keys if key not in left]:
            raise CheckpointError(f"{folder}: {absent[0]} is missing")
        a, b = (left.pop(key) for key in keys)
        found, own = _from_file(target, a, b), target.factors()
        if found is None or any(one.shape[1:] != mine.shape[1:] for one, mine in zip(found, own, strict=True)):
            raise CheckpointError(
                f"{folder}: {' and '.join(keys)} must be of {list(own[0].shape[1:])} and {list(own[1].shape[1:])} for "
                f"each expert, got {list(a.shape)} and {list(b.shape)} in all"
            )
        target.lora.write(target.stored, *found)
    return left


def _write(peft: Any, model: Any, config: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    if hasattr(model, "peft_config"):
        tensors = tensors | _renamed(dict(peft.get_peft_model_state_dict(model)), model, to_file=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / _FILE, {"format": "pt"})
    saved = copy.deepcopy(config)
    saved.inference_mode, saved.target_modules = True, saved.target_modules or []
    saved.save_pretrained(str(folder))


def _converted(config: Any, model: Any) -> Any:
    """The configuration with the names that transformers 5 has, as PEFT rewrites it: one parameter for all experts."""
    config = copy.deepcopy(config)
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an older PEFT, which knows no other names
        return config
    try:
        convert_peft_config_for_transformers(config, model=_twin(model), conversions=None)
    except ValueError as error:
        raise ConfigError(f"LoraConfig.target_modules={config.target_modules!r}: {error}; name all of them") from error
    return config


def _fused(tensors: dict[str, Tensor], config: Any, model: Any, folder: Path) -> dict[str, Tensor]:
    """Factors of each expert by itself, put together by PEFT."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
    except ImportError as error:
        raise CheckpointError(
            f"{folder} has factors of each expert by itself, which this peft does not put together ({error}); "
            f"install peft 0.21 or newer"
        ) from error
    try:
        found: dict[str, Tensor] = convert_peft_adapter_state_dict_for_transformers(_twin(model), config, tensors)
    except Exception as error:  # of PEFT, for which an adapter may be any dict
        raise CheckpointError(
            f"{folder}: PEFT cannot put the factors of each expert together ({type(error).__name__}: {error}); every "
            f"expert of a layer must have them"
        ) from error
    return found


def _twin(model: Any) -> Any:
    """transformers' own model, on the meta device."""
    with torch.device("meta"):
        return type(model)._from_config(copy.deepcopy(model.config))


def _moved(targets: Any, model: Any) -> Any:
    """`target_modules` as our model calls these modules. PEFT leaves out without a word what it does not find."""
    if not targets or isinstance(targets, str):
        return targets
    moved = {}
    for target in targets:
        moved[target] = target
        for _, ours, theirs in shared_names(model):
            inside = re.sub(rf"\.{theirs}(?=\.|$)", f".{ours}", target)
            moved[target] = re.sub(rf"^{theirs}(?=\.|$)", ours.rpartition(".")[2], inside)
    names = [name for name, _ in model.named_modules()]
    theirs_alone = [name for name, _ in _twin(model).named_modules()]
    for target, ours in moved.items():
        if any(_named(each, target) for each in theirs_alone) and not any(_named(each, ours) for each in names):
            raise ConfigError(
                f"LoraConfig.target_modules names {target!r}, which {type(model).__name__} with expert-parallel layers "
                f"has no more; leave it out, or name another module"
            )
    return list(moved.values())


def _renamed(tensors: dict[str, Tensor], model: Any, *, to_file: bool) -> dict[str, Tensor]:
    """Shared experts of a known family's block lie elsewhere in our model than in transformers'."""
    for block, ours, theirs in shared_names(model):
        old, new = (f"{_PREFIX}{block}.{each}." for each in ((ours, theirs) if to_file else (theirs, ours)))
        tensors = {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in tensors.items()}
    return tensors


def _low_rank(config: Any, target: _Target) -> LowRank:
    rank = (config.rank_pattern or {}).get(_pattern_of(config.rank_pattern, target), config.r)
    alpha = (config.alpha_pattern or {}).get(_pattern_of(config.alpha_pattern, target), config.lora_alpha)
    return LowRank(rank, alpha / (rank**0.5 if config.use_rslora else rank))


def _pattern_of(patterns: dict[str, Any] | None, target: _Target) -> str | None:
    """As PEFT finds the first that matches."""
    name = f"{target.of.name}.{target.parameter}"
    return next((each for each in patterns or {} if re.match(rf"(.*\.)?({each})$", name)), None)


def _targets(model: Any, wanted: list[str]) -> Iterator[_Target]:
    """In the order of layers. PEFT's wrapper of the last parameter of a module is the outermost."""
    layers = saved_experts(model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    twin = _twin(base) if any(one.layout.tensors[0].transposed for one in layers) else None
    for one in layers:
        held = [each for each in one.layout.tensors if each.part in ("w13", "w2") and not each.flat]
        names = {each.part: each.name for each in held}
        found = [s for s, p in names.items() if any(_named(f"{one.name}.{p}", each) for each in wanted)]
        turned = twin is not None and not getattr(twin.get_submodule(one.name), "is_transposed", False)
        for at, stored in enumerate(found):
            yield _Target(one, stored, names[stored], len(found) - 1 - at, turned)


def _named(name: str, wanted: str) -> bool:
    """As PEFT compares `target_parameters`."""
    return name == wanted or name.endswith(f".{wanted}")


def _in_file(target: _Target, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """As PEFT holds factors of all experts: A [E * r, in], B [out, r * E] with E running fastest."""
    if target.stored == "w13" and target.of.layout.tensors[0].interleaved:
        b = torch.stack(b.chunk(2, 1), 2).flatten(1, 2)
    if target.turned:
        a, b = b.mT, a.mT
    return {target.key("A"): a.flatten(0, 1), target.key("B"): b.permute(1, 2, 0).flatten(1)}


def _from_file(target: _Target, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """A and B [E, ...] of the tensors of a file; None where these are not of so many experts."""
    experts = target.of.layer.config.num_experts
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] % experts or b.shape[1] % experts:
        return None
    a, b = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)
    if target.turned:
        a, b = b.mT, a.mT
    if target.stored == "w13" and target.of.layout.tensors[0].interleaved:
        b = torch.cat([b[:, ::2], b[:, 1::2]], 1)
    return a, b


def _check_config(config: Any) -> None:
    for name in _UNSERVED:
        if value := getattr(config, name, None):
            raise ConfigError(
                f"LoraConfig.{name}={value!r} is not served with target_parameters of experts; leave it at its default"
            )
    if config.init_lora_weights is not True:
        raise ConfigError(
            f"LoraConfig.init_lora_weights must be True for experts (A random, B zero), got "
            f"{config.init_lora_weights!r}"
        )


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
