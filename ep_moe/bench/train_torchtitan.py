"""torchtitan's routed layer for `bench.train`, from an installed torchtitan: its experts over MinimalAsyncEP.

It works with torchtitan 0.3.0, which also needs spmd_types and tyro. Its trainer refuses MinimalAsyncEP unless backward
recomputes the whole block, as "eager" and "compiled" do. They use two receive buffers in turn. Rows that the combine of
backward receives then overwrite rows from which the gradients of w1 and w3 have not been computed yet: expect WRONG.
"kept" recomputes nothing, and has a buffer for each of the four exchanges of a step. torchtitan does not offer that; it
shows its speed with correct gradients.

A buffer holds all rows that can arrive for the measured number of tokens, R * T * min(K, L), so no row is dropped. The
experts compute the whole buffer, because only the GPU knows how many rows arrived. Results are weighted after the
experts, on the rank that sent the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh

from ep_moe.bench.harness import attempt
from ep_moe.bench.libraries import imported, require_plain_swiglu
from ep_moe.bench.train_entries import Entry, Options
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import BackendUnavailable, ConfigError
from ep_moe.layer import MoELayer
from ep_moe.parallel.rank_group import RankGroup

DTYPE = torch.bfloat16
TRANSPORT = "torchtitan.distributed.minimal_async_ep.api"
# attributes that a process has once for all layers: number of buffers, the buffers, and the sizes they were made for
COUNT, STATE, KEY = "_HIDDEN_RECV_BUFFER_COUNT", "_buffer_state", "_buffer_key"


@dataclass(frozen=True)
class Way:
    """A way to run the layer. buffers: receive buffers, used in turn; recomputed: backward runs the forward again"""

    name: str
    compiled: bool
    buffers: int
    recomputed: bool


WAYS = {
    "eager": Way("MinimalAsyncEP, eager", compiled=False, buffers=2, recomputed=True),
    "compiled": Way("MinimalAsyncEP, compiled", compiled=True, buffers=2, recomputed=True),
    "eager-kept": Way("MinimalAsyncEP, 4 buffers, eager", compiled=False, buffers=4, recomputed=False),
    "compiled-kept": Way("MinimalAsyncEP, 4 buffers, compiled", compiled=True, buffers=4, recomputed=False),
}


class Block(nn.Module):
    """The measured part of a transformer block: it counts the routes of each expert, and calls `RoutedExperts`."""

    def __init__(self, routed: nn.Module, num_experts: int) -> None:
        super().__init__()
        self.routed, self.num_experts = routed, num_experts

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        chosen = torch.zeros(len(ids), self.num_experts, dtype=torch.bool, device=ids.device).scatter(1, ids, True)
        out: Tensor = self.routed(x[None], weights[None], ids[None], chosen.sum(0))[0]
        return out


class TorchTitan:
    """torchtitan's layer. w13: [L, 2 * I, H], gate first; w2: [L, H, I]. Its w1 and w3 are copies of w13's halves."""

    def __init__(self, config: MoEConfig, w13: Tensor, w2: Tensor, rank_group: RankGroup) -> None:
        require_plain_swiglu(config, "torchtitan")
        if rank_group.group is None:
            raise ConfigError("MinimalAsyncEP needs two ranks; start more")
        self._transport = imported(TRANSPORT)
        missing = [name for name in (COUNT, STATE, KEY) if not hasattr(self._transport, name)]
        if missing:
            raise BackendUnavailable(f"{TRANSPORT} has no {missing[0]}; install torchtitan 0.3.0")
        self._dispatcher = imported("torchtitan.models.common.token_dispatcher").MinimalAsyncEPTokenDispatcher
        layers = imported("torchtitan.models.common.moe")
        self.config, self.rank_group, self.device = config, rank_group, w2.device
        self._default, self._tokens = getattr(self._transport, COUNT), 0
        experts = layers.GroupedExperts.Config(
            dim=config.hidden_size, hidden_dim=config.intermediate_size, num_experts=len(w2)
        )
        settings = layers.RoutedExperts.Config(inner_experts=experts, token_dispatcher=self._settings(1))
        with torch.device("meta"):
            self._routed = settings.build()
        self.w1, self.w3 = (nn.Parameter(half.detach().clone()) for half in w13.chunk(2, 1))
        self.w2 = nn.Parameter(w2.detach())
        held = self._routed.inner_experts
        held.w1_EFD, held.w2_EDF, held.w3_EFD = self.w1, self.w2, self.w3

    def _settings(self, tokens: int) -> Any:
        config = self.config
        return self._dispatcher.Config(
            num_experts=config.num_experts, top_k=config.top_k, hidden_dim=config.hidden_size,
            num_max_tokens_per_rank=tokens, dtype=DTYPE, device=self.device,
        )  # fmt: skip

    def connect(self, tokens: int, buffers: int) -> bool:
        """Allocate buffers for a number of tokens of each rank. Collective."""
        self.close()  # a process has only one set of buffers, of one size
        setattr(self._transport, COUNT, buffers)
        dispatcher, group = self._settings(tokens).build(), self.rank_group.group
        assert group is not None
        dispatcher.wire_meshes(ep_mesh=DeviceMesh.from_group(group, self.device.type))
        self._routed.token_dispatcher, self._tokens = dispatcher, tokens
        return True

    def entry(self, way: Way) -> Entry:
        """Make an entry for the number of tokens that `connect` was called with."""
        block: nn.Module = Block(self._routed, self.config.num_experts)
        if way.recomputed:  # as torchtitan's FullAC does
            block = checkpoint_wrapper(block, preserve_rng_state=True, early_stop=False)
        step: Callable[..., Tensor] = torch.compile(block, fullgraph=True) if way.compiled else block

        def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            if len(x) != self._tokens:
                raise ConfigError(f"torchtitan's buffers are for {self._tokens} tokens, got {len(x)}")
            setattr(self._transport, COUNT, way.buffers)
            getattr(self._transport, STATE).hidden_recv_buffer_index = 0
            return step(x, ids, weights)

        ranks, config = self.rank_group.size, self.config
        rows = ranks * self._tokens * min(config.top_k, len(self.w2))
        size = way.buffers * rows * config.hidden_size * DTYPE.itemsize
        return Entry("torchtitan", way.name, call, (self.w1, self.w2, self.w3), self.gradients, len(self.w2), size)

    def gradients(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return the gradients of w13 and w2 of one expert."""
        grads = [w.grad for w in (self.w1, self.w3, self.w2)]
        if any(grad is None for grad in grads):
            raise ConfigError("torchtitan's experts are left without a gradient")
        first, third, second = (grad[slot] for grad in grads if grad is not None)
        return torch.cat([first, third]), second

    def close(self) -> None:
        """Drop the buffers, by resetting attributes: torchtitan has no call for it."""
        for name, value in ((STATE, None), (KEY, None), (COUNT, self._default)):
            setattr(self._transport, name, value)


def prepared(context: EPContext, config: MoEConfig, layer: MoELayer | None, options: Options) -> TorchTitan | None:
    """Make torchtitan's layer on a layer's weights; None if that fails, with the reason on rank 0. Collective."""
    if layer is None or not options.torchtitan:
        return None
    stored = layer.expert_weights.stored_tensors()
    make = partial(TorchTitan, config, stored["w13"], stored["w2"], context.rank_groups["ep"])
    return attempt(context, "torchtitan", make)


@contextmanager
def connected(
    context: EPContext, titan: TorchTitan | None, tokens: int, names: Sequence[str]
) -> Iterator[Sequence[Entry]]:
    """Yield the entries for a number of tokens of each rank; none if buffers cannot be allocated. Collective.

    names: of `WAYS`
    """
    if titan is None:
        yield ()
        return
    ways = [WAYS[name] for name in names]
    try:
        connect = partial(titan.connect, tokens, max(way.buffers for way in ways))
        able = attempt(context, f"torchtitan, buffers for {tokens} tokens", connect)
        yield [titan.entry(way) for way in ways] if able else ()
    finally:
        titan.close()
