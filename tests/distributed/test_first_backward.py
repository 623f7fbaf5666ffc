"""Code that writes or reads expert gradients beside the layer before the first `sync_gradients` divides them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from ep_moe import EPContext, ParallelConfig, training
from ep_moe.testing import distributed, rank_device
from tests.fixtures.training_model import batch, loss_of, made


def penalty(model: nn.Module) -> torch.Tensor:
    return sum((0.1 * parameter.square().sum() for parameter in model.parameters()), torch.zeros(()))


def nothing(model: nn.Module) -> torch.Tensor:
    return torch.zeros(())


def step_in_backward(model: nn.Module) -> torch.Tensor:
    for parameter in training.expert_parameters(model):
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    return torch.zeros(())


@distributed(2, deadline_s=60)
@pytest.mark.parametrize("beside", [nothing, penalty, step_in_backward])
@pytest.mark.parametrize("parallel", [ParallelConfig(dp=2), ParallelConfig(dp=2, ep=1)])
def test_what_comes_before_the_first_division_is_warned_of(beside, parallel, world_size):
    with EPContext.from_groups(parallel, device=rank_device(), deadline_s=30) as context:
        own = [batch(step).chunk(2)[context.layout.dp_rank].to(context.device) for step in range(2)]
        for first in (False, True):
            model = made(context)
            if first:
                training.sync_gradients(model, context)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss = loss_of(model, own[0]) + loss_of(model, own[1])  # two calls of each layer
                (loss + beside(model).to(context.device)).backward()
                loss_of(model, own[1]).backward()
                training.sync_gradients(model, context)
            wanted = 2 * (beside is not nothing and not first)  # one for each layer
            assert sum("wrote or read them" in str(one.message) for one in caught) == wanted


@distributed(2, deadline_s=60)
def test_a_penalty_behind_an_early_sync_is_that_of_one_process(world_size):
    """A weight penalty after an early `sync_gradients` has the gradient of one process.

    Its gradient is equal on all ranks, so the mean equals it.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        found = []
        for weight in (0, 1):
            model = made(context)
            training.sync_gradients(model, context)
            model.zero_grad()
            own = batch(0).chunk(2)[context.layout.dp_rank].to(context.device)
            (loss_of(model, own) + weight * penalty(model).to(context.device)).backward()
            training.sync_gradients(model, context)
            found.append([parameter.grad for parameter in model.parameters()])
        for plain, penalised, parameter in zip(*found, model.parameters(), strict=True):
            torch.testing.assert_close(penalised, plain + 0.2 * parameter.detach())
