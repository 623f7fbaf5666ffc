"""Hopper kernels of experts with weights of 4 bits, on rows in bf16 or E4M3."""

from __future__ import annotations

import dataclasses
from functools import cached_property

from ep_moe.experts.hopper.experts import HOPPER, HopperExperts
from ep_moe.experts.hopper.gemm_grouped import LINE
from ep_moe.weights.layouts.hopper_4bit import Hopper4Bit, Hopper4BitFp8


class W4A16TritonExperts(HopperExperts):
    """Experts with weights of 4 bits and rows in bf16: each scheme is a scaling of its own."""

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
    """The same with rows in E4M3, which have one scale each, found here, and may have traveled so."""

    name = "w4a8_triton"
    tested_machines = "1 H100, 1 H200"
    weight_layout = Hopper4BitFp8
    capabilities = dataclasses.replace(
        W4A16TritonExperts.capabilities,
        schemes=frozenset({"mxfp4_fp8", "int4_fp8", "mxint4_fp8"}),
        row_formats=frozenset({"plain", "fp8_row"}),
    )
