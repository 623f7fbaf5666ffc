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

    Args:
        interval: Steps from one plan to the next. 0: none by itself (`ExpertBalancer.move_to` is what moves experts).
        window: The last so many of these steps are counted.
        bytes_per_step: What a rank sends, and what it receives, in one step.
        bytes_per_commit: What a rank rewrites between two forwards. Experts that swap places in a larger cycle are
            rewritten together all the same. A layer that needs more is committed in sub-plans, each a complete map. A
            balancer holds memory for both from the beginning. For a commit it holds max(bytes_per_commit / bytes of an
            expert, 8) experts, at most the slots of the rank. For a step it holds min(bytes_per_step / bytes of an
            expert, 16) experts, or bytes_per_step for a larger expert.
        sync_every: Steps between two looks at the other ranks while a rebalance is under way. A layer is put in force
            at such a step; nothing is exchanged while none is under way.
        deadline_s: Seconds after which a rank that does not answer is lost, and a transfer after half of it. At most
            the context's deadline. Default: half of that.
        nodes: For the planner, see `ep_moe.eplb.plan`, for prices, and for which replica is nearest. Default: those
            that the context found, where each has as many consecutive EP ranks, else 1.
        groups: For the planner, see `ep_moe.eplb.plan`. Default: those of the layers' router where it chooses fewer
            groups than there are nodes, else 1.
        tolerance: For the planner, see `ep_moe.eplb.plan`.
        enough: For the planner, see `ep_moe.eplb.plan`.
        machine: Rates by which a plan is priced. A plan that does not pay within `interval` steps is refused. Default:
            every plan is carried out.
        replicas: Which of an expert's replicas a token goes to. Plans reckon with an even spread.

    Raises:
        ConfigError: a field is of a wrong kind or out of range.
    """

    interval: int = 3000
    window: int = 1000
    bytes_per_step: int = 16 << 20
    bytes_per_commit: int = 64 << 20
    sync_every: int = 2
    deadline_s: float | None = None
    nodes: int | None = None
    groups: int | None = None
    tolerance: float = 0.01
    enough: float = 1.0
    machine: Machine | None = None
    replicas: Replicas = Replicas.SPREAD

    def __post_init__(self) -> None:
        set_counts(self, interval=0, window=1, bytes_per_step=1, bytes_per_commit=1, sync_every=1)
        for name in ("nodes", "groups"):
            if getattr(self, name) is not None:
                set_counts(self, **{name: 1})
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
