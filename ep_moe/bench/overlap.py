"""The gain of overlapping transfers and computation: whole routed layers in one part and in several, and shared experts
during transfers.

    torchrun --standalone --nproc-per-node 4 -m ep_moe.bench.overlap [MODEL ...] [--tokens T ...] [--csv F] ...

Times are microseconds of one layer call: the median of CUDA-graph replays on the slowest rank. Lines are replayed in
turns. Routing is uniform, and experts are tuned.

parts        tokens per rank in one part; spare: multiprocessors that the experts then leave to the transport
gain         time of the same layer in one part / time of this line
beside       share of the transport's kernel time during which another kernel ran too, from a profile of one replay
hidden       share of the shared experts' own time that does not add to the layer's time
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ep_moe import registry
from ep_moe.bench.all2all import max_over_ranks
from ep_moe.bench.harness import (
    Where,
    add_models,
    benchmark_main,
    check_dealt,
    check_measured,
    own_device,
    parse,
    positive,
    replayed,
    show,
    tracked,
    write,
)
from ep_moe.config import MoEConfig, Wire
from ep_moe.context import EPContext
from ep_moe.experts.base import ExpertsOptions
from ep_moe.integrations.model_name import config_named
from ep_moe.layer import MoELayer
from ep_moe.parallel.rank_group import barrier
from ep_moe.quant.schemes import SCHEMES
from ep_moe.runtime.devices import on_device_of
from ep_moe.types import Routing

MODELS = ("qwen3-30b-a3b", "deepseek-v3")
TOKENS = (8192,)
CUTS = (2, 4)
VARIANTS = (  # experts, scheme, rows on the wire, transport, multiprocessors spared in parts
    ("flashinfer_cutlass", "none", "plain", "flashinfer_nvlink", (0,)),
    ("flashinfer_cutlass", "none", "plain", "nvlink_p2p", (0,)),
    ("bf16_triton", "none", "plain", "nvlink_p2p", (0, 8)),
    ("fp8_block_triton", "fp8_block", "fp8_block", "flashinfer_nvlink", (0, 16)),
    ("fp8_block_triton", "fp8_block", "fp8_block", "nvlink_p2p", (0, 8)),
    ("fp8_block_triton", "fp8_block", "fp8_block", "deepep_static", (0, 24)),
)
Variant = tuple[str, str, str, str, tuple[int, ...]]

Span = tuple[str, float, float]  # kernel, begin and end in microseconds


@dataclass
class OverlapLine:
    model: str
    experts: str
    rows: str
    all2all: str
    tokens: int
    parts: int
    spare_sms: int
    us: float
    gain: float
    beside: float


@dataclass
class Gap:
    """Microseconds of a layer without its shared experts, of the shared experts alone, and of both together."""

    model: str
    tokens: int
    without: float
    alone: float
    both: float


def build(
    context: EPContext, config: MoEConfig, variant: Variant, pipeline: int | None = None, spare_sms: int = 0
) -> MoELayer:
    experts, scheme, rows, all2all, _ = variant
    layer = MoELayer(
        config,
        context,
        all2all=all2all,
        options=ExpertsOptions(spare_sms=spare_sms),
        experts=experts,
        quantization=scheme,
        wire=Wire(dispatch=rows),
        pipeline=pipeline,
        dtype=torch.bfloat16,
    )
    generator = torch.Generator(device=context.device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=context.device) / 50

    tensors = {
        "w13": random(config.w13_rows, config.hidden_size),
        "w2": random(config.hidden_size, config.intermediate_size),
    }
    stored = SCHEMES[scheme].quantize(tensors, torch.bfloat16)
    for expert in layer.expert_weights.local_experts:
        layer.update_expert(expert, **stored)
    return layer


def batch(context: EPContext, config: MoEConfig, tokens: int) -> tuple[Tensor, Routing]:
    generator = torch.Generator(device=context.device).manual_seed(context.layout.rank)
    ids = torch.rand(tokens, config.num_experts, generator=generator, device=context.device).topk(config.top_k).indices
    x = torch.randn(tokens, config.hidden_size, generator=generator, device=context.device).bfloat16()
    return x, Routing(ids, torch.full(ids.shape, 1 / config.top_k, device=context.device))


def pipelines(model: str, count: int, variant: Variant) -> list[OverlapLine]:
    config = dataclasses.replace(config_named(model), shared_intermediate_size=0, shared_gate=False)
    cases = [(count, 0), *((count // cut, spare) for cut in CUTS for spare in variant[-1])]
    with EPContext.from_torchrun(max_tokens=count) as context, torch.no_grad():
        layers = [build(context, config, variant, size if size < count else None, spare) for size, spare in cases]
        tune(context, [size for size, _ in cases])
        x, routing = batch(context, config, count)
        calls = [partial(layer.forward_routed, x, routing) for layer in layers]
        times = [
            max_over_ranks(context, us) for us in replayed(calls, repeat=2, before=partial(barrier, context.device))
        ]
        shares = [overlapped_share(timeline(call, context.device)) for call in calls]
    experts, _, rows, all2all, _ = variant
    found = zip(cases, times, shares, strict=True)
    return [
        OverlapLine(model, experts, rows, all2all, count, size, spare, us, times[0] / us, share)
        for (size, spare), us, share in found
    ]


def shared(model: str, count: int) -> Gap | None:
    config = config_named(model)
    if not config.shared_intermediate_size:
        return None
    bare = dataclasses.replace(config, shared_intermediate_size=0, shared_gate=False)
    with EPContext.from_torchrun(max_tokens=count) as context, torch.no_grad():
        full, without = (build(context, own, VARIANTS[0]) for own in (config, bare))
        tune(context, [count])
        x, routing = batch(context, config, count)
        alone: Any = full.shared_experts
        calls: list[Callable[[], Any]] = [
            partial(without.forward_routed, x, routing),
            partial(alone, x),
            partial(full.forward_routed, x, routing),
        ]
        return Gap(
            model,
            count,
            *(max_over_ranks(context, us) for us in replayed(calls, repeat=2, before=partial(barrier, context.device))),
        )


def tune(context: EPContext, sizes: Sequence[int]) -> None:
    context.tune(sorted({min(context.layout.ep * size, ExpertsOptions().chunk_rows) for size in sizes}))


def timeline(call: Callable[[], Any], device: torch.device) -> list[Span]:
    """Return the kernels of one call, from a profile of a graph replay: in an eager call the host would be too slow."""
    call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
        call()
    graph.replay()
    torch.cuda.synchronize(device)
    barrier(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize(device)
    barrier(device)
    kernels = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    events = [event for event in kernels if not event.name.startswith("ep_moe::")]  # not the ranges of whole stages
    return [(event.name, event.time_range.start, event.time_range.end) for event in events]


def is_transport_kernel(name: str) -> bool:
    """Whether a kernel moves rows between ranks. Copies count too."""
    ours = ("_send", "_announce", "_give", "_receive", "_tell_given")
    return "a2a" in name.lower() or "deep_ep" in name or "Memcpy" in name or name in ours


def overlapped_share(spans: list[Span]) -> float:
    """Return the share of the transport's time in which another kernel runs; 0 without transport."""
    total = shared_us = 0.0
    others: list[tuple[float, float]] = []  # merged intervals, which do not overlap
    for start, end in sorted((start, end) for name, start, end in spans if not is_transport_kernel(name)):
        if others and start <= others[-1][1]:
            others[-1] = (others[-1][0], max(end, others[-1][1]))
        else:
            others.append((start, end))
    for name, start, end in spans:
        if is_transport_kernel(name):
            total += end - start
            shared_us += sum(max(0.0, min(end, b) - max(start, a)) for a, b in others)
    return shared_us / total if total else 0.0


def draw(spans: list[Span], title: str, axes: Any) -> None:
    first = min(start for _, start, _ in spans)
    for row, chosen in enumerate((True, False)):
        own = [(start - first, end - start) for name, start, end in spans if is_transport_kernel(name) is chosen]
        axes.broken_barh(own, (row - 0.4, 0.8), facecolors=("tab:orange", "tab:blue")[row])
    axes.set(yticks=(0, 1), yticklabels=("transport", "other kernels"), xlabel="us", title=title)


def plot(model: str, count: int, variant: Variant, file: Path) -> None:
    """Plot the profile of one call, in one part and in two."""
    from matplotlib.figure import Figure

    config = dataclasses.replace(config_named(model), shared_intermediate_size=0, shared_gate=False)
    figure = Figure(figsize=(12, 4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    with EPContext.from_torchrun(max_tokens=count) as context, torch.no_grad():
        x, routing = batch(context, config, count)
        for axes, pipeline, spare in ((above, None, 0), (below, count // 2, variant[-1][-1])):
            layer = build(context, config, variant, pipeline, spare)
            tune(context, [pipeline or count])
            spans = timeline(partial(layer.forward_routed, x, routing), context.device)
            draw(spans, f"{model}, {variant[3]}, {count} tokens per rank, {pipeline or count} at once", axes)
        if context.layout.rank == 0:
            figure.savefig(file, dpi=110)


def most_gained(lines: Sequence[OverlapLine], variants: Sequence[Variant], model: str) -> Variant:
    """Return the variant with the largest gain, among those of the fastest transport.

    A slow transport would have a large gain only because it is slow.
    """
    best = min((line for line in lines if line.model == model), key=lambda line: line.us)
    own = [line for line in lines if (line.model, line.all2all) == (model, best.all2all)]
    found = max(own, key=lambda line: line.gain)
    return next(v for v in variants if (v[0], v[2], v[3]) == (found.experts, found.rows, found.all2all))


def table(lines: list[OverlapLine]) -> Table:
    found = Table(title="layers in one go and in parts")
    names, numbers = ("model", "experts", "rows", "all2all"), ("tokens", "parts", "spare", "us", "gain", "beside")
    for name in (*names, *numbers):
        found.add_column(name, no_wrap=True, justify="left" if name in names else "right")
    for line in lines:
        found.add_row(
            line.model, line.experts, line.rows, line.all2all, str(line.tokens), str(line.parts), str(line.spare_sms),
            f"{line.us:.0f}", f"{line.gain:.2f}", f"{line.beside:.0%}",
        )  # fmt: skip
    return found


def shared_table(found: list[Gap]) -> Table:
    shown = Table(title="shared experts in the gap")
    for name in ("model", "tokens", "without us", "alone us", "both us", "hidden"):
        shown.add_column(name, no_wrap=True, justify="left" if name == "model" else "right")
    for gap in found:
        times = (f"{us:.0f}" for us in (gap.without, gap.alone, gap.both))
        shown.add_row(gap.model, str(gap.tokens), *times, f"{(gap.without + gap.alone - gap.both) / gap.alone:.0%}")
    return shown


@benchmark_main
@on_device_of(own_device)
def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    add_models(parser, MODELS)
    known = sorted({variant[3] for variant in VARIANTS})
    parser.add_argument("--transports", nargs="+", choices=known, default=known)
    parser.add_argument("--tokens", nargs="+", type=positive, default=TOKENS)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parse(parser, Where.RANKS)
    for model in asked.models:
        check_dealt(config_named(model).num_experts)
    console = Console(width=130)
    named = [variant for variant in VARIANTS if variant[3] in asked.transports]
    variants = [variant for variant in named if registry.unsupported_reason("dispatchers", variant[3]) is None]
    lines, gaps = [], []
    calls = list(product(asked.models, asked.tokens, variants))
    for model, count, variant in tracked(calls, "call", asked):
        found = pipelines(model, count, variant)
        lines += found
        if dist.get_rank() == 0:
            show(console, table(found))
    for model in asked.models:
        gaps += [gap for count in (16, 128, *asked.tokens) if (gap := shared(model, count)) is not None]
    check_measured(lines)
    if asked.plot is not None:
        plot(asked.models[0], asked.tokens[-1], most_gained(lines, variants, asked.models[0]), asked.plot)
    if dist.get_rank() == 0:
        console.print(shared_table(gaps))
        if asked.csv is not None:
            write(lines, asked.csv)
    return {"lines": lines, "shared": gaps}


if __name__ == "__main__":
    main()
