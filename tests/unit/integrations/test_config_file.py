"""Test that invalid fields of config.json other than sizes are refused by name."""

import json

import pytest

from ep_moe import CheckpointError
from ep_moe.integrations.config_file import read_config, read_generation_config
from tests.fixtures.checkpoint_files import quiet, tiny_config
from tests.fixtures.transformers_models import tiny_transformers_model

pytest.importorskip("transformers")
SIZES = [
    "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size",
    "intermediate_size_mlp", "moe_intermediate_size", "num_key_value_heads", "num_local_experts", "n_routed_experts",
    "num_experts_per_tok", "max_position_embeddings",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "size"), [(name, -1) for name in SIZES] + [("vocab_size", 0), ("moe_intermediate_size", 0)]
)
def test_a_size_is_a_positive_integer(name, size, tmp_path):
    quiet()
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    assert read_config(tmp_path).model_type == "qwen3_moe"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: size}))
    with pytest.raises(CheckpointError, match=rf"config\.json: {name} must be a positive integer, got {size}"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("kind", "size", "allowed"),
    [
        ("ernie4_5_vl_moe", [48, 32], True),
        ("ernie4_5_vl_moe", [48, 0], False),
        ("ernie4_5_vl_moe", [], False),
        ("qwen3_moe", [48, 32], False),
    ],
)
def test_several_sizes_are_those_of_a_family_that_has_them(kind, size, allowed, tmp_path):
    quiet()
    tiny_transformers_model(kind).config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw.get("text_config", raw)["moe_intermediate_size"] = size
    file.write_text(json.dumps(raw))
    if allowed:
        assert read_config(tmp_path).moe_intermediate_size == size
        return
    with pytest.raises(CheckpointError, match=r"config\.json.*moe_intermediate_size"):
        read_config(tmp_path)


@pytest.mark.parametrize("where", ["rope_theta", "rope_parameters", "list"])
def test_a_number_is_finite_wherever_it_stands(where, tmp_path):
    """Every number must be finite, at any depth. Python's json accepts NaN, which JSON does not have."""
    quiet()
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    file, nan = tmp_path / "config.json", float("nan")
    wrong = {"rope_theta": nan, "rope_parameters": {"factor": nan}, "list": [1.0, [2.0, nan]]}[where]
    file.write_text(json.dumps(json.loads(file.read_text()) | {where: wrong}))
    with pytest.raises(CheckpointError, match=rf"config\.json: {where}[.a-z0-9]* must be a finite number, got nan"):
        read_config(tmp_path)


def test_a_generation_config_that_transformers_refuses_is_named(tmp_path):
    file = tmp_path / "generation_config.json"
    assert read_generation_config(tmp_path) is None
    file.write_text(json.dumps({"max_new_tokens": 3}))
    assert read_generation_config(tmp_path).max_new_tokens == 3
    file.write_text(json.dumps({"max_new_tokens": -1}))
    words = (
        r"generation_config\.json is nothing that transformers can read: ValueError: .*max_new_tokens.*; mend or remove"
    )
    with pytest.raises(CheckpointError, match=words):
        read_generation_config(tmp_path)
