"""RankGroup: a process group with the flight recorder that watches it. Every transport gets one."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ep_moe.errors import InputError
from ep_moe.parallel.call_facts import different_layers, facts_difference
from ep_moe.parallel.collectives import all_gather_single
from ep_moe.parallel.collectives import all_to_all_rows as all_to_all_rows
from ep_moe.parallel.collectives import gather_rows as gather_rows
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.step_board import HostExchange
from ep_moe.runtime.batched_gradients import batch_problem
from ep_moe.runtime.devices import unseen_by_modes

_log = logging.getLogger("ep_moe.parallel")


def barrier(device: torch.device, group: ProcessGroup | None = None) -> None:
    """Wait for all ranks of a group, by default of the job. Names this rank's GPU, which NCCL would guess otherwise."""
    ids = [device.index] if dist.get_backend(group) == "nccl" else None
    dist.barrier(group, device_ids=ids)


_NEVER = -(2**63)  # a number that ranks never exchange
Gradients = Mapping[str, Tensor]  # tensors of a call that may require gradients, by name
NO_GRADIENTS: Gradients = MappingProxyType({})


class SumOrder:
    """The order in which this rank summed gradients of layers with the others of a group.

    digest: a checksum of the layers' names in that order
    """

    digest = 0

    def add(self, layer: str) -> None:
        """Note the sum of a layer's gradients."""
        self.digest = zlib.crc32(layer.encode(), self.digest)


class _Known:
    """Facts that a group learns in its calls.

    own: the `HostExchange` of this rank, if it can read the memory of all other ranks
    agreed_exchange: the same, once it is known that all ranks have one
    """

    own: HostExchange | None = None
    agreed_exchange: HostExchange | None = None
    asked = decided = grew = False


@dataclass(frozen=True)
class Levels:
    """The two levels of an EP group with equally many ranks on each node.

    node: its ranks on this node, by local rank
    rail: its ranks with this rank's local rank, by node
    node_major_ranks: for each of its ranks, node * (ranks of a node) + local rank
    """

    node: RankGroup
    rail: RankGroup
    node_major_ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks, with the flight recorder that watches its collectives.

    Args:
        group: The process group of torch.distributed, None for a single rank.
        ranks: Global ranks in group order.
        rank: This rank's place in the group.
        flight_recorder: Numbers the steps of this rank, and finds lost peers.
        levels: The nodes and rails of an EP group on several nodes. None for one node, or for a group without rails.

    Attributes:
        exchanges: A counter that numbers the differentiable collectives of the group, equally on all ranks.
        sum_order: The order in which layers summed gradients over the group.
    """

    group: ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int
    flight_recorder: FlightRecorder
    levels: Levels | None = None
    known: _Known = field(default_factory=_Known, init=False, repr=False, compare=False)
    exchanges: Iterator[int] = field(default_factory=count, init=False, repr=False, compare=False)
    sum_order: SumOrder = field(default_factory=SumOrder, init=False, repr=False, compare=False)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @classmethod
    def alone(cls) -> RankGroup:
        """Create a group of one rank, for one process without torch.distributed."""
        return cls(None, (0,), 0, FlightRecorder())

    def exchange(self, values: Tensor) -> list[list[int]]:
        """All-gather integers to the host. Collective. Waits for the device.

        Args:
            values: int64 [n] of this rank.

        Returns:
            R lists of n integers, by rank.

        Raises:
            DistBackendError: The collective was aborted after a peer was lost. A flight recorder's step turns it into
                PeerTimeout.
        """
        if self.size == 1:
            return [values.tolist()]
        self.flight_recorder.check()
        gathered = values.new_full((self.size * len(values),), _NEVER)
        all_gather_single(gathered, values, group=self.group)
        rows: list[list[int]] = gathered.view(self.size, -1).tolist()
        self.flight_recorder.check()
        if any(_NEVER in row for row in rows):  # the collective did not write all numbers
            raise dist.DistBackendError("an exchange was aborted")
        return rows

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce a tensor over the group, in place. Collective.

        Args:
            tensor: A tensor of any shape. It becomes NaN if the collective is aborted (`nan_if_aborted`).
            op: The reduction.
        """
        dist.all_reduce(tensor, op=op, group=self.group)
        self.nan_if_aborted(tensor)

    def nan_if_aborted(self, out: Tensor) -> None:
        """Fill a collective's result with NaN if the collective was aborted. Does not wait for the device.

        The host learns of a lost peer only in its next step. Before that it may have read the arbitrary numbers of an
        aborted collective, or trained on them.

        Args:
            out: The result of a collective of torch, after the current stream waits for it. Integers are not changed.
        """
        aborted = self.flight_recorder.device_watch.aborted(out.device)
        if aborted is not None and out.is_floating_point():
            with torch.no_grad():
                out.masked_fill_(aborted, torch.nan)

    def agree(
        self,
        values: Sequence[int | Tensor],
        problem: str | None,
        device: torch.device,
        *,
        gradients: Gradients = NO_GRADIENTS,
        call_name: str | None = None,
        call_facts: str | None = None,
        name_rank: bool = True,
    ) -> list[list[int]]:
        """Exchange one call's integers, and raise one rank's problem on all ranks. Collective.

        A bad argument on one rank thus becomes an error on all ranks instead of a hang. The check adds no exchange: a
        call exchanges its counts anyway.

        Args:
            values: n integers and int64 tensors of this rank, integers first. n, with all elements of the tensors, is
                at most R + 1.
            problem: A fault found on this rank, or None.
            device: The device of the exchange.
            gradients: Tensors by name. Each of them must require a gradient on all ranks or on none.
            call_name: The layer or function that must be the same on all ranks. None: `FlightRecorder.call_name`.
            call_facts: Facts that must be the same on all ranks. None: `FlightRecorder.call_facts`.
            name_rank: Whether the error of a problem begins with the rank that has it. False for a problem that ranks
                of other groups have too, so that all of them raise one text.

        Returns:
            R lists of n integers on the host, by rank.

        Raises:
            InputError: On all ranks, if a rank has a problem, or ranks are in different layers, have different facts,
                or differ in which tensors require gradients.
            ValueError: There are more than R + 1 integers.
        """
        recorder = self.flight_recorder
        call_name = recorder.call_name if call_name is None else call_name
        call_facts = recorder.call_facts if call_facts is None else call_facts
        checksums = [zlib.crc32(text.encode()) for text in (call_name, call_facts)]
        # one copy moves all integers to the device; the tensors follow them
        integers = [value for value in values if isinstance(value, int)]
        tensors = [value.reshape(-1) for value in values if isinstance(value, Tensor)]
        assert not any(isinstance(value, int) for value in values[len(integers) :]), "integers come first"
        numbers = len(integers) + sum(map(len, tensors))
        if self.size > 1 and numbers > self.size + 1:
            raise ValueError(
                f"agree exchanges at most R + 1 = {self.size + 1} numbers on {self.size} ranks, got {numbers}"
            )
        # all calls have the same width, so that ranks in different layers can exchange and report that
        filler = [0] * (self.size + 1 - numbers)
        header = [problem is not None, *checksums, _requires_grad_bits(gradients), *filler, *integers]
        row = torch.tensor(header, dtype=torch.int64, device=device)
        rows = self.exchange(torch.cat([row, *tensors]) if tensors else row)
        troubled = [index for index, row in enumerate(rows) if row[0]]
        if troubled:
            owner = self.ranks[troubled[0]]
            text = recorder.broadcast_text(problem, owner=owner, group=self.ranks)
            raise InputError(f"rank {owner}: {text}" if name_rank else text)
        odd = [index for index, row in enumerate(rows) if row[1] != rows[0][1]]
        if odd:
            pair = (self.ranks[0], self.ranks[odd[0]])
            names = [recorder.broadcast_text(call_name, owner=rank, group=self.ranks) for rank in pair]
            raise InputError(different_layers(pair, names))
        self._check_call_facts(call_name, call_facts, [row[2] for row in rows])
        self._same_gradients(gradients, [row[3] for row in rows])
        return [row[len(row) - numbers :] for row in rows]

    def meet_in_backward(self, call_name: str, number: int, gradient: Tensor) -> None:
        """Check before a collective of backward that all ranks are in the backward of the same call.

        Otherwise gloo would end a process if sizes differ, and would exchange gradients of different calls if they do
        not. Collective on CPUs. On GPUs it compares nothing, because it would wait for the device.

        Args:
            call_name: The layer: `FlightRecorder.call_name` in forward.
            number: The number of the collective in forward, from `exchanges`.
            gradient: The tensor that the collective will exchange.

        Raises:
            InputError: The gradient is a batch of several, which collectives do not support. On CPUs it is raised on
                all ranks, and also if one is in a forward, or in the backward of another layer or call.
        """
        problem = batch_problem(gradient)
        if gradient.device.type != "cpu":
            if problem is not None:
                raise InputError(problem)
            return
        where, facts = f"the backward of {call_name}", f"exchange={number}"
        self.agree([], problem, gradient.device, call_name=where, call_facts=facts)

    def meet_on_host(self, where: str) -> None:
        """Check through the store that all ranks are in the same layer. Collective.

        It takes about a millisecond of the host, and does not wait for the device.

        Args:
            where: The name of this rank's call, such as `the backward of NAME`.

        Raises:
            InputError: On all ranks, if they have different names.
        """
        names = self.flight_recorder.gather_texts(where, self.ranks)
        odd = [at for at, name in enumerate(names) if name != names[0]]
        if odd:
            raise InputError(different_layers((self.ranks[0], self.ranks[odd[0]]), (names[0], names[odd[0]])))

    def most_tokens(
        self,
        tokens: int,
        problem: str | None,
        device: torch.device,
        what: str,
        *,
        gradients: Gradients = NO_GRADIENTS,
    ) -> int:
        """Return the most tokens of any rank in a call. Collective; through host memory if the ranks share it.

        Args:
            tokens: The tokens of this rank.
            problem: A fault found on this rank, or None.
            device: The device of the call.
            what: The transport's name, for errors.
            gradients: As in `agree`.

        Returns:
            The most tokens, the same on all ranks.

        Raises:
            InputError: On all ranks, as in `agree`.
        """
        return self.begin_most_tokens(tokens, problem, device, what, gradients=gradients)()

    def begin_most_tokens(
        self, tokens: int, problem: str | None, device: torch.device, what: str, *, gradients: Gradients = NO_GRADIENTS
    ) -> Callable[[], int]:
        """Begin `most_tokens`, so that this rank can do other work until the peers' numbers arrive.

        Args:
            tokens: The tokens of this rank.
            problem: A fault found on this rank, or None.
            device: The device of the call.
            what: The transport's name, for errors.
            gradients: As in `agree`.

        Returns:
            A function that waits for the peers' numbers, and returns or raises like `most_tokens`. Call it before the
            group's next exchange.

        Raises:
            InputError: The group has one rank, which has a problem.
        """
        recorder, exchange = self.flight_recorder, self.known.agreed_exchange
        if self.size == 1:
            if problem is not None:
                raise InputError(f"rank {self.ranks[0]}: {problem}")
            return lambda: tokens
        recorder.check()
        if exchange is None:
            return lambda: self._agreed_most(tokens, problem, device, what, gradients)
        facts = zlib.crc32(recorder.call_name.encode(), _requires_grad_bits(gradients))
        facts = zlib.crc32(recorder.call_facts.encode(), facts)
        exchange.post(tokens << 1 | (problem is not None), facts)

        def collect() -> int:
            most, alike = tokens, problem is None
            for first, given in exchange.collect(recorder, lambda: self._dispatch_step(what)):
                most = max(most, first >> 1)
                alike = alike and given == facts and not first & 1
            return most if alike else self._agreed_most(tokens, problem, device, what, gradients)

        return collect

    def _agreed_most(
        self, tokens: int, problem: str | None, device: torch.device, what: str, gradients: Gradients
    ) -> int:
        """Return the most tokens by `agree`, a collective on the device.

        It is used until it is known whether all ranks share host memory, if they do not, and if they differ or one has
        a problem: `agree` then raises the error.
        """
        recorder, known = self.flight_recorder, self.known
        if not known.asked:
            known.own, known.asked = recorder.host_exchange(self.ranks), True
        # dispatch modes must not count the exchange: later calls may use host memory
        with self._dispatch_step(what), unseen_by_modes():
            rows = self.agree([known.own is not None, tokens], problem, device, gradients=gradients)
        if not known.decided:
            known.agreed_exchange, known.decided = known.own if all(row[0] for row in rows) else None, True
            if known.agreed_exchange is None and self.rank == 0:
                _log.warning(
                    "ranks %s cannot read each other's memory through /proc on their hosts, so each call over %s "
                    "waits for the device; EPContext.from_torchrun(max_tokens=...) avoids the wait",
                    ", ".join(map(str, self.ranks)), what,
                )  # fmt: skip
        return max(row[1] for row in rows)

    @contextmanager
    def _dispatch_step(self, what: str) -> Iterator[None]:
        """Enter a step at the beginning of a dispatch. It counts as the dispatch's step, not as one more.

        Peers that arrive late are found to be behind this step.
        """
        before = self.flight_recorder.newest
        with self.flight_recorder.step("dispatch", what):
            yield
        self.flight_recorder.set_newest_step(before)

    def _check_call_facts(self, call_name: str, call_facts: str, checksums: list[int]) -> None:
        """Raise InputError if ranks differ in their facts. checksums: those of each rank's facts"""
        odd = [index for index, found in enumerate(checksums) if found != checksums[0]]
        if not odd:
            return
        pair = (self.ranks[0], self.ranks[odd[0]])
        facts = [self.flight_recorder.broadcast_text(call_facts, owner=rank, group=self.ranks) for rank in pair]
        raise InputError(facts_difference(call_name, facts, pair))

    def _same_gradients(self, gradients: Gradients, requires_grad: list[int]) -> None:
        for at, name in enumerate(gradients):
            found = {bool(bits >> at & 1): rank for rank, bits in zip(self.ranks, requires_grad, strict=True)}
            if len(found) > 1:
                raise InputError(
                    f"{name} requires a gradient on rank {found[True]} and not on rank {found[False]}, which would "
                    "not run backward; set the same requires_grad and grad mode on all ranks, also on a rank without "
                    "rows"
                )


def _requires_grad_bits(gradients: Gradients) -> int:
    """Return a bit mask of the tensors that require gradients, 0 if grad mode is off."""
    if not torch.is_grad_enabled():
        return 0
    return sum(1 << at for at, tensor in enumerate(gradients.values()) if tensor.requires_grad)
