"""Dense weights sharded by torch's tensor parallelism beside a MoE layer equal one process."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from ep_moe import ConfigError, EPContext, InputError, MoEConfig, MoELayer, ParallelConfig, Tokens, training
from ep_moe.testing import distributed, rank_device
from ep_moe.weights.parts import full, local
from tests.fixtures.distributed_cases import same_error

P = ParallelConfig
CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)
BOUND = 1e-5  # relative; sums of some hundred float32 numbers


class Model(nn.Module):
    """A model whose `norm` and router are replicated over tp."""

    def __init__(self, context: EPContext) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.moe = MoELayer(CONFIG, context, experts="reference")

    def forward(self, x: Tensor) -> Tensor:
        x = x + 3 * self.down(self.up(self.norm(x)).relu())
        return x + self.moe(x)


def made(context: EPContext, tp: DeviceMesh | None = None) -> Model:
    torch.manual_seed(0)
    model = Model(context).to(context.device)
    if tp is not None:
        parallelize_module(model, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def backward(model: nn.Module, x: Tensor) -> None:
    (model(x) - 1).square().mean().backward()


def rows(context: EPContext, step: int = 0) -> tuple[Tensor, Tensor]:
    """Return the rows of this dp rank and of all ranks."""
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step)).to(context.device)
    return x.chunk(context.layout.dp)[context.layout.dp_rank], x


def check_norms(model: nn.Module, context: EPContext, alone: nn.Module) -> None:
    for kind in (1.0, 2.0, math.inf):
        wanted = nn.utils.get_total_norm([p.grad for p in alone.parameters()], kind)
        found = training.clip_grad_norm_(model, context, 1e9, kind)
        assert abs(float(found) - float(wanted)) <= BOUND * float(wanted), kind


@distributed(2, deadline_s=60)
def test_parameter_groups_has_no_group_of_dtensors_and_plain_tensors(world_size):
    """`parameter_groups` separates DTensors from plain tensors.

    The optimizer updates a group in one call, which cannot mix them.
    """
    mesh = init_device_mesh(rank_device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    with EPContext.from_mesh(mesh, device=rank_device(), deadline_s=20) as context:
        model = made(context, mesh["tp"])
        groups = training.parameter_groups(model)
        optimizer = torch.optim.AdamW(groups, lr=0.1, foreach=True)
        backward(model, torch.ones(3, 16, device=context.device))
        optimizer.step()
        kinds = [[hasattr(p, "placements") for p in group["params"]] for group in optimizer.param_groups]
        assert [set(kind) for kind in kinds] == [{False}, {True}, {False}]
        assert {p for group in groups for p in group["params"]} == set(model.parameters())


@distributed(4, set_device=True, deadline_s=60)
def test_the_norm_counts_fsdp_over_tensor_parallel_weights_once(world_size):
    """The gradient norm counts each element once if FSDP2 shards tp-sharded weights over dp (torch's strided
    shards)."""
    mesh = init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    with EPContext.from_mesh(mesh, device=rank_device(), deadline_s=20) as context:
        model, alone = made(context, mesh["tp"]), made(EPContext.local(rank_device()))
        training.fully_shard(model, context, mesh=mesh["dp"])
        own, everything = rows(context)
        backward(model, own)
        backward(alone, everything)
        training.sync_gradients(model, context)  # FSDP's means over dp are accepted where tokens are replicated
        check_norms(model, context, alone)


@distributed(2, deadline_s=60)
def test_the_norm_is_of_summed_gradients(world_size):
    """With sequence parallelism, the norm is that of the gradients summed over tp.

    Each tp rank holds only the contribution of its own rows.
    """
    mesh = init_device_mesh(rank_device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    with EPContext.from_mesh(mesh, device=rank_device(), deadline_s=20) as context:
        norm, alone = nn.LayerNorm(16).to(context.device), nn.LayerNorm(16)
        parallelize_module(norm, mesh["tp"], SequenceParallel(sequence_dim=0, use_local_output=False))
        x = rows(context)[1]
        (norm(x.chunk(2)[context.layout.tp_rank]).full_tensor() * x).square().mean().backward()
        (alone.to(context.device)(x) * x).square().mean().backward()
        assert norm.weight.grad.placements[0].is_partial()
        check_norms(norm, context, alone)


@distributed(4, deadline_s=60)
def test_steps_are_those_of_one_process(world_size):
    """Steps equal one process: each tp shard is averaged over dp, and counts once in the norm."""
    mesh = init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    with EPContext.from_mesh(mesh, device=rank_device(), deadline_s=20) as context:
        model, alone = made(context, mesh["tp"]), made(EPContext.local(rank_device()))
        optimizers = [torch.optim.SGD(training.parameter_groups(each), lr=0.1) for each in (model, alone)]
        for step in range(3):
            own, everything = rows(context, step)
            backward(model, own)
            training.sync_gradients(model, context)
            backward(alone, everything)
            check_norms(model, context, alone)
            for name, parameter in alone.named_parameters():
                if not name.startswith("moe.expert_weights"):
                    found = full(model.get_parameter(name).grad)
                    torch.testing.assert_close(found, parameter.grad, rtol=BOUND, atol=1e-6, msg=f"{step}: {name}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@distributed(4, deadline_s=60)
def test_pieces_that_differ_over_dp_are_found(world_size):
    mesh = init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    with EPContext.from_mesh(mesh, device=rank_device(), deadline_s=20) as context:
        model = made(context, mesh["tp"])
        if dist.get_rank() == 3:
            local(model.up.weight.data)[0].add_(1)
        backward(model, rows(context)[0])
        before = [local(parameter.grad).clone() for parameter in model.parameters()]
        text = same_error(InputError, lambda: training.sync_gradients(model, context))
        assert "sync_gradients: up.weight differs between rank 1 and 3" in text
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert torch.equal(local(parameter.grad), gradient), "a refused call changes nothing"


MESHES = {  # meshes of the weights, with a part of the error
    "of dp ranks": (P(dp=4), (2, 2), "up.weight is a DTensor over ranks 0, 1, which are not in one tp group"),
    "of tp ranks with tokens of their own": (
        P(dp=2, tp=2, tokens=Tokens.SHARDED),
        (2, 2),
        "up.weight is a DTensor over ranks 0, 1, and its gradient is a sum over tp ranks with different tokens",
    ),
}


@distributed(4, deadline_s=60)
@pytest.mark.parametrize("case", MESHES)
def test_weights_cut_over_other_ranks_are_refused(case, world_size):
    parallel, sizes, words = MESHES[case]
    mesh = init_device_mesh(rank_device().type, sizes, mesh_dim_names=("dp", "tp"))
    with EPContext.from_groups(parallel, device=rank_device(), deadline_s=20) as context:
        model = made(context, mesh["tp"])
        backward(model, torch.ones(3, 16, device=context.device))
        assert words in same_error(ConfigError, lambda: training.sync_gradients(model, context))


@distributed(4, set_device=True, deadline_s=60)
def test_fsdp_over_some_dp_ranks_is_refused(world_size):
    """FSDP over only some dp ranks is refused.

    It averages dense gradients over two ranks, where those of experts are sums of four.
    """
    mesh = init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    with EPContext.from_groups(P(dp=4), device=rank_device(), deadline_s=20) as context:
        model = made(context)
        fully_shard(model.up, mesh=mesh["tp"])
        backward(model, torch.ones(3, 16, device=context.device))
        text = same_error(ConfigError, lambda: training.sync_gradients(model, context))
        assert "up.weight is a DTensor over ranks 0, 1, over which FSDP averages its gradient, and 4 ranks have" in text
