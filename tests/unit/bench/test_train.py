"""Test `bench/train` on a CPU: the hand-written layer is right, and lines with wrong gradients are marked."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.functional import silu

from ep_moe import Activation, EPContext, MoEConfig
from ep_moe.bench import floors, harness, train, train_entries, train_report
from ep_moe.bench.experts import Rates
from ep_moe.bench.train_entries import Batch, Options
from ep_moe.bench.train_report import TrainLine
from ep_moe.errors import ConfigError
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import gather_from_all_ranks
from tests.fixtures.p2p_on_cpu import p2p_on_cpu

CONFIG = MoEConfig(hidden_size=32, intermediate_size=16, num_experts=8, top_k=2)
RATES = Rates(copy=4e12, bf16=800e12, fp8=1500e12)
OPTIONS = Options(transports=("nvlink_p2p", "allgather", "torch_a2a", "local"), by_hand=("eager",), steps=1)


def layers(context: EPContext, *, tokens: int = 6, config: MoEConfig = CONFIG, **asked: bool) -> list[TrainLine]:
    options = dataclasses.replace(OPTIONS, **asked)
    ((_, _, lines, _),) = train.layer_lines(context, "m", config, [tokens], options, RATES)
    return train_report.compared(lines)


@pytest.fixture
def asked_for(monkeypatch):
    """Return a function that parses command-line words and returns what would be measured.

    Its result is a list of (model, arguments, options).
    """

    def run(*words):
        found = []
        context = EPContext.local("cpu")
        for name, fake in {
            "with_graphs": lambda model, asked, options, rates: found.append((model, asked, options)) or [],
            "experts_lines": lambda *_: [],
            "check_measured": lambda lines: None,
            "EPContext": SimpleNamespace(from_torchrun=lambda: context),
            "dist": SimpleNamespace(get_rank=lambda: 0),
        }.items():
            monkeypatch.setattr(train, name, fake)
        monkeypatch.setattr(harness, "_check_machine", lambda where: None)
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr("sys.argv", ["train", "--quiet", *words])
        train.main()
        return found

    return run


def test_options_of_a_run_are_those_of_its_lines(asked_for):
    ((model, asked, options),) = asked_for("qwen3-30b-a3b", "--rows", "--transports", "torch_a2a", "--by-hand", "eager")
    assert (model, asked.rows, asked.no_graph, asked.one_thread) == ("qwen3-30b-a3b", [], False, False)
    plain = Options(
        transports=["torch_a2a"],
        by_hand=["eager"],
        torchtitan=options.torchtitan,
        sonic="default",
        transformers=True,
    )
    assert options == plain
    words = ("qwen3-30b-a3b", "--rows", "--transports", "--by-hand", "--torchtitan", "--sonic", "none", "--no-graph")
    plain = Options(transports=[], by_hand=[], torchtitan=[], transformers=True)
    for word, changed in {
        "--no-transformers": {"transformers": False},
        "--float8": {"float8": True},
        "--exact": {"exact": True},
        "--main-grad": {"main_grad": True},
        "--accumulate": {"accumulate": True},
        "--frozen": {"frozen": True},
        "--steps=3": {"steps": 3},
        "--experts=reference": {"experts": "reference"},
    }.items():
        ((_, asked, options),) = asked_for(*words, word)
        assert options == dataclasses.replace(plain, **changed), word
        assert asked.no_graph


@pytest.mark.parametrize(
    ("changed", "captures"),
    [
        ({}, 1),
        ({"device": "cpu"}, 0),
        ({"reference": None}, 0),
        ({"no_graph": True}, 0),
        ({"accumulate": True}, 0),
        ({"frozen": True}, 0),
    ],
)
def test_steps_that_can_be_are_captured_too(changed, captures, monkeypatch):
    """Steps that support capture are measured in a CUDA graph too, in a context with that point's tokens."""
    given = {"device": "cuda", "reference": {}, "no_graph": False, "accumulate": False, "frozen": False} | changed
    batch = SimpleNamespace(x=SimpleNamespace(device=SimpleNamespace(type=given["device"])))
    contexts = []

    def opened(*, max_tokens):
        contexts.append(max_tokens)
        return EPContext.local("cpu")

    monkeypatch.setattr(train, "EPContext", SimpleNamespace(from_torchrun=opened))
    point = SimpleNamespace(tokens=8)
    monkeypatch.setattr(train, "layer_lines", lambda *_: [(batch, point, ["eager"], given["reference"])] * 2)
    monkeypatch.setattr(train, "captured_line", lambda context, config, *_: "graph")
    monkeypatch.setattr(train, "free_device_memory", lambda: None)
    asked = SimpleNamespace(tokens=[8, 64], no_graph=given["no_graph"])
    options = dataclasses.replace(OPTIONS, accumulate=given["accumulate"], frozen=given["frozen"])
    lines = train.with_graphs("qwen3-30b-a3b", asked, options, None)
    assert lines == ["eager", *["graph"] * captures] * 2
    assert contexts == [64, *[8] * 2 * captures]


# --- the layer by hand ---------------------------------------------------------------------------------------------


def dense(batch: Batch, w13: torch.Tensor, w2: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute every expert for every row, in float64."""
    x, weights, w13, w2 = (t.detach().double().requires_grad_() for t in (batch.x, batch.weights, w13, w2))
    gate, up = torch.einsum("th,eih->tei", x, w13).chunk(2, 2)
    y = torch.einsum("tei,ehi->teh", silu(gate) * up, w2)
    out = torch.zeros_like(y[:, 0])
    for column, ids in enumerate(batch.ids.T):
        out = out + weights[:, column, None] * y[torch.arange(len(ids)), ids]
    out.backward(batch.grad.double())
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, "w13": w13.grad, "w2": w2.grad}


@pytest.mark.parametrize("compiled", [False, True])
def test_by_hand_is_a_dense_layer(monkeypatch, compiled):
    stages, compile_it = [], torch.compile

    def compiling(function, **options):
        stages.append(function)
        return compile_it(function, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", compiling)
    monkeypatch.setattr(train_entries, "attempt", lambda context, what, make: make())  # without collectives over ranks
    with EPContext.local("cpu") as context:
        layer = train_entries.built(context, CONFIG, "auto", OPTIONS)
        options = dataclasses.replace(OPTIONS, by_hand=("compiled" if compiled else "eager",))
        (entry,) = train_entries.by_hand(context, CONFIG, context, layer, options)
        batch = Batch.make(context, CONFIG, 24)
        stored = layer.expert_weights.stored_tensors()
        found, wanted = train_entries.results(entry, batch), dense(batch, stored["w13"], stored["w2"])
    assert len(stages) == (4 if compiled else 0)
    assert train_entries.max_relative_error(found, wanted) < train_report.ERROR
    assert entry.parameters[0].data_ptr() == stored["w13"].data_ptr(), "the same weights, no copy"
    assert entry.parameters[0].grad is None


@pytest.mark.parametrize("changed", [{"activation": Activation.GEGLU}, {"expert_bias": True}])
def test_by_hand_refuses_what_it_does_not_compute(changed):
    config = dataclasses.replace(CONFIG, **changed)
    with pytest.raises(ConfigError, match="SwiGLU without biases"):
        train_entries.ByHand(config, torch.empty(8, 32, 32), torch.empty(8, 32, 16), None, compiled=False)


@pytest.mark.parametrize("accumulate", [False, True])
def test_timed_steps_add_to_gradients_where_they_are_asked_to(monkeypatch, accumulate):
    monkeypatch.setattr(train_entries, "attempt", lambda context, what, make: make())  # without collectives over ranks
    options = dataclasses.replace(OPTIONS, accumulate=accumulate)
    with EPContext.local("cpu") as context:
        entries, _ = train_entries.experts_entries(context, context, CONFIG, options)
        batch = Batch.make(context, CONFIG, 24)
        for entry in entries:
            once = train_entries.results(entry, batch)["w13"]
            for _ in range(3):
                train_entries.step(entry, batch)
            if accumulate:
                torch.testing.assert_close(entry.gradients(0)[0], 3 * once[0], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(train_entries.results(entry, batch)["w13"], once)
            else:
                assert all(parameter.grad is None for parameter in entry.parameters)
    assert [entry.owner for entry in entries] == ["ours", "by hand"]


def test_frozen_experts_have_no_gradients_in_any_line(monkeypatch):
    for module in (train, train_entries):
        monkeypatch.setattr(module, "attempt", lambda context, what, make: make())  # without collectives over ranks
    monkeypatch.setattr(train, "max_over_ranks", lambda context, value: value)
    monkeypatch.setattr(train, "barrier", lambda device: None)
    stepped = []

    def step(entry, batch):
        train_entries.run_forward_backward(entry, batch)
        stepped.append((entry.owner, [parameter.grad for parameter in entry.parameters]))

    monkeypatch.setattr(train, "step", step)
    options = dataclasses.replace(OPTIONS, frozen=True)
    with EPContext.local("cpu") as context:
        lines = train.experts_lines(context, "m", CONFIG, [32], options, RATES)
    assert {owner for owner, _ in stepped} == {"ours", "by hand"}
    assert not [one for _, gradients in stepped for one in gradients if one is not None]
    load = floors.Load(CONFIG.num_experts, 32, 0, 0)
    for line in lines:
        assert not line.wrong
        assert line.floor_ms == pytest.approx(floors.training_us(CONFIG, load, RATES, frozen=True) / 1e3)
        tera = floors.training_operations(CONFIG, load, frozen=True) / 1e12
        assert line.tflops == pytest.approx(tera / line.step_ms * 1e3)


def test_what_only_experts_that_learn_have_is_refused_for_frozen_ones(asked_for, capsys):
    for word in ("--main-grad", "--accumulate"):
        with pytest.raises(SystemExit):
            asked_for("--frozen", word)
        assert "--frozen leaves --main-grad and --accumulate without gradients" in capsys.readouterr().err


# --- lines ---------------------------------------------------------------------------------------------------------


@distributed(2)
def test_every_line_is_there_and_its_gradients_agree(world_size):
    with (
        p2p_on_cpu(),
        EPContext.from_groups(device=rank_device(), deadline_s=30, max_tokens=8) as context,
    ):
        lines = layers(context, exact=True, main_grad=True, transformers=True)
        alone = train.experts_lines(context, "m", CONFIG, [32], OPTIONS, RATES)
    names = [(line.owner, line.name) for line in lines]
    assert names[0][0] == "ours"
    assert names[0][1].endswith(", auto")
    assert names[-1] == ("transformers", "all_to_all, eager")
    assert names[-2] == ("by hand", "eager")
    assert names[-3][1].endswith(", exact")
    assert names[-4][1].endswith(", main_grad float32")
    assert names[-5][1].endswith(", main_grad")
    for transport in ("nvlink_p2p", "allgather", "torch_a2a"):
        assert len([name for _, name in names[:-5] if f"+ {transport}" in name]) == 1, "once, as auto or by its name"
    assert not [name for _, name in names if "local" in name], "it cannot serve two ranks, and takes no other with it"
    assert [line.owner for line in alone] == ["ours", "by hand"]
    assert [line.rows for line in alone] == [32, 32]
    assert {line.ranks for line in lines} == {world_size}
    for line in [*lines, *alone]:
        assert not line.wrong
        assert line.forward_ms > 0
        assert line.step_ms > 0
        assert line.floor_ms > 0
    assert [line.x_hand for line in lines] == [lines[-2].step_ms / line.step_ms for line in lines]
    assert len(set(gather_from_all_ranks([dataclasses.astuple(line) for line in lines].__repr__()))) == 1, (
        "the slowest rank's"
    )


@distributed(2)
@pytest.mark.parametrize("fault", ["result", "rows", "weights", "one expert"])
def test_a_fault_in_a_gradient_is_marked(fault, world_size):
    """A wrong result or gradient is marked in the table.

    The planted faults are a result 5 % off, gradients of returned rows 5 % off, and routing weights without a gradient.
    In
    the last one, the gradient of one expert on one rank is 5 % off.
    """
    merge, backward, stacked = train_entries.merge, train_entries.Exchange.backward, train_entries.stacked
    if fault == "result":
        train_entries.merge = lambda rows, order, weights: 1.05 * merge(rows, order, weights)
    elif fault == "rows":
        train_entries.Exchange.backward = staticmethod(lambda ctx, grad: backward(ctx, 1.05 * grad))
    elif fault == "weights":
        train_entries.merge = lambda rows, order, weights: merge(rows, order, weights.detach() + 0 * weights)
    else:

        def off(*given):
            entry = stacked(*given)

            def gradients(slot):
                w13, w2 = entry.gradients(slot)
                return w13, w2 * (1.05 if (slot, dist.get_rank()) == (0, 1) else 1)

            return dataclasses.replace(entry, gradients=gradients)

        train_entries.stacked = off
    try:
        with EPContext.from_groups(device=rank_device(), deadline_s=30, max_tokens=24) as context:
            lines = layers(context, tokens=24)
    finally:
        train_entries.merge, train_entries.Exchange.backward = merge, staticmethod(backward)
        train_entries.stacked = stacked
    assert [line.owner for line in lines if line.wrong] == ["by hand"]
    assert lines[0].x_hand is None, "nothing is ahead of what computes something else"


@distributed(2)
def test_what_fails_takes_no_other_with_it(world_size):
    with EPContext.from_groups(device=rank_device(), deadline_s=30, max_tokens=6) as context:
        lines = layers(context, config=dataclasses.replace(CONFIG, activation=Activation.GEGLU))
    assert {line.owner for line in lines} == {"ours"}
    assert all(line.x_hand is None for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a graph that is none, on the CPU")
@distributed(2)
def test_the_line_of_a_graph(world_size):
    """A captured step counts one replay as one step.

    A replay that writes nothing is marked as wrong, and a kernel that cannot be captured is left out.
    """
    replays = {"works": lambda call: call, "writes nothing": lambda call: lambda: None}
    with p2p_on_cpu(), EPContext.from_groups(device=rank_device(), deadline_s=30, max_tokens=8) as context:
        ((batch, point, _, reference),) = train.layer_lines(context, "m", CONFIG, [6], OPTIONS, RATES)
        given = (context, CONFIG, batch, point, OPTIONS, reference)
        assert train.captured_line(*given) is None
        can = dataclasses.replace(ReferenceExperts.capabilities, cuda_graph=True)
        for what, replay in replays.items():
            graph = mock.Mock(
                side_effect=lambda call, repeat, replay=replay: (call(), SimpleNamespace(replay=replay(call)))[1]
            )
            with mock.patch.object(ReferenceExperts, "capabilities", can), mock.patch.object(train, "captured", graph):
                line = train.captured_line(*given)
            assert line.name == "reference + nvlink_p2p, CUDA graph"
            assert line.wrong == (what == "writes nothing")
            assert line.forward_ms is None
            assert line.step_ms > 0


# --- floors, tables ------------------------------------------------------------------------------------------------


def test_a_rank_may_hold_fewer_experts_than_a_router_has_groups():
    config = train.share("deepseek-v3", 8)
    assert (config.num_experts, config.routing.num_groups) == (8, 1)


def test_the_floor_of_a_step():
    many, few = floors.Load(4, 1e6, 0, 0), floors.Load(4, 1, 0, 0)
    numbers = 32 * 3 * 16  # weights of an expert
    assert floors.training_operations(CONFIG, many) == 3 * 2e6 * numbers
    assert floors.training_us(CONFIG, many, RATES) == pytest.approx(1e6 * 6e6 * numbers / 800e12)
    assert floors.training_us(CONFIG, few, RATES) == pytest.approx(1e6 * 3 * 4 * numbers * 2 / 4e12)
    assert floors.training_operations(CONFIG, many, frozen=True) == 2 * 2e6 * numbers
    assert floors.training_us(CONFIG, many, RATES, frozen=True) == pytest.approx(1e6 * 4e6 * numbers / 800e12)
    assert floors.training_us(CONFIG, few, RATES, frozen=True) == pytest.approx(1e6 * 2 * 4 * numbers * 2 / 4e12)


def line_of(
    owner: str, name: str, ms: float, *, tokens: int = 16, part: str = "layer", error: float = 0.0
) -> TrainLine:
    return TrainLine("m", 2, part, tokens, 4 * tokens, owner, name, ms / 3, ms, 0.5, 400.0, error, peak_mib=ms * 10)


def test_the_fastest_right_layer_by_hand_is_what_counts():
    lines = [
        line_of("ours", "a", 2.0),
        line_of("by hand", "eager", 6.0),
        line_of("by hand", "compiled", 4.0),
        line_of("by hand", "wrong", 1.0, error=1.1 * train_report.ERROR),
        line_of("ours", "a", 2.0, tokens=32),
        line_of("by hand", "eager", 5.0, part="experts"),
    ]
    train_report.compared(lines)
    assert [line.x_hand for line in lines] == [2.0, 4 / 6, 1.0, 4.0, None, 1.0]


def test_tables_csv_and_panels(tmp_path):
    lines = [line_of(*of, tokens=tokens) for tokens in (16, 32) for of in (("ours", "a", 2.0), ("by hand", "b", 4.0))]
    lines[0].error, lines[1].forward_ms = float("nan"), None
    console = Console(width=160, record=True)
    console.print(*train_report.tables(train_report.compared(lines)))
    text = console.export_text()
    assert text.count("floor 0.500 ms") == 2, "a table for each point"
    assert text.count("WRONG") == 1
    harness.write(lines, tmp_path / "lines.csv")
    # compare by repr, because NaN does not equal itself
    assert repr(train_report.read(tmp_path / "lines.csv")) == repr(lines)
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    train_report.plot(lines, tmp_path / "lines.png")
    assert (tmp_path / "lines.png").stat().st_size > 10_000


def test_panels_name_the_model_and_the_part():
    """Each panel names the model and the part. A mock stands in for matplotlib, which need not be installed."""
    lines = [line_of("ours", "a", 2.0, tokens=tokens) for tokens in (32, 16)]
    lines += [dataclasses.replace(lines[0], part="experts", owner="by hand", peak_mib=9.0)]
    lines += [dataclasses.replace(lines[0], part="experts", error=float("nan"))]  # a wrong line has no curve
    figure = mock.MagicMock()
    above, below = ([mock.MagicMock(), mock.MagicMock()] for _ in range(2))
    figure.subplots.return_value = above, below
    with mock.patch.dict("sys.modules", {"matplotlib.figure": SimpleNamespace(Figure=lambda **_: figure)}):
        train_report.plot(lines, "lines.png")
    figure.savefig.assert_called_once_with("lines.png", dpi=110)
    for row, label in ((above, "forward + backward, ms"), (below, "peak memory, MiB")):
        titles = [(axes.set.call_args.kwargs["title"], axes.set.call_args.kwargs["ylabel"]) for axes in row]
        assert titles == [(lines[0].model, label), (f"{lines[0].model}, local experts", label)]
    curves = [[call.args[:3] for call in axes.plot.call_args_list] for axes in above]
    assert curves[0] == [([16, 32], [2.0, 2.0], "o-"), ([16, 32], [0.5, 0.5], "k:")]
    assert ([32], [2.0], "x--") in curves[1]
    assert ([], [], "o-") in curves[1]
