"""Emulate CUDA graphs: run a recorded call again, on the tensors that it was recorded with."""

from __future__ import annotations

import dataclasses

import torch

from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.errors import BackendUnavailable
from ep_moe.execution import graphs
from ep_moe.execution.graph_inputs import InputMemory
from ep_moe.experts.reference import ReferenceExperts
from tests.fixtures.layer_static import emulate_on_cpu

GRAPHS = graphs.Recorder


class EmulatedRecorder:
    """Emulate a `Recorder`. `replays` counts the replays."""

    replays, can_replay, handle, for_current_stream = 0, True, 0, vars(GRAPHS)["for_current_stream"]

    def __init__(self, device: torch.device, workspaces) -> None:
        self.stream = None
        self.memory = InputMemory()

    @classmethod
    def unsupported_reason(cls, device: torch.device) -> str | None:
        return None

    def warm(self, call) -> None:
        call()

    def record(self, call):
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        out = call()

        def replay() -> None:
            EmulatedRecorder.replays += 1
            out.copy_(call())

        return replay, out

    def record_within_step(self, call):
        assert not torch.is_grad_enabled()
        call()

        def replay() -> None:
            EmulatedRecorder.replays += 1
            call()

        return replay

    def graph_of(self, launch, given):
        raise BackendUnavailable("there are no kernels here")


def stand_in() -> None:
    """Replace the recorder in a rank's process."""
    emulate_on_cpu(NVLinkP2PDispatcher)
    graphs.Recorder, EmulatedRecorder.replays = EmulatedRecorder, 0
    ReferenceExperts.capabilities = dataclasses.replace(ReferenceExperts.capabilities, cuda_graph=True)
