"""DeepEP's V1 `Buffer` in normal mode by its documented contract, on gloo. It checks what DeepEP asserts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe.parallel.collectives import as_bytes
from tests.emulations.exchange import all_gather_values


class Event:
    """An event whose rows exist only for callers that wait. Until then the tensors hold NaN."""

    def __init__(self, finish) -> None:
        self._finish = finish

    def current_stream_wait(self) -> None:
        self._finish()


class Buffer:
    def __init__(self, group: Any, ranks: int, row_bytes: int) -> None:
        self.group, self.ranks = group, ranks
        self.rank = dist.get_rank(group)
        self.row_bytes = row_bytes
        self.destroyed = False

    def get_dispatch_layout(self, ids: Tensor, num_experts: int):
        assert ids.dtype == torch.int64
        assert ids.is_contiguous()
        assert ((ids >= -1) & (ids < num_experts)).all(), "an id that no rank has"
        each = num_experts // self.ranks
        owner = torch.where(ids >= 0, ids // each, self.ranks)
        in_rank = torch.zeros(len(ids), self.ranks + 1, dtype=torch.bool).scatter_(1, owner, True)[:, : self.ranks]
        per_expert = torch.bincount(ids[ids >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank.contiguous(), None

    def dispatch(
        self, x: Tensor, *, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert,
        topk_idx, topk_weights, num_worst_tokens, async_finish,
    ):  # fmt: skip
        assert not self.destroyed
        x, scale = x if isinstance(x, tuple) else (x, None)
        assert x.dtype == (torch.bfloat16 if scale is None else torch.float8_e4m3fn)
        assert x.shape[1] * 2 == self.row_bytes
        scales = torch.empty(len(x), 0) if scale is None else scale
        assert async_finish
        assert num_tokens_per_rdma_rank is None
        assert torch.equal(num_tokens_per_rank, is_token_in_rank.sum(0).int())
        assert all(t.is_contiguous() for t in (x, is_token_in_rank, topk_idx, topk_weights))
        each = len(num_tokens_per_expert) // self.ranks
        mine = (as_bytes(x), scales, is_token_in_rank, topk_idx, topk_weights, num_worst_tokens)
        everyone = all_gather_values(mine, self.group)
        rows, steps, ids, weights, plan = [], [], [], [], []
        for data, step, wanted, chosen, factors, worst in everyone:
            assert worst == num_worst_tokens
            tokens = wanted[:, self.rank].nonzero().flatten()
            local = chosen[tokens] - self.rank * each
            here = (local >= 0) & (local < each)
            rows.append(data[tokens])
            steps.append(step[tokens])
            ids.append(torch.where(here, local, -1))
            weights.append(torch.where(here, factors[tokens], 0.0))
            plan.append(tokens)
        count = sum(map(len, plan))
        total = num_worst_tokens or count
        assert count <= total, "more rows than there is room for"
        got = torch.full((total, x.shape[1]), torch.nan).to(x.dtype)
        got_scales = torch.full((total, scales.shape[1]), torch.nan)
        got_ids = torch.full((total, topk_idx.shape[1]), -1)
        got_weights = torch.full((total, topk_idx.shape[1]), torch.nan)

        def finish() -> None:
            for target, parts in ((as_bytes(got), rows), (got_scales, steps), (got_ids, ids), (got_weights, weights)):
                target[:count] = torch.cat(parts)

        arrived = got if scale is None else (got, got_scales)
        return arrived, got_ids, got_weights, [], (plan, count, len(x)), Event(finish)

    def combine(self, y: Tensor, handle: Any, *, async_finish: bool):
        assert async_finish
        assert y.dtype == torch.bfloat16
        plan, count, tokens = handle
        assert len(y) >= count
        everyone = all_gather_values((y.clone(), plan), self.group)
        out = torch.full((tokens, y.shape[1]), torch.nan, dtype=y.dtype)

        def finish() -> None:
            total = torch.zeros(tokens, y.shape[1])
            for rows, sent in everyone:
                start = sum(len(part) for part in sent[: self.rank])
                total[sent[self.rank]] += rows[start : start + len(sent[self.rank])].float()
            out.copy_(total)

        return out, None, Event(finish)

    def destroy(self) -> None:
        assert not self.destroyed
        self.destroyed = True
