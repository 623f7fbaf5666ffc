"""Properties of devices, the current device and stream, side streams, and operations hidden from dispatch modes.

Torch's operations run on the device of their tensors. Triton, the driver, FlashInfer, pinned memory, graph captures and
events use the current device, which is 0 until it is set. So each entry point of the package first enters `on_device`
with the context's device.
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
ALIGNED = 16  # bytes: the alignment for which Triton compiles binaries, and that libraries' kernels need


@cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


@cache
def memory_rate(device: torch.device) -> float:
    """Compute the peak bandwidth of a GPU's memory from its clock and width: bytes per second, 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    found = torch.cuda.get_device_properties(device)
    return 2e3 * found.memory_clock_rate * found.memory_bus_width / 8  # kHz, double data rate; bits


def current_stream(device: torch.device) -> int:
    """Return the handle of a GPU's current stream, without creating a stream object; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    handle: int = torch._C._cuda_getCurrentRawStream(index)
    return handle


@cache
def supports_pdl(device: torch.device) -> bool:
    """Return whether the GPU supports PDL: a kernel can start before the previous one has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def without_peer_atomics(count: int) -> tuple[int, int] | None:
    """Find two GPUs without atomic operations in each other's memory, for example connected over PCI Express.

    Args:
        count: GPUs 0 to count - 1 are checked.

    Returns:
        The first such pair. None if all pairs have them, as over NVLink, or if the driver cannot be queried.
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
    """Make a GPU the current device within a `with` block. Does nothing for a CPU, or if it is already current.

    In compiled code it does nothing: that code itself makes the device of its tensors current.

    Args:
        device: The GPU, with its index.

    Returns:
        A context manager.

    Raises:
        InputError: A CUDA graph is being captured on another GPU.
    """
    index = None if torch.compiler.is_compiling() else gpu_index(device)
    if index is None or not is_other_gpu_current(index):
        return nullcontext()
    if torch.cuda.is_current_stream_capturing():
        found = torch.cuda.current_device()
        raise InputError(
            f"a CUDA graph is captured on cuda:{found}, the current device, and would not record work on {device}; "
            f"capture it within torch.cuda.device({str(device)!r})"
        )
    return torch.cuda.device(index)


def is_other_gpu_current(index: int | None) -> bool:
    """Return whether another GPU than this one is current. Called in each eager call, so it must be fast.

    Args:
        index: Index of the GPU; None for no GPU.

    Returns:
        Whether another GPU is current; False for None.
    """
    return index is not None and not torch.compiler.is_compiling() and torch._C._cuda_getDevice() != index


@cache  # saves half a microsecond in torch
def gpu_index(device: torch.device) -> int | None:
    """Return a GPU's index; None for a CPU, and for a GPU without an index."""
    return device.index if device.type == "cuda" else None


def on_device_of(
    place: Callable[..., torch.device],
) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Decorate a function to run within `on_device`.

    Args:
        place: Returns the device for the function's arguments.

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
    """Return a GPU without an index as the current GPU with its index; return other devices unchanged."""
    if isinstance(device, torch.device) and device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def as_device(device: object, what: str = "device") -> torch.device:
    """Return the device that a user named, with its index.

    Args:
        device: A torch.device, or an argument of `torch.device`: "cpu", "cuda", "cuda:1", the index of a GPU.
        what: Name of the argument, for the error.

    Returns:
        The device. A GPU without an index becomes the current GPU.

    Raises:
        ConfigError: It is not a device, or torch does not have it here.
    """
    if isinstance(device, str) or type(device) is int:
        try:
            device = torch.device(device)
        except (RuntimeError, ValueError) as error:  # ValueError: an integer beyond int64
            raise ConfigError(f"{what} must be a torch.device or its name, got {device!r}: {error}") from None
    if not isinstance(device, torch.device):
        raise ConfigError(f"{what} must be a torch.device or its name, such as 'cuda:0', got {device!r}")
    try:
        return with_index(device)
    except (AssertionError, RuntimeError) as error:  # a CPU build of torch asserts
        raise ConfigError(f"{what} {str(device)!r} is none that torch has here: {error}") from None


def memory_left(device: torch.device) -> tuple[int, int]:
    """Return the free and total bytes of a GPU; (0, 0) for a CPU, or if the query fails."""
    if device.type != "cuda":
        return 0, 0
    try:
        return torch.cuda.mem_get_info(device)
    except RuntimeError:
        return 0, 0


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy if its address is not a multiple of 16 bytes, which some kernels need.

    An empty tensor reports address 0 and still cannot be viewed as words, so it is copied.
    """
    return x.clone() if x.data_ptr() % ALIGNED or not x.numel() else x


def without_class(x: Any) -> Any:
    """Return a tensor of a subclass that only changes methods as a plain tensor, and keep its autograd graph.

    An autograd function would lose the class, and with it the graph. For an asynchronous result of torch's collectives
    this waits.

    Args:
        x: Anything.

    Returns:
        The plain tensor; anything else unchanged.
    """
    if not isinstance(x, Tensor) or type(x) in (Tensor, torch.nn.Parameter):
        return x
    if type(x).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return x.as_subclass(Tensor)
    return x.wait() if hasattr(x, "wait") else x


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Hide operations from torch's dispatch modes, for operations that not every call makes.

    Selective activation checkpointing numbers the operations of a forward and of its recomputation, and finds saved
    tensors by these numbers. Operations that a layer makes only in its first call, or only in a recomputation, would
    shift the numbers.

    Yields:
        Nothing.
    """
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        yield
        return
    with _disable_current_modes():
        yield


class SideStream:
    """Runs calls on a separate stream, in the order in which they are made.

    A call begins after the work that the caller's stream has at that time, so memory that the caller freed before may
    be reused. `wait()` makes the caller's stream wait for the call, and runs the rest of the call on the caller's
    stream. In a CUDA graph capture, both streams become branches of the graph.
    """

    def __init__(self, priority: int = 0) -> None:
        """Store the priority. The first call creates the stream.

        Args:
            priority: Priority of the CUDA stream; a lower number goes first.
        """
        self._priority = priority
        self._stream: torch.cuda.Stream | None = None
        self.active = False  # whether a call is being launched on this stream

    def start(self, device: torch.device, call: Callable[[], Pending[Result]]) -> Pending[Result]:
        """Start a call. The objects that `call` references are kept until `wait()`, so their memory is not reused.

        Args:
            device: The device on which it runs.
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
