"""The names of published models: where a family's checkpoint holds the tensors of a block, and how a module of a
transformers model holds its experts.

A new family is one entry. A module's layout has the names of its parameters, and what each has of an expert; it turns
an expert's tensors into canonical ones (`w13` gate first, `w2`, biases) and back. It knows no sizes.
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
    """Where a checkpoint holds the tensors of a MoE block.

    Args:
        block: The block's prefix, in which `{layer}` stands for the layer's number.
        experts: The formats in use, looked for in this order.
        router: Names in the block, by the tensor of a `Router`.
        shared: The shared expert's prefix in the block, None without one.
        elsewhere: Names and prefixes in the block that the caller loads. `load_layers` names them in its warning.
        resaved: The prefix in a model that transformers saved under its own names (save_original_format=False), if it
            differs.
    """

    block: str
    experts: tuple[ExpertFormat, ...]
    router: Mapping[str, str] = field(default_factory=lambda: {"weight": "gate.weight"})
    shared: str | None = None
    elsewhere: tuple[str, ...] = ()
    resaved: str | None = None

    def block_in(self, source: Source, layer: int) -> str:
        """The prefix that the files have."""
        known = [prefix.format(layer=layer) for prefix in (self.block, self.resaved) if prefix is not None]
        return next((prefix for prefix in known if source.under(prefix)), known[0])


_QWEN_NAMES = ("experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight", "experts.{e}.down_proj.weight")
_MIXTRAL_NAMES = ("experts.{e}.w1.weight", "experts.{e}.w3.weight", "experts.{e}.w2.weight")


# MLX
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

# published with code of its own, which says what transformers' own class says
ALIASES = {"kimi_k2": "deepseek_v3"}


def names_of(family: str | CheckpointNames) -> CheckpointNames:
    """The entry of a family, or names of the caller's. Raises ConfigError."""
    if isinstance(family, CheckpointNames):
        return family
    if family not in CHECKPOINT_NAMES:
        raise ConfigError(f"family must be one of {', '.join(CHECKPOINT_NAMES)}, got {family!r}")
    return CHECKPOINT_NAMES[family]


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """A parameter with one tensor of each expert.

    name: of the parameter, in its module
    part: of an expert's canonical tensors, w13, w2, w13_bias or w2_bias; w1 is the gate half of w13, w3 the up half
    transposed: [columns, rows]
    interleaved: gate and up by turns, where w13 has both
    flat: the experts' rows lie one below another, [E * rows, columns], else [E, rows, columns]
    unused: entries behind those of the experts, which no expert has
    """

    name: str
    part: str
    transposed: bool = False
    interleaved: bool = False
    flat: bool = False
    unused: int = 0

    def one(self, whole: Tensor, expert: int, experts: int) -> Tensor:
        """An expert's part of the parameter."""
        return whole.unflatten(0, (experts, -1))[expert] if self.flat else whole[expert]

    def join(self, stacked: Tensor) -> Tensor:
        """The parameter of the parts of all experts, [E, ...]. Entries that no expert has are 0."""
        if self.flat:
            return stacked.flatten(0, 1)
        unused = stacked.new_zeros((self.unused, *stacked.shape[1:]))
        return torch.cat([stacked, unused]) if self.unused else stacked

    def canonical(self, tensor: Tensor) -> Tensor:
        tensor = tensor.mT if self.transposed else tensor
        if not self.interleaved:
            return tensor
        dim = self._rows
        return torch.cat(tensor.unflatten(dim, (-1, 2)).unbind(dim), dim)

    def stored(self, tensor: Tensor) -> Tensor:
        """The opposite of `canonical`."""
        if self.interleaved:
            dim = self._rows
            tensor = torch.stack(tensor.chunk(2, dim), dim).flatten(dim - 1, dim)
        return tensor.mT if self.transposed else tensor

    @property
    def _rows(self) -> int:
        return -1 if self.part.endswith("_bias") else -2


@dataclass(frozen=True)
class ModuleLayout:
    """The parameters of a module of experts.

    experts: E; tensors: gate and up before down
    gated: w13 is gate and up, else up alone

    Tensors are by the parameters' names: of one expert, or of all of them, [E, ...].
    """

    experts: int
    tensors: tuple[HeldTensor, ...]
    gated: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.tensors)

    def one(self, whole: Mapping[str, Tensor], expert: int) -> dict[str, Tensor]:
        """An expert's part of each parameter."""
        return {one.name: one.one(whole[one.name], expert, self.experts) for one in self.tensors}

    def canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {one.part: one.canonical(tensors[one.name]) for one in self.tensors}
        if "w1" in found:
            found["w13"] = torch.cat([found.pop("w1"), found.pop("w3")], -2)
        return found

    def stored(self, canonical: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The opposite of `canonical`."""
        parts = dict(canonical)
        if any(one.part == "w1" for one in self.tensors):
            parts["w1"], parts["w3"] = parts.pop("w13").chunk(2, -2)
        return {one.name: one.stored(parts[one.part]) for one in self.tensors}


def fused_layout(stored: Fused, experts: int) -> ModuleLayout:
    """How transformers' module of a known family's experts holds them."""
    both = {"transposed": stored.transposed, "interleaved": stored.interleaved}
    tensors = [
        HeldTensor(name="gate_up_proj", part="w13", **both),
        HeldTensor(name="down_proj", part="w2", transposed=stored.transposed),
    ]
    if stored.bias:
        tensors += [
            HeldTensor(name="gate_up_proj_bias", part="w13_bias", interleaved=stored.interleaved),
            HeldTensor(name="down_proj_bias", part="w2_bias"),
        ]
    return ModuleLayout(experts, tuple(tensors))


if not TYPE_CHECKING:  # checkers know the new names alone
    __getattr__ = renamed_in(__name__, {"FAMILIES": ("CHECKPOINT_NAMES", CHECKPOINT_NAMES)})
