"""Names imported from this repository exist, also in modules that skip without a GPU or Triton."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
PACKAGES = ("ep_moe", "tests", "tools", "examples")
SOURCES = sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))


def module_file(module: str) -> Path | None:
    """Return the file of a module of this repository, None for other modules."""
    base = ROOT.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def defined(tree: ast.Module) -> set[str]:
    """Return the names that a module binds at top level, in branches too."""
    found = {"__doc__", "__file__", "__name__"}
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        else:
            # an assigned `__getattr__` serves old names (`ep_moe.renamed`), which this repository does not use
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id != "__getattr__":
                found.add(node.id)
            todo.extend(ast.iter_child_nodes(node))
    return found


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def names_of(path: Path) -> set[str] | None:
    """Return the names of a module's file, None if a `__getattr__` adds more."""
    names = defined(parsed(path))
    return None if "__getattr__" in names else names


def has(module: str, name: str) -> bool:
    """Return whether `from module import name` works. True for modules of other packages."""
    if module.split(".")[0] not in PACKAGES:
        return True
    path = module_file(module)
    names = set() if path is None else names_of(path)
    return names is None or name in names or module_file(f"{module}.{name}") is not None


def unresolved(tree: ast.AST) -> list[str]:
    """Return imports of this repository, at any depth, and attributes of imported modules, that do not exist."""
    missing, modules = [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole.split(".")[0] in PACKAGES and (path := module_file(whole)) and path.name != "__init__.py":
                    modules[alias.asname or alias.name] = whole
                if not has(node.module, alias.name):
                    missing.append(f"line {node.lineno}: {whole}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module = modules[node.value.id]
            if not has(module, node.attr) and not node.attr.startswith("__"):
                missing.append(f"line {node.lineno}: {module}.{node.attr}")
    return missing


# One item for all files: modules are then parsed once, instead of once per xdist worker.


def test_imported_names_exist():
    found = {str(path.relative_to(ROOT)): unresolved(parsed(path)) for path in SOURCES}
    assert {path: missing for path, missing in found.items() if missing} == {}


def test_private_methods_that_tests_override_exist():
    """Private methods that tests override by super() exist.

    If such a method was renamed, a planted fault that overrides it would have no effect.
    """
    in_tests = [path for path in SOURCES if path.is_relative_to(ROOT / "tests")]
    package = [path for path in SOURCES if path not in in_tests]
    known = {name for path in package for name in re.findall(r"^ *def (\w+)", path.read_text(), re.MULTILINE)}
    known |= dir_of_torch()
    calling = [path for path in in_tests if re.search(r"\bsuper\(.*\)\._", path.read_text())]
    assert calling
    found = {str(path.relative_to(ROOT)): overridden(parsed(path)) - known for path in calling}
    assert {path: missing for path, missing in found.items() if missing} == {}


def overridden(tree: ast.AST) -> set[str]:
    """Return the private methods that a file calls on super()."""
    called = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    ]
    return {name for name in called if name.startswith("_") and not name.startswith("__")}


def dir_of_torch() -> set[str]:
    return {name for kind in (torch.nn.Module, torch.Tensor, torch.optim.Optimizer) for name in dir(kind)}
