"""Which backends and which expert map a layer gets. All ranks of a context choose alike, or raise alike."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from ep_moe import registry, select
from ep_moe.config import MoEConfig, Wire, flat_facts
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError, EPMoEError
from ep_moe.exchange import check_pipeline
from ep_moe.experts.base import ExpertsOptions
from ep_moe.fused.base import INSIDE, FusedExperts
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.router import Router
from ep_moe.types import dtype_name
from ep_moe.weights.schemes import scheme_of


@dataclass(frozen=True)
class Asked:
    """What a user named for a layer; fields as those of `MoELayer`."""

    all2all: str
    experts: str
    quantization: str
    wire: Wire
    pipeline: int | None
    options: ExpertsOptions
    dtype: torch.dtype
    router: Any


def agree(
    context: EPContext, name: str, config: MoEConfig, asked: Asked, expert_map: ExpertMap | None
) -> tuple[select.Choice, ExpertMap, dict[str, Any]]:
    """Choose backends and check that all ranks were given the same layer; all raise alike.

    Returns the choice, the map, and the keywords of `select.explain` that led to it.
    """
    choice, problem, keywords = select.Choice("", "", "refused", ""), None, dict[str, Any]()
    try:
        if expert_map is None:
            expert_map = ExpertMap.linear(config.num_experts, context.layout.ep)
        _check_map(expert_map, config, context.layout.ep)
        keywords = {
            "all2all": asked.all2all,
            "experts": asked.experts,
            "scheme": scheme_of(asked.quantization),
            "options": asked.options,
            "wire": asked.wire,
            "expert_map": expert_map,
            "max_tokens": context.wire_tokens,
        }
        choice = select.choose(config, context.layout, context.device, asked.dtype, **keywords)
        if choice.all2all == INSIDE:
            _check_fused(choice.experts, asked)
        else:
            check_pipeline(asked.pipeline, context.wire_tokens, choice.all2all)
    except EPMoEError as error:
        problem = error
    facts = {
        "layer": name,
        **flat_facts(config, "MoEConfig"),
        "expert_map": "" if expert_map is None else expert_map.to_json(),
        "dtype": dtype_name(asked.dtype),
        "quantization": asked.quantization,
        **flat_facts(asked.options, "ExpertsOptions"),
        **flat_facts(asked.wire, "Wire"),
        "pipeline": asked.pipeline,
        "all2all": choice.all2all,
        "experts": choice.experts,
    }
    context.agreement.same(f"MoELayer {name}", facts, problem)
    assert expert_map is not None
    if asked.experts == select.AUTO and (doubt := select.untried(choice.experts, context.device)) is not None:
        warnings.warn(
            f"{doubt}; see whether tests/gpu/test_blackwell.py of ep_moe's repository passes on this GPU, then name "
            f"experts={choice.experts!r}",
            stacklevel=3,
        )
    return choice, expert_map, keywords


def _check_map(expert_map: ExpertMap, config: MoEConfig, ranks: int) -> None:
    for name, value in (("num_experts", config.num_experts), ("num_ranks", ranks)):
        if getattr(expert_map, name) != value:
            raise ConfigError(
                f"expert_map.{name} must be {value} for this layer and context, got {getattr(expert_map, name)}"
            )


def _check_fused(name: str, asked: Asked) -> None:
    """For what `select` does not look at."""
    if asked.pipeline is not None:
        raise ConfigError(f"pipeline={asked.pipeline!r} is not for experts={name}: its rows do not travel in parts")
    kind: type[FusedExperts] = registry.load("fused", name)
    if kind.capabilities.routes and not (asked.router is None or isinstance(asked.router, Router)):
        raise ConfigError(
            f"experts={name} routes inside, as ep_moe.router.Router does; leave router=None, or choose other experts, "
            f"got {type(asked.router).__name__}"
        )
