"""Reads the load counters of layers: summed over a window of steps, or step by step as a LoadTrace."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ep_moe.checks import check_count
from ep_moe.eplb.migration.transfer import BalancedLayer
from ep_moe.eplb.trace import LoadTrace
from ep_moe.errors import ConfigError, InputError
from ep_moe.parallel.rank_group import RankGroup


class LoadWindow:
    """Counts the load of all layers over the last `window` of every `interval` steps, int64 [layers, E].

    Counts are taken as differences of the layers' counters on the device, and copied to the host asynchronously. The
    counters are never reset, because others read them too. If someone else resets one, its layer starts at zero.
    """

    @torch.inference_mode(False)  # tensors made in inference mode could not be written outside of it
    def __init__(self, layers: Sequence[BalancedLayer], interval: int, window: int) -> None:
        self._placements = [layer.placement for layer in layers]
        self._interval, self._window = interval, window
        self._resets: list[int] | None = None  # while a window is open
        self._event: torch.cuda.Event | None = None
        self._before = torch.stack([placement.expert_load for placement in self._placements])
        self._counts = torch.empty_like(self._before)
        self._on_host = torch.empty(
            self._counts.shape, dtype=torch.int64, device="cpu", pin_memory=self._counts.is_cuda
        )
        # run all kernels once now: loading them later would delay a forward
        self._open()
        self.close()
        self.opens(0)

    def ends(self, steps: int) -> bool:
        """Return whether a window ends with step number `steps`. The caller then calls `close`, or drops the window."""
        return self._interval > 0 and steps % self._interval == 0

    def opens(self, steps: int) -> None:
        """Begin a window if one begins after step number `steps`. Call it after each step."""
        if self._interval > 0 and (steps + self._window) % self._interval == 0:
            self._open()

    def _open(self) -> None:
        self._read(self._before)
        self._resets = self._reset_counts()

    def close(self) -> None:
        assert self._resets is not None, "close() needs a window that has begun"
        for row, mine, before in zip(self._before, self._reset_counts(), self._resets, strict=True):
            if mine != before:  # the layer's counter was reset to zero within the window
                row.zero_()
        self._resets = None
        self._read(self._counts)
        self._counts -= self._before
        self._on_host.copy_(self._counts, non_blocking=True)
        if self._counts.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._counts.device))

    @property
    def copied(self) -> bool:
        """Whether the counts have arrived on the host. Queries the device without waiting."""
        return self._event is None or self._event.query()

    def take(self) -> Tensor:
        """Return this rank's counts of the last window, on the host. Valid once `copied`, until the next `close`."""
        return self._on_host

    def _read(self, out: Tensor) -> None:
        torch.stack([placement.expert_load for placement in self._placements], out=out)

    def _reset_counts(self) -> list[int]:
        return [placement.resets for placement in self._placements]


class LoadRecorder:
    """Records a `LoadTrace`: one copy of the load counters per step, on the device.

    Args:
        layers: The layers, all with the same E.
        lockstep: The group of the ranks that run the layers together, `context.rank_groups["lockstep"]`.
        steps: The largest number of steps that is recorded.

    Raises:
        ConfigError: The layers have different numbers of experts.
    """

    @torch.inference_mode(False)  # tensors made in inference mode could not be written outside of it
    def __init__(self, layers: Sequence[BalancedLayer], lockstep: RankGroup, *, steps: int) -> None:
        check_count("LoadRecorder.steps", steps, at_least=1)
        self._layers, self._rank_group = list(layers), lockstep
        self._placements = [layer.placement for layer in layers]
        experts = {layer.name: len(layer.placement.expert_load) for layer in layers}
        if len(set(experts.values())) != 1:
            raise ConfigError(f"LoadRecorder.layers must be alike in E, got {experts}; make a recorder for each kind")
        start = torch.stack([placement.expert_load for placement in self._placements])
        self._rows = start.new_zeros(steps + 1, *start.shape)
        self._rows[0] = start
        self._resets = [self._reset_counts()]

    def step(self) -> None:
        """Record one forward. Call it after each forward, on all ranks. Steps beyond the last are not recorded."""
        number = len(self._resets)
        if number < len(self._rows):
            torch.stack([placement.expert_load for placement in self._placements], out=self._rows[number])
            self._resets.append(self._reset_counts())

    def finish(self, model: str = "") -> LoadTrace:
        """Sum the recorded counts over all ranks. Collective over the lockstep group; synchronizes with the device.

        The tokens of a step are the largest routes / top_k of its layers, rounded up.

        Args:
            model: The model's name, which is stored in the trace.

        Returns:
            The trace, the same on all ranks.

        Raises:
            InputError: On all ranks, if the ranks recorded different numbers of steps, or none.
        """
        with self._rank_group.flight_recorder.step("record load"):
            self._check_alike()
        rows = self._rows[: len(self._resets)]
        resets = torch.tensor(self._resets, dtype=torch.int64, device="cpu")
        same = (resets[1:] == resets[:-1]).to(rows.device).unsqueeze(2)
        counts = rows[1:] - rows[:-1] * same
        if self._rank_group.size > 1:
            with self._rank_group.flight_recorder.step("record load"):
                self._rank_group.all_reduce(counts)
        # all members of an etp group count the same rows
        counts = counts.cpu() // self._layers[0].expert_weights.etp.size
        top_k = torch.tensor(
            [layer.expert_weights.config.top_k for layer in self._layers], dtype=torch.int64, device="cpu"
        )
        tokens = (-(-counts.sum(2) // top_k)).max(1).values
        names = tuple(layer.name for layer in self._layers)
        return LoadTrace(counts.numpy(), tokens.numpy(), model, names)

    def _check_alike(self) -> None:
        steps = len(self._resets) - 1
        problem = None if steps else "LoadRecorder has recorded no step; call step() after each forward"
        found = [row[0] for row in self._rank_group.agree([steps], problem, self._rows.device)]
        odd = next((at for at, theirs in enumerate(found) if theirs != found[0]), None)
        if odd is not None:
            first, other = self._rank_group.ranks[0], self._rank_group.ranks[odd]
            raise InputError(
                f"LoadRecorder has recorded {found[0]} steps on rank {first} and {found[odd]} on rank {other}; give "
                f"all ranks the same `steps` and call step() after each forward on all of them"
            )

    def _reset_counts(self) -> list[int]:
        return [placement.resets for placement in self._placements]
