"""Test the comparison of tp ranks' rows that are not bitwise equal, without ranks."""

import pytest
import torch

from ep_moe.parallel import row_comparison
from ep_moe.parallel.checksum import checksum, is_compared, row_checksums
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.parallel.row_comparison import RowComparison

X, CPU = torch.ones(2, 4), torch.device("cpu")


@pytest.fixture
def comparison():
    return RowComparison(RankGroup(None, (4, 5, 6), 0, FlightRecorder()))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_largest_difference_of_all_ranks_is_told_once(comparison, monkeypatch, order):
    apart = [torch.tensor([0.0, 1e-3]), torch.tensor([2e-5, 0.0])]
    monkeypatch.setattr(row_comparison, "_distances", lambda rows, group: [apart[at] for at in order])
    with pytest.warns(
        UserWarning, match=r"tp ranks 4, 5, 6 are not bitwise equal: .* by up to 1\.0e-03 of a row's norm"
    ):
        assert comparison.problem({"x": X}) is None
    assert comparison.problem({"x": X}) is None, "without a further warning"


def test_the_pair_of_ranks_that_differs_is_named(comparison, monkeypatch):
    apart = [torch.zeros(2), torch.tensor([0.0, torch.inf])]
    monkeypatch.setattr(row_comparison, "_distances", lambda rows, group: apart)
    assert "x on rank 5 differs from rank 6 in 1 of 2 rows" in comparison.problem({"x": X})


def other_rows(found, monkeypatch):
    """Set the rows of the first rank, and compare the others with what is passed next."""
    first = []

    def gathered(own, rank_group):
        first.append(own)
        return [first[0], own, own]

    monkeypatch.setattr(row_comparison, "_gathered", gathered)
    row_comparison._distances(found, None)


def test_a_row_that_is_nan_on_one_rank_alone_is_another(comparison, monkeypatch):
    other_rows(torch.tensor([[2.0, 2.0], [torch.nan, 2.0]]), monkeypatch)
    found = comparison.problem({"x": torch.full((2, 2), 2.0)})
    assert "x on rank 4 differs from rank 5 in 1 of 2 rows" in found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_two_bytes_is_no_difference(dtype, comparison, monkeypatch):
    rows = torch.ones(2, 4, dtype=dtype)
    other_rows(rows, monkeypatch)
    with pytest.warns(UserWarning, match="are not bitwise equal"):
        assert comparison.problem({"x": rows * (1 + 2**-6)}) is None


def test_more_tokens_than_before_are_weighed_as_by_a_new_one(comparison):
    """Facts of more tokens than before equal those of a new comparison. Its table of factors grows with the tokens."""
    for tokens in (1, 40, 3, 700):
        passed = {"x": torch.randn(tokens, 24, generator=torch.Generator().manual_seed(tokens))}
        new = RowComparison(RankGroup(None, (4, 5, 6), 0, FlightRecorder()))
        kept, fresh = (one.facts(passed, CPU, compared=True) for one in (comparison, new))
        assert [int(number) for number in kept] == [int(number) for number in fresh]
        assert int(kept[1]) == int(checksum(passed["x"], CPU))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64])
def test_a_checksum_is_of_the_numbers_wherever_they_lie(dtype):
    """A checksum depends on the values only, for aligned and unaligned, contiguous and strided tensors."""
    whole = torch.randint(0, 2, (4, 19), generator=torch.Generator().manual_seed(0)).to(dtype)
    for view in (whole[0, 1:17], whole[1, 3:6], whole[:, 2:10], whole.t()):
        assert checksum(view, CPU) == checksum(view.clone(memory_format=torch.contiguous_format), CPU)


def test_a_checksum_tells_the_order_of_its_pieces(monkeypatch):
    monkeypatch.setattr("ep_moe.parallel.checksum.WORDS", 4)  # 8 MiB by default
    x = torch.arange(8)
    assert checksum(x, CPU) != checksum(x.roll(4), CPU)


def test_a_checksum_tells_each_bit_of_each_word():
    """A checksum detects each bit of each word. An even factor would lose the highest bit, and 0 all bits."""
    for place in range(6):
        for bit in (1, 1 << 31, -(1 << 63)):
            words = torch.zeros(6, dtype=torch.int64)
            words[place] = bit
            assert int(checksum(words, CPU)) != 0, (place, bit)


def test_ids_of_either_width_are_the_same_ids(comparison):
    """int32 and int64 ids have equal checksums.

    Otherwise ranks that pass different dtypes would compare row by row in each call, and warn of rounding.
    """
    ids = torch.tensor([[0, 5], [-1, 3]])
    narrow, wide = (comparison.facts({"routing.ids": one}, CPU, compared=True) for one in (ids.int(), ids))
    assert [int(number) for number in narrow] == [int(number) for number in wide]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 2, 16), (2, 5), (1, 19), (0, 8), (4,)])
def test_checksums_of_rows_are_those_of_each(dtype, shape, monkeypatch):
    monkeypatch.setattr("ep_moe.parallel.checksum.WORDS", 4)  # 8 MiB by default
    wide = torch.randint(0, 255, (*shape[:-1], shape[-1] + 3), generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = wide[..., 1 : shape[-1] + 1]
    assert row_checksums(rows).tolist() == [int(checksum(row, CPU)) for row in rows]


def test_ranks_are_compared_often_at_first_and_each_128_rounds_later():
    compared = [number for number in range(1, 1000) if is_compared(number)]
    assert compared == [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896]
