"""One expert's parameters by name, as optimizers, wrappers and checkpoints see them: w1 (gate), w3 (up) and w2 (down).

Kernels read all slots of a rank at once, w13 [L, 2I, H] and w2 [L, H, I]. Each parameter is a view of its part of one
slot. An optimizer's in-place step therefore updates the tensors that kernels read, without a second copy. Names contain
the logical expert and not the slot, so that a parameter has the same name on every rank and under every map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from ep_moe.config import MoEConfig
from ep_moe.errors import ConfigError, InputError
from ep_moe.runtime.first_order import first_order_only

_HALVES = {"w13": ("w1", "w3"), "w13_bias": ("w1_bias", "w3_bias")}  # stored tensor -> (gate rows, up rows)

WRAP = (
    "{what} would shard expert parameters over ranks that hold different experts; call "
    "ep_moe.training.fully_shard(model, context) instead"
)


def parts_of(name: str, gated: bool) -> tuple[str, ...]:
    """Return the names of the parameters that make up a stored tensor, in the order of its rows."""
    names = _HALVES.get(name, (name,))
    return names if gated else names[:1]


def part_names(names: Iterator[str] | tuple[str, ...], gated: bool) -> list[str]:
    """Return the names of an expert's parameters, given the names of its stored tensors."""
    return [part for name in names for part in parts_of(name, gated)]


def split_parts(name: str, tensor: Tensor, gated: bool) -> dict[str, Tensor]:
    """Split a stored tensor of one slot into views by parameter name."""
    names = parts_of(name, gated)
    return dict(zip(names, tensor.chunk(len(names)), strict=True))


_TAKEN = (
    "{name} of an expert cannot be removed or reparametrized, as FullyShardedDataParallel, pruning and "
    "parametrizations do: kernels read all experts as one tensor; shard with ep_moe.training.fully_shard(model, "
    "context), and write new values into the parameter"
)
_NAMES = frozenset(part for name in ("w13", "w2", "w13_bias", "w2_bias") for part in parts_of(name, gated=True))


class Changes:
    """Counts replacements of expert parameters in a layer. Each call compares one number instead of all parameters."""

    def __init__(self) -> None:
        self.count = 0


class _Guarded(dict[str, Any]):
    """A dict whose write methods all go through `__setitem__` and `__delitem__`, which subclasses override."""

    def update(self, *given: Any, **named: Any) -> None:
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __ior__(self, given: Any) -> Self:  # type: ignore[override,misc]
        self.update(given)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self and default:
            return default[0]
        found = self[name]
        del self[name]
        return found

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self))
        return name, self.pop(name)

    def clear(self) -> None:
        for name in list(self):
            del self[name]


class _Watched(_Guarded):
    """The `_parameters` of an expert's module. Counts all writes, by assignment or `torch.func.functional_call`."""

    def __init__(self, changes: Changes) -> None:
        super().__init__()
        self._changes = changes

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in _NAMES or value is None:
            raise ConfigError(_TAKEN.format(name=name))
        self._changes.count += 1
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        raise ConfigError(_TAKEN.format(name=name))


class ExpertModules(_Guarded):
    """The submodules of a rank's expert weights. Those with a numeric name are experts, and cannot be replaced."""

    def __setitem__(self, name: str, value: Any) -> None:
        if self.get(name) is not value:
            self._refuse(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._refuse(name)
        super().__delitem__(name)

    def hold(self, experts: dict[str, Expert]) -> None:
        """Replace the modules of all experts."""
        for name in [name for name in self if name.isdigit()]:
            super().__delitem__(name)
        for name, expert in experts.items():
            super().__setitem__(name, expert)

    @staticmethod
    def _refuse(name: str) -> None:
        if name.isdigit():
            raise ConfigError(
                f"expert {name} cannot be replaced by another module, added or removed: kernels read all experts as "
                f"one tensor; write its values with update_expert({name}, w13=..., w2=...) or load_state_dict, or "
                "assign single parameters"
            )


class Expert(nn.Module):
    """The parameters of one logical expert on this rank. `ExpertWeights` saves and loads them.

    replaced: assigned parameters by name, whose values must still be copied to the memory of the former ones
    """

    def __init__(self, changes: Changes) -> None:
        super().__init__()
        self.__dict__["_parameters"] = _Watched(changes)
        self.replaced: dict[str, nn.Parameter] = {}
        self.sharded = False  # by `ep_moe.training.fully_shard`, over ranks that hold this same expert

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_parameters":
            raise ConfigError(_TAKEN.format(name=" and ".join(self._parameters)))
        # FSDP2 replaces each parameter that it shards by a DTensor
        before = self.__dict__.get("_parameters", {}).get(name)
        sharded = isinstance(value, nn.Parameter) and hasattr(value, "placements")
        if sharded and before is not None and not hasattr(before, "placements") and not self.sharded:
            raise ConfigError(WRAP.format(what="fully_shard"))
        if isinstance(value, nn.Parameter) and before is not None and before is not value and not self.sharded:
            if value.shape != before.shape or hasattr(value, "placements") != hasattr(before, "placements"):
                raise InputError(
                    f"{name} of an expert must be replaced by a parameter of its shape {list(before.shape)} and kind "
                    f"({type(before.data).__name__}), got {list(value.shape)} ({type(value.data).__name__})"
                )
            _refuse_shared(name, before, value)
            self.replaced[name] = value
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        return

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        return


def _refuse_shared(name: str, before: nn.Parameter, value: nn.Parameter) -> None:
    """Raise ConfigError if an assigned parameter belongs to another layer's expert.

    A parameter can be a view of one layer's memory only. Two layers that shared it would each move it to their own
    memory, even between the other's forward and backward.
    """
    own, other = (getattr(p, "differs_between_ranks", lambda: None)() for p in (before, value))
    if other is not None and other is not own and any(p is value for p in other.parameters()):
        raise ConfigError(
            f"{name} of an expert is a parameter of another layer's expert, and two layers of several ranks cannot "
            f"share one; call one MoELayer in both places, or assign nn.Parameter(other.detach().clone())"
        )


def etp_parameter(view: Tensor, name: str, mesh: DeviceMesh | None, requires_grad: bool) -> nn.Parameter:
    """Return a parameter that is a view of `view`, this etp rank's shard.

    mesh: the mesh of the etp group, None if it has one rank. With a mesh, the parameter is a DTensor, which tells
        checkpoints and gradient norms which rows or columns of the whole tensor it holds.
    """
    if mesh is None:
        return nn.Parameter(view, requires_grad=requires_grad)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dim = None if name == "w2_bias" else 1 if name == "w2" else 0
    placement = Replicate() if dim is None else Shard(dim)
    return nn.Parameter(DTensor.from_local(view, mesh, [placement], run_check=False), requires_grad=requires_grad)


def local(parameter: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or the tensor itself. Differentiable."""
    found: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return found


def full(value: Any) -> Any:
    """Return the full tensor of a DTensor, collective over its mesh, or any other value unchanged."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class Joined(Function):
    """Connect the stored tensors of all slots to the experts' parameters in the autograd graph, without a copy.

    The parameters are views of the stored tensors. A call has one node for all tensors, so that all ranks run the
    collectives of backward in the same order.

    back: maps the gradients of the stored tensors to those of the parameters, in order
    """

    @staticmethod
    def forward(
        ctx: Any, stored: tuple[Tensor, ...], back: Callable[..., list[Tensor]], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(tensor.view_as(tensor) for tensor in stored)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.back(list(gradients)))


def connect_in_autograd(
    stored: Mapping[str, Tensor], back: Callable[..., list[Tensor]], parameters: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Apply `Joined` to stored tensors, and return its outputs by name."""
    # `Function.apply` checks each of hundreds of parameters for torch.func transforms: bypass it if none is active
    plain = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()  # type: ignore[attr-defined]
    apply = Joined.apply if plain else super(Function, Joined).apply
    return dict(zip(stored, apply(tuple(stored.values()), back, *parameters), strict=True))


# --- shards over etp --------------------------------------------------------------------------------------------------


def etp_dim(name: str, dims: int) -> int | None:
    """Return the dimension of an expert's tensor that is split over etp, or None if all etp ranks hold the whole."""
    if not name.startswith("w2"):
        return 0 if dims else None
    return 1 if dims > 1 else None  # columns; biases and scales with one entry per row of w2 are whole on every rank


def etp_shard(config: MoEConfig, name: str, tensor: Tensor, etp: int, etp_rank: int) -> Tensor:
    """Return an etp rank's shard of a whole expert's tensor. Gate and up are each split, so that a shard has both."""
    dim = etp_dim(name, tensor.dim())
    if etp == 1 or dim is None:
        return tensor
    halves = tensor.chunk(2, dim) if _has_halves(config, name) else (tensor,)
    return torch.cat([half.chunk(etp, dim)[etp_rank] for half in halves], dim)


def join_etp_shards(config: MoEConfig, name: str, pieces: list[Tensor]) -> Tensor:
    """Join all etp ranks' shards, in order, to the whole tensor: the inverse of `etp_shard`.

    A tensor that is not split is taken from etp rank 0, the only rank that adds w2_bias to its output.
    """
    dim = etp_dim(name, pieces[0].dim())
    if len(pieces) == 1 or dim is None:
        return pieces[0]
    if _has_halves(config, name):
        gates, ups = zip(*(piece.chunk(2, dim) for piece in pieces), strict=True)
        return torch.cat([*gates, *ups], dim)
    return torch.cat(pieces, dim)


def _has_halves(config: MoEConfig, name: str) -> bool:
    return name.startswith("w13") and config.activation.gated
