"""Test kernel functions as torch operators, called eagerly."""

import torch

from ep_moe.runtime.launch_cache import launch_directly
from ep_moe.runtime.torch_operator import launching_operator, operator


@operator("tests_doubled")
def doubled(x: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor) -> None:
    out.copy_(2 * x)


@launching_operator("tests_tripled")
def tripled(launch: object, x: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor) -> None:
    assert launch is launch_directly
    out.copy_(3 * x)


def test_nothing_is_recorded_for_gradients():
    """An eager call records no autograd graph.

    The kernels write `out`, and torch would record its default autograd node.
    """
    x, workspace = torch.ones(3, requires_grad=True), torch.empty(0)
    for function, factor in ((doubled, 2), (tripled, 3)):
        out = torch.zeros(3)
        function(x, out, workspace)
        assert out.tolist() == [factor] * 3
        assert not out.requires_grad
    assert torch.is_grad_enabled()


def test_compiled_graphs_know_what_an_operator_writes():
    """A compiled graph knows which arguments an operator writes. The launch function is not an argument."""
    for name in ("tests_doubled", "tests_tripled"):
        schema = getattr(torch.ops.ep_moe, name).default._schema
        assert [argument.name for argument in schema.arguments] == ["x", "out", "workspace"]
        assert [argument.is_write for argument in schema.arguments] == [False, True, True]
