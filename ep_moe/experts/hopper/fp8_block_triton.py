"""`fp8_block_triton`: DeepSeek's fp8 128 x 128 blocks on Hopper by this project's own grouped GEMM.

Takes every row layout as it is: CONTIGUOUS and BATCHED rows are neither sorted nor copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.experts.base import ExpertsCapabilities
from ep_moe.experts.hopper import fp8_block_op
from ep_moe.experts.hopper.experts import ACTIVATIONS, TritonExperts
from ep_moe.experts.hopper.operator import home_of, ids_ready_of
from ep_moe.experts.layouts import expected_pairs
from ep_moe.runtime.launch_cache import Launch
from ep_moe.types import PeerRows, Received, RowLayout, Weighting


class Fp8BlockTritonExperts(TritonExperts):
    name = "fp8_block_triton"
    run_on = "1, 2 and 4 H200"
    capabilities = ExpertsCapabilities(
        layouts=frozenset(RowLayout),
        weightings=frozenset(Weighting),
        activations=ACTIVATIONS,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        schemes=frozenset({"fp8_block"}),
        biases=False,
        etp=True,
        alignment_bytes=16,
        cuda_graph=True,
        host_sync=False,
        deterministic=True,
        differentiable=False,
        min_compute_capability=(9, 0),
        max_compute_capability=(9, 0),
        devices=frozenset({"cuda"}),
        row_formats=frozenset({"plain", "fp8_block"}),
        wire_ids=True,
        spare_sms=True,
        peer_out=True,
    )

    def workspace_bytes(self) -> int:
        if not self.weights.num_slots:
            return 0
        config, etp = self.config, self.weights.etp.size
        return fp8_block_op.scratch_bytes(
            self.routes,
            self.options.chunk_rows,
            config.hidden_size,
            config.w13_rows // etp,
            config.intermediate_size // etp,
            self.weights.num_slots,
            self.weights.dtype,
        )

    def compute(self, received: Received, out: Tensor | None) -> Tensor:
        out, slots = super().compute(received, out), self.weights.num_slots
        if received.layout is RowLayout.BATCHED:
            out[slots:].zero_()  # slots that only wider ranks have; a transport may fill rows up there
        return out

    def step(self, received: Received, out: Tensor, peers: PeerRows | None, launch: Launch) -> None:
        x, weights, config = received.x, self.weights, self.config
        starts, ends = self._bounds(received)
        wire = received.wire_ids
        ids = received.local_ids if wire is None else wire.ids
        fp8_block_op.fp8_block_moe(
            out.view(-1, config.hidden_size),
            self.workspace(),
            x.view(-1, config.hidden_size),
            None if received.x_scale is None else received.x_scale.view(-1, config.hidden_size // fp8_block_op.BLOCK),
            weights.dtype,
            ids,
            0 if wire is None else wire.base,
            *ids_ready_of(wire),
            self._weights(received),
            starts,
            ends,
            weights.get_parameter("w13"),
            weights.get_parameter("w13_scale"),
            weights.get_parameter("w2"),
            weights.get_parameter("w2_scale"),
            config.activation.value,
            config.activation_alpha,
            config.activation_limit,
            expected_pairs(config, weights.num_slots, 1 if ids is None else ids.shape[1]),
            self.routes,
            self.options.spare_sms,
            *home_of(peers),
            launch=launch,
        )

    def _bounds(self, received: Received) -> tuple[Tensor | None, Tensor | None]:
        """First and last row of each expert among the flat rows, int32 [L]."""
        slots = self.weights.num_slots
        match received.layout:
            case RowLayout.RANK_MAJOR:
                return None, None
            case RowLayout.CONTIGUOUS:
                assert received.expert_offsets is not None
                offsets = received.expert_offsets[: slots + 1].int()  # no rows beyond this rank's slots
                return offsets[:-1], offsets[1:]
            case RowLayout.BATCHED:
                assert received.expert_counts is not None
                cap = received.x.shape[1]
                starts = torch.arange(0, slots * cap, cap, dtype=torch.int32, device=received.x.device)
                return starts, starts + received.expert_counts[:slots].int()

    def _weights(self, received: Received) -> Tensor | None:
        if received.weighting is Weighting.COMBINE:
            return None
        assert received.weights is not None
        return received.weights if received.layout is RowLayout.RANK_MAJOR else received.weights.flatten()
