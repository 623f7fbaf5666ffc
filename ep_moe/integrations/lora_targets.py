"""Resolves the names in PEFT's `LoraConfig` on a model with expert-parallel layers, by PEFT's own matching rules.

A name selects matrices of experts (`LoraTarget`), or other modules, which PEFT handles itself.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ep_moe.checks import as_number, check_count
from ep_moe.errors import ConfigError
from ep_moe.integrations.blocks import ExpertParallelBlock, layers_with_layout, shared_names
from ep_moe.integrations.generic import ExpertParallelExperts
from ep_moe.integrations.save import LayerWithLayout
from ep_moe.weights import lora
from ep_moe.weights.lora import ExpertLora, LowRank

PREFIX = "base_model.model."  # begins each name in an adapter's file
# fields of LoraConfig that may have any value beside factors of experts: ep_moe computes them, PEFT does without the
# experts, or they say how the factors were initialized. PEFT refuses most others for target_parameters, and adds some
# in its releases
_SERVED = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules", "target_parameters", "bias",
    "trainable_token_indices", "ensure_weight_tying", "init_lora_weights", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "runtime_config",
}  # fmt: skip
# fields that PEFT computes, but only if it gets a target
_OF_PEFT = {"bias": "none", "trainable_token_indices": None}


@dataclass(frozen=True, eq=False)
class LoraTarget:
    """One matrix of all experts of a layer, which gets LoRA factors.

    of: the layer
    stored: its name in our layer, w13 or w2
    parameter: its name in transformers' module, such as "gate_up_proj"
    depth: how many of PEFT's wrappers enclose the matrix's own; an adapter's names have `.base_layer` for each
    turned: transformers holds the matrix transposed and PEFT does not know it: PEFT's A is our B transposed, and
        PEFT's B our A transposed
    """

    of: LayerWithLayout
    stored: str
    parameter: str
    depth: int
    turned: bool

    def key(self, factor: str) -> str:
        """Return the name of a factor, "A" or "B", in an adapter's file."""
        return f"{PREFIX}{self.of.name}{'.base_layer' * self.depth}.lora_{factor}.weight"

    @property
    def lora(self) -> ExpertLora:
        found = self.of.layer.expert_weights.lora
        assert found is not None
        return found

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [L, r, in] and B [L, out, r] of the experts in this rank's slots."""
        return self.lora.factors(self.stored, self.of.layer.expert_weights.stored_tensors()[self.stored])

    def whole_factors(self) -> Iterator[Tensor]:
        """Yield A and then B of all experts, [E, ...]. Collective over the EP group."""
        return (lora.gather_factor(self.of.layer.expert_weights, factor) for factor in self.factors())

    def matches(self, wanted: str) -> bool:
        return is_named(f"{self.of.name}.{self.parameter}", wanted)

    def low_rank(self, config: Any) -> LowRank:
        """Return the rank and the scaling of the factors by a `LoraConfig`. Raise ConfigError for unusable values."""
        rank = (config.rank_pattern or {}).get(self.pattern_in(config.rank_pattern), config.r)
        alpha = (config.alpha_pattern or {}).get(self.pattern_in(config.alpha_pattern), config.lora_alpha)
        of = f"of {self.of.name}.{self.parameter}"
        rank = check_count(f"LoraConfig.r (or rank_pattern) {of}", rank, at_least=1)
        if as_number(alpha) is None:
            raise ConfigError(f"LoraConfig.lora_alpha (or alpha_pattern) {of} must be a number, got {alpha!r}")
        return LowRank(rank, alpha / (rank**0.5 if config.use_rslora else rank))

    def pattern_in(self, patterns: dict[str, Any] | None) -> str | None:
        """Return the first key of `rank_pattern` or `alpha_pattern` that matches this matrix, as PEFT searches them."""
        return _pattern_of(f"{self.of.name}.{self.parameter}", patterns or {})

    def in_file(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        """Convert factors of all experts to PEFT's form, by their names in an adapter's file.

        a and b are [E, r, in] and [E, out, r]. PEFT's A is [E * r, in]. PEFT's B is [out, r * E], E running fastest.
        """
        if self.stored == "w13" and self.of.layout.tensors[0].interleaved:
            b = torch.stack(b.chunk(2, 1), 2).flatten(1, 2)
        if self.turned:
            a, b = b.mT, a.mT
        return {self.key("A"): a.flatten(0, 1), self.key("B"): b.permute(1, 2, 0).flatten(1)}

    def from_file(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
        """Invert `in_file`: return A [E, r, in] and B [E, out, r]; None if the shapes do not fit E experts."""
        experts = self.of.layer.config.num_experts
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] % experts or b.shape[1] % experts:
            return None
        a, b = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)
        if self.turned:
            a, b = b.mT, a.mT
        if self.stored == "w13" and self.of.layout.tensors[0].interleaved:
            b = torch.cat([b[:, ::2], b[:, 1::2]], 1)
        return a, b


def expert_targets(model: Any, wanted: list[str]) -> Iterator[LoraTarget]:
    """Yield a target for each matrix of experts that `wanted` names, in the order of layers.

    PEFT wraps a module once for each of its target parameters. The wrapper of the last parameter is the outermost.
    """
    layers = layers_with_layout(model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    theirs = meta_copy(base) if any(one.layout.tensors[0].transposed for one in layers) else None
    for one in layers:
        held = [each for each in one.layout.tensors if each.part in ("w13", "w2") and not each.flat]
        names = {each.part: each.name for each in held}
        found = [s for s, p in names.items() if any(is_named(f"{one.name}.{p}", each) for each in wanted)]
        turned = theirs is not None and not getattr(theirs.get_submodule(one.name), "is_transposed", False)
        for at, stored in enumerate(found):
            yield LoraTarget(one, stored, names[stored], len(found) - 1 - at, turned)


def is_named(name: str, wanted: str) -> bool:
    """Return whether an entry of `target_parameters` selects the parameter `name`, as PEFT compares them."""
    return name == wanted or name.endswith(f".{wanted}")


def converted(config: Any, model: Any) -> Any:
    """Return a copy of a `LoraConfig` with the names of transformers 5, which has one parameter for all experts.

    PEFT rewrites target modules of single experts to `target_parameters`. Raise ConfigError if it cannot.
    """
    config = copy.deepcopy(config)
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an older PEFT has no such conversion
        return config
    try:
        convert_peft_config_for_transformers(config, model=meta_copy(model), conversions=None)
    except ValueError as error:
        raise ConfigError(f"LoraConfig.target_modules={config.target_modules!r}: {error}; name all of them") from error
    return config


def converted_adapter(config: Any, model: Any, names: Iterable[str]) -> Any:
    """Convert the configuration of an adapter that was trained where each expert had linear layers of its own.

    PEFT joins the factors of gate and up, r of each, to factors of rank 2r, and doubles `lora_alpha`. The scale then
    stays alpha / r, but not alpha / sqrt(r) (rsLoRA), and patterns for single layers do not reach the joined matrix.

    Args:
        config: The adapter's configuration.
        model: The model that gets the adapter.
        names: Names of tensors in the adapter's file.

    Returns:
        The configuration as `converted` returns it, with the scale that the adapter was trained with.

    Raises:
        ConfigError: A pattern selects layers of experts that have no parameter of their own any more.
    """
    found = converted(config, model)
    targets = expert_targets(model, list(found.target_parameters or []))
    kept = {f"{target.of.name}.{target.parameter}" for target in targets}
    layers = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in names}
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(config, field) or {}
        for layer in sorted(layers):
            single = re.sub(r"\.experts\.\d+\.", ".experts.", layer)
            key = _pattern_of(layer, patterns)
            if single != layer and key != (_pattern_of(single, patterns) if single in kept else None):
                raise ConfigError(
                    f"LoraConfig.{field} selects {layer} by {key!r}, and transformers joins the experts of a layer in "
                    "one parameter; merge the adapter with the versions of peft and transformers that trained it"
                )
        if field == "alpha_pattern" and config.use_rslora:
            for key in found.alpha_pattern.keys() - patterns.keys():
                found.alpha_pattern[key] = found.lora_alpha * (found.rank_pattern[key] / found.r) ** 0.5
    return found


def moved_modules(targets: Any, model: Any) -> Any:
    """Return `target_modules` or `modules_to_save` with shared experts under the names that our blocks give them."""
    if not targets or isinstance(targets, str):
        return targets
    moved = []
    for target in targets:
        ours = target
        for _, held_at, theirs in shared_names(model):
            inside = re.sub(rf"\.{theirs}(?=\.|$)", f".{held_at}", target)
            ours = re.sub(rf"^{theirs}(?=\.|$)", held_at.rpartition(".")[2], inside)
        moved.append(ours)
    return moved


def _pattern_of(name: str, patterns: dict[str, Any]) -> str | None:
    """Return the first key of `rank_pattern` or `alpha_pattern` that matches a name, as PEFT searches them."""
    return next((each for each in patterns if re.match(rf"(.*\.)?({each})$", name)), None)


def patterns_of_peft(
    patterns: dict[str, Any], config: Any, model: nn.Module, targets: Sequence[LoraTarget]
) -> dict[str, Any]:
    """Return `rank_pattern` or `alpha_pattern` for PEFT's own targets.

    A pattern may match experts' matrices and other modules. PEFT searches it by the names of our model, which differ
    from transformers' for shared experts. So each target gets a pattern of its own, found by transformers' name.

    Args:
        patterns: Those of the adapter, for the names of transformers' model.
        config: The configuration that is passed to PEFT.
        model: The model that is passed to PEFT.
        targets: Experts' matrices, which are not PEFT's targets.
    """
    found, used = dict[str, Any](), {target.pattern_in(patterns) for target in targets}
    shared = [(f"{block}.{ours}.", f"{block}.{theirs}.") for block, ours, theirs in shared_names(model)]
    for name in _targets_of_peft(config, model):
        renamed = (theirs + name.removeprefix(ours) for ours, theirs in shared if name.startswith(ours))
        if (key := _pattern_of(next(renamed, name), patterns)) is not None:
            found[re.escape(name)] = patterns[key]
            used.add(key)
    return found | {key: value for key, value in patterns.items() if key not in used}  # PEFT warns of these


def _targets_of_peft(config: Any, model: nn.Module) -> Iterator[str]:
    """Yield the names of the modules and parameters of `model` that get factors by PEFT."""
    modules, parameters = config.target_modules, config.target_parameters or []
    all_linear = isinstance(modules, str) and modules.lower() == "all-linear"
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) if all_linear else _wanted(config, "target_modules", modules, name):
            yield name
    for name, _ in model.named_parameters():
        if _wanted(config, "target_parameters", parameters, name):
            yield name


def check_modules(config: Any, model: nn.Module, found: Any) -> None:
    """Check that PEFT will find each module that a configuration names. PEFT itself skips missing names silently.

    Args:
        config: PEFT's configuration, with the names of transformers' model.
        model: A transformers model with expert-parallel layers.
        found: The same configuration as it is passed to PEFT, with the names of `model`.

    Raises:
        ConfigError: A field names a module or parameter that expert-parallel layers replaced or moved, or one that
            only these layers have.
    """
    kept = _Kept(model)
    if getattr(config, "bias", "none") == "all" and (own := kept.own_bias(model)) is not None:
        raise ConfigError(
            f"{type(config).__name__}.bias='all' would train {own}, which only expert-parallel layers have; pass "
            "'lora_only' or 'none'"
        )
    theirs = meta_copy(model)
    parameters = [name for name, _ in theirs.named_parameters()]
    modules = [name for name, _ in theirs.named_modules() if name]
    for field, names in (("target_modules", modules), ("modules_to_save", modules), ("target_parameters", parameters)):
        before, after = getattr(config, field, None), getattr(found, field, None)
        if not before or (isinstance(before, str) and before.lower() == "all-linear"):
            continue
        for name in names:
            if (wanted := _wanted(config, field, before, name)) is None:
                continue
            module, own = (name.rpartition(".")[0] if names is parameters else name), kept.name_of(name)
            if field == "modules_to_save" and kept.holds_experts(name):
                problem = f"whose experts are on several ranks ({name}); train them with target_parameters"
            elif not kept.has(module) or _wanted(found, field, after or [], own) is None:
                problem = f"which {type(model).__name__} with expert-parallel layers has no more"
            else:
                continue
            raise ConfigError(
                f"{type(config).__name__}.{field} names {wanted!r}, {problem}; leave it out, or name another module"
            )
        for name in kept.own:
            if (wanted := _wanted(found, field, after or [], name)) is not None:
                raise ConfigError(
                    f"{type(config).__name__}.{field} names {wanted!r}, which only expert-parallel layers have "
                    f"({name}); leave it out, or name another module"
                )


class _Kept:
    """Tells which modules of transformers' model a model with expert-parallel layers still has.

    own: names of modules and parameters that only the expert-parallel layers have, such as their routers and experts
    """

    def __init__(self, model: nn.Module) -> None:
        kinds = (ExpertParallelBlock, ExpertParallelExperts)
        modules = {_bare(name): module for name, module in model.named_modules(remove_duplicate=False)}
        self._names = modules.keys()
        self._replaced = [name for name, module in modules.items() if isinstance(module, kinds)]
        self._shared = [(f"{block}.{theirs}", f"{block}.{ours}") for block, ours, theirs in shared_names(model)]
        names = [*modules, *(_bare(name) for name, _ in model.named_parameters())]
        made = tuple(f"{name}.moe" for name in self._replaced)
        shared = tuple(ours for _, ours in self._shared)
        self.own = [name for name in names if name.startswith(made) and not (shared and name.startswith(shared))]

    def own_bias(self, model: nn.Module) -> str | None:
        """Return the name of a parameter of these layers that PEFT takes for a bias."""
        names = (_bare(name) for name, _ in model.named_parameters())
        return next((name for name in names if "bias" in name and name in self.own), None)

    def name_of(self, name: str) -> str:
        """Return the name in this model of a module or parameter of transformers' model."""
        for theirs, ours in self._shared:
            if name == theirs or name.startswith(f"{theirs}."):
                return ours + name.removeprefix(theirs)
        return name

    def has(self, module: str) -> bool:
        """Return whether this model has a module of transformers' model."""
        inside = any(module.startswith(f"{name}.") for name in self._replaced)
        return self.name_of(module) in self._names if inside else module not in self._replaced

    def holds_experts(self, module: str) -> bool:
        """Return whether a module of transformers' model is, or contains, one that was replaced."""
        return any(f"{name}.".startswith(f"{module}.") for name in self._replaced)


def _bare(name: str) -> str:
    """Return a name without the components that PEFT's wrappers add."""
    return re.sub(r"\.(base_layer|original_module)(?=\.|$)", "", name)


def _wanted(config: Any, field: str, wanted: Any, name: str) -> str | None:
    """Return the entry of a configuration's field that selects `name`, as PEFT compares them; None if none does."""
    if field == "modules_to_save":
        return next((each for each in wanted if name.endswith(each)), None)
    if field == "target_parameters":
        return next((each for each in wanted if is_named(name, each)), None)
    from peft.tuners.tuners_utils import check_target_module_exists

    if not wanted or not check_target_module_exists(config, name):
        return None
    return wanted if isinstance(wanted, str) else next((each for each in wanted if is_named(name, each)), name)


# fields of LoraConfig that change no number, and so may differ between ranks
_ORIGIN = {"base_model_name_or_path", "revision", "peft_version", "auto_mapping", "task_type", "runtime_config"}


def config_facts(config: Any) -> dict[str, str]:
    """Return the fields of a `LoraConfig` by name, for a comparison of ranks. Sets have another order on each rank."""
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _ORIGIN}
    return {
        f"LoraConfig.{name}": repr(sorted(value) if isinstance(value, set) else value) for name, value in values.items()
    }


def check_config(config: Any, *, of_peft: bool = True) -> None:
    """Raise ConfigError if a `LoraConfig` sets a field that is not supported for factors of experts.

    Args:
        config: The configuration.
        of_peft: Whether it also has targets that PEFT handles.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name not in _SERVED and value and value != default:
            raise ConfigError(
                f"LoraConfig.{field.name}={value!r} is not served with target_parameters of experts; leave it at its "
                "default"
            )
    for name, default in _OF_PEFT.items():
        if not of_peft and (value := getattr(config, name, default)) != default:
            raise ConfigError(
                f"LoraConfig.{name}={value!r} is not served where experts are the only targets; name another module in "
                "target_modules, or leave it at its default"
            )
    if config.init_lora_weights is not True:
        raise ConfigError(
            f"LoraConfig.init_lora_weights must be True for experts (A random, B zero), got "
            f"{config.init_lora_weights!r}"
        )


def meta_copy(model: Any) -> Any:
    """Return transformers' own model of the same configuration, on the meta device."""
    with torch.device("meta"):
        return type(model)._from_config(copy.deepcopy(model.config))
