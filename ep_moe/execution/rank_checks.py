"""What must be alike on ranks, looked at once: dense parameters, the map, copies of experts, and wrappers' doings.

Ranks that hold different numbers where they should hold the same compute without an error, and wrongly. The usual ways
there: another seed on each rank, a wrapper that broadcasts rank 0's experts, a checkpoint that one rank did not load.
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import InputError
from ep_moe.parallel.rank_group import RankGroup, checksum
from ep_moe.placement.placement import Placement
from ep_moe.runtime.devices import with_index
from ep_moe.types import capturing
from ep_moe.weights.expert_weights import ExpertWeights

_SAMPLE = 1 << 14  # numbers of a slot's tensor that tell experts apart

_WRAPPED = (
    "DistributedDataParallel has overwritten the experts of each rank with rank 0's, and would average gradients of "
    "different experts; wrap DistributedDataParallel(ep_moe.training.exclude_experts(model)), and load the weights anew"
)


class Layer(Protocol):
    """What is asked of a MoELayer."""

    name: str
    _fixed: bool
    config: MoEConfig
    context: EPContext
    placement: Placement
    router: Any
    shared_experts: nn.Module | None
    expert_weights: ExpertWeights

    def _carried(self) -> str: ...


class RankChecks:
    """Of one layer. `first_call` looks once; backward looks at its calls number 2, 4, 8 and so on."""

    def __init__(self, layer: Layer) -> None:
        self._done = False
        self.saw_ids = False  # valid ones, in some call
        self.forwards = 0  # that began, of which some may have ended by an exception
        self.dtype: torch.dtype | None = None  # of fixed buffers, once all ranks have them
        self._wrapper: weakref.ref[Any] | None = None
        self._backwards = 0
        if layer.context.layout.stage > 1:
            own = weakref.ref(layer)  # the layer holds what it hands this to
            layer.expert_weights.gradient_sum.each_backward = lambda: self.after_steps(own())

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
        layout = layer.context.layout
        ranks = sorted(dist.get_process_group_ranks(wrapper.process_group))
        if ranks not in (sorted(layout.group("stage")), sorted(layout.group("dp"))):
            return (
                f"DistributedDataParallel averages over ranks {', '.join(map(str, ranks))}, and this layer's experts "
                f"get gradients of ranks {', '.join(map(str, sorted(layout.group('stage'))))}; give it a process_group "
                f"of these"
            )
        layer.expert_weights.gradient_sum.divisor = layout.token_ranks  # as it does with dense ones
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
        with layer.context._entered(layer.name, layer._carried()), torch.no_grad():
            whole = layer.context.rank_groups["lockstep"]
            dense = dict(_dense(layer))
            text = zlib.crc32(layer.placement.expert_map.to_json().encode())
            sums = [checksum(tensor, device) for tensor in dense.values()]
            total = checksum(torch.stack(sums), device) if sums else 0
            with whole.flight_recorder.step("first call"):
                rows = whole.agree([len(dense), text, total], self.wrapper_problem(layer), device)
            if len({(row[0], row[2]) for row in rows}) > 1:
                raise InputError(
                    f"{layer.name}: all ranks must hold the same router and shared experts, and "
                    f"{_name_dense(whole, dense, sums, device)} differs from the others; call torch.manual_seed with "
                    f"one seed on all ranks before the model is made, or load a checkpoint on all"
                )
            if len({row[1] for row in rows}) > 1:
                raise InputError(
                    f"{layer.name}: the ranks have different expert maps in force; load state_dict, and call "
                    f"Placement.update, on all ranks alike"
                )
            _compare_experts(layer, layer.context.rank_groups["ep"], device)
        self._done = True
        self.dtype = layer.expert_weights.dtype if layer._fixed else None

    def after_steps(self, layer: Layer | None) -> None:
        """Warn, on all ranks and once, where optimizer steps let dense parameters drift apart: each rank's gradients
        are of its own tokens until something averages them. Collective over the stage, within a backward. Waits for
        the device, and so not inside a graph capture."""
        if layer is None or capturing(layer.context.device):
            return
        self._backwards += 1
        if self._backwards < 2 or self._backwards & (self._backwards - 1):
            return
        rank_group, device = layer.context.rank_groups["stage"], layer.context.device
        dense = dict(_dense(layer))
        sums = [checksum(tensor, device) for tensor in dense.values()]
        total = checksum(torch.stack(sums), device) if sums else torch.zeros((), dtype=torch.int64, device=device)
        with rank_group.flight_recorder.step("backward by the comparison of ranks", counted=False):
            if len({row[0] for row in rank_group.exchange(total.reshape(1))}) == 1:
                return
            name = _name_dense(rank_group, dense, sums, device)
        layer.expert_weights.gradient_sum.each_backward = None
        warnings.warn(
            f"{layer.name}: {name} differs from the other ranks' after {self._backwards} backward calls, so that ranks "
            f"train different models; average gradients before each optimizer step with "
            f"ep_moe.training.sync_gradients(model, context), or wrap the model as docs/how-to/training.md shows",
            UserWarning,
            stacklevel=2,
        )


def _dense(layer: Layer) -> Iterable[tuple[str, Tensor]]:
    """Parameters and buffers that all ranks hold alike; not what a wrapper has cut."""
    for part in ("router", "shared_experts"):
        module = getattr(layer, part)
        if isinstance(module, nn.Module):
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if not (tensor.is_meta or hasattr(tensor, "placements")):
                    yield f"{part}.{name}", tensor


def _name_dense(rank_group: RankGroup, dense: dict[str, Tensor], sums: list[Tensor], device: torch.device) -> str:
    """What differs, and on which ranks: the same words on all of them."""
    counts = {row[0] for row in rank_group.exchange(torch.tensor([len(dense)], device=device))}
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


def _compare_experts(layer: Layer, rank_group: RankGroup, device: torch.device) -> None:
    """Copies of an expert must be equal; whole ranks must not be."""
    weights, expert_map = layer.expert_weights, layer.placement.expert_map
    if rank_group.size == 1 or not weights.stored_tensors():
        return
    slots_per_rank = expert_map.slots_per_rank
    facts = torch.zeros(slots_per_rank, 2, dtype=torch.int64, device=device)
    many = set(expert_map.replicated)
    for slot, expert in enumerate(weights.local_experts):
        if expert >= 0 and not weights.is_meta:
            tensors = [tensor[slot].detach() for tensor in weights.stored_tensors().values()]
            facts[slot, 0] = _of_all([tensor.flatten()[:_SAMPLE] for tensor in tensors], device)
            facts[slot, 1] = _of_all(tensors, device) if expert in many else 0
    with rank_group.flight_recorder.step("first call"):
        rows = [list(zip(row[::2], row[1::2], strict=True)) for row in rank_group.exchange(facts.flatten())]
    for expert in many:
        found = {
            rows[slot // slots_per_rank][slot % slots_per_rank][1] for slot in expert_map.logical_to_physical[expert]
        }
        if len(found) > 1:
            ranks = sorted(
                {rank_group.ranks[slot // slots_per_rank] for slot in expert_map.logical_to_physical[expert]}
            )
            raise InputError(
                f"{layer.name}: copies of expert {expert} on ranks {', '.join(map(str, ranks))} differ; write "
                f"experts with update_expert on all ranks, or load a checkpoint on all"
            )
    for rank in range(1, rank_group.size):
        first, own = [row[0] for row in rows[0]], [row[0] for row in rows[rank]]
        other = expert_map.local(0) != expert_map.local(rank)
        if other and first == own and len(set(own)) == slots_per_rank > 1:
            raise InputError(
                f"{layer.name}: rank {rank_group.ranks[rank]} holds for its experts the numbers of rank "
                f"{rank_group.ranks[0]}'s: "
                f"something has broadcast one rank's parameters to all (a data-parallel wrapper, a loop). "
                f"Leave ep_moe.training.expert_parameters(model) out of it, and load the weights anew"
            )


def _of_all(tensors: list[Tensor], device: torch.device) -> Tensor:
    return checksum(torch.stack([checksum(tensor, device) for tensor in tensors]), device)


# --- fresh numbers ----------------------------------------------------------------------------------------------------
# The numbers of a fresh layer: the same ones on all ranks, under every layout and map.


@contextmanager
def fresh_numbers(context: EPContext, device: torch.device) -> Iterator[None]:
    """Within, torch's default generators begin with a seed that all ranks of the stage share: one number that the first
    rank draws from its own default generator. Afterwards they go on as if that number were all that was drawn, so that
    what a model draws next depends on no layout either. On the meta device nothing is drawn."""
    if device.type == "meta":
        yield
        return
    seed = context._shared_seed(int(torch.randint(2**62, (), device="cpu")))
    index = with_index(device).index
    gpus = [index] if device.type == "cuda" and index is not None else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(seed)
        yield
