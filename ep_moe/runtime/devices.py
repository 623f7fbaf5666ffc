"""What a device can do, asked once; what its kernels can read; the device and the stream that are current, work beside
that stream, and operations that torch's dispatch modes are not to see.

Torch's own operations run where their tensors are. Triton, the driver, FlashInfer, pinned memory, graph captures and
events run on the device that is current, which is 0 until it is set. Each entry point of the package enters
`on_device` of the context's device first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ep_moe.errors import ConfigError, InputError
from ep_moe.types import Pending

Given = ParamSpec("Given")
Result = TypeVar("Result")
ALIGNED = 16  # bytes: what Triton's binaries are compiled for, and what libraries' kernels read at once


@cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


@cache
def memory_rate(device: torch.device) -> float:
    """Compute the peak bandwidth of a GPU's memory from its clock and width: bytes per second, 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    found = torch.cuda.get_device_properties(device)
    return 2e3 * found.memory_clock_rate * found.memory_bus_width / 8  # kHz, of which both edges count, and bits


def current_stream(device: torch.device) -> int:
    """Give the handle of the stream that is current on a GPU, without an object for it; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    handle: int = torch._C._cuda_getCurrentRawStream(index)
    return handle


@cache
def starts_early(device: torch.device) -> bool:
    """Say whether the GPU has PDL: kernels can start before those ahead of them have ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def without_peer_atomics(count: int) -> tuple[int, int] | None:
    """Look for GPUs without atomic operations in each other's memory, as over PCI Express.

    Args:
        count: GPUs 0 to count - 1 are asked.

    Returns:
        The first such pair. None where all have them, as over NVLink, and where the driver cannot be asked.
    """
    try:
        from cuda.bindings import driver

        driver.cuInit(0)
    except (ImportError, RuntimeError):  # not installed, or no driver that it finds
        return None
    asked = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    for first, second in itertools.permutations(range(count), 2):
        status, found = driver.cuDeviceGetP2PAttribute(asked, first, second)
        if int(status) == 0 and not found:
            return first, second
    return None


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current device, for a `with`. Nothing happens on a CPU, or where it is current already.

    Compiled code needs nothing of it: it makes the device of its tensors current by itself.

    Args:
        device: The GPU, with its index.

    Returns:
        A context manager.

    Raises:
        InputError: a CUDA graph is being captured on another GPU.
    """
    index = None if torch.compiler.is_compiling() else gpu_index(device)
    if index is None or not elsewhere(index):
        return nullcontext()
    if torch.cuda.is_current_stream_capturing():
        found = torch.cuda.current_device()
        raise InputError(
            f"a CUDA graph is captured on cuda:{found}, which is current, and would have nothing of what runs on "
            f"{device}; capture it within torch.cuda.device({str(device)!r})"
        )
    return torch.cuda.device(index)


def elsewhere(index: int | None) -> bool:
    """Say whether another GPU than this one is current. Part of the host time of eager calls.

    Args:
        index: Of the GPU; None for no GPU, which gives False.

    Returns:
        Whether it is another.
    """
    return index is not None and not torch.compiler.is_compiling() and torch._C._cuda_getDevice() != index


@cache  # half a microsecond of torch's otherwise
def gpu_index(device: torch.device) -> int | None:
    """Give a GPU's index; None for a CPU, and for a GPU without an index."""
    return device.index if device.type == "cuda" else None


def on_device_of(
    place: Callable[..., torch.device],
) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Decorate a function to run within `on_device`.

    Args:
        place: The function's arguments -> the device.

    Returns:
        A decorator.
    """

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @functools.wraps(function)
        def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            with on_device(place(*args, **kwargs)):
                return function(*args, **kwargs)

        return run

    return decorate


def with_index(device: torch.device) -> torch.device:
    """Give `torch.device("cuda")` the index of the device that is current now; leave others as they are."""
    if isinstance(device, torch.device) and device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def as_device(device: object, what: str = "device") -> torch.device:
    """Give the device that a user named, with its index.

    Args:
        device: A torch.device, or what `torch.device` takes: "cpu", "cuda", "cuda:1", the index of a GPU.
        what: The argument, for the error.

    Returns:
        The device. One of a GPU without an index is the device that is current now.

    Raises:
        ConfigError: it is no device, or none that torch has here.
    """
    if isinstance(device, str) or type(device) is int:
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ConfigError(f"{what} must be a torch.device or its name, got {device!r}: {error}") from None
    if not isinstance(device, torch.device):
        raise ConfigError(f"{what} must be a torch.device or its name, such as 'cuda:0', got {device!r}")
    try:
        return with_index(device)
    except (AssertionError, RuntimeError) as error:  # a build for CPUs asserts
        raise ConfigError(f"{what} {str(device)!r} is none that torch has here: {error}") from None


def memory_left(device: torch.device) -> tuple[int, int]:
    """Ask a GPU for its free and total bytes; (0, 0) where there is none, or it does not answer."""
    if device.type != "cuda":
        return 0, 0
    try:
        return torch.cuda.mem_get_info(device)
    except RuntimeError:
        return 0, 0


def aligned(x: Tensor) -> Tensor:
    """x, or a copy where it begins between two multiples of 16 bytes, which some kernels cannot read. An empty tensor
    reports address 0 and still cannot be viewed as words, so it is copied."""
    return x.clone() if x.data_ptr() % ALIGNED or not x.numel() else x


def without_class(x: Any) -> Any:
    """Make a plain tensor of one whose class only changes methods, and keep its graph.

    The class is lost within autograd's functions, and then the graph. Waits for a result that torch's collectives have
    under way.

    Args:
        x: Anything.

    Returns:
        The plain tensor; all else as it is.
    """
    if not isinstance(x, Tensor) or type(x) in (Tensor, torch.nn.Parameter):
        return x
    if type(x).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return x.as_subclass(Tensor)
    return x.wait() if hasattr(x, "wait") else x


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Hide operations from dispatch modes: those that a layer makes in its first call alone, now and then, or only
    where activation checkpointing repeats a call. Selective checkpointing numbers the operations of a forward and of
    its repetition, and takes what it saved by these numbers.

    Yields:
        Nothing.
    """
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        yield
        return
    with _disable_current_modes():
        yield


class SideStream:
    """Calls on a stream of their own, in the order they are made.

    Each begins when what the caller's stream has been given until then is done, so that memory which the caller freed
    before may be used again; `wait()` makes the caller's stream wait, and does there what the call left to it. Inside a
    graph capture both become branches.
    """

    def __init__(self, priority: int = 0) -> None:
        """Make the stream in the first call.

        Args:
            priority: Of a CUDA stream, lower goes first.
        """
        self._priority = priority
        self._stream: torch.cuda.Stream | None = None
        self.active = False  # whether a call is being given to it

    def start(self, device: torch.device, call: Callable[[], Pending[Result]]) -> Pending[Result]:
        """Begin a call. What `call` holds is kept until `wait()`: its memory may not be used again before.

        Args:
            device: Where it runs.
            call: The call.

        Returns:
            Its result, pending.
        """
        self.active = True
        try:
            return call() if device.type != "cuda" else self._start(device, call)
        finally:
            self.active = False

    def _start(self, device: torch.device, call: Callable[[], Pending[Result]]) -> Pending[Result]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, self._priority)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            pending = call()
            done = torch.cuda.Event()
            done.record(self._stream)

        return Pending(partial(_join, device, done, pending, call))


def _join(device: torch.device, done: torch.cuda.Event, pending: Pending[Result], kept: object) -> Result:
    torch.cuda.current_stream(device).wait_event(done)
    return pending.wait()
