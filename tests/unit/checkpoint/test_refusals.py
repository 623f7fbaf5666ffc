"""Test that checkpoints and models which would be misread, or do not fit a configuration, are refused by name."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ep_moe import Activation, CheckpointError, ConfigError, EPContext, InputError, MoEConfig, MoELayer, RoutingConfig
from ep_moe.checkpoint.reader import load_layers
from ep_moe.config import ParallelConfig, RoutingMethod
from ep_moe.quant.schemes import SCHEMES

H, I, E = 128, 128, 2  # noqa: E741
P = "model.layers.0.mlp"
SIZES = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
FP8 = torch.float8_e4m3fn


@pytest.fixture
def context():
    with EPContext.local(torch.device("cpu")) as made:
        yield made


def config(**fields) -> MoEConfig:
    return MoEConfig(**({"hidden_size": H, "intermediate_size": I, "num_experts": E, "top_k": 1} | fields))


def each(make) -> dict[str, Tensor]:
    """Return the tensors of every matrix. `make` returns name suffix -> tensor from a shape."""
    found = {f"{P}.gate.weight": torch.randn(E, H).bfloat16()}
    for expert in range(E):
        for name, shape in SIZES.items():
            found |= {f"{P}.experts.{expert}.{name}.{end}": tensor for end, tensor in make(*shape).items()}
    return found


def plain() -> dict[str, Tensor]:
    return each(lambda rows, columns: {"weight": torch.randn(rows, columns).bfloat16()})


def int8() -> dict[str, Tensor]:
    return each(lambda r, c: {"weight": torch.ones(r, c).to(torch.int8), "weight_scale_inv": torch.ones(1, 1)})


def fp8() -> dict[str, Tensor]:
    return each(lambda r, c: {"weight": torch.randn(r, c).to(FP8), "weight_scale_inv": torch.ones(1, 1)})


def int4(scale=torch.bfloat16, **more: Tensor) -> dict[str, Tensor]:
    one = lambda r, c: {  # noqa: E731
        "weight_packed": torch.ones(r, c // 8, dtype=torch.int32), "weight_scale": torch.ones(r, c // 128).to(scale)
    } | {end: tensor.clone() for end, tensor in more.items()}  # fmt: skip
    return each(one)


def load(layer: MoELayer, tensors: dict[str, Tensor], folder, family="qwen3_moe") -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    load_layers({0: layer}, folder, family, progress=False)


@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_codes_are_no_numbers(scheme, context, tmp_path):
    layer = MoELayer(config(), context, quantization=scheme)
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight must be .*bfloat16.*, got int8"):
        load(layer, int8(), tmp_path)
    router = plain() | {f"{P}.gate.weight": torch.ones(E, H, dtype=torch.int8)}
    with pytest.raises(CheckpointError, match=r"gate\.weight must be .*, got int8"):
        load(layer, router, tmp_path)


@pytest.mark.parametrize("scheme", ["none", "int4_fp8"])
@pytest.mark.parametrize("name", ["weight_zero_point", "weight_g_idx"])
def test_int4_that_is_not_symmetric_or_in_order(name, scheme, context, tmp_path):
    layer = MoELayer(config(), context, quantization=scheme)
    with pytest.raises(CheckpointError, match=rf"{name} changes what the numbers mean"):
        load(layer, int4(**{name: torch.zeros(1, dtype=torch.int32)}), tmp_path)


def test_exponents_are_bytes_whatever_they_are_called(context, tmp_path):
    scale = torch.full((E, 2 * I, H // 32), 124, dtype=torch.uint8)
    tensors = {f"{P}.router.weight": torch.randn(E, H), f"{P}.router.bias": torch.randn(E)}
    for name, rows in (("gate_up_proj", 2 * I), ("down_proj", H)):
        tensors |= {
            f"{P}.experts.{name}_blocks": torch.full((E, rows, H // 32, 16), 0x21, dtype=torch.uint8),
            f"{P}.experts.{name}_scales": scale[:, :rows].clone(),
            f"{P}.experts.{name}_bias": torch.randn(E, rows),
        }
    asked = config(
        activation=Activation.SWIGLU_CLAMPED, expert_bias=True,
        routing=RoutingConfig(method=RoutingMethod.TOPK_SOFTMAX, bias=True),
    )  # fmt: skip
    layers = [MoELayer(asked, context, quantization="mxfp4") for _ in range(2)]
    load(layers[0], tensors, tmp_path, "gpt_oss")
    called = {name: t.view(torch.float8_e8m0fnu) if name.endswith("_scales") else t for name, t in tensors.items()}
    load(layers[1], called, tmp_path, "gpt_oss")
    for name, tensor in layers[0].expert_weights.slot(0).items():
        assert torch.equal(tensor, layers[1].expert_weights.slot(0)[name]), name


@pytest.mark.parametrize(
    ("fields", "family", "sentence"),
    [
        ({"expert_bias": True}, "qwen3_moe", "experts have no biases, and MoEConfig.expert_bias=True"),
        ({"activation": Activation.RELU2}, "qwen3_moe", "MoEConfig.activation=relu2 has none"),
        ({"shared_intermediate_size": 64}, "qwen3_moe", "MoEConfig.shared_intermediate_size=64"),
        ({"routing": RoutingConfig(bias=True)}, "qwen3_moe", "router has no bias in this family"),
        ({}, "deepseek_v3", "e_score_correction_bias is there, and RoutingConfig.correction_bias=False leaves it out"),
    ],
)
def test_configurations_that_do_not_fit(fields, family, sentence, context, tmp_path):
    tensors = plain() | {f"{P}.gate.e_score_correction_bias": torch.randn(E)}
    with pytest.raises(CheckpointError, match=sentence):
        load(MoELayer(config(**fields), context), tensors, tmp_path, family)


def test_shared_experts_that_were_not_asked_for_are_named(context, tmp_path):
    tensors = plain() | {f"{P}.shared_experts.gate_proj.weight": torch.randn(I, H)}
    with pytest.warns(UserWarning, match="shared_experts is not loaded"):
        load(MoELayer(config(), context), tensors, tmp_path, "deepseek_v3")


def test_layers_without_memory(context, tmp_path):
    with torch.device("meta"):
        layer = MoELayer(config(), context)
    with pytest.raises(CheckpointError, match=r"meta device; call to_empty\(device=\.\.\.\) before load_layers"):
        load(layer, plain(), tmp_path)
    with pytest.raises(InputError, match=r"meta device; call to_empty\(device=\.\.\.\) before update_expert"):
        layer.update_expert(0, w13=torch.ones(2 * I, H), w2=torch.ones(H, I))


def test_no_layers(tmp_path):
    with pytest.raises(InputError, match="at least one layer"):
        load_layers({}, tmp_path, "qwen3_moe")


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_plain_weights_are_numbers(dtype, context):
    with pytest.raises(InputError, match="w2 must be numbers that are rounded to float32, got"):
        MoELayer(config(), context).update_expert(0, w2=torch.ones(H, I).to(dtype))


def test_a_quantised_layer_has_plain_biases(context):
    layer = MoELayer(config(expert_bias=True), context, quantization="mxfp4")
    given = SCHEMES["mxfp4"].quantize({"w13": torch.randn(2 * I, H), "w2": torch.randn(H, I)}, torch.bfloat16)
    layer.update_expert(0, **given, w2_bias=torch.ones(H, dtype=torch.float64))
    with pytest.raises(InputError, match="w2_bias must be numbers"):
        layer.update_expert(0, w2_bias=torch.ones(H, dtype=torch.int32))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: config(activation="swiglu"), r"MoEConfig\.activation must be one of Activation\.SWIGLU, .*'swiglu'"),
        (lambda: config(routing="softmax"), r"MoEConfig\.routing must be a RoutingConfig, got 'softmax'"),
        (lambda: RoutingConfig(method="softmax_topk"), r"RoutingConfig\.method must be one of RoutingMethod\.SOFTMAX"),
        (lambda: ParallelConfig(tokens="sharded"), r"ParallelConfig\.tokens must be one of Tokens\.REPLICATED"),
    ],
)
def test_names_in_the_place_of_members(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()
