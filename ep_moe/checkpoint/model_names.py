"""The tensor names of published models, in checkpoints and in modules of transformers.

`CHECKPOINT_NAMES` has one entry per model family. A `ModuleLayout` describes the parameters of a transformers module of
experts. It converts an expert's tensors to canonical ones (`w13` gate first, `w2`, biases) and back, for any sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ep_moe.checkpoint.formats import ExpertFormat, Fused, PerExpert, Source, Stacked
from ep_moe.errors import ConfigError
from ep_moe.renamed import renamed_in


@dataclass(frozen=True, kw_only=True)
class CheckpointNames:
    """The names of a MoE block's tensors in a checkpoint.

    Args:
        block: The block's prefix, in which `{layer}` stands for the layer's number.
        experts: The formats in use, tried in this order.
        router: Names in the block, by the name of the `Router`'s tensor.
        shared: The shared expert's prefix in the block, None without one.
        elsewhere: Names and prefixes in the block that the caller loads. `load_layers` names them in its warning.
        resaved: The block's prefix if transformers saved the model under its own names (save_original_format=False).
            None if it is the same.
    """

    block: str
    experts: tuple[ExpertFormat, ...]
    router: Mapping[str, str] = field(default_factory=lambda: {"weight": "gate.weight"})
    shared: str | None = None
    elsewhere: tuple[str, ...] = ()
    resaved: str | None = None

    def block_in(self, source: Source, layer: int) -> str:
        """Return the block's prefix in the files of `source`."""
        known = [prefix.format(layer=layer) for prefix in (self.block, self.resaved) if prefix is not None]
        return next((prefix for prefix in known if source.under(prefix)), known[0])


_QWEN_NAMES = ("experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight", "experts.{e}.down_proj.weight")
_MIXTRAL_NAMES = ("experts.{e}.w1.weight", "experts.{e}.w3.weight", "experts.{e}.w2.weight")


# names of checkpoints in MLX format
_SWITCH = Stacked("switch_mlp.gate_proj.weight", "switch_mlp.up_proj.weight", "switch_mlp.down_proj.weight")


CHECKPOINT_NAMES: dict[str, CheckpointNames] = {
    "qwen3_moe": CheckpointNames(block="model.layers.{layer}.mlp", experts=(PerExpert(*_QWEN_NAMES), Fused(), _SWITCH)),
    "mixtral": CheckpointNames(
        block="model.layers.{layer}.block_sparse_moe",
        resaved="model.layers.{layer}.mlp",
        experts=(PerExpert(*_MIXTRAL_NAMES), Fused(), _SWITCH),
    ),
    "deepseek_v3": CheckpointNames(
        block="model.layers.{layer}.mlp",
        experts=(PerExpert(*_QWEN_NAMES), Fused(), _SWITCH),
        router={"weight": "gate.weight", "e_score_correction_bias": "gate.e_score_correction_bias"},
        shared="shared_experts",
    ),
    "gpt_oss": CheckpointNames(
        block="model.layers.{layer}.mlp",
        experts=(Fused(transposed=True, interleaved=True, bias=True),),
        router={"weight": "router.weight", "bias": "router.bias"},
    ),
    "llama4_text": CheckpointNames(
        block="model.layers.{layer}.feed_forward",
        experts=(PerExpert(*_QWEN_NAMES), Fused(transposed=True), _SWITCH),
        router={"weight": "router.weight"},
        shared="shared_expert",
    ),
}

# model types that are published with their own code, equivalent to a class of transformers
ALIASES = {"kimi_k2": "deepseek_v3"}


def names_of(family: str | CheckpointNames) -> CheckpointNames:
    """Return the names of a family, or the given names. Raises ConfigError for an unknown family."""
    if isinstance(family, CheckpointNames):
        return family
    if not isinstance(family, str) or family not in CHECKPOINT_NAMES:
        raise ConfigError(f"family must be one of {', '.join(CHECKPOINT_NAMES)}, got {family!r}")
    return CHECKPOINT_NAMES[family]


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """A parameter of a transformers module that holds one tensor of each expert.

    name: name of the parameter in its module
    part: name of the canonical tensor: w13, w2, w13_bias or w2_bias; w1 is the gate half of w13, w3 the up half
    transposed: each expert's matrix is [columns, rows]
    interleaved: rows of gate and up alternate in w13
    flat: the parameter is [E * rows, columns], otherwise [E, rows, columns]
    unused: number of entries after those of the E experts
    """

    name: str
    part: str
    transposed: bool = False
    interleaved: bool = False
    flat: bool = False
    unused: int = 0

    def expert_slice(self, whole: Tensor, expert: int, experts: int) -> Tensor:
        """Return an expert's part of the parameter."""
        return whole.unflatten(0, (experts, -1))[expert] if self.flat else whole[expert]

    def join(self, stacked: Tensor) -> Tensor:
        """Join the parts of all experts [E, ...] to the parameter. Unused entries are 0."""
        if self.flat:
            return stacked.flatten(0, 1)
        unused = stacked.new_zeros((self.unused, *stacked.shape[1:]))
        return torch.cat([stacked, unused]) if self.unused else stacked

    def to_canonical(self, tensor: Tensor) -> Tensor:
        tensor = tensor.mT if self.transposed else tensor
        if not self.interleaved:
            return tensor
        dim = self._rows
        return torch.cat(tensor.unflatten(dim, (-1, 2)).unbind(dim), dim)

    def from_canonical(self, tensor: Tensor) -> Tensor:
        """Convert a canonical tensor to the parameter's order: the inverse of `to_canonical`."""
        if self.interleaved:
            dim = self._rows
            tensor = torch.stack(tensor.chunk(2, dim), dim).flatten(dim - 1, dim)
        return tensor.mT if self.transposed else tensor

    @property
    def _rows(self) -> int:
        return -1 if self.part.endswith("_bias") else -2


@dataclass(frozen=True)
class ModuleLayout:
    """The parameters of a transformers module of experts.

    experts: E; tensors: gate and up before down
    gated: w13 has gate and up, otherwise up only

    Methods take and return dicts by parameter name, with tensors of one expert or of all experts [E, ...].
    """

    experts: int
    tensors: tuple[ParameterLayout, ...]
    gated: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.tensors)

    def expert_slice(self, whole: Mapping[str, Tensor], expert: int) -> dict[str, Tensor]:
        """Return an expert's part of each parameter."""
        return {one.name: one.expert_slice(whole[one.name], expert, self.experts) for one in self.tensors}

    def to_canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {one.part: one.to_canonical(tensors[one.name]) for one in self.tensors}
        if "w1" in found:
            found["w13"] = torch.cat([found.pop("w1"), found.pop("w3")], -2)
        return found

    def from_canonical(self, canonical: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert canonical tensors to those of the parameters: the inverse of `to_canonical`."""
        parts = dict(canonical)
        if any(one.part == "w1" for one in self.tensors):
            parts["w1"], parts["w3"] = parts.pop("w13").chunk(2, -2)
        return {one.name: one.from_canonical(parts[one.part]) for one in self.tensors}


def fused_layout(stored: Fused, experts: int) -> ModuleLayout:
    """Return the layout of the experts' module in transformers, for a family of `CHECKPOINT_NAMES`."""
    both = {"transposed": stored.transposed, "interleaved": stored.interleaved}
    tensors = [
        ParameterLayout(name="gate_up_proj", part="w13", **both),
        ParameterLayout(name="down_proj", part="w2", transposed=stored.transposed),
    ]
    if stored.bias:
        tensors += [
            ParameterLayout(name="gate_up_proj_bias", part="w13_bias", interleaved=stored.interleaved),
            ParameterLayout(name="down_proj_bias", part="w2_bias"),
        ]
    return ModuleLayout(experts, tuple(tensors))


if not TYPE_CHECKING:  # type checkers see only the new names
    __getattr__ = renamed_in(__name__, {"FAMILIES": ("CHECKPOINT_NAMES", CHECKPOINT_NAMES)})
