"""Names of backends and where their classes are. Nobody imports a backend file; its import string stands here.

A third party registers an entry point in the group `ep_moe.dispatchers` or `ep_moe.experts`, of the same form.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any, Literal

from ep_moe.errors import ConfigError

Kind = Literal["dispatchers", "experts"]

_BUILT_IN: dict[Kind, dict[str, str]] = {
    "dispatchers": {
        "local": "ep_moe.all2all.local:LocalDispatcher",
        "allgather": "ep_moe.all2all.allgather:AllGatherDispatcher",
        "torch_a2a": "ep_moe.all2all.torch_a2a:TorchAll2AllDispatcher",
    },
    "experts": {
        "reference": "ep_moe.experts.reference:ReferenceExperts",
    },
}


def targets(kind: Kind) -> dict[str, str]:
    """Every known backend's name and "module:Class"."""
    plugins = {point.name: point.value for point in entry_points(group=f"ep_moe.{kind}")}
    clash = sorted(plugins.keys() & _BUILT_IN[kind].keys())
    if clash:
        raise ConfigError(
            f"entry point {clash[0]!r} in group ep_moe.{kind} has the name of a built-in backend; rename it"
        )
    return _BUILT_IN[kind] | plugins


def load(kind: Kind, name: str) -> Any:
    """The class of a backend. Imports its file, not the libraries it drives."""
    known = targets(kind)
    if name not in known:
        raise ConfigError(f"no backend among {kind} is named {name!r}; there are {', '.join(known)}")
    module, _, attribute = known[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def why_not(kind: Kind, name: str) -> str | None:
    """None if the backend can run in this installation, else the reason."""
    try:
        reason: str | None = load(kind, name).available()
    except ImportError as error:
        return f"its module does not import: {error}"
    return reason


def available(kind: Kind, name: str) -> bool:
    return why_not(kind, name) is None
