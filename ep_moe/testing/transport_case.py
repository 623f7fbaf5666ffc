"""Test cases of a transport: rows, routes and expected results, and the exchange of faults between ranks."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch import Tensor

from ep_moe.all2all.base import Dispatcher, DispatchShape
from ep_moe.config import PLAIN_WIRE, Wire
from ep_moe.errors import InputError, PeerTimeout
from ep_moe.experts.layouts import as_plain, as_rank_major, with_local_ids
from ep_moe.parallel.groups import default_store, numbered
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.quant.fp8 import round_by
from ep_moe.quant.row_format import quantize_for_wire
from ep_moe.types import (
    LocalIds,
    PeerRows,
    Pending,
    PhysicalIds,
    PhysicalRouting,
    Received,
    Weighting,
    capturing,
)

DispatcherFactory = Callable[[DispatchShape, RankGroup], Dispatcher]
Result = TypeVar("Result")


class Case:
    """One check of one dispatcher. Faults are collected, not raised, because peers wait for a rank that stops."""

    def __init__(self, dispatcher: Dispatcher, device: torch.device, to_peers: bool = False) -> None:
        """to_peers: experts write their results directly to the ranks of the tokens, if the transport offers it"""
        self.dispatcher = dispatcher
        self.device = device
        self.to_peers = to_peers
        self.rank, self.ranks = dispatcher.rank_group.rank, dispatcher.rank_group.size
        self.shape = dispatcher.dispatch_shape
        self.faults: list[str] = []

    def call(self, tokens: int, seed: int = 0) -> tuple[Tensor, PhysicalRouting, Tensor]:
        """Return this rank's rows and routes on the device, and the expected result."""
        x = rows(self.rank + seed, tokens, self.shape.dtype, self.shape.wire)
        routing = routes(self.rank + seed, tokens, self.ranks, self.shape.top_k)
        return x.to(self.device), moved(routing, self.device), self.expected(x, routing)

    def expected(self, x: Tensor, routing: PhysicalRouting) -> Tensor:
        """Return the result that combine must give after `experts`."""
        return expected(x, routing, factors(routing.ids % SLOTS, routing.ids // SLOTS))

    def dispatch(self, x: Tensor, routing: PhysicalRouting, max_tokens: int | None = None) -> Received:
        return self.dispatch_start(x, routing, max_tokens).wait()

    def dispatch_start(
        self, x: Tensor, routing: PhysicalRouting, max_tokens: int | None = None, problem: str | None = None
    ) -> Pending[Received]:
        """Begin a dispatch of plain rows. They are rounded to the wire format here if the transport does not do it."""
        data, scale = (x, None) if self.rounds else rounded(x, self.shape)
        return self.dispatcher.dispatch_start(data, routing, problem, x_scale=scale, max_tokens=max_tokens)

    @property
    def rounds(self) -> bool:
        return self.shape.wire.dispatch in self.dispatcher.capabilities.rounds

    def dispatch_and_combine(self, x: Tensor, routing: PhysicalRouting) -> Tensor:
        received = self.dispatch(x, routing)
        return self.dispatcher.combine(self.experts(received), received.handle)

    def experts(self, received: Received) -> Tensor | PeerRows:
        """Run experts that multiply by a factor of their own, so that a row at a wrong expert gives a wrong result."""
        received = with_local_ids(received, SLOTS)
        ids = received.local_ids
        if ids is not None and not capturing(self.device):
            self.add_fault_unless(
                bool(((ids >= -1) & (ids < self.shape.slots_per_rank)).all()), "local ids out of range"
            )
            after = ids.sort(1).values
            repeated = (after[:, 1:] == after[:, :-1]) & (after[:, 1:] >= 0)
            self.add_fault_unless(not bool(repeated.any()), "a local id comes twice in a row")
        return multiplied(received, self.shape.dtype, self.rank, to_peers=self.to_peers)

    def add_fault_unless(self, condition: bool, fault: str) -> None:
        if not condition:
            self.faults.append(fault)

    def same(self, actual: Tensor, wanted: Tensor, what: str) -> None:
        try:
            same(actual, wanted, what, tolerance(self.shape))
        except AssertionError as error:
            self.faults.append(str(error))


def run(check: Callable[[Case], None], dispatcher: Dispatcher, device: torch.device, to_peers: bool = False) -> None:
    case = Case(dispatcher, device, to_peers)
    try:
        check(case)
    except Exception as error:
        case.faults.append(_text(error))
    raise_faults_on_all_ranks(check, case)


def raise_faults_on_all_ranks(check: Callable[..., None], case: Case) -> None:
    """Raise AssertionError on all ranks if any rank found a fault."""
    what = check.__name__.replace("_", " ").strip()
    details = f"top_k {case.shape.top_k}, {case.shape.dtype}, {case.shape.wire}{', to peers' if case.to_peers else ''}"
    _exchange_faults(f"{case.dispatcher.name}: {what} ({details})", case.dispatcher.rank_group, case.faults)


def call_and_share_errors(what: str, rank_group: RankGroup, call: Callable[[], Result]) -> Result:
    """Return the result of `call`. Raise AssertionError on all ranks if it raises on any."""
    found, faults = list[Result](), list[str]()
    try:
        found.append(call())
    except Exception as error:
        faults.append(_text(error))
    _exchange_faults(what, rank_group, faults)
    return found[0]


def _exchange_faults(what: str, rank_group: RankGroup, faults: Sequence[str]) -> None:
    """Exchange faults and raise on all ranks if there are any.

    It uses the store, because peers of a rank that has raised may still wait for it in a collective.
    """
    reports = {0: list(faults)}
    if rank_group.size > 1:
        store = default_store()
        turn = store.add(f"ep_moe/contract/turns/{rank_group.rank}", 1)
        keys = [f"ep_moe/contract/{turn}/{rank}" for rank in range(rank_group.size)]
        store.set(keys[rank_group.rank], json.dumps(reports[0]))
        try:
            store.wait(keys, timedelta(seconds=3 * rank_group.flight_recorder.deadline_s + 30))
        except RuntimeError:  # some ranks did not answer in time: report those that did
            keys = [key if store.check([key]) else "" for key in keys]
        reports = {rank: json.loads(store.get(key)) if key else ["it never came"] for rank, key in enumerate(keys)}
    wrong = [rank for rank in reports if reports[rank]]
    if wrong:
        # a PeerTimeout only says that another rank is missing, so prefer that rank's own fault
        cause = min(wrong, key=lambda rank: reports[rank][0].startswith(PeerTimeout.__name__))
        raise AssertionError(f"{what} on ranks {wrong}; rank {cause}: {reports[cause][0]}")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def input_error_message(call: Callable[[], object]) -> str:
    try:
        call()
    except InputError as error:
        return str(error)
    return ""


def wait_for_input_error(seconds: float, call: Callable[[], object]) -> str:
    """Repeat `call` until it raises InputError or the time is over. Return its message, "" for none.

    A heartbeat carries the refusal of a peer, so it arrives with a delay.
    """
    end = time.monotonic() + seconds
    while not (sentence := input_error_message(call)) and time.monotonic() < end:
        time.sleep(0.02)
    return sentence


def hold_back(rank_group: RankGroup, lost: int, seconds: float) -> None:
    """Let rank `lost` wait until all other ranks have called this too, but at most so many seconds."""
    store, name = default_store(), numbered("held back", rank_group.ranks)
    keys = [f"{name}/{rank}" for rank in range(rank_group.size) if rank != lost]
    if rank_group.rank != lost:
        store.set(f"{name}/{rank_group.rank}", "")
        return
    end = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < end:
        time.sleep(0.02)


# --- rows -------------------------------------------------------------------------------------------------------------
# Test data of transports: rows and routes that every rank can compute for all ranks, experts that multiply their input
# by a number, and expected results.

HIDDEN, SLOTS, MAX_TOKENS = 512, 4, 24
LARGEST = 7  # largest magnitude in a row
MOST = 36  # limit of sum(weight * factor) over a row's routes: 7 * 36 = 252, and bfloat16 has all integers up to 256
# tokens of each of four ranks in one call
COUNTS = ((7, 5, 1, 3), (0, 4, 0, 0), (0, 0, 0, 0), (1, 0, 9, 2), (24, 24, 24, 24), (24, 0, 1, 23))
NVFP4 = Wire(dispatch="nvfp4", input_scale=1.0)
FP8_TENSOR = Wire(dispatch="fp8_tensor", input_scale=0.25)  # not 1, so that an omitted scale gives a wrong result
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dispatch_shape(ranks: int, top_k: int, dtype: torch.dtype, wire: Wire = PLAIN_WIRE) -> DispatchShape:
    return DispatchShape(
        hidden_size=HIDDEN,
        top_k=top_k,
        slots_per_rank=SLOTS,
        num_ranks=ranks,
        dtype=dtype,
        max_tokens=MAX_TOKENS,
        wire=wire,
    )


def rows(rank: int, tokens: int, dtype: torch.dtype, wire: Wire = PLAIN_WIRE) -> Tensor:
    """Return the rows [tokens, HIDDEN] of a rank, in memory that the caller may write to."""
    return _rows(rank, tokens, dtype, wire).clone()


@functools.lru_cache(maxsize=1024)  # checks request the same few rows many times
def _rows(rank: int, tokens: int, dtype: torch.dtype, wire: Wire) -> Tensor:
    """Return rows of small integers that every wire format represents exactly.

    - The first columns hold the rank and the token, so that a misplaced row gives a wrong result.
    - Magnitudes are at most 7, so that sums of products with `routes` are exact in bfloat16.
    - Each block of 128 columns contains a 7. The scale of fp8_block is then 1 / 64, and all values are exact. They are
      exact in mxfp8 too, whose scales are powers of two.
    - For nvfp4, the eight numbers of E2M1 replace the integers. Each block of 16 columns contains the largest, so that
      the scale is 1.
    """
    generator = torch.Generator().manual_seed(1000 + rank)
    x = torch.randint(-2, 3, (tokens, HIDDEN), generator=generator).float()
    number = torch.arange(tokens)
    x[:, 0], x[:, 1], x[:, 2], x[:, 3::128] = rank % 7 + 1, number % 8, number // 8, LARGEST
    if wire.dispatch == "nvfp4":
        x[:, 3::16] = LARGEST
        x = torch.tensor(_E2M1)[x.abs().long()].copysign(x)
    return x.to(dtype)


def routes(rank: int, tokens: int, ranks: int, top_k: int, *, drop: float = 0.3) -> PhysicalRouting:
    """Return distinct physical ids, some of them -1, and small integer weights, in memory that the caller may write to.

    A row has no more routes than `MOST` allows.
    """
    routing = _routes(rank, tokens, ranks, top_k, drop)
    return PhysicalRouting(PhysicalIds(routing.ids.clone()), routing.weights.clone())


@functools.lru_cache(maxsize=1024)
def _routes(rank: int, tokens: int, ranks: int, top_k: int, drop: float) -> PhysicalRouting:
    generator = torch.Generator().manual_seed(rank)
    width = max(ranks * SLOTS, top_k)
    ids = torch.rand(tokens, width, generator=generator).topk(top_k).indices
    dropped = (torch.rand(ids.shape, generator=generator) < drop) | (ids >= ranks * SLOTS)
    weights = torch.randint(1, 4, ids.shape, generator=generator).float()
    products = weights * factors(ids % SLOTS, ids // SLOTS)
    dropped |= products.masked_fill(dropped, 0).cumsum(1) > MOST
    return PhysicalRouting(PhysicalIds(ids.masked_fill(dropped, -1)), weights)


def factors(slots: Tensor, rank: Tensor | int) -> Tensor:
    """Return the factors of the experts in a rank's slots: 1 to 4, distinct, and in another order on the next rank."""
    return ((slots + rank) % SLOTS + 1).float()


def moved(routing: PhysicalRouting, device: torch.device) -> PhysicalRouting:
    return PhysicalRouting(PhysicalIds(routing.ids.to(device)), routing.weights.to(device))


def identity(received: Received, dtype: torch.dtype, *, to_peers: bool = False) -> Tensor | PeerRows:
    """Run experts that return their input."""
    return multiplied(received, dtype, None, to_peers=to_peers)


def multiplied(
    received: Received, dtype: torch.dtype, rank: int | None, *, to_peers: bool = False
) -> Tensor | PeerRows:
    """Run a rank's experts, which multiply their input by `factors`, or by 1 if `rank` is None.

    The result also has the factor of the routing weights if `received.weighting` says so. Rows without an expert are
    exactly zero. With `per_route` there is one row for each id. The result is written to `received.out`, or with
    to_peers to `peer_out`, if the transport offers these.
    """
    received = as_plain(with_local_ids(received, SLOTS), dtype)
    flat = as_rank_major(received, SLOTS)
    x, slots = flat.x, flat.local_ids
    assert slots is not None
    if received.per_route:
        x, slots = x.repeat_interleave(slots.shape[1], 0), cast("LocalIds", slots.view(-1, 1))
    mine = slots >= 0
    factor = mine.float() if rank is None else factors(slots, rank)
    if received.weighting is Weighting.EXPERTS:
        assert flat.weights is not None
        factor = factor * flat.weights
    factor = factor.masked_fill(~mine, 0).sum(1, keepdim=True)  # a weight without an expert may be NaN
    y = torch.where(mine.any(1, keepdim=True), x * factor.to(x.dtype), torch.zeros_like(x))
    if to_peers and received.peer_out is not None:
        travels = received.peer_out.blocks[0].dtype
        received.peer_out.write(y if travels == y.dtype else round_by(y, 1.0))
        return received.peer_out
    if received.out is not None:
        return received.out.copy_(y.view_as(received.out))
    return y if received.per_route else y.view_as(received.x)


def expected(x: Tensor, routing: PhysicalRouting, factor: Tensor | None = None) -> Tensor:
    """Return the expected result: x times the sum of weights, each multiplied by the factor [T, K] of its expert."""
    weights = routing.weights if factor is None else routing.weights * factor
    return (x.float() * weights.masked_fill(routing.ids < 0, 0).sum(1, keepdim=True)).to(x.dtype)


def tolerance(shape: DispatchShape) -> float:
    """Return the relative tolerance of sums of terms of one sign: E4M3 has 4 significant bits, bfloat16 has 8."""
    return 2**-4 + 2**-8 if shape.wire.combine == "fp8" else 0.0


def same(actual: Tensor, wanted: Tensor, what: object, rtol: float = 0.0) -> None:
    if actual.dtype == wanted.dtype and torch.equal(actual.cpu(), wanted.cpu()):
        return  # the usual case; assert_close takes longer than a call of the transport
    torch.testing.assert_close(actual.cpu(), wanted.cpu(), rtol=rtol, atol=0, msg=lambda text: f"{what}: {text}")


def rounded(x: Tensor, shape: DispatchShape) -> tuple[Tensor, Tensor | None]:
    """Return rows in the wire format: x and x_scale."""
    return quantize_for_wire(x, shape.wire)
