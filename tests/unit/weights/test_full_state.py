"""Callers that would save one rank's state dict as the whole model's are recognized by their frames."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from ep_moe import ConfigError, ExpertMap
from ep_moe.placement.expert_map import EMPTY
from ep_moe.weights.full_state import refuse_full_state

WHOLE = ExpertMap.from_ranks([[0, 1, 2], [0, 1, 2]], 3)
WITHOUT = ExpertMap.from_ranks([[0, 1, EMPTY], [0, 1, 2]], 3)  # an empty slot is no third expert


@pytest.mark.parametrize("function", ["_get_model_state_dict", "_get_optim_state_dict"])
@pytest.mark.parametrize(("held", "full", "refused"), [(WHOLE, True, 0), (WITHOUT, False, 0), (WITHOUT, True, 1)])
def test_a_full_state_is_one_of_ranks_with_all_experts(held, full, refused, function):
    caller = {"__name__": "torch.distributed.checkpoint.state_dict", "refuse": lambda: refuse_full_state(held)}
    exec(f"def {function}(info):\n    refuse()", caller)
    info = SimpleNamespace(full_state_dict=full)
    if refused:
        with pytest.raises(ConfigError, match="full_state_dict=True would give one rank's experts for all of them"):
            caller[function](info)
    else:
        caller[function](info)


def test_the_trainer_of_transformers_writes_one_ranks_state():
    caller = {"__name__": "transformers.trainer", "refuse": lambda: refuse_full_state(WITHOUT)}
    exec("def _save():\n    refuse()", caller)
    with pytest.raises(ConfigError, match="_save of transformers would save one rank's experts for all of them"):
        caller["_save"]()


@pytest.mark.parametrize("hooks", [{}, {1: print}])
def test_a_file_of_one_rank_is_what_a_hook_of_the_users_makes_of_it(hooks):
    """`register_save_state_pre_hook` of accelerate."""
    caller = {"__name__": "accelerate.accelerator", "refuse": lambda: refuse_full_state(WITHOUT)}
    exec("def save_state(self):\n    refuse()", caller)
    refused = pytest.raises(ConfigError, match="save_state of accelerate would save one rank's experts for all of them")
    with nullcontext() if hooks else refused:
        caller["save_state"](SimpleNamespace(_save_model_state_pre_hook=hooks))
