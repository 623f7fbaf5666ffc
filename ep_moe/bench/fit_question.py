"""The question that `ep-moe fit` answers: a model, and a cluster that need not exist."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from ep_moe.checks import check_count, check_positive
from ep_moe.config import MoEConfig, ParallelConfig, Wire
from ep_moe.errors import ConfigError
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.nodes import NodeLayout
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.quant.schemes import Scheme
from ep_moe.runtime.gpus import GPU
from ep_moe.selection import explain

MOST_GPUS = 4096  # limit, because all layouts are tried


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, and a cluster that need not exist.

    Args:
        config: The configuration of the MoE layers, which are equal.
        layers: The number of MoE layers.
        gpu: The kind of GPU.
        gpus: The number of GPUs of the job.
        per_host: The number of GPUs of a host, which NVLink connects.
        tokens: Tokens of each GPU in one call. A dp rank of tp GPUs passes tp times as many.
        scheme: The quantization of the experts.
        dtype: The dtype of the layer.
        wire: The format of rows on the wire.
        redundant: Slots in addition to one per expert.
        nic: Bytes per second of a GPU to other hosts, in one direction.
        all2all: A transport's name, or "auto".
        experts: A kernel's name, or "auto".
        rest_bytes: Bytes of everything outside the MoE layers, whole on each rank. None if unknown.

    Raises:
        ConfigError: A number is out of range, or hosts would be filled unevenly.
    """

    config: MoEConfig
    layers: int
    gpu: GPU
    gpus: int
    per_host: int
    tokens: int
    scheme: Scheme
    dtype: torch.dtype = torch.bfloat16
    wire: Wire = dataclasses.field(default_factory=Wire)
    redundant: int = 0
    nic: float = 50e9
    all2all: str = explain.AUTO
    experts: str = explain.AUTO
    rest_bytes: int | None = None

    def __post_init__(self) -> None:
        check_count("--gpus", self.gpus, at_least=1, at_most=MOST_GPUS)
        check_count("--per-host", self.per_host, at_least=1)
        check_count("--tokens", self.tokens, at_least=1, at_most=1 << 22)
        check_count("--redundant", self.redundant, at_least=0)
        check_positive("--nic-gb-s", self.nic)
        if self.gpus > self.per_host and self.gpus % self.per_host:
            raise ConfigError(
                f"--per-host must divide --gpus, got gpus={self.gpus}, per_host={self.per_host}; give whole hosts"
            )

    def layout(self, parallel: ParallelConfig) -> RankLayout:
        """Return the layout of rank 0. No rank has more experts than this one.

        Args:
            parallel: The sizes. dp * tp must be the number of GPUs.

        Returns:
            The layout on the nodes of the question.

        Raises:
            ConfigError: Sizes do not fit, or groups would be spread unevenly over hosts.
        """
        gpus = min(self.per_host, self.gpus)
        nodes = NodeLayout.from_ranks_per_node(range(self.gpus), self.per_host, gpus=gpus)
        found = RankLayout.from_config(parallel, world=self.gpus, rank=0, nodes=nodes)
        most = self.config.num_experts * (found.ep - 1)
        if self.redundant > most:
            raise ConfigError(
                f"--redundant must be at most {most} for {self.config.num_experts} experts on ep={found.ep} ranks, got "
                f"{self.redundant}; a rank would hold an expert twice"
            )
        for name, size in (("tp", found.tp), ("etp", found.etp), ("ep * etp", found.ep * found.etp)):
            larger = name == "ep * etp" and size % gpus == 0
            if gpus % size and not larger:
                raise ConfigError(f"{name} must divide the {gpus} GPUs of a host, got {size}; NVLink joins these alone")
        return found

    def expert_map(self, layout: RankLayout) -> ExpertMap:
        """Return the map: experts in order over the EP group, then redundant ones."""
        return ExpertMap.redundant(self.config.num_experts, layout.ep, self.redundant)

    def idle_ranks(self, layout: RankLayout) -> int:
        """Return the number of ranks of an EP group without an expert. As many redundant slots give each one."""
        return max(0, layout.ep - self.config.num_experts - self.redundant)

    def dispatched(self, layout: RankLayout) -> int:
        """Return the number of tokens that a rank sends in one call."""
        return layout.max_dispatch_tokens(self.tokens * layout.split)

    def choose(self, layout: RankLayout) -> explain.BackendChoice:
        """Choose transport and kernel as a layer with `max_tokens` on such GPUs does.

        Args:
            layout: The layout of the ranks.

        Returns:
            The pair, with the reason.

        Raises:
            BackendUnavailable: No pair can run.
        """
        return explain.choose(
            self.config, layout, self.gpu, self.dtype, all2all=self.all2all, experts=self.experts, scheme=self.scheme,
            max_tokens=self.dispatched(layout), wire=self.wire, expert_map=self.expert_map(layout),
        )  # fmt: skip
