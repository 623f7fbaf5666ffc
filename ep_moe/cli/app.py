"""The command line: `ep-moe run`, `explain`, `tune`, `plan`, `bench`, `doctor`. It only parses, prints and sets exit
codes."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from ep_moe.checks import check_picture, check_target
from ep_moe.cli import cluster_tables
from ep_moe.cli import doctor as doctor_report
from ep_moe.cli.cluster import ClusterReport
from ep_moe.cli.cluster import run as run_cluster
from ep_moe.cli.run import DIGITS, RunOptions, RunReport
from ep_moe.cli.run import run as run_model
from ep_moe.cli.run_eplb import Rebalanced
from ep_moe.cli.tune import TuneOptions
from ep_moe.cli.tune import run as run_tune
from ep_moe.config import ONE_SCALE, ParallelConfig, Wire
from ep_moe.eplb import LoadTrace
from ep_moe.eplb import report as plan_report
from ep_moe.errors import ConfigError, EPMoEError
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.parallel.local_launch import RanksFailed
from ep_moe.selection.explain import explain_model
from ep_moe.selection.tuned import Tuned

_ENDED = 128  # and the signal's number: what shells say of a process that a signal ended


class _Commands(TyperGroup):
    """Ends a command by one line where a signal ends it, after the ranks that it began."""

    def invoke(self, ctx: Any) -> Any:
        before = signal.getsignal(signal.SIGTERM)
        if not TorchrunEnv.present():  # torchrun's ranks began none, and a handler waits for whatever they wait for
            signal.signal(signal.SIGTERM, _terminated)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") == "0":
                Console(stderr=True).print("interrupted", highlight=False)
            raise typer.Exit(_ENDED + signal.SIGINT) from None
        finally:
            signal.signal(signal.SIGTERM, before)


def _terminated(number: int, _: Any) -> NoReturn:
    sys.exit(_ENDED + number)


app = typer.Typer(
    cls=_Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)
_console = Console(soft_wrap=True)
_WIDE = 8  # layers that fit side by side
_LINE = 120  # characters of a table's line
_BENCHES = ("all2all", "experts", "layer", "overlap", "planner", "rebalance", "scaling", "train")


@app.callback()
def _main() -> None:
    """Expert-parallel Mixture-of-Experts for PyTorch."""


@app.command()
def run(
    model: Annotated[
        str | None,
        typer.Option(help="Folder of a Hugging Face checkpoint, or a model's name on the Hub; default the demo."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    text: Annotated[str | None, typer.Option(help="Text file to read; default the demo's held-out text.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel size.")] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks that hold the same tokens.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel size; default dp * tp / etp.")] = None,
    etp: Annotated[int, typer.Option(help="Ranks over which each expert is cut.")] = 1,
    all2all: Annotated[str, typer.Option(help="Transport: auto, local, allgather, torch_a2a, ...")] = "auto",
    experts: Annotated[str, typer.Option(help="Expert kernel: auto, reference, ...")] = "auto",
    quantization: Annotated[
        str, typer.Option(help="Of the experts: none, fp8_dynamic, fp8_block, mxfp4, ...")
    ] = "none",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's.")] = None,
    window: Annotated[int, typer.Option(help="Tokens per sequence.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences per dp rank and forward.")] = 8,
    text_tokens: Annotated[int, typer.Option(help="Tokens of the text to read.")] = 16384,
    reference: Annotated[
        bool | None,
        typer.Option(help="Also run the untouched model in one process; default for weights of at most 32 GiB."),
    ] = None,
    redundant: Annotated[int, typer.Option(help="Experts that have a second copy.")] = 0,
    eplb: Annotated[bool, typer.Option(help="Rebalance the experts, and read the text again.")] = False,
    wire: Annotated[
        str,
        typer.Option(
            help="Rows on their way out, as Wire.dispatch: plain, fp8_block, fp8_row, mxfp8; of a calibrated "
            "checkpoint fp8_tensor and nvfp4 too."
        ),
    ] = "plain",
    tuned: Annotated[Path | None, typer.Option(help="File of ep-moe tune; instead of --all2all, --experts.")] = None,
    deadline: Annotated[float, typer.Option(help="Seconds after which a silent peer is reported lost.")] = 300.0,
) -> None:
    """Run a model on real text with its experts spread over ranks, and compare perplexities.

    Starts 4 gloo ranks on this machine; under torchrun it uses the ranks it is given, on GPUs where there are some.
    """
    options = RunOptions(
        model=model, revision=revision, text=text, dp=dp, tp=tp, ep=ep, etp=etp, all2all=all2all, experts=experts,
        quantization=quantization, dtype=dtype,
        window=window, batch=batch, text_tokens=text_tokens, reference=reference, redundant=redundant, eplb=eplb,
        wire=wire, tuned=None if tuned is None else str(tuned), deadline_s=deadline,
    )  # fmt: skip
    try:
        report = run_model(options)
    except EPMoEError as error:
        _fail(error)
    except RanksFailed as failure:
        if not failure.errors:
            raise
        _fail(next(iter(failure.errors.values())))
    if report is not None:
        _print_report(report)
        if report.exact and not report.agrees:
            raise typer.Exit(1)


@app.command()
def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Compare all ranks of torchrun or srun, and time their links.")
    ] = False,
    deadline: Annotated[float, typer.Option(help="With --cluster: seconds to wait for ranks, and transfers.")] = 120.0,
) -> None:
    """Print versions and how they were run, the NCCL that is loaded, GPUs, and each backend as available or why not.

    With --cluster, all ranks run it. It exits with 0 if the cluster is sound, with 1 if it names something odd.
    """
    if cluster:
        _doctor_cluster(deadline)
        return
    runs = doctor_report.runs()
    rows = [[name, version, runs.get(name, "")] for name, version in doctor_report.versions().items()]
    _table("", ["what", "version", "run by the tests"], rows)
    for line in doctor_report.gpus() or ["no GPU"]:
        _console.print(f"GPU {line}", highlight=False)
    _table("", ["kind", "backend", "here"], [list(row) for row in doctor_report.backends()])


def _doctor_cluster(deadline_s: float) -> None:
    def show(report: ClusterReport) -> None:
        for title, columns, rows in cluster_tables.tables(report):
            _table(title, columns, rows)
        _console.print()
        for line in cluster_tables.lines(report):
            _console.print(line, highlight=False, markup=False)

    try:
        report = run_cluster(deadline_s, show)
    except EPMoEError as error:
        _fail(error)
    if report.odd:
        raise typer.Exit(1)


@app.command()
def explain(
    config: Annotated[str, typer.Option(help="Bundled model config by name, or a .toml file.")],
    dp: Annotated[int, typer.Option(help="Data-parallel size.")] = 1,
    tp: Annotated[int, typer.Option(help="Ranks that hold the same tokens.")] = 1,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel size; default dp * tp / etp.")] = None,
    etp: Annotated[int, typer.Option(help="Ranks over which each expert is cut.")] = 1,
    all2all: Annotated[str, typer.Option(help="Transport: auto, or the only one to admit.")] = "auto",
    experts: Annotated[str, typer.Option(help="Expert kernel: auto, or the only one to admit.")] = "auto",
    quantization: Annotated[str, typer.Option(help="Of the experts: none, fp8_dynamic, fp8_block, ...")] = "none",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of a rank in one call; default any number.")
    ] = None,
    wire: Annotated[
        str, typer.Option(help="Rows on their way out: plain, fp8_block, fp8_row, fp8_tensor, mxfp8, nvfp4.")
    ] = "plain",
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks of a node; default all of them.")] = None,
) -> None:
    """Print every pair of transport and kernel for a model on this machine: chosen, possible, or why not."""
    try:
        parallel = ParallelConfig(dp=dp, tp=tp, ep=ep, etp=etp)
        rows_as = Wire(dispatch=wire, input_scale=1.0 if wire in ONE_SCALE else None)  # no reason depends on it
        rows = explain_model(
            config, parallel, all2all, experts, quantization, dtype, max_tokens, rows_as, ranks_per_node
        )
    except EPMoEError as error:
        _fail(error)
    order = ("chosen", "possible", "refused")
    for row in sorted(rows, key=lambda row: order.index(row.status)):
        _console.print(str(row), highlight=False, markup=False)
    if not any(row.status == "chosen" for row in rows):
        raise typer.Exit(1)


class _NumberLists(TyperCommand):
    """`--ranks 4 8 32` for `--ranks 4 --ranks 8 --ranks 32`: numbers behind a number belong to its option."""

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


@app.command(cls=_NumberLists)
def plan(
    trace: Annotated[Path, typer.Argument(help="Load trace, an .npz file of LoadTrace.save.")],
    ranks: Annotated[list[int], typer.Option(help="EP sizes, one or more numbers.")],
    redundant: Annotated[list[int] | None, typer.Option(help="Redundant experts, one or more; default 0.")] = None,
    groups: Annotated[int, typer.Option(help="Expert groups that stay on one node.")] = 1,
    nodes: Annotated[int, typer.Option(help="Nodes that the ranks are spread over.")] = 1,
    model: Annotated[str | None, typer.Option(help="Config with the sizes; default the trace's model.")] = None,
    bytes_per_weight: Annotated[float, typer.Option(help="2 for bfloat16, 1 for fp8.")] = 2.0,
    tolerance: Annotated[float, typer.Option(help="A layer this close to perfect balance stays.")] = 0.01,
    enough: Annotated[
        float, typer.Option(help="Balancedness at which to stop moving; 1 for all that can be had.")
    ] = 1.0,
    steps_to_pay: Annotated[int, typer.Option(help="Refuse what takes more steps to pay back.")] = 3000,
    plot: Annotated[Path | None, typer.Option(help="Heat maps of load per layer and rank, e.g. out.png.")] = None,
) -> None:
    """Plan a recorded load for other numbers of ranks and redundant experts: balance, time, bytes to move, verdict.

    Time is the layer's own model on H200s; see docs/how-to/eplb.md.
    """
    try:
        question = plan_report.Question(
            nodes=nodes, groups=groups, tolerance=tolerance, enough=enough, within_steps=steps_to_pay,
            bytes_per_weight=bytes_per_weight,
        )  # fmt: skip
        check_picture("--plot", plot)
        rows = plan_report.what_if(LoadTrace.load(trace), ranks, redundant or [0], question, model)
    except EPMoEError as error:
        _fail(error)
    _table(plan_report.TITLE, plan_report.COLUMNS, [row.cells() for row in rows])
    _console.print()
    for row in rows:
        _console.print(f"ranks {row.ranks}, redundant {row.redundant}: {row.verdict}", highlight=False, markup=False)
    if all(isinstance(row, plan_report.Impossible) for row in rows):
        raise typer.Exit(1)
    if plot is not None:
        plan_report.plot(rows, plot)


@app.command(cls=_NumberLists)
def tune(
    model: Annotated[
        str, typer.Argument(help="Bundled model config, a .toml file, a folder with config.json, or org/model.")
    ] = "demo",
    tokens: Annotated[
        list[int] | None, typer.Option(help="Most tokens of a rank in one call; one bucket each.")
    ] = None,
    quantization: Annotated[str, typer.Option(help="Of the experts: none, fp8_dynamic, fp8_block, ...")] = "none",
    wire: Annotated[
        str, typer.Option(help="Rows on their way out, as Wire.dispatch: plain, fp8_block, fp8_row, ...")
    ] = "plain",
    dtype: Annotated[str | None, typer.Option(help="Default bfloat16 on GPUs, float32 on the CPU.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder that keeps the kernels' own tuning.")] = None,
    out: Annotated[Path, typer.Option(help="File for MoELayer(tuned=Tuned.load(...)).")] = Path("tuned.json"),
) -> None:
    """Time every pair of transport and kernel per number of tokens, and write down which to use.

    Starts 4 gloo ranks on this machine; under torchrun it uses the ranks it is given, on GPUs where there are some.
    """
    try:
        check_target("--out", out)
        options = TuneOptions(
            model=model,
            tokens=tuple(tokens or (1, 16, 128, 1024, 8192)),
            quantization=quantization,
            wire=wire,
            dtype=dtype,
            cache=None if cache is None else str(cache),
        )
        tuned = run_tune(options, lambda line: _console.print(line, highlight=False, markup=False))
    except EPMoEError as error:
        _fail(error)
    except RanksFailed as failure:
        if not failure.errors:
            raise
        _fail(next(iter(failure.errors.values())))
    if tuned is not None:
        _print_tuned(tuned)
        tuned.save(out)
        _console.print(f"\nwritten to {out}", highlight=False, markup=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def bench(context: typer.Context, name: Annotated[str, typer.Argument(help=", ".join(_BENCHES))] = "") -> None:
    """Run a benchmark with the arguments that follow its name, as python -m ep_moe.bench.NAME does."""
    if name not in _BENCHES:
        _fail(ConfigError(f"bench NAME must be one of {', '.join(_BENCHES)}, got {name!r}"))
    sys.argv = [f"ep-moe bench {name}", *context.args]
    importlib.import_module(f"ep_moe.bench.{name}").main()


def _print_tuned(tuned: Tuned) -> None:
    facts = ", ".join(f"{name} {value}" for name, value in (tuned.machine | tuned.layer).items() if value is not None)
    _console.print(f"\n{facts}", highlight=False, markup=False)
    for bucket in tuned.buckets:
        lines = [line for line in tuned.measured if line.tokens == bucket.tokens]
        rows = [
            [
                line.all2all,
                line.experts,
                "" if line.pipeline is None else str(line.pipeline),
                f"{line.us:.1f}",
                "chosen" if line == bucket else "",
            ]
            for line in lines
        ]
        _table(f"up to {bucket.tokens} tokens per rank", ["all2all", "experts", "in parts of", "us", ""], rows)


def _fail(error: EPMoEError) -> NoReturn:
    """A user's error is one sentence, printed once: all ranks have the same one."""
    if os.environ.get("RANK", "0") == "0":
        _console.print(f"error: {error}", highlight=False, markup=False)
    raise typer.Exit(2)


def _print_report(report: RunReport) -> None:
    _console.print(report.title, highlight=False)
    _console.print(f"\nperplexity over {report.tokens} tokens", highlight=False)
    _console.print(f"  ep_moe        {report.perplexity:#.{DIGITS}g}", highlight=False)
    if report.reference is not None:
        apart = abs(report.perplexity / report.reference - 1)
        verdict = f"equal to {DIGITS} digits" if report.agrees else f"relative difference {apart:.1e}"
        if not report.agrees and report.exact:
            verdict = f"DIFFERENT, {verdict}: in float32 this is a bug"
        _console.print(f"  transformers  {report.reference:#.{DIGITS}g}  (one process; {verdict})", highlight=False)
    elif report.left_out is not None:
        _console.print(f"  transformers  not run: {report.left_out}", highlight=False)
    if report.rebalanced is not None:
        _print_rebalanced(report.rebalanced)
    _print_loads(report)
    whole = sum(report.stages.values())
    rows = [
        [name, f"{ms:.1f}", f"{1e3 * ms / report.forwards:.0f}", f"{ms / whole:.0%}"]
        for name, ms in report.stages.items()
    ]
    _table(
        f"time per stage, slowest rank, {report.forwards} layer calls", ["stage", "ms", "us per call", "share"], rows
    )


def _print_rebalanced(found: Rebalanced) -> None:
    for line in (
        "\nthe same text while experts move, and once they have",
        f"  balancedness  {found.before:.3f} before, {found.after:.3f} after (mean rank / fullest, over all layers)",
        f"  perplexity    {found.perplexity:#.{DIGITS}g}",
        f"  moved         {found.sent_bytes / 2**20:.1f} MiB between ranks, within {found.forwards} forwards",
        f"  forward       {found.usual_ms:.1f} ms usually, {found.longest_ms:.1f} ms the longest while moving",
    ):
        _console.print(line, highlight=False)


def _print_loads(report: RunReport) -> None:
    ranks = range(len(report.rank_load[0]))
    rows = [
        [f"layer {index}", *map(str, load), f"{even:.3f}"]
        for index, (load, even) in enumerate(zip(report.rank_load, report.balancedness, strict=True))
    ]
    _table(
        "tokens per EP rank (a token counts once per expert)", ["", *[f"rank {r}" for r in ranks], "balancedness"], rows
    )
    layers = range(len(report.expert_load))
    if len(layers) > _WIDE:
        columns, loads = ["all layers"], [[sum(column)] for column in zip(*report.expert_load, strict=True)]
    else:
        columns, loads = [f"layer {i}" for i in layers], [list(c) for c in zip(*report.expert_load, strict=True)]
    _table("tokens per expert", ["", *columns], [[f"expert {e}", *map(str, load)] for e, load in enumerate(loads)])


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right" if title else "left", no_wrap=bool(title))
    for row in rows:
        table.add_row(*map(escape, row))
    _console.print()
    # a line that is too long for the terminal is better than numbers without their ends
    Console(width=max(_console.width, _LINE), soft_wrap=True).print(table)
