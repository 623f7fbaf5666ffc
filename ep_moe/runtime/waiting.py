"""Launch kernels that wait for other ranks, or for programs of their own grid.

Before the first launch of a binary, `warp_paths` checks that its warps stay together.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakSet

from ep_moe.errors import BackendUnavailable
from ep_moe.runtime.triton_compat import JITFunction, triton
from ep_moe.runtime.versions import IN_PART, ON_GPUS
from ep_moe.runtime.warp_paths import divergent_branch


class Waiting:
    """A decorator above `triton.jit`: kernel[grid](...) launches a binary only if its warps provably stay together.

    `divergent_branch` examines each binary once, before its first launch (about 20 ms). For a binary that is not shown
    to be safe, a launch raises BackendUnavailable. All ranks raise together: they compile the same source with the same
    Triton, whose version the context compares over ranks.
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
        problem = "it has no PTX" if ptx is None else divergent_branch(ptx)
        if problem is not None:
            known = ", ".join(sorted({*ON_GPUS["triton"], *IN_PART["triton"]}))
            raise BackendUnavailable(
                f"kernel {self.kernel.fn.__name__!r} of {self.kernel.fn.__module__} waits for other ranks, and "
                f"Triton {triton.__version__} compiled it so that its warps may diverge ({problem}); it is not "
                f"launched. Install a tested Triton ({known}), or choose another all2all, for example "
                'all2all="torch_a2a"'
            )
