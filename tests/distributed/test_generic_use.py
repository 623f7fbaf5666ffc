"""Models with their own router in use: `generate` in all its ways, and `torch.compile`, as transformers alone."""

import copy

import pytest
import torch

from ep_moe import EPContext, ParallelConfig
from ep_moe.integrations.transformers import expert_parallel
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import quiet
from tests.fixtures.interface_models import interface_model
from tests.fixtures.transformers_models import tiny_transformers_model

WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 2},
    "a static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
}


def batch(rank):
    """Prompts of two lengths, padded on the left."""
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(rank)).to(rank_device())
    mask = torch.ones_like(ids)
    mask[0, :3] = ids[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


@distributed(2)
@pytest.mark.parametrize("kind", ["olmoe", "jamba", "qwen3_next"])  # attention; Mamba and linear attention beside it
def test_generate_equals_transformers(kind, world_size):
    """Ranks have prompts of their own, and end at different steps."""
    quiet()
    plain = interface_model(kind) if kind == "olmoe" else tiny_transformers_model(kind)
    plain = plain.to(rank_device()).eval()
    rank = torch.distributed.get_rank()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
        model = expert_parallel(copy.deepcopy(plain), context)
        for way, options in WAYS.items():
            found = []
            for one in (plain, model):
                torch.manual_seed(rank)
                given = {"max_new_tokens": 4 + 2 * rank, "pad_token_id": 0, "eos_token_id": None}
                found.append(one.generate(**batch(rank), **given, **options).tolist())
            assert found[0] == found[1], way


@distributed(1, 2, deadline_s=120)
def test_a_compiled_model_gives_the_same_logits(world_size):
    """On one rank the layer is within the graph, and its operations are traced; on more it runs between graphs."""
    quiet()
    plain = interface_model("olmoe", num_hidden_layers=1).to(rank_device())
    backend = "aot_eager" if world_size == 1 else "eager"
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device()) as context, torch.no_grad():
        model = torch.compile(expert_parallel(copy.deepcopy(plain), context), backend=backend)
        given = batch(context.layout.dp_rank)
        # the second one is of another shape; a layer between graphs has that in test_compile
        for length in (7, 5) if world_size == 1 else (7,):
            cut = {name: tensor[:, :length] for name, tensor in given.items()}
            expected = plain(**cut, use_cache=False).logits
            apart = (model(**cut, use_cache=False).logits - expected).abs().max() / expected.abs().max()
            assert apart < 1e-5, length
