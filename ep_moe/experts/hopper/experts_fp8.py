"""Hopper kernels of experts in fp8, with one scale per matrix, output channel or block of 128 x 128."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ep_moe.experts.hopper.experts import HOPPER, HopperExperts
from ep_moe.experts.hopper.scaling_fp8 import BLOCK
from ep_moe.experts.layouts import scaled_by_block
from ep_moe.runtime import nvrtc
from ep_moe.runtime.launch_cache import Launch
from ep_moe.types import PeerRows, Received, RowLayout
from ep_moe.weights.layouts.base import PerBlock


class Fp8TensorTritonExperts(HopperExperts):
    """Experts in fp8 with one calibrated scale per matrix. Rows arrive in fp8_tensor, or are rounded here."""

    name = "fp8_tensor_triton"
    tested_machines = "1, 2 and 4 H200, 2 H100"
    scaling = "matrix"
    capabilities = dataclasses.replace(
        HOPPER, schemes=frozenset({"fp8_static"}), row_formats=frozenset({"plain", "fp8_tensor"}), exact=True
    )


class Fp8ChannelTritonExperts(HopperExperts):
    """Experts in fp8 with one scale per output channel (row of weights), by which the products multiply their sums.

    Rows have one scale each. They arrive in fp8_row, or are rounded here.
    """

    name = "fp8_channel_triton"
    tested_machines = "1 and 2 H200, 2 H100"
    scaling = "channel"
    capabilities = dataclasses.replace(
        HOPPER,
        schemes=frozenset({"fp8_channel"}),
        biases=True,
        exact=True,
        row_formats=frozenset({"plain", "fp8_row"}),
    )


class Fp8BlockTritonExperts(HopperExperts):
    """Experts in DeepSeek's fp8, with one scale per block of 128 x 128.

    It reads every row layout: CONTIGUOUS and BATCHED rows are neither sorted nor copied.
    """

    name = "fp8_block_triton"
    tested_machines = "1, 2 and 4 H200, 1 and 2 H100"
    needs_nvrtc = False
    scaling = "block"
    capabilities = dataclasses.replace(
        HOPPER,
        layouts=frozenset(RowLayout),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        schemes=frozenset({"fp8_block"}),
        alignment_bytes=16,
        row_formats=frozenset({"plain", "fp8_block"}),
    )

    def compute(self, received: Received, out: Tensor | None) -> Tensor:
        out, slots = super().compute(received, out), self.weights.num_slots
        if received.layout is RowLayout.BATCHED:
            out[slots:].zero_()  # slots of ranks with more; a transport may have filled rows there
        return out


class Fp8DynamicTritonExperts(Fp8BlockTritonExperts):
    """Experts in fp8 with one scale per matrix, and row scales computed from the rows.

    Rows have one scale each (scaling `row`). They arrive in fp8_row, or are rounded here. Rows that arrive in
    fp8_block, rows that arrive grouped by expert, and rows of fp16 layers use the scaling `block` instead, with a scale
    per 128 columns. There each block of a matrix has the matrix's scale, and each block of an fp8_row row the row's.
    """

    name = "fp8_dynamic_triton"
    tested_machines = "1 and 2 H200, 2 H100"
    weight_layout = PerBlock
    capabilities = dataclasses.replace(
        Fp8BlockTritonExperts.capabilities,
        schemes=frozenset({"fp8_dynamic"}),
        alignment_bytes=2 * BLOCK,
        row_formats=frozenset({"plain", "fp8_block", "fp8_row"}),
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._compiles = nvrtc.missing() is None

    def workspace_bytes(self) -> int:
        return max(self._scratch_bytes("block"), self._scratch_bytes("row"))

    def _launch(self, received: Received, out: Tensor, peers: PeerRows | None, launch: Launch) -> None:
        if self._by_row(received):
            self._launch_scaled("row", received, out, peers, launch)
        else:
            self._launch_scaled("block", scaled_by_block(received), out, peers, launch)

    def _by_row(self, received: Received) -> bool:
        if received.layout is not RowLayout.RANK_MAJOR or received.format == "fp8_block":
            return False
        return self.weights.dtype == torch.bfloat16 and self._compiles
