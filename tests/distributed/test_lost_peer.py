"""A peer that dies, hangs or leaves the call: the others get a PeerTimeout in time that names it and the phase."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_moe import (
    Activation,
    EPContext,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    PeerTimeout,
)
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import check_call
from tests.fixtures.helpers import fill

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2, activation=Activation.RELU2)
DEADLINE_S = 2.0  # heartbeats then come every 0.25 s; a loaded host delays them
LOST = 1
LAYOUTS = {"dp=4": ParallelConfig(dp=4), "dp=2 tp=2 etp=2": ParallelConfig(dp=2, tp=2, ep=2, etp=2)}


def die() -> None:
    os._exit(7)


def hang() -> None:
    """Block forever. The harness ends expected-dead ranks once the others are through."""
    threading.Event().wait()


def survivors_raise(call: Callable[[], Any], sentence: str) -> None:
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=sentence):
        call()
    assert time.monotonic() - start < DEADLINE_S + 4


def lose(parallel: ParallelConfig, all2all: str, stage: str, how: Callable[[], None]) -> None:
    """Make one good call, then one in which rank LOST dies or hangs at `stage`."""
    context = EPContext.from_groups(parallel, device=rank_device(), deadline_s=DEADLINE_S)
    layer = fill(MoELayer(CONFIG, context, all2all=all2all, name="block"))
    x = torch.ones(4, 16, device=context.device)
    layer(x)
    if dist.get_rank() == LOST:
        if stage == "call":
            how()
        elif stage == "router":
            layer.router.register_forward_pre_hook(lambda *_: how())
        elif stage == "experts":
            capabilities = layer.experts.capabilities
            layer.experts = lambda received, out: how()
            layer.experts.capabilities = capabilities
        elif stage == "combine":
            layer._dispatcher()._combine = lambda *_: how()
        layer(x)
    # where the EP group is whole, the first to miss the lost rank may be its etp peer
    phase = {"call": "enter" if parallel.tp > 1 else "dispatch", "router": "dispatch"}.get(stage, "combine")
    later = "" if parallel.etp == 1 or stage == "call" else "|etp reduce"
    verdict = "shows no sign of life" if how is die else "is alive but behind"
    sentence = (
        rf"^rank \d lost its peers in ({phase}{later})( wait)? of block \(step \d+\): .*"
        rf"Rank {LOST} {verdict}.*Raise deadline_s \(now 2 s\) if it was only slow\.$"
    )
    survivors_raise(lambda: layer(x), sentence)


@distributed(4, deadline_s=20, expect_dead=[LOST])
@pytest.mark.parametrize(
    ("layout", "all2all", "stage"),
    [
        ("dp=4", "torch_a2a", "call"),
        ("dp=4", "allgather", "experts"),
        ("dp=2 tp=2 etp=2", "allgather", "router"),
        ("dp=2 tp=2 etp=2", "torch_a2a", "combine"),
    ],
)
def test_a_rank_dies(layout, all2all, stage, world_size):
    lose(LAYOUTS[layout], all2all, stage, die)


@distributed(2, deadline_s=40, expect_dead=[LOST])
def test_the_last_step_of_a_rank_that_dies_is_named(world_size):
    """The error names the last step of a dead rank exactly.

    Heartbeats come once a second here, and all calls fall between two of them.
    """
    context = EPContext.from_groups(device=rank_device(), deadline_s=8)
    layer = fill(MoELayer(CONFIG, context, all2all="torch_a2a", name="block"))
    x = torch.ones(4, 16, device=context.device)
    for _ in range(3):
        layer(x)
    if dist.get_rank() == LOST:
        compute = layer.experts.compute
        layer.experts.compute = lambda *args: (die(), compute(*args))
    last = context.flight_recorder.newest.number + 2  # dispatch and its wait are left, then experts run
    with pytest.raises(PeerTimeout) as caught:
        layer(x)
    text = str(caught.value)
    assert f"Rank {LOST} shows no sign of life, last seen finished dispatch wait of block (step {last})." in text, text


@distributed(4, deadline_s=20, expect_dead=[LOST])
@pytest.mark.parametrize(("layout", "stage"), [("dp=4", "call"), ("dp=2 tp=2 etp=2", "experts")])
def test_a_rank_hangs(layout, stage, world_size):
    lose(LAYOUTS[layout], "torch_a2a", stage, hang)


@distributed(4, deadline_s=20, expect_dead=[LOST])
def test_a_rank_skips_backward(world_size):
    context = EPContext.from_groups(device=rank_device(), deadline_s=DEADLINE_S)
    layer = fill(MoELayer(CONFIG, context, name="block"))
    y = layer(torch.ones(4, 16, device=context.device, requires_grad=True))
    if dist.get_rank() == LOST:
        hang()
    sentence = rf"lost its peers in backward by (all|reduce)_.*Rank {LOST} is alive but behind"
    survivors_raise(lambda: y.sum().backward(), sentence)


@distributed(4, deadline_s=20, expect_dead=[LOST])
def test_a_rank_makes_no_layer_and_no_context(world_size):
    device = rank_device()
    context = EPContext.from_groups(device=device, deadline_s=0.9)
    if dist.get_rank() == LOST:
        hang()
    for call, what in (
        (lambda: MoELayer(CONFIG, context, name="block"), "MoELayer block"),
        (lambda: EPContext.from_groups(device=device, deadline_s=0.9), "EPContext"),
    ):
        survivors_raise(call, rf"^{what}: rank 1 did not arrive within 0\.9 s; all ranks must make the same calls")


@distributed(2)
def test_a_slow_rank_is_waited_for(world_size):
    """A rank slower than a heartbeat and faster than the deadline is waited for."""
    with EPContext.from_groups(device=rank_device(), deadline_s=10) as context:
        layer = fill(MoELayer(CONFIG, context))
        if dist.get_rank() == LOST:
            time.sleep(1)
        check_call(layer, context)
