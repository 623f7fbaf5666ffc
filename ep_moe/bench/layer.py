"""Whole routed layers, ours and every peer's, on the same rows, routes and weights in one run.

    torchrun --standalone --nproc-per-node 4 -m ep_moe.bench.layer [MODEL ...] [--tokens T ...] [--csv F] ...

Times are microseconds of one layer call: the median of CUDA-graph replays on the slowest rank. Lines are replayed in
turns. Routing is uniform, experts are tuned, and there are no shared experts. The context of a line has its T as
max_tokens. A graph holds several calls, and each timed replay follows one that is not timed. So the skew of the ranks
after the barrier does not count.

rows         format of rows on the wire: out / back
x peer       time of the fastest peer with the same kind of weights / time of this line: above 1 is faster than the peer
x apart      multiple of the floor that computes and moves rows in turn; x overlap: of the floor that does both at once
error        largest difference from the first line, relative to its largest magnitude; WRONG beyond ERRORS. It guards
             against timing a different computation, and proves no more
host us      time of the host for one eager call: an eager call takes at least this long; captured: the same after
             `MoELayer.capture_routed`
stages       dispatch, experts and combine from a profile of replays; rest: before rows are sent
memory       (--memory) bytes that `plan()` states, and bytes that one layer really took in a context of its own: held
             after a call, and at the peak of a call
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from ep_moe.bench import breakdown, floors
from ep_moe.bench.all2all import max_over_ranks, p2p_rate
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
    host,
    interleaved_times,
    own_device,
    parse,
    positive,
    relative_error,
    show,
    tracked,
    write,
)
from ep_moe.bench.layer_report import LayerLine, plot, stage_table, table
from ep_moe.bench.overlap import batch
from ep_moe.bench.peers import Entry, Peers, Source
from ep_moe.config import ONE_SCALE, MoEConfig, Wire
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.execution.recorded_calls import CopiedInputs
from ep_moe.experts.base import ExpertsOptions
from ep_moe.integrations.model_name import config_named
from ep_moe.layer import MoELayer
from ep_moe.parallel.collectives import all_gather_single
from ep_moe.parallel.groups import local_device
from ep_moe.parallel.rank_group import barrier
from ep_moe.quant.schemes import SCHEMES
from ep_moe.runtime.devices import on_device_of
from ep_moe.selection.explain import AUTO
from ep_moe.types import Routing

MODELS = ("qwen3-30b-a3b", "deepseek-v3")
TOKENS = (1, 16, 128, 1024, 8192)
OUT = {"flashinfer_mega_fp8": "fp8"}  # a fused kernel rounds rows itself, whatever `rows` of its variant says
INPUT_SCALE = 0.02  # input scale of calibrated schemes
REPLAYS = 15
PARTS_FROM = 1024  # least tokens per rank for parts: with fewer, reading weights dominates, and each part reads them


@dataclass(frozen=True)
class Variant:
    """A layer of ours. rows: format on the wire, out/back; parts: number of parts that a call is split into"""

    experts: str
    scheme: str
    rows: str
    all2all: str
    parts: int = 1
    exact: bool = False

    @property
    def name(self) -> str:
        name = self.experts if self.all2all == AUTO else f"{self.experts} + {self.all2all}"
        if self.parts > 1:
            name = f"{name}, {self.parts} parts"
        return f"{name}, exact" if self.exact else name

    @property
    def tuning(self) -> tuple[str, str]:
        """The key of layers that share one tuning."""
        return self.experts, self.scheme

    def exactly(self) -> Variant:
        return dataclasses.replace(self, exact=True)


VARIANTS = (
    Variant("flashinfer_cutlass", "none", "plain", "nvlink_p2p"),
    Variant("flashinfer_cutlass", "none", "plain", "flashinfer_nvlink"),
    Variant("bf16_triton", "none", "plain", "nvlink_p2p"),
    Variant("bf16_triton", "none", "plain", "nvlink_p2p", parts=2),
    Variant("bf16_triton", "none", "plain", "nvlink_p2p", parts=4),
    Variant("flashinfer_mega_bf16", "none", "plain", AUTO),
    Variant("fp8_block_triton", "fp8_block", "fp8_block", "nvlink_p2p"),
    Variant("fp8_block_triton", "fp8_block", "fp8_block", "nvlink_p2p", parts=2),
    Variant("fp8_block_triton", "fp8_block", "fp8_block", "nvlink_p2p", parts=4),
    Variant("fp8_block_triton", "fp8_block", "fp8_block", "flashinfer_nvlink"),
    Variant("flashinfer_cutlass", "fp8_block", "plain", "nvlink_p2p"),
    Variant("fp8_tensor_triton", "fp8_static", "fp8_tensor", "nvlink_p2p"),
    Variant("fp8_tensor_triton", "fp8_static", "fp8_tensor", "nvlink_p2p", parts=2),
    Variant("fp8_tensor_triton", "fp8_static", "fp8_tensor/fp8", "nvlink_p2p"),
    Variant("fp8_tensor_triton", "fp8_static", "fp8_tensor/fp8", "nvlink_p2p", parts=2),
    Variant("flashinfer_cutlass", "fp8_static", "fp8_tensor", "nvlink_p2p"),
    Variant("fp8_dynamic_triton", "fp8_dynamic", "fp8_row", "nvlink_p2p"),
    Variant("fp8_channel_triton", "fp8_channel", "fp8_row", "nvlink_p2p"),
    Variant("flashinfer_mega_fp8", "fp8_block", "plain", AUTO),
)


@dataclass(frozen=True)
class Machine:
    """Measured rates of the GPUs. p2p: bytes/s"""

    rates: Rates
    p2p: float


def measure(
    context: EPContext,
    model: str,
    config: MoEConfig,
    variants: Sequence[Variant],
    machine: Machine,
    *,
    peers: bool = True,
) -> list[LayerLine]:
    """Measure all variants and peers. Those that cannot run are left out, and rank 0 prints the reason. Collective."""
    tokens = context.max_tokens or 1
    x, routing = batch(context, config, tokens)
    variants = [variant for variant in variants if variant.parts == 1 or tokens >= PARTS_FROM]
    layers = {variant: layer for variant in variants if (layer := built(context, config, variant)) is not None}
    sources = tuned(context, tokens, layers)
    layers = {variant: layer for variant, layer in layers.items() if variant.tuning in sources}
    entries = [ours(variant, layer, x, routing) for variant, layer in layers.items()]
    joined = Peers(context, config, x, routing, sources)
    recipes = (attempt(context, "peers", joined.recipes) if peers else None) or {}
    entries += [entry for name, make in recipes.items() if (entry := attempt(context, name, make)) is not None]
    lines = timed(context, model, entries, floors_of(context, config, routing, machine))
    for line, entry in zip(lines, entries, strict=True):
        if not math.isnan(line.us):
            line.host_us = host_time(context, f"{entry.name}, {entry.scheme}, on the host", entry.call)
    for line, entry, layer in zip(lines, entries, layers.values(), strict=False):  # ours come before the peers'
        if not math.isnan(line.us):
            extras(context, line, entry.call, layer)
    for entry in entries:
        entry.close()
    joined.close()
    return compared([line for line in lines if not math.isnan(line.us)])


def built(context: EPContext, config: MoEConfig, variant: Variant) -> MoELayer | None:
    what = f"{variant.name}, {variant.scheme}, with {variant.all2all}"
    return attempt(context, what, partial(filled, context, config, variant))


def filled(context: EPContext, config: MoEConfig, variant: Variant) -> MoELayer:
    """Make a layer with random weights, equal on all ranks.

    There are three kinds of experts, so that a row at a wrong expert gives a wrong result.
    """
    scheme, parts = variant.scheme, variant.parts
    there, _, back = variant.rows.partition("/")
    layer = MoELayer(
        config,
        context,
        all2all=variant.all2all,
        pipeline=-(-(context.max_tokens or 1) // parts) if parts > 1 else None,
        experts=variant.experts,
        quantization=scheme,
        wire=Wire(dispatch=there, combine=back or "plain", input_scale=INPUT_SCALE if there in ONE_SCALE else None),
        options=ExpertsOptions(exact=variant.exact),
        dtype=torch.bfloat16,
    )
    # another seed than those of rows: rows equal to weights would give unusually large products, which saturate fp8
    generator = torch.Generator(device=context.device).manual_seed(1_000_003)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=context.device) / 50

    w13, w2 = random(config.w13_rows, config.hidden_size), random(config.hidden_size, config.intermediate_size)
    kinds = []
    for kind in range(3):
        tensors = {"w13": w13, "w2": w2 / 2**kind}
        if config.expert_bias:
            tensors |= {"w13_bias": w13[:, 0] / 2**kind, "w2_bias": w2[:, 0] / 2**kind}
        if SCHEMES[scheme].activations.calibrated:
            scales = {"w13_input_scale": INPUT_SCALE, "w2_input_scale": 0.1}
            tensors |= {name: torch.tensor(value, device=context.device) for name, value in scales.items()}
        kinds.append(SCHEMES[scheme].quantize(tensors, torch.bfloat16))
    for expert in layer.expert_weights.local_experts:
        layer.update_expert(expert, **kinds[expert % 3])
    return layer


def tuned(context: EPContext, tokens: int, layers: dict[Variant, MoELayer]) -> dict[tuple[str, str], Source]:
    """Tune each pair of kernel and scheme once. Return the results by pair; pairs that fail are left out."""
    rows = [min(context.layout.ep * tokens, ExpertsOptions().chunk_rows)]
    sources: dict[tuple[str, str], Source] = {}
    for variant, layer in layers.items():
        if variant.tuning in sources:
            layer.experts.use(sources[variant.tuning].tiles)
            continue
        tiles = attempt(context, f"{variant.experts}, {variant.scheme}, tuning", partial(layer.tune, rows))
        if tiles is not None:
            sources[variant.tuning] = Source(layer, tiles)
    return sources


def ours(variant: Variant, layer: MoELayer, x: Tensor, routing: Routing) -> Entry:
    weights = "bf16" if variant.scheme == "none" else "fp8"
    out = OUT.get(variant.experts, "bf16" if variant.rows == "plain" else "fp8")
    back = "fp8" if "/" in variant.rows else "bf16"
    call = partial(layer.forward_routed, x, routing)
    return Entry("ours", variant.name, variant.scheme, weights, f"{out} / {back}", call)


# --- measuring -----------------------------------------------------------------------------------------------------


def timed(context: EPContext, model: str, entries: Sequence[Entry], least: dict[str, floors.Floor]) -> list[LayerLine]:
    """Time the entries and return a line for each, in order. `us` is NaN for one that fails."""
    graphs: dict[int, Callable[[], Any]] = {}
    lines, tokens, reference = [], context.max_tokens or 0, None
    repeat = calls_per_graph(tokens)
    for number, entry in enumerate(entries):
        out = attempt(context, f"{entry.name}, {entry.scheme}", lambda call=entry.call: call().clone())  # type: ignore[misc]
        floor = least[entry.weights]
        line = LayerLine(
            model, context.layout.ep, tokens, entry.owner, entry.name, entry.scheme, entry.weights, entry.rows,
            torch.nan, torch.inf, floor.in_turn, floor.overlapped,
        )  # fmt: skip
        lines.append(line)
        if out is None:
            continue
        reference = out if reference is None else reference
        line.error = max_over_ranks(context, relative_error(out, reference))
        if not entry.graph:
            graphs[number] = partial(repeated, entry.call, repeat)
            continue
        graph = attempt(context, f"{entry.name}, {entry.scheme}, captured", partial(captured, entry.call, repeat))
        if graph is not None:
            graphs[number] = graph.replay
    found = interleaved_times(list(graphs.values()), repeat, REPLAYS, partial(barrier, context.device))
    for number, us in zip(graphs, found, strict=True):
        lines[number].us = max_over_ranks(context, us)
    return lines


def repeated(call: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        call()


def calls_per_graph(tokens: int) -> int:
    return 10 if tokens <= 128 else 4 if tokens <= 1024 else 2


def extras(context: EPContext, line: LayerLine, call: Callable[[], Any], layer: MoELayer) -> None:
    """Measure what is only measured for our own lines: stages, and the host time of captured calls."""
    what = f"{line.name}, {line.scheme}"
    in_parts = line.name.endswith(" parts")  # their stages overlap and cannot be separated
    split = None if in_parts else attempt(context, f"{what}, stages", partial(breakdown.measure_stages, context, call))
    if split is not None:
        line.dispatch_us, line.experts_us = split.dispatch, split.experts
        line.combine_us, line.rest_us = split.combine, split.rest
    if attempt(context, f"{what}, by MoELayer.capture_routed", partial(recorded, layer, line.tokens)):
        line.captured_host_us = host_time(context, f"{what}, on the host when captured", call)
        layer._graphs.drop(CopiedInputs)


def recorded(layer: MoELayer, tokens: int) -> bool:
    layer.capture_routed([tokens])
    return True


def host_time(context: EPContext, what: str, call: Callable[[], Any]) -> float | None:
    """Return the host time of a call on the slowest rank.

    So many calls follow each other that reading the clock hardly counts and the GPU's queue has room for all.
    """
    calls = 20 if (context.max_tokens or 1) <= 128 else 5
    own = attempt(context, what, partial(host, call, calls=calls, before=partial(barrier, context.device)))
    return None if own is None else max_over_ranks(context, own)


def floors_of(context: EPContext, config: MoEConfig, routing: Routing, machine: Machine) -> dict[str, floors.Floor]:
    load = load_of(context, config, routing.ids)
    kinds = {name: kind.at(machine.rates, machine.p2p) for name, kind in floors.KINDS.items()}
    return {name: floors.counted_floor(config, load, kind) for name, kind in kinds.items()}


def load_of(context: EPContext, config: MoEConfig, ids: Tensor) -> floors.Load:
    """Count the load of all ranks. ids: [T, K] of this rank; all ranks have the same T. Collective."""
    ids = ids.long().contiguous()
    everyone = ids.new_empty(context.layout.ep * len(ids), ids.shape[1])
    all_gather_single(everyone, ids, group=context.rank_groups["ep"].group)
    return floors.load_of(everyone.view(context.layout.ep, *ids.shape), config.num_experts)


def compared(lines: list[LayerLine]) -> list[LayerLine]:
    """Set `x_peer` of all lines, from the fastest correct peer with the same kind of weights. Return the lines."""
    for line in lines:
        peers = [p.us for p in lines if (p.owner, p.weights, p.wrong) == ("peer", line.weights, False)]
        line.x_peer = min(peers) / line.us if peers else None
    return lines


def machine_of() -> Machine:
    with EPContext.from_torchrun() as context:
        rates, p2p = measure_rates(context.device), p2p_rate(context)
    free_device_memory()
    return Machine(rates, p2p)


def measure_layer_memory(
    config: MoEConfig, tokens: int, variants: Sequence[Variant], lines: Sequence[LayerLine]
) -> None:
    """Measure the memory of our own lines, each layer alone in a context, and write it into the lines."""
    for variant in variants:
        free_device_memory()
        with EPContext.from_torchrun(max_tokens=tokens) as context, torch.no_grad():
            use = breakdown.measure_memory(context, config, partial(built, context, config, variant))
        for line in lines:
            if use is not None and (line.owner, line.name, line.scheme) == ("ours", variant.name, variant.scheme):
                line.plan_bytes, line.held_bytes, line.peak_bytes = dataclasses.astuple(use)


@benchmark_main
@on_device_of(own_device)
def main() -> list[LayerLine]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser, MODELS)
    parser.add_argument("--tokens", nargs="+", type=positive, default=TOKENS)
    kernels = sorted({variant.experts for variant in VARIANTS})
    parser.add_argument("--experts", nargs="+", choices=kernels, default=kernels)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--exact", action="store_true", help="each layer with ExpertsOptions(exact=True) too")
    parser.add_argument("--memory", nargs="*", type=positive, default=(), metavar="T", help="tokens to weigh layers at")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parse(parser, Where.RANKS)
    for model in asked.models:
        check_dealt(config_named(model).num_experts)
    if missing := sorted({*asked.memory} - {*asked.tokens}):
        raise ConfigError(f"--memory {missing[0]} is not among --tokens {asked.tokens}; add it there")
    machine, lines, console = machine_of(), list[LayerLine](), Console(width=150)
    variants = [variant for variant in VARIANTS if variant.experts in asked.experts]
    if asked.exact:
        variants += [variant.exactly() for variant in variants if variant.parts == 1]
    first = dist.get_rank() == 0
    if first:
        console.print(
            f"{torch.cuda.get_device_name(local_device())}, torch {torch.__version__}: "
            f"copy {machine.rates.copy / 1e12:.2f} TB/s, "
            f"bf16 {machine.rates.bf16 / 1e12:.0f}, fp8 {machine.rates.fp8 / 1e12:.0f} TFLOP/s, "
            f"peer to peer {machine.p2p / 1e9:.0f} GB/s"
        )
    for model, tokens in tracked(list(product(asked.models, asked.tokens)), "call", asked):
        config = dataclasses.replace(config_named(model), shared_intermediate_size=0, shared_gate=False)
        with EPContext.from_torchrun(max_tokens=tokens) as context, torch.no_grad():
            found = measure(context, model, config, variants, machine, peers=not asked.no_peers)
        free_device_memory()
        if tokens in asked.memory:
            measure_layer_memory(config, tokens, variants, found)
            free_device_memory()
        lines += found
        if first and found:
            show(console, table(found), stage_table(found))
            if asked.csv is not None:  # after each call, so that a run that ends early leaves its lines
                write(lines, asked.csv)
    check_measured(lines)
    if first and asked.plot is not None:
        plot(lines, asked.plot)
    return lines


if __name__ == "__main__":
    main()
