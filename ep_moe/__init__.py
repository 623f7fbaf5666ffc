"""Expert-parallel Mixture-of-Experts for PyTorch.

    context = EPContext.from_torchrun(ParallelConfig.expert_parallel(dp=2, tp=2))
    layer = MoELayer(MoEConfig(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8), context)
    y = layer(x)

Packages import only from packages below them, from `cli` down to `types` and `errors`. `lint-imports` checks this
order, which pyproject.toml lists. Layers and backend selection import no backend module: `registry` names the backend
classes as strings, and a backend's module is imported when the backend is used."""

import sys

if sys.argv[:1] == ["-m"]:  # Python resolves the module of a `python -m` command, which may be `python -m ep_moe`
    from ep_moe_command import begin_module_form

    begin_module_form()  # before the imports below: they take most of the command's start-up time

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
