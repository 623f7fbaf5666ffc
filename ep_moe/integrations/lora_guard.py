"""Refuses adapters that PEFT itself puts on a model with expert-parallel layers, if it would drop a part of them.

PEFT does so in `get_peft_model`, `PeftModel.from_pretrained` and `model.add_adapter`. Each sets `peft_config` on the
model. Hooks check it when weights are loaded, which `from_pretrained` does at once, and at each call of the model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ep_moe.errors import ConfigError
from ep_moe.integrations.lora_targets import check_modules
from ep_moe.weights.expert_weights import ExpertWeights

_CHECKED = "ep_moe_checked_adapters"


def guard_adapters(model: nn.Module) -> None:
    """Register hooks on a model that raise ConfigError for an adapter that PEFT applies only in part.

    Args:
        model: A transformers model with expert-parallel layers.
    """
    model.register_load_state_dict_pre_hook(_check)
    model.register_forward_pre_hook(_check)


def accept_adapter(model: Any, config: Any) -> None:
    """Mark a configuration of PEFT as checked, such as one that already has our model's names.

    Args:
        model: The model that `guard_adapters` was given.
        config: The object that is passed to PEFT.
    """
    setattr(model, _CHECKED, [*getattr(model, _CHECKED, []), config])


def _check(model: Any, *_: Any) -> None:
    if torch.compiler.is_compiling() or "peft_config" not in vars(model):
        return
    for config in model.peft_config.values():
        if any(each is config for each in getattr(model, _CHECKED, [])):
            continue
        try:
            check_modules(config, model, config)
        except ConfigError as error:
            raise ConfigError(
                f"PEFT leaves out a part of this adapter: {error}. For an adapter on disk call "
                f"ep_moe.integrations.lora.load_lora(model, folder), for a new one ep_moe.integrations.lora.add_lora, "
                f"on a model without adapters"
            ) from error
        accept_adapter(model, config)


def guard_scales(model: Any, layer_type: Any, experts: list[ExpertWeights]) -> None:
    """Refuse calls and merging while the scale of all LoRA layers of PEFT is changed.

    PEFT would rescale its own layers, but not the factors of experts.

    Args:
        model: A PEFT model.
        layer_type: PEFT's `LoraLayer`.
        experts: Weights of the experts that have factors.
    """
    scales = [(module, dict(module.scaling)) for module in model.modules() if isinstance(module, layer_type)]
    if scales:
        model.ep_moe_scales = partial(_check_scales, scales, experts)
        model.get_base_model().register_forward_pre_hook(model.ep_moe_scales)  # PEFT's `generate` calls the base model


def _check_scales(scales: list[tuple[Any, dict[str, float]]], experts: list[ExpertWeights], *_: Any) -> None:
    if torch.compiler.is_compiling() or all(weights.lora is None for weights in experts):
        return
    if all(module.scaling != scaling for module, scaling in scales):
        module, scaling = scales[0]
        raise ConfigError(
            f"the scale of all LoRA layers of PEFT was changed, from {scaling} to {module.scaling} in the first, but "
            "not that of the experts' factors; load the adapter with another lora_alpha in its configuration"
        )
