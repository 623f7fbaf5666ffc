"""Full state dicts of torch.distributed.checkpoint and accelerate are refused, with a remedy."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.optim import SGD

from ep_moe import ConfigError, EPContext, MoELayer, ParallelConfig, training
from ep_moe.testing import distributed, rank_device
from tests.fixtures.training_model import CONFIG, WIDTH


@distributed(2, set_device=True)
def test_a_full_state_is_refused_and_one_file_is_made_of_a_distributed_checkpoint(tmp_path):
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        torch.manual_seed(0)
        layer = MoELayer(CONFIG, context)
        optimizer = SGD(layer.parameters(), lr=0.1, momentum=0.9)
        layer(torch.ones(2, WIDTH, device=context.device)).sum().backward()
        training.sync_gradients(layer, context)
        optimizer.step()
        for ask in (
            lambda: get_model_state_dict(layer, options=full),
            lambda: get_optimizer_state_dict(layer, optimizer, options=full),
        ):
            with pytest.raises(ConfigError, match=r"full_state_dict=True would save one rank's experts.*dcp_to_torch"):
                ask()
        dcp.save({"model": get_model_state_dict(layer)}, checkpoint_id=tmp_path / "parts")
        if context.layout.rank == 0:
            dcp_to_torch_save(tmp_path / "parts", tmp_path / "whole.pt")
        dist.barrier()
        whole = torch.load(tmp_path / "whole.pt")["model"]
        other = MoELayer(CONFIG, context)
        set_model_state_dict(other, whole, options=StateDictOptions(full_state_dict=True, strict=False))
        for name, parameter in layer.named_parameters():
            assert torch.equal(other.get_parameter(name), parameter)


@distributed(2, set_device=True)
def test_ranks_that_hold_all_experts_have_a_full_state():
    with EPContext.from_groups(ParallelConfig(dp=2, ep=1), device=rank_device(), deadline_s=30) as context:
        layer = MoELayer(CONFIG, context)
        found = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))
        assert len(found) == len(layer.state_dict())


@pytest.mark.skipif(torch.cuda.is_available(), reason="accelerate's ranks are CPUs here, over gloo")
@distributed(2)
def test_files_of_one_rank_are_refused_on_all(tmp_path):
    """Saving by accelerate is refused on all ranks.

    It would write only the first process's experts, and treated views of one memory as one tensor.
    """
    accelerate = pytest.importorskip("accelerate")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        model = nn.Sequential(MoELayer(CONFIG, context))
        accelerator = accelerate.Accelerator()
        model = accelerator.prepare(training.exclude_experts(model))
        for save in (
            lambda: accelerator.save_state(str(tmp_path)),
            lambda: accelerator.save_state(str(tmp_path), safe_serialization=False),
            lambda: accelerator.save_model(model, str(tmp_path)),
            lambda: accelerator.get_state_dict(model),
        ):
            with pytest.raises(ConfigError, match=r"of accelerate would save one rank's experts.*get_model_state_dict"):
                save()
        hook = accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
        accelerator.save_state(str(tmp_path))  # allowed if a hook of the user decides what is saved
        hook.remove()


@distributed(2)
def test_an_expert_of_two_layers_is_refused():
    """Sharing one expert parameter between two layers is refused.

    Each layer would move it into its own memory, also between forward and backward of the other layer.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        one, other = (MoELayer(CONFIG, context) for _ in range(2))
        expert = str(one.expert_weights.local_experts[0])
        shared = one.expert_weights.get_submodule(expert).w2
        with pytest.raises(ConfigError, match=r"w2 of an expert is a parameter of another layer's expert.*call one"):
            other.expert_weights.get_submodule(expert).w2 = shared
        other.expert_weights.get_submodule(expert).w2 = nn.Parameter(shared.detach().clone())
        rows = torch.ones(2, WIDTH, device=context.device)
        other(one(rows)).sum().backward()
