"""Comparisons of the state that must be equal on ranks: router, shared experts, expert map, replicas of an expert.

If ranks differ there, results are wrong and no error is raised. Usual causes are a different seed on each rank, a
wrapper that broadcasts rank 0's experts, and a checkpoint that one rank did not load. All comparisons are collective
and wait for the device.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ep_moe.errors import InputError
from ep_moe.execution.expert_comparison import ComparedExperts, compare_experts, mixing_problem, warn_of_twins
from ep_moe.execution.similarity import Similarity
from ep_moe.parallel.call_facts import LEARNING_FACTS_PREFIX, different_backwards
from ep_moe.parallel.checksum import checksum, is_compared
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.types import capturing
from ep_moe.weights.expert_weights import ExpertWeights

_IN_BACKWARD = "backward by the comparison of ranks"


class ComparedLayer(ComparedExperts, Protocol):
    """The part of a MoELayer that a comparison reads."""

    _fixed: bool
    router: Any
    shared_experts: nn.Module | None
    _block: Callable[[], nn.Module | None]

    def _call_facts(self) -> str: ...


def compare_ranks(layer: ComparedLayer, problem: str | None, step: str = "first call", *, trains: bool = False) -> None:
    """Raise InputError on all ranks of a layer's call if they differ in state that must be equal.

    problem: a fault found on this rank, which all ranks then raise; step: the name of the step in errors; trains: as in
        `compare_experts`
    """
    device, whole = layer.context.device, layer.context.rank_groups["lockstep"]
    dense = dict(_dense(layer))
    sums, total = _sums(dense, device)
    with whole.flight_recorder.step(step):
        rows = whole.agree([len(dense), total], problem, device)
    if len({(row[0], row[1]) for row in rows}) > 1:
        raise InputError(
            f"{layer.name}: all ranks must hold the same router and shared experts, and "
            f"{_name_dense(whole, dense, sums, device)} differs from the others; call torch.manual_seed with one seed "
            f"on all ranks before the model is made, or load a checkpoint on all"
        )
    compare_experts(layer, layer.context.rank_groups["ep"], device, step, trains=trains)
    warn_of_twins(layer, layer.context.rank_groups["ep"], device, step)


def meets_before_sums(device: torch.device) -> bool:
    """Return whether ranks compare before each sum of gradients over EP groups, which waits for the device."""
    return device.type == "cpu"


class BackwardComparison:
    """Compares ranks in some backward passes of a layer: those of `is_compared`, from the second one on.

    It compares over two kinds of group, which together reach the whole pipeline stage: the ranks of the call
    ("lockstep"), and the ranks that sum gradients of the same experts ("expert_data").
    """

    def __init__(self, layer: ComparedLayer) -> None:
        self._layer = weakref.ref(layer)  # weak, because the layer's weights hold methods of this object
        self._backwards = {"lockstep": 0, "expert_data": 0}
        self._begun = 0  # backwards of the layer
        self._last = 0  # the call whose backward ran last
        self._warned = self._warned_of_buffer = False
        self._differs: set[str] = set()  # the kinds of group whose dense parameters differ
        self.similarity = Similarity()
        self.mixed: tuple[str, int] | None = None  # a problem of the experts, and the weights' `updates` at that time
        layout, weights = layer.context.layout, layer.expert_weights
        if layout.lockstep > 1 or layout.replicas > 1:
            weights.each_backward = self.on_backward
        if layout.replicas > 1:
            weights.gradient_sum.each_sum = self.on_sum

    def on_backward(self, call: int) -> None:
        """Compare ranks in the backward of the layer's call with this number.

        The difference to the previous backward's number must be equal on all ranks, else they run backward of different
        calls.
        """
        self._compare_learning()
        step, self._last = call - self._last, call
        layer = self._layer()
        if layer is not None and layer.context.layout.lockstep > 1:
            self.compare_in_backward("lockstep", step)

    def _compare_learning(self) -> None:
        """Compare which experts learn on the ranks that sum gradients of the same experts.

        A rank whose experts are all frozen does not enter the sum, and the others would wait for it. CPUs compare in
        each backward, GPUs in those of `is_compared`.

        Raises:
            InputError: on all ranks of the stage, if requires_grad differs.
        """
        layer = self._layer()
        if layer is None or capturing(layer.context.device):
            return
        weights, groups, device = layer.expert_weights, layer.context.rank_groups, layer.context.device
        if layer.context.layout.replicas == 1 or weights.sharded or not weights.has_expert_parameters:
            return
        self._begun += 1
        if not (meets_before_sums(device) or is_compared(self._begun)):
            return
        flags = "".join(str(int(parameter.requires_grad)) for parameter in weights.parameters())
        where, facts, problem = f"the backward of {layer.name}", f"{LEARNING_FACTS_PREFIX}{flags}", None
        with groups["expert_data"].flight_recorder.step(f"{_IN_BACKWARD} of {where}", counted=False):
            try:
                groups["expert_data"].agree([], None, device, call_name=where, call_facts=facts)
            except InputError as error:
                problem = str(error)
            # without facts, because ranks of one EP group hold different experts
            groups["lockstep"].agree([], problem, device, call_name=where, call_facts="", name_rank=False)

    def on_sum(self, batch: Tensor | None = None) -> None:
        """Compare the ranks that are about to sum gradients of the same experts.

        EP groups exchange nothing in forward, so they can run backward of layers in different orders. The sum would
        then add gradients of different layers. CPUs meet before each sum. GPUs would wait for that. They compare the
        layer's first sum on the host, through the store. In some later sums they compare the order of all sums so far.

        batch: a gradient of this rank that is a batch of several; the sum will refuse it

        Raises:
            InputError: on all ranks, if one is in the backward of another layer, or was since the last comparison.
        """
        layer = self._layer()
        if layer is None or capturing(layer.context.device):
            return
        rank_group = layer.context.rank_groups["expert_data"]
        with rank_group.flight_recorder.step(_IN_BACKWARD, counted=False):
            if meets_before_sums(layer.context.device):
                empty = torch.empty(0, dtype=torch.float32, device=layer.context.device)
                rank_group.meet_in_backward(layer.name, 0, empty if batch is None else batch)
            elif not self._backwards["expert_data"]:
                rank_group.meet_on_host(f"the backward of {layer.name}")
        rank_group.sum_order.add(layer.name)
        try:
            self.compare_in_backward("expert_data", rank_group.sum_order.digest)
        except InputError:  # on all ranks, whose later sums are compared anew
            rank_group.sum_order.digest = 0
            raise

    def compare_in_backward(self, kind: str, step: int = 0) -> None:
        """Compare ranks in a backward pass, and warn once, on all ranks, if dense parameters have drifted apart.

        They drift apart if optimizer steps use gradients that are not averaged: each rank has those of its own tokens.
        Collective over one kind of group. Waits for the device, so it is skipped in a graph capture.

        step: a number that is equal on all ranks that are in the backward of the same call

        Raises:
            InputError: on all ranks, if one is in the backward of another call.
        """
        layer = self._layer()
        if layer is None or capturing(layer.context.device):
            return
        self._backwards[kind] += 1
        number = self._backwards[kind]
        if number < 2 or not is_compared(number):
            return
        if kind == "lockstep" and (problem := self._mixed(layer)) is not None:  # the next call is refused, on all ranks
            self.mixed = problem, layer.expert_weights.updates
        if kind in self._differs:  # as it will in each comparison from now on. Experts are compared all the same
            return
        found = _drifted(layer, layer.context.rank_groups[kind], step)
        if found.buffer is not None:
            self._warn_of_buffer(layer, found.buffer)
        name = found.parameter
        if name is None:
            self._warn_of_sums(layer, dense_params_in_sync=found.dense_params_in_sync)
            return
        self._differs.add(kind)  # of this kind only: the ranks of the other group may not have found it
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{layer.name}: {name} differs from the other ranks' after {number} backward calls: the ranks train "
            "different models; average gradients before each optimizer step with "
            "ep_moe.training.sync_gradients(model, context) and clip them with clip_grad_norm_ of ep_moe.training, "
            "or wrap the model as docs/how-to/training.md shows",
            UserWarning,
            stacklevel=2,
        )

    def _mixed(self, layer: ComparedLayer) -> str | None:
        """Return what mixed the experts of different ranks, None for nothing."""
        rank_group = layer.context.rank_groups["ep"]
        problem = mixing_problem(layer, rank_group, _IN_BACKWARD)
        return problem or self.similarity.problem(layer, rank_group, _IN_BACKWARD)

    def _warn_of_buffer(self, layer: ComparedLayer, name: str) -> None:
        """Warn once about a buffer that differs. Parameters may be equal even so: gradients do not change buffers."""
        if self._warned_of_buffer:
            return
        self._warned_of_buffer = True
        warnings.warn(
            f"{layer.name}: the buffer {name} differs from the other ranks', because each rank updates it from its "
            "own tokens: the ranks may compute with different models; use torch.nn.SyncBatchNorm instead of "
            "BatchNorm, or broadcast the buffer before evaluation and saving, as DistributedDataParallel does in "
            "each forward",
            UserWarning,
            stacklevel=2,
        )

    def _warn_of_sums(self, layer: ComparedLayer, *, dense_params_in_sync: bool) -> None:
        """Warn once if gradients of experts are sums while those of dense parameters seem to be averages.

        That is so if dense parameters change in optimizer steps and stay equal on ranks: then the user's loop averages
        (or sums) dense gradients, and does not divide those of experts.
        """
        found, ranks = layer.expert_weights.gradient_sum, layer.context.layout.token_ranks
        if self._warned or ranks == 1 or found.divisor != 1 or found.wrapper_divisor is not None:
            return
        if not (found.router_steps or dense_params_in_sync):
            return
        self._warned = True
        which = "routers" if found.router_steps else "dense parameters"
        warnings.warn(
            f"{layer.name}: {which} stay equal on all ranks, so their gradients seem to be averaged over ranks, and "
            f"gradients of experts are sums over {ranks} ranks: they are {ranks} times too large; call "
            "ep_moe.training.sync_gradients(model, context) before each step instead of your own all_reduce",
            UserWarning,
            stacklevel=2,
        )


@dataclass(frozen=True)
class Drift:
    """The result of a comparison in a backward pass.

    parameter: names a parameter of router or shared experts that differs between ranks. If none does, names the other
        parameters of the experts' optimizer if they differ. None for no difference
    buffer: names a buffer of router or shared experts that differs
    dense_params_in_sync: whether the other parameters of the experts' optimizer have changed and are equal on ranks
    """

    parameter: str | None = None
    buffer: str | None = None
    dense_params_in_sync: bool = False


def _drifted(layer: ComparedLayer, rank_group: RankGroup, step: int) -> Drift:
    """Compare the ranks of a group in a backward pass.

    Raises InputError if one rank is in the backward of another call.

    step: as in `BackwardComparison.compare_in_backward`
    """
    device, dense = layer.context.device, dict(_dense(layer))
    parameters: dict[str, Tensor] = {name: held for name, held in dense.items() if isinstance(held, nn.Parameter)}
    buffers = {name: tensor for name, tensor in dense.items() if name not in parameters}
    kinds = [(held, *_sums(held, device)) for held in (parameters, buffers)]
    facts = torch.stack([*(total for _, _, total in kinds), kinds[0][2].new_full((), step), *_dense_checksums(layer)])
    with rank_group.flight_recorder.step(_IN_BACKWARD, counted=False):
        rows = rank_group.exchange(facts)
        for rank, row in zip(rank_group.ranks, rows, strict=True):
            if row[2] != rows[0][2]:
                pair = rank_group.ranks[0], rank
                raise InputError(different_backwards(f"the backward of {layer.name}", pair))
        named, of_buffers = (
            _name_dense(rank_group, held, sums, device) if len({row[at] for row in rows}) > 1 else None
            for at, (held, sums, _) in enumerate(kinds)
        )
    others = [row[3:] for row in rows]
    odd = _drifted_ranks(others)
    if named is None and odd:
        ranks = ", ".join(str(rank_group.ranks[at]) for at in odd)
        named = f"another parameter of the experts' optimizer, on rank{'s' if len(odd) > 1 else ''} {ranks},"
    return Drift(named, of_buffers, not odd and _dense_params_in_sync(others))


def _dense_checksums(layer: ComparedLayer) -> list[Tensor]:
    """Return three int64 [] tensors: this rank's place among the ranks with the same tokens, and two checksums.

    The checksums are of the other parameters of the experts' optimizer, before its first step and now.
    """
    layout, device = layer.context.layout, layer.context.device
    dense_checksum = layer.expert_weights.gradient_sum.dense_checksum
    zero = torch.zeros((), dtype=torch.int64, device=device)
    if dense_checksum is None or layout.token_ranks == 1:
        return [zero, zero, zero]
    return [zero + layout.place % layout.split, dense_checksum.before.to(device), dense_checksum.now().to(device)]


def _drifted_ranks(rows: list[list[int]]) -> list[int]:
    """Return the ranks of a group (as places) whose numbers now differ from the majority's.

    Only numbers that were equal on all ranks before count. Others may be shards that the user made.

    rows: the results of `_dense_checksums` of each rank
    """
    odd = []
    for alike in _by_copy(rows):
        if len({row[1] for _, row in alike}) == 1:
            most = Counter(row[2] for _, row in alike).most_common(1)[0][0]
            odd += [at for at, row in alike if row[2] != most]
    return sorted(odd)


def _dense_params_in_sync(rows: list[list[int]]) -> bool:
    """Return whether the other parameters of the experts' optimizer were equal on the group's ranks before, and have
    changed on all of them. rows: as in `_drifted_ranks`"""
    copies = _by_copy(rows)
    began_alike = all(len({row[1] for _, row in alike}) == 1 for alike in copies)
    return began_alike and max(map(len, copies)) > 1 and all(row[1] != row[2] for row in rows)


def _by_copy(rows: list[list[int]]) -> list[list[tuple[int, list[int]]]]:
    """Group rows by their rank's place among the tp ranks with the same tokens: lists of (place in the group, row).

    Only ranks of one list are compared. tp ranks with the same tokens are not compared with each other: without a sum
    over them, their gradients may differ by rounding.
    """
    return [[(at, row) for at, row in enumerate(rows) if row[0] == copy] for copy in sorted({row[0] for row in rows})]


def dense_digest(layer: ComparedLayer) -> int:
    """Return a checksum of the router and the shared experts. Waits for the device."""
    return int(_sums(dict(_dense(layer)), layer.context.device)[1])


def _sums(dense: dict[str, Tensor], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return the checksum of each tensor, and one of all together."""
    sums = [checksum(tensor, device) for tensor in dense.values()]
    total = checksum(torch.stack(sums), device) if sums else torch.zeros((), dtype=torch.int64, device=device)
    return sums, total


def _dense(layer: ComparedLayer) -> Iterable[tuple[str, Tensor]]:
    """Yield names and tensors that must be equal on all ranks: parameters and buffers of router and shared experts.

    They include the floating-point ones of the model's block around the layer, such as its own router. Tensors that a
    wrapper has sharded are left out.
    """
    for part in ("router", "shared_experts"):
        module = getattr(layer, part)
        if isinstance(module, nn.Module):
            yield from ((f"{part}.{name}", tensor) for name, tensor in _whole(module))
    block = layer._block()
    if block is not None:
        apart = [module for module in block.modules() if isinstance(module, ExpertWeights)]
        experts = {id(tensor) for module in apart for tensor in [*module.parameters(), *module.buffers()]}
        # integer tensors are skipped: counters may differ between ranks
        yield from ((n, t) for n, t in _whole(block) if id(t) not in experts and t.is_floating_point())


def _whole(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not (tensor.is_meta or hasattr(tensor, "placements")):
            yield name, tensor


def _name_dense(rank_group: RankGroup, dense: dict[str, Tensor], sums: list[Tensor], device: torch.device) -> str:
    """Return the name of the first tensor that differs, and its ranks. All ranks return the same text."""
    counts = {row[0] for row in rank_group.exchange(torch.tensor([len(dense)], dtype=torch.int64, device=device))}
    name = "router or shared_experts"
    if len(counts) == 1:
        rows = rank_group.exchange(torch.stack(sums))
        column = next(at for at, found in enumerate(zip(*rows, strict=True)) if len(set(found)) > 1)
        name = list(dense)[column]
        groups = Counter(row[column] for row in rows)
        odd = [
            rank for rank, row in zip(rank_group.ranks, rows, strict=True) if row[column] != groups.most_common(1)[0][0]
        ]
        name = f"{name} on rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
    return name
