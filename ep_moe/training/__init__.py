"""What a training loop needs beside the layer: gradients over ranks and their norm, torch's data-parallel wrappers,
losses of the routers, and their balance without a loss."""

from ep_moe.training.balance import (
    BiasUpdate,
    load_balancing_loss,
    router_logits,
    router_z_loss,
    sequence_balancing_loss,
)
from ep_moe.training.gradients import (
    clip_grad_norm_,
    dense_parameters,
    expert_parameters,
    parameter_groups,
    sync_gradients,
)
from ep_moe.training.wrappers import exclude_experts, fully_shard

__all__ = [
    "BiasUpdate",
    "clip_grad_norm_",
    "dense_parameters",
    "exclude_experts",
    "expert_parameters",
    "fully_shard",
    "load_balancing_loss",
    "parameter_groups",
    "router_logits",
    "router_z_loss",
    "sequence_balancing_loss",
    "sync_gradients",
]
