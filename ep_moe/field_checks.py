"""Checks of what configurations hold: a ConfigError says the field, what it must be, and what it is."""

from __future__ import annotations

import enum
from typing import TypeGuard

from ep_moe.errors import ConfigError


def check_count(name: str, value: object, *, at_least: int) -> None:
    """name: as the user wrote it, such as `MoEConfig.top_k`"""
    if type(value) is not int or value < at_least:  # True is no count
        raise ConfigError(f"{name} must be an integer of at least {at_least}, got {value!r}")


def check_positive(name: str, value: object) -> None:
    if not is_number(value) or not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be a positive number, got {value!r}")


def check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        known = f"one of {', '.join(map(str, kind))}" if issubclass(kind, enum.Enum) else f"a {kind.__name__}"
        raise ConfigError(f"{name} must be {known}, got {value!r}")


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
