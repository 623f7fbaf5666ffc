"""Modules, and names in them, that docstrings, comments and pages put in backticks exist.

A reference `first.second` is checked if `first` is a module or folder of `ep_moe`, or `second` is a constant in
capitals. Variables, and modules in checkpoints, share some of these names: `config.top_k` is accepted because code
reads this attribute, `router.layer` because code has this string.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from ep_moe.registry import Kind
from tests.repository.test_docs import PRESENT
from tests.repository.test_imports_resolve import ROOT, SOURCES, module_file, names_of, parsed

REFERENCE = re.compile(r"(?<!`)`([a-z_]\w*(?:\.\w+)+)(?:\([^`]*\))?`(?!`)")
FILE_ENDINGS = {"cu", "json", "md", "npz", "png", "py", "safetensors", "sbatch", "sh", "toml", "txt"}
OTHERS = {"flashinfer", "transformers"}  # other packages, which have folders or modules with names like ours
GROUPS = {f"ep_moe.{kind}" for kind in get_args(Kind)}  # names of entry point groups


@functools.cache
def modules() -> dict[str, list[str]]:
    """Map the last part of each module's and package's name to the whole names."""
    found = defaultdict(list)
    for path in SOURCES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "ep_moe":
            whole = parts[:-1] if parts[-1] == "__init__" else parts
            found[whole[-1]].append(".".join(whole))
    return found


@functools.cache
def used() -> tuple[set[tuple[str, str]], str]:
    """Return (name before, name after) of each dot in all code, and all strings without whitespace."""
    pairs, strings = set(), set()
    for node in (node for path in SOURCES for node in ast.walk(parsed(path))):
        if isinstance(node, ast.Attribute):
            owner = node.value
            pairs.add((owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", ""), node.attr))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.search(r"\s", node.value):
            strings.add(node.value)
    return pairs, "\n".join(strings)


def within(module: str, parts: list[str]) -> bool:
    """Return whether a module or package has the named parts: submodules, then a name."""
    if not parts:
        return True
    inner = f"{module}.{parts[0]}"
    if module_file(inner) is not None:
        return within(inner, parts[1:])
    path = module_file(module)
    names = set() if path is None else names_of(path)
    return names is None or parts[0] in names


def exists(reference: str) -> bool:
    """Return whether a reference names something, as far as its first part is known."""
    first, second, *_ = parts = reference.split(".")
    constant = len(parts) == 2 and second.isupper()
    if (first not in modules() and not constant) or first in OTHERS or parts[-1] in FILE_ENDINGS or reference in GROUPS:
        return True
    if any(part.isdigit() for part in parts):  # a tensor name of a checkpoint
        return True
    if any(within(module, parts[1:]) for module in modules().get(first, ())):
        return True
    pairs, strings = used()
    return (first, second) in pairs or reference in strings


def references(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each reference in backticks."""
    for number, line in enumerate(text.splitlines(), 1):
        for reference in REFERENCE.findall(line):
            yield number, reference


def test_named_modules_exist():
    sources = [path for path in SOURCES if path != Path(__file__)]  # this file plants wrong references
    texts = [*sources, *(ROOT / "ep_moe").rglob("*.cu"), *PRESENT]
    missing = [
        f"{path.relative_to(ROOT)}:{number}: {reference}"
        for path in texts
        for number, reference in references(path.read_text())
        if not exists(reference)
    ]
    assert missing == []


@pytest.mark.parametrize(
    "text",
    [
        "as `launch_cache.launches` gives them",
        "`ep_moe.runtime.launches` has it",
        "by `nvlink_p2p.bulk.sum_rows(x)`",
        "a name of `row_formats.ROW_FORMATS`",
    ],
)
def test_what_does_not_exist_is_found(text):
    ((_, reference),) = references(text)
    assert not exists(reference)


@pytest.mark.parametrize(
    "text",
    [
        "`launch_cache.LaunchCache`, `runtime.launch_cache` and `ep_moe.runtime.launch_cache.cdiv(a, b)`",
        "`config.top_k` and `router.weight` of a layer, `experts.3.up_proj` of a checkpoint",
        "`torch.compile`, `tune.json`, `row_format.ROW_FORMATS`, `Weighting.EXPERTS`",
    ],
)
def test_what_exists_is_not(text):
    assert all(exists(reference) for _, reference in references(text))
