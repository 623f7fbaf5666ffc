"""Refusal of PEFT's own entries (`get_peft_model`, `PeftModel.from_pretrained`, `model.add_adapter`) for what they
would leave out of a model with expert-parallel layers.

PEFT puts `peft_config` on each model into which it puts an adapter. It is read where weights are loaded, as
`from_pretrained` does at once, and at each call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ep_moe.errors import ConfigError
from ep_moe.integrations.lora_targets import check_modules

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
