"""Distributed checkpoints of experts' LoRA factors: saved per expert, loaded under any map."""

import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ep_moe import EPContext, ExpertMap, MoELayer, ParallelConfig, training
from ep_moe.testing import distributed, rank_device
from ep_moe.weights.lora import LowRank, add_lora
from tests.fixtures.training_model import CONFIG, EXPERTS, WIDTH

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
MAPS = {"the same": ExpertMap.linear(EXPERTS, 2), "another": ExpertMap.round_robin(EXPERTS, 2)}


def made(context: EPContext, expert_map: ExpertMap, seed: int) -> tuple[MoELayer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = MoELayer(CONFIG, context, expert_map=expert_map)
    lora = add_lora(layer.expert_weights, {"w13": LowRank(2, 1.0), "w2": LowRank(2, 1.0)}, seed)
    return layer, torch.optim.AdamW(lora.parameters(), lr=0.1)


def rows(context: EPContext) -> torch.Tensor:
    generator = torch.Generator().manual_seed(context.layout.rank)
    return torch.randn(12, WIDTH, generator=generator).to(context.device)


def trained(layer: MoELayer, context: EPContext, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    x = rows(context)
    for _ in range(2):
        layer(x).square().mean().backward()
        training.sync_gradients(layer, context)
        optimizer.step()
        optimizer.zero_grad()
    return layer(x).detach()


def state(layer: MoELayer, optimizer: torch.optim.Optimizer) -> dict:
    return {
        "model": get_model_state_dict(layer),
        "optimizer": get_optimizer_state_dict(layer, optimizer, options=OPTIONS),
    }


@distributed(2, set_device=True)
@pytest.mark.parametrize("case", MAPS)
def test_factors_and_their_optimizer_go_on_after_a_distributed_checkpoint(case, tmp_path):
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        layer, optimizer = made(context, MAPS["the same"], seed=0)
        trained(layer, context, optimizer)
        dcp.save(state(layer, optimizer), checkpoint_id=tmp_path)
        dist.barrier()
        other, its_optimizer = made(context, MAPS[case], seed=1)
        found = state(other, its_optimizer)
        dcp.load(found, checkpoint_id=tmp_path)
        set_model_state_dict(other, found["model"])
        set_optimizer_state_dict(other, its_optimizer, found["optimizer"], options=OPTIONS)
        expected, out = trained(layer, context, optimizer), trained(other, context, its_optimizer)
        torch.testing.assert_close(out, expected)


@distributed(2, set_device=True)
def test_a_file_of_one_rank_needs_the_map_that_it_was_saved_under(world_size):
    """A rank's own file loads under its map. Under another, it is refused by name: factors do not move."""
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        layer, optimizer = made(context, MAPS["another"], seed=0)
        wanted, file = trained(layer, context, optimizer), io.BytesIO()
        torch.save(layer.state_dict(), file)
        for name, expert_map in MAPS.items():
            file.seek(0)
            state_dict = torch.load(file, map_location=context.device)
            state_dict["expert_weights.no expert"] = torch.zeros(1)
            other, _ = made(context, expert_map, seed=1)
            if name == "another":
                other.load_state_dict(state_dict, strict=False)
                torch.testing.assert_close(other(rows(context)), wanted)
            else:
                with pytest.raises(RuntimeError, match="has LoRA factors, which do not move between ranks"):
                    other.load_state_dict(state_dict, strict=False)
