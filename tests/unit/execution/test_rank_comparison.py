"""What ranks compare of a layer, on one rank."""

import torch

from ep_moe import EPContext, MoEConfig, MoELayer, RoutingConfig, RoutingMethod
from ep_moe.execution.rank_comparison import _dense

SIGMOID = RoutingConfig(method=RoutingMethod.SIGMOID_TOPK, correction_bias=True)
CONFIG = MoEConfig(
    hidden_size=8, intermediate_size=8, num_experts=4, top_k=2, routing=SIGMOID, shared_intermediate_size=8
)


def test_all_that_ranks_hold_alike_is_compared():
    """A correction bias is a buffer, and decides as a parameter does."""
    with EPContext.local(torch.device("cpu")) as context:
        layer = MoELayer(CONFIG, context)
        held = {name for name in layer.state_dict() if name.startswith(("router.", "shared_experts."))}
        assert "router.e_score_correction_bias" in held
        assert dict(_dense(layer)).keys() == held
