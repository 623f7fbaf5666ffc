"""What `bench.layer` measured (`docs/reference/benchmarks/layer-*.csv`), beside the floors of `bench.floors`."""

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
    """One line of a file: a layer in one part, of uniform routing.

    Args:
        file: Its name.
        gpu: By the file's name, such as "h200".
        config: Of the model, a bundled one.
        model: Its name.
        ranks: Of the EP group.
        tokens: Of each rank.
        pair: Kernel and transport, as in "bf16_triton + nvlink_p2p".
        scheme: Of the experts.
        rows: As the file says how rows traveled, such as "fp8 / bf16".
        us: Measured.
        floor: Of uniform routing, at the GPU's rates of `runtime.gpus`.
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
    """The floor in turn of a kernel that reads weights and multiplies beside each other as far as kernels do.

    Where both take equally long, the floor supposes that one hides the other completely. Own kernels over `nvlink_p2p`
    take, without launches, 1.2 to 2.1 times the floor where the shorter is over half of the longer, and 0.9 to 1.5
    times elsewhere; of the root of the sum of squares, 1.0 to 1.7 and 0.9 to 1.5 times.

    Args:
        floor: Of the layer.

    Returns:
        Microseconds.
    """
    return math.hypot(floor.weights, floor.products) + floor.wire


def log_rows(config: MoEConfig, ranks: int, tokens: int) -> float:
    """Binary logarithm of the routes that an expert gets in one call, with uniform routing."""
    return math.log2(tokens * ranks * config.top_k / config.num_experts)


def layer_sizes(config: MoEConfig) -> tuple[int, ...]:
    """What times depend on; equal for layers that take equally long."""
    return config.hidden_size, config.w13_rows, config.intermediate_size, config.num_experts, config.top_k


def expert_numbers(config: MoEConfig) -> int:
    """Numbers of an expert's matrices."""
    return config.hidden_size * (config.w13_rows + config.intermediate_size)


def rows_text(wire: Wire) -> str:
    """How rows travel, out and back, as the files say it."""
    return f"{'fp8' if 'fp8' in wire.dispatch else 'bf16'} / {'fp8' if wire.combine == 'fp8' else 'bf16'}"


def out_of(rows: str) -> str:
    """The part of `rows_text` that is about the way out."""
    return rows.partition(" / ")[0]


@cache
def measured() -> tuple[MeasuredLine, ...]:
    """Lines of all files: ours, in one part, over a transport."""
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

    # the file's floor has the rows of `KINDS` whatever the line's rows were
    as_filed = least(kind_of(gpu, scheme, KINDS[line["weights"]].wire)).in_turn
    return MeasuredLine(
        file, gpu.name, config, model, ranks, tokens, line["name"], scheme, rows, float(line["us"]),
        least(kind_of(gpu, scheme, _wire(scheme, rows))), float(line["floor_apart_us"]) / as_filed,
    )  # fmt: skip


def _wire(scheme: str, rows: str) -> Wire:
    """Of a line: rows in fp8 have the format of the scheme's kernel."""
    out, _, back = rows.partition(" / ")
    known = {"fp8_static": "fp8_tensor", "fp8_block": "fp8_block"}
    dispatch = "plain" if out == "bf16" else known.get(scheme, "fp8_row")
    scale = 1.0 if dispatch in ONE_SCALE else None  # no size depends on it
    return Wire(dispatch=dispatch, combine="fp8" if back == "fp8" else "plain", input_scale=scale)
