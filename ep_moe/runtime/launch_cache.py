"""Launches: kept for calls like earlier ones (`LaunchCache`), their grids, and kernels that start early (PDL).

Triton looks at every argument of every launch to find the binary that was compiled for its like, which takes the host
two to three times as long as the launch itself. What was launched once with the same arguments, or others like them, is
launched here without another look. Kernels of `nvrtc` are launched alike. Triton's own functions of the names `cdiv`
and `next_power_of_2` serve its compiler too, and take the host 1.6 us a call where these take 0.1: a layer call has
twenty of them.

Kernels may start before those ahead of them in their stream have ended (CUDA's programmatic dependent launch). A
kernel launched with `pdl_launch` starts as soon as all programs of the one ahead of it have called `pdl_trigger`, or
ended. It calls `pdl_wait` before it reads what an earlier kernel wrote or writes what one may still read; read
before are only weights, which no kernel of a forward pass writes, and what a flag says is there (`types.WireIds`). All
kernels ahead of it have ended then, since the one ahead has waited for its own in the same way, or was launched without
`pdl_launch` and so began after them. Kernels that write weights let none start early.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_moe.runtime import devices
from ep_moe.runtime.devices import ALIGNED, unseen_by_modes
from ep_moe.runtime.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton
from ep_moe.runtime.versions import LAUNCHERS, launcher_known

_log = logging.getLogger("ep_moe.runtime")

Grid = tuple[int, ...]
Launch = Callable[..., None]  # kernel, grid, arguments, and by name constants and options

_MAX_CACHED = 64  # launches that a cache keeps at once


def at_once(kernel: Any, grid: Grid, /, *args: Any, **constants: Any) -> None:
    """A launch, and no more."""
    kernel[grid](*args, **constants)


class RecordedLaunches:
    """A `Launch` that can repeat all launches: in the same order, with the same arguments, on the same memory, of
    which it holds nothing but addresses."""

    def __init__(self) -> None:
        self._made: list[Callable[[], None]] = []

    def __call__(self, kernel: Any, grid: Grid, /, *args: Any, **constants: Any) -> None:
        self._made.append(_launched(LaunchSpec(kernel, grid, (), args, constants)))

    def replay(self) -> None:
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
    """Launches whose first arguments change from call to call, while the others depend on a key alone."""

    def __init__(self) -> None:
        self._made: dict[Any, Callable[..., None]] = {}

    def launch(self, key: Any, changing: tuple[Any, ...], make_spec: Callable[[], LaunchSpec]) -> None:
        """key: all that the rest depends on, and of `changing` dtypes and where there is None
        changing: contiguous tensors, None, and numbers that the kernel does not specialize on
        make_spec: gives the whole launch when a key is new, where tensors may be views of other dtypes
        """
        bits, given = 0, []
        for argument in changing:
            if isinstance(argument, Tensor):
                argument = argument.data_ptr()
                bits |= argument
            given.append(argument)
        made = self._made.get(key)
        if made is not None and bits % ALIGNED == 0:
            made(*given)
            return
        with unseen_by_modes():
            spec = make_spec()
        if bits % ALIGNED:
            at_once(spec.kernel, spec.grid, *spec.changing, *spec.fixed, **spec.constants)
            return
        if len(self._made) == _MAX_CACHED:
            self._made.clear()
        made = _launched(spec)
        if isinstance(made, _Binary):
            self._made[key] = made


def _launched(spec: LaunchSpec) -> Callable[..., None]:
    """Launch it; what launches it again, with other `changing`."""
    kernel, grid, changing, fixed, constants = spec
    made = kernel[grid](*changing, *fixed, **constants)
    if made is not None:
        rest = _constants(kernel, len(changing) + len(fixed), constants)
        return _Binary(made, grid, tuple(map(_kept, (*fixed, *rest))))

    def interpreted(*given: Any) -> None:  # Triton's interpreter leaves none
        kernel[grid](*given, *fixed, **constants)

    return interpreted


class KeptLaunches:
    """A `Launch` that keeps the binary of each call, for calls with the same kernel, constants and kinds of arguments.

    Kinds are what Triton compiles a kernel for: the dtype and alignment of a tensor; whether an integer is 1, a
    multiple of 16, or of more than 32 bits. Grids may differ. Used on one device.
    """

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __call__(self, kernel: Any, grid: Grid, /, *args: Any, **constants: Any) -> None:
        parts: list[Any] = [id(kernel), *constants.items()]  # a kernel's hash is of its source, and slow
        given = []
        for argument in args:
            if isinstance(argument, Tensor):
                kind, argument = argument.dtype, argument.data_ptr()
                parts.append((kind, argument % ALIGNED == 0))
            elif type(argument) is int:
                parts.append((argument == 1, argument % ALIGNED == 0, -1 << 31 <= argument < 1 << 31))
            else:
                parts.append(float if type(argument) is float else argument)
            given.append(argument)
        key = tuple(parts)
        kept = self._made.get(key)
        if kept is not None:
            run, rest = kept
            run((*grid, 1, 1)[:3], *given, *rest)
            return
        made = kernel[grid](*args, **constants)
        if made is None or not hasattr(made, "packed_metadata"):  # of the interpreter, or of NVRTC
            return
        if len(self._made) == _MAX_CACHED:
            self._made.clear()
        run = _short(made) or (lambda grid, *given: made[grid](*given))
        self._made[key] = run, tuple(map(_kept, _constants(kernel, len(args), constants)))


@cache
def kept_launches(device: torch.device) -> KeptLaunches:
    """Of a device, for launches that belong to no layer."""
    return KeptLaunches()


class _Binary:
    """A launch of a compiled kernel."""

    __slots__ = ("_fixed", "_run")

    def __init__(self, made: Any, grid: Grid, fixed: tuple[Any, ...]) -> None:
        short, grid = _short(made), (*grid, 1, 1)[:3]
        self._run, self._fixed = made[grid] if short is None else partial(short, grid), fixed

    def __call__(self, *changing: Any) -> None:
        self._run(*changing, *self._fixed)


def _constants(kernel: Any, given: int, constants: dict[str, Any]) -> list[Any]:
    """A binary takes all that its kernel's signature has, constants too, but no options of the launch."""
    return [constants[name] for name in kernel.arg_names[given:]]


def _short(made: Any) -> Callable[..., None] | None:
    """What `made[grid](*args)` does, of grid and args, for half of the host's time while no profiler listens; None
    where it is a Triton whose launcher is not known, or none of its kernels."""
    if not hasattr(made, "packed_metadata"):
        return None
    import triton

    if not launcher_known(triton.__version__):
        _say_slow(triton.__version__)
        return None
    run, function, packed = made.run, made.function, made.packed_metadata
    knobs, active = triton.knobs.runtime, triton.runtime.driver.active
    current, device = active.get_current_stream, active.get_current_device()

    def launch(grid: Grid, *args: Any) -> None:
        enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            made[grid](*args)
        else:
            run(*grid, current(device), function, packed, None, None, None, *args)

    return launch


@cache
def _say_slow(version: str) -> None:
    _log.warning(
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


def cdiv(number: int, size: int) -> int:
    """How many pieces of so many there are, the last one perhaps not whole."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """The smallest that is not below; 1 for 0 and 1."""
    return 1 << max(number - 1, 0).bit_length()


# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False


def pdl_launch(device: torch.device, pdl: bool = True) -> dict[str, bool]:
    """How a kernel with a parameter PDL is launched to start early, where the device can and `pdl` asks for it."""
    return {"PDL": True, "launch_pdl": True} if pdl and devices.starts_early(device) else {"PDL": False}


@triton.jit
def pdl_trigger(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    if PDL:
        gdc_wait()
