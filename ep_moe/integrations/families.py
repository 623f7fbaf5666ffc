"""Model families whose whole MoE block is replaced by a `MoELayer`.

A family is a `Family` entry here and its tensor names in `ep_moe.checkpoint.model_names`. `register_family` adds both.
The entry converts the model's configuration to a `MoEConfig`, and the layer's output to what the model expects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from ep_moe.checkpoint.formats import Fused
from ep_moe.checkpoint.model_names import CHECKPOINT_NAMES, CheckpointNames
from ep_moe.checks import check_kind
from ep_moe.config import MoEConfig, RoutingConfig, RoutingMethod
from ep_moe.errors import ConfigError
from ep_moe.integrations.config_file import read_config
from ep_moe.types import Activation


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family.

    Args:
        block: The class name of its MoE block.
        config: Converts the text model's configuration to the `MoEConfig` of its blocks.
        shared: The block's attribute that holds the shared experts. None if it has none.
        returns: Converts the layer's (output, input) to what the model expects its block to return.
    """

    block: str
    config: Callable[[PretrainedConfig], MoEConfig]
    shared: str | None = None
    returns: Callable[[Tensor, Tensor], Any] = lambda out, x: out


def _moe_config(c: Any, *, experts: int, intermediate: int, routing: RoutingConfig, **rest: Any) -> MoEConfig:
    """Return a configuration from the fields that have one name in all families, and from `rest`."""
    rest.setdefault("activation", _activation(c.hidden_act))
    return MoEConfig(
        hidden_size=c.hidden_size,
        intermediate_size=intermediate,
        num_experts=experts,
        top_k=c.num_experts_per_tok,
        routing=routing,
        **rest,
    )


def _qwen3(c: Any) -> MoEConfig:
    routing = RoutingConfig(renormalize=c.norm_topk_prob)
    return _moe_config(c, experts=c.num_experts, intermediate=c.moe_intermediate_size, routing=routing)


def _mixtral(c: Any) -> MoEConfig:
    routing = RoutingConfig(renormalize=True)
    return _moe_config(c, experts=c.num_local_experts, intermediate=c.intermediate_size, routing=routing)


def _deepseek_v3(c: Any) -> MoEConfig:
    routing = RoutingConfig(
        method=RoutingMethod.SIGMOID_TOPK,
        renormalize=c.norm_topk_prob,
        scaling_factor=c.routed_scaling_factor,
        num_groups=c.n_group,
        top_groups=c.topk_group,
        correction_bias=True,
        float32_logits=True,
    )
    inner = c.moe_intermediate_size
    shared = inner * c.n_shared_experts
    return _moe_config(
        c, experts=c.n_routed_experts, intermediate=inner, routing=routing, shared_intermediate_size=shared
    )


def _gpt_oss(c: Any) -> MoEConfig:
    return _moe_config(
        c,
        experts=c.num_local_experts,
        intermediate=c.intermediate_size,
        routing=RoutingConfig(method=RoutingMethod.TOPK_SOFTMAX, bias=True),
        activation=Activation.SWIGLU_CLAMPED,
        activation_alpha=getattr(c, "swiglu_alpha", 1.702),
        activation_limit=getattr(c, "swiglu_limit", 7.0),
        expert_bias=True,
    )


def _llama4(c: Any) -> MoEConfig:
    inner = c.intermediate_size
    routing = RoutingConfig(method=RoutingMethod.TOPK_SIGMOID, weight_on_input=True)
    return _moe_config(
        c, experts=c.num_local_experts, intermediate=inner, routing=routing, shared_intermediate_size=inner
    )


def _activation(name: str) -> Activation:
    known = {"silu": Activation.SWIGLU, "swish": Activation.SWIGLU, "gelu": Activation.GEGLU}
    if name not in known:
        raise ConfigError(f"hidden_act must be one of {', '.join(known)} for expert-parallel blocks, got {name!r}")
    return known[name]


FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(block="Qwen3MoeSparseMoeBlock", config=_qwen3),
    "mixtral": Family(block="MixtralSparseMoeBlock", config=_mixtral),
    "deepseek_v3": Family(block="DeepseekV3MoE", config=_deepseek_v3, shared="shared_experts"),
    "gpt_oss": Family(block="GptOssMLP", config=_gpt_oss, returns=lambda out, x: (out, None)),
    "llama4_text": Family(
        block="Llama4TextMoe", config=_llama4, shared="shared_expert", returns=lambda out, x: (out.flatten(0, -2), None)
    ),
}


def register_family(model_type: str, family: Family, names: CheckpointNames) -> None:
    """Let `load_pretrained` and `expert_parallel` replace the whole MoE blocks of a model type.

    Without an entry only the experts are replaced, and the model's own router runs. With an entry, a router of ep_moe
    replaces it, and all tensors of the block are read, quantized experts included. Call this on all ranks with the
    same arguments.

    An entry that omits a tensor is refused when a model is made: each tensor of the block, in memory and in the file,
    must be read. `ep_moe.testing.check_family` compares on a tiny model what the tensors do not show.

    Args:
        model_type: The `model_type` of the text model's configuration, such as "glm4_moe".
        family: The class of its block, and the conversion of its configuration.
        names: The names of the block's tensors in a checkpoint.

    Raises:
        ConfigError: The entry is inconsistent, or the model type has one already.
    """
    check_kind("register_family: family", family, Family)
    check_kind("register_family: names", names, CheckpointNames)
    if model_type in FAMILIES:
        raise ConfigError(f"model_type {model_type!r} is registered already; leave it, or choose another model type")
    if (family.shared is None) != (names.shared is None):
        raise ConfigError(
            f"Family.shared={family.shared!r} and CheckpointNames.shared={names.shared!r} must both name the shared "
            f"experts, or both be None"
        )
    if names.elsewhere:
        raise ConfigError(
            f"CheckpointNames.elsewhere={names.elsewhere!r} leaves tensors to the caller, and a replaced block has no "
            f"caller who would load them; leave the family unregistered: its experts alone are then replaced"
        )
    if not any(isinstance(each, Fused) for each in names.experts):
        raise ConfigError(
            "CheckpointNames.experts must have the form in which transformers' class holds its experts; add "
            "ep_moe.checkpoint.formats.Fused()"
        )
    FAMILIES[model_type], CHECKPOINT_NAMES[model_type] = family, names


def moe_config_of(family: Family, config: PretrainedConfig) -> MoEConfig:
    """Return `Family.config` of a configuration. Raise ConfigError if it fails or returns another type."""
    try:
        found = family.config(config)
    except AttributeError as error:
        raise ConfigError(
            f"Family.config asks the configuration of {config.model_type!r} for what it lacks: {error}"
        ) from error
    check_kind("Family.config's result", found, MoEConfig)
    return found


def checked_config(folder: Path) -> tuple[Any, MoEConfig]:
    """Return the text model's configuration of a checkpoint folder, and the `MoEConfig` of its blocks."""
    config, family = family_of(read_config(folder))
    try:
        return config, moe_config_of(family, config)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from error


def family_of(config: PretrainedConfig) -> tuple[Any, Family]:
    """Return the text model's configuration and its family. Raise ConfigError if the family is not known."""
    config = config.get_text_config()
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {config.model_type!r} is not among the families whose routing ep_moe computes itself "
            f"({', '.join(FAMILIES)}); load_pretrained loads the model, with its own router"
        )
    return config, FAMILIES[config.model_type]


def blocks_of(model: nn.Module, family: Family) -> list[tuple[str, nn.Module]]:
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ == family.block]
    if not found:
        raise ConfigError(
            f"the model has no block of class {family.block}: it was replaced already, or its configuration leaves no "
            f"layer with experts; such a model is loaded by transformers alone"
        )
    return found
