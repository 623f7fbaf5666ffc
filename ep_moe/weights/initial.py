"""What a fresh layer holds: the same numbers on all ranks, under every layout and map."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.quant.schemes import PLAIN, Scheme
from ep_moe.runtime.devices import with_index


@contextmanager
def fresh_numbers(shared_seed: Callable[[int], int], device: torch.device) -> Iterator[None]:
    """Within, torch's default generators begin with a seed that all ranks of the stage share: one number that the first
    rank draws from its own default generator. Afterwards they go on as if that number were all that was drawn, so that
    what a model draws next depends on no layout either. On the meta device nothing is drawn."""
    if device.type == "meta":
        yield
        return
    seed = shared_seed(int(torch.randint(2**62, (), device="cpu")))
    index = with_index(device).index
    gpus = [index] if device.type == "cuda" and index is not None else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(seed)
        yield


def initial_expert(
    config: MoEConfig, scheme: Scheme, dtype: torch.dtype, seed: int, device: torch.device
) -> dict[str, Tensor]:
    """One whole expert's canonical tensors, drawn by a generator of its own.

    Matrices are uniform in +-1/sqrt(fan in), biases zero, input scales 1. The numbers are drawn in float32 and then
    rounded, so that they are the same ones in every dtype and scheme.

    Args:
        config: the layer's.
        scheme: by which the matrices are quantized.
        dtype: of the activations.
        seed: of this expert.
        device: where the numbers are drawn; generators of CPUs and GPUs give different ones.

    Returns:
        Tensors by canonical name, of the shapes and dtypes of `scheme.expert`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, spec in PLAIN.expert(config, torch.float32).items():
        tensor = torch.zeros(spec.shape, dtype=torch.float32, device=device)
        if name in ("w13", "w2"):
            bound = 1 / math.sqrt(spec.shape[1])
            tensor.uniform_(-bound, bound, generator=generator)
        tensors[name] = tensor
    if scheme.activations.calibrated:
        tensors |= {f"{name}_input_scale": torch.ones((), device=device) for name in ("w13", "w2")}
    return scheme.quantize(tensors, dtype)
