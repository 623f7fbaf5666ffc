"""torchtitan's routed layer as `ep_moe.bench.train_torchtitan` calls it, in plain torch over gloo.

It has torchtitan's modules, their configurations, and receive buffers that take turns. Later rows overwrite earlier
ones, as over NVLink.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import grouped_mm, silu

from tests.emulations.bench_libraries import module

TRANSPORT = "torchtitan.distributed.minimal_async_ep.api"


@dataclass
class State:
    group: dist.ProcessGroup
    buffers: list[Tensor]
    hidden_recv_buffer_index: int = 0


@dataclass
class Plan:
    """The order of this rank's routes: by expert, then by rank and route.

    Attributes:
        arrived: For each row here, the index of its route among all routes.
        counts: Rows of each expert here.
        rank: This rank.
        top_k: K.
    """

    arrived: Tensor
    counts: Tensor
    rank: int
    top_k: int


def everyone(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather a tensor of all ranks along the first dimension."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def transport(members: ModuleType) -> SimpleNamespace:
    """Return the transport functions, which use the state of the module."""

    def receive(rows: Tensor) -> Tensor:
        """Write rows into the next buffer, which callers read in place.

        The result has a version counter of its own, so autograd does not notice overwritten rows.
        """
        state = members._buffer_state
        number = state.hidden_recv_buffer_index
        state.hidden_recv_buffer_index = (number + 1) % members._HIDDEN_RECV_BUFFER_COUNT
        buffer = state.buffers[number]
        buffer[: len(rows)] = rows
        return buffer.data

    def init_buffer(group, hidden_dim, num_max_tokens_per_rank, num_local_experts, top_k, dtype, device):
        key = (group, hidden_dim, num_max_tokens_per_rank, num_local_experts, top_k, dtype, device)
        if members._buffer_key is not None:
            if members._buffer_key != key:
                raise ValueError("already initialized with a different configuration")
            return
        rows = group.size() * num_max_tokens_per_rank * min(top_k, num_local_experts)
        nothing = [
            torch.full((rows, hidden_dim), torch.nan, dtype=dtype) for _ in range(members._HIDDEN_RECV_BUFFER_COUNT)
        ]
        members._buffer_key, members._buffer_state = key, State(group, nothing)

    class Dispatch(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
            ctx.plan, ctx.tokens = plan, len(x)
            rows = everyone(x, members._buffer_state.group)
            return receive(rows[plan.arrived // plan.top_k])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            mine = receive(returned(grad, ctx.plan, ctx.tokens))[: ctx.tokens * ctx.plan.top_k]
            return mine.view(ctx.tokens, ctx.plan.top_k, -1).float().sum(1).to(grad.dtype), None

    class Combine(Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor, weights: Tensor, plan: Plan) -> Tensor:
            rows = receive(returned(y, plan, len(weights)))[: weights.numel()]
            ctx.plan, ctx.rows = plan, rows
            ctx.save_for_backward(weights)
            scaled = rows.view(*weights.shape, -1).float() * weights.unsqueeze(2)
            return scaled.sum(1).to(y.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
            (weights,) = ctx.saved_tensors
            each = grad.float().unsqueeze(1)
            of_weights = (ctx.rows.view(*weights.shape, -1).float() * each).sum(2)
            rows = everyone((each * weights.unsqueeze(2)).to(grad.dtype).flatten(0, 1), members._buffer_state.group)
            return receive(rows[ctx.plan.arrived]), of_weights, None

    def returned(y: Tensor, plan: Plan, tokens: int) -> Tensor:
        """Return the experts' rows to their senders, in the order of routes."""
        routes = tokens * plan.top_k
        back = torch.zeros(dist.get_world_size() * routes, y.shape[1])
        back[plan.arrived] = y[: len(plan.arrived)].float()
        dist.all_reduce(back, group=members._buffer_state.group)
        return back[plan.rank * routes :][:routes].to(y.dtype)

    return SimpleNamespace(init_buffer=init_buffer, dispatch=Dispatch.apply, combine=Combine.apply)


@dataclass(kw_only=True)
class DispatcherConfig:
    num_experts: int
    top_k: int
    hidden_dim: int
    num_max_tokens_per_rank: int
    dtype: torch.dtype
    device: torch.device


@dataclass(kw_only=True)
class ExpertsConfig:
    dim: int
    hidden_dim: int
    num_experts: int


@dataclass(kw_only=True)
class RoutedConfig:
    inner_experts: ExpertsConfig
    token_dispatcher: DispatcherConfig

    def build(self) -> Routed:
        return Routed(self)


class Experts(nn.Module):
    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        wide, narrow = (config.hidden_dim, config.dim), (config.dim, config.hidden_dim)
        self.w1_EFD, self.w2_EDF, self.w3_EFD = (
            nn.Parameter(torch.empty(config.num_experts, *shape)) for shape in (wide, narrow, wide)
        )

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Compute all rows, also those in which nothing arrived."""
        ends = counts.cumsum(0).int()
        gate, up = (grouped_mm(x, w.mT, offs=ends) for w in (self.w1_EFD, self.w3_EFD))
        return grouped_mm(silu(gate) * up, self.w2_EDF.mT, offs=ends)


class Routed(nn.Module):
    def __init__(self, config: RoutedConfig) -> None:
        super().__init__()
        self.inner_experts, self.token_dispatcher = Experts(config.inner_experts), config.token_dispatcher

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        """Run the layer. x: [B, L, H]; weights, ids: [B, L, K]; counts: this rank's routes by expert."""
        how: Any = self.token_dispatcher
        flat, (rows, top_k) = ids.flatten(0, 1), ids.flatten(0, 1).shape
        assert flat.dtype == torch.int64
        assert counts.tolist() == flat.flatten().bincount(minlength=how.config.num_experts).tolist()
        assert rows <= how.config.num_max_tokens_per_rank
        rank, held = dist.get_rank(how.group), how.config.num_experts // how.group.size()
        expert, order = everyone(flat, how.group).flatten().sort(stable=True)
        here = expert // held == rank
        plan = Plan(order[here], expert[here].sub(rank * held).bincount(minlength=held), rank, top_k)
        y = self.inner_experts(how.api.dispatch(x.flatten(0, 1), plan), plan.counts)
        return how.api.combine(y, weights.flatten(0, 1), plan).view_as(x)


def install(*, refused: str | None = None) -> None:
    """Install the modules. `refused` is the reason why buffers cannot be made."""
    members = module(TRANSPORT, _HIDDEN_RECV_BUFFER_COUNT=2, _buffer_state=None, _buffer_key=None)
    api = transport(members)

    class Dispatcher:
        Config: Any = None

        def __init__(self, config: DispatcherConfig) -> None:
            self.config, self.api = config, api

        def wire_meshes(self, *, ep_mesh: Any) -> None:
            if refused is not None:
                raise RuntimeError(refused)
            how, self.group = self.config, ep_mesh.get_group()
            held = how.num_experts // ep_mesh.size()
            api.init_buffer(
                self.group, how.hidden_dim, how.num_max_tokens_per_rank, held, how.top_k, how.dtype, how.device
            )  # fmt: skip

    class Config(DispatcherConfig):
        def build(self) -> Dispatcher:
            return Dispatcher(self)

    Dispatcher.Config = Config
    module("torchtitan.models.common.token_dispatcher", MinimalAsyncEPTokenDispatcher=Dispatcher)
    Experts.Config, Routed.Config = ExpertsConfig, RoutedConfig  # type: ignore[attr-defined]
    module("torchtitan.models.common.moe", GroupedExperts=Experts, RoutedExperts=Routed)
