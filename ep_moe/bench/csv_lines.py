"""A benchmark's lines as a CSV file: a column for each field."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write(lines: Sequence[Any], file: Path) -> None:
    """lines: dataclasses, alike and at least one; None is an empty cell"""
    with file.open("w", newline="") as target:
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow([field.name for field in dataclasses.fields(lines[0])])
        writer.writerows(dataclasses.astuple(line) for line in lines)
