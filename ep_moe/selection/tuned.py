"""What was measured for a layer: by `ep-moe tune`, the fastest transport and kernel per number of tokens, for one layer
shape on one machine; and by a layer's own kernel, whose tuning one rank does for all.

A bucket is a bound on the tokens that any rank sends in one call, and all ranks state theirs alike
(`EPContext(max_tokens=)`, `EPContext.token_limit`): the smallest bucket that holds the bound in force serves the call,
and nothing is asked of the device or of a peer.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ep_moe._version import __version__
from ep_moe.checks import check_path, flat_facts, from_table
from ep_moe.config import MoEConfig, Wire
from ep_moe.context import TUNING_S, EPContext
from ep_moe.errors import ConfigError
from ep_moe.experts.base import Experts
from ep_moe.experts.fused.base import FusedExperts
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.types import dtype_name

_log = logging.getLogger("ep_moe.selection")

FORMAT = 1
_SHAPE = ("hidden_size", "intermediate_size", "num_experts", "top_k", "activation", "expert_bias")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One pair of transport and kernel, timed at one bucket.

    Args:
        tokens: That every rank sends.
        experts: The kernel's name.
        all2all: The transport's name.
        us: Of dispatch, experts and combine, in microseconds: the slowest rank's median.
        pipeline: As `MoELayer` takes it.
    """

    tokens: int
    experts: str
    all2all: str
    us: float
    pipeline: int | None = None

    def __str__(self) -> str:
        return f"{self.all2all} with {self.experts}{'' if self.pipeline is None else f' in parts of {self.pipeline}'}"


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The contents of a file of `ep-moe tune`.

    Args:
        machine: What the times depend on of a machine, as `machine_facts` says.
        layer: What the times depend on of a layer, as `layer_facts` says.
        versions: Of the software that was measured.
        buckets: The fastest pair of each bucket, tokens ascending.
        measured: All that were timed.

    Raises:
        ConfigError: the buckets are none, or not ascending.
    """

    machine: dict[str, Any]
    layer: dict[str, Any]
    versions: dict[str, Any]
    buckets: tuple[Measured, ...]
    measured: tuple[Measured, ...] = ()

    def __post_init__(self) -> None:
        tokens = [bucket.tokens for bucket in self.buckets]
        if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1:
            raise ConfigError(f"Tuned.buckets must have ascending tokens of at least 1, got {tokens}; tune again")

    def mismatch(self, machine: Mapping[str, Any], layer: Mapping[str, Any]) -> str | None:
        """Compare with this machine and layer.

        Args:
            machine: As `machine_facts` gives it.
            layer: As `layer_facts` gives it.

        Returns:
            None, or in what they differ from those that were measured.
        """
        lines = [
            f"{what} {name} is {here.get(name)!r} here and {measured.get(name)!r} in the file"
            for what, measured, here in (("machine", self.machine, machine), ("layer", self.layer, layer))
            for name in sorted(measured.keys() | here.keys())
            if measured.get(name) != here.get(name)
        ]
        return "; ".join(lines) or None

    def other_versions(self, versions: Mapping[str, Any]) -> str | None:
        """Compare with the software that is installed. With other versions the times may have changed.

        Args:
            versions: As `versions` gives them.

        Returns:
            None, or which software has another version than what was measured.
        """
        names = [name for name in versions if versions[name] != self.versions.get(name)]
        return ", ".join(f"{name} is {versions[name]}, was {self.versions.get(name)}" for name in names) or None

    def save(self, path: str | Path) -> None:
        """Write a file that `load` reads.

        Args:
            path: The file, which is overwritten.
        """
        table = {"format": FORMAT, "machine": self.machine, "layer": self.layer, "versions": self.versions}
        rows = {"buckets": [as_row(one) for one in self.buckets], "measured": [as_row(one) for one in self.measured]}
        text = json.dumps(table, indent=1)[:-2]  # a line per measurement, to be read by people too
        for name, own in rows.items():
            text += f',\n "{name}": [\n  ' + ",\n  ".join(map(json.dumps, own)) + "\n ]"
        Path(path).write_text(text + "\n}\n")

    @classmethod
    def load(cls, path: str | Path) -> Tuned:
        """Read a file of `ep-moe tune`.

        Args:
            path: The file.

        Returns:
            Its contents.

        Raises:
            ConfigError: there is no such file, or it is another one; names the file and what is wrong with it.
        """
        check_path("Tuned.load: path", path)
        try:
            table = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise ConfigError(f"tuned: there is no file {path}; make it with ep-moe tune") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"tuned: {path} cannot be read as JSON ({error}); tune again") from error
        where = f"tuned: {path}"
        if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
            raise ConfigError(f"{where} must be an object with format {FORMAT}, as ep-moe tune writes it; tune again")
        for name in ("buckets", "measured"):
            table[name] = _rows(table.get(name), f"{where}: {name}")
        for name in ("machine", "layer", "versions"):
            if not isinstance(table.get(name), dict):
                raise ConfigError(f"{where}: {name} must be an object, got {table.get(name)!r}; tune again")
        unknown = table.keys() - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"{where}: unknown key {min(unknown)!r}; tune again")
        return cls(**table)


def bucket_index(bounds: Sequence[int], tokens: int) -> int:
    """Find the bucket that serves a number of tokens.

    Args:
        bounds: Ascending.
        tokens: Of the call.

    Returns:
        The index of the first bound that holds them, of the last one for more than any holds.
    """
    return min(bisect_left(bounds, tokens), len(bounds) - 1)


def as_row(line: Measured) -> dict[str, Any]:
    """Write a line as plain JSON.

    Args:
        line: What was measured.

    Returns:
        Its fields, without those that are None.
    """
    return {name: value for name, value in dataclasses.asdict(line).items() if value is not None}


def from_row(row: Any, where: str) -> Measured:
    """Read a line of JSON.

    Args:
        row: An object.
        where: Names the line in errors.

    Returns:
        What was measured.

    Raises:
        ConfigError: it is no object, or has wrong fields.
    """
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be an object, got {row!r}; tune again")
    return from_table(Measured, row, where=where)


def _rows(value: Any, where: str) -> tuple[Measured, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list, got {value!r}; tune again")
    return tuple(from_row(row, f"{where}[{index}]") for index, row in enumerate(value))


def layer_facts(config: MoEConfig, scheme: str, wire: Wire, dtype: torch.dtype) -> dict[str, Any]:
    """Describe what of a layer its times depend on. A scale of calibrated rows is no part of it.

    Args:
        config: The layer.
        scheme: Its quantization's name.
        wire: How rows travel.
        dtype: Of the layer.

    Returns:
        Values by name.
    """
    facts = flat_facts(config, "MoEConfig")
    shape = {name: facts[f"MoEConfig.{name}"] for name in _SHAPE}
    rows = {"Wire.dispatch": wire.dispatch, "Wire.combine": wire.combine}
    return {**shape, "quantization": scheme, **rows, "dtype": dtype_name(dtype)}


def machine_facts(device: torch.device, ep: int, etp: int, nodes: int = 1) -> dict[str, Any]:
    """Describe what of a machine times depend on.

    Args:
        device: Of a rank.
        ep: Ranks of the EP group.
        etp: Ranks that share an expert.
        nodes: Of the EP group.

    Returns:
        Values by name.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": gpu, "ep": ep, "etp": etp} | ({"nodes": nodes} if nodes > 1 else {})


def versions() -> dict[str, Any]:
    """Versions of the installed software by name."""
    try:
        flashinfer = version("flashinfer-python")
    except PackageNotFoundError:
        flashinfer = "not installed"
    return {"ep_moe": __version__, "torch": str(torch.__version__), "flashinfer": flashinfer}


def fastest_per_bucket(lines: Sequence[Measured], layouts: Mapping[str, Hashable]) -> tuple[Measured, ...]:
    """Choose the fastest line of each bucket, among kernels that can share one layer's weights.

    Prepared weights are held once: of the layouts that were timed in every bucket, the one with the least sum over
    buckets of (its best time / the best time of all), ties to the earlier. Within it the kernel may differ per bucket.

    Args:
        lines: What was measured.
        layouts: Kernel -> the layout that it reads weights in, in order of preference.

    Returns:
        A line per bucket, tokens ascending.

    Raises:
        ConfigError: no kernel was timed in every bucket.
    """
    buckets = sorted({line.tokens for line in lines})
    fastest: dict[Hashable, dict[int, Measured]] = {layout: {} for layout in layouts.values()}
    order = list(layouts)
    for line in sorted(lines, key=lambda line: (line.us, order.index(line.experts))):
        fastest[layouts[line.experts]].setdefault(line.tokens, line)
    whole = {layout: best for layout, best in fastest.items() if len(best) == len(buckets)}
    if not buckets or not whole:
        raise ConfigError(f"tune: no expert kernel could be timed at all of {buckets} tokens")
    least = {tokens: min(line.us for line in lines if line.tokens == tokens) for tokens in buckets}

    def loss(best: Mapping[int, Measured]) -> float:
        return sum(best[tokens].us / least[tokens] for tokens in buckets)

    chosen = min(whole.values(), key=loss)
    return tuple(chosen[tokens] for tokens in buckets)


Kernel = Experts | FusedExperts


def tuned_on_one_rank(
    kernel: Kernel,
    context: EPContext,
    placed: ExpertMap,
    rows: Sequence[int],
    cache: str | Path | None,
    name: str,
) -> list[int]:
    """Let the rank with the most experts tune a kernel. Collective.

    Args:
        kernel: The layer's, on each rank.
        context: Its ranks.
        placed: Which rank has how many experts.
        rows: Numbers of received rows to measure.
        cache: A folder that keeps findings, None for none.
        name: Of the layer, for errors.

    Returns:
        What `kernel.tune` found there, on all ranks.
    """
    busiest = max(range(placed.num_ranks), key=placed.num_slots)
    found: list[int] = context.consensus.share(
        f"tune {name}",
        lambda: kernel.tune(_counts(rows), None if cache is None else Path(cache).expanduser()),
        owner=busiest * context.layout.etp,  # within the first EP group of those that run together
        deadline_s=TUNING_S,
    )
    if context.layout.rank == 0:
        _log.info("%s: tuned %s for %s rows", name, kernel.name, ", ".join(map(str, rows)))
    return found


def _counts(rows: Sequence[int]) -> list[int]:
    for count in rows:
        if type(count) is not int or count < 1:
            raise ConfigError(f"tune: rows must be integers of at least 1, got {count!r}")
    return list(rows)
