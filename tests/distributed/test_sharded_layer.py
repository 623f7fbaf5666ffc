"""Layers that FSDP2 shards as modules of their own."""

import pytest
import torch
from torch import nn

from ep_moe import ConfigError, EPContext, InputError, ParallelConfig, training
from ep_moe.layer import MoELayer
from ep_moe.testing import distributed, rank_device
from ep_moe.weights.lora import LowRank, add_lora, merge_lora
from tests.fixtures.distributed_cases import same_error
from tests.fixtures.training_model import CONFIG, WIDTH


@distributed(2, set_device=True)
def test_a_sharded_layers_result_is_written_in_place():
    """An in-place write to the output of a sharded layer keeps gradients right.

    FSDP2's hook on the output gathers the parameters for backward. An in-place write to a view would drop the hook.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        found = []
        for wrapped in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(MoELayer(CONFIG, context), nn.ReLU(inplace=True))
            if wrapped:
                for module in (model[0], model):  # only the root keeps its gathered parameters
                    training.fully_shard(module, context)
            x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)).to(context.device).requires_grad_()
            model(x).square().mean().backward()
            if not wrapped:
                training.sync_gradients(model, context)
            gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
            found.append([g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients])
        torch.testing.assert_close(found[1], found[0])


@distributed(2, set_device=True)
def test_a_refusal_leaves_the_layer_as_it_was():
    """A refused `fully_shard` leaves the layer unchanged, for LoRA experts and for options that torch does not know."""
    with EPContext.from_groups(ParallelConfig(dp=2, ep=1), device=rank_device(), deadline_s=30) as context:
        layer = MoELayer(CONFIG, context)
        add_lora(layer.expert_weights, {"w2": LowRank(2, 1.0)}, 0)
        refused = same_error(ConfigError, lambda: training.fully_shard(layer, context))
        assert "experts with LoRA factors are not sharded; pass shard_experts=False" in refused
        merge_lora(layer.expert_weights)
        with pytest.raises(TypeError, match="shard_all"):
            training.fully_shard(layer, context, shard_all=True)
        training.use_main_grads(layer.requires_grad_(True))  # needs unsharded experts
        layer(torch.ones(2, WIDTH, device=context.device)).square().sum().backward()


@distributed(2, set_device=True)
def test_an_expert_that_is_shared_out_is_not_updated():
    with EPContext.from_groups(ParallelConfig(dp=2, ep=1), device=rank_device(), deadline_s=30) as context:
        layer = training.fully_shard(MoELayer(CONFIG, context), context)
        with pytest.raises(InputError, match="expert parameters are sharded by fully_shard; load them with"):
            layer.update_expert(0, w2=torch.ones(WIDTH, CONFIG.intermediate_size))


@distributed(2, set_device=True)
def test_an_optimizer_of_the_parameters_before_they_were_cut_is_refused():
    """An optimizer made before `fully_shard` is refused. It would silently train no expert."""
    with EPContext.from_groups(ParallelConfig(dp=2, ep=1), device=rank_device(), deadline_s=30) as context:
        layer = MoELayer(CONFIG, context)
        early = torch.optim.SGD(training.expert_parameters(layer), lr=0.1)
        training.fully_shard(layer, context)
        layer(torch.ones(2, WIDTH, device=context.device)).square().mean().backward()
        with pytest.raises(ConfigError, match=r"that their layer has replaced.*fully_shard has sharded the model"):
            early.step()
        torch.optim.SGD(training.expert_parameters(layer), lr=0.1).step()


@distributed(2, set_device=True)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_codes_are_not_numbers_of_an_expert_that_is_shared_out(dtype):
    with EPContext.from_groups(ParallelConfig(dp=2, ep=1), device=rank_device(), deadline_s=30) as context:
        layer = training.fully_shard(MoELayer(CONFIG, context), context)
        before = [parameter.full_tensor().clone() for parameter in layer.expert_weights.parameters()]
        codes = {"expert_weights.0.w2": torch.ones(WIDTH, CONFIG.intermediate_size).to(dtype)}
        with pytest.raises(RuntimeError, match="expert 0: w2 must be numbers that are rounded to float32, got "):
            layer.load_state_dict(codes, strict=False)
        after = [parameter.full_tensor() for parameter in layer.expert_weights.parameters()]
        assert all(map(torch.equal, after, before))


@distributed(2, set_device=True)
def test_whole_numbers_are_loaded_into_experts_that_are_shared_out():
    """Sharded experts take whole tensors, which torch refuses for other DTensors. Each rank keeps its shards."""
    with EPContext.from_groups(ParallelConfig(dp=2, ep=1), device=rank_device(), deadline_s=30) as context:
        torch.manual_seed(0)
        state = MoELayer(CONFIG, context).expert_weights.state_dict()
        torch.manual_seed(1)
        weights = training.fully_shard(MoELayer(CONFIG, context), context).expert_weights
        assert not torch.equal(next(weights.parameters()).full_tensor(), next(iter(state.values())))
        weights.load_state_dict(state)
        assert len(state) == len(list(weights.parameters()))
        for name, tensor in weights.state_dict().items():
            assert torch.equal(tensor.full_tensor(), state[name]), name
