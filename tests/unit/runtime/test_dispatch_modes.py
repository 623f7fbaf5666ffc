"""Test that one-time and periodic work of a layer is invisible to dispatch modes.

Selective checkpointing counts the operations that it sees.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ep_moe.parallel.device_watch import DeviceWatch
from ep_moe.runtime.launch_cache import LaunchCache, LaunchSpec
from ep_moe.runtime.workspace import Workspaces

CPU = torch.device("cpu")


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


def test_marks_of_a_device():
    watch = DeviceWatch(0.0, abortable=True)
    watch.active = True
    with Seen() as seen:
        for _ in range(3):
            watch.mark(CPU)
    assert watch.newest is not None
    assert watch.newest._asked > 1
    assert seen.names == []


def test_a_launch_of_a_new_form():
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments: launched.append(len(arguments))

    x = torch.zeros(8)
    with Seen() as seen:
        LaunchCache().launch("key", (x,), lambda: LaunchSpec(Kernel(), (1,), (x.view(torch.int32),), (x[:4],), {}))
    assert launched == [2]
    assert seen.names == []


def test_scratch_memory():
    workspaces = Workspaces(CPU)
    workspaces.reserve(64)
    with Seen() as seen:
        workspaces.take(64)
    assert workspaces.allocated == 64
    assert seen.names == []
