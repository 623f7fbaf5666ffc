"""Registration of `ep_implementation="ep_moe"`, and what it refuses."""

import pytest

from ep_moe.errors import ConfigError
from ep_moe.integrations.ep_implementation import register_ep_implementation

expert_parallel = pytest.importorskip("transformers.distributed.expert_parallel")
if not hasattr(expert_parallel, "EPImplementationInterface"):
    pytest.skip("this transformers has no EPImplementationInterface", allow_module_level=True)


def test_names_of_transformers_are_left_alone():
    with pytest.raises(ConfigError, match="name='auto' is an implementation of transformers"):
        register_ep_implementation("auto")


def test_an_older_transformers_is_named(monkeypatch):
    monkeypatch.delattr(expert_parallel, "EPImplementationInterface")
    with pytest.raises(ConfigError, match=r"no EPImplementationInterface; install transformers 5.23 or newer, or use"):
        register_ep_implementation()
