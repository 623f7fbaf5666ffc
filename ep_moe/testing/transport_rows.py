"""What transports are checked with: rows and routes that every rank can compute for every other, experts that return
their input, and what must come back."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.all2all.base import DispatchShape
from ep_moe.config import PLAIN_WIRE, Wire
from ep_moe.experts.layouts import localized, widened
from ep_moe.quant.fp8 import round_by
from ep_moe.quant.wire import round_rows
from ep_moe.types import PeerRows, PhysicalIds, PhysicalRouting, Received, RowLayout, Weighting

HIDDEN, CAP, MAX_TOKENS = 512, 4, 24
# tokens of four ranks in one call
COUNTS = ((7, 5, 1, 3), (0, 4, 0, 0), (0, 0, 0, 0), (1, 0, 9, 2), (24, 24, 24, 24), (24, 0, 1, 23))
NVFP4 = Wire(dispatch="nvfp4", input_scale=1.0)
FP8_TENSOR = Wire(dispatch="fp8_tensor", input_scale=0.25)  # not 1, so that a scale that is left out tells
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dispatch_shape(ranks: int, top_k: int, dtype: torch.dtype, wire: Wire = PLAIN_WIRE) -> DispatchShape:
    return DispatchShape(
        hidden_size=HIDDEN,
        top_k=top_k,
        slots_per_rank=CAP,
        num_ranks=ranks,
        dtype=dtype,
        max_tokens=MAX_TOKENS,
        wire=wire,
    )


def rows(rank: int, tokens: int, dtype: torch.dtype, wire: Wire = PLAIN_WIRE) -> Tensor:
    """Small integers; the first columns name the rank and the token, so that a row that went astray tells. At most 7:
    products with up to 8 weights of 3 are exact in bfloat16. And a 7 in each 128: the scale is 1 / 64, and all numbers
    are exact in fp8_block too, as in mxfp8, whose scales are powers of two. In nvfp4 the eight numbers of E2M1 stand
    for the integers, with the largest in each 16 columns: the scale is 1."""
    generator = torch.Generator().manual_seed(1000 + rank)
    x = torch.randint(-2, 3, (tokens, HIDDEN), generator=generator).float()
    number = torch.arange(tokens)
    x[:, 0], x[:, 1], x[:, 2], x[:, 3::128] = rank % 7 + 1, number % 8, number // 8, 7
    if wire.dispatch == "nvfp4":
        x[:, 3::16] = 7
        x = torch.tensor(_E2M1)[x.abs().long()].copysign(x)
    return x.to(dtype)


def routes(rank: int, tokens: int, ranks: int, top_k: int, *, drop: float = 0.3) -> PhysicalRouting:
    """Distinct physical ids with some -1, and weights of small integers."""
    generator = torch.Generator().manual_seed(rank)
    width = max(ranks * CAP, top_k)
    ids = torch.rand(tokens, width, generator=generator).topk(top_k).indices
    dropped = (torch.rand(ids.shape, generator=generator) < drop) | (ids >= ranks * CAP)
    weights = torch.randint(1, 4, ids.shape, generator=generator).float()
    return PhysicalRouting(PhysicalIds(ids.masked_fill(dropped, -1)), weights)


def moved(routing: PhysicalRouting, device: torch.device) -> PhysicalRouting:
    return PhysicalRouting(PhysicalIds(routing.ids.to(device)), routing.weights.to(device))


def identity(received: Received, dtype: torch.dtype, *, to_peers: bool = False) -> Tensor | PeerRows:
    """Experts that return their input: x times this rank's weights where the experts weigh; exactly zero in rows
    without any. Written where the transport would have it; to_peers: to `peer_out`, if it offers that."""
    received = widened(localized(received, CAP), dtype)
    x = received.x
    match received.layout:
        case RowLayout.RANK_MAJOR:
            assert received.local_ids is not None
            mine = received.local_ids >= 0
            valid = mine.any(1)
            factor: Tensor | None = None
            if received.weighting is Weighting.EXPERTS:
                assert received.weights is not None
                factor = received.weights.masked_fill(~mine, 0).sum(1)
        case RowLayout.CONTIGUOUS:
            assert received.expert_offsets is not None
            valid = torch.arange(len(x), device=x.device) < received.expert_offsets[-1]
            factor = received.weights
        case RowLayout.BATCHED:
            assert received.expert_counts is not None
            valid = torch.arange(x.shape[1], device=x.device) < received.expert_counts.unsqueeze(1)
            factor = received.weights
    y = x if factor is None or received.weighting is Weighting.COMBINE else x * factor.unsqueeze(-1).to(x.dtype)
    y = torch.where(valid.unsqueeze(-1), y, torch.zeros_like(y))
    if to_peers and received.peer_out is not None:
        travels = received.peer_out.blocks[0].dtype
        received.peer_out.write(y if travels == y.dtype else round_by(y, 1.0))
        return received.peer_out
    return y if received.out is None else received.out.copy_(y.view_as(received.out))


def expected(x: Tensor, routing: PhysicalRouting) -> Tensor:
    return (x.float() * routing.weights.masked_fill(routing.ids < 0, 0).sum(1, keepdim=True)).to(x.dtype)


def tolerance(shape: DispatchShape) -> float:
    """Relative, of sums whose parts are all of one sign: E4M3 has 4 bits of mantissa, bfloat16 has 8."""
    return 2**-4 + 2**-8 if shape.wire.combine == "fp8" else 0.0


def same(actual: Tensor, wanted: Tensor, what: object, rtol: float = 0.0) -> None:
    torch.testing.assert_close(actual.cpu(), wanted.cpu(), rtol=rtol, atol=0, msg=lambda text: f"{what}: {text}")


def rounded(x: Tensor, shape: DispatchShape) -> tuple[Tensor, Tensor | None]:
    """Rows as they travel: x and x_scale."""
    return round_rows(x, shape.wire)
