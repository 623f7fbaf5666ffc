"""`bf16_triton`: unquantised experts in bf16 on Hopper by this project's own kernels.

Weights are read as the checkpoint has them, rows where the transport left them, ids as they travelled. Nothing is
tuned at run time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.experts.base import ExpertsCapabilities
from ep_moe.experts.hopper import bf16_op
from ep_moe.experts.hopper.experts import ACTIVATIONS, TritonExperts
from ep_moe.experts.hopper.operator import home_of, ids_ready_of
from ep_moe.experts.layouts import expected_pairs
from ep_moe.quant.schemes import PLAIN
from ep_moe.runtime import nvrtc
from ep_moe.runtime.launch_cache import Launch
from ep_moe.types import PeerRows, Received, RowLayout, Weighting

UNIT = 128  # hidden and intermediate sizes are multiples of it


class Bf16TritonExperts(TritonExperts):
    name = "bf16_triton"
    run_on = "1, 2 and 4 H200"
    capabilities = ExpertsCapabilities(
        layouts=frozenset({RowLayout.RANK_MAJOR}),
        weightings=frozenset(Weighting),
        activations=ACTIVATIONS,
        dtypes=frozenset({torch.bfloat16}),
        schemes=frozenset({PLAIN.name}),
        biases=False,
        etp=True,
        alignment_bytes=2 * UNIT,
        cuda_graph=True,
        host_sync=False,
        deterministic=True,
        differentiable=False,
        min_compute_capability=(9, 0),
        max_compute_capability=(9, 0),
        devices=frozenset({"cuda"}),
        wire_ids=True,
        spare_sms=True,
        peer_out=True,
    )

    @classmethod
    def available(cls) -> str | None:
        return super().available() or nvrtc.missing()

    def workspace_bytes(self) -> int:
        if not self.weights.num_slots:
            return 0
        config = self.config
        inner = config.intermediate_size // self.weights.etp.size
        return bf16_op.scratch_bytes(self.routes, config.hidden_size, inner, self.weights.num_slots)

    def step(self, received: Received, out: Tensor, peers: PeerRows | None, launch: Launch) -> None:
        x, weights, config, wire = received.x, self.weights, self.config, received.wire_ids
        ids = received.local_ids if wire is None else wire.ids
        assert ids is not None
        bf16_op.bf16_moe(
            out,
            self.workspace(),
            x,
            ids,
            0 if wire is None else wire.base,
            *ids_ready_of(wire),
            received.weights if received.weighting is Weighting.EXPERTS else None,
            weights.get_parameter("w13"),
            weights.get_parameter("w2"),
            config.activation.value,
            config.activation_alpha,
            config.activation_limit,
            expected_pairs(config, weights.num_slots, ids.shape[1]),
            self.routes,
            self.options.spare_sms,
            *home_of(peers),
            launch=launch,
        )
