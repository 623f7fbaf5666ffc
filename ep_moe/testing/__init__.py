"""Tools for testing on ranks: one body, run by plain pytest on forked gloo ranks or under torchrun on real ones; and
the contracts of transports and kernels, for anybody's class."""

from ep_moe.testing.distributed import distributed, rank_device
from ep_moe.testing.fused_contract import check_fused
from ep_moe.testing.kernel_contract import check_experts
from ep_moe.testing.transport_contract import check_dispatcher

__all__ = ["check_dispatcher", "check_experts", "check_fused", "distributed", "rank_device"]
