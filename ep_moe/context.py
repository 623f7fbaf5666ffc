"""EPContext: the process groups, transports, scratch memory and failure detection that the layers of a model share."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Store

from ep_moe import registry
from ep_moe.checks import as_whole
from ep_moe.errors import ConfigError, ContextClosed, EPMoEError, OutOfMemory, PeerTimeout
from ep_moe.parallel.connected_ranks import ConnectedRanks
from ep_moe.parallel.failed import is_out_of_memory, with_cause
from ep_moe.parallel.flight_recorder import COMPILING_S, FlightRecorder
from ep_moe.parallel.groups import RankGroups
from ep_moe.parallel.layout import RankLayout
from ep_moe.renamed import renamed
from ep_moe.runtime.devices import SideStream, on_device_of
from ep_moe.runtime.profiling import StageTimes
from ep_moe.runtime.workspace import Workspaces
from ep_moe.types import capturing

_log = logging.getLogger("ep_moe.context")

if TYPE_CHECKING:
    from ep_moe.all2all.base import Dispatcher, DispatchShape

TUNING_S = 1800.0  # how long ranks wait for the rank that measures in `tune`
TUNED_ROWS = (1, 8, 32, 128, 512, 2048, 8192, 16384)


class _CallGuard:
    """The context manager that `EPContext._begin_call` returns; it ends the forward.

    It is a class because a generator-based context manager takes the host twice as long.
    """

    def __init__(self, context: EPContext) -> None:
        self._context = weakref.ref(context)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        context = self._context()
        if context is None:
            return
        try:
            if error is not None:
                context._report_exception(error)
        finally:
            context._end_call()


_COMPILED = nullcontext()  # a compiled graph is traced once, and does not execute these checks when it runs


class EPContext(ConnectedRanks):
    """The rank layout and groups, the pool of dispatchers, the flight recorder and the deadline of one model.

    All ranks create it together by `from_torchrun`, `from_groups` or `from_mesh`. `local` creates one for a single
    process. These methods call the constructor. A context must outlive its layers. It is not re-entrant: it runs one
    forward at a time. It works as a context manager, and one process may have several contexts.

    Args:
        layout: This rank's coordinates and groups.
        device: The device on which the layers compute.
        store: The store that the ranks share; None for a single process.
        rank_groups: Process groups by kind.
        flight_recorder: Tracks the steps of this rank and its peers.
        max_tokens: The most tokens that any rank passes to a layer in one call. Transports with fixed buffers allocate
            them once for this number, and need it. Default: no limit. Of these transports only `nvlink_p2p` then works:
            its buffers grow with the calls, and `MoELayer.capture` refuses such a layer.

    Attributes:
        consensus: Consensus of the ranks that run the same layers (this rank's lockstep group).
    """

    def __init__(
        self,
        layout: RankLayout,
        device: torch.device,
        store: Store | None,
        rank_groups: RankGroups,
        flight_recorder: FlightRecorder,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(layout, device, store, rank_groups, flight_recorder, max_tokens)
        self._stage_times: StageTimes | None = None
        self._current_limit = self._max_dispatch_tokens
        self._agreed_limit: int | None = None  # of the beginning call, if its ranks have agreed on one already
        self._workspaces = Workspaces(device)
        self._compute = SideStream(priority=-1)
        self._recorders: list[Any] = []
        self._generation: Any = None
        self._pool: dict[tuple[str, DispatchShape], Any] = {}
        self._backends: Any = None  # the registry as `selection` read it for the first layer
        self._layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by order of construction
        self._layer_count = 0
        self._layers_named = _layers_named(weakref.ref(self))
        self._running_call: str | None = None
        self._call_guard = _CallGuard(self)
        self._destroyed = False
        self._dropped = weakref.finalize(self, _never_destroyed, flight_recorder, str(layout))
        self._dropped.atexit = False  # at process exit the operating system frees everything

    # --- what layers use ---------------------------------------------------------------------------------------

    def _dispatcher(self, name: str, dispatch_shape: DispatchShape) -> Dispatcher:
        """Return the pooled dispatcher of this name and shape. It is created on first use."""
        made: Dispatcher = self._pooled(
            name, dispatch_shape, lambda: registry.load("dispatchers", name)(dispatch_shape, self.rank_groups["ep"])
        )
        return made

    @on_device_of(lambda self, *_: self.device)
    def _pooled(self, name: str, dispatch_shape: DispatchShape, make: Callable[[], Any]) -> Any:
        """Return the object that layers of one dispatch shape share, a transport or the buffers of a fused kernel.

        It is created on first use and destroyed with the context. It has `capabilities` and `destroy()`.
        """
        self._check_alive()
        key = (name, dispatch_shape)
        if key not in self._pool:
            # a library may compile kernels and then wait for its peers, so the deadline is extended
            with self.flight_recorder.step("connect", name, counted=False, more_s=COMPILING_S):
                self._pool[key] = make()
            if self.layout.rank == 0:
                _log.info("made the buffers of %s that layers share: %s", name, dispatch_shape)
        return self._pool[key]

    @property
    def _max_dispatch_tokens(self) -> int | None:
        """The most tokens that a rank dispatches: its share of `max_tokens` and the shares of its etp peers."""
        return None if self.max_tokens is None else self.layout.max_dispatch_tokens(self.max_tokens)

    @property
    def _call_limit(self) -> int | None:
        """The most tokens that a rank dispatches in the current call; None if that is not known yet."""
        return self._agreed_limit if self._current_limit is None else self._current_limit

    @contextmanager
    def token_limit(self, max_tokens: int) -> Iterator[None]:
        """Limit the tokens of calls within a block to fewer than the context's `max_tokens`.

        Receivers of transports with fixed buffers then read fewer empty rows. On entry all ranks compare the limit
        through the store, because ranks with different limits would overwrite each other's rows. This takes time:
        wrap a capture or many steps, not each step.

        Args:
            max_tokens: The most tokens that any rank passes to a layer in the block, in [1, `EPContext.max_tokens`].

        Yields:
            Nothing.

        Raises:
            ConfigError: on all ranks, if a value is out of range or ranks pass different values.
        """
        problem = None
        if self.max_tokens is None:
            problem = ConfigError(
                "token_limit is for a context with max_tokens: EPContext.from_torchrun(max_tokens=...)"
            )
        elif not 1 <= (as_whole(max_tokens) or 0) <= self.max_tokens:
            problem = ConfigError(
                f"token_limit: max_tokens must be an integer in [1, {self.max_tokens}] (EPContext's), got "
                f"{max_tokens!r}"
            )
        self.consensus.require_equal("EPContext.token_limit", {"max_tokens": as_whole(max_tokens)}, problem)
        before, self._current_limit = self._current_limit, self.layout.max_dispatch_tokens(int(max_tokens))
        try:
            yield
        finally:
            self._current_limit = before

    links = renamed("links", "rank_groups")
    at_most = renamed("at_most", "token_limit")

    def _name_layer(self, name: str | None) -> str:
        """Return the name of the next layer for errors and the flight recorder: `name`, or "moe" and a number."""
        self._check_alive()
        self.flight_recorder.check()
        self._layer_count += 1
        return name or f"moe{self._layer_count - 1}"

    def _shared_seed(self, seed: int) -> int:
        """Return the seed of the stage's first rank for the layer under construction.

        All ranks then draw the same numbers, even if they were seeded differently.
        """
        ranks = self.layout.group("stage")
        if self._seeds is None or len(ranks) == 1:
            return seed
        key = str(self._layer_count)
        if self.layout.rank == ranks[0]:
            self._seeds.set(key, str(seed))
        try:
            self._seeds.wait([key], timedelta(seconds=self.flight_recorder.deadline_s))
        except RuntimeError as error:  # DistStoreError; FileStore raises a plain RuntimeError
            raise PeerTimeout(
                f"rank {ranks[0]} made no layer number {key} within {self.flight_recorder.deadline_s:g} s; make the "
                f"layers on "
                f"all ranks, in the same order"
            ) from error
        return int(self._seeds.get(key))

    def _register(self, layer: Any) -> None:
        """Register a constructed layer, for the methods that run over all layers."""
        self._layers[self._layer_count] = layer

    @property
    def _idle(self) -> bool:
        """Whether a forward may begin. If not, `_begin_call` raises the reason."""
        return self._running_call is None and not self._destroyed

    def _begin_call(self, name: str, call_facts: str = "") -> AbstractContextManager[None]:
        """Begin one forward of one layer, and return a context manager that ends it.

        A context runs one forward at a time, so that all ranks issue its collectives in the same order.

        call_facts: text that determines the sizes of all exchanges of the call; its ranks compare it
            (`RankGroup.agree`)
        """
        if torch.compiler.is_compiling():
            return _COMPILED
        self._check_alive()
        if self._running_call is not None:
            raise RuntimeError(
                f"EPContext is not re-entrant: {name} was called inside {self._running_call}; use a context of its own "
                f"for a model that runs in another thread"
            )
        self._running_call = name  # first, so that a call from another thread finds it set
        try:
            self.flight_recorder.begin_call(name, call_facts)
        except BaseException:
            self._running_call = None
            raise
        return self._call_guard

    def _report_exception(self, error: BaseException, call_name: str = "", *, users: bool = False) -> None:
        """Handle an exception that leaves a forward.

        An exception that all ranks raise together leaves the context usable. Any other exception belongs to this rank
        alone. It is then reported to the peers, which raise it too, and every later call raises it on all ranks.

        call_name: the layer's name, if the exception left the call before `_begin_call`
        users: whether the exception comes from the user's code, which may raise any class on one rank alone
        """
        alike = not users and isinstance(error, EPMoEError)
        alike = alike and (getattr(error, "agreed_by", None) is not None or not is_out_of_memory(error, self.device))
        # torch's activation checkpointing ends a recomputation with an exception, on all ranks at the same operation
        ends = type(error).__module__ == "torch.utils.checkpoint"
        if self.flight_recorder.has_no_peers or alike or ends or capturing(self.device):
            return
        before = self.flight_recorder.failed
        failure = self.flight_recorder.publish_failure(error, call_name)
        if before or isinstance(failure, OutOfMemory):
            raise with_cause(failure, error)
        error.add_note(f"ep_moe: {failure}")

    def _end_call(self) -> None:
        """End the forward that `_begin_call` began."""
        self._running_call, self._agreed_limit, self.flight_recorder.call_name = None, None, ""

    def plan(self, train_tokens: int | None = None) -> dict[str, int]:
        """Return this rank's memory in bytes by kind, summed over the context's layers.

        Args:
            train_tokens: As in `MoELayer.plan`, for all layers.

        Returns:
            Bytes by the kinds of `MoELayer.plan`. The largest workspace counts once for each stream that layers run
            on. A transport's buffers count once for each dispatch shape and call in flight. Buffers that grow count
            with their present size. "temporary" is that of the layer with the most.

        Raises:
            ConfigError: as in `MoELayer.plan`.
        """
        total, temporary = dict[str, int](), list[int]()
        for layer in self._layers.values():
            for name, size in layer.plan(train_tokens).items():
                if name == "temporary":  # one layer after another needs it
                    temporary.append(size)
                else:
                    total[name] = total.get(name, 0) + size
        if total:
            total["workspace"] = self._workspaces.reserved
            shared: dict[Any, int] = {}
            for layer in self._layers.values():
                for key, size in layer._transport_bytes(train_tokens).items():
                    shared[key] = max(shared.get(key, 0), size)
            total["transport"] = sum(shared.values())
        if temporary:
            total["temporary"] = max(temporary)
        return total

    @on_device_of(lambda self, *_, **__: self.device)
    def tune(self, rows: Sequence[int] = TUNED_ROWS, *, cache: str | Path | None = None) -> None:
        """Run `MoELayer.tune` for every layer. Layers of the same shape are measured once.

        Collective.

        Args:
            rows: Numbers of received rows to measure.
            cache: A folder that keeps results by GPU, versions and shape. Default: results are not kept.

        Raises:
            ConfigError: on all ranks, as in `MoELayer.tune`.
            InputError: on all ranks, as in `MoELayer.tune`.
            PeerTimeout: a peer did not reach this call, or did not answer.
        """
        found: dict[Any, list[int]] = {}
        for _, layer in sorted(self._layers.items()):
            for kernel in layer._kernels:
                key = (kernel.name, *layer._tuning_key)
                if key not in found:
                    found[key] = layer._tune_kernel(kernel, rows, cache)
                else:
                    layer._use(kernel, found[key])

    @on_device_of(lambda self, *_, **__: self.device)
    def capture(self, tokens: Sequence[int]) -> None:
        """Run `MoELayer.capture` for every layer.

        Collective.

        Args:
            tokens: Numbers of tokens, the same list on all ranks.

        Raises:
            ConfigError: on all ranks, where a layer cannot be captured.
        """
        for _, layer in sorted(self._layers.items()):
            layer.capture(tokens)

    @on_device_of(lambda self, *_, **__: self.device)
    def capture_routed(self, tokens: Sequence[int]) -> None:
        """Run `MoELayer.capture_routed` for every layer.

        Collective.

        Args:
            tokens: Numbers of tokens, the same list on all ranks.

        Raises:
            ConfigError: on all ranks, where a layer cannot be captured.
        """
        for _, layer in sorted(self._layers.items()):
            layer.capture_routed(tokens)

    # --- lifetime ----------------------------------------------------------------------------------------------

    @on_device_of(lambda self: self.device)
    def destroy(self) -> None:
        """Destroy the dispatchers and process groups that this context created.

        Collective and idempotent. The default process group stays.
        """
        if self._destroyed:
            return
        self._destroyed = True
        self._dropped.detach()
        static = any(dispatcher.capabilities.static for dispatcher in self._pool.values())
        # after a failure, kernels may wait forever for a peer, and so would a synchronization
        if self.device.type == "cuda" and static and not self.flight_recorder.failed:
            torch.cuda.synchronize(self.device)  # keeps this rank's buffers while its kernels still exchange with peers
        try:
            if not self.rank_groups.ended:  # else the connections are closed already
                # wait for the peers: none of them may still open or use a connection when this rank closes it
                self.consensus.raise_on_all_ranks("EPContext.destroy", None)
        except RuntimeError:  # PeerTimeout, or torch's error if the store, and with it the job, has ended
            pass  # the call that lost the peer reported it; this rank's resources are released all the same
        finally:
            self._release()

    def _release(self) -> None:
        self.flight_recorder.close()
        for layer in self._layers.values():
            layer._release_buffers()
            problem = layer.placement.invalid_ids.problem(layer.name, layer.config.num_experts)
            if problem is not None:  # found by the last calls: no later call can raise it
                warnings.warn(problem, stacklevel=3)
        self._recorders.clear()
        for dispatcher in self._pool.values():
            dispatcher.destroy()
        self._pool.clear()
        self._workspaces.clear()
        self.rank_groups.destroy()

    def __enter__(self) -> EPContext:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.destroy()
        elif not self._destroyed:
            # does not wait for the peers: the error may have ended them too
            self._destroyed = True
            self._dropped.detach()
            self.flight_recorder.close()

    def _check_alive(self) -> None:
        if self._destroyed:
            raise ContextClosed("this EPContext was destroyed; keep it alive as long as its layers")
        if self.rank_groups.ended:
            raise ContextClosed(
                "torch.distributed was ended (destroy_process_group), and with it the groups of this EPContext; end "
                "it after the last call, and make a new EPContext after init_process_group"
            )

    def __repr__(self) -> str:
        return f"EPContext({self.layout}, {self.device}, {self._layer_count} layers, {len(self._pool)} transports)"


def _layers_named(known: weakref.ref[EPContext]) -> Callable[[str], list[Any]]:
    """Return a function that finds layers by name while `torch.compile` traces a graph (`execution.compiled`)."""

    def find(name: str) -> list[Any]:
        context = known()
        assert context is not None
        return [layer for layer in context._layers.values() if layer.name == name]

    return find


def _never_destroyed(flight_recorder: FlightRecorder, layout: str) -> None:
    """Warn that a context was garbage-collected without `destroy`.

    Its process groups stay open: peers may still be in their last call, and NCCL ends groups collectively.
    """
    flight_recorder.close(wait=False)
    if flight_recorder.has_no_peers:
        return
    warnings.warn(
        f"an EPContext ({layout}) was dropped with its process groups open, which keep connections and threads; call "
        f"context.destroy() on all ranks, or use it as a context manager",
        ResourceWarning,
        stacklevel=2,
    )
