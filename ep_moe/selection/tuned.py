"""Files of `ep-moe tune`, and the tuning of a layer's kernel on one rank.

`ep-moe tune` measures the fastest transport and kernel per number of tokens, for one layer shape on one machine.

A bucket is an upper bound of the tokens that any rank sends in one call. All ranks have the same token limit
(`EPContext(max_tokens=)`, `EPContext.token_limit`). The smallest bucket of at least this limit serves a call, without
synchronizing the device or communicating with other ranks.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ep_moe._version import __version__
from ep_moe.checks import check_path, flat_facts, from_table, shown
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
    """The measured time of one pair of transport and kernel in one bucket.

    Args:
        tokens: The tokens that every rank sends.
        experts: The kernel's name.
        all2all: The transport's name.
        us: The time of dispatch, experts and combine in microseconds: the slowest rank's median.
        pipeline: The value of `MoELayer(pipeline=)`.
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
        machine: The properties of the machine that times depend on, see `machine_facts`.
        layer: The properties of the layer that times depend on, see `layer_facts`.
        versions: The versions of the measured software.
        buckets: The fastest pair of each bucket, in ascending order of tokens.
        measured: All measured pairs.

    Raises:
        ConfigError: There are no buckets, or they are not in ascending order.
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
        """Compare the measured machine and layer with given ones.

        Args:
            machine: The result of `machine_facts`.
            layer: The result of `layer_facts`.

        Returns:
            The differences, or None.
        """
        lines = [
            f"{what} {name} is {here.get(name)!r} here and {measured.get(name)!r} in the file"
            for what, measured, here in (("machine", self.machine, machine), ("layer", self.layer, layer))
            for name in sorted(measured.keys() | here.keys())
            if measured.get(name) != here.get(name)
        ]
        return "; ".join(lines) or None

    def other_versions(self, versions: Mapping[str, Any]) -> str | None:
        """Compare the measured versions with the installed ones. With other versions, times may differ.

        Args:
            versions: The result of `versions`.

        Returns:
            The software whose version differs, or None.
        """
        names = [name for name in versions if versions[name] != self.versions.get(name)]
        return ", ".join(f"{name} is {versions[name]}, was {self.versions.get(name)}" for name in names) or None

    def save(self, path: str | Path) -> None:
        """Write a file for `load`.

        Args:
            path: The file. An existing file is overwritten.
        """
        table = {"format": FORMAT, "machine": self.machine, "layer": self.layer, "versions": self.versions}
        rows = {"buckets": [as_row(one) for one in self.buckets], "measured": [as_row(one) for one in self.measured]}
        text = json.dumps(table, indent=1)[:-2]  # one line per measurement, for readability
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
            ConfigError: The file does not exist, or was not written by `ep-moe tune`.
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
    """Return the index of the bucket that serves a number of tokens.

    Args:
        bounds: The bounds of the buckets, ascending.
        tokens: The tokens of the call.

    Returns:
        The index of the first bound that is at least `tokens`, or of the last bound if all are smaller.
    """
    return min(bisect_left(bounds, tokens), len(bounds) - 1)


def as_row(line: Measured) -> dict[str, Any]:
    """Convert a measurement to a JSON object.

    Args:
        line: The measurement.

    Returns:
        Its fields, without those that are None.
    """
    return {name: value for name, value in dataclasses.asdict(line).items() if value is not None}


def from_row(row: Any, where: str) -> Measured:
    """Convert a JSON object to a measurement.

    Args:
        row: The object.
        where: The name of the line in errors.

    Returns:
        The measurement.

    Raises:
        ConfigError: `row` is not an object, or has wrong fields.
    """
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be an object, got {row!r}; tune again")
    return from_table(Measured, row, where=where)


def _rows(value: Any, where: str) -> tuple[Measured, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list, got {value!r}; tune again")
    return tuple(from_row(row, f"{where}[{index}]") for index, row in enumerate(value))


def layer_facts(config: MoEConfig, scheme: str, wire: Wire, dtype: torch.dtype) -> dict[str, Any]:
    """Return the properties of a layer that times depend on. `Wire.input_scale` is not one of them.

    Args:
        config: The layer's configuration.
        scheme: The name of its quantization.
        wire: The format of rows during transport.
        dtype: The layer's dtype.

    Returns:
        Values by name.
    """
    facts = flat_facts(config, "MoEConfig")
    shape = {name: facts[f"MoEConfig.{name}"] for name in _SHAPE}
    rows = {"Wire.dispatch": wire.dispatch, "Wire.combine": wire.combine}
    return {**shape, "quantization": scheme, **rows, "dtype": dtype_name(dtype)}


def machine_facts(device: torch.device, ep: int, etp: int, nodes: int = 1) -> dict[str, Any]:
    """Return the properties of a machine that times depend on.

    Args:
        device: The device of a rank.
        ep: The number of ranks of the EP group.
        etp: The number of ranks that share an expert.
        nodes: The number of nodes of the EP group.

    Returns:
        Values by name.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": gpu, "ep": ep, "etp": etp} | ({"nodes": nodes} if nodes > 1 else {})


def versions() -> dict[str, Any]:
    """Return the versions of the installed software by name."""
    try:
        flashinfer = version("flashinfer-python")
    except PackageNotFoundError:
        flashinfer = "not installed"
    return {"ep_moe": __version__, "torch": str(torch.__version__), "flashinfer": flashinfer}


def fastest_per_bucket(lines: Sequence[Measured], layouts: Mapping[str, Hashable]) -> tuple[Measured, ...]:
    """Choose the fastest measurement of each bucket, among kernels with one layout of the weights.

    A layer stores its weights in one layout, so one layout serves all buckets. Among the layouts that were measured in
    every bucket, this chooses the one with the least sum over buckets of (its best time / the best time of all
    layouts). The earlier one wins a tie. Kernels of this layout may differ per bucket.

    Args:
        lines: The measurements.
        layouts: Kernel -> the layout of its weights, in order of preference.

    Returns:
        One measurement per bucket, in ascending order of tokens.

    Raises:
        ConfigError: No layout was measured in every bucket.
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
    """Tune a kernel on the rank with the most experts, and return the result on all ranks. Collective.

    Args:
        kernel: The layer's kernel on this rank.
        context: The layer's context.
        placed: The layer's expert map.
        rows: The numbers of received rows to measure.
        cache: A folder that stores results, None for none.
        name: The layer's name, for errors.

    Returns:
        The result of `kernel.tune` on that rank.
    """
    busiest = max(range(placed.num_ranks), key=placed.num_slots)
    found: list[int] = context.consensus.compute_on_owner(
        f"tune {name}",
        lambda: kernel.tune(_counts(rows), None if cache is None else Path(cache).expanduser()),
        owner=busiest * context.layout.etp,  # its rank in the first EP group
        deadline_s=TUNING_S,
    )
    if context.layout.rank == 0:
        _log.info("%s: tuned %s for rows=%s", name, kernel.name, shown(rows))
    return found


def _counts(rows: Sequence[int]) -> list[int]:
    if not isinstance(rows, Iterable):
        raise ConfigError(f"tune: rows must be a list of integers of at least 1, got {shown(rows)}")
    counts = list(rows)
    for count in counts:
        if type(count) is not int or count < 1:
            raise ConfigError(f"tune: rows must be integers of at least 1, got {shown(count)}")
    return counts
