"""Plans a recorded load trace for other numbers of ranks and redundant experts, with the planner that runs online."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ep_moe.checks import check_count, check_kind, check_not_negative, check_picture, check_positive, check_share
from ep_moe.config import MoEConfig, load_model_config
from ep_moe.eplb.cost import H200, LayerTime, Machine, Price, verdict
from ep_moe.eplb.planner.packing import Floats, Ints
from ep_moe.eplb.planner.plan import plan
from ep_moe.eplb.planner.score import Traffic, balancedness, critical_path, loads_by_rank, traffic
from ep_moe.eplb.trace import LoadTrace
from ep_moe.errors import ConfigError
from ep_moe.placement.expert_map import ExpertMap


@dataclass(frozen=True, kw_only=True)
class Question:
    """Options of a what-if plan.

    nodes, groups, tolerance, enough: see `plan`
    within_steps: see `verdict`
    bytes_per_weight: see `LayerTime.of`
    """

    nodes: int = 1
    groups: int = 1
    tolerance: float = 0.01
    enough: float = 1.0
    within_steps: int = 3000
    bytes_per_weight: float = 2.0
    machine: Machine = H200

    def __post_init__(self) -> None:
        for name in ("nodes", "groups", "within_steps"):  # errors have the names of the command's options
            object.__setattr__(self, name, check_count(name, getattr(self, name), at_least=1))
        check_positive("bytes_per_weight", self.bytes_per_weight)
        check_not_negative("tolerance", self.tolerance)
        check_share("enough", self.enough)
        check_kind("Question.machine", self.machine, Machine)


@dataclass(frozen=True, eq=False)
class Answer:
    """The result for one number of ranks and of redundant experts.

    before: float64 [layers, R], load per rank and step under the linear map, redundant experts last
    after: float64 [layers, R], load per rank and step under the planned maps
    held_out: balancedness of maps planned on the first half of the trace, on its second half; None for one step
    """

    ranks: int
    redundant: int
    before: Floats
    after: Floats
    held_out: float | None
    moved: Traffic
    price: Price

    def cells(self) -> list[str]:
        found = [f"{balancedness(loads).mean():.3f}" for loads in (self.before, self.after)]
        found += [f"{critical_path(self.after):.3f}", "" if self.held_out is None else f"{self.held_out:.3f}"]
        found += [f"{self.price.before_ms:.4g}", f"{self.price.after_ms:.4g}"]
        moved = (self.moved.local_bytes, self.moved.same_node_bytes, self.moved.other_node_bytes)
        return [str(self.ranks), str(self.redundant), *found, *[f"{size / 1e9:.3g}" for size in moved]]

    def facts(self) -> dict[str, Any]:
        """Return the values of `cells` for programs: sizes in bytes, balancedness as the mean over layers."""
        return {
            "ranks": self.ranks,
            "redundant": self.redundant,
            "possible": True,
            "balancedness_before": float(balancedness(self.before).mean()),
            "balancedness_after": float(balancedness(self.after).mean()),
            "critical_path_after": float(critical_path(self.after)),
            "balancedness_held_out": self.held_out,
            "before_ms": self.price.before_ms,
            "after_ms": self.price.after_ms,
            "local_bytes": self.moved.local_bytes,
            "same_node_bytes": self.moved.same_node_bytes,
            "other_node_bytes": self.moved.other_node_bytes,
            "verdict": self.verdict,
        }

    @property
    def verdict(self) -> str:
        return str(self.price)


TITLE = (
    "balancedness before, after, after by time, on the held-out half; ms a step; GB to move within a rank, within a "
    "node, between nodes"
)
COLUMNS = [
    *("ranks", "redundant", "before", "after", "by time", "held", "ms before", "ms after"),
    *("GB rank", "GB node", "GB nodes"),
]


@dataclass(frozen=True)
class Impossible:
    """A combination that is impossible, with the reason."""

    ranks: int
    redundant: int
    reason: str

    def cells(self) -> list[str]:
        return [str(self.ranks), str(self.redundant), *["-"] * (len(COLUMNS) - 2)]

    def facts(self) -> dict[str, Any]:
        """Return the values of `cells` for programs."""
        return {"ranks": self.ranks, "redundant": self.redundant, "possible": False, "verdict": self.verdict}

    @property
    def verdict(self) -> str:
        return f"impossible: {self.reason}"


def what_if(
    trace: LoadTrace,
    ranks: Sequence[int],
    redundant: Sequence[int],
    question: Question,
    model: str | MoEConfig | None = None,
) -> list[Answer | Impossible]:
    """Return an answer for each number of ranks combined with each number of redundant experts.

    model: the configuration that states the sizes, or its name or path. Default: the trace's own model. Raises
        ConfigError if it has another number of experts than the trace.
    """
    config = _config(trace, model)
    rows: list[Answer | Impossible] = []
    for count in ranks:
        check_count("ranks", count, at_least=1)
    for extra in redundant:
        check_count("redundant", extra, at_least=0)
    for count in ranks:
        for extra in redundant:
            try:
                rows.append(_answer(trace, config, count, extra, question))
            except ConfigError as error:
                rows.append(Impossible(count, extra, str(error)))
    return rows


def _config(trace: LoadTrace, model: str | MoEConfig | None) -> MoEConfig:
    name = model or trace.model
    if not name:
        raise ConfigError("the trace names no model; give one with --model, bundled or a .toml file")
    config = name if isinstance(name, MoEConfig) else load_model_config(name).moe
    name = name if isinstance(name, str) else "the model"
    if config.num_experts != trace.num_experts:
        raise ConfigError(f"{name} has {config.num_experts} experts, the trace {trace.num_experts}")
    return config


def _answer(trace: LoadTrace, config: MoEConfig, ranks: int, redundant: int, question: Question) -> Answer:
    if ranks > trace.num_experts + redundant:
        raise ConfigError(
            f"{ranks} ranks for {trace.num_experts} + {redundant} slots; at least {ranks - trace.num_experts} "
            f"redundant experts would give each rank one"
        )
    old = [ExpertMap.redundant(trace.num_experts, ranks, redundant)] * trace.num_layers
    load = trace.window() / trace.steps
    new = _planned(load, old, question)
    time = LayerTime.of(config, question.machine, bytes_per_weight=question.bytes_per_weight)
    per_node = ranks // question.nodes
    moved = traffic(old, new, expert_bytes=time.expert_bytes, ranks_per_node=per_node)
    price = verdict(load, old, new, moved=moved, time=time, within_steps=question.within_steps, ranks_per_node=per_node)
    half, held_out = trace.steps // 2, None
    if half:
        later = loads_by_rank(trace.window(half), _planned(trace.window(0, half), old, question))
        held_out = float(balancedness(later).mean())
    return Answer(ranks, redundant, loads_by_rank(load, old), loads_by_rank(load, new), held_out, moved, price)


def _planned(load: Floats | Ints, old: Sequence[ExpertMap], question: Question) -> list[ExpertMap]:
    asked = question
    return plan(load, old, groups=asked.groups, nodes=asked.nodes, tolerance=asked.tolerance, enough=asked.enough)


def plot(rows: Sequence[Answer | Impossible], file: str | Path) -> None:
    """Plot each rank's load over the mean of its layer as heat maps, before and after, for each possible combination.

    Raises ConfigError if `file` is no picture's name, or no combination is possible.
    """
    check_picture("plot", Path(file))
    from matplotlib.figure import Figure

    answers = [row for row in rows if isinstance(row, Answer)]
    if not answers:
        raise ConfigError("there is nothing to plot: no combination is possible")
    figure = Figure(figsize=(10, 3 * len(answers) + 0.5), layout="constrained")
    for axes, answer in zip(figure.subplots(len(answers), 2, squeeze=False), answers, strict=True):
        relative = [_over_mean(loads) for loads in (answer.before, answer.after)]
        top = max(float(values.max()) for values in relative)
        for name, values, one in zip(("before", "after"), relative, axes, strict=True):
            image = one.imshow(values, aspect="auto", vmin=0, vmax=top, interpolation="nearest")
            title = f"{answer.ranks} ranks, {answer.redundant} redundant, {name}"
            one.set(xlabel="rank", ylabel="layer", title=f"{title}: fullest {values.max():.2f}")
        figure.colorbar(image, ax=list(axes), label="load / mean of the layer")
    figure.savefig(file, dpi=120)


def _over_mean(loads: Floats) -> Floats:
    mean = loads.mean(1, keepdims=True)
    return np.asarray(np.divide(loads, mean, out=np.ones_like(loads), where=mean > 0))
