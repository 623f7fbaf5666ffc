"""The base class of fused kernels: rows and their routes in, the sums over each row's experts out.

A fused kernel replaces several steps of the layer: dispatch, experts and combine (`travels`), or routing and experts on
one rank (`routes`). It receives physical ids or the router's logits, and no expert map.
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
from ep_moe.placement.deferred import ids_for_checks
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.quant.schemes import PLAIN, Scheme
from ep_moe.renamed import PLUGIN_HOOKS, renamed, take_old_names
from ep_moe.runtime.gpus import GPU, compute_capability
from ep_moe.types import PhysicalIds, PhysicalRouting, capturing, dtype_name
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.layouts.base import WeightLayout

INSIDE = "inside"  # stands for the name of a transport if a fused kernel includes dispatch and combine


@dataclass(frozen=True, kw_only=True)
class FusedDispatchShape(DispatchShape):
    """The shape by which layers of a context share the buffers of a fused kernel.

    Args:
        kernel: The kernel's name.
        intermediate_size: I of this rank's shards of experts.
    """

    kernel: str
    intermediate_size: int


@dataclass(frozen=True)
class RouterLogits:
    """The input of a kernel that includes routing.

    Args:
        logits: [T, E], dtype of the router.
        correction_bias: float32 [E], or None.
    """

    logits: Tensor
    correction_bias: Tensor | None = None


Routed = PhysicalRouting | RouterLogits
Stage = Callable[[str], AbstractContextManager[None]]
Pool = Callable[
    [Callable[[], Any]], Any
]  # returns the context's object for this dispatch shape; the first use creates it with the given function


class FusedExperts(ABC):
    """The fused kernel of one layer on one rank. It has no parameters, and reads those of `ExpertWeights`.

    A subclass defines `name`, `capabilities` and `compute`.

    Args:
        config: The layer's configuration.
        weights: This rank's experts.
        rank_group: The EP group.
        dispatch_shape: The shape of the rows that travel, with `max_tokens` if the kernel is static.
        options: How the kernel runs, None for the defaults.
        pool: Keeps the object that layers of equal shape in a context share. It has `capabilities` and `destroy()`.
            Default: each layer has its own.
    """

    name: ClassVar[str]
    capabilities: ClassVar[FusedCapabilities]
    tested_machines: ClassVar[str] = "not run"  # for docs/reference/backends.md
    weight_layout: ClassVar[type[WeightLayout]] = WeightLayout  # the layout in which it reads weights

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
        """Say why the kernel cannot run in this installation. Uses no device.

        Returns:
            None if it can run, else the reason.
        """
        return None

    @classmethod
    def unsupported_platform(cls, layout: RankLayout, device: torch.device | GPU) -> str | None:
        """Say why the kernel cannot run on this machine with these ranks. May query the driver; not collective.

        Args:
            layout: The layout of the ranks.
            device: A device of this machine, or the description of another GPU.

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
            config: The layer's configuration.
            layout: The layout of the ranks.
            dtype: Dtype of the layer.
            scheme: Quantization scheme of the experts.
            expert_map: The expert map. Default: assume one that the kernel can serve.
            max_tokens: The most tokens that a rank sends, None for any number.
            options: How the kernel runs, None for the defaults.

        Returns:
            None if it can, else the reason.
        """
        can, ranks, inner = cls.capabilities, layout.ep, config.intermediate_size // layout.etp
        if (problem := can.unsupported_reason(config, dtype, layout.etp, scheme, options)) is not None:
            return problem
        if not can.travels and ranks > 1:
            return f"it has no built-in all2all and needs ep=1, got ep={ranks}"
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
            return "it has fixed buffers; set their size with EPContext.from_torchrun(max_tokens=...)"
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
            return f"it supports only the linear expert map without replicas, got {expert_map} (EPLB, ExpertMap)"
        if len(set(slots)) == 1:
            return None
        spare = expert_map.num_ranks * expert_map.slots_per_rank - expert_map.num_experts
        return (
            f"it needs the same number of slots on every rank, got {slots}; add slots, for example with "
            f"ExpertMap.redundant({expert_map.num_experts}, {expert_map.num_ranks}, {spare})"
        )

    @classmethod
    def buffer_bytes(cls, dispatch_shape: FusedDispatchShape) -> int:
        """Count the bytes that the kernel keeps between calls for all layers of a shape.

        The bookkeeping of an external library is not counted.

        Args:
            dispatch_shape: The shape of the rows that travel.

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
            Integers for `use`, on any rank with a kernel of this shape; [] if there is nothing to tune.
        """
        return []

    def use(self, tuned: list[int]) -> None:
        """Use the variants that `tune` found.

        Args:
            tuned: The result of `tune`.
        """
        assert not tuned, f"{self.name} has nothing to tune"

    # --- calls -------------------------------------------------------------------------------------------------

    def __call__(self, x: Tensor, routed: Routed, *, max_tokens: int | None = None) -> Tensor:
        """Compute the layer's experts for this rank's rows. Collective over the EP group with the capability `travels`.

        Args:
            x: [T, H] of the layer's dtype. T may differ per rank and be 0.
            routed: A `PhysicalRouting` [T, K], -1 for no expert; `RouterLogits` [T, E] for a kernel that routes.
            max_tokens: The token limit of this call. Default: the dispatch shape's.

        Returns:
            [T, H], the weighted sum over each row's experts; zero for a row without experts.

        Raises:
            InputError: An argument is wrong, or the call is within a CUDA graph capture, which the kernel does not
                support. Peers raise for a wrong argument at a later step (`refuse`).
            PeerTimeout: A peer died, hung or issued another sequence of calls.
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
        """Create what the first call needs. Collective. Runs before the call's step, whose deadline is short."""
        return

    def refuse(self, problem: str) -> NoReturn:
        """Raise this rank's problem.

        A kernel that includes dispatch has no exchange that could carry the problem. This rank makes the call without
        rows, so that it still computes its peers' rows. The peers raise the problem at a later step.

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
            routed: A `PhysicalRouting` [T, K], -1 for no expert; `RouterLogits` [T, E] for a kernel that routes.

        Returns:
            [T, H], the weighted sum over each row's experts; zero for a row without experts.
        """

    def _problem(self, x: Tensor, routed: Routed, max_tokens: int | None) -> str | None:
        """Return what is wrong with the arguments of a call, or None. Does not wait for the device."""
        g = self.dispatch_shape
        if x.dim() != 2 or x.shape[1] != g.hidden_size:
            return f"x must be [T, {g.hidden_size}], got {list(x.shape)}"
        if x.dtype != g.dtype:
            return f"x must be {dtype_name(g.dtype)}, got {dtype_name(x.dtype)}"
        if self.capabilities.static:
            assert g.max_tokens is not None
            if max_tokens is None or not 1 <= max_tokens <= g.max_tokens:
                return f"max_tokens must be in [1, {g.max_tokens}], EPContext's token limit, got {max_tokens}"
            if (problem := too_many_tokens(x, max_tokens)) is not None:
                return problem
        if self.capabilities.routes:
            if not isinstance(routed, RouterLogits):
                return f"{self.name} has a built-in router and takes RouterLogits, got {type(routed).__name__}"
            experts = [len(x), self.config.num_experts]
            if list(routed.logits.shape) != experts:
                return f"logits must be [T, E] = {experts}, got {list(routed.logits.shape)}"
            return None
        if not isinstance(routed, PhysicalRouting):
            return f"routing must be a PhysicalRouting (pass it through Placement), got {type(routed).__name__}"
        return routing_problem(ids_for_checks(routed), routed.weights, x, g.top_k)


class FusedCall:
    """One call of a layer with a fused kernel, with the interface of `Exchange`. bound: the token limit of the call"""

    def __init__(self, kernel: FusedExperts, x: Tensor, routed: Routed, bound: int | None, stage: Stage) -> None:
        self.kernel, self.x, self.routed, self.bound, self._stage = kernel, x, routed, bound, stage

    def run(self, work: Callable[[], Any] | None = None) -> tuple[Tensor, Any]:
        """Return rows [T, H], summed over ranks, and the result of `work`."""
        with self._stage("fused"):
            out = self.kernel(self.x, self.routed, max_tokens=self.bound)
        if work is None:
            return out, None
        with self._stage("shared"):
            return out, work()

    def refuse(self, problem: str) -> NoReturn:
        self.kernel.refuse(problem)


def logits_of(router: Any, x: Tensor) -> RouterLogits:
    """Return a `Router`'s logits for x [T, H]."""
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
    """Return a pool for one object, which is not shared."""
    kept: list[Any] = []

    def pool(make: Callable[[], Any]) -> Any:
        if not kept:
            kept.append(make())
        return kept[0]

    return pool
