"""The Triton form of `Checksum.of_parts`: a launch for each part and two more, in the place of some ten for each."""

# Triton's language has no types
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # words of a program


def of_parts(parts: Sequence[Tensor], factors: Tensor, powers: Tensor) -> Tensor:
    """parts: int64 words; factors: of the words of a block; powers: of the number between blocks, from the 0th on."""
    count = len(parts)
    sums = torch.zeros(count + 1, dtype=torch.int64, device=factors.device)
    for number, words in enumerate(parts):
        blocks = triton.cdiv(len(words), len(factors))
        _weigh[(triton.cdiv(len(words), _BLOCK),)](
            words, factors, powers, sums, number, len(words), len(factors), blocks,
            BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    _combine[(1,)](sums, factors, powers, count, LANES=triton.next_power_of_2(count), num_warps=1)
    return sums[count]


@triton.jit
def _weigh(words, factors, powers, sums, number, count, each, blocks, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    block = start // each
    at = start + tl.arange(0, BLOCK)
    word = tl.load(words + at, mask=at < count, other=0)
    factor = tl.load(factors + at % each, mask=at < count, other=0)
    total = tl.sum(word * factor) * tl.load(powers + blocks - 1 - block)
    if start == 0:
        total += tl.load(powers + blocks)
    tl.atomic_add(sums + number, total, sem="relaxed")  # modulo 2**64, and so the same in any order


@triton.jit
def _combine(sums, factors, powers, count, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    found = tl.load(sums + lane, mask=lane < count, other=0)
    factor = tl.load(factors + lane, mask=lane < count, other=0)
    tl.store(sums + count, tl.sum(found * factor) + tl.load(powers + 1))
