"""Scaled gradients with `use_main_grads`: pipeline schedules and loss scalers."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from ep_moe import ConfigError, EPContext, InputError, MoELayer, ParallelConfig
from ep_moe.testing import distributed, rank_device
from ep_moe.training import sync_gradients, use_main_grads
from tests.fixtures.pipelines import refused_within
from tests.fixtures.training_model import CONFIG, WIDTH

PARTS = 2


def rows(context: EPContext) -> torch.Tensor:
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(context.layout.rank)).to(context.device)


def mean(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


@distributed(2)
@pytest.mark.parametrize("unscaled", ["with the copy", "before it"])
def test_a_scaler_beside_another_dtype_is_refused(unscaled, world_size):
    """GradScaler is refused with main gradients of another dtype.

    `grad` is a copy of `main_grad` made before or after `unscale_`, and nothing tells which.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        layer = MoELayer(CONFIG, context)
        use_main_grads(layer, torch.float32)
        for enabled in (True, False):
            scaler = torch.amp.GradScaler(context.device.type, init_scale=8.0, enabled=enabled)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            scaler.scale(mean(layer(rows(context)), torch.ones(()))).backward()
            sync_gradients(layer, context)
            if unscaled == "before it":
                scaler.unscale_(optimizer)
            for parameter in layer.expert_weights.parameters():
                parameter.grad, parameter.main_grad = parameter.main_grad, None
            refused = pytest.raises(ConfigError, match=r"too large by the scale; call use_main_grads\(model\) without")
            with refused if enabled else contextlib.nullcontext():
                scaler.step(optimizer)
            optimizer.zero_grad()


@distributed(2)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_pipeline_that_scales_gradients(dtype, world_size):
    """A schedule with `scale_grads=True` works with main gradients in the parameter dtype, and is refused in another.

    Each rank has a pipeline of one stage, and its micro-batches are calls of a layer over both ranks.
    """
    alone = [dist.new_group([rank]) for rank in range(world_size)][dist.get_rank()]
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        torch.manual_seed(0)
        layer = MoELayer(CONFIG, context)
        x, target = rows(context), torch.ones(12, WIDTH, device=context.device)
        mean(layer(x), target).backward()
        wanted = [parameter.grad for parameter in layer.parameters()]
        layer.zero_grad()
        use_main_grads(layer, dtype)
        stage = PipelineStage(layer, 0, 1, context.device, group=alone)
        scaling = ScheduleGPipe(stage, PARTS, loss_fn=mean)
        if dtype is None:
            scaling.step(x, target=target)
        else:
            with refused_within(InputError, f"ScheduleGPipe has scale_grads=True and divides .grad by its {PARTS}"):
                scaling.step(x, target=target)
            stage.clear_runtime_states()
            ScheduleGPipe(stage, PARTS, loss_fn=lambda y, t: mean(y, t) / PARTS, scale_grads=False).step(
                x, target=target
            )
        for parameter, gradient in zip(layer.parameters(), wanted, strict=True):
            found = getattr(parameter, "main_grad", None) if dtype is not None else parameter.grad
            torch.testing.assert_close(parameter.grad if found is None else found, gradient)
