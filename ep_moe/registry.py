"""Names of backends and where their classes are. Nobody imports a backend file; its import string stands here.

A third party registers an entry point in the group `ep_moe.dispatchers`, `ep_moe.experts` or `ep_moe.fused`, of the
same form.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from importlib.metadata import entry_points
from typing import Any, Literal

from ep_moe.errors import ConfigError

Kind = Literal["dispatchers", "experts", "fused"]

# kernels: the first that can serve a layer is chosen
_BUILT_IN: dict[Kind, dict[str, str]] = {
    "dispatchers": {
        "local": "ep_moe.all2all.local:LocalDispatcher",
        "allgather": "ep_moe.all2all.allgather:AllGatherDispatcher",
        "deepep": "ep_moe.all2all.deepep:DeepEPDispatcher",
        "deepep_static": "ep_moe.all2all.deepep:DeepEPStaticDispatcher",
        "flashinfer_nvlink": "ep_moe.all2all.flashinfer_nvlink:FlashInferNVLinkDispatcher",
        "nvlink_p2p": "ep_moe.all2all.nvlink_p2p:NVLinkP2PDispatcher",
        "pplx": "ep_moe.all2all.pplx:PplxDispatcher",
        "torch_a2a": "ep_moe.all2all.torch_a2a:TorchAll2AllDispatcher",
    },
    "experts": {
        "bf16_triton": "ep_moe.experts.bf16_triton:Bf16TritonExperts",
        "fp8_tensor_triton": "ep_moe.experts.fp8_tensor_triton:Fp8TensorTritonExperts",
        "fp8_block_triton": "ep_moe.experts.fp8_block_triton:Fp8BlockTritonExperts",
        "fp8_dynamic_triton": "ep_moe.experts.fp8_dynamic_triton:Fp8DynamicTritonExperts",
        "flashinfer_cutlass": "ep_moe.experts.flashinfer_cutlass:FlashInferCutlassExperts",
        "flashinfer_cutedsl": "ep_moe.experts.flashinfer_cutedsl:FlashInferCuteDslExperts",
        "flashinfer_trtllm": "ep_moe.experts.flashinfer_trtllm:FlashInferTrtllmExperts",
        "reference": "ep_moe.experts.reference:ReferenceExperts",
    },
    "fused": {
        "flashinfer_mega_bf16": "ep_moe.fused.flashinfer_mega:FlashInferMegaBf16",
        "flashinfer_mega_fp8": "ep_moe.fused.flashinfer_mega:FlashInferMegaFp8",
        "flashinfer_trtllm_monolithic": "ep_moe.fused.flashinfer_trtllm:FlashInferTrtllmMonolithic",
    },
}


def targets(kind: Kind) -> dict[str, str]:
    """Every known backend's name and "module:Class"."""
    plugins = _plugins(kind)
    clash = sorted(plugins.keys() & _BUILT_IN[kind].keys())
    if clash:
        raise ConfigError(
            f"entry point {clash[0]!r} in group ep_moe.{kind} has the name of a built-in backend; rename it"
        )
    return _BUILT_IN[kind] | plugins


@functools.cache
def _plugins(kind: Kind) -> dict[str, str]:
    """Entry points of other packages. Kept, because looking reads the metadata of everything installed."""
    return {point.name: point.value for point in entry_points(group=f"ep_moe.{kind}")}


def check(kind: Kind, name: str) -> None:
    """Raise ConfigError, with the known names, for an unknown one."""
    if name not in targets(kind):
        raise ConfigError(f"no backend among {kind} is named {name!r}; there are {', '.join(targets(kind))}")


def load(kind: Kind, name: str) -> Any:
    """The class of a backend. Imports its file, not the libraries it drives."""
    check(kind, name)
    module, _, attribute = targets(kind)[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def why_not(kind: Kind, name: str) -> str | None:
    """None if the backend can run in this installation, else the reason."""
    check(kind, name)
    try:
        backend = load(kind, name)
    except Exception as error:  # a library that is half there raises what it likes
        return f"{targets(kind)[name]} does not import: {error}"
    reason: str | None = backend.available()
    return reason


def without_flashinfer() -> str | None:
    """None, or what `available()` says of every backend that drives FlashInfer where it is not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed; pip install ep-moe[gpu]"
    return None


def available(kind: Kind, name: str) -> bool:
    return why_not(kind, name) is None
