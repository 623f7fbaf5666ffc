"""Checks of what configurations hold: a ConfigError says the field, what it must be, and what it is."""

from __future__ import annotations

import dataclasses
import enum
import functools
from types import NoneType, UnionType
from typing import Any, TypeGuard, get_args, get_origin, get_type_hints

from ep_moe.errors import ConfigError

SHORTEST_DEADLINE_S = 0.001  # torch counts in milliseconds, and has no word for never
LONGEST_DEADLINE_S = 7 * 24 * 3600.0  # three of them in milliseconds are still an int32, which poll() takes


def check_count(name: str, value: object, *, at_least: int) -> None:
    """name: as the user wrote it, such as `MoEConfig.top_k`"""
    if type(value) is not int or value < at_least:  # True is no count
        raise ConfigError(f"{name} must be an integer of at least {at_least}, got {value!r}")


def check_positive(name: str, value: object) -> None:
    if not is_number(value) or not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be a positive number, got {value!r}")


def deadline_problem(name: str, value: object) -> str | None:
    """None, or why a number of seconds is no deadline."""
    if is_number(value) and SHORTEST_DEADLINE_S <= value <= LONGEST_DEADLINE_S:
        return None
    bounds = f"at least {SHORTEST_DEADLINE_S:g} and at most {LONGEST_DEADLINE_S:g}"
    return f"{name} must be a number of seconds, {bounds}, got {value!r}"


def check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        known = f"one of {', '.join(map(str, kind))}" if issubclass(kind, enum.Enum) else f"a {kind.__name__}"
        raise ConfigError(f"{name} must be {known}, got {value!r}")


def check_fields(capabilities: Any, kind: type) -> None:
    """A backend's capabilities hold what the annotations of their class say. Numbers are left to `check_count`.

    kind: the class of ep_moe's that they extend
    """
    hints = _hints(kind)
    for field in dataclasses.fields(kind):
        value = getattr(capabilities, field.name)
        if int not in (hints[field.name], *get_args(hints[field.name])) and not _fits(value, hints[field.name]):
            raise ConfigError(f"{kind.__name__}.{field.name} must be a {field.type}, got {value!r}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, part) for part in parts)
    if origin is frozenset:
        return isinstance(value, frozenset | set) and all(_fits(item, parts[0]) for item in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_fits, value, parts))
    return type(value) is hint if hint in (int, bool, NoneType) else isinstance(value, hint)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
