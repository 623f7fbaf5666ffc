"""Shared by all benchmarks: start, timing, and output of lines.

Arguments, the machine and output files are checked before anything is timed. An error is printed as one sentence, with
exit code 2. Times are those of the current device (`on_device`), or of the CPU if there is no GPU. They are medians of
calls that take turns, so that drift of the clock affects all calls equally. A CSV file has a column for each field.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import enum
import functools
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from ep_moe.checks import check_picture, check_target
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError, EPMoEError
from ep_moe.integrations.model_name import FORMS, config_named
from ep_moe.parallel.groups import TorchrunEnv, local_device
from ep_moe.runtime.progress import Progress, hide_progress_bars

INTERRUPTED = 130  # exit code after Ctrl-C
Made = TypeVar("Made")


class Where(enum.Enum):
    """What a benchmark needs to run.

    ANYWHERE  one process, on a GPU or the CPU
    GPU       one process with a GPU
    RANKS     ranks of torchrun, one GPU each
    LAUNCHED  ranks of torchrun, on GPUs or the CPU
    """

    ANYWHERE = enum.auto()
    GPU = enum.auto()
    RANKS = enum.auto()
    LAUNCHED = enum.auto()


def positive(text: str) -> int:
    """Parse a command-line argument: an integer of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def natural(text: str) -> int:
    """Parse a command-line argument: an integer of at least 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")
    return int(text)


def not_negative(text: str) -> float:
    """Parse a command-line argument: a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def check_dealt(experts: int) -> None:
    """Raise ConfigError, on all ranks, unless the ranks divide the experts evenly, as peers and floors assume."""
    ranks = TorchrunEnv.read().world_size
    if experts % ranks:
        raise ConfigError(
            f"this benchmark deals {experts} experts to the ranks, as many to each; {ranks} ranks do not divide them"
        )


def parse(parser: argparse.ArgumentParser, where: Where) -> argparse.Namespace:
    """Parse and check the arguments. Raise ConfigError, on all ranks, for wrong arguments or an unsuitable machine."""
    parser.add_argument("--json", action="store_true", help="print the lines as one JSON object on stdout, alone there")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    asked = parser.parse_intermixed_args()
    if hasattr(asked, "models"):
        given = [asked.given] if isinstance(asked.given, str) else asked.given
        asked.models = given or asked.models or asked.default
    _check_arguments(asked)
    _check_machine(where)
    return asked


def add_models(parser: argparse.ArgumentParser, default: Sequence[str], *, several: bool = True) -> None:
    """Add positional arguments for models, which `parse` returns as `models`."""
    about = f"{FORMS}; default {' '.join(default)}"
    parser.add_argument("given", nargs="*" if several else "?", metavar="MODEL", help=about)
    # the option of an earlier release
    parser.add_argument("--models" if several else "--model", dest="models", nargs="+", help=argparse.SUPPRESS)
    parser.set_defaults(default=list(default))


ItemT = TypeVar("ItemT")


def tracked(items: Sequence[ItemT], what: str, asked: argparse.Namespace) -> Iterator[ItemT]:
    """Yield the items, and show progress on the first rank. what: the name of one item"""
    with Progress(len(items), "measuring", what, shown=_is_first() and not asked.quiet) as bar:
        for item in items:
            yield item
            bar.update()


def show(console: Console, *tables: Any) -> None:
    """Print to a console while a progress bar may be drawn."""
    with hide_progress_bars():
        console.print(*tables)


def own_device() -> torch.device:
    """Return this rank's GPU. Without a GPU or torchrun, return the CPU: `parse` reports that later."""
    return local_device() if TorchrunEnv.present() and torch.cuda.is_available() else torch.device("cpu")


def check_measured(lines: Sized) -> None:
    """Raise ConfigError if nothing was measured. Called by all ranks."""
    if not lines:
        raise ConfigError("nothing was measured: none of what was asked for can run here; see ep-moe doctor")


def benchmark_main(main: Callable[[], Any]) -> Callable[[], None]:
    """Wrap the main function of a benchmark: print an error of a user as one sentence on rank 0, and handle --json.

    main: returns its lines, or a dict of them, which --json prints; its own output then goes to stderr
    """

    @functools.wraps(main)
    def run() -> None:
        as_json = any(len(arg) > 2 and "--json".startswith(arg) for arg in sys.argv[1:])  # argparse takes --js too
        try:
            with redirect_stdout(sys.stderr) if as_json else nullcontext():
                found = main()
        except EPMoEError as error:
            _end(f"error: {error}", 2)
        except KeyboardInterrupt:
            _end("interrupted", INTERRUPTED)
        if as_json and _is_first():
            spec = sys.modules[main.__module__].__spec__  # has the module's own name, even if -m runs it as __main__
            name = (main.__module__ if spec is None else spec.name).rpartition(".")[2]
            sys.stdout.write(
                json_text({"bench": name, **(found if isinstance(found, dict) else {"lines": found})}) + "\n"
            )

    return run


def json_text(value: Any) -> str:
    """Return a value as one line of JSON. Dataclasses become objects. NaN and infinities become null."""
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, enum.Enum):
        return value.value
    if hasattr(value, "tolist"):  # tensors, and arrays and scalars of NumPy
        return _plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _is_first() -> bool:
    return not TorchrunEnv.present() or TorchrunEnv.read().rank == 0


def _end(text: str, code: int) -> NoReturn:
    if _is_first():
        Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)
    raise SystemExit(code)


def _check_arguments(asked: argparse.Namespace) -> None:
    check_target("--csv", getattr(asked, "csv", None))
    check_picture("--plot", getattr(asked, "plot", None))
    for model in getattr(asked, "models", ()):
        config_named(model)


def _check_machine(where: Where) -> None:
    if where in (Where.GPU, Where.RANKS) and not torch.cuda.is_available():
        raise ConfigError("this benchmark times kernels on a GPU, and torch sees none here; see ep-moe doctor")
    if where in (Where.RANKS, Where.LAUNCHED) and not TorchrunEnv.present():
        raise ConfigError(
            "this benchmark runs on ranks; start it with torchrun --standalone --nproc-per-node gpu -m "
            "ep_moe.bench.NAME (one GPU a rank)"
        )


_WARM = 2  # warm-up measurements, which do not count


def replayed(
    calls: Sequence[Callable[[], Any]],
    *,
    repeat: int = 5,
    replays: int = 15,
    before: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Return the median microseconds of each call in a CUDA graph of `repeat` calls. before: runs before each replay"""
    graphs = [captured(call, repeat) for call in calls]
    return interleaved_times([graph.replay for graph in graphs], repeat, replays, before)


def eager(
    calls: Sequence[Callable[[], Any]],
    *,
    repeat: int = 5,
    replays: int = 9,
    before: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Return the median microseconds of each call without a graph. The host's work counts if the GPU waits for it."""
    repeated = [lambda call=call: [call() for _ in range(repeat)] for call in calls]  # type: ignore[misc]
    return interleaved_times(repeated, repeat, replays, before)


def host(
    call: Callable[[], Any], *, calls: int = 20, samples: int = 10, before: Callable[[], Any] = lambda: None
) -> float:
    """Return the median over `samples` of the microseconds that the host needs for a call.

    A sample is `calls` calls in a row. None of them waits for the device: it is idle when they begin, and its queue has
    room for all their kernels. before: runs before each sample
    """
    on_gpu, times = torch.cuda.is_available(), list[float]()
    for _ in range(samples + _WARM):
        before()
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) * 1e6 / calls)
        if on_gpu:
            torch.cuda.synchronize()
    return statistics.median(times[_WARM:])


def interleaved_times(
    calls: Sequence[Callable[[], Any]], repeat: int, replays: int, before: Callable[[], Any]
) -> list[float]:
    """Return the median microseconds of a call. Each item of `calls` runs `repeat` calls.

    Each item is run once more before it is timed. There, ranks whose hosts start at different times wait for each
    other.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(replays + _WARM):
        for call, own in zip(calls, times, strict=True):
            before()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            call()
            start = _now()
            call()
            own.append(_us_since(start) / repeat)
    return [statistics.median(own[_WARM:]) for own in times]


def _now() -> Any:
    """Return a recorded event on a GPU, else the time in seconds."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _us_since(start: Any) -> float:
    end = _now()
    if isinstance(end, float):
        return float(end - start) * 1e6
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def captured(call: Callable[[], Any], repeat: int) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of `repeat` calls, captured after three eager calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # the outer context restores the stream: a capture that fails leaves its own stream current
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        for _ in range(repeat):
            call()
    return graph


LineT = TypeVar("LineT")


def attempt(context: EPContext, what: str, make: Callable[[], Made]) -> Made | None:
    """Return the result of `make`. If it fails on any rank, return None on all, and print the reason on rank 0."""
    made, reason = None, None
    try:
        made = make()
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
    except Exception as error:  # any error of a library: the others must still be measured
        reason = f"{type(error).__name__}: {error}"
    reasons: list[str | None] = [None] * context.layout.ep
    dist.all_gather_object(reasons, reason, group=context.rank_groups["ep"].group)
    failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if failed and context.layout.rank == 0:
        Console(width=130).print(f"left out: {what}: {failed[0]}", markup=False)
    return None if failed else made


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Return the largest difference, relative to the largest magnitude of the reference; infinity for a NaN."""
    apart = (out.float() - reference.float()).abs().max() / reference.float().abs().max()
    return float(apart.nan_to_num(torch.inf))


def free_device_memory() -> None:
    """Free unused device memory. Layers and graphs form reference cycles, which need the garbage collector."""
    gc.collect()
    torch.cuda.empty_cache()


def write(lines: Sequence[Any], file: Path) -> None:
    """Write lines to a CSV file. lines: at least one, of one dataclass; None becomes an empty cell"""
    with file.open("w", newline="") as target:
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow([field.name for field in dataclasses.fields(lines[0])])
        writer.writerows(dataclasses.astuple(line) for line in lines)


def read(file: Path, kind: type[LineT], bench: str) -> list[LineT]:
    """Read a file that `write` wrote. kind: the dataclass of its lines. Raise ConfigError for any other file."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    try:
        with file.open(newline="") as text:
            rows = list(csv.DictReader(text))
        return [kind(**{name: _value(kinds[name], cell) for name, cell in row.items()}) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a file of {bench}: {error!r}; write it with --csv") from error


def _value(kind: str, text: str) -> Any:
    if not text:
        return None
    return float(text) if "float" in kind else int(text) if "int" in kind else text
