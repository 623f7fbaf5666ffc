"""Test names that all ranks derive equally on their own, and the environment of torchrun."""

import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace as Some

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import debug

from ep_moe import ConfigError, ParallelConfig, RankLayout
from ep_moe.parallel import groups
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.groups import DEADLINE_S, TorchrunEnv
from ep_moe.parallel.nodes import NodeLayout


def test_ranks_that_made_things_with_others_before_find_one_name(monkeypatch):
    """Ranks find the same name for a group even if one has made contexts with other ranks before.

    Rank 0 counts a context of its own. It does not count among those that ranks 0 and 1 make together.
    """
    store = dist.HashStore()
    monkeypatch.setattr(groups, "default_store", lambda: store)

    def name(rank, ranks):
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        return groups.numbered("context", ranks)

    before = name(0, [0])
    first = [name(0, [0, 1]), name(1, [1, 0])]
    second = [name(0, [0, 1]), name(1, [0, 1])]
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert len({before, first[0], second[0]}) == 3


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({}, r"RANK must be a number, got None; launch with torchrun, or use EPContext\.local\(\) for one process"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be a number, got 'one'"),
        ({"RANK": "1"}, "WORLD_SIZE must be a number, got None"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK must be a number, got '-1'"),
    ],
)
def test_torchruns_environment_is_incomplete(env, sentence, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^environment variable {sentence}"):
        TorchrunEnv.read()


LEAVES = """
import atexit, sys, torch, torch.distributed as dist
atexit.register(lambda: print("at exit:", dist.is_initialized()))
from ep_moe.parallel.groups import init_from_torchrun
init_from_torchrun(torch.device("cpu"), deadline_s=30)
print("before:", dist.is_initialized())
"""


@pytest.mark.parametrize(
    ("last", "left"), [("", False), ("sys.exit(0)", False), ("dist.destroy_process_group()", False), ("1 / 0", True)]
)
def test_a_default_group_of_ours_ends_with_the_process(last, left, tmp_path):
    """It is left after an exception: peers may be within an exchange, and should see why it ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", LEAVES + last], env={**os.environ, **env, "MASTER_PORT": str(port)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.stdout.split("\n")[:2], done.returncode) == (["before: True", f"at exit: {left}"], int(left)), (
        done.stderr
    )


def test_torchruns_environment(monkeypatch):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert TorchrunEnv.read() == TorchrunEnv(rank=5, local_rank=1, world_size=8, local_world_size=4)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert TorchrunEnv.read() == TorchrunEnv(rank=5, local_rank=5, world_size=8, local_world_size=8)


NAMES = ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@pytest.mark.parametrize(
    ("names", "present"),
    [
        ((), False),
        (("TORCHELASTIC_RUN_ID",), True),  # its error names the missing variables
        (("RANK", "WORLD_SIZE"), False),  # a scheduler may set these beside a single process
        (("RANK", "WORLD_SIZE", "MASTER_ADDR"), True),
    ],
)
def test_a_launcher_is_found_by_what_it_sets(names, present, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name in names:
        monkeypatch.setenv(name, "1")
    assert TorchrunEnv.present() is present


def test_a_process_takes_the_gpu_of_its_place_on_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert groups.local_device() == torch.device("cuda", 0)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host"}.items():
        monkeypatch.setenv(name, value)
    assert groups.local_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"^LOCAL_RANK=2 has no GPU of its own, there are 2; start one process"):
        groups.local_device()


@pytest.mark.parametrize(
    ("given", "seconds"), [(7, 7), (float("nan"), DEADLINE_S), (-1.0, DEADLINE_S), (0, DEADLINE_S), ("5", DEADLINE_S)]
)
def test_ranks_meet_whatever_their_deadlines(given, seconds, monkeypatch):
    """`init_from_torchrun` connects ranks whatever their deadlines. Invalid ones are refused once all are connected."""
    made = {}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda **how: made.update(how))
    groups.init_from_torchrun(torch.device("cpu"), deadline_s=given)
    assert made == {"backend": "gloo", "timeout": timedelta(seconds=seconds), "device_id": None}


@pytest.mark.parametrize(("field", "value"), [("max_tokens", 0), ("max_tokens", 2.5), ("ranks_per_node", 0)])
def test_a_limit_is_refused_where_ranks_compare_theirs(field, value, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    limits = {"max_tokens": None, "ranks_per_node": None} | {field: value}
    with pytest.raises(ConfigError, match=rf"{field} must be an integer in \[1, 2147483647\] or None, got {value}$"):
        groups.agreed_layout(ParallelConfig(dp=1), [0], dist.HashStore(), torch.device("cpu"), 5.0, **limits)


@pytest.mark.parametrize("imported", [False, True])
def test_meshes_are_forgotten_where_dtensors_were_imported(imported, monkeypatch):
    cleared, module = [], "torch.distributed.tensor"
    monkeypatch.setattr(debug, "_clear_sharding_prop_cache", lambda: cleared.append(module))
    monkeypatch.setattr(groups, "sys", Some(modules=[module] * imported))
    groups._forget_meshes()
    assert cleared == [module] * imported


@pytest.fixture
def made(monkeypatch):
    """Return the names and ranks of groups that a part of the ranks makes, and the job's default group."""
    c10d, found = dist.distributed_c10d, Some(groups=[], default=Some(bound_device_id="a GPU"))

    def make(size, rank, ranks, backend, store, name, **_):
        found.groups.append((name, tuple(ranks)))
        assert found.default.bound_device_id is None, "NCCL would split the default communicator"
        if found.default.fails:
            raise RuntimeError("no connection")
        return name, None

    found.default.fails = False
    monkeypatch.setattr(c10d, "_new_process_group_helper", make)
    monkeypatch.setattr(c10d, "_get_default_group", lambda: found.default)
    monkeypatch.setattr(c10d, "_world", Some(pg_group_ranks={}))
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(groups, "default_store", dist.HashStore)
    return found


def test_a_group_of_a_part_of_the_ranks_has_a_name_that_only_its_members_know(made):
    """A group of some ranks has a name that only its members derive.

    Groups of two kinds may start with the same rank.
    """
    kinds = ("tp", "dp", "ep", "etp", "lockstep", "stage")
    members = set()
    for rank in (4, 5, 6, 7):
        layout = RankLayout(world=4, rank=rank, dp=2, tp=2, ep=2, etp=2, ranks=(4, 5, 6, 7))
        for kind in kinds:
            groups.make_group(layout, kind, "context1", timedelta(seconds=1), "gloo")
            members.add((kind, tuple(layout.group(kind))))
    assert len(set(made.groups)) == len(members)
    assert len({name for name, _ in made.groups}) == len(members)


@pytest.mark.parametrize("fails", [False, True])
def test_the_default_group_keeps_its_device(fails, made):
    made.default.fails = fails
    layout = RankLayout(world=2, rank=4, dp=2, ep=2, ranks=(4, 6))
    with pytest.raises(RuntimeError, match="no connection") if fails else nullcontext():
        groups.make_group(layout, "ep", "context1", timedelta(seconds=1), "gloo")
    assert made.default.bound_device_id == "a GPU"


@pytest.mark.parametrize("kind", ["tp", "ep", "lockstep", "stage"])
def test_a_given_group_serves_all_kinds_of_its_ranks(kind, monkeypatch):
    """A given group serves all kinds with the same ranks, whichever kind is requested first."""
    made, given = [], object()
    monkeypatch.setattr(groups, "make_group", lambda layout, kind, *_: made.append(kind))
    monkeypatch.setattr(groups, "backend_for", lambda device: None)
    layout = RankLayout(world=2, rank=0, tp=2, ep=2)
    found = groups.RankGroups(layout, FlightRecorder(), torch.device("cpu"), {kind: given})
    assert made == []
    assert [found[same].group for same in ("tp", "ep", "lockstep", "stage")] == [given] * 4


def test_a_given_group_has_the_order_of_the_layout(monkeypatch):
    """A given group must have the layout's order, because a rank's position decides which experts it holds."""
    layout = RankLayout(world=2, rank=0, dp=2, ep=2, ranks=(0, 1))
    for ranks in ([1, 0], [0], [0, 1, 2]):
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group, ranks=ranks: ranks)
        with pytest.raises(ConfigError, match=r"^groups\['ep'\] holds ranks "):
            groups.check_groups(layout, {"ep": object()})
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    groups.check_groups(layout, {"ep": object()})


def test_places_of_an_ep_group_on_nodes_that_take_turns(monkeypatch):
    """With interleaved nodes, `node_major_ranks` gives the position of each rank of an EP group in node order."""
    monkeypatch.setattr(groups, "make_group", lambda layout, kind, *_: kind)
    monkeypatch.setattr(groups, "backend_for", lambda device: None)
    ranks = (1, 0, 3, 2)
    nodes = NodeLayout.from_hosts(ranks, [(host, host) for host in "abab"])
    layout = RankLayout(world=4, rank=0, dp=4, ep=4, ranks=ranks, nodes=nodes)
    levels = groups.RankGroups(layout, FlightRecorder(), torch.device("cpu"))["ep"].levels
    assert levels.node_major_ranks == (0, 2, 1, 3)
    assert (levels.node.ranks, levels.rail.ranks) == ((0, 2), (1, 0))


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 7.0), ("cuda", 74.0)])
def test_nccl_ends_a_step_later_than_the_flight_recorder(device, seconds, monkeypatch):
    """NCCL's timeout is longer than the flight recorder's deadline, because it would end the process.

    gloo's own timeout equals the deadline, because it is what ends a step.
    """
    made = []
    monkeypatch.setattr(groups, "make_group", lambda *given: made.append(given) or object())
    monkeypatch.setattr(groups, "backend_for", lambda device: f"of {device}")
    layout = RankLayout(world=4, rank=0, dp=2, tp=2, ep=4)
    groups.RankGroups(layout, FlightRecorder(deadline_s=7.0), torch.device(device), name="context1")
    assert {kind for _, kind, *_ in made} >= {"tp", "ep"}
    for given, _, *rest in made:
        assert (given, rest) == (layout, ["context1", timedelta(seconds=seconds), f"of {device}"])
