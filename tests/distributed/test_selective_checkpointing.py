"""Calls that activation checkpointing repeats."""

import dataclasses
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ep_moe import EPContext, MoELayer
from ep_moe.testing import distributed, rank_device
from tests.fixtures.gradient_cases import FLOAT, LAYOUTS, P


class Operations(TorchDispatchMode):
    """Record the names of operations, as selective checkpointing counts them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is not torch.ops.aten.detach.default:  # selective checkpointing ignores it too
            self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


@distributed(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["in torch", "by kernels where they run"])
def test_a_repeated_call_has_the_operations_of_the_first_one(dtype, world_size):
    """A recomputed call runs the same operations as the first one.

    The first call compares ranks in addition. Selective checkpointing finds saved results by operation number.
    """
    config = dataclasses.replace(FLOAT, hidden_size=256, intermediate_size=128, expert_bias=False)
    for parallel in LAYOUTS[2] if world_size == 2 else [P()]:
        with EPContext.from_groups(parallel, device=rank_device(), deadline_s=20) as context:
            torch.manual_seed(0)
            layer = MoELayer(config, context, dtype=dtype)
            x = torch.randn(4, 256, device=context.device, dtype=dtype).requires_grad_()
            forward, again = Operations(), Operations()
            modes = functools.partial(lambda *both: both, forward, again)
            checkpoint(layer, x, use_reentrant=False, context_fn=modes).sum().backward()
            assert again.names, parallel
            assert again.names == forward.names[: len(again.names)], parallel
