"""`generate` in all its modes and `torch.compile` of models that keep their own router equal transformers."""

import copy

import pytest
import torch

from ep_moe import EPContext, ExpertsOptions, ParallelConfig
from ep_moe.integrations.transformers import expert_parallel
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import FAMILIES, quiet, tiny_model
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
    """Return prompts of two lengths, padded on the left."""
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(rank)).to(rank_device())
    mask = torch.ones_like(ids)
    mask[0, :3] = ids[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


@distributed(2)
@pytest.mark.parametrize("kind", ["olmoe", "jamba", "qwen3_next"])  # attention; Mamba and linear attention beside it
def test_generate_equals_transformers(kind, world_size):
    """`generate` equals transformers if ranks have different prompts and end at different steps."""
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


WIDE = {"hidden_size": 128, "head_dim": 32}  # sizes that GPU kernels accept
BFLOAT16 = {
    "olmoe": WIDE | {"intermediate_size": 128},
    "qwen3_moe": WIDE | {"moe_intermediate_size": 128},  # a family whose router ep_moe replaces too
    "granitemoe": WIDE | {"intermediate_size": 128, "attention_multiplier": 0.125},
}


@distributed(2, deadline_s=120)
@pytest.mark.parametrize("kind", BFLOAT16)
def test_generate_in_bfloat16_equals_one_process(kind, world_size):
    """Exact layers generate one process's tokens in bfloat16.

    Other layers generate those of transformers, except where a difference within rounding decides.
    """
    quiet()
    made = tiny_model if kind in FAMILIES else interface_model
    plain = made(kind, **BFLOAT16[kind]).to(rank_device()).eval()
    for parameter in plain.parameters():
        if parameter.dim() > 1:  # so that rounding decides few tokens of attention and routers
            parameter.data.mul_(0.4)
    plain = plain.to(torch.bfloat16)
    single = copy.deepcopy(plain).float()
    rank = torch.distributed.get_rank()
    given = batch(rank) | {"max_new_tokens": 8 + 2 * rank, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context, torch.no_grad():
        if kind in FAMILIES:  # `exact` covers the router too
            options = ExpertsOptions(exact=True)
            with EPContext.local(device=rank_device()) as alone:
                expected = expert_parallel(copy.deepcopy(plain), alone, options=options).generate(**given)
            found = expert_parallel(copy.deepcopy(plain), context, options=options).generate(**given)
            assert torch.equal(found, expected), "exact layers"
        model = expert_parallel(copy.deepcopy(plain), context)
        with_logits = {"output_logits": True, "return_dict_in_generate": True}
        theirs, ours = plain.generate(**given, **with_logits), model.generate(**given, **with_logits)
        start = given["input_ids"].shape[1]
        mask = torch.cat([given["attention_mask"], torch.ones_like(theirs.sequences[:, start:])], 1)
        in_float32 = single(input_ids=theirs.sequences, attention_mask=mask).logits[:, start - 1 : -1]
        their_logits, our_logits = (torch.stack(one.logits, 1).float() for one in (theirs, ours))
        error, apart = ((their_logits - one).abs().amax(-1) for one in (in_float32, our_logits))
        differs = (theirs.sequences != ours.sequences)[:, start:]
        followed = differs.cumsum(1) - differs.int() == 0  # steps up to the first that differs
        first, second = their_logits.topk(2).values.unbind(-1)
        assert (first - second)[differs & followed].le(4 * error.max()).all(), "no rounding is so large"
        # a router at a tie may choose another expert, so compare the median error
        assert apart[followed].median() <= 2 * error.median(), f"{apart}, transformers' rounding {error}"
        assert followed.float().mean() > 0.25, f"few steps followed equal tokens: {followed}"


@distributed(1, 2, deadline_s=120)
def test_a_compiled_model_gives_the_same_logits(world_size):
    """A compiled model gives the same logits.

    On one rank the layer is traced into the graph; on more ranks it runs between graphs.
    """
    quiet()
    plain = interface_model("olmoe", num_hidden_layers=1).to(rank_device())
    backend = "aot_eager" if world_size == 1 else "eager"
    with EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device()) as context, torch.no_grad():
        model = torch.compile(expert_parallel(copy.deepcopy(plain), context), backend=backend)
        given = batch(context.layout.dp_rank)
        # the second length has another shape; test_compile covers this for layers between graphs
        for length in (7, 5) if world_size == 1 else (7,):
            cut = {name: tensor[:, :length] for name, tensor in given.items()}
            expected = plain(**cut, use_cache=False).logits
            apart = (model(**cut, use_cache=False).logits - expected).abs().max() / expected.abs().max()
            assert apart < 1e-5, length
