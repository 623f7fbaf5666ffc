"""Replaces whole MoE blocks of known families by layers with our router, our experts and the model's shared experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ep_moe.checkpoint.formats import PLAIN_DTYPES, ExpertFormat, Fused
from ep_moe.checkpoint.model_names import CheckpointNames, fused_layout, names_of
from ep_moe.checkpoint.reader import check_block, read_experts
from ep_moe.checkpoint.source import ModuleSource
from ep_moe.checks import check_kind
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import CheckpointError, ConfigError
from ep_moe.integrations.activation_probe import computes, find_activation, is_experts
from ep_moe.integrations.families import FAMILIES, Family, blocks_of, moe_config_of
from ep_moe.integrations.find_experts import held_tensor
from ep_moe.integrations.generic import ExpertParallelExperts, keep_frozen, replace_module
from ep_moe.integrations.model_hooks import TokenMasks
from ep_moe.integrations.save import LayerWithLayout, ModelParts, put_tensor
from ep_moe.layer import MoELayer


class ExpertParallelBlock(nn.Module):
    """Replaces a model's MoE block and returns what that block returned. `RouterLogitsHook` collects its router logits.

    moe: the layer that computes the block
    returns: converts (output, input) to what the model expects
    masks: the model's record of which rows are tokens
    jitter: in training, rows are multiplied by uniform random numbers in [1 - jitter, 1 + jitter]
    """

    def __init__(
        self, moe: MoELayer, returns: Callable[[Tensor, Tensor], Any], masks: TokenMasks, jitter: float = 0.0
    ) -> None:
        super().__init__()
        self.moe = moe
        self._returns = returns
        self.masks, self._jitter = masks, jitter

    def forward(self, hidden_states: Tensor) -> Any:
        if self.training and self._jitter > 0:
            noise = torch.empty_like(hidden_states).uniform_(1.0 - self._jitter, 1.0 + self._jitter)
            hidden_states = hidden_states * noise
        mask = self.masks.of_rows(hidden_states.shape[:-1].numel())
        if mask is None or not self.moe._takes_mask:
            return self._returns(self.moe(hidden_states), hidden_states)
        tokens, sent = mask.tokens.view(hidden_states.shape[:-1]), bool(mask.sent or self.moe._logit_taps)
        return self._returns(self.moe(hidden_states, tokens, send_masked=sent), hidden_states)


def replace_blocks(
    model: PreTrainedModel, context: EPContext, family: Family, layer_options: dict[str, Any]
) -> dict[str, ExpertParallelBlock]:
    """Replace the blocks of a known family, in place. Return the replacements by name.

    Raises:
        ConfigError: The family's entry does not cover all that a block holds and computes.
    """
    config = model.config.get_text_config()
    moe_config, names = moe_config_of(family, config), names_of(config.model_type)
    masks, made = TokenMasks(send_padding=not model.can_generate()), {}
    for number, name in enumerate([name for name, _ in blocks_of(model, family)]):  # no list keeps blocks alive
        block = model.get_submodule(name)
        parameters = list(block.parameters())
        # look at the experts first: the router may be float32 when they are not
        by_experts = [*block.get_submodule("experts").parameters(), *parameters]
        first = next((one for one in by_experts if one.dtype in PLAIN_DTYPES), parameters[0])
        shared = None if family.shared is None else _shared(block, name, family.shared)
        layer_options |= {"shared_experts": shared, "name": name, "device": first.device, "dtype": first.dtype}
        if number == 0:
            _check_activation(block, name, moe_config)
        moe = MoELayer(moe_config, context, **layer_options)
        source = ModuleSource(block, name)
        found = _accounted(source, block, name, names, moe, config.model_type)
        if first.device.type != "meta":
            read_experts(moe, source, name, found)
            _copy_router(moe, source, name, names.router)
        _keep_frozen(moe, block, names, found)
        made[name] = ExpertParallelBlock(moe, family.returns, masks, _jitter(block, name))
        made[name].train(block.training)
        replace_module(model, block, made[name])
    return made


def _shared(block: nn.Module, name: str, attribute: str) -> nn.Module:
    found = getattr(block, attribute, None)
    if not isinstance(found, nn.Module):
        raise ConfigError(f"{name} ({type(block).__name__}) has no module {attribute!r}; mend Family.shared")
    return found


def _jitter(block: nn.Module, name: str) -> float:
    """Return the `jitter_noise` of a block, by which Mixtral multiplies its rows in training; 0.0 if it has none.

    It is read from attributes, because neither a tensor nor a forward in eval mode shows it. Raise ConfigError for
    jitter of another name or place.
    """
    for path, module in block.named_modules():
        for attribute, value in vars(module).items():
            if "jitter" not in attribute or not isinstance(value, int | float) or not value:
                continue
            if module is not block or attribute != "jitter_noise":
                raise ConfigError(
                    f"{name}.{path}.{attribute}={value:g} is noise of training that a replaced block does not make; "
                    f"set it to 0 in the model's configuration".replace("..", ".")
                )
            return float(value)
    return 0.0


def _accounted(
    source: ModuleSource, block: nn.Module, name: str, names: CheckpointNames, moe: MoELayer, model_type: str
) -> ExpertFormat:
    """Return the format of the experts in the block. Raise ConfigError unless the entry covers all that it holds."""
    computed = [
        f"{name}.{path}.{buffer}".replace("..", ".")
        for path, module in block.named_modules()
        for buffer in sorted(module._non_persistent_buffers_set)
    ]
    if computed:
        raise ConfigError(
            f"{', '.join(computed)} of {type(block).__name__} is computed and in no checkpoint, so that the entry of "
            f"{model_type!r} cannot name it; leave the family unregistered: its experts alone are then replaced"
        )
    try:
        found, _ = check_block(source, names, name, moe, model_type, in_memory=True)
    except CheckpointError as error:
        codes = any(tensor.dtype not in PLAIN_DTYPES for tensor in block.parameters())
        hint = "; a model that is quantized is loaded with load_pretrained" if codes else ""
        raise ConfigError(f"{error}{hint}") from error
    experts: Any = block.get_submodule("experts")
    if is_experts(experts) and isinstance(found, Fused):
        stated = (found.transposed, found.interleaved)
        if stated != (held := (experts.is_transposed, not experts.is_concatenated)):
            raise ConfigError(
                f"{name}.experts ({type(experts).__name__}) are held with transposed={held[0]}, interleaved={held[1]}, "
                f"and the entry of {model_type!r} says {found}; mend CheckpointNames.experts"
            )
    return found


def _check_activation(block: nn.Module, name: str, config: MoEConfig) -> None:
    experts: Any = block.get_submodule("experts")
    if not is_experts(experts) or computes(experts, config):
        return
    found = find_activation(experts, f"{name}.experts")
    raise ConfigError(
        f"{name}.experts ({type(experts).__name__}) compute {found.activation.value} (alpha={found.alpha:g}, "
        f"limit={found.limit:g}), and Family.config says {config.activation.value} (alpha={config.activation_alpha:g}, "
        f"limit={config.activation_limit:g}); mend it"
    )


def check_context(what: str, context: object) -> None:
    """Raise ConfigError for a context that is none. what: what errors call the caller."""
    check_kind(f"{what}: context", context, EPContext)


def check_model(what: str, model: object) -> None:
    """Raise ConfigError unless a model has modules and a configuration, as those of transformers have."""
    check_kind(f"{what}: model", model, nn.Module)
    if not hasattr(model, "config"):
        raise ConfigError(
            f"{what}: model must be a model of transformers, got {type(model).__name__}, which has no config; pass the "
            f"model itself, not a wrapper or a part of it"
        )


def layers_with_layout(model: Any) -> list[LayerWithLayout]:
    """Return the layers of a model with the layout of transformers' modules, in the model's order.

    Raises:
        ConfigError: The model has no expert-parallel layers.
    """
    check_kind("model", model, nn.Module)
    prefix = "base_model.model." if hasattr(model, "peft_config") and hasattr(model, "base_model") else ""
    found = []
    for path, module in model.named_modules():
        name = path.removeprefix(prefix)
        if isinstance(module, ExpertParallelExperts):
            found.append(LayerWithLayout(name, module.moe, module.layout, module.kept))
        elif isinstance(module, ExpertParallelBlock):
            formats = names_of(model.config.get_text_config().model_type).experts
            held = next(each for each in formats if isinstance(each, Fused))
            layout = fused_layout(held, module.moe.config.num_experts)
            found.append(LayerWithLayout(f"{name}.experts", module.moe, layout))
    if not found:
        raise ConfigError("model must have expert-parallel layers, got none; call its own save_pretrained")
    return found


def model_parts(model: Any) -> ModelParts:
    """Return the parts of a model with expert-parallel layers. Raise ConfigError for another, or one with adapters."""
    experts = layers_with_layout(model)
    if hasattr(model, "peft_config") and hasattr(model, "base_model") and not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{type(model).__name__} holds LoRA factors beside weights that it has under other names; call "
            f"ep_moe.integrations.lora.merge_lora(model) first, or save_lora(model, folder) for the factors alone"
        )
    blocks = {n: m for n, m in model.named_modules() if isinstance(m, ExpertParallelBlock)}
    if not blocks:
        return ModelParts(model, experts, {one.name: one.stand_in() for one in experts})
    names, places = names_of(model.config.get_text_config().model_type), dict[str, nn.Module]()
    for (name, block), one in zip(blocks.items(), experts, strict=True):
        place = places[name] = nn.Module()
        place.experts = one.stand_in()
        for full, tensor in block_tensors(block.moe, name, names).items():
            put_tensor(place, full.removeprefix(f"{name}."), tensor)
    return ModelParts(model, experts, places)


def shared_names(model: Any) -> Iterator[tuple[str, str, str]]:
    """Yield (block, ours, theirs) for each block of a known family with shared experts.

    block is the block's name. ours and theirs are the names of its shared experts in our block and in transformers'.
    """
    prefix = "base_model.model." if hasattr(model, "peft_config") and hasattr(model, "base_model") else ""
    for path, module in model.named_modules():
        if isinstance(module, ExpertParallelBlock) and module.moe.shared_experts is not None:
            shared = FAMILIES[model.config.get_text_config().model_type].shared
            assert shared is not None, "the layer was given the block's own"
            yield path.removeprefix(prefix), "moe.shared_experts", shared


def block_tensors(layer: MoELayer, block: str, names: CheckpointNames) -> dict[str, Tensor]:
    """Return the tensors of a layer's router and shared experts, by transformers' names."""
    assert isinstance(layer.router, nn.Module)
    found = {f"{block}.{names.router[key]}": tensor for key, tensor in layer.router.state_dict().items()}
    if layer.shared_experts is not None:
        found |= {f"{block}.{names.shared}.{key}": tensor for key, tensor in layer.shared_experts.state_dict().items()}
    return found


def _keep_frozen(moe: MoELayer, block: nn.Module, names: CheckpointNames, found: ExpertFormat) -> None:
    """Freeze the parameters of a layer's router and experts that are frozen in the replaced block.

    Shared experts need nothing: the layer holds the block's own module.
    """
    assert isinstance(moe.router, nn.Module)
    for key, parameter in moe.router.named_parameters():
        parameter.requires_grad_(held_tensor(block, names.router[key]).requires_grad)
    experts = block.get_submodule("experts")
    if not any(one.requires_grad for one in experts.parameters()):
        moe.expert_weights.requires_grad_(False)
    elif isinstance(found, Fused):
        keep_frozen(moe, fused_layout(found, moe.config.num_experts), experts)


@torch.no_grad()
def _copy_router(moe: MoELayer, source: ModuleSource, block: str, names: Any) -> None:
    assert isinstance(moe.router, nn.Module)
    for key, tensor in moe.router.state_dict().items():
        tensor.copy_(source.read(f"{block}.{names[key]}"))
