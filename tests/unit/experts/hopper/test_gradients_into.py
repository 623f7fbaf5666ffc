"""Test which buffers for gradients the training step passes to its kernels. tests/gpu tests their results."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ep_moe import ExpertsOptions, MoEConfig
from ep_moe.experts.hopper import gradients
from ep_moe.experts.hopper.experts import Bf16TritonExperts
from ep_moe.experts.hopper.gemm_grouped import weight_gradient
from ep_moe.experts.hopper.gradients import Routes, TrainedStep
from ep_moe.runtime.launch_cache import launch_directly
from ep_moe.types import LocalIds, Received, RowLayout, Weighting
from ep_moe.weights.main_grads import GradientOut

SLOTS, HIDDEN, INNER, ROWS = 3, 64, 128, 5
NAMES = ("w13", "w2", "w13_bias", "w2_bias")


@contextlib.contextmanager
def without_kernels():
    """Replace kernels by mocks. Yield the mock of the weight gradients' product; sums of bias rows are ones."""

    def ones(rows, ends, out, *_, **__):
        out.fill_(1.0)

    product = mock.create_autospec(weight_gradient)
    kernels = mock.MagicMock()
    kernels.sum_rows.side_effect = ones
    rows = mock.patch.multiple(Routes, gather=lambda _, x, out: out, numbers=mock.DEFAULT, sum=mock.DEFAULT)
    with (
        rows,
        mock.patch.multiple(gradients, kernels=kernels, weight_gradient=product),
        mock.patch.object(TrainedStep, "_product", lambda _, x, w, routes, out, **__: out),
    ):
        yield product


def backward(count, wanted, into=None, *, adds=True, recompute=False):
    """Run a backward pass. adds: whether this etp rank adds the output bias."""
    config = MoEConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_experts=SLOTS, top_k=1)
    shapes = ((2 * INNER, HIDDEN), (HIDDEN, INNER), (2 * INNER,), (HIDDEN,))
    stored = {name: torch.zeros(SLOTS, *shape) for name, shape in zip(NAMES, shapes, strict=True)}
    experts = object.__new__(Bf16TritonExperts)
    experts.config, experts.options = config, ExpertsOptions(recompute=recompute)
    experts._launch_trained = launch_directly
    experts.weights = SimpleNamespace(adds_output_bias=adds)
    ids = LocalIds(torch.zeros(ROWS, 1, dtype=torch.int32))
    x, h = torch.zeros(ROWS, HIDDEN), torch.zeros(count, 0 if recompute else 2 * INNER)
    received = Received(x, RowLayout.RANK_MAJOR, Weighting.EXPERTS, None, local_ids=ids, weights=torch.ones(ROWS, 1))
    saved = h, ids, torch.zeros(SLOTS, dtype=torch.int32), ids
    return experts.gradients(received, saved, stored, x, dict.fromkeys(NAMES, wanted), into)


def buffers(accumulate):
    shapes = {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER), "w13_bias": (2 * INNER,), "w2_bias": (HIDDEN,)}
    return {name: GradientOut(torch.full((SLOTS, *s), 2.0), accumulate, 0.5) for name, s in shapes.items()}


@pytest.mark.parametrize("accumulate", [False, True])
def test_products_write_into_buffers(accumulate):
    into = buffers(accumulate)
    with without_kernels() as product:
        found = backward(ROWS, False, into)
    assert found.stored == dict.fromkeys(found.stored)
    given = {id(call.args[3]): call.args[4:] for call in product.call_args_list}
    assert given == {id(into[name].out): (accumulate, 0.5) for name in ("w2", "w13")}
    for name in ("w13_bias", "w2_bias"):
        assert (into[name].out == (2.5 if accumulate else 0.5)).all(), name


def test_products_write_new_tensors_without_buffers():
    with without_kernels() as product:
        found = backward(ROWS, True)
    assert [call.args[4:] for call in product.call_args_list] == [(False, 1.0)] * 2
    assert {id(call.args[3]) for call in product.call_args_list} == {id(found.stored[name]) for name in ("w2", "w13")}
    assert (found.stored["w2_bias"] == 1).all()
    with without_kernels() as product:
        found = backward(ROWS, False)
    assert not product.called
    assert found.stored == dict.fromkeys(found.stored)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_rank_without_rows(accumulate):
    into = buffers(accumulate)
    with without_kernels() as product:
        backward(0, False, into)
    assert not product.called
    assert all((out.out == (2.0 if accumulate else 0.0)).all() for out in into.values())


def test_the_bias_of_the_result_that_another_rank_adds():
    """An etp rank that does not add the output bias gets zeros as its gradient, without a product."""
    with without_kernels() as product:
        found = backward(ROWS, True, adds=False)
    assert product.call_count == 2
    assert not found.stored["w2_bias"].any()
    assert (found.stored["w13_bias"] == 1).all()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_gradient_overwrites_products_that_nothing_reads_again(recompute, kept, monkeypatch):
    monkeypatch.setattr("ep_moe.experts.hopper.experts.graph_is_kept", lambda: kept)
    computed = torch.zeros(ROWS, 2 * INNER)
    with without_kernels(), mock.patch.object(TrainedStep, "_first", return_value=computed):
        backward(ROWS, True, recompute=recompute)
        given = gradients.kernels.differentiate.call_args
    overwritten = recompute or not kept
    assert (given.kwargs["grad_h"] is given.args[0]) == overwritten
    assert given.args[0]._version == overwritten, "autograd must not read it again, such as after an exception"


def test_a_gradient_is_allocated_when_it_is_computed():
    """The gradient of w13, the larger matrix, needs no memory while that of w2 is computed."""
    done, empty_like = [], torch.empty_like
    with without_kernels() as product, mock.patch.object(torch, "empty_like") as made:
        made.side_effect = lambda given: done.append(tuple(given.shape[1:])) or empty_like(given)
        product.side_effect = lambda *_, **__: done.append("product")
        backward(ROWS, True)
    matrices = [one for one in done if one in {"product", (HIDDEN, INNER), (2 * INNER, HIDDEN)}]
    assert matrices == [(HIDDEN, INNER), "product", (2 * INNER, HIDDEN), "product"]
