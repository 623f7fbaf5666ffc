"""Kernels that start before those ahead of them have ended give the bits of those that wait."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe import EPContext, MoEConfig, MoELayer, ParallelConfig, Wire
from ep_moe.quant.schemes import SCHEMES
from ep_moe.runtime import devices
from ep_moe.testing import distributed, rank_device
from ep_moe.types import Routing
from ep_moe.weights.initial import random_expert
from tests.fixtures.helpers import integer_routing, moved

CONFIG = MoEConfig(hidden_size=1024, intermediate_size=512, num_experts=16, top_k=4)
KINDS = {
    "bf16": {"experts": "bf16_triton"},
    "fp8": {
        "experts": "fp8_tensor_triton", "quantization": "fp8_static",
        "wire": Wire(dispatch="fp8_tensor", input_scale=0.02),
    },
}  # fmt: skip


@contextmanager
def waiting():
    """No kernel starts early."""
    with mock.patch.object(devices, "starts_early", return_value=False):
        yield


def built(context: EPContext, kind: str, turn: int) -> MoELayer:
    layer = MoELayer(CONFIG, context, all2all="nvlink_p2p", **KINDS[kind], dtype=torch.bfloat16)
    scheme = SCHEMES[layer.expert_weights.scheme.name]
    for expert in range(16):
        drawn = random_expert(CONFIG, scheme, (expert + turn) % 16, torch.bfloat16, layer.device)
        layer.update_expert(expert, **drawn)
    return layer


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="needs GPUs and Triton"
)
@distributed(2, 4)
@pytest.mark.parametrize("tokens", [1, 24, 150, 1500], ids=["one", "by packets", "by flags", "many"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_bits_of_kernels_that_wait(kind, tokens, world_size):
    """Two layers behind each other, several times in a graph, so that each kernel's memory was another's just now. The
    ones that wait are other layers: what was launched once is launched again as it was."""
    rank, device, parallel = dist.get_rank(), rank_device(), ParallelConfig(dp=world_size)
    with (
        EPContext.from_groups(parallel, device=device, max_tokens=tokens) as context,
        EPContext.from_groups(parallel, device=device, max_tokens=tokens) as other,
    ):
        early, late = ([built(each, kind, turn) for turn in range(2)] for each in (context, other))
        x = torch.zeros(tokens, CONFIG.hidden_size, dtype=torch.bfloat16, device=device)
        routing = moved(integer_routing(tokens, CONFIG, 0), device)

        def chain(layers: list[MoELayer]) -> Tensor:
            y = x
            for _ in range(3):
                for layer in layers:
                    y = layer.forward_routed(y, routing)
                    y = y / y.float().square().mean(1, keepdim=True).sqrt().clamp(min=1e-6).to(y.dtype)
            return y

        chain(early)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
            result = chain(early)
        for seed in range(20):
            draw(x, routing, 100 * seed + rank)
            with waiting():
                expected = chain(late)
            torch.cuda.synchronize(device)
            graph.replay()
            assert torch.equal(result, expected), seed
            assert torch.equal(chain(early), expected), seed
            assert expected.isfinite().all()
            assert (expected != 0).any()


def draw(x: Tensor, routing: Routing, seed: int) -> None:
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
    fresh = integer_routing(len(x), CONFIG, seed)
    routing.ids.copy_(fresh.ids)
    routing.weights.copy_(fresh.weights)
