"""A benchmark's lines as a CSV file: a column for each field."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from ep_moe.errors import ConfigError

LineT = TypeVar("LineT")


def write(lines: Sequence[Any], file: Path) -> None:
    """lines: dataclasses, alike and at least one; None is an empty cell"""
    with file.open("w", newline="") as target:
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow([field.name for field in dataclasses.fields(lines[0])])
        writer.writerows(dataclasses.astuple(line) for line in lines)


def read(file: Path, kind: type[LineT], bench: str) -> list[LineT]:
    """What `write` wrote. kind: the dataclass of the lines; ConfigError where it is no file of this benchmark."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    try:
        with file.open(newline="") as text:
            rows = list(csv.DictReader(text))
        return [kind(**{name: _value(kinds[name], cell) for name, cell in row.items()}) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a file of {bench}: {error!r}; write it with --csv") from error


def _value(kind: str, text: str) -> Any:
    if not text:
        return None
    return float(text) if "float" in kind else int(text) if "int" in kind else text
