"""Old names of public things: they work for one release, with a DeprecationWarning that says the new name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that `old` is `new` now."""
    warnings.warn(f"{old} is {new} now; the old name goes with the next release", DeprecationWarning, stacklevel)


def renamed(old: str, new: str) -> Any:
    """A property under an old name, for what an instance has under the new one."""

    def get(self: Any) -> Any:
        warn_renamed(f"{type(self).__name__}.{old}", new)
        return getattr(self, new)

    return property(get, doc=f"Deprecated name of `{new}`.")


def take_old_names(kind: type, names: Mapping[str, str]) -> None:
    """Give a subclass, written for an earlier release, the new names of what it overrides. names: old to new"""
    for old, new in names.items():
        if old in kind.__dict__ and new not in kind.__dict__:
            warn_renamed(f"{kind.__name__}.{old}", new, stacklevel=4)
            setattr(kind, new, kind.__dict__[old])


PLUGIN_HOOKS = {
    "why_not": "unsupported_reason",
    "platform_problem": "unsupported_platform",
    "preparation": "weight_layout",
}
