"""Dense parameters that an optimizer steps beside a layer's experts: whether they stay alike on ranks.

A router and shared experts alone would not tell. They may be frozen, or all that a loop averages.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.optim import Optimizer

from ep_moe.parallel.checksum import checksum

_LOOKED_AT = 1 << 12  # numbers of each parameter


class Beside:
    """The plain dense parameters that learn by an optimizer, held weakly. Experts differ on purpose. DTensors are
    pieces, which differ too.

    optimizer: ahead of a step, and not within a graph capture
    before: a checksum of the parameters then, int64 []; 0 where there are none
    """

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        apart = ("summed_over_ranks", "placements")
        dense = [p for p in parameters if p.requires_grad and not any(hasattr(p, name) for name in apart)]
        # tensors of inference mode have no version, and do not learn
        self._held = [weakref.ref(parameter) for parameter in dense if not parameter.is_inference()]
        self._seen: list[int] = []
        self.before = self._last = torch.zeros((), dtype=torch.int64, device="cpu")
        self.before = self.now()

    @torch.no_grad()
    def now(self) -> Tensor:
        """Give the checksum of the parameters' present numbers. Each layer of a model asks within one backward, and the
        parameters are read once."""
        found = [p for held in self._held if (p := held()) is not None and not p.is_meta]
        versions = [parameter._version for parameter in found]
        if found and versions != self._seen:
            device = found[0].device
            sums = [checksum(parameter.flatten()[:_LOOKED_AT], device) for parameter in found]
            self._last, self._seen = checksum(torch.stack(sums), device), versions
        return self._last
