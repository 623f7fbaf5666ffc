"""Operations that torch's dispatch modes are not to see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Hide operations from dispatch modes: those that a layer makes in its first call alone, now and then, or only
    where activation checkpointing repeats a call. Selective checkpointing numbers the operations of a forward and of
    its repetition, and takes what it saved by these numbers.

    Yields:
        Nothing.
    """
    if not torch._C._len_torch_dispatch_stack():
        yield
        return
    with _disable_current_modes():
        yield
