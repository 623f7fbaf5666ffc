"""Deprecated aliases of renamed public names. They work for one release, and warn with the new name.

- `renamed`: an attribute or method of a class.
- `renamed_field`: a field of a dataclass.
- `renamed_in`: a name in a module.
- `take_old_names`: methods that a subclass, written for an earlier release, overrides.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def renamed(old: str, new: str) -> Any:
    """Return a property that warns and forwards to a renamed attribute or method.

    Args:
        old: The old name.
        new: The new name of the attribute or method.

    Returns:
        The property, to be assigned to the old name in the class body.
    """

    def get(self: Any) -> Any:
        _warn(f"{type(self).__name__}.{old}", new)
        return getattr(self, new)

    return property(get, doc=f"Deprecated name of `{new}`.")


def renamed_field(old: str, new: str) -> Callable[[type[Kind]], type[Kind]]:
    """Return a decorator that lets a dataclass take a field under its old name, also in `dataclasses.replace`.

    Args:
        old: The field's old name.
        new: The field's new name.

    Returns:
        The decorator.
    """

    def decorate(kind: type[Kind]) -> type[Kind]:
        made: Callable[..., None] = kind.__init__

        @functools.wraps(made)
        def init(self: Any, *args: Any, **fields: Any) -> None:
            if old in fields:
                _warn(f"{kind.__name__}({old}=)", new)
                fields[new] = fields.pop(old)
            made(self, *args, **fields)

        kind.__init__ = init  # type: ignore[method-assign]
        return kind

    return decorate


def renamed_in(module: str, names: Mapping[str, tuple[str, Any]]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module with renamed objects.

    Args:
        module: The module's `__name__`.
        names: (new name, object) by old name.

    Returns:
        A function that warns and returns the object.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new, found = names[name]
        _warn(f"{module}.{name}", new)
        return found

    return get


def take_old_names(kind: type, names: Mapping[str, str]) -> None:
    """Assign a subclass's overrides of old names to the new names, with a warning.

    Args:
        kind: A subclass that may have been written for an earlier release.
        names: New name by old name.
    """
    for old, new in names.items():
        if old in kind.__dict__ and new not in kind.__dict__:
            _warn(f"{kind.__name__}.{old}", new, stacklevel=5)  # points at the class statement, across ABCMeta's frames
            setattr(kind, new, kind.__dict__[old])


def _warn(old: str, new: str, stacklevel: int = 3) -> None:
    warnings.warn(f"{old} is {new} now; the old name goes with the next release", DeprecationWarning, stacklevel)


PLUGIN_HOOKS = {
    "why_not": "unsupported_reason",
    "platform_problem": "unsupported_platform",
    "preparation": "weight_layout",
    "run_on": "tested_machines",
    "again": "recordable_call",
    "map_problem": "unsupported_map",
}
