"""`bench/weight_push` measures what it claims, on a small model on a CPU."""

import torch

from ep_moe import EPContext, MoEConfig, ParallelConfig
from ep_moe.bench import weight_push
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import quiet
from tests.fixtures.distributed_cases import gather_from_all_ranks

CONFIG = MoEConfig(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2)


@distributed(1, 2)
def test_a_push_and_its_floor(world_size, monkeypatch):
    quiet()
    monkeypatch.setattr(weight_push, "_BANDWIDTH_BYTES", 1 << 16)
    pushed, load = [], weight_push.load_weights
    monkeypatch.setattr(weight_push, "load_weights", lambda *given: pushed.append(load(*given)))
    for ep in {1, world_size}:
        with (
            EPContext.from_groups(ParallelConfig(dp=world_size, ep=ep), device=rank_device()) as ours,
            EPContext.from_groups(ParallelConfig(dp=world_size), device=rank_device()) as theirs,
        ):
            found = weight_push.measure(ours, theirs, CONFIG, "fp8_dynamic", layers=2, dtype=torch.bfloat16, repeat=2)
        experts = 2 * 8 * 3 * 64 * 32 * 2
        assert found.bytes > experts, "and attention, embeddings"
        assert found.bytes < 1.7 * experts
        assert (found.ranks, found.trainer_ep, found.layers) == (world_size, ep, 2)
        assert len(pushed) == 3, "one is thrown away"
        assert {len(names) for names in pushed} == {len(pushed[0])}
        pushed.clear()
        assert (found.broadcast is None) == (ep == 1)
        own = found.bytes - experts + experts * (8 + world_size * (world_size > 1)) / world_size / 8
        floor = own / found.copy + (0 if found.broadcast is None else experts / found.broadcast)
        assert abs(found.floor_s / floor - 1) < 1e-9
        assert 0 < found.per_second == found.bytes / found.push_s / 1e9
        assert len(set(gather_from_all_ranks(found))) == 1, "the slowest rank's, on all"
        assert "fp8_dynamic" in list(weight_push.shown("", [found]).columns[0].cells)
