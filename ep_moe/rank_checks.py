"""What must be alike on ranks, looked at once: dense parameters, the map, copies of experts, and wrappers' doings.

Ranks that hold different numbers where they should hold the same compute without an error, and wrongly. The usual ways
there: another seed on each rank, a wrapper that broadcasts rank 0's experts, a checkpoint that one rank did not load.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import InputError
from ep_moe.parallel.link import Link
from ep_moe.placement.placement import Placement
from ep_moe.types import capturing
from ep_moe.weights.checksum import checksum
from ep_moe.weights.expert_weights import ExpertWeights

_SAMPLE = 1 << 14  # numbers of a slot's tensor that tell experts apart

_WRAPPED = (
    "DistributedDataParallel has overwritten the experts of each rank with rank 0's, and would average gradients of "
    "different experts; wrap DistributedDataParallel(ep_moe.training.exclude_experts(model)), and load the weights anew"
)


class Layer(Protocol):
    """What is asked of a MoELayer."""

    name: str
    fixed: bool
    config: MoEConfig
    context: EPContext
    placement: Placement
    router: Any
    shared_experts: nn.Module | None
    expert_weights: ExpertWeights

    @property
    def carried(self) -> str: ...


class RankChecks:
    """Of one layer; `first_call` looks once."""

    def __init__(self) -> None:
        self._done = False
        self.dtype: torch.dtype | None = None  # of fixed buffers, once all ranks have them
        self._wrapper: weakref.ref[Any] | None = None

    def wrapper_problem(self, layer: Layer) -> str | None:
        """None, or what the wrapper that calls this layer does to its experts."""
        if layer.context.layout.world == 1:
            return None
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is None or (self._wrapper is not None and self._wrapper() is wrapper):
            return None
        managed = {id(parameter) for parameter in wrapper._module_parameters}
        if any(id(p) in managed for p in layer.expert_weights.parameters()):
            return _WRAPPED
        layer.expert_weights.gradient_sum.divisor = layer.context.layout.token_ranks  # as it does with dense ones
        self._wrapper = weakref.ref(wrapper)
        return None

    def first_call(self, layer: Layer) -> None:
        """Raise InputError on all ranks of the layer's first call unless they hold alike what they should. Waits for
        the device, and so not inside a graph capture."""
        if self._done or layer.context.layout.lockstep == 1:
            return
        device = layer.context.device
        if torch.compiler.is_compiling() or capturing(device):
            return
        with layer.context.entered(layer.name, layer.carried), torch.no_grad():
            whole = layer.context.links["lockstep"]
            dense = dict(_dense(layer))
            text = zlib.crc32(layer.placement.expert_map.to_json().encode())
            sums = [checksum(tensor, device) for tensor in dense.values()]
            total = checksum(torch.stack(sums), device) if sums else 0
            with whole.ledger.step("first call"):
                rows = whole.agree([total, len(dense), text], self.wrapper_problem(layer), device)
            if len({(row[0], row[1]) for row in rows}) > 1:
                _name_dense(layer, whole, dense, sums)
            if len({row[2] for row in rows}) > 1:
                raise InputError(
                    f"{layer.name}: the ranks have different expert maps in force; load state_dict, and call "
                    f"Placement.update, on all ranks alike"
                )
            _compare_experts(layer, layer.context.links["ep"], device)
        self._done = True
        self.dtype = layer.expert_weights.dtype if layer.fixed else None


def _dense(layer: Layer) -> Iterable[tuple[str, Tensor]]:
    """Parameters and buffers that all ranks hold alike; not what a wrapper has cut."""
    for part in ("router", "shared_experts"):
        module = getattr(layer, part)
        if isinstance(module, nn.Module):
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if not (tensor.is_meta or hasattr(tensor, "placements")):
                    yield f"{part}.{name}", tensor


def _name_dense(layer: Layer, link: Link, dense: dict[str, Tensor], sums: list[Tensor]) -> None:
    """Every rank finds the same difference."""
    counts = {row[0] for row in link.exchange(torch.tensor([len(dense)], device=layer.context.device))}
    name = "router or shared_experts"
    if len(counts) == 1:
        rows = link.exchange(torch.stack(sums))
        column = next(at for at, found in enumerate(zip(*rows, strict=True)) if len(set(found)) > 1)
        name = list(dense)[column]
        groups = Counter(row[column] for row in rows)
        odd = [rank for rank, row in zip(link.ranks, rows, strict=True) if row[column] != groups.most_common(1)[0][0]]
        name = f"{name} on rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
    raise InputError(
        f"{layer.name}: all ranks must hold the same router and shared experts, and {name} differs from the others; "
        f"call torch.manual_seed with one seed on all ranks before the model is made, or load a checkpoint on all"
    )


def _compare_experts(layer: Layer, link: Link, device: torch.device) -> None:
    """Copies of an expert must be equal; whole ranks must not be."""
    weights, expert_map = layer.expert_weights, layer.placement.expert_map
    if link.size == 1 or not weights.tensors:
        return
    cap = expert_map.cap
    facts = torch.zeros(cap, 2, dtype=torch.int64, device=device)
    many = set(copied(weights))
    for slot, expert in enumerate(weights.local_experts):
        if expert >= 0 and not weights.is_meta:
            tensors = [tensor[slot].detach() for tensor in weights.tensors.values()]
            facts[slot, 0] = _of_all([tensor.flatten()[:_SAMPLE] for tensor in tensors], device)
            facts[slot, 1] = _of_all(tensors, device) if expert in many else 0
    with link.ledger.step("first call"):
        rows = [list(zip(row[::2], row[1::2], strict=True)) for row in link.exchange(facts.flatten())]
    for expert in many:
        found = {rows[slot // cap][slot % cap][1] for slot in expert_map.logical_to_physical[expert]}
        if len(found) > 1:
            ranks = sorted({link.ranks[slot // cap] for slot in expert_map.logical_to_physical[expert]})
            raise InputError(
                f"{layer.name}: copies of expert {expert} on ranks {', '.join(map(str, ranks))} differ; write "
                f"experts with update_expert on all ranks, or load a checkpoint on all"
            )
    for rank in range(1, link.size):
        first, own = [row[0] for row in rows[0]], [row[0] for row in rows[rank]]
        other = expert_map.local(0) != expert_map.local(rank)
        if other and first == own and len(set(own)) == cap > 1:
            raise InputError(
                f"{layer.name}: rank {link.ranks[rank]} holds for its experts the numbers of rank {link.ranks[0]}'s: "
                f"something has broadcast one rank's parameters to all (a data-parallel wrapper, a loop). "
                f"Leave ep_moe.training.expert_parameters(model) out of it, and load the weights anew"
            )


def copied(weights: ExpertWeights) -> list[int]:
    """Logical experts with more than one slot in the EP group."""
    return [expert for expert, count in enumerate(weights.expert_map.replica_count) if count > 1]


def _of_all(tensors: list[Tensor], device: torch.device) -> Tensor:
    return checksum(torch.stack([checksum(tensor, device) for tensor in tensors]), device)
