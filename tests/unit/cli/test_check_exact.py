"""Test `ep-moe check-exact` from end to end."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from ep_moe import ConfigError, ExpertMap, ParallelConfig
from ep_moe.cli import check_exact
from ep_moe.cli.app import app
from ep_moe.cli.check_exact import LOGITS, RunDigests
from ep_moe.experts.base import ExpertsOptions
from ep_moe.integrations import transformers as transformers_models
from ep_moe.parallel.groups import TorchrunEnv

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(TorchrunEnv.present(), reason="starts ranks of its own")

SMALL = ("--ranks", "1", "2", "--prompts", "3", "--window", "20")


def invoke(*args):
    return CliRunner().invoke(app, ["check-exact", *args], catch_exceptions=False)


def run_digests(batching="prompts", **digests):
    return RunDigests(
        ranks=1, expert_map="linear", all2all="local", experts="reference", batching=batching, digests=digests
    )


def test_a_model_is_equal_over_ranks_maps_transports_and_batches():
    result = invoke("demo", *SMALL, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["equal"]
    ways = [(one["ranks"], one["expert_map"], one["all2all"], one["batching"]) for one in answer["runs"]]
    batchings = ["prompts", "tokens of 3", "all at once"]
    one = [(1, "linear", all2all, batching) for all2all in ("local", "allgather") for batching in batchings]
    two = [
        (2, expert_map, all2all, batching)
        for expert_map in ("linear", "redundant")
        for all2all in ("torch_a2a", "allgather")
        for batching in batchings
    ]
    assert ways == one + two
    assert len({run["checksum"] for run in answer["runs"]}) == 1
    assert len({run["logits"] for run in answer["runs"]}) == 2  # None where only the layers ran
    assert {run["first_difference"] for run in answer["runs"]} == {None}


def test_without_exact_the_first_layer_that_differs_is_named():
    result = invoke(*SMALL, "--no-exact")
    assert result.exit_code == 1
    assert "differ from the first" in result.stdout
    assert "first at model.layers." in result.stdout


def test_the_first_difference_is_in_the_order_of_layers():
    first = run_digests(a="1", b="2", c="3", **{LOGITS: "4"})
    assert first.differs_from(first) is None
    assert run_digests("all at once", a="1", b="2", c="3").differs_from(first) is None
    assert run_digests("all at once", a="1", b="x", c="x").differs_from(first) == "b"
    assert run_digests(a="1", b="2", c="3", **{LOGITS: "x"}).differs_from(first) == LOGITS
    assert run_digests(a="1", b="2").checksum != run_digests(a="1", b="3").checksum


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("--ranks", "0"), "--ranks must be numbers in [1, 64], got 0"),
        (("--prompts", "0"), "--prompts must be at least 1"),
        (("--window", "1"), "--window must be at least 2"),
        (("--deadline", "nan"), "--deadline"),
        (("--experts", "referenc"), "did you mean 'reference'?"),
        (("--dtype", "int8"), "--dtype must be"),
        (("mixtral-8x7b",), "is a config: it has sizes and no weights"),
    ],
    ids=str,
)
def test_wrong_options_are_one_line(args, problem):
    result = invoke(*args)
    assert result.exit_code == 2
    assert problem in result.output
    assert result.output.count("\n") <= 2


@pytest.mark.parametrize(
    ("ranks", "fits"), [((1,), True), ((64, 2), True), ((65,), False), ((0, 2), False), ((), False)]
)
def test_ranks_from_1_to_64_are_started_here(ranks, fits):
    with (
        contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=r"--ranks must be numbers in \[1, 64\]")
    ):
        check_exact._check(check_exact.CheckOptions(ranks=ranks))


def test_ranks_are_started_here_or_by_torchrun(monkeypatch):
    monkeypatch.setattr(TorchrunEnv, "present", lambda: True)
    check_exact._check(check_exact.CheckOptions(ranks=None))
    with pytest.raises(ConfigError, match="--ranks is for ranks that are started here"):
        check_exact._check(check_exact.CheckOptions(ranks=(1,)))


@pytest.mark.parametrize(("model", "dtype", "wanted"), [(None, None, "float32"), ("m", None, "auto"), ("m", "x", "x")])
def test_what_is_loaded_and_read_is_as_for_run(model, dtype, wanted):
    both = {"revision": "v2", "text": "a.txt", "window": 5, "experts": "e", "quantization": "q", "deadline_s": 7.0}
    asked = check_exact.CheckOptions(model=model, dtype=dtype, prompts=3, **both).as_run()
    assert {name: getattr(asked, name) for name in both} == both
    assert (asked.model, asked.dtype, asked.text_tokens) == (model, wanted, 15)


@pytest.mark.parametrize(
    ("ranks", "device", "available", "found"),
    [
        (1, "cuda", True, ("local", "allgather")),
        (2, "cuda", True, ("nvlink_p2p", "allgather")),
        (2, "cuda", False, ("torch_a2a", "allgather")),
        (2, "cpu", True, ("torch_a2a", "allgather")),
    ],
)
def test_transports_that_are_compared_are_those_that_run_here(ranks, device, available, found, monkeypatch):
    kind = SimpleNamespace(
        capabilities=SimpleNamespace(devices={"cuda"}), available=lambda: None if available else "no NVLink"
    )
    monkeypatch.setattr(check_exact.registry, "load", lambda *_: kind)
    assert check_exact._transports(ranks, torch.device(device)) == found


def test_the_second_map_has_no_more_copies_than_slots_for_them():
    """The redundant map has at most one replica of an expert on each other rank."""
    maps = check_exact._maps(8, 4)
    assert list(maps) == ["linear", "redundant"]
    assert maps["redundant"] == ExpertMap.redundant(8, 4, 4)
    assert check_exact._maps(1, 4)["redundant"] == ExpertMap.redundant(1, 4, 3)
    assert list(check_exact._maps(8, 1)) == ["linear"]


@pytest.mark.parametrize(("deadline", "longest"), [(7.0, 900.0), (400.0, 1200.0)])
def test_ranks_are_started_for_each_number_that_was_asked_for(deadline, longest, monkeypatch):
    """Ranks are started for each requested number of ranks, with one thread for dense parts.

    Another number of threads could split their sums differently.
    """
    started = []

    def run_local_ranks(target, world, arguments, **how):
        started.append((target, world, arguments, how))
        return [[f"of {world}"]]

    monkeypatch.setattr(check_exact, "run_local_ranks", run_local_ranks)
    monkeypatch.setattr(check_exact, "model_folder", lambda *given, **how: (given, how))
    options = check_exact.CheckOptions(model="org/m", revision="v2", text=__file__, ranks=(1, 3), deadline_s=deadline)
    assert check_exact.run(options) == ["of 1", "of 3"]
    target = "ep_moe.cli.check_exact:run_on_rank"
    folder = (("org/m",), {"revision": "v2"})
    arguments = {"options": options, "device": torch.device("cpu"), "folder": folder, "forked": True}
    assert started == [(target, world, arguments, {"deadline_s": longest, "threads": 1}) for world in (1, 3)]


def test_under_torchrun_its_own_ranks_are_compared(monkeypatch):
    ended, asked = [], []
    monkeypatch.setattr(TorchrunEnv, "present", lambda: True)
    monkeypatch.setattr(check_exact, "local_device", lambda: "here")
    monkeypatch.setattr(
        check_exact, "init_from_torchrun", lambda device, deadline_s: asked.append((device, deadline_s))
    )
    monkeypatch.setattr(check_exact.dist, "destroy_process_group", lambda: ended.append(True))
    monkeypatch.setattr(check_exact, "run_on_rank", lambda *given: given)
    options = check_exact.CheckOptions(deadline_s=7.0)
    assert check_exact.run(options) == (options, "here")
    assert (asked, ended) == ([("here", 7.0)], [True])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("exact", [True, False])
def test_a_rank_loads_and_reads_what_was_asked_for(exact, rank, monkeypatch):
    """A rank loads and reads what was requested, for each map and transport. Only the first rank has the answer."""
    opened, loaded, read, looked_up, digested = [], [], [], [], []
    context = SimpleNamespace(consensus="of all ranks")

    def from_groups(*given, **how):
        opened.append((given, how))
        return contextlib.nullcontext(context)

    monkeypatch.setattr(check_exact, "EPContext", SimpleNamespace(from_groups=from_groups))
    monkeypatch.setattr(check_exact.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(check_exact.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(check_exact, "load_errors_on_all_ranks", lambda folder, consensus: contextlib.nullcontext())
    monkeypatch.setattr(check_exact, "model_folder", lambda *given, **how: looked_up.append((given, how)) or "m")
    monkeypatch.setattr(check_exact, "model_dtype", lambda name, folder: f"{name} of {folder}")
    monkeypatch.setattr(check_exact, "text_windows", lambda *given: read.append(given) or "windows")
    monkeypatch.setattr(transformers_models, "num_experts", lambda folder, context: 8)
    monkeypatch.setattr(
        transformers_models, "load_pretrained", lambda *given, **how: loaded.append((given, how)) or "a model"
    )
    monkeypatch.setattr(
        check_exact, "_digests", lambda *given: digested.append(given) or [("prompts", {"a": "1"}, "k")]
    )
    options = check_exact.CheckOptions(
        model="org/m", revision="v2", text="a.txt", prompts=3, window=5, experts="reference", quantization="fp8_block",
        dtype="float16", exact=exact, deadline_s=7.0,
    )  # fmt: skip
    device = torch.device("cpu")
    found = check_exact.run_on_rank(options, device)
    assert opened == [((ParallelConfig(dp=2),), {"device": device, "deadline_s": 7.0})]
    assert looked_up == [(("org/m", "of all ranks"), {"revision": "v2"})]
    assert read == [("a.txt", 15, 5, "m")]
    maps = check_exact._maps(8, 2)
    ways = [(name, all2all) for name in maps for all2all in ("torch_a2a", "allgather")]
    how = {"dtype": "float16 of m", "experts": "reference", "quantization": "fp8_block", "progress": False}
    how |= {"options": ExpertsOptions(exact=exact)}
    wanted = [(("m", context), {**how, "expert_map": maps[name], "all2all": all2all}) for name, all2all in ways]
    assert loaded == wanted
    assert digested == [("a model", "windows", context)] * len(ways)
    if rank:
        assert found is None
    else:
        assert [(one.ranks, one.expert_map, one.all2all, one.experts) for one in found] == [
            (2, *way, "k") for way in ways
        ]


@pytest.mark.parametrize(("forked", "level"), [(True, "info"), (True, None), (False, "info")])
def test_log_records_are_those_of_a_rank_in_a_process_of_its_own(forked, level, monkeypatch):
    levels = []

    class OpenedError(Exception):
        pass

    def opened(*_, **__):
        raise OpenedError

    def records(level):
        levels.append(level)
        return contextlib.nullcontext()

    monkeypatch.setattr(check_exact, "log_records", records)
    monkeypatch.setattr(check_exact, "EPContext", SimpleNamespace(from_groups=opened))
    monkeypatch.setattr(check_exact.dist, "get_world_size", lambda: 2)
    with pytest.raises(OpenedError):
        check_exact.run_on_rank(check_exact.CheckOptions(log_level=level), torch.device("cpu"), forked=forked)
    assert levels == ["info"] * (forked and level is not None)
