"""Which rows of a call this rank works on, and how outputs find back.

    x [T, H]        what the model passed; equal on all tp ranks where tokens are replicated
    local_tokens    the rows this rank answers for; over all ranks every token once
    etp_gather      the local tokens of this rank's etp group: its members hold pieces of the same experts, so each of
                    them sends all these rows through its piece
    etp_reduce      sums the pieces, and keeps the local tokens
    tp_gather       the outputs of all tp ranks' local tokens, as the model expects them back

With etp = 1 the gathered rows are the local tokens; with one tp rank, or sequence-sharded tokens, these are x.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ep_moe.config import Tokens
from ep_moe.errors import InputError
from ep_moe.parallel.collectives import (
    all_gather_single,
    gather_replicated,
    gather_rows,
    reduce_scatter_rows,
    sum_gradients,
)
from ep_moe.parallel.layout import RankLayout, share
from ep_moe.parallel.rank_group import NO_GRADIENTS, WORDS, Gradients, RankGroup, checksum, place_factors
from ep_moe.runtime.devices import unseen_by_modes
from ep_moe.types import Routing, TokenMask, capturing


@dataclass(frozen=True)
class Share:
    """One call's split. local: [start, stop) of x. etp_counts, tp_counts: local tokens of each peer. masked: whether a
    rank of the etp group passes a mask."""

    local: tuple[int, int]
    etp_counts: list[int]
    tp_counts: list[int]
    masked: bool = False


class TokenFlow:
    """The way of tokens between the attention view and the expert view of the ranks.

    whole: each rank's tokens are its own, and nothing is agreed on before a call
    etp_rows_are_local: the rows of `etp_gather` are all among this rank's x, so that no rank asks another for them
    """

    def __init__(self, layout: RankLayout, *, tp: RankGroup, etp: RankGroup, lockstep: RankGroup) -> None:
        self._layout = layout
        self._tp, self._etp, self._lockstep = tp, etp, lockstep
        self._replicated = layout.split > 1
        # a lockstep group holds whole tp groups where tokens are split over them
        self._split_rank = {rank: at % layout.split for at, rank in enumerate(lockstep.ranks)}
        self.etp_rows_are_local = layout.etp == 1 or (self._replicated and layout.tp % layout.etp == 0)
        self.checks_input = layout.lockstep > 1 and (layout.lockstep != layout.ep or self._replicated)
        self._comparison = RowComparison(tp)
        self.whole = not (self._replicated or layout.etp > 1 or self.checks_input)

    def enter(
        self,
        total: int,
        problem: str | None,
        device: torch.device,
        passed: Passed | None = None,
        *,
        gradients: Gradients = NO_GRADIENTS,
    ) -> Share:
        """Agree with all ranks of this layer's collectives on a call with `total` rows here, and split them.

        Raises InputError on all of them when any has a problem, or when tp ranks that must pass the same do not. Where
        the EP group holds all of them and nothing is split, the dispatcher's own exchange does this instead. Inside a
        CUDA-graph capture all must pass equally many, and nothing is compared.

        passed: the call's arguments, of which tp ranks pass the same
        gradients: what the call is differentiated by, on all ranks or on none
        """
        layout = self._layout
        masked = passed is not None and has_mask(argument_bits(passed))
        if self.whole:
            return Share((0, total), [total], [total], masked)
        totals = {layout.rank: total}
        if capturing(device):  # no exchange can be captured: a batch size is captured on all ranks alike
            totals, masked = dict.fromkeys(self._lockstep.ranks, total), masked and self.etp_rows_are_local
        elif self.checks_input:
            with self._lockstep.flight_recorder.step("enter"):
                same = self._comparison.facts(passed, device, compared=self._replicated)
                rows = self._lockstep.agree([total, *same], problem, device, gradients=gradients)
            found = dict(zip(self._lockstep.ranks, rows, strict=True))
            totals = {rank: row[0] for rank, row in found.items()}
            masked = any(has_mask(found[rank][1]) for rank in self._etp.ranks)
            self._check_replicated(rows, passed or {}, device)
        return Share(
            local=share(total, layout.split, self._split_rank[layout.rank]),
            etp_counts=[self._local_count(rank, totals) for rank in self._etp.ranks] if self._etp.size > 1 else [total],
            tp_counts=[self._local_count(rank, totals) for rank in self._tp.ranks] if self._replicated else [total],
            masked=masked,
        )

    def agree(self, problem: str | None, device: torch.device) -> None:
        """Raise a problem that a rank met after `enter`, on all ranks that entered; where the EP group holds them all
        the dispatcher's own exchange does this instead."""
        if self.checks_input and not capturing(device):
            with self._lockstep.flight_recorder.step("route"):
                self._lockstep.agree([], problem, device)

    def _local_count(self, rank: int, totals: dict[int, int]) -> int:
        start, stop = share(totals[rank], self._layout.split, self._split_rank[rank])
        return stop - start

    def _check_replicated(self, rows: list[list[int]], passed: Passed, device: torch.device) -> None:
        """Every rank sees what all have exchanged, so that all raise alike. rows: total and `facts` of each rank."""
        if not self._replicated:
            return
        tp = self._layout.tp
        unequal: set[int] = set()
        for base in range(0, self._lockstep.size, tp):
            ranks, found = self._lockstep.ranks[base : base + tp], rows[base : base + tp]
            for column, problem in enumerate((counts_problem, arguments_problem)):
                if len({row[column] for row in found}) > 1:
                    raise InputError(problem({rank: row[column] for rank, row in zip(ranks, found, strict=True)}))
            if len({row[2] for row in found}) > 1:
                unequal.update(ranks)
        if unequal:
            text = None
            if self._layout.rank in unequal:
                with self._tp.flight_recorder.step("tp rows", counted=False):
                    text = self._comparison.problem(passed)
            with self._lockstep.flight_recorder.step("tp rows"):
                self._lockstep.agree([], text, device)

    def shared_gradients(self, x: Tensor) -> Tensor:
        """For a value that all tp ranks hold alike and use for their own share: backward sums over tp."""
        return sum_gradients(x, self._tp) if self._replicated else x

    def local_tokens(self, x: Tensor, call: Share) -> Tensor:
        """The rows this rank answers for. x: [T, ...]."""
        return x[call.local[0] : call.local[1]] if self._replicated else x

    def etp_gather(self, x: Tensor, call: Share) -> Tensor:
        """The local tokens of the whole etp group. x: [T, ...]."""
        if self._layout.etp == 1:
            return self.local_tokens(x, call)
        if self.etp_rows_are_local:
            before = sum(call.etp_counts[: self._layout.etp_rank])
            start = call.local[0] - before
            return x[start : start + sum(call.etp_counts)]
        with self._etp.flight_recorder.step("etp gather"):
            return gather_rows(self.local_tokens(x, call), call.etp_counts, self._etp).wait()

    def etp_gather_given(self, routing: Routing, call: Share) -> Routing:
        """Of the rows of `etp_gather`, the routes that the caller gave for the rows of x."""
        ids, weights = routing.ids, self.shared_gradients(routing.weights)
        if self.etp_rows_are_local:
            return Routing(self.etp_gather(ids, call), self.etp_gather(weights, call))
        return Routing(*self.etp_gather_routing(self.local_tokens(ids, call), self.local_tokens(weights, call), call))

    def etp_gather_routing(self, ids: Tensor, weights: Tensor, call: Share) -> tuple[Tensor, Tensor]:
        """The routing of the gathered rows from that of the local tokens, where the others lie on other ranks. Each
        rank thereby routes its local tokens alone, and its router has their gradient.

        Ids are far below 2**24, so that float32 holds them exactly and both travel in one message.
        """
        with self._etp.flight_recorder.step("etp gather"):
            both = gather_rows(torch.cat([ids.float(), weights], dim=1), call.etp_counts, self._etp).wait()
        found, gathered = both.chunk(2, dim=1)
        return found.detach().long(), gathered

    def mask(self, mask: TokenMask | None, rows: Tensor, call: Share) -> TokenMask | None:
        """That of the gathered rows. mask: of x, None where all are tokens; rows: x. Collective over etp where
        `etp_gather` is, on ranks without a mask too."""
        if not call.masked:
            return None
        tokens, sent = (True, False) if mask is None else (mask.tokens.reshape(-1), mask.sent)
        if self.etp_rows_are_local:
            assert isinstance(tokens, Tensor)
            return TokenMask(self.etp_gather(tokens, call), sent)
        codes = torch.full((len(rows),), 2 * bool(sent), dtype=torch.uint8, device=rows.device)
        with torch.no_grad():
            codes = self.etp_gather(codes.masked_fill(torch.as_tensor(tokens, device=rows.device), 1), call)
        return TokenMask(codes == 1, codes > 0)

    def whole_input(self, y: Tensor, call: Share) -> Tensor:
        """What a router gave, for all rows of x [T, ...]. y: of the rows it saw, gathered ones where these are local,
        else the local tokens.

        All tp ranks must go on to use the result alike: backward gives each rank the gradient of its own rows.
        """
        if self._layout.etp > 1 and self.etp_rows_are_local:
            before = sum(call.etp_counts[: self._layout.etp_rank])
            y = y[before : before + call.local[1] - call.local[0]]
        if not self._replicated:
            return y
        with self._tp.flight_recorder.step("router logits", counted=False):  # ranks that record nothing do not make it
            return gather_replicated(y, call.tp_counts, self._tp)

    def etp_reduce(self, y: Tensor, call: Share) -> Tensor:
        """Sum the etp group's partial rows, those of `etp_gather`, and keep the local tokens. y: [rows, H]."""
        if self._layout.etp == 1:
            return y
        with self._etp.flight_recorder.step("etp reduce"):
            return reduce_scatter_rows(y, call.etp_counts, self._etp).wait()

    def tp_gather(self, y: Tensor, call: Share) -> Tensor:
        """Outputs of the local tokens to what the model expects back: [T, H]."""
        if not self._replicated:
            return y
        with self._tp.flight_recorder.step("tp gather"):
            return gather_replicated(y, call.tp_counts, self._tp)


# --- whether the tp ranks of a dp rank pass the same rows -------------------------------------------------------------
# Each rank works on its share and ignores its other rows, so that different rows would be lost without an error. A
# checksum rides on the exchange of counts, which the host waits for anyway. Where checksums differ, a second exchange
# compares row by row. Ranks that compute the same rows by different kernels differ by rounding, and go on.

NAMES = ("x", "routing.ids", "routing.weights", "mask", "mask with send_masked")  # what a call may pass
_SIGNS = 8  # random projections of a row; the root of their mean square estimates a distance
# of a row's norm: what rounding may come to through many layers, and far below what other tokens differ by
_ROUNDING = {torch.bfloat16: 2**-4, torch.float16: 2**-4, torch.float32: 2**-9, torch.float64: 2**-9}
_NEEDS = f"ParallelConfig.tokens={Tokens.REPLICATED.value} needs the same tokens on all tp ranks"
_REMEDY = (
    f"pass the same x, routing and mask on both (dropout and sampling: call torch.manual_seed with one seed on all tp "
    f"ranks), or tokens={Tokens.SHARDED.value} where each rank has its own"
)

Passed = Mapping[str, Tensor]  # by a name of NAMES


def passed_alike(rows: Tensor, routing: Routing | None, mask: TokenMask | None, replayed_ids: Tensor | None) -> Passed:
    """What tp ranks must pass alike in a call of a layer. replayed_ids: of a router whose choice is replayed"""
    passed = {"x": rows}
    if replayed_ids is not None:
        passed |= {"routing.ids": replayed_ids}
    if routing is not None:
        passed |= {"routing.ids": routing.ids, "routing.weights": routing.weights}
    if mask is not None:
        passed["mask with send_masked" if mask.sent else "mask"] = mask.tokens.reshape(-1)
    return passed


def argument_bits(passed: Passed) -> int:
    """Which of NAMES there are."""
    return sum(1 << NAMES.index(name) for name in passed)


def has_mask(names: int) -> bool:
    """names: as `argument_bits` gives them."""
    return names >> NAMES.index("mask") > 0


def counts_problem(found: Mapping[int, int]) -> str:
    """found: rows of x by rank."""
    counts = ", ".join(f"{rows} on rank {rank}" for rank, rows in found.items())
    return f"{_NEEDS}, got x with {counts} rows; {_REMEDY}"


def arguments_problem(found: Mapping[int, int]) -> str:
    """found: arguments by rank, as `facts` numbers them."""
    said = [
        f"{', '.join(name for at, name in enumerate(NAMES) if bits >> at & 1)} on rank {rank}"
        for rank, bits in found.items()
    ]
    return f"{_NEEDS}, got {'; '.join(said)}; {_REMEDY}"


class RowComparison:
    """Of rows whose checksums differ."""

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._warned = False
        self._factors: Tensor | None = None  # of checksums; each line of `facts` is host time of an eager call

    def facts(self, passed: Passed | None, device: torch.device, *, compared: bool) -> list[int | Tensor]:
        """Numbers that are equal where ranks pass the same: which arguments, and a checksum of them if they are
        compared with other ranks'."""
        if not passed:
            return [0, 0]
        if not compared:
            return [argument_bits(passed), 0]
        given = [tensor if tensor.is_floating_point() else tensor.long() for tensor in passed.values()]
        sums = [checksum(tensor, device, self._place_factors(tensor, device)) for tensor in given]
        return [argument_bits(passed), sums[0] if len(sums) == 1 else checksum(torch.stack(sums), device)]

    def _place_factors(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Those of at least as many words as a checksum of the tensor weighs at a time, kept for later calls: few
        tokens do not write the 8 MiB of the most words."""
        words = min(WORDS, -(-tensor.numel() * tensor.element_size() // 8))
        if self._factors is None or self._factors.device != device or len(self._factors) < words:
            with unseen_by_modes():
                self._factors = place_factors(1 << max(words - 1, 0).bit_length(), device)
        return self._factors

    @torch.no_grad()
    def problem(self, passed: Passed) -> str | None:
        """None where the rows of all ranks of the group are the same but for rounding. Collective over the group, on
        whose ranks `passed` holds the same names and as many rows."""
        largest = 0.0
        for name, tensor in passed.items():
            rows = tensor.detach().reshape(len(tensor), -1)
            share = _distances(rows, self._rank_group) if rows.is_floating_point() else _unequal(rows, self._rank_group)
            bound = _ROUNDING[rows.dtype] if rows.is_floating_point() else 0.0
            for (one, other), found in zip(pairwise(self._rank_group.ranks), share, strict=True):
                far = int((found > bound).sum())
                if far:
                    return (
                        f"{_NEEDS}, and {name} on rank {one} differs from that on rank {other} in {far} of "
                        f"{len(rows)} rows; {_REMEDY}"
                    )
                largest = max(largest, found.max().item())
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the rows of tp ranks {', '.join(map(str, self._rank_group.ranks))} are not equal bit for bit; they "
                f"differ "
                f"by up to {largest:.1e} of a row's norm, as rounding does. Each such call compares them in a further "
                f"exchange",
                stacklevel=2,
            )
        return None


def _unequal(rows: Tensor, rank_group: RankGroup) -> Sequence[Tensor]:
    """1 for each row that is not that of the next rank, else 0."""
    return [(one != other).any(1).double() for one, other in pairwise(_gathered(rows.long(), rank_group))]


def _distances(rows: Tensor, rank_group: RankGroup) -> Sequence[Tensor]:
    """Of each row from that of the next rank, as a part of its norm; infinite where one alone is NaN."""
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
