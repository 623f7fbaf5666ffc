"""EPContext: what the layers of a model share, and who owns it. No global state means that somebody owns it."""

from __future__ import annotations

import platform
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh

from ep_moe import registry
from ep_moe._version import __version__
from ep_moe.all2all.side_stream import SideStream
from ep_moe.config import ParallelConfig, Tokens
from ep_moe.errors import ConfigError, PeerTimeout
from ep_moe.observe import StageTimes
from ep_moe.parallel.agree import Agreement
from ep_moe.parallel.groups import Links, check_groups, default_store, init_from_torchrun, local_device, sizes_from_mesh
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.ledger import Ledger
from ep_moe.parallel.tokens import TokenFlow
from ep_moe.workspace import Workspaces

if TYPE_CHECKING:
    from ep_moe.all2all.base import Dispatcher, Geometry

DEADLINE_S = 300.0
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
        if context is not None:
            context.left()


_COMPILED = nullcontext()  # a graph is traced once, and runs where nothing here is looked at


class EPContext:
    """Rank layout and groups, the pool of dispatchers, the lockstep ledger and the deadline of one model.

    Made collectively by one of `from_torchrun`, `from_groups`, `from_mesh`; `local` makes one for a single process.
    Outlives its layers, is not re-entrant, works as a context manager. Several may live in one process.

    layout: this rank's RankLayout; device: where the layers compute
    tokens: the TokenFlow between attention's and the experts' view
    agreement: among the ranks that run the same layers (this rank's lockstep group)
    stage_times: None, or a StageTimes that the layers add to
    max_tokens: the most tokens that any rank passes to a layer in one call; None: any number, and no transport with
        fixed buffers
    workspaces: the kernels' scratch memory, shared by all layers
    compute: the stream that computes parts while others travel
    recorders: of captured calls, one for each stream that they were captured for
    """

    def __init__(
        self,
        layout: RankLayout,
        device: torch.device,
        store: Store | None,
        links: Links,
        ledger: Ledger,
        max_tokens: int | None = None,
    ) -> None:
        self.layout = layout
        self.device = device
        self.ledger = ledger
        self.links = links
        self.tokens = TokenFlow(layout, tp=links["tp"], etp=links["etp"], lockstep=links["lockstep"])
        self.stage_times: StageTimes | None = None
        self.max_tokens = max_tokens
        self.step_tokens = self.wire_tokens
        peers = layout.group("lockstep")
        scope = None if store is None else PrefixStore(f"block{peers[0]}", store)
        self.agreement = Agreement(scope, peers, layout.rank, ledger.deadline_s)
        self.workspaces = Workspaces(device)
        self.compute = SideStream(priority=-1)
        self.recorders: list[Any] = []
        self._pool: dict[tuple[str, Geometry], Any] = {}
        self._layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # in order of making
        self._layer_count = 0
        self._inside: str | None = None
        self._forward = _Forward(self)
        self._destroyed = False

    # --- constructors ------------------------------------------------------------------------------------------

    @classmethod
    def from_torchrun(
        cls,
        parallel: ParallelConfig | None = None,
        *,
        device: torch.device | None = None,
        deadline_s: float = DEADLINE_S,
        max_tokens: int | None = None,
    ) -> EPContext:
        """From torchrun's environment; makes the default process group unless there is one.

        parallel: defaults to expert parallel over all ranks (dp = world).
        max_tokens: the most tokens (rows of x) that any rank will pass to a layer; opens the transports whose buffers
            are made once, which CUDA graphs need
        """
        device = device or local_device()
        init_from_torchrun(device, deadline_s=deadline_s)
        return cls.from_groups(parallel, device=device, deadline_s=deadline_s, max_tokens=max_tokens)

    @classmethod
    def from_groups(
        cls,
        parallel: ParallelConfig | None = None,
        groups: Mapping[str, ProcessGroup] | None = None,
        *,
        device: torch.device,
        deadline_s: float = DEADLINE_S,
        max_tokens: int | None = None,
    ) -> EPContext:
        """Within an initialised torch.distributed; `groups` ("ep", "tp", "etp") are used where given, made where not.

        A group must hold the ranks that RankLayout gives it.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised; call EPContext.from_torchrun, or init_process_group first"
            )
        rank, world = dist.get_rank(), dist.get_world_size()
        parallel = parallel or ParallelConfig(dp=world)
        base = default_store()
        # counted per rank in the store and not in a global: all ranks make their contexts in the same order
        number = base.add(f"ep_moe/contexts/{rank}", 1)
        store = PrefixStore(f"ep_moe/{number}", base)
        layout = _agreed_layout(parallel, store, rank, world, device, deadline_s, max_tokens)
        return cls._connect(layout, device, store, groups, deadline_s, max_tokens)

    @classmethod
    def _connect(
        cls,
        layout: RankLayout,
        device: torch.device,
        store: Store,
        groups: Mapping[str, ProcessGroup] | None,
        deadline_s: float,
        max_tokens: int | None,
    ) -> EPContext:
        agreement = Agreement(PrefixStore("connect", store), range(layout.world), layout.rank, deadline_s)
        problem = None
        try:
            check_groups(layout, groups or {})
        except ConfigError as error:
            problem = error
        # before any group is made: a rank that makes another set of them would leave the others waiting
        agreement.same("EPContext groups", {"groups given": sorted(groups or {})}, problem)
        made: list[Links] = []
        abort = (lambda: made[0].abort()) if device.type == "cuda" else None  # gloo has timeouts of its own
        peers = layout.group("lockstep")  # others have nothing to do with what is told here
        scope = PrefixStore(f"ledger/block{peers[0]}", store)
        ledger = Ledger(scope, peers, layout.rank, deadline_s=deadline_s, abort=abort)
        made.append(Links(layout, ledger, device, groups))
        agreement.healthy("EPContext", None)  # all have their groups before any uses one
        return cls(layout, device, store, made[0], ledger, max_tokens)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        tokens: Tokens = Tokens.REPLICATED,
        ep: int | None = None,
        etp: int | None = None,
        device: torch.device | None = None,
        deadline_s: float = DEADLINE_S,
        max_tokens: int | None = None,
    ) -> EPContext:
        """From a DeviceMesh with axes among (pp, dp, tp) or (pp, replica, ep, etp); its groups are used.

        ep, etp: for a mesh of attention's axes; default ep = dp * tp, etp = 1.
        """
        sizes, groups = sizes_from_mesh(mesh)
        etp = sizes.get("etp", 1) if etp is None else etp
        tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
        parallel = ParallelConfig(
            pp=pp, dp=mesh.size() // (tp * pp), tp=tp, ep=sizes.get("ep", ep), etp=etp, tokens=tokens
        )
        device = device or (local_device() if mesh.device_type == "cuda" else torch.device(mesh.device_type))
        return cls.from_groups(parallel, groups, device=device, deadline_s=deadline_s, max_tokens=max_tokens)

    @classmethod
    def local(cls, device: torch.device | None = None) -> EPContext:
        """One process, no torch.distributed."""
        layout = RankLayout(world=1, rank=0)
        ledger = Ledger()
        device = device or local_device()
        return cls(layout, device, None, Links(layout, ledger, device), ledger)

    # --- what layers use ---------------------------------------------------------------------------------------

    def dispatcher(self, name: str, geometry: Geometry) -> Dispatcher:
        """The pool's dispatcher of that name and geometry, made on first use."""
        made: Dispatcher = self.pooled(
            name, geometry, lambda: registry.load("dispatchers", name)(geometry, self.links["ep"])
        )
        return made

    def pooled(self, name: str, geometry: Geometry, make: Callable[[], Any]) -> Any:
        """What layers of one geometry share, made on first use and given back with the context. It has `capabilities`
        and `destroy()`."""
        self._check_alive()
        key = (name, geometry)
        if key not in self._pool:
            self._pool[key] = make()
        return self._pool[key]

    @property
    def wire_tokens(self) -> int | None:
        """The most tokens that a rank dispatches: its own share of `max_tokens`, and its etp peers'."""
        return None if self.max_tokens is None else self.layout.wire_tokens(self.max_tokens)

    @contextmanager
    def at_most(self, max_tokens: int) -> Iterator[None]:
        """Within, no rank passes more than so many tokens to a layer, fewer than the context's `max_tokens`: the
        receivers of transports with fixed buffers then have fewer empty rows to look at.

        Collective: ranks that disagree would write into each other's rows, so they compare through the store. Put it
        around a capture, or around many steps.
        """
        problem = None
        if self.max_tokens is None:
            problem = ConfigError("at_most is for a context with max_tokens: EPContext.from_torchrun(max_tokens=...)")
        elif type(max_tokens) is not int or not 1 <= max_tokens <= self.max_tokens:
            problem = ConfigError(
                f"at_most: max_tokens must be an integer in [1, {self.max_tokens}] (EPContext's), got {max_tokens!r}"
            )
        self.agreement.same("EPContext.at_most", {"max_tokens": max_tokens}, problem)
        before, self.step_tokens = self.step_tokens, self.layout.wire_tokens(max_tokens)
        try:
            yield
        finally:
            self.step_tokens = before

    def name_layer(self, name: str | None) -> str:
        """What errors and the ledger call the next layer."""
        self._check_alive()
        self._layer_count += 1
        return name or f"moe{self._layer_count - 1}"

    def register(self, layer: Any) -> None:
        """Count a finished layer in for `plan` and `tune`."""
        self._layers[self._layer_count] = layer

    @property
    def idle(self) -> bool:
        """Whether a forward may begin; `entered` says why not."""
        return self._inside is None and not self._destroyed

    def entered(self, name: str) -> AbstractContextManager[None]:
        """One forward of one layer, for a `with`. A context runs one at a time: its collectives have one order."""
        if torch.compiler.is_compiling():
            return _COMPILED
        self._check_alive()
        if self._inside is not None:
            raise RuntimeError(
                f"EPContext is not re-entrant: {name} was called inside {self._inside}; use a context of its own for a "
                f"model that runs in another thread"
            )
        self._inside = self.ledger.where = name
        return self._forward

    def left(self) -> None:
        """The end of that forward."""
        self._inside, self.ledger.where = None, ""

    def plan(self) -> dict[str, int]:
        """Bytes per kind of buffer on this rank over the layers that live: summed, but the largest workspace once (per
        stream that layers run on), and a transport's buffers once per geometry (and call in flight)."""
        total: dict[str, int] = {}
        for layer in self._layers.values():
            for name, size in layer.plan().items():
                total[name] = total.get(name, 0) + size
        if total:
            total["workspace"] = self.workspaces.reserved
            shared: dict[Any, int] = {}
            for layer in self._layers.values():
                for key, size in layer.transport_bytes().items():
                    shared[key] = max(shared.get(key, 0), size)
            total["transport"] = sum(shared.values())
        return total

    def tune(self, rows: Sequence[int] = TUNED_ROWS, *, cache: str | Path | None = None) -> None:
        """`MoELayer.tune` for every layer, measured once for layers of one shape. Collective."""
        found: dict[Any, list[int]] = {}
        for _, layer in sorted(self._layers.items()):
            for kernel in layer.kernels:
                key = (kernel.name, *layer.shape)
                if key not in found:
                    found[key] = layer.tune_kernel(kernel, rows, cache)
                else:
                    layer.use(kernel, found[key])

    def capture(self, tokens: Sequence[int]) -> None:
        """`MoELayer.capture` for every layer. Collective."""
        for _, layer in sorted(self._layers.items()):
            layer.capture(tokens)

    def capture_routed(self, tokens: Sequence[int]) -> None:
        """`MoELayer.capture_routed` for every layer. Collective."""
        for _, layer in sorted(self._layers.items()):
            layer.capture_routed(tokens)

    # --- lifetime ----------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Give back dispatchers and groups made here. Collective, idempotent. The default group stays."""
        if self._destroyed:
            return
        self._destroyed = True
        if self.device.type == "cuda" and any(d.capabilities.static for d in self._pool.values()):
            torch.cuda.synchronize(self.device)  # what peers read or write here is kept until they are done
        try:
            # nobody closes connections while a peer still opens or uses them
            self.agreement.healthy("EPContext.destroy", None)
        except PeerTimeout:
            pass  # a lost peer has been reported where it was lost; what is here is given back all the same
        self._release()

    def _release(self) -> None:
        self.ledger.close()
        for layer in self._layers.values():
            layer.let_go()
        self.recorders.clear()
        for dispatcher in self._pool.values():
            dispatcher.destroy()
        self._pool.clear()
        self.workspaces.clear()
        self.links.destroy()

    def __enter__(self) -> EPContext:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.destroy()
        elif not self._destroyed:
            # peers are not waited for: whatever ended this rank may have ended them too
            self._destroyed = True
            self.ledger.close()

    def _check_alive(self) -> None:
        if self._destroyed:
            raise RuntimeError("this EPContext was destroyed; keep it alive as long as its layers")

    def __repr__(self) -> str:
        return f"EPContext({self.layout}, {self.device}, {self._layer_count} layers, {len(self._pool)} transports)"


def _agreed_layout(
    parallel: ParallelConfig,
    store: Store,
    rank: int,
    world: int,
    device: torch.device,
    deadline_s: float,
    max_tokens: int | None,
) -> RankLayout:
    """This rank's layout, after all ranks stated the same versions and sizes."""
    if not isinstance(device, torch.device):
        raise ConfigError(f"device must be a torch.device, got {device!r}; write torch.device({device!r})")
    facts = {
        "ep_moe version": __version__,
        "torch version": torch.__version__,
        "python version": platform.python_version(),
        "device type": device.type,
        "deadline_s": deadline_s,
        "max_tokens": max_tokens,
        **{f"ParallelConfig.{name}": getattr(parallel, name) for name in ("pp", "dp", "tp", "ep", "etp")},
        "ParallelConfig.tokens": parallel.tokens.value,
    }
    problem = None if deadline_s > 0 else ConfigError(f"deadline_s must be positive, got {deadline_s}")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        problem = ConfigError(f"max_tokens must be an integer of at least 1 or None, got {max_tokens!r}")
    patience = DEADLINE_S if problem else deadline_s
    Agreement(PrefixStore("create", store), range(world), rank, patience).same("EPContext", facts, problem)
    # equal facts, so that this raises on all ranks or on none
    return RankLayout.from_config(parallel, world=world, rank=rank)
