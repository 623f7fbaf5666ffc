"""Local experts alone, one GPU holding one rank's share of four: every kernel and scheme, beside FlashInfer's own call.

    python -m ep_moe.bench.experts [--models NAME ...] [--schemes NAME ...] [--csv FILE]

Medians of CUDA-graph replays in microseconds, and two ratios of one run: to the floor (the larger of weight bytes
touched at the measured copy rate and operations at the measured matmul rate), and to FlashInfer's public
`cutlass_fused_moe`, tuned by its own autotuner on the same rows, where it has that scheme.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ep_moe import registry
from ep_moe.config import MoEConfig, load_model_config
from ep_moe.experts.base import Experts, ExpertsOptions
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.types import LocalIds, Received, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.schemes import SCHEMES
from ep_moe.workspace import Workspaces

RANKS = 4
MODELS = ("qwen3-30b-a3b", "deepseek-v3")
ROWS = (64, 512, 4096, 16384)
VARIANTS = (
    ("flashinfer_cutlass", "none"),
    ("flashinfer_cutlass", "fp8_static"),
    ("flashinfer_cutlass", "fp8_dynamic"),
    ("flashinfer_cutlass", "fp8_block"),
    ("fp8_block_triton", "fp8_block"),
    ("flashinfer_cutlass", "mxfp4"),
    ("flashinfer_cutlass", "mxfp4_fp8"),
    ("flashinfer_cutlass", "int4_fp8"),
)
# weight bytes per number, and whether the products run at the fp8 rate
COST = {
    "none": (2.0, False),
    "fp8_static": (1.0, True),
    "fp8_dynamic": (1.0, True),
    "fp8_block": (1.0, True),
    "mxfp4": (0.53, False),
    "mxfp4_fp8": (0.53, True),
    "int4_fp8": (0.52, True),
}


@dataclass
class Rates:
    """What this GPU does: bytes/s copied (read and written), operations/s in bf16 and fp8."""

    copy: float
    bf16: float
    fp8: float


@dataclass
class Line:
    model: str
    rows: int
    kernel: str
    scheme: str
    layout: str
    us: float
    floor_us: float
    peer_us: float | None = None
    untuned_us: float | None = None


def replayed(call: Callable[[], Any], *, calls: int = 5, replays: int = 15) -> float:
    """Median microseconds of one call inside a CUDA graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times: list[float] = []
    for _ in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[2:])


def measure_rates(device: torch.device) -> Rates:
    source = torch.ones(1 << 28, device=device)  # 1 GiB
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / replayed(lambda: torch.neg(source, out=target), calls=2, replays=5) * 1e6
    size = 8192
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    a16, b16 = a.bfloat16(), b.bfloat16()
    bf16 = 2 * size**3 / replayed(lambda: a16 @ b16, calls=2, replays=5) * 1e6
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
    fp8 = 2 * size**3 * 1e6
    fp8 /= replayed(lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16), calls=2, replays=5)
    return Rates(copy, bf16, fp8)


def make(kernel: str, scheme: str, config: MoEConfig, device: torch.device, chunk_rows: int) -> Experts:
    kind: type[Experts] = registry.load("experts", kernel)
    weights = ExpertWeights(
        config,
        ExpertMap.linear(config.num_experts, RANKS),
        device=device,
        dtype=torch.bfloat16,
        scheme=SCHEMES[scheme],
        preparation=kind.preparation,
        trainable=False,
    )
    generator = torch.Generator(device=device).manual_seed(0)
    tensors = {
        "w13": torch.randn(config.w13_rows, config.hidden_size, generator=generator, device=device) / 50,
        "w2": torch.randn(config.hidden_size, config.intermediate_size, generator=generator, device=device) / 50,
        "w13_input_scale": torch.tensor(0.02, device=device),
        "w2_input_scale": torch.tensor(0.1, device=device),
    }
    if scheme != "fp8_static":
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("scale")}
    for expert in weights.local_experts:
        weights.update_expert(expert, SCHEMES[scheme].quantize(tensors, torch.bfloat16))
    return kind(config, weights, Workspaces(device), ExpertsOptions(chunk_rows=chunk_rows))


def received_rows(config: MoEConfig, slots: int, rows: int, device: torch.device) -> Received:
    """Rows that a uniform router sends to this rank: at least one local expert each."""
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
    """The same pairs as a CONTIGUOUS transport delivers them."""
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
    numbers = config.hidden_size * (config.w13_rows + config.intermediate_size)
    bytes_per_number, fast = COST[scheme]
    touched = len(valid.unique()) * numbers * bytes_per_number
    return 1e6 * max(touched / rates.copy, 2 * len(valid) * numbers / (rates.fp8 if fast else rates.bf16))


def public_call(experts: Any, received: Received) -> float | None:
    """FlashInfer's own function on the same weights, as its authors would: autotuned, fused finalize, own workspace."""
    scheme, weights = experts.weights.scheme.name, experts.weights
    if scheme not in ("none", "fp8_block"):
        return None
    import flashinfer
    from flashinfer.fused_moe import cutlass_fused_moe

    out = torch.empty_like(received.x)
    scales = [] if scheme == "none" else [weights.get_parameter(f"{name}_scale") for name in ("w13", "w2")]

    def call() -> None:
        cutlass_fused_moe(
            received.x,
            received.local_ids,
            received.weights,
            weights.get_parameter("w13"),
            weights.get_parameter("w2"),
            torch.bfloat16,
            scales,
            output=out,
            use_deepseek_fp8_block_scale=scheme == "fp8_block",
            tune_max_num_tokens=len(out),
        )

    with flashinfer.autotune(True):
        call()
    return replayed(call)


def run(models: Sequence[str], schemes: Sequence[str], rows: tuple[int, ...] = ROWS) -> list[Line]:
    device = torch.device("cuda", torch.cuda.current_device())
    console = Console(width=130)
    rates = measure_rates(device)
    console.print(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}: copy {rates.copy / 1e12:.2f} TB/s, "
        f"bf16 {rates.bf16 / 1e12:.0f}, fp8 {rates.fp8 / 1e12:.0f} TFLOP/s"
    )
    lines: list[Line] = []
    for model in models:
        config = load_model_config(model).moe
        for kernel, scheme in VARIANTS:
            if scheme not in schemes:
                continue
            if (why := registry.why_not("experts", kernel)) is not None:
                console.print(f"{kernel}: {why}")
                continue
            experts = make(kernel, scheme, config, device, max(rows))
            untuned = {count: _timed(experts, config, count, device) for count in rows}
            experts.use(experts.tune(rows, None))
            for count in rows:
                received = received_rows(config, experts.weights.num_slots, count, device)
                least = floor_us(config, scheme, received, rates)
                peer = public_call(experts, received) if kernel == "flashinfer_cutlass" else None
                us = _timed(experts, config, count, device)
                lines.append(Line(model, count, kernel, scheme, "rank_major", us, least, peer, untuned[count]))
                if scheme == "fp8_block":
                    grouped = contiguous_rows(received, experts.weights.num_slots)
                    out = torch.empty_like(grouped.x)
                    us = replayed(lambda g=grouped, o=out, e=experts: e(g, o))  # type: ignore[misc]
                    lines.append(Line(model, count, kernel, scheme, "contiguous", us, least))
            del experts
            torch.cuda.empty_cache()
        console.print(table([line for line in lines if line.model == model], model))
    return lines


def _timed(experts: Experts, config: MoEConfig, count: int, device: torch.device) -> float:
    received = received_rows(config, experts.weights.num_slots, count, device)
    out = torch.empty_like(received.x)
    return replayed(lambda: experts(received, out))


def table(lines: list[Line], title: str) -> Table:
    found = Table(title=f"{title}, one rank of {RANKS}")
    numbers = ("us", "x floor", "untuned us", "FlashInfer us", "ours / FlashInfer")
    for name in ("rows", "kernel", "scheme", "layout", *numbers):
        found.add_column(name, justify="left" if name in ("kernel", "scheme", "layout") else "right")
    for line in sorted(lines, key=lambda line: line.rows):
        found.add_row(
            str(line.rows), line.kernel, line.scheme, line.layout, f"{line.us:.0f}", f"{line.us / line.floor_us:.2f}",
            "" if line.untuned_us is None else f"{line.untuned_us:.0f}",
            "" if line.peer_us is None else f"{line.peer_us:.0f}",
            "" if line.peer_us is None else f"{line.us / line.peer_us:.2f}",
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--schemes", nargs="+", default=list(COST))
    parser.add_argument("--csv", type=Path)
    asked = parser.parse_args()
    lines = run(asked.models, asked.schemes)
    if asked.csv is not None:
        with asked.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            columns = ("model", "rows", "kernel", "scheme", "layout", "us", "floor_us", "peer_us", "untuned_us")
            writer.writerow(columns)
            writer.writerows([getattr(line, column) for column in columns] for line in lines)


if __name__ == "__main__":
    main()
