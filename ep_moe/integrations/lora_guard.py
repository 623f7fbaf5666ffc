"""Refusal of PEFT's own entries (`get_peft_model`, `PeftModel.from_pretrained`, `model.add_adapter`) for what they
would leave out of a model with expert-parallel layers.

PEFT puts `peft_config` on each model into which it puts an adapter. It is read where weights are loaded, as
`from_pretrained` does at once, and at each call.
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
    """Refuse a model whose adapter PEFT cannot put on it.

    Args:
        model: of transformers, with expert-parallel layers.
    """
    model.register_load_state_dict_pre_hook(_check)
    model.register_forward_pre_hook(_check)


def accept_adapter(model: Any, config: Any) -> None:
    """Check no more a configuration of PEFT whose names are our model's.

    Args:
        model: as given to `guard_adapters`.
        config: the object that PEFT is given.
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
    """Refuse calls, and merging, while PEFT's layers are rescaled all together: experts' factors are not.

    Args:
        model: of PEFT.
        layer_type: PEFT's `LoraLayer`.
        experts: that have factors.
    """
    scales = [(module, dict(module.scaling)) for module in model.modules() if isinstance(module, layer_type)]
    if scales:
        model.ep_moe_scales = partial(_check_scales, scales, experts)
        model.get_base_model().register_forward_pre_hook(model.ep_moe_scales)  # `generate` of PEFT calls this model


def _check_scales(scales: list[tuple[Any, dict[str, float]]], experts: list[ExpertWeights], *_: Any) -> None:
    if torch.compiler.is_compiling() or all(weights.lora is None for weights in experts):
        return
    if all(module.scaling != scaling for module, scaling in scales):
        module, scaling = scales[0]
        raise ConfigError(
            f"the scale of all LoRA layers of PEFT was changed, from {scaling} to {module.scaling} in the first, and "
            f"would not be that of experts' factors; load the adapter with another lora_alpha in its configuration"
        )
