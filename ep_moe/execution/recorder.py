"""Where calls are recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ep_moe.execution.cuda_graph import CallGraph, Given
from ep_moe.execution.graph_inputs import InputMemory
from ep_moe.runtime.devices import current_stream
from ep_moe.runtime.workspace import Workspaces
from ep_moe.types import capturing


class Recorder:
    """Records calls as CUDA graphs in one memory pool, and has them replayed on the stream that was current when it was
    made, and on no other: what graphs share is kept apart by that stream's order alone.

    memory: what the calls read
    """

    def __init__(self, device: torch.device, workspaces: Workspaces) -> None:
        self.stream: Any = torch.cuda.current_stream(device)
        self._device, self._current = device, self.stream.cuda_stream
        self._beside = torch.cuda.Stream(device)  # the default stream cannot be captured
        workspaces.lend(self._beside)  # what is recorded there runs here
        self._pool = torch.cuda.graph_pool_handle()
        self.memory = InputMemory()

    @classmethod
    def unsupported_reason(cls, device: torch.device) -> str | None:
        """None, or why calls there cannot be recorded."""
        return None if device.type == "cuda" else f"the layer is on {device}, and CUDA graphs need a GPU"

    @classmethod
    def among(cls, made: list[Any], device: torch.device, workspaces: Workspaces) -> Recorder:
        """The one of those that were made that is for the current stream; a new one joins them."""
        found = next((recorder for recorder in made if recorder.here), None)
        if found is None:
            made.append(found := cls(device, workspaces))
        return found

    @property
    def here(self) -> bool:
        """Whether a replay may begin: the stream is current, and not being captured itself."""
        return current_stream(self._device) == self._current and not capturing(self._device)

    def warm(self, call: Callable[[], Tensor]) -> None:
        """Run it where it will be recorded: what the first call on a stream makes is not to be made in a graph."""
        self._beside.wait_stream(self.stream)
        with torch.cuda.stream(self._beside):
            call()
        self.stream.wait_stream(self._beside)

    def record(self, call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """What replays it, and the tensor that each replay writes."""
        graph = torch.cuda.CUDAGraph()
        # the outer one leaves the stream again where a capture fails
        with torch.cuda.stream(self._beside), torch.cuda.graph(graph, self._pool, self._beside):
            out = call()
        return graph.replay, out

    def graph_of(self, launch: Callable[[], None], first: Given, last: Given) -> CallGraph:
        """As `CallGraph.record`."""
        return CallGraph.record(launch, first, last, self._beside)
