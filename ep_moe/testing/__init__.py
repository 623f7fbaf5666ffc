"""Tools for testing on ranks: one body, run by plain pytest on forked gloo ranks or under torchrun on real ones."""

from ep_moe.testing.distributed import distributed, rank_device

__all__ = ["distributed", "rank_device"]
