"""ExpertBalancer: counts load, plans maps, moves experts and commits the maps. All ranks act at the same step.

    forward  step()  forward  step()  forward  step() ...

`rebalance` implements a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ep_moe.eplb.migration.background import decision_for_user_maps
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

    All ranks of the world construct it, as they do the context. Every rank calls `step` after each forward, on the
    stream that the layers run on. `update_expert` may be called at any time, on all ranks with the same arguments.
    A conversion of a layer (`.to`, `.half`) is refused while its experts move.

    If a rebalance is rolled back, the former maps stay in force. `step` raises RebalanceError, and the balancer
    continues with the next window. If a rank was lost, `step` raises PeerTimeout, or the error that the layers would
    raise. The balancer is then OFF, and each further `step` raises the same error.

    Args:
        layers: A model, or its MoE layers in the order of construction, all with the same E. Their expert weights must
            not require gradients, because an optimizer's state does not move with the experts.
        context: The layers' EPContext. `close` the balancer before it.
        config: When and how experts move. Default: `EPLBConfig()`.
        planner: A function (load int64 [layers, E], maps in force) -> one map per layer. It runs in a thread on every
            rank, and its result must depend on its arguments alone. Default: `ep_moe.eplb.plan`.

    Attributes:
        config: When and how experts move.
        layers: The layers that are balanced, in the order of construction.

    Raises:
        ConfigError: On all ranks, if the layers cannot be balanced, or ranks construct different balancers.
    """

    @property
    def state(self) -> State:
        """The stage of the rebalance: IDLE if none is under way, OFF once the balancer has ended."""
        return self._state

    @_on_its_device
    def step(self) -> None:
        """Count a forward and advance a rebalance. Call it after each forward, on all ranks.

        It does not wait for the device. It waits for peers if a transfer on the CPU, or the status exchange begun
        `sync_every` steps ago, has not arrived.

        Raises:
            RebalanceError: On all ranks, if a rebalance was rolled back. The maps in force stay.
            PeerTimeout: If a rank was lost. The balancer is off.
            InputError: After `close`.
        """
        self._check_on("step")
        self._steps += 1
        try:
            self._advance()
        finally:
            self._watch_window()

    @_on_its_device
    def move_to(self, maps: Sequence[ExpertMap]) -> None:
        """Begin to move the experts to the given maps in the following steps. Call it on all ranks after the same step.

        Args:
            maps: One per layer.

        Raises:
            InputError: A rebalance is under way, or the balancer is closed.
        """
        self._check_on("move_to")
        if self._state is not State.IDLE:
            raise InputError(f"move_to: a rebalance is under way ({self._state.name}); settle() first")
        self._plan(partial(decision_for_user_maps, maps, len(self.layers)))
        self._post_status()

    @_on_its_device
    def settle(self) -> None:
        """Complete the rebalance that is under way, without forwards. Call it on all ranks, after the same step.

        Raises:
            RebalanceError: On all ranks, if the rebalance was rolled back. The maps in force stay.
            PeerTimeout: If a rank was lost. The balancer is off.
            InputError: After `close`.
        """
        self._check_on("settle")
        while self._state is not State.IDLE:
            time.sleep(_PAUSE_S)
            self._advance()

    @contextmanager
    def no_stats(self) -> Iterator[None]:
        """Do not count load in any layer within this context manager, such as in warm-up and idle steps.

        Yields:
            Nothing.
        """
        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(layer.placement.no_stats())
            yield

    def stats(self) -> BalancerStats:
        """Return what the balancer has done so far. Local; does not synchronize with the device.

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
        """Complete the rebalance that is under way and destroy the balancer's process groups. Collective, idempotent.

        Raises:
            RebalanceError: If the rebalance was rolled back, as `step` would have raised it. The groups are destroyed.
            PeerTimeout: If a rank was lost.
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
