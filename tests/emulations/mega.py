"""FlashInfer's mega kernels for Hopper, emulated on gloo from their sources.

Sources (0.7.2.post1): moe_ep/backends/mega/kernel/sm90 and moe_ep/kernel_src/sm90. The classes have FlashInfer's own
fields and methods, so the adapter runs unchanged. They check arguments that FlashInfer does not check, read the weights
by index formulas of their own, and round numbers where the kernels do.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

from tests.emulations.exchange import all_gather_values

TOP_KS = (1, 2, 4, 6, 8)


@dataclass(frozen=True)
class BootstrapConfig:
    world_size: int
    rank: int
    stream: int = 0
    auto_bootstrap: bool = True
    device: int | None = None
    nccl_comm: int | None = None
    process_group: Any = None
    tcp_store: Any = None


@dataclass(frozen=True)
class FleetParams:
    num_experts: int
    max_tokens_per_rank: int
    token_hidden_size: int


@dataclass
class Tensors:
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


@dataclass
class Bf16Config:
    intermediate_size: int
    top_k: int
    capacity_factor: float = 1.0
    dedup_dispatch: bool = True
    clamp_limit: float | None = None
    allow_unverified_p2p: bool = False
    init_timeout_s: float = 600.0
    combine_wire: str | None = None


@dataclass
class Fp8Config:
    intermediate_size: int
    top_k: int
    capacity_factor: float = 1.0
    dedup_dispatch: bool = True
    grouped_combine: bool = True
    fuse_fc1_epilogue: bool = False
    payload_dtype: str = "fp8"
    combine_dtype: str = "fp8"
    allow_unverified_p2p: bool = False
    init_timeout_s: float = 600.0


@dataclass(frozen=True)
class Bf16Weights:
    w13: Tensor
    w2: Tensor
    num_local_experts: int
    hidden_size: int
    intermediate_size: int

    def shapes(self) -> tuple[int, int, int]:
        assert {self.w13.dtype, self.w2.dtype} == {torch.bfloat16}
        e, h, i = self.num_local_experts, self.hidden_size, self.intermediate_size
        assert (self.w13.shape, self.w2.shape) == ((e, 2 * i, h), (e, h, i))
        return e, h, i

    def gate_up_down(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return gate, up and down of an expert.

        Row r of gate lies at 64 * (r // 32) + r % 32, row r of up 32 rows further.
        """
        row = torch.arange(self.intermediate_size)
        at = 64 * (row // 32) + row % 32
        return self.w13[expert][at].float(), self.w13[expert][at + 32].float(), self.w2[expert].float()


@dataclass(frozen=True)
class Fp8Weights:
    w13_fp8: Tensor
    w13_sf: Tensor
    w2_fp8: Tensor
    w2_sf: Tensor
    w13_interleaved: bool = False

    def shapes(self) -> tuple[int, int, int]:
        assert {self.w13_fp8.dtype, self.w2_fp8.dtype} == {torch.float8_e4m3fn}
        assert {self.w13_sf.dtype, self.w2_sf.dtype} == {torch.float32}
        assert not self.w13_interleaved, "that is for fuse_fc1_epilogue"
        e, h, i = self.w2_fp8.shape
        assert self.w13_fp8.shape == (e, 2 * i, h)
        assert (self.w13_sf.shape, self.w2_sf.shape) == ((e, 2 * i // 128, h // 128), (e, h // 128, i // 128))
        return e, h, i

    def gate_up_down(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        def widened(data: Tensor, scale: Tensor) -> Tensor:
            rows, columns = (torch.arange(size) // 128 for size in data.shape)
            return data.float() * scale[rows][:, columns]

        inner = self.w2_fp8.shape[2]
        w13 = widened(self.w13_fp8[expert], self.w13_sf[expert])
        return w13[:inner], w13[inner:], widened(self.w2_fp8[expert], self.w2_sf[expert])


class Kernel:
    """Emulate `MegaKernelBackend`, as far as an adapter uses it."""

    hidden_unit = 256
    config_class: type = Bf16Config
    weights_class: type = Bf16Weights

    def __init__(self, config: Any) -> None:
        assert isinstance(config, self.config_class)
        self.config, self._weights = config, None

    def bind_ep_bootstrap(self, bootstrap: BootstrapConfig) -> None:
        group = bootstrap.process_group
        assert (dist.get_rank(group), dist.get_world_size(group)) == (bootstrap.rank, bootstrap.world_size)
        self.group, self.rank, self.size = group, bootstrap.rank, bootstrap.world_size

    def validate_init(self, bootstrap: BootstrapConfig, fleet: FleetParams) -> None:
        c = self.config
        assert bootstrap.stream == 0
        assert c.top_k in TOP_KS
        assert c.capacity_factor == 1.0, "rows beyond it would end the process"
        assert fleet.num_experts % bootstrap.world_size == 0
        assert fleet.token_hidden_size % self.hidden_unit == 0
        assert c.intermediate_size % 128 == 0
        assert c.init_timeout_s > 0

    def validate_transformed_weights(self, weights: Any, bootstrap: BootstrapConfig, fleet: FleetParams) -> None:
        assert isinstance(weights, self.weights_class)
        tensors = [value for value in vars(weights).values() if isinstance(value, Tensor)]
        assert all(t.is_contiguous() and not t.requires_grad for t in tensors)
        each = fleet.num_experts // bootstrap.world_size
        assert weights.shapes() == (each, fleet.token_hidden_size, self.config.intermediate_size)
        self._weights = weights

    def prepare_workspace(self, bootstrap: BootstrapConfig, fleet: FleetParams) -> Any:
        assert self._weights is not None, "weights come first"
        stated = all_gather_values((dataclasses.astuple(self.config), fleet), self.group)
        assert len(set(stated)) == 1, "ranks disagree"
        return SimpleNamespace(fleet=fleet, staged=None, alive=True)

    def stage_inputs(self, t: Tensors, workspace: Any, *, quantize_input: bool) -> None:
        assert workspace.alive
        assert workspace.staged is None, "one round at a time"
        assert quantize_input
        x, ids, weights = t.hidden_states, t.topk_ids, t.topk_weights
        assert (x.dtype, ids.dtype, weights.dtype) == (torch.bfloat16, torch.int32, torch.float32)
        assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in (x, ids, weights))
        assert x.data_ptr() % 16 == 0, "reads rows 16 bytes at a time"
        assert ids.shape == weights.shape == (len(x), self.config.top_k)
        assert len(x) <= workspace.fleet.max_tokens_per_rank
        assert (ids < workspace.fleet.num_experts).all(), "traps"
        everyone = all_gather_values((x, ids, weights), self.group)
        workspace.staged = (everyone, self._weights, ids)

    def compute(self, workspace: Any, weights: Any, *, output: Tensor) -> Tensor:
        everyone, bound, ids = workspace.staged
        assert weights is bound is self._weights, "a different weight bundle"
        workspace.staged = None
        assert output.shape == everyone[self.rank][0].shape
        assert output.dtype == torch.bfloat16
        assert output.is_contiguous()
        experts = [weights.gate_up_down(expert) for expert in range(weights.shapes()[0])]
        inbox = all_gather_values([self._answers(experts, *theirs) for theirs in everyone], self.group)
        output.copy_(self._sum([answers[self.rank] for answers in inbox], ids))
        return output

    def _routes(self, experts: list[Any], x: Tensor, ids: Tensor) -> dict[tuple[int, int], Tensor]:
        """Map (token, k) to the bf16 row that this rank's expert gives."""
        found = {}
        for number, matrices in enumerate(experts, start=self.rank * len(experts)):
            at, k = (ids == number).nonzero(as_tuple=True)
            y = self._expert(x[at], *matrices)
            found |= {(int(t), int(route)): row for t, route, row in zip(at, k, y, strict=True)}
        return found

    def _expert(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = x.float()
        hidden = (silu(rows @ gate.T) * (rows @ up.T)).bfloat16()
        return (hidden.float() @ down.T).bfloat16()

    def _answers(self, experts: list[Any], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return this rank's part of each row of a peer, float32 [T, H], rounded to bf16 once, as it travels."""
        total = torch.zeros(x.shape)
        for (token, k), row in sorted(self._routes(experts, x, ids).items()):
            total[token] += weights[token, k] * row.float()
        return total.bfloat16().float()

    def _sum(self, answers: list[Tensor], ids: Tensor) -> Tensor:
        return torch.stack(answers).sum(0).bfloat16()

    def destroy(self, workspace: Any) -> None:
        if workspace is not None:
            assert workspace.alive
            workspace.alive = False


class Fp8Kernel(Kernel):
    hidden_unit = 128
    config_class, weights_class = Fp8Config, Fp8Weights

    def validate_init(self, bootstrap: BootstrapConfig, fleet: FleetParams) -> None:
        super().validate_init(bootstrap, fleet)
        assert (self.config.combine_dtype, self.config.grouped_combine) == ("bf16", False), "the only ones written here"

    def _expert(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = rounded(x)
        a, b = (rows @ gate.T).bfloat16().float(), (rows @ up.T).bfloat16().float()
        return (rounded((silu(a) * b).bfloat16()) @ down.T).bfloat16()

    def _answers(self, experts: list[Any], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return a bf16 row per route, float32 [T, K, H], 0 for routes of other ranks."""
        found = torch.zeros(len(x), ids.shape[1], x.shape[1])
        for (token, k), row in self._routes(experts, x, ids).items():
            found[token, k] = (weights[token, k] * row.float()).bfloat16().float()
        return found

    def _sum(self, answers: list[Tensor], ids: Tensor) -> Tensor:
        return torch.stack(answers).sum(0).sum(1).bfloat16()


def rounded(x: Tensor) -> Tensor:
    """Quantize to E4M3 with a float32 scale per 128 columns, and dequantize.

    A block of zeros has the scale 1. CUDA's fmaxf and fminf skip NaN: it does not count for the scale, and becomes the
    lowest number.
    """
    blocks = x.float().unflatten(1, (-1, 128))
    largest = blocks.abs().nan_to_num(0.0, torch.inf).amax(2, keepdim=True)
    blocks = torch.where(blocks.isnan(), -torch.inf, blocks)
    scale = torch.where(largest > 0, largest / 448.0, 1.0)
    return ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).view(x.shape)


def library(name: str) -> Any:
    fp8 = name == "flashinfer_mega_fp8"
    kernel = Fp8Kernel if fp8 else Kernel
    return SimpleNamespace(
        kernel=kernel,
        config=kernel.config_class,
        weights=kernel.weights_class,
        bootstrap=BootstrapConfig,
        fleet=FleetParams,
        tensors=Tensors,
    )


def on_the_cpu(*kinds: Any) -> None:
    """Replace the kernels in a rank's process."""
    from ep_moe.experts.fused import flashinfer_mega

    flashinfer_mega.library = library
    for kind in kinds:
        kind.capabilities = dataclasses.replace(kind.capabilities, devices=frozenset({"cpu"}))
        kind.available = classmethod(lambda cls: None)
        kind.unsupported_platform = classmethod(lambda cls, layout, device: None)
