"""Canonical expert weights of one rank: parameters per slot, a state dict per logical expert.

    w13 [L, 2I / etp, H]  gate rows first, then up rows (as Hugging Face and vLLM); [L, I / etp, H] without a gate
    w2  [L, H, I / etp]
    w13_bias [L, 2I / etp], w2_bias [L, H] where the layer has them; w2_bias is added by etp rank 0 alone

An expert's tensors outside this class are whole: w13 [2I, H], w2 [H, I], w13_bias [2I], w2_bias [H].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_moe.config import MoEConfig
from ep_moe.errors import ConfigError, InputError
from ep_moe.parallel.link import Link
from ep_moe.placement.expert_map import EMPTY, ExpertMap

# which dimension of an expert's tensor is cut over etp; None: not at all
CUT_DIM: dict[str, int | None] = {"w13": 0, "w2": 1, "w13_bias": 0, "w2_bias": None}


def expert_shapes(config: MoEConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one whole expert's tensors, by canonical name."""
    rows, inner, hidden = config.w13_rows, config.intermediate_size, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"w13": (rows, hidden), "w2": (hidden, inner)}
    if config.expert_bias:
        shapes |= {"w13_bias": (rows,), "w2_bias": (hidden,)}
    return shapes


def cut(config: MoEConfig, name: str, tensor: Tensor, etp: int, etp_rank: int) -> Tensor:
    """The etp rank's piece of a whole expert's tensor; gate and up are cut alike, so that a piece has both."""
    dim = CUT_DIM[name]
    if etp == 1 or dim is None:
        return tensor
    halves = tensor.chunk(2, dim) if name.startswith("w13") and config.activation.gated else (tensor,)
    return torch.cat([half.chunk(etp, dim)[etp_rank] for half in halves], dim)


def join(config: MoEConfig, name: str, pieces: list[Tensor]) -> Tensor:
    """The inverse of `cut`: all etp ranks' pieces in order to the whole tensor. What is not cut is etp rank 0's: it
    alone uses w2_bias, and alone trains it."""
    dim = CUT_DIM[name]
    if len(pieces) == 1 or dim is None:
        return pieces[0]
    if name.startswith("w13") and config.activation.gated:
        gates, ups = zip(*(piece.chunk(2, dim) for piece in pieces), strict=True)
        return torch.cat([*gates, *ups], dim)
    return torch.cat(pieces, dim)


class ExpertWeights(nn.Module):
    """The parameters of this rank's slots.

    `state_dict` has the keys `{logical id}.w13` and so on, whole tensors, each expert on the rank that owns its first
    replica: the union over ranks is a checkpoint that depends on no placement. With etp > 1 it is collective over the
    etp group. `load_state_dict` takes any dict that has (at least) this rank's experts.
    """

    w13: nn.Parameter
    w2: nn.Parameter
    w13_bias: nn.Parameter | None
    w2_bias: nn.Parameter | None

    def __init__(
        self,
        config: MoEConfig,
        expert_map: ExpertMap,
        *,
        ep_rank: int = 0,
        etp: Link | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.expert_map = expert_map
        self.ep_rank = ep_rank
        self.etp = etp or Link.alone()
        if config.intermediate_size % self.etp.size:
            raise ConfigError(
                f"ParallelConfig.etp must divide MoEConfig.intermediate_size, got etp={self.etp.size}, "
                f"intermediate_size={config.intermediate_size}"
            )
        self.num_slots = expert_map.num_slots(ep_rank)
        self.names = tuple(expert_shapes(config))
        for name in CUT_DIM:
            shape = self.shapes().get(name)
            parameter = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of this rank's parameters."""
        shapes = {}
        for name, whole in expert_shapes(self.config).items():
            dim = CUT_DIM[name]
            piece = tuple(size // self.etp.size if axis == dim else size for axis, size in enumerate(whole))
            shapes[name] = (self.num_slots, *piece)
        return shapes

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The logical expert in each slot, -1 for an empty one."""
        return self.expert_map.local(self.ep_rank)[: self.num_slots]

    @property
    def adds_output_bias(self) -> bool:
        """Outputs are summed over etp: one rank of it adds w2_bias."""
        return self.etp.rank == 0

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan in), as `nn.Linear`; biases zero. Replicas differ until weights are loaded."""
        for name, fan_in in (("w13", self.config.hidden_size), ("w2", self.config.intermediate_size)):
            bound = 1 / math.sqrt(fan_in)
            self.get_parameter(name).uniform_(-bound, bound)
        for bias in (self.w13_bias, self.w2_bias):
            if bias is not None:
                bias.zero_()

    @torch.no_grad()
    def update_expert(self, logical_id: int, tensors: Mapping[str, Tensor]) -> int:
        """Write an expert's whole tensors (some or all of them) into every slot that holds it here.

        Local: call it on all ranks with the same tensors. Returns the number of slots written on this rank.
        """
        if not 0 <= logical_id < self.config.num_experts:
            raise InputError(f"logical_id must be in [0, {self.config.num_experts}), got {logical_id}")
        shapes = expert_shapes(self.config)
        for name, tensor in tensors.items():
            if name not in shapes:
                raise InputError(f"expert {logical_id} has no tensor {name!r}; it has {', '.join(shapes)}")
            if tuple(tensor.shape) != shapes[name]:
                raise InputError(f"expert {logical_id}: {name} must be {list(shapes[name])}, got {list(tensor.shape)}")
        slots = [slot for slot, expert in enumerate(self.local_experts) if expert == logical_id]
        for slot in slots:
            for name, tensor in tensors.items():
                self.get_parameter(name)[slot].copy_(cut(self.config, name, tensor, self.etp.size, self.etp.rank))
        return len(slots)

    @torch.no_grad()
    def whole(self, name: str, slot: int) -> Tensor:
        """A slot's whole tensor. Collective over the etp group."""
        piece = self.get_parameter(name).detach()[slot]
        if self.etp.size == 1:
            return piece
        pieces = [torch.empty_like(piece) for _ in range(self.etp.size)]
        with self.etp.ledger.step("gather an expert over etp"):
            dist.all_gather(pieces, piece.contiguous(), group=self.etp.group)
        return join(self.config, name, pieces)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        first_slot = self.ep_rank * self.expert_map.cap
        for expert, physical in sorted(
            (expert, first_slot + slot) for slot, expert in enumerate(self.local_experts) if expert != EMPTY
        ):
            if self.expert_map.logical_to_physical[expert][0] == physical:
                for name in self.names:
                    destination[f"{prefix}{expert}.{name}"] = self.whole(name, physical - first_slot)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self.w13.is_meta:
            error_msgs.append(
                f"{prefix.rstrip('.')} is on the meta device; call to_empty(device=...) before load_state_dict"
            )
            return
        known = {f"{prefix}{e}.{name}" for e in range(self.config.num_experts) for name in self.names}
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]
        for expert in sorted(set(self.local_experts) - {EMPTY}):
            keys = {name: f"{prefix}{expert}.{name}" for name in self.names}
            missing_keys += [key for key in keys.values() if key not in state_dict]
            tensors = {name: state_dict[key] for name, key in keys.items() if key in state_dict}
            try:
                self.update_expert(expert, tensors)
            except InputError as error:
                error_msgs.append(str(error))

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes().items())
        return f"{shapes}, experts {list(self.local_experts)}"
