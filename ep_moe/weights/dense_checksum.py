"""Checksums of the dense parameters that one optimizer updates together with a layer's experts.

Ranks compare these checksums to detect dense parameters that diverge. The router and the shared experts alone are not
enough: they may be frozen, or be the only parameters whose gradients a training loop averages.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.optim import Optimizer

from ep_moe.parallel.checksum import checksum

_LOOKED_AT = 1 << 12  # leading elements of each parameter that enter the checksum


class DenseChecksum:
    """The checksum of an optimizer's trainable, plain dense parameters, which it references weakly.

    Expert parameters and DTensors are excluded: they differ between ranks by design.

    optimizer: construct this before its step, outside a CUDA graph capture
    before: checksum of the parameters at construction, int64 []; 0 if there are none
    """

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        apart = ("summed_over_ranks", "placements")
        dense = [p for p in parameters if p.requires_grad and not any(hasattr(p, name) for name in apart)]
        # inference tensors have no version counter, and are not trained
        self._held = [weakref.ref(parameter) for parameter in dense if not parameter.is_inference()]
        self._seen: list[int] = []
        self.before = self._last = torch.zeros((), dtype=torch.int64, device="cpu")
        self.before = self.now()

    @torch.no_grad()
    def now(self) -> Tensor:
        """Return the checksum of the current parameters, int64 [].

        Every layer of a model calls this in one backward. The result is cached until a parameter's version changes.
        """
        found = [p for held in self._held if (p := held()) is not None and not p.is_meta]
        versions = [parameter._version for parameter in found]
        if found and versions != self._seen:
            device = found[0].device
            sums = [checksum(parameter.flatten()[:_LOOKED_AT], device) for parameter in found]
            self._last, self._seen = checksum(torch.stack(sums), device), versions
        return self._last
