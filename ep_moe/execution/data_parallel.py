"""Checks of a `DistributedDataParallel` wrapper around a layer: which gradients it averages, over which ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ep_moe.execution.rank_comparison import ComparedLayer

_JOINED = (
    "DistributedDataParallel.join() lets a rank end while the others wait for its experts; remove join, and on a "
    "rank without a batch call the layer with x[:0], or ep_moe.integrations.transformers.idle_step"
)
# torch's communication hooks that do not average over the wrapper's ranks; all others do
_NO_MEANS = ("noop_hook", "post_localSGD_hook")


def join_problem(wrapper: DistributedDataParallel) -> str | None:
    """Return a problem if DDP's join lets a rank make fewer calls than others, else None.

    With `throw_on_early_termination` no rank makes fewer calls.
    """
    join = getattr(wrapper, "_join_config", None)
    return _JOINED if join is not None and join.enable and not join.throw_on_early_termination else None


def wrapper_problem(wrapper: DistributedDataParallel, layer: ComparedLayer) -> str | None:
    """Return None, or what is wrong with a wrapper for a layer's experts. Warn if dense gradients may be sums."""
    layout = layer.context.layout
    ranks = sorted(dist.get_process_group_ranks(wrapper.process_group))
    if ranks not in (sorted(layout.group("stage")), sorted(layout.group("dp"))):
        return (
            f"DistributedDataParallel averages over ranks {', '.join(map(str, ranks))}, and this layer's experts "
            f"get gradients of ranks {', '.join(map(str, sorted(layout.group('stage'))))}; give it a process_group "
            f"of these"
        )
    for hook, _ in getattr(wrapper, "_comm_hooks", ()):
        _warn_of_sums(layer.name, hook)
    return None


def _warn_of_sums(name: str, hook: Any) -> None:
    """Warn about a communication hook that may sum dense gradients over ranks, where DDP itself averages them."""
    if _averages(hook):
        return
    warnings.warn(
        f"{name}: DistributedDataParallel has the communication hook {getattr(hook, '__qualname__', hook)!r}, which "
        "may sum gradients over ranks, and gradients of experts are means: dense gradients would be too large; "
        "divide by the number of ranks in the hook, and set hook.averages_gradients = True to silence this warning",
        UserWarning,
        stacklevel=2,
    )


def _averages(hook: Any) -> bool:
    """Return whether a hook averages gradients: it says so, or is one of torch's that do.

    Wrappers of torch (`fp16_compress_wrapper`) hold another hook in their closure, which is checked too.
    """
    said = getattr(hook, "averages_gradients", None)
    if said is not None:
        return bool(said)
    own = str(getattr(hook, "__module__", "")).startswith("torch.distributed.algorithms.")
    inner = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    known = own and getattr(hook, "__name__", "") not in _NO_MEANS
    return known and all(_averages(held) for held in inner if callable(held))
