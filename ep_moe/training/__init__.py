"""Training: gradients over ranks, their norm, torch's data-parallel wrappers."""

from ep_moe.training.gradients import clip_grad_norm_, dense_parameters, expert_parameters, sync_gradients
from ep_moe.training.wrappers import exclude_experts, fully_shard

__all__ = [
    "clip_grad_norm_",
    "dense_parameters",
    "exclude_experts",
    "expert_parameters",
    "fully_shard",
    "sync_gradients",
]
