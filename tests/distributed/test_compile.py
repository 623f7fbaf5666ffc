"""`torch.compile` of an expert-parallel layer: the layer runs between two graphs and equals the eager call."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ep_moe import EPContext, InputError, MoEConfig, MoELayer, training
from ep_moe.testing import distributed, rank_device
from tests.fixtures.helpers import fill

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=6, top_k=2, shared_intermediate_size=16)


class Block(torch.nn.Module):
    """A layer with dense parts around it, as in a model."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.before = torch.nn.Linear(16, 16, device=layer.device, dtype=layer.dtype)
        self.layer = layer

    def forward(self, x):
        return x + self.layer(self.before(x)).tanh()


def made(context: EPContext, dtype: torch.dtype, **how) -> Block:
    torch.manual_seed(5)
    layer = MoELayer(CONFIG, context, dtype=dtype, **how)
    with torch.no_grad():
        for parameter in [*layer.parameters()]:
            parameter.zero_()
    fill(layer)
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in [*layer.router.parameters(), *layer.shared_experts.parameters()]:
            parameter.normal_()
    return Block(layer)


def rows(rank: int, step: int, like: Block) -> torch.Tensor:
    """Return rows of a number that differs between ranks and steps, and is 0 once."""
    tokens = [3 + rank, 0 if rank else 4, 5 - rank][step]
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(tokens, 16, generator=generator).to(like.layer.device, like.layer.dtype)


@distributed(2, deadline_s=120.0)
@pytest.mark.parametrize(("all2all", "dtype"), [("allgather", torch.float32), ("torch_a2a", torch.bfloat16)])
def test_forward_and_backward_as_eager(all2all, dtype):
    context = EPContext.from_torchrun(device=rank_device())
    block = made(context, dtype, all2all=all2all, experts="reference")
    compiled = torch.compile(block, backend="aot_eager")
    for grad in (True, False):
        for step in range(3):
            found = []
            for call in (block, compiled):
                block.zero_grad()
                block.layer.placement.reset_load()
                x = rows(context.layout.rank, step, block).requires_grad_(grad)
                with torch.set_grad_enabled(grad):
                    y = call(x)
                if grad:
                    y.float().sum().backward()
                gradients = [None if p.grad is None else p.grad.clone() for p in block.parameters()]
                found.append([y.detach(), x.grad, block.layer.placement.expert_load.clone(), *gradients])
            for actual, expected in zip(*found, strict=True):
                assert (actual is None) == (expected is None)
                assert actual is None or torch.equal(actual, expected)
    context.destroy()


@distributed(2, deadline_s=120.0)
@pytest.mark.parametrize("main_grads", [False, True])
def test_a_compiled_optimizer_step(main_grads):
    """A compiled step is that of an eager one, and runs the checks of steps."""
    with EPContext.from_torchrun(device=rank_device()) as context:
        found = []
        for compiled in (False, True):
            torch._dynamo.reset()
            block = made(context, torch.float32, all2all="allgather", experts="reference")
            if main_grads:
                training.use_main_grads(block)
            optimizer = torch.optim.SGD(block.parameters(), lr=0.125, momentum=0.5, foreach=True)
            step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
            for at in range(3):
                block(rows(context.layout.rank, at, block)).square().sum().backward()
                training.sync_gradients(block, context)
                step()
                optimizer.zero_grad()
            y = block(rows(context.layout.rank, 0, block))
            block(rows(context.layout.rank, 1, block)).square().sum().backward()
            step()
            with pytest.raises(InputError, match="an optimizer has updated the layer's parameters"):
                y.sum().backward()
            found.append([parameter.detach().clone() for parameter in block.parameters()])
        for eager, other in zip(*found, strict=True):
            torch.testing.assert_close(other, eager)


@distributed(2)
@pytest.mark.parametrize("what", ["layer", "block"])
def test_a_full_graph_is_refused_in_words(what):
    context = EPContext.from_torchrun(device=rank_device())
    block = made(context, torch.float32, all2all="allgather", experts="reference")
    compiled = torch.compile(block if what == "block" else block.layer, fullgraph=True, backend="eager")
    words = r"call torch.compile\(model\) without fullgraph=True"
    if torch.__version__ < "2.13":  # older versions do not print why a function is not compiled
        words += "|Hard failure due to fullgraph=True"
    with pytest.raises(Exception, match=words):
        compiled(torch.ones(2, 16, device=block.layer.device))
    context.destroy()


@distributed(2)
def test_a_wrong_call_is_refused_on_all_ranks():
    context = EPContext.from_torchrun(device=rank_device())
    block = made(context, torch.float32, all2all="allgather", experts="reference")
    compiled = torch.compile(block.layer, backend="eager")
    x = torch.ones(2, 8 if context.layout.rank else 16, device=block.layer.device)
    with pytest.raises(InputError, match=r"rank 1: x must be \[..., 16\]"):
        compiled(x)
    context.destroy()


@distributed(2, deadline_s=120.0)
def test_what_records_operations_is_refused_and_breaks_nothing():
    def under(mode, model, x):
        with mode:
            model(x)

    recorders = {
        "export": lambda model, x: torch.export.export(model, (x,)),
        "jit": lambda model, x: torch.jit.trace(model, (x,), check_trace=False),
        "make_fx": lambda model, x: make_fx(model)(x),
        "fake": lambda model, x: under(FakeTensorMode(allow_non_fake_inputs=True), model, x),
    }
    with EPContext.from_groups(device=rank_device(), deadline_s=30) as context, torch.no_grad():
        block = made(context, torch.float32)
        x = rows(context.layout.rank, 0, block)
        wanted = block(x)
        for name, record in recorders.items():
            with pytest.raises(InputError, match=r"torch\.export, torch\.jit\.trace and fake tensors cannot record"):
                record(block, x)
            assert torch.equal(block(x), wanted), name
