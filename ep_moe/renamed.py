"""Old names of public things: they work for one release, with a DeprecationWarning that says the new name.

`renamed` serves an attribute or method of a class, `renamed_field` an argument of a dataclass, `renamed_in` a name of a
module, `take_old_names` what a subclass of an earlier release overrides.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def renamed(old: str, new: str) -> Any:
    """Make an attribute of a class, under an old name, for what instances have under the new one.

    Args:
        old: The attribute's name.
        new: The name of an attribute or method.

    Returns:
        A property.
    """

    def get(self: Any) -> Any:
        _warn(f"{type(self).__name__}.{old}", new)
        return getattr(self, new)

    return property(get, doc=f"Deprecated name of `{new}`.")


def renamed_field(old: str, new: str) -> Callable[[type[Kind]], type[Kind]]:
    """Let a dataclass take a field under its old name, also in `dataclasses.replace`.

    Args:
        old: The field's name.
        new: The name that it has now.

    Returns:
        A decorator for the dataclass.
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
    """Make the `__getattr__` of a module whose names have changed.

    Args:
        module: Its `__name__`.
        names: Old name to new name and what it stands for.

    Returns:
        A function that warns and gives it.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new, found = names[name]
        _warn(f"{module}.{name}", new)
        return found

    return get


def take_old_names(kind: type, names: Mapping[str, str]) -> None:
    """Give a subclass, written for an earlier release, the new names of what it overrides.

    Args:
        kind: The subclass.
        names: Old name to new name.
    """
    for old, new in names.items():
        if old in kind.__dict__ and new not in kind.__dict__:
            _warn(f"{kind.__name__}.{old}", new, stacklevel=5)  # of the class: ABCMeta lies between
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
