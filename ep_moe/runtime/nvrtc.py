"""Kernels in CUDA C++, compiled where they run, for what Triton has no words for.

cuda-bindings and NVRTC come with the CUDA builds of torch. Binaries are kept where Triton keeps its own.
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

SHARED = 227 * 1024  # bytes of shared memory that a program can have on Hopper


@cache
def missing() -> str | None:
    """Why nothing can be compiled, None where it can."""
    try:
        from cuda.bindings import nvrtc

        done(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:
        return f"cuda-bindings or NVRTC is not installed ({error}); use a CUDA build of torch, which brings both"
    return None


def compile_kernels(source: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """A binary for compute capability 9.0 and what the compiler has to say about it. Needs no GPU."""
    from cuda.bindings import nvrtc

    program = done(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], []))
    given = [option.encode() for option in ("--gpu-architecture=sm_90a", "--std=c++17", "-default-device", *options)]
    status = nvrtc.nvrtcCompileProgram(program, len(given), given)
    log = b" " * done(nvrtc.nvrtcGetProgramLogSize(program))
    done(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode(errors="replace").strip("\0 \n")
    if int(status[0]):
        raise RuntimeError(f"NVRTC does not compile a kernel of this project: {text}")
    binary = b" " * done(nvrtc.nvrtcGetCUBINSize(program))
    done(nvrtc.nvrtcGetCUBIN(program, binary))
    return binary, text


@cache
def kernel(source: str, name: str, options: tuple[str, ...], device: int) -> Any:
    """A function of the driver, which may have all shared memory. device: index of the current one, part of
    the cache's key alone"""
    from cuda.bindings import driver

    module = done(driver.cuModuleLoadData(_kept(source, options)))
    function = done(driver.cuModuleGetFunction(module, name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    done(driver.cuFuncSetAttribute(function, attribute, SHARED))
    return function


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


class Kernel:
    """A function with the threads and shared bytes of a program, launched as Triton's kernels are, on torch's current
    stream: kernel[grid](arguments)."""

    arg_names = ()  # by which nothing is given

    def __init__(self, function: Any, device: torch.device, threads: int, shared: int) -> None:
        self._function, self._device, self._threads, self._shared = function, device, threads, shared

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[[Arguments], Kernel]:
        x, y, z = (*grid, 1, 1)[:3]

        def run(arguments: Arguments) -> Kernel:
            how = (x, y, z, self._threads, 1, 1, self._shared, current_stream(self._device))
            done(_driver().cuLaunchKernel(self._function, *how, arguments.address, 0))
            return self

        return run


_CODES = {c_void_p: "Q", c_int: "i", c_float: "f"}  # of `struct`


class Arguments:
    """Of a kernel, as the driver takes them: where each one is.

    given: value and C type of each, None as the type of a tensor map
    """

    def __init__(self, given: Sequence[tuple[Any, Any]]) -> None:
        kinds = tuple([kind for _, kind in given])
        size, pack, offsets = _layout(kinds)
        numbers = (c_char * size).from_buffer_copy(pack(*[value for value, kind in given if kind is not None]))
        self._own = numbers, [value for value, kind in given if kind is None]  # the driver reads them at each launch
        first, maps = addressof(numbers), iter(self._own[1])
        at = [next(maps).getPtr() if offset is None else first + offset for offset in offsets]
        self._places = (c_void_p * len(at))(*at)
        self.address = addressof(self._places)


@cache
def _layout(kinds: tuple[Any, ...]) -> tuple[int, Callable[..., bytes], tuple[int | None, ...]]:
    """How a kernel's arguments but its tensor maps lie in memory: bytes in all, what packs them, and where each one
    begins, None for a map. One call packs all: an object of ctypes for each takes the host longer than the launch."""
    offsets, size = list[int | None](), 0
    for kind in kinds:
        offsets.append(None if kind is None else size)
        size += 0 if kind is None else sizeof(kind)
    return size, Struct("=" + "".join(_CODES[kind] for kind in kinds if kind is not None)).pack, tuple(offsets)


@lru_cache(maxsize=4096)  # some microseconds each, of a call that has the same tensors every time
def tensor_map(
    pointer: int, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Any:
    """Of a tensor whose boxes are copied to shared memory (TMA), where lines of 128 bytes are swizzled; 0 beyond it.

    shape, strides, box: numbers, of the innermost dimension first, whose stride is 1 and left out
    """
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = {1: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8, 2: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16}[itemsize]
    return done(
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
    """A binary, compiled once for all processes that have these sources and this compiler."""
    from cuda.bindings import nvrtc
    from triton.runtime.cache import get_cache_manager

    version = done(nvrtc.nvrtcVersion())
    files = get_cache_manager(hashlib.sha256(repr((source, options, version)).encode()).hexdigest())
    path = files.get_file("kernels.cubin")
    if path is None:
        path = files.put(compile_kernels(source, options)[0], "kernels.cubin")
    with open(path, "rb") as file:
        return file.read()


def done(answer: tuple[Any, ...]) -> Any:
    """What a call gives besides its status."""
    status, *rest = answer
    if int(status):
        raise BackendUnavailable(f"the CUDA driver or NVRTC answers {status!r} to a kernel of this project")
    return rest[0] if len(rest) == 1 else tuple(rest)
