"""Time of a push of a trainer's weights into a serving model of another layout, compared with its floor.

    torchrun --standalone --nproc-per-node 2 -m ep_moe.bench.weight_push [MODEL] [--layers 1] [--schemes none ...] ...

The model is a transformers model with MoE blocks of MODEL's sizes, and the smallest possible attention and embeddings.
The trainer has its experts in order over the ranks (`--trainer-ep` of them form an EP group). The server has as many
redundant experts as ranks. Seconds are those of the slowest rank: the median of `--repeat` pushes after one warm-up.

GB        size of all tensors, each counted once, in the trainer's dtype
gather    seconds of `export_weights` alone, until all tensors are taken
push      seconds of `load_weights(server, export_weights(trainer))`; GB/s: GB / push
floor     GB/s if experts were broadcast, and each rank's share copied, at the bandwidths measured in this run
of floor  GB/s / floor
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from ep_moe.bench.harness import Where, add_models, benchmark_main, own_device, parse, positive, show, tracked, write
from ep_moe.config import MoEConfig, ParallelConfig
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.integrations.model_name import config_named
from ep_moe.integrations.transformers import expert_parallel, export_weights, load_weights, moe_layers
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.parallel.rank_group import barrier
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.quant.schemes import SCHEMES
from ep_moe.runtime.devices import on_device_of

_BANDWIDTH_BYTES = 1 << 27  # size of the tensor by which bandwidths are measured


@dataclass(frozen=True)
class PushLine:
    """The result for one scheme of the server. Bandwidths in bytes per second.

    broadcast: None if every rank of the trainer has all experts
    """

    scheme: str
    ranks: int
    trainer_ep: int
    layers: int
    bytes: int
    gather_s: float
    push_s: float
    broadcast: float | None
    copy: float
    floor_s: float

    @property
    def per_second(self) -> float:
        """GB per second of a push."""
        return self.bytes / self.push_s / 1e9

    @property
    def floor(self) -> float:
        """GB per second of the floor."""
        return self.bytes / self.floor_s / 1e9


def model_of(config: MoEConfig, layers: int, context: EPContext, dtype: torch.dtype, **options: Any) -> Any:
    """Make a model with small random weights. Each rank holds only its own experts."""
    made = Qwen3MoeConfig(
        vocab_size=64, hidden_size=config.hidden_size, moe_intermediate_size=config.intermediate_size,
        num_hidden_layers=layers, num_experts=config.num_experts, num_experts_per_tok=config.top_k,
        num_attention_heads=1, num_key_value_heads=1, head_dim=32, intermediate_size=32,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made, dtype=dtype)
    model = expert_parallel(model.requires_grad_(False), context, **options).to_empty(device=context.device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.itemsize > 1:
                parameter.normal_(0, 0.02)
    for layer in moe_layers(model):
        layer.expert_weights.reset_parameters()
    return model


def measure(
    ours: EPContext, theirs: EPContext, config: MoEConfig, scheme: str, *, layers: int, dtype: torch.dtype,
    experts: str = "auto", repeat: int = 3,
) -> PushLine:  # fmt: skip
    """Measure one scheme. Collective. ours, theirs: contexts of trainer and server"""
    ranks, trainer_ep = ours.layout.world, ours.layout.ep
    trainer = model_of(config, layers, ours, dtype, experts="reference")
    expert_map = ExpertMap.redundant(config.num_experts, theirs.layout.ep, theirs.layout.ep if ranks > 1 else 0)
    server = model_of(config, layers, theirs, dtype, experts=experts, quantization=scheme, expert_map=expert_map)

    sizes = {name: tensor.nbytes for name, tensor in export_weights(trainer)}
    gather = timed(ours, repeat, lambda: sum(1 for _ in export_weights(trainer)))
    push = timed(ours, repeat, lambda: load_weights(server, export_weights(trainer)))
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    broadcast, copy = bandwidths(ours)
    slots = max(expert_map.num_slots(rank) for rank in range(expert_map.num_ranks))
    own = sum(sizes.values()) - of_experts + of_experts * slots / config.num_experts
    floor = own / copy + (0.0 if broadcast is None else of_experts / broadcast)
    return PushLine(scheme, ranks, trainer_ep, layers, sum(sizes.values()), gather, push, broadcast, copy, floor)


def bandwidths(context: EPContext) -> tuple[float | None, float]:
    """Return bytes per second of a broadcast in an EP group (None for one rank), and of a copy on all ranks at once."""
    one, two = (torch.ones(_BANDWIDTH_BYTES, dtype=torch.uint8, device=context.device) for _ in range(2))
    ep, copy = context.rank_groups["ep"], _BANDWIDTH_BYTES / timed(context, 5, lambda: two.copy_(one))
    if ep.size == 1:
        return None, copy
    return _BANDWIDTH_BYTES / timed(context, 5, lambda: dist.broadcast(one, ep.ranks[0], group=ep.group)), copy


def timed(context: EPContext, repeat: int, call: Callable[[], Any]) -> float:
    """Return the median seconds of a call on the slowest rank, after one warm-up call."""
    times = []
    for _ in range(repeat + 1):
        with seconds(context) as spent:
            call()
        times.append(spent[0])
    return statistics.median(times[1:])


@contextmanager
def seconds(context: EPContext) -> Iterator[list[float]]:
    spent: list[float] = []
    _ready(context)
    start = time.perf_counter()
    yield spent
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
    slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=context.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    spent.append(float(slowest))


def _ready(context: EPContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
    barrier(context.device)


@benchmark_main
@on_device_of(own_device)
def main() -> list[PushLine]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser, ["qwen3-30b-a3b"], several=False)
    parser.add_argument("--layers", type=positive, default=1)
    parser.add_argument(
        "--schemes", nargs="+", choices=list(SCHEMES), default=["none", "fp8_dynamic", "fp8_block", "mxfp4"]
    )
    parser.add_argument("--experts", default="auto", help="the server's kernel")
    parser.add_argument("--trainer-ep", type=positive, help="ranks of a trainer's EP group; default all")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeat", type=positive, default=3)
    parser.add_argument("--csv", type=Path)
    asked = parse(parser, Where.LAUNCHED)
    ranks = TorchrunEnv.read().world_size
    asked.trainer_ep = asked.trainer_ep or ranks
    if ranks % asked.trainer_ep:
        raise ConfigError(f"--trainer-ep must divide the number of ranks, got {asked.trainer_ep} of {ranks}")
    (model,) = asked.models
    config: MoEConfig = config_named(model)
    how = {"layers": asked.layers, "dtype": getattr(torch, asked.dtype), "experts": asked.experts}
    with (
        EPContext.from_torchrun(ParallelConfig(dp=ranks, ep=asked.trainer_ep)) as ours,
        EPContext.from_torchrun(ParallelConfig(dp=ranks)) as theirs,
    ):
        schemes = tracked(asked.schemes, "scheme", asked)
        lines = [measure(ours, theirs, config, scheme, repeat=asked.repeat, **how) for scheme in schemes]
    if TorchrunEnv.read().rank == 0:
        show(Console(width=130), shown(f"MoE layers of {model}: {asked.layers}; {asked.dtype}, {ranks} ranks", lines))
        if asked.csv is not None:
            write(lines, asked.csv)
    return lines


def shown(title: str, lines: list[PushLine]) -> Table:
    table = Table(title=title)
    table.add_column("scheme")
    for name in ("trainer ep", "GB", "gather s", "push s", "GB/s", "floor", "of floor", "broadcast GB/s", "copy GB/s"):
        table.add_column(name, justify="right")
    for one in lines:
        table.add_row(
            one.scheme, str(one.trainer_ep), f"{one.bytes / 1e9:.2f}", f"{one.gather_s:.2f}", f"{one.push_s:.2f}",
            f"{one.per_second:.2f}", f"{one.floor:.2f}", f"{one.per_second / one.floor:.0%}",
            "" if one.broadcast is None else f"{one.broadcast / 1e9:.2f}", f"{one.copy / 1e9:.2f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
