"""Test the `scaling` command: its tables, and measured times beside the model of larger EP groups."""

from __future__ import annotations

import csv
import dataclasses
import sys
from pathlib import Path

import pytest

from ep_moe import ConfigError, MoEConfig
from ep_moe.bench import all2all, scaling
from ep_moe.bench.floors import KINDS, floor
from ep_moe.bench.wire_rows import deduplicated, row_bytes, two_level
from ep_moe.config import Wire, load_model_config

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "benchmarks"


# --- measured times ------------------------------------------------------------------------------------------------


def test_no_layer_was_measured_below_its_floor():
    lines = scaling.layer_lines(DOCS / "layer-h200.csv", 4)
    assert lines
    for cells in lines:
        assert float(cells[-1]) >= float(cells[-2]) >= 1, cells


def test_transports_were_measured_a_little_above_their_bytes():
    """Measured transports take at least the time of the model's bytes, and FlashInfer's takes little more.

    If the model missed bytes that travel, FlashInfer's ratio would be larger.
    """
    lines = scaling.slopes(DOCS / "all2all-h200.csv", 4)
    assert all(line.slope / line.model >= 1 for line in lines)
    best = [line.slope / line.model for line in lines if line.transport == "flashinfer_nvlink"]
    assert best
    assert max(best) < 1.15  # close to the floor, by this project's definition


def write(file: Path, *lines: str) -> Path:
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize(
    "text",
    [
        "model,tokens,us\ndemo,abc,5\n",
        "model,tokens,us,ranks\ndemo,0,5,2\n",
        "transport,rows,hidden,tokens,us,captured,wire_bytes,floor_us\n"
        + "".join(f"local,plain,2048,{count},9,True,0,0.0\n" for count in (1, 16, 128)),
    ],
    ids=["no number", "no tokens", "one rank"],
)
def test_a_file_of_other_cells_is_refused(tmp_path, monkeypatch, capsys, text):
    file = tmp_path / "times.csv"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["scaling", "--models", "qwen3-30b-a3b", "--measured", str(file)])
    with pytest.raises(SystemExit) as end:
        scaling.main()
    assert end.value.code == 2
    assert "times.csv holds no times of two ranks or more" in capsys.readouterr().err


def test_ranks_weights_and_rows_of_a_measured_line_are_its_own(tmp_path):
    file = write(
        tmp_path / "layer.csv",
        "model,ranks,tokens,name,weights,rows,us",
        "qwen3-30b-a3b,2,128,ours,fp8,bf16 / bf16,100",
        "qwen3-30b-a3b,2,64,peer,fp8,fp8 / bf16,100",
        "qwen3-30b-a3b,2,16,peer,fp8,fp8 / fp8,100",
        "qwen3-30b-a3b,2,16,ours,bf16,plain,",
        "qwen3-30b-a3b,2,16,ours,mxfp4,plain,100",
    )
    config, expected = load_model_config("qwen3-30b-a3b").moe, []
    for tokens, name, rows, wire in (
        (16, "peer", "fp8 / fp8", Wire(dispatch="fp8_block", combine="fp8")),
        (64, "peer", "fp8 / bf16", Wire(dispatch="fp8_block")),
        (128, "ours", "bf16 / bf16", Wire()),
    ):
        least = floor(config, dataclasses.replace(KINDS["fp8"], wire=wire), 2, tokens)
        cells = ["qwen3-30b-a3b", "2", str(tokens), name, "fp8", rows, "100", str(least)]
        expected.append([*cells, f"{100 / least.in_turn:.2f}", f"{100 / least.overlapped:.2f}"])
    assert scaling.layer_lines(file, 4) == expected


def test_lines_that_name_a_kernel_a_transport_and_a_scheme_are_read_too(tmp_path):
    head = "model,tokens,experts,scheme,rows,all2all,us"
    lines = [
        "qwen3-30b-a3b,128,a,none,plain,b,100",
        "qwen3-30b-a3b,128,a,fp8_block,fp8_block,b,100",
    ]
    found = scaling.layer_lines(write(tmp_path / "layer.csv", head, *lines), 4)
    config = load_model_config("qwen3-30b-a3b").moe
    assert [cells[1:5] for cells in found] == [["4", "128", "a b", "bf16"], ["4", "128", "a b", "fp8"]]
    assert [cells[7] for cells in found] == [str(floor(config, KINDS[name], 4, 128)) for name in ("bf16", "fp8")]


def test_slopes_leave_out_eager_lines_and_use_the_rate_of_the_run(tmp_path):
    head = "transport,rows,hidden,tokens,us,captured,wire_bytes,floor_us,raw_us"
    one = [f"nvlink_p2p,plain,256,{tokens},{10 + 2 * tokens},True,1000,10," for tokens in (100, 1, 10)]
    eager = [f"torch_a2a,plain,256,{tokens},{500},False,1000,10," for tokens in (1, 10, 100)]
    (found,) = scaling.slopes(write(tmp_path / "a2a.csv", head, *one, *eager), 4)
    assert (found.fixed, found.slope) == (12, pytest.approx(2))
    config = MoEConfig(hidden_size=256, intermediate_size=1, num_experts=all2all.EXPERTS, top_k=all2all.TOP_K)
    # the measured rate is 1000 bytes / 10 us
    assert found.model == pytest.approx(sum(deduplicated(config, 4, 4).bytes(config, Wire())) / 100)


def test_a_file_without_a_column_or_none_is_refused(tmp_path):
    for text in ("model,us\na,1", "model,tokens,us"):
        with pytest.raises(ConfigError, match="has no column"):
            scaling.layer_lines(write(tmp_path / "broken.csv", text), 4)
    with pytest.raises(ConfigError, match=r"none\.csv does not exist"):
        scaling.layer_lines(tmp_path / "none.csv", 4)


# --- the command ---------------------------------------------------------------------------------------------------


def run(monkeypatch, *words: object) -> list[dict[str, str]]:
    """Run the command, and return the lines of the CSV file that `words` ends with."""
    monkeypatch.setattr(sys, "argv", ["scaling", *map(str, words)])
    scaling.main()
    with Path(words[-1]).open(newline="") as text:
        return list(csv.DictReader(text))


def test_command_prints_tables_and_writes_files(tmp_path, monkeypatch, capsys):
    picture = tmp_path / "scaling.png"
    words = ["--models", "qwen3-30b-a3b", "--ranks", 1, 4, "--ep", "--tokens", 128, "--totals", 64]
    files = [DOCS / name for name in ("layer-h200.csv", "all2all-h200.csv")]
    lines = run(monkeypatch, *words, "--measured", *files, "--plot", picture, "--csv", tmp_path / "scaling.csv")
    printed = capsys.readouterr().out
    config = load_model_config("qwen3-30b-a3b").moe
    for kind in KINDS.values():
        for ranks, tokens in ((1, 128), (4, 128), (1, 64), (4, 16)):
            assert str(floor(config, kind, ranks, tokens)) in printed
    assert "flashinfer_mega_bf16" in printed
    assert [(line["weights"], line["ranks"], float(line["tokens"]), line["all2all"]) for line in lines] == [
        (weights, ranks, tokens, "flat")
        for weights in ("bf16", "fp8")
        for ranks, both in (("1", (64, 128)), ("4", (16, 128)))
        for tokens in both
    ]
    for line in lines:
        parts = [float(line[name]) for name in ("weights_us", "products_us", "out_us", "back_us")]
        assert float(line["in_turn_us"]) == pytest.approx(max(parts[:2]) + sum(parts[2:]))
    assert picture.stat().st_size > 0


def test_command_answers_for_320_ranks_in_two_levels(tmp_path, monkeypatch, capsys):
    words = ["--models", "deepseek-v3", "--ranks", 8, "--ep", 16, 320, "--tokens", 128, "--totals", 64]
    lines = run(monkeypatch, *words, "--csv", tmp_path / "scaling.csv")
    printed = capsys.readouterr().out
    assert "320 + 64" in printed
    config = load_model_config("deepseek-v3").moe
    (line,) = (one for one in lines if (one["ranks"], one["all2all"], one["weights"]) == ("320", "two_level", "fp8"))
    rows, row = two_level(config, 320, 8, 64), sum(row_bytes(config, KINDS["fp8"].wire, 8))
    assert line["redundant"] == "64"
    assert float(line["nvlink_bytes"]) == pytest.approx(128 * rows.near * row)
    assert float(line["nic_bytes"]) == pytest.approx(128 * rows.far * row)
    flat, two = (
        floor(config, KINDS["fp8"], 320, 128, way=way, redundant=64).in_turn for way in (deduplicated, two_level)
    )
    assert f"{flat:.0f} / {two:.0f}" in printed
    assert {one["ranks"] for one in lines} == {"8", "16", "320"}
    assert [one["all2all"] for one in lines if one["ranks"] == "8"] == ["flat"] * 4
    fixed = run(monkeypatch, *words, "--redundant", 0, "--csv", tmp_path / "fixed.csv")
    assert {one["redundant"] for one in fixed} == {"0"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ep", "12"], "per_host=8 must divide ranks=12 or be larger"),
        (["--redundant", "-1"], "--redundant: must be an integer of at least 0, got '-1'"),
        (["--ranks", "2", "--ep", "--redundant", "999"], "num_redundant=999"),
    ],
)
def test_command_refuses_groups_that_cannot_be(words, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling", "--models", "deepseek-v3", *words])
    with pytest.raises(SystemExit) as end:
        scaling.main()
    assert end.value.code == 2
    assert says in capsys.readouterr().err
