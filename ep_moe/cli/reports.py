"""Prints the reports of `ep-moe run`, `ep-moe check-exact` and `ep-moe tune`, and writes the files of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ep_moe.cli.check_exact import LOGITS, RunDigests
from ep_moe.cli.output import Output
from ep_moe.cli.perplexity import Rebalanced
from ep_moe.cli.run import DIGITS, RunOptions, RunReport
from ep_moe.errors import ConfigError
from ep_moe.selection.tuned import Tuned

_WIDE = 8  # layers that fit side by side


def print_report(out: Output, report: RunReport) -> None:
    """Print the results of `ep-moe run`.

    Args:
        out: The output to print to.
        report: The report of rank 0.
    """
    out.line(report.title)
    out.line(f"\nperplexity over {report.tokens} tokens")
    out.line(f"  ep_moe        {report.perplexity:#.{DIGITS}g}")
    if report.reference is not None:
        apart = abs(report.perplexity / report.reference - 1)
        verdict = f"equal to {DIGITS} digits" if report.agrees else f"relative difference {apart:.1e}"
        if not report.agrees and report.exact:
            verdict = f"DIFFERENT, {verdict}: in float32 this is a bug"
        elif not report.agrees:
            verdict = f"{verdict}; not float32, or quantized, so digits may differ"
        out.line(f"  transformers  {report.reference:#.{DIGITS}g}  (one process; {verdict})")
    elif report.left_out is not None:
        out.line(f"  transformers  not run: {report.left_out}")
    if report.rebalanced is not None:
        _print_rebalanced(out, report.rebalanced)
    _print_loads(out, report)
    whole = sum(report.stages.values())
    rows = [
        [name, f"{ms:.1f}", f"{1e3 * ms / report.forwards:.0f}", f"{ms / whole:.0%}"]
        for name, ms in report.stages.items()
    ]
    out.table(
        f"time per stage, slowest rank, {report.forwards} layer calls", ["stage", "ms", "us per call", "share"], rows
    )


def print_checked(found: Sequence[RunDigests], out: Output) -> bool:
    """Print the results of `ep-moe check-exact`.

    Args:
        found: The digests of all ways of running. The others are compared with the first.
        out: The output to print to.

    Returns:
        Whether all are equal.
    """
    first = found[0]
    differences = [one.differs_from(first) for one in found]
    rows = [
        [
            str(one.ranks), one.expert_map, one.all2all, one.batching, one.checksum, one.digests.get(LOGITS, ""),
            "" if name is None else f"first at {name}",
        ]
        for one, name in zip(found, differences, strict=True)
    ]  # fmt: skip
    out.line(f"{len(first.digests) - 1} MoE layers, experts {first.experts}")
    out.table("", ["ranks", "map", "transport", "batches", "layers", "logits", "differs"], rows)
    apart = sum(name is not None for name in differences)
    out.line()
    out.line("all equal, bit for bit" if not apart else f"{apart} of {len(found)} differ from the first")
    runs = [
        {
            "ranks": one.ranks, "expert_map": one.expert_map, "all2all": one.all2all, "experts": one.experts,
            "batching": one.batching, "checksum": one.checksum, "logits": one.digests.get(LOGITS),
            "first_difference": name,
        }
        for one, name in zip(found, differences, strict=True)
    ]  # fmt: skip
    out.result({"equal": not apart, "runs": runs})
    return not apart


def _print_rebalanced(out: Output, found: Rebalanced) -> None:
    for line in (
        "\nthe same text while experts move, and once they have",
        f"  balancedness  {found.before:.3f} before, {found.after:.3f} after (mean rank / fullest, over all layers)",
        f"  perplexity    {found.perplexity:#.{DIGITS}g}",
        f"  moved         {found.sent_bytes / 2**20:.1f} MiB between ranks, within {found.forwards} forwards",
        f"  forward       {found.usual_ms:.1f} ms usually, {found.longest_ms:.1f} ms the longest while moving",
    ):
        out.line(line)


def _print_loads(out: Output, report: RunReport) -> None:
    ranks = range(len(report.rank_load[0]))
    rows = [
        [f"layer {index}", *map(str, load), f"{even:.3f}"]
        for index, (load, even) in enumerate(zip(report.rank_load, report.balancedness, strict=True))
    ]
    out.table(
        "tokens per EP rank (a token counts once per expert)", ["", *[f"rank {r}" for r in ranks], "balancedness"], rows
    )
    layers = range(len(report.expert_load))
    if len(layers) > _WIDE:
        columns, loads = ["all layers"], [[sum(column)] for column in zip(*report.expert_load, strict=True)]
    else:
        columns, loads = [f"layer {i}" for i in layers], [list(c) for c in zip(*report.expert_load, strict=True)]
    out.table("tokens per expert", ["", *columns], [[f"expert {e}", *map(str, load)] for e, load in enumerate(loads)])


def write_files(options: RunOptions, report: RunReport) -> list[str]:
    """Write the files that the options of a run name.

    Args:
        options: The options of the run.
        report: The report of rank 0.

    Returns:
        A line for each file that was written.

    Raises:
        ConfigError: A file cannot be written.
    """
    lines = [] if options.trace is None else [f"\nwritten to {options.trace}: open it in ui.perfetto.dev"]
    try:
        if options.record_load is not None and report.recorded is not None:
            file = Path(options.record_load).with_suffix(".npz")
            report.recorded.save(file)
            lines.append(f"\nwritten to {file}: ep-moe plan {file} says what other numbers of ranks would do")
        if options.plot is not None:
            plot_load(report, options.plot)
            lines.append(f"\nwritten to {options.plot}")
    except OSError as error:
        raise ConfigError(f"a file cannot be written: {error}") from error
    return lines


def plot_load(report: RunReport, file: str) -> None:
    """Plot heat maps of each layer's load by expert and by rank, divided by its mean.

    Args:
        report: The report of rank 0.
        file: The picture's name.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2 + 0.25 * len(report.expert_load)), layout="constrained")
    wide, narrow = figure.subplots(1, 2, width_ratios=[2, 1])
    for axes, name, load in ((wide, "expert", report.expert_load), (narrow, "EP rank", report.rank_load)):
        relative = [[routes * len(row) / max(sum(row), 1) for routes in row] for row in load]
        image = axes.imshow(relative, aspect="auto", vmin=0, interpolation="nearest")
        fullest = max(map(max, relative))
        axes.set(xlabel=name, ylabel="layer", title=f"load / mean by {name}: fullest {fullest:.2f}")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axes)
    figure.suptitle(report.title, fontsize="small", wrap=True)
    figure.savefig(file, dpi=120)


def print_tuned(out: Output, tuned: Tuned) -> None:
    """Print the measurements of `ep-moe tune`.

    Args:
        out: The output to print to.
        tuned: The result of rank 0.
    """
    facts = ", ".join(f"{name} {value}" for name, value in (tuned.machine | tuned.layer).items() if value is not None)
    out.line(f"\n{facts}")
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
        out.table(f"up to {bucket.tokens} tokens per rank", ["all2all", "experts", "in parts of", "us", ""], rows)
