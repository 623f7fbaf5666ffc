"""The data that the stages of a layer exchange, and the letters that docstrings use for shapes.

T  tokens of this rank        E  logical experts (of the checkpoint)     K  top-k
H  hidden size                P  physical experts = R * slots_per_rank   R  ranks of the EP group
I  expert intermediate size   L  slots of this rank                      N  received rows
C  rows of a slot in a BATCHED layout

logical expert   an expert of the checkpoint
physical expert  a slot of some rank that holds a copy of a logical expert; its id is `owner * slots_per_rank + local`
local expert     a physical expert counted from its rank's first slot

The id -1 always means "no expert".
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
LogicalIds = NewType("LogicalIds", Tensor)  # unused: `Routing` takes tensors. The next release removes it


@dataclass(frozen=True)
class Routing:
    """The experts of each token, chosen by a router, as logical ids (those of the checkpoint).

    The constructor checks nothing. A layer checks the routing in its call, so that all ranks raise an error together.

    Args:
        ids: int64 or int32 [T, K], logical ids in [0, E), -1 for no expert. The valid ids of a row are distinct.
        weights: float32 [T, K]. Each expert's output (or input) is multiplied by its weight.
        logits: [T, E], the router's scores. `ep_moe.training.router_logits` records them. Default: not recorded.
    """

    ids: Tensor
    weights: Tensor
    logits: Tensor | None = None


class TokenMask(NamedTuple):
    """Which rows of a call are tokens, and which are padding.

    Args:
        tokens: bool [...], the leading sizes of x, True for a token.
        sent: Whether padding rows are sent to experts like tokens and only not counted as load. Or bool [T]: the rows
            that are sent.
    """

    tokens: Tensor
    sent: Tensor | bool = False


def without_rows(routing: Routing, kept: Tensor) -> Routing:
    """Return a routing without the routes of some rows.

    Args:
        routing: The routing of T rows.
        kept: bool [...] of T elements, True for rows that keep their routes.

    Returns:
        The routing with ids of -1 in the other rows, and without logits.
    """
    return Routing(routing.ids.masked_fill(~kept.reshape(-1, 1), -1), routing.weights)


@dataclass(frozen=True)
class PhysicalRouting:
    """A routing in physical ids. It is a separate type, so that it cannot be confused with `Routing`.

    Args:
        ids: int32 or int64 [T, K], physical ids in [0, P), -1 for no expert.
        weights: float32 [T, K].
    """

    ids: PhysicalIds
    weights: Tensor

    def materialize(self) -> PhysicalRouting:
        """Return this routing with its physical ids computed.

        Returns:
            This routing. A deferred one (`placement.deferred`) is placed and counted as load by this call.
        """
        return self


class RowLayout(enum.Enum):
    """How received rows are arranged.

    - `RANK_MAJOR`: [N, H], grouped by source rank, one row per (token, rank). With local ids and weights; an id of -1
      is an expert of another rank, or none.
    - `CONTIGUOUS`: [N, H], grouped by local expert, with `expert_offsets` [L + 1] on the device.
    - `BATCHED`: [L, C, H], padded to C rows per local expert, with `expert_counts` [L] on the device.
    """

    RANK_MAJOR = "rank_major"
    CONTIGUOUS = "contiguous"
    BATCHED = "batched"


class Weighting(enum.Enum):
    """Which part of a layer multiplies by the routing weight.

    - `EXPERTS`: the expert kernel, which also sums over the local experts of a row.
    - `COMBINE`: the transport, in combine.
    """

    EXPERTS = "experts"
    COMBINE = "combine"


@dataclass(frozen=True)
class WireIds:
    """Physical ids as a transport received them. A kernel ignores routes outside this rank's slots or of weight 0.

    Args:
        ids: int32 [N, K], contiguous.
        base: This rank's first physical id.
        ids_ready: int32 [R] on the device, for transports that send ids and weights before the rows. Those of rank r
            have arrived when `ids_ready[r] == sequence[0] + 1`. A kernel launched with PDL (`pdl_launch`) may then read
            ids and weights before the rows arrive. It must call `pdl_wait` before it ends, for the kernels after it
            that read rows.
        sequence: int32 [2] on the device, given with `ids_ready`. sequence[0] is the sequence number of the previous
            call. The kernel's programs may use sequence[1] as a counter to wait for each other. It must be 0 again
            when the kernel ends.
    """

    ids: PhysicalIds
    base: int
    ids_ready: Tensor | None = None
    sequence: Tensor | None = None


@dataclass(frozen=True)
class PeerPackets:
    """Peer memory for rows in LL packets of 8 bytes: 4 bytes of a row, and the call's sequence number.

    Every row ends with one more packet. It is also written for a row without a result.

    Args:
        blocks: R tensors, int64 [bound, at least words + 1]. Each row begins at a multiple of 16 bytes.
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
        """Write rows to the ranks that sent them.

        Args:
            blocks: R tensors [bound, H], or [bound, 0] to write no rows to a rank.
        """
        number = self.number[:1].long() << 32
        for place, rows in zip(self.blocks, blocks, strict=True):
            if rows.numel():
                place[:, : self.words].copy_(rows.contiguous().view(torch.int32).long() & 0xFFFFFFFF | number)
            place[:, self.words].copy_(number.expand(len(place)))


@dataclass(frozen=True)
class PeerRows:
    """Memory on the source ranks of received rows, into which an expert kernel writes its results.

    The result of received row n is row n % bound of block n // bound.

    Args:
        blocks: R tensors [bound, H], as this rank maps them.
        addresses: int64 [R] on the device, the base addresses.
        offset: Bytes. Block r begins at addresses[r] + offset.
        rank: This rank: its block is local memory.
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
        """A key that identifies this memory: the address of `addresses`, offset, bound and rank, and the packets'
        number and stride."""
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
        """Signal to ranks that wait for packets that this rank returns no rows."""
        if self.packets is not None:
            self.packets.write([block[:, :0] for block in self.blocks])


@dataclass(frozen=True)
class Received:
    """The rows that a rank received for its experts, and how they are arranged. Valid until `combine`.

    Args:
        x: [N, H] or [L, C, H], in the number format `format`.
        layout: How rows are arranged.
        weighting: Which part of the layer multiplies by the routing weight.
        handle: The transport's state for this call; opaque.
        local_ids: RANK_MAJOR: int32 or int64 [N, K]. None if `wire_ids` is given instead.
        wire_ids: RANK_MAJOR: the physical ids as they were received.
        weights: Weighting EXPERTS: float32 [N, K], or one per row: [N] or [L, C].
        expert_offsets: CONTIGUOUS: [L + 1].
        expert_counts: BATCHED: [L].
        format: The number format of x, a name in `quant.row_format.ROW_FORMATS`.
        x_scale: [..., H / block], if the format has scales. x is then [..., H / packed].
        input_scale: `Wire.input_scale`, for fp8_tensor and nvfp4 rows.
        out: [..., H], the leading sizes of x: memory of the transport for the kernel's results. Writing them there
            saves combine a copy.
        peer_out: RANK_MAJOR: peer memory for the kernel's results. A kernel with the capability `peer_out` writes them
            there instead of to `out`. Combine then copies nothing.
        per_route: RANK_MAJOR under Weighting.COMBINE: the kernel's results are [N * K, H], one row per id in order.
            A row is zero if its id is no local expert. `out` and `peer_out` have as many rows.
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
        """Return the rows with all tensors contiguous, for kernels that take only pointers.

        Returns:
            Itself, or a copy in which non-contiguous tensors are replaced by contiguous ones.
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
        """Whether w13 holds a gate and an up projection."""
        return self is not Activation.RELU2


Result = TypeVar("Result")


class Pending(Generic[Result]):
    """The future result of an asynchronous operation. `wait()` returns it, once.

    Args:
        finish: Waits for the operation and returns the result.
        ready: Whether the result is available without waiting.
    """

    def __init__(self, finish: Callable[[], Result], *, ready: bool = False) -> None:
        self._finish: Callable[[], Result] | None = finish
        self.ready = ready

    @classmethod
    def of(cls, result: Result) -> Pending[Result]:
        """Wrap an available result.

        Args:
            result: The value that `wait` returns.

        Returns:
            A `Pending` that is ready.
        """
        return cls(lambda: result, ready=True)

    def wait(self) -> Result:
        """Wait for the result.

        Returns:
            The result.

        Raises:
            RuntimeError: `wait` was called before.
        """
        if self._finish is None:
            raise RuntimeError("this Pending was waited for already; keep the result of the first wait()")
        finish, self._finish = self._finish, None
        return finish()


def capturing(device: torch.device) -> bool:
    """Return whether the current stream is being captured into a CUDA graph.

    Args:
        device: Any device; the result is False unless it is a CUDA device.

    Returns:
        Whether a capture is under way.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def recomputing() -> bool:
    """Return whether this thread is in a backward pass.

    A forward that is called there is a recomputation by activation checkpointing.

    Returns:
        Whether a backward pass runs in this thread.
    """
    task: int = torch._C._current_graph_task_id()  # -1 outside of one
    return task != -1


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the prefix "torch.".

    Args:
        dtype: For example torch.bfloat16.

    Returns:
        For example "bfloat16".
    """
    return str(dtype).removeprefix("torch.")


if not TYPE_CHECKING:  # type checkers see only the new names
    __getattr__ = renamed_in(__name__, {"PeerCells": ("PeerPackets", PeerPackets)})
