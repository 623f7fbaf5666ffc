"""Fixtures for all tests."""

import gc
import os
import signal
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # nohup, and `&` in a script: what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores; read as torch is imported

import pytest
import torch

from ep_moe import registry
from ep_moe.parallel import local_launch

# the fork server of this process starts with the first ranks, later than this
local_launch._PRELOAD = "tests.fixtures.preload"


def pytest_configure(config: pytest.Config) -> None:
    """Leave slow tests out of a run of all tests: of named files, and with -m, they run."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr:
        config.option.markexpr = "not slow"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the list that `tools/slow_tests.py` writes."""
    slow = set(Path(__file__).with_name("slow_tests.txt").read_text().splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing of what is collected ends before the session: collections of garbage need not walk through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _same_numbers():
    """A fresh layer's weights are random: they are the same random numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fresh_registry():
    """Tests put entry points of their own in place; what the registry has read must not outlive them."""
    registry._plugins.cache_clear()
    yield
    registry._plugins.cache_clear()
