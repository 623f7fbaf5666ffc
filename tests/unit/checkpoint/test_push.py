"""Test weights that are pushed tensor by tensor, with a fault on one rank."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ep_moe import CheckpointError, EPContext, InputError, MoEConfig, MoELayer
from ep_moe.checkpoint import push
from ep_moe.checkpoint.reader import refuse_calls_while_writing
from ep_moe.errors import ContextClosed
from ep_moe.testing import distributed, rank_device

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)


def test_a_rank_with_a_problem_gathers_the_rest_with_its_peers(monkeypatch):
    gathered = []
    monkeypatch.setattr(push, "full", lambda value: gathered.append(value) or value)

    def take(name, tensor):
        raise CheckpointError(f"{name} is wrong")

    weights = {name: torch.ones(1) for name in "abc"}
    with pytest.raises(CheckpointError, match="a is wrong"):
        push._receive(weights, SimpleNamespace(take=take))
    assert gathered == list(weights.values())


def test_the_first_problem_of_several_is_raised():
    """The first of several problems is raised, because later ones may be consequences of it."""

    def take(name, tensor):
        raise CheckpointError(f"{name} is wrong")

    with pytest.raises(CheckpointError, match="a is wrong"):
        push._receive([("a", torch.ones(1)), "no pair"], SimpleNamespace(take=take))


@distributed(2)
@pytest.mark.parametrize("before", ["", "a load that failed"])
@pytest.mark.parametrize("writer", [None, 0, 1])
def test_layers_are_served_again_where_no_rank_wrote(writer, before, world_size):
    """After a failed push, layers that were served before are served again if no rank wrote to them."""
    with EPContext.from_groups(device=rank_device(), deadline_s=20) as context:
        layer = MoELayer(CONFIG, context)
        layer._unfinished = before
        with contextlib.suppress(CheckpointError), refuse_calls_while_writing([layer], "a trainer") as replaced:
            replaced.written = dist.get_rank() == writer
            context.consensus.raise_on_all_ranks("a tensor", CheckpointError("bad"))
        assert layer._unfinished == (before if writer is None else "a trainer")


def test_layers_of_two_contexts_are_refused():
    layers = [MoELayer(CONFIG, EPContext.local(rank_device())) for _ in range(2)]
    with pytest.raises(InputError, match="layers must belong to one EPContext"):
        push.load_layer_weights(dict(enumerate(layers)), {}, "mixtral")


def test_layers_of_a_context_that_ended_take_no_weights():
    with EPContext.local(rank_device()) as context:
        layer = MoELayer(CONFIG, context)
    with pytest.raises(ContextClosed, match="this EPContext was destroyed"):
        push.load_layer_weights({0: layer}, {}, "mixtral")


@pytest.mark.parametrize(
    "pushed", [{}, {"model.layers.1.self_attn.q_proj.weight": torch.ones(2)}], ids=["nothing", "other"]
)
def test_a_layer_without_weights_is_named(pushed):
    with EPContext.local(rank_device()) as context:
        layer = MoELayer(CONFIG, context)
        with pytest.raises(
            CheckpointError, match=r"the pushed weights: model\.layers\.1\.block_sparse_moe has no experts"
        ):
            push.load_layer_weights({1: layer}, pushed, "mixtral")
        assert not layer._unfinished


@pytest.mark.parametrize(
    ("tensor", "what"),
    [(torch.ones(2, device="meta"), "on the meta device"), (torch.ones(2).to_sparse(), "torch.sparse_coo")],
)
def test_a_tensor_without_numbers_is_refused(tensor, what):
    with pytest.raises(InputError, match=f"w must be a dense tensor with numbers, got one {what}"):
        push._checked_tensor("w", tensor)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (torch.ones(2), "weights must be pairs of name and tensor, got Tensor"),
        (("w", torch.ones(2), 0), "weights must be pairs of name and tensor, got tuple"),
        ((7, torch.ones(2)), "the name of a weight must be a str, got int"),
        (("w", [1.0]), "w must be a Tensor, got list"),
    ],
)
def test_what_is_no_pair_of_name_and_tensor_is_refused(pair, words):
    with pytest.raises(InputError, match=words):
        push._checked_tensor(*push._pair(pair))


def test_a_part_comes_in_one_piece():
    """A part is written once it is complete, so a tensor that arrives later is refused instead of being lost."""
    written = []
    target = SimpleNamespace(
        part=lambda name: name[0], own=set(), write=written.append,
        stage=lambda tensors, headers: push.Staged(frozenset(tensors), list(tensors), dict(tensors)),
    )  # fmt: skip
    arrived = push._Arrived(target, SimpleNamespace(written=False), copies=False)
    for name in ("a1", "a2", "b1"):
        arrived.take(name, torch.ones(1))
    assert [set(part) for part in written] == [{"a1", "a2"}]
    with pytest.raises(CheckpointError, match="a1 is there twice; push each tensor once"):
        arrived.take("a1", torch.ones(1))
    with pytest.raises(
        CheckpointError,
        match="a3 arrived after all tensors of a; remove it, or push the tensors of a one after another",
    ):
        arrived.take("a3", torch.ones(1))


@pytest.mark.parametrize(("names", "written"), [(["x1", "x2"], False), (["a1", "x1"], True), (["x1", "a1"], True)])
def test_a_write_is_not_forgotten(names, written):
    """A write is remembered, whether parts that the model has no place for (x) come before or after it."""
    target = SimpleNamespace(
        part=lambda name: name, own=set(), write=lambda plan: None, check_whole=lambda covered: None,
        stage=lambda tensors, headers: push.Staged(frozenset(n for n in tensors if n[0] == "a"), list(tensors), None),
    )  # fmt: skip
    replaced = SimpleNamespace(written=False)
    arrived = push._Arrived(target, replaced, copies=False)
    for name in names:
        arrived.take(name, torch.ones(1))
    arrived.end()
    assert replaced.written is written


def test_a_write_that_fails_half_way_is_one():
    """A write that fails half way counts as a write, so layers with a part of the new weights are not served."""

    def write(plan):
        raise CheckpointError("a number that cannot be written")

    replaced = SimpleNamespace(written=False)
    target = SimpleNamespace(
        part=lambda name: name[0], own=set(), write=write,
        stage=lambda tensors, headers: push.Staged(frozenset(tensors), list(tensors), None),
    )  # fmt: skip
    arrived = push._Arrived(target, replaced, copies=False)
    arrived.take("a1", torch.ones(1))
    with pytest.raises(CheckpointError, match="cannot be written"):
        arrived.end()
    assert replaced.written
