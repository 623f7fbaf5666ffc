"""The configuration that users write: frozen, keyword-only dataclasses, checked on construction, readable from TOML."""

from __future__ import annotations

import enum
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from ep_moe.checks import (
    INT32_MAX,
    MOST_EXPERTS,
    check_kind,
    check_path,
    check_positive,
    did_you_mean,
    from_table,
    set_counts,
    set_flags,
    set_positive,
    shown,
)
from ep_moe.errors import ConfigError
from ep_moe.types import Activation


class RoutingMethod(enum.Enum):
    """How the router turns logits [T, E] into ids and weights [T, K].

    - `SOFTMAX_TOPK`: softmax over all experts, then top-k (Mixtral, Qwen3-MoE).
    - `TOPK_SOFTMAX`: top-k of the logits, then softmax over the K (GPT-OSS).
    - `TOPK_SIGMOID`: top-k of the logits, then sigmoid (Llama-4, K = 1).
    - `SIGMOID_TOPK`: sigmoid, correction bias for the choice only, groups, top-k (DeepSeek-V3, Kimi-K2).
    """

    SOFTMAX_TOPK = "softmax_topk"
    TOPK_SOFTMAX = "topk_softmax"
    TOPK_SIGMOID = "topk_sigmoid"
    SIGMOID_TOPK = "sigmoid_topk"


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How the router chooses the experts of a token.

    Args:
        method: How logits become ids and weights.
        renormalize: Divide the K weights by their sum (SOFTMAX_TOPK and SIGMOID_TOPK).
        scaling_factor: Routed scaling factor, multiplied in last.
        num_groups: SIGMOID_TOPK: the number of expert groups. A group's score is the sum of its two best experts.
        top_groups: SIGMOID_TOPK: the number of best groups whose experts can be chosen.
        correction_bias: SIGMOID_TOPK adds a learned bias [E] to the scores for the choice, not to the weights.
        bias: The router's linear map has a bias [E].
        weight_on_input: Multiply the expert's input, not its output, by the weight (needs top_k = 1).
        float32_logits: Store and compute the linear map in float32, whatever the layer's dtype.

    Raises:
        ConfigError: a field has a wrong type, is out of range, or does not apply to the method.
    """

    method: RoutingMethod = RoutingMethod.SOFTMAX_TOPK
    renormalize: bool = False
    scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    correction_bias: bool = False
    bias: bool = False
    weight_on_input: bool = False
    float32_logits: bool = False

    def __post_init__(self) -> None:
        check_kind("RoutingConfig.method", self.method, RoutingMethod)
        set_positive(self, "scaling_factor")
        set_counts(self, num_groups=1, top_groups=1)
        set_flags(self, "renormalize", "correction_bias", "bias", "weight_on_input", "float32_logits")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ConfigError(
                f"RoutingConfig.top_groups must be between 1 and num_groups, got top_groups="
                f"{self.top_groups}, num_groups={self.num_groups}"
            )
        grouped = self.num_groups > 1 or self.correction_bias
        if grouped and self.method is not RoutingMethod.SIGMOID_TOPK:
            raise ConfigError(
                f"RoutingConfig.num_groups and correction_bias belong to method sigmoid_topk, got method="
                f"{self.method.value}, num_groups={self.num_groups}, correction_bias={self.correction_bias}"
            )
        if self.renormalize and self.method in (RoutingMethod.TOPK_SOFTMAX, RoutingMethod.TOPK_SIGMOID):
            raise ConfigError(
                f"RoutingConfig.renormalize belongs to methods softmax_topk and sigmoid_topk, got method="
                f"{self.method.value}; leave it False"
            )


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The shape and routing of one MoE layer, independent of where it runs.

    Args:
        hidden_size: H.
        intermediate_size: I of one routed expert.
        num_experts: E, the number of logical experts.
        top_k: K, the number of experts of a token.
        activation: The function between the two expert matrices.
        activation_alpha: The constant alpha of SWIGLU_CLAMPED and SWIGLU_SOFTCAPPED.
        activation_limit: The constant limit of SWIGLU_CLAMPED, SWIGLU_SOFTCAPPED, SWIGLU_LIMITED and
            SWIGLU_LIMITED_AFTER.
        expert_bias: Both expert matrices have biases [E, 2I] and [E, H].
        shared_intermediate_size: I of the shared expert, 0 for none. It has the activation of the routed experts.
        shared_gate: Multiply the shared expert's output by sigmoid(x @ gate) (Qwen2-MoE).
        routing: How the router chooses the experts of a token.

    Raises:
        ConfigError: a field has a wrong type, is out of range, or contradicts another field.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    activation: Activation = Activation.SWIGLU
    activation_alpha: float = 1.702
    activation_limit: float = 7.0
    expert_bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    routing: RoutingConfig = field(default_factory=RoutingConfig)

    def __post_init__(self) -> None:
        check_kind("MoEConfig.activation", self.activation, Activation)
        check_kind("MoEConfig.routing", self.routing, RoutingConfig)
        set_counts(self, at_most=INT32_MAX, hidden_size=1, intermediate_size=1, shared_intermediate_size=0)
        set_counts(self, at_most=MOST_EXPERTS, num_experts=1, top_k=1)
        set_positive(self, "activation_alpha", "activation_limit")
        set_flags(self, "expert_bias", "shared_gate")
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"MoEConfig.top_k must not exceed num_experts, got top_k={self.top_k}, num_experts={self.num_experts}"
            )
        if self.shared_gate and not self.shared_intermediate_size:
            raise ConfigError(
                "MoEConfig.shared_gate=True needs shared_intermediate_size > 0, got 0; set the size of the shared "
                "experts, or shared_gate=False"
            )
        self._check_routing()

    def _check_routing(self) -> None:
        routing = self.routing
        if routing.weight_on_input and self.top_k != 1:
            raise ConfigError(
                f"RoutingConfig.weight_on_input needs top_k = 1 (a row that travels once has one weight), got "
                f"top_k={self.top_k}; set weight_on_input=False, or top_k=1"
            )
        if self.num_experts % routing.num_groups:
            raise ConfigError(
                f"RoutingConfig.num_groups must divide num_experts, got num_groups={routing.num_groups}, "
                f"num_experts={self.num_experts}"
            )
        per_group = self.num_experts // routing.num_groups
        if routing.num_groups > 1 and per_group < 2:
            raise ConfigError(
                f"RoutingConfig.num_groups={routing.num_groups} leaves {per_group} expert a group; 2 needed"
            )
        if self.top_k > routing.top_groups * per_group:
            raise ConfigError(
                f"MoEConfig.top_k={self.top_k} exceeds the {routing.top_groups} x {per_group} experts that "
                f"RoutingConfig.top_groups leaves to choose from"
            )

    @property
    def w13_rows(self) -> int:
        """Rows of w13: 2I (gate and up) if the activation is gated, else I."""
        return self.intermediate_size * (2 if self.activation.gated else 1)


ONE_SCALE = {"fp8_tensor": 448, "nvfp4": 448 * 6}  # the largest x / input_scale, by format with one `input_scale`


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The number format of rows in dispatch and combine.

    Formats of `dispatch`:

    - `"plain"`: the layer's dtype.
    - `"fp8_block"`: E4M3 with one float32 scale per 128 columns (DeepSeek-V3's activations): half the bytes. Rows are
      rounded once, before dispatch. `fp8_block_triton` takes such rows as they are. Its results are bitwise equal to
      those from plain rows, which it rounds in the same way. Other kernels convert the rows to the layer's dtype.
    - `"fp8_row"`: E4M3 with one float32 scale per row. `fp8_dynamic_triton` and `fp8_channel_triton` take such rows.
    - `"fp8_tensor"`: E4M3 with one static scale, `input_scale`. No scales are sent. For `fp8_static` with calibrated
      scales.
    - `"mxfp8"`: E4M3 with one E8M0 scale per 32 columns, for Blackwell's kernels of this format.
    - `"nvfp4"`: E2M1 with one E4M3 scale per 16 columns, for Blackwell's kernels of this format.

    Args:
        dispatch: The format of rows that are sent to the experts, one of those above.
        combine: "plain", or "fp8": E4M3 without a scale, half the bytes. Each rank's part is then rounded to 4 bits of
            mantissa (2**-4 of its size) and clamped to 448.
        input_scale: The static scale of "fp8_tensor" and "nvfp4" rows; None for other formats. A row is its stored
            numbers (in "nvfp4" times their block scales) times `input_scale`. Its value is the largest calibrated
            magnitude / 448 ("fp8_tensor") or / (448 * 6) ("nvfp4"), as in a checkpoint's `input_scale`. Take the
            largest over the layer's experts.

    Raises:
        ConfigError: a format is unknown, `input_scale` is missing, or the format has no `input_scale`.
    """

    dispatch: str = "plain"
    combine: str = "plain"
    input_scale: float | None = None

    def __post_init__(self) -> None:
        formats = ("plain", "fp8_block", "fp8_row", "fp8_tensor", "mxfp8", "nvfp4")
        for name, known in (("dispatch", formats), ("combine", ("plain", "fp8"))):
            if not isinstance(value := getattr(self, name), str) or value not in known:
                hint = did_you_mean(value, known)
                raise ConfigError(f"Wire.{name} must be one of {', '.join(known)}, got {shown(value)}{hint}")
        largest = ONE_SCALE.get(self.dispatch)
        if largest is None:
            if self.input_scale is not None:
                raise ConfigError(
                    f"Wire.input_scale is for {' and '.join(ONE_SCALE)} rows only, got {self.input_scale!r} with "
                    f"{self.dispatch}"
                )
            return
        try:
            object.__setattr__(self, "input_scale", check_positive("Wire.input_scale", self.input_scale))
        except ConfigError:
            raise ConfigError(
                f"Wire(dispatch={self.dispatch!r}) needs input_scale, a positive number (largest magnitude / "
                f"{largest}, as a checkpoint's input_scale), got {shown(self.input_scale)}"
            ) from None


PLAIN_WIRE = Wire()


class Tokens(enum.Enum):
    """Whether the tp ranks of one dp rank pass the same tokens.

    - `REPLICATED`: every tp rank passes the same tokens. Each rank dispatches its share, and outputs are gathered.
    - `SHARDED`: every rank passes its own tokens (sequence parallelism). Nothing is gathered.
    """

    REPLICATED = "replicated"
    SHARDED = "sharded"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The sizes of the parallel groups.

    The same ranks form two grids: pp * dp * tp for attention, and pp * replicas * ep * etp for experts.

    Args:
        pp: Pipeline stages.
        dp: Data-parallel ranks of a stage.
        tp: Tensor-parallel ranks of a dp rank.
        ep: Ranks of an EP group. Default: dp * tp / etp, one EP group for the stage.
        etp: Ranks that share one expert's intermediate size.
        tokens: Whether the tp ranks of one dp rank pass the same tokens.

    Raises:
        ConfigError: a size is no integer of at least 1.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int | None = None
    etp: int = 1
    tokens: Tokens = Tokens.REPLICATED

    def __post_init__(self) -> None:
        set_counts(self, at_most=INT32_MAX, pp=1, dp=1, tp=1, etp=1)
        if self.ep is not None:
            set_counts(self, at_most=INT32_MAX, ep=1)
        check_kind("ParallelConfig.tokens", self.tokens, Tokens)

    @classmethod
    def expert_parallel(cls, *, dp: int, tp: int = 1, pp: int = 1) -> ParallelConfig:
        """Distribute whole experts over all ranks of the stage: ep = dp * tp, etp = 1.

        Args:
            dp: Data-parallel ranks of a stage.
            tp: Tensor-parallel ranks of a dp rank.
            pp: Pipeline stages.

        Returns:
            The sizes.
        """
        return cls(pp=pp, dp=dp, tp=tp, ep=dp * tp)

    @classmethod
    def expert_tensor_parallel(cls, *, dp: int, tp: int, pp: int = 1) -> ParallelConfig:
        """Distribute experts over dp, and shard each expert over tp: ep = dp, etp = tp.

        Args:
            dp: Data-parallel ranks of a stage.
            tp: Tensor-parallel ranks of a dp rank.
            pp: Pipeline stages.

        Returns:
            The sizes.
        """
        return cls(pp=pp, dp=dp, tp=tp, ep=dp, etp=tp)

    @classmethod
    def tensor_parallel(cls, *, dp: int = 1, tp: int, pp: int = 1) -> ParallelConfig:
        """Shard every expert over all ranks of the stage: ep = 1, etp = dp * tp.

        Args:
            dp: Data-parallel ranks of a stage.
            tp: Tensor-parallel ranks of a dp rank.
            pp: Pipeline stages.

        Returns:
            The sizes.
        """
        return cls(pp=pp, dp=dp, tp=tp, ep=1, etp=dp * tp)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The MoE layers of a published model, as in `configs/*.toml`.

    Args:
        name: The model's name.
        family: The entry of `ep_moe.checkpoint.model_names` that names its tensors.
        num_layers: Number of layers, including dense ones.
        dense_layers: Number of layers without experts.
        moe: The configuration of every MoE layer.

    Raises:
        ConfigError: a field has a wrong type, or no layer has experts.
    """

    name: str
    family: str
    num_layers: int
    dense_layers: int = 0
    moe: MoEConfig

    def __post_init__(self) -> None:
        for name, kind in (("name", str), ("family", str), ("moe", MoEConfig)):
            check_kind(f"ModelConfig.{name}", getattr(self, name), kind)
        set_counts(self, at_most=INT32_MAX, num_layers=1, dense_layers=0)
        if self.dense_layers >= self.num_layers:
            raise ConfigError(
                f"ModelConfig.dense_layers must be less than num_layers, got dense_layers={self.dense_layers}, "
                f"num_layers={self.num_layers}"
            )

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return self.num_layers - self.dense_layers

    @property
    def routed_parameters(self) -> int:
        """Number of parameters in the routed experts of all layers, without biases."""
        moe = self.moe
        return self.moe_layers * moe.num_experts * moe.hidden_size * (moe.w13_rows + moe.intermediate_size)


def model_configs() -> list[str]:
    """List the bundled model configurations.

    Returns:
        Names that `load_model_config` takes, sorted.
    """
    folder = resources.files("ep_moe") / "configs"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_model_config(name_or_path: str | Path) -> ModelConfig:
    """Read a model's configuration.

    Args:
        name_or_path: The name of a bundled configuration (`model_configs`), or a path that ends in .toml.

    Returns:
        The configuration.

    Raises:
        ConfigError: there is no such configuration, or the file is not one.
    """
    check_path("load_model_config: name_or_path", name_or_path)
    path = Path(name_or_path)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"config file {path} does not exist")
        raw = path.read_bytes()
    elif str(name_or_path) in model_configs():
        raw = (resources.files("ep_moe") / "configs" / f"{name_or_path}.toml").read_bytes()
    else:
        known = model_configs()
        hint = did_you_mean(str(name_or_path), known)
        raise ConfigError(
            f"no bundled config is named {str(name_or_path)!r}{hint}; there are {', '.join(known)}, or give a path "
            f"that ends in .toml"
        )
    try:
        table = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name_or_path} is not valid TOML: {error}") from error
    return from_table(ModelConfig, table, where=str(name_or_path))
