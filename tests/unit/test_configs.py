"""Test the bundled configurations against the published sizes, and the errors of wrong ones."""

import dataclasses
import enum
import json
import re
from importlib import resources

import pytest
from safetensors import safe_open

from ep_moe import (
    Activation,
    ConfigError,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    RoutingConfig,
    RoutingMethod,
    Tokens,
    Wire,
)
from ep_moe.checkpoint.model_names import names_of
from ep_moe.checks import from_table
from ep_moe.config import load_model_config, model_configs

# values of fields that a row of PUBLISHED does not list
USUAL = {
    "dense_layers": 0,
    "moe.activation": "swiglu",
    "moe.expert_bias": False,
    "moe.shared_intermediate_size": 0,
    "moe.shared_gate": False,
    "moe.routing.renormalize": False,
    "moe.routing.scaling_factor": 1.0,
    "moe.routing.num_groups": 1,
    "moe.routing.top_groups": 1,
    "moe.routing.correction_bias": False,
    "moe.routing.bias": False,
    "moe.routing.weight_on_input": False,
    "moe.routing.float32_logits": False,
}

SIZES = ("num_layers", "moe.hidden_size", "moe.intermediate_size", "moe.num_experts", "moe.top_k")

# name: family, (layers, H, I, E, K), routing method, and fields that differ from USUAL; from each model's config.json
PUBLISHED = {
    "deepseek-v3": (
        "deepseek_v3",
        (61, 7168, 2048, 256, 8),
        "sigmoid_topk",
        {
            "dense_layers": 3,
            "moe.shared_intermediate_size": 2048,
            "moe.routing.renormalize": True,
            "moe.routing.scaling_factor": 2.5,
            "moe.routing.num_groups": 8,
            "moe.routing.top_groups": 4,
            "moe.routing.correction_bias": True,
            "moe.routing.float32_logits": True,
        },
    ),
    "kimi-k2": (
        "deepseek_v3",
        (61, 7168, 2048, 384, 8),
        "sigmoid_topk",
        {
            "dense_layers": 1,
            "moe.shared_intermediate_size": 2048,
            "moe.routing.renormalize": True,
            "moe.routing.scaling_factor": 2.827,
            "moe.routing.correction_bias": True,
            "moe.routing.float32_logits": True,
        },
    ),
    "qwen3-235b-a22b": ("qwen3_moe", (94, 4096, 1536, 128, 8), "softmax_topk", {"moe.routing.renormalize": True}),
    "qwen3-30b-a3b": ("qwen3_moe", (48, 2048, 768, 128, 8), "softmax_topk", {"moe.routing.renormalize": True}),
    "mixtral-8x7b": ("mixtral", (32, 4096, 14336, 8, 2), "softmax_topk", {"moe.routing.renormalize": True}),
    "gpt-oss-120b": (
        "gpt_oss",
        (36, 2880, 2880, 128, 4),
        "topk_softmax",
        {
            "moe.activation": "swiglu_clamped",
            "moe.activation_alpha": 1.702,
            "moe.activation_limit": 7.0,
            "moe.expert_bias": True,
            "moe.routing.bias": True,
        },
    ),
    "llama-4-maverick": (
        "llama4_text",
        (48, 5120, 8192, 128, 1),
        "topk_sigmoid",
        {"dense_layers": 24, "moe.shared_intermediate_size": 8192, "moe.routing.weight_on_input": True},
    ),
    "demo": ("qwen3_moe", (3, 128, 64, 16, 2), "softmax_topk", {"moe.routing.renormalize": True}),
}

# name: (parameters in routed experts, parameters of the whole model as published)
PARAMETERS = {
    "deepseek-v3": (58 * 256 * 3 * 7168 * 2048, 671e9),
    "kimi-k2": (60 * 384 * 3 * 7168 * 2048, 1.04e12),  # the technical report's number; the model card rounds to 1T
    "qwen3-235b-a22b": (94 * 128 * 3 * 4096 * 1536, 235e9),
    "qwen3-30b-a3b": (48 * 128 * 3 * 2048 * 768, 30.5e9),
    "mixtral-8x7b": (32 * 8 * 3 * 4096 * 14336, 46.7e9),
    "gpt-oss-120b": (36 * 128 * 3 * 2880 * 2880, 116.8e9),
    "llama-4-maverick": (24 * 128 * 3 * 5120 * 8192, 400e9),
}


def flat(table: dict, prefix: str = "") -> dict:
    """Flatten nested tables to {"moe.routing.bias": ...}. An enum member becomes its value."""
    fields = {}
    for key, value in table.items():
        if isinstance(value, dict):
            fields |= flat(value, f"{prefix}{key}.")
        else:
            fields[prefix + key] = value.value if isinstance(value, enum.Enum) else value
    return fields


def minimal(**changes) -> dict:
    """Return a table that loads, with changes; `moe` and `routing` are nested in it."""
    routing = {"method": "softmax_topk"} | changes.pop("routing", {})
    moe = {"hidden_size": 8, "intermediate_size": 16, "num_experts": 4, "top_k": 2, "routing": routing}
    return {"name": "small", "family": "mixtral", "num_layers": 2, "moe": moe | changes.pop("moe", {})} | changes


def moe(**changes) -> MoEConfig:
    return MoEConfig(**{"hidden_size": 8, "intermediate_size": 16, "num_experts": 16, "top_k": 2} | changes)


def names(*parts: str) -> str:
    """Return a pattern that requires all these texts, in any order."""
    return "".join(f"(?=.*{re.escape(part)})" for part in parts)


# --- the bundled files ----------------------------------------------------------------------------------------


def test_bundled_names():
    assert model_configs() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_field_is_the_published_one(name):
    family, sizes, method, unusual = PUBLISHED[name]
    expected = USUAL | dict(zip(SIZES, sizes, strict=True)) | unusual
    expected |= {"name": name, "family": family, "moe.routing.method": method}
    fields = flat(dataclasses.asdict(load_model_config(name)))
    if fields["moe.activation"] != "swiglu_clamped":  # the constants of an activation matter only for swiglu_clamped
        del fields["moe.activation_alpha"], fields["moe.activation_limit"]
    assert fields == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensor_names_are_known(name):
    config = load_model_config(name)
    assert (names_of(config.family).shared is not None) == (config.moe.shared_intermediate_size > 0)


@pytest.mark.parametrize("name", PARAMETERS)
def test_routed_parameters_account_for_the_published_total(name):
    """Routed parameters account for the published total, less 1.5 % to 5.5 % in these models.

    The rest is attention, embeddings, shared experts and dense layers.
    """
    routed, total = PARAMETERS[name]
    assert load_model_config(name).routed_parameters == routed
    assert 0.945 < routed / total < 0.985


def test_gpt_oss_mlp_parameters_to_the_digit():
    """Parameters of GPT-OSS's MLPs equal the model card's 114.71B: routed weights, biases and routers."""
    config = load_model_config("gpt-oss-120b")
    experts, hidden = config.moe.num_experts, config.moe.hidden_size
    biases = config.moe_layers * experts * (config.moe.w13_rows + hidden)
    routers = config.moe_layers * experts * (hidden + 1)
    assert round((config.routed_parameters + biases + routers) / 1e9, 2) == 114.71


def test_an_ungated_activation_counts_two_matrices():
    ungated = minimal(moe={"activation": "relu2"}, dense_layers=1)
    assert from_table(ModelConfig, ungated, where="t").routed_parameters == 1 * 4 * 2 * 8 * 16


def test_demo_equals_its_checkpoint():
    folder = resources.files("ep_moe") / "demo"
    published = json.loads((folder / "config.json").read_text())
    config = load_model_config("demo")
    assert published["hidden_act"] == "silu"
    assert (published["decoder_sparse_step"], published["mlp_only_layers"]) == (1, [])  # no dense layers
    assert (
        config.family,
        config.num_layers,
        config.dense_layers,
        config.moe.hidden_size,
        config.moe.intermediate_size,
        config.moe.num_experts,
        config.moe.top_k,
        config.moe.routing.renormalize,
    ) == (
        published["model_type"],
        published["num_hidden_layers"],
        0,
        published["hidden_size"],
        published["moe_intermediate_size"],
        published["num_local_experts"],
        published["num_experts_per_tok"],
        published["norm_topk_prob"],
    )
    sizes = []
    with resources.as_file(folder) as path:
        for file in path.glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                keys = [key for key in tensors.keys() if ".experts." in key]  # noqa: SIM118
                sizes += [tensors.get_slice(key).get_shape() for key in keys]
    assert sum(rows * columns for rows, columns in sizes) == config.routed_parameters


# --- loading --------------------------------------------------------------------------------------------------


def test_a_path_is_read_like_a_name(tmp_path):
    bundled = resources.files("ep_moe") / "configs" / "deepseek-v3.toml"
    path = tmp_path / "mine.toml"
    path.write_bytes(bundled.read_bytes())
    assert load_model_config(path) == load_model_config(str(path)) == load_model_config("deepseek-v3")


def test_left_out_keys_take_their_defaults():
    table = minimal()
    del table["moe"]["routing"]
    config = from_table(ModelConfig, table, where="t")
    assert config.moe == moe(num_experts=4)
    assert config.moe.routing == RoutingConfig(method=RoutingMethod.SOFTMAX_TOPK)


def test_a_whole_number_serves_as_float():
    factor = from_table(ModelConfig, minimal(routing={"scaling_factor": 3}), where="t").moe.routing.scaling_factor
    assert type(factor) is float
    assert factor == 3.0


def test_an_optional_integer_and_an_enum():
    table = {"dp": 2, "ep": 2, "tokens": "sharded"}
    assert from_table(ParallelConfig, table, where="t") == ParallelConfig(dp=2, ep=2, tokens=Tokens.SHARDED)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=names("'mixtral-8x22b'", "mixtral-8x7b", "demo", ".toml")):
        load_model_config("mixtral-8x22b")


def test_missing_file(tmp_path):
    path = tmp_path / "absent.toml"
    with pytest.raises(ConfigError, match=names(str(path), "does not exist")):
        load_model_config(path)


def test_invalid_toml_names_the_file_and_the_line(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text('name = "x"\nfamily = \n')
    with pytest.raises(ConfigError, match=names(str(path), "not valid TOML", "line 2")):
        load_model_config(path)


def test_an_error_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "typo.toml"
    path.write_text('name = "x"\nfamily = "mixtral"\nnum_layer = 3\n')
    with pytest.raises(ConfigError, match=names(str(path), "'num_layer'", "did you mean 'num_layers'")):
        load_model_config(path)


# --- tables ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "named"),
    [
        (minimal(moe={"num_expert": 4}), ("'num_expert'", "MoEConfig", "did you mean 'num_experts'")),
        (minimal(routing={"renormalise": True}), ("'renormalise'", "did you mean 'renormalize'")),
        (minimal(zzz=1), ("'zzz'", "ModelConfig", "known keys are name, family, num_layers")),
        (minimal(num_layers="two"), ("ModelConfig.num_layers must be of type int, got 'two'",)),
        (minimal(num_layers=2.0), ("ModelConfig.num_layers must be of type int, got 2.0",)),
        (minimal(num_layers=True), ("ModelConfig.num_layers must be of type int, got True",)),
        (minimal(name=7), ("ModelConfig.name must be of type str, got 7",)),
        (minimal(moe={"expert_bias": 1}), ("MoEConfig.expert_bias must be of type bool, got 1",)),
        (minimal(routing={"scaling_factor": "2.5"}), ("RoutingConfig.scaling_factor", "type float, got '2.5'")),
        (minimal(moe={"routing": "softmax_topk"}), ("MoEConfig.routing", "type RoutingConfig, got 'softmax_topk'")),
        (minimal(moe={"activation": "silu"}), ("MoEConfig.activation", "swiglu, geglu, swiglu_clamped", "'silu'")),
        (minimal(routing={"method": "top_k"}), ("RoutingConfig.method", "softmax_topk, topk_softmax", "'top_k'")),
        (minimal(routing={"method": ["topk_softmax"]}), ("RoutingConfig.method", "got ['topk_softmax']")),
        (minimal(moe={"top_k": 999}), ("ModelConfig.moe: MoEConfig.top_k must not exceed num_experts",)),
        (minimal(num_layers=0), ("ModelConfig.num_layers must be an integer of at least 1, got 0",)),
        ({"family": "mixtral"}, ("ModelConfig needs name, num_layers, moe",)),
        (
            {"name": "x", "family": "mixtral", "num_layers": 1, "moe": {"top_k": 2}},
            ("MoEConfig needs hidden_size, intermediate_size, num_experts",),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_wrong_table_is_refused_by_place(table, named):
    with pytest.raises(ConfigError, match=names("some.toml", *named)):
        from_table(ModelConfig, table, where="some.toml")


def test_optional_integer_of_the_wrong_type():
    with pytest.raises(ConfigError, match=names("ParallelConfig.ep must be of type int", "'all'")):
        from_table(ParallelConfig, {"ep": "all"}, where="t")


# --- values ---------------------------------------------------------------------------------------------------

GROUPED = {"method": RoutingMethod.SIGMOID_TOPK}


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_experts", "top_k"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_at_least_one(name, value):
    with pytest.raises(ConfigError, match=names(f"MoEConfig.{name}", "at least 1", f"got {value}")):
        moe(**{name: value})


def test_top_k_above_num_experts():
    with pytest.raises(ConfigError, match=names("MoEConfig.top_k", "top_k=17", "num_experts=16")):
        moe(top_k=17)
    assert moe(top_k=16).top_k == 16


def test_shared_gate_without_a_shared_expert():
    with pytest.raises(ConfigError, match=names("MoEConfig.shared_gate", "shared_intermediate_size > 0", "got 0")):
        moe(shared_gate=True)


def test_weight_on_input_needs_one_expert_a_token():
    routing = RoutingConfig(method=RoutingMethod.TOPK_SIGMOID, weight_on_input=True)
    with pytest.raises(ConfigError, match=names("RoutingConfig.weight_on_input", "top_k = 1", "top_k=2")):
        moe(top_k=2, routing=routing)
    assert moe(top_k=1, routing=routing).routing.weight_on_input


@pytest.mark.parametrize(("groups", "best"), [(4, 5), (2, 3)])
def test_top_groups_out_of_range(groups, best):
    with pytest.raises(ConfigError, match=names("top_groups", f"top_groups={best}", f"num_groups={groups}")):
        RoutingConfig(**GROUPED, num_groups=groups, top_groups=best)


@pytest.mark.parametrize("field", ["num_groups", "top_groups"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2"])
def test_groups_are_counted(field, value):
    with pytest.raises(ConfigError, match=names(f"RoutingConfig.{field}", "an integer of at least 1", repr(value))):
        RoutingConfig(**GROUPED, **{"num_groups": 4, "top_groups": 2, field: value})


@pytest.mark.parametrize("method", [m for m in RoutingMethod if m is not RoutingMethod.SIGMOID_TOPK])
@pytest.mark.parametrize("changes", [{"num_groups": 4}, {"correction_bias": True}], ids=str)
def test_groups_and_correction_bias_belong_to_one_method(method, changes):
    name, value = next(iter(changes.items()))
    with pytest.raises(ConfigError, match=names("sigmoid_topk", f"method={method.value}", f"{name}={value}")):
        RoutingConfig(method=method, **changes)


def test_groups_that_do_not_divide_the_experts():
    with pytest.raises(ConfigError, match=names("RoutingConfig.num_groups", "num_groups=3", "num_experts=16")):
        moe(routing=RoutingConfig(**GROUPED, num_groups=3, top_groups=2))


def test_groups_of_one_expert():
    with pytest.raises(ConfigError, match=names("RoutingConfig.num_groups=16", "1 expert a group", "2 needed")):
        moe(routing=RoutingConfig(**GROUPED, num_groups=16, top_groups=4))
    with pytest.raises(ConfigError, match=names("RoutingConfig.num_groups=2", "1 expert a group", "2 needed")):
        moe(num_experts=2, top_k=1, routing=RoutingConfig(**GROUPED, num_groups=2, top_groups=1))


def test_top_k_above_the_experts_of_the_best_groups():
    routing = RoutingConfig(**GROUPED, num_groups=8, top_groups=2)
    with pytest.raises(ConfigError, match=names("MoEConfig.top_k=5", "2 x 2", "RoutingConfig.top_groups")):
        moe(top_k=5, routing=routing)
    assert moe(top_k=4, routing=routing).top_k == 4


def test_values_are_checked_where_a_table_is_read():
    with pytest.raises(ConfigError, match=names("top_k=5", "num_experts=4")):
        from_table(ModelConfig, minimal(moe={"top_k": 5}), where="t")


def test_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        moe().top_k = 3


@pytest.mark.parametrize(("activation", "rows"), [(Activation.SWIGLU, 32), (Activation.RELU2, 16)])
def test_rows_of_w13(activation, rows):
    assert moe(activation=activation).w13_rows == rows


@pytest.mark.parametrize(
    ("made", "sizes"),
    [
        (ParallelConfig.expert_parallel(dp=4, tp=2), (4, 2, 8, 1)),
        (ParallelConfig.expert_tensor_parallel(dp=4, tp=2), (4, 2, 4, 2)),
        (ParallelConfig.tensor_parallel(dp=4, tp=2), (4, 2, 1, 8)),
    ],
    ids=["expert_parallel", "expert_tensor_parallel", "tensor_parallel"],
)
def test_named_layouts(made, sizes):
    assert (made.dp, made.tp, made.ep, made.etp) == sizes


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"shared_intermediate_size": -1}, "shared_intermediate_size"),
        ({"activation_limit": -7.0}, "activation_limit"),
        ({"activation_alpha": float("nan")}, "activation_alpha"),
        ({"top_k": "a"}, "top_k"),
        ({"hidden_size": 64.0}, "hidden_size"),
    ],
)
def test_moe_config_values_out_of_range(change, field):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_experts": 8, "top_k": 2}
    with pytest.raises(ConfigError, match=field):
        MoEConfig(**(sizes | change))


@pytest.mark.parametrize("method", [RoutingMethod.TOPK_SOFTMAX, RoutingMethod.TOPK_SIGMOID])
def test_renormalize_is_refused_where_it_means_nothing(method):
    with pytest.raises(ConfigError, match=rf"renormalize.*{method.value}"):
        RoutingConfig(method=method, renormalize=True)


@pytest.mark.parametrize("dense", [2, 5])
def test_as_many_dense_layers_as_layers_or_more(dense):
    moe = MoEConfig(hidden_size=64, intermediate_size=64, num_experts=8, top_k=2)
    with pytest.raises(ConfigError, match=rf"dense_layers={dense}, num_layers=2"):
        ModelConfig(name="x", family="mixtral", num_layers=2, dense_layers=dense, moe=moe)


def test_a_file_of_other_bytes_is_no_configuration(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b"name = \xff")
    with pytest.raises(ConfigError, match=r"mine\.toml is not valid TOML"):
        load_model_config(tmp_path / "mine.toml")


def test_formats_that_do_not_exist():
    with pytest.raises(
        ConfigError, match=r"dispatch must be one of plain, fp8_block, fp8_row, fp8_tensor, mxfp8, nvfp4, got 'fp4'"
    ):
        Wire(dispatch="fp4")
    with pytest.raises(ConfigError, match=r"Wire\.combine must be one of plain, fp8, got 'fp8_block'"):
        Wire(combine="fp8_block")
    for name, largest in (("fp8_tensor", 448), ("nvfp4", 2688)):
        needs = rf"Wire\(dispatch='{name}'\) needs input_scale, a positive number \(largest magnitude / {largest}, as"
        for scale in (None, 0.0, -1.0, float("inf"), float("nan"), "1"):
            with pytest.raises(ConfigError, match=rf"{needs} .*, got {scale!r}"):
                Wire(dispatch=name, input_scale=scale)
    for name in ("plain", "fp8_block", "fp8_row", "mxfp8"):
        with pytest.raises(ConfigError, match=rf"for fp8_tensor and nvfp4 rows only, got 1\.0 with {name}"):
            Wire(dispatch=name, input_scale=1.0)
