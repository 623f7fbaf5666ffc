"""Refuse a `DistributedDataParallel` around expert parameters while it is made, before it overwrites them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_moe.errors import ConfigError
from ep_moe.weights.callers import Callers, frames_of

if TYPE_CHECKING:
    from ep_moe.weights.slots import ExpertSlots

# iterates over each module's parameters, before the wrapper broadcasts rank 0's
_BUILDS: Callers = {"torch.nn.parallel.distributed": ("_build_params_for_reducer",)}


def refuse_data_parallel(weights: ExpertSlots) -> None:
    """Raise ConfigError if a `DistributedDataParallel` that is being made would manage expert parameters.

    It would overwrite the experts of each rank with those of its first rank, and average gradients of different
    experts. A rank without experts has no parameters to find. It takes an empty list of excluded parameters as the
    sign, because `exclude_experts` also lists the layer's load counters.

    Args:
        weights: The weights whose parameters are iterated over.

    Raises:
        ConfigError: The wrapper would manage a parameter. All ranks of the wrapper raise.
    """
    for frame in frames_of(_BUILDS):
        wrapper = frame.f_locals["self"]
        if wrapper.process_group.size() == 1:
            return
        managed = {id(parameter) for parameter in wrapper._module_parameters}
        own = [id(parameter) for parameter in weights.parameters()]
        without_experts = weights.has_expert_parameters and not own
        if not managed.isdisjoint(own) or (without_experts and not wrapper.parameters_to_ignore):
            raise ConfigError(
                "DistributedDataParallel would overwrite the experts of each rank with rank 0's, and average gradients "
                "of different experts; wrap DistributedDataParallel(ep_moe.training.exclude_experts(model)). "
                "No weight has been changed"
            )
        return
