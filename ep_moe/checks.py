"""Checks of what a user gives: a ConfigError says the field, what it must be, and what it is. Checks of what a backend
returns. Configurations as tables.

Integers and numbers of NumPy are taken for Python's; True and False are neither. A check returns the value as Python's
own type, since ranks compare configurations as text.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import importlib.util
import numbers
from collections.abc import Iterable, Sequence
from operator import index
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, SupportsIndex, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ep_moe.errors import ConfigError
from ep_moe.types import dtype_name

Config = TypeVar("Config")

SHORTEST_DEADLINE_S = 0.001  # torch counts in milliseconds, and has no word for never
LONGEST_DEADLINE_S = 7 * 24 * 3600.0  # three of them in milliseconds are still an int32, which poll() takes
LARGEST = 2**63 - 1  # what a tensor can hold
INT32 = 2**31 - 1  # kernels count rows and columns in it
MOST_EXPERTS = 2**20  # and ranks of a map: far more than any model has, and a table of them still fits
_SHOWN = 120  # characters of a value


def check_count(name: str, value: object, *, at_least: int, at_most: int = LARGEST) -> int:
    """name: as the user wrote it, such as `MoEConfig.top_k`"""
    found = as_whole(value)
    if found is None or not at_least <= found <= at_most:
        within = f"at most {at_most}" if found is not None and found > at_most else f"at least {at_least}"
        raise ConfigError(f"{name} must be an integer of {within}, got {shown(value)}")
    return found


def check_positive(name: str, value: object) -> float:
    found = as_number(value)
    if found is None or not found > 0:
        raise ConfigError(f"{name} must be a positive number, got {shown(value)}")
    return found


def check_not_negative(name: str, value: object) -> float:
    found = as_number(value)
    if found is None or found < 0:
        raise ConfigError(f"{name} must be a number of at least 0, got {shown(value)}")
    return found


def check_share(name: str, value: object) -> float:
    """A part of a whole, which is not nothing."""
    found = as_number(value)
    if found is None or not 0 < found <= 1:
        raise ConfigError(f"{name} must be a number above 0 and at most 1, got {shown(value)}")
    return found


def check_flag(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise ConfigError(f"{name} must be True or False, got {shown(value)}")
    return value


def check_divides(name: str, value: object, whole: int, what: str) -> int:
    found = as_whole(value)
    if found is None or found < 1 or whole % found:
        raise ConfigError(f"{name} must divide the {whole} {what}, got {shown(value)}")
    return found


def deadline_problem(name: str, value: object) -> str | None:
    """None, or why a number of seconds is no deadline."""
    found = as_number(value)
    if found is not None and SHORTEST_DEADLINE_S <= found <= LONGEST_DEADLINE_S:
        return None
    bounds = f"at least {SHORTEST_DEADLINE_S:g} and at most {LONGEST_DEADLINE_S:g}"
    return f"{name} must be a number of seconds, {bounds}, got {shown(value)}"


def check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        known = f"one of {', '.join(map(str, kind))}" if issubclass(kind, enum.Enum) else f"a {kind.__name__}"
        raise ConfigError(f"{name} must be {known}, got {shown(value)}")


def check_fields(capabilities: Any, kind: type) -> None:
    """A backend's capabilities hold what the annotations of their class say. Numbers are left to `check_count`.

    kind: the class of ep_moe's that they extend
    """
    for name, annotation, hint in _checked_fields(kind):
        value = getattr(capabilities, name)
        if not _fits(value, hint):
            raise ConfigError(f"{kind.__name__}.{name} must be a {annotation}, got {shown(value)}")


@functools.cache
def _checked_fields(kind: type) -> list[tuple[str, Any, Any]]:
    """Of a dataclass: name, annotation and type of each field without numbers."""
    hints = get_type_hints(kind)
    fields = [(field.name, field.type, hints[field.name]) for field in dataclasses.fields(kind)]
    return [(name, text, hint) for name, text, hint in fields if int not in (hint, *_taken_apart(hint)[1])]


@functools.cache
def _taken_apart(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A layer's choice of backends asks thousands of times."""
    return get_origin(hint), get_args(hint)


def _fits(value: object, hint: Any) -> bool:
    origin, parts = _taken_apart(hint)
    if origin is UnionType:
        return any(_fits(value, part) for part in parts)
    if origin is frozenset:
        return isinstance(value, frozenset | set) and all(_fits(item, parts[0]) for item in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_fits, value, parts))
    return type(value) is hint if hint in (int, bool, NoneType) else isinstance(value, hint)


def check_path(name: str, value: object) -> None:
    if not isinstance(value, str | PathLike):
        raise ConfigError(f"{name} must be a path, got {shown(value)}")


def set_counts(config: Any, *, at_most: int = LARGEST, **least: int) -> None:
    """Check integer fields of a frozen dataclass: name=the least that it may be."""
    for name, at_least in least.items():
        found = check_count(f"{_name(config)}.{name}", getattr(config, name), at_least=at_least, at_most=at_most)
        object.__setattr__(config, name, found)


def set_flags(config: Any, *names: str) -> None:
    for name in names:
        check_flag(f"{_name(config)}.{name}", getattr(config, name))


def set_positive(config: Any, *names: str) -> None:
    for name in names:
        object.__setattr__(config, name, check_positive(f"{_name(config)}.{name}", getattr(config, name)))


def as_whole(value: object) -> int | None:
    """An integer as Python's, None for what is none."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def as_id(value: object) -> int | None:
    """As `as_whole`, and an integer tensor of one element too."""
    if isinstance(value, numbers.Integral | bool):
        return as_whole(value)
    if getattr(value, "dtype", None) is torch.bool or not isinstance(value, SupportsIndex):
        return None
    try:
        return index(value)
    except TypeError:  # a tensor of floats, or of several
        return None


def as_number(value: object) -> float | None:
    """A finite number as Python's, None for what is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    if not abs(found) < float("inf"):  # NaN is not less either
        return None
    return int(value) if isinstance(value, numbers.Integral) else found


def shown(value: object) -> str:
    """A value in a sentence."""
    try:
        text = repr(value)
    except Exception:  # a user's own __repr__
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({type(value).__name__})"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Suggest a name for one that is unknown, for an error.

    Args:
        name: What was given.
        known: The names that there are.

    Returns:
        " (did you mean 'x'?)", or "" where no name is close.
    """
    close = difflib.get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def _name(config: Any) -> str:
    return type(config).__name__


# --- configurations as tables -----------------------------------------------------------------------------------------


def from_table(cls: type[Config], table: dict[str, Any], *, where: str) -> Config:
    """Build a configuration dataclass from nested tables.

    Args:
        table: Fields by name, as TOML has them.
        where: What errors call the table, such as its path.

    Returns:
        An instance of the class.

    Raises:
        ConfigError: a key is unknown or missing, or a value of another type or out of bounds.
    """
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known keys are {', '.join(fields)}"
            raise ConfigError(f"{where}: unknown key {key!r} in {cls.__name__}{hint}")
    missing = [
        f.name
        for f in fields.values()
        if f.name not in table and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: {cls.__name__} needs {', '.join(missing)}")
    given = {key: _value(hints[key], value, f"{where}: {cls.__name__}.{key}") for key, value in table.items()}
    try:
        return cls(**given)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not NoneType)
    if isinstance(value, dict) and dataclasses.is_dataclass(hint):
        return from_table(hint, value, where=where)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            raise ConfigError(f"{where} must be one of {', '.join(m.value for m in hint)}, got {value!r}") from None
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{where} must be of type {getattr(hint, '__name__', hint)}, got {value!r}")
    return value


def flat_facts(config: Any, prefix: str) -> dict[str, Any]:
    """Write a configuration as plain facts, field by field, so that a difference between ranks has a name.

    Args:
        config: A dataclass.
        prefix: What the names begin with.

    Returns:
        Values by "prefix.field", of nested dataclasses too.
    """
    facts: dict[str, Any] = {}
    for own in dataclasses.fields(config):
        value = getattr(config, own.name)
        name = f"{prefix}.{own.name}"
        if dataclasses.is_dataclass(value):
            facts |= flat_facts(value, name)
        else:
            facts[name] = value.value if isinstance(value, enum.Enum) else value
    return facts


# --- files that a command writes --------------------------------------------------------------------------------------
# Files that a command is to write: what is wrong with them is said before anything is computed.

_PICTURES = (".png", ".svg", ".pdf")


def check_target(option: str, file: Path | None) -> None:
    """option: as the user wrote it, such as `--csv`"""
    if file is None:
        return
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {file} is in a folder that does not exist; make it first")
    if file.is_dir():
        raise ConfigError(f"{option} {file} is a folder; name a file in it")


def check_picture(option: str, file: Path | None) -> None:
    check_target(option, file)
    if file is None:
        return
    if file.suffix not in _PICTURES:
        raise ConfigError(f"{option} {file} must end in one of {', '.join(_PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{option} needs matplotlib; pip install ep-moe[plot]")


# --- what a backend returns, looked at before it is sent on -----------------------------------------------------------

_REMEDY = "mend the backend, and try it with ep_moe.testing."


def check_returned_rows(what: str, contract: str, y: Any, dtype: torch.dtype, shape: Sequence[int | None]) -> Tensor:
    """Check rows that a backend has computed or brought back.

    Rows of another dtype would give a layer's result that dtype. On one rank alone they would end a process in gloo,
    or be read by another width.

    Args:
        what: Backend and method, for errors.
        contract: Of `ep_moe.testing`, which finds such faults.
        y: What was returned.
        dtype: Of the layer.
        shape: Sizes, None for one that is not known here.

    Returns:
        y.

    Raises:
        TypeError: y is anything else. No `EPMoEError`, which all ranks raise alike: one rank sends it to its peers.
    """
    if torch.compiler.is_compiling():
        return y  # type: ignore[no-any-return]
    if isinstance(y, Tensor) and y.dtype == dtype and y.dim() == len(shape):
        for size, wanted in zip(y.shape, shape, strict=True):
            if wanted is not None and size != wanted:
                break
        else:
            return y
    sizes = ", ".join("*" if size is None else str(size) for size in shape)
    got = f"{dtype_name(y.dtype)} {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
    raise TypeError(f"{what} must return a Tensor, {dtype_name(dtype)} [{sizes}], got {got}; {_REMEDY}{contract}")


def check_returned(what: str, contract: str, found: Any, kind: type) -> None:
    """Check the class of what a backend returned.

    Args:
        what: As in `check_returned_rows`.
        contract: As in `check_returned_rows`.
        found: What was returned.
        kind: What it must be.

    Raises:
        TypeError: it is of another class.
    """
    if not isinstance(found, kind):
        raise TypeError(f"{what} must be a {kind.__name__}, got {type(found).__name__}; {_REMEDY}{contract}")
