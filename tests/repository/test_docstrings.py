"""Public names have an entry in the API reference, and document their arguments, results and errors."""

from __future__ import annotations

import ast
import enum
import inspect
import pkgutil
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ep_moe
from ep_moe import config, eplb, metrics, registry, router, testing, training, types
from ep_moe.quant import fp8, kernels, microscale, row_format, schemes
from ep_moe.selection import backend_table, explain, resolve, tuned

QUANT = (fp8, kernels, microscale, row_format, schemes)
SELECTION = (backend_table, explain, resolve, tuned)
WHOLE = (config, registry, router, types, *QUANT, *SELECTION)  # all names that these modules define are public
EXPORTS = (ep_moe, eplb, metrics, testing, training)
BASES = ("ep_moe.all2all.base.Dispatcher", "ep_moe.experts.base.Experts", "ep_moe.experts.fused.base.FusedExperts")
ROOT = Path(__file__).parents[2]
API = "".join(page.read_text() for page in sorted((ROOT / "docs" / "reference" / "api").glob("*.md")))
ENTRIES = dict(re.findall(r"^::: ([\w.]+)\n((?: .*\n)*)", API, re.MULTILINE))  # name: options


def used() -> Iterator[tuple[str, Any]]:
    """Yield each name that pages and examples import, with the place."""
    codes = {path.name: path.read_text() for path in (ROOT / "examples").rglob("*.py")}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        codes[page.name] = "\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE))
    for place, code in codes.items():
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ep_moe"):
                found = [pkgutil.resolve_name(f"{node.module}:{alias.name}") for alias in node.names]
                yield from ((place, one) for one in found if not inspect.ismodule(one))


def public() -> Iterator[tuple[str, Any]]:
    """Yield qualified names and functions or classes that users call."""
    for name in ENTRIES:
        yield name, pkgutil.resolve_name(name)
    for module in WHOLE:
        for name, found in vars(module).items():
            if not name.startswith("_") and getattr(found, "__module__", None) == module.__name__:
                yield f"{module.__name__}.{name}", found


def has(doc: str, section: str) -> bool:
    return re.search(rf"^{section}:$", doc, re.MULTILINE) is not None


def raises(function: Any) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))


def missing_of(name: str, found: Any, doc: str | None = None) -> list[str]:
    """Return what the docstring of a function, or of a class as its constructor, leaves out.

    `doc` is the docstring that a method inherits.
    """
    doc = inspect.cleandoc(found.__doc__ or doc or "")
    if inspect.isclass(found):
        doc += "\n" + inspect.cleandoc(found.__init__.__doc__ or "")
        named = re.findall(r"the arguments of `(\w+)` too", doc)
        doc += "".join("\n" + (inspect.getdoc(base) or "") for base in found.__mro__ if base.__name__ in named)
    if not doc.strip():
        return [f"{name} has no docstring"]
    signature = inspect.signature(found)
    parameters = [p for p in signature.parameters if p not in ("self", "cls") and not p.startswith("_")]
    missing = [f"{name}: Args: {p}" for p in parameters if not re.search(rf"^ +\*{{0,2}}{p}: ", doc, re.MULTILINE)]
    if parameters and not has(doc, "Args"):
        missing.append(f"{name}: Args")
    if inspect.isclass(found):
        return missing
    gives = signature.return_annotation not in (None, "None", inspect.Signature.empty)
    one_line = "\n" not in doc and not parameters  # which is enough without arguments
    if gives and not (one_line or has(doc, "Returns") or has(doc, "Yields")):
        missing.append(f"{name}: Returns")
    if raises(found) and not has(doc, "Raises"):
        missing.append(f"{name}: Raises")
    return missing


def missing(name: str, found: Any) -> list[str]:
    """Return what the docstrings of a name and its members leave out.

    Members are skipped if the API entry hides them.
    """
    if inspect.isfunction(found):
        return missing_of(name, found)
    if not inspect.isclass(found):
        return []
    if issubclass(found, enum.Enum | BaseException):
        lacks = [] if found.__doc__ else [f"{name} has no docstring"]
    else:
        lacks = missing_of(name, found)
    if "members: false" in ENTRIES.get(name, ""):
        return lacks
    ours = [kind for kind in found.__mro__ if kind.__module__ == found.__module__ or "ep_moe." in kind.__module__]
    for own, member in (item for kind in ours for item in vars(kind).items()):
        if own.startswith("_"):
            continue
        member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if inspect.isfunction(member):
            lacks += missing_of(f"{name}.{own}", member, inspect.getdoc(getattr(found, own)))
        elif isinstance(member, property) and not member.__doc__:
            lacks.append(f"{name}.{own} has no docstring")
    return lacks


def test_public_names_are_documented() -> None:
    found = [line for name, thing in public() for line in missing(name, thing)]
    assert not found, "\n".join(found)


def test_public_names_have_one_entry() -> None:
    """Exported names, base classes of plug-ins, and names that pages and examples import have exactly one API entry."""
    entries = [pkgutil.resolve_name(name) for name in ENTRIES]
    exported = [f"{module.__name__}.{name}" for module in EXPORTS for name in module.__all__ if name != "__version__"]
    named = [(name, pkgutil.resolve_name(name)) for name in [*exported, *BASES]]
    without = [f"{place}: {thing}" for place, thing in [*named, *used()] if not any(thing is one for one in entries)]
    assert not without, "\n".join(without)
    assert Counter(map(id, entries)).most_common(1)[0][1] == 1, ENTRIES
    assert len(ENTRIES) == API.count("\n::: "), "an entry is there twice, or is not read"


def test_documented_names_of_a_package_are_exported() -> None:
    entries = [pkgutil.resolve_name(name) for name in ENTRIES]
    held = {
        f"{module.__name__}.{name}"
        for module in EXPORTS
        for name, thing in vars(module).items()
        if any(thing is one for one in entries)
    }
    assert held <= {f"{module.__name__}.{name}" for module in EXPORTS for name in module.__all__}
    assert len(held) > 50


def test_what_is_left_out_is_found() -> None:
    def taken(rows: int, columns: int) -> int:
        """Multiply.

        Args:
            rows: Of it.
        """
        if rows < 0:
            raise ValueError(rows)
        return rows * columns

    class Held:
        """Held."""

        @property
        def size(self) -> int:
            return 1

        def grow(self, by: int) -> None: ...

    assert missing("taken", taken) == ["taken: Args: columns", "taken: Returns", "taken: Raises"]
    assert missing("Held", Held) == ["Held.size has no docstring", "Held.grow has no docstring"]
