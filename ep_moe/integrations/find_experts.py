"""Finds the modules of a transformers model that hold experts, the layout of their parameters, and what they compute.

Modules on transformers' experts interface (`use_experts_implementation`) state their layout in attributes. Any other
module that is called with rows, ids and weights is probed: a small copy computes with random experts. Its results are
compared with each layout that the shapes of its parameters allow.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from ep_moe.checkpoint.formats import PLAIN_DTYPES
from ep_moe.checkpoint.model_names import ModuleLayout, ParameterLayout
from ep_moe.config import MoEConfig
from ep_moe.errors import ConfigError
from ep_moe.integrations.activation_probe import FoundActivation, find_activation, in_training_problem, is_experts
from ep_moe.integrations.experts_probe import differs_in_training, identify, identify_block
from ep_moe.types import dtype_name

_MOST = 8  # parameters that a module of experts, or a block with its router, may have; others are not probed
NORM = "post_expert_norm"  # a module's name in transformers' experts interface
TOP_K = ("top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
REMEDY = "leave the model as it is, or use transformers' own DistributedConfig(ep_size=...)"


class FoundExperts(NamedTuple):
    """A module of experts.

    sizes: H and I
    zero_experts: an id >= E returns the row itself; without it, such an id contributes nothing
    norm: the module applies its submodule `NORM` to the output of each expert
    block: the module is a whole block: it is called with rows alone, and its router sorts them by expert
    """

    layout: ModuleLayout
    sizes: tuple[int, int]
    activation: FoundActivation
    zero_experts: bool = False
    norm: bool = False
    block: bool = False

    def config(self, top_k: int) -> MoEConfig:
        """Return the configuration of a layer of these experts."""
        activation, alpha, limit = self.activation
        return MoEConfig(
            hidden_size=self.sizes[0],
            intermediate_size=self.sizes[1],
            num_experts=self.layout.experts,
            top_k=min(top_k, self.layout.experts),
            activation=activation,
            activation_alpha=alpha,
            activation_limit=limit,
            expert_bias=any(one.part == "w13_bias" for one in self.layout.tensors),
        )


def find_experts(model: nn.Module) -> dict[str, FoundExperts]:
    """Return the modules of experts of a model, by name, in the model's order.

    The model may be on the meta device. Experts outside the text model (`experts_apart`) are left out.

    Raises:
        ConfigError: No `MoELayer` computes what one of them does.
    """
    found, kinds, apart = {}, set(), _parts_apart(model)
    modules = [(name, module) for name, module in model.named_modules() if not name.startswith(apart)]
    for name, module in modules:
        if is_experts(module):
            found[name] = _on_interface(module, name)
        elif (other := _identify_by_probe(module)) is not None:
            found[name] = other
            check_dtypes(module, name, other.layout)
            if differs_in_training(module, other.layout, other.sizes, other.activation, block=other.block):
                raise ConfigError(in_training_problem(module, name, REMEDY))
            kinds.add(type(module))
    for name, module in modules:
        if type(module) in kinds and name not in found:
            raise ConfigError(
                f"{name}: {type(module).__name__} computes no Activation of ep_moe between its matrices, as others of "
                f"its class do; add its activation to ep_moe.types.Activation and ep_moe.experts.reference, or {REMEDY}"
            )
    return found


def experts_apart(model: nn.Module) -> list[str]:
    """Return the names of modules of experts outside the text model, such as those of a vision encoder.

    They stay whole on every rank. A rank calls them only for an image or a sound, when its peers may have none and
    would not join the collective call.
    """
    parts = _parts_apart(model)
    return [
        name
        for name, module in model.named_modules()
        if name.startswith(parts) and (is_experts(module) or _identify_by_probe(module) is not None)
    ]


def _parts_apart(model: nn.Module) -> tuple[str, ...]:
    """Return the name prefixes of the submodels that are not the text model."""
    config = getattr(model, "config", None)
    if config is None:
        return ()
    texts = (type(config), type(config.get_text_config()))
    parts = [(name, one) for name, one in model.named_modules() if isinstance(one, PreTrainedModel) and name]
    return tuple(f"{name}." for name, part in parts if type(part.config) not in texts)


def _on_interface(experts: Any, name: str) -> FoundExperts:
    kind = type(experts).__name__
    if not getattr(type(experts).forward, "__globals__", {}).get("__name__", "").startswith("transformers."):
        raise ConfigError(
            f"{name}: {kind} has a forward of its own in place of that of transformers' experts interface, which a "
            f"layer would leave out; {REMEDY}"
        )
    layout = interface_layout(experts)
    tensors = dict(experts.named_parameters()) | dict(experts.named_buffers())
    norm = bool(getattr(experts, f"has_{NORM}", False))  # transformers before 5.18 has none
    held = {each for each in tensors if not (norm and each.startswith(f"{NORM}."))}
    if held != set(layout.names):
        odd = ", ".join(sorted(held ^ set(layout.names)))
        raise ConfigError(
            f"{name}: {kind} must hold {', '.join(sorted(layout.names))} alone, and differs in {odd}; {REMEDY}"
        )
    if norm and not isinstance(getattr(experts, NORM, None), nn.Module):
        raise ConfigError(f"{name}: {kind} must have a module {NORM}, as it normalizes each output, got none; {REMEDY}")
    check_dtypes(experts, name, layout)
    first, second = (tensors[each] for each in layout.names[:2])
    rows, hidden = (first.shape[2], first.shape[1]) if experts.is_transposed else first.shape[1:]
    out, inner = (second.shape[2], second.shape[1]) if experts.is_transposed else second.shape[1:]
    if hidden != out or rows != inner * (2 if experts.has_gate else 1):
        raise ConfigError(
            f"{name}: {kind} must hold matrices of one hidden and one intermediate size, got {layout.names[0]} "
            f"{list(first.shape)} and down_proj {list(second.shape)}; {REMEDY}"
        )
    activation = find_activation(experts, name)
    return FoundExperts(layout, (hidden, inner), activation, norm=norm)


def config_of(experts: Any, name: str, top_k: int) -> MoEConfig:
    """Return the configuration of a layer that replaces a module on transformers' experts interface.

    The model routes its tokens itself, so the routing fields have no meaning.

    Raises:
        ConfigError: No `MoELayer` computes what the module does.
    """
    found = _on_interface(experts, name)
    if found.norm:
        raise ConfigError(
            f"{name}: {type(experts).__name__} normalizes each expert's output, which one call of MoELayer does not; "
            f"replace it by expert_parallel, or {REMEDY}"
        )
    return found.config(top_k)


def interface_layout(experts: Any) -> ModuleLayout:
    """Return the layout of a module on transformers' experts interface, as its flags state it."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    transposed, interleaved = bool(experts.is_transposed), bool(experts.has_gate and not experts.is_concatenated)
    tensors = [
        ParameterLayout(name=first, part="w13", transposed=transposed, interleaved=interleaved),
        ParameterLayout(name="down_proj", part="w2", transposed=transposed),
    ]
    if experts.has_bias:
        tensors += [
            ParameterLayout(name=f"{first}_bias", part="w13_bias", interleaved=interleaved),
            ParameterLayout(name="down_proj_bias", part="w2_bias"),
        ]
    return ModuleLayout(len(experts.down_proj), tuple(tensors), gated=bool(experts.has_gate))


def held_tensor(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer by its dotted name in a module."""
    found: Tensor = attrgetter(name)(module)
    return found


def check_dtypes(experts: nn.Module, name: str, layout: ModuleLayout) -> None:
    """Raise ConfigError unless the parameters have one dtype, and it is a plain floating-point one."""
    tensors = {each: held_tensor(experts, each) for each in layout.names}
    first = tensors[layout.names[0]].dtype
    for each in sorted(tensors):
        if tensors[each].dtype not in PLAIN_DTYPES or tensors[each].dtype != first:
            raise ConfigError(
                f"{name}.{each} must be bfloat16, float16, float32 or float64, as all tensors beside it, got "
                f"{dtype_name(tensors[each].dtype)}; give expert_parallel the model as it was before it was quantized"
            )


def _identify_by_probe(module: nn.Module) -> FoundExperts | None:
    """Identify a module of experts, or a block with its router, by a probe; None if it is neither."""
    tensors = dict(module.named_parameters())
    if len(tensors) > _MOST or any(True for _ in module.buffers()):
        return None
    if len(tensors) in (2, 3) and _inputs(module) == 3:
        for layout, hidden, inner in _candidates(module, tensors):
            if (found := identify(module, layout, hidden, inner)) is not None:
                return FoundExperts(layout, (hidden, inner), *found)
    if "router" in module._modules and _inputs(module) == 1:
        stacked = {name: tensor for name, tensor in tensors.items() if tensor.dim() == 3}
        if len(stacked) == 2 and all(name == "bias" or name.startswith("router.") for name in tensors.keys() - stacked):
            for layout, hidden, inner in _fused(stacked):
                if (activation := identify_block(module, layout, hidden, inner)) is not None:
                    return FoundExperts(layout, (hidden, inner), activation, block=True)
    return None


def _inputs(module: nn.Module) -> int:
    """Return the number of arguments that a call of the module must pass."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return sum(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)


def _candidates(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[ModuleLayout, int, int]]:
    """Yield the layouts that the shapes of the parameters allow, each with H and I."""
    dims = {tensor.dim() for tensor in tensors.values()}
    if dims == {3} and len(tensors) == 2:
        yield from _fused(tensors)
    elif dims == {2} and len(tensors) == 3:
        yield from _flat(module, tensors)


def _fused(tensors: Mapping[str, Tensor]) -> Iterator[tuple[ModuleLayout, int, int]]:
    """Yield layouts of two parameters [E, rows, columns]: gate and up (or up alone), then down.

    The first parameter may have more entries than there are experts.
    """
    (first, both), (second, down) = tensors.items()
    experts, unused = len(down), len(both) - len(down)
    for transposed in (False, True):
        rows, hidden = both.shape[:0:-1] if transposed else both.shape[1:]
        out, inner = down.shape[:0:-1] if transposed else down.shape[1:]
        if out != hidden or rows not in (inner, 2 * inner) or unused < 0:
            continue
        for interleaved in (False, True) if rows == 2 * inner else (False,):
            gate_up = ParameterLayout(
                name=first, part="w13", transposed=transposed, interleaved=interleaved, unused=max(unused, 0)
            )
            tensors_of = (gate_up, ParameterLayout(name=second, part="w2", transposed=transposed))
            yield ModuleLayout(experts, tensors_of, gated=rows == 2 * inner), hidden, inner


def _flat(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[ModuleLayout, int, int]]:
    """Yield layouts of three parameters [E * I, H]: gate, up and down, in each plausible order."""
    shapes = {tuple(tensor.shape) for tensor in tensors.values()}
    if len(shapes) != 1:
        return
    ((rows, hidden),) = shapes
    stated = {
        value
        for one in module.modules()
        for attribute, value in vars(one).items()
        if "experts" in attribute and type(value) is int
    }
    for experts in sorted(one for one in stated if one > 0 and rows % one == 0):
        one, two, three = tensors
        for gate, up, down in ((one, two, three), (one, three, two), (two, one, three)):
            parts = {gate: ("w1", False), up: ("w3", False), down: ("w2", True)}
            layouts = (ParameterLayout(name=n, part=p, transposed=t, flat=True) for n, (p, t) in parts.items())
            yield ModuleLayout(experts, tuple(layouts)), hidden, rows // experts


def top_k_of(model: Any, experts: nn.Module, name: str) -> int:
    """Return K, the most experts that a token may take.

    A value that is too large only costs memory. One that is too small makes a later call raise. The search goes from
    inside the module of experts outward, and ends at the model's configuration. Raises ConfigError if none states it.
    """
    if found := numbers_of(list(experts.modules())):  # a block with its router
        return max(found)
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
    """Return all values of the attributes `TOP_K` that modules or configurations have."""
    found: list[int] = []
    for holder in holders:
        for name in TOP_K:
            value = getattr(holder, name, None)
            values = value if isinstance(value, list | tuple) else [value]
            found += [each for each in values if type(each) is int and each > 0]
    return found
