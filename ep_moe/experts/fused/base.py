"""The contract of a fused kernel: rows and their routes in, what the layer's experts give for them out.

It replaces the middle of the layer: dispatch, experts and combine in one (`travels`), or routing and experts on one
rank (`routes`). It sees physical ids, or the router's logits; never an expert map beyond what its capabilities allow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from ep_moe.all2all.base import DispatchShape, routing_problem, too_many_tokens
from ep_moe.config import MoEConfig
from ep_moe.errors import InputError
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.capabilities import FusedCapabilities as FusedCapabilities
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.placement.deferred import given_ids
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.quant.schemes import PLAIN, Scheme
from ep_moe.renamed import PLUGIN_HOOKS, renamed, take_old_names
from ep_moe.runtime.gpus import GPU, compute_capability
from ep_moe.types import PhysicalIds, PhysicalRouting, capturing, dtype_name
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.layouts.base import WeightLayout

INSIDE = "inside"  # the all2all of a fused kernel, wherever a name stands for one


@dataclass(frozen=True, kw_only=True)
class FusedDispatchShape(DispatchShape):
    """What is the same in equal layers of a context, whose buffers they share.

    Args:
        kernel: Its name.
        intermediate_size: I of this rank's shards of experts.
    """

    kernel: str
    intermediate_size: int


@dataclass(frozen=True)
class RouterLogits:
    """What a kernel that routes inside is given.

    Args:
        logits: [T, E], of the router's dtype.
        correction_bias: float32 [E], or None.
    """

    logits: Tensor
    correction_bias: Tensor | None = None


Routed = PhysicalRouting | RouterLogits
Stage = Callable[[str], AbstractContextManager[None]]
Pool = Callable[
    [Callable[[], Any]], Any
]  # the context's object for this dispatch shape, made on first use by what is given


class FusedExperts(ABC):
    """One layer's fused kernel on one rank. Holds no parameters: it reads those of `ExpertWeights`.

    A subclass defines `name`, `capabilities` and `compute`.

    Args:
        config: The layer.
        weights: This rank's experts.
        rank_group: The EP group.
        dispatch_shape: The shape of what travels, with `max_tokens` where the kernel is static.
        options: How the kernel runs, None for the defaults.
        pool: Keeps what equal layers of a context share: an object with `capabilities` and `destroy()`. Default: it is
            not shared.
    """

    name: ClassVar[str]
    capabilities: ClassVar[FusedCapabilities]
    tested_machines: ClassVar[str] = "not run"  # for docs/reference/backends.md
    weight_layout: ClassVar[type[WeightLayout]] = WeightLayout  # the layout it reads weights in

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        take_old_names(cls, PLUGIN_HOOKS)

    geometry = renamed("geometry", "dispatch_shape")
    link = renamed("link", "rank_group")

    def __init__(
        self,
        config: MoEConfig,
        weights: ExpertWeights,
        rank_group: RankGroup,
        dispatch_shape: FusedDispatchShape,
        options: ExpertsOptions | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.rank_group = rank_group
        self.dispatch_shape = dispatch_shape
        self.options = options or ExpertsOptions()
        self.pool = pool or _private_pool()

    # --- what selection asks -----------------------------------------------------------------------------------

    @classmethod
    def available(cls) -> str | None:
        """Say why the kernel cannot run in this installation. Touches no device.

        Returns:
            None if it can run, else the reason.
        """
        return None

    @classmethod
    def unsupported_platform(cls, layout: RankLayout, device: torch.device | GPU) -> str | None:
        """Say why the kernel cannot run on this machine with these ranks. Asks the driver at most; not collective.

        Args:
            layout: Of the ranks.
            device: A device of this machine, or a GPU that is not here.

        Returns:
            None if it can, else the reason.
        """
        can = cls.capabilities
        if device.type not in can.devices:
            return f"{cls.name} runs on {', '.join(sorted(can.devices))}, not on {device.type}"
        lowest, highest = can.min_compute_capability, can.max_compute_capability
        if device.type != "cuda" or (lowest is None and highest is None):
            return None
        found = compute_capability(device)
        if (lowest is None or found >= lowest) and (highest is None or found <= highest):
            return None
        bounds = " to ".join(f"{bound[0]}.{bound[1]}" for bound in dict.fromkeys((lowest, highest)) if bound)
        return f"{cls.name} needs a GPU of compute capability {bounds}, this one has {found[0]}.{found[1]}"

    @classmethod
    def unsupported_reason(
        cls,
        config: MoEConfig,
        layout: RankLayout,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
        *,
        expert_map: ExpertMap | None = None,
        max_tokens: int | None = None,
        options: ExpertsOptions | None = None,
    ) -> str | None:
        """Say why the kernel cannot serve a layer.

        Args:
            config: The layer.
            layout: Of the ranks.
            dtype: Of the layer.
            scheme: Quantization of the experts.
            expert_map: Default: one that the kernel can serve.
            max_tokens: The most tokens that a rank sends, None for any number.
            options: How the kernel runs, None for the defaults.

        Returns:
            None if it can, else the reason.
        """
        can, ranks, inner = cls.capabilities, layout.ep, config.intermediate_size // layout.etp
        if (problem := can.unsupported_reason(config, dtype, layout.etp, scheme, options)) is not None:
            return problem
        if not can.travels and ranks > 1:
            return f"it has no all2all inside and serves one rank, ep={ranks}"
        if ranks < can.min_ranks or (can.max_ranks is not None and ranks > can.max_ranks):
            return f"it serves {can.min_ranks} to {can.max_ranks or 'any number of'} ranks, ep={ranks}"
        if can.top_ks is not None and config.top_k not in can.top_ks:
            return f"top_k {config.top_k} is not among {', '.join(map(str, sorted(can.top_ks)))}"
        for name, size, unit in (
            ("hidden_size", config.hidden_size, can.hidden_unit),
            ("intermediate_size / etp", inner, can.inner_unit),
        ):
            if size % unit:
                return f"{name} must be a multiple of {unit}, got {size}"
        if can.static and max_tokens is None:
            return "it has fixed buffers; say how large by EPContext.from_torchrun(max_tokens=...)"
        return None if expert_map is None else cls.unsupported_map(expert_map)

    @classmethod
    def unsupported_map(cls, expert_map: ExpertMap) -> str | None:
        """Say why the kernel cannot serve an expert map.

        Args:
            expert_map: Which rank holds which expert.

        Returns:
            None if it can, else the reason.
        """
        slots = [expert_map.num_slots(rank) for rank in range(expert_map.num_ranks)]
        if not cls.capabilities.any_map:
            if expert_map == ExpertMap.linear(expert_map.num_experts, expert_map.num_ranks):
                return None
            return f"it serves the linear expert map without replicas alone, not {expert_map} (EPLB, ExpertMap)"
        if len(set(slots)) == 1:
            return None
        spare = expert_map.num_ranks * expert_map.slots_per_rank - expert_map.num_experts
        return (
            f"it needs as many slots on every rank, got {slots}; fill them up, for example with "
            f"ExpertMap.redundant({expert_map.num_experts}, {expert_map.num_ranks}, {spare})"
        )

    @classmethod
    def buffer_bytes(cls, dispatch_shape: FusedDispatchShape) -> int:
        """Count what the kernel keeps between calls for all layers of a shape. A library's own bookkeeping is not
        counted.

        Args:
            dispatch_shape: The shape of what travels.

        Returns:
            Bytes.
        """
        return 0

    def workspace_bytes(self) -> int:
        """Count the scratch memory of one call, which layers share.

        Returns:
            Bytes.
        """
        return 0

    def tune(self, rows: Sequence[int], cache: Path | None) -> list[int]:
        """Find the fastest variant for each number of received rows, on this rank alone.

        Args:
            rows: Numbers of received rows.
            cache: A folder with earlier findings, None for none.

        Returns:
            Integers for `use`, on any rank with a kernel of this shape; [] where there is nothing to tune.
        """
        return []

    def use(self, tuned: list[int]) -> None:
        """Run with what `tune` found.

        Args:
            tuned: What `tune` returned.
        """
        assert not tuned, f"{self.name} has nothing to tune"

    # --- calls -------------------------------------------------------------------------------------------------

    def __call__(self, x: Tensor, routed: Routed, *, max_tokens: int | None = None) -> Tensor:
        """Compute the layer's experts for this rank's rows. Collective over the EP group with the capability `travels`.

        Args:
            x: [T, H] of the layer's dtype. T may differ per rank and be 0.
            routed: A `PhysicalRouting` [T, K], -1 for no expert; `RouterLogits` [T, E] for a kernel that routes.
            max_tokens: The most tokens that any rank has in this call. Default: the dispatch shape's.

        Returns:
            [T, H], the sum over each row's experts, multiplied by the routing weights; zero where there is none.

        Raises:
            InputError: an argument is wrong, or the call is within a CUDA graph capture that the kernel cannot be part
                of. Peers raise a wrong argument at a later step (`refuse`).
            PeerTimeout: a peer died, hung or went another way.
        """
        bound = self.dispatch_shape.max_tokens if max_tokens is None else max_tokens
        problem = self._problem(x, routed, bound)
        if problem is not None:
            self.refuse(problem)
        if capturing(x.device) and not self.capabilities.cuda_graph:
            raise InputError(
                f"{self.name} cannot be captured in a CUDA graph; choose other experts (docs/reference/backends.md) or "
                f"call the layer outside of the capture"
            )
        if isinstance(routed, PhysicalRouting):
            routed = routed.materialize()
        self.connect()
        with self.rank_group.flight_recorder.step("fused", self.name):
            out = self.compute(x, routed)
        if x.is_cuda and self.capabilities.travels and not capturing(x.device):
            self.rank_group.flight_recorder.device_watch.mark(x.device)
        return out

    def connect(self) -> None:
        """Make what the first call needs. Collective. Not part of the step, whose deadline is that of a call."""
        return

    def refuse(self, problem: str) -> NoReturn:
        """Raise this rank's problem.

        Where dispatch is inside, no exchange can carry the problem. This rank takes part with no rows, so that the rows
        of its peers find their experts here, and the peers raise the problem at a later step.

        Args:
            problem: What is wrong with the call.

        Returns:
            Never.

        Raises:
            InputError: Always.
        """
        if not self.capabilities.travels:
            raise InputError(problem)
        device = self.weights.device
        if not capturing(device) and device.type != "meta":
            self.connect()
            ids = torch.empty(0, self.dispatch_shape.top_k, dtype=torch.int32, device=device)
            x = torch.empty(0, self.dispatch_shape.hidden_size, dtype=self.dispatch_shape.dtype, device=device)
            with self.rank_group.flight_recorder.step("fused", self.name):
                self.compute(x, PhysicalRouting(PhysicalIds(ids), ids.float()))
        text = f"rank {self.rank_group.ranks[self.rank_group.rank]}: {problem}"
        self.rank_group.flight_recorder.refuse(text)
        raise InputError(text)

    @abstractmethod
    def compute(self, x: Tensor, routed: Routed) -> Tensor:
        """Compute the layer's experts for a call that has been checked. Ids out of range name no expert.

        Args:
            x: [T, H]. T may differ per rank and be 0.
            routed: A `PhysicalRouting` [T, K], -1 for no expert; `RouterLogits` [T, E] where the kernel routes.

        Returns:
            [T, H], the sum over each row's experts, multiplied by the routing weights; zero where there is none.
        """

    def _problem(self, x: Tensor, routed: Routed, max_tokens: int | None) -> str | None:
        """What is wrong with a call, without waiting for the device."""
        g = self.dispatch_shape
        if x.dim() != 2 or x.shape[1] != g.hidden_size:
            return f"x must be [T, {g.hidden_size}], got {list(x.shape)}"
        if x.dtype != g.dtype:
            return f"x must be {dtype_name(g.dtype)}, got {dtype_name(x.dtype)}"
        if self.capabilities.static:
            assert g.max_tokens is not None
            if max_tokens is None or not 1 <= max_tokens <= g.max_tokens:
                return f"max_tokens must be in [1, {g.max_tokens}], as EPContext has it, got {max_tokens}"
            if (problem := too_many_tokens(x, max_tokens)) is not None:
                return problem
        if self.capabilities.routes:
            if not isinstance(routed, RouterLogits):
                return f"{self.name} routes inside and takes RouterLogits, got {type(routed).__name__}"
            experts = [len(x), self.config.num_experts]
            if list(routed.logits.shape) != experts:
                return f"logits must be [T, E] = {experts}, got {list(routed.logits.shape)}"
            return None
        if not isinstance(routed, PhysicalRouting):
            return f"routing must be a PhysicalRouting (pass it through Placement), got {type(routed).__name__}"
        return routing_problem(given_ids(routed), routed.weights, x, g.top_k)


class FusedCall:
    """One call of one layer by its fused kernel; it stands for an `Exchange`. bound: the most tokens of any rank."""

    def __init__(self, kernel: FusedExperts, x: Tensor, routed: Routed, bound: int | None, stage: Stage) -> None:
        self.kernel, self.x, self.routed, self.bound, self._stage = kernel, x, routed, bound, stage

    def run(self, work: Callable[[], Any] | None = None) -> tuple[Tensor, Any]:
        """Rows [T, H] that are summed over ranks, and what `work` returns."""
        with self._stage("fused"):
            out = self.kernel(self.x, self.routed, max_tokens=self.bound)
        if work is None:
            return out, None
        with self._stage("shared"):
            return out, work()

    def refuse(self, problem: str) -> NoReturn:
        self.kernel.refuse(problem)


def logits_of(router: Any, x: Tensor) -> RouterLogits:
    """A `Router`'s logits of x [T, H]."""
    return RouterLogits(router.logits(x), router.e_score_correction_bias)


def fused_dispatch_shape(
    kernel: str, config: MoEConfig, layout: RankLayout, slots_per_rank: int, dtype: torch.dtype, max_tokens: int | None
) -> FusedDispatchShape:
    return FusedDispatchShape(
        hidden_size=config.hidden_size,
        top_k=config.top_k,
        slots_per_rank=slots_per_rank,
        num_ranks=layout.ep,
        dtype=dtype,
        max_tokens=max_tokens,
        kernel=kernel,
        intermediate_size=config.intermediate_size // layout.etp,
    )


def _private_pool() -> Pool:
    """A pool of one."""
    kept: list[Any] = []

    def pool(make: Callable[[], Any]) -> Any:
        if not kept:
            kept.append(make())
        return kept[0]

    return pool
