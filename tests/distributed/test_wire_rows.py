"""The byte model `bench.wire_rows` equals bytes that ranks count, on simulated hosts.

Each rank sends every combination of K experts, with every combination of replicas, once. Counted bytes then equal the
model's expectations.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, ExpertMap, MoEConfig, Wire
from ep_moe.all2all.base import DispatchShape
from ep_moe.all2all.hierarchical import HierarchicalDispatcher
from ep_moe.all2all.hierarchical_static import HierarchicalStaticDispatcher
from ep_moe.all2all.torch_collectives import TorchAll2AllDispatcher
from ep_moe.bench.wire_rows import WAYS, filling, row_bytes
from ep_moe.testing import distributed, rank_device
from ep_moe.testing.transport_case import rounded
from ep_moe.types import PhysicalRouting
from tests.fixtures.counted_links import counted_links
from tests.fixtures.distributed_cases import gather_from_all_ranks

HIDDEN, TOP_K = 256, 2
PLAIN = Wire()
KINDS = [TorchAll2AllDispatcher, HierarchicalDispatcher, HierarchicalStaticDispatcher]


def every_choice(expert_map: ExpertMap) -> torch.Tensor:
    """Return physical ids, int64 [T, K]: every combination of K experts equally often."""
    slots, most = expert_map.logical_to_physical, max(expert_map.replica_count)
    found = []
    for chosen in itertools.combinations(range(expert_map.num_experts), TOP_K):
        for picks in itertools.product(range(most), repeat=TOP_K):
            replicas = [slots[expert] for expert in chosen]
            assert all(most % len(one) == 0 for one in replicas)
            found.append([one[pick % len(one)] for one, pick in zip(replicas, picks, strict=True)])
    return torch.tensor(found)


def received(kind, context: EPContext, expert_map: ExpertMap, wire: Wire) -> tuple[int, tuple[int, int]]:
    """Return the tokens of a rank, and the most bytes of any rank over near and far links, dispatch plus combine."""
    ranks, device, ids = dist.get_world_size(), rank_device(), every_choice(expert_map)
    shape = DispatchShape(
        hidden_size=HIDDEN, top_k=TOP_K, slots_per_rank=expert_map.slots_per_rank, num_ranks=ranks,
        dtype=torch.bfloat16, max_tokens=len(ids), wire=wire,
    )  # fmt: skip
    dispatcher = kind(shape, context.rank_groups["ep"])
    x, scale = rounded(torch.ones(len(ids), HIDDEN, dtype=torch.bfloat16, device=device), shape)
    routing = PhysicalRouting(ids.to(device), torch.ones(ids.shape, device=device))
    with counted_links(context) as links:
        arrived = dispatcher.dispatch(x, routing, scale, max_tokens=len(ids))
        out = links.near_received, links.far_received
        links.clear()
        dispatcher.combine(torch.zeros(len(arrived.x), HIDDEN, dtype=torch.bfloat16, device=device), arrived.handle)
    # for combine, sender and receiver are exchanged
    own = [one + back for one, back in zip(out, (links.near_sent, links.far_sent), strict=True)]
    return len(ids), tuple(max(gather_from_all_ranks(size)) for size in own)


def differences(experts: int, redundant: int, per_host: int, wire: Wire = PLAIN, kinds=KINDS) -> list[str]:
    """Return the transports whose bytes differ from the model's."""
    ranks = dist.get_world_size()
    config = MoEConfig(hidden_size=HIDDEN, intermediate_size=16, num_experts=experts, top_k=TOP_K)
    expert_map, found = ExpertMap.redundant(experts, ranks, redundant), []
    with EPContext.from_groups(device=rank_device(), ranks_per_node=per_host) as context:
        for kind in kinds:
            tokens, counted = received(kind, context, expert_map, wire)
            rows = WAYS[kind.name](config, ranks, per_host, redundant)
            row = sum(row_bytes(config, wire, rows.routes))
            if counted != pytest.approx((tokens * rows.near * row, tokens * rows.far * row)):
                found.append(f"{kind.name}: {counted}, {rows}")
    return found


@distributed(2, deadline_s=60)
def test_bytes_on_2_ranks(world_size):
    for per_host in (1, 2):
        assert differences(8, 0, per_host) == []


@distributed(4, deadline_s=120)
@pytest.mark.parametrize("wire", [PLAIN, Wire(dispatch="fp8_block")], ids=lambda wire: wire.dispatch)
def test_bytes_on_2_hosts_of_2_ranks(wire, world_size):
    assert differences(8, 0, 2, wire) == []


@distributed(4, deadline_s=120)
@pytest.mark.parametrize("per_host", [1, 2, 4])
@pytest.mark.parametrize(
    ("experts", "redundant"),
    [(6, 2), (3, 1), (2, 2), (6, 0), (3, 0)],
    ids=["redundant", "fewer experts than ranks, filled", "two replicas of each", "uneven", "a rank without experts"],
)
def test_bytes_of_maps(experts, redundant, per_host, world_size):
    assert redundant in (0, filling(experts, world_size))
    assert differences(experts, redundant, per_host) == []


class TwiceOverTheRail(HierarchicalDispatcher):
    """Plant: send each row over the rail twice."""

    def __init__(self, *args):
        super().__init__(*args)
        once = self._over_rail

        def twice(x, send, receive):
            once(x, send, receive).wait()
            return once(x, send, receive)

        self._over_rail = twice


@distributed(4, deadline_s=60)
def test_a_row_too_many_is_seen(world_size):
    (found,) = differences(8, 0, 2, kinds=[TwiceOverTheRail])
    assert found.startswith("hierarchical: ")
