"""Hopper kernels of experts with 4-bit weights, for rows in bf16 or E4M3."""

from __future__ import annotations

import dataclasses
from functools import cached_property

from ep_moe.experts.hopper.experts import HOPPER, HopperExperts
from ep_moe.experts.hopper.gemm_grouped import LINE
from ep_moe.weights.layouts.hopper_4bit import Hopper4Bit, Hopper4BitFp8


class W4A16TritonExperts(HopperExperts):
    """Experts with 4-bit weights and bf16 rows. Each scheme is its own scaling."""

    name = "w4a16_triton"
    tested_machines = "1 H100, 1 H200"
    weight_layout = Hopper4Bit
    capabilities = dataclasses.replace(
        HOPPER,
        schemes=frozenset({"mxfp4", "mxint4", "int4", "nvfp4a16"}),
        biases=True,
        spare_sms=False,
        alignment_bytes=LINE,
    )

    @cached_property
    def scaling(self) -> str:
        return self.weights.scheme.name


class W4A8TritonExperts(W4A16TritonExperts):
    """Experts with 4-bit weights and E4M3 rows, one scale per row. Rows arrive in fp8_row, or are rounded here."""

    name = "w4a8_triton"
    tested_machines = "1 H100, 1 H200"
    weight_layout = Hopper4BitFp8
    capabilities = dataclasses.replace(
        W4A16TritonExperts.capabilities,
        schemes=frozenset({"mxfp4_fp8", "int4_fp8", "mxint4_fp8"}),
        row_formats=frozenset({"plain", "fp8_row"}),
    )
