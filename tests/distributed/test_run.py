"""`ep-moe run` on several ranks reports on all of them."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, MoEConfig, MoELayer, ParallelConfig
from ep_moe.cli import run
from ep_moe.testing import distributed, rank_device

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)


@distributed(2)
def test_a_reading_has_the_slowest_ranks_stages_and_the_sums_of_all(world_size):
    rank = dist.get_rank()

    @contextmanager
    def watched(context):
        yield SimpleNamespace(milliseconds=lambda: {"route": 1.0 + rank, "experts": 4.0 - rank})

    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context, torch.no_grad():
        layer = MoELayer(CONFIG, context)

        def forward(step):
            layer(torch.ones(3 + rank, 16, device=context.device))
            return 0.5, 3 + rank

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "watched_stages", watched)
            reading = run._read(run.RunOptions(quiet=True), SimpleNamespace(steps=2, forward=forward), [layer], context)
    assert reading.stages == {"route": 2.0, "experts": 4.0}
    assert reading.predicted == 14
    assert sum(reading.expert_load[0]) == 14 * CONFIG.top_k
