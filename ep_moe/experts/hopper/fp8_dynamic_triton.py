"""`fp8_dynamic_triton`: experts in fp8 with one scale a matrix, whose activations get theirs from the rows, on Hopper
by this project's own kernels.

Rows have one scale each (`fp8_row_op`), and may have travelled so. Those that travelled in fp8_block, those that are
grouped already and those of fp16 layers go the way of `fp8_block_triton`, where rows have a scale for each 128 columns:
it finds the scale of a matrix at each of its blocks, and the one of a row that came with it likewise.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ep_moe.experts.hopper import fp8_row_op
from ep_moe.experts.hopper.fp8_block_op import BLOCK
from ep_moe.experts.hopper.fp8_block_triton import Fp8BlockTritonExperts
from ep_moe.experts.hopper.operator import home_of, ids_ready_of
from ep_moe.experts.layouts import expected_pairs
from ep_moe.runtime import nvrtc
from ep_moe.runtime.launch_cache import Launch
from ep_moe.types import PeerRows, Received, RowLayout, Weighting
from ep_moe.weights.layouts.per_block import PerBlock


class Fp8DynamicTritonExperts(Fp8BlockTritonExperts):
    name = "fp8_dynamic_triton"
    run_on = "1 and 2 H200"
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
        config, slots = self.config, self.weights.num_slots
        if not slots:
            return 0
        inner = config.intermediate_size // self.weights.etp.size
        by_row = fp8_row_op.scratch_bytes(self.routes, config.hidden_size, inner, slots)
        return max(super().workspace_bytes(), by_row)

    def step(self, received: Received, out: Tensor, peers: PeerRows | None, launch: Launch) -> None:
        weights, config, wire = self.weights, self.config, received.wire_ids
        ids = received.local_ids if wire is None else wire.ids
        if ids is None or not self._by_row(received):
            super().step(_scaled_by_block(received), out, peers, launch)
            return
        fp8_row_op.fp8_row_moe(
            out,
            self.workspace(),
            received.x,
            received.x_scale,
            ids,
            0 if wire is None else wire.base,
            *ids_ready_of(wire),
            received.weights if received.weighting is Weighting.EXPERTS else None,
            weights.get_parameter("w13"),
            weights.get_parameter("w13_scale"),
            weights.get_parameter("w2"),
            weights.get_parameter("w2_scale"),
            config.activation.value,
            config.activation_alpha,
            config.activation_limit,
            expected_pairs(config, weights.num_slots, ids.shape[1]),
            self.routes,
            self.options.spare_sms,
            *home_of(peers),
            launch=launch,
        )

    def _by_row(self, received: Received) -> bool:
        if received.layout is not RowLayout.RANK_MAJOR or received.format == "fp8_block":
            return False
        return self.weights.dtype == torch.bfloat16 and self._compiles


def _scaled_by_block(received: Received) -> Received:
    """A row's one scale, if it came with one, for each 128 columns of it: no memory of its own."""
    if received.format != "fp8_row":
        return received
    assert received.x_scale is not None
    scale = received.x_scale.expand(*received.x.shape[:-1], received.x.shape[-1] // BLOCK)
    return dataclasses.replace(received, x_scale=scale, format="fp8_block")
