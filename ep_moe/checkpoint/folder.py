"""Files of a checkpoint folder: its JSON, and the names that stay inside it."""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

from ep_moe.errors import CheckpointError

_AGAIN = "fetch the checkpoint again"


def read_object(file: Path, wrong: str) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        file: the file.
        wrong: how the sentence goes on after its path, such as "is not a safetensors index".

    Raises:
        CheckpointError: the file cannot be read, is no JSON, or holds something else than an object.
    """
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} {wrong}: {type(error).__name__}: {error}; {_AGAIN}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} {wrong}: it must hold an object, got {type(found).__name__}; {_AGAIN}")
    return found


def weight_map(index: Path) -> dict[str, str]:
    """Name of a tensor -> name of its file, of `model.safetensors.index.json`. Raises CheckpointError."""
    wrong = "is not a safetensors index"
    files = read_object(index, wrong).get("weight_map")
    if not isinstance(files, dict):
        raise CheckpointError(f"{index} {wrong}: weight_map must be an object, got {files!r:.80}; {_AGAIN}")
    for name, file in files.items():
        if not isinstance(file, str) or not file:
            raise CheckpointError(
                f"{index} {wrong}: weight_map[{name!r}] must be the name of a file, got {file!r:.80}; {_AGAIN}"
            )
    return files


def file_inside(folder: Path, name: str) -> Path:
    """The path of a file that a checkpoint names.

    A link may lead elsewhere within the folder, or to the blobs of a Hugging Face cache: its snapshots are such links.

    Raises:
        CheckpointError: the name, or the link of that name, leaves the folder.
    """
    path, parts = folder / name, PurePosixPath(name).parts
    if "\0" in name or PurePosixPath(name).is_absolute() or ".." in parts:
        raise CheckpointError(
            f"{folder} names the file {name!r}, which is outside the folder; put the file into the folder and its name "
            f"into the index"
        )
    inside = path.resolve().is_relative_to(folder.resolve())
    if not inside and not _is_cached_blob(path):
        raise CheckpointError(
            f"{path} is a link to {path.resolve()}, outside the folder; copy the file into the folder"
        )
    return path


def _is_cached_blob(path: Path) -> bool:
    """Whether a file is a link to `models--org--name/blobs`. The cache may link such a blob to a shared one in turn."""
    if not path.is_symlink():
        return False
    target = (path.parent.resolve() / os.readlink(path)).parent.resolve()
    return target.name == "blobs" and target.parent.name.startswith("models--")
