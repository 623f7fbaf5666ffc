"""Test that callers which would save one rank's state dict as the whole model's are recognized by their frames."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ep_moe import ConfigError, ExpertMap
from ep_moe.placement.expert_map import EMPTY
from ep_moe.weights.full_state import refuse_full_state, unshare_storages

WHOLE = ExpertMap.from_ranks([[0, 1, 2], [0, 1, 2]], 3)
WITHOUT = ExpertMap.from_ranks([[0, 1, EMPTY], [0, 1, 2]], 3)  # an empty slot is not a third expert


@pytest.mark.parametrize("function", ["_get_model_state_dict", "_get_optim_state_dict"])
@pytest.mark.parametrize(("held", "full", "refused"), [(WHOLE, True, 0), (WITHOUT, False, 0), (WITHOUT, True, 1)])
def test_a_full_state_is_one_of_ranks_with_all_experts(held, full, refused, function):
    caller = {"__name__": "torch.distributed.checkpoint.state_dict", "refuse": lambda: refuse_full_state(held)}
    exec(f"def {function}(info):\n    refuse()", caller)
    info = SimpleNamespace(full_state_dict=full)
    if refused:
        with pytest.raises(ConfigError, match="full_state_dict=True would save one rank's experts for all ranks"):
            caller[function](info)
    else:
        caller[function](info)


def test_the_trainer_of_transformers_writes_one_ranks_state():
    caller = {"__name__": "transformers.trainer", "refuse": lambda: refuse_full_state(WITHOUT)}
    exec("def _save():\n    refuse()", caller)
    with pytest.raises(ConfigError, match="_save of transformers would save one rank's experts for all ranks"):
        caller["_save"]()


@pytest.mark.parametrize("hooks", [{}, {1: print}])
def test_a_file_of_one_rank_is_what_a_hook_of_the_users_makes_of_it(hooks):
    """Saving one rank's file is refused, unless the user has a hook (`register_save_state_pre_hook` of accelerate).

    The hook decides what the file contains.
    """
    caller = {"__name__": "accelerate.accelerator", "refuse": lambda: refuse_full_state(WITHOUT)}
    exec("def save_state(self):\n    refuse()", caller)
    refused = pytest.raises(ConfigError, match="save_state of accelerate would save one rank's experts for all ranks")
    with nullcontext() if hooks else refused:
        caller["save_state"](SimpleNamespace(_save_model_state_pre_hook=hooks))


@pytest.mark.parametrize(
    ("module", "function", "apart"),
    [
        ("safetensors.torch", "save_model", True),
        ("safetensors.torch", "load_model", True),
        ("safetensors.torch", "save_file", False),
        ("accelerate.accelerator", "get_state_dict", True),
        ("transformers.trainer", "_save", True),
        ("torch.optim", "_save", False),
    ],
)
def test_views_of_one_memory_are_copied_for_callers_that_keep_one_of_them(module, function, apart):
    """Views of one memory are copied for callers that keep only one of them.

    For other callers, a state_dict() has views of the parameters, as torch's has.
    """
    memory = torch.arange(6.0).requires_grad_()
    tensors = {"gate": memory[:3], "up": memory[3:]}
    caller = {"__name__": module, "lay": lambda: unshare_storages(tensors)}
    exec(f"def {function}():\n    return lay()", caller)
    found = caller[function]()
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"gate": [0.0, 1.0, 2.0], "up": [3.0, 4.0, 5.0]}
    memories = {tensor.untyped_storage().data_ptr() for tensor in found.values()}
    assert len(memories) == (2 if apart else 1)
    assert (memory.untyped_storage().data_ptr() in memories) is not apart
    assert any(tensor.requires_grad for tensor in found.values()) is not apart
