"""Test models around a text model with experts: loaded and saved whole, or a warning names what is left out."""

import contextlib
import json

import pytest
import torch
import transformers

from ep_moe import EPContext, RankLayout
from ep_moe.errors import ConfigError
from ep_moe.integrations import load
from ep_moe.integrations.transformers import load_pretrained, save_pretrained
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.groups import RankGroups
from tests.fixtures.checkpoint_files import save, tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a tiny Qwen3-VL-MoE, whose published files hold the matrices of all experts transposed."""
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 48, "head_dim": 8,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32, "patch_size": 4,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config).float().eval()
    for tensor in model.state_dict().values():
        tensor.add_(torch.randn(tensor.shape) / 5)
    root = tmp_path_factory.mktemp("wrapped")
    save(model, root)
    return root


def local():
    return EPContext.local(torch.device("cpu"))


def test_all_of_the_model_is_loaded_and_saved(folder, tmp_path):
    plain = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(folder)
    model = load_pretrained(folder, local(), progress=False)
    assert type(model) is type(plain)
    ours = model.state_dict()
    for name, tensor in plain.state_dict().items():
        if ".experts." not in name:
            assert torch.equal(ours[name], tensor), name
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        expected, found = (one(input_ids=ids, use_cache=False).logits for one in (plain, model))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for part in (model.config, model.config.text_config):
        part.quantization_config = {"quant_method": "fp8"}  # describes the files that were read
    save_pretrained(model, tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text(), "these have numbers"
    again = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(again[name], tensor), name


def test_a_bar_of_the_contexts_first_rank_counts_each_expert(folder, monkeypatch):
    """The first rank of the context shows the bar, whatever its rank in the job."""
    bars = []

    class Bar(contextlib.nullcontext):
        def __init__(self, total, *_, shown):
            super().__init__(self)
            self.left = total
            bars.append((self, shown))

        def update(self, count):
            self.left -= count

    monkeypatch.setattr(load, "Progress", Bar)
    layout, recorder, cpu = RankLayout(world=1, rank=3, ranks=(3,)), FlightRecorder(), torch.device("cpu")
    with EPContext(layout, cpu, None, RankGroups(layout, recorder, cpu), recorder) as context:
        for options in ({}, {"progress": False}):
            load_pretrained(folder, context, **options)
    assert [shown for _, shown in bars] == [True, False]
    assert [bar.left for bar, _ in bars] == [0, 0]


def test_a_class_that_is_not_named_is_refused(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3VLMoeTextModel"]}))
    with pytest.raises(
        ConfigError, match=r"architectures must name .* one of Qwen3VLMoeForConditionalGeneration.*, got"
    ):
        load_pretrained(tmp_path, local())


def test_a_text_model_that_is_loaded_alone_is_named(tmp_path):
    """A warning says that only the text model is loaded, in a known family whose blocks are replaced."""
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("llama4_text"), dtype=torch.float32)
    save(model, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": text}))
    with pytest.warns(UserWarning, match="of the model 'llama4' its text model 'llama4_text' alone is loaded"):
        load_pretrained(tmp_path, local(), progress=False)
