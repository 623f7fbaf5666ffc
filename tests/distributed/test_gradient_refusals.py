"""Backward passes that a layer refuses: second-order, batched and forward-mode gradients."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from ep_moe import EPContext, ExpertsOptions, InputError, MoELayer
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import same_error
from tests.fixtures.gradient_cases import FLOAT, LAYOUTS, P, data, make
from tests.fixtures.helpers import fill, integer_rows
from tests.fixtures.p2p_on_cpu import p2p_on_cpu


@distributed(2)
@pytest.mark.parametrize("of", ["x", "parameters"])
def test_gradients_of_gradients_are_refused(of, world_size):
    """Double backward is refused.

    Second derivatives would lack what the backward of a collective or of a sum contributes.
    """
    for parallel in LAYOUTS[2]:
        with EPContext.from_groups(parallel, device=rank_device(), deadline_s=30) as context:
            if of == "x" and context.layout.lockstep == 1:
                continue  # no collective for rows
            if of == "parameters" and context.layout.etp > 1 and torch.__version__ < "2.13":
                continue  # before torch 2.13, `DTensor.to_local` silently has no second derivative
            layer = make(FLOAT, context, "torch_a2a")
            x = data(FLOAT, dist.get_rank() // context.layout.tp, 4)[0].to(context.device)
            wanted = [x.requires_grad_()] if of == "x" else list(layer.expert_weights.parameters())
            for loss in (lambda y: y.square().sum(), torch.sum):
                with pytest.raises(InputError, match="second-order gradients"):
                    torch.autograd.grad(loss(layer(x)), wanted, create_graph=True)
            layer(x).sum().backward()


@distributed(2)
@pytest.mark.parametrize("who", ["all ranks", "rank 1"])
def test_a_batch_of_gradients_is_refused(who, world_size):
    """`is_grads_batched=True` is refused on all ranks, as no collective supports it.

    If only one rank asks for it, the others raise instead of waiting.
    """
    if who == "rank 1" and rank_device().type != "cpu":
        pytest.skip("on GPUs ranks exchange nothing ahead of a collective of backward")
    batched = who == "all ranks" or dist.get_rank() == 1
    for parallel in LAYOUTS[2]:
        with EPContext.from_groups(parallel, device=rank_device(), deadline_s=30) as context:
            apart = context.layout.tp > 1 and context.layout.ep == 1  # ranks do not compare ahead of a sum
            if context.layout.lockstep == 1 or (apart and who == "rank 1"):
                continue
            layer = make(FLOAT, context, "torch_a2a")
            x = data(FLOAT, dist.get_rank() // context.layout.tp, 4)[0].to(context.device).requires_grad_()

            def ask(layer=layer, x=x):
                y = layer(x)
                given = torch.ones(2, *y.shape, device=y.device) if batched else torch.ones_like(y)
                torch.autograd.grad(y, x, given, is_grads_batched=batched)

            assert "is_grads_batched=True" in same_error(InputError, ask)
            layer(x).sum().backward()


@distributed(2)
@pytest.mark.parametrize(("ep", "exact"), [(1, False), (2, False), (2, True)])
def test_a_batch_of_gradients_of_one_rank_is_refused_on_all(ep, exact, world_size):
    """With ep < dp ranks meet in the sum of the experts' gradients only."""
    if rank_device().type != "cpu":
        pytest.skip("on GPUs ranks exchange nothing ahead of a collective of backward")
    batched = dist.get_rank() == 1
    with EPContext.from_groups(P(dp=2, ep=ep), device=rank_device(), deadline_s=30) as context:
        config = dataclasses.replace(FLOAT, expert_bias=False) if exact else FLOAT
        layer = fill(MoELayer(config, context, options=ExpertsOptions(exact=exact)))
        x = integer_rows(3, 16, dist.get_rank()).requires_grad_()

        def ask():
            y = layer(x)
            given = torch.ones(2, *y.shape) if batched else torch.ones_like(y)
            torch.autograd.grad(y, [x, *layer.expert_weights.parameters()], given, is_grads_batched=batched)

        assert "is_grads_batched=True" in same_error(InputError, ask)
        layer(x).sum().backward()


@distributed(2)
def test_a_batch_of_gradients_is_refused_by_a_transport_with_a_backward_of_its_own(world_size):
    with p2p_on_cpu(), EPContext.from_groups(device=rank_device(), deadline_s=30, max_tokens=8) as context:
        layer = make(FLOAT, context, "nvlink_p2p")
        x = data(FLOAT, dist.get_rank(), 4)[0].to(context.device).requires_grad_()
        y = layer(x)
        given = torch.ones(2, *y.shape, device=y.device)
        assert "is_grads_batched=True" in same_error(
            InputError, lambda: torch.autograd.grad(y, x, given, is_grads_batched=True)
        )
        layer(x).sum().backward()


@distributed(2)
def test_forward_mode_is_refused(world_size):
    with EPContext.from_groups(device=rank_device(), deadline_s=30) as context:
        layer = make(FLOAT, context)
        x = data(FLOAT, dist.get_rank(), 4)[0].to(context.device)
        with forward_ad.dual_level(), pytest.raises(InputError, match="forward-mode AD"):
            layer(forward_ad.make_dual(x, x))
        layer(x)
