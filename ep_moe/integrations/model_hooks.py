"""What hooks on a Hugging Face model tell its expert-parallel blocks, and take from them, while a call is under way.

A model hands its attention mask to its attention, and to no MoE block: `TokenMasks` keeps the mask of a call, which
says what rows of hidden states are tokens. `RouterLogitsHook` serves `output_router_logits=True`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ep_moe.errors import ConfigError
from ep_moe.layer import MoELayer
from ep_moe.runtime.devices import on_device
from ep_moe.training.balance import recording
from ep_moe.types import TokenMask

_EMPTY = (
    "input_ids or inputs_embeds of shape {} has no token, for which transformers' models have no forward; call "
    "ep_moe.integrations.transformers.idle_step(model) on a rank without a batch"
)


class _Call(NamedTuple):
    mask: TokenMask | None  # [B, S]
    idle: bool = False


class _Asked(threading.local):
    """What calls of this thread are. Never read in compiled code, which has no guard on it."""

    labels = idle = generates = False


class TokenMasks:
    """Of one model: finds each call's mask, for the blocks that the call reaches.

    Padding is not counted as load. It goes to no expert either, unless something may be computed from it. It is
    computed as in the untouched model in these cases:

    - with gradients or labels;
    - when hidden states or router logits are asked for;
    - with a 4-D mask, by which other rows may attend to padding;
    - when `generate` is given padding on the right.

    A call that activation checkpointing repeats in backward finds no mask. It counts nothing, and computes padding as
    the call with gradients did. Each thread has its own call: those whose layers do not meet are served.

    Args:
        send_padding: compute padding always, for models of which not only attention joins the tokens of a sequence:
            other layers, or a head or the caller, who may take any row for that of the sequence.
    """

    def __init__(self, *, send_padding: bool = False) -> None:
        self.layer: MoELayer | None = None  # the first, which refuses calls
        self._calls: dict[int, _Call] = {}  # under way, by thread
        self._latest: _Call | None = None  # for compiled code, which sees no threads; None while several are in a call
        self._send_padding = send_padding
        self._asked = _Asked()

    def attach(self, model: PreTrainedModel, inner: PreTrainedModel, layer: MoELayer) -> None:
        """inner: the model that holds the decoder layers; layer: the first expert-parallel one."""
        self.layer = layer
        model.register_forward_pre_hook(self._look_for_labels, with_kwargs=True)
        inner.register_forward_pre_hook(self._begin, with_kwargs=True)
        inner.register_forward_hook(self._end, always_call=True)

    def of_rows(self, rows: int) -> TokenMask | None:
        """The mask of the call, [rows]; None without one, or where a block has other rows than the call has tokens."""
        call = self._latest if torch.compiler.is_compiling() else self._calls.get(threading.get_ident())
        if call is None or call.mask is None:
            return None
        tokens = call.mask.tokens.reshape(-1)
        if call.idle:
            tokens = tokens.new_zeros(rows)
        return TokenMask(tokens, call.mask.sent) if len(tokens) == rows else None

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Within, no row of a call is a token."""
        before, self._asked.idle = self._asked.idle, True
        try:
            yield
        finally:
            self._asked.idle = before

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Within, the next token comes from the last position of each sequence, which padding on the right makes a row
        of padding."""
        before, self._asked.generates = self._asked.generates, True
        try:
            yield
        finally:
            self._asked.generates = before

    def _look_for_labels(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self._asked.labels = kwargs.get("labels") is not None

    def _begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self._put(_Call(None))
        labels, self._asked.labels = self._asked.labels, False
        given = kwargs.get("inputs_embeds")
        given = kwargs.get("input_ids", args[0] if args else None) if given is None else given
        if not isinstance(given, Tensor):
            return  # the model says what is wrong
        rows = given.shape[:2]
        if rows.numel() == 0:
            self._refuse(_EMPTY.format(list(given.shape)))
        if (problem := _ids_problem(given, model)) is not None:
            self._refuse(problem)
        config = getattr(model, "config", None)
        shown = kwargs.get("output_hidden_states", getattr(config, "output_hidden_states", False))
        sent = labels or bool(shown) or torch.is_grad_enabled()
        if self._asked.idle:
            self._put(_Call(TokenMask(torch.zeros(rows, dtype=torch.bool, device=given.device), sent), idle=True))
            return
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        tokens = tokens_of(mask, rows, kwargs.get("cache", kwargs.get("past_key_values")))
        if tokens is not None:
            by_row = any(one.dim() == 4 for one in _tensors_of(mask))
            sent = sent or self._send_padding or by_row or self._last_is_padding(tokens)
            self._put(_Call(TokenMask(tokens, sent)))

    def _last_is_padding(self, tokens: Tensor) -> bool:
        """Whether `generate` goes on from a row of padding. Waits for the device where a prompt is read, not at each
        further token, which is none."""
        return self._asked.generates and tokens.shape[1] > 1 and not bool(tokens[:, -1].all())

    def _end(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._put(None)

    def _put(self, call: _Call | None) -> None:
        """Of this thread."""
        if call is None:
            self._calls.pop(threading.get_ident(), None)
        else:
            self._calls[threading.get_ident()] = call
        calls = list(self._calls.values())
        self._latest = calls[0] if len(calls) == 1 else None

    def _refuse(self, problem: str) -> None:
        """On all ranks, which are on their way to the first layer."""
        assert self.layer is not None
        with on_device(self.layer.context.device):
            self.layer._refuse(problem)


def tokens_of(mask: Any, rows: torch.Size, cache: Any) -> Tensor | None:
    """Read which rows of a call are tokens off its attention mask, without a wait for the device.

    Args:
        mask: What transformers takes: [B, L], 0 for padding, where the rows are at the places behind those of the
            cache; or [B or 1, heads or 1, S, L], bool or added to the scores. A row of the latter that attends to
            nothing is padding. A dict of such masks by layer type.
        rows: [B, S] of the call.
        cache: The call's cache, or None.

    Returns:
        bool [B, S]. None where the mask does not say it: packed sequences without padding, masks of other forms.
    """
    found = (_tokens_of(one, rows, cache) for one in _tensors_of(mask))
    return next((tokens for tokens in found if tokens is not None), None)


def _tokens_of(mask: Tensor, rows: torch.Size, cache: Any) -> Tensor | None:
    batch, length = rows
    if mask.dim() == 4 and mask.shape[2] == length and mask.shape[0] in (1, batch):
        if mask.dtype != torch.bool and not mask.is_floating_point():
            return None
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        return seen.any(-1).any(1).expand(batch, length)
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < length:
        return None
    past = _length_of(cache)
    if past is None:  # a mask of the call's own length says all the same
        return mask != 0 if mask.shape[1] == length else None
    if isinstance(past, Tensor):  # of a static cache, on the device
        places = torch.arange(length, device=mask.device) + past.to(mask.device)
        return mask.index_select(1, places.clamp(max=mask.shape[1] - 1)) != 0
    if past + length > mask.shape[1]:
        return None
    return mask[:, past : past + length] != 0


def _length_of(cache: Any) -> int | Tensor | None:
    """The tokens in a cache. None where it counts none, such as one of linear attention alone: the model, which is
    called behind this, says whether it can go on from it."""
    if cache is None:
        return 0
    try:
        length: int | Tensor = cache.get_seq_length()
    except (AttributeError, ValueError):
        return None
    return length


def _ids_problem(ids: Tensor, model: Any) -> str | None:
    """None, or that the embedding has no row for an id, which its error would say on this rank alone. On a GPU the ids
    would be waited for, and end the process."""
    if ids.device.type != "cpu" or ids.is_floating_point():
        return None
    rows = None
    with suppress(AttributeError, NotImplementedError):  # of models that have another way to embed
        rows = model.get_input_embeddings().num_embeddings
    if rows is None or not (bad := ids[(ids < 0) | (ids >= rows)]).numel():
        return None
    return f"input_ids must be in [0, {rows}), the rows of the embedding, got {int(bad[0])}; use the model's tokenizer"


def _tensors_of(mask: Any) -> list[Tensor]:
    """A mask, or those by layer type: first what says it of each place, and by name. transformers makes the dict from a
    set, whose order is another on each rank, and layers that need no mask have None there."""
    masks = [mask[key] for key in sorted(mask, key=str)] if isinstance(mask, dict) else [mask]
    return sorted((one for one in masks if isinstance(one, Tensor)), key=Tensor.dim)


class RouterLogitsHook:
    """Puts the layers' router logits where transformers puts those of its own routers.

    transformers collects outputs of its router classes, which the replaced blocks do not have. Its models compute the
    auxiliary loss from what the inner model returns, and so need no change.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[ExitStack, list[Tensor], bool]] = {}  # calls that want them, by thread

    def attach(self, model: PreTrainedModel) -> None:
        """To the model whose forward returns `router_logits`, such as MixtralModel."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        # as transformers' capture_outputs asks
        if not kwargs.get("output_router_logits", getattr(model.config, "output_router_logits", False)):
            return None
        if "router_logits" not in (model._can_record_outputs or {}):
            raise ConfigError(
                f"output_router_logits=True: {type(model).__name__} of transformers returns no router logits; set it "
                f"to False, and record them with ep_moe.training.router_logits(model)"
            )
        as_dict = kwargs.get("return_dict", getattr(model.config, "return_dict", True))
        stack, recorded, thread = ExitStack(), list[Tensor](), _thread()
        if thread in self._open:  # left there by an interrupt, for which torch calls no hooks
            self._open.pop(thread)[0].close()
        layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        stack.enter_context(recording(layers, recorded, thread or None))
        self._open[thread] = stack, recorded, as_dict is not False
        return args, kwargs | {"return_dict": True}

    def _end(self, model: PreTrainedModel, args: Any, output: Any) -> Any:
        if not self._open or (thread := _thread()) not in self._open:
            return None
        stack, recorded, as_dict = self._open.pop(thread)
        stack.close()
        if output is None:  # the call raises
            return None
        output["router_logits"] = tuple(recorded)
        return output if as_dict else output.to_tuple()


def _thread() -> int:
    """This one; 0 in compiled code, which sees none."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
