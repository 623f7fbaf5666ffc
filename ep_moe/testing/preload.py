"""What the fork server imports once, so that a rank starts in milliseconds."""

import torch
import torch.distributed

import ep_moe
import ep_moe.all2all.allgather
import ep_moe.all2all.torch_a2a
import ep_moe.experts.reference  # noqa: F401

try:
    import pytest  # noqa: F401  (test modules import it)
except ImportError:
    pass

# its first call imports sympy and mpmath, half a second a rank
torch.testing.assert_close(torch.zeros(1), torch.zeros(1))
