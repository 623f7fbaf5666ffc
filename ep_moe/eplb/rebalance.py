"""The state machine of a balancer: what a rank does between two forwards, and what all ranks decide together.

Each `ExpertBalancer.step` advances it once. A rank checks whether its transfers have ended, and starts the next batch.
Every `sync_every` advances it reads the status of all ranks. The next action follows from these alone, so all ranks
take the same one (`consensus.reach_verdict`). The first vote in the store decides whether a layer's new map comes into
force. A rank that has lost the others can therefore still learn what they did.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ep_moe.checks import shown
from ep_moe.eplb.config import EPLBConfig
from ep_moe.eplb.cost import Price
from ep_moe.eplb.load import LoadWindow
from ep_moe.eplb.migration.background import (
    Background,
    Decision,
    Planner,
    add_transfer_schedules,
    decide,
    default_planner,
    layer_load_stats,
)
from ep_moe.eplb.migration.consensus import (
    Action,
    Connections,
    Context,
    RankStatus,
    State,
    Trouble,
    Verdict,
    connect,
    on_found_nodes,
    reach_verdict,
    with_routers_groups,
)
from ep_moe.eplb.migration.schedule import TransferSchedule
from ep_moe.eplb.migration.transfer import BalancedLayer, Migration
from ep_moe.errors import ConfigError, EPMoEError, InputError, PeerTimeout, RebalanceError
from ep_moe.placement.placement import LayerStats
from ep_moe.runtime.devices import on_device_of

_log = logging.getLogger("ep_moe.eplb")

_COMMIT, _ROLLBACK, _RESTART = "commit", "rollback", "restart"  # votes on the layer whose experts are moving


def _device_of(context: Context) -> torch.device:
    device = getattr(context, "device", None)
    if not isinstance(device, torch.device):
        raise ConfigError(f"ExpertBalancer: context must be an EPContext, got {shown(context)}")
    return device


def _in_use(balancer: Callable[[], RebalanceLoop | None]) -> Callable[[], RebalanceLoop | None]:
    """Return a function that returns a balancer until it is closed, OFF, or freed, and then None."""

    def in_use() -> RebalanceLoop | None:
        found = balancer()
        return None if found is None or found._end is not None or found._connection.closed else found

    return in_use


class RebalanceLoop:
    """The internals of an ExpertBalancer, which adds the public methods."""

    @on_device_of(lambda self, layers, context, *_, **__: _device_of(context))
    def __init__(
        self,
        layers: nn.Module | Sequence[BalancedLayer],
        context: Context,
        config: EPLBConfig | None = None,
        *,
        planner: Planner | None = None,
    ) -> None:
        """Connect with the other ranks' balancers. Arguments: see `ExpertBalancer`."""
        self.config = on_found_nodes(EPLBConfig() if config is None else config, context)
        self._context = context
        self._connection: Connections = connect(layers, context, self.config)
        self.layers = self._connection.layers
        self._mover, self._status_exchange = self._connection.mover, self._connection.status_exchange
        self.config = with_routers_groups(self.config, self.layers)
        self._planner = planner or default_planner(self.config, [layer.placement.slots for layer in self.layers])
        self._load = LoadWindow(self.layers, self.config.interval, self.config.window)
        self._state, self._since = State.IDLE, 0.0
        self._steps = self._number = 0  # calls of `step`; advances, which include those of `settle`
        self._due = 0  # the number of the advance that reads the next status exchange
        self._background: Background | None = None
        self._decision: Decision | None = None
        self._queue: list[tuple[BalancedLayer, TransferSchedule]] = []
        self._migration: Migration | None = None
        self._problem, self._trouble = "", Trouble.NONE
        self._end: EPMoEError | None = None
        self._epoch = 0
        self._counts = dict.fromkeys(("rebalances", "commits", "rollbacks", "skipped", "restarts", "received_bytes"), 0)
        self._window: Callable[[], tuple[LayerStats, ...]] = tuple
        self._price: Price | None = None
        self._error = ""
        in_use = _in_use(weakref.ref(self))
        for layer in self.layers:
            layer.placement.choose(self.config.replicas, ranks_per_node=self._per_node)
            layer.expert_weights.balancer = in_use

    @property
    def moves_experts(self) -> bool:
        """Whether transfers are planned, or under way."""
        return self._state in (State.PLANNING, State.MOVING)

    # --- this rank's part --------------------------------------------------------------------------------------

    def _check_on(self, call: str) -> None:
        if self._end is not None:
            raise type(self._end)(str(self._end)) from self._end
        if self._connection.closed:
            raise InputError(f"ExpertBalancer.{call}: this balancer is closed; make another one")
        if self._state is State.IDLE:  # a rebalance under way finds a lost peer itself, and ends in order
            self._context.flight_recorder.check()

    def _advance(self) -> None:
        self._number += 1
        if self._state is not State.IDLE:
            self._work()
            if self._number == self._due:
                self._act_on_statuses()

    def _watch_window(self) -> None:
        if self._end is not None:
            return
        if self._load.ends(self._steps):
            if self._state is State.IDLE:
                self._load.close()
                self._enter(State.GATHERING)
                self._post_status()
            else:
                self._counts["skipped"] += 1
        self._load.opens(self._steps)

    def _enter(self, state: State) -> None:
        self._state, self._since = state, time.monotonic()

    def _work(self) -> None:
        """Do this rank's part of the current state. All ranks raise its problem after the next status exchange."""
        if self._trouble is Trouble.LOST:
            return
        try:
            if self._state is State.MOVING:
                assert self._migration is not None
                self._migration.advance()
                # a row whose weights were updated during the transfer is not damaged: the layer is sent again
                if self._migration.done and not self._problem:
                    outdated, name = self._migration.outdated(), self._migration.layer.name
                    if outdated == "map":
                        self._trouble_here(
                            f"layer {name}: its expert map was changed while its experts were moving; settle() first, "
                            "and change maps on all ranks alike"
                        )
                    elif not outdated:
                        self._trouble_here(self._migration.damage())
            elif self._state is State.PLANNING and self._decision is None and not self._problem:
                self._look_at_plan()
            if not self._done and time.monotonic() - self._since > self._connection.deadline_s:
                self._overdue()
        except Exception as error:
            moving = self._state is State.MOVING  # peers may be waiting for bytes that this rank will not send
            self._problem = str(error) if isinstance(error, EPMoEError) else f"{type(error).__name__}: {error}"
            self._trouble = Trouble.LOST if moving else Trouble.HERE

    def _trouble_here(self, problem: str) -> None:
        if problem:
            self._problem, self._trouble = problem, Trouble.HERE

    def _overdue(self) -> None:
        """Report that the current state took too long. While MOVING, each batch has a deadline of its own."""
        if self._state is not State.MOVING:
            self._trouble_here(f"{self._state.name} took longer than {self._connection.deadline_s:g} s")

    @property
    def _done(self) -> bool:
        if self._trouble is Trouble.HERE and self._state is not State.MOVING:
            return True
        if self._state is State.GATHERING:
            return self._load.copied
        if self._state is State.PLANNING:
            return self._decision is not None
        return self._migration is None or self._migration.done

    def _plan(self, call: Any) -> None:
        rest = {
            "rank": self._mover.rank_group.rank,
            "budget": self.config.bytes_per_step,
            "commit": self.config.bytes_per_commit,
            "ranks_per_node": self._per_node,
        }
        layers = [
            (layer.placement, layer.placement.expert_map, self._mover.store(layer).row_bytes) for layer in self.layers
        ]
        self._decision, self._background = None, Background(partial(add_transfer_schedules, call, layers, **rest))
        self._enter(State.PLANNING)

    def _look_at_plan(self) -> None:
        assert self._background is not None
        if not self._background.done:
            return
        decision: Decision = self._background.result()
        for layer in self.layers:
            if layer.placement.expert_map != layer.expert_weights.expert_map:
                raise InputError(
                    f"layer {layer.name}: Placement.update changed the expert map, and did not move the weights; put "
                    "the former map back with Placement.update on all ranks, and give the new one to move_to"
                )
        if self._mover.staging.reserve(decision.staging_size):
            self._decision = decision

    def _changes(self, decision: Decision) -> list[tuple[BalancedLayer, TransferSchedule]]:
        pairs = zip(self.layers, decision.schedules, strict=True)
        return [(layer, part) for layer, parts in pairs for part in parts]

    @property
    def _per_node(self) -> int:
        return self._mover.rank_group.size // (self.config.nodes or 1)

    # --- all ranks together ------------------------------------------------------------------------------------

    def _post_status(self) -> None:
        digest = 0 if self._decision is None or self._state is not State.PLANNING else self._decision.digest
        forward = self._context.flight_recorder.number
        written = self._state is State.MOVING and self._migration is not None and self._migration.written()
        self._status_exchange.post_status(
            RankStatus(self._number, forward, self._state, self._epoch, self._done, self._trouble, digest, written)
        )
        self._due = self._number + self.config.sync_every

    def _act_on_statuses(self) -> None:
        try:
            verdict = reach_verdict(self._status_exchange.wait_for_statuses(), self._status_exchange.rank_group.ranks)
            problem = self._explanation(verdict)
            sums = (
                self._status_exchange.wait_for_load_sums()
                if verdict.action is Action.COMMIT and self._state is State.SUMMING
                else None
            )
        except EPMoEError as error:
            self._disable_and_raise(error)
        if verdict.action is Action.ABORT:
            self._disable_and_raise((PeerTimeout if verdict.explained_by is not None else RebalanceError)(problem))
        if verdict.action is Action.ROLLBACK:
            self._roll_back(problem)
        if verdict.action is Action.COMMIT:
            self._next_state(sums)
        if verdict.action is Action.RESTART:
            self._restart()
        if self._state is not State.IDLE:
            self._post_status()

    def _explanation(self, verdict: Verdict) -> str:
        if verdict.explained_by is None:
            return verdict.text
        ranks = self._status_exchange.rank_group.ranks
        owner = ranks[verdict.explained_by]
        return f"rank {owner}: {self._context.flight_recorder.broadcast_text(self._problem, owner=owner, group=ranks)}"

    def _next_state(self, sums: Tensor | None) -> None:
        if self._state is State.GATHERING:
            self._status_exchange.post_load_counts(self._load.take())
            self._enter(State.SUMMING)
        elif self._state is State.SUMMING:
            assert sums is not None
            self._sums_are_in(sums)
        elif self._state is State.PLANNING:
            assert self._decision is not None
            self._price = self._decision.price
            self._queue = self._changes(self._decision)
            self._counts["rebalances"] += bool(self._queue)
            self._say(
                "step %d: rebalance %s; %d moves of layers", self._steps, self._price or "planned", len(self._queue)
            )
            # only the queue now holds the schedules, which frees them layer by layer: at once would take a millisecond
            self._decision = self._background = None
            self._next_layer()
        else:
            self._commit()

    def _sums_are_in(self, sums: Tensor) -> None:
        etp = self.layers[0].expert_weights.etp.size  # all members of an etp group count the same rows
        load = (sums // etp).numpy()
        current = [layer.placement.expert_map for layer in self.layers]
        # computed on request, which takes milliseconds for a large model; a copy, because a planner may write into load
        self._window = cache(partial(layer_load_stats, [layer.name for layer in self.layers], load.copy(), current))
        moe, size = self.layers[0].expert_weights.config, self._mover.store(self.layers[0]).row_bytes * etp
        self._plan(partial(decide, load, current, self._planner, self.config, moe, size))

    def _next_layer(self) -> None:
        if not self._queue:
            self._finish()
            return
        self._begin(*self._queue.pop(0))

    def _begin(self, layer: BalancedLayer, part: TransferSchedule) -> None:
        self._epoch += 1
        self._enter(State.MOVING)
        # it starts to send in the next step, because this one may contain a commit
        self._migration = Migration(layer, part, self._mover)

    def _commit(self) -> None:
        """Vote on a layer whose bytes have all arrived on all ranks, and do what the first vote says.

        Ranks vote differently only if their callers did different things to the layer since the last exchange, such as
        an update of weights on one rank. The balancer ends on ranks whose RESTART lost to COMMIT. A rank that has lost
        the others votes ROLLBACK. If it was the first, the balancer ends on all ranks.
        """
        migration = self._migration
        assert migration is not None
        outdated, name = migration.outdated(), migration.layer.name
        late = not outdated and migration.written()  # written after this rank's last status said that they were not
        forward = self._context.flight_recorder.number
        try:
            vote, theirs = self._vote(_RESTART if outdated or late else _COMMIT, forward)
        except PeerTimeout as error:
            self._disable_and_raise(error, "is undecided")
        if vote == _RESTART:
            self._restart()
            return
        if vote == _ROLLBACK:
            self._disable_and_raise(
                RebalanceError("another rank ended its balancer; its error says why"), "was rolled back"
            )
        if outdated == "map":
            # not put in force: the slots may no longer be those of the old map. Ranks that differ refuse the next call
            self._disable_and_raise(
                RebalanceError(
                    f"the expert map of {name} was changed on this rank alone while its experts were moving; call "
                    "settle() first, change maps on all ranks alike, and make a new balancer"
                ),
                "was applied on the other ranks alone",
            )
        self._put_in_force(migration)
        problem = ""
        if outdated or late:
            problem = (
                f"parameters of {name} were written on this rank after its experts had arrived on other ranks, which "
                "keep the former values; call update_expert on all ranks alike, and make a new balancer"
            )
        elif forward != theirs:
            problem = (
                f"the ranks are not in step: forward is {forward} on this rank and {theirs} on another, and outputs "
                "since then may be wrong; call ExpertBalancer.step() after every forward, on all ranks alike"
            )
        if problem:
            self._disable_and_raise(RebalanceError(problem), "was applied")
        self._next_layer()

    def _restart(self) -> None:
        migration = self._migration
        assert migration is not None
        self._problem, self._trouble = "", Trouble.NONE
        self._counts["restarts"] += 1
        self._begin(migration.layer, migration.transfer_schedule)

    def _vote(self, vote: str, forward: int) -> tuple[str, int]:
        """Cast a vote on the layer under way. Return the first vote of any rank, and that rank's forward number."""
        what = f"eplb {self._connection.name} epoch {self._epoch}"
        vote, number = self._context.consensus.first(what, f"{vote} {forward}").split()
        return vote, int(number)

    def _put_in_force(self, migration: Migration) -> None:
        migration.commit()
        self._counts["commits"] += 1
        self._say("step %d: experts of %s moved", self._steps, migration.layer.name)
        self._counts["received_bytes"] += migration.received_bytes

    # --- ends --------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._enter(State.IDLE)
        self._decision = self._background = self._migration = None
        self._problem, self._trouble = "", Trouble.NONE
        self._queue = []
        self._mover.staging.release()

    def _roll_back(self, problem: str) -> NoReturn:
        """End the rebalance and raise RebalanceError. All ranks do so, with no transfer under way between them."""
        where = self._place()
        self._finish()
        self._counts["rollbacks"] += 1
        self._error = f"{where} was rolled back: {problem}. The balancer goes on"
        self._say("%s", self._error, level=logging.WARNING)
        raise RebalanceError(self._error)

    def _disable_and_raise(self, error: EPMoEError, fate: str = "") -> NoReturn:
        """Disable the balancer and raise. The other ranks do the same once they miss this rank.

        fate: what became of the layer under way, if it is known
        """
        where = self._place()
        fate = fate or self._resolve_current_layer()
        self._counts["rollbacks"] += 1
        self._enter(State.OFF)  # `self._migration` stays, so transfers under way keep their memory
        self._mover.abort()
        self._error = f"{where} {fate}, and the balancer is off: {error}"
        self._end = type(error)(self._error)
        _log.warning("%s", self._error)  # on each rank, because this may be the only one
        raise self._end from error

    def _say(self, text: str, *values: Any, level: int = logging.INFO) -> None:
        """Log an event of all ranks, on the first of them only."""
        if self._mover.rank_group.rank == 0:
            _log.log(level, text, *values)

    def _resolve_current_layer(self) -> str:
        """Return what became of the layer under way. Put it in force if other ranks did so before they were lost."""
        vote = _ROLLBACK
        if self._state is State.MOVING:
            assert self._migration is not None
            try:
                vote, _ = self._vote(_ROLLBACK, 0)
            except PeerTimeout:
                return "is undecided"
            if vote == _COMMIT:
                self._put_in_force(self._migration)
        return "was applied" if vote == _COMMIT else "was rolled back"

    def _place(self) -> str:
        layer = "" if self._migration is None else f" of {self._migration.layer.name}"
        return f"rebalance in {self._state.name}{layer} (step {self._number})"
