"""Tools for tests on several ranks, and contract checks for your own transports, kernels and model families.

A test body runs on forked gloo ranks under plain pytest, and on real ranks under torchrun.
"""

from ep_moe.testing.distributed import distributed, rank_device
from ep_moe.testing.fused_contract import check_fused
from ep_moe.testing.kernel_contract import check_experts
from ep_moe.testing.model_family import check_family
from ep_moe.testing.transport_contract import check_dispatcher

__all__ = ["check_dispatcher", "check_experts", "check_family", "check_fused", "distributed", "rank_device"]
