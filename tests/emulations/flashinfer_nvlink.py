"""FlashInfer's one-sided NVLink communication by its documented contract, on gloo.

Rows go to the rank of their ids, one per (token, rank), in any order. Empty rows hold garbage. Combine sums the ranks'
rows in float32. The emulation checks arguments that FlashInfer does not check.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.emulations.exchange import all_gather_values

TOP_KS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)  # moeAlltoAllKernels.cu, FlashInfer 0.7.2.post1
sizes_made: list[int] = []  # FlashInfer shares equal workspaces within a process


@dataclass
class Communication:
    """Emulate `flashinfer.moe_ep.NVLinkOneSidedAlltoAll`, as far as a dispatcher uses it."""

    group: Any
    rank: int
    size: int
    params: dict[str, Any]
    low_precision: bool = False

    def __post_init__(self) -> None:
        assert self.params["top_k"] in TOP_KS
        assert self.params["num_experts"] % self.size == 0
        self._plan: Any = None
        self._buffer: Tensor | None = None
        self._step = 0

    def dispatch(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, *, hidden_states_scale: Tensor | None,
        max_tokens_per_rank: int,
    ) -> Any:  # fmt: skip
        assert self._plan is None, "dispatch called twice without an intervening combine"
        assert 0 < max_tokens_per_rank <= self.params["max_tokens_per_rank"]
        assert len(hidden) <= max_tokens_per_rank, "writes past its part of the peers' buffers"
        assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
        assert ids.shape == weights.shape == (len(hidden), self.params["top_k"])
        assert all(t.is_contiguous() for t in (hidden, ids, weights))
        assert ((ids >= 0) & (ids < self.params["num_experts"])).all(), "writes to memory of no expert"
        scale = torch.empty(len(hidden), 0) if hidden_states_scale is None else hidden_states_scale
        assert (len(scale), scale.is_contiguous()) == (len(hidden), True)
        payloads = (hidden.view(torch.uint8), scale.view(torch.uint8), ids, weights, max_tokens_per_rank)
        everyone = all_gather_values(payloads, self.group)
        assert len({bound for *_, bound in everyone}) == 1, "ranks disagree about the layout"
        each = self.params["num_experts"] // self.size
        shape = (self.size, max_tokens_per_rank)
        # all bits set: NaN in every dtype that has one
        rows, scales = (torch.full((*shape, t.shape[1] * t.itemsize), 255, dtype=torch.uint8) for t in (hidden, scale))
        got_ids = torch.full((*shape, ids.shape[1]), -1, dtype=torch.int32)
        got_weights = torch.full((*shape, ids.shape[1]), torch.nan)
        self._step += 1
        generator = torch.Generator().manual_seed(self._step * 100 + self.rank)
        plan = []
        for source, (x, s, i, w, _) in enumerate(everyone):
            tokens = (i // each == self.rank).any(1).nonzero().flatten()
            tokens = tokens[torch.randperm(len(tokens), generator=generator)]
            for target, value in ((rows, x), (scales, s), (got_ids, i), (got_weights, w)):
                target[source, : len(tokens)] = value[tokens]
            plan.append(tokens)
        self._plan, self._tokens, self._bound = plan, len(hidden), max_tokens_per_rank
        return SimpleNamespace(
            hidden_states=rows.flatten(0, 1).view(hidden.dtype),
            hidden_states_scale=None if hidden_states_scale is None else scales.flatten(0, 1).view(scale.dtype),
            topk_ids=got_ids.flatten(0, 1),
            topk_weights=got_weights.flatten(0, 1),
        )

    def get_combine_input_buffer(self, dtype: torch.dtype) -> Tensor:
        assert self._plan is not None, "get_combine_input_buffer called before dispatch"
        self._buffer = torch.full((self.size * self._bound, self.params["hidden_size"]), torch.nan, dtype=dtype)
        return self._buffer

    def combine(self, y: Tensor) -> Tensor:
        assert self._plan is not None, "combine called before dispatch"
        assert y.shape == (self.size * self._bound, self.params["hidden_size"])
        assert y.is_contiguous()
        if self.low_precision:
            y.copy_(y.float().clamp(-448, 448).to(torch.float8_e4m3fn))  # in place if the rows lie in its workspace
        everyone = all_gather_values((y.view(self.size, self._bound, -1), self._plan), self.group)
        total = torch.zeros(self._tokens, y.shape[1])
        for rows, plan in everyone:
            total[plan[self.rank]] += rows[self.rank, : len(plan[self.rank])].float()
        self._plan = self._buffer = None
        return total.to(y.dtype)

    def destroy(self) -> None:
        self.params = {}


def communication(group: dict[str, Any], params: dict[str, Any], config: dict[str, Any]) -> Communication:
    size = params["hidden_size"] * 1000 + config["extra_payload_bytes_per_token"]
    assert (params["max_tokens_per_rank"], size) not in sizes_made, "two users of one workspace"
    sizes_made.append((params["max_tokens_per_rank"], size))
    low_precision = config["use_low_precision_combine"]
    return Communication(group["process_group"], group["rank"], group["world_size"], params, low_precision)
