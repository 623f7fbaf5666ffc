"""The input tensors of recorded calls, and the signature of a layer's arguments.

A replay may have fewer tokens than were recorded. The rows after its tokens then have no route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_moe.types import Routing, TokenMask

_COPIES = 64  # numbers of tokens whose copy destinations are cached
_NO_TOKEN = 2**31 - 1  # a row number that is larger than any number of tokens


class InputMemory:
    """Input tensors that all recorded calls of a stream share, each with room for the most rows so far.

    Sharing is safe because of the stream's order: a replay reads its inputs before the next call's are copied.
    """

    def __init__(self) -> None:
        self._held: dict[Any, Tensor] = {}
        self._inputs: dict[Any, Inputs] = {}
        # row numbers that a mask has changed, and their originals, by address
        self.masked_row_numbers: dict[int, tuple[Tensor, Tensor]] = {}

    def inputs(self, *signature: Any, **rest: Any) -> Inputs:
        """Return the `Inputs` of this signature. All layers share them."""
        key = (*signature, *rest.items())
        if key not in self._inputs:
            self._inputs[key] = Inputs(self, *signature, **rest)
        return self._inputs[key]

    def get_tensor(self, key: Any, rows: int, make: Callable[[int], Tensor]) -> Tensor:
        """Return the tensor [rows, ...] of a key. If it is too small, `make` creates a larger one; graphs keep the old
        one."""
        held = self._held.get(key)
        if held is None or len(held) < rows:
            held = self._held[key] = make(rows)
        return held[:rows]


class _Copies(NamedTuple):
    """The copies that prepare a replay for one number of tokens.

    to: the destinations, first of the caller's tensors, then of the constants; constants: their sources
    words, constant_words: the same memory as int32, so that one launch copies all. Empty if a row is no multiple of 4
        bytes
    """

    to: list[Tensor]
    constants: list[Tensor]
    words: list[Tensor]
    constant_words: list[Tensor]


class CallSignature(NamedTuple):
    """The shapes, dtype and device of a layer's arguments. hidden, top_k: H and K; dtype: of x"""

    hidden: int
    top_k: int
    dtype: torch.dtype
    device: torch.device

    def fits(self, x: Tensor, routing: Routing | None, tokens: int) -> bool:
        """Return whether valid arguments match the signature. x: [..., H] with `tokens` rows"""
        if x.shape[-1:] != (self.hidden,) or x.dtype != self.dtype or x.device != self.device:
            return False
        if routing is None:
            return True
        if type(routing) is not Routing:
            return False
        ids, weights = routing.ids, routing.weights
        return (
            type(ids) is Tensor
            and type(weights) is Tensor
            and ids.shape == weights.shape == (tokens, self.top_k)
            and (ids.dtype == torch.int64 or ids.dtype == torch.int32)
            and weights.dtype == torch.float32
            and ids.device == weights.device == self.device
        )


class Inputs:
    """The input tensors of one recorded call of `most` tokens, which serves calls of `least` to `most` tokens.

    x: [most, H] of the layer's dtype; routing: ids int64 and weights float32 [most, K], or None
    tokens: int32 [1], the number of rows that are tokens; None if all are, or if the routing has ids of -1 for others
    numbers: int32 [most], the row numbers, if there is `tokens`. A masked row has the number `_NO_TOKEN`, so that
        `number >= tokens` holds for it
    """

    def __init__(
        self, memory: InputMemory, hidden: int, top_k: int, dtype: torch.dtype, device: torch.device,
        *, least: int, most: int, routed: bool,
    ) -> None:  # fmt: skip
        self.least, self.most, self._memory = least, most, memory
        self.signature = CallSignature(hidden, top_k, dtype, device)
        self._copies: dict[int, _Copies] = {}
        self.x = memory.get_tensor(
            ("x", hidden, dtype), most, lambda rows: torch.zeros(rows, hidden, dtype=dtype, device=device)
        )
        self.routing: Routing | None = None
        self.tokens: Tensor | None = None
        self._constant = torch.empty(0, dtype=torch.float32)
        if routed:
            ids, self._constant = (
                memory.get_tensor(
                    (name, top_k), most, lambda rows: torch.full((rows, top_k), -1, dtype=torch.int64, device=device)
                )
                for name in ("ids", "no ids")
            )
            weights = memory.get_tensor(
                ("weights", top_k), most, lambda rows: torch.zeros(rows, top_k, dtype=torch.float32, device=device)
            )
            self.routing = Routing(ids, weights)
        elif least < most:
            self.tokens = memory.get_tensor(
                "tokens", 1, lambda rows: torch.zeros(rows, dtype=torch.int32, device=device)
            )
            self._constant = memory.get_tensor(
                "numbers", most + 1, lambda rows: torch.arange(rows, dtype=torch.int32, device=device)
            )
            self.numbers = memory.get_tensor(
                "row", most, lambda rows: torch.arange(rows, dtype=torch.int32, device=device)
            )

    def clear(self) -> None:
        """Set the inputs to no tokens."""
        self.x.zero_()
        if self.routing is not None:
            self.routing.ids.fill_(-1)
        if self.tokens is not None:
            self.tokens.zero_()

    def masked(self, routing: Routing) -> Routing:
        """Return a router's routes for x with ids of -1 for rows that are no tokens."""
        assert self.tokens is not None
        none = self.numbers.unsqueeze(1) >= self.tokens
        return Routing(routing.ids.masked_fill(none, -1), routing.weights)

    def takes(self, mask: TokenMask) -> bool:
        """Return whether a replay can apply a mask."""
        return self.tokens is not None and not mask.sent

    def _hide(self, mask: TokenMask | None, tokens: int) -> None:
        """Write the row numbers for a call with this mask. The next call restores them; few calls have a mask."""
        masked, address = self._memory.masked_row_numbers, self.numbers.data_ptr()
        if address in masked:
            changed, right = masked.pop(address)
            changed.copy_(right)
        if mask is not None:
            changed, right = self.numbers[:tokens], self._constant[:tokens]
            masked[address] = changed, right
            changed.copy_(right.masked_fill(~mask.tokens.reshape(-1), _NO_TOKEN))

    def copy_arguments(self, x: Tensor, routing: Routing | None, tokens: int, mask: TokenMask | None = None) -> None:
        """Copy a call's arguments to the tensors that a replay reads, by one launch if all are contiguous."""
        if mask is not None or (self._memory.masked_row_numbers and self.tokens is not None):
            self._hide(mask, tokens)
        if x.dim() != 2:
            x = x.reshape(tokens, self.x.shape[1])
        copies = self._copies.get(tokens) or self._ready(tokens)
        # a tensor of 2-byte numbers at an odd offset cannot be viewed as int32
        whole = bool(copies.words) and x.is_contiguous() and x.storage_offset() % 2 == 0
        given = [x]
        if routing is not None:
            given += [routing.ids, routing.weights]
            whole = whole and given[1].dtype == torch.int64 and given[1].is_contiguous() and given[2].is_contiguous()
        if whole:
            given_words = [tensor.view(torch.int32) for tensor in given]
            torch._foreach_copy_(copies.words, given_words + copies.constant_words)
        else:
            for to, tensor in zip(copies.to, given + copies.constants, strict=True):
                to.copy_(tensor)

    def _ready(self, tokens: int) -> _Copies:
        if len(self._copies) == _COPIES:
            self._copies.clear()
        with torch.inference_mode(False):  # views made in inference mode could not be written outside of it
            made = self._copies[tokens] = self._copied(tokens)
        return made

    def _copied(self, tokens: int) -> _Copies:
        to, constants = [self.x[:tokens]], []
        if self.routing is not None:
            to += [self.routing.ids[:tokens], self.routing.weights[:tokens]]
            if tokens < self.most:
                to.append(self.routing.ids[tokens:])
                constants.append(self._constant[tokens:])
        elif self.tokens is not None:
            to.append(self.tokens)
            constants.append(self._constant[tokens : tokens + 1])
        words, constant_words = (
            [tensor.view(torch.int32) for tensor in tensors] if self.x.shape[1] * self.x.itemsize % 4 == 0 else []
            for tensors in (to, constants)
        )
        return _Copies(to, constants, words, constant_words)
