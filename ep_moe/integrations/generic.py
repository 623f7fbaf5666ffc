"""Expert-parallel experts for every model of transformers whose experts are one module of a block.

Only that module is replaced (`find_experts` says which it is). The model keeps its router, shared experts, norms and
gates, and gives the replaced module what it gave its own: rows, ids of experts and weights.

    replaced = replace_experts(model, context)              # a model in memory, or one on the meta device
    replaced["model.layers.0.mlp.experts"].write_expert(3, {"gate_up_proj": ..., "down_proj": ...})
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ep_moe.checkpoint.model_names import ModuleLayout
from ep_moe.checkpoint.unexpected_tensors import listed
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.integrations.edited import changed_methods
from ep_moe.integrations.experts_probe import sorted_routes
from ep_moe.integrations.find_experts import (
    KEEP,
    NORM,
    TOP_K,
    FoundExperts,
    experts_apart,
    find_experts,
    held_tensor,
    top_k_of,
)
from ep_moe.integrations.in_step import attach_all_called
from ep_moe.integrations.model_hooks import TokenMasks
from ep_moe.layer import MoELayer
from ep_moe.quant.schemes import PLAIN, scheme_of
from ep_moe.types import LogicalIds, Routing


class ExpertParallelExperts(nn.Module):
    """Stands where a model's experts stood: rows [T, H], ids [T, K] and weights [T, K] in, rows [T, H] out.

    Args:
        replaced: the module in whose place it stands, of which it keeps no tensor but those of its `NORM`.
        context: the ranks and what their layers share.
        found: what `replaced` holds and computes.
        top_k: the most experts that a token takes.
        name: of the module in its model.
        masks: which rows are tokens, of the model.
        table: whether ids come from a table, which may name one expert twice for a token; a top-k cannot.
        layer_options: `MoELayer`'s keyword arguments from expert_map on.

    Raises:
        ConfigError: on all ranks, where `MoELayer` cannot compute what the module does.
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
        first = held_tensor(replaced, self.tensor_names[0])
        placed: dict[str, Any] = {"name": name, "dtype": first.dtype, "device": first.device}
        # results are normalized expert by expert: one call for each choice of a token
        config = found.config(1 if found.norm else top_k)
        self.moe = MoELayer(config, context, router=routed_by_model, **placed, **layer_options)
        self.add_module(NORM, getattr(replaced, NORM) if found.norm else None)
        keep_frozen(self.moe, self.layout, replaced)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """What `write_expert` takes: the names of the replaced module's parameters of all experts."""
        return self.layout.names

    @property
    def kept(self) -> dict[str, nn.Module | nn.Parameter]:
        """What stays of the replaced module besides its experts."""
        modules = {name: module for name, module in self.named_children() if module is not self.moe}
        return modules | {name: one for name, one in self._parameters.items() if one is not None}

    @property
    def local_experts(self) -> list[int]:
        """The logical experts that this rank holds, and whose tensors it needs."""
        return list(self.moe.expert_weights.held)

    @torch.no_grad()
    def write_expert(self, expert: int, tensors: Mapping[str, Tensor]) -> int:
        """Write one expert's whole tensors, quantized here where the layer is.

        Args:
            expert: logical id, in [0, E).
            tensors: `tensor_names`, each as the replaced module holds it at [expert]: transposed, and with gate and up
                interleaved, where that module's are.

        Returns:
            The number of slots written on this rank.

        Raises:
            InputError: a tensor has another shape, or is not made of numbers.
        """
        return write_expert(self.moe, self.layout, expert, tensors)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of all tokens of this rank.

        Args:
            hidden_states: [..., H] of T rows.
            top_k_index: [T, k] integers, k at most K. An id of at least E is no expert, as in transformers; where the
                model has zero experts, it stands for the row itself.
            top_k_weights: [T, k].

        Returns:
            As hidden_states.

        Raises:
            InputError: on all ranks.
        """
        self.calls += 1
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
        """Take part in a call of the other ranks. Raises InputError on all ranks.

        gradients: the rows of other ranks have them
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
        """The sum of each expert's normalized output times its weight, one choice of all tokens after another."""
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
    """As `ExpertParallelExperts.write_expert`, of a layer whose module of experts holds them in `layout`."""
    assert tensors.keys() == set(layout.names), f"{sorted(tensors)} are not {layout.names}"
    return layer.update_expert(expert, **layout.canonical(tensors))


def keep_frozen(layer: MoELayer, layout: ModuleLayout, replaced: nn.Module) -> None:
    """Freeze the parameters of a layer's experts whose tensors are frozen in the module that holds them in `layout`."""
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
    """Stands where a block stood that is called with rows alone. Its router sorts the rows by expert and stays."""

    def __init__(self, replaced: nn.Module, context: EPContext, **options: Any) -> None:
        super().__init__(replaced, context, **options)
        self.router = replaced.get_submodule("router")
        self.bias: nn.Parameter | None
        self.register_parameter("bias", replaced._parameters.get("bias"))

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Route and compute rows [..., H]. Raises InputError on all ranks."""
        rows = hidden_states.flatten(0, -2)
        ids, weights = sorted_routes(self.router(rows), len(rows))
        out = super().forward(rows, ids, weights).view(hidden_states.shape)
        return out if self.bias is None else out + self.bias


def replace_experts(model: nn.Module, context: EPContext, **layer_options: Any) -> dict[str, ExpertParallelExperts]:
    """Replace each experts module of a model, in place. Made by all ranks alike.

    A module in memory gives its weights to the one that replaces it; one on the meta device is replaced by one on the
    meta device, which `write_expert` fills after `to_empty`.

    Args:
        model: any model of transformers.
        context: the ranks and what their layers share.
        layer_options: `MoELayer`'s keyword arguments from expert_map on.

    Returns:
        What replaced each module, by that module's name, in the model's order.

    Raises:
        ConfigError: the model has no experts that are a module of their own, or a layer cannot compute what they do.
    """
    found = find_experts(model)
    if not found:
        if any(isinstance(module, ExpertParallelExperts) for module in model.modules()):
            raise ConfigError(f"the experts of {type(model).__name__} were replaced already; call expert_parallel once")
        raise ConfigError(
            f"{type(model).__name__} ({_type_of(model)}) has no module that computes experts from rows, ids and "
            f"weights, as transformers' experts interface has; {KEEP}, or put a MoELayer into its blocks"
        )
    if apart := experts_apart(model):
        warnings.warn(
            f"{type(model).__name__}: the experts of {listed(apart)} stay whole on every rank: they are no part of the "
            f"text model, and a rank calls them only when it has an image or a sound",
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
                f"{changed}, which a layer in its place would leave out; remove it, and register hooks on what stands "
                f"there afterwards (a model with device_map has such methods too: load it without)"
            )
    top_k = {name: top_k_of(model, experts, name) for name, experts in modules.items()}
    first = _shared(model, modules)
    masks, replaced = TokenMasks(send_padding=True), dict[str, ExpertParallelExperts]()
    for name, experts in modules.items():
        if first[name] != name:
            _put(model, experts, replaced[first[name]])
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
                made.write_expert(expert, made.layout.one(whole, expert))
        made.train(experts.training)
        made.moe._block = weakref.ref(made if found[name].block else parent)
        _put(model, experts, made)
        replaced[name] = made
    attach_all_called(model, replaced)
    if tied := getattr(model, "all_tied_weights_keys", None):
        gone = tuple(f"{name}." for name in found)
        kept = {target: source for target, source in tied.items() if not target.startswith(gone)}
        setattr(model, "all_tied_weights_keys", kept)  # noqa: B010 (of transformers; `tie_weights` goes by it)
    return replaced


def _put(model: nn.Module, experts: nn.Module, made: nn.Module) -> None:
    """In the place of a module, under each of its names."""
    for name in [name for name, one in model.named_modules(remove_duplicate=False) if one is experts]:
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], made)


def routed_by_model(x: Tensor) -> Routing:
    raise ConfigError("the model routes its tokens itself; call forward_routed")


def _type_of(model: nn.Module) -> str:
    return f"model_type {getattr(getattr(model, 'config', None), 'model_type', None)!r}"


def _shared(model: nn.Module, found: Mapping[str, nn.Module]) -> dict[str, str]:
    """By module, the first one that has the very same parameters: one layer stands for both.

    Raises:
        ConfigError: a part of a module's parameters is tied to others, which would be two things after a copy.
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
                        f"{full} is tied to {other}, and expert-parallel layers have their own weights each; {KEEP}"
                    )
    return first


def routing_of(ids: Tensor, weights: Tensor, experts: int, most: int, *, distinct: bool) -> Routing:
    """What a model's router chose, as `MoELayer.forward_routed` takes it.

    Args:
        ids: [T, k] integers, k at most K; an id of at least E is no expert, as in transformers.
        weights: [T, k].
        experts: E.
        most: K.
        distinct: whether valid ids of a row are distinct. A table may name one expert twice, a top-k cannot.

    Returns:
        Ids and float32 weights [T, K].
    """
    missing = most - ids.shape[-1]
    ids, weights = ids.masked_fill(ids >= experts, -1), weights.float()
    if missing:
        ids, weights = pad(ids, (0, missing), value=-1), pad(weights, (0, missing))
    if not distinct:
        ids, weights = _merged(ids, weights)
    return Routing(cast("LogicalIds", ids), weights)


def _merged(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """An expert that a row names twice, once with the sum of the weights: valid ids of a row are distinct."""
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    again = same.tril(-1).any(2)
    return ids.masked_fill(again, -1), (same * weights.unsqueeze(1)).sum(2).masked_fill(again, 0.0)
