"""What `bench.layer` measured (`docs/reference/benchmarks/layer-*.csv`) over the floor that `bench.fit` computes.

A ratio depends most on the rows that an expert gets: with few a layer reads weights, with many it multiplies, and
between these it does both. Lines of one run are therefore interpolated over the logarithm of the rows per expert.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

import torch

from ep_moe.bench.floors import Floor, Kind, Rates, Way, deduplicated, expert_times, floor, load_of
from ep_moe.config import ONE_SCALE, MoEConfig, Wire, load_model_config
from ep_moe.eplb.cost import Machine
from ep_moe.runtime.gpus import GPU, GPUS
from ep_moe.selection.explain import BackendChoice

FOLDER = "docs/reference/benchmarks"
_DRAWN_TOKENS = 4096  # of all ranks, up to which routes are drawn; with more the busiest rank is near the mean
_DRAWS = 8


@dataclass(frozen=True)
class Line:
    """One line of a file: a layer in one part, of uniform routing.

    Args:
        file: Its name.
        gpu: By the file's name, such as "h200".
        model: A bundled configuration.
        ranks: Of the EP group.
        tokens: Of each rank.
        pair: Kernel and transport, as in "bf16_triton + nvlink_p2p".
        scheme: Of the experts.
        rows: As the file says how rows travelled, such as "fp8 / bf16".
        us: Measured.
        floor_us: In turn, of uniform routing, at the GPU's rates of `runtime.gpus`.
    """

    file: str
    gpu: str
    model: str
    ranks: int
    tokens: int
    pair: str
    scheme: str
    rows: str
    us: float
    floor_us: float

    @property
    def ratio(self) -> float:
        return self.us / self.floor_us

    @property
    def rows_per_expert(self) -> float:
        return rows_per_expert(_moe(self.model), self.ranks, self.tokens)


@dataclass(frozen=True)
class Ratio:
    """Measured over floor.

    Args:
        value: The multiple.
        source: The file and its lines, and what differs from what was asked.
    """

    value: float
    source: str


def measured_ratio(
    gpu: str, choice: BackendChoice, scheme: str, wire: Wire, config: MoEConfig, ranks: int, tokens: int
) -> Ratio | None:
    """Look for the nearest run of a kernel over a transport.

    Args:
        gpu: Its name.
        choice: Transport and kernel.
        scheme: Of the experts.
        wire: How rows travel.
        config: The layer.
        ranks: Of the EP group.
        tokens: That each rank sends.

    Returns:
        The ratio, None where no such layer was measured on such a GPU.
    """
    pair = f"{choice.experts} + {choice.all2all}"
    lines = [one for one in measured() if (one.gpu, one.pair, one.scheme) == (gpu, pair, scheme)]
    return ratio_of(lines, wire, config, ranks, tokens)


def ratio_of(lines: Iterable[Line], wire: Wire, config: MoEConfig, ranks: int, tokens: int) -> Ratio | None:
    """Interpolate within the run whose rows, expert size and ranks are nearest, in this order.

    Args:
        lines: Of one GPU, kernel, transport and scheme.
        wire: How rows travel.
        config: The layer.
        ranks: Of the EP group.
        tokens: That each rank sends.

    Returns:
        The ratio, None without lines.
    """
    runs: dict[tuple[str, str, int, str], list[Line]] = {}
    for line in lines:
        runs.setdefault((line.file, line.model, line.ranks, line.rows), []).append(line)
    if not runs:
        return None
    rows = f"{'fp8' if 'fp8' in wire.dispatch else 'bf16'} / {'fp8' if wire.combine == 'fp8' else 'bf16'}"
    x = math.log2(rows_per_expert(config, ranks, tokens))

    def away(line: Line) -> float:
        return max(0.0, abs(math.log2(line.rows_per_expert) - x))

    def distance(run: list[Line]) -> tuple[bool, float, float, float]:
        first = run[0]
        size = abs(math.log2(_numbers(_moe(first.model)) / _numbers(config)))
        return first.rows != rows, size, abs(math.log2(first.ranks / ranks)), min(map(away, run))

    nearest: list[Line] = min(list(runs.values()), key=distance)
    run = sorted(nearest, key=lambda line: line.rows_per_expert)
    below = [line for line in run if math.log2(line.rows_per_expert) <= x]
    above = [line for line in run if math.log2(line.rows_per_expert) > x]
    used = [*below[-1:], *above[:1]]
    value = used[0].ratio
    if len(used) == 2:
        low, high = (math.log2(line.rows_per_expert) for line in used)
        value += (used[1].ratio - used[0].ratio) * (x - low) / (high - low)
    return Ratio(value, _source(used, rows, config, ranks, tokens))


def _source(used: list[Line], rows: str, config: MoEConfig, ranks: int, tokens: int) -> str:
    first = used[0]
    points = ", ".join(f"{line.ratio:.2f} at {line.tokens} tokens" for line in used)
    text = f"{FOLDER}/{first.file}: {first.model}, {first.ranks} ranks, {first.pair}, rows {first.rows}: {points}"
    other = []
    if _numbers(_moe(first.model)) != _numbers(config):
        other.append("experts of another size")
    if first.ranks != ranks:
        other.append(f"{first.ranks} ranks for {ranks}")
    if first.rows != rows:
        other.append(f"rows {first.rows} for {rows}")
    if len(used) == 1 and first.rows_per_expert != rows_per_expert(config, ranks, tokens):
        other.append(f"beyond the measured {first.rows_per_expert:g} rows per expert")
    return text + (f" ({'; '.join(other)})" if other else "")


def rows_per_expert(config: MoEConfig, ranks: int, tokens: int) -> float:
    """Routes that an expert gets in one call, with uniform routing."""
    return tokens * ranks * config.top_k / config.num_experts


@cache
def measured() -> tuple[Line, ...]:
    """Lines of all files: ours, in one part, over a transport."""
    found = []
    folder = resources.files("ep_moe.bench") / "measured"
    for file in sorted((one for one in folder.iterdir() if one.name.endswith(".csv")), key=lambda one: one.name):
        gpu = re.search(r"-([hb]\d00)[-.]", file.name)
        assert gpu is not None, f"{file.name} does not name its GPU"
        for line in csv.DictReader(file.read_text().splitlines()):
            name = line["name"]
            if line["owner"] != "ours" or " + " not in name or "parts" in name or not line["us"]:
                continue
            model, ranks, tokens, scheme = line["model"], int(line["ranks"]), int(line["tokens"]), line["scheme"]
            kind = kind_of(GPUS[gpu[1]], scheme, _wire(scheme, line["rows"]))
            least = busiest_floor(_moe(model), kind, ranks, tokens, per_host=ranks, way=deduplicated).in_turn
            rows, us = line["rows"], float(line["us"])
            found.append(Line(file.name, gpu[1], model, ranks, tokens, name, scheme, rows, us, least))
    return tuple(found)


def busiest_floor(config: MoEConfig, kind: Kind, ranks: int, tokens: int, *, per_host: int, way: Way) -> Floor:
    """`bench.floors.floor`, where few tokens load ranks unevenly with the mean of the busiest rank.

    Args:
        config: The layer.
        kind: Weights, rows and rates.
        ranks: Of the EP group.
        tokens: That each rank sends.
        per_host: Ranks that NVLink joins.
        way: How rows travel.

    Returns:
        The floor.
    """
    found = floor(config, kind, ranks, tokens, per_host=per_host, way=way)
    if ranks == 1 or config.num_experts % ranks or ranks * tokens > _DRAWN_TOKENS:
        return found
    experts, pairs = _busiest(config.num_experts, config.top_k, ranks, tokens)
    machine = kind.machine
    weights, products = expert_times(config, kind.scheme, experts, pairs, machine.hbm_bytes_per_s, machine.flops)
    return replace(found, weights=weights, products=products)


@cache
def _busiest(experts: int, top_k: int, ranks: int, tokens: int) -> tuple[float, float]:
    """Experts that are touched and routes on the rank that has most of them: the mean of some uniform draws."""
    generator = torch.Generator("cpu").manual_seed(0)
    loads = []
    for _ in range(_DRAWS):
        scores = torch.rand(ranks, tokens, experts, generator=generator, device="cpu")
        loads.append(load_of(scores.topk(top_k, dim=-1).indices, experts))
    return sum(load.experts for load in loads) / _DRAWS, sum(load.pairs for load in loads) / _DRAWS


def kind_of(gpu: GPU, scheme: str, wire: Wire, nic: float = 50e9) -> Kind:
    """Weights, rows and rates, as `bench.floors` takes them.

    Args:
        gpu: With its rates.
        scheme: Of the experts.
        wire: How rows travel.
        nic: Bytes per second to other hosts.

    Returns:
        The kind.
    """
    rates = gpu.rates
    machine = Machine(
        hbm_bytes_per_s=rates.copy, flops=rates.bf16, link_bytes_per_s=rates.link, node_link_bytes_per_s=nic
    )
    return Kind(scheme, scheme, wire, machine).at(Rates(rates.copy, rates.bf16, rates.fp8), rates.link)


def _wire(scheme: str, rows: str) -> Wire:
    """Of a line: rows in fp8 have the format of the scheme's kernel."""
    out, _, back = rows.partition(" / ")
    known = {"fp8_static": "fp8_tensor", "fp8_block": "fp8_block"}
    dispatch = "plain" if out == "bf16" else known.get(scheme, "fp8_row")
    scale = 1.0 if dispatch in ONE_SCALE else None  # no size depends on it
    return Wire(dispatch=dispatch, combine="fp8" if back == "fp8" else "plain", input_scale=scale)


@cache
def _moe(model: str) -> MoEConfig:
    return load_model_config(model).moe


def _numbers(config: MoEConfig) -> int:
    """Of an expert's matrices."""
    return config.hidden_size * (config.w13_rows + config.intermediate_size)
