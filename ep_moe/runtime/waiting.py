"""Kernels that wait for other ranks, or for programs of their own grid. Their binaries are examined before a launch:
whether their warps stay together (`warp_paths`).
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakSet

from ep_moe.errors import BackendUnavailable
from ep_moe.runtime.triton_compat import JITFunction, triton
from ep_moe.runtime.versions import IN_PART, ON_GPUS
from ep_moe.runtime.warp_paths import parting_branch


class Waiting:
    """A decorator above `triton.jit`. kernel[grid](...) launches a binary only if its warps are shown to stay together.

    Each binary is examined once, before its first launch (`parting_branch`, some 20 ms). Raises
    BackendUnavailable, without a launch, for a binary that is not shown to be safe. All ranks compile the same source
    with the same Triton, which the context compares, so that all raise.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arg_names = kernel.arg_names
        self._shown: WeakSet[Any] = WeakSet()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        if not isinstance(self.kernel, JITFunction):  # Triton's interpreter compiles nothing
            return self.kernel[grid]
        return partial(self._launch, (*grid, 1, 1)[:3])

    def _launch(self, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> Any:
        made = self.kernel.warmup(*args, grid=grid, **constants)
        if made not in self._shown:
            self._examine(made)
            self._shown.add(made)
        made[grid](*args, *(constants[name] for name in self.arg_names[len(args) :]))
        return made

    def _examine(self, made: Any) -> None:
        ptx = made.asm.get("ptx")
        problem = "it has no PTX" if ptx is None else parting_branch(ptx)
        if problem is not None:
            known = ", ".join(sorted({*ON_GPUS["triton"], *IN_PART["triton"]}))
            raise BackendUnavailable(
                f"kernel {self.kernel.fn.__name__!r} of {self.kernel.fn.__module__} waits for other ranks, and "
                f"Triton {triton.__version__} compiled it so that its warps may part ({problem}); it is not launched. "
                f'Install a Triton that was run ({known}), or choose another all2all, for example all2all="torch_a2a"'
            )
