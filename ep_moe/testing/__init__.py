"""Tools for testing on ranks: one body, run by plain pytest on forked gloo ranks or under torchrun on real ones."""

from ep_moe.testing.conformance import check_dispatcher
from ep_moe.testing.distributed import distributed, rank_device

__all__ = ["check_dispatcher", "distributed", "rank_device"]
