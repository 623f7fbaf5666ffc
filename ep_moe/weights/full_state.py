"""What other libraries would leave out of a file, without a word, that they make of a module's state_dict().

Modules and optimizers do not learn what their state_dict() is for: the callers' frames alone say it.
"""

from __future__ import annotations

from torch import Tensor

from ep_moe.errors import ConfigError
from ep_moe.placement.expert_map import EMPTY, ExpertMap
from ep_moe.weights.callers import Callers, frames_of

_FULL: Callers = {"torch.distributed.checkpoint.state_dict": ("_get_model_state_dict", "_get_optim_state_dict")}
# those whose file is one rank's
_ONE_RANK: Callers = {
    "accelerate.accelerator": ("save_state", "save_model", "get_state_dict"), "transformers.trainer": ("_save",),
}  # fmt: skip
_ADAPTER: Callers = {"peft.utils.save_and_load": ("get_peft_model_state_dict",)}
# those that take tensors of one memory for the same tensor, and keep one of them
_ONE_OF_A_STORAGE: Callers = {**_ONE_RANK, "safetensors.torch": ("save_model", "load_model")}


def refuse_full_state(expert_map: ExpertMap) -> None:
    """Raise ConfigError in a state_dict() of which a file is made that is to hold the whole model and would not.

    With `full_state_dict=True` torch gathers DTensors, and takes plain tensors for whole ones; accelerate's and
    transformers' `Trainer` write what the first rank has. Rank 0's experts would be all that is saved.

    Args:
        expert_map: Of the layer; a rank that holds all experts has a full state.

    Raises:
        ConfigError: on all ranks, where some rank does not hold all experts.
    """
    if all(len({*expert_map.local(rank)} - {EMPTY}) == expert_map.num_experts for rank in range(expert_map.num_ranks)):
        return
    for frame in frames_of(_FULL):
        if getattr(frame.f_locals.get("info"), "full_state_dict", False):
            raise ConfigError(
                "full_state_dict=True would give one rank's experts for all of them; leave it out, call "
                "torch.distributed.checkpoint.save on all ranks, and make one file of that by dcp_to_torch_save of "
                "torch.distributed.checkpoint.format_utils"
            )
        return
    for frame in frames_of(_ONE_RANK):
        if getattr(frame.f_locals.get("self"), "_save_model_state_pre_hook", None):
            return  # the user's, which says what is saved of a model
        raise ConfigError(
            f"{frame.f_code.co_name} of {frame.f_globals['__name__'].partition('.')[0]} would save one rank's experts "
            f"for all of them; call torch.distributed.checkpoint.save with get_model_state_dict and "
            f"get_optimizer_state_dict on all ranks (docs/how-to/training.md), or for a model of transformers "
            f"ep_moe.integrations.transformers.save_pretrained(model, folder)"
        )


def refuse_adapter_state() -> None:
    """Raise ConfigError in a state_dict() from which PEFT picks an adapter by name. It would leave experts out."""
    if next(frames_of(_ADAPTER), None) is not None:
        raise ConfigError(
            "get_peft_model_state_dict of PEFT would leave out the factors of experts; call "
            "ep_moe.integrations.lora.save_lora(model, folder) on all ranks"
        )


def laid_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give each tensor memory of its own, for callers that keep one tensor of each memory.

    Args:
        tensors: Of one state_dict(), perhaps views of one memory.

    Returns:
        The same, or copies.
    """
    if next(frames_of(_ONE_OF_A_STORAGE), None) is None:
        return tensors
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
