"""Test gradients in buffers (`use_main_grads`) in one process: the graph, other ways to backward, and refusals."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ep_moe import ConfigError, EPContext, ExpertMap, InputError, MoEConfig, MoELayer
from ep_moe.training import clip_grad_norm_, expert_parameters, use_main_grads, zero_main_grads
from ep_moe.weights import main_grads
from ep_moe.weights.kept_gradients import KeptGradients
from ep_moe.weights.lora import LowRank, add_lora
from tests.fixtures.main_grads import writing_kernel

CONFIG = MoEConfig(hidden_size=16, intermediate_size=32, num_experts=4, top_k=2)
WIDE = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=4, top_k=2)
KERNELS = {"reference": contextlib.nullcontext, "writing": writing_kernel}


@pytest.fixture
def context():
    with EPContext.local("cpu") as found:
        yield found


@pytest.fixture(params=KERNELS)
def kernel(request):
    with KERNELS[request.param]():
        yield request.param


def layer_of(context, **options):
    torch.manual_seed(0)
    return MoELayer(CONFIG, context, **options)


def rows(seed=0):
    return torch.randn(9, 16, generator=torch.Generator().manual_seed(seed))


def loss_of(layer, x):
    return layer(x).square().mean()


def pair(context, main_dtype=None, **options):
    """Return an ordinary layer, and one with main gradients."""
    layers = layer_of(context, **options), layer_of(context, **options)
    use_main_grads(layers[1], main_dtype)
    return layers


def assert_same(layers):
    for (name, p), q in zip(layers[0].named_parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def leaves(loss):
    """Return the leaf variables of the graph of a loss, by id."""
    found, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        todo += [following for following, _ in node.next_functions if following is not None]
    return found


def test_one_parameter_stands_for_all_in_the_graph(context, kernel):
    layers = pair(context)
    ordinary, ours = ({id(p) for p in expert_parameters(layer)} & leaves(loss_of(layer, rows())) for layer in layers)
    assert len(ordinary) == 3 * CONFIG.num_experts
    assert len(ours) == 1


def test_only_what_is_asked_for_is_computed(context, kernel):
    """Only the requested gradients are computed.

    torch.autograd.grad and backward(inputs=...) for rows leave the parameters' gradients unchanged.
    """
    ordinary, layer = pair(context)
    x = rows().requires_grad_()
    (found,) = torch.autograd.grad(loss_of(layer, x), x)
    (wanted,) = torch.autograd.grad(loss_of(ordinary, x), x)
    assert torch.equal(found, wanted)
    assert all(p.grad is None for p in expert_parameters(layer))
    loss_of(layer, x).backward(inputs=[x])
    assert all(p.grad is None for p in expert_parameters(layer))
    for one in (ordinary, layer):
        loss_of(one, x).backward(inputs=list(one.parameters()))
    assert_same((ordinary, layer))
    parameters = expert_parameters(layer)
    with pytest.raises(ConfigError, match=r"call loss.backward\(\)"):
        torch.autograd.grad(loss_of(layer, x), parameters, allow_unused=True)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(loss_of(layer, x), parameters[1:])
    assert torch.autograd.grad(loss_of(layer, x), parameters[1:], allow_unused=True) == (None,) * len(parameters[1:])
    assert_same((ordinary, layer))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_graphs_that_are_kept(context, kernel, reentrant):
    layers = pair(context)
    for layer in layers:
        x = rows().requires_grad_()
        checkpoint(loss_of, layer, x, use_reentrant=reentrant).backward()
        loss = loss_of(layer, rows(1))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(layers)


def test_two_calls_before_their_backwards(context, kernel):
    layers = pair(context)
    for layer in layers:
        first, second = loss_of(layer, rows(1)), loss_of(layer, rows(2))
        first.backward()
        second.backward()
    assert_same(layers)
    for layer in layers:
        layer.zero_grad()
        (loss_of(layer, rows(3)) + loss_of(layer, rows(4))).backward()
    assert_same(layers)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_gradients_that_autograd_brings_are_added(context, kernel, dtype):
    """Gradients that autograd computes for the parameters are added to the buffers.

    They come from a loss of the parameters, together with the layer's, before it and after it.
    """
    layers = pair(context, dtype)
    for layer in layers:
        (loss_of(layer, rows()) + sum(p.square().sum() for p in expert_parameters(layer))).backward()
        sum(p.square().sum() for p in expert_parameters(layer)).backward()
        loss_of(layer, rows(1)).backward()
    for p, q in zip(*map(expert_parameters, layers), strict=True):
        # three float32 sums in another order
        assert torch.allclose(p.grad, q.grad if dtype is None else q.main_grad, rtol=0, atol=4 * 2**-24 * 4)
        assert (q.grad is None) == (dtype is not None)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_parameters_in_their_place_for_a_call(context, kernel, dtype):
    """Parameters passed to functional_call get their own gradients, and the other parameters get theirs."""
    layers = pair(context, dtype)
    given = []
    for layer in layers:
        name = "expert_weights.1.w2"
        other = torch.ones_like(layer.get_parameter(name)).requires_grad_()
        functional_call(layer, {name: other}, (rows(),)).square().mean().backward()
        loss_of(layer, rows(1)).backward()
        given.append(other.grad)
    assert torch.equal(*given)
    if dtype is not None:
        for q in expert_parameters(layers[1]):
            q.grad, q.main_grad = q.main_grad, None
    assert_same(layers)


def test_assigned_parameters(context, kernel):
    layers = pair(context)
    for layer in layers:
        loss_of(layer, rows()).backward()
        layer.expert_weights.get_submodule("2").w1 = torch.nn.Parameter(torch.ones(32, 16))
        loss_of(layer, rows(1)).backward()
    assert_same(layers)
    loss = loss_of(layers[1], rows())
    layers[1].expert_weights.get_submodule("2").w1 = torch.nn.Parameter(torch.ones(32, 16))
    layers[1].expert_weights.refresh_slots()
    with pytest.raises((ConfigError, RuntimeError), match=r"between forward and backward|modified inplace"):
        loss.backward()


def test_a_layer_that_is_converted_keeps_its_gradients(context, kernel):
    for dtype in (None, torch.float32):
        layers = pair(context, dtype, dtype=torch.bfloat16)
        for layer in layers:
            loss_of(layer, rows().bfloat16()).backward()
            layer.float()
            loss_of(layer, rows(1)).backward()
        for p, q in zip(*map(expert_parameters, layers), strict=True):
            found = q.grad if dtype is None else q.main_grad
            assert found.dtype == torch.float32
            assert torch.equal(found, p.grad)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_compiled_models(context, kernel, dtype):
    """A compiled layer's gradients are moved from autograd to the buffers, alternating with eager calls."""
    torch.compiler.reset()
    ordinary, layer = pair(context, dtype)
    compiled = torch.compile(layer, backend="aot_eager")
    for seed, call in enumerate((compiled, layer, compiled)):
        loss_of(call, rows(seed)).backward()
        loss_of(ordinary, rows(seed)).backward()
    for p, q in zip(*map(expert_parameters, (ordinary, layer)), strict=True):
        found = q.grad if dtype is None else q.main_grad
        # a traced graph may sum in another order
        assert torch.allclose(found, p.grad, rtol=0, atol=1e-5 * float(p.grad.abs().max()))
        assert (q.grad is None) == (dtype is not None)


def test_an_expert_that_is_held_twice(context, kernel):
    twice = ExpertMap.from_ranks([[0, 1, 2, 3, 1]], 4, allow_duplicates=True)
    layers = pair(context, expert_map=twice)
    for layer in layers:
        for seed in range(2):
            loss_of(layer, rows(seed)).backward()
    assert_same(layers)


def test_state_dicts_have_no_gradients(context):
    ordinary, layer = pair(context, torch.float32)
    loss_of(layer, rows()).backward()
    assert layer.state_dict().keys() == ordinary.state_dict().keys()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    ordinary.load_state_dict(torch.load(file))
    assert all(p.main_grad is not None for p in expert_parameters(layer))
    assert not hasattr(copy.deepcopy(expert_parameters(layer)[0]), "main_grad")


def test_a_step_that_would_skip_parameters_is_refused(context):
    layer = layer_of(context)
    use_main_grads(layer, torch.float32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.step()  # no parameter has a gradient
    loss_of(layer, rows()).backward()
    before = expert_parameters(layer)[0].detach().clone()
    with pytest.raises(ConfigError, match=r"SGD.*p.grad = p.main_grad.to\(p.dtype\)"):
        optimizer.step()
    optimizer.reads_main_grad = True
    optimizer.step()
    del optimizer.reads_main_grad
    for parameter in expert_parameters(layer):
        parameter.grad = parameter.main_grad.to(parameter.dtype)
    assert torch.equal(expert_parameters(layer)[0], before)
    optimizer.step()
    assert not torch.equal(expert_parameters(layer)[0], before)
    optimizer.zero_grad()
    zero_main_grads(layer)
    assert all(p.main_grad is None for p in expert_parameters(layer))
    optimizer.step()
    loss_of(layer, rows()).backward()
    again = layer_of(context)
    again.load_state_dict(layer.state_dict())
    loss_of(again, rows()).backward()
    assert all(torch.equal(p.main_grad, q.grad) for p, q in zip(*map(expert_parameters, (layer, again)), strict=True))


def test_a_parameter_that_learns_later_is_not_skipped(context):
    """A parameter that was frozen when the buffers were made is not skipped once it trains."""
    layer = layer_of(context, dtype=torch.bfloat16)
    late = layer.expert_weights.get_submodule("0").w2.requires_grad_(False)
    use_main_grads(layer, torch.float32)
    late.requires_grad_(True)
    loss_of(layer, rows().bfloat16()).backward()
    with pytest.raises(ConfigError, match=r"SGD.*would skip expert parameters"):
        torch.optim.SGD([late], lr=0.1).step()
    late.main_grad = None
    late.square().sum().backward()
    assert late.grad is None
    assert torch.equal(late.main_grad, 2 * late.float())
    assert late.main_grad.dtype == torch.float32


@pytest.mark.parametrize("frozen", [(), ("w1",), ("w1", "w3"), ("w2",)], ids="+".join)
def test_what_is_frozen_has_no_buffer(context, frozen):
    """It would be as large as the weights. A stored tensor of which one part learns has a buffer for all of it."""
    layer = layer_of(context)
    for name, parameter in layer.expert_weights.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen) if frozen else True)
    use_main_grads(layer, torch.float32)
    sizes = {"w13": 4 * 2 * 32 * 16 * 4, "w2": 4 * 16 * 32 * 4}  # experts, rows, columns, bytes
    for name, parts in (("w13", {"w1", "w3"}), ("w2", {"w2"})):
        if parts <= {*frozen}:
            del sizes[name]
    held = layer.expert_weights.main_grads
    assert {name: buffer.nbytes for name, buffer in held.buffers.items()} == sizes
    assert held.bytes == sum(sizes.values())


def test_the_plan_counts_buffers(context):
    layer = layer_of(context, dtype=torch.bfloat16, experts="reference")
    numbers = sum(p.numel() for p in expert_parameters(layer))
    with writing_kernel():
        before = layer.plan(train_tokens=8)["gradients"]
        use_main_grads(layer)
        assert layer.plan(train_tokens=8)["gradients"] == before
        layer = layer_of(context, dtype=torch.bfloat16, experts="reference")
        use_main_grads(layer, torch.float32)
        assert layer.plan(train_tokens=8)["gradients"] == before + 2 * numbers


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_are_refused_before_and_behind(context, register):
    layer = layer_of(context)
    handle = getattr(expert_parameters(layer)[3], register)(lambda grad: None)
    with pytest.raises(ConfigError, match="has a hook"):
        use_main_grads(layer)
    assert layer.expert_weights.main_grads is None
    handle.remove()
    for dtype in (None, torch.float32):
        layer = layer_of(context)
        use_main_grads(layer, dtype)
        handle = getattr(expert_parameters(layer)[3], register)(lambda grad: None)
        with pytest.raises(InputError, match="has a hook"):
            layer(rows())
        with torch.no_grad():
            layer(rows())
        handle.remove()
        loss_of(layer, rows()).backward()


def test_buffers_of_inference_mode_take_gradients(context):
    layer = layer_of(context, experts="reference")
    with torch.inference_mode():
        use_main_grads(layer)
    loss_of(layer, rows()).backward()  # writes
    first = [parameter.grad.clone() for parameter in layer.expert_weights.parameters()]
    loss_of(layer, rows()).backward()  # adds
    for before, parameter in zip(first, layer.expert_weights.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, 2 * before)
    assert any(before.any() for before in first)


def test_what_is_refused(context):
    layer = layer_of(context)
    with pytest.raises(ConfigError, match=r"torch.float32 or the parameters' float32, got float16"):
        use_main_grads(layer, torch.float16)
    with pytest.raises(ConfigError, match=r"must be a torch.dtype or None, got 'float32'"):
        use_main_grads(layer, "float32")
    loss_of(layer, rows()).backward()
    with pytest.raises(ConfigError, match=r"have a .grad already"):
        use_main_grads(layer, torch.float32)
    use_main_grads(layer)
    use_main_grads(layer)
    with pytest.raises(ConfigError, match="dtype must stay None"):
        use_main_grads(layer, torch.float32)
    other = layer_of(context)
    use_main_grads(other, torch.float32)
    with pytest.raises(ConfigError, match="dtype must stay float32, as an earlier call set it, got None"):
        use_main_grads(other)
    with pytest.raises(ConfigError, match="quantized"):
        use_main_grads(MoELayer(WIDE, context, quantization="fp8_block", experts="reference"))
    model = torch.nn.ModuleList([layer_of(context), layer_of(context)])
    add_lora(model[1].expert_weights, {"w2": LowRank(2, 1.0)}, 0)
    with pytest.raises(ConfigError, match="merge_lora"):
        use_main_grads(model, torch.float32)
    assert model[0].expert_weights.main_grads is None, "all or none"
    assert not hasattr(expert_parameters(model[0])[0], "main_grad")
    layer = layer_of(context)
    use_main_grads(layer)
    add_lora(layer.expert_weights, {"w2": LowRank(2, 1.0)}, 0)
    with pytest.raises(InputError, match="merge_lora"):
        layer(rows())


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_moves_without_gradients_say_nothing(context, dtype):
    layer = layer_of(context)
    use_main_grads(layer, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.expert_weights.set_expert_map(ExpertMap.linear(4, 1))
    assert float(clip_grad_norm_(layer, context, 1.0)) == 0, "before the next backward"
    attribute = "grad" if dtype is None else "main_grad"
    assert all(getattr(p, attribute) is None for p in expert_parameters(layer))
    loss_of(layer, rows()).backward()
    assert all(getattr(p, attribute) is not None for p in expert_parameters(layer))


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_scaler_steps_what_unscales_main_gradients_by_itself(reads, scales, enabled, monkeypatch):
    """A GradScaler is accepted only with an optimizer that reads main gradients and unscales them in its step."""
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    monkeypatch.setattr(main_grads, "frames_of", lambda _: [SimpleNamespace(f_locals={"self": scaler})])
    optimizer = SimpleNamespace(reads_main_grad=reads, _step_supports_amp_scaling=scales)
    refused = enabled and not (reads and scales)
    with pytest.raises(ConfigError, match=r"unscales \.grad and not") if refused else contextlib.nullcontext():
        main_grads._refuse_scaler(optimizer)


@pytest.mark.parametrize("main_dtype", [None, torch.float32])
@pytest.mark.parametrize("keep", [lambda gradient: gradient, lambda gradient: {"of a step": [gradient]}])
def test_a_gradient_that_was_kept_is_named_once(context, kernel, main_dtype, keep):
    """In torch it would keep its numbers: backward allocates a new one."""
    layer = layer_of(context)
    use_main_grads(layer, main_dtype)
    parameter, attribute = expert_parameters(layer)[-1], "grad" if main_dtype is None else "main_grad"

    def step(clear=True):
        loss_of(layer, rows()).backward()
        found = getattr(parameter, attribute)
        if clear:
            layer.zero_grad()
            zero_main_grads(layer)
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            del_later = step()
            del del_later
        clone = step().clone()
        accumulated = step(clear=False)
        step()  # adds to it, as torch does
        del accumulated
        step()
    kept = keep(step())
    with pytest.warns(UserWarning, match=rf"kept = parameter\.{attribute}\).* keep a clone of it"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    del kept, clone


def test_kept_gradients_are_looked_for_ever_more_rarely():
    kept = KeptGradients()
    assert [number for number in range(1, 400) if kept.checks_next()] == [*range(1, 129), 256, 384]
