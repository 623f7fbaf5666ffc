"""`ep-moe tune`: finds the fastest transport and kernel of a layer for each number of tokens, on the current ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe import registry
from ep_moe.all2all.base import Dispatcher, DispatchShape
from ep_moe.bench.harness import eager, replayed
from ep_moe.checks import did_you_mean
from ep_moe.cli.output import log_records, note
from ep_moe.cli.rank_times import attempt, barrier, by_the_clock, slowest
from ep_moe.cli.run import LAPTOP_RANKS
from ep_moe.config import ONE_SCALE, PLAIN_WIRE, MoEConfig, Wire
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.execution.exchange import Exchange
from ep_moe.experts.base import Experts
from ep_moe.experts.fused.base import INSIDE
from ep_moe.integrations.model_name import layer_config
from ep_moe.layer import MoELayer
from ep_moe.parallel.groups import TorchrunEnv, init_from_torchrun, local_device
from ep_moe.parallel.local_launch import run_local_ranks
from ep_moe.quant.schemes import PLAIN, SCHEMES, scheme_of
from ep_moe.runtime.devices import on_device_of
from ep_moe.runtime.progress import Progress
from ep_moe.selection import explain
from ep_moe.selection.tuned import Measured, Tuned, fastest_per_bucket, layer_facts, machine_facts, versions
from ep_moe.types import Routing, dtype_name
from ep_moe.weights.initial import random_expert

CUTS = (2, 4)  # numbers of parts of a call that are tried, if the transport has fixed buffers
CUT_FROM = 512  # least tokens of a call in parts: with fewer, launches and waiting of the parts outweigh any gain
MOST_TOKENS = 1 << 22  # most tokens of one call; their rows alone are tens of GiB
ROOM = 8 << 30  # most bytes of one transport's buffers
INPUT_SCALE = 0.02  # for rows with one scale; the measured rows do not saturate, and no time depends on it
CLOSE = 2.0  # multiple of the fastest trial's time; slower candidates are not measured again
DEADLINE_S = 300.0

_DTYPES = {dtype_name(known): known for known in (torch.bfloat16, torch.float16, torch.float32)}

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """The options of `ep-moe tune`.

    model: as `ep_moe.integrations.model_name` takes it
    tokens: numbers of tokens that every rank sends, one bucket each
    dtype: default bfloat16 on GPUs, float32 on the CPU
    cache: a folder for the kernels' own tuning
    quiet: show no progress
    log_level: least level of log records that forked ranks write to stderr; None leaves logging as it is
    """

    model: str
    tokens: tuple[int, ...]
    quantization: str = PLAIN.name
    wire: str = PLAIN_WIRE.dispatch
    dtype: str | None = None
    cache: str | None = None
    quiet: bool = False
    log_level: str | None = None

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1 or max(self.tokens) > MOST_TOKENS:
            raise ConfigError(
                f"--tokens must be numbers of at least 1 and at most {MOST_TOKENS}, got {list(self.tokens)}"
            )
        if self.quantization not in SCHEMES:
            hint = did_you_mean(self.quantization, SCHEMES)
            raise ConfigError(f"--quantization must be one of {', '.join(SCHEMES)}, got {self.quantization!r}{hint}")
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        self.dispatch_wire()

    def dispatch_wire(self) -> Wire:
        return Wire(dispatch=self.wire, input_scale=INPUT_SCALE if self.wire in ONE_SCALE else None)


def run(options: TuneOptions, say: Say) -> Tuned | None:
    """Measure on torchrun's ranks if there are any, else on forked ranks. Return None on ranks other than 0.

    say: called with each result on rank 0; with forked ranks, it is called at the end
    """
    if TorchrunEnv.present():
        device = local_device()
        init_from_torchrun(device, deadline_s=DEADLINE_S)
        try:
            return run_on_rank(options, device, say)
        finally:
            dist.destroy_process_group()
    arguments = {"options": options, "device": torch.device("cpu")}
    if not options.quiet:
        note(f"tune: starting {LAPTOP_RANKS} ranks on this machine")
    lines, found = run_local_ranks("ep_moe.cli.tune:lines_on_rank", LAPTOP_RANKS, arguments, deadline_s=3 * DEADLINE_S)[
        0
    ]
    for line in lines:
        say(line)
    tuned: Tuned = found
    return tuned


def lines_on_rank(options: TuneOptions, device: torch.device) -> tuple[list[str], Tuned | None]:
    """Return the lines that `run_on_rank` says, and its result."""
    lines: list[str] = []
    with nullcontext() if options.log_level is None else log_records(options.log_level):
        return lines, run_on_rank(options, device, lines.append)


def run_on_rank(options: TuneOptions, device: torch.device, say: Say) -> Tuned | None:
    """Measure on one rank, within an initialized process group. Return None on ranks other than 0."""
    name = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    with EPContext.from_groups(device=device, deadline_s=DEADLINE_S, max_tokens=max(options.tokens)) as context:
        tuned = tune(
            context,
            layer_config(options.model, context),
            options.tokens,
            quantization=options.quantization,
            wire=options.dispatch_wire(),
            dtype=_DTYPES[name],
            cache=options.cache,
            say=say if context.layout.rank == 0 else _quiet,
            progress=not options.quiet,
        )
        return tuned if context.layout.rank == 0 else None


def _quiet(line: str) -> None:
    return


@torch.no_grad()
@on_device_of(lambda context, *_, **__: context.device)
def tune(
    context: EPContext,
    config: MoEConfig,
    tokens: Sequence[int],
    *,
    quantization: str = PLAIN.name,
    wire: Wire = PLAIN_WIRE,
    dtype: torch.dtype,
    cache: str | Path | None = None,
    say: Say = _quiet,
    progress: bool = False,
) -> Tuned:
    """Time dispatch, experts and combine of every pair that can run, for each number of tokens. Called by all ranks.

    Weights are random, routing is uniform, and every rank passes as many tokens as the bucket has. Each kernel first
    runs its own tuning. Fused kernels are not timed, because they are used only if they are named.

    On GPUs, times are those of CUDA-graph replays in turns, or of eager calls if a pair cannot be captured. On the CPU,
    they are wall-clock times. All ranks make the same choice, from the medians of the slowest rank. A candidate that
    fails is reported and left out.

    context: a context for this call alone, with max_tokens
    cache: a folder for the kernels' own tuning
    progress: show progress on rank 0

    Raises ConfigError, on all ranks, if no pair can run.
    """
    config = dataclasses.replace(config, shared_intermediate_size=0, shared_gate=False)
    counts = sorted(set(tokens))
    facts = layer_facts(config, quantization, wire, dtype)
    pairs = _pairs(context, config, facts | {"tokens": counts}, scheme=quantization, wire=wire, dtype=dtype)
    layers: dict[str, MoELayer] = {}
    kernels = list(dict.fromkeys(kernel for _, kernel in pairs))
    lines: list[Measured] = []
    shown = progress and context.layout.rank == 0
    with Progress(len(kernels) + len(counts), "tuning", "step", shown=shown) as bar:  # kernels, then buckets
        for kernel in kernels:
            make = partial(_layer, context, config, pairs, kernel, quantization, wire, dtype)
            layer, problem = attempt(context, f"making {kernel}", make)
            if problem is None:
                _, problem = attempt(
                    context, f"tuning {kernel}", partial(layer.tune, _rows(context, layer, counts), cache=cache)
                )
            if problem is None:
                layers[kernel] = layer
            else:
                say(f"{kernel} is left out: {problem}")
            bar.update()
        for count in counts:
            with context.token_limit(count):
                lines += _measure(context, layers, pairs, say)
            bar.update()
    layouts = {kernel: registry.load("experts", kernel).weight_layout for kernel in layers}
    layout = context.layout
    return Tuned(
        machine=machine_facts(context.device, layout.ep, layout.etp, layout.ep_node_count),
        layer=facts,
        versions=versions(),
        buckets=fastest_per_bucket(lines, layouts),
        measured=tuple(lines),
    )


def _pairs(
    context: EPContext, config: MoEConfig, facts: dict[str, Any], *, scheme: str, wire: Wire, dtype: torch.dtype
) -> list[tuple[str, str]]:
    """Return (transport, kernel) of all pairs that can run, in the order of `explain`. All ranks must have the same."""
    table = explain.explain(
        config,
        context.layout,
        context.device,
        dtype,
        scheme=scheme_of(scheme),
        max_tokens=context._max_dispatch_tokens,
        wire=wire,
    )
    pairs = [(row.all2all, row.experts) for row in table if row.status != "refused" and row.all2all != INSIDE]
    problem = None
    if context.max_tokens is None:
        problem = ConfigError(
            "tune needs EPContext.from_torchrun(max_tokens=...), the largest number of tokens to measure"
        )
    elif not pairs:
        problem = ConfigError("tune: no pair of transport and kernel can run; ep-moe explain says why")
    context.consensus.require_equal("ep-moe tune", facts | {"pairs": pairs}, problem)
    return pairs


def _layer(
    context: EPContext,
    config: MoEConfig,
    pairs: Sequence[tuple[str, str]],
    kernel: str,
    quantization: str,
    wire: Wire,
    dtype: torch.dtype,
) -> MoELayer:
    """Make a layer with one random expert in all slots. Times do not depend on the values of weights."""
    layer = MoELayer(
        config,
        context,
        all2all=next(transport for transport, own in pairs if own == kernel),
        experts=kernel,
        quantization=quantization,
        wire=wire,
        name=f"tune {kernel}",
        dtype=dtype,
    )
    tensors = random_expert(config, scheme_of(quantization), 0, dtype, context.device)
    for expert in layer.expert_weights.local_experts:
        layer.update_expert(expert, **tensors)
    return layer


def _rows(context: EPContext, layer: MoELayer, counts: Sequence[int]) -> list[int]:
    """Return the numbers of rows that a kernel may receive, whole calls and parts of calls."""
    sent = {context.layout.max_dispatch_tokens(count) for count in counts}
    sent |= {size for count in sent for size in _part_sizes(count)}
    return sorted({min(context.layout.ep * count, layer.experts.options.chunk_rows) for count in sent})


def _part_sizes(tokens: int) -> list[int]:
    return [-(-tokens // cut) for cut in CUTS] if tokens >= CUT_FROM else []


@dataclass(frozen=True)
class _Candidate:
    """A transport and kernel to measure. line: its description, still without a time"""

    line: Measured
    call: Callable[[], Any]
    captured: bool


def _measure(
    context: EPContext, layers: dict[str, MoELayer], pairs: Sequence[tuple[str, str]], say: Say
) -> list[Measured]:
    """Measure all candidates at the current token limit: one trial each, then those close to the fastest in turns."""
    tried: list[tuple[_Candidate, float]] = []
    for candidate in _candidates(context, layers, pairs, say):
        times, problem = attempt(context, str(candidate.line), partial(_times, context, [candidate], trial=True))
        if problem is None:
            tried.append((candidate, times[0]))
        else:
            say(f"{candidate.line.tokens} tokens, {candidate.line}: left out, {problem}")
    best = min((us for _, us in tried), default=0.0)
    found = [(candidate, us) for candidate, us in tried if us > CLOSE * best]
    for captured in (True, False):
        close = [one for one, us in tried if us <= CLOSE * best and one.captured is captured]
        found += zip(close, _times(context, close), strict=True)
    lines = [dataclasses.replace(candidate.line, us=us) for candidate, us in found]
    lines.sort(key=lambda line: line.us)
    for line in lines:
        say(f"{line.tokens} tokens, {line}: {line.us:.1f} us")
    return lines


def _candidates(
    context: EPContext, layers: dict[str, MoELayer], pairs: Sequence[tuple[str, str]], say: Say
) -> list[_Candidate]:
    tokens = context._current_limit
    assert tokens is not None
    found = []
    for transport, kernel in pairs:
        if kernel not in layers:
            continue
        layer, kind = layers[kernel], registry.load("dispatchers", transport)
        x, routing = _batch(layer, tokens)
        can = layer.experts.capabilities
        captured = kind.capabilities.cuda_graph and can.cuda_graph
        # a kernel for which the host waits cannot overlap with the transfer of another part
        parts = _part_sizes(tokens) if kind.capabilities.static and not can.host_sync else []
        for pipeline in (None, *parts):
            line = Measured(tokens=tokens, experts=kernel, all2all=transport, us=0.0, pipeline=pipeline)
            dispatch_shape = dataclasses.replace(
                layer._dispatch_shape(), max_tokens=pipeline or context._max_dispatch_tokens
            )
            make = partial(_transport, context, transport, dispatch_shape, pipeline)
            dispatcher, problem = attempt(context, f"making {transport}", make)
            if problem is not None:
                say(f"{tokens} tokens, {line}: left out, {problem}")
            elif dispatcher is None:
                say(f"{tokens} tokens, {line}: left out, its buffers are larger than {ROOM >> 30} GiB")
            else:
                found.append(_Candidate(line, partial(_travel, layer, dispatcher, x, routing), captured))
    return found


def _transport(context: EPContext, name: str, dispatch_shape: DispatchShape, pipeline: int | None) -> Dispatcher | None:
    """Return the context's transport for a dispatch shape; None if its buffers are too large."""
    kind = registry.load("dispatchers", name)
    calls = 1 if pipeline is None else kind.calls_in_parts(dispatch_shape)
    return None if kind.buffer_bytes(dispatch_shape) * calls > ROOM else context._dispatcher(name, dispatch_shape)


def _travel(layer: MoELayer, dispatcher: Dispatcher, x: Tensor, routing: Routing) -> Tensor:
    """Run dispatch, experts and combine, the part of a layer's call that depends on the choice."""
    assert isinstance(layer.experts, Experts)
    out, _ = Exchange(layer.context, dispatcher, layer.experts, x, layer.placement(routing)).run()
    return out


def _batch(layer: MoELayer, tokens: int) -> tuple[Tensor, Routing]:
    """Return random rows and routes: the same for all candidates, different on each rank."""
    config, device = layer.config, layer.device
    generator = torch.Generator(device=device).manual_seed(layer.context.layout.rank)
    scores = torch.rand(tokens, config.num_experts, generator=generator, dtype=torch.float32, device=device)
    ids = scores.topk(config.top_k).indices
    x = torch.randn(tokens, config.hidden_size, generator=generator, dtype=torch.float32, device=device)
    weights = torch.full(ids.shape, 1 / config.top_k, dtype=torch.float32, device=device)
    return x.to(layer.dtype), Routing(ids, weights)


def _times(context: EPContext, candidates: Sequence[_Candidate], *, trial: bool = False) -> list[float]:
    """Return the median time of each candidate on the slowest rank, in microseconds. Equal on all ranks.

    Either all candidates can be captured, or none.
    """
    if not candidates:
        return []
    calls, tokens = [one.call for one in candidates], candidates[0].line.tokens
    if context.device.type != "cuda":
        return slowest(context, by_the_clock(calls, 1 if trial else 7, partial(barrier, context)))
    # several calls in a row, because one is short; late starts of ranks fall into an extra call that is not timed
    sizes = (2, 1) if trial else (10 if tokens <= 128 else 4 if tokens <= 1024 else 2, 15)
    measure = replayed if candidates[0].captured else eager
    return slowest(context, measure(calls, repeat=sizes[0], replays=sizes[1], before=partial(barrier, context)))
