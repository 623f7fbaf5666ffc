"""The command line: `ep-moe run`, `check-exact`, `explain`, `fit`, `tune`, `plan`, `bench`, `doctor`.

This module parses options, prints results and sets exit codes. `doctor` and `explain` have modules of their own. What
all commands share is in `output`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import signal
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from ep_moe._version import __version__
from ep_moe.checks import check_picture, check_target, did_you_mean
from ep_moe.cli import doctor as doctor_report
from ep_moe.cli.check_exact import CheckOptions
from ep_moe.cli.check_exact import run as run_check_exact
from ep_moe.cli.explain import explain
from ep_moe.cli.fit import FitOptions, print_answer
from ep_moe.cli.fit import run as run_fit
from ep_moe.cli.output import (
    DEFAULT_LEVEL,
    EXIT_CODES,
    AsJson,
    LogLevel,
    ModelArgument,
    Quiet,
    command,
    least_level,
    model_named,
    note,
)
from ep_moe.cli.reports import print_checked, print_report, print_tuned, write_files
from ep_moe.cli.run import RunOptions
from ep_moe.cli.run import run as run_model
from ep_moe.cli.tune import TuneOptions
from ep_moe.cli.tune import run as run_tune
from ep_moe.eplb import LoadTrace
from ep_moe.eplb import report as plan_report
from ep_moe.errors import ConfigError
from ep_moe.integrations.model_name import DEMO, FORMS, checkpoint_named, sizes_named
from ep_moe.parallel.groups import TorchrunEnv

_ENDED = 128  # plus the signal's number: the exit code by which shells report a process that a signal ended


class _Commands(TyperGroup):
    """Handles signals. SIGTERM and Ctrl-C end a command after the ranks that it started; Ctrl-C prints one line."""

    def invoke(self, ctx: Any) -> Any:
        before = signal.getsignal(signal.SIGTERM)
        # torchrun's ranks start no ranks, and a Python handler would run only once a blocking call returns
        if not TorchrunEnv.present():
            signal.signal(signal.SIGTERM, _terminated)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            note("interrupted")
            raise typer.Exit(_ENDED + signal.SIGINT) from None
        finally:
            signal.signal(signal.SIGTERM, before)


def _terminated(number: int, _: Any) -> NoReturn:
    sys.exit(_ENDED + number)


_ABOUT = "Expert-parallel Mixture-of-Experts for PyTorch: run, explain, tune and measure it."
app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help=f"{_ABOUT} Under torchrun, commands run on its ranks, and rank 0 prints.",
    epilog="\n\n".join(["Exit codes:", *(f"{code}: {meaning}" for code, meaning in EXIT_CODES.items())]),
)
_BENCHES = ("all2all", "experts", "layer", "overlap", "planner", "rebalance", "scaling", "train", "weight_push")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ep-moe {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Expert-parallel Mixture-of-Experts for PyTorch."""


@app.command()
def run(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Folder of a checkpoint, or a Hub id (org/model); default the demo."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    text: Annotated[str | None, typer.Option(help="Text file to read; default the demo's held-out text.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel size.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size: ranks that hold the same tokens.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel size; default dp * tp / etp.")] = None,
    etp: Annotated[int, typer.Option(help="Ranks over which each expert is sharded.")] = 1,
    all2all: Annotated[str, typer.Option(help="Transport: auto, local, allgather, torch_a2a, ...")] = "auto",
    experts: Annotated[str, typer.Option(help="Expert kernel: auto, reference, ...")] = "auto",
    quantization: Annotated[
        str, typer.Option(help="Quantization of the experts: none, fp8_dynamic, fp8_block, mxfp4, ...")
    ] = "none",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's.")] = None,
    window: Annotated[int, typer.Option(help="Tokens per sequence.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences per dp rank and forward.")] = 8,
    text_tokens: Annotated[int, typer.Option(help="Tokens of the text to read.")] = 16384,
    reference: Annotated[
        bool | None,
        typer.Option(help="Also run the untouched model in one process; default for weights of at most 32 GiB."),
    ] = None,
    redundant: Annotated[int, typer.Option(help="Redundant experts: those with a second copy.")] = 0,
    eplb: Annotated[bool, typer.Option(help="Rebalance the experts, and read the text again.")] = False,
    wire: Annotated[
        str,
        typer.Option(
            help="Row format of dispatch (Wire.dispatch): plain, fp8_block, fp8_row, mxfp8; of a calibrated "
            "checkpoint fp8_tensor and nvfp4 too."
        ),
    ] = "plain",
    tuned: Annotated[Path | None, typer.Option(help="File of ep-moe tune; instead of --all2all, --experts.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="File for torch.profiler's trace of one more forward of rank 0, e.g. out.json.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Heat maps of load by expert and rank, e.g. load.png.")] = None,
    record_load: Annotated[
        Path | None, typer.Option(help="File for the load of each forward, for ep-moe plan, e.g. trace.npz.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds after which a silent peer is reported lost.")] = 300.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    log_level: LogLevel = DEFAULT_LEVEL,
    old_model: Annotated[str | None, typer.Option("--model", hidden=True)] = None,
) -> None:
    """Run a model on real text with its experts spread over ranks, and compare perplexities.

    Starts 4 gloo ranks on this machine. Under torchrun it uses torchrun's ranks, on GPUs if there are any.
    """
    with command(as_json, quiet, log_level) as out:
        options = RunOptions(
            model=checkpoint_named(model_named("run", model, DEMO, model=old_model)), revision=revision, text=text,
            dp=dp, tp=tp, ep=ep, etp=etp, all2all=all2all, experts=experts, quantization=quantization, dtype=dtype,
            window=window, batch=batch, text_tokens=text_tokens, reference=reference, redundant=redundant, eplb=eplb,
            wire=wire, tuned=None if tuned is None else str(tuned), trace=None if trace is None else str(trace),
            plot=None if plot is None else str(plot), record_load=None if record_load is None else str(record_load),
            quiet=quiet, deadline_s=deadline, log_level=least_level(quiet, log_level),
        )  # fmt: skip
        report = run_model(options)
        if report is not None:
            print_report(out, report)
            written = write_files(options, report)
            for line in written:
                out.line(line)
            found = {field.name: getattr(report, field.name) for field in fields(report) if field.name != "recorded"}
            out.result({**found, "agrees": report.agrees, "balancedness": report.balancedness})
            if report.exact and not report.agrees:
                raise typer.Exit(1)


app.command()(doctor_report.doctor)
app.command()(explain)


@app.command()
def fit(
    model: Annotated[
        str, typer.Argument(help="Bundled model config, a .toml file, a folder with config.json, or org/model.")
    ],
    gpus: Annotated[int, typer.Option(help="GPUs of the job.")],
    gpu: Annotated[str, typer.Option(help="GPU type: h100, h200 or b200.")] = "h200",
    per_host: Annotated[int, typer.Option(help="GPUs that NVLink joins.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens per GPU in one call.")] = 128,
    quantization: Annotated[
        str, typer.Option(help="Quantization of the experts: none, fp8_dynamic, fp8_block, ...")
    ] = "none",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    wire: Annotated[str, typer.Option(help="Row format of dispatch: plain, fp8_block, fp8_row, ...")] = "plain",
    dp: Annotated[int | None, typer.Option(help="Data-parallel size; default gpus / tp.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size: ranks that hold the same tokens.")] = 1,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel size; default dp * tp / etp.")] = None,
    etp: Annotated[int, typer.Option(help="Ranks over which each expert is sharded.")] = 1,
    redundant: Annotated[int, typer.Option(help="Expert slots beyond one per expert.")] = 0,
    all2all: Annotated[str, typer.Option(help="Transport: auto, or the only one to consider.")] = "auto",
    experts: Annotated[str, typer.Option(help="Expert kernel: auto, or the only one to consider.")] = "auto",
    nic_gb_s: Annotated[float, typer.Option(help="GB/s of a GPU to other hosts, one direction.")] = 50.0,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    log_level: LogLevel = DEFAULT_LEVEL,
) -> None:
    """Say whether a model fits on GPUs that are not here, which backends it would use, and how long a MoE layer takes.

    Exits with 1 if it does not fit. docs/how-to/fit.md explains the numbers.
    """
    with command(as_json, quiet, log_level) as out:
        answered = run_fit(
            FitOptions(
                model=model, gpus=gpus, gpu=gpu, per_host=per_host, tokens=tokens, quantization=quantization,
                dtype=dtype, wire=wire, dp=dp, tp=tp, ep=ep, etp=etp, redundant=redundant, all2all=all2all,
                experts=experts, nic_gb_s=nic_gb_s, revision=revision,
            )
        )  # fmt: skip
        print_answer(answered, out.line)
        out.result(answered)
        if not answered["memory"]["fits"]:
            raise typer.Exit(1)


class _NumberLists(TyperCommand):
    """Accepts `--ranks 4 8 32` for `--ranks 4 --ranks 8 --ranks 32`: a number after a number belongs to its option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        option = ""
        for arg in args:
            if arg.isdigit() and option and spread[-1].isdigit():
                spread.append(option)
            elif not arg.isdigit():
                option = arg if arg in ("--ranks", "--redundant", "--tokens") else ""
            spread.append(arg)
        return super().parse_args(ctx, spread)


@app.command("check-exact", cls=_NumberLists)
def check_exact(
    model: ModelArgument = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    text: Annotated[
        str | None, typer.Option(help="Text file whose beginning is the prompts; the demo has one.")
    ] = None,
    ranks: Annotated[
        list[int] | None, typer.Option(help="Numbers of ranks, one or more; default 1 2 4, under torchrun its own.")
    ] = None,
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 6,
    window: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 48,
    experts: Annotated[str, typer.Option(help="Expert kernel, or auto.")] = "auto",
    quantization: Annotated[str, typer.Option(help="Quantization of the experts: none, fp8_static, ...")] = "none",
    dtype: Annotated[str | None, typer.Option(help="auto for the checkpoint's, float32, bfloat16 or float16.")] = None,
    exact: Annotated[bool, typer.Option(help="Use exact layers; without them, see what differs.")] = True,
    deadline: Annotated[float, typer.Option(help="Seconds after which a silent peer is reported lost.")] = 300.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    log_level: LogLevel = DEFAULT_LEVEL,
) -> None:
    """Check that results do not depend on ranks, expert maps, transports and batches (ExpertsOptions.exact).

    Exits with 1 if a checksum differs, and names the first layer that differs.
    """
    with command(as_json, quiet, log_level) as out:
        found = run_check_exact(
            CheckOptions(
                model=None if model is None else checkpoint_named(model), revision=revision, text=text,
                ranks=None if ranks is None else tuple(ranks), prompts=prompts, window=window, experts=experts,
                quantization=quantization, dtype=dtype, exact=exact, deadline_s=deadline,
                log_level=least_level(quiet, log_level),
            )
        )  # fmt: skip
        if found is not None and not print_checked(found, out):
            raise typer.Exit(1)


@app.command(cls=_NumberLists)
def plan(
    trace: Annotated[Path, typer.Argument(help="Load trace, an .npz file of LoadTrace.save.")],
    ranks: Annotated[
        list[int] | None, typer.Option(help="EP sizes, one or more numbers; default powers of 2 up to E and 64.")
    ] = None,
    redundant: Annotated[list[int] | None, typer.Option(help="Redundant experts, one or more; default 0.")] = None,
    groups: Annotated[int, typer.Option(help="Expert groups that stay on one node.")] = 1,
    nodes: Annotated[int, typer.Option(help="Nodes that the ranks are spread over.")] = 1,
    model: Annotated[str | None, typer.Option(help=f"Whose sizes: {FORMS}. Default: the trace's model.")] = None,
    bytes_per_weight: Annotated[float, typer.Option(help="2 for bfloat16, 1 for fp8.")] = 2.0,
    tolerance: Annotated[float, typer.Option(help="A layer this close to perfect balance stays.")] = 0.01,
    enough: Annotated[
        float, typer.Option(help="Balancedness at which moving stops; 1 for the best that is possible.")
    ] = 1.0,
    steps_to_pay: Annotated[int, typer.Option(help="Refuse moves that take more steps to pay off.")] = 3000,
    plot: Annotated[Path | None, typer.Option(help="Heat maps of load per layer and rank, e.g. out.png.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    log_level: LogLevel = DEFAULT_LEVEL,
) -> None:
    """Plan a recorded load for other numbers of ranks and redundant experts: balance, time, bytes to move, verdict.

    Times are estimates of a layer on H200s; see docs/how-to/eplb.md.
    """
    with command(as_json, quiet, log_level) as out:
        question = plan_report.Question(
            nodes=nodes, groups=groups, tolerance=tolerance, enough=enough, within_steps=steps_to_pay,
            bytes_per_weight=bytes_per_weight,
        )  # fmt: skip
        check_picture("--plot", plot)
        recorded = LoadTrace.load(trace)
        named = model or recorded.model
        sizes = sizes_named(named) if named else None
        asked = ranks or [2**power for power in range(1, 7) if 2**power <= recorded.num_experts]
        rows = plan_report.what_if(recorded, asked, redundant or [0], question, sizes)
        out.table(plan_report.TITLE, plan_report.COLUMNS, [row.cells() for row in rows])
        out.line()
        for row in rows:
            out.line(f"ranks {row.ranks}, redundant {row.redundant}: {row.verdict}")
        out.result({"model": named, "rows": [row.facts() for row in rows]})
        if all(isinstance(row, plan_report.Impossible) for row in rows):
            raise typer.Exit(1)
        if plot is not None:
            plan_report.plot(rows, plot)


@app.command(cls=_NumberLists)
def tune(
    model: ModelArgument = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Token limits of a rank's call; one bucket each.")] = None,
    quantization: Annotated[
        str, typer.Option(help="Quantization of the experts: none, fp8_dynamic, fp8_block, ...")
    ] = "none",
    wire: Annotated[
        str, typer.Option(help="Row format of dispatch (Wire.dispatch): plain, fp8_block, fp8_row, ...")
    ] = "plain",
    dtype: Annotated[str | None, typer.Option(help="Default bfloat16 on GPUs, float32 on the CPU.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder that keeps the kernels' own tuning.")] = None,
    file: Annotated[Path, typer.Option("--out", help="File for MoELayer(tuned=Tuned.load(...)).")] = Path("tuned.json"),
    as_json: AsJson = False,
    quiet: Quiet = False,
    log_level: LogLevel = DEFAULT_LEVEL,
) -> None:
    """Time every pair of transport and kernel for each number of tokens, and save the fastest to a file.

    Starts 4 gloo ranks on this machine. Under torchrun it uses torchrun's ranks, on GPUs if there are any.
    """
    with command(as_json, quiet, log_level) as out:
        check_target("--out", file)
        options = TuneOptions(
            model=model_named("tune", model, DEMO),
            tokens=tuple(tokens or (1, 16, 128, 1024, 8192)),
            quantization=quantization,
            wire=wire,
            dtype=dtype,
            cache=None if cache is None else str(cache),
            quiet=quiet,
            log_level=least_level(quiet, log_level),
        )
        tuned = run_tune(options, out.progress)
        if tuned is not None:
            print_tuned(out, tuned)
            tuned.save(file)
            out.line(f"\nwritten to {file}")
            out.result({"file": file, **asdict(tuned)})


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=", ".join(_BENCHES))] = "",
    quiet: Quiet = False,
    log_level: LogLevel = DEFAULT_LEVEL,
) -> None:
    """List the benchmarks, or run one with the arguments that follow its name, as python -m ep_moe.bench.NAME does."""
    with command(quiet=quiet, log_level=log_level) as out:
        if name in ("", "--help", "-h"):  # after a name, --help is an option of the benchmark
            for line in _bench_help():
                out.line(line)
            return
        if name not in _BENCHES:
            hint = did_you_mean(name, _BENCHES)
            raise ConfigError(f"bench NAME must be one of {', '.join(_BENCHES)}, got {name!r}{hint}")
        sys.argv = [f"ep-moe bench {name}", *context.args, *(["--quiet"] if quiet else [])]
        importlib.import_module(f"ep_moe.bench.{name}").main()


def _bench_help() -> list[str]:
    """Return a line for each benchmark, with the first phrase of its module docstring.

    The files are parsed, because importing all of them takes seconds.
    """
    lines = ["Usage: ep-moe bench NAME [MODEL ...] [OPTIONS]; ep-moe bench NAME --help lists those of a benchmark.", ""]
    for name in _BENCHES:
        spec = importlib.util.find_spec(f"ep_moe.bench.{name}")
        assert spec is not None
        assert spec.origin is not None
        text = ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or ""
        lines.append(f"  {name:9}  {re.split(r'[:.] ', ' '.join(text.split()))[0]}")
    return [
        *lines,
        "",
        f"MODEL, of those that measure models: {FORMS}.",
        "--json prints the lines of any as one JSON object; --quiet and --log-level are as elsewhere.",
    ]
