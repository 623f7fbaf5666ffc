"""The transport and kernel of a layer's calls, by their token limit: one pair for all calls, or tuned buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ep_moe import registry
from ep_moe.all2all.base import Dispatcher, DispatchShape
from ep_moe.config import MoEConfig, Wire
from ep_moe.errors import ConfigError
from ep_moe.execution.exchange import check_pipeline
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.fused.base import INSIDE
from ep_moe.parallel.layout import RankLayout
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.quant.schemes import Scheme
from ep_moe.selection import explain
from ep_moe.selection.tuned import Measured, Tuned, bucket_index


@dataclass(frozen=True)
class TableEntry:
    """The transport and kernel for calls of up to `tokens` tokens per rank.

    Args:
        tokens: The most tokens of any rank in such a call, None for any number.
        choice: The transport and kernel.
        pipeline: The value of `MoELayer(pipeline=)`.
        buffer_tokens: The tokens per rank that the transport's buffers hold; with a pipeline, those of a part. None
            for any number.
    """

    tokens: int | None
    choice: explain.BackendChoice
    pipeline: int | None
    buffer_tokens: int | None

    def __str__(self) -> str:
        return f"{self.choice.all2all} with {self.choice.experts} {_described(self)}"

    def dispatch_shape(
        self, config: MoEConfig, expert_map: ExpertMap, dtype: torch.dtype, wire: Wire, *, exact: bool, repeats: bool
    ) -> DispatchShape:
        """Return the shape that the transport is constructed for.

        Args:
            config: The layer's configuration.
            expert_map: A map of the layer. All its maps have the same slots and ranks.
            dtype: The dtype of rows.
            wire: The layer's wire.
            exact: The value of `ExpertsOptions.exact`.
            repeats: Whether calls of an exact layer send one row for each route.

        Returns:
            The shape.
        """
        per_route = exact and not repeats and self._returns_routes
        rows = config.top_k if exact and not per_route else 1  # rows sent for each token
        return DispatchShape(
            hidden_size=config.hidden_size,
            top_k=config.top_k // rows,
            slots_per_rank=expert_map.slots_per_rank,
            num_ranks=expert_map.num_ranks,
            dtype=dtype,
            max_tokens=None if self.buffer_tokens is None else self.buffer_tokens * rows,
            wire=wire,
            per_route=per_route,
        )

    @property
    def _returns_routes(self) -> bool:
        """Whether the pair returns the result of each route of a token as a separate row."""
        transport = registry.load("dispatchers", self.choice.all2all)
        kernel = registry.load("experts", self.choice.experts)
        return bool(transport.capabilities.per_route and kernel.capabilities.per_route)


class BackendTable:
    """The transport and kernel of a layer's calls, by their token limit.

    Args:
        entries: The entries, in ascending order of tokens.
    """

    def __init__(self, entries: Sequence[TableEntry]) -> None:
        self._entries = tuple(entries)
        self._bounds = [entry.tokens or 0 for entry in entries]

    @property
    def last(self) -> TableEntry:
        """The entry with the most tokens."""
        return self._entries[-1]

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels without duplicates. That of the entry with the most tokens comes first."""
        return list(dict.fromkeys(entry.choice.experts for entry in reversed(self._entries)))

    def entry_for(self, bound: int | None) -> TableEntry:
        """Return the entry for calls with a token limit.

        Args:
            bound: The most tokens of any rank, None for any number.

        Returns:
            The first entry with at least so many tokens, or the last entry.
        """
        if bound is None or len(self._entries) == 1:
            return self._entries[-1]
        return self._entries[bucket_index(self._bounds, bound)]

    @property
    def has_fixed_buffers(self) -> bool:
        """Whether a transport has buffers of fixed dtype and size, without exchanging sizes before it sends rows."""
        return any(
            registry.load("dispatchers", entry.choice.all2all).capabilities.static and entry.buffer_tokens is not None
            for entry in self._entries
            if entry.choice.all2all != INSIDE
        )

    def dtype_problem(
        self,
        dtype: torch.dtype,
        config: MoEConfig,
        layout: RankLayout,
        scheme: Scheme,
        options: ExpertsOptions,
        wire: Wire,
    ) -> str | None:
        """Return why a backend does not support a dtype that the layer is converted to.

        Args:
            dtype: The new dtype.
            config: The layer's configuration.
            layout: The layout of the ranks.
            scheme: The layer's scheme.
            options: The kernel's options.
            wire: The layer's wire.

        Returns:
            The backend and its reason, or None if all support it.
        """
        for entry in self._entries:
            if entry.choice.all2all == INSIDE:
                return f"experts={entry.choice.experts} has buffers of the dtype with which the layer was built"
            kernel, transport = entry.choice.experts, entry.choice.all2all
            sender, computer = registry.load("dispatchers", transport), registry.load("experts", kernel)
            if (why := computer.unsupported_reason(config, dtype, layout.etp, scheme, options)) is not None:
                return f"experts={kernel} does not compute in it: {why}"
            why = sender.unsupported_reason(config.hidden_size, config.top_k, layout.ep, dtype, entry.tokens, wire)
            if why is not None:
                return f"all2all={transport} does not carry it: {why}"
        return None

    def transport_bytes(
        self, dispatch_shape: Callable[[TableEntry], DispatchShape]
    ) -> dict[tuple[str, DispatchShape], int]:
        """Return the size of the transports' buffers.

        Args:
            dispatch_shape: Returns the shape that an entry's transport is constructed for.

        Returns:
            Bytes by transport and shape.
        """
        found: dict[tuple[str, DispatchShape], int] = {}
        for entry in self._entries:
            kind: type[Dispatcher] = registry.load("dispatchers", entry.choice.all2all)
            key = (entry.choice.all2all, dispatch_shape(entry))
            calls = 1 if entry.pipeline is None else kind.calls_in_parts(key[1])
            found[key] = max(found.get(key, 0), kind.buffer_bytes(key[1]) * calls)
        return found

    def explained(self, table: Sequence[explain.BackendChoice]) -> list[explain.BackendChoice]:
        """Mark this table's pairs as chosen in a table of `explain`.

        Args:
            table: The result of `explain`.

        Returns:
            The same rows, in which only this table's pairs are "chosen".
        """
        own = {(entry.choice.all2all, entry.choice.experts): entry.choice for entry in self._entries}
        rest = [dataclasses.replace(row, status="possible") if row.status == "chosen" else row for row in table]
        return [own.get((row.all2all, row.experts), row) for row in rest]

    def __str__(self) -> str:
        return ", ".join(map(str, self._entries))


def tuned_table(
    tuned: Tuned,
    config: MoEConfig,
    layout: RankLayout,
    device: torch.device,
    dtype: torch.dtype,
    keywords: Mapping[str, Any],
) -> BackendTable:
    """Return the table of a tuned file's buckets, up to the context's `max_tokens`.

    Args:
        tuned: The contents of the file.
        config: The layer's configuration.
        layout: The layout of the ranks.
        device: The layer's device.
        dtype: The layer's dtype.
        keywords: Keyword arguments of `explain`.

    Returns:
        The table.

    Raises:
        ConfigError: A pair cannot run here, or the kernels need different layouts of the weights.
    """
    most = keywords["max_tokens"]
    last = bucket_index([bucket.tokens for bucket in tuned.buckets], most)
    used = [*tuned.buckets[:last], dataclasses.replace(tuned.buckets[last], tokens=most)]
    used = [dataclasses.replace(b, pipeline=None) if (b.pipeline or 0) >= b.tokens else b for b in used]
    for bucket in used:
        pair = {"all2all": bucket.all2all, "experts": bucket.experts}
        explain.choose(config, layout, device, dtype, **{**keywords, **pair})
        check_pipeline(bucket.pipeline, bucket.tokens, bucket.all2all)
    if len({registry.load("experts", bucket.experts).weight_layout for bucket in used}) > 1:
        kernels = ", ".join(sorted({bucket.experts for bucket in used}))
        raise ConfigError(f"tuned has experts that cannot share one layer's weights: {kernels}; tune again")
    return BackendTable([TableEntry(b.tokens, _choice(b, used), b.pipeline, _buffer_tokens(b, used)) for b in used])


def _choice(bucket: Measured, used: Sequence[Measured]) -> explain.BackendChoice:
    same = [one for one in used if (one.all2all, one.experts) == (bucket.all2all, bucket.experts)]
    return explain.BackendChoice(bucket.all2all, bucket.experts, "chosen", f"tuned: {', '.join(map(_described, same))}")


def _described(one: Measured | TableEntry) -> str:
    tokens = "any number of" if one.tokens is None else f"up to {one.tokens}"
    return f"{tokens} tokens" + ("" if one.pipeline is None else f" in parts of {one.pipeline}")


def _buffer_tokens(bucket: Measured, used: Sequence[Measured]) -> int:
    """Return the tokens per rank that the buffers of a bucket's transport hold.

    Buckets of one transport share its buffers, which are sized for the largest of them: receivers read only the rows
    within the call's token limit. Transports without fixed buffers are also shared with other layers, and get the limit
    of all buckets.
    """
    if not registry.load("dispatchers", bucket.all2all).capabilities.static:
        return used[-1].tokens
    if bucket.pipeline is not None:
        return bucket.pipeline
    return max(one.tokens for one in used if one.all2all == bucket.all2all and one.pipeline is None)
