"""The backward of `bf16_triton` against float64: odd numbers of rows, experts without rows, every activation."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ep_moe import Activation, EPContext, ExpertsOptions, MoEConfig, MoELayer

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from ep_moe.experts.hopper import gradients
from ep_moe.experts.hopper.experts import ACTIVATIONS
from ep_moe.experts.hopper.gemm_grouped import weight_gradient
from ep_moe.experts.shared_experts import activate
from ep_moe.weights.main_grads import GradientOut
from tests.fixtures.bf16_triton import check_peer_cells, check_peer_rows

# Each number is rounded to bf16 at most five times on its way (for x: h, da, dh, a route's gradient and their sum), by
# 2**-9 of itself each. For random numbers, a norm changes by no more than the sum of these.
BOUND = 5 * 2**-9
DEVICE = "cuda"


def case(rows, top_k, slots, hidden, inner, activation, dropped):
    """Return rows, ids (two experts get none), weights (one is zero), both matrices and the gradient of the result."""
    config = MoEConfig(
        hidden_size=hidden, intermediate_size=inner, num_experts=max(slots, top_k), top_k=top_k, activation=activation
    )
    generator = torch.Generator(DEVICE).manual_seed(rows + slots)

    def normal(*shape):
        return torch.randn(shape, device=DEVICE, generator=generator)

    scores = torch.rand(rows, slots, device=DEVICE, generator=generator)
    scores[:, [1, slots - 1]] = -1
    ids = scores.topk(top_k, 1).indices.int()
    nowhere = (ids == 1) | (ids == slots - 1) | (torch.rand(ids.shape, device=DEVICE, generator=generator) < dropped)
    ids = ids.masked_fill(nowhere, -1).contiguous()
    weights = torch.rand(ids.shape, device=DEVICE, generator=generator)
    weights[rows // 2, 0] = 0.0
    w13 = normal(slots, inner * (1 + activation.gated), hidden).div(hidden**0.5).bfloat16()
    w2 = normal(slots, hidden, inner).div(inner**0.5).bfloat16()
    return config, normal(rows, hidden).bfloat16(), ids, weights, w13, w2, normal(rows, hidden).bfloat16()


def exact(config, x, ids, weights, w13, w2, grad, *biases):
    """Compute the result and all gradients in float64."""
    given = [tensor.double().requires_grad_() for tensor in (x, weights, w13, w2, *biases)]
    x64, weights64, first, second, *added = given
    y = torch.zeros_like(x64)
    for expert in range(len(w2)):
        row, route = (ids == expert).nonzero(as_tuple=True)
        h = x64[row] @ first[expert].T + (added[0][expert] if added else 0)
        own = activate(h, config) @ second[expert].T + (added[1][expert] if added else 0)
        y = y.index_add(0, row, weights64[row, route].unsqueeze(1) * own)
    return [y.detach(), *torch.autograd.grad(y, given, grad.double())]


def ours(config, x, ids, weights, w13, w2, grad, *biases, recompute=False, float8=False):
    step = gradients.TrainedStep(config, w13, w2, *biases or (None, None), float8=float8)
    y, routes, h = step.forward(x, weights, ids)
    dx, dweights, stored = backward(step, grad, x, weights, routes, None if recompute else h)
    return [y, dx, dweights, *stored.values()]


def backward(step, grad, x, weights, routes, h, into=None, **how):
    """Return the gradients of x and weights, and by name those of matrices and biases, written to `into`."""
    named = {"w13": step.w13, "w2": step.w2, "w13_bias": step.w13_bias, "w2_bias": step.w2_bias}
    outs = into or {name: GradientOut(torch.empty_like(one)) for name, one in named.items() if one is not None}
    dx, dweights = step.backward(grad, x, weights, routes, h, outs, lambda name, product: product(outs[name]), **how)
    return dx, dweights, {name: to.out for name, to in outs.items()}


def largest_weight_gradients(config, x, ids, w13, w2, grad):
    """Return the sum of magnitudes of the terms of each route's weight gradient, float64 [rows, K].

    <a, da> may cancel, and is then small compared with the terms that were rounded.
    """
    out = torch.zeros(ids.shape, dtype=torch.float64, device=DEVICE)
    for expert in range(len(w2)):
        row, route = (ids == expert).nonzero(as_tuple=True)
        a = activate(x.double()[row] @ w13[expert].double().T, config)
        out[row, route] = (a * (grad.double()[row] @ w2[expert].double())).abs().sum(1)
    return out


def errors(found, wanted):
    return [float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("check", [check_peer_rows, check_peer_cells])
def test_rows_and_their_gradients_written_to_peers_have_the_same_bits(check, rank):
    config, x, ids, weights, w13, w2, grad = case(300, 4, 8, 320, 192, Activation.SWIGLU, 0.6)
    step, here = gradients.TrainedStep(config, w13, w2), (ids >= 0).any(1, keepdim=True)
    y, routes, h = step.forward(x, weights, ids)
    dx, dweights, _ = backward(step, grad, x, weights, routes, h)

    def back(peers):
        found, by_weight = step.backward(grad, x, weights, routes, h, (), None, peer_out=peers)
        assert torch.equal(by_weight, dweights)
        return found

    check(lambda peers: step.forward(x, weights, ids, peer_out=peers)[0], 4, rank, here, y)
    check(back, 4, rank, here, dx)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS, key=lambda one: one.value), ids=lambda one: one.value)
@pytest.mark.parametrize(
    ("rows", "top_k", "slots", "hidden", "inner", "dropped"),
    [(1, 2, 4, 256, 128, 0.0), (300, 4, 8, 320, 192, 0.3), (513, 3, 5, 384, 1152, 0.5), (1000, 8, 64, 512, 640, 0.9)],
)
def test_gradients_against_float64(rows, top_k, slots, hidden, inner, dropped, activation):
    given = case(rows, top_k, slots, hidden, inner, activation, dropped)
    found, wanted = ours(*given), exact(*given)
    assert max(errors(found[:2] + found[3:], wanted[:2] + wanted[3:])) < BOUND
    config, x, ids, _, w13, w2, grad = given
    assert (
        (found[2].double() - wanted[2]).abs() <= BOUND * largest_weight_gradients(config, x, ids, w13, w2, grad)
    ).all()
    for expert in (1, slots - 1):
        assert not found[3][expert].any(), "an expert without rows has zeros"
        assert not found[4][expert].any()
    for recompute in (False, True):
        again = ours(*given, recompute=recompute)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "equal inputs give equal bits"


@pytest.mark.parametrize("activation", [Activation.SWIGLU_CLAMPED, Activation.RELU2], ids=lambda one: one.value)
def test_biases(activation):
    given = case(513, 3, 5, 384, 1152, activation, 0.5)
    generator = torch.Generator(DEVICE).manual_seed(9)
    biases = [torch.randn(w.shape[:2], device=DEVICE, generator=generator).bfloat16() for w in given[4:6]]
    found, wanted = ours(*given, *biases), exact(*given, *biases)
    apart = errors(found, wanted)
    assert max(apart[:2] + apart[3:]) < BOUND
    # a weight's gradient may cancel, and is then small compared with its terms
    assert float((found[2].double() - wanted[2]).norm()) < BOUND * 4 * float(wanted[2].norm())
    without = errors(ours(*given, biases[0], torch.zeros_like(biases[1])), wanted)
    assert without[0] > BOUND
    assert without[2] > BOUND


@pytest.mark.parametrize(("room", "ranks"), [(0, 2), (0, 1), (1 << 40, 2)])
def test_room_for_pairs_that_do_not_come(room, ranks, monkeypatch):
    """Counted routes and buffers for all possible routes give the same result within rounding, as tiles may differ.

    Routes are not counted if no other rank has experts.
    """
    config, *rest = case(300, 4, 8, 256, 128, Activation.SWIGLU, 0.3)
    given = (dataclasses.replace(config, num_experts=8 * ranks), *rest)
    monkeypatch.setattr(gradients, "UNCOUNTED", room)
    found, wanted = ours(*given), exact(*given)
    config, x, ids, weights, w13, w2, _ = given
    _, routes, h = gradients.TrainedStep(config, w13, w2).forward(x, weights, ids)
    counted = ranks == 2 and not room
    assert len(h) == routes.count == (int((ids >= 0).sum()) if counted else 300 * 4)
    assert max(errors(found[:2] + found[3:], wanted[:2] + wanted[3:])) < BOUND


def test_rows_copied_before_the_first_product_give_the_bits_of_gathered_rows(monkeypatch):
    given = case(700, 4, 8, 256, 128, Activation.SWIGLU, 0.3)
    found = []
    for copied in (False, True):
        monkeypatch.setattr(gradients, "copies_rows_first", lambda *_, copied=copied: copied)
        found.append(ours(*given))
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def test_rows_of_the_next_expert_have_no_part():
    """An expert's weight gradient uses no row of the next expert, wherever its rows end within a block of 64.

    One row more would exceed the bound.
    """
    a, b = (torch.randn(100, 128, device=DEVICE).bfloat16() for _ in range(2))
    ends = torch.tensor([37, 37, 100], dtype=torch.int32, device=DEVICE)
    out = torch.full((3, 128, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    weight_gradient(a, b, ends, out)

    def product(begin, end):
        return a[begin:end].double().T @ b[begin:end].double()

    assert max(errors([out[0], out[2]], [product(0, 37), product(37, 100)])) < 2**-9
    assert not out[1].any()
    assert errors([out[0]], [product(0, 38)])[0] > 2**-9


@pytest.mark.parametrize("factor", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("across", "columns"), [(64, 64), (128, 320), (320, 192), (1536, 256)])
def test_weight_gradients_into_a_buffer(across, columns, dtype, accumulate, factor):
    """Weight gradients are written or added into a buffer.

    Experts without rows, at both ends too, keep the buffer's content, or get zeros if the buffer is overwritten.
    """
    generator = torch.Generator(DEVICE).manual_seed(across + columns)
    a, b = (torch.randn(200, n, device=DEVICE, generator=generator).bfloat16() for n in (across, columns))
    ends = [0, 37, 37, 101, 200, 200]
    before = torch.randn(len(ends), across, columns, device=DEVICE, generator=generator).to(dtype)
    out = before.clone() if accumulate else torch.full_like(before, torch.nan)
    weight_gradient(
        a, b, torch.tensor(ends, dtype=torch.int32, device=DEVICE), out, accumulate=accumulate, factor=factor
    )
    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-24
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        own, old = out[expert].double(), before[expert].double()
        if begin == end:
            assert torch.equal(own, old) if accumulate else not own.any(), expert
            continue
        rows, others = a[begin:end].double(), b[begin:end].double()
        new = factor * (rows.T @ others)
        wanted = old + new if accumulate else new
        # float32 sums, which tensor cores may truncate; the addend and the sum are rounded
        summed = (end - begin + 1) * 2**-22 * factor * (rows.abs().T @ others.abs())
        allowed = summed + rounding * (1 + rounding) * (2 * new.abs() + wanted.abs())
        assert ((own - wanted).abs() <= allowed).all(), (expert, float(((own - wanted).abs() / allowed).max()))


def test_a_sum_in_bf16_has_the_bits_of_torchs():
    a, b = (torch.randn(100, 192, device=DEVICE).bfloat16() for _ in range(2))
    ends = torch.tensor([37, 100], dtype=torch.int32, device=DEVICE)
    before = torch.randn(2, 192, 192, device=DEVICE).bfloat16()
    new = torch.empty_like(before)
    weight_gradient(a, b, ends, new)
    found = before.clone()
    weight_gradient(a, b, ends, found, accumulate=True)
    assert torch.equal(found, before + new)


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS, key=lambda one: one.value), ids=lambda one: one.value)
def test_gradients_that_overwrite_saved_products_have_the_same_bits(activation, float8):
    config, x, ids, weights, w13, w2, grad = case(513, 3, 5, 384, 1152, activation, 0.5)
    step = gradients.TrainedStep(config, w13, w2, float8=float8)
    _, routes, h = step.forward(x, weights, ids)
    used = h[: int(routes.ends[-1])]
    before = used.clone()
    dx, dweights, stored = backward(step, grad, x, weights, routes, h)
    assert torch.equal(used, before)
    again = backward(step, grad, x, weights, routes, h, overwrites=True)
    assert not torch.equal(used, before)
    assert torch.equal(again[0], dx)
    assert torch.equal(again[1], dweights)
    assert all(torch.equal(again[2][name], one) for name, one in stored.items())


@pytest.mark.parametrize("recompute", [False, True])
def test_a_kept_graph_has_a_second_backward(recompute):
    config = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
    with EPContext.local(torch.device(DEVICE)) as context:
        options = ExpertsOptions(recompute=recompute)
        layer = MoELayer(config, context, dtype=torch.bfloat16, experts="bf16_triton", options=options)
        x = torch.randn(512, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        given = (x, *layer.parameters())
        y = layer(x)
        first = torch.autograd.grad(y, given, torch.ones_like(y), retain_graph=True)
        second = torch.autograd.grad(y, given, torch.ones_like(y))
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_step_writes_gradients_where_it_is_told(dtype, biased, float8):
    """Backward writes gradients into given buffers, and then adds to them, with factor 0.5.

    Those of matrices in bf16 have the bits of gradients returned without buffers.
    """
    config, x, ids, weights, w13, w2, grad = case(513, 3, 5, 384, 1152, Activation.SWIGLU, 0.5)
    biases = [torch.randn(w.shape[:2], device=DEVICE).bfloat16() if biased else None for w in (w13, w2)]
    step = gradients.TrainedStep(config, w13, w2, *biases, float8=float8)
    _, routes, h = step.forward(x, weights, ids)
    dx, _, stored = backward(step, grad, x, weights, routes, h)
    buffers = {name: torch.full_like(tensor, torch.nan, dtype=dtype) for name, tensor in stored.items()}
    for accumulate in (False, True):
        into = {name: GradientOut(buffer, accumulate, 0.5) for name, buffer in buffers.items()}
        assert torch.equal(backward(step, grad, x, weights, routes, h, into)[0], dx)
        for name, buffer in buffers.items():
            expected = stored[name] * (1.0 if accumulate else 0.5)
            if dtype == torch.bfloat16 and not name.endswith("bias"):
                assert torch.equal(buffer, expected), (name, accumulate)
            # returned gradients were rounded to bf16, and a bias in bf16 is rounded after its addition
            assert ((buffer - expected.float()).abs() <= 2**-8 * expected.float().abs()).all(), (name, accumulate)
    nowhere = step.forward(x, weights, torch.full_like(ids, -1))[1]
    for accumulate in (True, False):
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        into = {name: GradientOut(buffer, accumulate, 0.5) for name, buffer in buffers.items()}
        backward(step, grad, x, weights, nowhere, None, into)
        for name, buffer in buffers.items():
            assert torch.equal(buffer, before[name]) if accumulate else not buffer.any(), (name, accumulate)


def e4m3(rows):
    """Round with a scale per row, in float64."""
    scale = rows.double().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return (rows.double() / scale).to(torch.float8_e4m3fn).double() * scale


class Rounded(torch.autograd.Function):
    """a @ w.T with operands in E4M3.

    The gradient of a is computed with E4M3 operands too, that of w with unrounded ones.
    """

    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w)
        return e4m3(a.bfloat16()) @ e4m3(w).T

    @staticmethod
    def backward(ctx, grad):
        a, w = ctx.saved_tensors
        return e4m3(grad.bfloat16()) @ e4m3(w.T.contiguous()).T, grad.T @ a


def exact_float8(config, x, ids, weights, w13, w2, grad):
    """Compute as `exact` does, with the GEMMs' operands rounded to E4M3.

    As in the kernel, the routing weight multiplies the product that gives `da`.
    """
    given = [tensor.double().requires_grad_() for tensor in (x, weights, w13, w2)]
    x64, weights64, first, second = given
    y = torch.zeros_like(x64)
    by_weight = torch.zeros_like(weights64)
    for expert in range(len(w2)):
        row, route = (ids == expert).nonzero(as_tuple=True)
        weight = weights64.detach()[row, route].unsqueeze(1)
        a = activate(Rounded.apply(x64[row], first[expert]).bfloat16().double(), config)
        own = Rounded.apply(a, second[expert])
        y = y.index_add(0, row, weight * own)
        da = e4m3(grad[row]) @ e4m3(second[expert].detach().T.contiguous()).T
        by_weight[row, route] = (a.detach() * da).sum(1)
    found = torch.autograd.grad(y, [x64, first, second], grad.double())
    return [y.detach(), found[0], by_weight.detach(), *found[1:]]


# Numbers that bf16 rounds to the other side of an E4M3 step, 2**-4 of themselves, change a norm by the root of their
# share, at most 2 * 2**-9 / 2**-4: 0.25 * 2**-4. Sums of E4M3 products have some 14 bits.
FLOAT8_BOUND = BOUND + 4 * 0.25 * 2**-4


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS, key=lambda one: one.value), ids=lambda one: one.value)
@pytest.mark.parametrize(
    ("rows", "top_k", "slots", "hidden", "inner", "dropped"),
    [(300, 4, 8, 256, 128, 0.3), (513, 3, 5, 384, 1152, 0.5), (1000, 8, 64, 512, 640, 0.9)],
)
def test_float8_against_rounded_operands(rows, top_k, slots, hidden, inner, dropped, activation):
    given = case(rows, top_k, slots, hidden, inner, activation, dropped)
    found, wanted = ours(*given, float8=True), exact_float8(*given)
    print(errors(found, wanted), errors(found, exact(*given)))
    assert max(errors(found, wanted)) < FLOAT8_BOUND
    for recompute in (False, True):
        again = ours(*given, recompute=recompute, float8=True)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "equal inputs give equal bits"
