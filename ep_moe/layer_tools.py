"""LayerTools: the methods of a MoELayer beside its call: tune, capture, plan, read loads, record routes, explain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from ep_moe.context import TUNED_ROWS
from ep_moe.errors import ConfigError, InputError
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
    """A MoELayer without its call: its parts, and the methods that users call between calls."""

    if TYPE_CHECKING:  # defined by MoELayer; the functions that take a whole layer need them

        def run(self, x: Tensor, routing: Routing | None, mask: TokenMask | None = None) -> Tensor: ...
        @property
        def _kernel(self) -> Kernel: ...
        def _dispatcher(self) -> Dispatcher: ...
        def _shape_of(self, entry: TableEntry, *, repeats: bool = False) -> DispatchShape: ...

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse `torch.jit.script`, which calls this for the modules of a model."""
        raise InputError(
            f"{self.name}: torch.jit.script cannot compile a MoELayer, which runs Python between its kernels; call "
            "torch.compile(model), or torch.export with a model on EPContext.local()"
        )

    def tune(self, rows: Sequence[int] = TUNED_ROWS, *, cache: str | Path | None = None) -> list[int]:
        """Find the fastest variant of the expert kernel for each number of received rows.

        Collective. Call it after weights are loaded and before any CUDA graph is captured. The rank with the most
        experts measures, and all ranks use its results.

        Args:
            rows: Numbers of received rows to measure.
            cache: A folder that keeps results by GPU, versions and shape. The measuring rank reads and writes it.
                Default: results are not kept.

        Returns:
            The results for `experts`. Their meaning is private to the kernel.

        Raises:
            ConfigError: on all ranks, if the measuring rank's `rows` holds anything but integers of at least 1, or
                measuring fails there, for example because the cache folder cannot be written.
            InputError: on all ranks, if the measuring rank is in a CUDA graph capture.
            PeerTimeout: a peer did not reach this call, or did not answer.
        """
        found = [self._tune_kernel(kernel, rows, cache) for kernel in self._kernels]
        return found[0]

    @on_device_of(lambda self, *_, **__: self.context.device)
    def _tune_kernel(self, kernel: Kernel, rows: Sequence[int], cache: str | Path | None = None) -> list[int]:
        """Tune one of the layer's kernels, as `tune` does."""
        found = tuned_on_one_rank(kernel, self.context, self.placement.expert_map, rows, cache, self.name)
        self._use(kernel, found)
        return found

    def _use(self, kernel: Kernel, tuned: list[int]) -> None:
        """Apply tuning results to one of the layer's kernels, and drop the layer's CUDA graphs."""
        kernel.use(tuned)
        self._graphs.drop()

    def capture(self, tokens: Sequence[int]) -> None:
        """Record `forward` for some numbers of tokens as CUDA graphs.

        A call without gradients then replays the smallest graph that has room for its tokens. A replay costs the host
        one launch and two copies. Results are bitwise equal to an eager call. Exception: with `local`, and in the
        router and shared experts, GEMMs run at the recorded size and equal an eager call of that size.

        Collective. Call it after `tune`, on the stream that the calls will use. The graphs serve calls under the
        current token limit (`EPContext.token_limit`). Expert maps may change, and weights may be rewritten in place.
        After `tune`, or after a tensor or module was replaced, calls run eagerly. A user's router or shared experts are
        recorded from one run, so they must not be random and must not wait for the device. All graphs of the context
        share the memory of the rows between kernels; `plan` does not count it.

        Args:
            tokens: Numbers of tokens, the same list on all ranks. Larger calls run eagerly.

        Raises:
            ConfigError: on all ranks, if the layer cannot be captured.
        """
        self._checks.first_call(self)  # replays make no checks
        self._graphs.capture(self, tokens, routed=False)

    def capture_routed(self, tokens: Sequence[int]) -> None:
        """Record `forward_routed` for some numbers of tokens as CUDA graphs, as `capture` records `forward`.

        Args:
            tokens: Numbers of tokens, the same list on all ranks.

        Raises:
            ConfigError: on all ranks, if the layer cannot be captured.
        """
        self._checks.first_call(self)
        self._graphs.capture(self, tokens, routed=True)

    def plan(self, train_tokens: int | None = None) -> dict[str, int]:
        """Return this rank's memory in bytes by kind, computed from shapes alone.

        The result is the same before and after allocation. Exception: buffers that grow (a transport with fixed
        buffers in a context without `max_tokens`) count with their present size.

        Args:
            train_tokens: The most tokens of a rank in a training step. Default: count inference only.

        Returns:
            Bytes of "experts", "router", "placement", "shared_experts", "workspace" and "transport". The layers of a
            context share the workspace and the transport's buffers; `EPContext.plan` counts them once. With
            `train_tokens` also "gradients", and for a router that chooses all experts equally often "saved", the
            tensors that forward saves for backward, and "temporary", the most that the experts need for a moment in
            forward or backward. The latter is missing for kernels that cannot tell it, such as `reference`.

        Raises:
            ConfigError: `train_tokens` is no integer of at least 1, or exceeds the current token limit. Or the size of
                the backward of the layer's transport and kernel does not follow from shapes, or they have no backward.
        """
        return memory_plan.layer_bytes(self, train_tokens)

    def _transport_bytes(self, train_tokens: int | None = None) -> memory_plan.Buffers:
        return memory_plan.transport_bytes(self, train_tokens)

    @on_device_of(lambda self: self.context.device)
    def stats(self) -> LayerStats:
        """Return the load per expert and per rank.

        Collective over the EP group. Waits for the device.

        Returns:
            Routes per logical expert [E] and per EP rank [R], summed over the EP group.

        Raises:
            ConfigError: the layer has a fused kernel that routes internally and counts no load.
        """
        if self._routes_inside:
            raise ConfigError(
                f"experts={self.choice.experts} has a built-in router and counts no load; choose other experts"
            )
        return layer_stats(self.name, self.placement, self.context.rank_groups["ep"])

    @contextmanager
    def record_routing(self, buffer: RoutingBuffer) -> Iterator[RoutingBuffer]:
        """Record the routes of all calls in a block in device memory, in the order of calls and of their rows.

        Recording does not wait for the device. A user's CUDA graph that is captured in the block appends rows at each
        replay. The layer's own graphs are not used in the block. A call that activation checkpointing repeats in
        backward is recorded once.

        Args:
            buffer: The memory for the rows. If tp ranks pass the same tokens, each of them records all rows of x.

        Yields:
            The buffer.

        Raises:
            InputError: in a call in the block, on all ranks. The buffer is no `RoutingBuffer`, has another K or is on
                another device, or the layer's fused kernel routes internally.
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

        Weights have gradients as usual. Every call in the block must have T rows, and takes the same ids. Run backward
        in the block too, so that a call that activation checkpointing repeats takes these ids again. Each call reads
        the ids. If a user's CUDA graph is captured in the block, each replay reads the ids that the tensor then holds.

        Args:
            ids: int16, int32 or int64 [..., K] of T rows, logical ids, -1 for no expert, on the layer's device.
            mask: bool [...] of T elements, True for rows that take these ids. The router chooses for other rows, such
                as those of sequences without a record. Default: all rows take these ids.

        Yields:
            Nothing.

        Raises:
            InputError: in a call in the block, on all ranks. `ids` is None, or `ids` or `mask` has a wrong dtype, shape
                or device. Or an id is out of range, or occurs twice in a row. Or the layer's own router does not choose
                the experts: the call is `forward_routed`, the router is the user's, or a fused kernel routes
                internally. On a GPU only the first call in the block checks the values of ids, and a call in a capture
                does not.
        """
        routes = self._routes = self._routes or RoutingTap()
        before, routes.replayed = routes.replayed, Replay(ids, mask)
        try:
            yield
        finally:
            routes.replayed = before

    @contextmanager
    def _rows_as_padding(self) -> Iterator[None]:
        """Treat the rows of calls in a block as padding: record and replay no routes, and tap the logits of no rows."""
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
            One row per pair. Its status is "chosen", "possible" or "refused", and `reason` says why.
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
