"""Forward and backward of one routed layer, ours and by hand, on the same rows, routes and weights in one run.

    torchrun --standalone --nproc-per-node 2 -m ep_moe.bench.train [MODEL ...] [--tokens T ...] [--csv F] ...

Times are milliseconds in bf16: the median of eager calls on the slowest rank. Lines take turns. Routing is uniform, and
there are no shared experts. A step runs forward and backward and drops the gradients. Each timed step follows one that
is not timed, so the skew of the ranks after the barrier does not count. On a CPU everything runs over gloo, without
floors and memory.

auto         the pair of transport and kernel that "auto" selects; the other lines name their transport
by hand      torch alone: sort, all_to_all_single of K copies, grouped_mm, index_add; eager, and compiled
torchtitan   (if installed) its layer over MinimalAsyncEP. Its buffers hold all rows that can arrive, so none is
             dropped. Backward recomputes the layer, as its trainer requires, eager and compiled. "4 buffers" recomputes
             nothing, and has more buffers than torchtitan offers. See train_torchtitan.py
transformers (if installed) its experts over its own `all_to_all`, eager: it synchronizes with the device
SonicMoE     (if installed) its local experts, with --rows, with its default tiles or tuned (--sonic)
main_grad    (--main-grad) the "auto" pair after `use_main_grads`: each step overwrites the experts' gradients in place,
             in bf16, and in float32
accumulate   (--accumulate) a timed step of every line adds to the gradients of the previous step; without CUDA graphs
frozen       (--frozen) the experts of all lines are frozen: forward, and the gradients of rows and routing weights
exact        (--exact) the "auto" pair with ExpertsOptions(exact=True)
float8       (--float8) products in E4M3, except those of the matrices' gradients
CUDA graph   a replay of one captured step of the "auto" pair, in a context of its own
experts      (--rows) the kernel's own step, without transport, on one rank that holds --slots experts
floor        the longer of: products at the measured matmul rate (three for each of forward's); weights, read twice, and
             their gradients, written once, at the measured copy rate. Rows on the wire are omitted
x by hand    time of the fastest layer by hand / time of this line: above 1 is faster than by hand
error        largest difference from the first line, relative to its largest magnitude, of the result and of the
             gradients of rows, routing weights and some experts; WRONG beyond ERROR (FLOAT8_ERROR). It guards against
             timing a different computation, and proves no more
peak         peak memory of a step in torch's allocator, without parameters, inputs and scratch memory of CUDA graphs;
             buffers: those of `MoELayer.plan`, allocated once
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from ep_moe import registry
from ep_moe.bench import floors, train_sonic, train_torchtitan
from ep_moe.bench.all2all import max_over_ranks
from ep_moe.bench.experts import measure_rates
from ep_moe.bench.floors import Rates
from ep_moe.bench.harness import (
    Where,
    add_models,
    attempt,
    benchmark_main,
    captured,
    check_dealt,
    check_measured,
    free_device_memory,
    interleaved_times,
    own_device,
    parse,
    positive,
    show,
    tracked,
    write,
)
from ep_moe.bench.layer import load_of
from ep_moe.bench.train_entries import (
    BY_HAND,
    Batch,
    Entry,
    Options,
    built,
    drop_gradients,
    experts_entries,
    forward,
    layer_call,
    layer_entries,
    max_relative_error,
    ours,
    results,
    run_forward_backward,
    step,
    with_experts,
)
from ep_moe.bench.train_report import TrainLine, compared, plot, tables
from ep_moe.bench.train_torchtitan import WAYS
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.integrations.model_name import config_named
from ep_moe.parallel.groups import local_device
from ep_moe.parallel.rank_group import barrier
from ep_moe.runtime.devices import on_device_of
from ep_moe.selection.explain import AUTO

MODELS = ("qwen3-30b-a3b", "deepseek-v3")
TOKENS = (1024, 8192, 16384)
ROWS = (32768, 65536)
SLOTS = 64
MIB = 2**20


def peak(entry: Entry, batch: Batch) -> float | None:
    """Return the peak memory of a step in MiB, without what exists before it. What calls keep between steps counts."""
    device = batch.x.device
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step(entry, batch)
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before + entry.kept_bytes()) / MIB


def measure(
    context: EPContext, entries: Sequence[Entry], batch: Batch, point: TrainLine, options: Options
) -> tuple[list[TrainLine], dict[str, Tensor] | None]:
    """Return a line for each entry that runs, and the first one's results. Collective.

    point: a line with the fields that all lines share
    """
    for entry in entries if options.frozen else ():
        for parameter in entry.parameters:
            parameter.requires_grad_(False)
    torch.compiler.reset()  # so that each shape is compiled anew, and does not count as a recompilation
    reference: dict[str, Tensor] | None = None
    lines, able = [], []
    for entry in entries:
        found = attempt(context, f"{entry.owner}, {entry.name}", partial(results, entry, batch))
        if found is None:
            continue
        reference = found if reference is None else reference
        error = max_over_ranks(context, max_relative_error(found, reference))
        del found
        able.append(entry)
        own = dataclasses.replace(point, owner=entry.owner, name=entry.name, error=error, allowed=entry.allowed)
        own.buffers_mib = entry.buffers / MIB
        lines.append(own)
    wait = partial(barrier, context.device)
    forwards = interleaved_times([partial(forward, entry, batch) for entry in able], 1, options.steps, wait)
    times = interleaved_times([partial(step, entry, batch) for entry in able], 1, options.steps, wait)
    for line, entry, forward_us, us in zip(lines, able, forwards, times, strict=True):
        line.forward_ms = max_over_ranks(context, forward_us) / 1e3
        set_step_time(line, max_over_ranks(context, us), point.tflops)
        size = peak(entry, batch)
        line.peak_mib = None if size is None else max_over_ranks(context, size)
    return lines, reference


def set_step_time(line: TrainLine, us: float, tera: float) -> None:
    """Set the time and the rate of a line. tera: operations of a step / 1e12"""
    line.step_ms, line.tflops = us / 1e3, tera / us * 1e6


def captured_line(
    context: EPContext,
    config: MoEConfig,
    batch: Batch,
    point: TrainLine,
    options: Options,
    reference: dict[str, Tensor],
) -> TrainLine | None:
    """Measure the "auto" pair's step as a CUDA graph; None if it cannot be captured, with the reason. Collective."""
    layer = attempt(context, "a layer to capture", partial(built, context, config, AUTO, options))
    if layer is None:
        return None
    entry = ours(f"{layer.choice.experts} + {layer.choice.all2all}, CUDA graph", layer, layer_call(layer), options)
    found: dict[str, Tensor] = {}

    def call() -> None:
        found.clear()
        drop_gradients(entry)
        found.update(run_forward_backward(entry, batch))

    def capture() -> torch.cuda.CUDAGraph:
        for what in (layer.experts, layer._dispatcher()):
            if not what.capabilities.cuda_graph:
                raise ConfigError(f"{what.name} cannot be captured")
        return captured(call, 1)

    graph = attempt(context, f"ours, {entry.name}", capture)
    if graph is None:
        return None
    kept = [*found.values(), *(p.grad for p in entry.parameters if p.grad is not None)]
    for tensor in kept:
        tensor.fill_(torch.nan)  # so that only values that the replay writes can compare equal
    graph.replay()
    error = max_over_ranks(context, max_relative_error(with_experts(entry, found), reference))
    (us,) = interleaved_times([graph.replay], 1, options.steps, partial(barrier, context.device))
    line = dataclasses.replace(point, owner="ours", name=entry.name, error=error, buffers_mib=entry.buffers / MIB)
    set_step_time(line, max_over_ranks(context, us), point.tflops)
    return line


def point_of(
    model: str, config: MoEConfig, ranks: int, part: str, tokens: int, load: floors.Load, rates: Rates | None, *,
    frozen: bool,
) -> TrainLine:  # fmt: skip
    """Return a line with the fields that all lines of a point share. Its `tflops` holds the operations of a step."""
    floor = None if rates is None else floors.training_us(config, load, rates, frozen=frozen) / 1e3
    tera = floors.training_operations(config, load, frozen=frozen) / 1e12
    return TrainLine(model, ranks, part, tokens, int(load.pairs), "", "", None, torch.nan, floor, tera, torch.inf)


def layer_lines(
    context: EPContext, model: str, config: MoEConfig, tokens: Sequence[int], options: Options, rates: Rates | None
) -> list[tuple[Batch, TrainLine, list[TrainLine], dict[str, Tensor] | None]]:
    """Measure whole layers, in a context for the largest number of tokens. Collective.

    Returns for each number of tokens the batch, the point, its lines and the first one's results.
    """
    found = []
    entries, first = layer_entries(context, config, options)
    titan = train_torchtitan.prepared(context, config, first, options)
    for count in tokens:
        batch = Batch.make(context, config, count)
        load = load_of(context, config, batch.ids)
        point = point_of(model, config, context.layout.ep, "layer", count, load, rates, frozen=options.frozen)
        with (
            context.token_limit(count),  # once per point, because setting it is an exchange of all ranks
            train_torchtitan.connected(context, titan, count, options.torchtitan) as peers,
        ):
            lines, reference = measure(context, [*entries, *peers], batch, point, options)
        found.append((batch, point, lines, reference))
    return found


def experts_lines(
    context: EPContext, model: str, config: MoEConfig, rows: Sequence[int], options: Options, rates: Rates | None
) -> list[TrainLine]:
    """Measure local experts alone, on each rank separately. Collective."""
    lines: list[TrainLine] = []
    with EPContext.local(context.device) as own:
        entries, first = experts_entries(context, own, config, options)
        entries += train_sonic.entries(context, first, options)
        for count in rows:
            batch = Batch.make(context, config, count // config.top_k)
            load = floors.Load(experts=config.num_experts, pairs=batch.ids.numel(), rows=0, both=0)
            point = point_of(model, config, 1, "experts", len(batch.x), load, rates, frozen=options.frozen)
            lines += measure(context, entries, batch, point, options)[0]
    return lines


def with_graphs(model: str, asked: argparse.Namespace, options: Options, rates: Rates | None) -> list[TrainLine]:
    """Measure whole layers, then each point's step as a CUDA graph.

    Each graph is captured in a context of its own, because a capture that fails may make its context unusable.
    """
    config, lines = routed(model), list[TrainLine]()
    with EPContext.from_torchrun(max_tokens=max(asked.tokens)) as context:
        points = layer_lines(context, model, config, asked.tokens, options, rates)
    free_device_memory()
    for batch, point, found, reference in points:
        lines += found
        if batch.x.device.type != "cuda" or reference is None or asked.no_graph or options.eager:
            continue
        with EPContext.from_torchrun(max_tokens=point.tokens) as context:
            line = captured_line(context, config, batch, point, options, reference)
        lines += [] if line is None else [line]
        free_device_memory()
    return lines


def routed(model: str) -> MoEConfig:
    """Return the configuration of a model without shared experts."""
    return dataclasses.replace(config_named(model), shared_intermediate_size=0, shared_gate=False)


def share(model: str, slots: int) -> MoEConfig:
    """Return the configuration of one rank that holds `slots` experts and gets all rows."""
    config = routed(model)
    # routes are given, so groups of experts must not restrict the configuration
    routing = dataclasses.replace(config.routing, num_groups=1, top_groups=1)
    return dataclasses.replace(config, num_experts=slots, routing=routing)


def check(asked: argparse.Namespace) -> None:
    """Raise ConfigError, on all ranks, for options that exclude each other or do not fit a model."""
    if asked.frozen and (asked.main_grad or asked.accumulate):
        raise ConfigError("--frozen leaves --main-grad and --accumulate without gradients; leave it or them out")
    for model in asked.models:
        config = share(model, asked.slots) if asked.rows else routed(model)
        for count in asked.rows:
            if count % config.top_k:
                raise ConfigError(f"--rows must be multiples of {config.top_k} ({model}'s top_k), got {count}")
        check_dealt(routed(model).num_experts)


def transports() -> list[str]:
    """Return the names of the transports with a backward."""
    known = [name for name in registry.targets("dispatchers") if name != "local"]
    can = {name: registry.load("dispatchers", name).capabilities for name in known}
    return [name for name in known if can[name].differentiable or can[name].adjoint]


@benchmark_main
@on_device_of(own_device)
def main() -> list[TrainLine]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser, MODELS)
    parser.add_argument("--tokens", nargs="*", type=positive, default=TOKENS, help="of each rank; none: no layers")
    parser.add_argument(
        "--rows", nargs="*", type=positive, default=ROWS, help="pairs of a row and an expert; none: no local experts"
    )
    parser.add_argument("--slots", type=positive, default=SLOTS, help="local experts of --rows")
    parser.add_argument("--experts", default=AUTO, choices=[AUTO, *registry.targets("experts")])
    parser.add_argument("--transports", nargs="*", choices=transports(), default=transports(), help='beside "auto"')
    parser.add_argument("--by-hand", nargs="*", choices=list(BY_HAND), default=list(BY_HAND))
    parser.add_argument("--torchtitan", nargs="*", choices=list(WAYS), default=list(WAYS), help="where it is installed")
    where = "beside layers, where it is installed"
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=True, help=where)
    sonic = ["none", *train_sonic.WAYS]
    parser.add_argument("--sonic", choices=sonic, default="default", help="beside --rows, where it is installed")
    parser.add_argument("--float8", action="store_true", help='the "auto" pair with ExpertsOptions(float8=True) too')
    parser.add_argument("--exact", action="store_true", help='the "auto" pair with ExpertsOptions(exact=True) too')
    parser.add_argument("--main-grad", action="store_true", help='the "auto" pair after use_main_grads too')
    parser.add_argument("--accumulate", action="store_true", help="add to gradients, and capture no CUDA graph")
    parser.add_argument("--frozen", action="store_true", help="experts have no gradients; captures no CUDA graph")
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--one-thread", action="store_true", help="backward in the thread that calls it, of all lines")
    parser.add_argument("--steps", type=positive, default=10, help="that are timed")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parse(parser, Where.LAUNCHED)
    check(asked)
    options = Options(
        asked.experts, asked.transports, asked.by_hand, asked.steps, asked.float8, asked.torchtitan, asked.exact,
        asked.main_grad, asked.accumulate, asked.sonic, asked.transformers, asked.frozen,
    )  # fmt: skip
    console, lines = Console(width=160), list[TrainLine]()
    with EPContext.from_torchrun() as context:
        rates = measure_rates(context.device) if context.device.type == "cuda" else None
    free_device_memory()
    first = dist.get_rank() == 0
    if first and rates is not None:
        console.print(
            f"{torch.cuda.get_device_name(local_device())}, torch {torch.__version__}: "
            f"copy {rates.copy / 1e12:.2f} TB/s, bf16 {rates.bf16 / 1e12:.0f} TFLOP/s"
        )
    for model in tracked(asked.models, "model", asked):
        with torch.autograd.set_multithreading_enabled(not asked.one_thread):
            found = with_graphs(model, asked, options, rates) if asked.tokens else []
            if asked.rows:
                with EPContext.from_torchrun() as context:
                    found += experts_lines(context, model, share(model, asked.slots), asked.rows, options, rates)
                free_device_memory()
        lines += compared(found)
        if first and found:
            show(console, *tables(found))
            if asked.csv is not None:  # after each model, so that a run that ends early leaves its lines
                write(lines, asked.csv)
    check_measured(lines)
    if first and asked.plot is not None:
        plot(lines, asked.plot)
    return lines


if __name__ == "__main__":
    main()
