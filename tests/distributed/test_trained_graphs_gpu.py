"""Training calls that are recorded as CUDA graphs automatically equal eager calls bit for bit."""

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, ExpertsOptions, MoEConfig, MoELayer, ParallelConfig
from ep_moe.testing import distributed, rank_device
from ep_moe.training import use_main_grads
from tests.fixtures.distributed_cases import gather_from_all_ranks

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs GPUs of compute capability 9.0", allow_module_level=True)

CONFIG = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=16, top_k=4)
COUNTS = [(96, 96), (96, 96), (96, 96), (96, 96), (5, 90), (0, 33), (96, 0), (64, 1), (96, 96), (17, 96)]


def layers(context, *, main, options=None):
    """Return two models of two layers each: one is recorded, the other never."""
    found = []
    for recorded in (True, False):
        torch.manual_seed(0)
        how = {"experts": "bf16_triton", "all2all": "nvlink_p2p", "dtype": torch.bfloat16, "options": options}
        made = torch.nn.Sequential(MoELayer(CONFIG, context, **how), MoELayer(CONFIG, context, **how))
        for layer in made:
            if not recorded:
                layer._graphs.trained.tries = 0
            if main is not None:
                use_main_grads(layer, main)
        found.append(made)
    return found


def gradients(model):
    named = {name: getattr(p, "main_grad", None) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {name: grad.clone() for name, grad in named.items() if grad is not None}


@distributed(2)
@pytest.mark.parametrize("most", [96, None])
@pytest.mark.parametrize(
    ("main", "options"),
    [
        (None, None),
        (torch.bfloat16, None),
        (torch.float32, None),
        (None, ExpertsOptions(recompute=True)),
        (None, ExpertsOptions(float8=True)),
    ],
    ids=["parameters", "main", "main float32", "recompute", "float8"],
)
def test_recorded_steps_equal_eager_ones(most, main, options, world_size):
    device = rank_device()
    with EPContext.from_groups(ParallelConfig(dp=2), device=device, max_tokens=most) as context:
        rank, pair = dist.get_rank(), layers(context, main=main, options=options)
        for step, counts in enumerate(COUNTS):
            tokens, found = counts[rank], []
            generator = torch.Generator().manual_seed(10 * step + rank)
            given, behind = (torch.randn(tokens, 256, generator=generator).to(device, torch.bfloat16) for _ in range(2))
            for model in pair:
                if step % 3 != 1:  # otherwise gradients add up
                    for parameter in model.parameters():
                        parameter.grad = None
                        if hasattr(parameter, "main_grad"):
                            parameter.main_grad = None
                x = given.clone().requires_grad_()
                out = model(x)
                out.backward(behind)
                found.append({"out": out.detach(), "x": x.grad} | gradients(model))
            assert found[0].keys() == found[1].keys()
            assert len(found[1]) > 3 * len(pair[1][0].expert_weights.slots_of_expert), "of every expert here"
            for name, tensor in found[1].items():
                assert torch.equal(found[0][name], tensor), f"step {step}: {name}"
            with torch.no_grad():
                for model in pair:
                    for parameter in model[0].expert_weights.parameters():
                        parameter -= 1e-3
        recorded = [len(layer._graphs.trained) for model in pair for layer in model]
        assert recorded[2:] == [0, 0]
        assert min(recorded[:2]) >= 1


@distributed(2)
@pytest.mark.parametrize("runs", [0, 1])
def test_a_rank_that_runs_what_its_peer_replays(runs, world_size):
    """A rank that runs eagerly beside one that replays: the bits of eager ranks, and flight recorders in step."""
    device = rank_device()
    with EPContext.from_groups(ParallelConfig(dp=2), device=device) as context:
        rank, pair = dist.get_rank(), layers(context, main=None)
        if rank == runs:
            for layer in pair[0]:
                layer._graphs.trained.tries = 0
        generator = torch.Generator().manual_seed(rank)
        for step in range(8):
            given, behind = (torch.randn(64, 256, generator=generator).to(device, torch.bfloat16) for _ in range(2))
            found = []
            for model in pair:
                model.zero_grad()
                x = given.clone().requires_grad_()
                out = model(x)
                out.backward(behind)
                found.append({"out": out.detach(), "x": x.grad} | gradients(model))
                assert len(set(gather_from_all_ranks(context.flight_recorder._step))) == 1, step
            for name, tensor in found[1].items():
                assert torch.equal(found[0][name], tensor), f"step {step}: {name}"
        assert (len(pair[0][0]._graphs.trained) > 0) == (rank != runs)
