"""Public names say what they take, return and raise, so that a tool can render them."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import ep_moe
from ep_moe import config, eplb, metrics, registry, router, testing, training, types
from ep_moe.quant import fp8, kernels, microscale, row_format, schemes
from ep_moe.selection import backend_table, explain, resolve, tuned

QUANT = (fp8, kernels, microscale, row_format, schemes)
SELECTION = (backend_table, explain, resolve, tuned)
WHOLE = (config, registry, router, types, *QUANT, *SELECTION)  # all that they define is public
EXPORTS = (ep_moe, eplb, metrics, testing, training)


def public() -> Iterator[tuple[str, Any]]:
    """Qualified names and functions or classes that users call."""
    for module in EXPORTS:
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name)
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
    """What the docstring of a function, or of a class as its constructor, leaves out. doc: one that it inherits"""
    doc = inspect.cleandoc(found.__doc__ or doc or "")
    if inspect.isclass(found):
        doc += "\n" + inspect.cleandoc(found.__init__.__doc__ or "")
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
    one_line = "\n" not in doc and not parameters  # "Name ..." says what a function without arguments gives
    if gives and not (one_line or has(doc, "Returns") or has(doc, "Yields")):
        missing.append(f"{name}: Returns")
    if raises(found) and not has(doc, "Raises"):
        missing.append(f"{name}: Raises")
    return missing


def missing(name: str, found: Any) -> list[str]:
    if inspect.isfunction(found):
        return missing_of(name, found)
    if not inspect.isclass(found):
        return []
    if issubclass(found, enum.Enum | BaseException):
        lacks = [] if found.__doc__ else [f"{name} has no docstring"]
    else:
        lacks = missing_of(name, found)
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
