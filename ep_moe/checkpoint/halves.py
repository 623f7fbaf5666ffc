"""Gate and up of a quantized expert as one matrix, w13: bytes are kept but where the two have scales of their own."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from ep_moe.quant.fp8 import rescale_fp8
from ep_moe.quant.microscale import rescale_nvfp4

Parts = Mapping[str, Tensor]
_GLOBAL = "_global_scale"
_ROUNDED = (
    "gate and up projections of a checkpoint have two scales where a layer has one: the halves with the smaller scale "
    "are rounded a second time, under the larger"
)


def join_halves(gate: Parts, up: Parts) -> dict[str, Tensor]:
    """Parts of w13, gate first. Of two scales of matrices the larger is taken, and the other half rounded anew."""
    if _GLOBAL in gate:
        return _nvfp4(gate, up)
    if gate["_scale"].dim() == 0:
        scale = torch.maximum(gate["_scale"], up["_scale"])
        return {"": concatenate(*(_fp8_under(scale, half) for half in (gate, up))), "_scale": scale}
    return {part: concatenate(gate[part], up[part]) for part in gate}


def concatenate(*parts: Tensor) -> Tensor:
    """torch.cat, also of float8, which some versions cannot."""
    if parts[0].itemsize > 1:
        return torch.cat(parts)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _fp8_under(scale: Tensor, half: Parts) -> Tensor:
    """The same numbers under another scale, which is no smaller: the same bytes if it is its own."""
    if torch.equal(half["_scale"], scale):
        return half[""]
    warnings.warn(_ROUNDED, stacklevel=2)
    return rescale_fp8(half[""], half["_scale"], scale)


def _nvfp4(gate: Parts, up: Parts) -> dict[str, Tensor]:
    scale = torch.maximum(gate[_GLOBAL], up[_GLOBAL])
    halves = [_nvfp4_under(scale, half) for half in (gate, up)]
    return {
        "": concatenate(*(data for data, _ in halves)),
        "_scale": concatenate(*(scales for _, scales in halves)),
        _GLOBAL: scale,
    }


def _nvfp4_under(scale: Tensor, half: Parts) -> tuple[Tensor, Tensor]:
    if torch.equal(half[_GLOBAL], scale):
        return half[""], half["_scale"]
    warnings.warn(_ROUNDED, stacklevel=2)
    return rescale_nvfp4(half[""], half["_scale"], half[_GLOBAL], scale)
