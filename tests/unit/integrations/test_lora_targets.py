"""Test what a `LoraConfig` names in a model with expert-parallel layers, and how a file stores experts' factors."""

import sys
from types import SimpleNamespace

import pytest
import torch

from ep_moe.integrations import lora_targets
from ep_moe.integrations.lora_targets import LoraTarget, is_named, moved_modules

E, RANK, INSIDE, OUTSIDE = 3, 2, 5, 8


def target(stored="w2", *, turned=False, interleaved=False, depth=0):
    tensors = (SimpleNamespace(interleaved=interleaved),)
    of = SimpleNamespace(
        name="layers.0.experts", layout=SimpleNamespace(tensors=tensors),
        layer=SimpleNamespace(config=SimpleNamespace(num_experts=E)),
    )  # fmt: skip
    return LoraTarget(of=of, stored=stored, parameter="p", depth=depth, turned=turned)


def factors():
    return torch.randn(E, RANK, INSIDE), torch.randn(E, OUTSIDE, RANK)


@pytest.mark.parametrize(("depth", "inside"), [(0, ""), (1, ".base_layer")])
def test_a_factor_has_the_name_that_peft_gives_it(depth, inside):
    """A factor has PEFT's name. PEFT nests one wrapper for each parameter of a module."""
    assert target(depth=depth).key("A") == f"base_model.model.layers.0.experts{inside}.lora_A.weight"


def test_factors_of_all_experts_are_one_tensor_each():
    """Factors of all experts are one tensor each in a file.

    A stacks experts along its rows. In B, the expert index varies fastest along the columns.
    """
    a, b = factors()
    one = target()
    file = one.in_file(a, b)
    in_a, in_b = file[one.key("A")], file[one.key("B")]
    assert (in_a.shape, in_b.shape) == ((E * RANK, INSIDE), (OUTSIDE, RANK * E))
    for expert in range(E):
        assert torch.equal(in_a[expert * RANK : (expert + 1) * RANK], a[expert])
        assert torch.equal(in_b[:, expert::E], b[expert])


def test_rows_by_turns_are_so_in_the_file():
    """Interleaved gate and up rows are interleaved in the file too. down has none."""
    a, b = factors()
    plain, by_turns = target("w13"), target("w13", interleaved=True)
    rows = [row for pair in zip(range(OUTSIDE // 2), range(OUTSIDE // 2, OUTSIDE), strict=True) for row in pair]
    assert torch.equal(by_turns.in_file(a, b)[by_turns.key("B")], plain.in_file(a, b)[plain.key("B")][rows])
    assert torch.equal(
        target("w2", interleaved=True).in_file(a, b)[plain.key("B")], target("w2").in_file(a, b)[plain.key("B")]
    )


def test_a_transposed_parameter_has_its_factors_exchanged():
    a, b = factors()
    one = target(turned=True)
    file = one.in_file(a, b)
    assert torch.equal(file[one.key("A")], b.mT.flatten(0, 1))
    assert torch.equal(file[one.key("B")], a.mT.permute(1, 2, 0).flatten(1))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("stored", ["w13", "w2"])
def test_factors_are_read_as_they_were_written(stored, interleaved, turned):
    a, b = factors()
    one = target(stored, interleaved=interleaved, turned=turned)
    found = one.from_file(*one.in_file(a, b).values())
    for read, written in zip(found, (a, b), strict=True):
        assert torch.equal(read, written)


@pytest.mark.parametrize(("a", "b"), [((7, 5), (8, 6)), ((6, 5), (8, 7)), ((6,), (8, 6)), ((6, 5), (8, 6, 1))], ids=str)
def test_factors_of_another_number_of_experts_are_none(a, b):
    assert target().from_file(torch.zeros(a), torch.zeros(b)) is None
    assert target().from_file(torch.zeros(6, 5), torch.zeros(8, 6)) is not None


@pytest.mark.parametrize(
    ("name", "wanted", "named"),
    [("a.b", "a.b", True), ("x.a.b", "a.b", True), ("x.aa.b", "a.b", False), ("a.b.c", "a.b", False)],
)
def test_a_parameter_is_named_from_its_end_on(name, wanted, named):
    assert is_named(name, wanted) is named


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("shared_expert", "shared_experts"),
        ("shared_expert.up_proj", "shared_experts.up_proj"),
        ("mlp.shared_expert.up_proj", "mlp.moe.shared_experts.up_proj"),
        ("layers.0.mlp.shared_expert", "layers.0.mlp.moe.shared_experts"),
        ("shared_expert_gate", "shared_expert_gate"),
        ("mlp.shared_expert_gate", "mlp.shared_expert_gate"),
        ("my_shared_expert.up_proj", "my_shared_expert.up_proj"),
        ("q_proj", "q_proj"),
    ],
)
def test_modules_of_shared_experts_are_found_where_they_lie(theirs, ours, monkeypatch):
    block = ("layers.0.mlp", "moe.shared_experts", "shared_expert")
    monkeypatch.setattr(lora_targets, "shared_names", lambda model: [block, ("layers.1.mlp", *block[1:])])
    assert moved_modules([theirs, "o_proj"], None) == [ours, "o_proj"]


@pytest.mark.parametrize("targets", [None, "all-linear", r".*\.up_proj"])
def test_a_pattern_of_modules_stays(targets):
    assert moved_modules(targets, None) == targets


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("mlp.base_layer.weight", "mlp.weight"),
        ("mlp.experts.base_layer", "mlp.experts"),
        ("head.original_module.weight", "head.weight"),
        ("mlp.base_layers.weight", "mlp.base_layers.weight"),
    ],
)
def test_names_are_those_without_pefts_wrappers(name, bare):
    assert lora_targets._bare(name) == bare


@pytest.mark.parametrize(
    ("field", "wanted", "name", "found"),
    [
        ("modules_to_save", ["head"], "model.lm_head", "head"),
        ("modules_to_save", ["head"], "head.model", None),
        ("target_parameters", ["experts.down_proj"], "mlp.experts.down_proj", "experts.down_proj"),
        ("target_parameters", ["down_proj"], "mlp.experts.my_down_proj", None),
    ],
)
def test_a_field_names_what_peft_takes_it_for(field, wanted, name, found):
    """A field matches names as PEFT does: saved modules by any suffix, and parameters by whole components."""
    assert lora_targets._wanted(None, field, wanted, name) == found


def test_a_peft_without_a_conversion_leaves_the_configuration(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft.utils.transformers_weight_conversion", None)
    config = SimpleNamespace(target_modules=["q_proj"])
    found = lora_targets.converted(config, None)
    assert found == config
    assert found is not config
