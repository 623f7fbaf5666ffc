"""One expert's parameters by name, as optimizers, wrappers and checkpoints see them: w1 (gate), w3 (up) and w2 (down).

Kernels read all slots of a rank at once, w13 [L, 2I, H] and w2 [L, H, I]. Each parameter here is a view of its part of
one slot, so that an optimizer's step in place is what the kernels read next, and no byte is held twice. Names bear the
logical expert and not the slot: what belongs to an expert has one name on every rank, under every map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from ep_moe.config import MoEConfig
from ep_moe.errors import ConfigError, InputError

_HALVES = {"w13": ("w1", "w3"), "w13_bias": ("w1_bias", "w3_bias")}  # of stored tensors: rows of gate, rows of up

WRAP = (
    "{what} would shard expert parameters over ranks that hold different experts; call "
    "ep_moe.training.fully_shard(model, context) instead"
)


def parts_of(name: str, gated: bool) -> tuple[str, ...]:
    """Names of the parameters that make up a stored tensor, in the order of its rows."""
    names = _HALVES.get(name, (name,))
    return names if gated else names[:1]


def part_names(names: Iterator[str] | tuple[str, ...], gated: bool) -> list[str]:
    """Names of an expert's parameters, for those of its stored tensors."""
    return [part for name in names for part in parts_of(name, gated)]


def split_parts(name: str, tensor: Tensor, gated: bool) -> dict[str, Tensor]:
    """A stored tensor of one slot as views by parameter name."""
    names = parts_of(name, gated)
    return dict(zip(names, tensor.chunk(len(names)), strict=True))


_TAKEN = (
    "{name} of an expert cannot be taken away or put beside another, as FullyShardedDataParallel, pruning and "
    "parametrizations do: kernels read all experts as one tensor; shard with "
    "ep_moe.training.fully_shard(model, context), and write other numbers into the parameter"
)
_NAMES = frozenset(part for name in ("w13", "w2", "w13_bias", "w2_bias") for part in parts_of(name, gated=True))


class Changes:
    """How often a layer's experts got other parameters. Each call looks at one number instead of at all of them."""

    def __init__(self) -> None:
        self.count = 0


class _Guarded(dict[str, Any]):
    """What a module holds by name. Each way to write into a dict is `__setitem__` or `__delitem__` here."""

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
    """An expert's parameters, of which setattr, `torch.func.functional_call` and others put new ones here."""

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
    """The submodules of a rank's expert weights, of which those named by a number hold an expert's parameters."""

    def __setitem__(self, name: str, value: Any) -> None:
        if self.get(name) is not value:
            self._refuse(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._refuse(name)
        super().__delitem__(name)

    def hold(self, experts: dict[str, Expert]) -> None:
        """Take these for the experts, and no others."""
        for name in [name for name in self if name.isdigit()]:
            super().__delitem__(name)
        for name, expert in experts.items():
            super().__setitem__(name, expert)

    @staticmethod
    def _refuse(name: str) -> None:
        if name.isdigit():
            raise ConfigError(
                f"expert {name} cannot be replaced by another module, added or taken away: kernels read all experts as "
                f"one tensor; write its numbers with update_expert({name}, w13=..., w2=...) or load_state_dict, or "
                f"assign single parameters"
            )


class Expert(nn.Module):
    """The parameters of one logical expert on this rank. They are saved and loaded by `ExpertWeights`.

    replaced: parameters that were assigned, and are to lie where the former ones did
    """

    def __init__(self, changes: Changes) -> None:
        super().__init__()
        self.__dict__["_parameters"] = _Watched(changes)
        self.replaced: set[str] = set()
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
            self.replaced.add(name)
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        return

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        return


def _refuse_shared(name: str, before: nn.Parameter, value: nn.Parameter) -> None:
    """A parameter lies in one layer's memory: two that hold it would each copy it there in the other's backward."""
    own, other = (getattr(p, "differs_between_ranks", lambda: None)() for p in (before, value))
    if other is not None and other is not own and any(p is value for p in other.parameters()):
        raise ConfigError(
            f"{name} of an expert is a parameter of another layer's expert, and two layers of several ranks cannot "
            f"share one; call one MoELayer in both places, or assign nn.Parameter(other.detach().clone())"
        )


def etp_parameter(view: Tensor, name: str, mesh: DeviceMesh | None, requires_grad: bool) -> nn.Parameter:
    """A parameter on the memory of `view`, this etp rank's piece.

    mesh: of the etp group, None where there is one rank of it. Pieces are DTensors over it, so that whatever saves or
        measures them knows which rows or columns of the whole they are.
    """
    if mesh is None:
        return nn.Parameter(view, requires_grad=requires_grad)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dim = None if name == "w2_bias" else 1 if name == "w2" else 0
    placement = Replicate() if dim is None else Shard(dim)
    return nn.Parameter(DTensor.from_local(view, mesh, [placement], run_check=False), requires_grad=requires_grad)


def local(parameter: Tensor) -> Tensor:
    """This rank's own numbers of a parameter; differentiable."""
    found: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return found


def full(value: Any) -> Any:
    """The whole of a DTensor. Collective over its mesh. Anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class Joined(Function):
    """All slots' tensors as functions of the experts' parameters, whose memory they are: nothing is copied. One node
    for all tensors of a call, so that what backward exchanges has one order on all ranks.

    back: the stored tensors' gradients to those of the inputs, in order
    """

    @staticmethod
    def forward(
        ctx: Any, stored: tuple[Tensor, ...], back: Callable[..., list[Tensor]], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(tensor.view_as(tensor) for tensor in stored)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.back(list(gradients)))


def joined(
    stored: Mapping[str, Tensor], back: Callable[..., list[Tensor]], parameters: Iterable[Tensor]
) -> dict[str, Tensor]:
    """`Joined` of tensors by name."""
    # `Function.apply` looks at each of hundreds of parameters for what a transform of torch.func has left there
    plain = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()  # type: ignore[attr-defined]
    apply = Joined.apply if plain else super(Function, Joined).apply
    return dict(zip(stored, apply(tuple(stored.values()), back, *parameters), strict=True))


# --- shards over etp --------------------------------------------------------------------------------------------------
# An expert's tensors split over etp ranks, and joined again.


def etp_dim(name: str, dims: int) -> int | None:
    """Which dimension of an expert's tensor is split over etp; None: not at all."""
    if not name.startswith("w2"):
        return 0 if dims else None
    return 1 if dims > 1 else None  # columns; what w2 has once for a row, a bias or a scale, is every rank's


def etp_shard(config: MoEConfig, name: str, tensor: Tensor, etp: int, etp_rank: int) -> Tensor:
    """The etp rank's shard of a whole expert's tensor. Gate and up are split alike, so that a shard has both."""
    dim = etp_dim(name, tensor.dim())
    if etp == 1 or dim is None:
        return tensor
    halves = tensor.chunk(2, dim) if _has_halves(config, name) else (tensor,)
    return torch.cat([half.chunk(etp, dim)[etp_rank] for half in halves], dim)


def join(config: MoEConfig, name: str, pieces: list[Tensor]) -> Tensor:
    """The inverse of `etp_shard`: all etp ranks' pieces in order to the whole tensor. What is not split is etp rank
    0's: it alone uses w2_bias, and alone trains it."""
    dim = etp_dim(name, pieces[0].dim())
    if len(pieces) == 1 or dim is None:
        return pieces[0]
    if _has_halves(config, name):
        gates, ups = zip(*(piece.chunk(2, dim) for piece in pieces), strict=True)
        return torch.cat([*gates, *ups], dim)
    return torch.cat(pieces, dim)


def _has_halves(config: MoEConfig, name: str) -> bool:
    return name.startswith("w13") and config.activation.gated
