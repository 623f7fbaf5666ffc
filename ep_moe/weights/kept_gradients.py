"""Detect a gradient of `use_main_grads` that a user kept, before a backward overwrites its memory.

torch allocates a new gradient after `zero_grad()`, so that a kept `p.grad` keeps its numbers. A view of a buffer does
not. It is found by the references to the Python object. A tensor derived from it, such as `p.grad.detach()`, is not.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from torch import Tensor

from ep_moe.parallel.checksum import is_compared

_ALL = 128  # the number of backwards that are all checked. Later ones are checked as ranks compare
_IN_A_LIST = max(map(sys.getrefcount, [object()]))  # of an object that only the list holds


class KeptGradients:
    """Warns once about gradients of one layer that are still referenced when they begin anew."""

    def __init__(self) -> None:
        self._backwards, self._warned = 0, False

    def checks_next(self) -> bool:
        """Count a backward, and return whether it is checked. Checks take time of the host."""
        self._backwards += 1
        return not self._warned and (self._backwards <= _ALL or is_compared(self._backwards))

    def check(self, views: Sequence[Tensor], uses: int, attribute: str) -> None:
        """Warn if a gradient is still referenced.

        views: those that are about to begin anew; uses: the references to each of them beside that of the list
        attribute: the name of the gradient, `grad` or `main_grad`
        """
        if max(map(sys.getrefcount, views), default=0) > _IN_A_LIST + uses:  # the fastest way for hundreds of them
            self._warned = True
            warnings.warn(
                f"a gradient of an expert is still referenced (kept = parameter.{attribute}), and this backward "
                "overwrites it: use_main_grads writes into the same memory in each step; keep a clone of it, and "
                "delete variables such as that of a loop before the next backward",
                UserWarning,
                stacklevel=2,
            )
