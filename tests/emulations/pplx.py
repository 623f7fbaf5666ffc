"""pplx-kernels' intranode `AllToAll` by its documented contract, on gloo.

Dispatch copies a row per route, in any order within an expert. Combine is a weighted sum. The emulation checks
arguments that pplx does not check.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ep_moe.all2all.base import DispatchShape
from ep_moe.parallel.collectives import as_bytes
from ep_moe.parallel.rank_group import RankGroup
from tests.emulations.exchange import all_gather_values


class AllToAll:
    def __init__(self, dispatch_shape: DispatchShape, rank_group: RankGroup) -> None:
        self.g, self.rank_group = dispatch_shape, rank_group
        self.step = 0
        self.sent: Any = None
        self.plan: Any = None
        self.destroyed = False

    def _exchange(self, value: Any) -> list[Any]:
        return all_gather_values(value, self.rank_group.group)

    def dispatch(
        self, *, out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale, indices, bound_m, do_send,
        do_recv,
    ):  # fmt: skip
        assert not self.destroyed
        assert do_send != do_recv
        assert bound_m is None
        assert all(given.is_contiguous() for given in (dp_x, dp_x_scale, indices) if given is not None)
        assert (out_expert_x_scale is None) == (dp_x_scale is None) == (not self.g.scales)
        scales = torch.empty(len(dp_x), 0) if dp_x_scale is None else dp_x_scale
        assert scales.shape == (len(dp_x), self.g.scales)
        assert self.g.scales % 4 == 0, "scales of a row must be a multiple of 16 bytes"
        assert indices.dtype == torch.uint32
        assert len(dp_x) <= self.g.max_tokens
        assert out_expert_x.shape == (
            self.g.slots_per_rank,
            self.rank_group.size * self.g.max_tokens,
            self.g.hidden_size,
        )
        if do_send:
            assert (self.sent, self.plan) == (None, None), "a call is under way"
            ids = indices.long()
            assert (ids < self.g.num_physical).all(), "writes to memory of no expert"
            copies = torch.bincount(ids.flatten(), minlength=self.g.num_physical)
            assert (copies <= self.g.max_tokens).all(), "writes over the rows of the next expert"
            self.sent = self._exchange((as_bytes(dp_x).clone(), scales.clone(), ids))
            return
        self.step += 1
        generator = torch.Generator().manual_seed(self.step * 100 + self.rank_group.rank)
        out_expert_x.copy_(torch.full(out_expert_x.shape, torch.nan))
        self.plan = []
        every, every_scale = (torch.cat([sent[part] for sent in self.sent]) for part in (0, 1))
        firsts = [0, *itertools.accumulate(len(sent[0]) for sent in self.sent)]
        for slot in range(self.g.slots_per_rank):
            expert = self.rank_group.rank * self.g.slots_per_rank + slot
            routes = [
                (r, *where) for r, (*_, ids) in enumerate(self.sent) for where in (ids == expert).nonzero().tolist()
            ]
            routes = [routes[i] for i in torch.randperm(len(routes), generator=generator)]
            chosen = [firsts[rank] + token for rank, token, _ in routes]
            as_bytes(out_expert_x)[slot, : len(routes)] = every[chosen]
            if out_expert_x_scale is not None:
                out_expert_x_scale[slot, : len(routes)] = every_scale[chosen]
            out_expert_num_tokens[slot] = len(routes)
            self.plan.append(routes)
        self.sent = None

    def combine(self, *, out_tokens, indices, weights, expert_y, bound_m, do_send, do_recv):
        assert do_send != do_recv
        assert bound_m is None
        assert weights.dtype == torch.float32
        assert all(given.is_contiguous() for given in (indices, weights, expert_y))
        assert out_tokens.shape == (self.g.max_tokens, self.g.hidden_size)
        if do_send:
            assert self.plan is not None, "combine called before dispatch"
            self.sent = self._exchange((expert_y.clone(), self.plan))
            return
        total = torch.zeros(len(indices), self.g.hidden_size)
        for rows, plan in self.sent:
            own = [
                (slot, place, token, route)
                for slot, routes in enumerate(plan)
                for place, (rank, token, route) in enumerate(routes)
                if rank == self.rank_group.rank
            ]
            slots, places, tokens, routes = torch.tensor(own, dtype=torch.int64).view(-1, 4).unbind(1)
            total.index_add_(0, tokens, weights[tokens, routes].unsqueeze(1) * rows[slots, places].float())
        out_tokens.fill_(torch.nan)
        out_tokens[: len(indices)] = total
        self.sent = self.plan = None

    def destroy(self) -> None:
        assert not self.destroyed
        self.destroyed = True


def make_all2all(dispatch_shape: DispatchShape, rank_group: RankGroup) -> AllToAll:
    return AllToAll(dispatch_shape, rank_group)
