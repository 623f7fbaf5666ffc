"""The names of published model families: where a block's tensors lie in a checkpoint. A new family is one entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ep_moe.checkpoint.formats import ExpertFormat, Fused, PerExpert, Source, Stacked
from ep_moe.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CheckpointNames:
    """block: the MoE block's prefix, `{layer}` stands for the layer's number
    resaved: that of a model that transformers saved under its own names (save_original_format=False), if another
    experts: the formats in use, looked for in this order
    router: a Router's tensor -> its name in the block
    shared: the shared expert's prefix in the block, None without one
    elsewhere: names and prefixes in the block that the caller loads; `load_layers` names them in its warning
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


FAMILIES: dict[str, CheckpointNames] = {
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
    if family not in FAMILIES:
        raise ConfigError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    return FAMILIES[family]
