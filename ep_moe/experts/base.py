"""The base class of expert kernels: compute the local experts of received rows, and return rows in the same order.

A kernel sees local ids only, never a placement. A kernel with its own backward (`Experts.own_backward`) is one node of
the autograd graph.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from ep_moe.checks import check_returned_rows
from ep_moe.config import MoEConfig
from ep_moe.experts.capabilities import ExpertsCapabilities as ExpertsCapabilities
from ep_moe.experts.capabilities import ExpertsOptions as ExpertsOptions
from ep_moe.experts.capabilities import KernelCapabilities as KernelCapabilities
from ep_moe.experts.differentiable import (
    Allocator,
    Attached,
    RowGradients,
    StepGradients,
    differentiable_step,
    wants_gradients,
)
from ep_moe.experts.layouts import as_plain, as_rank_major, with_local_ids
from ep_moe.quant.schemes import PLAIN, Scheme
from ep_moe.renamed import PLUGIN_HOOKS, take_old_names
from ep_moe.runtime.gpus import GPU, compute_capability
from ep_moe.runtime.workspace import Workspaces
from ep_moe.types import PeerRows, Received
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.layouts.base import WeightLayout
from ep_moe.weights.main_grads import GradientOut


class Experts(ABC):
    """The expert kernel of one layer on one rank. It has no parameters, and reads those of `ExpertWeights`.

    A subclass defines `name`, `capabilities` and `compute`. `weight_layout` is the layout in which it reads weights.
    With `own_backward` it also defines `compute_saving` and `gradients`. Otherwise autograd records `compute`.

    Args:
        config: The layer's configuration.
        weights: This rank's experts.
        workspaces: Scratch memory that layers share. Default: a new one on the CPU.
        options: How the kernel runs, None for the defaults.
    """

    name: ClassVar[str]
    capabilities: ClassVar[ExpertsCapabilities]
    tested_machines: ClassVar[str] = "not run"  # for docs/reference/backends.md
    weight_layout: ClassVar[type[WeightLayout]] = WeightLayout  # the layout in which it reads weights
    own_backward: ClassVar[bool] = False  # defines `compute_saving`, `gradients`; else autograd records `compute`
    writes_gradients: ClassVar[bool] = False  # `gradients` takes `into`
    # `compute_saving`, `gradients` and `row_gradients` take `peer_out`; needs the capability `peer_out`
    trains_to_peers: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        take_old_names(cls, PLUGIN_HOOKS)

    def __init__(
        self,
        config: MoEConfig,
        weights: ExpertWeights,
        workspaces: Workspaces | None = None,
        options: ExpertsOptions | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.workspaces = workspaces or Workspaces(torch.device("cpu"))
        self.options = options or ExpertsOptions()
        self._scratch: Tensor | None = None
        self.workspaces.reserve(self.workspace_bytes())

    @property
    def row_formats(self) -> frozenset[str]:
        """The row formats that it reads without conversion, for the quantization scheme of its weights."""
        return self.capabilities.row_formats

    def workspace_bytes(self) -> int:
        """Count the scratch memory of one call, which layers share.

        Returns:
            Bytes.
        """
        return 0

    def workspace(self) -> Tensor:
        """Return the scratch memory of the current stream.

        Returns:
            uint8 [at least `workspace_bytes`].
        """
        # a compiled graph cannot look up the stream, so it uses the buffer of the last eager call
        if self._scratch is None and torch.compiler.is_compiling():  # no eager call before: allocate in the graph
            return torch.empty(self.workspaces.reserved, dtype=torch.uint8, device=self.workspaces.device)
        if self._scratch is None or not torch.compiler.is_compiling():
            self._scratch = self.workspaces.take(self.workspaces.reserved)
        return self._scratch

    def tune(self, rows: Sequence[int], cache: Path | None) -> list[int]:
        """Find the fastest variant for each number of received rows, on this rank alone.

        Args:
            rows: Numbers of received rows.
            cache: A folder with earlier findings, None for none.

        Returns:
            Integers for `use`, on any rank with a kernel of this shape; [] if there is nothing to tune.
        """
        return []

    def use(self, tuned: list[int]) -> None:
        """Use the variants that `tune` found.

        Args:
            tuned: The result of `tune`.
        """
        assert not tuned, f"{self.name} has nothing to tune"

    @classmethod
    def available(cls) -> str | None:
        """Say why the kernel cannot run in this installation. Uses no device.

        Returns:
            None if it can run, else the reason.
        """
        return None

    @classmethod
    def compute_capability(cls, scheme: str) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """Return the range of GPUs on which the kernel computes a scheme.

        Args:
            scheme: Name of the quantization scheme.

        Returns:
            Lowest and highest compute capability, such as ((9, 0), (10, 3)); None for any.
        """
        return cls.capabilities.min_compute_capability, cls.capabilities.max_compute_capability

    @classmethod
    def unsupported_platform(cls, scheme: Scheme, device: torch.device | GPU) -> str | None:
        """Say why the kernel cannot compute a scheme on a device.

        Args:
            scheme: Quantization scheme of the experts.
            device: A device of this machine, or the description of another GPU.

        Returns:
            None if it can, else the reason.
        """
        lowest, highest = cls.compute_capability(scheme.name)
        found = compute_capability(device) if device.type == "cuda" else (0, 0)
        if found >= (lowest or found) and found <= (highest or found):
            return None
        low, high = (None if bound is None else ".".join(map(str, bound)) for bound in (lowest, highest))
        wanted = f"{low} or newer" if high is None else f"{high} or older" if low is None else f"{low} to {high}"
        what = "" if scheme.plain else f" for quantization {scheme.name}"
        here = f"this one has {found[0]}.{found[1]}" if device.type == "cuda" else f"this is a {device.type}"
        return f"{cls.name} needs a GPU of compute capability {low if low == high else wanted}{what}, {here}"

    @classmethod
    def unsupported_reason(
        cls,
        config: MoEConfig,
        dtype: torch.dtype,
        etp: int,
        scheme: Scheme = PLAIN,
        options: ExpertsOptions | None = None,
    ) -> str | None:
        """Say why the kernel cannot serve a layer.

        Args:
            config: The layer's configuration.
            dtype: Dtype of the layer.
            etp: Ranks that share an expert's intermediate size.
            scheme: Quantization scheme of the experts.
            options: How the kernel runs, None for the defaults.

        Returns:
            None if it can, else the reason.
        """
        return cls.capabilities.unsupported_reason(config, dtype, etp, scheme, options)

    @overload
    def __call__(self, received: Received, out: PeerRows) -> PeerRows: ...

    @overload
    def __call__(self, received: Received, out: Tensor | None = None) -> Tensor: ...

    def __call__(self, received: Received, out: Tensor | PeerRows | None = None) -> Tensor | PeerRows:
        """Compute the experts for received rows of any layout and format.

        Under `Weighting.EXPERTS` a row's outputs are multiplied by the routing weights and summed over its local
        experts. A row without a local expert is exactly zero, and so are slots that this rank does not have. Rows
        beyond an expert's count (CONTIGUOUS, BATCHED) are undefined. Inputs are not modified.

        Args:
            received: The rows that reached this rank.
            out: Output, contiguous [..., H] as `received.x`, of the layer's dtype. Kernels with the capability
                `peer_out` also take `received.peer_out`, where they do not write rows without a local expert.
                Default: a new tensor.

        Returns:
            [..., H] in the order of `received.x`; `out` if it was given.
        """
        if self.weights.has_expert_parameters:
            found: Tensor | PeerRows = self.weights(self._run, received, out)
            return found
        return self._run(received, out)

    def _run(self, received: Received, out: Tensor | PeerRows | None) -> Tensor | PeerRows:
        received = received.dense()
        if not self.capabilities.wire_ids:
            received = with_local_ids(received, self.weights.num_slots)
        if received.format not in self.row_formats:
            received = as_plain(received, self.weights.dtype)
        if isinstance(out, PeerRows):
            self.compute_to_peers(received, out)
            return out
        own_backward = self.own_backward or self.options.recompute
        if own_backward and not torch.compiler.is_compiling() and wants_gradients(self, received):
            flat_rows = as_rank_major(with_local_ids(received, self.weights.num_slots), self.weights.num_slots).dense()
            return differentiable_step(self, flat_rows).view(*received.x.shape[:-1], self.config.hidden_size)
        if received.layout in self.capabilities.layouts:
            return self._attached(self._computed(received, out), received)
        flat = None if out is None else out.flatten(0, -2)
        y = self._computed(as_rank_major(received, self.weights.num_slots), flat)
        return self._attached(y.view(*received.x.shape[:-1], y.shape[-1]), received)

    def _computed(self, received: Received, out: Tensor | None) -> Tensor:
        y = self.compute(received, out)
        rows = (None,) if received.per_route else received.x.shape[:-1]
        shape = (*rows, self.config.hidden_size)
        return check_returned_rows(f"experts={self.name}: compute", "check_experts", y, self.weights.dtype, shape)

    def _attached(self, y: Tensor, received: Received) -> Tensor:
        """Attach y in the autograd graph to all tensors that may need a gradient, even if no row used them.

        Backward then runs the same collectives on all ranks, also on a rank without rows or without experts.
        """
        if not self.capabilities.differentiable or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return y  # compiled layers have no peers
        stored = [one for one in self.weights.stored_tensors().values() if one.requires_grad]
        others = (received.x, received.weights, self.weights.anchor)
        given = (*stored, *(one for one in others if one is not None and one.requires_grad))
        joined: Tensor = Attached.apply(y, self.weights, bool(stored), *given)
        return joined

    @abstractmethod
    def compute(self, received: Received, out: Tensor | None) -> Tensor:
        """Compute the experts, for the layouts that the capabilities name. All tensors are contiguous.

        Under `Weighting.EXPERTS` a row's outputs are multiplied by the routing weights and summed over its local
        experts. A row without a local expert is exactly zero. With `Received.per_route` each of a row's K ids has its
        own output row instead, which is not multiplied. Rows beyond an expert's count (CONTIGUOUS, BATCHED) are
        undefined. Do not modify inputs.

        Args:
            received: The rows that reached this rank.
            out: [..., H] of the layer's dtype, receives the result; None for a new tensor.

        Returns:
            [..., H] in the order of `received.x`, `out` if it was given.
        """

    def compute_saving(
        self, received: Received, allocate: Allocator | None = None, peer_out: PeerRows | None = None
    ) -> tuple[Tensor | PeerRows, tuple[Tensor, ...]]:
        """Compute, and save what `gradients` needs. By default nothing is saved, and `gradients` computes it again.

        Args:
            received: RANK_MAJOR rows with local ids.
            allocate: Allocates saved tensors by name, shape and dtype. Passed only to kernels with `records_training`;
                others need no such parameter. Default: new tensors.
            peer_out: Where to write the rows, as `compute_to_peers` does. Passed only to kernels with
                `trains_to_peers`; others need no such parameter. Default: a new tensor.

        Returns:
            [N, H], or `peer_out` if it was given; and the saved tensors.
        """
        return self.compute(received, None), ()

    def records_training(self, rows: int) -> bool:
        """Say whether `compute_saving` and `row_gradients` may be recorded as CUDA graphs.

        Args:
            rows: Received rows, [N, H].

        Returns:
            True if they do not wait for the device, and need little more memory for the worst-case number of routes
            than for the actual one. The kernel then takes `allocate` in `compute_saving`, and defines `row_gradients`.
        """
        return False

    def row_gradients(
        self,
        received: Received,
        saved: tuple[Tensor, ...],
        stored: Mapping[str, Tensor],
        grad: Tensor,
        allocate: Allocator,
        peer_out: PeerRows | None = None,
    ) -> RowGradients:
        """Compute the backward of `compute_saving`, except the gradients of stored tensors, for `records_training`.

        Args:
            received: The argument of `compute_saving`.
            saved: The tensors that `compute_saving` saved.
            stored: The weights' stored tensors at that time, by name.
            grad: As of `gradients`.
            allocate: Allocates the tensors that the returned products read, by name, shape and dtype.
            peer_out: As of `gradients`.

        Returns:
            Gradients of the rows and of the routing weights, and functions that write those of the stored tensors.

        Raises:
            AssertionError: The kernel declares `records_training` and does not define this.
        """
        raise AssertionError(f"{self.name} has no gradients of rows alone")

    def saved_bytes(self, rows: int) -> int:
        """Count the bytes that `compute_saving` saves, for a uniform router.

        Args:
            rows: Received rows.

        Returns:
            Bytes.
        """
        return 0

    def temporary_bytes(self, rows: int, *, recorded: bool) -> int | None:
        """Count the most bytes that a training step holds at once beside what `compute_saving` saves.

        Gradients of stored tensors do not count. The router is uniform, and backward does not keep the graph.

        Args:
            rows: Received rows.
            recorded: The step is recorded as CUDA graphs (`records_training`).

        Returns:
            Bytes; None if they do not follow from shapes.
        """
        return None

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
        """Compute the backward of `compute_saving`. By default this is the autograd backward of `compute`.

        Args:
            received: The argument of `compute_saving`.
            saved: The tensors that `compute_saving` saved.
            stored: The weights' stored tensors at that time, by name.
            grad: [N, H]. Rows without a local expert are undefined.
            wanted: Whether the gradient of each stored tensor is wanted, by name.
            into: Where to write gradients of stored tensors, by name: `out` [L, ...], the target; `accumulate`, add to
                `out`; `factor`, multiply the gradient by it. Passed only to kernels with `writes_gradients`; others
                need no such parameter.
            peer_out: Where to write the gradients of the rows, as `compute_to_peers` does. Passed only to kernels with
                `trains_to_peers`; others need no such parameter. Default: a new tensor.

        Returns:
            Gradients of the rows (`peer_out` if it was given), of the routing weights and of the stored tensors. None
            for stored tensors that are not wanted or are in `into`.
        """
        leaves = {name: tensor.detach().requires_grad_(wanted[name]) for name, tensor in stored.items()}
        x = received.x.detach().requires_grad_()
        weights = None if received.weights is None else received.weights.detach().requires_grad_()
        assert received.local_ids is not None
        grad = grad.where((received.local_ids >= 0).any(1, keepdim=True), 0.0)
        with torch.enable_grad():
            y = self.weights.run_with_tensors(
                leaves, self.compute, dataclasses.replace(received, x=x, weights=weights), None
            )
        given = [x, *([] if weights is None else [weights]), *(leaf for leaf in leaves.values() if leaf.requires_grad)]
        found = dict(zip(map(id, given), torch.autograd.grad(y, given, grad, allow_unused=True), strict=True))

        def of(tensor: Tensor) -> Tensor:
            own = found[id(tensor)]
            return torch.zeros_like(tensor) if own is None else own

        by_name = {name: of(leaf) if leaf.requires_grad else None for name, leaf in leaves.items()}
        return StepGradients(of(x), None if weights is None else of(weights), by_name)

    def compute_to_peers(self, received: Received, out: PeerRows) -> None:
        """Compute the experts and write each row to the rank that sent it, for kernels with `peer_out`.

        Args:
            received: The rows that reached this rank.
            out: `received.peer_out`. Rows without a local expert are not written.

        Raises:
            AssertionError: The kernel declares `peer_out` and does not define this.
        """
        raise AssertionError(f"{self.name} writes no rows to peers")
