"""What this project's own expert kernels share."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod

import torch
from torch import Tensor

from ep_moe.experts.base import Experts
from ep_moe.types import PeerRows, Received


class TritonExperts(Experts):
    """Kernels in Triton, whose last step sums a row's experts into one tensor, or where the row came from."""

    @classmethod
    def available(cls) -> str | None:
        return None if importlib.util.find_spec("triton") else "Triton is not installed; use a CUDA build of torch"

    @property
    def picks(self) -> int:
        """Of one pass."""
        return self.options.chunk_rows * self.config.top_k

    def compute(self, received: Received, out: Tensor | None) -> Tensor:
        out = torch.empty_like(received.x, dtype=self.weights.dtype) if out is None else out
        if received.x.numel() == 0 or self.weights.num_slots == 0:
            return out.zero_()
        self.step(received, out, None)
        return out

    def compute_to_peers(self, received: Received, out: PeerRows) -> None:
        if received.x.numel() and self.weights.num_slots:
            self.step(received, out.blocks[out.rank], out)
        else:
            out.write_nothing()

    @abstractmethod
    def step(self, received: Received, out: Tensor, peers: PeerRows | None) -> None:
        """Into out, or with peers there; then out is a block of theirs."""
