"""What this project's own expert kernels share."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ep_moe.experts.base import Experts
from ep_moe.runtime.launch_cache import Launch, RecordedLaunches, at_once
from ep_moe.types import Activation, PeerRows, Received, RowLayout

# what the kernels' programs compute; they would take any other for the last of their cases
ACTIVATIONS = frozenset({Activation.SWIGLU, Activation.GEGLU, Activation.SWIGLU_CLAMPED, Activation.RELU2})
_PLACES = 32  # of calls that are remembered


class TritonExperts(Experts):
    """Kernels in Triton, whose last step sums a row's experts into one tensor, or where the row came from.

    What a call launches depends on where its rows lie and on their number alone, and transports with fixed buffers
    leave them in the same place: the second call there is recorded, later ones launch the same again.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._recorded: dict[Any, RecordedLaunches | None] = {}  # None: of a place that was seen once

    @classmethod
    def available(cls) -> str | None:
        return None if importlib.util.find_spec("triton") else "Triton is not installed; use a CUDA build of torch"

    @property
    def routes(self) -> int:
        """Of one pass."""
        return self.options.chunk_rows * self.config.top_k

    def compute(self, received: Received, out: Tensor | None) -> Tensor:
        out = torch.empty_like(received.x, dtype=self.weights.dtype) if out is None else out
        if received.x.numel() == 0 or self.weights.num_slots == 0:
            return out.zero_()
        self._step(received, out, None)
        return out

    def compute_to_peers(self, received: Received, out: PeerRows) -> None:
        if received.x.numel() and self.weights.num_slots:
            self._step(received, out.blocks[out.rank], out)
        else:
            out.write_nothing()

    def _step(self, received: Received, out: Tensor, peers: PeerRows | None) -> None:
        # rows that are grouped already take operations of torch's, which are not recorded
        if torch.compiler.is_compiling() or received.layout is not RowLayout.RANK_MAJOR:
            self.step(received, out, peers, at_once)
            return
        place = self._place(received, out, peers)
        recorded = self._recorded.get(place)
        if recorded is not None:
            recorded.again()
        elif place in self._recorded:
            recorded = RecordedLaunches()
            self.step(received, out, peers, recorded)
            self._recorded[place] = recorded
        else:
            if len(self._recorded) == _PLACES:
                self._recorded.clear()
            self.step(received, out, peers, at_once)
            self._recorded[place] = None

    def _place(self, received: Received, out: Tensor, peers: PeerRows | None) -> tuple[Any, ...]:
        """All that `step` makes its launches of."""
        wire, weights, scale = received.wire_ids, received.weights, received.x_scale
        ids = received.local_ids if wire is None else wire.ids
        assert ids is not None
        return (
            received.x.data_ptr(),
            received.x.shape,
            0 if scale is None else scale.data_ptr(),
            received.format,
            received.input_scale,
            ids.data_ptr(),
            ids.shape,
            ids.dtype,
            0 if wire is None else wire.base,
            0 if wire is None or wire.ids_ready is None else wire.ids_ready.data_ptr(),
            0 if weights is None else weights.data_ptr(),
            received.weighting,
            out.data_ptr(),
            self.workspace().data_ptr(),
            None if peers is None else peers.place,
            self.weights.place,
        )

    @abstractmethod
    def step(self, received: Received, out: Tensor, peers: PeerRows | None, launch: Launch) -> None:
        """Into out, or with peers there; then out is a block of theirs. Of RANK_MAJOR rows nothing but launches."""
