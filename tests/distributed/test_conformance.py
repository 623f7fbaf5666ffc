"""Every transport in the tree against the public contract. GPU transports also run on a CPU, over emulations."""

import dataclasses
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, ParallelConfig, Wire, registry
from ep_moe.all2all import deepep, flashinfer_nvlink, pplx
from ep_moe.all2all.base import Dispatcher, DispatchShape
from ep_moe.all2all.flashinfer_nvlink import FlashInferNVLinkDispatcher
from ep_moe.all2all.nvlink_p2p import dispatcher as nvlink_p2p
from ep_moe.parallel.rank_group import RankGroup, barrier
from ep_moe.quant.row_format import quantize_for_wire
from ep_moe.testing import check_dispatcher, distributed, rank_device
from ep_moe.testing.transport_case import (
    dispatch_shape,
    expected,
    identity,
    moved,
    routes,
    rows,
    same,
)
from ep_moe.types import PhysicalIds, PhysicalRouting
from tests.emulations.deepep import Buffer
from tests.emulations.flashinfer_nvlink import communication
from tests.emulations.peer_memory import make_memory
from tests.emulations.pplx import make_all2all

CAPABLE = {name: registry.load("dispatchers", name).capabilities for name in registry.built_in("dispatchers")}
OF_TORCH = [name for name, can in CAPABLE.items() if "cpu" in can.devices and can.max_ranks != 1]


def nvlink(shape: DispatchShape, rank_group: RankGroup) -> Dispatcher:
    """Build the transport over FlashInfer on GPUs, over its emulation on the CPU."""
    if rank_device().type == "cpu":
        flashinfer_nvlink.communication = communication
    return FlashInferNVLinkDispatcher(shape, rank_group)


FEW_WIRES = (Wire(dispatch="fp8_block"), Wire(combine="fp8"))  # rows with scales; rows rounded for combine


def wires(name: str, *, few: bool) -> list[Wire] | None:
    """Return the wire formats for `check_dispatcher`: a few that the transport supports, or None for all."""
    can = CAPABLE[name]
    here = [wire for wire in FEW_WIRES if wire.dispatch in can.dispatch_formats and wire.combine in can.combine_formats]
    return here if few and rank_device().type == "cpu" else None


@distributed(4)
@pytest.mark.parametrize("name", OF_TORCH)
def test_transports_of_torch(name, world_size):
    """Transports over torch collectives meet the contract.

    Hierarchical ones get few formats here; test_hierarchical checks all formats over several nodes.
    """
    few = name.startswith("hierarchical")
    check_dispatcher(registry.load("dispatchers", name), top_ks=(3,), wires=wires(name, few=few))


@distributed(2, 4)
def test_flashinfer_nvlink(world_size):
    if rank_device().type == "cuda" and (why := FlashInferNVLinkDispatcher.available()):
        pytest.skip(why)
    if rank_device().type == "cuda":
        check_dispatcher(nvlink)
    else:
        few = world_size == 2
        formats = wires("flashinfer_nvlink", few=few)
        check_dispatcher(nvlink, top_ks=(3,) if few else (1, 3), dtypes=(torch.bfloat16,), wires=formats)


def deepep_asking(shape: DispatchShape, rank_group: RankGroup, kind=deepep.DeepEPDispatcher) -> Dispatcher:
    if rank_device().type == "cpu":
        deepep.make_buffer = Buffer
    return kind(shape, rank_group)


def deepep_static(shape: DispatchShape, rank_group: RankGroup) -> Dispatcher:
    return deepep_asking(shape, rank_group, deepep.DeepEPStaticDispatcher)


@distributed(2, 4)
@pytest.mark.parametrize("make", [deepep_asking, deepep_static], ids=["deepep", "deepep_static"])
def test_deepep(make, world_size):
    if rank_device().type == "cuda" and (why := deepep.DeepEPDispatcher.available()):
        pytest.skip(why)
    check_dispatcher(make, top_ks=(3,))


def pplx_alone(shape: DispatchShape, rank_group: RankGroup) -> Dispatcher:
    if rank_device().type == "cpu":
        pplx.make_all2all = make_all2all
    return pplx.PplxDispatcher(shape, rank_group)


@distributed(2, 4)
def test_pplx(world_size):
    if rank_device().type == "cuda" and (why := pplx.PplxDispatcher.available()):
        pytest.skip(why)
    check_dispatcher(pplx_alone, top_ks=(3,), dtypes=(torch.bfloat16,))


def p2p(shape: DispatchShape, rank_group: RankGroup, kind=nvlink_p2p.NVLinkP2PDispatcher) -> Dispatcher:
    if rank_device().type == "cpu":
        nvlink_p2p.make_memory = make_memory
    return kind(shape, rank_group)


class ManyTokens(nvlink_p2p.NVLinkP2PDispatcher):
    """Send by kernels and flags, as calls of many tokens do."""

    low_latency_bytes = 0


class CopyEngines(nvlink_p2p.NVLinkP2PDispatcher):
    """Send by copy engines, as large calls do beside other work."""

    low_latency_bytes = copied_bytes = 0


# `packets`, `kernels` and `copies` run in all formats, dtypes and top-k, and buffers grow by bytes: rows with scales
# that are rounded in their write, and rows that are rounded on the way back.
FEW_FORMATS = dataclasses.replace(
    nvlink_p2p.NVLinkP2PDispatcher.capabilities,
    dispatch_formats=frozenset({"plain", "fp8_block"}),
    combine_formats=frozenset({"plain", "fp8"}),
)


class Growing(nvlink_p2p.NVLinkP2PDispatcher):
    """Start with room for 2 tokens, so that buffers grow."""

    least_room = 2
    capabilities = FEW_FORMATS


class GrowingCopies(CopyEngines):
    least_room = 2
    capabilities = FEW_FORMATS


def p2p_growing(shape: DispatchShape, rank_group: RankGroup, kind=Growing) -> Dispatcher:
    return p2p(dataclasses.replace(shape, max_tokens=None), rank_group, kind)


def p2p_growing_copies(shape: DispatchShape, rank_group: RankGroup) -> Dispatcher:
    return p2p_growing(shape, rank_group, GrowingCopies)


def p2p_many(shape: DispatchShape, rank_group: RankGroup) -> Dispatcher:
    return p2p(shape, rank_group, ManyTokens)


def p2p_copies(shape: DispatchShape, rank_group: RankGroup) -> Dispatcher:
    return p2p(shape, rank_group, CopyEngines)


@distributed(1, 2, 4)
@pytest.mark.parametrize(
    "make",
    [p2p, p2p_many, p2p_copies, p2p_growing, p2p_growing_copies],
    ids=["packets", "kernels", "copies", "growing", "growing by copies"],
)
def test_nvlink_p2p(make, world_size):
    """`nvlink_p2p` meets the contract for each way of sending.

    On a CPU, each way runs all formats on one number of ranks only. `packets` and `kernels` signal differently, so they
    also run all dtypes and top-k there.
    """
    if rank_device().type == "cuda" and (why := nvlink_p2p.NVLinkP2PDispatcher.available()):
        pytest.skip(why)
    on_cpu = rank_device().type == "cpu"
    if make in (p2p, p2p_many) and (not on_cpu or world_size == {p2p: 4, p2p_many: 2}[make]):
        check_dispatcher(make, top_ks=(1, 3))
    else:
        few = make in (p2p, p2p_many) or (make is p2p_copies and world_size != 4)
        formats = wires("nvlink_p2p", few=few)
        check_dispatcher(make, top_ks=(3,), dtypes=(torch.bfloat16,), wires=formats)


@distributed(4)
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (FlashInferNVLinkDispatcher, nvlink),
        (nvlink_p2p.NVLinkP2PDispatcher, p2p),
        (deepep.DeepEPStaticDispatcher, deepep_static),
        (pplx.PplxDispatcher, pplx_alone),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_groups_beside_each_other(kind, make, world_size):
    """Transports on all ranks and on pairs of them work while calls of both are in flight."""
    device, rank = rank_device(), dist.get_rank()
    if device.type == "cuda" and (why := kind.available()):
        pytest.skip(why)
    everyone, pairs = ParallelConfig(dp=4), ParallelConfig(dp=4, ep=2)
    with ExitStack() as stack:
        contexts = [stack.enter_context(EPContext.from_groups(sizes, device=device)) for sizes in (everyone, pairs)]
        made = [make(dispatch_shape(c.layout.ep, 3, torch.bfloat16), c.rank_groups["ep"]) for c in contexts]
        for turn in range(3):
            under_way = []
            for number, dispatcher in enumerate(made):
                seed = 100 * turn + 10 * number + rank
                x, routing = rows(seed, 5 + rank, torch.bfloat16), routes(seed, 5 + rank, dispatcher.rank_group.size, 3)
                received = dispatcher.dispatch(x.to(device), moved(routing, device))
                under_way.append((dispatcher, received, expected(x, routing)))
            for dispatcher, received, wanted in reversed(under_way) if turn % 2 else under_way:
                y = dispatcher.combine(identity(received, torch.bfloat16), received.handle)
                same(y, wanted, f"turn {turn}, {dispatcher.rank_group.size} ranks")
        barrier(device)
        for dispatcher in made:
            dispatcher.destroy()


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, in every other place."""
    room = tensor.new_zeros(*tensor.shape, 2)
    room[..., 0] = tensor
    return room[..., 0]


@distributed(2)
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (FlashInferNVLinkDispatcher, nvlink),
        (nvlink_p2p.NVLinkP2PDispatcher, p2p),
        (deepep.DeepEPDispatcher, deepep_asking),
        (pplx.PplxDispatcher, pplx_alone),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_tensors_that_lie_apart_travel_like_others(kind, make, world_size):
    """Libraries and kernels take one piece of memory for granted."""
    device, rank = rank_device(), dist.get_rank()
    if device.type == "cuda" and (why := kind.available()):
        pytest.skip(why)
    with EPContext.from_groups(device=device, deadline_s=20) as context:
        for wire in (Wire(), Wire(dispatch="fp8_block")):
            dispatcher = make(dispatch_shape(world_size, 3, torch.bfloat16, wire), context.rank_groups["ep"])
            x, routing = rows(rank, 5 + rank, torch.bfloat16, wire), routes(rank, 5 + rank, world_size, 3)
            travelling, scale = quantize_for_wire(x.to(device), wire)
            there = moved(routing, device)
            given = PhysicalRouting(PhysicalIds(apart(there.ids)), apart(there.weights))
            received = dispatcher.dispatch(apart(travelling), given, None if scale is None else apart(scale))
            y = dispatcher.combine(apart(identity(received, x.dtype)), received.handle)
            same(y, expected(x, routing), f"{wire.dispatch} in every other place")
            barrier(device)
            dispatcher.destroy()


# --- fixed buffers --------------------------------------------------------------------------------------------------


@distributed(2, set_device=True)
def test_fewer_tokens_at_most(world_size):
    rank, device = dist.get_rank(), rank_device()
    if device.type == "cuda" and (why := FlashInferNVLinkDispatcher.available()):
        pytest.skip(why)
    with EPContext.from_groups(device=device, deadline_s=20) as context:
        dispatcher = nvlink(dispatch_shape(world_size, 2, torch.bfloat16), context.rank_groups["ep"])
        x, routing = rows(rank, 3 + rank, torch.bfloat16), routes(rank, 3 + rank, world_size, 2)
        received = dispatcher.dispatch(x.to(device), moved(routing, device), max_tokens=5)
        assert len(received.x) == 5 * world_size
        y = dispatcher.combine(identity(received, x.dtype), received.handle)
        same(y, expected(x, routing), "bound of 5")
