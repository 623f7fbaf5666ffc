"""Test `generate` on one rank: its arguments, when peers are asked, and whose random numbers are drawn."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.integrations import forward_sync
from ep_moe.integrations.forward_sync import GenerationSync, idle_step
from ep_moe.integrations.model_hooks import TokenMasks

CPU = torch.device("cpu")
CONFIG = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)


class Model(nn.Module):
    """A stand-in for a transformers model, whose forward and `generate` record their arguments."""

    def __init__(self):
        super().__init__()
        self.masks, self.weight, self.calls = TokenMasks(), nn.Parameter(torch.ones(1)), []

    def forward(self, **given):
        self.calls.append((given, self.masks._asked.idle))
        return (torch.ones(1, 1, 3) * self.weight,)

    def generate(self, inputs=None, synced_gpus=None, **kwargs):
        self.calls.append((inputs, synced_gpus, kwargs, self.masks._asked.generates))
        return "tokens"


@pytest.fixture
def context():
    with EPContext.local(CPU) as made:
        yield made


def test_an_idle_step_is_one_row_that_is_no_token():
    """An idle step computes one row that is not a token, without a cache.

    A cache would differ in length from the peers'.
    """
    model = Model()
    loss = idle_step(model)
    ((given, idle),) = model.calls
    assert idle
    assert not model.masks._asked.idle
    ids = given.pop("input_ids")
    assert (ids.shape, ids.dtype, ids.device) == ((1, 1), torch.int64, model.weight.device)
    assert given == {"use_cache": False, "return_dict": True}
    loss.backward()
    assert (loss.item(), model.weight.grad.item()) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("asked", "nested", "given", "ran"),
    [(None, False, False, True), (True, False, False, True), (False, False, False, False), (True, True, True, False)],
)
def test_ranks_are_kept_in_step_instead_of_by_synced_gpus(asked, nested, given, ran, context, monkeypatch):
    """Ranks are kept in step by this package instead of synced_gpus, unless the caller passes synced_gpus=False.

    The call of an assistant model is nested in another call, and is not changed.
    """
    model, begun = Model(), []
    generation = GenerationSync.of(context)
    assert GenerationSync.of(context) is generation
    monkeypatch.setattr(
        generation, "_run", lambda bound, generate: begun.append(bound.arguments["inputs"]) or generate()
    )
    generation.attach(model, model)
    generation._depth = int(nested)
    more = {} if asked is None else {"synced_gpus": asked}
    assert model.generate("ids", max_new_tokens=3, **more) == "tokens"
    assert model.calls == [("ids", given, {"max_new_tokens": 3}, True)]
    assert begun == ["ids"] * ran
    assert not model.masks._asked.generates


@pytest.mark.parametrize(
    ("asked", "of_call", "of_model", "kind"),
    [
        ({}, {}, {}, "Tensor"),
        ({"return_dict_in_generate": True}, {}, {}, "GenerateDecoderOnlyOutput"),
        ({}, {"return_dict_in_generate": True}, {}, "GenerateDecoderOnlyOutput"),
        ({}, {}, {"return_dict_in_generate": True}, "GenerateDecoderOnlyOutput"),
        ({"return_dict_in_generate": False}, {}, {"return_dict_in_generate": True}, "Tensor"),
        ({"num_beams": 1}, {"return_dict_in_generate": True, "num_beams": 2}, {}, "GenerateDecoderOnlyOutput"),
        ({"num_beams": 2}, {"return_dict_in_generate": True}, {}, "GenerateBeamDecoderOnlyOutput"),
    ],
)
def test_no_sequences_come_back_in_the_form_that_is_asked_for(asked, of_call, of_model, kind, context):
    model = Model()
    model.generation_config = GenerationConfig(**of_model)
    GenerationSync.of(context).attach(model, model)
    config = GenerationConfig(**of_call) if of_call else None
    ids = torch.empty(0, 5, dtype=torch.int64)
    found = model.generate(ids, generation_config=config, **asked)
    assert type(found).__name__ == kind
    assert torch.equal(found if kind == "Tensor" else found.sequences, ids)
    found = model.generate(inputs_embeds=torch.empty(0, 5, 8), generation_config=config, **asked)
    found = found if kind == "Tensor" else found.sequences
    assert (found.shape, found.dtype) == ((0, 0), torch.int64), "without ids of a prompt"
    assert model.calls == []


def test_layers_of_another_context_are_another_models(context):
    generation = GenerationSync.of(context)
    own = nn.Sequential(MoELayer(CONFIG, context))
    with EPContext.local(CPU) as other:
        assert generation._is_of_others(nn.Sequential(MoELayer(CONFIG, other)))
    assert not generation._is_of_others(own)
    assert not generation._is_of_others(nn.Linear(1, 1)), "a dense assistant waits for none"
    assert not generation._is_of_others(None)


def in_group(size, rank=0, split=1, rows=None):
    """Return a rank's `GenerationSync` in a group, and the list of what it sends to the group."""
    made, asked = object.__new__(GenerationSync), []
    group = SimpleNamespace(
        size=size, rank=rank, exchange=lambda row: asked.append(row) or rows,
        flight_recorder=SimpleNamespace(step=lambda *_: contextlib.nullcontext()),
    )  # fmt: skip
    made._context = SimpleNamespace(
        rank_groups={"tp": group}, layout=SimpleNamespace(split=split), device=CPU,
        _begin_call=lambda name: contextlib.nullcontext(),
    )  # fmt: skip
    made._rank_group, made._models, made._depth, made._serving, made._inside = group, [], 0, False, False
    return made, asked


def test_peers_are_asked_before_all_other_hooks_of_a_forward():
    """Peers are asked before all other hooks of a forward, because an idle step runs those hooks."""
    made, _ = in_group(2)
    model, order = Model(), []
    model.register_forward_pre_hook(lambda *_: order.append("another"))
    made._before, made._after = (
        lambda forward: order.append(forward // forward_sync._MOST_LAYERS),
        lambda: order.append("after"),
    )
    made.attach(nn.Identity.__new__(type("First", (nn.Identity,), {"generate": lambda self: None})), nn.Identity())
    made.attach(model, model)
    model()
    assert order == [1, "another", "after"], "by the number of the model"


@pytest.mark.parametrize(("depth", "serving", "asks"), [(1, False, True), (0, False, False), (1, True, False)], ids=str)
def test_peers_are_asked_within_generate_alone(depth, serving, asks):
    """Peers are asked only within `generate`, and not in a step that serves a peer's other model."""
    made, served = in_group(2)[0], []
    turns = iter([4, 4, 7])
    asked = []
    made._depth, made._serving = depth, serving
    made._next_forward = lambda forward: asked.append(forward) or next(turns)
    made._idle = served.append
    made._before(7)
    assert asked == [7] * 3 * asks
    assert served == [4, 4] * asks
    assert made._inside is asks
    made._inside = True
    made._after()
    assert made._inside is serving, "the forward that it interrupted goes on"


@pytest.mark.parametrize(("split", "rank", "shared"), [(1, 1, False), (2, 0, True), (2, 1, True)])
def test_tp_ranks_draw_the_numbers_of_the_first_one(split, rank, shared):
    """tp ranks draw the random numbers of the first tp rank.

    Afterwards each has its own random state again, as if it had drawn none.
    """
    first = torch.Generator().manual_seed(5).get_state().view(torch.int64)
    torch.manual_seed(9)
    own = torch.rand(3, generator=torch.Generator().manual_seed(9))
    theirs = torch.rand(3, generator=torch.Generator().manual_seed(5))
    made, asked = in_group(2, rank, split, [first.tolist(), [0]])
    with made._random_state_of_tp():
        drawn = torch.rand(3)
    assert len(asked) == int(shared)
    assert torch.equal(drawn, theirs if shared and rank else own)
    if shared and rank:
        assert torch.equal(torch.rand(3), own)


def test_random_states_of_a_gpu_are_beside_the_hosts(monkeypatch):
    host, gpu, kept = torch.get_rng_state(), torch.arange(16, dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: kept.append((state, device)))
    device = torch.device("cuda:1")
    state = forward_sync._random_state(device)
    assert torch.equal(state.view(torch.uint8), torch.cat([host, gpu]))
    forward_sync._set_random_state(state, device)
    ((given, where),) = kept
    assert torch.equal(given, gpu)
    assert where == device
