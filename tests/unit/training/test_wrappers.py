"""Test what `ep_moe.training` checks for data-parallel wrappers, in one process."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ep_moe import ConfigError, EPContext, MoEConfig, MoELayer, RoutingConfig
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.training import exclude_experts, fully_shard, wrappers

CONFIG = MoEConfig(hidden_size=4, intermediate_size=4, num_experts=2, top_k=1)


def test_what_a_wrapper_shall_ignore_is_added_to_what_it_ignores():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "moe": MoELayer(CONFIG, EPContext.local(torch.device("cpu")))})
    model._ddp_params_and_buffers_to_ignore = ["a.bias"]
    for _ in range(2):
        exclude_experts(model)
        ignored = set(model._ddp_params_and_buffers_to_ignore)
        assert {"a.bias", "moe.expert_weights.0.w1", "moe.placement.expert_load"} <= ignored
        assert not {"a.weight", "moe.router.weight"} & ignored


def test_a_gpu_that_is_not_current_is_refused(monkeypatch):
    """`fully_shard` refuses a model that is not on the current GPU, because FSDP2 would move it there."""
    monkeypatch.setattr(wrappers, "is_other_gpu_current", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    context = EPContext.local(torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"current device, cuda:1, and the model is on cpu; call torch.cuda.set_device\('cpu'\) first"
    ):
        fully_shard(MoELayer(CONFIG, context), context)


@pytest.mark.skipif(TorchrunEnv.present(), reason="torch.distributed can be initialized there")
def test_one_process_without_torch_distributed_is_not_sharded():
    context = EPContext.local(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"FSDP2 needs .*from_torchrun\(\) under torchrun, or leave fully_shard out"):
        fully_shard(MoELayer(CONFIG, context), context)


def test_parameters_that_fsdp_would_cast_are_refused():
    """A `param_dtype` is refused: FSDP2 would cast the router, but not the experts that it does not shard."""
    context = EPContext.local(torch.device("cpu"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"mp_policy\.param_dtype=torch\.bfloat16 .* under torch\.autocast"):
        fully_shard(MoELayer(CONFIG, context), context, mp_policy=policy)


@pytest.mark.parametrize(
    ("dtype", "rest", "apart"),
    [(torch.bfloat16, torch.bfloat16, 1), (torch.bfloat16, None, 0), (torch.float32, torch.float32, 0)],
)
def test_a_router_with_logits_in_float32_is_apart_from_a_rest_of_16_bits(dtype, rest, apart):
    """A float32 router in a 16-bit model is sharded separately, because FSDP2 shards parameters of one dtype together.

    Without other parameters there is nothing to separate it from.
    """
    config = dataclasses.replace(CONFIG, hidden_size=8, intermediate_size=8, routing=RoutingConfig(float32_logits=True))
    layer = MoELayer(config, EPContext.local(torch.device("cpu")), dtype=dtype)
    assert layer.router.weight.dtype == torch.float32
    model = nn.ModuleList([layer] if rest is None else [layer, nn.Linear(2, 2, dtype=rest)])
    assert wrappers._routers_apart(model) == [layer.router] * apart
