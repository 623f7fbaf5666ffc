"""Initial expert weights, which do not depend on ranks, layout or map, and random experts for tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.quant.schemes import PLAIN, Rounding, Scheme
from ep_moe.quant.weight_formats import Nvfp4
from ep_moe.runtime.devices import with_index
from ep_moe.types import Activation


@contextmanager
def fork_rng_with_shared_seed(shared_seed: Callable[[int], int], device: torch.device) -> Iterator[None]:
    """Seed torch's default generators with one seed for all ranks of the pipeline stage, inside the `with` block.

    The first rank draws the seed from its default CPU generator. On exit the generators' states are restored, as if
    only the seed had been drawn: later random numbers of a model do not depend on the layout either. Does nothing on
    the meta device.

    Args:
        shared_seed: Takes this rank's draw and returns the draw of the first rank. Collective.
        device: The device whose generator is seeded besides the CPU's.
    """
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
    """Draw one whole expert's canonical tensors with a generator of its own.

    Matrices are uniform in +-1/sqrt(fan in), biases zero, input scales 1. Values are drawn in float32 and then rounded
    or quantized, so that every dtype and scheme starts from the same values.

    Args:
        config: The layer's configuration.
        scheme: The scheme that quantizes the matrices.
        dtype: The dtype of activations.
        seed: The seed of this expert.
        device: Where values are drawn. Generators of CPUs and GPUs give different values.

    Returns:
        Tensors by canonical name, with the shapes and dtypes of `scheme.expert`.
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
        tensors |= {f"{name}_input_scale": torch.ones((), dtype=torch.float32, device=device) for name in ("w13", "w2")}
    return scheme.quantize(tensors, dtype)


def random_expert(
    config: MoEConfig, scheme: Scheme, expert: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Draw one expert's quantized canonical tensors for a test, scaled to keep activations near 1.

    Static input scales are large enough that standard normal rows do not saturate, nor do the squares of RELU2: the
    error of a saturated value has no bound.
    """
    # a test's rows must not use the same seeds: rows equal to weights would give exceptionally large products
    generator = torch.Generator(device=device).manual_seed(1_000_003 + expert)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device)

    def scale(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=device)

    tensors = {
        "w13": normal(config.w13_rows, config.hidden_size) / config.hidden_size**0.5,
        "w2": normal(config.hidden_size, config.intermediate_size) / config.intermediate_size**0.5,
    }
    if config.expert_bias:
        tensors |= {"w13_bias": 0.3 * normal(config.w13_rows), "w2_bias": 0.3 * normal(config.hidden_size)}
        tensors = {name: t.to(dtype) if name.endswith("bias") else t for name, t in tensors.items()}
    if scheme.activations is Rounding.FP8_STATIC:
        wide = 4.0 if config.activation is Activation.RELU2 else 1.0
        tensors |= {
            "w13_input_scale": scale(0.014 + 0.0005 * (expert % 3)),
            "w2_input_scale": scale(wide * (0.1 + 0.001 * (expert % 5))),
        }
    if scheme.activations is Rounding.NVFP4:
        tensors |= {
            "w13_input_scale": scale(0.0024 * 2 ** (expert % 3)),
            "w2_input_scale": scale(0.017 * 2 ** (expert % 2)),
        }
    quantized = scheme.quantize(tensors, dtype)
    if isinstance(scheme.weights, Nvfp4):
        # distinct global scales per expert and matrix, for the same values: using a wrong one changes the result
        for name, factor in (("w13", 2 ** (expert % 2)), ("w2", 2 ** (expert % 3))):
            quantized[f"{name}_scale"] = (quantized[f"{name}_scale"].float() / factor).to(torch.float8_e4m3fn)
            quantized[f"{name}_global_scale"] = quantized[f"{name}_global_scale"] * factor
    return quantized
