"""EPContext: what the layers of a model share, and who owns it. No global state means that somebody owns it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh

from ep_moe import registry
from ep_moe.checks import as_whole, shown
from ep_moe.config import ParallelConfig, Tokens
from ep_moe.errors import ConfigError, ContextClosed, EPMoEError, OutOfMemory, PeerTimeout
from ep_moe.parallel.consensus import StoreConsensus
from ep_moe.parallel.failed import is_out_of_memory
from ep_moe.parallel.flight_recorder import COMPILING_S, FlightRecorder
from ep_moe.parallel.groups import (
    DEADLINE_S,
    Links,
    agreed_layout,
    check_groups,
    default_store,
    init_from_torchrun,
    local_device,
    numbered,
)
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.mesh import axis_groups, members, read_mesh
from ep_moe.parallel.token_flow import TokenFlow
from ep_moe.renamed import renamed
from ep_moe.runtime.devices import as_device, gpu_index, on_device, on_device_of
from ep_moe.runtime.profiling import StageTimes
from ep_moe.runtime.side_stream import SideStream
from ep_moe.runtime.workspace import Workspaces
from ep_moe.types import capturing

if TYPE_CHECKING:
    from ep_moe.all2all.base import Dispatcher, DispatchShape

TUNING_S = 1800.0  # how long ranks wait for the one that tunes
TUNED_ROWS = (1, 8, 32, 128, 512, 2048, 8192, 16384)


class _Forward:
    """From `entered` on. A generator in its place takes the host twice as long."""

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
                context._broken_by(error)
        finally:
            context._left()


_COMPILED = nullcontext()  # a graph is traced once, and runs where nothing here is looked at


class EPContext:
    """Rank layout and groups, the pool of dispatchers, the flight recorder and the deadline of one model.

    Made collectively by one of `from_torchrun`, `from_groups`, `from_mesh`; `local` makes one for a single process.
    These call the constructor. Outlives its layers, is not re-entrant, works as a context manager. Several may live in
    one process.

    Args:
        layout: This rank's coordinates and groups.
        device: Where the layers compute.
        store: Shared by the ranks; None for a single process.
        rank_groups: Process groups by kind.
        flight_recorder: Follows the steps of this rank and its peers.
        max_tokens: The most tokens that any rank passes to a layer in one call. Default: any number, and no transport
            with fixed buffers.

    Attributes:
        consensus: Among the ranks that run the same layers (this rank's lockstep group).
    """

    def __init__(
        self,
        layout: RankLayout,
        device: torch.device,
        store: Store | None,
        rank_groups: Links,
        flight_recorder: FlightRecorder,
        max_tokens: int | None = None,
    ) -> None:
        self.layout = layout
        self.device, self._gpu = device, gpu_index(device)
        self.flight_recorder = flight_recorder
        self.rank_groups = rank_groups
        self._tokens = TokenFlow(layout, tp=rank_groups["tp"], etp=rank_groups["etp"], lockstep=rank_groups["lockstep"])
        self._stage_times: StageTimes | None = None
        self.max_tokens = max_tokens
        self._current_limit = self._max_dispatch_tokens
        self._seeds = None if store is None else PrefixStore(f"seeds/stage{layout.pp_rank}", store)
        peers = layout.group("lockstep")
        scope = None if store is None else PrefixStore(f"block{peers[0]}", store)
        self.consensus = StoreConsensus(scope, peers, layout.rank, flight_recorder.deadline_s)
        self._workspaces = Workspaces(device)
        self._compute = SideStream(priority=-1)
        self._recorders: list[Any] = []
        self._generation: Any = None
        self._pool: dict[tuple[str, DispatchShape], Any] = {}
        self._layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # in order of making
        self._layer_count = 0
        self._inside: str | None = None
        self._forward = _Forward(self)
        self._destroyed = False
        self._dropped = weakref.finalize(self, _never_destroyed, flight_recorder, str(layout))
        self._dropped.atexit = False  # a process that ends takes everything with it

    # --- constructors ------------------------------------------------------------------------------------------

    @classmethod
    def from_torchrun(
        cls,
        parallel: ParallelConfig | None = None,
        *,
        device: torch.device | str | int | None = None,
        deadline_s: float = DEADLINE_S,
        max_tokens: int | None = None,
    ) -> EPContext:
        """Make a context from torchrun's environment, and the default process group unless there is one.

        Args:
            parallel: Sizes of dp, tp, ep, etp and pp. Default: expert parallel over all ranks (dp = world).
            device: Where the layers compute. Default: this rank's GPU, else the CPU.
            deadline_s: Seconds that a collective step may last before its peers are examined.
            max_tokens: The most tokens (rows of x) that any rank passes to a layer in one call. It opens the transports
                whose buffers are made once, which CUDA graphs need. Default: any number.

        Returns:
            The context, on every rank.

        Raises:
            ConfigError: on all ranks, where the sizes do not fit the world or the ranks do not agree.
        """
        device = local_device() if device is None else as_device(device)
        init_from_torchrun(device, deadline_s=deadline_s)
        return cls.from_groups(parallel, device=device, deadline_s=deadline_s, max_tokens=max_tokens)

    @classmethod
    def from_groups(
        cls,
        parallel: ParallelConfig | None = None,
        groups: Mapping[str, ProcessGroup] | None = None,
        *,
        device: torch.device | str | int,
        deadline_s: float = DEADLINE_S,
        max_tokens: int | None = None,
    ) -> EPContext:
        """Make a context within an initialised torch.distributed.

        Args:
            parallel: Sizes of dp, tp, ep, etp and pp. Default: expert parallel over all ranks (dp = world).
            groups: Process groups by "ep", "tp" and "etp". Each must hold the ranks that `RankLayout` gives it; a group
                that is not given is made.
            device: Where the layers compute.
            deadline_s: Seconds that a collective step may last before its peers are examined.
            max_tokens: The most tokens that any rank passes to a layer in one call. Default: any number.

        Returns:
            The context, on every rank.

        Raises:
            ConfigError: on all ranks, where the sizes or groups do not fit or the ranks do not agree.
        """
        _check_initialized()
        ranks = range(dist.get_world_size())
        problem = None
        if not isinstance(parallel, ParallelConfig | None):
            problem = ConfigError(
                f"parallel must be a ParallelConfig, got {shown(parallel)}; give ParallelConfig(dp=...)"
            )
            parallel = None
        parallel = parallel or ParallelConfig(dp=len(ranks))
        try:
            device = as_device(device)
        except ConfigError as error:  # all ranks raise it, once they have met
            device, problem = torch.device("cpu"), error
        return cls._connect(parallel, ranks, groups, device, deadline_s, max_tokens, problem)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        tokens: Tokens = Tokens.REPLICATED,
        ep: int | None = None,
        etp: int | None = None,
        device: torch.device | str | int | None = None,
        deadline_s: float = DEADLINE_S,
        max_tokens: int | None = None,
    ) -> EPContext:
        """Make a context over the ranks of a DeviceMesh, whose axes it knows by their names.

        The axes may stand in any order. Attention's are `pp`, `dp_replicate`, one of `dp`, `dp_shard`, `fsdp` and
        `batch`, `cp`, and `tp`. The experts' are `pp`, `dp_replicate`, one of `replica`, `efsdp` and `edp` (ranks that
        hold the same experts), `ep` and `etp`. All axes but `pp`, `tp`, `ep` and `etp` hold different tokens: together
        they are the layer's dp. With an `ep` or `etp` axis each rank has its own tokens (tp = 1).

        The ranks of the mesh call this and no others. A submesh is served: contexts of several live side by side.
        The groups of `tp`, `ep` and `etp` are the mesh's own; those that it lacks are made.

        Args:
            mesh: A mesh with axis names, for example `init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))`.
            tokens: Whether the tp ranks of one dp rank pass the same tokens.
            ep: The size of an EP group, for a mesh of attention's axes. Its ranks follow each other in the order
                `pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`. Default: dp * tp / etp.
            etp: The number of ranks over which an expert is cut, for a mesh of attention's axes. Default: 1.
            device: Where the layers compute. Default: this process's device of the mesh's type.
            deadline_s: Seconds that a collective step may last before its peers are examined.
            max_tokens: The most tokens that any rank passes to a layer in one call. None: any number, and no
                transport with fixed buffers.

        Returns:
            The context. Its `layout.ranks` are the mesh's ranks in the order of the layout.

        Raises:
            ConfigError: The mesh cannot be served, or the ranks do not agree. All its ranks raise alike.
        """
        _check_initialized()
        ranks, parallel, problem = members(mesh), ParallelConfig(), None
        try:
            parallel, ranks = read_mesh(mesh, tokens=tokens, ep=ep, etp=etp)
            if device is None:
                device = local_device() if mesh.device_type == "cuda" else torch.device(mesh.device_type)
            device = as_device(device)
        except ConfigError as error:
            device, problem = torch.device("cpu"), error
        groups = {} if problem else axis_groups(mesh)
        return cls._connect(parallel, ranks, groups, device, deadline_s, max_tokens, problem)

    @classmethod
    def _connect(
        cls,
        parallel: ParallelConfig,
        ranks: Sequence[int],
        groups: Mapping[str, ProcessGroup] | None,
        device: torch.device,
        deadline_s: float,
        max_tokens: int | None,
        problem: ConfigError | None = None,
    ) -> EPContext:
        """ranks: those of the context, as the layout orders them; problem: why this rank cannot make one"""
        name = numbered("context", ranks)
        store = PrefixStore(name, default_store())
        layout = agreed_layout(parallel, ranks, store, device, deadline_s, max_tokens, problem)
        deadline_s, max_tokens = float(deadline_s), None if max_tokens is None else int(max_tokens)  # of NumPy perhaps
        with on_device(device):
            return cls._linked(layout, name, store, groups, device, max_tokens, deadline_s, problem)

    @classmethod
    def _linked(
        cls,
        layout: RankLayout,
        name: str,
        store: Store,
        groups: Mapping[str, ProcessGroup] | None,
        device: torch.device,
        max_tokens: int | None,
        deadline_s: float,
        problem: ConfigError | None,
    ) -> EPContext:
        consensus = StoreConsensus(PrefixStore("connect", store), layout.ranks, layout.rank, deadline_s)
        try:
            check_groups(layout, groups or {})
        except ConfigError as error:
            problem = error
        # before any group is made: a rank that makes another set of them would leave the others waiting
        consensus.same("EPContext groups", {"groups given": sorted(groups or {})}, problem)
        made: list[Links] = []

        def abort() -> None:
            for rank_groups in made:
                rank_groups.abort()

        peers = layout.group("lockstep")  # only these share a layer's collectives
        scope = PrefixStore(f"ledger/block{peers[0]}", store)
        frees = abort if device.type == "cuda" else None  # gloo has timeouts of its own
        flight_recorder = FlightRecorder(scope, peers, layout.rank, deadline_s=deadline_s, abort=frees, device=device)
        try:
            if device.type == "cuda":
                flight_recorder.prepare_mark(device)
            with flight_recorder.step("connect", "process groups", counted=False, more_s=COMPILING_S):
                made.append(Links(layout, flight_recorder, device, groups, name))
            consensus.healthy("EPContext", None)  # all have their groups before any uses one
            flight_recorder.attach()
        except BaseException:
            flight_recorder.close(wait=False)  # no context will
            raise
        return cls(layout, device, store, made[0], flight_recorder, max_tokens)

    @classmethod
    def local(cls, device: torch.device | str | int | None = None) -> EPContext:
        """Make a context of one process, without torch.distributed.

        Args:
            device: Where the layers compute. Default: this process's GPU, else the CPU.

        Returns:
            The context.
        """
        layout = RankLayout(world=1, rank=0)
        flight_recorder = FlightRecorder()
        device = local_device() if device is None else as_device(device)
        return cls(layout, device, None, Links(layout, flight_recorder, device), flight_recorder)

    # --- what layers use ---------------------------------------------------------------------------------------

    def _dispatcher(self, name: str, dispatch_shape: DispatchShape) -> Dispatcher:
        """The pool's dispatcher of that name and geometry, made on first use."""
        made: Dispatcher = self._pooled(
            name, dispatch_shape, lambda: registry.load("dispatchers", name)(dispatch_shape, self.rank_groups["ep"])
        )
        return made

    @on_device_of(lambda self, *_: self.device)
    def _pooled(self, name: str, dispatch_shape: DispatchShape, make: Callable[[], Any]) -> Any:
        """What layers of one geometry share, made on first use and given back with the context. It has `capabilities`
        and `destroy()`."""
        self._check_alive()
        key = (name, dispatch_shape)
        if key not in self._pool:
            # a library may wait for peers, after it has compiled its kernels
            with self.flight_recorder.step("connect", name, counted=False, more_s=COMPILING_S):
                self._pool[key] = make()
        return self._pool[key]

    @property
    def _max_dispatch_tokens(self) -> int | None:
        """The most tokens that a rank dispatches: its own share of `max_tokens`, and its etp peers'."""
        return None if self.max_tokens is None else self.layout.max_dispatch_tokens(self.max_tokens)

    @contextmanager
    def token_limit(self, max_tokens: int) -> Iterator[None]:
        """Bound the tokens of calls within a block, below the context's `max_tokens`.

        Receivers of transports with fixed buffers then look at fewer empty rows. Put it around a capture, or around
        many
        steps: ranks that disagree would write into each other's rows, so that they compare through the store.

        Args:
            max_tokens: The most tokens that any rank passes to a layer within, in [1, `EPContext.max_tokens`].

        Yields:
            Nothing.

        Raises:
            ConfigError: on all ranks, where a value is out of range or ranks disagree.
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
        self.consensus.same("EPContext.token_limit", {"max_tokens": as_whole(max_tokens)}, problem)
        before, self._current_limit = self._current_limit, self.layout.max_dispatch_tokens(int(max_tokens))
        try:
            yield
        finally:
            self._current_limit = before

    links = renamed("links", "rank_groups")
    at_most = renamed("at_most", "token_limit")

    def _name_layer(self, name: str | None) -> str:
        """What errors and the ledger call the next layer."""
        self._check_alive()
        self.flight_recorder.check()
        self._layer_count += 1
        return name or f"moe{self._layer_count - 1}"

    def _shared_seed(self, seed: int) -> int:
        """The seed of the stage's first rank, for the layer that is being made: the same numbers on all ranks, whatever
        seeds they were given."""
        ranks = self.layout.group("stage")
        if self._seeds is None or len(ranks) == 1:
            return seed
        key = str(self._layer_count)
        if self.layout.rank == ranks[0]:
            self._seeds.set(key, str(seed))
        try:
            self._seeds.wait([key], timedelta(seconds=self.flight_recorder.deadline_s))
        except RuntimeError as error:  # DistStoreError, but FileStore has no type of its own
            raise PeerTimeout(
                f"rank {ranks[0]} made no layer number {key} within {self.flight_recorder.deadline_s:g} s; make the "
                f"layers on "
                f"all ranks, in the same order"
            ) from error
        return int(self._seeds.get(key))

    def _register(self, layer: Any) -> None:
        """Count a finished layer in for `plan` and `tune`."""
        self._layers[self._layer_count] = layer

    @property
    def _idle(self) -> bool:
        """Whether a forward may begin; `entered` says why not."""
        return self._inside is None and not self._destroyed

    def _entered(self, name: str, carried: str = "") -> AbstractContextManager[None]:
        """One forward of one layer, for a `with`. A context runs one at a time: its collectives have one order.

        carried: what decides the sizes of all that the call exchanges, which its ranks compare (`RankGroup.agree`)
        """
        if torch.compiler.is_compiling():
            return _COMPILED
        self._check_alive()
        if self._inside is not None:
            raise RuntimeError(
                f"EPContext is not re-entrant: {name} was called inside {self._inside}; use a context of its own for a "
                f"model that runs in another thread"
            )
        self.flight_recorder.enter(name, carried)
        self._inside = name
        return self._forward

    def _broken_by(self, error: BaseException, where: str = "", *, users: bool = False) -> None:
        """An exception leaves a forward. What all ranks raise alike breaks nothing. Any other is this rank's alone: its
        peers raise it too, and every further call raises it on all ranks.

        where: the layer, if it left before `entered`
        users: it comes from the user's own code, which may raise any class on one rank alone
        """
        alike = isinstance(error, EPMoEError) and not users and not is_out_of_memory(error, self.device)
        # a recomputation ends by an exception of torch's, on all ranks at the same operation
        ends = type(error).__module__ == "torch.utils.checkpoint"
        if self.flight_recorder.alone or alike or ends or capturing(self.device):
            return
        before = self.flight_recorder.failed
        failure = self.flight_recorder.fail(error, where)
        if before or isinstance(failure, OutOfMemory):
            raise failure.with_traceback(None) from error
        error.add_note(f"ep_moe: {failure}")

    def _left(self) -> None:
        """The end of that forward."""
        self._inside, self.flight_recorder.where = None, ""

    def plan(self) -> dict[str, int]:
        """Count this rank's bytes by kind over the layers that live.

        Returns:
            Bytes by the kinds of `MoELayer.plan`. The largest workspace counts once (per stream that layers run on),
            and a transport's buffers once per dispatch shape (and call in flight)."""
        total: dict[str, int] = {}
        for layer in self._layers.values():
            for name, size in layer.plan().items():
                total[name] = total.get(name, 0) + size
        if total:
            total["workspace"] = self._workspaces.reserved
            shared: dict[Any, int] = {}
            for layer in self._layers.values():
                for key, size in layer._transport_bytes().items():
                    shared[key] = max(shared.get(key, 0), size)
            total["transport"] = sum(shared.values())
        return total

    @on_device_of(lambda self, *_, **__: self.device)
    def tune(self, rows: Sequence[int] = TUNED_ROWS, *, cache: str | Path | None = None) -> None:
        """Run `MoELayer.tune` for every layer, measured once for layers of one shape.

        Collective.

        Args:
            rows: Numbers of received rows to measure.
            cache: A folder that keeps findings by GPU, versions and shape. Default: nothing is kept.
        """
        found: dict[Any, list[int]] = {}
        for _, layer in sorted(self._layers.items()):
            for kernel in layer._kernels:
                key = (kernel.name, *layer.shape)
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
        """Give back dispatchers and groups made here. Collective, idempotent. The default group stays."""
        if self._destroyed:
            return
        self._destroyed = True
        self._dropped.detach()
        static = any(dispatcher.capabilities.static for dispatcher in self._pool.values())
        # what failed may have left kernels that wait for ever
        if self.device.type == "cuda" and static and not self.flight_recorder.failed:
            torch.cuda.synchronize(self.device)  # what peers read or write here is kept until they are done
        try:
            if not self.rank_groups.ended:  # else the connections are closed already
                # a rank closes connections once no peer opens or uses them any more
                self.consensus.healthy("EPContext.destroy", None)
        except RuntimeError:  # PeerTimeout, or torch's where the store is gone, and with it the job
            pass  # a lost peer has been reported where it was lost; what is here is given back all the same
        finally:
            self._release()

    def _release(self) -> None:
        self.flight_recorder.close()
        for layer in self._layers.values():
            layer._release_buffers()
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
            # peers are not waited for: whatever ended this rank may have ended them too
            self._destroyed = True
            self._dropped.detach()
            self.flight_recorder.close()

    def _check_alive(self) -> None:
        if self._destroyed:
            raise ContextClosed("this EPContext was destroyed; keep it alive as long as its layers")
        if self.rank_groups.ended:
            raise ContextClosed(
                "torch.distributed was ended (destroy_process_group), and with it the groups of this EPContext; end it "
                "after the last call, and make another context where it begins again"
            )

    def __repr__(self) -> str:
        return f"EPContext({self.layout}, {self.device}, {self._layer_count} layers, {len(self._pool)} transports)"


def _never_destroyed(flight_recorder: FlightRecorder, layout: str) -> None:
    """Of a context that is garbage. Its groups stay: peers may be within their last call, and to end them is collective
    with NCCL."""
    if flight_recorder.alone:
        return
    flight_recorder.close(wait=False)
    warnings.warn(
        f"an EPContext ({layout}) was dropped with its process groups open, which keep connections and threads; call "
        f"context.destroy() on all ranks, or use it as a context manager",
        ResourceWarning,
        stacklevel=2,
    )


def _check_initialized() -> None:
    if not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised; call EPContext.from_torchrun, or init_process_group first"
        )
