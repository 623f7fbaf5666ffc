"""TokenFlow: the split of a call's rows over tp and etp ranks, and the way of the outputs back to x.

    x [T, H]        the model's rows; equal on all tp ranks if tokens are replicated
    local_tokens    this rank's share of x; the shares of all ranks contain every token once
    etp_gather      the local tokens of all ranks of the etp group; each of these ranks holds a shard of the same
                    experts and computes all these rows with its shard
    etp_reduce      sums the partial results over the etp group, and keeps this rank's local tokens
    tp_gather       the outputs of the local tokens of all tp ranks, in the order of x

With etp = 1 the gathered rows are the local tokens. With one tp rank, or sequence-sharded tokens, the local tokens are
x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_moe.errors import InputError
from ep_moe.parallel.collectives import gather_replicated, gather_rows, reduce_scatter_rows, sum_gradients
from ep_moe.parallel.layout import RankLayout, split_range
from ep_moe.parallel.rank_group import NO_GRADIENTS, Gradients, RankGroup
from ep_moe.parallel.row_comparison import (
    MASKS,
    CallArguments,
    RowComparison,
    arguments_problem,
    counts_problem,
    has_mask,
)
from ep_moe.types import Routing, TokenMask, capturing


@dataclass(frozen=True)
class TokenSplit:
    """One call's split of tokens over ranks.

    Args:
        local: [start, stop) of x, the local tokens.
        etp_counts: The number of local tokens of each rank of the etp group.
        tp_counts: The number of local tokens of each rank of the tp group.
        masked: Whether a rank of the etp group passes a mask.
    """

    local: tuple[int, int]
    etp_counts: list[int]
    tp_counts: list[int]
    masked: bool = False


def replicated_arguments(
    rows: Tensor, routing: Routing | None, mask: TokenMask | None, replayed_ids: Tensor | None
) -> CallArguments:
    """Return the arguments of a call that must be equal on tp ranks, by name.

    Args:
        rows: x.
        routing: The caller's routing, or None.
        mask: The caller's mask, or None.
        replayed_ids: The ids of a replayed routing, or None.

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
    """Moves rows between the attention layout (tp) and the expert layout (etp) of the ranks.

    Args:
        layout: This rank's coordinates.
        tp: The tp group.
        etp: The etp group.
        lockstep: All ranks that run the same layers together.

    Attributes:
        is_pass_through: Whether each rank works on all rows of its x, and ranks exchange nothing before dispatch.
        etp_rows_are_local: Whether all rows of `etp_gather` are in this rank's x, so that no exchange is needed.
        checks_input: Whether `enter` exchanges numbers and compares the call's arguments.
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
        self.is_pass_through = not (self._replicated or layout.etp > 1 or self.checks_input)

    def enter(
        self,
        total: int,
        problem: str | None,
        device: torch.device,
        passed: CallArguments | None = None,
        *,
        gradients: Gradients = NO_GRADIENTS,
    ) -> TokenSplit:
        """Begin a call together with all ranks of the layer's collectives, and return the split of its rows.

        The ranks exchange row counts, problems and checksums of arguments. If the EP group holds all these ranks and no
        tokens are split, the dispatcher's own exchange does this instead. In a CUDA graph capture all ranks must pass
        equally many rows, and nothing is compared.

        Args:
            total: Rows of x on this rank.
            problem: A fault found on this rank, or None.
            device: The device of x.
            passed: The call's arguments that must be equal on tp ranks.
            gradients: Tensors by name. Each of them must require a gradient on all ranks or on none.

        Returns:
            The split.

        Raises:
            InputError: on all ranks, if any rank has a problem, or tp ranks pass different arguments.
        """
        layout = self._layout
        masked = passed is not None and any(name in passed for name in MASKS)
        if self.is_pass_through:
            return TokenSplit((0, total), [total], [total], masked)
        totals = {layout.rank: total}
        if capturing(device):  # an exchange cannot be captured; all ranks capture the same batch size
            totals, masked = dict.fromkeys(self._lockstep.ranks, total), masked and self.etp_rows_are_local
        elif self.checks_input:
            with self._lockstep.flight_recorder.step("enter"):
                same = self._comparison.facts(passed, device, compared=self._replicated)
                rows = self._lockstep.agree([total, *same], problem, device, gradients=gradients)
            found = dict(zip(self._lockstep.ranks, rows, strict=True))
            totals = {rank: row[0] for rank, row in found.items()}
            masked = any(has_mask(found[rank][1]) for rank in self._etp.ranks)
            self._check_replicated(rows, passed or {}, device)
        return TokenSplit(
            local=split_range(total, layout.split, self._split_rank[layout.rank]),
            etp_counts=[self._local_count(rank, totals) for rank in self._etp.ranks] if self._etp.size > 1 else [total],
            tp_counts=[self._local_count(rank, totals) for rank in self._tp.ranks] if self._replicated else [total],
            masked=masked,
        )

    def agree(self, problem: str | None, device: torch.device) -> None:
        """Raise a problem that a rank found after `enter` on all ranks that entered.

        If the EP group holds all these ranks, the dispatcher's own exchange does this instead.

        Args:
            problem: A fault found on this rank, or None.
            device: The device of x.

        Raises:
            InputError: on all ranks, if any rank has a problem.
        """
        if self.checks_input and not capturing(device):
            with self._lockstep.flight_recorder.step("route"):
                self._lockstep.agree([], problem, device)

    def _local_count(self, rank: int, totals: dict[int, int]) -> int:
        start, stop = split_range(totals[rank], self._layout.split, self._split_rank[rank])
        return stop - start

    def _check_replicated(self, rows: list[list[int]], passed: CallArguments, device: torch.device) -> None:
        """Raise InputError, on all ranks, if tp ranks pass different arguments.

        All ranks see the same `rows`, so they raise the same error. rows: total and `facts` of each rank
        """
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
        """Sum gradients over tp in backward, for a value that is equal on all tp ranks and used for each rank's share.

        Args:
            x: The value.

        Returns:
            The same value.
        """
        return sum_gradients(x, self._tp) if self._replicated else x

    def local_tokens(self, x: Tensor, call: TokenSplit) -> Tensor:
        """Return this rank's share of the rows.

        Args:
            x: [T, ...].
            call: The call's split.

        Returns:
            The rows of the local tokens.
        """
        return x[call.local[0] : call.local[1]] if self._replicated else x

    def etp_gather(self, x: Tensor, call: TokenSplit) -> Tensor:
        """Gather the local tokens of the etp group. Collective over the group unless `etp_rows_are_local`.

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

    def etp_gather_given(self, routing: Routing, call: TokenSplit) -> Routing:
        """Gather the routes that the callers passed, for the rows of `etp_gather`.

        Args:
            routing: The routes of x.
            call: The call's split.

        Returns:
            The routes of the gathered rows.
        """
        ids, weights = routing.ids, self.shared_gradients(routing.weights)
        if self.etp_rows_are_local:
            return Routing(self.etp_gather(ids, call), self.etp_gather(weights, call))
        return Routing(*self.etp_gather_routing(self.local_tokens(ids, call), self.local_tokens(weights, call), call))

    def etp_gather_routing(self, ids: Tensor, weights: Tensor, call: TokenSplit) -> tuple[Tensor, Tensor]:
        """Gather the routes of local tokens, if rows of `etp_gather` come from other ranks.

        Each rank thus routes only its local tokens, and its router gets their gradient. Ids and weights are gathered in
        one message, as float32. Ids are far below 2**24, so float32 represents them exactly.

        Args:
            ids: The ids of the local tokens.
            weights: The weights of the local tokens.
            call: The call's split.

        Returns:
            Ids, int64, and weights of the gathered rows.
        """
        with self._etp.flight_recorder.step("etp gather"):
            both = gather_rows(torch.cat([ids.float(), weights], dim=1), call.etp_counts, self._etp).wait()
        found, gathered = both.chunk(2, dim=1)
        return found.detach().long(), gathered

    def mask(self, mask: TokenMask | None, rows: Tensor, call: TokenSplit) -> TokenMask | None:
        """Gather masks, for the rows of `etp_gather`.

        Collective over etp if `etp_gather` is; ranks without a mask take part too.

        Args:
            mask: The mask of x, None if all rows are tokens.
            rows: x.
            call: The call's split.

        Returns:
            The mask of the gathered rows, None if no rank passes one.
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

    def tp_gather_router_results(self, y: Tensor, call: TokenSplit) -> Tensor:
        """Gather a router's results for all rows of x. Collective over tp if tokens are replicated.

        All tp ranks must use the result in the same way: backward gives each rank the gradient of its own rows.

        Args:
            y: The results for the rows that the router saw: those of `etp_gather` if `etp_rows_are_local`, else the
                local tokens.
            call: The call's split.

        Returns:
            [T, ...], in the order of x.
        """
        if self._layout.etp > 1 and self.etp_rows_are_local:
            before = sum(call.etp_counts[: self._layout.etp_rank])
            y = y[before : before + call.local[1] - call.local[0]]
        if not self._replicated:
            return y
        with self._tp.flight_recorder.step("router logits", counted=False):  # only ranks that record make this step
            return gather_replicated(y, call.tp_counts, self._tp)

    def etp_reduce(self, y: Tensor, call: TokenSplit) -> Tensor:
        """Sum the partial rows over the etp group, and keep the local tokens. Collective over the group.

        Args:
            y: [rows, H], this rank's partial results for the rows of `etp_gather`.
            call: The call's split.

        Returns:
            The rows of the local tokens.
        """
        if self._layout.etp == 1:
            return y
        with self._etp.flight_recorder.step("etp reduce"):
            return reduce_scatter_rows(y, call.etp_counts, self._etp).wait()

    def tp_gather(self, y: Tensor, call: TokenSplit) -> Tensor:
        """Gather the outputs of all tp ranks' local tokens. Collective over tp if tokens are replicated.

        Args:
            y: The outputs of the local tokens.
            call: The call's split.

        Returns:
            [T, H], in the order of x.
        """
        if not self._replicated:
            return y
        with self._tp.flight_recorder.step("tp gather"):
            return gather_replicated(y, call.tp_counts, self._tp)
