"""Launches that are made again: of Triton's kernels, and of those of `nvrtc`, which are launched alike.

Triton looks at every argument of every launch to find the binary that was compiled for its like, which takes the host
two to three times as long as the launch itself. What was launched once with the same arguments, or others like them, is
launched here without another look.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from ep_moe.runtime.versions import LAUNCHERS, launcher_known

Grid = tuple[int, ...]
Launch = Callable[..., None]  # kernel, grid, arguments, and by name constants and options

_FORMS = 64  # that are kept at once
_ALIGNED = 16  # bytes: what Triton's binaries are compiled for, and what libraries' kernels read at once


def aligned(x: Tensor) -> Tensor:
    """x, or a copy where it begins between two multiples of 16 bytes, which some kernels cannot read. Nothing has no
    address that says so, and still cannot be seen as words then."""
    return x.clone() if x.data_ptr() % _ALIGNED or not x.numel() else x


def at_once(kernel: Any, grid: Grid, /, *args: Any, **constants: Any) -> None:
    """A launch, and no more."""
    kernel[grid](*args, **constants)


class RecordedLaunches:
    """A `Launch` that can do all again: in the same order, with the same arguments, on the same memory, of
    which it holds nothing but addresses."""

    def __init__(self) -> None:
        self._made: list[Callable[[], None]] = []

    def __call__(self, kernel: Any, grid: Grid, /, *args: Any, **constants: Any) -> None:
        self._made.append(_launched(LaunchSpec(kernel, grid, (), args, constants)))

    def again(self) -> None:
        for launch in self._made:
            launch()


class LaunchSpec(NamedTuple):
    """A launch in full: kernel[grid](*changing, *fixed, **constants)."""

    kernel: Any
    grid: Grid
    changing: tuple[Any, ...]
    fixed: tuple[Any, ...]
    constants: dict[str, Any]


class LaunchCache:
    """Launches whose first arguments change from call to call, while the others depend on their form alone."""

    def __init__(self) -> None:
        self._made: dict[Any, Callable[..., None]] = {}

    def launch(self, form: Any, changing: tuple[Any, ...], first: Callable[[], LaunchSpec]) -> None:
        """form: all that the rest depends on, and of `changing` dtypes and where there is None
        changing: contiguous tensors, None, and numbers that the kernel does not specialise on
        first: says all when a form comes first, where tensors may be views of other dtypes
        """
        bits, given = 0, []
        for argument in changing:
            if isinstance(argument, Tensor):
                argument = argument.data_ptr()
                bits |= argument
            given.append(argument)
        made = self._made.get(form)
        if made is not None and bits % _ALIGNED == 0:
            made(*given)
            return
        launch = first()
        if bits % _ALIGNED:
            at_once(launch.kernel, launch.grid, *launch.changing, *launch.fixed, **launch.constants)
            return
        if len(self._made) == _FORMS:
            self._made.clear()
        made = _launched(launch)
        if isinstance(made, _Binary):
            self._made[form] = made


def _launched(first: LaunchSpec) -> Callable[..., None]:
    """Launch it; what launches it again, with other `changing`."""
    kernel, grid, changing, fixed, constants = first
    made = kernel[grid](*changing, *fixed, **constants)
    if made is not None:
        # a binary takes all that its kernel's signature has, constants too, but no options of the launch
        rest = [constants[name] for name in kernel.arg_names[len(changing) + len(fixed) :]]
        return _Binary(made, grid, tuple(map(_kept, (*fixed, *rest))))

    def interpreted(*given: Any) -> None:  # Triton's interpreter leaves none
        kernel[grid](*given, *fixed, **constants)

    return interpreted


class _Binary:
    """A launch of a compiled kernel."""

    __slots__ = ("_fixed", "_run")

    def __init__(self, made: Any, grid: Grid, fixed: tuple[Any, ...]) -> None:
        grid = (*grid, 1, 1)[:3]
        self._run, self._fixed = _short(made, grid) or made[grid], fixed

    def __call__(self, *changing: Any) -> None:
        self._run(*changing, *self._fixed)


def _short(made: Any, grid: Grid) -> Callable[..., None] | None:
    """What `made[grid]` does, for half of the host's time while no profiler listens; None where it is a Triton whose
    launcher is not known, or none of its kernels."""
    if not hasattr(made, "packed_metadata"):
        return None
    import triton

    if not launcher_known(triton.__version__):
        _say_slow(triton.__version__)
        return None
    run, function, packed, full = made.run, made.function, made.packed_metadata, made[grid]
    knobs, active = triton.knobs.runtime, triton.runtime.driver.active
    current, device = active.get_current_stream, active.get_current_device()

    def launch(*args: Any) -> None:
        enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            full(*args)
        else:
            run(*grid, current(device), function, packed, None, None, None, *args)

    return launch


@cache
def _say_slow(version: str) -> None:
    logging.getLogger("ep_moe").warning(
        "Triton %s is newer or older than those whose launcher is known (%s): each launch takes the host longer, with "
        "the same results",
        version,
        ", ".join(LAUNCHERS),
    )


def _kept(argument: Any) -> Any:
    """A tensor's address, which a kernel takes as it takes the tensor, without asking the driver what kind of memory it
    is; of a descriptor one like it that holds no memory; others as they are."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(base := getattr(argument, "base", None), Tensor):
        argument = copy.copy(argument)
        argument.base = _At(base.data_ptr())
    return argument


class _At:
    """What is left of a descriptor's tensor."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def data_ptr(self) -> int:
        return self._pointer
