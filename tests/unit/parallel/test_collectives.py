"""Test collectives in backward, without other processes."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ep_moe import InputError
from ep_moe.parallel.collectives import sum_gradients


@pytest.mark.parametrize("batched", [False, True])
def test_a_batch_of_gradients_is_not_summed_over_ranks(batched):
    recorder, summed = SimpleNamespace(step=lambda *_, **__: nullcontext()), []
    rank_group = SimpleNamespace(
        size=2, flight_recorder=recorder, all_reduce=lambda gradient: summed.append(gradient.mul_(2))
    )
    x = torch.ones(3, requires_grad=True)
    y = sum_gradients(x, rank_group)
    if batched:
        with pytest.raises(InputError, match=r"does not support batched gradients .* once for each output"):
            torch.autograd.grad(y, x, torch.ones(2, 3), is_grads_batched=True)
        assert summed == []
    else:
        assert torch.autograd.grad(y, x, torch.ones(3))[0].tolist() == [2.0, 2.0, 2.0]
