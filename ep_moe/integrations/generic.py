"""Expert-parallel experts for every model on transformers' experts interface (`use_experts_implementation`).

Only the experts module of a block is replaced. The model keeps its router, shared experts, norms and gates, and gives
the replaced module what it gave its own: rows, ids of experts and weights.

    replaced = replace_experts(model, context)              # a model in memory, or one on the meta device
    replaced["model.layers.0.mlp.experts"].write_expert(3, {"gate_up_proj": ..., "down_proj": ...})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ep_moe.checkpoint.formats import NUMBERS
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.integrations.gate_functions import find_activation, is_experts
from ep_moe.integrations.token_mask import TokenMasks
from ep_moe.layer import MoELayer
from ep_moe.quant.schemes import PLAIN, scheme_of
from ep_moe.types import LogicalIds, Routing, dtype_name

TOP_K = ("top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_KEEP = "leave the model as it is, or use transformers' own DistributedConfig(ep_size=...)"


class ExpertParallelExperts(nn.Module):
    """Stands where a model's experts stood: rows [T, H], ids [T, K] and weights [T, K] in, rows [T, H] out.

    Args:
        replaced: the module in whose place it stands, of which it keeps no tensor.
        context: the ranks and what their layers share.
        config: what the module computes; its top_k is the most experts that a token takes.
        name: of the module in its model.
        masks: which rows are tokens, of the model.
        table: whether ids come from a table, which may name one expert twice for a token; a top-k cannot.
        layer_options: `MoELayer`'s keyword arguments from expert_map on.

    Raises:
        ConfigError: on all ranks, where `MoELayer` cannot compute what the module does.
    """

    def __init__(
        self,
        replaced: Any,
        context: EPContext,
        *,
        config: MoEConfig,
        name: str,
        masks: TokenMasks,
        table: bool = False,
        **layer_options: Any,
    ) -> None:
        super().__init__()
        self.has_gate, self.has_bias = bool(replaced.has_gate), bool(replaced.has_bias)
        self.is_transposed, self.is_concatenated = bool(replaced.is_transposed), bool(replaced.is_concatenated)
        self.masks, self._table = masks, table
        first = getattr(replaced, self.tensor_names[0])
        placed = {"name": name, "dtype": first.dtype, "device": first.device}
        self.moe = MoELayer(config, context, router=routed_by_model, **placed, **layer_options)
        self._keep_frozen(replaced)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """What `write_expert` takes: the names of the replaced module's parameters, [E, ...] each."""
        first = "gate_up_proj" if self.has_gate else "up_proj"
        matrices = (first, "down_proj")
        return (*matrices, *(f"{each}_bias" for each in matrices)) if self.has_bias else matrices

    @property
    def local_experts(self) -> list[int]:
        """The logical experts that this rank holds, and whose tensors it needs."""
        return list(self.moe.expert_weights.held)

    @torch.no_grad()
    def write_expert(self, expert: int, tensors: Mapping[str, Tensor]) -> int:
        """Write one expert's whole tensors, quantised here where the layer is.

        Args:
            expert: logical id, in [0, E).
            tensors: `tensor_names`, each as the replaced module holds it at [expert]: transposed, and with gate and up
                interleaved, where that module's are.

        Returns:
            The number of slots written on this rank.

        Raises:
            InputError: a tensor has another shape, or is not made of numbers.
        """
        assert tensors.keys() == set(self.tensor_names), f"{sorted(tensors)} are not {self.tensor_names}"
        first, second, *biases = (tensors[name] for name in self.tensor_names)
        if self.is_transposed:
            first, second = first.mT, second.mT
        canonical = {"w13": self._gate_first(first), "w2": second}
        if biases:
            canonical |= {"w13_bias": self._gate_first(biases[0]), "w2_bias": biases[1]}
        weights = self.moe.expert_weights
        if not weights.scheme.plain:
            canonical = {part: tensor.to(weights.device) for part, tensor in canonical.items()}
            canonical = weights.scheme.quantize(canonical, weights.dtype)
        return self.moe.update_expert(expert, **canonical)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of all tokens of this rank.

        Args:
            hidden_states: [..., H] of T rows.
            top_k_index: [T, k] integers, k at most K; an id of at least E is no expert, as in transformers.
            top_k_weights: [T, k].

        Returns:
            As hidden_states.

        Raises:
            InputError: on all ranks.
        """
        moe, most = self.moe, self.moe.config.top_k
        chosen = top_k_index.shape[-1]
        if moe._logit_taps:
            self._refuse("its router is the model's own, whose logits output_router_logits=True of the call returns")
        if chosen > most:
            self._refuse(
                f"the model chooses {chosen} experts a token, and the layer was built for {most}, the largest of "
                f"{', '.join(TOP_K)} beside it; set one of them on its router before expert_parallel"
            )
        routing = routing_of(top_k_index, top_k_weights, moe.config, distinct=not self._table)
        mask = self.masks.of_rows(len(routing.ids))
        if mask is None:
            out = moe.forward_routed(hidden_states, routing)
        else:
            tokens = mask.tokens.view(hidden_states.shape[:-1])
            out = moe.forward_routed(hidden_states, routing, tokens, send_masked=bool(mask.sent))
        return out.to(hidden_states.dtype)

    def _refuse(self, problem: str) -> NoReturn:
        self.moe._refuse(f"{self.moe.name}: {problem}")

    def _gate_first(self, rows: Tensor) -> Tensor:
        """[2I, ...], of gate and up by turns where the module's are."""
        if self.is_concatenated or not self.has_gate:
            return rows
        return torch.cat([rows[::2], rows[1::2]])

    def _keep_frozen(self, experts: Any) -> None:
        """Parameters of frozen tensors are frozen."""
        first, second = ("w1", "w3"), ("w2",)
        names = self.tensor_names
        parts = dict(zip(names, (first, second, ("w1_bias", "w3_bias"), ("w2_bias",)), strict=False))
        frozen = {part for name in names if not getattr(experts, name).requires_grad for part in parts[name]}
        for name, parameter in self.moe.expert_weights.named_parameters():
            whole = "w1" if name == "w13" else "w1_bias" if name == "w13_bias" else name.rpartition(".")[2]
            if whole in frozen:
                parameter.requires_grad_(False)


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
        ConfigError: the model has no experts of transformers' interface, or a layer cannot compute what they do.
    """
    found = dict(_experts_of(model))
    if not found:
        if any(isinstance(module, ExpertParallelExperts) for module in model.modules()):
            raise ConfigError(f"the experts of {type(model).__name__} were replaced already; call expert_parallel once")
        raise ConfigError(
            f"{type(model).__name__} ({_type_of(model)}) has no experts of transformers' experts interface "
            f"(use_experts_implementation); {_KEEP}, or put a MoELayer into its blocks"
        )
    scheme = scheme_of(layer_options.get("quantization", PLAIN.name))
    if scheme.activations.calibrated:
        raise ConfigError(
            f"quantization={scheme.name} needs input scales, which a calibrated checkpoint of a known family holds and "
            f"{type(model).__name__} does not; choose fp8_dynamic, fp8_block or another that derives them"
        )
    configs = {name: config_of(experts, name, _top_k_of(model, experts, name)) for name, experts in found.items()}
    first = _shared(model, found)
    masks, replaced = TokenMasks(send_padding=True), dict[str, ExpertParallelExperts]()
    for name, experts in found.items():
        if first[name] != name:
            _put(model, experts, replaced[first[name]])
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        made = ExpertParallelExperts(
            experts,
            context,
            config=configs[name],
            name=name,
            masks=masks,
            table=any(not tensor.is_floating_point() for tensor in parent.buffers()),
            **layer_options,
        )
        if not made.moe.expert_weights.is_meta:
            for expert in made.local_experts:
                made.write_expert(expert, {each: getattr(experts, each).detach()[expert] for each in made.tensor_names})
        made.train(experts.training)
        _put(model, experts, made)
        replaced[name] = made
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


def _experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if is_experts(module):
            yield name, module


def _type_of(model: nn.Module) -> str:
    return f"model_type {getattr(getattr(model, 'config', None), 'model_type', None)!r}"


def config_of(experts: Any, name: str, top_k: int) -> MoEConfig:
    """What a module computes.

    Raises:
        ConfigError: no `MoELayer` computes it.
    """
    kind = type(experts).__name__
    matrices = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    known = {*matrices, *(f"{each}_bias" for each in matrices)} if experts.has_bias else set(matrices)
    tensors = dict(experts.named_parameters()) | dict(experts.named_buffers())
    if getattr(experts, "has_post_expert_norm", False):  # transformers before 5.18 has none
        raise ConfigError(f"{name}: {kind} normalises each expert's output, which MoELayer does not; {_KEEP}")
    if tensors.keys() != known:
        odd = ", ".join(sorted(tensors.keys() ^ known))
        raise ConfigError(f"{name}: {kind} must hold {', '.join(sorted(known))} alone, and differs in {odd}; {_KEEP}")
    for each in sorted(known):
        if tensors[each].dtype not in NUMBERS or tensors[each].dtype != tensors[matrices[0]].dtype:
            raise ConfigError(
                f"{name}.{each} must be bfloat16, float16, float32 or float64, as all tensors beside it, got "
                f"{dtype_name(tensors[each].dtype)}; give expert_parallel the model as it was before it was quantised"
            )
    first, second = (tensors[each] for each in matrices)
    rows, hidden = (first.shape[2], first.shape[1]) if experts.is_transposed else first.shape[1:]
    out, inner = (second.shape[2], second.shape[1]) if experts.is_transposed else second.shape[1:]
    if hidden != out or rows != inner * (2 if experts.has_gate else 1):
        raise ConfigError(
            f"{name}: {kind} must hold matrices of one hidden and one intermediate size, got {matrices[0]} "
            f"{list(first.shape)} and down_proj {list(second.shape)}; {_KEEP}"
        )
    activation, alpha, limit = find_activation(experts, name)
    return MoEConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_experts=len(first),
        top_k=min(top_k, len(first)),
        activation=activation,
        activation_alpha=alpha,
        activation_limit=limit,
        expert_bias=bool(experts.has_bias),
    )


def _top_k_of(model: Any, experts: nn.Module, name: str) -> int:
    """The most experts that a token may take: a larger number costs room alone, a smaller one is refused in the call.

    Looked for beside the experts, then further out, then in the configuration.
    """
    inside = {id(module) for module in experts.modules()}
    while name:
        name = name.rpartition(".")[0]
        beside = [module for module in model.get_submodule(name).modules() if id(module) not in inside]
        if found := numbers_of(beside):
            return max(found)
    config = getattr(model, "config", None)
    if config is not None and (found := numbers_of([config.get_text_config(), config])):
        return max(found)
    raise ConfigError(
        f"{type(model).__name__} does not say how many experts a token takes: none of {', '.join(TOP_K)} is in its "
        f"blocks or its configuration; set model.config.num_experts_per_tok"
    )


def numbers_of(holders: list[Any]) -> list[int]:
    found: list[int] = []
    for holder in holders:
        for name in TOP_K:
            value = getattr(holder, name, None)
            values = value if isinstance(value, list | tuple) else [value]
            found += [each for each in values if type(each) is int and each > 0]
    return found


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
                if first.get(other.rpartition(".")[0]) != first[name]:
                    raise ConfigError(
                        f"{full} is tied to {other}, and expert-parallel layers have their own weights each; {_KEEP}"
                    )
    return first


def routing_of(ids: Tensor, weights: Tensor, config: MoEConfig, *, distinct: bool) -> Routing:
    """What a model's router chose, as `MoELayer.forward_routed` takes it.

    Args:
        ids: [T, k] integers, k at most K; an id of at least E is no expert, as in transformers.
        weights: [T, k].
        config: of the layer.
        distinct: whether valid ids of a row are distinct. A table may name one expert twice, a top-k cannot.

    Returns:
        Ids and float32 weights [T, K].
    """
    missing = config.top_k - ids.shape[-1]
    ids, weights = ids.masked_fill(ids >= config.num_experts, -1), weights.float()
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
