"""Fast repeated launches (`LaunchCache`), grid sizes, and early starts of kernels (PDL).

Triton inspects every argument of every launch to find the matching binary. This takes the host two to three times as
long as the launch itself. The classes here keep the binary of a launch, and use it for launches with arguments of the
same kinds. Kernels of `nvrtc` are launched in the same way. Triton's own functions `cdiv` and `next_power_of_2` also
serve its compiler, and take the host 1.6 us a call. Those here take 0.1 us, and a layer call makes twenty such calls.

PDL (CUDA's programmatic dependent launch) lets a kernel start before the previous kernel of its stream has ended:

- A kernel launched with `pdl_launch` starts when all programs of the previous kernel have called `pdl_trigger` or
  ended.
- It calls `pdl_wait` before it reads what an earlier kernel wrote, or writes what one may still read. Before
  `pdl_wait` it may only read weights, which no kernel of a forward pass writes, and data whose arrival a flag announces
  (`types.WireIds`).
- After `pdl_wait` all earlier kernels have ended: the previous kernel waited for its predecessor in the same way, or
  was launched without `pdl_launch` and so started after it had ended.
- Kernels that write weights do not let the next kernel start early.
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
Launch = Callable[..., None]  # (kernel, grid, *arguments, **constants and options)

_MAX_CACHED = 64  # most launches in a cache


def launch_directly(kernel: Any, grid: Grid, /, *args: Any, **constants: Any) -> None:
    """Launch a kernel directly, without a cache."""
    kernel[grid](*args, **constants)


class RecordedLaunches:
    """A `Launch` that records launches, and can repeat all of them in the same order with the same arguments.

    It keeps the addresses of tensors, and does not keep their memory alive.
    """

    def __init__(self) -> None:
        self._made: list[Callable[[], None]] = []

    def __call__(self, kernel: Any, grid: Grid, /, *args: Any, **constants: Any) -> None:
        self._made.append(_launched(LaunchSpec(kernel, grid, (), args, constants)))

    def replay(self) -> None:
        for launch in self._made:
            launch()


class LaunchSpec(NamedTuple):
    """All arguments of a launch: kernel[grid](*changing, *fixed, **constants)."""

    kernel: Any
    grid: Grid
    changing: tuple[Any, ...]
    fixed: tuple[Any, ...]
    constants: dict[str, Any]


class LaunchCache:
    """A cache of launches. Their leading arguments change from call to call; the others depend only on a key."""

    def __init__(self) -> None:
        self._made: dict[Any, Callable[..., None]] = {}

    def launch(self, key: Any, changing: tuple[Any, ...], make_spec: Callable[[], LaunchSpec]) -> None:
        """Launch a kernel, by its cached binary if the key is known.

        key: everything on which the other arguments depend; also the dtypes of `changing`, and which are None
        changing: contiguous tensors, None, and numbers on which the kernel does not specialize
        make_spec: returns the whole launch for a new key. Its tensors may be views in other dtypes
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
            launch_directly(spec.kernel, spec.grid, *spec.changing, *spec.fixed, **spec.constants)
            return
        if len(self._made) == _MAX_CACHED:
            self._made.clear()
        made = _launched(spec)
        if isinstance(made, _Binary):
            self._made[key] = made


def _launched(spec: LaunchSpec) -> Callable[..., None]:
    """Launch a kernel, and return a function that launches it again with other `changing`."""
    kernel, grid, changing, fixed, constants = spec
    made = kernel[grid](*changing, *fixed, **constants)
    if made is not None:
        rest = _constants(kernel, len(changing) + len(fixed), constants)
        return _Binary(made, grid, tuple(map(_kept, (*fixed, *rest))))

    def interpreted(*given: Any) -> None:  # Triton's interpreter returns no binary
        kernel[grid](*given, *fixed, **constants)

    return interpreted


class KeptLaunches:
    """A `Launch` that caches the binary of each launch by kernel, constants and kinds of arguments.

    The kind of an argument is what Triton compiles a kernel for: the dtype and alignment of a tensor; whether an
    integer is 1, a multiple of 16, or has more than 32 bits. Grids may differ. An object serves one device.
    """

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __call__(self, kernel: Any, grid: Grid, /, *args: Any, **constants: Any) -> None:
        parts: list[Any] = [id(kernel), *constants.items()]  # a kernel's own hash is slow: it hashes the source
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
        if made is None or not hasattr(made, "packed_metadata"):  # from Triton's interpreter, or from NVRTC
            return
        if len(self._made) == _MAX_CACHED:
            self._made.clear()
        run = _short(made) or (lambda grid, *given: made[grid](*given))
        self._made[key] = run, tuple(map(_kept, _constants(kernel, len(args), constants)))


@cache
def kept_launches(device: torch.device) -> KeptLaunches:
    """Return the cache of a device for launches that belong to no layer."""
    return KeptLaunches()


class _Binary:
    """A repeatable launch of a compiled kernel."""

    __slots__ = ("_fixed", "_run")

    def __init__(self, made: Any, grid: Grid, fixed: tuple[Any, ...]) -> None:
        short, grid = _short(made), (*grid, 1, 1)[:3]
        self._run, self._fixed = made[grid] if short is None else partial(short, grid), fixed

    def __call__(self, *changing: Any) -> None:
        self._run(*changing, *self._fixed)


def _constants(kernel: Any, given: int, constants: dict[str, Any]) -> list[Any]:
    """Return the constants in a kernel's signature, which its binary takes too, without options of the launch."""
    return [constants[name] for name in kernel.arg_names[given:]]


def _short(made: Any) -> Callable[..., None] | None:
    """Return a function of grid and args that does what `made[grid](*args)` does, in half of the host's time.

    With a profiler's launch hooks it takes the slow path. Returns None for a Triton whose launcher is not known, and
    for kernels of NVRTC.
    """
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
    """Return an argument in the form in which a cache keeps it.

    A tensor becomes its address: the launcher then does not ask the driver for its kind of memory. A tensor descriptor
    becomes a copy that holds no memory. Other arguments are unchanged.
    """
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(base := getattr(argument, "base", None), Tensor):
        argument = copy.copy(argument)
        argument.base = _At(base.data_ptr())
    return argument


class _At:
    """Stands for a descriptor's tensor, with only its address."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def data_ptr(self) -> int:
        return self._pointer


def cdiv(number: int, size: int) -> int:
    """Return number / size, rounded up."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`; 1 for 0 and 1."""
    return 1 << max(number - 1, 0).bit_length()


# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False


def pdl_launch(device: torch.device, pdl: bool = True) -> dict[str, bool]:
    """Return the launch options of a kernel with a parameter PDL: start early if `pdl`, and if the device can."""
    return {"PDL": True, "launch_pdl": True} if pdl and devices.supports_pdl(device) else {"PDL": False}


@triton.jit
def pdl_trigger(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    if PDL:
        gdc_wait()
