"""Test that `send` places logical ids as `Placement` does before a send.

On a CPU, Triton's interpreter runs all ranks in turn, so no rank waits.
"""

from __future__ import annotations

import pytest
import torch

from ep_moe.all2all.base import DispatchShape
from ep_moe.all2all.nvlink_p2p.buffers import Workspace
from ep_moe.placement.deferred import DeferredRouting
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.placement.placement import Placement
from ep_moe.types import PhysicalIds, PhysicalRouting, Routing
from tests.fixtures.fp8_block_kernels import DEVICE
from tests.fixtures.host_word import HostWord
from tests.fixtures.p2p_kernels import signal_all_others, workspaces

pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe.all2all.nvlink_p2p import bulk, low_latency


def rotated(expert_map: ExpertMap) -> ExpertMap:
    """Return the map with every expert moved to the next rank."""
    slots, slots_per_rank = expert_map.physical_to_logical, expert_map.slots_per_rank
    return ExpertMap(
        physical_to_logical=slots[slots_per_rank:] + slots[:slots_per_rank],
        num_experts=expert_map.num_experts,
        num_ranks=4,
    )


SENDERS = ["by kernel", "by packets", "announced"]
PRESENT, MOST = (4, 0, 2, 3), 4  # tokens of each rank, and the token limit
HIDDEN = 1280  # a low-latency row has two pieces


class Placing:
    """A rank's placement by torch, one whose tables the kernels read, and the tensors of a captured call."""

    def __init__(self, expert_map: ExpertMap, rank: int, top_k: int, ids_dtype: torch.dtype) -> None:
        self.before, self.late = [Placement(expert_map, ep_rank=rank).to(device) for device in ("cpu", DEVICE)]
        self.rank, self.tokens, self.experts = rank, PRESENT[rank], expert_map.num_experts
        # rows beyond `tokens`, which no rank reads
        self.ids = torch.full((9, top_k), 1, dtype=ids_dtype, device=DEVICE)
        self.weights = torch.ones(9, top_k, device=DEVICE)
        self.x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16).to(DEVICE)
        self.invalid = HostWord()
        self.tables = self.late.tables._replace(invalid=self.invalid.address)

    def draw(self, seed: int) -> None:
        """Draw routes; some have no expert, some an unknown expert, and some occur twice."""
        generator = torch.Generator().manual_seed(100 * seed + self.rank)
        ids = torch.randint(-3, self.experts + 3, (self.tokens, self.ids.shape[1]), generator=generator)
        ids[3:4], ids[1:2, -1:] = -1, self.experts
        self.ids[: self.tokens] = ids.to(self.ids)
        self.weights[: self.tokens] = torch.rand(ids.shape, generator=generator).to(DEVICE)

    @property
    def x_here(self) -> torch.Tensor:
        return self.x[: self.tokens]

    def placed_before(self) -> PhysicalRouting:
        ids, weights = self.ids[: self.tokens], self.weights[: self.tokens]
        there = self.before(Routing(ids.cpu(), weights.cpu()))
        return PhysicalRouting(PhysicalIds(there.materialize().ids.to(DEVICE)), weights)

    def routing(self) -> DeferredRouting:
        return DeferredRouting(self.ids[: self.tokens], self.weights[: self.tokens], self.tables)

    def put(self, expert_map: ExpertMap) -> None:
        for placement in (self.before, self.late):
            placement.update(expert_map)


def send_all(sender: str, made: list[Workspace], calls: list[tuple[torch.Tensor, PhysicalRouting]]) -> None:
    for workspace, (x, routing) in zip(made, calls, strict=True):
        signal_all_others(made, workspace.rank, 0)
        if sender == "by kernel":
            bulk.send(workspace, x, None, routing, MOST, 3)
        elif sender == "announced":
            bulk.announce(workspace, None, routing, MOST)
        else:
            low_latency.send(workspace, x, None, routing, MOST, take=False)
    for workspace, (x, routing) in zip(made, calls, strict=True):
        if sender == "by packets":
            low_latency.send(workspace, x, None, placed_already(routing), MOST, put=False)
        workspace.sequence[2] = workspace.sequence[0]


def placed_already(routing: PhysicalRouting) -> PhysicalRouting:
    """Return a routing for the receiving half, which reads no ids. On GPUs one launch sends and receives."""
    return PhysicalRouting(PhysicalIds(torch.zeros_like(routing.weights, dtype=torch.int64)), routing.weights)


def valid_picks(placing: Placing) -> torch.Tensor:
    ids = placing.ids[: placing.tokens].flatten().long().cpu()
    return torch.bincount(ids[(ids >= 0) & (ids < placing.experts)], minlength=placing.experts)


MAPS = [
    (ExpertMap.linear(12, 4), ExpertMap.round_robin(12, 4), 1, torch.int32),
    (ExpertMap.redundant(10, 4, 6), rotated(ExpertMap.redundant(10, 4, 6)), 3, torch.int64),
    (ExpertMap.redundant(6, 4, 10), rotated(ExpertMap.redundant(6, 4, 10)), 4, torch.int32),
    (ExpertMap.uneven([7, 1, 3, 2]), ExpertMap.uneven([7, 1, 3, 2]), 3, torch.int64),
]
# LL packets take half a minute per map in the interpreter. One redundant and one uneven map suffice, since all senders
# place ids in the same way
SENT_AND_MAPS = [
    (sender, *maps) for sender in SENDERS for maps in MAPS if sender != "by packets" or maps in (MAPS[1], MAPS[3])
]


@pytest.mark.parametrize(("sender", "first", "later", "top_k", "ids_dtype"), SENT_AND_MAPS)
def test_placed_on_the_way_as_before_it(sender, first, later, top_k, ids_dtype):
    """Ids placed inside `send` leave the same bytes on all ranks, and the same loads, as ids placed before it.

    The call repeats on the same tensors after changes of the ids, then of the tables, then with counting off.
    """
    shape = DispatchShape(
        hidden_size=HIDDEN,
        top_k=top_k,
        slots_per_rank=first.slots_per_rank,
        num_ranks=4,
        dtype=torch.bfloat16,
        max_tokens=9,
    )
    found, wanted = workspaces(shape, DEVICE), workspaces(shape, DEVICE)
    ranks = [Placing(first, rank, top_k, ids_dtype) for rank in range(4)]
    counted = [torch.zeros(first.num_experts, dtype=torch.int64) for _ in ranks]
    for number, change in enumerate(("first", "ids", "tables", "counting")):
        for placing in ranks:
            if change != "tables":
                placing.draw(number)
            else:
                placing.put(later)
            if change == "counting":
                for placement in (placing.before, placing.late):
                    placement.counting.zero_()
        for workspace in (*found, *wanted):
            workspace.sent_ids.fill_(99)
        send_all(sender, wanted, [(placing.x_here, placing.placed_before()) for placing in ranks])
        send_all(sender, found, [(placing.x_here, placing.routing()) for placing in ranks])
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours.memory.local, theirs.memory.local), change
            assert torch.equal(ours.sent_ids, theirs.sent_ids), change
            assert (ours.sent_ids[:MOST] < 99).all()
        for placing, sum_ in zip(ranks, counted, strict=True):
            ids = placing.ids[: placing.tokens].flatten().tolist()
            unknown = [id_ for id_ in ids if not -1 <= id_ < placing.experts]
            if sender != "announced" or DEVICE != "cpu":  # torch has placed these before
                assert placing.invalid.read() in (unknown or [-1]), "the host learns one of the ids that name no expert"
            placing.invalid.write(-1)
            sum_ += valid_picks(placing) * (change != "counting")
            assert torch.equal(placing.late.expert_load.cpu(), sum_), "once per route"
            assert torch.equal(placing.late.expert_load.cpu(), placing.before.expert_load), change
            assert torch.equal(placing.late.slot_load.cpu(), placing.before.slot_load), change


@pytest.mark.parametrize("sender", SENDERS[:2])
def test_ids_that_were_materialized_are_sent_as_they_are(sender):
    """A routing that was already materialized is sent with its ids, and is not counted again."""
    expert_map = ExpertMap.redundant(10, 4, 6)
    shape = DispatchShape(
        hidden_size=HIDDEN,
        top_k=3,
        slots_per_rank=expert_map.slots_per_rank,
        num_ranks=4,
        dtype=torch.bfloat16,
        max_tokens=9,
    )
    found, wanted = workspaces(shape, DEVICE), workspaces(shape, DEVICE)
    ranks = [Placing(expert_map, rank, 3, torch.int64) for rank in range(4)]
    for placing in ranks:
        placing.draw(0)
    routings = [placing.routing() for placing in ranks]
    looked = [routing.materialize().ids for routing in routings]
    send_all(sender, found, [(placing.x_here, routing) for placing, routing in zip(ranks, routings, strict=True)])
    for placing, routing, ids in zip(ranks, routings, looked, strict=True):
        before = placing.placed_before()
        assert torch.equal(ids, before.ids)
        assert routing.materialize().ids is ids, "they are kept"
        assert torch.equal(placing.late.slot_load.cpu(), placing.before.slot_load)
    send_all(sender, wanted, [(placing.x_here, placing.placed_before()) for placing in ranks])
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.memory.local, theirs.memory.local)
