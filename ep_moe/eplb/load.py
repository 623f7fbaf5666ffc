"""Load as the placements count it on the device: of a window of steps, or step by step as a LoadTrace."""

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
    """The counts of all layers over the last `window` of every `interval` steps, int64 [layers, E]: taken on the
    device, copied to the host without a wait. What others count or reset meanwhile is theirs."""

    @torch.inference_mode(False)  # or what is made within one could not be written outside
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
        # once, since a forward would wait for kernels that are loaded meanwhile
        self._open()
        self.close()
        self.opens(0)

    def ends(self, steps: int) -> bool:
        """Whether the last of `steps` steps is the last of a window too: then `close` it, or let it be."""
        return self._interval > 0 and steps % self._interval == 0

    def opens(self, steps: int) -> None:
        """After each step: begin a window where one begins."""
        if self._interval > 0 and (steps + self._window) % self._interval == 0:
            self._open()

    def _open(self) -> None:
        self._read(self._before)
        self._resets = self._reset_counts()

    def close(self) -> None:
        assert self._resets is not None, "a window ends that has not begun"
        for row, mine, before in zip(self._before, self._reset_counts(), self._resets, strict=True):
            if mine != before:  # a layer that was reset began anew
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
        """Whether the counts are on the host; asks the device and does not wait."""
        return self._event is None or self._event.query()

    def take(self) -> Tensor:
        """The last window's counts of this rank, on the host, once `copied`; until the next `close`."""
        return self._on_host

    def _read(self, out: Tensor) -> None:
        torch.stack([placement.expert_load for placement in self._placements], out=out)

    def _reset_counts(self) -> list[int]:
        return [placement.resets for placement in self._placements]


class LoadRecorder:
    """Record a `LoadTrace`: one copy of the load counters per step, on the device.

    Args:
        layers: Alike in E.
        lockstep: Group of the ranks that run the layers together, `context.rank_groups["lockstep"]`.
        steps: The most steps that are recorded.

    Raises:
        ConfigError: The layers have different numbers of experts.
    """

    @torch.inference_mode(False)  # or what is made within one could not be written outside
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
        """Count one forward. Call it after each forward, on all ranks. Steps beyond the last are not recorded."""
        number = len(self._resets)
        if number < len(self._rows):
            torch.stack([placement.expert_load for placement in self._placements], out=self._rows[number])
            self._resets.append(self._reset_counts())

    def finish(self, model: str = "") -> LoadTrace:
        """Sum what was recorded over all ranks. Collective over the lockstep group; waits for the device.

        A step's tokens are its routes / top_k, of the layer with the most, rounded up.

        Args:
            model: A name, which the trace keeps.

        Returns:
            The trace, the same on all ranks.

        Raises:
            InputError: On all ranks, where the ranks recorded different numbers of steps, or none.
        """
        with self._rank_group.flight_recorder.step("record load"):
            self._check_alike()
        rows = self._rows[: len(self._resets)]
        resets = torch.tensor(self._resets, device="cpu")
        same = (resets[1:] == resets[:-1]).to(rows.device).unsqueeze(2)
        counts = rows[1:] - rows[:-1] * same
        if self._rank_group.size > 1:
            with self._rank_group.flight_recorder.step("record load"):
                self._rank_group.all_reduce(counts)
        # the members of an etp group count the same rows
        counts = counts.cpu() // self._layers[0].expert_weights.etp.size
        top_k = torch.tensor([layer.expert_weights.config.top_k for layer in self._layers], device="cpu")
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
