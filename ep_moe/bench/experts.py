"""Local experts alone, on one GPU with the share of one rank of four: every kernel and scheme, compared with
FlashInfer's own call and with kernels of other libraries that are installed.

    python -m ep_moe.bench.experts [MODEL ...] [--schemes NAME ...] [--rows N ...] [--no-peers] [--csv FILE]

Times are medians of CUDA-graph replays in microseconds (of eager calls for torch's `reference`, which cannot be
captured). Two ratios are of the same run. One is to the floor: the larger of weight bytes touched at the measured copy
rate and operations at the measured matmul rate. The other is to FlashInfer's public `cutlass_fused_moe`, if it has the
scheme: tuned by its own autotuner on the same rows, and with the tiles that our tuner found (the raw call, which shows
what the adapter adds).

peer: Triton's fused_moe of vLLM and SGLang, SonicMoE's forward (eager, its default tiles, routes listed beforehand) and
DeepGEMM's two grouped products (nothing between them) on the same weights and routes; for 4-bit weights vLLM's
Marlin, and OpenAI's `triton_kernels` as vLLM calls them (GPT-OSS's experts too).
error: a peer's largest difference from `reference`, relative to its largest magnitude; WRONG beyond
`layer_report.ERRORS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ep_moe import registry
from ep_moe.bench import floors, libraries, libraries_4bit
from ep_moe.bench.floors import Rates
from ep_moe.bench.harness import (
    Where,
    add_models,
    benchmark_main,
    check_measured,
    eager,
    parse,
    positive,
    relative_error,
    replayed,
    show,
    write,
)
from ep_moe.bench.layer_report import ERRORS
from ep_moe.config import MoEConfig
from ep_moe.errors import ConfigError
from ep_moe.experts.base import Experts, ExpertsOptions
from ep_moe.experts.flashinfer import cutlass_op
from ep_moe.experts.flashinfer.call_scales import Inputs, TensorScales, round_rows
from ep_moe.experts.flashinfer.cutlass_op import tactic_for
from ep_moe.integrations.model_name import config_named
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.quant.schemes import SCHEMES
from ep_moe.runtime.progress import Progress
from ep_moe.runtime.workspace import Workspaces, carve
from ep_moe.types import LocalIds, Received, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights

RANKS = 4
SONIC = "SonicMoE"
PEER_SCHEMES = ("none", "fp8_block", *libraries_4bit.MARLIN_SCHEMES)  # schemes for which other libraries are called
Say = Callable[[str], Any]
MODELS = ("qwen3-30b-a3b", "deepseek-v3")
ROWS = (64, 512, 4096, 16384)
VARIANTS = (
    ("reference", "none"),  # torch: sort, gather, grouped_mm; it synchronizes with the host, so it is timed eagerly
    ("flashinfer_cutlass", "none"),
    ("bf16_triton", "none"),
    ("flashinfer_cutlass", "fp8_static"),
    ("fp8_tensor_triton", "fp8_static"),
    ("flashinfer_cutlass", "fp8_dynamic"),
    ("fp8_dynamic_triton", "fp8_dynamic"),
    ("fp8_channel_triton", "fp8_channel"),
    ("flashinfer_cutlass", "fp8_block"),
    ("fp8_block_triton", "fp8_block"),
    ("flashinfer_cutlass", "mxfp4"),
    ("flashinfer_cutlass", "mxfp4_fp8"),
    ("flashinfer_cutlass", "int4_fp8"),
    ("w4a16_triton", "mxfp4"),
    ("w4a16_triton", "mxint4"),
    ("w4a16_triton", "int4"),
    ("w4a16_triton", "nvfp4a16"),
    ("w4a8_triton", "mxfp4_fp8"),
    ("w4a8_triton", "int4_fp8"),
    ("w4a8_triton", "mxint4_fp8"),
)


@dataclass
class ExpertsLine:
    model: str
    rows: int
    kernel: str
    scheme: str
    layout: str
    us: float
    floor_us: float
    untuned_us: float | None = None
    peer_us: float | None = None
    raw_us: float | None = None
    error: float | None = None  # for a peer that returns a result

    @property
    def wrong(self) -> bool:
        return self.error is not None and not self.error <= ERRORS["fp8" if floors.WEIGHTS[self.scheme][1] else "bf16"]


def measure_rates(device: torch.device) -> Rates:
    source = torch.ones(1 << 28, device=device)  # 1 GiB
    target = torch.empty_like(source)
    (copy_us,) = replayed([lambda: torch.neg(source, out=target)], repeat=2)
    size = 8192
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    a16, b16 = a.bfloat16(), b.bfloat16()
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
    products = [lambda: a16 @ b16, lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16)]
    bf16_us, fp8_us = replayed(products, repeat=2)
    operations = 2e6 * size**3
    return Rates(2e6 * source.nbytes / copy_us, operations / bf16_us, operations / fp8_us)


def unsupported_reason(kernel: str, scheme: str, config: MoEConfig) -> str | None:
    """Return why the kernel cannot run here, or not with these experts; None if it can."""
    if (why := registry.unsupported_reason("experts", kernel)) is not None:
        return why
    kind: type[Experts] = registry.load("experts", kernel)
    found = SCHEMES[scheme]
    return found.unsupported_reason(config, 1) or kind.unsupported_reason(config, torch.bfloat16, 1, found)


def make(kernel: str, scheme: str, config: MoEConfig, device: torch.device, chunk_rows: int) -> Experts:
    kind: type[Experts] = registry.load("experts", kernel)
    weights = ExpertWeights(
        config,
        ExpertMap.linear(config.num_experts, RANKS),
        device=device,
        dtype=torch.bfloat16,
        scheme=SCHEMES[scheme],
        weight_layout=kind.weight_layout,
        trainable=False,
    )
    generator = torch.Generator(device=device).manual_seed(0)
    tensors = {
        "w13": torch.randn(config.w13_rows, config.hidden_size, generator=generator, device=device) / 50,
        "w2": torch.randn(config.hidden_size, config.intermediate_size, generator=generator, device=device) / 50,
        "w13_input_scale": torch.tensor(0.02, device=device),
        "w2_input_scale": torch.tensor(0.1, device=device),
    }
    if config.expert_bias:
        tensors |= {"w13_bias": tensors["w13"][:, 0], "w2_bias": tensors["w2"][:, 0]}
    if scheme != "fp8_static":
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("scale")}
    # three kinds of experts, so that a row at a wrong expert gives a wrong result
    kinds = [tensors | {"w2": tensors["w2"] / 2**kind} for kind in range(3)]
    stored = [SCHEMES[scheme].quantize(numbers, torch.bfloat16) for numbers in kinds]
    for expert in weights.local_experts:
        weights.update_expert(expert, stored[expert % 3])
    return kind(config, weights, Workspaces(device), ExpertsOptions(chunk_rows=chunk_rows))


def received_rows(config: MoEConfig, slots: int, rows: int, device: torch.device) -> Received:
    """Return rows that a uniform router sends to this rank. Each has at least one local expert."""
    generator = torch.Generator(device=device).manual_seed(1)
    chosen: list[Tensor] = []
    while sum(map(len, chosen)) < rows:
        ids = torch.rand(4 * rows, config.num_experts, generator=generator, device=device).topk(config.top_k).indices
        ids = torch.where(ids < slots, ids, -1)
        chosen.append(ids[(ids >= 0).any(1)])
    ids = torch.cat(chosen)[:rows].int().contiguous()
    return Received(
        x=torch.randn(rows, config.hidden_size, generator=generator, device=device).bfloat16(),
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        handle=None,
        local_ids=LocalIds(ids),
        weights=torch.full(ids.shape, 1 / config.top_k, device=device),
    )


def contiguous_rows(received: Received, slots: int) -> Received:
    """Return the same pairs of row and expert as a CONTIGUOUS transport delivers them."""
    assert received.local_ids is not None
    ids, top_k = received.local_ids.flatten(), received.local_ids.shape[1]
    order = ids.argsort(stable=True)[int((ids < 0).sum()) :]
    counts = torch.bincount(ids[order].long(), minlength=slots)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    return Received(
        x=received.x[order // top_k],
        layout=RowLayout.CONTIGUOUS,
        weighting=Weighting.COMBINE,
        handle=None,
        expert_offsets=offsets,
    )


def floor_us(config: MoEConfig, scheme: str, received: Received, rates: Rates) -> float:
    assert received.local_ids is not None
    valid = received.local_ids[received.local_ids >= 0]
    flops = rates.fp8 if floors.WEIGHTS[scheme][1] else rates.bf16
    return max(floors.expert_times(config, scheme, len(valid.unique()), len(valid), rates.copy, flops))


def public_calls(experts: Any, received: Received, tiles: list[int]) -> dict[str, Callable[[], Any]]:
    """Return calls of FlashInfer's own function on the same weights and scales, as its authors would call it.

    It has fused finalize and a workspace of its own. "raw_us" has the given tiles. "peer_us" is autotuned, for schemes
    whose tuning ends within minutes. If it needs fp8 rows, they are rounded within the call, as ours are. It gets the
    scales of dynamic schemes as arguments, but ours computes them in the call.
    """
    if experts.name != "flashinfer_cutlass":
        return {}
    import flashinfer
    from flashinfer.fused_moe import cutlass_fused_moe

    weights, runner = experts.weights, experts.runner
    out = torch.empty_like(received.x)
    experts(received, out)  # leaves the call's scales in the workspace
    stored = {name: weights.get_parameter(name) for name in cutlass_op.scale_names(runner.scheme)}
    shape = (len(out), out.shape[1], experts.config.intermediate_size, weights.num_slots, experts.config.top_k)
    scratch = carve(experts.workspace().clone(), cutlass_op.operator_scratch_shapes(runner, *shape, weighted=True))
    scales = cutlass_op.quant_scales(runner.scheme, stored, scratch)
    rounded = scratch["rows"] if runner.scheme in cutlass_op.PRE_ROUNDED else received.x
    unread = TensorScales(*(scale.clone() for scale in scales)) if rounded is not received.x else None
    flags = {name: flag for name, flag in runner.flags.items() if name != "use_fused_finalize"}

    def call(profile_ids: list[int] | None = None) -> None:
        if unread is not None:
            given = Inputs(scales[3].expand(1), scales[1], dynamic=False)
            round_rows(received.x, scales[0], scales[2], given, rounded, unread)
        cutlass_fused_moe(
            rounded,
            received.local_ids,
            received.weights,
            weights.get_parameter("w13"),
            weights.get_parameter("w2"),
            torch.bfloat16,
            scales,
            output=out,
            tune_max_num_tokens=len(out),
            profile_ids=profile_ids,
            **flags,
        )

    raw: dict[str, Callable[[], Any]] = {"raw_us": lambda: call(tiles)}
    if runner.scheme not in ("none", "fp8_block"):
        return raw
    with flashinfer.autotune(True):
        call()
    return raw | {"peer_us": call}


def global_ids(received: Received, slots: int, experts: int) -> Tensor:
    """Return global ids int32 [N, K] for a rank that has the first experts.

    Routes to other ranks get ids of those ranks' experts in turn, because kernels choose tiles by the number of all
    experts.
    """
    assert received.local_ids is not None
    places = torch.arange(received.local_ids.numel(), device=received.x.device).view_as(received.local_ids)
    others = slots + places % max(experts - slots, 1)
    return torch.where(received.local_ids < 0, others, received.local_ids).int()


def peers_of(
    scheme: str, rank_experts: libraries.RankExperts, received: Received
) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Return by name a function that makes the call of each other library.

    received: rows of a rank that has the first experts of `rank_experts`
    """
    ids, x, weights = global_ids(received, len(rank_experts.w2), len(rank_experts.slots)), received.x, received.weights
    assert weights is not None

    def fused(library: str) -> Callable[[], Any]:
        return partial(libraries.FUSED_MOE[library](rank_experts), x, ids, weights)

    made: dict[str, Callable[[], Callable[[], Any]]] = {}
    if scheme in ("none", "fp8_block"):
        made |= {f"{library} fused_moe": partial(fused, library) for library in libraries.FUSED_MOE}
    if scheme == "none":
        made[SONIC] = lambda: partial(libraries.sonic(rank_experts, ids, weights), x)
    if scheme == "fp8_block":
        made["DeepGEMM, two products alone"] = lambda: libraries.deepgemm_products(rank_experts, ids)
    if scheme in libraries_4bit.MARLIN_SCHEMES and rank_experts.w13_bias is None:
        made["vLLM Marlin"] = lambda: partial(libraries_4bit.marlin(rank_experts, scheme), x, ids, weights)
    if scheme == "mxfp4":
        made["triton_kernels"] = lambda: partial(libraries_4bit.triton_kernels(rank_experts), x, ids, weights)
    return made


def peer_lines(
    model: str, config: MoEConfig, scheme: str, rows: Sequence[int], rates: Rates, device: torch.device, say: Say
) -> list[ExpertsLine]:
    """Measure other libraries on canonical weights. One that fails is left out from then on, with its reason."""
    try:
        if scheme != "mxfp4" or not libraries_4bit.is_gpt_oss(config):
            libraries.require_plain_swiglu(config, f"other libraries, {scheme}")
    except ConfigError as error:
        say(f"left out: {error}")
        return []
    reference = make("reference", scheme, config, device, max(rows))
    weights = reference.weights
    slots = torch.arange(config.num_experts, dtype=torch.int32, device=device)
    slots[weights.num_slots :] = -1
    stored = {name: weights.get_parameter(name).detach() for name in weights.names}
    rank_experts, lines, failed = libraries.RankExperts(slots=slots, **stored), list[ExpertsLine](), set[str]()
    for count in rows:
        received = received_rows(config, weights.num_slots, count, device)
        least, wanted = floor_us(config, scheme, received, rates), None
        try:
            wanted = reference(received)
        except torch.OutOfMemoryError as error:  # the reference dequantizes all matrices
            say(f"not compared: other libraries, {scheme}, {count} rows: {error}")
        for name, begin in peers_of(scheme, rank_experts, received).items():
            if name in failed:
                continue
            try:
                call = begin()
                out = call()
                apart = None if out is None or wanted is None else relative_error(out, wanted)
                (us,) = (eager if name == SONIC else replayed)([call])
            except Exception as error:  # any error of a library: the others must still be measured
                failed.add(name)
                say(f"left out: {name}, {scheme}: {type(error).__name__}: {error}")
                continue
            lines.append(ExpertsLine(model, count, f"peer: {name}", scheme, "rank_major", us, least, error=apart))
    return lines


def run(
    models: Sequence[str],
    schemes: Sequence[str],
    rows: tuple[int, ...] = ROWS,
    *,
    peers: bool = True,
    bar: Progress | None = None,
) -> list[ExpertsLine]:
    """Measure all kernels and libraries. bar: progress by kernels"""
    device = torch.device("cuda", torch.cuda.current_device())
    console = Console(width=160)
    rates = measure_rates(device)
    console.print(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}: copy {rates.copy / 1e12:.2f} TB/s, "
        f"bf16 {rates.bf16 / 1e12:.0f}, fp8 {rates.fp8 / 1e12:.0f} TFLOP/s"
    )
    lines: list[ExpertsLine] = []
    for model in models:
        config = config_named(model)
        for kernel, scheme in VARIANTS:
            if bar is not None:
                bar.update()
            if scheme not in schemes:
                continue
            if (why := unsupported_reason(kernel, scheme, config)) is not None:
                console.print(f"{kernel}, {scheme}: {why}")
                continue
            experts = make(kernel, scheme, config, device, max(rows))
            untuned = {count: _untuned(experts, config, count, device) for count in rows}
            tiles = experts.tune(rows, None)
            experts.use(tiles)
            for count in rows:
                received = received_rows(config, experts.weights.num_slots, count, device)
                least = floor_us(config, scheme, received, rates)
                theirs = public_calls(experts, received, tactic_for(tiles, count))
                us, *others = timed(experts)([_own_call(experts, received), *theirs.values()])
                found = dict(zip(theirs, others, strict=True))
                lines.append(
                    ExpertsLine(model, count, kernel, scheme, "rank_major", us, least, untuned[count], **found)
                )
                if scheme == "fp8_block":
                    grouped = contiguous_rows(received, experts.weights.num_slots)
                    (us,) = replayed([_own_call(experts, grouped)])
                    lines.append(ExpertsLine(model, count, kernel, scheme, "contiguous", us, least))
            del experts
            torch.cuda.empty_cache()
        for scheme in [scheme for scheme in PEER_SCHEMES if peers and scheme in schemes]:
            lines += peer_lines(model, config, scheme, rows, rates, device, partial(console.print, markup=False))
            torch.cuda.empty_cache()
        show(console, table([line for line in lines if line.model == model], model))
    return lines


def timed(experts: Experts) -> Callable[..., list[float]]:
    return replayed if experts.capabilities.cuda_graph else eager


def _own_call(experts: Experts, received: Received) -> Callable[[], Any]:
    out = torch.empty_like(received.x)
    return lambda: experts(received, out)


def _untuned(experts: Experts, config: MoEConfig, count: int, device: torch.device) -> float:
    received = received_rows(config, experts.weights.num_slots, count, device)
    return timed(experts)([_own_call(experts, received)])[0]


def table(lines: list[ExpertsLine], title: str) -> Table:
    found = Table(title=f"{title}, one rank of {RANKS}")
    numbers = ("us", "x floor", "untuned us", "FlashInfer us", "ours / FlashInfer", "raw us", "ours / raw", "error")
    for name in ("rows", "kernel", "scheme", "layout", *numbers):
        found.add_column(name, no_wrap=True, justify="left" if name in ("kernel", "scheme", "layout") else "right")
    for line in sorted(lines, key=lambda line: line.rows):
        found.add_row(
            str(line.rows), line.kernel, line.scheme, line.layout, f"{line.us:.0f}", f"{line.us / line.floor_us:.2f}",
            "" if line.untuned_us is None else f"{line.untuned_us:.0f}",
            "" if line.peer_us is None else f"{line.peer_us:.0f}",
            "" if line.peer_us is None else f"{line.us / line.peer_us:.2f}",
            "" if line.raw_us is None else f"{line.raw_us:.0f}",
            "" if line.raw_us is None else f"{line.us / line.raw_us:.2f}",
            "" if line.error is None else f"{line.error:.3f}" + (" WRONG" if line.wrong else ""),
        )  # fmt: skip
    return found


@benchmark_main
def main() -> list[ExpertsLine]:
    parser = argparse.ArgumentParser(description=__doc__)
    add_models(parser, MODELS)
    parser.add_argument("--schemes", nargs="+", choices=list(floors.WEIGHTS), default=list(floors.WEIGHTS))
    parser.add_argument("--rows", nargs="+", type=positive, default=list(ROWS), help="received rows")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--csv", type=Path)
    asked = parse(parser, Where.GPU)
    kernels = len(asked.models) * len(VARIANTS)
    with Progress(kernels, "measuring", "kernel", shown=not asked.quiet) as bar:
        lines = run(asked.models, asked.schemes, tuple(asked.rows), peers=not asked.no_peers, bar=bar)
    check_measured(lines)
    if asked.csv is not None:
        write(lines, asked.csv)
    return lines


if __name__ == "__main__":
    main()
