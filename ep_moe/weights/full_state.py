"""What `full_state_dict=True` of torch.distributed.checkpoint would leave out without a word: other ranks' experts."""

from __future__ import annotations

import sys
from types import FrameType

from ep_moe.errors import ConfigError
from ep_moe.placement.expert_map import EMPTY, ExpertMap

_MODULE = "torch.distributed.checkpoint.state_dict"
_ASKING = ("_get_model_state_dict", "_get_optim_state_dict")


def refuse_full_state(expert_map: ExpertMap) -> None:
    """Raise ConfigError in a state_dict() that torch makes a full one of.

    torch gathers DTensors for it, and takes plain tensors for whole ones; rank 0's experts would be all that is saved.
    Modules and optimizers do not learn what their state_dict() is for: the callers' frames alone say it.

    Args:
        expert_map: Of the layer; a rank that holds all experts has a full state.

    Raises:
        ConfigError: on all ranks, where some rank does not hold all experts.
    """
    if all(len({*expert_map.local(rank)} - {EMPTY}) == expert_map.num_experts for rank in range(expert_map.num_ranks)):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _ASKING and frame.f_globals.get("__name__") == _MODULE:
            if getattr(frame.f_locals.get("info"), "full_state_dict", False):
                raise ConfigError(
                    "full_state_dict=True would give one rank's experts for all of them; leave it out, call "
                    "torch.distributed.checkpoint.save on all ranks, and make one file of that by dcp_to_torch_save of "
                    "torch.distributed.checkpoint.format_utils"
                )
            return
        frame = frame.f_back
