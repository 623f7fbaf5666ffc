"""The folder of a model: one on this machine, or one of the Hugging Face cache, as `from_pretrained` finds it."""

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
_OTHER_FORMS = ["original/*", "metal/*", "onnx/*", "consolidated*"]  # the same weights again
_LONGEST_S = 86400.0  # for a download, while the other ranks wait


class HubOptions(TypedDict, total=False):
    """How a model's name is looked up, as in `from_pretrained`; unused for a folder.

    revision: branch, tag or commit; token: of the Hub; cache_dir: default huggingface_hub's; local_files_only: download
    nothing
    """

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool


def model_folder(
    path: str | Path, consensus: StoreConsensus | None = None, *, weights: bool = True, **hub: Unpack[HubOptions]
) -> Path:
    """Find the folder of a model.

    A folder that exists is taken as it is. Another name is looked up by huggingface_hub, in its cache or on the Hub.
    With a consensus one rank of each host downloads, and the others find its files in the cache.

    Args:
        path: a folder, or a name such as "org/model".
        consensus: of the ranks that look for it, all of which call this; None for one rank alone.
        weights: also fetch the weights, not configuration and tokenizer alone.
        hub: see `HubOptions`.

    Returns:
        The folder. All ranks have the same revision of a model of the Hub.

    Raises:
        CheckpointError: on all ranks, when any has no such folder and cannot have the model.
        ConfigError: the ranks found different revisions, or huggingface_hub is not installed.
    """
    known = HubOptions.__annotations__
    if unknown := sorted(hub.keys() - known.keys()):
        raise TypeError(f"unexpected keyword argument {', '.join(unknown)}; of the Hub there are {', '.join(known)}")

    def look(**more: bool) -> tuple[Path, str | None]:
        """The folder, and the commit where it is of the Hub."""
        if not isinstance(path, str | Path) or os.path.isfile(path):
            raise CheckpointError(f"path must be a folder or the name of a model, got {path!r}")
        if os.path.isdir(path):
            return Path(path), None
        folder = _download(str(path), weights, {**hub, **more})
        return folder, folder.name

    if consensus is None:
        return look()[0]
    waits = isinstance(path, str | Path) and not os.path.isdir(path)
    longest_s = _LONGEST_S if waits else None
    downloads = consensus.first_here(f"the model {path}", socket.gethostname())
    found, problem = _try(look) if downloads else (None, None)
    consensus.healthy("checkpoint", problem, deadline_s=longest_s)
    if found is None:
        found, problem = _try(lambda: look(local_files_only=True))
        if problem is not None and waits:  # hosts of one name do not share a cache
            found, problem = _try(look)
    consensus.healthy("checkpoint", problem, deadline_s=longest_s)
    consensus.same("checkpoint", {f"commit of {path}": found[1]} if found and found[1] else {}, None)
    assert found is not None
    return found[0]


def _try(look: Callable[[], tuple[Path, str | None]]) -> tuple[tuple[Path, str | None] | None, Exception | None]:
    try:
        return look(), None
    except Exception as error:
        return None, error


def _download(name: str, weights: bool, hub: Mapping[str, Any]) -> Path:
    no_folder = f"there is no folder {name}"
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(f"{no_folder}, and names of the Hugging Face Hub need huggingface_hub; install ep-moe[hf]")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(
            name, allow_patterns=_SMALL + _WEIGHTS * weights, ignore_patterns=_OTHER_FORMS, **hub
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
# Files of a checkpoint folder: its JSON, and the names that stay inside it.

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
