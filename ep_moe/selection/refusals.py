"""All checks of whether a transport and an expert kernel can serve a layer."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ep_moe import registry
from ep_moe.config import PLAIN_WIRE, MoEConfig, Wire
from ep_moe.errors import BackendUnavailable
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.fused.base import INSIDE, FusedExperts
from ep_moe.parallel.layout import RankLayout
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.quant.schemes import Scheme
from ep_moe.runtime.gpus import GPU
from ep_moe.types import RowLayout, Weighting


class BackendCache:
    """A cache of the registry for one table: each backend is imported and checked once, not for each of its pairs."""

    def __init__(self, device: torch.device | GPU) -> None:
        self.load = functools.cache(registry.load)
        self._on_paper = isinstance(device, GPU)
        self.unsupported_reason = functools.cache(self._unsupported_reason)

    def _unsupported_reason(self, kind: registry.Kind, name: str) -> str | None:
        """Return why a backend cannot run in this installation, or None.

        For a hypothetical GPU, libraries of `ep-moe[gpu]` and a CUDA build of torch are assumed to be installed.
        Backends of separately built libraries and of other packages are still checked on this host.
        """
        if self._on_paper and not registry.is_plugin(kind, name) and name not in registry.BUILT_APART:
            return None
        try:
            backend = self.load(kind, name)
        except BackendUnavailable as error:
            return str(error)
        return registry.query_unsupported_reason(kind, name, backend.available)


@dataclass(frozen=True)
class Refusals:
    """Checks pairs of transport and kernel for one layer. The fields are arguments of `explain`."""

    backends: BackendCache
    config: MoEConfig
    layout: RankLayout
    device: torch.device | GPU
    dtype: torch.dtype
    scheme: Scheme
    options: ExpertsOptions
    max_tokens: int | None
    wire: Wire
    expert_map: ExpertMap | None

    def of_pair(self, transport: str, kernel: str) -> str | None:
        """Return why this transport and this kernel cannot serve the layer, or None if they can."""
        problem = self.scheme.unsupported_reason(self.config, self.layout.etp)
        if problem is not None:
            return problem
        for kind, name in (("dispatchers", transport), ("experts", kernel)):
            reason = self.backends.unsupported_reason(kind, name)
            if reason is not None:
                return f"{name}: {reason}"
        sender, computer = self.backends.load("dispatchers", transport), self.backends.load("experts", kernel)
        can, able = sender.capabilities, computer.capabilities
        for name, devices in ((transport, can.devices), (kernel, able.devices)):
            if self.device.type not in devices:
                return f"{name} runs on {', '.join(sorted(devices))}, not on {self.device.type}"
        reason = registry.query_unsupported_reason(
            "dispatchers",
            transport,
            lambda: (
                sender.unsupported_reason(
                    self.config.hidden_size, self.config.top_k, self.layout.ep, self.dtype, self.max_tokens, self.wire
                )
                or sender.unsupported_platform(self.layout)
            ),
        )
        if reason is not None:
            return reason
        if not able.layouts & {can.layout, RowLayout.RANK_MAJOR}:  # any layout can be seen as RANK_MAJOR
            accepted = ", ".join(sorted(layout.value for layout in able.layouts))
            return f"{transport} delivers {can.layout.value} rows, {kernel} takes {accepted}"
        if can.layout is RowLayout.RANK_MAJOR and can.weighting is Weighting.COMBINE:
            return f"{transport} delivers rows of several experts each and leaves their weights to combine"
        if can.weighting not in able.weightings:
            return f"{transport} leaves the routing weights to {can.weighting.value}, {kernel} does not work that way"
        if self.options.deterministic and not can.deterministic:
            return f"{transport} is not deterministic"
        if self.options.exact and not can.exact:
            return f"{transport} does not promise that it delivers each row in order and unchanged (exact=True)"
        if self.options.exact and self.wire.combine != "plain":
            return f"combine in {self.wire.combine} rounds rows, which exact=True forbids"
        return registry.query_unsupported_reason(
            "experts",
            kernel,
            lambda: (
                computer.unsupported_platform(self.scheme, self.device)
                or computer.unsupported_reason(self.config, self.dtype, self.layout.etp, self.scheme, self.options)
            ),
        )

    def of_fused(self, kernel: str) -> str | None:
        """Return why this fused kernel cannot serve the layer, or None if it can."""
        problem = self.scheme.unsupported_reason(self.config, self.layout.etp)
        if problem is not None:
            return problem
        if (reason := self.backends.unsupported_reason("fused", kernel)) is not None:
            return f"{kernel}: {reason}"
        kind: type[FusedExperts] = registry.load("fused", kernel)
        if self.wire != PLAIN_WIRE:
            return f"{kernel} has its own row format for dispatch and combine, not {self.wire}"
        return registry.query_unsupported_reason(
            "fused",
            kernel,
            lambda: (
                kind.unsupported_platform(self.layout, self.device)
                or kind.unsupported_reason(
                    self.config,
                    self.layout,
                    self.dtype,
                    self.scheme,
                    expert_map=self.expert_map,
                    max_tokens=self.max_tokens,
                    options=self.options,
                )
            ),
        )

    def trains(self, transport: str, kernel: str) -> bool:
        """Return whether both have a backward with this wire."""
        if transport == INSIDE or self.wire != PLAIN_WIRE:
            return False
        try:
            can = self.backends.load("dispatchers", transport).capabilities
            return bool(
                self.backends.load("experts", kernel).capabilities.differentiable
                and (can.differentiable or can.adjoint)
            )
        except BackendUnavailable:  # the pair is refused for the same reason
            return False
