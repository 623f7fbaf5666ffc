"""`ep-moe explain`: what serves a model first, and the refusals by their reason."""

from __future__ import annotations

from collections.abc import Sequence

from ep_moe.selection.explain import BackendChoice

_ORDER = ("chosen", "possible", "refused")


def in_order(rows: Sequence[BackendChoice]) -> list[BackendChoice]:
    """Sort a table of `explain` by status.

    Args:
        rows: The table.

    Returns:
        The same rows: chosen, possible, refused.
    """
    return sorted(rows, key=lambda row: _ORDER.index(row.status))


def grouped(rows: Sequence[BackendChoice]) -> list[str]:
    """Describe a table of `explain` in few lines.

    Args:
        rows: The table.

    Returns:
        A line for the chosen pair and each possible one; then one for each reason of the refusals, most pairs first.
    """
    lines = [str(row) for row in in_order(rows) if row.status != "refused"]
    refused: dict[str, list[BackendChoice]] = {}
    absent: dict[str, set[str]] = {}  # backends whose own reason it is, whatever they are paired with
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
