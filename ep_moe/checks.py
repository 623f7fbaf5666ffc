"""Validate user configuration and backend results, and convert configuration dataclasses from and to tables.

A failed check of user input raises a ConfigError that names the field, the allowed values and the value found. Checks
accept NumPy integers and floats, and reject True and False as numbers. They return Python's own int or float, because
ranks compare configurations as text.
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

SHORTEST_DEADLINE_S = 0.001  # torch's timeouts have a resolution of 1 ms, and no value for "never"
LONGEST_DEADLINE_S = 7 * 24 * 3600.0  # three deadlines in milliseconds fit into the int32 that poll() takes
LARGEST = 2**63 - 1  # the largest int64
INT32_MAX = 2**31 - 1  # kernels index rows and columns with int32
MOST_EXPERTS = 2**20  # also limits the ranks of a map: far above any model, and a table of this size fits in memory
_SHOWN = 120  # characters of a value that an error prints


def check_count(name: str, value: object, *, at_least: int, at_most: int = LARGEST) -> int:
    """Return value as a Python int; raise ConfigError unless it is an integer in [at_least, at_most].

    name: the field as the user wrote it, such as `MoEConfig.top_k`
    """
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
    """Return value as a Python number; raise ConfigError unless it is a fraction in (0, 1]."""
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
    """Return None, or the reason why a number of seconds cannot be a deadline."""
    found = as_number(value)
    if found is not None and SHORTEST_DEADLINE_S <= found <= LONGEST_DEADLINE_S:
        return None
    bounds = f"at least {SHORTEST_DEADLINE_S:g} and at most {LONGEST_DEADLINE_S:g}"
    return f"{name} must be a number of seconds, {bounds}, got {shown(value)}"


def check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        known = f"one of {', '.join(map(str, kind))}" if issubclass(kind, enum.Enum) else with_article(kind.__name__)
        raise ConfigError(f"{name} must be {known}, got {shown(value)}")


def with_article(name: str) -> str:
    """Return the name of a class after "a" or "an"."""
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def check_fields(capabilities: Any, kind: type) -> None:
    """Raise ConfigError unless the fields of a backend's capabilities have the annotated types.

    Integer fields are skipped: `check_count` checks them.

    kind: the capabilities class of ep_moe that the backend's class extends
    """
    for name, annotation, hint in _checked_fields(kind):
        value = getattr(capabilities, name)
        if not _fits(value, hint):
            raise ConfigError(f"{kind.__name__}.{name} must be a {annotation}, got {shown(value)}")


@functools.cache
def _checked_fields(kind: type) -> list[tuple[str, Any, Any]]:
    """Return name, annotation text and resolved type of each dataclass field that is not an integer."""
    hints = get_type_hints(kind)
    fields = [(field.name, field.type, hints[field.name]) for field in dataclasses.fields(kind)]
    return [(name, text, hint) for name, text, hint in fields if int not in (hint, *_taken_apart(hint)[1])]


@functools.cache
def _taken_apart(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the origin and the arguments of a type hint. Cached: choosing a layer's backends calls it thousands of
    times."""
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
    """Check integer fields of a frozen dataclass and store them as Python ints.

    least: the smallest allowed value of each field, by name
    """
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
    """Return an integer as a Python int, None for any other value."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def as_id(value: object) -> int | None:
    """Return an integer, or an integer tensor of one element, as a Python int; None for any other value."""
    if isinstance(value, numbers.Integral | bool):
        return as_whole(value)
    if getattr(value, "dtype", None) is torch.bool or not isinstance(value, SupportsIndex):
        return None
    try:
        return index(value)
    except TypeError:  # a float tensor, or one of several elements
        return None


def as_number(value: object) -> float | None:
    """Return a finite number as a Python int or float, None for any other value."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    if not abs(found) < float("inf"):  # also rejects NaN
        return None
    return int(value) if isinstance(value, numbers.Integral) else found


def shown(value: object) -> str:
    """Return the repr of a value for an error message, in one line of at most `_SHOWN` characters."""
    try:
        text = " ".join(map(str.strip, repr(value).splitlines()))
    except Exception:  # a user's __repr__ may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({type(value).__name__})"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Suggest the closest known name for an unknown one, as a part of an error message.

    Args:
        name: The name that the user gave.
        known: The valid names.

    Returns:
        " (did you mean 'x'?)", or "" if no known name is close.
    """
    close = difflib.get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def _name(config: Any) -> str:
    return type(config).__name__


# --- configurations as tables -----------------------------------------------------------------------------------------


def from_table(cls: type[Config], table: dict[str, Any], *, where: str) -> Config:
    """Build a configuration dataclass from nested tables.

    Args:
        cls: The dataclass.
        table: Fields by name, as read from TOML.
        where: The name of the table in errors, such as its path.

    Returns:
        An instance of the class.

    Raises:
        ConfigError: a key is unknown or missing, or a value has a wrong type or is out of bounds.
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
    """Flatten a configuration into one entry per field, so that an error can name the field in which ranks differ.

    Args:
        config: A dataclass.
        prefix: The first part of each name.

    Returns:
        Values by "prefix.field"; fields of nested dataclasses by "prefix.field.field". Enums as their values.
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
# Checked before the command computes anything.

_PICTURES = (".png", ".svg", ".pdf")


def check_target(option: str, file: Path | None) -> None:
    """Raise ConfigError unless a command can write this file. None passes.

    option: the option as the user wrote it, such as `--csv`
    """
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


# --- results of backends, checked before they are passed on -----------------------------------------------------------

_REMEDY = "mend the backend, and try it with ep_moe.testing."


def check_returned_rows(what: str, contract: str, y: Any, dtype: torch.dtype, shape: Sequence[int | None]) -> Tensor:
    """Check the rows that an expert kernel or a transport returned.

    Rows of a wrong dtype would change the dtype of the layer's result. If one rank alone sent them, gloo would end a
    process, or peers would read them with the wrong element size.

    Args:
        what: Backend and method, for errors.
        contract: The function of `ep_moe.testing` that finds such faults.
        y: The returned value.
        dtype: The layer's dtype.
        shape: The expected sizes, None for a size that is unknown here.

    Returns:
        y.

    Raises:
        TypeError: y is no tensor of this dtype and shape. The class is not an `EPMoEError`, because the fault is
            this rank's alone. `EPContext` then reports it to the peers.
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
        found: The returned value.
        kind: The required class.

    Raises:
        TypeError: it is of another class.
    """
    if not isinstance(found, kind):
        raise TypeError(f"{what} must be a {kind.__name__}, got {type(found).__name__}; {_REMEDY}{contract}")
