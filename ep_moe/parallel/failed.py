"""Classification of an exception that left a call on one rank, and the message that all ranks raise for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ep_moe.errors import EPMoEError, OutOfMemory, RankFailed
from ep_moe.runtime.devices import memory_left

_TEXT = 400  # the most characters of the exception's own message
_REMEDY = (
    "Pass fewer tokens, or make EPContext with a smaller max_tokens; ExpertsOptions(chunk_rows=...) bounds the rows "
    "that are computed at once; EPContext.plan() says what the layers need"
)


def is_communication_error(error: BaseException) -> bool:
    """Return whether a collective raised this. gloo and NCCL raise plain RuntimeErrors besides torch's classes."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "nccl", "connection closed"))


def is_out_of_memory(error: BaseException, device: torch.device) -> bool:
    """Return whether an exception, or one of its causes, means that device memory is exhausted.

    torch has a class for it. NCCL, the driver and libraries are recognized by their messages. Some messages of NCCL do
    not name the cause; they count if less than 1% of the memory is free.
    """
    for origin in causes(error):
        if not isinstance(origin, RuntimeError):
            return False
        text = str(origin).lower()
        if isinstance(origin, torch.OutOfMemoryError) or "out of memory" in text:
            return True
        if "nccl" in text and ("unhandled cuda error" in text or "failed to cuda" in text):
            free, total = memory_left(device)
            return free < total // 100
    return False


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and the chain of its `__cause__`, each exception once."""
    seen: set[int] = set()
    origin: BaseException | None = error
    while origin is not None and id(origin) not in seen:
        seen.add(id(origin))
        yield origin
        origin = origin.__cause__


def with_cause(failure: EPMoEError, error: BaseException) -> EPMoEError:
    """Prepare a stored failure to be raised again, with the current error as its cause. Return it.

    The old traceback is dropped. If the error is the failure itself, or was raised from it, the cause stays unchanged:
    otherwise the chain of `__cause__` would be a cycle.
    """
    if not any(origin is failure for origin in causes(error)):
        failure.__cause__ = error
    return failure.with_traceback(None)


def failure_text(
    error: BaseException, rank: int, step: object, call_name: str, device: torch.device, *, memory: bool
) -> str:
    """Return the message of a RankFailed or OutOfMemory.

    step: the newest step of the flight recorder; call_name: the layer, "" between calls
    memory: `is_out_of_memory(error)`
    """
    place = f"in a call of {call_name}" if call_name else "between calls"
    if not memory:
        return (
            f"rank {rank} raised {type(error).__name__} {place}: {_shortened(error)} (it {_was(step)}). Its peers "
            "wait in the same call, and the EPContext cannot be used again on any rank; fix the cause, and make a "
            "new context and new layers"
        )
    return (
        f"rank {rank} ran out of memory on {device} {place} (it {_was(step)}){_left(device)}: {_shortened(error)}. "
        f"{_REMEDY}. The EPContext cannot be used again on any rank"
    )


def published_failure(entry: bytes) -> EPMoEError | None:
    """Return the error that `FlightRecorder.publish_failure` published, None for an empty entry."""
    found = json.loads(entry or b"null")
    if found is None:
        return None
    return (OutOfMemory if found["memory"] else RankFailed)(found["text"])


def _was(step: object) -> str:
    return f"was last seen {step}"


def _left(device: torch.device) -> str:
    free, total = memory_left(device)
    return f"; {free / 2**20:.0f} of {total / 2**20:.0f} MiB are free" if total else ""


def _shortened(error: BaseException) -> str:
    """Return an exception's message, shortened, and without torch's text about its allocator, which is out of date."""
    text = re.split(r"\. GPU \d+ has|\n", str(error).strip(), maxsplit=1)[0].rstrip(". ")
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}..."
