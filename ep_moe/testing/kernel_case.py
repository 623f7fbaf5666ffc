"""What expert kernels are checked with: one kernel object with its weights, rows for it, and what must come back."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.experts.base import Experts, ExpertsOptions
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.quant.schemes import Scheme
from ep_moe.runtime.workspace import Workspaces
from ep_moe.testing.expert_oracle import expected_and_limit, random_expert
from ep_moe.types import LocalIds, Received, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights

SLOTS = 5


class Layer:
    """One kernel object with the weights of `SLOTS` experts, and their canonical tensors."""

    def __init__(
        self,
        kind: type[Experts],
        config: MoEConfig,
        scheme: Scheme,
        dtype: torch.dtype,
        device: torch.device,
        etp: RankGroup | None = None,
        options: ExpertsOptions | None = None,
        *,
        tensors: list[dict[str, Tensor]] | None = None,
        trainable: bool = False,
    ) -> None:
        self.config, self.scheme, self.dtype, self.device, self.kind = config, scheme, dtype, device, kind
        random = (random_expert(config, scheme, expert, dtype, device) for expert in range(SLOTS))
        self.tensors = list(random) if tensors is None else tensors
        weights = ExpertWeights(
            config,
            ExpertMap.uneven([SLOTS, config.num_experts - SLOTS]),
            etp=etp or RankGroup.alone(),
            device=device,
            dtype=dtype,
            scheme=scheme,
            weight_layout=kind.weight_layout,
            trainable=trainable,
        )
        for expert, own in enumerate(self.tensors):
            weights.update_expert(expert, own)
        self.experts = kind(config, weights, Workspaces(device), options)

    def __str__(self) -> str:
        bias = ", biases" if self.config.expert_bias else ""
        return f"{self.kind.name} ({self.scheme.name}, {self.dtype}, {self.config.activation.value}{bias})"

    @property
    def rounds(self) -> bool:
        """Whether the kernel rounds activations as the scheme says; the reference computes with its weights alone."""
        return self.kind.name != "reference"

    def wanted(self, received: Received) -> tuple[Tensor, Tensor]:
        """Value and limit for RANK_MAJOR rows."""
        assert received.local_ids is not None
        weights = received.weights if received.weighting is Weighting.EXPERTS else None
        return expected_and_limit(
            self.config,
            self.scheme,
            self.tensors,
            received.x,
            received.local_ids,
            weights,
            self.dtype,
            rounds=self.rounds,
        )

    def run(self, received: Received, out: Tensor | None = None) -> Tensor:
        """The kernel's output; what it was given is as before."""
        ids = None if received.wire_ids is None else received.wire_ids.ids
        given = {name: value for name, value in (vars(received) | {"ids": ids}).items() if isinstance(value, Tensor)}
        before = {name: tensor.clone() for name, tensor in given.items()}
        y = self.experts(received, out)
        for name, was in before.items():
            same = torch.equal(given[name].view(torch.uint8), was.view(torch.uint8))  # NaN too
            that(same, self, f"{received.layout.value}: {name} must be left as it was")
        return y

    def rows(self, count: int, weighting: Weighting = Weighting.EXPERTS) -> Received:
        """RANK_MAJOR rows with up to K local experts each, some with none."""
        generator = torch.Generator().manual_seed(count)
        width = max(SLOTS, self.config.top_k)
        ids = torch.rand(count, width, generator=generator).topk(self.config.top_k).indices
        ids = torch.where((torch.rand(ids.shape, generator=generator) < 0.4) | (ids >= SLOTS), -1, ids)
        ids[3:5] = -1
        weights = torch.rand(ids.shape, generator=generator) + 0.1
        x = torch.randn(count, self.config.hidden_size, generator=generator).to(self.dtype)
        return Received(
            x=x.to(self.device),
            layout=RowLayout.RANK_MAJOR,
            weighting=weighting,
            handle=None,
            local_ids=LocalIds(ids.int().to(self.device)),
            weights=weights.to(self.device) if weighting is Weighting.EXPERTS else None,
        )


def that(condition: object, layer: Layer, fault: str) -> None:
    if not condition:
        raise AssertionError(f"{layer}: {fault}")
