"""ExpertBalancer: count, plan, move, commit. All ranks do the same at the same step, or nothing.

    forward  step()  forward  step()  forward  step() ...

What happens in a step is in `rebalance`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ep_moe.eplb.migration.background import given
from ep_moe.eplb.migration.consensus import State
from ep_moe.eplb.rebalance import RebalanceLoop
from ep_moe.eplb.stats import BalancerStats
from ep_moe.errors import InputError
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.runtime.devices import on_device_of

_PAUSE_S = 5e-4
_on_its_device = on_device_of(lambda self, *_: self._context.device)


class ExpertBalancer(RebalanceLoop):
    """Keeps the load of a model's ranks even by moving experts between them.

    Made by all ranks of the world, as the context. Every rank calls `step` after each forward, on the stream that the
    layers run on. `update_expert` may be called at any time, on all ranks alike.

    If a rebalance is rolled back, the former maps stay in force. `step` raises RebalanceError, and the balancer goes on
    with the next window. If a rank was lost, `step` raises PeerTimeout, or what the layers would raise. The balancer is
    then OFF, and each further `step` says so.

    Args:
        layers: A model, or its MoE layers in the order of their making; alike in E. Their expert weights must not
            require gradients: experts move, an optimizer's state would stay behind.
        context: The layers' EPContext. `close` the balancer before it.
        config: When and how experts move. Default: `EPLBConfig()`.
        planner: (load int64 [layers, E], maps in force) -> a map per layer. A function of its arguments alone, run in a
            thread on every rank. Default: `ep_moe.eplb.plan`.

    Attributes:
        config: When and how experts move.
        layers: The layers that are balanced, in the order of their making.

    Raises:
        ConfigError: on all ranks, where the layers cannot be balanced or ranks ask for different balancers.
    """

    @property
    def state(self) -> State:
        """The stage of the rebalance: IDLE between two, OFF where the balancer ended."""
        return self._state

    @_on_its_device
    def step(self) -> None:
        """Count a forward and bring a rebalance forward. Call it after each forward, on all ranks.

        Does not wait for the device. Waits for peers where a transfer on the CPU, or an exchange begun `sync_every`
        steps ago, has not come yet.

        Raises:
            RebalanceError: on all ranks, where a rebalance was rolled back; the maps in force stay.
            PeerTimeout: where a rank was lost; the balancer is off.
            InputError: after `close`.
        """
        self._check_on("step")
        self._steps += 1
        try:
            self._advance()
        finally:
            self._watch_window()

    @_on_its_device
    def move_to(self, maps: Sequence[ExpertMap]) -> None:
        """Begin to move the experts to these maps, in the steps to come. On all ranks, after the same step.

        Args:
            maps: One per layer.

        Raises:
            InputError: a rebalance is under way, or after `close`.
        """
        self._check_on("move_to")
        if self._state is not State.IDLE:
            raise InputError(f"move_to: a rebalance is under way ({self._state.name}); settle() first")
        self._plan(partial(given, maps, len(self.layers)))
        self._tell()

    @_on_its_device
    def settle(self) -> None:
        """Bring what is under way to its end, without forwards. On all ranks, after the same step.

        Raises:
            RebalanceError: on all ranks, where the rebalance was rolled back; the maps in force stay.
            PeerTimeout: where a rank was lost; the balancer is off.
            InputError: after `close`.
        """
        self._check_on("settle")
        while self._state is not State.IDLE:
            time.sleep(_PAUSE_S)
            self._advance()

    @contextmanager
    def no_stats(self) -> Iterator[None]:
        """Count no load within the block, in no layer: for warm-up and idle steps.

        Yields:
            Nothing.
        """
        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(layer.placement.no_stats())
            yield

    def stats(self) -> BalancerStats:
        """Say what the balancer has done. Local, and waits for nothing.

        Returns:
            A snapshot.
        """
        return BalancerStats(
            state=self._state,
            steps=self._steps,
            staging_bytes=self._mover.staging.bytes,
            layers=self._window(),
            price="" if self._price is None else str(self._price),
            predicted=self._price,
            error=self._error,
            **self._counts,
        )

    @_on_its_device
    def close(self) -> None:
        """Bring what is under way to its end and give back the process groups. Collective, idempotent.

        Raises:
            RebalanceError: where that end is a rollback, as `step` would have raised it; the groups are given back.
            PeerTimeout: where a rank was lost.
        """
        if self._end is not None or self._connection.closed:
            return
        try:
            self.settle()
        finally:
            if self._end is None:
                self._connection.close()

    def __enter__(self) -> ExpertBalancer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
