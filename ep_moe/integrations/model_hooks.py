"""Hooks that pass data between a Hugging Face model and its expert-parallel blocks during a call.

A model passes its attention mask to its attention layers, but not to its MoE blocks. `TokenMasks` keeps the mask of
the call, from which a block learns which rows are tokens. `RouterLogitsHook` implements `output_router_logits=True`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
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
    "input_ids or inputs_embeds of shape {} has no token, and transformers models cannot run without one; call "
    "ep_moe.integrations.transformers.idle_step(model) on a rank without a batch"
)


class _Call(NamedTuple):
    mask: TokenMask | None  # [B, S]
    idle: bool = False


class _Asked(threading.local):
    """Flags of this thread's current call. Compiled code never reads them, because it would not guard on them."""

    labels = idle = generates = False


class TokenMasks:
    """Keeps the token mask of each call of one model, for the blocks that the call reaches.

    Padding never counts as load. By default it goes to no expert. It is computed as in the untouched model if a result
    may depend on it:

    - with gradients or labels;
    - when hidden states or router logits are requested;
    - with a 4-D mask, which may let other rows attend to padding;
    - when `generate` is given padding on the right.

    A call that activation checkpointing repeats in backward finds no mask. It counts no load, and computes padding as
    the first call with gradients did. Each thread has its own mask. Several threads may call the model, as long as no
    two of them are inside a layer at the same time.

    Args:
        send_padding: Always compute padding. Needed for models in which more than attention mixes the rows of a
            sequence, or whose head or caller may use any row as the result of the sequence.
    """

    def __init__(self, *, send_padding: bool = False) -> None:
        self.layer: MoELayer | None = None  # the first layer, through which a bad call is refused on all ranks
        self._calls: dict[int, _Call] = {}  # calls in progress, by thread
        # for compiled code, which cannot read the thread's id; None while several threads are in a call
        self._latest: _Call | None = None
        self._send_padding = send_padding
        self._asked = _Asked()

    def attach(self, model: PreTrainedModel, inner: PreTrainedModel, layer: MoELayer) -> None:
        """Register the hooks. inner: the model with the decoder layers; layer: the first expert-parallel layer."""
        self.layer = layer
        model.register_forward_pre_hook(self._look_for_labels, with_kwargs=True)
        inner.register_forward_pre_hook(self._begin, with_kwargs=True)
        inner.register_forward_hook(self._end, always_call=True)

    def of_rows(self, rows: int) -> TokenMask | None:
        """Return the call's mask [rows]; None without a mask, or if the call has another number of rows."""
        call = self._latest if torch.compiler.is_compiling() else self._calls.get(threading.get_ident())
        if call is None or call.mask is None:
            return None
        tokens = call.mask.tokens.reshape(-1)
        if call.idle:
            tokens = tokens.new_zeros(rows)
        return TokenMask(tokens, call.mask.sent) if len(tokens) == rows else None

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Treat no row of a call as a token, within this context manager."""
        before, self._asked.idle = self._asked.idle, True
        try:
            yield
        finally:
            self._asked.idle = before

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Mark calls within this context manager as calls of `generate`.

        `generate` reads the last position of each sequence. With padding on the right, that is a row of padding.
        """
        before, self._asked.generates = self._asked.generates, True
        try:
            yield
        finally:
            self._asked.generates = before

    def _look_for_labels(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self._asked.labels = _by_name(model, args, kwargs).get("labels") is not None

    def _begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self._put(_Call(None))
        labels, self._asked.labels = self._asked.labels, False
        call = _by_name(model, args, kwargs)
        given = call.get("inputs_embeds")
        given = call.get("input_ids") if given is None else given
        if not isinstance(given, Tensor):
            return  # the model itself raises
        rows = given.shape[:2]
        if rows.numel() == 0:
            self._refuse(_EMPTY.format(list(given.shape)))
        if (problem := _ids_problem(given, model)) is not None:
            self._refuse(problem)
        config = getattr(model, "config", None)
        shown = call.get("output_hidden_states", getattr(config, "output_hidden_states", False))
        sent = labels or bool(shown) or torch.is_grad_enabled()
        if self._asked.idle:
            self._put(_Call(TokenMask(torch.zeros(rows, dtype=torch.bool, device=given.device), sent), idle=True))
            return
        mask = call.get("attention_mask")
        cache = call.get("cache")
        tokens = tokens_of(mask, rows, call.get("past_key_values") if cache is None else cache)
        if tokens is not None:
            by_row = any(one.dim() == 4 for one in _tensors_of(mask))
            sent = sent or self._send_padding or by_row or self._last_is_padding(tokens)
            self._put(_Call(TokenMask(tokens, sent)))

    def _last_is_padding(self, tokens: Tensor) -> bool:
        """Return whether `generate` will read a row of padding. Synchronizes with the device for a prompt only.

        A further token is one column, which is never padding.
        """
        return self._asked.generates and tokens.shape[1] > 1 and not bool(tokens[:, -1].all())

    def _end(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._put(None)

    def _put(self, call: _Call | None) -> None:
        """Set, or with None remove, the call of this thread."""
        if call is None:
            self._calls.pop(threading.get_ident(), None)
        else:
            self._calls[threading.get_ident()] = call
        calls = list(self._calls.values())
        self._latest = calls[0] if len(calls) == 1 else None

    def _refuse(self, problem: str) -> None:
        """Raise InputError on all ranks. The others learn of it at the first layer, which they are about to enter."""
        assert self.layer is not None
        with on_device(self.layer.context.device):
            self.layer._refuse(problem)


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a model's call by name, also those that were passed by position."""
    if not args:
        return kwargs  # as transformers itself calls an inner model: a signature costs host time
    parameters = inspect.signature(model.forward).parameters.values()
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return dict(zip(names or ("input_ids", "attention_mask"), args, strict=False)) | dict(kwargs)


def tokens_of(mask: Any, rows: torch.Size, cache: Any) -> Tensor | None:
    """Derive from an attention mask which rows of a call are tokens, without a device synchronization.

    Args:
        mask: A mask as transformers takes it, or a dict of masks by layer type. Either [B, L], 0 for padding, where
            the call's rows follow those of the cache. Or [B or 1, heads or 1, S, L], bool or added to the scores; a
            row that attends to nothing is padding.
        rows: The shape [B, S] of the call.
        cache: The call's cache, or None.

    Returns:
        bool [B, S]. None if the mask does not tell: packed sequences without padding, and masks of other forms.
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
    if past is None:  # a mask of the call's own length needs no offset
        return mask != 0 if mask.shape[1] == length else None
    if isinstance(past, Tensor):  # a static cache keeps its length on the device
        places = torch.arange(length, device=mask.device) + past.to(mask.device)
        return mask.index_select(1, places.clamp(max=mask.shape[1] - 1)) != 0
    if past + length > mask.shape[1]:
        return None
    return mask[:, past : past + length] != 0


def _length_of(cache: Any) -> int | Tensor | None:
    """Return the number of tokens in a cache; None if the cache does not count them, such as for linear attention.

    The model itself, which runs after this hook, raises if it cannot continue from such a cache.
    """
    if cache is None:
        return 0
    try:
        length: int | Tensor = cache.get_seq_length()
    except (AttributeError, ValueError):
        return None
    return length


def _ids_problem(ids: Tensor, model: Any) -> str | None:
    """Describe an id that the embedding has no row for; None if all are valid.

    The embedding itself would raise on this rank only. Ids on a GPU are not checked, because that would synchronize;
    a bad one there ends the process.
    """
    if ids.device.type != "cpu" or ids.is_floating_point():
        return None
    rows = None
    with suppress(AttributeError, NotImplementedError):  # models that embed in another way
        rows = model.get_input_embeddings().num_embeddings
    if rows is None or not (bad := ids[(ids < 0) | (ids >= rows)]).numel():
        return None
    return f"input_ids must be in [0, {rows}), the rows of the embedding, got {int(bad[0])}; use the model's tokenizer"


def _tensors_of(mask: Any) -> list[Tensor]:
    """Return the masks of a call, those of fewer dimensions first, then by name. None entries are left out.

    A 2-D mask states for each position whether it is a token. transformers builds the dict of masks from a set, whose
    order differs between ranks, hence the sort by name. Layer types that need no mask have None.
    """
    masks = [mask[key] for key in sorted(mask, key=str)] if isinstance(mask, dict) else [mask]
    return sorted((one for one in masks if isinstance(one, Tensor)), key=Tensor.dim)


class RouterLogitsHook:
    """Returns the layers' router logits in `router_logits` of the output, as transformers does for its own routers.

    transformers collects the outputs of its router classes, which the replaced blocks do not have. The outer models
    compute the auxiliary loss from what the inner model returns, so they need no change.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[ExitStack, list[Tensor], bool]] = {}  # calls that requested logits, by thread

    def attach(self, model: PreTrainedModel) -> None:
        """Register the hooks on the model whose forward returns `router_logits`, such as MixtralModel."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        # the condition of transformers' capture_outputs
        if not kwargs.get("output_router_logits", getattr(model.config, "output_router_logits", False)):
            return None
        if "router_logits" not in (model._can_record_outputs or {}):
            raise ConfigError(
                f"output_router_logits=True: {type(model).__name__} of transformers returns no router logits; set it "
                f"to False, and record them with ep_moe.training.router_logits(model)"
            )
        as_dict = kwargs.get("return_dict", getattr(model.config, "return_dict", True))
        stack, recorded, thread = ExitStack(), list[Tensor](), _thread()
        if thread in self._open:  # left by an earlier call that was interrupted: torch then calls no hooks
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
    """Return the id of this thread; 0 in compiled code, which cannot read it."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
