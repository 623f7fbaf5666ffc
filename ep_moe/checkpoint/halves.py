"""Join gate and up of a quantized expert to w13. Codes are unchanged unless gate and up have different scales."""

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
    "gate and up projections of a checkpoint have one scale each, and a layer has one for both: the half with the "
    "smaller scale is rounded a second time, with the larger scale"
)


def join_halves(gate: Parts, up: Parts) -> dict[str, Tensor]:
    """Return the parts of w13, gate first.

    If the scheme has one scale per matrix and the two halves differ, w13 gets the larger scale. The other half is then
    requantized.
    """
    if _GLOBAL in gate:
        return _nvfp4(gate, up)
    if gate["_scale"].dim() == 0:
        scale = torch.maximum(gate["_scale"], up["_scale"])
        return {"": concatenate(*(_fp8_under(scale, half) for half in (gate, up))), "_scale": scale}
    return {part: concatenate(gate[part], up[part]) for part in gate}


def concatenate(*parts: Tensor) -> Tensor:
    """Concatenate along the first dimension. Supports float8, which torch.cat of some versions does not."""
    if parts[0].itemsize > 1:
        return torch.cat(parts)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _fp8_under(scale: Tensor, half: Parts) -> Tensor:
    """Return the codes of a half under an equal or larger scale. They are unchanged if the scale is its own."""
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
