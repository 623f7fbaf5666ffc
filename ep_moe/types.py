"""The data that flow between the five nouns, and the legend of the shape letters.

T  tokens of this rank        E  logical experts (of the checkpoint)     K  top-k
H  hidden size                P  physical experts = R * cap              R  ranks of the EP group
I  expert intermediate size   L  slots of this rank                      N  received rows

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
from typing import Any, Generic, NamedTuple, NewType, TypeVar, cast

import torch
from torch import Tensor

LogicalIds = NewType("LogicalIds", Tensor)
PhysicalIds = NewType("PhysicalIds", Tensor)
LocalIds = NewType("LocalIds", Tensor)


@dataclass(frozen=True)
class Routing:
    """A router's choice, in ids of the checkpoint.

    ids: int64 or int32 [T, K], logical ids, -1 for none; the valid ids of a row are distinct.
    weights: float32 [T, K], what each expert's output (or input) is multiplied by.
    logits: [T, E], what they were chosen by; None where no one asks for it (`ep_moe.training.router_logits`).
    """

    ids: LogicalIds
    weights: Tensor
    logits: Tensor | None = None


class TokenMask(NamedTuple):
    """Which rows of a call are tokens, and which are padding.

    tokens: bool [...], as x without its last size
    sent: whether padding travels as tokens do, and is not counted alone; or bool [T], which rows travel
    """

    tokens: Tensor
    sent: Tensor | bool = False


def without_rows(routing: Routing, kept: Tensor) -> Routing:
    """No picks for the other rows. routing: ids [T, K]; kept: bool [...] of T rows."""
    ids = routing.ids.masked_fill(~kept.reshape(-1, 1), -1)
    return Routing(cast("LogicalIds", ids), routing.weights)  # a cast, which torch.compile traces


@dataclass(frozen=True)
class PhysicalRouting:
    """A placed routing: the same shape, in physical ids. Another type, because mixing the two up is
    this field's commonest wrong result."""

    ids: PhysicalIds
    weights: Tensor

    def materialize(self) -> PhysicalRouting:
        """This routing, with ids that are there; a deferred one (`placement.deferred`) is placed and counted here."""
        return self


class RowLayout(enum.Enum):
    """How received rows are arranged.

    RANK_MAJOR  [N, H], one row per (token, rank); carries local ids, -1 for "not mine", and weights
    CONTIGUOUS  [N, H] grouped by local expert, `expert_offsets` [L + 1] on the device
    BATCHED     [L, cap, H], `expert_counts` [L] on the device
    """

    RANK_MAJOR = "rank_major"
    CONTIGUOUS = "contiguous"
    BATCHED = "batched"


class Weighting(enum.Enum):
    """Who multiplies by the routing weight.

    EXPERTS  the expert side does, and sums over the local experts of a row
    COMBINE  the transport does, in combine
    """

    EXPERTS = "experts"
    COMBINE = "combine"


@dataclass(frozen=True)
class WireIds:
    """Ids as a transport received them. A pick outside this rank's slots, or of weight 0, is none.

    ids: int32 [N, K], contiguous; base: this rank's first physical id
    told, calls: int32 [R] and int32 [2] on the device, where ids and weights come before the rows: they are here once
        all of `ids_ready` are one more than calls[0]. A kernel that starts early (`pdl`) may read them then; before
        it ends it has awaited the kernel ahead of it, for those that read rows. calls[1] is zero, for its programs to
        wait for each other, and left so
    """

    ids: PhysicalIds
    base: int
    ids_ready: Tensor | None = None
    sequence: Tensor | None = None


@dataclass(frozen=True)
class PeerPackets:
    """Rows as packets of 8 bytes, 4 of a row and the number of the call, and one cell more that comes for every row,
    also where there is no answer.

    blocks: R tensors int64 [bound, at least words + 1], rows at multiples of 16 bytes; number: int32 [at least 1] on
        the device; words: of a row
    """

    blocks: tuple[Tensor, ...]
    number: Tensor
    words: int

    @property
    def stride(self) -> int:
        """Cells from one row to the next."""
        return self.blocks[0].stride(0)

    def write(self, blocks: Sequence[Tensor]) -> None:
        """blocks: R tensors [bound, H], or [bound, 0] where no row is wanted"""
        number = self.number[:1].long() << 32
        for place, rows in zip(self.blocks, blocks, strict=True):
            if rows.numel():
                place[:, : self.words].copy_(rows.contiguous().view(torch.int32).long() & 0xFFFFFFFF | number)
            place[:, self.words].copy_(number.expand(len(place)))


@dataclass(frozen=True)
class PeerRows:
    """The experts' rows in the memory of the ranks that the received ones came from: row n is row n % bound of its
    block n // bound.

    blocks: R tensors [bound, H], as this rank sees them; addresses: int64 [R] on the device; offset: bytes: block r
        begins at addresses[r] + offset; rank: whose own block lies here
    packets: rows go there, and not into blocks, which then say what they are like; offset is of these
    """

    blocks: tuple[Tensor, ...]
    addresses: Tensor
    offset: int
    rank: int
    packets: PeerPackets | None = None

    @property
    def bound(self) -> int:
        return len(self.blocks[0])

    @property
    def device(self) -> torch.device:
        return self.addresses.device

    @cached_property
    def place(self) -> tuple[int, ...]:
        """What tells it from others: addresses on this rank, and how far apart rows are."""
        packets = (0, 0) if self.packets is None else (self.packets.number.data_ptr(), self.packets.stride)
        return self.addresses.data_ptr(), self.offset, self.bound, self.rank, *packets

    def write(self, y: Tensor) -> None:
        """All rows. y: [N, H] of the blocks' dtype"""
        if self.packets is not None:
            self.packets.write(y.split(self.bound))
            return
        for block, rows in zip(self.blocks, y.split(self.bound), strict=True):
            block.copy_(rows)

    def write_nothing(self) -> None:
        """No row is wanted of this rank, and a rank that awaits packets must learn it."""
        if self.packets is not None:
            self.packets.write([block[:, :0] for block in self.blocks])


@dataclass(frozen=True)
class Received:
    """The rows that reached this rank's experts. It says itself what it is; nothing is implied by who
    made it. Valid until `combine`."""

    x: Tensor  # [N, H] or [L, cap, H], as they came
    layout: RowLayout
    weighting: Weighting
    handle: Any  # the transport's own state for this call; opaque
    local_ids: LocalIds | None = None  # RANK_MAJOR: int32 or int64 [N, K]; or instead of them:
    wire_ids: WireIds | None = None  # as they travelled
    weights: Tensor | None = None  # weighting EXPERTS: float32 [N, K], or one per row: [N], [L, cap]
    expert_offsets: Tensor | None = None  # CONTIGUOUS
    expert_counts: Tensor | None = None  # BATCHED
    format: str = "plain"  # how x is written: of `row_formats.ROW_FORMATS`. Some have:
    x_scale: Tensor | None = None  # [..., H / block], and x is [..., H / packed]
    input_scale: float | None = None  # of fp8_tensor and nvfp4 rows: `Wire.input_scale`
    out: Tensor | None = None  # [..., H] as x: where the transport would have the experts' rows, to spare a copy
    peer_out: PeerRows | None = None  # or, RANK_MAJOR, rather there: then no rank fetches them

    def dense(self) -> Received:
        """Itself, or with contiguous copies of the views among its tensors: kernels read from bare pointers."""
        copies: dict[str, Any] = {}
        for name in _TENSORS:
            tensor = getattr(self, name)
            if tensor is not None and not tensor.is_contiguous():
                copies[name] = tensor.contiguous()
        return dataclasses.replace(self, **copies) if copies else self


_TENSORS = ("x", "x_scale", "local_ids", "weights", "expert_offsets", "expert_counts")


class Activation(enum.Enum):
    """What stands between the two expert matrices. `gate, up = (w13 @ x).chunk(2)`.

    SWIGLU          silu(gate) * up
    GEGLU           gelu(gate) * up, the exact (erf) gelu
    SWIGLU_CLAMPED  GPT-OSS: (up + 1) * gate * sigmoid(alpha * gate), gate clamped above and up on both
                    sides at `limit`
    RELU2           relu(w13 @ x) ** 2, no gate: w13 is [I, H]
    GEGLU_TANH      gelu(gate) * up, gelu by its tanh approximation (Gemma 4)
    SWIGLU_LIMITED  DeepSeek-V4: silu(gate) * up, gate clamped above and up on both sides at `limit`
    SWIGLU_SOFTCAPPED  Inkling 2: cap(gate, alpha) * sigmoid(gate) * cap(up, limit), cap(x, c) = c * tanh(x / c)
    """

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    SWIGLU_CLAMPED = "swiglu_clamped"
    RELU2 = "relu2"
    GEGLU_TANH = "geglu_tanh"
    SWIGLU_LIMITED = "swiglu_limited"
    SWIGLU_SOFTCAPPED = "swiglu_softcapped"

    @property
    def gated(self) -> bool:
        return self is not Activation.RELU2


Result = TypeVar("Result")


class Pending(Generic[Result]):
    """A result under way. `wait()` gives it, once; every transport overlaps through this one shape.

    ready: nothing is left to do or to wait for
    """

    def __init__(self, finish: Callable[[], Result], *, ready: bool = False) -> None:
        self._finish: Callable[[], Result] | None = finish
        self.ready = ready

    @classmethod
    def of(cls, result: Result) -> Pending[Result]:
        """One that is ready."""
        return cls(lambda: result, ready=True)

    def wait(self) -> Result:
        if self._finish is None:
            raise RuntimeError("this Pending was waited for already; keep the result of the first wait()")
        finish, self._finish = self._finish, None
        return finish()


def capturing(device: torch.device) -> bool:
    """Whether work on the current stream goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def recomputing() -> bool:
    """Whether a backward pass runs, in which activation checkpointing calls a forward again."""
    task: int = torch._C._current_graph_task_id()  # -1 outside of one
    return task != -1


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
