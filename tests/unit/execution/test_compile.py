"""Test `torch.compile` of a layer in one process: one graph holds all of it, and results equal an eager call's."""

import pytest
import torch

from ep_moe import EPContext, ExpertMap, InputError, MoELayer, Routing, RoutingBuffer
from ep_moe.experts.reference import grouped
from ep_moe.placement.placement import Placement
from tests.fixtures.helpers import expert_shapes, fill
from tests.fixtures.single_layer import CPU, context, full, routing, shape  # noqa: F401  (a fixture)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BOUND = {BF16: 2e-2, F16: 2e-3, F32: 1e-5}  # inductor keeps float32 where an eager operation rounds


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


def rows(tokens: int, dtype=F32) -> torch.Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def compile_quickly(call):
    """Compile with the backend "aot_eager", which traces the same graph and gradients without Inductor's C++ build."""
    return torch.compile(call, fullgraph=True, backend="aot_eager")


def close(actual, expected, dtype) -> None:
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=BOUND[dtype] * max(scale, 1e-3))


def random_expert(config, expert, seed):
    generator = torch.Generator().manual_seed(1000 * seed + expert)
    return {name: torch.randn(size, generator=generator) * 0.2 for name, size in expert_shapes(config).items()}


def layer_of(config, context, dtype, **how) -> MoELayer:  # noqa: F811
    return fill(MoELayer(config, context, dtype=dtype, **how), random_expert)


@pytest.mark.parametrize(("dtype", "sizes"), [(F32, (6, 9, 33, 34, 1, 0)), (BF16, (6,)), (F16, (6,))], ids=str)
def test_forward_of_any_number_of_tokens(dtype, sizes, context):  # noqa: F811
    """One compiled layer serves any number of tokens, with at most 4 graphs.

    One dtype gets all sizes, because the graphs depend on sizes in the same way in every dtype.
    """
    layer = layer_of(shape(shared_intermediate_size=16), context, dtype)
    compiled = compile_quickly(layer)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for tokens in sizes:
            x = rows(tokens, dtype)
            close(compiled(x), layer(x), dtype)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= 4, "the first number, any number, and 0 and 1, which are special to torch"


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_by_inductor(dtype, context):  # noqa: F811
    layer = layer_of(full() if dtype == F32 else shape(shared_intermediate_size=16), context, dtype)
    # a C++ compiler takes least time for scalar loops
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        check_gradients(layer, torch.compile(layer, fullgraph=True), (6,), dtype)


@pytest.mark.parametrize(("dtype", "sizes"), [(BF16, (6,)), (F32, (6, 11))], ids=str)
def test_forward_and_backward(dtype, sizes, context):  # noqa: F811
    layer = layer_of(full(), context, dtype)
    check_gradients(layer, compile_quickly(layer), sizes, dtype)


def check_gradients(layer, compiled, sizes, dtype) -> None:
    for tokens in sizes:
        found = []
        for call in (layer, compiled):
            layer.zero_grad()
            x = rows(tokens, dtype).requires_grad_()
            y = call(x)
            y.float().square().sum().backward()
            found.append([y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)])
        for actual, expected in zip(found[1], found[0], strict=True):
            close(actual, expected, dtype)


def test_rows_behind_the_last_group_leave_no_trace(context):  # noqa: F811
    """Routes without an expert contribute nothing to outputs and gradients.

    They stay in the graph as rows that no expert reads.
    """
    layer = layer_of(shape(), context, F32)

    class Routed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x, ids, weights):
            return self.layer.forward_routed(x, Routing(ids, weights))

    compiled = compile_quickly(Routed())
    none = torch.full((6, 2), -1)
    for ids in (routing(6).ids, none):
        found = []
        for call in (Routed(), compiled):
            layer.zero_grad()
            x, weights = rows(6).requires_grad_(), torch.ones(6, 2, requires_grad=True)
            y = call(x, ids, weights)
            y.square().sum().backward()
            found.append([y.detach(), x.grad, weights.grad, *(p.grad for p in layer.expert_weights.parameters())])
        for actual, expected in zip(found[1], found[0], strict=True):
            close(actual, torch.zeros_like(actual) if expected is None else expected, F32)


@pytest.mark.parametrize("dtype", [BF16, F32, F16])
def test_grouped_mm_is_torchs(dtype):
    """`grouped` equals torch's `grouped_mm`. Rows after the last of `ends` are zero, and so are their gradients."""
    x, weight = rows(10, dtype).requires_grad_(), rows(24, dtype).view(3, 8, 16).clone().requires_grad_()
    ends = torch.tensor([3, 3, 7], dtype=torch.int32)
    want = torch.nn.functional.grouped_mm(x[:7], weight.transpose(1, 2), offs=ends)
    expected = torch.autograd.grad(want.float().square().sum(), (x, weight))
    y = grouped(x, weight, ends)
    actual = torch.autograd.grad(y.float().square().sum(), (x, weight))
    assert torch.equal(y[:7], want)
    assert not y[7:].any()
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
    if dtype == F32:
        torch.library.opcheck(grouped, (x.detach(), weight.detach(), ends))
        torch.autograd.gradcheck(lambda x: grouped(x, weight.detach(), ends).double(), (x,), eps=1e-2, atol=1e-2)


@pytest.mark.parametrize("rank", [0, 3])
def test_placing_is_bit_for_bit_the_eager_one(rank):
    """Compiled placement equals eager placement, bit for bit.

    The hash's constants exceed int32, the dtype in which Inductor would write them.
    """
    placement = Placement(ExpertMap.redundant(16, 4, 16), ep_rank=rank)
    ids = torch.randint(-1, 16, (500, 4), generator=torch.Generator().manual_seed(rank))
    given = Routing(ids, torch.ones(500, 4))
    want, loads = placement(given).materialize().ids, placement.expert_load.clone()
    compiled = torch.compile(lambda ids, weights: placement(Routing(ids, weights)).materialize().ids, fullgraph=True)
    assert torch.equal(compiled(ids, given.weights), want)
    assert torch.equal(placement.expert_load, 2 * loads)
    with placement.no_stats():
        compiled(ids, given.weights)
    assert torch.equal(placement.expert_load, 2 * loads)
    with pytest.raises(InputError, match=r"routing.ids must be -1 or in \[0, 16\), got -1 to 16"):
        compiled(ids.clone().fill_(-1).index_fill(0, torch.tensor([7]), 16), given.weights)


@pytest.mark.parametrize("send_masked", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_padding(grad, send_masked, context):  # noqa: F811
    layer = layer_of(shape(), context, F32)
    compiled = compile_quickly(lambda x, mask: layer(x, mask, send_masked=send_masked))
    x, mask = rows(6), torch.tensor([True, False, True, True, False, True])
    with torch.set_grad_enabled(grad):
        close(compiled(x, mask).detach(), layer(x, mask, send_masked=send_masked).detach(), F32)
        layer.placement.reset_load()
        compiled(x, mask)
    assert layer.placement.expert_load.sum() == 4 * layer.config.top_k


def test_a_layer_in_another_dtype_than_it_was_made_in(context):  # noqa: F811
    layer = layer_of(shape(), context, F32)
    compiled = compile_quickly(layer)
    with torch.no_grad():
        compiled(rows(6))
        layer.to(BF16)
        close(compiled(rows(6, BF16)), layer(rows(6, BF16)), BF16)


@pytest.mark.parametrize("grad", [False, True])
def test_load_is_counted_once_a_call(grad, context):  # noqa: F811
    layer = layer_of(shape(), context, BF16)
    compiled = compile_quickly(layer)
    with torch.set_grad_enabled(grad):
        for calls in range(1, 4):
            y = compiled(rows(6, BF16))
            if grad:
                y.float().sum().backward()
            assert int(layer.placement.expert_load.sum()) == calls * 6 * 2
    layer.placement.reset_load()
    with torch.no_grad(), layer.no_stats():
        compiled(rows(6, BF16))
    assert not layer.placement.expert_load.any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_backward_computes_again_is_no_load(reentrant, context):  # noqa: F811
    layer = layer_of(shape(), context, BF16)
    compiled = compile_quickly(layer)
    x = rows(6, BF16).requires_grad_()
    torch.utils.checkpoint.checkpoint(compiled, x, use_reentrant=reentrant).float().sum().backward()
    assert int(layer.placement.expert_load.sum()) == 6 * 2


def test_autocast_within_a_graph(context):  # noqa: F811
    layer = layer_of(shape(), context, F32)
    compiled = compile_quickly(layer)
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        y = compiled(rows(6, BF16))
        assert y.dtype == BF16
        close(y, layer(rows(6, BF16)), BF16)


def test_wrong_arguments_are_refused_as_ever(context):  # noqa: F811
    layer = layer_of(shape(), context, F32)
    with pytest.raises(InputError, match=r"x must be \[..., 16\]"):
        torch.compile(layer, backend="aot_eager")(torch.ones(3, 8))


def test_a_user_of_no_compiler_does_not_load_it():
    import subprocess
    import sys

    script = "import sys, ep_moe, ep_moe.layer; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_fresh_context_needs_no_eager_call():
    with EPContext.local(CPU) as made, torch.no_grad():
        layer = layer_of(shape(), made, BF16)
        y = compile_quickly(layer)(rows(4, BF16))
        close(y, layer(rows(4, BF16)), BF16)


def test_routes_are_recorded_beside_a_graph(context):  # noqa: F811
    """Routes are recorded and replayed for a compiled layer too. Calls within such a block run outside the graph."""
    layer = fill(MoELayer(shape(), context))
    compiled, buffer = torch.compile(layer, backend="aot_eager"), RoutingBuffer(8, 2)
    with torch.no_grad():
        compiled(rows(3))
        with layer.record_routing(buffer):
            for tokens in (3, 5):
                compiled(rows(tokens))
        ids = buffer.read()[0]
        assert torch.equal(ids, torch.cat([layer.router(rows(tokens)).ids for tokens in (3, 5)]).to(ids.dtype))
        with layer.replay_routing(ids[:5]):
            assert torch.equal(compiled(rows(5)), layer(rows(5)))
