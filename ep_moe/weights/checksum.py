"""A number that tells tensors apart."""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = 1 << 20  # that are weighed at a time: 8 MiB of scratch memory
_FACTOR, _STEP = -7046029254386353131, 6364136223846793005  # odd: 2**64 / golden ratio, and Knuth's of MMIX


def checksum(tensor: Tensor, device: torch.device) -> Tensor:
    """Sum a tensor's bytes as int64 words, each times an odd number of its place, modulo 2**64.

    Args:
        tensor: of any shape and dtype. Equal bytes give equal sums on every device.
        device: where the sum is wanted.

    Returns:
        int64 [] on `device`.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        padded = data.new_zeros(-(-data.numel() // 8) * 8)
        padded[: data.numel()] = data
        data = padded
    total = torch.ones((), dtype=torch.int64, device=tensor.device)
    for words in data.view(torch.int64).split(_WORDS):
        place = torch.arange(len(words), dtype=torch.int64, device=tensor.device)
        total = total * _STEP + (words * ((place * _FACTOR) | 1)).sum()
    return total.to(device)
