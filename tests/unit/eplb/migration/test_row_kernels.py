"""Test the Triton kernels for EPLB's rows and checksums against torch; on a CPU, in Triton's interpreter."""

from __future__ import annotations

import ctypes
import sys
from unittest import mock

import numpy as np
import pytest
import torch

from tests.fixtures.interpreter import interpreter_problem

if problem := interpreter_problem():
    pytest.skip(problem, allow_module_level=True)

from ep_moe import ExpertMap, MoEConfig
from ep_moe.eplb.migration import slots
from ep_moe.eplb.migration.slots import Checksum, SlotStore
from ep_moe.weights.expert_weights import ExpertWeights

pytestmark = pytest.mark.filterwarnings("ignore:overflow")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
SLOTS = 3
CHECKSUM = Checksum(DEVICE)
WORDS = [[1], [7, 4096], [5000, 1, 8192, 3], [4095, 4097]]


def random_words(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Tensors of random words, the kernels for them, and their rows computed by torch."""

    def __init__(self, words: list[int]) -> None:
        self.host = [random_words(SLOTS, count, seed=index) for index, count in enumerate(words)]
        self.parts = [part.to(DEVICE) for part in self.host]
        self.kernels = CHECKSUM.rows([(part.data_ptr(), part.shape[1]) for part in self.parts])
        self.row_bytes = 8 * (sum(words) + 1)

    def row(self, slot: int) -> torch.Tensor:
        parts = [part[slot].view(torch.uint8) for part in self.host]
        return torch.cat([*parts, Checksum(CPU).of_parts(parts).view(1).view(torch.uint8)])

    def packed(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """Pack a part of a slot's row; assert that the words before and after it are unchanged."""
        out = torch.full((stop - start + 16,), 0xAB, dtype=torch.uint8, device=DEVICE)
        self.kernels.pack(slot, start, stop, out[8:-8])
        assert (out[:8] == 0xAB).all()
        assert (out[-8:] == 0xAB).all()
        return out[8:-8].cpu()

    def examined(self, row: torch.Tensor) -> int:
        found = torch.full((3,), 77, device=DEVICE)
        self.kernels.examine(row.to(DEVICE), found[1])
        assert found[0] == found[2] == 77
        return int(found[1])


@pytest.mark.parametrize("words", [*WORDS, [(1 << 20) + 5, 9], [(1 << 21) + 4096]], ids=str)
def test_a_row_is_torchs(words):
    case = Case(words)
    for slot in (2, 0, 2) if sum(words) < 1 << 20 else (1,):  # each call leaves the scratch memory at zero
        row = case.packed(slot, 0, case.row_bytes)
        assert torch.equal(row, case.row(slot))
        assert case.examined(row) == 0
    assert CHECKSUM._scratch.count_nonzero() == 0


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_any_range(words):
    case = Case(words)
    whole, last = case.row(1), case.row_bytes // 8
    edges = {0, 1, last - 1, last, *(edge + near for edge in np.cumsum(words) for near in (-1, 0, 1)), 4095, 4096, 4097}
    edges = sorted(int(edge) for edge in edges if 0 <= edge <= last)
    for number, start in enumerate(edges):
        for stop in edges[number + 1 :]:
            found = case.packed(1, 8 * start, 8 * stop)
            assert torch.equal(found, whole[8 * start : 8 * stop]), (start, stop)


def test_a_range_without_the_checksum_takes_its_own_programs_alone():
    case = Case([5000, 1, 8192, 3])
    grids = []
    weigh = mock.MagicMock(__getitem__=lambda _, grid: grids.append(grid) or (lambda *_, **__: None))
    with mock.patch.object(slots, "_weigh", weigh):
        for start, stop in ((0, 1), (4095, 4097), (4999, 5002), (0, 13196), (0, 13197), (13196, 13197)):
            case.kernels.pack(0, 8 * start, 8 * stop, torch.empty(8 * (stop - start), dtype=torch.uint8))
    assert grids == [(1,), (2,), (3,), (6,), (6,), (6,)]


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_what_is_not_as_it_was_is_found(words):
    case = Case(words)
    row = case.row(0)
    for word in {0, sum(words) // 2, *(int(edge) - 1 for edge in np.cumsum(words)), sum(words)}:
        row[8 * word + 3] ^= 16
        assert case.examined(row) != 0, word
        row[8 * word + 3] ^= 16
    assert case.examined(row) == 0
    assert case.examined(torch.zeros_like(row)) != 0, "bytes that never came"
    last = case.row(1)
    row[-8:] = last[-8:]
    assert case.examined(row) != 0, "another row's checksum"
    if sum(words) > 1:
        swapped = last.view(torch.int64).clone()
        swapped[[0, sum(words) - 1]] = swapped[[sum(words) - 1, 0]]
        assert case.examined(swapped.view(torch.uint8)) != 0
    assert case.examined(last) == 0


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_rows_are_written_and_nothing_else(words):
    case = Case(words)
    rows = [case.row(slot).to(DEVICE) for slot in range(SLOTS)]
    before = [part.clone() for part in case.host]
    # the count is 2, so the third pair is ignored
    pairs = torch.tensor([[2, rows[0].data_ptr()], [0, rows[1].data_ptr()], [1, rows[2].data_ptr()]], device=DEVICE)
    case.kernels.write(pairs, 2)
    for part, old in zip(case.parts, before, strict=True):
        assert torch.equal(part.cpu(), old[[1, 1, 0]])


# --- in a store -----------------------------------------------------------------------------------------------------


def store_of(weights):
    """Return a store that uses the kernels, on a CPU too."""
    found = SlotStore(weights, CHECKSUM)
    assert found._on_gpu() is not None
    return found


@pytest.fixture
def weights(monkeypatch):
    monkeypatch.setattr(slots, "_is_on_gpu", lambda tensor: True)
    config = MoEConfig(hidden_size=12, intermediate_size=20, num_experts=3, top_k=1, expert_bias=True)
    held = ExpertWeights(config, ExpertMap.from_ranks([[0, 1, 2]], 3), device=DEVICE).requires_grad_(False)
    for index, parameter in enumerate(held.parameters()):
        parameter.view(-1).view(torch.int64).copy_(random_words(parameter.numel() // 2, seed=index))
    return held


def torch_form():
    return mock.patch.object(SlotStore, "_on_gpu", return_value=None)


def whole_row(held, slot):
    row = torch.full((held.row_bytes,), 0xAB, dtype=torch.uint8, device=DEVICE)
    held.read(slot, 0, held.row_bytes, row)
    return row


def examined(held, row):
    found = torch.full((), 77, device=DEVICE)
    held.examine(row, found)
    return int(found)


def test_a_store_does_the_same_by_either_form(weights):
    held = store_of(weights)
    rows = [whole_row(held, slot) for slot in range(3)]
    with torch_form():
        assert all(torch.equal(rows[slot], whole_row(held, slot)) for slot in range(3))
        assert [examined(held, row) for row in rows] == [0, 0, 0]
    assert [examined(held, row) for row in rows] == [0, 0, 0]
    row = rows[1].clone()
    row[100] ^= 1
    found = examined(held, row)
    with torch_form():
        assert found == examined(held, row) != 0
    pairs = torch.full((3, 2), -1, device=DEVICE)
    chosen = {2: rows[0], 0: rows[1]}
    held.address(chosen, pairs)
    held.write(chosen, pairs)
    assert all(torch.equal(whole_row(held, slot), rows[source]) for slot, source in ((0, 1), (1, 1), (2, 0)))
    held.write({}, pairs)


@pytest.mark.skipif(DEVICE.type == "cuda" or not sys.platform.startswith("linux"), reason="of a host's addresses")
def test_an_address_below_2_to_the_31():
    """The kernels accept an address below 2**31.

    A Python that is not a position-independent executable has its heap there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    # PROT_READ | PROT_WRITE; MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT
    low = libc.mmap(None, 4096, 3, 0x62, -1, ctypes.c_long(0))
    assert 0 < low < 2**31
    case = Case([7])
    out = torch.frombuffer((ctypes.c_uint8 * 56).from_address(low), dtype=torch.uint8)
    case.kernels.pack(1, 0, 56, out)
    assert torch.equal(out, case.row(1)[:56])
    libc.munmap(ctypes.c_void_p(low), 4096)


def test_tensors_that_were_replaced_are_found(weights):
    """The kernels use the new addresses after the weights' tensors were replaced, as `.to(device)` does."""
    held = store_of(weights)
    row = whole_row(held, 1)
    kernels = held._on_gpu()
    before = {name: tensor.data for name, tensor in weights.stored_tensors().items()}
    weights._apply(torch.clone)
    for tensor in before.values():
        tensor.zero_()
    assert torch.equal(whole_row(held, 1), row)
    assert held._on_gpu() is not kernels
    assert held._on_gpu() is held._on_gpu()
    pairs = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    held.address({0: row}, pairs)
    held.write({0: row}, pairs)
    assert torch.equal(whole_row(held, 0), row)
    assert all(tensor.count_nonzero() == 0 for tensor in before.values())


def test_parts_that_are_not_whole_words_are_for_torch(weights):
    weights.register_buffer("w13_extra_scale", torch.tensor([1.0, 2.0, 3.0], device=DEVICE))
    held = SlotStore(weights, CHECKSUM)
    assert held._on_gpu() is None
    assert examined(held, whole_row(held, 2)) == 0
