"""Test when a rank's gradients are complete, and when ranks sum them."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ep_moe import ConfigError, ExpertMap
from ep_moe.weights.gradient_sum import GradientSum

ONE, TWICE = ExpertMap.linear(4, 1), ExpertMap.from_ranks([[0, 1, 2, 3, 0]], 4, allow_duplicates=True)


def made(ep=1, etp=1, replicas=1, expert_map=ONE, names=("w13", "w2")):
    weights = SimpleNamespace(expert_map=expert_map, names=names, num_slots=4, gradients=list)
    return GradientSum(weights, *(SimpleNamespace(size=size) for size in (ep, etp, replicas)))


@pytest.mark.parametrize(
    ("how", "is_identity", "is_local"),
    [
        ({}, True, True),
        ({"ep": 2}, False, True),
        ({"etp": 2}, False, True),
        (
            {"etp": 2, "names": ("w13", "w2", "w2_bias")},
            False,
            False,
        ),  # each etp rank has the bias
        ({"replicas": 2}, False, False),
        ({"expert_map": TWICE}, False, False),
    ],
)
def test_where_sums_are_due(how, is_identity, is_local):
    found = made(**how)
    assert found.is_identity is is_identity
    assert found.is_local is is_local


def test_a_divisor_is_one_more_step():
    found = made()
    found.divide(2)
    assert not found.is_identity
    assert found.is_local


def test_gradients_that_are_here_follow_the_divisor():
    found, gradient = made(), torch.tensor([12.0])
    found._weights.gradients = lambda: [gradient]
    seen = []
    for ranks in (2, 4, 1):
        found.divide(ranks)
        seen.append(gradient.item())
    assert seen == [6.0, 3.0, 12.0]


def test_gradients_that_a_wrapper_divides_stay():
    """Gradients that a wrapper has divided stay. It divided them in backward, by its own divisor."""
    found, gradient = made(), torch.tensor([12.0])
    found._weights.gradients = lambda: [gradient]
    found.wrapper_divisor = lambda: 3.0
    found.divide(4)
    assert gradient.item() == 12.0
    assert found.divisor == 3.0


@pytest.mark.parametrize(("sharded", "wanted"), [(False, 3.0), (True, 3.0)])
def test_a_gradient_is_divided_by_each_rank_once(sharded, wanted):
    """Each rank divides a gradient once.

    The two EP groups have gradients of 6 and 6, for tokens of 4 ranks. FSDP averages over the groups later.
    """
    found = made(replicas=2)
    step = SimpleNamespace(step=lambda *_, **__: nullcontext())
    found.replicas = SimpleNamespace(size=2, flight_recorder=step, all_reduce=lambda gradient: gradient.mul_(2))
    found.divide(4)
    found.sharded = sharded
    (total,) = found({"w13": torch.tensor([6.0])}).values()
    assert total.item() == wanted


@pytest.mark.parametrize(
    ("ranks", "refused"),
    [([[0, 1, 2, 3, 0], []], True), ([[0, 1, 2, 3], []], False), ([[0, 1, 2, 3], [0]], False)],
)
def test_a_rank_without_an_expert_sums_no_copies(ranks, refused):
    found = made(ep=2, expert_map=ExpertMap.from_ranks(ranks, 4, allow_duplicates=True))
    words = "expert_map gives rank 1 of the EP group no expert, and has replicas"
    with pytest.raises(ConfigError, match=words) if refused else nullcontext():
        found.check()


def test_copies_of_an_expert_get_the_sum_over_all_ep_groups():
    """Each slot of a replicated expert gets the sum over its slots and the EP groups. Here both groups are equal."""
    found = made(replicas=2, expert_map=TWICE)
    step = SimpleNamespace(step=lambda *_, **__: nullcontext())
    found.replicas = SimpleNamespace(size=2, flight_recorder=step, all_reduce=lambda gradient: gradient.mul_(2))
    found._weights.slots_of_expert = {0: (0, 4), 1: (1,), 2: (2,), 3: (3,)}
    summed = found({"w13": torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])})
    assert summed["w13"].flatten().tolist() == [12.0, 4.0, 6.0, 8.0, 12.0]


def test_a_rank_without_slots_enters_no_sum():
    found, nothing = made(replicas=2, expert_map=TWICE), {"w13": torch.empty(0, 1)}
    found._weights.num_slots = 0
    assert found(nothing) is nothing
