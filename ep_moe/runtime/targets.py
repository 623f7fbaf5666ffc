"""Files that a command is to write: what is wrong with them is said before anything is computed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ep_moe.errors import ConfigError

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
