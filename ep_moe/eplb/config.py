"""EPLBConfig: when experts are rebalanced, how maps are planned, and how many bytes move in one step."""

from __future__ import annotations

from dataclasses import dataclass

from ep_moe.checks import check_kind, check_not_negative, check_share, set_counts, set_positive
from ep_moe.eplb.cost import Machine
from ep_moe.errors import ConfigError
from ep_moe.placement.placement import Replicas


@dataclass(frozen=True, kw_only=True)
class EPLBConfig:
    """Configuration of an ExpertBalancer, equal on all ranks.

    Args:
        interval: Steps between two plans. 0: no automatic plans; only `ExpertBalancer.move_to` moves experts.
        window: Number of steps whose load is counted: the last ones of each interval.
        bytes_per_step: The most bytes that a rank sends in one step, and the most that it receives.
        bytes_per_commit: The most bytes that a rank rewrites between two forwards. A layer that needs more is committed
            in sub-plans, each a complete map. Experts that swap places in a cycle are always rewritten together, even
            if they exceed this limit. A balancer allocates memory for commits and steps when it is made. For a commit
            it holds max(bytes_per_commit / bytes of an expert, 8) experts, at most the slots of the rank. For a step it
            holds min(bytes_per_step / bytes of an expert, 16) experts, or bytes_per_step for a larger expert.
        sync_every: Steps between two status exchanges of the ranks during a rebalance. A layer's new map comes into
            force at such a step. Without a rebalance nothing is exchanged.
        deadline_s: Seconds after which a rank that does not answer counts as lost. A transfer times out after half of
            it. At most the context's deadline. Default: half of the context's.
        nodes: Number of nodes, for the planner (`ep_moe.eplb.plan`), for prices, and for the nearest replica. Default:
            those that the context found, if each has equally many consecutive EP ranks, else 1.
        groups: See `ep_moe.eplb.plan`. Default: the groups of the layers' router if it selects fewer groups than there
            are nodes, else 1.
        tolerance: See `ep_moe.eplb.plan`.
        enough: See `ep_moe.eplb.plan`.
        machine: Rates from which a plan is priced. A plan that does not pay off within `interval` steps is refused.
            Default: every plan is carried out.
        replicas: Which of an expert's replicas a token goes to. The planner assumes an even spread.

    Raises:
        ConfigError: A field has a wrong type or is out of range.
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
