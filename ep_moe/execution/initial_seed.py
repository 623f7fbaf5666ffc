"""The numbers of a fresh layer: the same ones on all ranks, under every layout and map."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ep_moe.context import EPContext
from ep_moe.runtime.devices import with_index


@contextmanager
def fresh_numbers(context: EPContext, device: torch.device) -> Iterator[None]:
    """Within, torch's default generators begin with a seed that all ranks of the stage share: one number that the first
    rank draws from its own default generator. Afterwards they go on as if that number were all that was drawn, so that
    what a model draws next depends on no layout either. On the meta device nothing is drawn."""
    if device.type == "meta":
        yield
        return
    seed = context._shared_seed(int(torch.randint(2**62, (), device="cpu")))
    index = with_index(device).index
    gpus = [index] if device.type == "cuda" and index is not None else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(seed)
        yield
