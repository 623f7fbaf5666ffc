"""Test `@distributed`: the ranks that it starts, the arguments of bodies, and its behaviour under torchrun."""

import importlib
import inspect
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.testing.distributed import distributed, made_on_the_host, rank_device

module = importlib.import_module("ep_moe.testing.distributed")  # in the package, this name is the decorator


def asks(world_size, tmp_path):
    """A body with an argument for the number of ranks."""


def takes_none(tmp_path):
    """A body without one."""


@pytest.mark.parametrize(
    ("body", "given"), [(asks, {"world_size": 2, "tmp_path": "p"}), (takes_none, {"tmp_path": "p"})]
)
def test_a_body_runs_on_forked_ranks(body, given, monkeypatch):
    """A body runs on forked ranks with its own arguments, deadline and expected deaths."""
    started = []
    monkeypatch.setattr(TorchrunEnv, "present", lambda: False)
    monkeypatch.setattr(module, "run_local_ranks", lambda *given, **how: started.append((given, how)))
    test = distributed(2, 4, deadline_s=7.0, expect_dead=(1,))(body)
    test(world_size=2, tmp_path="p")
    target = f"{__name__}:{body.__name__}.body"
    assert started == [((target, 2, given), {"deadline_s": 7.0, "expect_dead": (1,)})]
    assert test.body is body
    assert list(inspect.signature(test).parameters) == ["tmp_path", "world_size"]
    marks = {mark.name: mark.args for mark in test.pytestmark}
    assert marks["parametrize"] == ("world_size", (2, 4))
    assert "world_size" in marks


@pytest.fixture
def torchrun(monkeypatch):
    """Pretend to be the second of two ranks of torchrun. It receives the arguments of the first one."""
    order = []
    monkeypatch.setattr(TorchrunEnv, "present", lambda: True)
    monkeypatch.setattr(TorchrunEnv, "read", lambda: SimpleNamespace(world_size=2))
    monkeypatch.setattr(module, "local_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(module, "init_from_torchrun", lambda device, deadline_s: order.append("init"))
    monkeypatch.setattr(module, "barrier", lambda device: order.append("barrier"))

    def broadcast(values, device):
        values[0] = values[0] | {"tmp_path": "of the first"}

    @contextmanager
    def on_device(device):
        order.append("device")
        yield

    monkeypatch.setattr(module.dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(module, "on_device", on_device)
    return order


@pytest.mark.parametrize("set_device", [False, True])
def test_all_of_torchruns_ranks_have_the_first_ones_arguments(set_device, torchrun, monkeypatch):
    """All ranks of torchrun get the first one's arguments, except `monkeypatch`: each rank undoes its own changes."""
    given = []

    def body(tmp_path, monkeypatch):
        torchrun.append("body")
        given.append((tmp_path, monkeypatch))

    distributed(2, set_device=set_device)(body)(world_size=2, tmp_path="mine", monkeypatch=monkeypatch)
    assert given == [("of the first", monkeypatch)]
    assert torchrun == ["init", *["device"] * set_device, "body", "barrier"]


@pytest.mark.parametrize(
    ("world_size", "how", "reason"),
    [(4, {}, "needs 4 ranks, torchrun started 2"), (2, {"expect_dead": (1,)}, "ends ranks on purpose")],
)
def test_what_torchruns_ranks_cannot_run_is_skipped(world_size, how, reason, torchrun):
    with pytest.raises(pytest.skip.Exception, match=reason):
        distributed(2, 4, **how)(takes_none)(world_size=world_size, tmp_path="p")
    assert torchrun == []


@pytest.mark.parametrize(
    ("initialized", "backend", "found"), [(True, "gloo", "cpu"), (True, "nccl", "cuda:3"), (False, "gloo", "cuda:3")]
)
def test_a_body_puts_tensors_where_its_ranks_communicate(initialized, backend, found, monkeypatch):
    monkeypatch.setattr(module.dist, "is_initialized", lambda: initialized)
    monkeypatch.setattr(module.dist, "get_backend", lambda: backend)
    monkeypatch.setattr(module, "local_device", lambda: torch.device("cuda:3"))
    assert rank_device() == torch.device(found)


def test_what_contracts_make_is_on_the_host_whatever_the_default_device():
    made = made_on_the_host(lambda *given, **how: (torch.ones(1).device.type, given, how))
    with torch.device("meta"):
        assert made(1, a=2) == ("cpu", (1,), {"a": 2})
        assert torch.ones(1).is_meta
    assert made() == ("cpu", (), {})
