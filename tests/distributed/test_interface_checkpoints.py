"""Checkpoints of models of which only the experts are replaced: logits equal from_pretrained, each rank reads its
share."""

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ep_moe import EPContext, ExpertMap, ParallelConfig
from ep_moe.checkpoint.source import SINGLE, CheckpointSource
from ep_moe.errors import CheckpointError
from ep_moe.integrations import load
from ep_moe.integrations import transformers as integration
from ep_moe.integrations.transformers import load_pretrained, moe_layers
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import quiet
from tests.fixtures.distributed_cases import gather_from_all_ranks
from tests.fixtures.interface_models import FORMATS, MODELS, interface_checkpoints

KINDS = [kind for kind in MODELS if kind != "gpt_oss"]  # gpt_oss is a known family, covered by test_transformers
EXPERTS = 8
# sizes, map (None: linear)
LAYOUTS = {
    1: [({}, None)],
    2: [({"dp": 2}, None), ({"tp": 2, "ep": 1, "etp": 2}, None), ({"dp": 2}, ExpertMap.redundant(8, 2, 5))],
    4: [({"dp": 4}, None), ({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, None)],
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    quiet()
    return interface_checkpoints(tmp_path_factory.mktemp("interface_ranks"), KINDS)


@pytest.fixture(scope="session")
def missing(checkpoints, tmp_path_factory):
    """Write OLMoE without one matrix of expert 6."""
    folder, good = tmp_path_factory.mktemp("missing_expert"), checkpoints / "olmoe" / "per_expert"
    tensors = load_file(good / SINGLE)
    del tensors["model.layers.0.mlp.experts.6.up_proj.weight"]
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    shutil.copy(good / "config.json", folder)
    return folder


@torch.no_grad()
def logits(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def batch(layout):
    generator = torch.Generator().manual_seed(layout.dp_rank)
    return torch.randint(0, 64, (1 + layout.dp_rank % 2, 12 - layout.dp_rank), generator=generator).to(rank_device())


class Counting(CheckpointSource):
    """Count the bytes read of each tensor."""

    def raw(self, name, *index):
        before = self.bytes_read
        part = super().raw(name, *index)
        self.read_of = getattr(self, "read_of", {})
        self.read_of[name] = self.read_of.get(name, 0) + self.bytes_read - before
        return part


@distributed(1, 2, 4)
def test_logits_equal_from_pretrained(checkpoints, world_size, monkeypatch):
    quiet()
    files = []
    monkeypatch.setattr(load, "CheckpointSource", Counting)
    found = integration.model_files
    monkeypatch.setattr(integration, "model_files", lambda *given: files.append(found(*given)) or files[-1])
    for number, kind in enumerate(KINDS):
        plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoints / kind / "fused").to(rank_device()).eval()
        for at, (sizes, expert_map) in enumerate(LAYOUTS[world_size]):
            if sizes.get("dp") == world_size and (number + at) % 2:
                continue  # only sharding within experts depends on the kind, so check whole experts for every other one
            with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context:
                ids = batch(context.layout)
                expected = logits(plain, ids)
                assert expected.std() > 0.1  # large enough that a wrong expert shows
                for form in FORMATS:
                    files.clear()
                    model = load_pretrained(checkpoints / kind / form, context, expert_map=expert_map, progress=False)
                    where = f"{kind} {form} {sizes} {expert_map}"
                    error = (logits(model, ids) - expected).abs().max() / expected.abs().max()
                    assert error < 1e-5, f"{where}: {error}"
                    assert of_experts(files[0]) == share_of(model, files[0], plain, context.layout.etp), where


def share_of(model, files, plain, etp):
    """Return the bytes of this rank's expert matrices, divided by etp if the reader knows their format."""
    held = sum(len(layer.expert_weights.slots_of_expert) for layer in moe_layers(model))
    name, layout = next(iter(files.modules.items()))
    first = {one.name: plain.get_parameter(f"{name}.{one.name}") for one in layout.tensors if "bias" not in one.part}
    per_expert = sum(
        one.expert_slice(first[one.name], 0, EXPERTS).nbytes for one in layout.tensors if one.name in first
    )
    return held * per_expert // (1 if None in files.formats.values() else etp)


def of_experts(files):
    """Return the bytes read of expert matrices."""
    rest = {name for recipe in files.rest.values() for name in recipe.names()}
    return sum(n for name, n in files.source.read_of.items() if name not in rest and not name.endswith("_bias"))


@distributed(2)
def test_a_missing_expert_is_one_error_on_all_ranks(missing):
    """A missing expert raises on all ranks, also on the one that does not read it."""
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
        with pytest.raises(CheckpointError, match=r"layers.0.mlp.experts.6.up_proj.weight is missing") as caught:
            load_pretrained(missing, context, progress=False)
        assert len(set(gather_from_all_ranks(str(caught.value)))) == 1
