"""Functions of kernels as operators of torch, called eagerly."""

import torch

from ep_moe.runtime.launch_cache import at_once
from ep_moe.runtime.torch_operator import launching_operator, operator


@operator("tests_doubled")
def doubled(x: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor) -> None:
    out.copy_(2 * x)


@launching_operator("tests_tripled")
def tripled(launch: object, x: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor) -> None:
    assert launch is at_once
    out.copy_(3 * x)


def test_nothing_is_recorded_for_gradients():
    """The kernels write `out`: its graph, and one of inputs that learn, would be of torch's stand-ins."""
    x, workspace = torch.ones(3, requires_grad=True), torch.empty(0)
    for function, factor in ((doubled, 2), (tripled, 3)):
        out = torch.zeros(3)
        function(x, out, workspace)
        assert out.tolist() == [factor] * 3
        assert not out.requires_grad
    assert torch.is_grad_enabled()


def test_compiled_graphs_know_what_an_operator_writes():
    """A launch is none of its arguments."""
    for name in ("tests_doubled", "tests_tripled"):
        schema = getattr(torch.ops.ep_moe, name).default._schema
        assert [argument.name for argument in schema.arguments] == ["x", "out", "workspace"]
        assert [argument.is_write for argument in schema.arguments] == [False, True, True]
