"""`output_router_logits=True` with expert-parallel blocks equals the original models, in train mode."""

from __future__ import annotations

import contextlib
import tempfile
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers

from ep_moe import EPContext, ParallelConfig
from ep_moe.integrations.transformers import expert_parallel, load_pretrained, moe_layers
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import FAMILIES, LAYERS, quiet, save, tiny_model
from tests.fixtures.distributed_cases import batch_of

WITH_LOSS = ("mixtral", "qwen3_moe", "gpt_oss")  # the others return logits only, and the user computes the loss
# transformers before 5.24 returns no router logits for two of them
RETURNED = [f for f in FAMILIES if transformers.__version__ >= "5.24" or f not in ("deepseek_v3", "llama4_text")]
HOWS = ("argument", "config", "checkpoints")
BOUND = 1e-5  # as in test_transformers
LAYOUTS = {1: [{}], 2: [{"dp": 2}, {"tp": 2}, {"tp": 2, "ep": 1, "etp": 2}], 4: [{"dp": 2, "tp": 2}]}


def inputs(batch):
    """Return the batch of a dp rank: padded on the left, with labels where there is no padding."""
    shape, device = (2 + batch, 14 - 3 * batch), rank_device()
    ids = torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(batch)).to(device)
    mask = torch.ones_like(ids)
    mask[1:, : 3 + batch] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "use_cache": False}


def router_weights(model, family):
    """Return the router weights of an original model, by layer."""
    blocks = [model.model.layers[n] for n in LAYERS[family]]
    blocks = [layer.feed_forward if family == "llama4_text" else layer.mlp for layer in blocks]
    return [(block.router if hasattr(block, "router") else block.gate).weight for block in blocks]


def whole_loss(out):
    """Return the loss with the auxiliary loss, or with a loss on the router logits if there is none."""
    if getattr(out, "aux_loss", None) is not None:
        return out.loss
    return out.loss + sum(logits.float().logsumexp(-1).square().mean() for logits in out.router_logits)


@distributed(1, 2, 4)
@pytest.mark.parametrize("family", RETURNED)
def test_logits_losses_and_gradients_equal_the_untouched_model(family, world_size):
    quiet()
    for at, sizes in enumerate(LAYOUTS[world_size]):
        with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context:
            given = inputs(batch_of(context.layout, dist.get_rank()))
            # How router logits are asked for, and recomputation, concern only the model. On two ranks each way runs
            # once, each under another layout.
            for how in HOWS[at::3] if world_size == 2 else HOWS:
                changes = {"output_router_logits": True} if how == "config" else {}
                call = given if how == "config" else given | {"output_router_logits": True}
                where = f"{family} {sizes} by {how}"
                plain = tiny_model(family, **changes).to(rank_device()).train()
                model = expert_parallel(tiny_model(family, **changes).to(rank_device()), context).train()
                if how == "checkpoints":
                    model.gradient_checkpointing_enable()
                expected, found = plain(**call), model(**call)
                close = {"rtol": BOUND, "atol": BOUND, "msg": lambda m, where=where: f"{where}: {m}"}
                assert found.keys() == expected.keys(), where
                assert len(found.router_logits) == len(LAYERS[family]), where
                torch.testing.assert_close(found.router_logits, expected.router_logits, **close)
                torch.testing.assert_close(found.loss, expected.loss, **close)
                assert (getattr(found, "aux_loss", None) is not None) == (family in WITH_LOSS), where
                if family in WITH_LOSS:
                    torch.testing.assert_close(found.aux_loss, expected.aux_loss, **close)
                for out in (expected, found):
                    whole_loss(out).backward()
                routers = [layer.router.weight for layer in moe_layers(model)]
                pairs = [*zip(routers, router_weights(plain, family), strict=True)]
                pairs.append((model.model.embed_tokens.weight, plain.model.embed_tokens.weight))
                for ours, theirs in pairs:
                    largest = float(theirs.grad.abs().max())
                    assert largest > 0
                    torch.testing.assert_close(ours.grad, theirs.grad, **close | {"rtol": 0, "atol": BOUND * largest})


@distributed(1)
def test_only_what_wants_logits_records_them(world_size):
    quiet()
    model = expert_parallel(tiny_model("mixtral").to(rank_device()), EPContext.local(rank_device()))
    ids = torch.arange(12, device=rank_device()).view(2, 6)
    layers = moe_layers(model)

    def taps():
        return [len(layer._logit_taps) for layer in layers]

    seen = []
    layers[0].register_forward_hook(lambda *_: seen.append(taps()))
    without = model(input_ids=ids)
    assert without.router_logits is None
    assert without.aux_loss is None
    model(input_ids=ids, output_router_logits=False)
    with_logits = model(input_ids=ids, output_router_logits=True)
    model(input_ids=ids)
    assert torch.equal(with_logits.logits, without.logits)
    with (
        mock.patch.object(type(layers[1].router), "logits", side_effect=ValueError("planted")),
        pytest.raises(ValueError, match="planted"),
    ):
        model(input_ids=ids, output_router_logits=True)
    model(input_ids=ids)
    assert seen == [[0, 0], [0, 0], [1, 1], [0, 0], [0, 0]]
    model.config.output_router_logits = True
    assert len(model(input_ids=ids).router_logits) == 2
    assert taps() == [0, 0]


@distributed(1)
def test_tuples_have_logits_where_transformers_has_them(world_size):
    quiet()
    context = EPContext.local(rank_device())
    ids = torch.arange(12, device=rank_device()).view(2, 6)
    for family in RETURNED:
        plain = tiny_model(family).to(rank_device())
        model = expert_parallel(tiny_model(family).to(rank_device()), context)
        for one, other in ((model, plain), (model.model, plain.model)):
            found, expected = (
                m(ids, output_router_logits=True, return_dict=False, use_cache=False) for m in (one, other)
            )
            assert isinstance(found, tuple)
            torch.testing.assert_close(found, expected, rtol=BOUND, atol=BOUND)


@distributed(1)
def test_a_checkpoint_that_wants_logits(world_size):
    quiet()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        save(tiny_model("qwen3_moe", output_router_logits=True), folder)
        context = stack.enter_context(EPContext.from_groups(device=rank_device()))
        model = load_pretrained(folder, context, progress=False)
        out = model(input_ids=torch.arange(6, device=rank_device()).view(1, 6))
        assert [tuple(logits.shape) for logits in out.router_logits] == [(6, 8)] * 2
        assert out.aux_loss > 0
