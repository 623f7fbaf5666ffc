"""The old import path of `ep_moe.Tuned`, which works for one release."""

from typing import TYPE_CHECKING

from ep_moe.renamed import renamed_in
from ep_moe.selection.tuned import Tuned

if not TYPE_CHECKING:
    __getattr__ = renamed_in(__name__, {"Tuned": ("ep_moe.Tuned", Tuned)})
    del Tuned  # so that `from ep_moe.tuned import Tuned` calls `__getattr__`, which warns
