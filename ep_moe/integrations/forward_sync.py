"""Keeps the ranks of a Hugging Face model in step while they run different numbers of forwards.

The blocks of a model are collective, so each forward of one rank needs a forward of every other rank. Within
`generate`, each rank announces before a forward which model it will call. A rank that has finished, or that wants to
call another model, joins the forward without tokens.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from ep_moe.checks import check_kind
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError, EPMoEError
from ep_moe.integrations.model_hooks import TokenMasks
from ep_moe.layer import MoELayer

if TYPE_CHECKING:
    from ep_moe.integrations.generic import ExpertParallelExperts


# transformers' continuous batching
_CONTINUOUS = ("init_continuous_batching", "continuous_batching_context_manager", "generate_batch")
_NOT_IN_STEP = (
    "continuous batching of transformers runs a different number of forwards on each rank, and each forward needs "
    "all ranks; call model.generate on all ranks, which keeps them in step, without cache_implementation='paged'"
)

_MOST_LAYERS = 2**16  # an announcement is a model's number times this, plus the number of layers that it will run

_OTHER_CONTEXT = (
    "assistant_model has layers of another EPContext, so ranks in one model would wait for ranks in the other; load "
    "it with the same context as this model"
)


def idle_step(model: nn.Module) -> Tensor:
    """Join one forward of the other ranks without tokens, on a rank that has no batch.

    The model runs on one row of padding. The row is not counted as load, not recorded by `record_routing` and
    `router_logits`, takes no replayed ids, and goes to no expert. With gradients the row is computed as a token. In
    training call `backward` on the result. It joins the others' backward, and this rank contributes zero gradients.

        loss = model(**batch).loss if batch is not None else idle_step(model)
        loss.backward()

    Args:
        model: A model of `load_pretrained` or `expert_parallel`, or a wrapper around it such as
            DistributedDataParallel. Call `idle_step` in the grad mode of the other ranks. With tp-replicated tokens,
            all ranks of a tp group call it.

    Returns:
        A loss of 0, a scalar that depends on the model's parameters.

    Raises:
        ConfigError: The model has no expert-parallel blocks.
    """
    check_kind("idle_step: model", model, nn.Module)
    masks = _masks_of(model)
    if not masks:
        raise ConfigError(
            f"idle_step needs a model of load_pretrained or expert_parallel, got {type(model).__name__}; call "
            f"layer(x[:0]) for each MoELayer of another model"
        )
    with ExitStack() as idle:
        for one in masks:
            idle.enter_context(one.idle())
        for module in model.modules():
            if isinstance(module, MoELayer):
                idle.enter_context(module._rows_as_padding())
        device = next(model.parameters()).device
        row = torch.zeros(1, 1, dtype=torch.int64, device=device)
        out = model(input_ids=row, use_cache=False, return_dict=True)
    logits: Tensor = out[0]
    return (logits * 0.0).sum()


def _masks_of(model: nn.Module) -> list[TokenMasks]:
    found = [getattr(module, "masks", None) for module in model.modules()]
    return list({id(one): one for one in found if isinstance(one, TokenMasks)}.values())


class GenerationSync:
    """Keeps the ranks of one context in step during `generate` of any of its models."""

    def __init__(self, context: EPContext) -> None:
        self._context, self._rank_group = context, context.rank_groups["lockstep"]
        self._models: list[tuple[weakref.ref[PreTrainedModel], weakref.ref[PreTrainedModel]]] = []  # whole and inner
        self._depth = 0  # nested calls of generate: an assistant model's runs inside the main model's
        self._serving = self._inside = False  # in an idle step for other ranks; in a forward of this rank

    @classmethod
    def of(cls, context: EPContext) -> GenerationSync:
        """Return the context's instance. The first call creates it."""
        if context._generation is None:
            context._generation = cls(context)
        found: GenerationSync = context._generation
        return found

    def attach(self, model: PreTrainedModel, inner: PreTrainedModel) -> None:
        """Wrap `generate` of a model, and register the hooks. All ranks attach their models in the same order.

        inner: the model that holds the decoder layers
        """
        number = len(self._models)
        self._models.append((weakref.ref(model), weakref.ref(inner)))
        generate = type(model).generate
        signature = inspect.signature(generate)

        @functools.wraps(generate)
        def synchronized(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind_partial(model, *args, **kwargs)
            with ExitStack() as generating:
                for masks in _masks_of(model):
                    generating.enter_context(masks.generating())
                if self._depth or given.arguments.get("synced_gpus") is False:
                    return generate(*given.args, **given.kwargs)
                given.arguments["synced_gpus"] = False  # its purpose, equal numbers of forwards, is served here
                return self._run(given, lambda: generate(*given.args, **given.kwargs))

        setattr(model, "generate", synchronized)  # noqa: B010 (a method, of this model alone)
        if self._rank_group.size > 1:
            for name in _CONTINUOUS:
                if hasattr(model, name):
                    setattr(model, name, functools.partial(self._refuse_continuous, name))
            # before all other hooks, because an idle step runs those too
            inner.register_forward_pre_hook(
                lambda one, *_: self._before(number * _MOST_LAYERS + _layers_run(one)), prepend=True
            )
            inner.register_forward_hook(lambda *_: self._after())

    def _refuse_continuous(self, name: str, *_: Any, **__: Any) -> None:
        """Raise ConfigError for continuous batching, on all ranks that call it or `generate`.

        There a thread of transformers calls the model as often as this rank's requests need. It may replay CUDA graphs
        without running our hooks, and it returns a short output instead of raising an exception.
        """
        self._next_forward(None, f"{name}: {_NOT_IN_STEP}")

    def _run(self, given: inspect.BoundArguments, generate: Callable[[], Any]) -> Any:
        self._depth += 1
        self._inside = False
        try:
            if self._rank_group.size > 1 and self._is_of_others(_argument(given, "assistant_model")):
                self._next_forward(None, _OTHER_CONTEXT)
            with self._random_state_of_tp():
                empty = _empty(given)
                found = generate() if empty is None else empty
            self._finish()
        except EPMoEError:
            raise  # raised on all ranks
        except Exception as error:
            self._report_failure(error)
            raise
        finally:
            self._depth -= 1
        return found

    def _is_of_others(self, assistant: Any) -> bool:
        """Return whether an assistant's layers have another context, so that its ranks cannot take turns with these."""
        modules = assistant.modules() if isinstance(assistant, nn.Module) else ()
        return any(isinstance(one, MoELayer) and one.context is not self._context for one in modules)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, forward: int) -> None:
        """Before a forward of this model, join the forwards of other models that peers announced first.

        `assistant_early_exit` of `generate` runs the first layers of the same model, and counts as another model.
        """
        if not self._depth or self._serving:
            return
        while (announced := self._next_forward(forward)) != forward:
            assert announced is not None
            self._idle(announced)
        self._inside = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self) -> None:
        if not self._serving:
            self._inside = False

    def _finish(self) -> None:
        """Join the forwards of the other ranks until all ranks have finished."""
        while (announced := self._next_forward(None)) is not None:
            self._idle(announced)

    def _next_forward(self, forward: int | None, problem: str | None = None) -> int | None:
        """Agree with all ranks on the forward that comes next: the lowest number announced.

        forward: the model that this rank wants to call, and the number of its layers; None if the rank has finished

        Returns None when all ranks have finished. A problem of any rank is raised on all of them.
        """
        if self._rank_group.size == 1:
            return forward
        with self._context._begin_call("generate"), self._rank_group.flight_recorder.step("generate"):
            rows = self._rank_group.agree([0 if forward is None else forward + 1], problem, self._context.device)
        return min((row[0] - 1 for row in rows if row[0]), default=None)

    @torch.no_grad()
    def _idle(self, forward: int) -> None:
        number, layers = divmod(forward, _MOST_LAYERS)
        model, inner = (one() for one in self._models[number])
        assert model is not None and inner is not None, "models live on all ranks alike"  # noqa: PT018
        own = _layers_run(inner)
        self._serving = True
        try:
            if layers != own:
                inner.config.num_hidden_layers = layers
            idle_step(model)
        finally:
            if layers != own:
                inner.config.num_hidden_layers = own
            self._serving = False

    def _report_failure(self, error: Exception) -> None:
        """Report an exception that leaves `generate` on this rank only. Peers that wait for this rank raise it."""
        if self._rank_group.size == 1 or self._context.flight_recorder.failed:
            return
        if self._inside:  # the peers are in the same forward, not at the next announcement
            self._context._report_exception(error)
            return
        with suppress(EPMoEError):
            self._next_forward(None, f"generate raised {type(error).__name__}: {error}")

    @contextmanager
    def _random_state_of_tp(self) -> Iterator[None]:
        """Give tp ranks that pass the same tokens the random state of the first of them, within the context."""
        rank_group = self._context.rank_groups["tp"]
        if self._context.layout.split == 1:
            yield
            return
        device = self._context.device
        own = _random_state(device)
        with self._context._begin_call("generate"), rank_group.flight_recorder.step("random state"):
            rows = rank_group.exchange(own.to(device))
        if rank_group.rank:
            _set_random_state(torch.tensor(rows[0], dtype=torch.int64, device="cpu"), device)
        try:
            yield
        finally:
            if rank_group.rank:
                _set_random_state(own, device)


def _layers_run(inner: nn.Module) -> int:
    """Return how many layers a model's forward runs, which transformers reads from its configuration at each call."""
    return int(getattr(getattr(inner, "config", None), "num_hidden_layers", None) or 0)


def _random_state(device: torch.device) -> Tensor:
    """Return the states of the default generators of the CPU and of a GPU, as int64 [n]."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states).view(torch.int64)


def _set_random_state(state: Tensor, device: torch.device) -> None:
    data, host = state.view(torch.uint8), len(torch.get_rng_state())
    torch.set_rng_state(data[:host].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(data[host:].clone(), device)


def _argument(given: inspect.BoundArguments, name: str) -> Any:
    """Return an argument by name; None if it is not given."""
    return (given.arguments | given.arguments.get("kwargs", {})).get(name)


def _empty(given: inspect.BoundArguments) -> Any:
    """Return what `generate` returns for a batch without sequences: its input, in the form that the caller asked for.
    Return None for a batch with sequences."""
    for name in ("inputs", "input_ids", "inputs_embeds"):
        if isinstance(tensor := _argument(given, name), Tensor) and tensor.dim() and len(tensor) == 0:
            ids = tensor.new_empty(0, 0, dtype=torch.int64) if tensor.is_floating_point() else tensor
            if not _setting(given, "return_dict_in_generate"):
                return ids
            beams = (_setting(given, "num_beams") or 1) > 1
            return (GenerateBeamDecoderOnlyOutput if beams else GenerateDecoderOnlyOutput)(sequences=ids)
    return None


def _setting(given: inspect.BoundArguments, name: str) -> Any:
    """Return a setting of `generate`, found as transformers does: argument, given configuration, model."""
    configs = (_argument(given, "generation_config"), getattr(given.arguments.get("self"), "generation_config", None))
    values = (_argument(given, name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


# --- modules of experts that a block leaves out -----------------------------------------------------------------------
# A block may have several modules of experts, such as one for text and one for images, and call only some of them.
#
# Each call is collective. After the block, a rank therefore calls the modules that it left out, without rows.


class SkippedExpertsHook:
    """Calls those modules of experts of a block that its forward left out, in order.

    Args:
        experts: The block's modules of experts, in the order in which it calls them.
    """

    def __init__(self, experts: Sequence[ExpertParallelExperts]) -> None:
        self._experts = experts
        self._before: list[int] = []

    def attach(self, block: nn.Module) -> None:
        block.register_forward_pre_hook(self._begin)
        block.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._before = [one.calls for one in self._experts]

    def _end(self, block: nn.Module, args: Any, out: Any) -> Any:
        left = [one.calls == before for one, before in zip(self._experts, self._before, strict=True)]
        if not any(left):
            return None
        if left != sorted(left):
            name = self._experts[left.index(True)].moe.name
            self._experts[0].moe._refuse(f"{name} was not called, and what its block calls after it was; ranks differ")
        first, *rest = out if isinstance(out, tuple) else (out,)
        gradients = first.requires_grad and torch.is_grad_enabled()  # backward is collective too
        missing = [one for one, is_left in zip(self._experts, left, strict=True) if is_left]
        results = [one.without_rows(gradients=gradients) for one in missing]
        if not gradients:
            return None
        first = first + sum(result.sum() for result in results)
        return (first, *rest) if isinstance(out, tuple) else first


def attach_skipped_experts_hooks(model: nn.Module, replaced: Mapping[str, ExpertParallelExperts]) -> None:
    """Register `SkippedExpertsHook` on each block that has several modules of experts."""
    groups: dict[str, dict[str, None]] = {}
    for one, other in pairwise(replaced):
        block = _common(one, other)
        if not isinstance(model.get_submodule(block), nn.ModuleList | nn.ModuleDict | PreTrainedModel):
            groups.setdefault(block, {}).update({one: None, other: None})
    for block, members in groups.items():
        SkippedExpertsHook([replaced[name] for name in members]).attach(model.get_submodule(block))


def _common(one: str, other: str) -> str:
    """Return the name of the innermost module that contains both modules."""
    parts = []
    for pair in zip(one.split("."), other.split("."), strict=False):
        if pair[0] != pair[1]:
            break
        parts.append(pair[0])
    return ".".join(parts)
