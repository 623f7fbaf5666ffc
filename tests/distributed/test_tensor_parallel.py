"""Dense weights that torch's tensor parallelism cuts over the tp ranks, beside a MoE layer, against one process."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from ep_moe import EPContext, MoEConfig, MoELayer, training
from ep_moe.testing import distributed, rank_device

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)
BOUND = 1e-5  # relative; sums of some hundred float32 numbers


class Model(nn.Module):
    """Of whose dense part `norm` and the router are whole on each rank."""

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
    """Of this dp rank, and of all."""
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step)).to(context.device)
    return x.chunk(context.layout.dp)[context.layout.dp_rank], x


def check_norms(model: nn.Module, context: EPContext, alone: nn.Module) -> None:
    for kind in (1.0, 2.0, math.inf):
        wanted = nn.utils.get_total_norm([p.grad for p in alone.parameters()], kind)
        found = training.clip_grad_norm_(model, context, 1e9, kind)
        assert abs(float(found) - float(wanted)) <= BOUND * float(wanted), kind


@distributed(2, deadline_s=60)
def test_parameter_groups_has_no_group_of_dtensors_and_plain_tensors(world_size):
    """Each is updated in one call, and `parameter_groups` is the remedy where that is refused."""
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
    """FSDP2 cuts the pieces of the tp ranks over dp: four pieces, which torch calls strided shards."""
    mesh = init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    with EPContext.from_mesh(mesh, device=rank_device(), deadline_s=20) as context:
        model, alone = made(context, mesh["tp"]), made(EPContext.local(rank_device()))
        training.fully_shard(model, context, mesh=mesh["dp"])
        own, everything = rows(context)
        backward(model, own)
        backward(alone, everything)
        check_norms(model, context, alone)


@distributed(2, deadline_s=60)
def test_the_norm_is_of_summed_gradients(world_size):
    """Sequence parallelism leaves each tp rank the summand of its own rows, and the norm is no sum of theirs."""
    mesh = init_device_mesh(rank_device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    with EPContext.from_mesh(mesh, device=rank_device(), deadline_s=20) as context:
        norm, alone = nn.LayerNorm(16).to(context.device), nn.LayerNorm(16)
        parallelize_module(norm, mesh["tp"], SequenceParallel(sequence_dim=0, use_local_output=False))
        x = rows(context)[1]
        (norm(x.chunk(2)[context.layout.tp_rank]).full_tensor() * x).square().mean().backward()
        (alone.to(context.device)(x) * x).square().mean().backward()
        assert norm.weight.grad.placements[0].is_partial()
        check_norms(norm, context, alone)
