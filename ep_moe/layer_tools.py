"""What a user does with a MoELayer beside calling it: tune, capture, plan, read loads, record routes, explain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ep_moe.context import TUNED_ROWS
from ep_moe.errors import ConfigError
from ep_moe.execution import memory_plan
from ep_moe.execution.routing_replay import Replay, RoutingBuffer, RoutingTap
from ep_moe.layer_parts import LayerParts
from ep_moe.placement.placement import LayerStats, layer_stats
from ep_moe.runtime.devices import on_device_of
from ep_moe.selection import explain
from ep_moe.selection.explain import BackendChoice
from ep_moe.selection.tuned import Kernel, tuned_on_one_rank

if TYPE_CHECKING:
    from ep_moe.all2all.base import Dispatcher, DispatchShape
    from ep_moe.selection.backend_table import TableEntry
    from ep_moe.types import Routing, TokenMask


class LayerTools(LayerParts):
    """A MoELayer without its call: its parts, and all that is asked of it between calls."""

    if TYPE_CHECKING:  # of MoELayer, for what looks at a whole layer

        def run(self, x: Tensor, routing: Routing | None, mask: TokenMask | None = None) -> Tensor: ...
        @property
        def _kernel(self) -> Kernel: ...
        def _dispatcher(self) -> Dispatcher: ...
        def _shape_of(self, entry: TableEntry, *, repeats: bool = False) -> DispatchShape: ...

    def tune(self, rows: Sequence[int] = TUNED_ROWS, *, cache: str | Path | None = None) -> list[int]:
        """Let the expert kernel find its fastest variant for each number of received rows.

        Collective. Call it once weights are loaded and before any CUDA graph is captured. The rank with the most
        experts measures, and all ranks use what it found.

        Args:
            rows: Numbers of received rows to measure.
            cache: A folder that keeps findings by GPU, versions and shape. The measuring rank reads and writes it.
                Default: nothing is kept.

        Returns:
            What was found for `experts`, in the kernel's own terms.

        Raises:
            ConfigError: on all ranks, where the measuring rank's `rows` holds anything but integers of at least 1, or
                measuring fails there, such as by a cache folder that cannot be written.
            InputError: on all ranks, where the measuring rank is within a CUDA graph capture.
            PeerTimeout: a peer did not get here, or did not answer.
        """
        found = [self._tune_kernel(kernel, rows, cache) for kernel in self._kernels]
        return found[0]

    @on_device_of(lambda self, *_, **__: self.context.device)
    def _tune_kernel(self, kernel: Kernel, rows: Sequence[int], cache: str | Path | None = None) -> list[int]:
        """`tune` for one of `kernels`."""
        found = tuned_on_one_rank(kernel, self.context, self.placement.expert_map, rows, cache, self.name)
        self._use(kernel, found)
        return found

    def _use(self, kernel: Kernel, tuned: list[int]) -> None:
        """Run one of `kernels` with what `tune` found; what was captured is captured no more."""
        kernel.use(tuned)
        self._graphs.drop()

    def capture(self, tokens: Sequence[int]) -> None:
        """Record `forward` for some numbers of tokens as CUDA graphs.

        A call without gradients then replays the smallest graph that has room for its tokens. A replay costs the host
        one launch and two copies. Results are bitwise equal to an eager call. Exception: with `local`, and in the
        router and shared experts, GEMMs run at the recorded size and equal an eager call of that size.

        Collective, after `tune`, on the current stream, for calls under the bound in force (`EPContext.token_limit`).
        Maps may change and weights may be rewritten in place. After `tune`, or with other tensors or modules in their
        place, calls run eagerly. A user's router or shared experts are recorded as they run once: nothing random, no
        wait for the device. `plan` does not count the rows between kernels, in memory that all graphs of the context
        share.

        Args:
            tokens: Numbers of tokens, the same list on all ranks. Larger calls run eagerly.

        Raises:
            ConfigError: on all ranks, where the layer cannot be captured.
        """
        self._checks.first_call(self)  # what is replayed looks at nothing
        self._graphs.capture(self, tokens, routed=False)

    def capture_routed(self, tokens: Sequence[int]) -> None:
        """As `capture`, for `forward_routed`.

        Args:
            tokens: Numbers of tokens, the same list on all ranks.

        Raises:
            ConfigError: on all ranks, where the layer cannot be captured.
        """
        self._checks.first_call(self)
        self._graphs.capture(self, tokens, routed=True)

    def plan(self, train_tokens: int | None = None) -> dict[str, int]:
        """Count this rank's bytes by kind, from shapes alone.

        The result is the same before and after anything is allocated. Exception: buffers that grow (a transport with
        fixed buffers in a context without `max_tokens`) count as they are now.

        Args:
            train_tokens: The most tokens of a rank in a training step, which is counted too.

        Returns:
            Bytes of "experts", "router", "placement", "shared_experts", "workspace" and "transport". The workspace and
            the transport's buffers are shared with the context's other layers; `EPContext.plan` counts them once. With
            `train_tokens` also "gradients", and "saved": what forward keeps for backward, with a uniform router.

        Raises:
            ConfigError: `train_tokens` is no integer of at least 1 or exceeds the bound in force. Or the layer's
                transport and kernel have no backward whose size follows from shapes.
        """
        return memory_plan.layer_bytes(self, train_tokens)

    def _transport_bytes(self, train_tokens: int | None = None) -> memory_plan.Buffers:
        return memory_plan.transport_bytes(self, train_tokens)

    @on_device_of(lambda self: self.context.device)
    def stats(self) -> LayerStats:
        """Read the load per expert and rank.

        Collective over the EP group. Waits for the device.

        Returns:
            Routes per logical expert [E] and per EP rank [R], of the whole EP group.

        Raises:
            ConfigError: where a fused kernel routes inside and counts nothing.
        """
        if self._routes_inside:
            raise ConfigError(f"experts={self.choice.experts} routes inside and counts no load; choose other experts")
        return layer_stats(self.name, self.placement, self.context.rank_groups["ep"])

    @contextmanager
    def record_routing(self, buffer: RoutingBuffer) -> Iterator[RoutingBuffer]:
        """Write the routes of all calls in a block to device memory, in the order of calls and of their rows.

        Nothing waits for the device. A CUDA graph of the user's that is captured within the block appends rows at each
        replay. Calls within run without graphs of the layer's own. A call that activation checkpointing repeats in
        backward is recorded once.

        Args:
            buffer: Room for the rows. Where tp ranks pass the same tokens, each of them records, and all rows of x.

        Yields:
            The buffer.

        Raises:
            InputError: by a call in the block, on all ranks. The buffer is no `RoutingBuffer`, has another K or lies on
                another device, or the layer's experts route inside.
        """
        routes = self._routes = self._routes or RoutingTap()
        before, routes.buffer = routes.buffer, buffer
        try:
            yield buffer
        finally:
            routes.buffer = before

    @contextmanager
    def replay_routing(self, ids: Tensor | None, mask: Tensor | None = None) -> Iterator[None]:
        """Take the experts of each call in a block from recorded ids, and their weights from the router's live logits.

        Weights have gradients as ever. Each call in the block has the ids' number of rows, and takes the same ids: so
        does a call that activation checkpointing repeats, if backward runs within the block. Ids are read in each call:
        within a CUDA graph of the user's, a replay takes what is there then.

        Args:
            ids: int16, int32 or int64 [..., K] of T rows, logical ids, -1 for no expert, on the layer's device.
            mask: bool [...] of T elements, True for rows that take these ids. Other rows are routed, such as those of
                sequences without a record. Default: all rows take them.

        Yields:
            Nothing.

        Raises:
            InputError: by a call in the block, on all ranks. `ids` is None, or `ids` or `mask` has a wrong dtype, shape
                or device. Or an id is out of range, or twice in a row. Or the layer routes otherwise: by
                `forward_routed`, a router of the user's, or experts that route inside. On a GPU the first call checks
                the ids themselves, and a capture does not.
        """
        routes = self._routes = self._routes or RoutingTap()
        before, routes.replayed = routes.replayed, Replay(ids, mask)
        try:
            yield
        finally:
            routes.replayed = before

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Within, the rows of calls are no tokens: no routes are recorded or replayed, and logits of no rows."""
        before = self._logit_taps
        self._logit_taps = [partial(_tap_nothing, tap) for tap in before]
        try:
            with nullcontext() if self._routes is None else self._routes.idle():
                yield
        finally:
            self._logit_taps = before

    def no_stats(self) -> AbstractContextManager[None]:
        """Count no forward as load within the block: for warm-up and idle steps.

        Returns:
            A context manager.
        """
        return self.placement.no_stats()

    def explain(self) -> list[BackendChoice]:
        """List every pair of transport and kernel.

        Returns:
            One row a pair, whose status is "chosen", "possible", or the reason why it cannot run here.
        """
        table = explain.explain(self.config, self.context.layout, self.context.device, self.dtype, **self._asked)
        if self.tuned is not None:
            return self._table.explained(table)
        grown = [dispatcher for dispatcher in self._dispatchers.values() if dispatcher.grows]
        if not grown:
            return table
        held = f"; they hold {sum(dispatcher.held_bytes() for dispatcher in grown) / 2**20:.1f} MiB now"
        return [replace(row, reason=row.reason + held) if row.status == "chosen" else row for row in table]


def _tap_nothing(tap: Callable[[Tensor], None], logits: Tensor) -> None:
    tap(logits[:0])
