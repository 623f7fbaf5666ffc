"""Test that every tensor factory in the package gets a device and a dtype.

Without a device, a tensor is on the user's default device, so host data may end up on a GPU. Without a dtype, numbers
are in the user's default dtype, so buffers that kernels read as float32 may have half of the bytes.
`tests/distributed/test_default_device.py` and `test_default_dtype.py` test this at run time.
"""

import ast
from pathlib import Path

import pytest

import ep_moe

ROOT = Path(ep_moe.__file__).parent
FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
# `arange`, `randint` and `randperm` make integers, and `as_tensor` keeps the dtype of a tensor
TYPED = FACTORIES - {"arange", "as_tensor", "randint", "randperm"}
# programs with their own process, and data that contracts make under `made_on_the_host`
ELSEWHERE = ("testing/", "bench/", "cli/run.py", "cli/perplexity.py")
# buffers of a module that follows its parameters; an empty placeholder
MEANT = {
    "placement/placement.py": ["torch.zeros(shape, dtype=torch.int64)"],
    "execution/graph_inputs.py": ["torch.empty(0, dtype=torch.float32)"],
}


def unnamed(source: str, argument: str = "device", factories: set[str] = FACTORIES) -> list[str]:
    """Return the calls of torch's factories without an argument."""
    return [
        ast.unparse(call)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in factories
        and not any(keyword.arg in (argument, None) for keyword in call.keywords)
    ]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_each_tensor_has_a_device(path):
    name = path.relative_to(ROOT).as_posix()
    if not name.startswith(ELSEWHERE):
        assert unnamed(path.read_text()) == MEANT.get(name, [])


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_each_tensor_has_a_dtype(path):
    if not path.relative_to(ROOT).as_posix().startswith(ELSEWHERE):
        assert unnamed(path.read_text(), "dtype", TYPED) == []


def test_it_sees_one():
    assert unnamed("torch.full((2,), -1)\ntorch.zeros(3, device=d)\ntorch.ones(2, **how)\nx.new_zeros(3)") == [
        "torch.full((2,), -1)"
    ]
    assert unnamed("torch.arange(3)\ntorch.zeros(3, device=d)\ntorch.ones(2, dtype=t)", "dtype", TYPED) == [
        "torch.zeros(3, device=d)"
    ]
