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

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_moe.errors import InputError
from ep_moe.parallel.collectives import gather_replicated, gather_rows, reduce_scatter_rows, sum_gradients
from ep_moe.parallel.layout import RankLayout, share
from ep_moe.parallel.rank_group import NO_GRADIENTS, Gradients, RankGroup
from ep_moe.parallel.row_comparison import (
    MASKS,
    Passed,
    RowComparison,
    arguments_problem,
    counts_problem,
    has_mask,
)
from ep_moe.types import Routing, TokenMask, capturing


@dataclass(frozen=True)
class Share:
    """One call's split of tokens over ranks.

    Args:
        local: [start, stop) of x, the local tokens.
        etp_counts: Local tokens of each rank of the etp group.
        tp_counts: Local tokens of each rank of the tp group.
        masked: Whether a rank of the etp group passes a mask.
    """

    local: tuple[int, int]
    etp_counts: list[int]
    tp_counts: list[int]
    masked: bool = False


def passed_alike(rows: Tensor, routing: Routing | None, mask: TokenMask | None, replayed_ids: Tensor | None) -> Passed:
    """Name what tp ranks must pass alike in a call of a layer.

    Args:
        rows: x.
        routing: What the caller gave, or None.
        mask: What the caller gave, or None.
        replayed_ids: Of a router whose choice is replayed, or None.

    Returns:
        Tensors by name, one of `row_comparison.NAMES`.
    """
    passed = {"x": rows}
    if replayed_ids is not None:
        passed |= {"routing.ids": replayed_ids}
    if routing is not None:
        passed |= {"routing.ids": routing.ids, "routing.weights": routing.weights}
    if mask is not None:
        passed["mask with send_masked" if mask.sent else "mask"] = mask.tokens.reshape(-1)
    return passed


class TokenFlow:
    """The way of tokens between the attention view and the expert view of the ranks.

    Args:
        layout: This rank's coordinates.
        tp: The tp group.
        etp: The etp group.
        lockstep: All ranks that run the same layers together.

    Attributes:
        whole: Each rank's tokens are its own, and nothing is agreed on before a call.
        etp_rows_are_local: The rows of `etp_gather` are all among this rank's x, so that no rank asks another for them.
        checks_input: `enter` exchanges numbers and compares the call's arguments.
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
        """Agree with all ranks of this layer's collectives on a call, and split its rows.

        Where the EP group holds all of them and nothing is split, the dispatcher's own exchange does this instead.
        Inside a CUDA-graph capture all must pass equally many rows, and nothing is compared.

        Args:
            total: Rows of x on this rank.
            problem: A fault found on this rank, or None.
            device: Of x.
            passed: The call's arguments, of which tp ranks pass the same.
            gradients: What the call is differentiated by, on all ranks or on none.

        Returns:
            The split.

        Raises:
            InputError: on all ranks, where any has a problem, or tp ranks that must pass the same do not.
        """
        layout = self._layout
        masked = passed is not None and any(name in passed for name in MASKS)
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
        """Raise a problem that a rank met after `enter` on all ranks that entered. Where the EP group holds them all,
        the dispatcher's own exchange does this instead.

        Args:
            problem: A fault found on this rank, or None.
            device: Of x.

        Raises:
            InputError: on all ranks, where any has a problem.
        """
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
        """Sum gradients over tp in backward, for a value that all tp ranks hold alike and use for their own share.

        Args:
            x: The value.

        Returns:
            The same value.
        """
        return sum_gradients(x, self._tp) if self._replicated else x

    def local_tokens(self, x: Tensor, call: Share) -> Tensor:
        """Take the rows that this rank answers for.

        Args:
            x: [T, ...].
            call: The call's split.

        Returns:
            The local tokens' rows.
        """
        return x[call.local[0] : call.local[1]] if self._replicated else x

    def etp_gather(self, x: Tensor, call: Share) -> Tensor:
        """Bring together the local tokens of the etp group. Collective over it unless `etp_rows_are_local`.

        Args:
            x: [T, ...].
            call: The call's split.

        Returns:
            Rows in the order of the group's ranks.
        """
        if self._layout.etp == 1:
            return self.local_tokens(x, call)
        if self.etp_rows_are_local:
            before = sum(call.etp_counts[: self._layout.etp_rank])
            start = call.local[0] - before
            return x[start : start + sum(call.etp_counts)]
        with self._etp.flight_recorder.step("etp gather"):
            return gather_rows(self.local_tokens(x, call), call.etp_counts, self._etp).wait()

    def etp_gather_given(self, routing: Routing, call: Share) -> Routing:
        """Bring together the routes that the callers gave, for the rows of `etp_gather`.

        Args:
            routing: Of x.
            call: The call's split.

        Returns:
            The gathered rows' routes.
        """
        ids, weights = routing.ids, self.shared_gradients(routing.weights)
        if self.etp_rows_are_local:
            return Routing(self.etp_gather(ids, call), self.etp_gather(weights, call))
        return Routing(*self.etp_gather_routing(self.local_tokens(ids, call), self.local_tokens(weights, call), call))

    def etp_gather_routing(self, ids: Tensor, weights: Tensor, call: Share) -> tuple[Tensor, Tensor]:
        """Bring together the routes of local tokens, for the rows of `etp_gather` that lie on other ranks.

        Each rank thereby routes its local tokens alone, and its router has their gradient. Ids are far below 2**24, so
        that float32 holds them exactly and both travel in one message.

        Args:
            ids: Of the local tokens.
            weights: Of the local tokens.
            call: The call's split.

        Returns:
            Ids, int64, and weights of the gathered rows.
        """
        with self._etp.flight_recorder.step("etp gather"):
            both = gather_rows(torch.cat([ids.float(), weights], dim=1), call.etp_counts, self._etp).wait()
        found, gathered = both.chunk(2, dim=1)
        return found.detach().long(), gathered

    def mask(self, mask: TokenMask | None, rows: Tensor, call: Share) -> TokenMask | None:
        """Bring together masks, for the rows of `etp_gather`. Collective over etp where `etp_gather` is, on ranks
        without a mask too.

        Args:
            mask: Of x, None where all rows are tokens.
            rows: x.
            call: The call's split.

        Returns:
            The gathered rows' mask, None where no rank passes one.
        """
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
        """Bring together what a router gave, for all rows of x. Collective over tp where tokens are replicated.

        All tp ranks must go on to use the result alike: backward gives each rank the gradient of its own rows.

        Args:
            y: Of the rows that the router saw: those of `etp_gather` where `etp_rows_are_local`, else the local tokens.
            call: The call's split.

        Returns:
            [T, ...], in the order of x.
        """
        if self._layout.etp > 1 and self.etp_rows_are_local:
            before = sum(call.etp_counts[: self._layout.etp_rank])
            y = y[before : before + call.local[1] - call.local[0]]
        if not self._replicated:
            return y
        with self._tp.flight_recorder.step("router logits", counted=False):  # ranks that record nothing do not make it
            return gather_replicated(y, call.tp_counts, self._tp)

    def etp_reduce(self, y: Tensor, call: Share) -> Tensor:
        """Sum the partial rows of the etp group, and keep the local tokens. Collective over the group.

        Args:
            y: [rows, H], this rank's part of the rows of `etp_gather`.
            call: The call's split.

        Returns:
            The local tokens' rows.
        """
        if self._layout.etp == 1:
            return y
        with self._etp.flight_recorder.step("etp reduce"):
            return reduce_scatter_rows(y, call.etp_counts, self._etp).wait()

    def tp_gather(self, y: Tensor, call: Share) -> Tensor:
        """Bring together what the model expects back. Collective over tp where tokens are replicated.

        Args:
            y: Outputs of the local tokens.
            call: The call's split.

        Returns:
            [T, H], in the order of x.
        """
        if not self._replicated:
            return y
        with self._tp.flight_recorder.step("tp gather"):
            return gather_replicated(y, call.tp_counts, self._tp)
