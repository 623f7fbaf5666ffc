"""Reads the lines that `bench.layer` measured (`docs/reference/benchmarks/layer-*.csv`), and adds their floors."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources

from ep_moe.bench.floors import KINDS, Floor, Kind, busiest_floor, kind_of
from ep_moe.bench.wire_rows import deduplicated
from ep_moe.config import ONE_SCALE, MoEConfig, Wire
from ep_moe.integrations.model_name import config_named
from ep_moe.runtime.gpus import GPU, GPUS

FOLDER = "docs/reference/benchmarks"


@dataclass(frozen=True)
class MeasuredLine:
    """One line of a file: a layer in one part, with uniform routing.

    Args:
        file: The file's name.
        gpu: The GPU that the file's name states, such as "h200".
        config: The configuration of the model, a bundled one.
        model: The model's name.
        ranks: Number of ranks of the EP group.
        tokens: Tokens of each rank.
        pair: Kernel and transport, as in "bf16_triton + nvlink_p2p".
        scheme: The scheme of the experts.
        rows: The format of rows on the wire, such as "fp8 / bf16".
        us: The measured time in microseconds.
        floor: The floor of uniform routing, at the GPU's rates of `runtime.gpus`.
        drawn: The floor of the routes that this run drew, as a multiple of `floor`. One token on each of 4 ranks may
            well touch a quarter fewer experts than the mean.
    """

    file: str
    gpu: str
    config: MoEConfig
    model: str
    ranks: int
    tokens: int
    pair: str
    scheme: str
    rows: str
    us: float
    floor: Floor
    drawn: float

    @cached_property
    def work_us(self) -> float:
        """`work_us` of the routes that this run drew."""
        return work_us(self.floor) * self.drawn

    @cached_property
    def log_rows(self) -> float:
        """`log_rows` of this layer."""
        return log_rows(self.config, self.ranks, self.tokens)

    @property
    def layer(self) -> tuple[int, ...]:
        """`layer_sizes` of this layer."""
        return layer_sizes(self.config)


def work_us(floor: Floor) -> float:
    """Return the floor in turn, with an experts' time that accounts for imperfect overlap of reads and products.

    The floor assumes that the longer of reads and products hides the other completely. Here their time is the root of
    the sum of squares. Our kernels over `nvlink_p2p` take, without launches, 1.2 to 2.1 times the floor if the shorter
    is over half of the longer, and 0.9 to 1.5 times otherwise. They take 1.0 to 1.7 and 0.9 to 1.5 times the time with
    the root of the sum of squares.

    Args:
        floor: The floor of the layer.

    Returns:
        Microseconds.
    """
    return math.hypot(floor.weights, floor.products) + floor.wire


def log_rows(config: MoEConfig, ranks: int, tokens: int) -> float:
    """Return the binary logarithm of the number of routes per expert in one call, with uniform routing."""
    return math.log2(tokens * ranks * config.top_k / config.num_experts)


def layer_sizes(config: MoEConfig) -> tuple[int, ...]:
    """Return the sizes that times depend on. Layers with equal sizes take equally long."""
    return config.hidden_size, config.w13_rows, config.intermediate_size, config.num_experts, config.top_k


def expert_numbers(config: MoEConfig) -> int:
    """Return the number of values in an expert's matrices."""
    return config.hidden_size * (config.w13_rows + config.intermediate_size)


def rows_text(wire: Wire) -> str:
    """Return the format of rows on the wire as the files write it, out / back."""
    return f"{'fp8' if 'fp8' in wire.dispatch else 'bf16'} / {'fp8' if wire.combine == 'fp8' else 'bf16'}"


def dispatch_format(rows: str) -> str:
    """Return the part of `rows_text` for dispatch (out)."""
    return rows.partition(" / ")[0]


@cache
def measured() -> tuple[MeasuredLine, ...]:
    """Return the lines of all files that are ours, in one part, and over a transport."""
    found = []
    folder = resources.files("ep_moe.bench") / "measured"
    for file in sorted((one for one in folder.iterdir() if one.name.endswith(".csv")), key=lambda one: one.name):
        gpu = re.search(r"-([hb]\d00)[-.]", file.name)
        assert gpu is not None, f"{file.name} does not name its GPU"
        for line in csv.DictReader(file.read_text().splitlines()):
            name = line["name"]
            if line["owner"] == "ours" and " + " in name and "parts" not in name and line["us"]:
                found.append(_line(file.name, GPUS[gpu[1]], line))
    return tuple(found)


def _line(file: str, gpu: GPU, line: dict[str, str]) -> MeasuredLine:
    model, ranks, tokens, scheme, rows = (
        line["model"],
        int(line["ranks"]),
        int(line["tokens"]),
        line["scheme"],
        line["rows"],
    )
    config = config_named(model)

    def least(kind: Kind) -> Floor:
        return busiest_floor(config, kind, ranks, tokens, per_host=ranks, way=deduplicated)

    # the floor in the file was computed with the rows of `KINDS`, whatever the line's own rows are
    as_filed = least(kind_of(gpu, scheme, KINDS[line["weights"]].wire)).in_turn
    return MeasuredLine(
        file, gpu.name, config, model, ranks, tokens, line["name"], scheme, rows, float(line["us"]),
        least(kind_of(gpu, scheme, _wire(scheme, rows))), float(line["floor_apart_us"]) / as_filed,
    )  # fmt: skip


def _wire(scheme: str, rows: str) -> Wire:
    """Return the wire of a line. Rows in fp8 have the format that the scheme's kernel reads."""
    out, _, back = rows.partition(" / ")
    known = {"fp8_static": "fp8_tensor", "fp8_block": "fp8_block"}
    dispatch = "plain" if out == "bf16" else known.get(scheme, "fp8_row")
    scale = 1.0 if dispatch in ONE_SCALE else None  # no size depends on it
    return Wire(dispatch=dispatch, combine="fp8" if back == "fp8" else "plain", input_scale=scale)
