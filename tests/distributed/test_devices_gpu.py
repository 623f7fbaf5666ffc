"""Scripts that never call `torch.cuda.set_device`: each rank computes on its own GPU although device 0 is current.

Run under torchrun on 2 GPUs. Results are compared with a layer of one process on the same device.
"""

import time

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, EPLBConfig, ExpertBalancer, ExpertMap, MoEConfig, MoELayer, OutOfMemory, Routing
from ep_moe.parallel.rank_group import barrier
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import gather_from_all_ranks

CONFIG = MoEConfig(hidden_size=512, intermediate_size=256, num_experts=16, top_k=4)
BF16 = torch.bfloat16
LIMIT = 0.03  # relative to the largest magnitude, in bfloat16

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs, and torchrun with a rank on each")


def filled(context, **how):
    """Build a layer with equal weights on all ranks, for any layout."""
    layer = MoELayer(CONFIG, context, dtype=BF16, **how)
    generator = torch.Generator().manual_seed(1)
    for expert in range(CONFIG.num_experts):
        w13 = torch.randn(2 * CONFIG.intermediate_size, CONFIG.hidden_size, generator=generator) * 0.05
        w2 = torch.randn(CONFIG.hidden_size, CONFIG.intermediate_size, generator=generator) * 0.05
        layer.update_expert(expert, w13=w13, w2=w2)
    with torch.no_grad():
        layer.router.weight.copy_(torch.randn(CONFIG.num_experts, CONFIG.hidden_size, generator=generator))
    return layer


def rows(device, count=300):
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    return torch.randn(count, CONFIG.hidden_size, generator=generator).to(device, BF16)


def routes(device, count=300):
    generator = torch.Generator().manual_seed(20 + dist.get_rank())
    ids = torch.rand(count, CONFIG.num_experts, generator=generator).topk(CONFIG.top_k).indices.to(device)
    return Routing(ids, torch.full(ids.shape, 0.25, device=device))


def reference(device):
    return filled(EPContext.local(device), experts="reference")


def same(found, wanted):
    assert found.device == wanted.device
    off = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert off < LIMIT, float(off)


@pytest.fixture(autouse=True)
def _device_is_not_set():
    assert torch.cuda.current_device() == 0
    yield
    assert torch.cuda.current_device() == 0


@distributed(2)
@torch.no_grad()
def test_a_default_context_and_another_with_fixed_buffers(world_size):
    """A default context and then one with fixed buffers both work.

    In this order the first call of the second context once hung.
    """
    device = rank_device()
    x, wanted = rows(device), reference(device)(rows(device))
    with EPContext.from_torchrun(deadline_s=30.0) as first:
        assert first.device == device
        same(filled(first)(x), wanted)
        with EPContext.from_torchrun(max_tokens=4096, deadline_s=30.0) as second:
            layer = filled(second)
            for _ in range(4):  # the call is replayed from the third on
                same(layer(x), wanted)
            empty = x[:0] if dist.get_rank() else x
            assert layer(empty).shape == empty.shape
            with second.token_limit(512):
                for _ in range(4):
                    same(layer(x), wanted)
            same(filled(first)(x), wanted)


@distributed(2)
@torch.no_grad()
def test_a_stream_of_the_users(world_size):
    device = rank_device()
    x, wanted = rows(device), reference(device)(rows(device))
    with EPContext.from_torchrun(max_tokens=4096, deadline_s=30.0) as context:
        layer, stream = filled(context), torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            found = [layer(x) for _ in range(4)]
        torch.cuda.current_stream(device).wait_stream(stream)
        for y in found:
            same(y, wanted)


@distributed(2)
@pytest.mark.parametrize("all2all", ["torch_a2a", "allgather"])
def test_gradients_of_forward_routed(all2all, world_size):
    device = rank_device()
    routing, grads = routes(device), []
    with EPContext.from_torchrun(deadline_s=30.0) as context:
        for layer in (reference(device), filled(context, experts="reference", all2all=all2all)):
            x = rows(device).requires_grad_()
            layer.forward_routed(x, routing).float().square().sum().backward()
            grads.append(x.grad)
    same(grads[1], grads[0])


@distributed(2)
@torch.no_grad()
def test_captures(world_size):
    device = rank_device()
    x, one = rows(device), reference(device)
    wanted = one(x)
    with EPContext.from_torchrun(max_tokens=512, deadline_s=30.0) as context:
        layer = filled(context)
        context.tune([8, 512])
        same(layer(x), wanted)
        context.capture([8, 300])
        for count in (300, 5):
            same(layer(x[:count]), wanted[:count])
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
            y = layer(x)
        graph.replay()
        same(y, wanted)


@distributed(2)
@torch.no_grad()
def test_parts_and_shared_streams(world_size):
    device = rank_device()
    x, wanted = rows(device), reference(device)(rows(device))
    with EPContext.from_torchrun(max_tokens=512, deadline_s=30.0) as context:
        layer = filled(context, pipeline=128)
        for _ in range(3):
            same(layer(x), wanted)


@distributed(2)
@torch.no_grad()
def test_experts_that_move(world_size):
    device = rank_device()
    x, wanted = rows(device), reference(device)(rows(device))
    with EPContext.from_torchrun(max_tokens=512, deadline_s=30.0) as context:
        maps = ExpertMap.redundant(CONFIG.num_experts, world_size, 4)
        layers = [filled(context, expert_map=maps).requires_grad_(False) for _ in range(2)]
        with ExpertBalancer(layers, context, EPLBConfig(interval=8, window=6)) as balancer:
            for _ in range(60):
                for layer in layers:
                    same(layer(x), wanted)
                balancer.step()
            balancer.settle()
        for layer in layers:
            assert sum(layer.stats().expert_load) > 0


def all_memory(device: torch.device) -> list[torch.Tensor]:
    """Take all free memory of a device, in pieces of decreasing size."""
    held, size = [], 1 << 34
    torch.cuda.empty_cache()
    while size >= 1 << 20:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    return held


@distributed(2)
@torch.no_grad()
def test_memory_that_is_not_there_on_one_rank(world_size):
    device = rank_device()
    context = EPContext.from_torchrun(deadline_s=30.0)
    layer, x = filled(context), rows(device).repeat(400, 1)
    full, start, hold = dist.get_rank() == 1, time.monotonic(), None

    def twice():
        """Call twice: a rank whose device waits hears of a failure at its next step at the latest."""
        layer(x)
        torch.cuda.synchronize(device)
        layer(x)

    if full:
        hold = all_memory(device)
    try:
        with pytest.raises(OutOfMemory) as first:
            twice()
    finally:
        del hold
        torch.cuda.empty_cache()
    assert time.monotonic() - start < 2 * 30.0
    assert isinstance(first.value, torch.OutOfMemoryError)
    with pytest.raises(OutOfMemory) as again:
        layer(x)
    texts = gather_from_all_ranks(str(again.value))
    assert texts[0] == texts[1]
    assert texts[0].startswith("rank 1 ran out of memory on cuda:1 in a call of ")
    context.flight_recorder.close()


@distributed(2)
def test_a_group_that_the_user_made_without_a_device(world_size):
    """A context works over a group that was made without `device_id`, as in most scripts.

    NCCL then creates the communicator at the first collective.
    """
    device = rank_device()
    group = dist.new_group(list(range(world_size)))
    barrier(device, group)
    with (
        torch.no_grad(),
        EPContext.from_groups(groups={"ep": group}, device=device, max_tokens=512, deadline_s=30.0) as context,
    ):
        same(filled(context)(rows(device)), reference(device)(rows(device)))
