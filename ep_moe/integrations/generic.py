"""Expert parallelism for every transformers model whose experts are a module of their own in a block.

Only that module is replaced; `find_experts` finds it. The model keeps its router, shared experts, norms and gates. It
calls the replacement as it called its own module: with rows, expert ids and weights.

    replaced = replace_experts(model, context)              # a model in memory, or one on the meta device
    replaced["model.layers.0.mlp.experts"].write_expert(3, {"gate_up_proj": ..., "down_proj": ...})
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ep_moe.checkpoint.model_names import ModuleLayout
from ep_moe.checkpoint.unexpected_tensors import summarize_names
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.integrations.experts_probe import sorted_routes
from ep_moe.integrations.find_experts import (
    NORM,
    REMEDY,
    TOP_K,
    FoundExperts,
    experts_apart,
    find_experts,
    held_tensor,
    top_k_of,
)
from ep_moe.integrations.forward_sync import attach_skipped_experts_hooks
from ep_moe.integrations.model_hooks import TokenMasks
from ep_moe.integrations.user_changes import changed_methods
from ep_moe.layer import MoELayer
from ep_moe.quant.schemes import PLAIN, scheme_of
from ep_moe.types import LogicalIds, Routing

ROUTED = ("hidden_states", "top_k_index", "top_k_weights")  # names of transformers' experts interface


class ExpertParallelExperts(nn.Module):
    """Replaces a model's module of experts: rows [T, H], ids [T, K] and weights [T, K] in, rows [T, H] out.

    Args:
        replaced: The module that it replaces. It keeps no tensors of this module except those of its `NORM`.
        context: The ranks and what their layers share.
        found: What `replaced` holds and computes.
        top_k: K, the most experts that a token takes.
        name: The name of the module in its model.
        masks: The model's record of which rows are tokens.
        table: Whether ids come from a table, which may name one expert twice for a token. A top-k cannot.
        layer_options: `MoELayer`'s keyword arguments from expert_map on.

    Raises:
        ConfigError: On all ranks, if `MoELayer` cannot compute what the module does.
    """

    def __init__(
        self,
        replaced: nn.Module,
        context: EPContext,
        *,
        found: FoundExperts,
        top_k: int,
        name: str,
        masks: TokenMasks,
        table: bool = False,
        **layer_options: Any,
    ) -> None:
        super().__init__()
        self.layout, self.masks = found.layout, masks
        self._zero_experts, self._table, self._top_k = found.zero_experts, table, top_k
        self.calls = 0
        self._inputs = ROUTED if found.block else tuple(inspect.signature(type(replaced).forward).parameters)[1:4]
        first = held_tensor(replaced, self.tensor_names[0])
        placed: dict[str, Any] = {"name": name, "dtype": first.dtype, "device": first.device}
        # the norm needs each expert's output, and the layer returns sums: `_normalised` calls it once for each choice
        config = found.config(1 if found.norm else top_k)
        self.moe = MoELayer(config, context, router=routed_by_model, **placed, **layer_options)
        self.add_module(NORM, getattr(replaced, NORM) if found.norm else None)
        keep_frozen(self.moe, self.layout, replaced)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of the tensors that `write_expert` takes: those of the replaced module's parameters."""
        return self.layout.names

    @property
    def kept(self) -> dict[str, nn.Module | nn.Parameter]:
        """The replaced module's children and parameters that stay, by name: all except its experts."""
        modules = {name: module for name, module in self.named_children() if module is not self.moe}
        return modules | {name: one for name, one in self._parameters.items() if one is not None}

    @property
    def local_experts(self) -> list[int]:
        """The logical experts that this rank holds, and whose tensors it needs."""
        return list(self.moe.expert_weights.slots_of_expert)

    @torch.no_grad()
    def write_expert(self, expert: int, tensors: Mapping[str, Tensor]) -> int:
        """Write one expert's whole tensors. A quantized layer quantizes them here.

        Args:
            expert: The logical id, in [0, E).
            tensors: The tensors by `tensor_names`, in the layout of the replaced module at [expert]: transposed, or
                with gate and up interleaved, if the module holds them so.

        Returns:
            The number of slots written on this rank.

        Raises:
            InputError: A tensor has another shape, or a dtype that is not plain floating-point.
        """
        return write_expert(self.moe, self.layout, expert, tensors)

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        """Compute the experts of all tokens of this rank.

        Args:
            given: The positional inputs: hidden_states [..., H], T rows in all; top_k_index [T, k] or [..., k],
                integers, k <= K; top_k_weights of the same shape. An id >= E is no expert, as in transformers. In a
                model with zero experts it stands for the row itself.
            named: The other inputs, by the names that the `forward` of the replaced module has for them.

        Returns:
            A tensor with the shape and dtype of `hidden_states`.

        Raises:
            InputError: On all ranks, if an argument of any rank is invalid.
        """
        self.calls += 1
        if len(given) + len(named) != 3 or any(name not in self._inputs[len(given) :] for name in named):
            self._refuse(f"its experts take {', '.join(self._inputs)}, got {len(given)} inputs and {sorted(named)}")
        hidden_states, top_k_index, top_k_weights = (*given, *(named[name] for name in self._inputs[len(given) :]))
        if top_k_index.dim() > 2 and top_k_index.shape[:-1] == hidden_states.shape[:-1]:
            top_k_index, top_k_weights = top_k_index.flatten(0, -2), top_k_weights.flatten(0, -2)
        moe, most = self.moe, self._top_k
        chosen = top_k_index.shape[-1]
        if moe._logit_taps:
            self._refuse("its router is the model's own, whose logits output_router_logits=True of the call returns")
        if chosen > most:
            self._refuse(
                f"the model chooses {chosen} experts a token, and the layer was built for {most}, the largest of "
                f"{', '.join(TOP_K)} beside it; set one of them on its router before expert_parallel"
            )
        experts = moe.config.num_experts
        routing = routing_of(top_k_index, top_k_weights, experts, most, distinct=not self._table)
        out = (self._routed if self._modules[NORM] is None else self._normalised)(hidden_states, routing)
        if self._zero_experts:
            own = (top_k_weights * (top_k_index >= experts)).sum(-1, keepdim=True)
            out = out + hidden_states * own.view(*hidden_states.shape[:-1], 1)
        return out.to(hidden_states.dtype)

    def without_rows(self, *, gradients: bool) -> Tensor:
        """Join a call of the other ranks with no rows. Raise InputError on all ranks if one of them is refused.

        gradients: the other ranks' rows require gradients
        """
        weights, config = self.moe.expert_weights, self.moe.config
        x = torch.empty(0, config.hidden_size, dtype=weights.dtype, device=weights.device)
        ids = torch.empty(0, self._top_k, dtype=torch.int64, device=weights.device)
        routed = ids.float().requires_grad_(gradients)
        return ExpertParallelExperts.forward(self, x.requires_grad_(gradients), ids, routed)

    def _routed(self, hidden_states: Tensor, routing: Routing) -> Tensor:
        mask = self.masks.of_rows(len(routing.ids))
        if mask is None:
            return self.moe.forward_routed(hidden_states, routing)
        tokens = mask.tokens.view(hidden_states.shape[:-1])
        return self.moe.forward_routed(hidden_states, routing, tokens, send_masked=bool(mask.sent))

    def _normalised(self, hidden_states: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of the experts' normalized outputs. One layer call for each of the K choices."""
        norm, shape = self.get_submodule(NORM), (*hidden_states.shape[:-1], 1)
        ids, weights = routing.ids, routing.weights.masked_fill(routing.ids < 0, 0.0)
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        for choice in range(ids.shape[1]):
            one = cast("LogicalIds", ids[:, choice : choice + 1].contiguous())
            output = norm(self._routed(hidden_states, Routing(one, torch.ones_like(weights[:, :1]))))
            out = out + output.float() * weights[:, choice].view(shape)
        return out

    def _refuse(self, problem: str) -> NoReturn:
        self.moe._refuse(f"{self.moe.name}: {problem}")


def write_expert(layer: MoELayer, layout: ModuleLayout, expert: int, tensors: Mapping[str, Tensor]) -> int:
    """Write one expert's tensors, given in `layout`, into a layer; see `ExpertParallelExperts.write_expert`."""
    assert tensors.keys() == set(layout.names), f"{sorted(tensors)} are not {layout.names}"
    return layer.update_expert(expert, **layout.to_canonical(tensors))


def keep_frozen(layer: MoELayer, layout: ModuleLayout, replaced: nn.Module) -> None:
    """Freeze those parameters of a layer's experts that are frozen in the replaced module, which has `layout`."""
    parts = {"w13": ("w1", "w3"), "w13_bias": ("w1_bias", "w3_bias")}
    frozen = {
        part
        for one in layout.tensors
        if not held_tensor(replaced, one.name).requires_grad
        for part in parts.get(one.part, (one.part,))
    }
    for name, parameter in layer.expert_weights.named_parameters():
        whole = "w1" if name == "w13" else "w1_bias" if name == "w13_bias" else name.rpartition(".")[2]
        if whole in frozen:
            parameter.requires_grad_(False)


class SortedExpertParallelExperts(ExpertParallelExperts):
    """Replaces a block that is called with rows alone. It keeps the block's router, which sorts rows by expert."""

    def __init__(self, replaced: nn.Module, context: EPContext, **options: Any) -> None:
        super().__init__(replaced, context, **options)
        self.router = replaced.get_submodule("router")
        self.bias: nn.Parameter | None
        self.register_parameter("bias", replaced._parameters.get("bias"))

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Route and compute rows [..., H]; return rows of that shape. Raise InputError on all ranks."""
        rows = hidden_states.flatten(0, -2)
        ids, weights = sorted_routes(self.router(rows), len(rows))
        out = super().forward(rows, ids, weights).view(hidden_states.shape)
        return out if self.bias is None else out + self.bias


def replace_experts(model: nn.Module, context: EPContext, **layer_options: Any) -> dict[str, ExpertParallelExperts]:
    """Replace each module of experts of a model, in place. All ranks call it with the same arguments.

    Weights of a module in memory are copied into its replacement. A module on the meta device is replaced by one on
    the meta device; `write_expert` fills it after `to_empty`.

    Args:
        model: Any transformers model.
        context: The ranks and what their layers share.
        layer_options: `MoELayer`'s keyword arguments from expert_map on.

    Returns:
        The replacements by the names of the modules, in the model's order.

    Raises:
        ConfigError: The model has no experts that are a module of their own, or a layer cannot compute what they do.
    """
    found = find_experts(model)
    if not found:
        if any(isinstance(module, ExpertParallelExperts) for module in model.modules()):
            raise ConfigError(f"the experts of {type(model).__name__} were replaced already; call expert_parallel once")
        raise ConfigError(
            f"{type(model).__name__} ({_type_of(model)}) has no module that computes experts from rows, ids and "
            f"weights, as transformers' experts interface has; {REMEDY}, or put a MoELayer into its blocks"
        )
    if apart := experts_apart(model):
        warnings.warn(
            f"{type(model).__name__}: the experts of {summarize_names(apart)} stay whole on every rank: they are no "
            f"part of the text model, and a rank calls them only when it has an image or a sound",
            stacklevel=3,
        )
    scheme = scheme_of(layer_options.get("quantization", PLAIN.name))
    if scheme.activations.calibrated:
        raise ConfigError(
            f"quantization={scheme.name} needs input scales, which a calibrated checkpoint of a known family holds and "
            f"{type(model).__name__} does not; choose fp8_dynamic, fp8_block or another that derives them"
        )
    modules = {name: model.get_submodule(name) for name in found}
    for name, experts in modules.items():
        if (changed := changed_methods(experts, name)) is not None:
            raise ConfigError(
                f"{changed}, which the layer that replaces it would ignore; remove it, and register hooks on what "
                "stands there afterwards (a model with device_map has such methods too: load it without)"
            )
    top_k = {name: top_k_of(model, experts, name) for name, experts in modules.items()}
    first = _shared(model, modules)
    masks, replaced = TokenMasks(send_padding=True), dict[str, ExpertParallelExperts]()
    for name in found:
        experts = modules.pop(name)  # and freed, once the next ones are replaced
        if first[name] != name:
            replace_module(model, experts, replaced[first[name]])
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        kind = SortedExpertParallelExperts if found[name].block else ExpertParallelExperts
        made = kind(
            experts,
            context,
            found=found[name],
            top_k=top_k[name],
            name=name,
            masks=masks,
            table=any(not tensor.is_floating_point() for tensor in parent.buffers()),
            **layer_options,
        )
        if not made.moe.expert_weights.is_meta:
            whole = {each: held_tensor(experts, each).detach() for each in made.tensor_names}
            for expert in made.local_experts:
                made.write_expert(expert, made.layout.expert_slice(whole, expert))
        made.train(experts.training)
        made.moe._block = weakref.ref(made if found[name].block else parent)
        replace_module(model, experts, made)
        replaced[name] = made
    attach_skipped_experts_hooks(model, replaced)
    if tied := getattr(model, "all_tied_weights_keys", None):
        gone = tuple(f"{name}." for name in found)
        kept = {target: source for target, source in tied.items() if not target.startswith(gone)}
        setattr(model, "all_tied_weights_keys", kept)  # noqa: B010 (transformers' `tie_weights` reads it)
    return replaced


def replace_module(model: nn.Module, module: nn.Module, replacement: nn.Module) -> None:
    """Replace a module of a model under each of its names: several layers may share it."""
    for name in [name for name, one in model.named_modules(remove_duplicate=False) if one is module]:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, replacement)


def routed_by_model(x: Tensor) -> Routing:
    raise ConfigError("the model routes its tokens itself; call forward_routed")


def _type_of(model: nn.Module) -> str:
    return f"model_type {getattr(getattr(model, 'config', None), 'model_type', None)!r}"


def _shared(model: nn.Module, found: Mapping[str, nn.Module]) -> dict[str, str]:
    """Map each module's name to the first module with the same parameter objects. One layer replaces both.

    Raises:
        ConfigError: A parameter is tied to one outside the module. The layer's copy would no longer be tied to it.
    """
    of_modules: dict[tuple[int, ...], str] = {}
    first = {}
    for name, experts in found.items():
        first[name] = of_modules.setdefault(tuple(id(parameter) for parameter in experts.parameters()), name)
    holders: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), name)
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    for name, experts in found.items():
        for own, parameter in experts.named_parameters():
            full = f"{name}.{own}"
            for other in (holders[id(parameter)], tied.get(full, full)):
                if {first[holder] for holder in found if other.startswith(f"{holder}.")} != {first[name]}:
                    raise ConfigError(
                        f"{full} is tied to {other}, and expert-parallel layers have their own weights each; {REMEDY}"
                    )
    return first


def routing_of(ids: Tensor, weights: Tensor, experts: int, most: int, *, distinct: bool) -> Routing:
    """Convert the choice of a model's router to the `Routing` that `MoELayer.forward_routed` takes.

    Args:
        ids: [T, k] integers, k <= K. An id >= E is no expert, as in transformers.
        weights: [T, k].
        experts: E.
        most: K.
        distinct: Whether valid ids of a row are distinct. A table may name one expert twice, a top-k cannot.

    Returns:
        Ids [T, K], -1 for no expert, and float32 weights [T, K].
    """
    missing = most - ids.shape[-1]
    ids, weights = ids.masked_fill(ids >= experts, -1), weights.float()
    if missing:
        ids, weights = pad(ids, (0, missing), value=-1), pad(weights, (0, missing))
    if not distinct:
        ids, weights = _merged(ids, weights)
    return Routing(cast("LogicalIds", ids), weights)


def _merged(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Merge repeated experts of a row: the first keeps the sum of the weights, the others become -1 with weight 0."""
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    again = same.tril(-1).any(2)
    return ids.masked_fill(again, -1), (same * weights.unsqueeze(1)).sum(2).masked_fill(again, 0.0)
