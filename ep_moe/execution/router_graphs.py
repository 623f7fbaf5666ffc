"""A router of ours as CUDA graphs of few tokens. By themselves its launches take the host longer than a whole call that
is replayed (`CallerInputs`), which a router's kernels, torch's own, cannot be part of."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_moe.execution.cuda_graph import Recorder
from ep_moe.router import Router
from ep_moe.types import Routing

MOST = 256  # tokens: more take the device longer than the host
_SIZES = 32  # numbers of tokens that are kept at once


class _Recorded(NamedTuple):
    x: Tensor
    graph: torch.cuda.CUDAGraph
    routing: Routing
    places: list[int]


class RouterGraphs:
    """Of one layer, on one stream. The second call of a number of tokens is recorded, and later ones are replayed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._made: dict[Any, _Recorded | None] = {}  # by tokens and dtype; None: of a call that was seen once
        self._failed = False

    def __call__(self, router: Router, x: Tensor) -> Routing:
        """Choose experts for x [T, H], without gradients. What is replayed holds until the next call."""
        tokens = len(x)
        if not 0 < tokens <= MOST or self._failed or router._forward_hooks or router._forward_pre_hooks:
            found: Routing = router(x)
            return found
        places = _places(router)
        key = (tokens, x.dtype)  # a router in float32 stays where it is when a layer changes its dtype
        made = self._made.get(key)
        if made is None or made.places != places:
            if key not in self._made:
                if len(self._made) == _SIZES:
                    self._made.clear()
                self._made[key] = None
                return router(x)  # type: ignore[no-any-return]
            made = self._record(router, x, places)
            if made is None:
                return router(x)  # type: ignore[no-any-return]
            self._made[key] = made
        made.x.copy_(x)
        made.graph.replay()
        return made.routing

    def _record(self, router: Router, x: Tensor, places: list[int]) -> _Recorded | None:
        try:
            with torch.inference_mode(False), torch.no_grad():  # what is made within it could not be written outside
                kept = torch.empty_like(x)
                graph, routing = self._recorder.graph_beside(lambda: router(kept))
                return _Recorded(kept, graph, routing, places)
        except RuntimeError:  # another thread of the process did what a capture does not stand
            self._failed = True
            return None


def _places(router: Router) -> list[int]:
    found: list[Any] = [*router._parameters.values(), *router._buffers.values()]
    return [tensor.data_ptr() for tensor in found if tensor is not None]
