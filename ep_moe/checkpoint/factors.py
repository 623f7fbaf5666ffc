"""The factors that belong to codes in a checkpoint: read as float32, and refused where they are none."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ep_moe.checkpoint.declared import Declared
from ep_moe.errors import CheckpointError
from ep_moe.quant.fp8 import FP8_MAX
from ep_moe.quant.microscale import e8m0_values

ALWAYS_FINITE = torch.finfo(torch.float32).max / FP8_MAX  # times any code
FLOATS = ("F32", "BF16", "F16", "F64")
EXPONENTS = "F8_E8M0"
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "F8_E8M0": "float8_e8m0fnu"}


class Tensors(Protocol):
    """The tensors of a checkpoint by our names, as they are stored."""

    @property
    def declared(self) -> Declared: ...

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of that very name."""

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype as safetensors calls it, and shape."""

    def raw(self, name: str, *index: int | slice) -> Tensor: ...

    def location(self, name: str) -> str:
        """The tensor's name and file, for a sentence."""


def wrong_dtype(tensors: Tensors, name: str, *, exponents: bool = True, bytes_too: bool = False) -> str | None:
    """None, or why a tensor cannot be factors.

    Args:
        tensors: of the checkpoint.
        name: of the factors.
        exponents: E8M0 may be there.
        bytes_too: a byte is E8M0 in this format, whatever config.json states.
    """
    dtype, _ = tensors.header(name)
    if dtype in FLOATS or (exponents and dtype == EXPONENTS):
        return None
    if dtype == "U8" and exponents:
        if bytes_too or tensors.declared.exponents:
            return None
        return (
            f"{tensors.location(name)} must be factors in float32, bfloat16, float16 or float8_e8m0fnu, got uint8; "
            f'bytes are exponents (E8M0) only where quantization_config in config.json states scale_fmt "ue8m0" or an '
            f"MX format"
        )
    wanted = ", ".join(_NAMES[one] for one in (*FLOATS, EXPONENTS)[: 5 if exponents else 4])
    return f"{tensors.location(name)} must be factors in {wanted}, got {_NAMES.get(dtype, dtype)}"


def factors(tensors: Tensors, name: str, *index: int | slice, positive: bool = False) -> Tensor:
    """The part at `index` in float32, powers of two from E8M0. Raises CheckpointError unless finite and at least 0.

    positive: 0 is refused too
    """
    wrong = wrong_dtype(tensors, name, bytes_too=True)
    if wrong is not None:
        raise CheckpointError(wrong)
    part = tensors.raw(name, *index)
    numbers = e8m0_values(part.contiguous()) if part.dtype == torch.uint8 else part.float()
    check_factors(tensors, name, numbers, positive=positive)
    return numbers


def scalar_factor(tensors: Tensors, name: str, expert: int | None = None, *, positive: bool = False) -> Tensor:
    """A float32 scalar: one number for all, or that of an expert."""
    _, shape = tensors.header(name)
    count = int(torch.Size(shape).numel())
    if count == 1:
        return factors(tensors, name, positive=positive).reshape(())
    if expert is None or not shape or count != shape[0]:
        raise CheckpointError(f"{tensors.location(name)} must have shape [], got {list(shape)}")
    return factors(tensors, name, expert, positive=positive).reshape(())


def check_factors(tensors: Tensors, name: str, numbers: Tensor, *, positive: bool = False) -> None:
    good = torch.isfinite(numbers) & ((numbers > 0) if positive else (numbers >= 0))
    if not good.all():
        found = numbers[~good].flatten()[0].item()
        wanted = "greater than 0" if positive else "at least 0"
        raise CheckpointError(
            f"{tensors.location(name)} must be finite and {wanted}, got {found} at {int((~good).sum())} of "
            f"{numbers.numel()} places that were read; the checkpoint is damaged, or was quantised wrongly: fetch or "
            f"export it again"
        )


def check_lost(tensors: Tensors, name: str, data: str, lost: int) -> None:
    """Raise CheckpointError where factors of 0 would lose numbers that are not 0.

    lost: how many
    """
    if lost:
        raise CheckpointError(
            f"{tensors.location(name)} has factors of 0 for {lost} numbers of {data} that are not 0; the checkpoint is "
            f"damaged: fetch or export it again"
        )


def check_finite(location: str, numbers: Tensor) -> Tensor:
    """Numbers that must be finite. Raises CheckpointError."""
    good = torch.isfinite(numbers)
    if not good.all():
        raise CheckpointError(
            f"{location} must be finite, got {numbers[~good].flatten()[0].item()} at {int((~good).sum())} of "
            f"{numbers.numel()} places that were read; the checkpoint is damaged: fetch or export it again"
        )
    return numbers


def check_fits(location: str, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers that a layer's dtype must hold: those of float16 end at 65504. Raises CheckpointError."""
    narrower = dtype == torch.float16 or numbers.dtype == torch.float64
    if not narrower or numbers.dtype == dtype or not numbers.numel():
        return numbers
    largest, top = numbers.abs().nan_to_num(posinf=0.0).amax().item(), torch.finfo(dtype).max
    if largest > top:
        raise CheckpointError(
            f"{location} has numbers up to {largest:.4g}, and {dtype} ends at {top:.4g}; choose another dtype"
        )
    return numbers


def check_codes(tensors: Tensors, name: str, codes: Tensor) -> None:
    """E4M3 codes: none is NaN. Raises CheckpointError."""
    wrong = (codes.view(torch.uint8) & 0x7F) == 0x7F
    if wrong.any():
        raise CheckpointError(
            f"{tensors.location(name)} must be finite, got NaN at {int(wrong.sum())} of {codes.numel()} places that "
            f"were read; the checkpoint is damaged, or was quantised wrongly: fetch or export it again"
        )
