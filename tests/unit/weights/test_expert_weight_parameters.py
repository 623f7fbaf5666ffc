"""Test the parameters of experts: names, the memory that kernels read, and changes of dtype and map."""

from collections.abc import Callable

import pytest
import torch

from ep_moe import Activation, ExpertMap
from ep_moe.quant.schemes import SCHEMES
from ep_moe.weights.expert_weights import ExpertWeights
from tests.fixtures.expert_weights import LARGE, REDUNDANT, etp_link, filled_weights, shape


def test_parameters_are_named_by_logical_expert():
    config = shape()
    weights = ExpertWeights(config, REDUNDANT, ep_rank=0)
    shapes = {"w1": (16, 8), "w3": (16, 8), "w2": (8, 16), "w1_bias": (16,), "w3_bias": (16,), "w2_bias": (8,)}
    found = {name: tuple(p.shape) for name, p in weights.named_parameters()}
    assert found == {f"{expert}.{name}": size for expert in (0, 4) for name, size in shapes.items()}
    without_gate = ExpertWeights(shape(Activation.RELU2, bias=False), REDUNDANT)
    assert {name for name, _ in without_gate.named_parameters()} == {"0.w1", "0.w2", "4.w1", "4.w2"}


def test_parameters_lie_where_kernels_read():
    """Parameters are views of the memory that kernels read.

    An in-place optimizer step affects the next call, and so does new `.data` of a parameter.
    """
    weights = ExpertWeights(shape(), REDUNDANT, ep_rank=0)  # slots: experts 4 and 0
    gate, up = weights.get_submodule("4").w1, weights.get_submodule("0").w3
    with torch.no_grad():
        gate.fill_(3), up.fill_(5)
    assert (weights.w13[0, :16] == 3).all()
    assert (weights.w13[1, 16:] == 5).all()
    gate.data = torch.full_like(gate, 7)
    assert weights(lambda: bool((weights.w13[0, :16] == 7).all()))
    assert gate.data_ptr() == weights.w13[0].data_ptr()
    weights.to(torch.float64)
    assert weights.get_submodule("4").w1 is gate, "optimizers hold it"
    assert gate.dtype == torch.float64
    assert gate.data_ptr() == weights.w13[0].data_ptr()


@pytest.mark.parametrize("read", [lambda weights: weights.w13, lambda weights: weights.get_parameter("w13")])
def test_reading_a_stored_tensor_writes_nothing(read):
    weights = filled_weights(
        shape(Activation.RELU2, bias=False), ExpertMap.from_ranks([[0, 1, 0, 2, 3, 4]], 5, allow_duplicates=True)
    )
    first, replaced = weights.get_submodule("0").w1, weights.get_submodule("1").w1
    with torch.no_grad():
        first.fill_(9)
    replaced.data = torch.full_like(replaced, 7)
    before = read(weights).clone()
    assert not (before[1] == 7).any()
    assert not (before[2] == 9).any()
    assert torch.equal(read(weights), before)
    assert (weights.stored_tensors()["w13"][1] == 7).all()
    assert (read(weights)[1] == 7).all()
    assert (read(weights)[2] == 9).all()


def test_kernels_read_parameters_with_memory_of_their_own():
    """Kernels read parameters that are in no slots, as before FSDP2 shards them. An empty slot is zero."""
    weights = filled_weights(shape(), ExpertMap.from_ranks([[4, -1, 0, 1, 2, 3]], 5))
    weights.w13[1] = 0
    before, fifth = weights.w13.clone(), weights.gather_slot(0)
    assert torch.equal(fifth["w13"], before[0])
    weights.unstack()
    assert weights.slots_are_current
    found = weights.gather_slot(0)
    assert found.keys() == fifth.keys()
    assert all(torch.equal(found[name], fifth[name]) for name in fifth)
    with torch.no_grad():
        for found in (weights(lambda: weights.w13), weights(lambda: weights.get_parameter("w13"))):
            assert torch.equal(found, before)
    with pytest.raises(AttributeError):
        weights.get_parameter("w13")


def test_an_expert_that_is_here_twice_has_one_parameter():
    config = shape(Activation.RELU2, bias=False)
    weights = ExpertWeights(config, ExpertMap.from_ranks([[0, 1, 0]], 2, allow_duplicates=True))
    assert [name for name, _ in weights.named_parameters()] == ["0.w1", "0.w2", "1.w1", "1.w2"]
    with torch.no_grad():
        weights.get_submodule("0").w1.fill_(2)
    out = weights(lambda: weights.w13 * torch.tensor([1.0, 10.0, 100.0])[:, None, None])
    assert (out[2] == 200).all(), "the other slot follows"
    out.sum().backward()
    assert (weights.get_submodule("0").w1.grad == 101).all(), "and its gradient counts"


def change_data(weights: ExpertWeights) -> None:
    weights.get_submodule("0").w1.data.fill_(3)


def fused_step(weights: ExpertWeights) -> None:
    first = weights.get_submodule("0").w1
    first.grad = torch.ones_like(first)
    torch.optim.SGD([first], lr=1.0, fused=True).step()


@pytest.mark.parametrize("change", [change_data, fused_step])
def test_copies_of_an_expert_follow_changes_that_bump_no_version(change: Callable[[ExpertWeights], None]) -> None:
    """Replicas of an expert follow changes that increase no version counter.

    Tensors that did not change keep their version, so that readers see no change.
    """
    weights = filled_weights(
        shape(Activation.RELU2, bias=False), ExpertMap.from_ranks([[0, 1, 0, 2, 3, 4]], 5, allow_duplicates=True)
    )
    weights.refresh_slots()
    versions = [tensor._version for tensor in weights.stored_tensors().values()]
    before = weights.w13[0].clone()
    change(weights)
    assert not weights.slots_are_current
    weights.refresh_slots()
    assert not torch.equal(weights.w13[0], before)
    assert torch.equal(weights.w13[2], weights.w13[0])
    assert [tensor._version for tensor in weights.stored_tensors().values()] == versions


def test_slots_lack_a_parameter_that_was_replaced():
    weights = filled_weights(shape(), ExpertMap.linear(5, 1))
    weights.refresh_slots()
    assert weights.slots_are_current
    expert = weights.get_submodule("3")
    expert.w2 = torch.nn.Parameter(torch.full_like(expert.w2, 7))
    assert not weights.slots_are_current
    weights.refresh_slots()
    assert (weights.w2[3] == 7).all()
    assert weights.slots_are_current


def test_what_is_no_tensor_is_named_when_loaded():
    weights = filled_weights(shape(bias=False), ExpertMap.linear(5, 1))
    saved_state = weights.state_dict()
    saved_state["3.w1"] = saved_state["3.w1"].numpy()
    with pytest.raises(RuntimeError, match=r"3\.w1 must be a Tensor, got ndarray"):
        weights.load_state_dict(saved_state)


def test_what_parameters_carry_goes_with_them():
    """Gradients and `requires_grad` follow parameters to another dtype, and `requires_grad` to another map."""
    weights = filled_weights(shape(bias=False), ExpertMap.linear(5, 1))
    first = weights.get_submodule("0")
    first.w1.grad, first.w2.requires_grad = torch.full_like(first.w1, 3), False
    weights.to(torch.bfloat16)
    first = weights.get_submodule("0")
    assert torch.equal(first.w1.grad, torch.full_like(first.w1, 3))
    assert (first.w1.grad.dtype, first.w1.requires_grad, first.w2.requires_grad) == (torch.bfloat16, True, False)
    weights.requires_grad_(False)
    weights.set_expert_map(ExpertMap.from_ranks([[4, 3, 2, 1, 0]], 5))
    assert not any(parameter.requires_grad for parameter in weights.parameters())


def test_an_expert_that_arrives_learns_as_those_here_did():
    expert_map = ExpertMap.from_ranks([[0, 1], [2, 3]], 4)
    weights = ExpertWeights(shape(bias=False), expert_map, ep_rank=0)
    for name, parameter in weights.named_parameters():
        parameter.requires_grad_(name.endswith("w2"))
    weights.set_expert_map(ExpertMap.from_ranks([[0, 3], [2, 1]], 4))
    assert {name for name, p in weights.named_parameters() if p.requires_grad} == {"0.w2", "3.w2"}


def test_what_keeps_a_rank_in_the_graph_is_where_the_weights_are():
    weights = ExpertWeights(shape(), REDUNDANT, device=torch.device("meta"))
    weights.get_submodule("4").w2.requires_grad_(False)
    assert weights.to_empty(device="cpu").anchor.device == weights.device == torch.device("cpu")
    assert [name for name, p in weights.named_parameters() if not p.requires_grad] == ["4.w2"]
    weights.unstack()
    assert weights.device == torch.device("cpu"), "parameters with memory of their own too"


def test_a_kernel_that_raises_leaves_no_functions_of_parameters():
    weights = filled_weights(shape(), ExpertMap.linear(5, 1))

    def compute():
        assert weights.w13.grad_fn is not None
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            weights(compute)
        assert weights.w13.grad_fn is None


def test_stored_tensors_are_per_slot():
    config = shape()
    weights = ExpertWeights(config, REDUNDANT, ep_rank=0, etp=etp_link(2, 0))
    assert {name: tuple(p.shape) for name, p in weights.stored_tensors().items()} == {
        "w13": (2, 16, 8),
        "w2": (2, 8, 8),
        "w13_bias": (2, 16),
        "w2_bias": (2, 8),
    }
    assert weights.local_experts == (4, 0)
    assert set(ExpertWeights(shape(bias=False), REDUNDANT).stored_tensors()) == {"w13", "w2"}
    assert ExpertWeights(config, REDUNDANT, ep_rank=3).w13.shape == (0, 32, 8)


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_a_rank_without_slots_has_matrices_of_its_piece(scheme, etp):
    expert_map = ExpertMap.from_ranks([[0, 1, 2], []], 3)
    options = {"scheme": SCHEMES[scheme], "dtype": torch.bfloat16, "etp": etp_link(etp, 0)}
    for ep_rank, slots in ((0, 3), (1, 0)):
        weights = ExpertWeights(LARGE, expert_map, ep_rank=ep_rank, **options)
        for name, sizes in (("w13", (512 // etp, 256)), ("w2", (256, 256 // etp))):
            found = weights.dense(name)
            assert (found.shape, found.dtype) == ((slots, *sizes), torch.bfloat16)


def test_fresh_parameters_are_random_and_biases_zero():
    weights = ExpertWeights(shape(inner=64), ExpertMap.linear(5, 1))
    for parameter, fan_in in ((weights.w13, 8), (weights.w2, 64)):
        bound = fan_in**-0.5
        assert 0.9 * bound < parameter.abs().max() <= bound
        assert parameter.unique().numel() > 0.9 * parameter.numel()
    assert (weights.w13_bias == 0).all()
    assert (weights.w2_bias == 0).all()


@pytest.mark.parametrize("trainable", [True, False])
def test_fresh_experts_leave_nothing_in_an_empty_slot(trainable):
    """New experts leave zeros in an empty slot, because kernels that loop over all slots read it."""
    weights = ExpertWeights(shape(), ExpertMap.from_ranks([[4, -1, 0, 1, 2, 3]], 5), trainable=trainable)
    for tensor in weights.stored_tensors().values():
        tensor.detach().fill_(torch.nan)
    weights.reset_parameters()
    for tensor in weights.stored_tensors().values():
        assert not tensor[1].any()
        assert tensor.isfinite().all()


@pytest.mark.parametrize("apart", [False, True], ids=["in slots", "apart"])
@pytest.mark.parametrize("learns", ["all", "one", "none"])
def test_weights_are_trained_while_any_parameter_learns(learns, apart):
    """Also where their parameters are no views of slots, as before FSDP2 cuts them."""
    weights = filled_weights(shape(), ExpertMap.linear(5, 1))
    if apart:
        weights.unstack()
    weights.requires_grad_(learns == "all")
    if learns == "one":
        weights.get_submodule("3").w2.requires_grad_(True)
    assert weights.any_requires_grad is (learns != "none")
