"""Tools for training loops.

They average gradients over ranks and compute their norm, support torch's data-parallel wrappers, compute router losses,
balance routers without a loss, and record routes.
"""

from ep_moe.training.balance import (
    BiasUpdate,
    load_balancing_loss,
    router_logits,
    router_z_loss,
    sequence_balancing_loss,
)
from ep_moe.training.gradients import clip_grad_norm_, sync_gradients
from ep_moe.training.main_grads import use_main_grads, zero_main_grads
from ep_moe.training.parameters import dense_parameters, expert_parameters, parameter_groups
from ep_moe.training.routing import RoutingRecord, load_routing, record_routing, replay_routing
from ep_moe.training.wrappers import exclude_experts, fully_shard

__all__ = [
    "BiasUpdate",
    "RoutingRecord",
    "clip_grad_norm_",
    "dense_parameters",
    "exclude_experts",
    "expert_parameters",
    "fully_shard",
    "load_balancing_loss",
    "load_routing",
    "parameter_groups",
    "record_routing",
    "replay_routing",
    "router_logits",
    "router_z_loss",
    "sequence_balancing_loss",
    "sync_gradients",
    "use_main_grads",
    "zero_main_grads",
]
