"""Triton and Gluon, or placeholders if they are not installed, so that modules with kernels import everywhere.

Modules import `triton`, `tl`, `gluon` and `gl` from here. So a kernel can be in one module with the torch code that
defines its result. Without Triton, a launch raises BackendUnavailable.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ep_moe.errors import BackendUnavailable

__all__ = [
    "HAS_GLUON", "JITFunction", "TensorDescriptor", "async_copy", "fence_async_shared", "gdc_launch_dependents",
    "gdc_wait", "gl", "gluon", "mbarrier", "tl", "tma", "triton", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip


class Missing:
    """A placeholder for a missing package, its contents, and the kernels that it would compile.

    It can be used as an attribute, a decorator and an annotation. A launch raises BackendUnavailable.
    """

    def __init__(self, package: str, error: ImportError, kernel: str = "") -> None:
        self._package, self._error, self._kernel = package, error, kernel

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **options: Any) -> Missing:
        """Stand for a call of `jit` with a function or with options, or for a constant. Keep a kernel's name."""
        name = getattr(args[0], "__name__", "") if args and callable(args[0]) else ""
        return Missing(self._package, self._error, name)

    def __getitem__(self, grid: Any) -> NoReturn:
        raise BackendUnavailable(
            f"kernel {self._kernel!r} needs {self._package}, which is not there ({self._error}); install the triton "
            f"that this torch asks for (a CUDA build of torch brings it), or choose another backend "
            f"(docs/reference/backends.md)"
        ) from self._error


class MissingFunction:
    """A placeholder for `triton.runtime.jit.JITFunction`, of which no kernel is an instance."""


try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.runtime.jit import JITFunction
except ImportError as error:
    triton = tl = gdc_launch_dependents = gdc_wait = Missing("Triton", error)
    JITFunction = MissingFunction
try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        async_copy,
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError as error:
    gluon = gl = Missing("a Triton with Gluon as in 3.6", error)
    async_copy = fence_async_shared = mbarrier = tma = warpgroup_mma = warpgroup_mma_wait = TensorDescriptor = gluon
HAS_GLUON = not isinstance(gluon, Missing)
