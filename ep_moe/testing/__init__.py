"""Tools for testing on ranks: one body, run by plain pytest on forked gloo ranks or under torchrun on real ones; and
the contracts of transports, kernels and model families, for anybody's class or entry."""

from ep_moe.testing.distributed import distributed, rank_device
from ep_moe.testing.fused_contract import check_fused
from ep_moe.testing.kernel_contract import check_experts
from ep_moe.testing.model_family import check_family
from ep_moe.testing.transport_contract import check_dispatcher

__all__ = ["check_dispatcher", "check_experts", "check_family", "check_fused", "distributed", "rank_device"]
