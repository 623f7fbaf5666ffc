"""4-bit weights, and the options of the CUDA code that converts them to bf16 or E4M3 (numbers_4bit.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ep_moe.experts.hopper.gemm_grouped import kernel_text

DEPTH = 128  # columns of a block of weights
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENTS = 20  # a group with a scale 2**20 or more below its row's largest becomes zero in E4M3


@dataclass(frozen=True)
class Weights:
    """One matrix of each expert, as stored by `weights.layouts.hopper_4bit`.

    data: int32 [L, blocks, rows, 16]; scale: int32 [L, blocks, words, rows]; format: "mxfp4", "nvfp4" or "int4"
    group: columns per scale; factor: float32 [L], a scale per matrix, or None; bias: contiguous bf16 [L, rows] or None
    e4m3: stored for E4M3 rows; row_scale: float32 [L, rows], for "mxfp4" with E4M3 rows, else None
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
        """int32 words of a row's scales in a block."""
        return self.scale.shape[2]


def numbers_form(w: Weights) -> tuple[str, ...]:
    """Return the compiler options of `numbers_text`."""
    given = {"FP8": int(w.e4m3), "INT4": int(w.format == "int4"), "GROUP": w.group, "WORDS": w.words}
    return tuple(f"-D{name}={value}" for name, value in given.items())


@cache
def numbers_text(name: str) -> str:
    """Return `kernel_text` with a table of E2M1's numbers in E4M3, by the distance to the row's largest exponent."""
    exponents = torch.arange(EXPONENTS, dtype=torch.float32, device="cpu")
    numbers = torch.tensor(E2M1, dtype=torch.float32, device="cpu") * torch.exp2(6.0 - exponents)[:, None]
    rows = numbers.to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    words = [int.from_bytes(bytes(row), "little") for row in rows]
    return kernel_text(name).replace("// NUMBERS_OF\n", ",\n".join(f"    {word:#x}ull" for word in words) + "\n")
