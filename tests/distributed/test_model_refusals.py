"""Refusals of models with expert-parallel blocks, and what stays usable."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext
from ep_moe.checkpoint.source import CheckpointSource
from ep_moe.errors import CheckpointError, ConfigError, InputError
from ep_moe.integrations.transformers import expert_parallel, load_pretrained, moe_layers
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import tiny_model, written
from tests.fixtures.distributed_cases import same_error


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return written(tmp_path_factory.getbasetemp())


@distributed(2)
def test_a_rank_that_cannot_read_on_stops_all(checkpoints, world_size):
    """A read error on one rank stops all ranks, after all headers were read."""
    raw = CheckpointSource.raw

    def cut_short(self, name, *index):
        if dist.get_rank() == 1 and "experts" in name and self.bytes_read > 1000:
            raise OSError("the file ends early")
        return raw(self, name, *index)

    with (
        EPContext.from_groups(device=rank_device(), deadline_s=20.0) as context,
        mock.patch.object(CheckpointSource, "raw", cut_short),
        pytest.raises(CheckpointError, match="ends early"),
    ):
        load_pretrained(checkpoints["mixtral shards"].folder, context)


@distributed(2)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_an_id_outside_the_vocabulary_is_one_sentence(family, world_size):
    """A token id outside the vocabulary on one rank raises on all ranks.

    The embedding's own error would be raised on one rank while the others wait in their first layer.
    """
    if rank_device().type == "cuda":
        pytest.skip("ids are not waited for there")
    with EPContext.from_groups(device=rank_device(), deadline_s=20.0) as context, torch.no_grad():
        model = expert_parallel(tiny_model(family), context)
        ids = torch.arange(6).view(2, 3)
        rows, wanted = model.get_input_embeddings().num_embeddings, model(ids).logits
        for bad in (-1, rows):
            wrong = ids.clone()
            wrong[1, 0] = bad if dist.get_rank() == 1 else 0
            for call in (model, partial(model.generate, max_new_tokens=2 + dist.get_rank(), do_sample=False)):
                text = same_error(InputError, partial(call, wrong))
                assert f"rank 1: input_ids must be in [0, {rows}), the rows of the embedding, got {bad}" in text
        assert torch.equal(model(ids).logits, wanted)


@distributed(2)
def test_a_model_is_not_saved_in_part(world_size):
    with EPContext.from_groups(device=rank_device()) as context:
        model = expert_parallel(tiny_model("mixtral").to(rank_device()), context)
        with pytest.raises(ConfigError, match="this rank's experts alone"):
            model.save_pretrained("nowhere")
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_state_dict(saved)  # the remedy that the error names
        assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


@distributed(1)
def test_what_is_frozen_stays_so(world_size):
    with EPContext.from_groups(device=rank_device()) as context:
        frozen = expert_parallel(tiny_model("mixtral").requires_grad_(False).to(rank_device()), context)
        assert not any(parameter.requires_grad for parameter in frozen.parameters())
        model = expert_parallel(tiny_model("mixtral").to(rank_device()), context)
        assert all(parameter.requires_grad for parameter in moe_layers(model)[0].parameters())


@distributed(1)
def test_codes_in_memory_are_refused(world_size):
    with EPContext.from_groups(device=rank_device()) as context:
        model = tiny_model("mixtral").to(rank_device())
        experts = next(module for name, module in model.named_modules() if name.endswith("experts"))
        codes = experts.gate_up_proj.detach().to(torch.float8_e4m3fn)
        experts.gate_up_proj = torch.nn.Parameter(codes, requires_grad=False)
        with pytest.raises(ConfigError, match=r"gate_up_proj must be .*, got float8_e4m3fn; a model that is quantized"):
            expert_parallel(model, context)


@distributed(1)
def test_a_checkpoint_outside_the_experts_and_beside_the_weights(checkpoints, world_size):
    """The generation config is loaded, and integer codes where numbers belong raise."""
    with tempfile.TemporaryDirectory() as place, EPContext.from_groups(device=rank_device()) as context:
        folder = shutil.copytree(checkpoints["mixtral shards"].folder, Path(place) / "copy")
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
        assert load_pretrained(folder, context).generation_config.eos_token_id == [3, 5]
        dtype, codes = CheckpointSource.dtype, "model.layers.0.self_attn.q_proj.weight"
        wrong = lambda self, name: torch.int8 if name == codes else dtype(self, name)  # noqa: E731
        patched = mock.patch.object(CheckpointSource, "dtype", wrong)
        with patched, pytest.raises(CheckpointError, match=r"q_proj\.weight is torch\.int8"):
            load_pretrained(folder, context)
