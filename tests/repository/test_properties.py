"""Reading a property has no effect. Code that writes, launches or waits is a method."""

import ast
from pathlib import Path

import ep_moe

PROPERTIES = {"property", "cached_property"}
IN_PLACE = {"copy_", "zero_", "fill_", "add_", "synchronize", "wait"}


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def effects(function: ast.FunctionDef) -> list[str]:
    """Return the lines of a function that assign to attributes of self, or write or wait by method name."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
            if any("self" in ast.unparse(target).split(".")[0] and "." in ast.unparse(target) for target in targets):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE:
            found.append(ast.unparse(node))
    return found


def faults(source: str) -> list[str]:
    """Return the properties of a module's classes that have an effect, directly or through a method of their class."""
    found = []
    for kind in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        bodies = [node for node in kind.body if isinstance(node, ast.FunctionDef)]
        methods = {node.name: node for node in bodies}
        for method in bodies:
            name = method.name
            if any(ast.unparse(decorator).endswith(".setter") for decorator in method.decorator_list):
                found.append(f"{kind.name}.{name}: a setter")
            if not any(name_of(decorator) in PROPERTIES for decorator in method.decorator_list):
                continue
            reached, ahead = {name}, [method]
            while ahead:
                function = ahead.pop()
                found += [f"{kind.name}.{name}: {line}" for line in effects(function)]
                for node in ast.walk(function):
                    own = isinstance(node, ast.Attribute) and name_of(node.value) == "self"
                    if own and node.attr in methods.keys() - reached:
                        reached.add(node.attr)
                        ahead.append(methods[node.attr])
    return found


def test_reading_a_property_changes_nothing() -> None:
    root = Path(ep_moe.__file__).parent
    found = [f"{path.relative_to(root)} {fault}" for path in root.rglob("*.py") for fault in faults(path.read_text())]
    assert not found, "make it a method:\n" + "\n".join(found)


def test_effects_are_found() -> None:
    planted = """
class Store:
    @property
    def size(self):
        self.count += 1
        return self.count
    @property
    def rows(self):
        return self._follow()
    def _follow(self):
        self.kept["a"] = 1
    @property
    def whole(self):
        self.rows_.copy_(self.other)
        return self.rows_
    @whole.setter
    def whole(self, value): ...
    @property
    def plain(self):
        found = [1]
        found[0] = len(self.kept)
        return found
"""
    assert [fault.split(":")[0] for fault in faults(planted)] == [
        "Store.size",
        "Store.rows",
        "Store.whole",
        "Store.whole",
    ]
