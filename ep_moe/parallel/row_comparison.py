"""Check that the tp ranks of a dp rank pass the same rows.

Each rank works on its share of the rows and ignores the others. If ranks passed different rows, some would be lost
without an error. A checksum is exchanged together with the counts, for which the host waits anyway. If checksums
differ, a second exchange compares row by row. Differences of the size of rounding are accepted: ranks may compute the
same rows by different kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ep_moe.config import Tokens
from ep_moe.parallel.checksum import WORDS, checksum, place_factors
from ep_moe.parallel.collectives import all_gather_single
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.runtime.devices import unseen_by_modes

MASKS = ("mask", "mask with send_masked")
NAMES = ("x", "routing.ids", "routing.weights", *MASKS)  # the arguments of a call
_SIGNS = 8  # random projections of a row; the root mean square of their differences estimates the distance of two rows
# the largest accepted distance, relative to a row's norm: above rounding through many layers, and far below the
# distance of different tokens
_ROUNDING = {torch.bfloat16: 2**-4, torch.float16: 2**-4, torch.float32: 2**-9, torch.float64: 2**-9}
_NEEDS = f"ParallelConfig.tokens={Tokens.REPLICATED.value} needs the same tokens on all tp ranks"
_REMEDY = (
    f"pass the same x, routing and mask on both (dropout and sampling: call torch.manual_seed with one seed on all tp "
    f"ranks), or tokens={Tokens.SHARDED.value} where each rank has its own"
)

CallArguments = Mapping[str, Tensor]  # a call's arguments by name, one of NAMES


def argument_bits(passed: CallArguments) -> int:
    """Return a bit mask of the arguments that are passed: bit i for NAMES[i]."""
    return sum(1 << NAMES.index(name) for name in passed)


def has_mask(names: int) -> bool:
    """Return whether a mask is passed. names: the result of `argument_bits`"""
    return names >> NAMES.index("mask") > 0


def counts_problem(found: Mapping[int, int]) -> str:
    """Return the message for tp ranks with different numbers of rows. found: rows of x by rank"""
    counts = ", ".join(f"{rows} on rank {rank}" for rank, rows in found.items())
    return f"{_NEEDS}, got x with {counts} rows; {_REMEDY}"


def arguments_problem(found: Mapping[int, int]) -> str:
    """Return the message for tp ranks with different arguments. found: results of `argument_bits` by rank"""
    said = [
        f"{', '.join(name for at, name in enumerate(NAMES) if bits >> at & 1)} on rank {rank}"
        for rank, bits in found.items()
    ]
    return f"{_NEEDS}, got {'; '.join(said)}; {_REMEDY}"


class RowComparison:
    """Compares the rows that tp ranks pass: by checksums in each call, and row by row where these differ.

    Args:
        rank_group: The tp group.
    """

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._warned = False
        self._factors: Tensor | None = None  # the factors of checksums, cached to save host time in each eager call

    def facts(self, passed: CallArguments | None, device: torch.device, *, compared: bool) -> list[int | Tensor]:
        """Return two numbers that are equal on ranks that pass the same: `argument_bits`, and a checksum.

        compared: whether the arguments are compared with other ranks'. If not, the checksum is 0
        """
        if not passed:
            return [0, 0]
        if not compared:
            return [argument_bits(passed), 0]
        given = [tensor if tensor.is_floating_point() else tensor.long() for tensor in passed.values()]
        sums = [checksum(tensor, device, self._place_factors(tensor, device)) for tensor in given]
        return [argument_bits(passed), sums[0] if len(sums) == 1 else checksum(torch.stack(sums), device)]

    def _place_factors(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return cached `place_factors` for a checksum of the tensor.

        They are only as long as the largest tensor so far needs, up to 8 MiB: calls with few tokens need not write all.
        """
        words = min(WORDS, -(-tensor.numel() * tensor.element_size() // 8))
        if self._factors is None or self._factors.device != device or len(self._factors) < words:
            with unseen_by_modes():
                self._factors = place_factors(1 << max(words - 1, 0).bit_length(), device)
        return self._factors

    @torch.no_grad()
    def problem(self, passed: CallArguments) -> str | None:
        """Compare the arguments of tp ranks row by row. Collective over the group.

        Warns once if rows differ by rounding.

        Args:
            passed: The call's arguments. All ranks pass the same names and equally many rows.

        Returns:
            None if the rows of all ranks are equal up to rounding, else a message that says what differs.
        """
        largest = 0.0
        for name, tensor in passed.items():
            rows = tensor.detach().reshape(len(tensor), -1)
            share = _distances(rows, self._rank_group) if rows.is_floating_point() else _unequal(rows, self._rank_group)
            bound = _ROUNDING[rows.dtype] if rows.is_floating_point() else 0.0
            for (one, other), found in zip(pairwise(self._rank_group.ranks), share, strict=True):
                far = int((found > bound).sum())
                if far:
                    return (
                        f"{_NEEDS}, and {name} on rank {one} differs from rank {other} in {far} of {len(rows)} rows; "
                        f"{_REMEDY}"
                    )
                largest = max(largest, found.max().item())
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the rows of tp ranks {', '.join(map(str, self._rank_group.ranks))} are not bitwise equal: they "
                f"differ by up to {largest:.1e} of a row's norm, within rounding. Each such call needs one more "
                "exchange to compare them",
                stacklevel=2,
            )
        return None


def _unequal(rows: Tensor, rank_group: RankGroup) -> Sequence[Tensor]:
    """Return for each pair of consecutive ranks float64 [rows]: 1 for each row that differs, else 0."""
    return [(one != other).any(1).double() for one, other in pairwise(_gathered(rows.long(), rank_group))]


def _distances(rows: Tensor, rank_group: RankGroup) -> Sequence[Tensor]:
    """Return for each pair of consecutive ranks the distance of each row, relative to its norm.

    It is infinite if only one of two rows has a NaN.
    """
    wide = rows.double() if rows.dtype == torch.float64 else rows.float()
    columns = wide.shape[1]
    generator = torch.Generator("cpu").manual_seed(0)
    signs = torch.randint(0, 2, (columns, _SIGNS), generator=generator, device="cpu").to(wide) * 2 - 1
    norm = wide.norm(dim=1, keepdim=True)
    found = []
    for one, other in pairwise(_gathered(torch.cat([(wide @ signs), norm], 1), rank_group)):
        apart = (one - other)[:, :_SIGNS].square().mean(1).sqrt()
        part = apart / torch.maximum(one[:, _SIGNS], other[:, _SIGNS]).clamp(min=torch.finfo(wide.dtype).tiny)
        odd = one.isnan().any(1) != other.isnan().any(1)
        found.append(part.nan_to_num(0.0).masked_fill(odd, torch.inf))
    return found


def _gathered(rows: Tensor, rank_group: RankGroup) -> list[Tensor]:
    out = rows.new_empty(rank_group.size * len(rows), rows.shape[1])
    all_gather_single(out, rows.contiguous(), group=rank_group.group)
    rank_group.nan_if_aborted(out)
    return list(out.chunk(rank_group.size))
