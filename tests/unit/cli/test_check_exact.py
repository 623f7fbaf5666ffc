"""`ep-moe check-exact` from end to end."""

import contextlib
import json

import pytest
from typer.testing import CliRunner

from ep_moe import ConfigError
from ep_moe.cli import check_exact
from ep_moe.cli.app import app
from ep_moe.cli.check_exact import LOGITS, Found
from ep_moe.parallel.groups import TorchrunEnv

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(TorchrunEnv.present(), reason="starts ranks of its own")

SMALL = ("--ranks", "1", "2", "--prompts", "3", "--window", "20")


def invoke(*args):
    return CliRunner().invoke(app, ["check-exact", *args], catch_exceptions=False)


def found(batching="prompts", **digests):
    return Found(ranks=1, expert_map="linear", all2all="local", experts="reference", batching=batching, digests=digests)


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
    assert len({run["logits"] for run in answer["runs"]}) == 2  # None where the layers ran alone
    assert {run["first_difference"] for run in answer["runs"]} == {None}


def test_without_exact_the_first_layer_that_differs_is_named():
    result = invoke(*SMALL, "--no-exact")
    assert result.exit_code == 1
    assert "differ from the first" in result.stdout
    assert "first at model.layers." in result.stdout


def test_the_first_difference_is_in_the_order_of_layers():
    first = found(a="1", b="2", c="3", **{LOGITS: "4"})
    assert first.differs_from(first) is None
    assert found("all at once", a="1", b="2", c="3").differs_from(first) is None
    assert found("all at once", a="1", b="x", c="x").differs_from(first) == "b"
    assert found(a="1", b="2", c="3", **{LOGITS: "x"}).differs_from(first) == LOGITS
    assert found(a="1", b="2").checksum != found(a="1", b="3").checksum


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
