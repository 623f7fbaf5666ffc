"""Test what `ep-moe tune` writes: the choice by times, the file and its faults, the lookup, and a layer's refusals.

tests/distributed/test_tuned_layer.py tests it on several ranks.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ep_moe import BackendUnavailable, ConfigError, EPContext, MoEConfig, MoELayer, Wire, load_model_config, registry
from ep_moe.cli import app as cli
from ep_moe.cli.run import DEMO
from ep_moe.experts.base import ExpertsOptions
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.parallel.layout import RankLayout
from ep_moe.quant.schemes import scheme_of
from ep_moe.selection import explain
from ep_moe.selection.backend_table import BackendTable, TableEntry, _buffer_tokens, tuned_table
from ep_moe.selection.tuned import (
    Measured,
    Tuned,
    bucket_index,
    fastest_per_bucket,
    layer_facts,
    machine_facts,
    versions,
)
from ep_moe.weights.layouts.base import WeightLayout

CPU = torch.device("cpu")
CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=6, top_k=2)


def line(tokens: int, experts: str, us: float, all2all: str = "local", pipeline: int | None = None) -> Measured:
    return Measured(tokens=tokens, experts=experts, all2all=all2all, us=us, pipeline=pipeline)


def tuned(*buckets: Measured, config: MoEConfig = CONFIG, **changed) -> Tuned:
    """Return a result as measured here, on one rank."""
    facts = {
        "machine": machine_facts(CPU, 1, 1),
        "layer": layer_facts(config, "none", Wire(), torch.float32),
        "versions": versions(),
        "buckets": buckets or (line(4, "reference", 5.5), line(9, "reference", 7.25, pipeline=None)),
    }
    return Tuned(**(facts | changed))


# --- the choice --------------------------------------------------------------------------------------------------


def test_the_kernel_with_the_least_loss_over_all_buckets():
    times = {"narrow": (10, 100), "wide": (12, 60), "even": (11, 90)}  # losses: 1 + 5/3, 1.2 + 1, 1.1 + 1.5
    lines = [line(t, name, us) for name, both in times.items() for t, us in zip((1, 8), both, strict=True)]
    lines += [line(1, "wide", 12.5, "other"), line(8, "wide", 55, "other", pipeline=4)]
    found = fastest_per_bucket(lines, {"narrow": 0, "wide": 1, "even": 2})
    assert found == (line(1, "wide", 12), line(8, "wide", 55, "other", pipeline=4))


def test_ties_go_to_the_kernel_that_is_preferred():
    lines = [line(1, "a", 10), line(1, "b", 10)]
    assert fastest_per_bucket(lines, {"a": 0, "b": 1}) == (lines[0],)
    assert fastest_per_bucket(lines, {"b": 0, "a": 1}) == (lines[1],)
    assert fastest_per_bucket(lines, {"b": 0, "a": 0}) == (lines[1],), "of one layout too"


def test_kernels_of_one_layout_may_differ_per_bucket():
    lines = [line(1, "a", 5), line(8, "a", 100), line(1, "b", 9), line(8, "b", 50), line(1, "c", 4), line(8, "c", 60)]
    assert fastest_per_bucket(lines, {"a": "canonical", "b": "canonical", "c": "own"}) == (
        line(1, "c", 4),
        line(8, "c", 60),
    )
    lines[0] = line(1, "a", 4.1)
    assert fastest_per_bucket(lines, {"a": "canonical", "b": "canonical", "c": "own"}) == (
        line(1, "a", 4.1),
        line(8, "b", 50),
    )


def test_a_kernel_without_a_time_for_some_bucket_cannot_serve():
    lines = [line(1, "a", 1), line(1, "b", 9), line(8, "b", 9)]
    assert fastest_per_bucket(lines, {"a": 0, "b": 1}) == tuple(lines[1:])
    with pytest.raises(ConfigError, match=r"no expert kernel could be timed at all of \[1, 8\] tokens"):
        fastest_per_bucket(lines[:1] + lines[2:], {"a": 0, "b": 1})
    with pytest.raises(ConfigError, match="no expert kernel could be timed"):
        fastest_per_bucket([], {})


TIMES = st.lists(
    st.tuples(st.sampled_from((1, 8, 64)), st.sampled_from("abcd"), st.sampled_from("xy"), st.integers(1, 50)),
    min_size=1,
    max_size=20,
)


@given(TIMES, st.fixed_dictionaries({name: st.integers(0, 2) for name in "abcd"}))
def test_no_other_choice_loses_less(times, layouts):
    lines = [line(tokens, kernel, us, transport) for tokens, kernel, transport, us in times]
    buckets = sorted({one.tokens for one in lines})

    def best(group, tokens):
        return min((one.us for one in lines if one.tokens == tokens and layouts[one.experts] in group), default=None)

    losses = {}
    for layout in set(layouts.values()):
        own = [best({layout}, tokens) for tokens in buckets]
        if None not in own:
            losses[layout] = sum(us / best({0, 1, 2}, t) for us, t in zip(own, buckets, strict=True))
    if not losses:
        with pytest.raises(ConfigError):
            fastest_per_bucket(lines, layouts)
        return
    found = fastest_per_bucket(lines, layouts)
    assert [one.tokens for one in found] == buckets
    assert len({layouts[one.experts] for one in found}) == 1
    lost = sum(one.us / best({0, 1, 2}, one.tokens) for one in found)
    assert lost == min(losses.values())


# --- the lookup --------------------------------------------------------------------------------------------------


def test_the_smallest_bucket_that_holds_the_bound():
    bounds = [1, 16, 128]
    expected = {1: 0, 2: 1, 15: 1, 16: 1, 17: 2, 127: 2, 128: 2, 129: 2, 10**6: 2}
    assert {tokens: bucket_index(bounds, tokens) for tokens in expected} == expected


def test_buckets_of_one_transport_share_its_buffers():
    used = [
        line(1, "k", 1, "nvlink_p2p"),
        line(16, "k", 1, "flashinfer_nvlink"),
        line(128, "k", 1, "nvlink_p2p"),
        line(1024, "k", 1, "nvlink_p2p", pipeline=512),
        line(8192, "k", 1, "torch_a2a"),
    ]
    assert [_buffer_tokens(one, used) for one in used] == [128, 16, 128, 512, 8192]
    assert _buffer_tokens(line(1, "k", 1, "allgather"), used) == 8192, "no buffers of its own: as other layers have it"


def test_calls_in_parts_as_large_as_their_bound_are_in_one():
    """A bucket's calls run in one part if the part size reaches the token limit.

    The limit may be the bucket's, or the context's if that is smaller.
    """
    named = {"all2all": "local", "experts": "reference"}
    for buckets, most, parts in (
        ([line(4, "reference", 5, pipeline=4), line(9, "reference", 7)], 9, [None, None]),
        ([line(4, "reference", 5), line(16, "reference", 7, pipeline=9)], 9, [None, None]),
        ([line(16, "reference", 7, pipeline=12)], 9, [None]),
    ):
        keywords = {"max_tokens": most, "scheme": scheme_of("none"), "wire": Wire()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(explain, "choose", lambda *_, **given: {name: given[name] for name in named} == named)
            found = tuned_table(tuned(*buckets), CONFIG, RankLayout(world=1, rank=0), CPU, torch.float32, keywords)
        assert [entry.pipeline for entry in found._entries] == parts
        assert found.last.tokens == most


def test_buffers_are_counted_once_for_each_transport_and_geometry(monkeypatch):
    """Buffers count once for each transport and shape, for the most calls in flight.

    These are two or more if calls run in parts.
    """
    kind = SimpleNamespace(buffer_bytes=lambda room: 10 * room, calls_in_parts=lambda room: 2 if room < 64 else 3)
    monkeypatch.setattr(registry, "load", lambda *_: kind)
    choice = explain.BackendChoice("p2p", "k", "chosen", "")
    other = dataclasses.replace(choice, all2all="other")
    table = BackendTable(
        [TableEntry(1, choice, None, 16), TableEntry(2, choice, 16, 16), TableEntry(3, choice, None, 16),
        TableEntry(4, choice, 64, 64),
         TableEntry(5, other, None, 16)]
    )  # fmt: skip
    expected = {("p2p", 16): 2 * 160, ("p2p", 64): 3 * 640, ("other", 16): 160}
    assert table.transport_bytes(lambda entry: entry.buffer_tokens) == expected


def test_another_dtype_is_asked_of_a_transport_with_all_that_it_was_chosen_for():
    """Another dtype is checked with the wire that the transport was chosen for, which may not carry it."""
    table = BackendTable([TableEntry(4, explain.BackendChoice("local", "reference", "chosen", ""), None, None)])
    asked = [torch.bfloat16, CONFIG, RankLayout(world=1, rank=0), scheme_of("none"), ExpertsOptions()]
    assert table.dtype_problem(*asked, Wire()) is None
    assert "all2all=local does not carry it: local carries plain rows in combine, not fp8" in table.dtype_problem(
        *asked, Wire(combine="fp8")
    )


def test_kernels_of_a_layer_are_made_with_the_same(monkeypatch):
    own = SimpleNamespace(name="own", value="tests.fixtures.plugins:EagerKernel")
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [own] if group == "ep_moe.experts" else [])
    registry._plugins.cache_clear()
    with EPContext.local(CPU) as context:
        context.max_tokens = 9
        options = ExpertsOptions(chunk_rows=7)
        file = tuned(line(4, "own", 5), line(9, "reference", 7))
        layer = MoELayer(CONFIG, context, tuned=file, options=options)
        assert [kernel.name for kernel in layer._kernels] == ["reference", "own"]
        for kernel in layer._kernels:
            assert kernel.config is layer.config
            assert kernel.weights is layer.expert_weights
            assert kernel.workspaces is context._workspaces, "scratch memory of one call at a time"
            assert kernel.options is options


def test_kernels_that_read_weights_otherwise_share_no_layer(monkeypatch):
    own = SimpleNamespace(name="own", value="tests.fixtures.plugins:EagerKernel")
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [own] if group == "ep_moe.experts" else [])
    registry._plugins.cache_clear()
    monkeypatch.setattr(registry.load("experts", "own"), "weight_layout", type("Own", (WeightLayout,), {}))
    with pytest.raises(ConfigError, match="tuned has experts that cannot share one layer's weights: own, reference"):
        MoELayer(CONFIG, local(), tuned=tuned(line(4, "own", 5), line(9, "reference", 7)))


# --- the file ----------------------------------------------------------------------------------------------------


def test_what_is_saved_is_what_is_loaded(tmp_path):
    made = tuned(
        line(1, "a", 5.5, "x"),
        line(16, "b", 7.25, "y", pipeline=8),
        measured=(line(1, "a", 5.5, "x"), line(1, "c", 9)),
        versions={"torch": "of another day"},
    )
    made.save(tmp_path / "tuned.json")
    assert Tuned.load(tmp_path / "tuned.json") == made
    assert json.loads((tmp_path / "tuned.json").read_text())["buckets"][1]["pipeline"] == 8
    bare = tuned()
    bare.save(tmp_path / "bare.json")
    assert Tuned.load(tmp_path / "bare.json") == bare, "nothing measured"


def broken(change) -> str:
    table = {
        "format": 1, "machine": {}, "layer": {}, "versions": {}, "measured": [],
        "buckets": [{"tokens": 1, "experts": "a", "all2all": "x", "us": 1.5}],
    }  # fmt: skip
    change(table)
    return json.dumps(table)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must be an object with format 1"),
        (broken(lambda t: t.pop("format")), "must be an object with format 1"),
        (broken(lambda t: t.update(format=2)), "must be an object with format 1"),
        (broken(lambda t: t.pop("machine")), "machine must be an object, got None"),
        (broken(lambda t: t.update(layer=[])), r"layer must be an object, got \[\]"),
        (broken(lambda t: t.update(speed=1)), "unknown key 'speed'"),
        (broken(lambda t: t.pop("measured")), "measured must be a list, got None"),
        (broken(lambda t: t.update(buckets=3)), "buckets must be a list, got 3"),
        (broken(lambda t: t.update(buckets=[7])), r"buckets\[0\] must be an object, got 7"),
        (broken(lambda t: t.update(buckets=[])), r"buckets must have ascending tokens of at least 1, got \[\]"),
        (broken(lambda t: t["buckets"][0].pop("us")), r"buckets\[0\]: Measured needs us"),
        (broken(lambda t: t["buckets"][0].update(tokens="1")), r"buckets\[0\]: Measured.tokens must be of type int"),
        (broken(lambda t: t["buckets"][0].update(expert="b")), "unknown key 'expert' in Measured; did you mean"),
        (broken(lambda t: t["buckets"].append(t["buckets"][0])), r"ascending tokens of at least 1, got \[1, 1\]"),
        (broken(lambda t: t["buckets"][0].update(tokens=0)), r"ascending tokens of at least 1, got \[0\]"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, text, sentence):
    (tmp_path / "tuned.json").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        Tuned.load(tmp_path / "tuned.json")


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*none\.json; make it with ep-moe tune"):
        Tuned.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"cannot be read as JSON \(.*directory"):
        Tuned.load(tmp_path)


def test_the_whole_file_of_the_tests_above_is_good(tmp_path):
    (tmp_path / "tuned.json").write_text(broken(lambda table: None))
    assert Tuned.load(tmp_path / "tuned.json").buckets == (line(1, "a", 1.5, "x"),)


# --- what a layer takes ------------------------------------------------------------------------------------------


def local(max_tokens: int | None = 9) -> EPContext:
    context = EPContext.local(CPU)
    context.max_tokens = context._current_limit = max_tokens
    return context


FACTS = layer_facts(CONFIG, "none", Wire(), torch.float32)
OTHERS = {
    "hidden_size": 32, "intermediate_size": 32, "num_experts": 8, "top_k": 3, "activation": "geglu",
    "expert_bias": True, "quantization": "mxfp4", "Wire.dispatch": "fp8_block", "Wire.combine": "fp8",
    "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("name", FACTS)
def test_another_layer_is_named(name):
    assert OTHERS.keys() == FACTS.keys()
    sentence = f"layer {name} is {FACTS[name]!r} here and {OTHERS[name]!r} in the file; run ep-moe tune for this one"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        MoELayer(CONFIG, local(), tuned=tuned(layer=FACTS | {name: OTHERS[name]}), dtype=torch.float32)


@pytest.mark.parametrize(("name", "other"), [("device", "NVIDIA H200"), ("ep", 4), ("etp", 2)])
def test_another_machine_is_named(name, other):
    here = machine_facts(CPU, 1, 1)
    sentence = f"machine {name} is {here[name]!r} here and {other!r} in the file"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        MoELayer(CONFIG, local(), tuned=tuned(machine=here | {name: other}), dtype=torch.float32)


def test_facts_that_only_one_side_has_are_named():
    here = machine_facts(CPU, 1, 1)
    assert tuned(machine={}).mismatch(here, FACTS).startswith("machine device is 'cpu' here and None in the file; ")
    assert tuned(machine=here | {"x": 1}).mismatch(here, FACTS) == "machine x is None here and 1 in the file"
    assert tuned().mismatch(here, FACTS) is None
    spread = machine_facts(CPU, 1, 1, nodes=2)
    assert tuned(machine=here).mismatch(spread, FACTS) == "machine nodes is 2 here and None in the file"


def test_a_layer_counts_the_nodes_of_its_context(monkeypatch):
    monkeypatch.setattr(RankLayout, "ep_node_count", 2)
    monkeypatch.setattr(RankLayout, "across_nodes", "ranks 0 and 1")
    with pytest.raises(ConfigError, match="machine nodes is 2 here and None in the file"):
        MoELayer(CONFIG, local(), tuned=tuned(machine=machine_facts(CPU, 1, 1)), dtype=torch.float32)


def test_the_layer_of_the_file_is_the_layer_that_was_asked_for():
    """The layer in the file is compared with the requested layer, argument by argument."""
    for changed, name in (
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"wire": Wire(dispatch="fp8_block")}, "Wire.dispatch"),
    ):
        with pytest.raises(ConfigError, match=f"layer {name} is"):
            MoELayer(CONFIG, local(), tuned=tuned(), **changed)
    wide = dataclasses.replace(CONFIG, hidden_size=128, intermediate_size=128)
    with pytest.raises(ConfigError, match="layer quantization is 'fp8_block' here and 'none' in the file"):
        MoELayer(wide, local(), tuned=tuned(config=wide), quantization="fp8_block", dtype=torch.float32)


@pytest.mark.parametrize("named", [{"all2all": "local"}, {"experts": "reference"}, {"pipeline": 4}])
def test_nothing_is_named_beside_it(named):
    (name, value), *_ = named.items()
    with pytest.raises(ConfigError, match=f"{name}={value!r} and tuned are both given"):
        MoELayer(CONFIG, local(), tuned=tuned(), **named)


def test_a_bound_must_be_stated():
    with pytest.raises(ConfigError, match=r"set it with EPContext.from_torchrun\(max_tokens=...\)"):
        MoELayer(CONFIG, local(None), tuned=tuned())


@pytest.mark.parametrize(
    ("bucket", "error", "sentence"),
    [
        (line(9, "flashinfer_cutlass", 1), BackendUnavailable, "all2all='local' with experts='flashinfer_cutlass'"),
        (line(9, "reference", 1, "nowhere"), ConfigError, "no backend among dispatchers is named 'nowhere'"),
        (line(9, "reference", 1, "inside"), ConfigError, "no backend among dispatchers is named 'inside'"),
        (line(9, "reference", 1, pipeline=4), ConfigError, "pipeline=4 needs a transport with fixed buffers"),
    ],
)
def test_a_pair_that_cannot_run_here_is_refused(bucket, error, sentence):
    with pytest.raises(error, match=sentence):
        MoELayer(CONFIG, local(), tuned=tuned(bucket))


def test_other_versions_are_a_warning():
    with pytest.warns(UserWarning, match=r"other software \(torch is .*, was 1\.0\); consider tuning again") as seen:
        MoELayer(CONFIG, local(), tuned=tuned(versions=versions() | {"torch": "1.0"}))
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MoELayer(CONFIG, local(), tuned=tuned())


def test_what_the_layer_says_of_itself():
    layer = MoELayer(CONFIG, local(), tuned=tuned(line(4, "reference", 1), line(64, "reference", 1, pipeline=16)))
    assert "tuned: local with reference up to 4 tokens, local with reference up to 9 tokens" in layer.extra_repr()
    chosen = [row for row in layer.explain() if row.status == "chosen"]
    assert chosen == [layer.choice]
    assert layer.choice.reason == "tuned: up to 4 tokens, up to 9 tokens"
    others = [explain.BackendChoice(name, "reference", "chosen", "best") for name in ("allgather", "local")]
    assert [row.status for row in layer._table.explained(others)] == ["possible", "chosen"]
    assert "tuned" not in MoELayer(CONFIG, local()).extra_repr()


# --- the command line --------------------------------------------------------------------------------------------


def invoke(*arguments: str):
    return CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--tokens", "0"), "--tokens must be numbers of at least 1 and at most 4194304, got [0]"),
        (("--tokens", "99999999999999999999"), "at most 4194304, got [99999999999999999999]"),
        (("--quantization", "int3"), "--quantization must be one of none,"),
        (("--dtype", "int8"), "--dtype must be one of bfloat16,"),
        (("--wire", "fp4"), "Wire.dispatch must be one of plain,"),
        (("--out", "nowhere/tuned.json"), "--out nowhere/tuned.json is in a folder that does not exist"),
    ],
)
def test_bad_arguments_are_refused_before_ranks_start(arguments, sentence, monkeypatch):
    monkeypatch.setattr(cli, "run_tune", lambda *_: pytest.fail("ranks were started"))
    result = invoke("tune", *arguments)
    assert result.exit_code == 2
    assert sentence in result.output


def test_the_command_prints_and_writes(monkeypatch, tmp_path):
    lines = (line(1, "a", 5, "x"), line(1, "b", 9, "y"), line(16, "a", 7, "y", pipeline=8))
    made, asked = tuned(lines[0], lines[2], measured=lines), []
    monkeypatch.setattr(cli, "run_tune", lambda options, say: asked.append(options) or made)
    out = tmp_path / "found.json"
    result = invoke("tune", "mixtral-8x7b", "--tokens", "1", "16", "128", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert (asked[0].model, asked[0].tokens) == ("mixtral-8x7b", (1, 16, 128))
    assert Tuned.load(out) == made
    assert re.search(r"up to 1 tokens per rank\n.*\nx +a +5\.0 +chosen *\ny +b +9\.0 *\n", result.output)
    assert re.search(r"up to 16 tokens per rank\n.*\ny +a +8 +7\.0 +chosen", result.output)


@pytest.mark.skipif(TorchrunEnv.present(), reason="starts ranks of its own")
def test_from_the_command_to_a_layer(tmp_path):
    """A tuned file from the command serves a layer.

    The command measures a checkpoint's folder on four gloo ranks by their clocks.
    """
    pytest.importorskip("transformers")
    out = tmp_path / "tuned.json"
    result = invoke("tune", str(DEMO), "--tokens", "1", "6", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert re.search(r"6 tokens, (allgather|torch_a2a) with reference: \d+\.\d us\n", result.output)
    found = Tuned.load(out)
    assert [one.tokens for one in found.buckets] == [1, 6]
    wanted = layer_facts(load_model_config("demo").moe, "none", Wire(), torch.float32)
    assert found.mismatch(machine_facts(CPU, 4, 1), wanted) is None
    assert f"written to {out}" in result.output.replace("\n", "")
    refused = invoke("tune", "nothing", "--out", str(out))
    assert refused.exit_code == 2
    assert "no bundled config is named 'nothing'" in refused.output


@pytest.mark.skipif(TorchrunEnv.present(), reason="starts ranks of its own")
def test_a_model_is_run_with_a_file(tmp_path):
    pytest.importorskip("transformers")
    facts = {"config": load_model_config("demo").moe, "machine": machine_facts(CPU, 4, 1)}
    good = tuned(line(4, "reference", 1, "torch_a2a"), line(64, "reference", 1, "allgather"), **facts)
    good.save(tmp_path / "good.json")
    few = ("run", "--no-reference", "--text-tokens", "512", "--window", "128", "--batch", "1", "--tuned")
    result = invoke(*few, str(tmp_path / "good.json"))
    assert result.exit_code == 0, result.output
    assert "all2all allgather, experts reference" in result.output, "auto would be torch_a2a"
    dataclasses.replace(good, machine=good.machine | {"ep": 2}).save(tmp_path / "foreign.json")
    result = invoke(*few, str(tmp_path / "foreign.json"))
    assert result.exit_code == 2
    assert "machine ep is 4 here and 2 in the file" in result.output
    result = invoke(*few, str(tmp_path / "none.json"))
    assert result.exit_code == 2
    assert "there is no file" in result.output


def test_bench_runs_the_named_module(monkeypatch):
    import sys

    from ep_moe.bench import planner

    monkeypatch.setattr(sys, "argv", ["untouched"])
    seen = []
    monkeypatch.setattr(planner, "main", lambda: seen.append(sys.argv))
    assert invoke("bench", "planner", "--repeat", "3", "--large").exit_code == 0
    assert seen == [["ep-moe bench planner", "--repeat", "3", "--large"]]


def test_bench_of_another_name():
    result = invoke("bench", "layers")
    assert result.exit_code == 2
    known = "all2all, experts, layer, overlap, planner, rebalance, scaling, train, weight_push"
    assert f"NAME must be one of {known}, got 'layers'" in result.output.replace("\n", "")


def test_every_bench_that_is_named_exists():
    import importlib

    for name in cli._BENCHES:
        assert callable(importlib.import_module(f"ep_moe.bench.{name}").main)
