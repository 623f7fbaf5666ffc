"""EPLBConfig: when experts are rebalanced, by what, and how much of a step that may take."""

from __future__ import annotations

from dataclasses import dataclass

from ep_moe.checks import check_kind, check_not_negative, check_share, set_counts, set_positive
from ep_moe.eplb.cost import Machine
from ep_moe.errors import ConfigError
from ep_moe.placement.placement import Replicas


@dataclass(frozen=True, kw_only=True)
class EPLBConfig:
    """How an ExpertBalancer works; equal on all ranks.

    interval: steps from one plan to the next; 0: none by itself (`ExpertBalancer.move_to` is what moves experts)
    window: the last so many of them are counted
    bytes_per_step: what a rank sends, and what it receives, in one step
    bytes_per_commit: what a rank rewrites between two forwards, where experts do not change places in larger cycles; a
        layer that needs more is put in force in pieces, each a map of its own. A balancer holds both as memory, the
        step's for 16 experts at most and the commit's for 8 at least, and for no more than a layer has on a rank
    sync_every: steps between two looks at the other ranks while a rebalance is under way. A layer is put in force at
        such a step; nothing is exchanged while none is under way
    deadline_s: after that a rank that does not answer is lost, a transfer after half of it; at most the context's
        deadline, default half of it
    nodes, groups, tolerance, enough: for the planner, see `ep_moe.eplb.planner.plan.plan`
    machine: rates by which a plan is priced; one that does not pay within `interval` steps is refused. None: every plan
        is carried out
    replicas: which of an expert's replicas a token goes to. Plans reckon with an even spread
    """

    interval: int = 3000
    window: int = 1000
    bytes_per_step: int = 16 << 20
    bytes_per_commit: int = 64 << 20
    sync_every: int = 2
    deadline_s: float | None = None
    nodes: int = 1
    groups: int = 1
    tolerance: float = 0.01
    enough: float = 1.0
    machine: Machine | None = None
    replicas: Replicas = Replicas.SPREAD

    def __post_init__(self) -> None:
        set_counts(self, interval=0, window=1, bytes_per_step=1, bytes_per_commit=1, sync_every=1, nodes=1, groups=1)
        if self.interval and self.window > self.interval:
            raise ConfigError(
                f"EPLBConfig.window must not exceed interval, got window={self.window}, interval={self.interval}"
            )
        if self.deadline_s is not None:
            set_positive(self, "deadline_s")
        object.__setattr__(self, "tolerance", check_not_negative("EPLBConfig.tolerance", self.tolerance))
        object.__setattr__(self, "enough", check_share("EPLBConfig.enough", self.enough))
        if self.machine is not None:
            check_kind("EPLBConfig.machine", self.machine, Machine)
        check_kind("EPLBConfig.replicas", self.replicas, Replicas)
