"""Test what `ep-moe tune` gives its candidates, without measuring any."""

import dataclasses
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ep_moe import ConfigError, EPContext, MoEConfig, MoELayer, RankLayout, Wire, registry
from ep_moe.cli import rank_times, tune
from ep_moe.quant.schemes import SCHEMES
from ep_moe.selection.explain import INSIDE, BackendChoice

CPU = torch.device("cpu")
CONFIG = MoEConfig(hidden_size=4, intermediate_size=4, num_experts=8, top_k=2)


def layer_of(rank: int = 0, chunk_rows: int = 10**6) -> SimpleNamespace:
    context = SimpleNamespace(layout=RankLayout(world=4, rank=rank, dp=2, tp=2, ep=4))
    options = SimpleNamespace(options=SimpleNamespace(chunk_rows=chunk_rows))
    return SimpleNamespace(context=context, config=CONFIG, device=CPU, dtype=torch.float32, experts=options)


def test_kernels_are_tuned_for_the_rows_of_all_ranks():
    """Kernels are tuned for the rows of all ranks, up to one chunk.

    Each of 4 ranks sends half of its tokens, because tp ranks share them.
    """
    layer = layer_of()
    assert tune._rows(layer.context, layer, [1, 8]) == [4, 16]
    layer = layer_of(chunk_rows=10)
    assert tune._rows(layer.context, layer, [1, 8]) == [4, 10]


def test_a_batch_is_the_same_for_all_candidates_and_another_on_each_rank():
    (x, routing), (again, same), (other, _) = (tune._batch(layer_of(rank), 6) for rank in (1, 1, 2))
    assert torch.equal(x, again)
    assert torch.equal(routing.ids, same.ids)
    assert not torch.equal(x, other)
    assert all(len(set(row)) == 2 for row in routing.ids.tolist())
    assert torch.equal(routing.weights, torch.full((6, 2), 0.5))
    _, many = tune._batch(layer_of(), 99)
    assert set(many.ids.flatten().tolist()) == set(range(CONFIG.num_experts))


def test_the_first_round_by_the_clock_is_not_counted(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(rank_times.time, "perf_counter", lambda: now[0])

    def call(name, seconds):
        left = iter(seconds)

        def run():
            order.append(name)
            now[0] += next(left)

        return run

    calls = [call("a", (90.0, 1.0, 3.0)), call("b", (0.0, 6.0, 4.0))]
    assert rank_times.by_the_clock(calls, 2, lambda: order.append("|")) == [pytest.approx(2e6), pytest.approx(5e6)]
    assert "".join(order) == "|a|b" * 3, "in turns, and all ranks together"


@pytest.mark.parametrize("scheme", ["none", "fp8_dynamic"])
def test_layers_that_are_timed_are_as_the_command_asks(scheme):
    config, wire = dataclasses.replace(CONFIG, hidden_size=32, intermediate_size=32), Wire(dispatch="fp8_row")
    with EPContext.local(CPU) as context:
        layer = tune._layer(context, config, [("local", "reference")], "reference", scheme, wire, torch.bfloat16)
        assert (layer.wire, layer.expert_weights.scheme.name, layer.dtype) == (wire, scheme, torch.bfloat16)
        assert layer.name == "tune reference", "as errors call it"


@pytest.mark.parametrize(("pipeline", "fits"), [(None, True), (16, False)])
def test_buffers_are_as_many_as_calls_in_flight(monkeypatch, pipeline, fits):
    kind = SimpleNamespace(buffer_bytes=lambda shape: tune.ROOM // 2 + 1, calls_in_parts=lambda shape: 2)
    monkeypatch.setattr(registry, "load", lambda *_: kind)
    context = SimpleNamespace(_dispatcher=lambda name, shape: name)
    assert tune._transport(context, "p2p", None, pipeline) == ("p2p" if fits else None)


def test_a_transport_that_is_left_out_is_named_with_the_reason(monkeypatch):
    def transport(context, name, shape, pipeline):
        if name == "allgather":
            raise ConfigError("no memory")
        return None if name == "torch_a2a" else object()

    monkeypatch.setattr(tune, "_transport", transport)
    said = []
    with EPContext.local(CPU) as context:
        context._current_limit = 4
        pairs = [(name, "reference") for name in ("local", "torch_a2a", "allgather")]
        found = tune._candidates(context, {"reference": MoELayer(CONFIG, context)}, pairs, said.append)
    assert [candidate.line.all2all for candidate in found] == ["local"]
    large, failed = said
    assert large == "4 tokens, torch_a2a with reference: left out, its buffers are larger than 8 GiB"
    assert re.fullmatch("4 tokens, allgather with reference: left out, .*no memory", failed)


@pytest.mark.parametrize(("rank", "dtype"), [(0, None), (1, "float16")])
def test_a_rank_measures_what_was_asked_for(rank, dtype, monkeypatch):
    contexts, measured = [], []
    layout = RankLayout(world=4, rank=rank, dp=4, ep=4)

    def from_groups(**asked):
        contexts.append(asked)
        return nullcontext(SimpleNamespace(layout=layout))

    monkeypatch.setattr(EPContext, "from_groups", from_groups)
    monkeypatch.setattr(tune, "layer_config", lambda model, context: f"sizes of {model}")
    monkeypatch.setattr(tune, "tune", lambda *asked, **how: (measured.append((*asked, how)), "tuned")[1])
    options = tune.TuneOptions(
        model="m", tokens=(3, 9), quantization="fp8_block", wire="fp8_row", dtype=dtype, cache="a folder", quiet=True
    )
    said = []
    assert tune.run_on_rank(options, CPU, said.append) == (None if rank else "tuned")
    assert contexts == [{"device": CPU, "deadline_s": tune.DEADLINE_S, "max_tokens": 9}]
    ((context, config, tokens, how),) = measured
    assert context.layout is layout
    assert (config, tokens) == ("sizes of m", (3, 9))
    how.pop("say")("a line")
    assert said == ([] if rank else ["a line"])
    wanted = {"quantization": "fp8_block", "wire": Wire(dispatch="fp8_row"), "cache": "a folder", "progress": False}
    assert how == {**wanted, "dtype": torch.float16 if dtype else torch.float32}


@pytest.mark.parametrize("tokens", [(), (5, 0), (1, tune.MOST_TOKENS + 1)])
def test_every_number_of_tokens_is_within_bounds(tokens):
    assert tune.TuneOptions(model="m", tokens=(1, tune.MOST_TOKENS)).tokens[1] == tune.MOST_TOKENS
    with pytest.raises(
        ConfigError, match=re.escape(f"--tokens must be numbers of at least 1 and at most {tune.MOST_TOKENS}")
    ):
        tune.TuneOptions(model="m", tokens=tokens)


def test_pairs_are_those_that_can_run_as_two(monkeypatch):
    """`tune` times only transport and kernel pairs. A fused kernel has no separate transport."""
    rows = [
        BackendChoice("local", "reference", "chosen", ""), BackendChoice("allgather", "reference", "possible", ""),
        BackendChoice("torch_a2a", "reference", "refused", "no"), BackendChoice(INSIDE, "fused", "possible", ""),
    ]  # fmt: skip
    asked, agreed = [], []
    monkeypatch.setattr(tune.explain, "explain", lambda *given, **how: (asked.append((*given, how)), rows)[1])
    consensus = SimpleNamespace(require_equal=lambda name, facts, problem: agreed.append((facts, problem)))
    context = SimpleNamespace(layout="layout", device=CPU, _max_dispatch_tokens=7, max_tokens=9, consensus=consensus)
    wire = Wire(dispatch="fp8_row")
    pairs = tune._pairs(context, CONFIG, {"a": 1}, scheme="fp8_dynamic", wire=wire, dtype=torch.float16)
    assert pairs == [("local", "reference"), ("allgather", "reference")]
    assert agreed == [({"a": 1, "pairs": pairs}, None)]
    how = {"scheme": SCHEMES["fp8_dynamic"], "max_tokens": 7, "wire": wire}
    assert asked == [(CONFIG, "layout", CPU, torch.float16, how)]


@pytest.mark.parametrize(
    ("limit", "rows", "words"),
    [
        (None, [BackendChoice("local", "reference", "chosen", "")], r"tune needs EPContext.from_torchrun\(max_tokens="),
        (
            9,
            [BackendChoice("torch_a2a", "reference", "refused", "no")],
            "no pair of transport and kernel can run; ep-moe",
        ),
    ],
    ids=["no limit", "no pair"],
)
def test_what_cannot_be_measured_is_refused_on_all_ranks(limit, rows, words, monkeypatch):
    def require_equal(name, facts, problem):
        raise problem

    monkeypatch.setattr(tune.explain, "explain", lambda *given, **how: rows)
    consensus = SimpleNamespace(require_equal=require_equal)
    context = SimpleNamespace(
        layout="layout", device=CPU, _max_dispatch_tokens=limit, max_tokens=limit, consensus=consensus
    )
    with pytest.raises(ConfigError, match=words):
        tune._pairs(context, CONFIG, {}, scheme="none", wire=Wire(), dtype=torch.float16)


@pytest.mark.parametrize("fails", [False, True])
def test_torchruns_ranks_measure_and_leave_their_process_group(fails, monkeypatch):
    asked, ended = [], []

    def on_rank(*given):
        if fails:
            raise ConfigError("no")
        return given

    monkeypatch.setattr(tune.TorchrunEnv, "present", lambda: True)
    monkeypatch.setattr(tune, "local_device", lambda: "here")
    monkeypatch.setattr(tune, "init_from_torchrun", lambda device, deadline_s: asked.append((device, deadline_s)))
    monkeypatch.setattr(tune, "run_on_rank", on_rank)
    monkeypatch.setattr(tune.dist, "destroy_process_group", lambda: ended.append(True))
    options = tune.TuneOptions(model="m", tokens=(3,))
    with pytest.raises(ConfigError, match="no") if fails else nullcontext():
        assert tune.run(options, print) == (options, "here", print)
    assert (asked, ended) == ([("here", tune.DEADLINE_S)], [True])
