"""`fp8_dynamic_triton`: experts in fp8 with one scale a matrix, on Hopper by the kernels of `fp8_block_triton`.

Rows, and activations between the products, are rounded with a scale for each row and 128 columns: finer than one for
all rows of a call, and nothing has to be measured, or bounded, before.
"""

from __future__ import annotations

import dataclasses

from ep_moe.experts.fp8_block_op import BLOCK
from ep_moe.experts.fp8_block_triton import Fp8BlockTritonExperts
from ep_moe.weights.per_block import PerBlock


class Fp8DynamicTritonExperts(Fp8BlockTritonExperts):
    name = "fp8_dynamic_triton"
    preparation = PerBlock
    capabilities = dataclasses.replace(
        Fp8BlockTritonExperts.capabilities, schemes=frozenset({"fp8_dynamic"}), alignment_bytes=2 * BLOCK
    )
