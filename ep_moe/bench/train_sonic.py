"""SonicMoE's local experts for `bench.train`, from an installed SonicMoE.

Forward and backward are called as SonicMoE's layer calls them after its router. Sorting is timed too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.bench import libraries
from ep_moe.bench.harness import attempt
from ep_moe.bench.train_entries import Entry, Options
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.layer import MoELayer

WAYS = {"default": "default tiles", "tuned": "tuned"}  # tuning takes minutes


class Sonic:
    """SonicMoE's experts on the weights of a layer. w13: [L, 2 * I, H], gate first; w2: [L, H, I]"""

    def __init__(self, w13: Tensor, w2: Tensor, *, tuned: bool) -> None:
        self._functional = libraries.imported("sonicmoe.functional")
        self._kind = libraries.imported("sonicmoe.enums").ActivationType.SWIGLU
        if not tuned:
            libraries.default_tiles(w2.device)
        self.w13, self.w2 = libraries.interleaved(w13.detach()).requires_grad_(), w2.detach().requires_grad_()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts. x: bf16 [T, H]; ids: int [T, K], slots; weights: float32 [T, K]. Returns [T, H]."""
        tokens, top_k = ids.shape
        pairs, experts = ids.numel(), len(self.w2)
        counts, ends, source, sorted_at, pair_at = (
            torch.empty(size, dtype=torch.int32, device=x.device)
            for size in (experts, experts + 1, pairs, pairs, pairs)
        )
        library = self._functional
        library.TC_topk_router_metadata_triton(ids.int(), experts, counts, ends, source, sorted_at, pair_at)
        lists = (source, sorted_at, pair_at, None, False)  # no offsets of tokens: each has the same number of experts
        w13, w2 = self.w13.permute(1, 2, 0), self.w2.permute(1, 2, 0)
        act, h = library._UpProjection.apply(x, w13, None, ends, pairs, top_k, *lists, self._kind, False, False)
        out: Tensor = library._DownProjection.apply(act, h, w2, None, weights, ends, tokens, top_k, *lists, self._kind)
        return out

    def gradients(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return the gradients of a slot's w13, gate first, and w2."""
        if self.w13.grad is None or self.w2.grad is None:
            raise ConfigError("SonicMoE's experts are left without a gradient")
        return self.w13.grad[slot].unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1), self.w2.grad[slot]


def entries(outer: EPContext, layer: MoELayer | None, options: Options) -> list[Entry]:
    """Make SonicMoE's entry, on a layer's weights. Return [] if it is not requested or cannot run. Collective.

    outer: the context of all ranks
    """
    if layer is None or options.sonic not in WAYS:
        return []
    config, stored = layer.config, layer.expert_weights.stored_tensors()

    def make() -> Entry:
        libraries.require_plain_swiglu(config, "SonicMoE")
        peer = Sonic(stored["w13"], stored["w2"], tuned=options.sonic == "tuned")
        parameters = (peer.w13, peer.w2)
        return Entry(
            "SonicMoE", WAYS[options.sonic], peer, parameters, peer.gradients, len(peer.w2), adds=options.accumulate
        )

    found = attempt(outer, "SonicMoE", make)
    return [] if found is None else [found]
