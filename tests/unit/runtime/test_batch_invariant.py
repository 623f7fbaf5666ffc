"""Test that row operations give a row the same bits among any other rows, in any place, with any threads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from ep_moe.runtime import batch_invariant
from ep_moe.runtime.batch_invariant import BLOCK, ROWS, grouped_linear, linear, pointwise, softmax, sum_columns, top_k
from tests.fixtures.helpers import same_bits

POOL = 2 * ROWS
# sizes at which MKL's or oneDNN's kernels depend on the number of rows or threads, and odd ones
SIZES = [(768, 256), (2880, 64), (33, 7), (257, 2)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_product_depends_on_its_row_alone(sizes, dtype, threads):
    wide, out = sizes
    x, weight, bias = numbers(POOL, wide, dtype=dtype), numbers(out, wide, dtype=dtype), numbers(out, dtype=dtype)
    alone = torch.cat([linear(row, weight, bias) for row in x.split(1)])
    largest = (x.abs().float() @ weight.abs().float().t() + bias.abs()).max()
    near = (alone.double() - (x.double() @ weight.double().t() + bias.double())).abs().max()
    assert near <= (wide * torch.finfo(torch.float32).eps + 2 * torch.finfo(dtype).eps) * largest

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.integers(0, POOL - 1), max_size=3 * ROWS), st.integers(1, 3))
    def check(rows: list[int], count: int) -> None:
        threads(count)
        assert same_bits(linear(x[rows], weight, bias), alone[rows])
        assert torch.get_num_threads() == count

    check()


def test_weights_that_lie_elsewhere_give_the_same_bits():
    x, weight = numbers(5, 33), numbers(7, 33)
    memory = torch.empty(3 + weight.numel())
    moved = memory[3:].view(7, 33).copy_(weight)
    assert same_bits(linear(x, moved), linear(x, weight))


@DTYPES
def test_groups_of_rows_do_not_see_each_other(dtype):
    weight, bias = numbers(3, 96, 768, dtype=dtype), numbers(3, 96, dtype=dtype)
    x = numbers(POOL, 768, dtype=dtype)
    alone = [linear(x, one, more) for one, more in zip(weight, bias, strict=True)]

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(st.tuples(*[st.lists(st.integers(0, POOL - 1), max_size=ROWS + 2)] * 3))
    def check(groups: tuple[list[int], ...]) -> None:
        given_rows = x[[row for rows in groups for row in rows]]
        found = grouped_linear(given_rows, weight, bias, [len(rows) for rows in groups])
        wanted = torch.cat([one[rows] for one, rows in zip(alone, groups, strict=True)])
        assert same_bits(found, wanted)

    check()


@DTYPES
def test_the_gradient_of_a_row_depends_on_it_alone_and_that_of_weights_on_the_order(dtype):
    weight, bias = (numbers(*shape, dtype=dtype).requires_grad_() for shape in ((2, 256, 768), (2, 256)))
    x, grad = numbers(POOL, 768, dtype=dtype), numbers(POOL, 256, dtype=dtype, seed=1)

    def gradients(rows: list[int], counts: list[int]) -> tuple[torch.Tensor, ...]:
        leaf = x[rows].requires_grad_()
        return torch.autograd.grad(grouped_linear(leaf, weight, bias, counts), (leaf, weight, bias), grad[rows])

    alone = torch.cat([gradients([row], [1, 0])[0] for row in range(POOL)])
    rows = list(range(ROWS + 5))
    first, *of_weights = gradients(rows, [len(rows), 0])
    assert same_bits(first, alone[rows])
    # the same rows in the same order, after those of another group
    second, *behind = gradients([40, 41, *rows], [2, len(rows)])
    with pytest.raises(AssertionError):
        assert same_bits(second[2:], first)  # multiplied by another matrix
    weight.data[1], bias.data[1] = weight.data[0], bias.data[0]
    second, *behind = gradients([40, 41, *rows], [2, len(rows)])
    assert same_bits(second[2:], first)
    for one, other in zip(of_weights, behind, strict=True):
        assert same_bits(one[0], other[1])
    exact = grad[rows].double().t() @ x[rows].double()
    assert (of_weights[0][0].double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()


def test_gradients_are_those_of_autograd():
    x, weight, bias = (numbers(*shape).double().requires_grad_() for shape in ((ROWS + 3, 6), (3, 4, 6), (3, 4)))
    assert torch.autograd.gradcheck(lambda *given: grouped_linear(*given, [2, 0, ROWS + 1]), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda given: pointwise(silu, given), (x,))
    assert torch.autograd.gradcheck(lambda given: sum_columns(given), (x,))


@DTYPES
@pytest.mark.parametrize("function", [torch.exp, torch.sigmoid, torch.tanh, silu], ids=lambda found: found.__name__)
def test_a_function_gives_an_element_the_same_bits_in_every_place(function, dtype, threads):
    values = numbers(BLOCK + 77, dtype=dtype)
    alone = torch.cat([pointwise(function, one) for one in values[-200:].split(1)])

    @settings(max_examples=10, deadline=None, derandomize=True, database=None)
    @given(st.integers(1, 200), st.integers(0, 3 * BLOCK), st.integers(1, 3))
    def check(count: int, before: int, many: int) -> None:
        threads(many)
        given_values = torch.cat([values[:1].expand(before), values[-count:]])
        assert same_bits(pointwise(function, given_values)[before:], alone[-count:])

    check()


def test_blocks_are_needed():
    """`pointwise` is needed: without it, the last elements of a tensor have other bits."""
    values = numbers(4096 + 15)
    assert not same_bits(torch.sigmoid(values)[-15:], torch.sigmoid(values.roll(500))[485:500])
    assert same_bits(pointwise(torch.sigmoid, values)[-15:], pointwise(torch.sigmoid, values.roll(500))[485:500])


@pytest.mark.parametrize("width", [1, 3, 8, 100, 256])
def test_a_softmax_depends_on_its_row_alone(width):
    x = numbers(POOL, width) * 5
    alone = torch.cat([softmax(row) for row in x.split(1)])
    assert same_bits(softmax(x[7:40]), alone[7:40])
    assert torch.allclose(alone, x.softmax(-1), rtol=2e-6 * (width.bit_length() + 1), atol=0)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from([-2.0, -0.0, 0.0, 0.5, 1.0, float("-inf"), float("inf")]), min_size=1, max_size=12))
def test_the_best_columns_are_those_of_a_stable_sort(row):
    scores = torch.tensor([row])
    for k in (1, len(row)):
        wanted = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(top_k(scores, k), wanted)


def test_a_nan_is_the_best_whatever_its_sign():
    scores = torch.tensor([[1.0, float("nan"), float("inf"), 0.0]])
    assert top_k(scores, 2).tolist() == top_k(-scores.where(scores.isnan(), -scores), 2).tolist() == [[1, 2]]


def test_a_product_that_raises_gives_the_threads_back(threads):
    threads(3)
    with pytest.raises(RuntimeError):
        linear(numbers(2, 8), numbers(4, 7))
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("fault", ["whole", "threads", "order"])
def test_planted_faults_are_seen(fault, monkeypatch, threads):
    given = [(numbers(POOL, wide), numbers(out, wide)) for wide, out in SIZES]
    alone = [torch.cat([linear(row, weight) for row in x.split(1)]) for x, weight in given]
    if fault == "whole":  # products of all rows at once
        monkeypatch.setattr(batch_invariant._Tile, "of", lambda self, given, part: given[part])
    elif fault == "threads":
        if not any(parted(x[:ROWS], weight, threads) for x, weight in given):
            pytest.skip("no product of these sizes depends on the threads of this CPU")
        monkeypatch.setattr(batch_invariant, "_one_thread", lambda device: torch.no_grad())
        threads(2)
    compute = (lambda x, weight: sum_columns(x.unsqueeze(1) * weight)) if fault == "order" else linear
    assert not all(same_bits(compute(x[:7], weight), one[:7]) for (x, weight), one in zip(given, alone, strict=True))


def parted(x, weight, threads):
    """Return whether torch's own product has other bits on two threads."""
    found = []
    for count in (1, 2):
        threads(count)
        found.append(x @ weight.t())
    threads(1)
    return not same_bits(*found)
