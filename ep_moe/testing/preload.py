"""What the fork server imports once, so that a rank starts in milliseconds and not in seconds."""

import gc
import importlib
import os

# otherwise torch.cuda.is_available() starts CUDA here, and a forked rank cannot use a GPU
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from ep_moe import registry

OPTIONAL = ["pytest", "ep_moe.integrations.transformers"]
OPTIONAL += ["torch.distributed.tensor.debug"]  # what `EPContext.destroy` clears a cache of torch by
OPTIONAL += [
    f"transformers.models.{name}.modeling_{name}"
    for name in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "llama4")
]

for module in OPTIONAL:
    try:
        importlib.import_module(module)
    except ImportError:
        pass  # its tests skip, or the tools say so

# its first call imports sympy and mpmath, half a second a rank
torch.testing.assert_close(torch.zeros(1), torch.zeros(1))

# imports the backends, and reads the metadata of everything installed
KINDS: tuple[registry.Kind, ...] = ("dispatchers", "experts", "fused")
for kind in KINDS:
    for backend in registry.targets(kind):
        registry.unsupported_reason(kind, backend)

# a rank's collections of garbage would walk through all of this, and copy its pages
gc.freeze()
