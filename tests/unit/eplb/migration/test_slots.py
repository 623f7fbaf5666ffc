"""Test a slot's bytes and their checksum: a row holds all of an expert, and every change is detected."""

import pytest
import torch

from ep_moe import ExpertMap, MoEConfig
from ep_moe.eplb.migration.slots import Checksum, SlotStore
from ep_moe.quant.schemes import SCHEMES
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.layouts.base import WeightLayout
from ep_moe.weights.layouts.cutlass import CutlassSm90

CHECKSUM = Checksum(torch.device("cpu"))
MAP = ExpertMap.from_ranks([[0, 1, 2]], 3)


def weights_of(scheme, weight_layout, bias=True, dtype=torch.bfloat16):
    config = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=3, top_k=1, expert_bias=bias)
    kwargs = {"scheme": SCHEMES[scheme], "weight_layout": weight_layout, "dtype": dtype}
    weights = ExpertWeights(config, MAP, **kwargs).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for tensor in [*weights.parameters(), *weights.buffers()]:
        noise = torch.randint(0, 256, (tensor.numel() * tensor.itemsize,), generator=generator, dtype=torch.uint8)
        tensor.view(-1).view(torch.uint8).copy_(noise)
    return weights


def damage(store, row):
    found = torch.full((2,), 77)
    store.examine(row, found[1])
    assert found[0] == 77
    return int(found[1])


def put(store, rows):
    pairs = torch.full((store.slots, 2), -1)
    store.address(rows, pairs)
    assert pairs[: len(rows)].tolist() == [[slot, row.data_ptr()] for slot, row in rows.items()]
    store.write(rows, pairs)


def raw(weights, slot):
    """Return a slot's bytes of all registered tensors, found without `slot_tensors`."""
    held = [*(weights._slots or weights._parameters).items(), *weights._buffers.items()]
    return {name: tensor.detach()[slot].reshape(-1).view(torch.uint8).clone() for name, tensor in held}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("weight_layout", [WeightLayout, CutlassSm90])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_holds_all_of_a_slot(scheme, weight_layout):
    """Reading a row in pieces of any size and writing it elsewhere copies all registered tensors, and nothing else."""
    weights = weights_of(scheme, weight_layout)
    store = SlotStore(weights, CHECKSUM)
    before, bystander = raw(weights, 0), raw(weights, 1)
    assert not same(before, raw(weights, 2))
    row = torch.full((store.row_bytes,), 0xAB, dtype=torch.uint8)
    for start in range(0, store.row_bytes, 5000):
        stop = min(start + 5000, store.row_bytes)
        store.read(0, start, stop, row[start:stop])
    assert damage(store, row) == 0
    put(store, {2: row})
    assert same(raw(weights, 2), before)
    assert same(raw(weights, 0), before)
    assert same(raw(weights, 1), bystander)
    assert store.checksum(0) == store.checksum(2) != store.checksum(1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_byte_counts(scheme):
    """A change in the first or last byte of any tensor is detected, in the row and in the slot."""
    weights = weights_of(scheme, CutlassSm90)
    store = SlotStore(weights, CHECKSUM)
    row = torch.zeros(store.row_bytes, dtype=torch.uint8)
    store.read(1, 0, store.row_bytes, row)
    sound = store.checksum(1).clone()
    for name, (first, last) in store._spans.items():
        for byte in (first, last - 1):
            row[byte] ^= 1
            assert damage(store, row) != 0, (name, byte)
            row[byte] ^= 1
        view = weights.slot_tensors()[name][1].view(-1).view(torch.uint8)
        view[-1] ^= 128
        assert store.checksum(1) != sound, name
        view[-1] ^= 128
    assert damage(store, row) == 0
    for byte in range(store.row_bytes - 8, store.row_bytes):
        row[byte] ^= 1
        assert damage(store, row) != 0
        row[byte] ^= 1


def test_a_row_that_never_came_is_damaged():
    store = SlotStore(weights_of("none", WeightLayout), CHECKSUM)
    assert damage(store, torch.zeros(store.row_bytes, dtype=torch.uint8)) != 0


def test_a_scale_per_slot_that_somebody_adds_moves_too():
    weights = weights_of("none", WeightLayout)
    plain = SlotStore(weights, CHECKSUM).row_bytes
    weights.register_buffer("w13_extra_scale", torch.tensor([1.0, 2.0, 3.0]))
    store = SlotStore(weights, CHECKSUM)
    assert store.row_bytes == plain + 8
    row = torch.zeros(store.row_bytes, dtype=torch.uint8)
    store.read(2, 0, store.row_bytes, row)
    put(store, {0: row})
    assert weights.w13_extra_scale.tolist() == [3.0, 2.0, 3.0]


def test_a_store_is_right_until_a_row_changes():
    """`SlotStore.fits` returns False once the layout of the weights changes.

    The owner keeps the store, and asks before each use.
    """
    weights, other = (weights_of("none", WeightLayout) for _ in range(2))
    store = SlotStore(weights, CHECKSUM)
    assert store.fits(weights)
    assert not store.fits(other)
    weights.to(torch.float32)
    assert not store.fits(weights)
    store = SlotStore(weights, CHECKSUM)
    assert store.fits(weights)
    weights.register_buffer("w13_extra_scale", torch.ones(3))
    assert not store.fits(weights)


def test_a_tensor_that_is_not_per_slot_is_refused():
    weights = weights_of("none", WeightLayout)
    weights.register_buffer("table", torch.zeros(7))
    with pytest.raises(AssertionError, match=r"\['table'\] of ExpertWeights are not \[3 slots"):
        SlotStore(weights, CHECKSUM)


def test_slots_of_a_rank_without_experts():
    config = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=3, top_k=1)
    some, none = (ExpertWeights(config, ExpertMap.uneven([3, 0]), ep_rank=rank) for rank in (0, 1))
    assert SlotStore(some, CHECKSUM).row_bytes == SlotStore(none, CHECKSUM).row_bytes


def test_a_checksum_depends_on_places_over_blocks():
    """The checksum detects blocks that change places, as it detects words.

    The data has more words than one block of weights.
    """
    words = torch.arange(3 << 20, dtype=torch.int64) + (1 << 60)
    data = words.view(torch.uint8)
    blocks = words.view(3, -1)[[1, 0, 2]].reshape(-1).view(torch.uint8)
    pair = words.clone()
    pair[[5, 9]] = pair[[9, 5]]
    found = {int(CHECKSUM(part)) for part in (data, blocks, pair.view(torch.uint8), data[:-1], data[:-8])}
    assert len(found) == 5
    for stop in (19, 20):  # whole words, and a remainder
        assert CHECKSUM(data[3:stop]) == CHECKSUM(data[3:stop].clone()), "wherever it begins in memory"


def test_a_sum_is_the_same_whatever_was_summed_before():
    """A checksum does not depend on what was summed before.

    On a CPU the table of factors grows with the size of the data.
    """
    device = torch.device("cpu")
    parts = [torch.arange(size, dtype=torch.int64).to(torch.uint8) for size in (5, 4000, 17, 24_000, 9)]
    alone = [Checksum(device)(part) for part in parts]
    one = Checksum(device)
    assert [one(part) for part in parts] == alone
    assert [one(part) for part in reversed(parts)] == alone[::-1]
    assert len(set(map(int, alone))) == len(alone)
