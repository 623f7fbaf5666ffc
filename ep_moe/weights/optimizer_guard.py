"""Refuses to put an optimizer's own `state_dict()` into a distributed checkpoint.

That dict numbers parameters, and ranks with different experts give one number to different ones: the checkpoint would
keep one rank's state under it and give it to all, without a word. `get_optimizer_state_dict` goes by names, which is
right on any ranks and under any map.

The layer is not given the optimizer, and parameters do not know it. What sees it is torch's hook on every optimizer's
step (`register_optimizer_step_post_hook`); it is installed with the first expert parameters that differ between ranks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ep_moe.errors import ConfigError

KEY = "parameters differ between ranks"
_REFUSAL = (
    "optimizer.state_dict() numbers parameters, and ranks hold different experts under one number: a checkpoint would "
    "keep {fqn} of one rank alone; save get_optimizer_state_dict(model, optimizer) of "
    "torch.distributed.checkpoint.state_dict, and load with set_optimizer_state_dict"
)


class _Refused:
    """A value that torch.distributed.checkpoint asks how it is to be written or read. A file of torch.save, one for
    each rank, keeps a plain empty set in its place."""

    def __create_write_items__(self, fqn: str, value: Any) -> Any:
        raise ConfigError(_REFUSAL.format(fqn=fqn.rpartition(".")[0] or fqn))

    def __create_chunk_list__(self) -> Any:
        raise ConfigError(_REFUSAL.format(fqn="the optimizer"))

    def __get_tensor_shard__(self, index: Any) -> Any:
        raise ConfigError(_REFUSAL.format(fqn="the optimizer"))

    def __reduce__(self) -> Any:
        return set, ()


def mark(parameter: Parameter) -> None:
    """This parameter is another expert's on other ranks."""
    parameter.differs_between_ranks = True  # type: ignore[attr-defined]
    _install()


@cache
def _install() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer.__dict__.get("_guarded_by_ep_moe"):
        return
    optimizer._guarded_by_ep_moe = True  # type: ignore[attr-defined]
    if any(hasattr(p, "differs_between_ranks") for group in optimizer.param_groups for p in group["params"]):
        optimizer.register_state_dict_post_hook(_guard)


def _guard(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    state_dict[KEY] = _Refused()
