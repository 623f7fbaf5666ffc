"""Checksums of tensors, by which ranks compare the state that they must share."""

from __future__ import annotations

import torch
from torch import Tensor

WORDS = 1 << 20  # int64 words that are multiplied at a time: 8 MiB of scratch memory
_LATEST = 128  # the most rounds between two comparisons
_FACTOR, _STEP = -7046029254386353131, 6364136223846793005  # odd: 2**64 / golden ratio, and the factor of Knuth's MMIX


def place_factors(count: int, device: torch.device) -> Tensor:
    """Return the odd factors of the first `count` places: int64 [count]."""
    return (torch.arange(count, dtype=torch.int64, device=device) * _FACTOR) | 1


def checksum(tensor: Tensor, device: torch.device, ready: Tensor | None = None) -> Tensor:
    """Sum a tensor's bytes as int64 words, each times an odd factor of its place, modulo 2**64.

    Args:
        tensor: A tensor of any shape and dtype. Equal bytes give equal sums on every device.
        device: The device of the result.
        ready: A cached result of `place_factors` on the tensor's device. It is ignored if it is too short.

    Returns:
        int64 [] on `device`.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        padded = data.new_zeros(-(-data.numel() // 8) * 8)
        padded[: data.numel()] = data
        data = padded
    total = None
    for words in data.view(torch.int64).split(WORDS):
        place = ready[: len(words)] if ready is not None and len(ready) >= len(words) else None
        part = (words * (place_factors(len(words), tensor.device) if place is None else place)).sum()
        total = part if total is None else total * _STEP + part
    return torch.zeros((), dtype=torch.int64, device=device) if total is None else total.to(device)


def row_checksums(rows: Tensor) -> Tensor:
    """Compute `checksum` of each row at once.

    Args:
        rows: [L, ...] of any dtype.

    Returns:
        int64 [L] on the device of `rows`.
    """
    data = rows.detach().unsqueeze(-1).flatten(1).contiguous().view(torch.uint8)
    padded = torch.nn.functional.pad(data, (0, -data.shape[1] % 8))
    words = padded.view(-1).view(torch.int64).view(len(padded), padded.shape[1] // 8)
    total = words.new_zeros(len(words))
    for part in words.split(WORDS, 1):
        total = total * _STEP + (part * place_factors(part.shape[1], part.device)).sum(1)
    return total


def is_compared(number: int) -> bool:
    """Return whether ranks compare in this round (counted from 1) of a repeated operation, such as backward.

    They compare in rounds 1, 2, 4, ..., 128, and then in every 128th. Most faults exist from the first round on. One
    that begins later is found within 128 rounds.
    """
    return number % _LATEST == 0 or number & (number - 1) == 0
