"""Find the folder of a model, on this machine or in the Hugging Face cache, as `from_pretrained` does."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict, Unpack

from ep_moe.errors import CheckpointError, ConfigError
from ep_moe.parallel.consensus import StoreConsensus

_SMALL = ["*.json", "*.txt", "*.model", "*.jinja"]
_WEIGHTS = ["*.safetensors"]
_OTHER_FORMS = ["original/*", "metal/*", "onnx/*", "consolidated*"]  # the same weights in other formats
_LONGEST_S = 86400.0  # deadline of the ranks that wait for a download


class HubOptions(TypedDict, total=False):
    """Options of the lookup of a model's name, as in `from_pretrained`.

    revision: branch, tag or commit; token: the Hub's access token; cache_dir: default: that of huggingface_hub;
    local_files_only: do not download; subfolder: a folder within the named one, also within a local folder, for which
    the others are not used
    """

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    subfolder: str


def model_folder(
    path: str | Path, consensus: StoreConsensus | None = None, *, weights: bool = True, **hub: Unpack[HubOptions]
) -> Path:
    """Find the folder of a model.

    An existing folder is returned unchanged. Any other name is looked up by huggingface_hub, in its cache or on the
    Hub. With a consensus, one rank of each host downloads, and the other ranks find the files in the cache.

    Args:
        path: A folder, or a name such as "org/model".
        consensus: The consensus of the ranks that need the model, all of which must call this function. None for a
            single rank.
        weights: Whether to fetch the weights, in addition to configuration and tokenizer.
        hub: See `HubOptions`.

    Returns:
        The folder. All ranks have the same revision of a model of the Hub.

    Raises:
        CheckpointError: A rank has no such folder and cannot download the model. All ranks raise.
        ConfigError: The ranks found different revisions, or huggingface_hub is not installed.
    """
    known = HubOptions.__annotations__
    if unknown := sorted(hub.keys() - known.keys()):
        raise TypeError(f"unexpected keyword argument {', '.join(unknown)}; of the Hub there are {', '.join(known)}")

    def look(**more: bool) -> tuple[Path, str | None]:
        """Return the folder, and the commit if it was found by huggingface_hub."""
        if not isinstance(path, str | Path) or os.path.isfile(path):
            raise CheckpointError(f"path must be a folder or the name of a model, got {path!r}")
        below = _subfolder(hub)
        if os.path.isdir(path):
            return _inside(Path(path), below), None
        options = {name: value for name, value in hub.items() if name != "subfolder"}
        folder = _download(str(path), weights, below, {**options, **more})
        return _inside(folder, below), folder.name

    if consensus is None:
        return look()[0]
    waits = isinstance(path, str | Path) and not os.path.isdir(path)
    longest_s = _LONGEST_S if waits else None
    downloads = consensus.first_here(f"the model {path}", socket.gethostname())
    found, problem = _try(look) if downloads else (None, None)
    consensus.raise_on_all_ranks("checkpoint", problem, deadline_s=longest_s)
    if found is None:
        found, problem = _try(lambda: look(local_files_only=True))
        if problem is not None and waits:  # hosts with the same hostname may have different caches
            found, problem = _try(look)
    consensus.raise_on_all_ranks("checkpoint", problem, deadline_s=longest_s)
    consensus.require_equal("checkpoint", {f"commit of {path}": found[1]} if found and found[1] else {}, None)
    assert found is not None
    return found[0]


def _try(look: Callable[[], tuple[Path, str | None]]) -> tuple[tuple[Path, str | None] | None, Exception | None]:
    try:
        return look(), None
    except Exception as error:
        return None, error


def _subfolder(hub: HubOptions) -> str:
    """Return the subfolder that is asked for, "" for none. Raise ConfigError unless it is within the folder."""
    below = hub.get("subfolder") or ""
    if not isinstance(below, str) or PurePosixPath(below).is_absolute() or ".." in PurePosixPath(below).parts:
        raise ConfigError(f"subfolder must be the name of a folder within the model's, got {below!r}")
    return below and PurePosixPath(below).as_posix()


def _inside(folder: Path, below: str) -> Path:
    if below and not (folder / below).is_dir():
        raise CheckpointError(f"{folder} has no folder {below!r}; check subfolder")
    return folder / below


def _download(name: str, weights: bool, below: str, hub: Mapping[str, Any]) -> Path:
    no_folder = f"there is no folder {name}"
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(f"{no_folder}, and names of the Hugging Face Hub need huggingface_hub; install ep-moe[hf]")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    within = below and f"{below}/"
    try:
        folder = snapshot_download(
            name,
            allow_patterns=[within + pattern for pattern in _SMALL + _WEIGHTS * weights],
            ignore_patterns=[within + pattern for pattern in _OTHER_FORMS],
            **hub,
        )
    except HFValidationError as error:
        raise CheckpointError(f"{no_folder}; give the folder of a checkpoint, or a name such as org/model") from error
    except Exception as error:
        said = " ".join(str(error).split())
        raise CheckpointError(
            f"{no_folder}, and no model of that name came from the Hugging Face Hub ({type(error).__name__}: {said}); "
            f"give a folder, or check the name, revision, token and connection"
        ) from error
    return Path(folder)


# --- files of a folder ------------------------------------------------------------------------------------------------
# Read the JSON files of a checkpoint folder, and keep file names inside the folder.

_AGAIN = "fetch the checkpoint again"


def read_object(file: Path, wrong: str) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        file: The file.
        wrong: The error message after the file's path, such as "is not a safetensors index".

    Returns:
        The object.

    Raises:
        CheckpointError: The file cannot be read, is not JSON, or holds another value than an object.
    """
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} {wrong}: {type(error).__name__}: {error}; {_AGAIN}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} {wrong}: it must hold an object, got {type(found).__name__}; {_AGAIN}")
    return found


def weight_map(index: Path) -> dict[str, str]:
    """Read the file name of each tensor from `model.safetensors.index.json`. Raises CheckpointError."""
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
    """Return the path of a file that a checkpoint's index names.

    A symbolic link may point elsewhere in the folder, or to the blobs of a Hugging Face cache, as those of its
    snapshots do.

    Args:
        folder: The folder of the checkpoint.
        name: The name in the index.

    Raises:
        CheckpointError: The name, or the link of that name, leads out of the folder.
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
    """Return whether a file is a link to `models--org--name/blobs`. Such a blob may be a link to a shared one."""
    if not path.is_symlink():
        return False
    target = (path.parent.resolve() / os.readlink(path)).parent.resolve()
    return target.name == "blobs" and target.parent.name.startswith("models--")
