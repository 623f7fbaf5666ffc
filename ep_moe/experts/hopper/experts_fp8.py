"""Hopper kernels of experts in fp8: one scale a matrix, an output channel or a block of 128 x 128."""

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
    """Experts in fp8 with one calibrated scale a matrix. Rows come plain and are rounded here, or were rounded before
    they traveled."""

    name = "fp8_tensor_triton"
    tested_machines = "1, 2 and 4 H200, 2 H100"
    scaling = "matrix"
    capabilities = dataclasses.replace(
        HOPPER, schemes=frozenset({"fp8_static"}), row_formats=frozenset({"plain", "fp8_tensor"}), exact=True
    )


class Fp8ChannelTritonExperts(HopperExperts):
    """Experts in fp8 with one scale for each row of weights, an output channel, which the products multiply into their
    sums. Rows have one scale each, found here, and may have traveled so."""

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
    """DeepSeek's fp8 blocks of 128 x 128. Takes every row layout as it is: CONTIGUOUS and BATCHED rows are neither
    sorted nor copied."""

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
            out[slots:].zero_()  # slots that only wider ranks have; a transport may fill rows up there
        return out


class Fp8DynamicTritonExperts(Fp8BlockTritonExperts):
    """Experts in fp8 with one scale a matrix, whose activations get theirs from the rows.

    Rows have one scale each, and may have traveled so. Those that traveled in fp8_block, those that are grouped
    already and those of fp16 layers go by blocks, where rows have a scale for each 128 columns: that way finds the
    scale of a matrix at each of its blocks, and the one of a row that came with it likewise.
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
