"""The model of a command: its first argument."""

from __future__ import annotations

from typing import Annotated

import typer

from ep_moe.cli.output import note
from ep_moe.config import model_configs
from ep_moe.errors import ConfigError
from ep_moe.integrations.model_name import FORMS

ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=f"{FORMS[0].upper()}{FORMS[1:]}.")]


def model_named(command: str, model: str | None, default: str | None = None, /, **old: str | None) -> str:
    """Take the model of a command from its first argument, or from an option of an earlier release.

    Args:
        command: Its name, for errors.
        model: The argument.
        default: Where nothing is given. None: an error.
        **old: Values of options that an earlier release had, by name.

    Returns:
        The name.

    Raises:
        ConfigError: no model, or more than one.
    """
    found = [] if model is None else [model]
    for option, value in old.items():
        if value is not None:
            found.append(value)
            note(f"note: --{option} is deprecated, the next release has none; write ep-moe {command} {value}")
    if len(found) > 1:
        raise ConfigError(f"{command} takes one model, got {' and '.join(found)}; leave out one of them")
    if not found and default is None:
        known = ", ".join(model_configs())
        raise ConfigError(f"{command} needs a model as its first argument: {FORMS}; bundled are {known}")
    return found[0] if found else str(default)
