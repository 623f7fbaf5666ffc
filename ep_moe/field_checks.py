"""Checks of what configurations hold: a ConfigError says the field, what it must be, and what it is."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeGuard

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


def check_sets(capabilities: Any) -> None:
    """Of a backend's capabilities: fields that are sets of something hold sets, and flags hold bools."""
    for field in dataclasses.fields(capabilities):
        value, name = getattr(capabilities, field.name), f"{type(capabilities).__name__}.{field.name}"
        if str(field.type).startswith("frozenset"):
            if not isinstance(value, frozenset | set) and not (value is None and "None" in str(field.type)):
                raise ConfigError(f"{name} must be a frozenset, got {value!r}")
        elif field.type == "bool":
            check_kind(name, value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
