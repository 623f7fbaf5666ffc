"""Ranks that run different backward passes, or different calls after them, are named in one error."""

import functools

import pytest
import torch.distributed as dist

from ep_moe import EPContext, InputError, MoELayer, training
from ep_moe.execution import rank_comparison
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import same_error
from tests.fixtures.gradient_cases import FLOAT, P
from tests.fixtures.helpers import fill, integer_rows


@distributed(2)
def test_ranks_with_other_numbers_of_micro_batches_are_named(world_size):
    """Ranks with different numbers of micro-batches are named in the error.

    One averages gradients while the other is in a layer's call. gloo would end the process over sizes that differ.
    """
    if rank_device().type != "cpu":
        pytest.skip("on GPUs the comparison would wait for the device")
    rank = dist.get_rank()
    with EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=20) as context:
        layer, x = fill(MoELayer(FLOAT, context)), integer_rows(3, 16, rank)
        for after in (training.sync_gradients, functools.partial(training.clip_grad_norm_, max_norm=1.0)):
            layer(x).sum().backward()
            training.sync_gradients(layer, context)

            def longer_on_one(after=after):
                if rank:
                    layer(x).sum().backward()
                after(layer, context)

            text = same_error(InputError, longer_on_one)
            assert "rank 0 is in 'sync_gradients', rank 1 in 'moe0'" in text.replace(
                "clip_grad_norm_", "sync_gradients"
            )


@distributed(2)
@pytest.mark.parametrize("ep", [1, 2])
def test_ranks_in_the_backward_of_different_layers_are_named(ep, world_size):
    """A model may skip a layer on some ranks.

    With ep < dp forward exchanges nothing, and the sum over EP groups would add gradients of two layers.
    """
    if rank_device().type != "cpu":
        pytest.skip("on GPUs the comparison would wait for the device")
    with EPContext.from_groups(P(dp=2, ep=ep), device=rank_device(), deadline_s=20) as context:
        layers, x = [MoELayer(FLOAT, context) for _ in range(2)], integer_rows(3, 16, dist.get_rank()).to(rank_device())
        losses = [layer(x).sum() for layer in layers]
        text = same_error(InputError, losses[dist.get_rank()].backward)
        assert "rank 0 is in 'the backward of moe0', rank 1 in 'the backward of moe1'" in text


@distributed(2)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_norm": 0.5}, "clip_grad_norm_ got max_norm=1.0 on rank 0, and max_norm=0.5 on rank 1"),
        ({"max_norm": -1}, "clip_grad_norm_ got max_norm=1.0 on rank 0, and max_norm=-1.0 on rank 1"),
        ({"norm_type": 1}, "clip_grad_norm_ got norm_type=2.0 on rank 0, and norm_type=1.0 on rank 1"),
        ({"norm_type": "inf"}, "clip_grad_norm_ got norm_type=2.0 on rank 0, and norm_type='inf' on rank 1"),
    ],
)
def test_ranks_that_clip_otherwise_are_named(given, words, world_size):
    """Ranks that pass different arguments to `clip_grad_norm_` are named in the error.

    They would train different models, or one would raise while its peer waits.
    """
    if rank_device().type != "cpu":
        pytest.skip("on GPUs the comparison would wait for the device")
    with EPContext.from_groups(P(dp=2), device=rank_device(), deadline_s=20) as context:
        layer = fill(MoELayer(FLOAT, context))
        layer(integer_rows(3, 16, dist.get_rank())).sum().backward()
        own = {"max_norm": 1.0} | (given if dist.get_rank() else {})
        assert words in same_error(InputError, lambda: training.clip_grad_norm_(layer, context, **own))
        assert training.clip_grad_norm_(layer, context, 1 if dist.get_rank() else 1.0).isfinite()


@distributed(2)
@pytest.mark.parametrize("first", [True, False])
def test_gpus_in_the_backward_of_different_layers_are_named(first, world_size, monkeypatch):
    """GPUs compare the first sum of each layer on the host, and the order of sums in later backwards.

    They compare nothing in the third sum. The fourth names the ranks.
    """
    monkeypatch.setattr(rank_comparison, "meets_before_sums", lambda device: False)
    with EPContext.from_groups(P(dp=2, ep=1), device=rank_device(), deadline_s=20) as context:
        layers, x = [MoELayer(FLOAT, context) for _ in range(2)], integer_rows(3, 16, dist.get_rank()).to(rank_device())
        other = dist.get_rank()

        def backward(odd):
            losses = [layer(x).sum() for layer in layers]
            for at in range(2):
                losses[at ^ odd].backward()

        if first:
            text = same_error(InputError, lambda: backward(other))
            assert "rank 0 is in 'the backward of moe0', rank 1 in 'the backward of moe1'" in text
        else:
            for odd in (0, 0, other):
                backward(odd)
            text = same_error(InputError, lambda: backward(0))
            assert text.startswith("the backward of moe0: the ranks run backward of different calls")
        backward(0)
