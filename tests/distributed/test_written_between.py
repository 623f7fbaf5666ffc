"""Parameters written in place between forward and backward are refused, as autograd does."""

import pytest
import torch

from ep_moe import EPContext, MoEConfig, MoELayer, ParallelConfig
from ep_moe.testing import distributed, rank_device
from ep_moe.training import expert_parameters, use_main_grads

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)


@distributed(2)
@pytest.mark.parametrize("main_grads", [False, True])
@pytest.mark.parametrize("etp", [1, 2])
def test_experts_written_between_forward_and_backward_are_refused(etp, main_grads, world_size):
    """Experts written between forward and backward are refused, also with etp.

    Pieces of etp ranks are DTensors, whose writes do not increase the version counter of their memory.
    """
    with EPContext.from_groups(ParallelConfig(dp=2, ep=2 // etp, etp=etp), device=rank_device()) as context:
        layer = MoELayer(CONFIG, context)
        if main_grads:
            use_main_grads(layer)
        x = torch.randn(6, 16, device=context.device, requires_grad=True)
        for written in (False, True):
            out = layer(x).sum()
            if written:
                with torch.no_grad():
                    for parameter in expert_parameters(layer):
                        parameter.mul_(1.5)
                with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
                    out.backward()
            else:
                out.backward()
