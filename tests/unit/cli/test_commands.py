"""Test what all commands share: models, JSON, log records, suggestions, exit codes, and the page about them."""

import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from ep_moe import ConfigError, PeerTimeout, __version__
from ep_moe.bench import planner
from ep_moe.bench.harness import json_text
from ep_moe.cli import app as cli
from ep_moe.cli import explain as explain_module
from ep_moe.cli.output import EXIT_CODES, LEVELS, log_records, model_named
from ep_moe.cli.run import DEMO, RunReport
from ep_moe.config import load_model_config
from ep_moe.eplb import LoadTrace
from ep_moe.integrations import model_name
from ep_moe.integrations.model_name import ModelKind, checkpoint_named, kind_of, sizes_named
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.parallel.local_launch import RanksFailed
from ep_moe.registry import targets as names
from ep_moe.selection.explain import BackendChoice
from ep_moe.selection.tuned import Measured, Tuned
from tests.fixtures.commands_in_turn import MARK
from tests.fixtures.programs import ran

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "cli.md").read_text()
COMMANDS = typer.main.get_command(cli.app).commands
EXPLAIN = ("explain", "qwen3-30b-a3b", "--dp", "4")
forks = pytest.mark.skipif(TorchrunEnv.present(), reason="starts ranks of its own")


def invoke(*args, code=0, env=None):
    result = CliRunner().invoke(cli.app, [str(arg) for arg in args], catch_exceptions=False, env=env)
    assert result.exit_code == code, result.output
    return result


def under(title):
    """Return the rows of the first table in a section of the page, as lists of cells."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def object_of(result):
    """Return the one JSON object on stdout."""
    lines = result.stdout.splitlines()
    assert len(lines) == 1, result.stdout
    return json.loads(lines[0])


# --- the page ------------------------------------------------------------------------------------------------------


def test_every_command_is_on_the_page():
    rows = re.findall(r"^\| `ep-moe ([\w-]+)", PAGE, re.M)
    assert sorted(rows) == sorted(COMMANDS)


def test_exit_codes_are_those_of_the_page_and_of_help():
    assert {int(code): meaning for code, meaning in under("Exit codes")} == EXIT_CODES
    help_text = " ".join(invoke("--help", env={"COLUMNS": "300"}).output.split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code}: {meaning}" in help_text


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_options_in_common(name):
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    wanted = set(re.findall(r"--[a-z-]+", " ".join(row[0] for row in under("Options in common"))))
    assert wanted == {"--json", "--quiet", "--log-level"}
    # a benchmark parses --json itself
    assert wanted - ({"--json"} if name == "bench" else set()) <= options


def tuned(options, say):
    line = Measured(tokens=1, experts="reference", all2all="allgather", us=float("inf"))
    say("measuring")
    return Tuned(machine={"device": "cpu"}, layer={"H": 8}, versions={}, buckets=(line,), measured=(line,))


def trace(folder):
    LoadTrace(np.ones((4, 2, 8), dtype=np.int64), np.full(4, 8), "mixtral-8x7b").save(folder / "trace.npz")
    return folder / "trace.npz"


@forks
@pytest.mark.parametrize("name", ["run", "doctor", "explain", "fit", "plan", "tune", "bench"])
def test_json_has_the_fields_of_the_page(name, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "run_tune", tuned)
    monkeypatch.setattr(planner, "CASES", (planner.Case(2, 8, 8, 4),))
    words = {
        "run": ("--text-tokens", "512", "--dp", "1", "--no-reference"),
        "explain": EXPLAIN[1:],
        "fit": ("qwen3-30b-a3b", "--gpus", "16"),
        "plan": (trace(tmp_path), "--ranks", "2", "16"),
        "tune": ("--out", tmp_path / "tuned.json"),
        "bench": ("planner", "--repeat", "1"),
    }
    if name == "run":
        pytest.importorskip("transformers")
    found = object_of(invoke(name, *words.get(name, ()), "--json"))
    (fields,) = [row[1] for row in under("Fields of `--json`") if row[0] == f"`{name}`"]
    assert list(found) == re.findall(r"`(\w+)`", fields.partition(";")[0])


def test_bench_lines_are_numbers(monkeypatch):
    monkeypatch.setattr(planner, "CASES", (planner.Case(2, 8, 8, 4),))
    result = invoke("bench", "planner", "--repeat", "1", "--json")
    found = object_of(result)
    assert found["bench"] == "planner"
    assert [line["of"] for line in found["lines"]] == ["2 x 8 -> 8 on 4"] * 3
    assert all(line["ms"] > 0 and line["DS ms"] is None for line in found["lines"])
    assert "numpy" in result.stderr, "the table"


def test_the_scaling_model_has_json_too():
    result = invoke("bench", "scaling", "--models", "demo", "--ranks", "4", "--tokens", "16", "--totals", "64", "--js")
    assert object_of(result)["lines"][0]["model"] == "demo", "argparse takes an option's beginning"


# --- JSON ----------------------------------------------------------------------------------------------------------


def test_json_of_a_no_and_of_an_error():
    assert object_of(invoke("explain", "demo", "--quantization", "fp8_block", "--json", code=1))["chosen"] is None
    refused = invoke("explain", "demo", "--dtype", "int8", "--json", code=2)
    assert refused.stdout == ""
    assert refused.stderr.startswith("error: dtype must be one of")


def test_rank_0_alone_prints():
    for words in (EXPLAIN, (*EXPLAIN, "--json"), ("doctor",), ("explain", "nothing")):
        result = CliRunner().invoke(cli.app, words, env={"RANK": "1"})
        assert (result.stdout, result.stderr) == ("", ""), words
    assert invoke(*EXPLAIN, env={"RANK": "0"}).stdout


def test_json_has_no_nan():
    assert json_text({"a": [float("nan"), np.array([1.5]), Path("b")], "c": ModelKind.SIZES}) == (
        '{"a": [null, [1.5], "b"], "c": "sizes"}'
    )


def test_what_a_library_prints_is_not_between(monkeypatch):
    def noisy(*_):

        sys.stdout.write("hello of a library\n")
        return {}

    monkeypatch.setattr(cli.doctor_report, "runs", noisy)
    result = invoke("doctor", "--json")
    assert "torch" in object_of(result)["versions"]
    assert "hello of a library" in result.stderr


# --- models --------------------------------------------------------------------------------------------------------


def test_forms_of_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert kind_of("demo") is kind_of("nowhere/other.toml") is ModelKind.SIZES
    assert kind_of("org/model") is kind_of(str(tmp_path)) is ModelKind.CHECKPOINT
    (tmp_path / "demo").mkdir()
    assert kind_of("demo") is ModelKind.CHECKPOINT, "a folder comes first"
    with pytest.raises(ConfigError, match=r"'qwen3-30b-a3' \(did you mean 'qwen3-30b-a3b'\?\); there are deepseek"):
        kind_of("qwen3-30b-a3")


def test_a_checkpoint_needs_transformers(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(model_name.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"is a checkpoint, whose config.json needs transformers; install ep-moe"):
        sizes_named(str(tmp_path))


def test_weights_are_needed_to_run():
    assert checkpoint_named("org/model") == "org/model"
    assert checkpoint_named("demo") is None
    assert "mixtral-8x7b is a config: it has sizes and no weights" in invoke("run", "mixtral-8x7b", code=2).stderr


def test_a_folder_has_the_sizes_of_its_config():
    pytest.importorskip("transformers")
    found, bundled = sizes_named(str(DEMO)), load_model_config("demo").moe
    assert (found.num_experts, found.hidden_size, found.top_k) == (16, bundled.hidden_size, bundled.top_k)
    both = [object_of(invoke("explain", name, "--dp", "4", "--json"))["chosen"] for name in (DEMO, "demo")]
    assert both[0] == both[1]


def test_plan_takes_a_folder(tmp_path):
    pytest.importorskip("transformers")
    assert "the model has 16 experts, the trace 8" in (
        invoke("plan", trace(tmp_path), "--ranks", "2", "--model", DEMO, code=2).stderr
    )


def test_no_model_and_two_models():
    said = invoke("explain", code=2).stderr
    assert "explain needs a model as its first argument" in said
    assert "bundled are deepseek-v3, demo" in said
    assert " [MODEL]" in invoke("explain", "--help").output
    assert "[[" not in invoke("explain", "--help").output
    assert "takes one model, got demo and demo" in invoke("explain", "demo", "--config", "demo", code=2).stderr
    assert model_named("run", None, "demo", model=None) == "demo"


def test_options_of_an_earlier_release_work(monkeypatch):
    old, new = (invoke("explain", *words, "--dp", "4") for words in (("--config", "demo"), ("demo",)))
    assert old.stdout == new.stdout
    assert old.stderr == "note: --config is deprecated, the next release has none; write ep-moe explain demo\n"
    assert new.stderr == ""
    seen = []
    monkeypatch.setattr(cli, "run_model", seen.append)
    assert "write ep-moe run org/model" in invoke("run", "--model", "org/model").stderr
    assert seen[0].model == "org/model"
    assert "--config" not in invoke("explain", "--help").output


# --- explain -------------------------------------------------------------------------------------------------------


def test_explain_groups_what_is_refused():
    short, full = (invoke(*EXPLAIN, *more).stdout.splitlines() for more in ((), ("--all",)))
    pairs = object_of(invoke(*EXPLAIN, "--json"))["pairs"]
    refused = [pair for pair in pairs if pair["status"] == "refused"]
    assert len(full) == len(pairs)
    able = len(pairs) - len(refused)
    assert short[:able] == full[:able]
    assert short[0].startswith("chosen")
    assert short[able : able + 2] == ["", f"refused: {len(refused)} pairs, by reason (--all lists the pairs)"]
    counts = [int(line.split()[0]) for line in short[able + 2 :]]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == len(refused)
    own = {pair["reason"].partition(": ")[0] for pair in refused} & {*names("dispatchers"), *names("experts")}
    shown = " ".join(short[able + 2 :])
    assert own
    assert all(backend in shown for backend in own), "whatever reason they share"
    assert len(short) < len(full) / 2


def test_groups_name_what_their_pairs_share():
    refused = [
        ("a", "x", "one"),
        ("a", "y", "two"),
        ("a", "z", "two"),
        ("b", "x", "3"),
        ("c", "x", "3"),
        ("b", "y", "3"),
    ]
    rows = [BackendChoice(*names, "refused", reason) for *names, reason in refused]
    assert explain_module.grouped(rows)[2:] == [
        "   3  2 transports, 2 kernels: 3", "   2  a with 2 kernels: two", "   1  a with x: one",
    ]  # fmt: skip
    rows = [BackendChoice(*pair, "refused", f"{pair[0]}: is absent") for pair in ("bx", "by", "ax")]
    assert explain_module.grouped(rows)[2:] == ["   3  a, b: is absent"]
    assert explain_module.grouped([]) == []


# --- names, levels and ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("explian demo", "Did you mean 'explain'"),
        ("explain dem", "did you mean 'demo'"),
        ("explain demo --all2all algather", "did you mean 'allgather'"),
        ("explain demo --experts referense", "did you mean 'reference'"),
        ("explain demo --experts flashinfer_mega_bf", "did you mean 'flashinfer_mega_bf16'"),
        ("explain demo --quantization fp8_blok", "did you mean 'fp8_block'"),
        ("explain demo --wire fp8_blok", "did you mean 'fp8_block'"),
        ("explain demo --log-level waning", "did you mean 'warning'"),
        ("run --all2all algather", "did you mean 'allgather'"),
        ("run --experts flashinfer_mega_bf", "did you mean 'flashinfer_mega_bf16'"),
        ("run --quantization fp8_blok", "did you mean 'fp8_block'"),
        ("tune --quantization fp8_blok", "did you mean 'fp8_block'"),
        ("bench planer", "did you mean 'planner'"),
    ],
)
def test_the_nearest_name_is_suggested(words, wanted):
    assert wanted in " ".join(invoke(*words.split(), code=2, env={"COLUMNS": "200"}).stderr.split())


def test_doctor_says_that_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("ep_moe.cli.doctor.gpus", list)
    assert "no GPU" in invoke("doctor").stdout.splitlines()


def test_bench_help_lists_the_benchmarks():
    lines = invoke("bench", "--help").stdout.splitlines()
    for name in cli._BENCHES:
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert len(line.split()) > 4, line
    assert "--repeat" in invoke_module_help("planner")


def invoke_module_help(name):
    result = CliRunner().invoke(cli.app, ["bench", name, "--help"])
    assert result.exit_code == 0
    return result.stdout


def test_version():
    assert invoke("--version").stdout == f"ep-moe {__version__}\n"


def test_progress_is_not_the_result(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "run_tune", tuned)
    file = tmp_path / "tuned.json"
    assert "measuring" in invoke("tune", "--out", file).stdout
    quiet = invoke("tune", "--out", file, "--quiet")
    assert "measuring" not in quiet.output
    assert "chosen" in quiet.stdout
    beside = invoke("tune", "--out", file, "--json")
    assert beside.stderr == "measuring\n"
    assert object_of(beside)["buckets"][0]["us"] is None


@pytest.mark.parametrize(
    ("words", "heard"),
    [
        ((), ["WARNING"]),
        (("--log-level", "info"), ["INFO", "WARNING"]),
        (("--log-level", "error"), []),
        (("--quiet", "--log-level", "debug"), []),
    ],
)
def test_levels_of_log_records(words, heard, monkeypatch):
    def logging_runs():
        for level in (logging.INFO, logging.WARNING):
            logging.getLogger("ep_moe.room").log(level, "heard")
        return {}

    monkeypatch.setattr(cli.doctor_report, "runs", logging_runs)
    logger = logging.getLogger("ep_moe")
    before = logger.level, list(logger.handlers)
    result = invoke("doctor", *words)
    assert re.findall(r"(\w+) ep_moe\.room: heard", result.stderr) == heard
    assert (logger.level, logger.handlers) == before


def test_ranks_are_named_in_log_records(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    with log_records("info"):
        logging.getLogger("ep_moe.room").info("heard")
    assert capsys.readouterr().err == "INFO ep_moe.room [rank 3]: heard\n"
    assert list(LEVELS) == ["debug", "info", "warning", "error"]


RUN = ("run", "--text-tokens", "512", "--dp", "1", "--no-reference")
RUNS = {
    "piped": RUN,
    "info": (*RUN, "--json", "--log-level", "info"),
    "warning": (*RUN, "--json", "--log-level", "warning"),
}


@pytest.fixture(scope="module")
def said_by_runs():
    """Return what each of RUNS wrote to stdout and stderr.

    They run in one separate process, because a fork server keeps the stderr that it started with.
    """
    pytest.importorskip("transformers")
    code, *written = ran("tests/fixtures/commands_in_turn.py", json.dumps(list(RUNS.values())))
    assert code == 0, written
    out, err = (text.split(f"\n{MARK}\n")[:-1] for text in written)
    return dict(zip(RUNS, zip(out, err, strict=True), strict=True))


@forks
@pytest.mark.parametrize("level", ["info", "warning"])
def test_ranks_that_are_forked_log_too(level, said_by_runs):
    out, err = said_by_runs[level]
    assert json.loads(out)["tokens"] == 512
    said = re.findall(r"^INFO ep_moe\.(\w+) \[rank 0\]: ", err, re.M)
    assert (set(said) >= {"selection", "context", "integrations"}) == (level == "info")
    assert level == "info" or not said


@forks
def test_a_run_that_is_piped(said_by_runs):
    """A run whose output is piped prints a line at the end of each step, and no progress bars."""
    out, err = said_by_runs["piped"]
    assert "perplexity" in out
    assert "\r" not in err
    lines = [line for line in err.splitlines() if re.match(r"(run|loading|reading): ", line)]
    wanted = ["run: starting 1 rank on", "loading: 48 of 48 experts", "reading: 1 of 1 forward"]
    assert [line[: len(want)] for line, want in zip(lines, wanted, strict=True)] == wanted


def test_codes_of_ends(monkeypatch):
    """Exit codes depend on the error: 2 for an error of this package, 130 for Ctrl-C.

    Other errors raise a traceback.
    """

    def ends(error):
        def run(_):
            raise error

        return run

    lost = RanksFailed("1 of 4 ranks failed", {2: PeerTimeout("rank 1 is gone")})
    for error, code in ((lost, 2), (ConfigError("no"), 2), (KeyboardInterrupt(), 130)):
        monkeypatch.setattr(cli, "run_model", ends(error))
        result = invoke("run", code=code)
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1, result.stderr
    monkeypatch.setattr(cli, "run_model", ends(RanksFailed("1 of 4 ranks failed", {})))
    with pytest.raises(RanksFailed, match="1 of 4 ranks failed"):
        invoke("run")
    monkeypatch.setattr(cli, "run_model", lambda _: SimpleNamespace())  # a bug: the result is not a report
    with pytest.raises(AttributeError, match="no attribute 'title'"):
        invoke("run")


@pytest.mark.parametrize(
    ("reference", "exact", "code"),
    [(2.0, True, 0), (2.5, True, 1), (2.5, False, 0), (None, True, 0)],
)
def test_a_perplexity_that_is_not_the_references_is_an_exit_code(reference, exact, code, monkeypatch):
    sizes = {"expert_load": [[1, 1]], "rank_load": [[2]], "stages": {"experts": 1.0}, "forwards": 1}
    report = RunReport(title="demo", tokens=2, perplexity=2.0, reference=reference, exact=exact, **sizes)
    monkeypatch.setattr(cli, "run_model", lambda _: report)
    assert object_of(invoke("run", "--json", code=code))["agrees"] is (reference != 2.5)


# --- benchmarks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_bench_alone_lists_the_benchmarks(words):
    assert "planner" in invoke("bench", *words).stdout


def test_benchmarks_take_models_as_all_commands_do():
    """Benchmarks take models as all commands do.

    A model is a folder, a bundled config, or the option of an earlier release, before or after other options.
    """
    pytest.importorskip("transformers")
    sizes = ("--ranks", "4", "--tokens", "16", "--totals", "64", "--json")
    for words in ((DEMO, *sizes), ("demo", *sizes), (*sizes, "demo"), ("--models", "demo", *sizes)):
        lines = object_of(invoke("bench", "scaling", *words))["lines"]
        name = str(DEMO) if words[0] == DEMO else "demo"
        assert {line["model"] for line in lines} == {name}
        assert [{**line, "model": "demo"} for line in lines] == object_of(invoke("bench", "scaling", "demo", *sizes))[
            "lines"
        ]
    both = object_of(invoke("bench", "scaling", "demo", "mixtral-8x7b", *sizes))["lines"]
    assert {line["model"] for line in both} == {"demo", "mixtral-8x7b"}
    assert "no bundled config is named 'dmo' (did you mean 'demo'?)" in invoke("bench", "scaling", "dmo", code=2).stderr


# --- Ctrl-C --------------------------------------------------------------------------------------------------------


ENDLESS = {
    "run": ("cli.app.run_model", ()),
    "doctor": ("cli.doctor.versions", ()),
    "explain": ("cli.explain.explain_model", ("demo",)),
    "fit": ("cli.app.run_fit", ("demo", "--gpus", "8")),
    "check-exact": ("cli.app.run_check_exact", ()),
    "plan": ("eplb.trace.LoadTrace.load", ("trace.npz", "--ranks", "2")),
    "tune": ("cli.app.run_tune", ()),
    "bench": ("bench.planner.compare", ("planner",)),
}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_ctrl_c_is_one_line(name, monkeypatch):
    where, words = ENDLESS[name]

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"ep_moe.{where}", interrupted)
    result = invoke(name, *words, code=130)
    assert result.stdout.strip() == ""
    said = [line for line in result.stderr.splitlines() if not line.startswith("measuring")]
    assert said == ["interrupted"]
