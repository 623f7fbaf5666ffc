"""This project's expert kernels for Hopper: one expert step (`step`) with several scalings (`scaling`).

The kernels read weights in the checkpoint's layout, rows where the transport received them, and ids as they traveled.
Nothing is tuned at run time.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ep_moe.experts.base import Experts, ExpertsCapabilities
from ep_moe.experts.differentiable import (
    Allocator,
    RowGradients,
    StepGradients,
    WeightProduct,
    graph_is_kept,
    new_tensors,
)
from ep_moe.experts.hopper import step
from ep_moe.experts.hopper.gemm_grouped import LINE
from ep_moe.experts.hopper.scaling_fp8 import BLOCK
from ep_moe.experts.hopper.step import SCALINGS
from ep_moe.experts.layouts import expected_pairs, row_bounds
from ep_moe.quant.schemes import PLAIN
from ep_moe.runtime import nvrtc
from ep_moe.runtime.launch_cache import KeptLaunches, Launch, RecordedLaunches, launch_directly
from ep_moe.types import Activation, PeerRows, Received, RowLayout, Weighting
from ep_moe.weights.main_grads import GradientOut

if TYPE_CHECKING:
    from ep_moe.experts.hopper.gradients import TrainedStep
    from ep_moe.experts.hopper.training_bytes import StepShape

# supported by the kernels, whose last branch would run for any other activation
ACTIVATIONS = frozenset({Activation.SWIGLU, Activation.GEGLU, Activation.SWIGLU_CLAMPED, Activation.RELU2})
_MAX_RECORDED_CALLS = 32  # of a layer


class HopperExperts(Experts):
    """The expert step of a scheme. Its last kernel sums each row's experts, into a tensor or into the peers' memory.

    The launches of a call depend only on the addresses and the number of its rows. Transports with fixed buffers
    deliver rows at the same addresses. So the second call at the same addresses is recorded, and later calls repeat its
    launches.
    """

    needs_nvrtc: ClassVar[bool] = True  # it has kernels in CUDA C++, which NVRTC compiles

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._recorded: dict[Any, RecordedLaunches | None] = {}  # None: one call seen, not recorded yet

    @property
    @abstractmethod
    def scaling(self) -> str:
        """The name of its scaling in `step.SCALINGS`."""

    @classmethod
    def available(cls) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed; use a CUDA build of torch"
        return nvrtc.missing() if cls.needs_nvrtc else None

    @property
    def routes(self) -> int:
        """The most routes of one pass."""
        return self.options.chunk_rows * self.config.top_k

    def workspace_bytes(self) -> int:
        return self._scratch_bytes(self.scaling)

    def _scratch_bytes(self, scaling: str) -> int:
        weights, config = self.weights, self.config
        if not weights.num_slots:
            return 0
        inner = config.intermediate_size // weights.etp.size
        gated, dtype = config.activation.gated, weights.dtype
        return step.scratch_bytes(
            scaling, self.routes, config.hidden_size, inner, weights.num_slots, gated=gated, dtype=dtype
        )

    def compute(self, received: Received, out: Tensor | None) -> Tensor:
        if out is None:
            shape = (*received.x.shape[:-1], self.config.hidden_size)
            if received.per_route:
                shape = (len(received.x) * self.config.top_k, self.config.hidden_size)
            out = received.x.new_empty(shape, dtype=self.weights.dtype)
        if received.x.numel() == 0 or self.weights.num_slots == 0:
            return out.zero_()
        self._step(received, out, None)
        return out

    def compute_to_peers(self, received: Received, out: PeerRows) -> None:
        if received.x.numel() and self.weights.num_slots:
            self._step(received, out.blocks[out.rank], out)
        else:
            out.write_nothing()

    def _step(self, received: Received, out: Tensor, peers: PeerRows | None) -> None:
        # rows that arrive grouped by expert also need torch operations, which cannot be recorded
        if torch.compiler.is_compiling() or received.layout is not RowLayout.RANK_MAJOR:
            self._launch(received, out, peers, launch_directly)
            return
        key = self._launch_key(received, out, peers)
        recorded = self._recorded.get(key)
        if recorded is not None:
            recorded.replay()
        elif key in self._recorded:
            recorded = RecordedLaunches()
            self._launch(received, out, peers, recorded)
            self._recorded[key] = recorded
        else:
            if len(self._recorded) == _MAX_RECORDED_CALLS:
                self._recorded.clear()
            self._launch(received, out, peers, launch_directly)
            self._recorded[key] = None

    def _launch_key(self, received: Received, out: Tensor, peers: PeerRows | None) -> tuple[Any, ...]:
        """Return everything on which the launches of `_launch` depend."""
        wire, weights, scale = received.wire_ids, received.weights, received.x_scale
        ids = received.local_ids if wire is None else wire.ids
        assert ids is not None
        return (
            received.x.data_ptr(),
            received.x.shape,
            0 if scale is None else scale.data_ptr(),
            received.format,
            received.input_scale,
            ids.data_ptr(),
            ids.shape,
            ids.dtype,
            0 if wire is None else wire.base,
            0 if wire is None or wire.ids_ready is None else wire.ids_ready.data_ptr(),
            0 if wire is None or wire.sequence is None else wire.sequence.data_ptr(),
            0 if weights is None else weights.data_ptr(),
            received.weighting,
            received.per_route,
            out.data_ptr(),
            self.workspace().data_ptr(),
            None if peers is None else peers.place,
            self.weights.addresses,
        )

    def _launch(self, received: Received, out: Tensor, peers: PeerRows | None, launch: Launch) -> None:
        """Compute into out, or into `peers`, of which out is then a block. For RANK_MAJOR rows this only launches."""
        self._launch_scaled(self.scaling, received, out, peers, launch)

    def _launch_scaled(
        self, scaling: str, received: Received, out: Tensor, peers: PeerRows | None, launch: Launch
    ) -> None:
        x, weights, config, wire = received.x, self.weights, self.config, received.wire_ids
        ids = received.local_ids if wire is None else wire.ids
        scale, input_scale = received.x_scale, received.input_scale
        step.hopper_moe(
            out.view(-1, config.hidden_size),
            self.workspace(),
            scaling,
            x.view(-1, config.hidden_size),
            None if scale is None else scale.view(-1, scale.shape[-1]),
            None if input_scale is None else float(input_scale),
            weights.dtype,
            ids,
            0 if wire is None else wire.base,
            *step.ids_ready_of(wire),
            self._routing_weights(received),
            *row_bounds(received, weights.num_slots),
            weights.get_parameter("w13"),
            weights.get_parameter("w2"),
            [weights.get_parameter(name) for name in SCALINGS[scaling].names],
            self._biases(),
            config.activation.value,
            config.activation_alpha,
            config.activation_limit,
            expected_pairs(config, weights.num_slots, 1 if ids is None else ids.shape[1], everyone=wire is not None),
            self.routes,
            self.options.spare_sms,
            self.options.exact,
            received.per_route,
            *step.peer_arguments(peers),
            launch=launch,
        )

    def _biases(self) -> list[Tensor]:
        """Return the biases of both products, or only the first if another etp rank adds the second."""
        if not self.config.expert_bias:
            return []
        names = ("w13_bias", "w2_bias") if self.weights.adds_output_bias else ("w13_bias",)
        return [self.weights.get_parameter(name) for name in names]

    def _routing_weights(self, received: Received) -> Tensor | None:
        if received.weighting is Weighting.COMBINE:
            return None
        assert received.weights is not None
        return received.weights if received.layout is RowLayout.RANK_MAJOR else received.weights.flatten()


HOPPER = ExpertsCapabilities(
    layouts=frozenset({RowLayout.RANK_MAJOR}),
    weightings=frozenset(Weighting),
    activations=ACTIVATIONS,
    dtypes=frozenset({torch.bfloat16}),
    schemes=frozenset({PLAIN.name}),
    biases=False,
    etp=True,
    alignment_bytes=2 * BLOCK,  # hidden and intermediate sizes are multiples of 128
    cuda_graph=True,
    host_sync=False,
    deterministic=True,
    differentiable=False,
    min_compute_capability=(9, 0),
    max_compute_capability=(9, 0),
    devices=frozenset({"cuda"}),
    wire_ids=True,
    spare_sms=True,
    peer_out=True,
    per_route=True,
)


class Bf16TritonExperts(HopperExperts):
    """Unquantized experts in bf16, with a backward (`gradients`)."""

    name = "bf16_triton"
    tested_machines = "1, 2 and 4 H200, 1, 2 and 4 H100"
    own_backward = True
    writes_gradients = True
    trains_to_peers = True
    capabilities = dataclasses.replace(
        HOPPER,
        differentiable=True,
        exact=True,
        float8=True,
        biases=True,
        alignment_bytes=LINE,  # sizes are multiples of 64, as in GPT-OSS
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._launch_trained = KeptLaunches()

    @cached_property
    def scaling(self) -> str:
        return "trained" if self.options.exact else "none"

    def compute_saving(
        self, received: Received, allocate: Allocator | None = None, peer_out: PeerRows | None = None
    ) -> tuple[Tensor | PeerRows, tuple[Tensor, ...]]:
        assert received.local_ids is not None
        stored = {name: tensor.detach() for name, tensor in self.weights.stored_tensors().items()}
        recompute, weights = self.options.recompute, self._routing_weights(received)
        y, routes, h = self._trained(stored).forward(
            received.x, weights, received.local_ids, allocate, peer_out, keeps=not recompute
        )
        kept = h.new_empty(len(h), 0) if recompute else h  # keeps the number of rows without their values
        return y, (kept, routes.slots, routes.ends, routes.source)

    def records_training(self, rows: int) -> bool:
        return not self.options.exact and self.weights.num_slots > 0 and self._step_shape(rows).uncounted

    def _trained(self, stored: Mapping[str, Tensor]) -> TrainedStep:
        from ep_moe.experts.hopper import gradients

        adds = self.weights.adds_output_bias
        return gradients.TrainedStep(
            self.config, stored["w13"], stored["w2"], stored.get("w13_bias"), stored.get("w2_bias") if adds else None,
            self.options.spare_sms, self.options.float8, self._launch_trained,
        )  # fmt: skip

    def saved_bytes(self, rows: int) -> int:
        from ep_moe.experts.hopper import training_bytes

        return training_bytes.saved_bytes(self._step_shape(rows), recompute=self.options.recompute)

    def temporary_bytes(self, rows: int, *, recorded: bool) -> int:
        from ep_moe.experts.hopper import training_bytes

        recompute, float8 = self.options.recompute, self.options.float8
        return training_bytes.temporary_bytes(
            self._step_shape(rows), recompute=recompute, float8=float8, recorded=recorded
        )

    def _step_shape(self, rows: int) -> StepShape:
        from ep_moe.experts.hopper.training_bytes import StepShape

        _, first, hidden = self.weights.stored_tensors()["w13"].shape
        return StepShape(self.config, rows, self.weights.num_slots, hidden, first, self.weights.dtype.itemsize)

    def gradients(
        self,
        received: Received,
        saved: tuple[Tensor, ...],
        stored: Mapping[str, Tensor],
        grad: Tensor,
        wanted: Mapping[str, bool],
        into: Mapping[str, GradientOut] | None = None,
        peer_out: PeerRows | None = None,
    ) -> StepGradients:
        into = into or {}
        returned = {name: wanted[name] and name not in into for name in stored}
        learning = self._learning(stored)
        made: dict[str, Tensor] = {}

        def write(name: str, product: WeightProduct) -> None:
            if name not in into:
                made[name] = torch.empty_like(stored[name])  # not before, for less memory at once
            product(into[name] if name in into else GradientOut(made[name]))

        asked = [name for name in learning if returned[name] or name in into]
        x, weights = self._backward(
            received, saved, stored, grad, asked, write, new_tensors(grad.device), peer_out,
            overwrites=self.options.recompute or not graph_is_kept(),
        )  # fmt: skip
        apart = {name: torch.zeros_like(stored[name]) for name in stored if returned[name] and name not in learning}
        return StepGradients(x, weights, {**dict.fromkeys(stored), **made, **apart})

    def row_gradients(
        self,
        received: Received,
        saved: tuple[Tensor, ...],
        stored: Mapping[str, Tensor],
        grad: Tensor,
        allocate: Allocator,
        peer_out: PeerRows | None = None,
    ) -> RowGradients:
        products: dict[str, WeightProduct] = {}
        learning = self._learning(stored)
        return RowGradients(
            *self._backward(received, saved, stored, grad, learning, products.__setitem__, allocate, peer_out), products
        )

    def _learning(self, stored: Mapping[str, Tensor]) -> list[str]:
        """Return the stored tensors with a gradient on this rank. Only one etp rank adds w2_bias."""
        return [name for name in stored if name != "w2_bias" or self.weights.adds_output_bias]

    def _backward(
        self, received: Received, saved: tuple[Tensor, ...], stored: Mapping[str, Tensor], grad: Tensor,
        wanted: Collection[str], emit: Callable[[str, WeightProduct], None], allocate: Allocator,
        peer_out: PeerRows | None, *, overwrites: bool = False,
    ) -> tuple[Tensor | PeerRows, Tensor | None]:  # fmt: skip
        """Run `gradients.TrainedStep.backward` with the tensors that forward saved."""
        from ep_moe.experts.hopper import gradients

        kept, slots, ends, source = saved
        assert received.local_ids is not None
        routes = gradients.Routes(received.local_ids, slots, ends, source, len(kept), self._launch_trained)
        weights, h = self._routing_weights(received), kept if kept.shape[1] else None
        x, by_weight = self._trained(stored).backward(
            grad, received.x, weights, routes, h, wanted, emit, allocate, peer_out, overwrites=overwrites
        )
        return x, None if weights is None else by_weight  # Weighting.COMBINE: combine multiplies by the weights
