"""Dispatch and combine alone, with experts that return their input: every transport that runs here, and its floor.

    torchrun --standalone --nproc-per-node 4 -m ep_moe.bench.all2all [--transports NAME ...] [--hidden H ...] ...

Times are microseconds of one dispatch and one combine: the median on the slowest rank, of CUDA-graph replays if the
transport can be captured, else of eager calls with their host work. There are 128 experts, top-8, and uniform routing.
Rows are bf16, or fp8_block for dispatch if the transport supports it (rounding them is not counted, because it replaces
the rounding of the kernel).

wire      bytes that leave the busiest rank: rows, ids and weights out, rows back
p2p       rate of copies between the same GPUs, all at once, measured in the same run: bytes/s
floor     wire / p2p
raw       calls of the library itself on ids that are ready, for transports of a library: shows what our adapter adds
backward  (--backward) bf16 rows of transports with a backward of their own: dispatch and combine of rows, and of their
          gradients, with those of the routing weights
load      (--load) FlashInfer's own calls in a workspace with room for EPLB's statistics, without and with each rank's
          int32 counts of the experts, which dispatch sends to all ranks
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ep_moe import registry
from ep_moe.all2all.base import Dispatcher, DispatchShape
from ep_moe.bench.harness import (
    Where,
    benchmark_main,
    check_dealt,
    check_measured,
    eager,
    own_device,
    parse,
    positive,
    replayed,
    write,
)
from ep_moe.config import Wire
from ep_moe.context import EPContext
from ep_moe.execution.trained_exchange import InputGradients, Transports, exchange_gradients
from ep_moe.parallel.rank_group import barrier
from ep_moe.quant.row_format import quantize_for_wire
from ep_moe.runtime.devices import on_device_of
from ep_moe.types import PhysicalIds, PhysicalRouting, Received

EXPERTS, TOP_K = 128, 8
HIDDEN = (2048, 4096, 7168)
TOKENS = (1, 16, 128, 1024, 8192)
DTYPE = torch.bfloat16
ROWS = ("plain", "fp8_block")
FEW = 128  # up to so many tokens a call is short, so more calls are timed in a row
ROOM = 8 << 30  # most bytes of one transport's buffers


@dataclass
class TransportLine:
    transport: str
    rows: str
    hidden: int
    tokens: int
    us: float
    captured: bool
    wire_bytes: int
    floor_us: float
    raw_us: float | None = None
    backward_us: float | None = None
    without_load_us: float | None = None
    with_load_us: float | None = None


def measure(
    context: EPContext, names: Sequence[str], hidden: Sequence[int], tokens: Sequence[int], *, load: bool = False,
    backward: bool = False,
) -> tuple[list[TransportLine], float]:  # fmt: skip
    rate = p2p_rate(context)
    lines: list[TransportLine] = []
    for size in hidden:
        for count in tokens:
            x, routing = inputs(context, size, count)
            for rows in ROWS:
                wire = Wire(dispatch=rows)
                sent = busiest(context, wire_bytes(context, routing, dispatch_shape_of(context, size, count, wire)))
                for name in names:
                    if (reason := unsupported_reason(name, context, size, count, wire)) is not None:
                        if (size, count) == (hidden[0], tokens[0]) and context.layout.rank == 0:
                            Console().print(f"{name}: {reason}")
                        continue
                    line = TransportLine(name, rows, size, count, 0.0, False, sent, sent / rate * 1e6)
                    time_transport(context, line, x, routing, load=load, backward=backward)
                    lines.append(line)
    return lines, rate


def dispatch_shape_of(context: EPContext, hidden: int, tokens: int, wire: Wire) -> DispatchShape:
    ranks = context.layout.ep
    return DispatchShape(
        hidden_size=hidden,
        top_k=TOP_K,
        slots_per_rank=EXPERTS // ranks,
        num_ranks=ranks,
        dtype=DTYPE,
        max_tokens=tokens,
        wire=wire,
    )


def unsupported_reason(name: str, context: EPContext, hidden: int, tokens: int, wire: Wire) -> str | None:
    """Return why a transport cannot run here with these sizes, or None if it can."""
    reason = registry.unsupported_reason("dispatchers", name)
    if reason is not None:
        return reason
    kind: type[Dispatcher] = registry.load("dispatchers", name)
    if kind.buffer_bytes(dispatch_shape_of(context, hidden, tokens, wire)) > ROOM:
        return f"its buffers for {tokens} tokens are larger than {ROOM >> 30} GiB"
    ranks = context.layout.ep
    return kind.unsupported_reason(hidden, TOP_K, ranks, DTYPE, tokens, wire) or kind.unsupported_platform(
        context.layout
    )


def inputs(context: EPContext, hidden: int, tokens: int) -> tuple[Tensor, PhysicalRouting]:
    generator = torch.Generator(device=context.device).manual_seed(context.layout.rank)
    scores = torch.rand(tokens, EXPERTS, generator=generator, device=context.device)
    ids = scores.topk(TOP_K).indices
    x = torch.randn(tokens, hidden, generator=generator, device=context.device).to(DTYPE)
    return x, PhysicalRouting(PhysicalIds(ids), torch.full(ids.shape, 1 / TOP_K, device=context.device))


def wire_bytes(context: EPContext, routing: PhysicalRouting, dispatch_shape: DispatchShape) -> int:
    """Return the bytes that this rank sends if each token goes once to each other rank with one of its experts.

    The results that return are counted too.
    """
    ranks = context.layout.ep
    owner = routing.ids // (EXPERTS // ranks)
    wanted = torch.zeros(len(owner), ranks, dtype=torch.bool, device=owner.device).scatter_(1, owner, True)
    wanted[:, context.layout.ep_rank] = False
    out = dispatch_shape.row_bytes + dispatch_shape.scale_bytes + TOP_K * 8
    return int(wanted.sum()) * (out + dispatch_shape.hidden_size * DTYPE.itemsize)


def time_transport(
    context: EPContext, line: TransportLine, x: Tensor, routing: PhysicalRouting, *, load: bool = False,
    backward: bool = False,
) -> None:  # fmt: skip
    dispatch_shape = dispatch_shape_of(context, line.hidden, line.tokens, Wire(dispatch=line.rows))
    dispatcher: Dispatcher = registry.load("dispatchers", line.transport)(dispatch_shape, context.rank_groups["ep"])
    rows, scale = quantize_for_wire(x, dispatch_shape.wire)

    def returned(received: Received) -> Tensor:
        y = received.x if received.out is None else received.out
        return dispatcher.combine(y if y.dtype == DTYPE else y.new_empty(y.shape, dtype=DTYPE), received.handle)

    def pair() -> Tensor:
        return returned(dispatcher.dispatch(rows, routing, scale))

    line.captured = dispatcher.capabilities.cuda_graph
    calls: dict[str, Callable[[], Any]] = {"us": pair}
    received = dispatcher.dispatch(rows, routing, scale)
    if received.out is not None and received.x.dtype == DTYPE:
        received.out.copy_(received.x)  # experts would write their result there
    returned(received)
    made = [dispatcher]
    if backward and line.rows == "plain" and dispatcher.capabilities.adjoint:
        if not dispatcher.capabilities.returns_weights:
            kind = registry.load("dispatchers", line.transport)
            made.append(kind(dispatch_shape.of_weights, context.rank_groups["ep"]))
        transports = Transports(dispatcher, made[1] if made[1:] else None, line.tokens)
        calls["backward_us"] = trained_pair(transports, pair, rows, routing)
        calls["backward_us"]()
    if line.transport == "flashinfer_nvlink":
        calls["raw_us"] = flashinfer_pair(dispatcher, rows, scale, routing)
        if load and line.rows == "plain":
            calls |= load_pairs(context, dispatch_shape, rows, routing)
    measure = partial(replayed, repeat=20 if line.tokens <= FEW else 5) if line.captured else eager
    times = measure(list(calls.values()), before=partial(barrier, context.device))
    for name, us in zip(calls, times, strict=True):
        setattr(line, name, max_over_ranks(context, us))
    torch.cuda.synchronize(context.device)
    barrier(context.device)
    for one in made:
        one.destroy()


def trained_pair(
    transports: Transports, pair: Callable[[], Tensor], grad: Tensor, routing: PhysicalRouting
) -> Callable[[], InputGradients]:
    """Return a call of `pair` and of its backward as in a layer. The experts pass gradients through unchanged."""

    def gradients(sent: Received) -> tuple[Tensor, Tensor]:
        rows = sent.x if sent.out is None else sent.out
        return rows, rows.new_ones(len(rows), TOP_K, dtype=torch.float32)

    def both() -> InputGradients:
        pair()
        return exchange_gradients(transports, routing, grad, gradients)

    return both


def flashinfer_pair(dispatcher: Any, x: Tensor, scale: Tensor | None, routing: PhysicalRouting) -> Callable[[], Any]:
    """Return FlashInfer's own calls, with the zero-copy combine."""
    communication, ids = dispatcher.buffer_pool.buffer_slots[0].workspace, routing.ids.int()

    def pair() -> None:
        communication.dispatch(x, ids, routing.weights, hidden_states_scale=scale)
        communication.combine(communication.get_combine_input_buffer(DTYPE))

    return pair


def load_pairs(
    context: EPContext, dispatch_shape: DispatchShape, x: Tensor, routing: PhysicalRouting
) -> dict[str, Callable[[], Any]]:
    """Return FlashInfer's own calls without and with `eplb_local_stats`, by column, in a workspace of their own."""
    from ep_moe.all2all.flashinfer_nvlink import communication

    rank_group, ids = context.rank_groups["ep"], routing.ids.int()
    group = {
        "world_size": rank_group.size,
        "rank": rank_group.rank,
        "device": x.device.index,
        "process_group": rank_group.group,
    }
    params = {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "max_tokens_per_rank": dispatch_shape.max_tokens,
        "hidden_size": dispatch_shape.hidden_size,
        "dtype": DTYPE,
    }
    library = communication(group, params, {"eplb_stats_num_experts": EXPERTS})
    counts = ids.flatten().long().bincount(minlength=EXPERTS).int()

    def pair(stats: Tensor | None) -> None:
        library.dispatch(x, ids, routing.weights, eplb_local_stats=stats)
        library.combine(library.get_combine_input_buffer(DTYPE))

    return {"without_load_us": partial(pair, None), "with_load_us": partial(pair, counts)}


def p2p_rate(context: EPContext) -> float:
    """Return the rate in bytes/s at which each GPU copies to the next one while all GPUs copy."""
    local, ranks = context.device.index, context.layout.ep
    target = torch.device("cuda", (local + 1) % ranks)
    source = torch.ones(1 << 28, dtype=torch.uint8, device=context.device)
    sink = torch.empty_like(source, device=target)
    (us,) = eager([lambda: sink.copy_(source)], before=partial(barrier, context.device))
    return float(source.nbytes / max_over_ranks(context, us) * 1e6)


def max_over_ranks(context: EPContext, value: float) -> float:
    """Return the largest value of any rank. Collective."""
    found = torch.tensor([value], dtype=torch.float64, device=context.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def busiest(context: EPContext, count: int) -> int:
    return int(max_over_ranks(context, float(count)))


def table(lines: list[TransportLine], rate: float) -> Table:
    found = Table(title=f"dispatch + combine, E={EXPERTS}, K={TOP_K}; p2p {rate / 1e9:.0f} GB/s")
    numbers = (
        "us", "x floor", "wire KiB", "share of p2p", "raw us", "adapter us", "backward us", "x fwd", "no load us",
        "load us",
    )  # fmt: skip
    for name in ("H", "T", "transport", "rows", *numbers, ""):
        found.add_column(name, no_wrap=True, justify="left" if name in ("transport", "rows", "") else "right")
    for line in lines:
        found.add_row(
            str(line.hidden),
            str(line.tokens),
            line.transport,
            line.rows,
            f"{line.us:.1f}",
            f"{line.us / line.floor_us:.1f}" if line.wire_bytes else "",
            f"{line.wire_bytes / 1024:.0f}",
            f"{line.floor_us / line.us:.0%}",
            "" if line.raw_us is None else f"{line.raw_us:.1f}",
            "" if line.raw_us is None else f"{line.us - line.raw_us:+.1f}",
            "" if line.backward_us is None else f"{line.backward_us:.1f}",
            "" if line.backward_us is None else f"{line.backward_us / line.us:.2f}",
            "" if line.without_load_us is None else f"{line.without_load_us:.1f}",
            "" if line.with_load_us is None else f"{line.with_load_us:.1f}",
            "" if line.captured else "eager",
        )
    return found


def plot(lines: list[TransportLine], file: Path) -> None:
    from matplotlib.figure import Figure

    sizes = sorted({line.hidden for line in lines})
    names = sorted({line.transport for line in lines})
    figure = Figure(figsize=(5 * len(sizes) + 3, 4), layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        here = [line for line in lines if line.hidden == size]
        for name, rows in sorted({(line.transport, line.rows) for line in here}):
            own = [line for line in here if (line.transport, line.rows) == (name, rows)]
            style = "o-" if rows == "plain" else "x:"
            label = name if rows == "plain" else f"{name}, {rows}"
            colour = f"C{names.index(name)}"
            axes.plot([line.tokens for line in own], [line.us for line in own], style, label=label, color=colour)
        floor = {line.tokens: line.floor_us for line in here if line.wire_bytes and line.rows == "plain"}
        axes.plot(list(floor), list(floor.values()), "k--", label="floor")
        axes.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="us", title=f"H = {size}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    figure.savefig(file, dpi=120)


@benchmark_main
@on_device_of(own_device)
def main() -> list[TransportLine]:
    parser = argparse.ArgumentParser(description=__doc__)
    known = list(registry.targets("dispatchers"))
    parser.add_argument("--transports", nargs="+", choices=known, default=known)
    parser.add_argument("--hidden", nargs="+", type=positive, default=HIDDEN)
    parser.add_argument("--tokens", nargs="+", type=positive, default=TOKENS)
    parser.add_argument("--load", action="store_true", help="FlashInfer's EPLB statistics riding on dispatch, too")
    parser.add_argument("--backward", action="store_true", help="dispatch and combine with their backward, too")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parse(parser, Where.RANKS)
    check_dealt(EXPERTS)
    with EPContext.from_torchrun() as context:
        lines, rate = measure(
            context, asked.transports, asked.hidden, asked.tokens, load=asked.load, backward=asked.backward
        )
        check_measured(lines)
        if context.layout.rank:
            return lines
    Console(width=170).print(table(lines, rate))
    if asked.csv is not None:
        write(lines, asked.csv)
    if asked.plot is not None:
        plot(lines, asked.plot)
    return lines


if __name__ == "__main__":
    main()
