"""Test cases of an expert kernel: a kernel object with its weights, rows, and expected results and gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.experts.base import Experts, ExpertsOptions
from ep_moe.experts.differentiable import Allocator, RowGradients, StepGradients
from ep_moe.experts.shared_experts import activate
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.placement.expert_map import EMPTY, ExpertMap
from ep_moe.quant.schemes import Scheme
from ep_moe.runtime.workspace import Workspaces
from ep_moe.testing.expert_oracle import expected_and_limit, numbers_of
from ep_moe.types import Activation, LocalIds, PeerRows, Received, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.initial import random_expert
from ep_moe.weights.main_grads import GradientOut
from ep_moe.weights.parts import parts_of

SLOTS = 5
# The logical expert in each slot of a rank. No slot has the number of its expert, so that a kernel which confuses the
# two gives a wrong result.
PERMUTED = (3, 0, 4, 1, 2)
WITH_AN_EMPTY_SLOT = (3, 0, EMPTY, 4, 1)


def case_name(kind: type[Experts], config: MoEConfig, scheme: Scheme, dtype: torch.dtype) -> str:
    bias = ", biases" if config.expert_bias else ""
    return f"{kind.name} ({scheme.name}, {dtype}, {config.activation.value}{bias})"


class KernelCase:
    """A kernel object with the weights of a rank's experts, and their canonical tensors by slot."""

    def __init__(
        self,
        kind: type[Experts],
        config: MoEConfig,
        scheme: Scheme,
        dtype: torch.dtype,
        device: torch.device,
        etp: RankGroup | None = None,
        options: ExpertsOptions | None = None,
        *,
        tensors: list[dict[str, Tensor]] | None = None,
        trainable: bool = False,
        held: tuple[int, ...] = PERMUTED,
    ) -> None:
        """held: the logical expert of each slot, `EMPTY` for none"""
        self.config, self.scheme, self.dtype, self.device, self.kind = config, scheme, dtype, device, kind
        self.held = held
        if tensors is None:  # tensors of an EMPTY slot are never used; copies of the first change no largest scale
            numbers = [0 if expert == EMPTY else slot for slot, expert in enumerate(held)]
            tensors = [random_expert(config, scheme, number, dtype, device) for number in numbers]
        self.tensors = tensors
        elsewhere = [expert for expert in range(config.num_experts) if expert not in held]
        weights = ExpertWeights(
            config,
            ExpertMap.from_ranks([held, elsewhere], config.num_experts),
            etp=etp or RankGroup.alone(),
            device=device,
            dtype=dtype,
            scheme=scheme,
            weight_layout=kind.weight_layout,
            trainable=trainable,
        )
        self.experts = kind(config, weights, Workspaces(device), options)
        self._write()

    def __str__(self) -> str:
        return case_name(self.kind, self.config, self.scheme, self.dtype)

    def _write(self) -> None:
        """Write the weights of all slots except EMPTY ones, which stay zero and which no route uses."""
        for expert, own in zip(self.held, self.tensors, strict=True):
            if expert != EMPTY:
                self.experts.weights.update_expert(expert, own)

    def rewrite(self) -> None:
        """Give each expert the weights of the next one. Scales that are shared by all experts do not change."""
        full = [slot for slot, expert in enumerate(self.held) if expert != EMPTY]
        after = dict(zip(full, full[1:] + full[:1], strict=True))
        self.tensors = [self.tensors[after.get(slot, slot)] for slot in range(len(self.held))]
        self.__dict__.pop("_numbers", None)
        self._write()

    @property
    def rounds(self) -> bool:
        """Whether the kernel rounds activations as the scheme says. The reference only uses the scheme's weights."""
        return self.kind.name != "reference"

    def wanted(self, received: Received) -> tuple[Tensor, Tensor]:
        """Return the expected output of RANK_MAJOR rows, and the limit of its error."""
        assert received.local_ids is not None
        weights = received.weights if received.weighting is Weighting.EXPERTS else None
        return expected_and_limit(
            self.config,
            self.scheme,
            self.tensors,
            received.x,
            received.local_ids,
            weights,
            self.dtype,
            rounds=self.rounds,
            numbers=self._numbers,
        )

    @cached_property
    def _numbers(self) -> list[tuple[Tensor, Tensor]]:
        """The dequantized weights of each slot, kept because a contract needs them a hundred times."""
        return [numbers_of(self.scheme, own) for own in self.tensors]

    def run(self, received: Received, out: Tensor | None = None) -> Tensor:
        """Return the kernel's output. Check that it does not change its inputs."""
        ids = None if received.wire_ids is None else received.wire_ids.ids
        given = {name: value for name, value in (vars(received) | {"ids": ids}).items() if isinstance(value, Tensor)}
        before = {name: tensor.clone() for name, tensor in given.items()}
        with named(self, f"{received.layout.value} rows {list(received.x.shape[:-1])}"):
            y = self.experts(received, out)
        for name, was in before.items():
            same = torch.equal(given[name].view(torch.uint8), was.view(torch.uint8))  # NaN too
            require(same, self, f"{received.layout.value}: {name} must be left as it was")
        return y

    def rows(self, count: int, weighting: Weighting = Weighting.EXPERTS) -> Received:
        """Return RANK_MAJOR rows with up to K local experts each, some with none."""
        generator = torch.Generator().manual_seed(count)
        width = max(SLOTS, self.config.top_k)
        ids = torch.rand(count, width, generator=generator).topk(self.config.top_k).indices
        full = torch.tensor([slot for slot, expert in enumerate(self.held) if expert != EMPTY], dtype=torch.int64)
        ids = torch.where((torch.rand(ids.shape, generator=generator) < 0.4) | ~torch.isin(ids, full), -1, ids)
        ids[3:5] = -1
        weights = torch.rand(ids.shape, generator=generator) + 0.1
        x = torch.randn(count, self.config.hidden_size, generator=generator).to(self.dtype)
        return Received(
            x=x.to(self.device),
            layout=RowLayout.RANK_MAJOR,
            weighting=weighting,
            handle=None,
            local_ids=LocalIds(ids.int().to(self.device)),
            weights=weights.to(self.device) if weighting is Weighting.EXPERTS else None,
        )


@contextmanager
def named(case: object, what: str) -> Iterator[None]:
    """Convert an exception within this context manager to an AssertionError that names the case."""
    try:
        yield
    except Exception as error:
        if isinstance(error, AssertionError) and str(error).startswith(f"{case}: "):
            raise
        raise AssertionError(f"{case}: {what}: {type(error).__name__}: {error}") from error


def require(condition: object, case: KernelCase, fault: str) -> None:
    if not condition:
        raise AssertionError(f"{case}: {fault}")


# --- gradients --------------------------------------------------------------------------------------------------------
# Checks of kernels that are `differentiable`: gradients of rows, routing weights and parameters, compared bitwise.
#
# Values are chosen so that nothing is rounded in any dtype. Each row of a matrix has one value that is not zero. Gates
# are 0, or so large that silu and gelu are the identity. Sums stay below 256 times their unit.

EXACT = (Activation.SWIGLU, Activation.GEGLU, Activation.GEGLU_TANH, Activation.RELU2)  # no such values with clamps
ROWS = 12
LARGE = 64.0  # a large gate


def exact_expert(config: MoEConfig, expert: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return the canonical tensors of an expert whose gradients are exact."""
    inner, hidden, gated = config.intermediate_size, config.hidden_size, config.activation.gated
    i, h = torch.arange(inner), torch.arange(hidden)
    own = torch.zeros(inner, hidden)
    own[i, (5 * i + 3 + expert) % hidden] = 1.0 - 2 * (i % 2)
    gate = torch.zeros(inner, hidden)
    gate[i, (7 * i + expert) % hidden] = LARGE
    w2 = torch.zeros(hidden, inner)
    w2[h, (3 * h + expert) % inner] = 1 / LARGE if gated else 1.0
    tensors = {"w13": torch.cat([gate, own]) if gated else own, "w2": w2}
    if config.expert_bias:
        tensors |= {"w13_bias": torch.zeros(config.w13_rows), "w2_bias": h % 3 - 1.0}
    return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}


def _exact_call(case: KernelCase) -> tuple[Received, Tensor]:
    """Return rows, and the gradient of their output."""
    weighted = Weighting.EXPERTS in case.kind.capabilities.weightings
    received = case.rows(ROWS, Weighting.EXPERTS if weighted else Weighting.COMBINE)
    generator = torch.Generator().manual_seed(2)
    received.x.copy_(torch.randint(0, 3, received.x.shape, generator=generator))
    if received.weights is not None:
        received.weights.copy_(torch.randint(1, 3, received.weights.shape, generator=generator) / 2)
    return received, torch.randint(-1, 2, received.x.shape, generator=generator).to(received.x)


def gradients(case: KernelCase) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the kernel's gradients and the expected ones, by name. case: trainable, with `exact_expert` weights"""
    received, slope = _exact_call(case)
    received.x.requires_grad_()
    if received.weights is not None:
        received.weights.requires_grad_()
    case.experts(received).backward(slope)
    wanted = _wanted(case, received, slope)
    found = {"x": _grad(received.x)}
    if received.weights is not None:
        found["weights"] = _grad(received.weights)
    weights = case.experts.weights
    for slot in range(len(case.tensors)):
        if weights.has_expert_parameters:
            canonical = _of_expert(weights, weights.local_experts[slot])
        else:
            own = {name: _grad(tensor)[slot] for name, tensor in weights.stored_tensors().items()}
            canonical = weights.weight_layout.restore(own)
        found |= {f"{name} of slot {slot}": tensor for name, tensor in canonical.items()}
    return {name: (found[name], value) for name, value in wanted.items()}


@torch.no_grad()
def written_gradients(case: KernelCase) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield (what, found, expected) for a kernel with `writes_gradients`, which writes gradients into given buffers.

    Expected is half of the gradient that it returns without buffers, because buffers are given with the factor 0.5. It
    replaces NaN, or is added to the buffer. case: as for `gradients`
    """
    experts, (received, slope) = case.experts, _exact_call(case)
    stored = dict(experts.weights.stored_tensors())

    def backward(names: Collection[str], into: dict[str, GradientOut] | None) -> StepGradients:
        saved = experts.compute_saving(received)[1]
        wanted = {name: name in names for name in stored}
        given: dict[str, Any] = {} if into is None else {"into": into}
        return experts.gradients(received, saved, stored, slope, wanted, **given)

    alone = backward(stored, None)
    for dtype, start, names in product({case.dtype, torch.float32}, (None, 3.0), (tuple(stored), tuple(stored)[:1])):
        before = torch.nan if start is None else start
        outs = {name: torch.full_like(stored[name], before, dtype=dtype) for name in names}
        into = {name: GradientOut(out, start is not None, 0.5) for name, out in outs.items()}
        found = backward(names, into)
        yield "the gradient of x beside written ones", _rows(found), _rows(alone)
        yield "the gradient of weights beside written ones", found.weights, alone.weights
        for name in stored:
            yield f"what is returned for {name}, which is written or not wanted,", found.stored.get(name), None
        for name, out in outs.items():
            gradient = alone.stored[name]
            assert gradient is not None
            yield f"the written gradient of {name}", out, (0.5 * gradient.float() + (start or 0.0)).to(dtype)


@torch.no_grad()
def recorded_gradients(case: KernelCase) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield (what, found, expected) for a kernel with `records_training`, whose calls a CUDA graph may replay.

    A second call writes to the same memory for other rows and gradients. The products that the first call returned then
    read this memory. case: as for `gradients`
    """
    experts, (received, slope) = case.experts, _exact_call(case)
    if not experts.records_training(len(received.x)):
        return
    stored = dict(experts.weights.stored_tensors())
    held: dict[tuple[str, str], Tensor] = {}

    def allocator(of: str) -> Allocator:
        def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return held.setdefault((of, name), torch.empty(shape, dtype=dtype, device=case.device))

        return allocate

    wanted = dict.fromkeys(stored, True)
    alone = experts.gradients(received, experts.compute_saving(received)[1], stored, slope, wanted)
    own = replace(received, x=-received.x)  # stands for the transport's copy, whose memory is reused
    _, saved = experts.compute_saving(own, allocator("forward"))
    first = experts.row_gradients(own, saved, stored, -slope, allocator("backward"))
    own.x.copy_(received.x)
    experts.compute_saving(own, allocator("forward"))
    found = experts.row_gradients(own, saved, stored, slope, allocator("backward"))
    yield "the gradient of x, recorded,", _rows(found), _rows(alone)
    yield "the gradient of weights, recorded,", found.weights, alone.weights
    for name, product_of in first.products.items():
        out = torch.full_like(stored[name], torch.nan)
        product_of(GradientOut(out))
        yield f"the gradient of {name}, recorded,", out, alone.stored[name]


@torch.no_grad()
def peer_gradients(case: KernelCase) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield (what, found, expected) for a kernel with `trains_to_peers`, which writes rows to peers' memory.

    Expected are the rows that it returns otherwise. Rows without a local expert are not written. case: as for
    `gradients`
    """
    experts, (received, slope) = case.experts, _exact_call(case)
    stored, ranks, left = dict(experts.weights.stored_tensors()), 2, 77.0
    assert received.local_ids is not None
    here = (received.local_ids >= 0).any(1, keepdim=True)

    def peers() -> PeerRows:
        blocks = tuple(torch.full_like(slope[: ROWS // ranks], left) for _ in range(ranks))
        addresses = torch.tensor([block.data_ptr() for block in blocks], device=case.device)
        return PeerRows(blocks, addresses, 0, 1)

    def written(to: PeerRows, wanted: Tensor | PeerRows) -> tuple[Tensor, Tensor]:
        assert isinstance(wanted, Tensor)
        return torch.cat(to.blocks), wanted.where(here, left)

    y, saved = experts.compute_saving(received)
    to, wanted = peers(), dict.fromkeys(stored, True)
    found, kept = experts.compute_saving(received, peer_out=to)
    require(found is to, case, "compute_saving does not return peer_out, where it is to write")
    yield "what is written to peers", *written(to, y)
    alone = experts.gradients(received, saved, stored, slope, wanted)
    to = peers()
    backward = experts.gradients(received, kept, stored, slope, wanted, peer_out=to)
    require(backward.x is to, case, "gradients does not return peer_out, where it is to write")
    yield "the gradient of x that is written to peers", *written(to, alone.x)
    yield "the gradient of weights beside rows written to peers", backward.weights, alone.weights
    for name in stored:
        yield f"the gradient of {name} beside rows written to peers", backward.stored[name], alone.stored[name]


def _rows(found: StepGradients | RowGradients) -> Tensor:
    assert isinstance(found.x, Tensor)
    return found.x


def _wanted(case: KernelCase, received: Received, slope: Tensor) -> dict[str, Tensor]:
    """Return the expected gradients, by autograd in float64."""
    assert received.local_ids is not None
    x = received.x.detach().double().requires_grad_()
    weights = None if received.weights is None else received.weights.detach().double().requires_grad_()
    experts = [{n: t.double().requires_grad_() for n, t in tensors.items()} for tensors in case.tensors]
    y = torch.zeros_like(x)
    for slot, own in enumerate(experts):
        at, column = (received.local_ids == slot).nonzero(as_tuple=True)
        a = activate(x[at] @ own["w13"].T + own.get("w13_bias", 0.0), case.config)
        part = a @ own["w2"].T + own.get("w2_bias", 0.0)
        y = y.index_add(0, at, part if weights is None else part * weights[at, column].unsqueeze(1))
    y.backward(slope.double())
    given = {"x": x} | ({} if weights is None else {"weights": weights})
    given |= {f"{name} of slot {slot}": t for slot, own in enumerate(experts) for name, t in own.items()}
    return {name: _grad(tensor) for name, tensor in given.items()}


def _of_expert(weights: ExpertWeights, expert: int) -> dict[str, Tensor]:
    """Return the gradients of an expert's parameters, as canonical tensors."""
    module, gated = weights.get_submodule(str(expert)), weights.config.activation.gated
    return {
        name: torch.cat([_grad(module.get_parameter(part)) for part in parts_of(name, gated)]) for name in weights.names
    }


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
