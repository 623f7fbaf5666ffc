"""Test what the constructors of a context pass on to each other."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ep_moe import ConfigError, EPContext, ParallelConfig, Tokens
from ep_moe.parallel import connected_ranks

CPU = torch.device("cpu")
LAYOUT = ParallelConfig(dp=2)


@pytest.fixture
def given(monkeypatch):
    """Return the arguments of `_connect` and `init_from_torchrun`."""
    calls = {}
    monkeypatch.setattr(connected_ranks, "_check_initialized", lambda: None)
    monkeypatch.setattr(connected_ranks.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(connected_ranks, "init_from_torchrun", lambda device, **how: calls.update(init=(device, how)))
    monkeypatch.setattr(EPContext, "_connect", classmethod(lambda cls, *given: calls.update(connect=given)))
    return calls


def test_from_torchrun(given):
    EPContext.from_torchrun(LAYOUT, device="cpu", deadline_s=7.0, max_tokens=3, ranks_per_node=2)
    assert given["init"] == (CPU, {"deadline_s": 7.0}), "torch's own timeout is the context's"
    assert given["connect"] == (LAYOUT, range(2), None, CPU, 7.0, 3, 2, None)


def test_from_groups(given):
    groups = {"ep": object()}
    EPContext.from_groups(LAYOUT, groups, device="cpu", deadline_s=7.0, max_tokens=3, ranks_per_node=2)
    assert given["connect"] == (LAYOUT, range(2), groups, CPU, 7.0, 3, 2, None)


def test_a_layout_of_another_kind_is_refused_on_all_ranks(given):
    """It is refused where all ranks compare their arguments, so that none waits for this one."""
    EPContext.from_groups({"dp": 2}, device="cpu")
    layout, *_, problem = given["connect"]
    assert layout == ParallelConfig(dp=2)
    assert type(problem) is ConfigError
    assert str(problem) == "parallel must be a ParallelConfig, got {'dp': 2}; give ParallelConfig(dp=...)"


def test_from_mesh(given, monkeypatch):
    asked = {}

    def read_mesh(mesh, **how):
        asked.update(how)
        return LAYOUT, [5, 3]

    monkeypatch.setattr(connected_ranks, "members", lambda mesh: [3, 5])
    monkeypatch.setattr(connected_ranks, "read_mesh", read_mesh)
    monkeypatch.setattr(connected_ranks, "axis_groups", lambda mesh: {"tp": "the mesh's"})
    mesh = SimpleNamespace(device_type="cpu")
    EPContext.from_mesh(mesh, tokens=Tokens.SHARDED, ep=2, etp=4, deadline_s=7.0, max_tokens=3, ranks_per_node=2)
    assert asked == {"tokens": Tokens.SHARDED, "ep": 2, "etp": 4}
    assert given["connect"] == (LAYOUT, [5, 3], {"tp": "the mesh's"}, CPU, 7.0, 3, 2, None)


def test_an_axis_of_the_experts_that_a_mesh_lacks_has_one_rank():
    ranks = torch.arange(4).view(2, 2)
    mesh = SimpleNamespace(mesh=ranks, mesh_dim_names=("edp", "etp"), size=lambda *at: [ranks.numel(), 2][len(at)])
    found = connected_ranks.read_mesh(mesh, tokens=Tokens.REPLICATED, ep=None, etp=None)
    assert found == (ParallelConfig(dp=4, ep=1, etp=2), (0, 1, 2, 3))


def test_numbers_become_pythons(monkeypatch):
    made = []
    monkeypatch.setattr(connected_ranks, "numbered", lambda *_: "context0")
    monkeypatch.setattr(connected_ranks, "default_store", lambda: None)
    monkeypatch.setattr(connected_ranks, "PrefixStore", lambda *_: None)
    monkeypatch.setattr(connected_ranks, "agreed_layout", lambda *_: "layout")
    monkeypatch.setattr(connected_ranks, "on_device", lambda _: nullcontext())
    monkeypatch.setattr(EPContext, "_linked", classmethod(lambda cls, *given: made.append(given)))
    EPContext._connect(LAYOUT, range(2), {}, CPU, np.float32(8), np.int64(3))
    assert made == [("layout", "context0", None, {}, CPU, 3, 8.0, None)]
    assert [type(one) for one in made[0][5:7]] == [int, float], "NumPy's are no JSON"


def test_without_torch_distributed(monkeypatch):
    if dist.is_initialized():
        pytest.skip("torchrun's ranks have a process group already")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"RANK must be a number, got None; .* EPContext\.local\(\) for one process"):
        EPContext.from_torchrun(device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"torch\.distributed is not initialized; call EPContext\.from_torchrun"):
        EPContext.from_groups(device=torch.device("cpu"))


def test_a_mesh_without_the_rank_that_calls_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    with pytest.raises(ConfigError, match=r"mesh must hold the rank that calls from_mesh, got .* on rank 5"):
        connected_ranks.members(SimpleNamespace(get_coordinate=lambda: None))
    with pytest.raises(ConfigError, match=r"^mesh must be a DeviceMesh, got None; make one with init_device_mesh$"):
        connected_ranks.members(None)
    mesh = SimpleNamespace(get_coordinate=lambda: [0], mesh=torch.tensor([[4, 5]]))
    assert connected_ranks.members(mesh) == (4, 5)


@pytest.mark.parametrize("names", [None, (), ("dp", "heads")])
def test_axes_of_a_mesh_have_known_names(names):
    mesh = SimpleNamespace(mesh_dim_names=names, size=lambda *_: 2)
    with pytest.raises(ConfigError, match=r"mesh.mesh_dim_names must be among pp, .*, got"):
        connected_ranks.read_mesh(mesh, tokens=Tokens.REPLICATED, ep=None, etp=None)
