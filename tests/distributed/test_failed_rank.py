"""An exception on one rank within a layer's call: its peers raise RankFailed, which names it, now and in later
calls."""

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ep_moe import (
    Activation,
    EPContext,
    EPLBConfig,
    ExpertBalancer,
    InputError,
    MoEConfig,
    MoELayer,
    OutOfMemory,
    PeerTimeout,
)
from ep_moe.errors import RankFailed
from ep_moe.testing import distributed, rank_device
from ep_moe.training import clip_grad_norm_, sync_gradients
from tests.fixtures.distributed_cases import check_call, gather_from_all_ranks, same_error
from tests.fixtures.helpers import fill
from tests.fixtures.planted_errors import FULL, plant, raises_once

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2, activation=Activation.RELU2)
DEADLINE_S = 2.0
ODD = 1
# the default transport on GPUs has kernels that keep waiting for the peer that left the call
WAITS = {"all2all": "allgather"}


def heard(layer, x):
    """Call the layer, twice on a GPU.

    There the host does not wait for the device, and learns of a peer's failure at its next step.
    """
    for _ in range(1 if x.device.type == "cpu" else 2):
        y = layer(x)
    return y


def said(call):
    try:
        call()
        return "nothing", ""
    except Exception as error:
        return type(error).__name__, str(error)


@distributed(2, 4, deadline_s=40)
@pytest.mark.parametrize("where", ["router", "shared experts", "experts", "pre-hook", "placement"])
def test_what_leaves_a_call_is_raised_on_all_ranks(where, world_size):
    config = MoEConfig(
        hidden_size=16, intermediate_size=16, num_experts=8, top_k=2, activation=Activation.RELU2,
        shared_intermediate_size=16,
    )  # fmt: skip
    context = EPContext.from_groups(device=rank_device(), deadline_s=DEADLINE_S)
    layer = fill(MoELayer(config, context, **WAITS, name="block"))
    x = torch.ones(4, 16, device=context.device)
    layer(x)
    gather_from_all_ranks("")  # a slow rank would hear of the next call's failure in this one
    odd = dist.get_rank() == ODD
    if odd:
        plant(layer, where, ValueError("no such thing"))
    start = time.monotonic()
    kind, text = said(lambda: heard(layer, x))
    assert time.monotonic() - start < DEADLINE_S + 4
    assert kind == ("ValueError" if odd else "RankFailed")
    sentence = f"rank {ODD} raised ValueError in a call of block: no such thing (it was last seen "
    assert odd or text.startswith(sentence), text
    with pytest.raises(RankFailed) as again:
        layer(x)
    with pytest.raises(RankFailed) as another:
        MoELayer(config, context)
    every = gather_from_all_ranks(str(again.value))
    assert every == [str(another.value)] * world_size
    assert every[0].startswith(sentence)
    if not odd:
        assert text == every[0]
    context.flight_recorder.close()


@distributed(2, deadline_s=40)
def test_the_rank_itself_is_told_by_a_note(world_size):
    context = EPContext.from_groups(device=rank_device(), deadline_s=DEADLINE_S)
    layer = fill(MoELayer(CONFIG, context, **WAITS))
    if dist.get_rank() == ODD:
        plant(layer, "experts", ValueError("no such thing"))
        with pytest.raises(ValueError, match="no such thing") as caught:
            layer(torch.ones(4, 16, device=context.device))
        assert "the EPContext cannot be used again on any rank" in caught.value.__notes__[0]
    else:
        with pytest.raises(RankFailed):
            heard(layer, torch.ones(4, 16, device=context.device))


@distributed(2, deadline_s=40)
@pytest.mark.parametrize(
    "planted", [torch.OutOfMemoryError(FULL), RuntimeError("NCCL error: Cuda failure 'out of memory'")]
)
def test_memory_that_is_not_there_is_named_on_all_ranks(planted, world_size):
    context = EPContext.from_groups(device=rank_device(), deadline_s=DEADLINE_S)
    layer = fill(MoELayer(CONFIG, context, **WAITS, name="block"))
    x = torch.ones(4, 16, device=context.device)
    layer(x)
    if dist.get_rank() == ODD:
        plant(layer, "experts", planted)
    with pytest.raises(torch.OutOfMemoryError) as first:
        heard(layer, x)
    text = same_error(OutOfMemory, lambda: layer(x))
    assert str(first.value) == text
    where = gather_from_all_ranks(str(x.device))[ODD]
    assert text.startswith(
        f"rank {ODD} ran out of memory on {where} in a call of block (it was last seen finished dispatch"
    )
    assert "total capacity" not in text
    for remedy in ("max_tokens", "chunk_rows", "EPContext.plan()"):
        assert remedy in text
    context.flight_recorder.close()


@distributed(2, deadline_s=40)
def test_a_rank_that_goes_on_does_not_meet_another_call(world_size):
    """A rank whose caller swallows the exception cannot go on: its next calls raise too.

    It would be one call out of step with its peers.
    """
    context = EPContext.from_groups(device=rank_device(), deadline_s=DEADLINE_S)
    layer = fill(MoELayer(CONFIG, context))
    if dist.get_rank() == ODD:
        plant(layer, "router", ValueError("no such thing"))
    found = [said(lambda: heard(layer, torch.ones(4, 16, device=context.device)))[0] for _ in range(3)]
    assert found[1:] == ["RankFailed"] * 2
    assert found[0] == ("ValueError" if dist.get_rank() == ODD else "RankFailed")
    context.flight_recorder.close()


@distributed(2, deadline_s=40)
@pytest.mark.parametrize("where", ["router", "shared experts"])
def test_an_error_of_ours_from_a_users_module_is_that_ranks_alone(where, world_size):
    """An ep_moe error class raised by a user's module counts as a failure of that rank alone.

    Errors that ep_moe raises itself are raised on all ranks; those of user code are not.
    """
    config = dataclasses.replace(CONFIG, shared_intermediate_size=16)
    context = EPContext.from_groups(device=rank_device(), deadline_s=DEADLINE_S)
    layer = fill(MoELayer(config, context, **WAITS, name="block"))
    odd = dist.get_rank() == ODD
    if odd:
        plant(layer, where, InputError("the user's own"))
    x = torch.ones(4, 16, device=context.device)
    found = [said(lambda: heard(layer, x)) for _ in range(3)]
    assert [kind for kind, _ in found] == ["InputError" if odd else "RankFailed", "RankFailed", "RankFailed"]
    assert gather_from_all_ranks(found[1:]) == [found[1:]] * world_size
    context.flight_recorder.close()


@distributed(2, deadline_s=40)
def test_whatever_is_called_after_it_raises_the_same(world_size):
    context = EPContext.from_groups(device=rank_device(), deadline_s=DEADLINE_S)
    layer, other = fill(MoELayer(CONFIG, context, name="block")), fill(MoELayer(CONFIG, context, name="other"))
    for one in (layer, other):
        one.expert_weights.requires_grad_(False)
    balancer = ExpertBalancer([layer, other], context, EPLBConfig(interval=100, window=100))
    x = torch.ones(4, 16, device=context.device)
    plant(layer, "router", ValueError("no such thing"))  # on both ranks
    assert said(lambda: layer(x))[0] == "ValueError"
    calls = {
        "the layer": lambda: layer(x),
        "another layer": lambda: other(x),
        "balancer": balancer.step,
        "sync_gradients": lambda: sync_gradients(layer, context),
        "clip_grad_norm_": lambda: clip_grad_norm_(layer, context, 1.0),
        "stats": layer.stats,
        "state": lambda: MoELayer(CONFIG, context),
    }
    found = {what: said(call) for what, call in calls.items()}
    assert {kind for kind, _ in found.values()} == {"RankFailed"}, found
    assert len({text for own in gather_from_all_ranks([text for _, text in found.values()]) for text in own}) == 1
    context.destroy()


@distributed(2)
def test_a_hook_behind_the_call_leaves_the_ranks_in_step(world_size):
    with EPContext.from_groups(device=rank_device(), deadline_s=10) as context:
        layer = fill(MoELayer(CONFIG, context))
        if dist.get_rank() == ODD:
            layer.register_forward_hook(raises_once(ValueError("no such thing")))
        kind, _ = said(lambda: layer(torch.ones(4, 16, device=context.device)))
        assert kind == ("ValueError" if dist.get_rank() == ODD else "nothing")
        check_call(layer, context)


@distributed(2)
def test_a_recomputation_that_ends_early_breaks_nothing(world_size):
    """Activation checkpointing works, which stops the recomputation by an exception within the layer."""
    with EPContext.from_groups(device=rank_device(), deadline_s=10) as context:
        layer = fill(MoELayer(CONFIG, context, experts="reference"))
        for _ in range(2):
            x = torch.ones(4, 16, device=context.device, requires_grad=True)
            checkpoint(lambda x: layer(x) * 2, x, use_reentrant=False).sum().backward()
            assert x.grad is not None
        check_call(layer, context)


@distributed(2, deadline_s=40)
def test_after_a_lost_peer_the_first_verdict_is_raised(world_size):
    context = EPContext.from_groups(device=rank_device(), deadline_s=DEADLINE_S)
    layer = fill(MoELayer(CONFIG, context, name="block"))
    x = torch.ones(4, 16, device=context.device)
    layer(x)
    if dist.get_rank() == ODD:
        time.sleep(DEADLINE_S + 3)
        return
    with pytest.raises(PeerTimeout, match="Rank 1 is alive but behind") as first:
        heard(layer, x)
    for use in (lambda: layer(x), lambda: MoELayer(CONFIG, context), lambda: layer.forward_routed(x, None)):
        with pytest.raises(PeerTimeout) as again:
            use()
        assert str(again.value) == str(first.value)
