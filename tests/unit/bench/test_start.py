"""Test that a benchmark which cannot run prints one sentence and exits with code 2 before it times anything."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

from ep_moe.bench import harness
from ep_moe.bench.harness import benchmark_main
from ep_moe.cli.app import app
from ep_moe.errors import ConfigError

NEED_RANKS = ("layer", "all2all", "overlap", "rebalance")


def ended(monkeypatch, capsys, name, *words, cuda=False):
    """Run a benchmark that must exit with code 2, and return its error output as one line."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"ep_moe.bench.{name}").main()
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert "Traceback" not in err
    return re.sub(r"\s+", " ", err)


@pytest.mark.parametrize("name", [*NEED_RANKS, "experts"])
def test_a_gpu_is_needed(monkeypatch, capsys, name):
    assert "torch sees none here; see ep-moe doctor" in ended(monkeypatch, capsys, name)


@pytest.mark.parametrize("name", [*NEED_RANKS, "train", "weight_push"])
def test_ranks_are_needed(monkeypatch, capsys, name):
    for variable in ("TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    assert "start it with torchrun" in ended(monkeypatch, capsys, name, cuda=True)


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("layer", "--models nope", "no bundled config is named 'nope'"),
        ("rebalance", "--model nope", "no bundled config is named 'nope'"),
        ("experts", "--models qwen3-30b-a3b nope", "no bundled config is named 'nope'"),
        ("layer", "--tokens 16 0", "argument --tokens: must be an integer of at least 1, got '0'"),
        ("all2all", "--hidden -1", "--hidden"),
        ("overlap", "--tokens 1.5", "argument --tokens: must be an integer of at least 1, got '1.5'"),
        ("rebalance", "--layers x", "argument --layers: must be an integer of at least 1, got 'x'"),
        ("layer", "--experts nope", "argument --experts: invalid choice: 'nope'"),
        ("all2all", "--transports nope", "argument --transports: invalid choice: 'nope'"),
        ("overlap", "--transports nope", "argument --transports: invalid choice: 'nope'"),
        ("experts", "--schemes nope", "argument --schemes: invalid choice: 'nope'"),
        ("scaling", "--csv /no/folder.csv", "--csv /no/folder.csv is in a folder that does not exist; make it first"),
        ("layer", "--plot /no/folder.png", "--plot /no/folder.png is in a folder that does not exist"),
        ("layer_report", "none.csv", "none.csv is not a file of bench.layer"),
        ("scaling", "--csv .", "--csv . is a folder; name a file in it"),
        ("scaling", "--plot out.nope", "--plot out.nope must end in one of .png, .svg, .pdf"),
        ("train_report", "none.csv", "none.csv is not a file of bench.train"),
        ("train", "--models demo --rows 63 --slots 8", "--rows must be multiples of 2 (demo's top_k), got 63"),
        ("train", "--models demo --slots 1", "top_k"),
        ("train", "--models demo --slots 8", "3 ranks do not divide them"),
        ("train", "--transports flashinfer_nvlink", "argument --transports: invalid choice: 'flashinfer_nvlink'"),
        ("planner", "--deepseek none.py", "--deepseek none.py is no .py file"),
        ("layer", "--memory -1", "argument --memory: must be an integer of at least 1, got '-1'"),
        ("layer", "--tokens 16 --memory 128", "--memory 128 is not among --tokens [16]; add it there"),
        ("layer", "--models demo", "deals 16 experts to the ranks, as many to each; 3 ranks do not divide them"),
        ("overlap", "--models demo", "3 ranks do not divide them"),
        ("rebalance", "--model demo", "3 ranks do not divide them"),
        ("weight_push", "--trainer-ep 2", "--trainer-ep must divide the number of ranks, got 2 of 3"),
        ("weight_push", "--schemes nope", "argument --schemes: invalid choice: 'nope'"),
        ("all2all", "", "deals 128 experts to the ranks, as many to each; 3 ranks do not divide them"),
    ],
)
def test_arguments_are_checked_first(monkeypatch, capsys, name, words, sentence):
    monkeypatch.setattr(harness, "_check_machine", lambda where: None)
    ranks = "2" if "memory" in words else "3"
    for variable, value in {"RANK": "0", "WORLD_SIZE": ranks, "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(variable, value)
    assert sentence in ended(monkeypatch, capsys, name, *words.split())


def test_nothing_measured_is_said():
    harness.check_measured([1])
    with pytest.raises(ConfigError, match="nothing was measured"):
        harness.check_measured([])


def test_rank_0_says_it_alone(monkeypatch, capsys):
    @benchmark_main
    def main():
        raise ConfigError("no")

    for rank, said in (("1", ""), ("0", "error: no\n")):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "here"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            main()
        assert capsys.readouterr().err == said


def test_the_command_ends_as_the_module(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = CliRunner().invoke(app, ["bench", "layer", "--models", "demo"])
    assert found.exit_code == 2
    assert "torch sees none here" in found.output


def test_rank_0_prints_json_alone(monkeypatch, capsys):
    @benchmark_main
    def main():
        sys.stdout.write("a table\n")
        return [harness.Where.GPU]

    for rank in ("0", "1"):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "here"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["bench", "--json"])
        main()
        out, err = capsys.readouterr()
        assert (out == "") == (rank == "1")
        assert err == "a table\n"
        monkeypatch.setattr(sys, "argv", ["bench"])
        main()
        assert capsys.readouterr() == ("a table\n", "")
