"""Test what `ep-moe check-exact` compares: rows of each layer in batches of other sizes, with equal calls on ranks."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ep_moe import EPContext, ExpertsOptions, MoEConfig, MoELayer
from ep_moe.cli import check_exact
from ep_moe.cli.check_exact import LOGITS, _digest, _digests

CONFIG = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
CPU = torch.device("cpu")


class Model(nn.Module):
    """A model of two layers that overwrites their inputs and outputs, as models may."""

    device = CPU

    def __init__(self, context):
        super().__init__()
        options = ExpertsOptions(exact=True)
        self.layers = nn.ModuleList([MoELayer(CONFIG, context, options=options) for _ in range(2)])
        self.called = []
        for layer in self.layers:
            layer.register_forward_hook(lambda layer, given, out: self.called.append(len(out.flatten(0, -2))))

    def forward(self, input_ids):
        assert not torch.is_grad_enabled(), "a graph would keep all of it"
        x = torch.sin(torch.arange(8) + input_ids.unsqueeze(-1).float())
        for layer in self.layers:
            out = layer(x)
            x.zero_()
            x = out.mul_(2)
        return SimpleNamespace(logits=x)


@pytest.fixture
def model():
    with EPContext.local(CPU) as context:
        yield Model(context)


def ranks(monkeypatch, world, rank):
    monkeypatch.setattr(
        check_exact.dist, "all_gather_object", lambda found, own: found.__setitem__(slice(None), [own] * len(found))
    )
    return SimpleNamespace(layout=SimpleNamespace(world=world, rank=rank))


def test_rows_in_batches_of_other_sizes_are_those_that_the_model_gave(model, monkeypatch):
    """Layers get the rows that the model gave them, in batches of other sizes, even after the model overwrote them."""
    windows = torch.arange(10).view(2, 5)
    found = list(_digests(model, windows, ranks(monkeypatch, 1, 0)))
    assert [batching for batching, *_ in found] == ["prompts", "tokens of 3", "all at once"]
    prompts, few, many = (digests for _, digests, _ in found)
    assert list(prompts) == ["layers.0", "layers.1", LOGITS], "the first difference is named in this order"
    assert few == many == {name: prompts[name] for name in ("layers.0", "layers.1")}
    assert len(set(prompts.values())) == 3
    assert {kernel for *_, kernel in found} == {"reference"}


def test_a_rank_without_prompts_calls_as_often_as_the_others(model, monkeypatch):
    """A rank without prompts calls its layers as often as the others.

    Rank 1 has one of three prompts: 5 rows, where rank 0 has 10.
    """
    windows = torch.arange(15).view(3, 5)
    for batching, *_ in _digests(model, windows, ranks(monkeypatch, 2, 1)):
        called, model.called = model.called, []
        wanted = {"prompts": [5, 5, 0, 0], "tokens of 3": [3, 2, 0, 0] * 2, "all at once": [5, 5]}[batching]
        assert called == wanted, batching


def test_a_layer_is_left_without_our_hooks(model, monkeypatch):
    before = [len(layer._forward_hooks) for layer in model.layers]
    list(_digests(model, torch.arange(5).view(1, 5), ranks(monkeypatch, 1, 0)))
    assert [len(layer._forward_hooks) for layer in model.layers] == before


def test_a_digest_is_of_rows_and_not_of_how_they_were_cut(monkeypatch):
    """A digest depends on the rows, and not on how they are split.

    It accepts strided rows and parts without rows.
    """
    context, x = ranks(monkeypatch, 1, 0), torch.randn(6, 4)
    whole = _digest([x], context)
    assert _digest([x[:2], x[2:2], x[2:]], context) == whole
    assert _digest([torch.cat([x, x], 1)[:, :4]], context) == whole
    assert _digest([x.flip(0)], context) != whole
    assert _digest([x.nextafter(x + 1)], context) != whole
