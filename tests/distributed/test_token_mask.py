"""Padding is not counted as load and not sent; tokens equal those without padding.

Layers take a mask, models their attention mask.
"""

import pytest
import torch
import torch.distributed as dist

from ep_moe import (
    EPContext,
    ExpertsOptions,
    InputError,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    RoutingConfig,
    RoutingMethod,
)
from ep_moe.integrations.transformers import expert_parallel, moe_layers
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import FAMILIES, quiet, tiny_model
from tests.fixtures.distributed_cases import batch_of, gather_from_all_ranks, same_error
from tests.fixtures.helpers import assert_same, fill, integer_rows

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2, shared_intermediate_size=16)
LAYOUTS = {
    2: [{"dp": 2}, {"tp": 2}, {"dp": 2, "ep": 1, "etp": 2}, {"tp": 2, "ep": 1, "etp": 2}],
    4: [{"dp": 2, "tp": 2, "ep": 2, "etp": 2}, {"dp": 4, "ep": 2, "etp": 2}],
}
BOUND = 1e-5  # as in test_transformers


def load(layer):
    """Return the routes per expert of all ranks, and reset the counters."""
    found = torch.tensor(layer.stats().expert_load)
    layer.placement.reset_load()
    return found


def batch_and_mask(context):
    """Return 6 rows and the mask of tokens. Odd batches have no padding and no mask."""
    batch = batch_of(context.layout, dist.get_rank())
    x = (integer_rows(6, 16, batch) + 1).to(context.device)
    mask = torch.tensor([False, True, True, False, True, True], device=context.device).roll(batch // 2)
    return x, None if batch % 2 else mask


@distributed(1, 2, 4)
def test_a_masked_layer_on_every_layout(world_size):
    for sizes in LAYOUTS.get(world_size, [{}]):
        for all2all in ("allgather", "torch_a2a"):
            with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context, torch.no_grad():
                if world_size == 1:
                    all2all = "auto"
                layer = fill(MoELayer(CONFIG, context, all2all=all2all))
                x, mask = batch_and_mask(context)
                tokens = torch.ones(6, dtype=torch.bool, device=x.device) if mask is None else mask
                whole, _ = layer(x), load(layer)
                chosen = layer.router(x)
                counted = torch.bincount(chosen.ids[tokens].flatten(), minlength=8)
                batches = dict(gather_from_all_ranks((batch_of(context.layout, dist.get_rank()), counted.cpu())))
                groups = context.layout.replicas if context.layout.ep == 1 else 1  # stats cover one EP group
                expected = sum(batches.values()) if groups == 1 else counted.cpu()
                for send in (False, True):
                    found = layer(x.view(2, 3, 16), None if mask is None else mask.view(2, 3), send_masked=send)
                    where = f"{sizes} {all2all} send_masked={send}"
                    assert_same(load(layer), expected, where)
                    found = found.view(6, 16)
                    # sums of some 34 terms in another order, each at most as large as the largest output
                    apart = {"rtol": 0, "atol": BOUND * float(whole.abs().max())}
                    torch.testing.assert_close(found[tokens], whole[tokens], **apart)
                    shared = whole if send else layer.shared_experts(x)
                    torch.testing.assert_close(found[~tokens], shared[~tokens], **apart, msg=where)


@distributed(2)
def test_a_wrong_mask_is_one_sentence(world_size):
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=20) as context, torch.no_grad():
        layer = fill(MoELayer(CONFIG, context))
        x, device = integer_rows(4, 16, 0).to(context.device), context.device
        good = torch.ones(4, dtype=torch.bool, device=device)
        for bad, sentence in (
            (good.long(), "mask must be bool, True for a token, got int64; pass mask != 0"),
            (good[:3], "mask must be [4], as x without its last size, got [3]"),
            (good.tolist(), "mask must be a Tensor, got list"),
        ):
            mask = bad if dist.get_rank() else good
            assert same_error(InputError, lambda mask=mask: layer(x, mask)) == f"rank 1: {sentence}"
        layer(x, good)


@distributed(2)
def test_tp_ranks_with_different_masks_are_refused(world_size):
    with EPContext.from_groups(ParallelConfig(tp=2), device=rank_device(), deadline_s=20) as context, torch.no_grad():
        layer = fill(MoELayer(CONFIG, context))
        x, rank = integer_rows(4, 16, 0).to(context.device), dist.get_rank()
        mask = torch.ones(4, dtype=torch.bool, device=context.device)
        other = mask.clone()
        other[rank] = False
        assert "mask on rank 0 differs" in same_error(InputError, lambda: layer(x, other))
        text = same_error(InputError, lambda: layer(x, mask, send_masked=bool(rank)))
        assert "x, mask on rank 0; x, mask with send_masked on rank 1" in text


@distributed(2)
def test_masked_gradients_are_those_of_the_tokens(world_size):
    """Gradients with a mask equal those of a call without the padding rows."""
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
        one, other = (fill(MoELayer(CONFIG, context)) for _ in range(2))
        other.load_state_dict(one.state_dict())
        x, mask = batch_and_mask(context)
        tokens = torch.ones(6, dtype=torch.bool, device=x.device) if mask is None else mask
        given, alone = x.clone().requires_grad_(), x[tokens].clone().requires_grad_()
        one(given, mask)[tokens].square().sum().backward()
        other(alone).square().sum().backward()
        # the GEMMs of 6 and of 4 rows may sum in another order, and terms as large as the largest gradient cancel
        apart = BOUND * float(alone.grad.abs().max())
        torch.testing.assert_close(given.grad[tokens], alone.grad, rtol=BOUND, atol=apart)
        for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(
                p.grad, q.grad, rtol=BOUND, atol=BOUND * float(q.grad.abs().max()), msg=lambda m, n=name: f"{n}: {m}"
            )


ROUTINGS = {
    "own": MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2),
    "weight_on_input": MoEConfig(
        hidden_size=16,
        intermediate_size=16,
        num_experts=8,
        top_k=1,
        routing=RoutingConfig(method=RoutingMethod.TOPK_SIGMOID, weight_on_input=True),
    ),
}


@distributed(1, 2, 4, set_device=True)  # `torch.equal` of DTensors is a collective on the current device
@pytest.mark.parametrize("name", ROUTINGS)
def test_padding_that_is_no_number_is_in_no_gradient(name, world_size):
    """NaN in padding rows reaches no output of a token and no gradient. The same bits are due as with zeros there."""
    for sizes in LAYOUTS.get(world_size, [{}]):
        for exact in (False, True) if "etp" not in sizes else (False,):
            with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context:
                options = ExpertsOptions(exact=True) if exact else None
                layer = fill(MoELayer(ROUTINGS[name], context, options=options))
                x, mask = batch_and_mask(context)
                padding = torch.zeros(6, dtype=torch.bool, device=x.device) if mask is None else ~mask
                found = []
                for number in (0.0, torch.nan):
                    given = x.masked_fill(padding.unsqueeze(1), number).requires_grad_()
                    out = layer(given, mask)
                    out.square().sum().backward()
                    found.append([out.detach(), given.grad, *(p.grad for p in layer.parameters())])
                    layer.zero_grad()
                for wanted, other in zip(*found, strict=True):
                    assert torch.equal(other, wanted), f"{sizes} exact={exact}"


def padded(layout):
    """Return token ids and mask of a dp rank, padded on the left. Odd ranks have no padding."""
    ids = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(layout.dp_rank)).to(rank_device())
    mask = torch.ones_like(ids)
    if layout.dp_rank % 2 == 0:
        mask[0, :5] = mask[2, :1] = 0
    return ids, mask


def routes(model, layout):
    """Return the tokens that each layer counted."""
    top_k = model.config.num_experts_per_tok
    return [int(load(layer).sum()) / top_k for layer in moe_layers(model)]


@distributed(1, 2)
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_of_a_model(family, world_size):
    quiet()
    plain = tiny_model(family).to(rank_device())
    for sizes in [{"dp": 2}, {"tp": 2}] if world_size == 2 else [{}]:
        with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context, torch.no_grad():
            model = expert_parallel(tiny_model(family).to(rank_device()), context)
            ids, mask = padded(context.layout)
            # on a GPU transformers compiles decoding with a static cache
            how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
            try:
                plain.generate(ids, attention_mask=mask, **how, cache_implementation="static")
            except TypeError as error:  # transformers 5.17's own Llama-4, whose mask functions take fewer arguments
                pytest.skip(f"transformers itself fails: {error}")
            tokens = 21 + 27 * (context.layout.dp - 1)
            expected, found = (m(ids, attention_mask=mask).logits for m in (plain, model))
            torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=BOUND, atol=BOUND)
            assert routes(model, context.layout) == [tokens] * 2
            expected, found = (m(ids, attention_mask=mask, labels=ids).loss for m in (plain, model))
            torch.testing.assert_close(found, expected, rtol=BOUND, atol=BOUND)
            assert routes(model, context.layout) == [tokens] * 2, "labels"
            for cache in ("dynamic", "static"):
                way = how | {"cache_implementation": cache}
                expected, found = (m.generate(ids, attention_mask=mask, **way) for m in (plain, model))
                assert torch.equal(found, expected), cache
                assert routes(model, context.layout) == [tokens + 9 * context.layout.dp] * 2, cache


@distributed(1, 2)
def test_generation_goes_on_from_padding_on_the_right_as_transformers_does(world_size):
    quiet()
    plain = tiny_model("qwen3_moe").to(rank_device())
    for sizes in [{"dp": 2}, {"tp": 2}] if world_size == 2 else [{}]:
        with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context, torch.no_grad():
            model = expert_parallel(tiny_model("qwen3_moe").to(rank_device()), context)
            ids, mask = padded(context.layout)
            mask = mask.flip(1)
            for more in ({}, {"synced_gpus": False}):
                how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **more}
                expected, found = (m.generate(ids, attention_mask=mask, **how) for m in (plain, model))
                assert torch.equal(found, expected), sizes
            dp = context.layout.dp
            assert routes(model, context.layout) == [2 * (21 + 27 * (dp - 1) + 9 * dp)] * 2, "padding is not counted"


@distributed(2)
def test_padding_in_training_is_computed_and_not_counted(world_size):
    """In training, all outputs equal transformers', those of padding included, and padding is no load.

    Activation checkpointing does not count tokens twice.
    """
    quiet()
    for family in ("mixtral", "deepseek_v3"):
        with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
            plain = tiny_model(family).to(rank_device()).train()
            model = expert_parallel(tiny_model(family).to(rank_device()), context).train()
            model.gradient_checkpointing_enable()
            ids, mask = padded(context.layout)
            logits = "router_logits" in (plain.model._can_record_outputs or {})  # transformers 5.17: not DeepSeek
            how = {"attention_mask": mask, "use_cache": False} | ({"output_router_logits": True} if logits else {})
            outputs = [m(ids, **how) for m in (plain, model)]
            for name in ("logits", "router_logits") if logits else ("logits",):
                torch.testing.assert_close(outputs[1][name], outputs[0][name], rtol=BOUND, atol=BOUND)
            for out in outputs:
                out.logits.square().mean().backward()
            ours, theirs = (m.model.embed_tokens.weight.grad for m in (model, plain))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=BOUND * float(theirs.abs().max()))
            assert routes(model, context.layout) == [48, 48]
