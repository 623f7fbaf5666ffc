"""How a benchmark starts: what it is asked, where it runs and where it writes are checked before anything is timed, and
what is wrong is one sentence and exit code 2."""

from __future__ import annotations

import argparse
import enum
import functools
from collections.abc import Callable, Sized
from typing import NoReturn

import torch
from rich.console import Console

from ep_moe.checks import check_picture, check_target
from ep_moe.config import load_model_config
from ep_moe.errors import ConfigError, EPMoEError
from ep_moe.parallel.groups import TorchrunEnv, local_device


class Where(enum.Enum):
    """ANYWHERE: on the CPU too; GPU: in a process with one; RANKS: under torchrun, a GPU each; LAUNCHED: under
    torchrun, on the CPU too."""

    ANYWHERE = enum.auto()
    GPU = enum.auto()
    RANKS = enum.auto()
    LAUNCHED = enum.auto()


def positive(text: str) -> int:
    """A type of arguments: an integer of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def not_negative(text: str) -> float:
    """A type of arguments: a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def check_dealt(experts: int) -> None:
    """For benchmarks whose peers or floors have as many experts on each rank. Raises ConfigError on all ranks alike."""
    ranks = TorchrunEnv.read().world_size
    if experts % ranks:
        raise ConfigError(
            f"this benchmark deals {experts} experts to the ranks, as many to each; {ranks} ranks do not divide them"
        )


def parse(parser: argparse.ArgumentParser, where: Where) -> argparse.Namespace:
    """The arguments. Raises ConfigError, on all ranks alike, where they or this machine will not do."""
    asked = parser.parse_args()
    _check_arguments(asked)
    _check_machine(where)
    return asked


def own_device() -> torch.device:
    """This rank's GPU; the CPU where `parse` will say that there is none, or no rank."""
    return local_device() if TorchrunEnv.present() and torch.cuda.is_available() else torch.device("cpu")


def check_measured(lines: Sized) -> None:
    """After the measurements, on all ranks."""
    if not lines:
        raise ConfigError("nothing was measured: none of what was asked for can run here; see ep-moe doctor")


def one_sentence(main: Callable[[], None]) -> Callable[[], None]:
    """A benchmark's main, whose errors are those of a user: printed by rank 0, all ranks having the same."""

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except EPMoEError as error:
            _end(error)

    return run


def _end(error: EPMoEError) -> NoReturn:
    if not TorchrunEnv.present() or TorchrunEnv.read().rank == 0:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", highlight=False, markup=False)
    raise SystemExit(2)


def _check_arguments(asked: argparse.Namespace) -> None:
    check_target("--csv", getattr(asked, "csv", None))
    check_picture("--plot", getattr(asked, "plot", None))
    for model in getattr(asked, "models", None) or [getattr(asked, "model", "demo")]:
        load_model_config(model)


def _check_machine(where: Where) -> None:
    if where in (Where.GPU, Where.RANKS) and not torch.cuda.is_available():
        raise ConfigError("this benchmark times kernels on a GPU, and torch sees none here; see ep-moe doctor")
    if where in (Where.RANKS, Where.LAUNCHED) and not TorchrunEnv.present():
        raise ConfigError(
            "this benchmark runs on ranks; start it with torchrun --standalone --nproc-per-node gpu -m "
            "ep_moe.bench.NAME (one GPU a rank)"
        )
