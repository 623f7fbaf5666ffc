"""Every transport in the tree against the public contract; those of GPUs on a CPU too, over an emulation of theirs."""

import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, ParallelConfig, Wire, registry
from ep_moe.all2all import deepep, flashinfer_nvlink, pplx
from ep_moe.all2all.base import Dispatcher, DispatchShape
from ep_moe.all2all.flashinfer_nvlink import FlashInferNVLinkDispatcher
from ep_moe.all2all.nvlink_p2p import dispatcher as nvlink_p2p
from ep_moe.all2all.torch_collectives import AllGatherDispatcher, LocalDispatcher, TorchAll2AllDispatcher
from ep_moe.parallel.rank_group import RankGroup, barrier
from ep_moe.quant.fp8 import round_blocks
from ep_moe.testing import check_dispatcher, distributed, rank_device
from ep_moe.testing.transport_case import (
    FP8_TENSOR,
    MAX_TOKENS,
    SLOTS,
    dispatch_shape,
    expected,
    factors,
    identity,
    moved,
    routes,
    rows,
    same,
)
from ep_moe.testing.transport_promises import a_peer_that_never_comes
from ep_moe.types import LocalIds, PhysicalIds, PhysicalRouting, Received
from tests.emulations.deepep import Buffer
from tests.emulations.flashinfer_nvlink import communication
from tests.emulations.peer_memory import make_memory
from tests.emulations.pplx import make_all2all

CAPABLE = {name: registry.load("dispatchers", name).capabilities for name in registry.built_in("dispatchers")}
OF_TORCH = [name for name, can in CAPABLE.items() if "cpu" in can.devices and can.max_ranks != 1]


def nvlink(shape: DispatchShape, rank_group: RankGroup) -> Dispatcher:
    """The real one on GPUs."""
    if rank_device().type == "cpu":
        flashinfer_nvlink.communication = communication
    return FlashInferNVLinkDispatcher(shape, rank_group)


FEW_WIRES = (Wire(dispatch="fp8_block"), Wire(combine="fp8"))  # rows with scales; rounded on the way back


def wires(name: str, *, few: bool) -> list[Wire] | None:
    """For `check_dispatcher`: some of a transport's formats, or None for all of them."""
    can = CAPABLE[name]
    here = [wire for wire in FEW_WIRES if wire.dispatch in can.dispatch_formats and wire.combine in can.combine_formats]
    return here if few and rank_device().type == "cpu" else None


@distributed(4)
@pytest.mark.parametrize("name", OF_TORCH)
def test_transports_of_torch(name, world_size):
    """The hierarchical ones have all formats on several nodes (test_hierarchical)."""
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
    """As calls of many tokens travel."""

    low_latency_bytes = 0


class CopyEngines(nvlink_p2p.NVLinkP2PDispatcher):
    """As large calls travel beside other work."""

    low_latency_bytes = copied_bytes = 0


# `packets`, `kernels` and `copies` run in all formats, dtypes and top-k, and buffers grow by bytes: rows with scales
# that are rounded in their write, and rows that are rounded on the way back.
FEW_FORMATS = dataclasses.replace(
    nvlink_p2p.NVLinkP2PDispatcher.capabilities,
    dispatch_formats=frozenset({"plain", "fp8_block"}),
    combine_formats=frozenset({"plain", "fp8"}),
)


class Growing(nvlink_p2p.NVLinkP2PDispatcher):
    """From 2 tokens on."""

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
    """On a CPU each way of sending meets all formats on one number of ranks, and `packets` and `kernels`, which differ
    in how they tell, all dtypes and top-k."""
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
    """All ranks, and the same ranks in pairs, with calls of one under way while the other's go on."""
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


# --- errors that the suite must see ---------------------------------------------------------------------------------


class OffByOne(TorchAll2AllDispatcher):
    def _dispatch(self, x, x_scale, routing, problem, max_tokens):
        ids = torch.where(routing.ids >= 0, (routing.ids + 1) % self.dispatch_shape.num_physical, -1)
        return super()._dispatch(x, x_scale, PhysicalRouting(PhysicalIds(ids), routing.weights), problem, max_tokens)


class Unweighted(TorchAll2AllDispatcher):
    def _changed(self, received: Received) -> Received:
        return dataclasses.replace(received, weights=torch.ones_like(received.weights))

    def dispatch_start(self, *arguments, **options):
        pending = super().dispatch_start(*arguments, **options)
        return mock.Mock(wait=lambda: self._changed(pending.wait()))


class ForeignIds(Unweighted):
    """Other ranks' experts under this rank's numbers."""

    def _changed(self, received: Received) -> Received:
        ids = received.local_ids.clone()
        ids[ids < 0] = self.dispatch_shape.slots_per_rank
        return dataclasses.replace(received, local_ids=LocalIds(ids))


class OtherExperts(Unweighted):
    """Rows meet other experts of the right rank."""

    def _changed(self, received: Received) -> Received:
        ids, weights = received.local_ids, received.weights
        other = self._met(ids, weights)
        return dataclasses.replace(received, local_ids=LocalIds(torch.where(ids >= 0, other, ids)))

    def _met(self, ids, weights):
        raise NotImplementedError


class Reversed(OtherExperts):
    def _met(self, ids, weights):
        return self.dispatch_shape.slots_per_rank - 1 - ids


class NextSlot(OtherExperts):
    def _met(self, ids, weights):
        return (ids + 1) % self.dispatch_shape.slots_per_rank


class LastSlotElsewhere(OtherExperts):
    def _met(self, ids, weights):
        free = torch.where((ids == 0).any(1, keepdim=True), 1, 0)  # so that the ids of a row stay distinct
        return torch.where(ids == self.dispatch_shape.slots_per_rank - 1, free, ids).to(ids.dtype)


class OneForAll(OtherExperts):
    """All of a row's routes on this rank go to its first expert there."""

    def _met(self, ids, weights):
        return ids.masked_fill(ids < 0, 99).amin(1, keepdim=True)


class WeightsSwapped(Unweighted):
    """Among a row's own experts."""

    def _changed(self, received: Received) -> Received:
        mine = received.local_ids >= 0
        both = mine.all(1, keepdim=True)
        return dataclasses.replace(received, weights=torch.where(both, received.weights.flip(1), received.weights))


class SharedState(TorchAll2AllDispatcher):
    """Keeps the newest call's handle for all."""

    def dispatch_start(self, *arguments, **options):
        pending = super().dispatch_start(*arguments, **options)

        def finish():
            received = pending.wait()
            self.latest = received.handle
            return received

        return mock.Mock(wait=finish)

    def _combine(self, y, handle, out):
        return super()._combine(y, self.latest, out)


class LastRowLost(TorchAll2AllDispatcher):
    def _combine(self, y, handle, out):
        pending = super()._combine(y, handle, out)

        def finish():
            out = pending.wait().clone()
            out[MAX_TOKENS - 1 :] = 0
            return out

        return mock.Mock(wait=finish)


class Untyped(TorchAll2AllDispatcher):
    """Hands rows in E4M3 without scales on as the bytes that traveled."""

    def _with_format(self, received):
        bytes_alone = received.x.dtype == torch.float8_e4m3fn and received.x_scale is None
        x = received.x.view(torch.uint8) if bytes_alone else received.x
        return super()._with_format(dataclasses.replace(received, x=x))


class Unscaled(TorchAll2AllDispatcher):
    """Takes rows without scales beside them for plain ones."""

    def _with_format(self, received):
        if received.x_scale is None:
            return dataclasses.replace(received, x=received.x.to(self.dispatch_shape.dtype))
        return super()._with_format(received)


class CoarseScales(TorchAll2AllDispatcher):
    """Rounds rows in its own write, to scales of fewer bits."""

    capabilities = dataclasses.replace(TorchAll2AllDispatcher.capabilities, rounds=frozenset({"fp8_block"}))

    def _dispatch(self, x, x_scale, routing, problem, max_tokens):
        if x.dtype != self.dispatch_shape.row_dtype:
            x, x_scale = round_blocks(x)
            x_scale = x_scale.bfloat16().float()
        return super()._dispatch(x, x_scale, routing, problem, max_tokens)


class Copied(TorchAll2AllDispatcher):
    """Claims to send a row once per rank, and sends it to every rank."""

    def _wanted(self, ids):
        return torch.ones_like(super()._wanted(ids))


class Silent(FlashInferNVLinkDispatcher):
    """Gives its peers zeros where it refuses a call."""

    def _poison(self, buffer_slot, device, max_tokens):
        super()._poison(SimpleNamespace(library=Zeros(buffer_slot.library)), device, max_tokens)


class Zeros:
    def __init__(self, library):
        self.dispatch, self.combine = library.dispatch, lambda rows: library.combine(torch.zeros_like(rows))
        self.get_combine_input_buffer = library.get_combine_input_buffer


class WritesItsInput(TorchAll2AllDispatcher):
    def _combine(self, y, handle, out):
        self.weights.zero_()
        return super()._combine(y, handle, out)

    def _dispatch(self, x, x_scale, routing, problem, max_tokens):
        self.weights = routing.weights
        return super()._dispatch(x, x_scale, routing, problem, max_tokens)


class NoProblem(TorchAll2AllDispatcher):
    """Forgets what the caller has found."""

    def dispatch_start(self, x, routing, problem=None, **options):
        return super().dispatch_start(x, routing, **options)


class OutOfOrder(TorchAll2AllDispatcher):
    """The last rows first, and combined again as they belong."""

    def _dispatch(self, x, x_scale, routing, problem, max_tokens):
        pending = super()._dispatch(x, x_scale, routing, problem, max_tokens)

        def finish():
            received = pending.wait()
            turned = {name: getattr(received, name).flip(0) for name in ("x", "local_ids", "weights")}
            scale = None if received.x_scale is None else received.x_scale.flip(0)
            return dataclasses.replace(received, x_scale=scale, **turned)

        return mock.Mock(wait=finish, ready=False)

    def _combine(self, y, handle, out):
        return super()._combine(y.flip(0), handle, out)


class Rounds(TorchAll2AllDispatcher):
    """What small integers do not show."""

    def _combine(self, y, handle, out):
        rounded = (y.detach().contiguous().view(torch.int16) & ~1).view(torch.bfloat16)  # integers to 128 stay
        return super()._combine(y + (rounded - y).detach(), handle, out)


class RowsRounded(TorchAll2AllDispatcher):
    """To 8 bits on the way there, whatever the layer's dtype."""

    capabilities = dataclasses.replace(TorchAll2AllDispatcher.capabilities, exact=False)

    def _dispatch(self, x, x_scale, routing, problem, max_tokens):
        return super()._dispatch(x.bfloat16().to(x.dtype), x_scale, routing, problem, max_tokens)


class SumsRounded(TorchAll2AllDispatcher):
    capabilities = dataclasses.replace(TorchAll2AllDispatcher.capabilities, exact=False)

    def _combine(self, y, handle, out):
        pending = super()._combine(y, handle, out)
        return mock.Mock(wait=lambda: pending.wait().bfloat16().to(y.dtype), ready=False)


def _rounded_weights(routing: PhysicalRouting) -> PhysicalRouting:
    return PhysicalRouting(routing.ids, routing.weights.bfloat16().float())


class WeightsRounded(TorchAll2AllDispatcher):
    def _dispatch(self, x, x_scale, routing, problem, max_tokens):
        return super()._dispatch(x, x_scale, _rounded_weights(routing), problem, max_tokens)


class WeightsRoundedInCombine(pplx.PplxDispatcher):
    def _dispatch(self, x, x_scale, routing, problem, max_tokens):
        return super()._dispatch(x, x_scale, _rounded_weights(routing), problem, max_tokens)


class AnyId(TorchAll2AllDispatcher):
    """Takes an id of no expert for an empty one."""

    def _dispatch(self, x, x_scale, routing, problem, max_tokens):
        known = (routing.ids >= 0) & (routing.ids < self.dispatch_shape.num_physical)
        ids = PhysicalIds(routing.ids.where(known, -1))
        return super()._dispatch(x, x_scale, PhysicalRouting(ids, routing.weights), problem, max_tokens)


class NoGradients(TorchAll2AllDispatcher):
    def _combine(self, y, handle, out):
        return super()._combine(y.detach().requires_grad_(y.requires_grad), handle, out)


class GradientsUnasked(AllGatherDispatcher):
    """Learns from no rank whether it wants gradients."""

    def _dispatch(self, x, x_scale, routing, problem, max_tokens):
        agree = self.rank_group.agree
        with mock.patch.object(
            RankGroup, "agree", lambda _, values, problem, device, **options: agree(values, problem, device)
        ):
            return super()._dispatch(x, x_scale, routing, problem, max_tokens)


class RaisesOnOneRank(TorchAll2AllDispatcher):
    def _dispatch(self, x, x_scale, routing, problem, max_tokens):
        if self.rank_group.rank == 1 and len(x) == 5:
            raise ValueError("boom")
        return super()._dispatch(x, x_scale, routing, problem, max_tokens)


class NotMadeOnOneRank(TorchAll2AllDispatcher):
    def __init__(self, shape, rank_group):
        super().__init__(shape, rank_group)
        if rank_group.rank == 1:
            raise ValueError("no memory")


class DestroyedOnce(TorchAll2AllDispatcher):
    gone = False

    def destroy(self):
        if self.gone and self.rank_group.rank == 1:
            raise ValueError("it is gone")
        self.gone = True


@distributed(2)
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (RaisesOnOneRank, r"torch_a2a: uneven and empty ranks .* on ranks \[0, 1\]; rank 1: ValueError: boom"),
        (NotMadeOnOneRank, r"made on ranks \[1\]; rank 1: ValueError: no memory"),
        (DestroyedOnce, r"torch_a2a: destroy, again on ranks \[1\]; rank 1: ValueError: it is gone"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_one_rank_raises_is_said_on_all(wrong, sentence, world_size):
    with pytest.raises(AssertionError, match=sentence):
        check_dispatcher(wrong, top_ks=(2,), dtypes=(torch.bfloat16,), deadline_s=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="over the emulation, on the CPU")
@distributed(2, set_device=True)
def test_the_suite_sees_what_refusals_lack(world_size):
    flashinfer_nvlink.communication = communication
    with pytest.raises(AssertionError, match=r"one token too many .*: rows that miss a rank's experts must be NaN"):
        check_dispatcher(Silent, top_ks=(2,), dtypes=(torch.bfloat16,), deadline_s=10)


@distributed(4, set_device=True)
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (Unweighted, "uneven and empty ranks"),
        (ForeignIds, "local ids out of range"),
        (OffByOne, "uneven and empty ranks"),
        (Reversed, "uneven and empty ranks"),
        (NextSlot, "uneven and empty ranks"),
        (LastSlotElsewhere, "uneven and empty ranks"),
        (OneForAll, "a local id comes twice in a row"),
        (WeightsSwapped, "uneven and empty ranks"),
        (SharedState, "two in flight"),
        (LastRowLost, "uneven and empty ranks"),
        (WritesItsInput, "weights must be left as they were"),
        (NoProblem, "what is wrong on one rank .*problem was not raised"),
        (AnyId, "what is wrong on one rank .*id 16 was not refused"),
        (OutOfOrder, "single rows keep their order and bits .*in another order"),
        (Rounds, "single rows keep their order and bits .*with other bits"),
        (NoGradients, "gradients flow .*gradient of x"),
        (GradientsUnasked, "gradients are wanted alike .*rank 0 alone wants a gradient of x"),
        (Untyped, "uneven and empty ranks .*fp8_tensor"),
        (Unscaled, "uneven and empty ranks .*fp8_tensor"),
        (CoarseScales, "rows that come plain are rounded as before the wire .*fp8_block.*other bits"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_suite_sees_it(wrong, sentence, world_size):
    formats = [FP8_TENSOR] if "fp8_tensor" in sentence else None
    with pytest.raises(Exception, match=sentence):
        check_dispatcher(wrong, top_ks=(2,), dtypes=(torch.bfloat16,), wires=formats, deadline_s=10)


@pytest.mark.skipif(torch.cuda.is_available(), reason="over the emulation, on the CPU")
@distributed(2, set_device=True)
@pytest.mark.parametrize(
    ("wrong", "dtype", "sentence"),
    [
        (RowsRounded, torch.float32, "single rows come back with other bits"),
        (RowsRounded, torch.float16, "single rows come back with other bits"),
        (SumsRounded, torch.float32, "single rows come back with other bits"),
        (WeightsRounded, torch.bfloat16, "weights arrive with other bits"),
        (WeightsRoundedInCombine, torch.bfloat16, "a weighted row was rounded more than once"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_suite_sees_what_is_rounded(wrong, dtype, sentence, world_size):
    pplx.make_all2all = make_all2all
    with pytest.raises(AssertionError, match=f"single rows keep their order and bits .*{sentence}"):
        check_dispatcher(wrong, top_ks=(2,), dtypes=(dtype,), wires=(), deadline_s=10)


class Alone(LocalDispatcher):
    """Right by itself, and waits for no rank."""

    def _dispatch(self, x, x_scale, routing, problem, max_tokens):
        given = routing.weights * factors(routing.ids % SLOTS, routing.ids // SLOTS)
        weights, ids = torch.zeros_like(given), torch.full_like(routing.ids, -1)
        weights[:, 0] = given.masked_fill(routing.ids < 0, 0).sum(1)
        multiplies_by_1 = factors(torch.arange(SLOTS), dist.get_rank()).tolist().index(1)
        ids[:, 0] = torch.where(weights[:, 0] > 0, multiplies_by_1, -1)
        return super()._dispatch(x, x_scale, PhysicalRouting(PhysicalIds(ids), weights), problem, max_tokens)


@distributed(2, set_device=True)
def test_a_transport_that_does_not_wait_is_seen(world_size):
    with pytest.raises(AssertionError, match=r"a peer that never comes .* rank 0: rank 1 was not named in ''"):
        a_peer_that_never_comes(Alone, dispatch_shape(world_size, 2, torch.float32), rank_device())


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
