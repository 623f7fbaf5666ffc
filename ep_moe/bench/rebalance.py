"""The slowdown of forwards during a rebalance: every expert moves to the next rank, layer after layer.

    torchrun --standalone --nproc-per-node 4 -m ep_moe.bench.rebalance [--layers 8] [--tokens 128 ...] ...

A forward is one pass through all layers, a CUDA-graph replay. Its time is that of the slowest rank, and includes the
`ExpertBalancer.step` after it. The host is at most two forwards ahead of the device, as in serving.

usual       median forward before anything moves; slowest: the slowest of these
moving      median and slowest forward while experts move, and the number of these forwards
ratio       slowest forward while moving / usual; over 1.2: forwards that took more than 1.2 times as long as usual
seconds     time from `move_to` to the last commit; GB: sent between ranks, over all ranks
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ep_moe.bench.harness import (
    Where,
    add_models,
    benchmark_main,
    check_dealt,
    own_device,
    parse,
    positive,
    show,
    tracked,
)
from ep_moe.bench.overlap import batch, build, tune
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.eplb.balancer import ExpertBalancer
from ep_moe.eplb.config import EPLBConfig
from ep_moe.eplb.migration.consensus import State
from ep_moe.integrations.model_name import config_named
from ep_moe.layer import MoELayer
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.runtime.devices import on_device_of

# warm-up forwards, and forwards that are timed before anything moves: as many as later, so that occasional delays of
# the host are not attributed to the rebalance
WARM, USUAL = 20, 1500
AHEAD = 2  # forwards by which the host may be ahead of the device
LATE = 1.2
_MOST = 20_000  # limit of forwards while moving


@dataclass(frozen=True)
class Result:
    """Times in milliseconds."""

    usual: float
    usual_slowest: float
    moving: float
    moving_slowest: float
    late: int
    forwards: int
    seconds: float
    sent_bytes: int
    commits: int

    @property
    def ratio(self) -> float:
        return self.moving_slowest / self.usual


def measure(context: EPContext, layers: Sequence[MoELayer], tokens: int, bytes_per_step: int) -> Result:
    forward = make_forward(context, layers, tokens)
    for layer in layers:
        layer.requires_grad_(False)
    config = EPLBConfig(interval=0, window=1, bytes_per_step=bytes_per_step)
    with ExpertBalancer(list(layers), context, config) as balancer, frozen():
        usual, _ = timed(context, forward, balancer, lambda number: number < USUAL)
        maps = [rotated(layer.placement.expert_map) for layer in layers]
        moving, seconds = timed(
            context,
            forward,
            balancer,
            lambda number: not number or (balancer.state is not State.IDLE and number < _MOST),
            lambda: balancer.move_to(maps),
        )
        found = balancer.stats()
    sent = torch.tensor([found.received_bytes], dtype=torch.int64, device=context.device)
    dist.all_reduce(sent)
    return Result(
        float(usual.median()), float(usual.max()), float(moving.median()), float(moving.max()),
        int((moving > LATE * usual.median()).sum()), len(moving), seconds, int(sent), found.commits,
    )  # fmt: skip


@contextmanager
def frozen() -> Iterator[None]:
    """Exclude existing objects from Python's garbage collection, as warm servers do.

    A full collection delays the host by 14 ms or more, and the objects of a plan may trigger one.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def make_forward(context: EPContext, layers: Sequence[MoELayer], tokens: int) -> Callable[[], Any]:
    """Return a call of one pass through the layers, each with its own routes; on a GPU a CUDA-graph replay."""
    x, _ = batch(context, layers[0].config, tokens)
    routes = [batch(context, layer.config, tokens)[1] for layer in layers]

    @torch.no_grad()
    def forward() -> Tensor:
        out = x
        for layer, routing in zip(layers, routes, strict=True):
            out = layer.forward_routed(out, routing)
        return out

    if context.device.type != "cuda":
        return forward
    forward()
    torch.cuda.synchronize(context.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(context.device)):
        forward()

    def replay(_read: Callable[[], Any] = forward) -> None:  # keeps rows and routes, which the graph reads, alive
        graph.replay()

    return replay


def timed(
    context: EPContext,
    forward: Callable[[], Any],
    balancer: ExpertBalancer,
    more: Callable[[int], bool],
    begin: Callable[[], None] = lambda: None,
) -> tuple[Tensor, float]:
    """Return the milliseconds of each forward on the slowest rank, float64 [forwards], and the seconds of all of them.

    begin: called after WARM warm-up forwards, before the first timed one. Without these, the first timed forward would
    include the start of an idle device.
    """
    on_gpu, marks, number = context.device.type == "cuda", [_now(context)], -WARM
    while number < 0 or more(number):
        if number == 0:
            begin()
            start = time.perf_counter()
        forward()
        balancer.step()
        marks.append(_now(context))
        number += 1
        if on_gpu and len(marks) > AHEAD:
            marks[-1 - AHEAD].synchronize()
    seconds = time.perf_counter() - start
    if on_gpu:
        torch.cuda.synchronize(context.device)
        own = [one.elapsed_time(two) for one, two in pairwise(marks[WARM:])]
    else:
        own = [1e3 * (two - one) for one, two in pairwise(marks[WARM:])]
    times = torch.tensor(own, dtype=torch.float64, device=context.device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.cpu(), seconds


def _now(context: EPContext) -> Any:
    if context.device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(context.device))
    return event


def rotated(placed: ExpertMap) -> ExpertMap:
    """Return the map with each rank's experts on the next rank."""
    slots = placed.physical_to_logical
    return dataclasses.replace(
        placed, physical_to_logical=slots[-placed.slots_per_rank :] + slots[: -placed.slots_per_rank]
    )


@benchmark_main
@on_device_of(own_device)
def main() -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser, ["qwen3-30b-a3b"], several=False)
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--tokens", nargs="+", type=positive, default=[16, 128, 1024])
    parser.add_argument("--bytes-per-step", nargs="+", type=positive, default=[4 << 20, 8 << 20, 16 << 20])
    parser.add_argument("--experts", default="flashinfer_cutlass")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--all2all", default="auto")
    asked = parse(parser, Where.RANKS)
    (model,) = asked.models
    config: MoEConfig = config_named(model)
    check_dealt(config.num_experts)
    lines: list[dict[str, Any]] = []
    config = dataclasses.replace(config, shared_intermediate_size=0, shared_gate=False)
    with EPContext.from_torchrun(max_tokens=max(asked.tokens)) as context:
        variant = (asked.experts, asked.quantization, "plain", asked.all2all, (0,))
        layers = [build(context, config, variant) for _ in range(asked.layers)]
        tune(context, asked.tokens)
        for tokens in tracked(asked.tokens, "number of tokens", asked):
            with context.token_limit(tokens):
                results = [measure(context, layers, tokens, size) for size in asked.bytes_per_step]
            lines += [
                {"tokens": tokens, "bytes_per_step": size, **dataclasses.asdict(found), "ratio": found.ratio}
                for size, found in zip(asked.bytes_per_step, results, strict=True)
            ]
            if context.layout.rank == 0:
                title = f"{asked.layers} layers of {model}, every expert moves, {tokens} tokens per rank"
                show(Console(width=130), shown(title, dict(zip(asked.bytes_per_step, results, strict=True))))
    return lines


def shown(title: str, results: dict[int, Result]) -> Table:
    """Return the table of results. results: by bytes per step"""
    table = Table(title=title)
    times = ("usual ms", "slowest", "moving ms", "slowest", "ratio", f"over {LATE}")
    for name in ("MB per step", *times, "forwards", "s", "GB"):
        table.add_column(name, justify="right")
    for size, found in results.items():
        table.add_row(
            f"{size / 2**20:.0f}", f"{found.usual:.3f}", f"{found.usual_slowest:.3f}", f"{found.moving:.3f}",
            f"{found.moving_slowest:.3f}", f"{found.ratio:.2f}", str(found.late), str(found.forwards),
            f"{found.seconds:.2f}", f"{found.sent_bytes / 1e9:.2f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
