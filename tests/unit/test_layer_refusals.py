"""Test what MoELayer and its dispatchers refuse, by field and value, in one process."""

# ruff: noqa: F811

import pytest
import torch

from ep_moe import ExpertMap, ExpertsOptions, InputError, MoELayer, Routing
from ep_moe.types import PhysicalIds, PhysicalRouting
from tests.fixtures.helpers import fill, integer_rows
from tests.fixtures.single_layer import HIDDEN, IDS, WEIGHTS, context, routing, shape  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([1.0] * HIDDEN, "x must be a Tensor, got list"),
        (torch.ones(3, 8), "x must be [..., 16] (hidden_size), got [3, 8]"),
        (torch.tensor(1.0), "x must be [..., 16] (hidden_size), got []"),
        (torch.ones(3, HIDDEN).bfloat16(), "x must be float32 as the layer is, got bfloat16"),
        (torch.ones(3, HIDDEN, device="meta"), "x must be on cpu as the layer is, got meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("all2all", ["local", "allgather", "torch_a2a"])
def test_bad_x_is_refused_by_field_and_value(context, all2all, x, message):
    layer = MoELayer(shape(), context, all2all=all2all)
    for call in (lambda: layer(x), lambda: layer.forward_routed(x, Routing(IDS, WEIGHTS))):
        with pytest.raises(InputError) as error:
            call()
        assert message in str(error.value)
    assert layer.placement.expert_load.sum() == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((IDS, WEIGHTS), "routing must be a Routing of logical ids, got tuple"),
        (PhysicalRouting(PhysicalIds(IDS), WEIGHTS), "routing must be a Routing of logical ids, got PhysicalRouting"),
        (Routing(IDS[:, :1], WEIGHTS), "routing.ids must be [T, K] = [3, 2], got [3, 1]"),
        (Routing(IDS[:2], WEIGHTS), "routing.ids must be [T, K] = [3, 2], got [2, 2]"),
        (Routing(IDS, WEIGHTS[:, 0]), "routing.weights must be [T, K] = [3, 2], got [3]"),
        (Routing(IDS.float(), WEIGHTS), "routing.ids must be int32 or int64, got float32"),
        (Routing(IDS, WEIGHTS.bfloat16()), "routing.weights must be float32, got bfloat16; call .float()"),
        (Routing(IDS, WEIGHTS.to("meta")), "routing.weights must be on cpu as x is, got meta"),
        (Routing(IDS + 1, WEIGHTS), "routing.ids must be -1 or in [0, 6), got 6"),
        (Routing(IDS - 1, WEIGHTS), "routing.ids must be -1 or in [0, 6), got -2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("all2all", ["local", "allgather", "torch_a2a"])
def test_bad_routing_is_refused_by_field_and_value(context, all2all, given, message):
    layer = MoELayer(shape(), context, all2all=all2all)
    with pytest.raises(InputError) as error:
        layer.forward_routed(torch.ones(3, HIDDEN), given)
    assert message in str(error.value)


@pytest.mark.parametrize("all2all", ["local", "allgather", "torch_a2a"])
def test_layer_works_after_a_refused_call(context, all2all):
    layer = fill(MoELayer(shape(), context, all2all=all2all))
    x, chosen = integer_rows(3, HIDDEN, 0), Routing(IDS, WEIGHTS)
    before = layer.forward_routed(x, chosen)
    for bad in (torch.ones(3, 8), "x"):
        with pytest.raises(InputError):
            layer(bad)
    assert torch.equal(layer.forward_routed(x, chosen), before)


def test_dispatcher_refuses_logical_ids(context):
    """A dispatcher refuses logical ids. Shape and range cannot tell them apart: both are integers below E."""
    layer = MoELayer(shape(), context)
    with pytest.raises(InputError) as error:
        layer._dispatcher().dispatch(torch.ones(3, HIDDEN), Routing(IDS, WEIGHTS))
    assert "routing must be a PhysicalRouting (pass it through Placement), got Routing" in str(error.value)


@pytest.mark.parametrize(
    ("x", "ids", "message"),
    [
        (torch.ones(3, 8), IDS, "x must be [T, 16], got [3, 8]"),
        (torch.ones(1, 3, HIDDEN), IDS, "x must be [T, 16], got [1, 3, 16]"),
        (torch.ones(3, HIDDEN).half(), IDS, "x must be float32, got float16"),
        (torch.ones(3, HIDDEN), IDS[:1], "routing.ids must be [T, K] = [3, 2], got [1, 2]"),
        (torch.ones(3, HIDDEN), IDS + 1, "ids out of range: 1 on rank 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("all2all", ["local", "allgather", "torch_a2a"])
def test_dispatcher_refuses_what_does_not_fit(context, all2all, x, ids, message):
    layer = MoELayer(shape(), context, all2all=all2all)
    with pytest.raises(InputError) as error:
        layer._dispatcher().dispatch(x, PhysicalRouting(PhysicalIds(ids), WEIGHTS))
    assert message in str(error.value)


def test_a_result_is_waited_for_once(context):
    layer = MoELayer(shape(), context)
    pending = layer._dispatcher().dispatch_start(torch.ones(3, HIDDEN), PhysicalRouting(PhysicalIds(IDS), WEIGHTS))
    pending.wait()
    with pytest.raises(RuntimeError, match="waited for already"):
        pending.wait()


def test_rows_that_backward_cannot_keep_are_refused(context):
    """Rows made in inference mode are refused where backward would keep them.

    This is one sentence on all ranks. torch's own error would leave the context of several ranks broken.
    """
    layer = MoELayer(shape(), context)
    with torch.inference_mode():
        x = torch.ones(3, HIDDEN)
        wanted = layer(x)
    with pytest.raises(InputError, match=r"x was made in torch\.inference_mode\(\).*pass x\.clone\(\)"):
        layer(x)
    layer(x.clone()).sum().backward()
    with torch.no_grad():
        assert torch.equal(layer(x), wanted)
    assert torch.equal(layer.requires_grad_(False)(x), wanted), "nothing of it is kept"


@pytest.mark.parametrize("part", ["router", "shared_experts", "expert_weights"])
def test_rows_that_the_backward_of_one_part_cannot_keep_are_refused(part, context):
    layer = MoELayer(shape(shared_intermediate_size=8), context).requires_grad_(False)
    with torch.inference_mode():
        x = torch.ones(3, HIDDEN)
    layer(x)
    getattr(layer, part).requires_grad_(True)
    with pytest.raises(InputError, match=r"x was made in torch\.inference_mode\(\)"):
        layer(x)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transforms_of_torch_func_are_refused(context, transform):
    layer, x = MoELayer(shape(), context), torch.ones(2, 3, HIDDEN)
    calls = {
        "grad": lambda: torch.func.grad(lambda rows: layer(rows).sum())(x),
        "vmap": lambda: torch.func.vmap(layer)(x),
        "jvp": lambda: torch.func.jvp(layer, (x,), (x,)),
    }
    with pytest.raises(InputError, match=r"MoELayer does not support transforms of torch\.func"):
        calls[transform]()
    layer(x)


def test_a_map_that_moved_no_weights_is_refused(context):
    layer, x = MoELayer(shape(), context), torch.ones(3, HIDDEN)
    wanted, before = layer(x).detach(), layer.placement.expert_map
    moved = ExpertMap.from_ranks([[*reversed(range(before.num_experts))]], before.num_experts)
    layer.placement.update(moved)
    with pytest.raises(InputError, match=r"Placement\.update changed the expert map.*ExpertBalancer"):
        layer(x)
    layer.placement.update(ExpertMap.linear(before.num_experts, 1))
    assert torch.equal(layer(x), wanted)


def test_a_router_that_was_converted_alone_is_refused(context):
    layer, x = MoELayer(shape(), context).bfloat16(), torch.ones(3, HIDDEN).bfloat16()
    layer.router.float()
    with pytest.raises(
        InputError, match=r"router\.weight must be bfloat16 as the layer is, got float32; .*float32_logits"
    ):
        layer(x)
    layer.forward_routed(x, Routing(IDS, WEIGHTS))
    layer.router.bfloat16()
    layer(x)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("of", ["x", "router.weight", "expert_weights.0.w1", "shared_experts.up_proj.weight"])
def test_a_batch_of_gradients_is_right_or_refused(context, of, exact):
    """`is_grads_batched=True` gives the gradients of one call each, where it is not refused."""
    layer = fill(MoELayer(shape(shared_intermediate_size=16), context, options=ExpertsOptions(exact=exact)))
    x = integer_rows(3, HIDDEN, 0).requires_grad_()
    wanted, y = {"x": x, **dict(layer.named_parameters())}[of], layer(x)
    batch = torch.stack([integer_rows(3, HIDDEN, seed) for seed in range(2)])
    if exact or of.startswith("expert_weights"):
        with pytest.raises(InputError, match=r"does not support batched gradients .* once for each output"):
            torch.autograd.grad(y, wanted, batch, is_grads_batched=True)
        return
    (found,) = torch.autograd.grad(y, wanted, batch, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, wanted, one, retain_graph=True)[0] for one in batch]
    torch.testing.assert_close(found, torch.stack(each))


@pytest.mark.parametrize("within", [False, True])
def test_torch_jit_script_is_refused(context, within):
    layer = MoELayer(shape(), context)
    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), layer) if within else layer
    with pytest.raises(InputError, match=rf"^{layer.name}: torch\.jit\.script cannot compile.*call torch\.compile"):
        torch.jit.script(model)
