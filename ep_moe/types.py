"""The data that flow between the five nouns, and the legend of the shape letters.

T  tokens of this rank        E  logical experts (of the checkpoint)     K  top-k
H  hidden size                P  physical experts = R * slots_per_rank   R  ranks of the EP group
I  expert intermediate size   L  slots of this rank                      N  received rows
C  rows that fit into a slot

logical expert   an expert of the checkpoint
physical expert  a slot of some rank that holds a copy of a logical expert; its id is `owner * slots_per_rank + local`
local expert     a physical expert counted from its rank's first slot
One sentinel everywhere: id -1 means "no expert".
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NewType, TypeVar

import torch
from torch import Tensor

from ep_moe.renamed import renamed_in

PhysicalIds = NewType("PhysicalIds", Tensor)
LocalIds = NewType("LocalIds", Tensor)
LogicalIds = NewType("LogicalIds", Tensor)  # no longer needed: `Routing` takes tensors. It goes with the next release


@dataclass(frozen=True)
class Routing:
    """The experts of each token, chosen by a router, as logical ids (those of the checkpoint).

    Nothing is checked here: a layer checks a routing in the call, so that all ranks raise alike.

    Args:
        ids: int64 or int32 [T, K], logical ids in [0, E), -1 for no expert. The valid ids of a row are distinct.
        weights: float32 [T, K]. Each expert's output (or input) is multiplied by its weight.
        logits: [T, E], the scores that the choice was made by. `ep_moe.training.router_logits` records them. Default:
            not recorded.
    """

    ids: Tensor
    weights: Tensor
    logits: Tensor | None = None


class TokenMask(NamedTuple):
    """Which rows of a call are tokens, and which are padding.

    Args:
        tokens: bool [...], as x without its last size.
        sent: Whether padding travels as tokens do, and is left out of the load alone; or bool [T], which rows travel.
    """

    tokens: Tensor
    sent: Tensor | bool = False


def without_rows(routing: Routing, kept: Tensor) -> Routing:
    """Remove the routes of rows that are not kept.

    Args:
        routing: Of T rows.
        kept: bool [...] of T elements.

    Returns:
        The same with ids of -1 in the other rows, without logits.
    """
    return Routing(routing.ids.masked_fill(~kept.reshape(-1, 1), -1), routing.weights)


@dataclass(frozen=True)
class PhysicalRouting:
    """A placed routing: as `Routing`, in physical ids. A type of its own, so that the two cannot be mixed up.

    Args:
        ids: int32 or int64 [T, K], physical ids in [0, P), -1 for no expert.
        weights: float32 [T, K].
    """

    ids: PhysicalIds
    weights: Tensor

    def materialize(self) -> PhysicalRouting:
        """Place what is not placed yet.

        Returns:
            This routing, with ids that are there. A deferred one (`placement.deferred`) is placed and counted here.
        """
        return self


class RowLayout(enum.Enum):
    """How received rows are arranged.

    - `RANK_MAJOR`: [N, H], one row per (token, rank); carries local ids, -1 for "not mine", and weights.
    - `CONTIGUOUS`: [N, H] grouped by local expert, `expert_offsets` [L + 1] on the device.
    - `BATCHED`: [L, C, H], `expert_counts` [L] on the device.
    """

    RANK_MAJOR = "rank_major"
    CONTIGUOUS = "contiguous"
    BATCHED = "batched"


class Weighting(enum.Enum):
    """Who multiplies by the routing weight.

    - `EXPERTS`: the expert kernel, which sums over the local experts of a row.
    - `COMBINE`: the transport, in combine.
    """

    EXPERTS = "experts"
    COMBINE = "combine"


@dataclass(frozen=True)
class WireIds:
    """Ids as a transport received them. A route outside this rank's slots, or of weight 0, is none.

    Args:
        ids: int32 [N, K], contiguous.
        base: This rank's first physical id.
        ids_ready: int32 [R] on the device, where ids and weights come before the rows. Rank r's have arrived when
            `ids_ready[r] == sequence[0] + 1`. A kernel launched with PDL (`pdl_launch`) may read ids and weights then,
            before the rows arrive. It must call `pdl_wait` before it ends, for the kernels after it that read rows.
        sequence: int32 [2] on the device, beside `ids_ready`. sequence[0] is the sequence number of the call before
            this one. The kernel's programs may count in sequence[1] to wait for each other. It is 0 before and after.
    """

    ids: PhysicalIds
    base: int
    ids_ready: Tensor | None = None
    sequence: Tensor | None = None


@dataclass(frozen=True)
class PeerPackets:
    """Rows as packets of 8 bytes: 4 of a row and the call's sequence number. One packet more comes for every row, also
    where there is no answer.

    Args:
        blocks: R tensors, int64 [bound, at least words + 1], rows at multiples of 16 bytes.
        number: int32 [at least 1] on the device, the sequence number.
        words: 4-byte words of a row.
    """

    blocks: tuple[Tensor, ...]
    number: Tensor
    words: int

    @property
    def stride(self) -> int:
        """Packets from one row to the next."""
        return self.blocks[0].stride(0)

    def write(self, blocks: Sequence[Tensor]) -> None:
        """Write rows to the ranks they came from.

        Args:
            blocks: R tensors [bound, H], or [bound, 0] where no row is wanted.
        """
        number = self.number[:1].long() << 32
        for place, rows in zip(self.blocks, blocks, strict=True):
            if rows.numel():
                place[:, : self.words].copy_(rows.contiguous().view(torch.int32).long() & 0xFFFFFFFF | number)
            place[:, self.words].copy_(number.expand(len(place)))


@dataclass(frozen=True)
class PeerRows:
    """The experts' rows in the memory of the ranks that the received ones came from: row n is row n % bound of its
    block n // bound.

    Args:
        blocks: R tensors [bound, H], as this rank sees them.
        addresses: int64 [R] on the device.
        offset: Bytes: block r begins at addresses[r] + offset.
        rank: Whose own block lies here.
        packets: If given, rows are written as packets. `blocks` then only gives shape and dtype, and `offset` refers to
            the packets.
    """

    blocks: tuple[Tensor, ...]
    addresses: Tensor
    offset: int
    rank: int
    packets: PeerPackets | None = None

    @property
    def bound(self) -> int:
        """Rows of a block."""
        return len(self.blocks[0])

    @property
    def device(self) -> torch.device:
        """The device of `addresses`."""
        return self.addresses.device

    @cached_property
    def place(self) -> tuple[int, ...]:
        """A key of this memory: address of `addresses`, offset, bound, rank, and the packets' number and stride."""
        packets = (0, 0) if self.packets is None else (self.packets.number.data_ptr(), self.packets.stride)
        return self.addresses.data_ptr(), self.offset, self.bound, self.rank, *packets

    def write(self, y: Tensor) -> None:
        """Write all rows.

        Args:
            y: [N, H] of the blocks' dtype.
        """
        if self.packets is not None:
            self.packets.write(y.split(self.bound))
            return
        for block, rows in zip(self.blocks, y.split(self.bound), strict=True):
            block.copy_(rows)

    def write_nothing(self) -> None:
        """Signal to ranks that await packets that this rank returns no rows."""
        if self.packets is not None:
            self.packets.write([block[:, :0] for block in self.blocks])


@dataclass(frozen=True)
class Received:
    """The rows that reached this rank's experts, and how they are arranged. Valid until `combine`.

    Args:
        x: [N, H] or [L, C, H], as they came.
        layout: How rows are arranged.
        weighting: Who multiplies by the routing weight.
        handle: The transport's own state for this call; opaque.
        local_ids: RANK_MAJOR: int32 or int64 [N, K], or None beside `wire_ids`.
        wire_ids: RANK_MAJOR: the ids as they traveled.
        weights: Weighting EXPERTS: float32 [N, K], or one per row: [N], [L, C].
        expert_offsets: CONTIGUOUS: [L + 1].
        expert_counts: BATCHED: [L].
        format: How x is written, a name of `quant.row_format.ROW_FORMATS`.
        x_scale: [..., H / block], where the format has scales; x is [..., H / packed] then.
        input_scale: Of fp8_tensor and nvfp4 rows: `Wire.input_scale`.
        out: [..., H] as x, memory of the transport for the experts' rows. Writing them there saves combine a copy.
        peer_out: RANK_MAJOR: peer memory for the experts' rows. A kernel with the capability `peer_out` writes them
            there instead of to `out`. Combine then copies nothing.
        per_route: RANK_MAJOR under Weighting.COMBINE: the experts' rows are [N * K, H], one for each id in its order,
            zero where it is no local expert's. `out` and `peer_out` have as many.
    """

    x: Tensor
    layout: RowLayout
    weighting: Weighting
    handle: Any
    local_ids: LocalIds | None = None
    wire_ids: WireIds | None = None
    weights: Tensor | None = None
    expert_offsets: Tensor | None = None
    expert_counts: Tensor | None = None
    format: str = "plain"
    x_scale: Tensor | None = None
    input_scale: float | None = None
    out: Tensor | None = None
    peer_out: PeerRows | None = None
    per_route: bool = False

    def dense(self) -> Received:
        """Make every tensor contiguous, for kernels that read from bare pointers.

        Returns:
            Itself, or a copy with contiguous tensors where some are views.
        """
        copies: dict[str, Any] = {}
        for name in _TENSORS:
            tensor = getattr(self, name)
            if tensor is not None and not tensor.is_contiguous():
                copies[name] = tensor.contiguous()
        return dataclasses.replace(self, **copies) if copies else self


_TENSORS = ("x", "x_scale", "local_ids", "weights", "expert_offsets", "expert_counts")


class Activation(enum.Enum):
    """The function between the two expert matrices. `gate, up = (w13 @ x).chunk(2)`.

    - `SWIGLU`: `silu(gate) * up`.
    - `GEGLU`: `gelu(gate) * up`, the exact (erf) gelu.
    - `SWIGLU_CLAMPED` (GPT-OSS): `(up + 1) * gate * sigmoid(alpha * gate)`, gate clamped above and up on both sides at
      `limit`.
    - `RELU2`: `relu(w13 @ x) ** 2`, no gate: w13 is [I, H].
    - `GEGLU_TANH` (Gemma 4): `gelu(gate) * up`, gelu by its tanh approximation.
    - `SWIGLU_LIMITED` (DeepSeek-V4): `silu(gate) * up`, gate clamped above and up on both sides at `limit`.
    - `SWIGLU_LIMITED_AFTER` (Step-3.7): `min(silu(gate), limit) * up`, up clamped on both sides at `limit`.
    - `SWIGLU_SOFTCAPPED` (Inkling 2): `cap(gate, alpha) * sigmoid(gate) * cap(up, limit)`, with
      `cap(x, c) = c * tanh(x / c)`.
    """

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    SWIGLU_CLAMPED = "swiglu_clamped"
    RELU2 = "relu2"
    GEGLU_TANH = "geglu_tanh"
    SWIGLU_LIMITED = "swiglu_limited"
    SWIGLU_LIMITED_AFTER = "swiglu_limited_after"
    SWIGLU_SOFTCAPPED = "swiglu_softcapped"

    @property
    def gated(self) -> bool:
        """Whether w13 holds a gate beside the up projection."""
        return self is not Activation.RELU2


Result = TypeVar("Result")


class Pending(Generic[Result]):
    """A result under way. `wait()` gives it, once; every transport overlaps through this one shape.

    Args:
        finish: Waits and gives the result.
        ready: Nothing is left to do or to wait for.
    """

    def __init__(self, finish: Callable[[], Result], *, ready: bool = False) -> None:
        self._finish: Callable[[], Result] | None = finish
        self.ready = ready

    @classmethod
    def of(cls, result: Result) -> Pending[Result]:
        """Wrap a result that is ready.

        Args:
            result: What `wait` gives.

        Returns:
            The pending result.
        """
        return cls(lambda: result, ready=True)

    def wait(self) -> Result:
        """Wait for the result.

        Returns:
            The result.

        Raises:
            RuntimeError: it was waited for already.
        """
        if self._finish is None:
            raise RuntimeError("this Pending was waited for already; keep the result of the first wait()")
        finish, self._finish = self._finish, None
        return finish()


def capturing(device: torch.device) -> bool:
    """Say whether work on the current stream goes into a CUDA graph.

    Args:
        device: Any; False for one without CUDA.

    Returns:
        Whether a capture is under way.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def recomputing() -> bool:
    """Say whether a backward pass runs, in which activation checkpointing calls a forward again.

    Returns:
        Whether one runs in this thread.
    """
    task: int = torch._C._current_graph_task_id()  # -1 outside of one
    return task != -1


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as configurations do.

    Args:
        dtype: Such as torch.bfloat16.

    Returns:
        Such as "bfloat16".
    """
    return str(dtype).removeprefix("torch.")


if not TYPE_CHECKING:  # checkers know the new names alone
    __getattr__ = renamed_in(__name__, {"PeerCells": ("PeerPackets", PeerPackets)})
