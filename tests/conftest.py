"""Fixtures for all tests."""

import pytest

from ep_moe import registry


@pytest.fixture(autouse=True)
def _fresh_registry():
    """Tests put entry points of their own in place; what the registry has read must not outlive them."""
    registry._plugins.cache_clear()
    yield
    registry._plugins.cache_clear()
