"""Kernels that start before those ahead of them in their stream have ended (CUDA's programmatic dependent launch).

A kernel launched with `pdl_launch` starts as soon as all programs of the one ahead of it have called `pdl_trigger`, or
ended. It calls `pdl_wait` before it reads what an earlier kernel wrote or writes what one may still read; read
before are only weights, which no kernel of a forward pass writes, and what a flag says is there (`types.WireIds`). All
kernels ahead of it have ended then, since the one ahead has waited for its own in the same way, or was launched without
`pdl_launch` and so began after them. Kernels that write weights let none start early.
"""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch

from ep_moe.runtime import devices
from ep_moe.runtime.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


def pdl_launch(device: torch.device, soon: bool = True) -> dict[str, bool]:
    """How a kernel with a parameter PDL is launched to start early, where the device can and `soon` asks for it."""
    return {"PDL": True, "launch_pdl": True} if soon and devices.starts_early(device) else {"PDL": False}


@triton.jit
def pdl_trigger(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    if PDL:
        gdc_wait()
