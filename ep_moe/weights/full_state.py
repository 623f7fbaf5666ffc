"""Refuse uses of state_dict() by other libraries that would silently save incomplete checkpoints.

A module or optimizer cannot see why its state_dict() is called, so these functions inspect the call stack.
"""

from __future__ import annotations

from torch import Tensor

from ep_moe.errors import ConfigError
from ep_moe.placement.expert_map import EMPTY, ExpertMap
from ep_moe.weights.callers import Callers, frames_of

_FULL: Callers = {"torch.distributed.checkpoint.state_dict": ("_get_model_state_dict", "_get_optim_state_dict")}
# functions that write one rank's state dict as the file of the whole model
_ONE_RANK: Callers = {
    "accelerate.accelerator": ("save_state", "save_model", "get_state_dict"), "transformers.trainer": ("_save",),
}  # fmt: skip
_ADAPTER: Callers = {"peft.utils.save_and_load": ("get_peft_model_state_dict",)}
# functions that treat tensors with shared storage as duplicates, and keep one of them
_ONE_OF_A_STORAGE: Callers = {**_ONE_RANK, "safetensors.torch": ("save_model", "load_model")}


def refuse_full_state(expert_map: ExpertMap) -> None:
    """Raise ConfigError if the calling library would save one rank's experts as the whole model.

    With `full_state_dict=True`, torch gathers DTensors but takes plain tensors to be whole. accelerate and the
    `Trainer` of transformers write the state dict of the first rank. Both would save the experts of rank 0 only.

    Args:
        expert_map: The layer's map. If every rank holds all experts, each rank has the full state and nothing is
            refused.

    Raises:
        ConfigError: A rank does not hold all experts, and such a function is on the call stack. All ranks raise.
    """
    if all(len({*expert_map.local(rank)} - {EMPTY}) == expert_map.num_experts for rank in range(expert_map.num_ranks)):
        return
    for frame in frames_of(_FULL):
        if getattr(frame.f_locals.get("info"), "full_state_dict", False):
            raise ConfigError(
                "full_state_dict=True would save one rank's experts for all ranks; leave it out, call "
                "torch.distributed.checkpoint.save on all ranks, and convert that to one file with dcp_to_torch_save "
                "of torch.distributed.checkpoint.format_utils"
            )
        return
    for frame in frames_of(_ONE_RANK):
        if getattr(frame.f_locals.get("self"), "_save_model_state_pre_hook", None):
            return  # the user's hook decides what is saved
        raise ConfigError(
            f"{frame.f_code.co_name} of {frame.f_globals['__name__'].partition('.')[0]} would save one rank's "
            "experts for all ranks; call torch.distributed.checkpoint.save with get_model_state_dict and "
            "get_optimizer_state_dict on all ranks (docs/how-to/training.md), or for a model of transformers "
            "ep_moe.integrations.transformers.save_pretrained(model, folder)"
        )


def refuse_adapter_state() -> None:
    """Raise ConfigError if PEFT collects an adapter. It selects tensors by name, and would omit experts' factors."""
    if next(frames_of(_ADAPTER), None) is not None:
        raise ConfigError(
            "get_peft_model_state_dict of PEFT would leave out the factors of experts; call "
            "ep_moe.integrations.lora.save_lora(model, folder) on all ranks"
        )


def unshare_storages(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors if the calling library keeps only one tensor of each storage.

    Args:
        tensors: The tensors of one state_dict(). They may be views of one storage.

    Returns:
        `tensors` itself, or copies with separate storages.
    """
    if next(frames_of(_ONE_OF_A_STORAGE), None) is None:
        return tensors
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
