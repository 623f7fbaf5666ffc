"""LoadTrace: recorded routes per step, layer and expert, as input for planners offline."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ep_moe.eplb.planner.packing import Ints
from ep_moe.errors import ConfigError

_FORMAT = 1
# what NumPy, zipfile and zlib raise for a file of another kind, or one that is truncated or encrypted
_UNREADABLE = (
    OSError, ValueError, EOFError, TypeError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class LoadTrace:
    """The routes that a model's routers chose in each step, summed over all ranks.

    Args:
        counts: int64 [steps, layers, E], routes to each logical expert.
        tokens: int64 [steps], tokens of the step.
        model: The name of a bundled model configuration, or any other name.
        layers: Names of the layers, in the order of `counts`. Default: their numbers.

    Raises:
        ConfigError: The arrays have a wrong dtype or dimension, or do not fit each other.
    """

    counts: Ints
    tokens: Ints
    model: str = ""
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, dims in (("counts", 3), ("tokens", 1)):
            value = np.asarray(getattr(self, name))
            if value.dtype.kind not in "iu" or value.ndim != dims or not value.size or (value < 0).any():
                raise ConfigError(
                    f"LoadTrace.{name} must be integers of at least 0 in {dims} dimensions, not empty, got "
                    f"{value.dtype} {list(value.shape)}"
                )
            object.__setattr__(self, name, value.astype(np.int64))
        if len(self.tokens) != len(self.counts):
            raise ConfigError(
                f"LoadTrace has {len(self.counts)} steps in counts and {len(self.tokens)} in tokens; give a number of "
                f"tokens for each step"
            )
        if not self.layers:
            object.__setattr__(self, "layers", tuple(map(str, range(self.counts.shape[1]))))
        if len(self.layers) != self.counts.shape[1]:
            raise ConfigError(
                f"LoadTrace.layers has {len(self.layers)} names for {self.counts.shape[1]} layers; give a name for "
                f"each layer, or none at all"
            )

    @property
    def steps(self) -> int:
        """Recorded steps."""
        return len(self.counts)

    @property
    def num_layers(self) -> int:
        """Recorded layers."""
        return int(self.counts.shape[1])

    @property
    def num_experts(self) -> int:
        """E, logical experts of a layer."""
        return int(self.counts.shape[2])

    def window(self, start: int = 0, stop: int | None = None) -> Ints:
        """Sum the counts over a range of steps.

        Args:
            start: The first step. A negative number counts from the end, as in a slice.
            stop: One past the last step. Default: the end of the trace.

        Returns:
            int64 [layers, E].

        Raises:
            ConfigError: No step is in this range.
        """
        chosen = self.counts[start:stop]
        if not len(chosen):
            raise ConfigError(f"LoadTrace.window({start}, {stop}) has none of the {self.steps} steps")
        return np.asarray(chosen.sum(0))

    def save(self, path: str | Path) -> None:
        """Write an .npz file.

        Args:
            path: The file, which is overwritten. ".npz" is appended to a name without it.
        """
        np.savez_compressed(
            path,
            format=np.int64(_FORMAT),
            counts=self.counts,
            tokens=self.tokens,
            model=np.str_(self.model),
            layers=np.array(self.layers, np.str_),
        )

    @classmethod
    def load(cls, path: str | Path) -> LoadTrace:
        """Read a file that `save` wrote.

        Args:
            path: The file, with or without ".npz".

        Returns:
            The trace.

        Raises:
            ConfigError: There is no such file, or it is not a load trace.
        """
        path = path if Path(path).is_file() else f"{path}.npz"
        if not Path(path).is_file():
            raise ConfigError(f"load trace {str(path).removesuffix('.npz')} does not exist, nor with .npz behind it")
        try:
            with np.load(path, allow_pickle=False) as file:
                fields = {name: file[name] for name in file.files}
        except _UNREADABLE as error:
            raise ConfigError(f"{path} is not a load trace; write one with LoadTrace.save") from error
        return cls._of(fields, path)

    @classmethod
    def _of(cls, fields: dict[str, Any], path: str | Path) -> LoadTrace:
        missing = [name for name in ("format", "counts", "tokens", "model", "layers") if name not in fields]
        if missing:
            raise ConfigError(f"{path} is not a load trace: it has no {missing[0]}; write one with LoadTrace.save")
        if fields["format"].shape != () or fields["format"] != _FORMAT:
            raise ConfigError(f"{path} has load trace format {fields['format']}, this version reads {_FORMAT}")
        try:
            names = tuple(map(str, fields["layers"].ravel()))
            return cls(fields["counts"], fields["tokens"], str(fields["model"]), names)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
