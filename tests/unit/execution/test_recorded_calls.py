"""With which arguments a recorded call is launched again."""

import pytest
import torch

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.execution.recorded_calls import _launch_arguments
from ep_moe.placement.deferred import DeferredRouting

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=6, top_k=2)


def strided(tensor):
    return torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]]


def shifted(tensor):
    """From between two multiples of 16 bytes."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


CHANGES = {
    "none": lambda x, ids, weights: (x, ids, weights),
    "strided ids": lambda x, ids, weights: (x, strided(ids), weights),
    "strided weights": lambda x, ids, weights: (x, ids, strided(weights)),
    "shifted x": lambda x, ids, weights: (shifted(x), ids, weights),
    "shifted ids": lambda x, ids, weights: (x, shifted(ids), weights),
    "shifted weights": lambda x, ids, weights: (x, ids, shifted(weights)),
}


@pytest.mark.parametrize("placing", ["the same", "another"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_kernel_is_given_addresses_of_the_kind_that_it_was_compiled_for(change, placing):
    """One piece each, at multiples of 16 bytes, and ids that are placed as when it was recorded."""
    with EPContext.local(torch.device("cpu")) as context:
        tables = MoELayer(CONFIG, context).placement.tables
        x, ids, weights = CHANGES[change](torch.zeros(4, 16), torch.ones(4, 2, dtype=torch.int64), torch.zeros(4, 2))
        wanted = tables.placing if placing == "the same" else tables.placing._replace(most=tables.placing.most + 1)
        found = _launch_arguments(x, DeferredRouting(ids, weights, tables), 3, wanted)
        if change != "none" or placing == "another":
            assert found is None
        else:
            held = [table.data_ptr() for table in tables[:5]]
            assert found == [x.data_ptr(), ids.data_ptr(), weights.data_ptr(), *held, tables[5], 3]
