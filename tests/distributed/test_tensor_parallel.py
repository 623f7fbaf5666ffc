"""Dense weights that torch's tensor parallelism cuts over the tp ranks, beside a MoE layer, against one process."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ep_moe import EPContext, MoEConfig, MoELayer, training
from ep_moe.testing import distributed, rank_device

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)


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
