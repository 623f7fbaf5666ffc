"""Imports of the fork server. It runs them once, so that a forked rank starts in milliseconds instead of seconds."""

import gc
import importlib
import os

# otherwise torch.cuda.is_available() initializes CUDA in this process, and forked ranks cannot use a GPU
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from ep_moe import registry

OPTIONAL = ["pytest", "ep_moe.integrations.transformers"]
OPTIONAL += ["torch.distributed.tensor.debug"]  # `EPContext.destroy` uses it to clear a cache of torch
OPTIONAL += [
    f"transformers.models.{name}.modeling_{name}"
    for name in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "llama4")
]

for module in OPTIONAL:
    try:
        importlib.import_module(module)
    except ImportError:
        pass  # its tests skip, or the tools report it

# the first call imports sympy and mpmath, which would take half a second on each rank
torch.testing.assert_close(torch.zeros(1), torch.zeros(1))

# imports the backends, and reads the metadata of everything installed
KINDS: tuple[registry.Kind, ...] = ("dispatchers", "experts", "fused")
for kind in KINDS:
    for backend in registry.targets(kind):
        registry.unsupported_reason(kind, backend)

# otherwise garbage collections in a rank would visit all of these objects, and so copy their memory pages
gc.freeze()
