"""Whole routed layers, whoever computes them: pairs of transport and kernel, and fused kernels, on the same routes.

    torchrun --standalone --nproc-per-node 4 -m ep_moe.bench.layer [--models NAME ...] [--tokens T ...] [--csv F]

Microseconds of one layer call, the slowest rank's median of CUDA-graph replays that take turns; uniform routing, tuned
experts, no shared experts, a context made for that many tokens.

x best       of the fastest line with weights of the same kind
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ep_moe.bench.all2all import slowest
from ep_moe.bench.overlap import Variant, batch, build, tune
from ep_moe.bench.timing import replayed
from ep_moe.config import MoEConfig, load_model_config
from ep_moe.context import EPContext
from ep_moe.errors import BackendUnavailable
from ep_moe.parallel.groups import local_device

MODELS = ("qwen3-30b-a3b",)
TOKENS = (1, 16, 128, 1024, 8192)
VARIANTS: tuple[Variant, ...] = (
    ("flashinfer_cutlass", "none", "plain", "nvlink_p2p", ()),
    ("flashinfer_cutlass", "none", "plain", "flashinfer_nvlink", ()),
    ("flashinfer_mega_bf16", "none", "plain", "auto", ()),
    ("fp8_block_triton", "fp8_block", "fp8_block", "nvlink_p2p", ()),
    ("fp8_block_triton", "fp8_block", "fp8_block", "flashinfer_nvlink", ()),
    ("flashinfer_mega_fp8", "fp8_block", "plain", "auto", ()),
)


@dataclass
class Line:
    model: str
    tokens: int
    experts: str
    scheme: str
    rows: str
    all2all: str
    us: float


def measure(model: str, config: MoEConfig, tokens: int, variants: Sequence[Variant]) -> list[Line]:
    """Variants that cannot run here are left out, with their reasons on rank 0's output."""
    with EPContext.from_torchrun(max_tokens=tokens) as context, torch.no_grad():
        made = []
        for variant in variants:
            try:
                made.append((variant, build(context, config, variant)))
            except BackendUnavailable as error:
                if dist.get_rank() == 0:
                    Console().print(f"{variant[0]} with {variant[3]}: {error}")
        tune(context, [tokens])
        x, routing = batch(context, config, tokens)
        calls = [partial(layer.forward_routed, x, routing) for _, layer in made]
        times = [slowest(context, us) for us in replayed(calls, repeat=2, before=dist.barrier)]
        return [
            Line(model, tokens, experts, scheme, rows, layer.choice.all2all, us)
            for ((experts, scheme, rows, _, _), layer), us in zip(made, times, strict=True)
        ]


def table(lines: list[Line]) -> Table:
    found = Table(title=f"{lines[0].model}, {lines[0].tokens} tokens per rank")
    for name in ("experts", "weights", "rows", "all2all", "us", "x best"):
        found.add_column(name, no_wrap=True, justify="right" if name in ("us", "x best") else "left")
    for line in lines:
        best = min(other.us for other in lines if other.scheme == line.scheme)
        found.add_row(line.experts, line.scheme, line.rows, line.all2all, f"{line.us:.0f}", f"{line.us / best:.2f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--experts", nargs="+", default=sorted({variant[0] for variant in VARIANTS}))
    parser.add_argument("--csv", type=Path)
    asked = parser.parse_args()
    torch.cuda.set_device(local_device())
    lines: list[Line] = []
    for model in asked.models:
        config = dataclasses.replace(load_model_config(model).moe, shared_intermediate_size=0, shared_gate=False)
        for tokens in asked.tokens:
            found = measure(model, config, tokens, [one for one in VARIANTS if one[0] in asked.experts])
            lines += found
            if dist.get_rank() == 0:
                Console(width=130).print(table(found))
    if asked.csv is not None and dist.get_rank() == 0:
        with asked.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([field.name for field in dataclasses.fields(Line)])
            writer.writerows(dataclasses.astuple(line) for line in lines)


if __name__ == "__main__":
    main()
