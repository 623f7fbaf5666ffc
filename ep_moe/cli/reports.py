"""Reports of `ep-moe run` and `ep-moe tune` for a reader."""

from __future__ import annotations

from ep_moe.cli.output import Output
from ep_moe.cli.run import DIGITS, RunReport
from ep_moe.cli.run_eplb import Rebalanced
from ep_moe.selection.tuned import Tuned

_WIDE = 8  # layers that fit side by side


def print_report(out: Output, report: RunReport) -> None:
    """Print what a run found.

    Args:
        out: Where.
        report: Of rank 0.
    """
    out.line(report.title)
    out.line(f"\nperplexity over {report.tokens} tokens")
    out.line(f"  ep_moe        {report.perplexity:#.{DIGITS}g}")
    if report.reference is not None:
        apart = abs(report.perplexity / report.reference - 1)
        verdict = f"equal to {DIGITS} digits" if report.agrees else f"relative difference {apart:.1e}"
        if not report.agrees and report.exact:
            verdict = f"DIFFERENT, {verdict}: in float32 this is a bug"
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


def print_tuned(out: Output, tuned: Tuned) -> None:
    """Print what was measured.

    Args:
        out: Where.
        tuned: Of rank 0.
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
