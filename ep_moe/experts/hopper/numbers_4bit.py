"""Weights of 4 bits as kernels in CUDA make numbers of them (numbers_4bit.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ep_moe.experts.hopper.gemm_grouped import kernel_text

DEPTH = 128  # columns of a block of weights
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENTS = 20  # of a group below its row's largest: from there on all numbers become zero in E4M3


@dataclass(frozen=True)
class Weights:
    """One matrix of each expert, as `weights.layouts.hopper_4bit` stores it.

    data: int32 [L, blocks, rows, 16]; scale: int32 [L, blocks, words, rows]; format: "mxfp4", "nvfp4" or "int4"
    group: columns of a scale; factor: float32 [L], of a whole matrix, or None; bias: contiguous bf16 [L, rows] or None
    e4m3: whether they are stored for rows of E4M3; row_scale: float32 [L, rows], of "mxfp4" then
    """

    data: Tensor
    scale: Tensor
    format: str
    group: int
    factor: Tensor | None = None
    bias: Tensor | None = None
    e4m3: bool = False
    row_scale: Tensor | None = None

    @property
    def words(self) -> int:
        """Of a row's scales in a block."""
        return self.scale.shape[2]


def numbers_form(w: Weights) -> tuple[str, ...]:
    """What `numbers_text` is compiled with."""
    given = {"FP8": int(w.e4m3), "INT4": int(w.format == "int4"), "GROUP": w.group, "WORDS": w.words}
    return tuple(f"-D{name}={value}" for name, value in given.items())


@cache
def numbers_text(name: str) -> str:
    """`kernel_text`, with E2M1's numbers in E4M3 by how far a row's largest exponent is above theirs."""
    exponents = torch.arange(EXPONENTS, device="cpu")
    numbers = torch.tensor(E2M1, device="cpu") * torch.exp2(6.0 - exponents)[:, None]
    rows = numbers.to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    words = [int.from_bytes(bytes(row), "little") for row in rows]
    return kernel_text(name).replace("// NUMBERS_OF\n", ",\n".join(f"    {word:#x}ull" for word in words) + "\n")
