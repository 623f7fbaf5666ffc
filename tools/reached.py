"""Record the code blocks that each test reaches, in its ranks too. `slow_tests.py` inserts calls of `reach` and runs
this."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from multiprocessing import process
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = os.environ.get("EP_MOE_REACHED", "")
MOST = 1 << 14  # blocks
_WORKER = os.environ.setdefault("EP_MOE_REACHED_WORKER", str(os.getpid()))  # forks of a worker's server inherit it
_reached = bytearray(MOST)


@torch.compiler.assume_constant_result  # no graph break under torch.compile
def reach(block: int) -> None:
    """Record that a block was reached. Each block begins with a call of this function."""
    _reached[block] = 1


def _record(test: str) -> None:
    found = [block for block, there in enumerate(_reached) if there]
    with open(f"{FOLDER}/reached.{os.getpid()}", "ab") as file:
        pickle.dump((test, found), file)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record the blocks that the test itself reaches, and its seconds; tell its ranks its name."""
    Path(f"{FOLDER}/test.{_WORKER}").write_text(item.nodeid)
    _reached[:] = bytes(MOST)
    start = time.perf_counter()
    try:
        return (yield)
    finally:
        _record(item.nodeid)
        with open(f"{FOLDER}/seconds.{os.getpid()}", "a") as file:
            file.write(f"{time.perf_counter() - start:.3f} {item.nodeid}\n")


_bootstrap = process.BaseProcess._bootstrap  # type: ignore[attr-defined]


def _recorded(self: process.BaseProcess, *args: Any, **options: Any) -> int:
    """Record the blocks that a rank or forked program reaches."""
    try:
        test = Path(f"{FOLDER}/test.{_WORKER}").read_text()
    except OSError:  # no test has started
        return int(_bootstrap(self, *args, **options))
    _reached[:] = bytes(MOST)
    try:
        return int(_bootstrap(self, *args, **options))
    finally:
        _record(test)


if FOLDER:
    process.BaseProcess._bootstrap = _recorded  # type: ignore[attr-defined]
