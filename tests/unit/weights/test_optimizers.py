"""Test which optimizer steps are refused, in one process."""

import contextlib
import gc
import io
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ep_moe import ConfigError, ExpertMap
from ep_moe.weights import optimizers
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.optimizers import (
    KEY,
    _note_router,
    _record_dense_checksum,
    _refuse_mixed_groups,
    _refuse_sums_beside_means,
    guard_optimizers,
    mark_replaced_parameters,
)
from tests.fixtures.expert_weights import REDUNDANT, filled_weights, shape

LEFT = "holds expert parameters that their layer has replaced, and would train no expert"


def parameter(piece):
    made = nn.Parameter(torch.ones(2))
    made.grad = torch.ones(2)
    if piece:
        made.placements = ()  # as a DTensor has
    return made


@pytest.mark.parametrize(
    ("options", "at_once"),
    [({}, False), ({"foreach": False}, False), ({"foreach": True}, True), ({"fused": True}, True)],
)
@pytest.mark.parametrize("kinds", [(False, False), (True, True), (False, True)])
def test_a_group_of_both_kinds_is_refused_where_it_is_updated_in_one_call(kinds, options, at_once):
    """A group with DTensors and plain tensors is refused if one call updates the whole group.

    On CPUs this is only the case if foreach or fused is requested.
    """
    optimizer = torch.optim.AdamW([parameter(piece) for piece in kinds], **options)
    refused = at_once and len(set(kinds)) == 2
    with pytest.raises(ConfigError, match="a group of AdamW has DTensors") if refused else contextlib.nullcontext():
        _refuse_mixed_groups(optimizer)


def test_a_parameter_that_takes_no_part_in_a_step_is_no_kind_of_it():
    plain, piece = parameter(False), parameter(True)
    piece.grad = None
    _refuse_mixed_groups(torch.optim.AdamW([plain, piece], foreach=True))


def test_an_optimizer_of_replaced_parameters_is_refused_while_their_layer_learns():
    weights = filled_weights(shape(), ExpertMap.linear(5, 1))
    early = torch.optim.SGD(weights.parameters(), lr=0.1)
    early.step()
    weights.set_expert_map(ExpertMap.from_ranks([[4, 3, 2, 1, 0]], 5))
    with pytest.raises(ConfigError, match=LEFT):
        early.step()
    torch.optim.SGD(weights.parameters(), lr=0.1).step()
    weights.requires_grad_(False)
    early.step()
    weights.requires_grad_(True)
    there = weakref.ref(weights)
    del weights
    gc.collect()
    assert there() is None, "an optimizer keeps no layer"
    early.step()


@pytest.mark.parametrize("learns", [True, False])
def test_a_rank_whose_experts_are_all_gone_refuses_as_its_peers_do(learns):
    weights = filled_weights(shape(), ExpertMap.linear(5, 1))
    early = torch.optim.SGD(weights.requires_grad_(learns).parameters(), lr=0.1)
    mark_replaced_parameters(list(weights.parameters()), empty := filled_weights(shape(), ExpertMap.uneven([0, 5])))
    assert not empty.slots_of_expert
    with pytest.raises(ConfigError, match=LEFT) if learns else contextlib.nullcontext():
        early.step()


def test_what_an_optimizer_steps_beside_experts_is_noted_once_for_each_layer():
    """The parameters that an optimizer steps together with experts are noted once per layer, by the first optimizer."""
    layers = [
        SimpleNamespace(gradient_sum=SimpleNamespace(dense_checksum=None), device=torch.device("cpu")) for _ in range(2)
    ]
    first, second = (torch.optim.SGD([parameter(False)], lr=0.1) for _ in range(2))
    _record_dense_checksum(first, layers[:1])
    noted = layers[0].gradient_sum.dense_checksum
    assert [held() for held in noted._held] == first.param_groups[0]["params"]
    _record_dense_checksum(second, layers)
    assert layers[0].gradient_sum.dense_checksum is noted
    assert [held() for held in layers[1].gradient_sum.dense_checksum._held] == second.param_groups[0]["params"]


@pytest.mark.parametrize("captured", [[False, True], [True, False], [True, True], [False, False]], ids=str)
def test_nothing_is_noted_in_a_capture(captured, monkeypatch):
    """Of any of its layers: the host would wait for the device."""
    monkeypatch.setattr(optimizers, "capturing", lambda device: device == "captured")
    layers = [
        SimpleNamespace(gradient_sum=SimpleNamespace(dense_checksum=None), device="captured" if each else "eager")
        for each in captured
    ]
    _record_dense_checksum(torch.optim.SGD([parameter(False)], lr=0.1), layers)
    assert [one.gradient_sum.dense_checksum is None for one in layers] == [any(captured)] * 2
    for each, layer in zip(captured, layers, strict=True):
        router, layer.gradient_sum.router_steps = nn.Linear(2, 2), False
        router.weight.grad, layer.gradient_sum.router = torch.ones(2, 2), lambda router=router: router
        _note_router(torch.optim.SGD(router.parameters(), lr=0.1), layer)
        assert layer.gradient_sum.router_steps is not each


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("gradients", "held", "steps"),
    [
        ((1.0, None), True, True),
        ((0.0, 1.0), True, True),
        ((0.0, 0.0), True, False),
        ((None, None), True, False),
        ((1.0, 1.0), False, False),
    ],
    ids=["one steps", "another steps", "zeros", "none", "another's"],
)
def test_a_router_steps_where_its_optimizer_has_a_gradient_of_it(gradients, held, steps, before):
    """One that has stepped stays so."""
    router = nn.Linear(2, 2)
    for each, gradient in zip(router.parameters(), gradients, strict=True):
        each.grad = None if gradient is None else torch.full_like(each, gradient)
    noted = SimpleNamespace(router_steps=before, router=lambda: router)
    optimizer = torch.optim.SGD(router.parameters() if held else [parameter(False)], lr=0.1)
    _note_router(optimizer, SimpleNamespace(gradient_sum=noted, device=torch.device("cpu")))
    assert noted.router_steps is (steps or before)


@pytest.fixture
def of_several_ranks(monkeypatch):
    """Weights as on one of two ranks that hold different experts, with gradients."""
    weights = filled_weights(shape(), ExpertMap.linear(5, 1))
    monkeypatch.setattr(weights.gradient_sum, "ep", SimpleNamespace(size=2))
    for each in weights.parameters():
        guard_optimizers(each, weights)
        each.grad = torch.ones_like(each)
    return weights


def test_gradients_are_noted_in_the_first_steps_and_ever_more_rarely(of_several_ranks, monkeypatch):
    noted, optimizer = [], torch.optim.SGD(of_several_ranks.parameters(), lr=0.1)
    monkeypatch.setattr(of_several_ranks.gradient_sum, "note_step", lambda: noted.append(step))
    for step in range(1, 20):  # noqa: B007
        optimizer.step()
    assert noted == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_checkpoint_asks_of_an_optimizers_state_is_refused(ranks, of_several_ranks, monkeypatch, tmp_path):
    """Over several ranks, which number different experts alike. A file of one rank is as torch writes it."""
    if ranks == 1:
        for each in of_several_ranks.parameters():
            del each.differs_between_ranks
    optimizer = torch.optim.SGD(of_several_ranks.parameters(), lr=0.1, momentum=0.5)
    for _ in range(3):
        optimizer.step()
    assert len(optimizer._optimizer_state_dict_post_hooks) == 1
    state = optimizer.state_dict()
    assert (KEY in state) is (ranks == 2)
    torch.save(state, tmp_path / "state")
    other = torch.optim.SGD(of_several_ranks.parameters(), lr=0.1, momentum=0.5)
    other.load_state_dict(torch.load(tmp_path / "state"))
    assert len(other.state) == len(optimizer.state) > 0
    if ranks == 2:
        asked = {
            "optimizer.state of one": lambda value: value.__create_write_items__("optimizer.state.0", None),
            "optimizer of one": lambda value: value.__create_write_items__("optimizer." + KEY, None),
            "the optimizer of one": lambda value: value.__create_chunk_list__(),
            "keep the optimizer of one": lambda value: value.__get_tensor_shard__(0),
        }
        for words, ask in asked.items():
            with pytest.raises(ConfigError, match=f"numbers parameters.*{words} rank alone"):
                ask(state[KEY])


def test_an_optimizer_of_parameters_on_the_meta_device_is_refused():
    """An optimizer of meta parameters is refused, because they do not become the parameters with memory."""
    weights = ExpertWeights(shape(), REDUNDANT, device=torch.device("meta"))
    early = torch.optim.SGD(weights.parameters(), lr=0.1)
    weights.to_empty(device="cpu")
    with pytest.raises(ConfigError, match=LEFT):
        early.step()


def test_a_parameter_in_a_file_names_no_layer():
    weights = filled_weights(shape(), ExpertMap.linear(5, 1))
    kept = weights.get_submodule("3").w2
    guard_optimizers(kept, weights)
    weights.set_expert_map(ExpertMap.from_ranks([[4, 3, 2, 1, 0]], 5))
    file = io.BytesIO()
    torch.save([kept], file)
    file.seek(0)
    (found,) = torch.load(file)
    assert torch.equal(found, kept)
    torch.optim.SGD([found], lr=0.1).step()


@pytest.mark.parametrize("mesh", [[0, 1], [[0, 1], [2, 3]], [[0, 1]], [0]], ids=str)
def test_dense_parameters_that_torch_averages_over_ranks_of_other_tokens_are_refused(mesh):
    """Dense parameters that torch averages over ranks with different tokens are refused beside summed experts.

    The mesh has one dimension as fully_shard makes it, or two (HSDP). Sharding over tp ranks only is accepted.
    """
    layout = SimpleNamespace(token_ranks=2, group=lambda name: (0, 1))
    gradient_sum = SimpleNamespace(layout=layout, divisor=1, wrapper_divisor=None, router=lambda: None)
    weights = SimpleNamespace(gradient_sum=gradient_sum, parameters=list)
    cut = nn.Parameter(torch.ones(2))
    cut.device_mesh = SimpleNamespace(mesh=torch.tensor(mesh))
    over_tp = {*torch.tensor(mesh).flatten().tolist()} <= {0, 1}
    refused = pytest.raises(ConfigError, match=r"averages dense gradients over ranks.*sums over 2 ranks.*2 times too")
    with contextlib.nullcontext() if over_tp else refused:
        _refuse_sums_beside_means(torch.optim.SGD([parameter(False), cut], lr=0.1), weights)
