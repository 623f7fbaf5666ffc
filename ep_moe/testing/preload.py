"""What the fork server imports once, so that a rank starts in milliseconds."""

import torch
import torch.distributed

from ep_moe import registry

try:
    import pytest  # noqa: F401  (test modules import it)
except ImportError:
    pass

# its first call imports sympy and mpmath, half a second a rank
torch.testing.assert_close(torch.zeros(1), torch.zeros(1))

# reads the metadata of everything installed
for kind in ("dispatchers", "experts"):
    registry.targets(kind)
