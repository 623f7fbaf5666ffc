"""Placement as one torch operator, for compiled graphs.

Inductor cannot be given the arithmetic itself: it writes the hash's constants into kernels as int32, which they exceed.
An operator runs the eager form, so that compiled and eager calls choose the same replicas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.placement.deferred import Tables
from ep_moe.types import recomputing


@torch.library.custom_op("ep_moe::place", mutates_args=("expert_load", "slot_load"))
def place(
    ids: Tensor, replicas: Tensor, counts: Tensor, expert_load: Tensor, slot_load: Tensor, counting: Tensor, seed: int
) -> Tensor:
    """`Tables.place`, which counts nothing inside a backward pass."""
    tables = Tables(replicas, counts, expert_load, slot_load, counting, seed)
    return (tables.counting_nothing() if recomputing() else tables).place(ids).contiguous()


@place.register_fake
def _(
    ids: Tensor, replicas: Tensor, counts: Tensor, expert_load: Tensor, slot_load: Tensor, counting: Tensor, seed: int
) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.int64)
