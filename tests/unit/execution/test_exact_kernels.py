"""Test the kernels that repeat a token's row for its routes and sum the results, bit for bit against torch.

They run on a GPU or in Triton's interpreter.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ep_moe.execution import exact_exchange
from ep_moe.runtime.batch_invariant import repeat_rows, sum_routes
from tests.fixtures.helpers import same_bits
from tests.fixtures.interpreter import interpreter_problem

PROBLEM = interpreter_problem()
pytestmark = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.mark.parametrize("weighted", [False, True], ids=["ones", "weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "size"), [(0, 2, 64), (1, 1, 64), (5, 3, 1000), (2, 8, 2056)])
def test_the_bits_of_torch(tokens, top_k, size, dtype, weighted):
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("the interpreter cuts bfloat16 off where hardware rounds")
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(tokens * top_k, size, generator=generator).to(DEVICE, dtype)
    rows[:, 3] = -0.0
    given = ()
    if weighted:
        ids, weights = torch.ones(tokens, top_k).int(), torch.rand(tokens, top_k, generator=generator)
        ids[:1, -1], weights[:1, -1] = -1, torch.nan  # a masked route
        given = (ids.to(DEVICE), weights.to(DEVICE))
    found = sum_routes(rows, top_k, *given)
    with mock.patch.object(exact_exchange, "triton", object.__new__(exact_exchange.Missing)):
        wanted = exact_exchange._in_order(rows, top_k, *given)
    assert found.dtype == dtype
    assert same_bits(found, wanted)


@pytest.mark.parametrize(("tokens", "top_k", "size"), [(0, 2, 64), (1, 1, 64), (5, 3, 1000), (2, 8, 2056)])
def test_each_row_as_often_as_it_has_routes(tokens, top_k, size):
    x = torch.randn(size, tokens, generator=torch.Generator().manual_seed(size)).T.to(DEVICE)  # rows are not contiguous
    assert same_bits(repeat_rows(x, top_k), x.repeat_interleave(top_k, 0))
