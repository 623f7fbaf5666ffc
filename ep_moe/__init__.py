"""Expert-parallel Mixture-of-Experts for PyTorch.

    context = EPContext.from_torchrun(ParallelConfig.expert_parallel(dp=2, tp=2))
    layer = MoELayer(MoEConfig(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8), context)
    y = layer(x)

Imports go one way, from `cli` down to `types` and `errors`; `lint-imports` checks the order in pyproject.toml. Layers
and the selection of backends import no backend file; `registry` holds their names."""

import sys

if sys.argv[:1] == ["-m"]:  # Python is looking for a module to run: perhaps `python -m ep_moe`
    from ep_moe_command import begin_module_form

    begin_module_form()  # before the imports below, which take most of the command's start

from ep_moe._version import __version__
from ep_moe.config import (
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    RoutingConfig,
    RoutingMethod,
    Tokens,
    Wire,
    load_model_config,
)
from ep_moe.context import EPContext
from ep_moe.eplb.balancer import ExpertBalancer
from ep_moe.eplb.config import EPLBConfig
from ep_moe.errors import (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    ContextClosed,
    EPMoEError,
    InputError,
    OutOfMemory,
    PeerTimeout,
    RankFailed,
    RebalanceError,
)
from ep_moe.execution.routing_replay import RoutingBuffer
from ep_moe.experts.base import ExpertsOptions
from ep_moe.layer import MoELayer
from ep_moe.parallel.layout import RankLayout
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.placement.placement import Placement
from ep_moe.router import Router
from ep_moe.selection.tuned import Tuned
from ep_moe.types import Activation, Routing

__all__ = [
    "Activation",
    "BackendUnavailable",
    "CheckpointError",
    "ConfigError",
    "ContextClosed",
    "EPContext",
    "EPLBConfig",
    "EPMoEError",
    "ExpertBalancer",
    "ExpertMap",
    "ExpertsOptions",
    "InputError",
    "MoEConfig",
    "MoELayer",
    "ModelConfig",
    "ParallelConfig",
    "OutOfMemory",
    "PeerTimeout",
    "Placement",
    "RankFailed",
    "RankLayout",
    "RebalanceError",
    "Router",
    "Routing",
    "RoutingBuffer",
    "RoutingConfig",
    "RoutingMethod",
    "Tokens",
    "Tuned",
    "Wire",
    "__version__",
    "load_model_config",
]
