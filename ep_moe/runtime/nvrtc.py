"""Compile and launch kernels in CUDA C++, for instructions that Triton cannot express.

NVRTC compiles them on the machine that runs them. cuda-bindings and NVRTC come with the CUDA builds of torch. Binaries
are kept in Triton's cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char, c_float, c_int, c_void_p, sizeof
from functools import cache, lru_cache
from struct import Struct
from typing import Any

import torch

from ep_moe.errors import BackendUnavailable
from ep_moe.runtime.devices import current_stream

SHARED = 227 * 1024  # most bytes of shared memory of a program on Hopper


@cache
def missing() -> str | None:
    """Return why kernels cannot be compiled here, or None."""
    try:
        from cuda.bindings import nvrtc

        check_status(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:
        return f"cuda-bindings or NVRTC is not installed ({error}); use a CUDA build of torch, which brings both"
    return None


def compile_kernels(source: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """Compile source for compute capability 9.0, and return the binary and the compiler's log. Needs no GPU."""
    from cuda.bindings import nvrtc

    program = check_status(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], []))
    given = [option.encode() for option in ("--gpu-architecture=sm_90a", "--std=c++17", "-default-device", *options)]
    status = nvrtc.nvrtcCompileProgram(program, len(given), given)
    log = b" " * check_status(nvrtc.nvrtcGetProgramLogSize(program))
    check_status(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode(errors="replace").strip("\0 \n")
    if int(status[0]):
        raise RuntimeError(f"NVRTC cannot compile a kernel of ep_moe: {text}")
    binary = b" " * check_status(nvrtc.nvrtcGetCUBINSize(program))
    check_status(nvrtc.nvrtcGetCUBIN(program, binary))
    return binary, text


@cache
def kernel(source: str, name: str, options: tuple[str, ...], device: int) -> Any:
    """Return the driver's function of a kernel, which may use all shared memory.

    device: index of the current device, only part of the cache's key
    """
    from cuda.bindings import driver

    module = check_status(driver.cuModuleLoadData(_kept(source, options)))
    function = check_status(driver.cuModuleGetFunction(module, name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check_status(driver.cuFuncSetAttribute(function, attribute, SHARED))
    return function


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


class Kernel:
    """A kernel that is launched as Triton's kernels are, on torch's current stream: kernel[grid](arguments).

    threads, shared: threads and bytes of shared memory of a program
    cooperative: start only when all programs can run at once, so that they may wait for each other
    """

    arg_names = ()  # it takes no arguments by name

    def __init__(
        self, function: Any, device: torch.device, threads: int, shared: int, *, cooperative: bool = False
    ) -> None:
        self._function, self._device, self._threads, self._shared = function, device, threads, shared
        self._cooperative = cooperative

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[[Arguments], Kernel]:
        x, y, z = (*grid, 1, 1)[:3]

        def run(arguments: Arguments) -> Kernel:
            how = (x, y, z, self._threads, 1, 1, self._shared, current_stream(self._device))
            if self._cooperative:
                check_status(_driver().cuLaunchCooperativeKernel(self._function, *how, arguments.address))
            else:
                check_status(_driver().cuLaunchKernel(self._function, *how, arguments.address, 0))
            return self

        return run


_CODES = {c_void_p: "Q", c_int: "i", c_float: "f"}  # format characters of `struct`


class Arguments:
    """A kernel's arguments as the driver takes them, as an array of addresses.

    given: value and C type of each argument; None as the type of a tensor map
    """

    def __init__(self, given: Sequence[tuple[Any, Any]]) -> None:
        kinds = tuple([kind for _, kind in given])
        size, pack, offsets = _layout(kinds)
        numbers = (c_char * size).from_buffer_copy(pack(*[value for value, kind in given if kind is not None]))
        # kept alive here, because the driver reads them at each launch
        self._own = numbers, [value for value, kind in given if kind is None]
        first, maps = addressof(numbers), iter(self._own[1])
        at = [next(maps).getPtr() if offset is None else first + offset for offset in offsets]
        self._places = (c_void_p * len(at))(*at)
        self.address = addressof(self._places)


@cache
def _layout(kinds: tuple[Any, ...]) -> tuple[int, Callable[..., bytes], tuple[int | None, ...]]:
    """Return the layout of a kernel's arguments in memory, without tensor maps.

    Returns the bytes in total, the function that packs them, and the offset of each argument, None for a map. One call
    packs all arguments, because a ctypes object for each would take the host longer than the launch.
    """
    offsets, size = list[int | None](), 0
    for kind in kinds:
        offsets.append(None if kind is None else size)
        size += 0 if kind is None else sizeof(kind)
    return size, Struct("=" + "".join(_CODES[kind] for kind in kinds if kind is not None)).pack, tuple(offsets)


@lru_cache(maxsize=4096)  # a map takes some microseconds to make, and calls use the same tensors every time
def tensor_map(
    pointer: int, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Any:
    """Return a TMA map that copies boxes of a tensor to shared memory, swizzled in lines of 128 bytes.

    Elements beyond the tensor are 0.

    shape, strides, box: in elements, innermost dimension first. Its stride is 1, and is left out of strides
    """
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = {1: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8, 2: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16}[itemsize]
    return check_status(
        driver.cuTensorMapEncodeTiled(
            kind,
            len(shape),
            pointer,
            [driver.cuuint64_t(size) for size in shape],
            [driver.cuuint64_t(stride * itemsize) for stride in strides],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * len(shape),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def _kept(source: str, options: tuple[str, ...]) -> bytes:
    """Return a binary from Triton's cache, compiled once for these sources and this compiler."""
    from cuda.bindings import nvrtc
    from triton.runtime.cache import get_cache_manager

    version = check_status(nvrtc.nvrtcVersion())
    files = get_cache_manager(hashlib.sha256(repr((source, options, version)).encode()).hexdigest())
    path = files.get_file("kernels.cubin")
    if path is None:
        path = files.put(compile_kernels(source, options)[0], "kernels.cubin")
    with open(path, "rb") as file:
        return file.read()


def check_status(answer: tuple[Any, ...]) -> Any:
    """Return a call's results without its status. Raise BackendUnavailable if the status is an error."""
    status, *rest = answer
    if int(status):
        raise BackendUnavailable(f"the CUDA driver or NVRTC answers {status!r} for a kernel of ep_moe")
    return rest[0] if len(rest) == 1 else tuple(rest)
