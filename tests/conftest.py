"""Fixtures for all tests."""

import gc
import os
import signal
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # nohup, or `&` in a script; child processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores; torch reads it when imported

import pytest
import torch

from ep_moe import registry
from ep_moe.parallel import local_launch

# set before the fork server of this process starts, which the first ranks do
local_launch._PRELOAD = "tests.fixtures.preload"


def pytest_configure(config: pytest.Config) -> None:
    """Leave slow tests out of a run of all tests. Named files and `-m` run them."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr:
        config.option.markexpr = "not slow"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in the list that `tools/slow_tests.py` writes."""
    slow = set(Path(__file__).with_name("slow_tests.txt").read_text().splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Freeze collected objects, so that the garbage collector skips them. They live until the end of the session."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _same_numbers():
    """Seed torch, so that a layer's random weights are equal in every run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fresh_registry():
    """Clear the registry's cached entry points, which some tests replace."""
    registry._plugins.cache_clear()
    yield
    registry._plugins.cache_clear()
