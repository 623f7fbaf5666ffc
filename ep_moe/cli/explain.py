"""`ep-moe explain`: prints the backends that can run a model, then those that cannot, grouped by reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ep_moe.cli.output import DEFAULT_LEVEL, AsJson, LogLevel, ModelArgument, Quiet, command, model_named
from ep_moe.config import ONE_SCALE, ParallelConfig, Wire
from ep_moe.integrations.model_name import sizes_named
from ep_moe.selection.explain import BackendChoice, explain_model

_ORDER = ("chosen", "possible", "refused")


def explain(
    model: ModelArgument = None,
    dp: Annotated[int, typer.Option(help="Data-parallel size.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size: ranks that hold the same tokens.")] = 1,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel size; default dp * tp / etp.")] = None,
    etp: Annotated[int, typer.Option(help="Ranks over which each expert is sharded.")] = 1,
    all2all: Annotated[str, typer.Option(help="Transport: auto, or the only one to consider.")] = "auto",
    experts: Annotated[str, typer.Option(help="Expert kernel: auto, or the only one to consider.")] = "auto",
    quantization: Annotated[
        str, typer.Option(help="Quantization of the experts: none, fp8_dynamic, fp8_block, ...")
    ] = "none",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    max_tokens: Annotated[int | None, typer.Option(help="Token limit of a rank's call; default any number.")] = None,
    wire: Annotated[
        str, typer.Option(help="Row format of dispatch: plain, fp8_block, fp8_row, fp8_tensor, mxfp8, nvfp4.")
    ] = "plain",
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks of a node; default all of them.")] = None,
    every: Annotated[bool, typer.Option("--all", help="A line for each refused pair too.")] = False,
    gpu: Annotated[
        str | None,
        typer.Option(help="GPU type, not necessarily here: h100, h200 or b200; default this machine."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    log_level: LogLevel = DEFAULT_LEVEL,
    old_config: Annotated[str | None, typer.Option("--config", hidden=True)] = None,
) -> None:
    """Print the pairs of transport and kernel that can run a model on this machine, and why others cannot.

    With --gpu: on machines with such GPUs, the packages of ep-moe[gpu], and NVLink between the GPUs of a node.
    """
    with command(as_json, quiet, log_level) as out:
        named = model_named("explain", model, config=old_config)
        parallel = ParallelConfig(dp=dp, tp=tp, ep=ep, etp=etp)
        rows_as = Wire(dispatch=wire, input_scale=1.0 if wire in ONE_SCALE else None)  # no reason depends on the scale
        rows = explain_model(
            sizes_named(named),
            parallel,
            all2all,
            experts,
            quantization,
            dtype,
            max_tokens,
            rows_as,
            ranks_per_node,
            gpu,
        )
        for line in [str(row) for row in in_order(rows)] if every else grouped(rows):
            out.line(line)
        chosen = next((row for row in rows if row.status == "chosen"), None)
        out.result({"model": named, "chosen": chosen, "pairs": in_order(rows)})
        if chosen is None:
            raise typer.Exit(1)


def in_order(rows: Sequence[BackendChoice]) -> list[BackendChoice]:
    """Sort a table of `explain` by status.

    Args:
        rows: The table.

    Returns:
        The same rows: chosen, possible, refused.
    """
    return sorted(rows, key=lambda row: _ORDER.index(row.status))


def grouped(rows: Sequence[BackendChoice]) -> list[str]:
    """Summarize a table of `explain` in a few lines.

    Args:
        rows: The table.

    Returns:
        A line for the chosen pair and each possible one, then a line for each reason of refusals, most pairs first.
    """
    lines = [str(row) for row in in_order(rows) if row.status != "refused"]
    refused: dict[str, list[BackendChoice]] = {}
    absent: dict[str, set[str]] = {}  # by reason, the backends that it refuses in every pair
    for row in rows:
        if row.status == "refused":
            owner, _, own = row.reason.partition(": ")
            is_own = owner in (row.all2all, row.experts)
            reason = own if is_own else row.reason
            refused.setdefault(reason, []).append(row)
            absent.setdefault(reason, set()).update([owner] if is_own else [])
    if refused:
        count = sum(map(len, refused.values()))
        lines += ["", f"refused: {count} pairs, by reason (--all lists the pairs)"]
        for reason, pairs in sorted(refused.items(), key=lambda item: -len(item[1])):
            lines.append(f"{len(pairs):4}  {', '.join(sorted(absent[reason])) or _who(pairs)}: {reason}")
    return lines


def _who(pairs: Sequence[BackendChoice]) -> str:
    transports, kernels = (sorted({getattr(row, field) for row in pairs}) for field in ("all2all", "experts"))
    if len(pairs) == 1:
        return f"{transports[0]} with {kernels[0]}"
    if len(transports) == 1:
        return f"{transports[0]} with {len(kernels)} kernels"
    if len(kernels) == 1:
        return f"{kernels[0]} with {len(transports)} transports"
    return f"{len(transports)} transports, {len(kernels)} kernels"
