"""Test the planned bytes of a training step against those that its tensors take, without its kernels."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ep_moe import MoEConfig
from ep_moe.experts.differentiable import new_tensors
from ep_moe.experts.hopper import gradients
from ep_moe.experts.hopper.gemm_grouped import PINGPONG
from ep_moe.experts.hopper.gradients import Routes, TrainedStep
from ep_moe.experts.hopper.training_bytes import StepShape, saved_bytes, temporary_bytes
from ep_moe.weights.main_grads import GradientOut

HIDDEN, INNER, TOP_K = 192, 128, 2
SHAPES = [(3, 500), (40, 7), (1, 64)]  # slots, rows


def storages(given):
    return [leaf.untyped_storage() for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


class MostBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations in the block allocate, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._live = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage._cdata for storage in storages(args)}
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            if storage._cdata not in given:  # else it is a view
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return out


def step_of(slots, **options):
    config = MoEConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_experts=slots, top_k=min(TOP_K, slots))
    matrices = (torch.zeros(slots, *shape, dtype=torch.bfloat16) for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    return TrainedStep(config, *matrices, **options)


class Nothing:
    """A module of functions that compute nothing. A mock would keep the tensors that it is called with."""

    def __getattr__(self, name):
        return nothing


def nothing(*_, **__):
    pass


@pytest.fixture(autouse=True)
def kernels():
    """Replace kernels by functions that compute nothing."""
    functions = dict.fromkeys(("grouped_gemm", "weight_gradient", "round_rows", "round_columns"), nothing)
    modules = dict.fromkeys(("kernels", "route_sort"), Nothing())
    with mock.patch.multiple(gradients, **functions, **modules, tiles_for=lambda *_, **__: PINGPONG):
        yield


def run(step, rows, *, recompute, allocate=None):
    """Return the most bytes of forward, and of backward, beside saved products and gradients of matrices."""
    x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)
    top_k = step.config.top_k
    ids = torch.zeros(rows, top_k, dtype=torch.int32)
    ends = torch.zeros(len(step.w2), dtype=torch.int32)
    routes = Routes(ids, ids, ends, ids.flatten(), rows * top_k, launch=nothing)
    targets = {name: GradientOut(torch.empty_like(w)) for name, w in (("w13", step.w13), ("w2", step.w2))}
    with mock.patch.object(Routes, "sort", return_value=routes), MostBytes() as forward:
        saved = step.forward(x, None, ids, allocate, keeps=not recompute)[2]
    h = None if recompute else saved
    kept = 0 if recompute else saved.nbytes
    del saved
    weights = torch.ones(rows, top_k)
    with MostBytes() as backward:
        step.backward(
            x, x, weights, routes, h, targets, lambda name, product: product(targets[name]), allocate,
            overwrites=allocate is None,
        )  # fmt: skip
    return forward.most - kept, backward.most


def bytes_of_routes(step, rows):
    """Return the bytes of backward's numbers and gradients of routes, which are planned for forward too."""
    return 2 * 4 * rows * step.config.top_k


@pytest.mark.parametrize(("slots", "rows"), SHAPES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("float8", [False, True])
def test_the_most_bytes_of_a_step(float8, recompute, slots, rows):
    step = step_of(slots, float8=float8)
    forward, backward = run(step, rows, recompute=recompute)
    shape = StepShape(step.config, rows, slots, HIDDEN, 2 * INNER, 2)
    planned = temporary_bytes(shape, recompute=recompute, float8=float8, recorded=False)
    assert max(forward, backward) <= planned <= max(forward + bytes_of_routes(step, rows), backward)


@pytest.mark.parametrize(("slots", "rows"), SHAPES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("float8", [False, True])
def test_recorded_steps_keep_their_operands(float8, recompute, slots, rows):
    made, step = {}, step_of(slots, float8=float8)

    def allocate(name, shape, dtype):
        return made.setdefault(name, new_tensors(torch.device("cpu"))(name, shape, dtype))

    forward, backward = run(step, rows, recompute=recompute, allocate=allocate)
    named = {name: tensor.nbytes for name, tensor in made.items() if name != "h"}
    shape = StepShape(step.config, rows, slots, HIDDEN, 2 * INNER, 2)
    planned, kept = temporary_bytes(shape, recompute=recompute, float8=float8, recorded=True), sum(named.values())
    most = kept + max(forward, backward - kept)
    assert most <= planned <= most + bytes_of_routes(step, rows)


@pytest.mark.parametrize("recompute", [False, True])
def test_saved_bytes(recompute):
    shape = StepShape(step_of(3).config, 5, 3, HIDDEN, 2 * INNER, 2)
    products = 0 if recompute else 5 * 2 * 2 * INNER * 2
    assert saved_bytes(shape, recompute=recompute) == 4 * (2 * 10 + 3) + products


def test_a_rank_without_experts_holds_nothing():
    shape = StepShape(step_of(3).config, 5, 0, HIDDEN, 2 * INNER, 2)
    assert saved_bytes(shape, recompute=False) == 0
    assert temporary_bytes(shape, recompute=True, float8=True, recorded=True) == 0
