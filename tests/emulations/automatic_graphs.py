"""Repeated calls without a GPU: a driver that records the arguments of kernels, and emulated graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.all2all.nvlink_p2p import dispatcher
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.errors import BackendUnavailable
from ep_moe.execution import graphs
from ep_moe.experts.hopper.experts import Bf16TritonExperts
from ep_moe.experts.hopper.experts_4bit import W4A16TritonExperts
from ep_moe.experts.hopper.experts_fp8 import (
    Fp8BlockTritonExperts,
    Fp8ChannelTritonExperts,
    Fp8DynamicTritonExperts,
    Fp8TensorTritonExperts,
)
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.groups import RankGroups
from ep_moe.parallel.layout import RankLayout
from ep_moe.placement.placement import Placement
from ep_moe.types import Routing
from tests.fixtures.launches import Driver

CONFIG = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2)
MOST = 3  # the token limit
CPU = torch.device("cpu")


def make_memory(rank_group, device, size: int) -> SimpleNamespace:
    local = torch.zeros(size, dtype=torch.uint8)
    return SimpleNamespace(local=local, peers=[local], addresses=torch.tensor([local.data_ptr()]))


class Allocations(TorchDispatchMode):
    """Notice operations whose result lies in memory that was not among their arguments."""

    seen = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        found = {t.untyped_storage().data_ptr() for t in tree_leaves(out) if isinstance(t, Tensor)}
        self.seen = self.seen or not found <= given
        return out


class Recording:
    """Stand in for a `Recorder` and its graphs. `recorded` counts the recordings."""

    handle, recorded = 0, 0
    unsupported_reason = staticmethod(lambda device: None)

    def __init__(self, made: Driver) -> None:
        self.driver = made

    def for_current_stream(self, made, device, workspaces) -> Recording:
        return self

    def graph_of(self, launch, given) -> Callable[..., None]:
        driver, self.recorded = self.driver, self.recorded + 1
        before = driver.found, driver.functions
        driver.found, driver.functions = [], []
        with Allocations() as allocations:
            launch()
        if allocations.seen:
            raise BackendUnavailable("it allocates")
        made = list(zip(driver.found, driver.functions, strict=True))
        driver.found, driver.functions = before
        places = [range(len(made))[place] for place in given]
        for place, arguments in zip(places, given.values(), strict=True):
            assert changed(made[place][0], arguments) == made[place][0], "what was recorded is what was given"

        def launch_again(given, stream) -> None:
            brought = dict(zip(places, given, strict=True))
            for number, (found, function) in enumerate(made):
                driver.found.append(changed(found, brought.get(number, ())))
                driver.functions.append(function)

        return launch_again


def changed(found: tuple, given: list[int] | tuple[int, ...]) -> tuple:
    """Return a launch with other first arguments. None in a launch is not an argument of the kernel."""
    places = [place for place, value in enumerate(found[2:], 2) if value is not None][: len(given)]
    other = list(found)
    for place, value in zip(places, given, strict=True):
        other[place] = value
    return tuple(other)


@pytest.fixture
def driver(monkeypatch):
    """Replace a GPU and its driver. All tensors are on the CPU, and nothing is computed."""
    from triton.runtime import driver

    made, tables = Driver(), Placement._tables

    def unpinned(self, expert_map):
        with mock.patch.object(torch.Tensor, "is_cuda", False):
            return tables(self, expert_map)

    monkeypatch.setattr(driver, "_active", made)
    monkeypatch.setattr(graphs, "Recorder", Recording(made))
    monkeypatch.setattr(Placement, "_tables", unpinned)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(dispatcher, "make_memory", make_memory)
    monkeypatch.setattr(NVLinkP2PDispatcher, "unsupported_platform", classmethod(lambda cls, layout: None))
    anywhere = {"devices": frozenset({"cpu"})}
    able = dataclasses.replace(NVLinkP2PDispatcher.capabilities, **anywhere)
    monkeypatch.setattr(NVLinkP2PDispatcher, "capabilities", able)
    anywhere |= {"min_compute_capability": None, "max_compute_capability": None}
    for kernel in (
        Bf16TritonExperts,
        Fp8BlockTritonExperts,
        Fp8ChannelTritonExperts,
        Fp8DynamicTritonExperts,
        Fp8TensorTritonExperts,
        W4A16TritonExperts,
    ):
        able = dataclasses.replace(kernel.capabilities, **anywhere)
        monkeypatch.setattr(kernel, "capabilities", able)
        monkeypatch.setattr(kernel, "available", classmethod(lambda cls: None))
    return made


@pytest.fixture
def context():
    layout, flight_recorder = RankLayout(world=1, rank=0), FlightRecorder()
    rank_groups = RankGroups(layout, flight_recorder, CPU)
    with EPContext(layout, CPU, None, rank_groups, flight_recorder, max_tokens=MOST) as made:
        yield made


def built(context: EPContext, config: MoEConfig = CONFIG, **asked) -> MoELayer:
    asked = {"all2all": "nvlink_p2p", "experts": "bf16_triton", "dtype": torch.bfloat16} | asked
    return MoELayer(config, context, **asked)


@pytest.fixture
def layer(driver, context):
    """Return a layer whose calls were noted, so that the next one is recorded."""
    made = built(context)
    for _ in range(2):
        forward(made, *given(1))
    assert len(made._graphs) == 1
    return made


def given(tokens: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, CONFIG.hidden_size, generator=generator).bfloat16()
    ids = torch.rand(tokens, CONFIG.num_experts, generator=generator).topk(CONFIG.top_k).indices.to(dtype)
    return x, Routing(ids, torch.rand(ids.shape, generator=generator))


@torch.no_grad()
def forward(layer: MoELayer, x: Tensor, routing: Routing | None) -> Tensor:
    return layer(x) if routing is None else layer.forward_routed(x, routing)


def repeats(layer: MoELayer, x: Tensor, routing: Routing | None) -> bool:
    """Return whether such a call is replayed."""
    with mock.patch.object(MoELayer, "run", autospec=True, side_effect=MoELayer.run) as run:
        out = forward(layer, x, routing)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    return not run.called


def every_other(tensor: Tensor) -> Tensor:
    """Return the same numbers with a stride of two elements."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def shifted(tensor: Tensor) -> Tensor:
    """Return the same numbers, not aligned to 16 bytes."""
    room = torch.zeros(tensor.numel() + 16, dtype=tensor.dtype)
    start = (-room.data_ptr() % 16) // tensor.itemsize + 1
    return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
