"""torch.amp.GradScaler in a plain loop: all ranks skip the same steps and keep one scale."""

import math

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ep_moe import EPContext, ExpertMap, MoELayer, ParallelConfig, training
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import gather_from_all_ranks
from tests.fixtures.training_model import CONFIG, EXPERTS, WIDTH

OVERFLOWS = {"one optimizer": math.nan, "an optimizer of experts": math.inf, "a rank without experts": math.inf}


@distributed(2)
@pytest.mark.parametrize("case", [*OVERFLOWS, "DDP"])
def test_ranks_skip_the_step_in_which_one_ranks_experts_overflow(case):
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        torch.manual_seed(0)
        uneven = ExpertMap.uneven([0, EXPERTS]) if case == "a rank without experts" else None
        layer = MoELayer(CONFIG, context, expert_map=uneven)
        model = DistributedDataParallel(training.exclude_experts(layer)) if case == "DDP" else layer
        parts = [training.dense_parameters(layer), training.expert_parameters(layer)]
        groups = parts if case == "an optimizer of experts" else [parts[0] + parts[1]]
        optimizers = [torch.optim.SGD(group, lr=0.1) for group in groups]
        scaler = torch.amp.GradScaler(context.device.type, init_scale=8.0)
        steps = []
        for step in range(3):
            generator = torch.Generator().manual_seed(2 * step + context.layout.rank)
            x = torch.randn(12, WIDTH, generator=generator).to(context.device)
            before = [[parameter.detach().clone() for parameter in group] for group in parts]
            scaler.scale(model(x).square().mean()).backward()
            if step == 1 and context.layout.rank == 1:
                layer.expert_weights.get_parameter("7.w2").grad[1, 1] = OVERFLOWS.get(case, math.inf)
            training.sync_gradients(model, context)
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            training.clip_grad_norm_(model, context, 1.0)
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            moved = [
                any(map(torch.ne, map(torch.sum, group), map(torch.sum, old)))
                for group, old in zip(parts, before, strict=True)
            ]
            steps.append((scaler.get_scale(), *moved))
        experts_move = uneven is None or context.layout.rank == 1
        assert steps == [(8.0, True, experts_move), (4.0, False, False), (4.0, True, experts_move)]
        finite = [bool(parameter.isfinite().all()) for parameter in layer.parameters()]
        assert all(map(all, gather_from_all_ranks(finite)))
