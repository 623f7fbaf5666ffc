"""Test layouts of the Hopper GEMMs on 4-bit weights: inverses, index arithmetic, and what the GEMMs then read."""

import pytest
import torch

from ep_moe.quant.microscale import dequantize_mxfp4
from ep_moe.weights.layouts import cutlass_mixed as sm90

ROWS, COLS = 64, 256  # the smallest size with more than one block of columns; 64 rows are one block of scales
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]

WEIGHTS = {
    "mxfp4 bf16": (sm90.interleave_mxfp4_bf16, sm90.deinterleave_mxfp4_bf16),
    "int4 fp8": (sm90.interleave_int4_fp8, sm90.deinterleave_int4_fp8),
    "mxfp4 fp8": (sm90.interleave_mxfp4_fp8, sm90.deinterleave_mxfp4_fp8),
}
each_weight = pytest.mark.parametrize(("there", "back"), WEIGHTS.values(), ids=WEIGHTS)


def random_bytes(*shape, low=0, high=256):
    return torch.randint(low, high, shape, dtype=torch.uint8)


def mxfp4(*lead, low=118, high=126):
    return random_bytes(*lead, ROWS, COLS // 2), random_bytes(*lead, ROWS, COLS // 32, low=low, high=high)


def numbers(data, scale):
    return dequantize_mxfp4(data.unflatten(-1, (-1, 16)), scale)


# --- inverses ----------------------------------------------------------------


@each_weight
@pytest.mark.parametrize("lead", [(), (3,), (2, 1), (0,)], ids=str)
def test_weights_come_back(there, back, lead):
    data = random_bytes(*lead, 3 * ROWS, COLS // 2)
    kept = data.clone()
    moved = there(data)
    assert moved.shape == data.shape
    assert moved.dtype == torch.uint8
    assert moved.is_contiguous()
    assert torch.equal(back(moved), data)
    assert torch.equal(there(back(data)), data)
    assert torch.equal(data, kept)


@each_weight
def test_every_byte_value_comes_back(there, back):
    data = torch.arange(256, dtype=torch.uint8).repeat_interleave(64).reshape(128, 128)
    for place in (data, data.t().contiguous()):
        assert torch.equal(back(there(place)), place)


@pytest.mark.parametrize("lead", [(), (3,), (2, 1), (0,)], ids=str)
def test_scales_come_back(lead):
    scale = random_bytes(*lead, 3 * ROWS, 12)
    folded = sm90.fold_mxfp4_scale(scale)
    assert folded.shape == (*lead, 3, 3, 16, 4)
    assert torch.equal(sm90.unfold_mxfp4_scale(folded), scale)
    scale = torch.randn(*lead, 3 * ROWS, 3).bfloat16()
    folded = sm90.fold_int4_scale(scale)
    assert folded.shape == (*lead, 3, 3, 8, 8)
    assert torch.equal(sm90.unfold_int4_scale(folded), scale)


@each_weight
def test_a_stack_is_its_matrices_and_row_and_column_blocks_commute(there, back):
    del back
    data = random_bytes(2, 2 * ROWS, COLS // 2)
    moved = there(data)
    assert torch.equal(there(data[1]), moved[1])
    assert torch.equal(there(data.roll(ROWS, 1)), moved.roll(ROWS, 1))
    assert torch.equal(there(data[..., 64:]), moved[..., 64:])
    assert torch.equal(there(data.transpose(0, 1).contiguous().transpose(0, 1)), moved)  # not contiguous


# --- the kernels' index arithmetic -------------------------------------------


def threads():
    """Return for each thread its row (another one is 8 below), its 64 columns, and its number 0 .. 15."""
    rows = [block // 8 * 16 + block % 8 for block in range(ROWS // 2)]
    return ((row, part, buffer_slot) for row in rows for part in range(COLS // 64) for buffer_slot in range(16))


def fp4_bits(word):
    """Permute the bits of four bytes one by one, as the kernel's layout does."""
    places = [6, 7, 8, 15, 22, 23, 24, 31, 3, 4, 5, 12, 19, 20, 21, 28]
    places += [0, 1, 2, 9, 16, 17, 18, 25, 13, 10, 11, 14, 29, 26, 27, 30]
    return sum((word >> bit & 1) << place for bit, place in enumerate(places))


def sign_bits(word):
    moves = {3: 7, 7: 15, 11: 23, 15: 31, 19: 3, 23: 11, 27: 19, 31: 27}
    return sum((word >> bit & 1) << moves.get(bit, bit) for bit in range(32))


def int4_kernel(data, bits):
    out = [[None] * (COLS // 2) for _ in range(ROWS)]
    for row, part, buffer_slot in threads():
        source = part * 32 + buffer_slot * 2
        target = part * 32 + buffer_slot // 8 * 16 + buffer_slot % 4 * 4
        taken = data[row][source : source + 2] + data[row + 8][source : source + 2]
        word = bits(int.from_bytes(taken, "little"))
        out[row + buffer_slot % 8 // 4 * 8][target : target + 4] = word.to_bytes(4, "little")
    return out


def fp4_kernel(data):
    out = [[None] * (COLS // 2) for _ in range(ROWS)]
    for row, part, buffer_slot in threads():
        source = part * 32 + buffer_slot // 4 * 8 + buffer_slot % 4
        target = part * 32 + buffer_slot // 8 * 16 + buffer_slot % 4 * 4
        word = fp4_bits(int.from_bytes([data[row + 8 * (i % 2)][source + 4 * (i // 2)] for i in range(4)], "little"))
        out[row + buffer_slot // 4 % 2 * 8][target : target + 4] = word.to_bytes(4, "little")
    return out


@pytest.mark.parametrize(
    ("there", "kernel"),
    [
        (sm90.interleave_mxfp4_bf16, fp4_kernel),
        (sm90.interleave_int4_fp8, lambda data: int4_kernel(data, lambda word: word)),
        (sm90.interleave_mxfp4_fp8, lambda data: int4_kernel(data, sign_bits)),
    ],
    ids=WEIGHTS,
)
def test_weights_lie_where_the_kernel_puts_them(there, kernel):
    data = random_bytes(ROWS, COLS // 2)
    assert there(data).tolist() == kernel(data.tolist())


@pytest.mark.parametrize(
    ("fold", "scale", "per_slice"),
    [
        (lambda s: sm90.fold_mxfp4_scale(s).view(torch.uint8), random_bytes(2 * ROWS, 8), 4),
        (sm90.fold_int4_scale, torch.randn(2 * ROWS, 2).bfloat16(), 1),
    ],
    ids=["mxfp4", "int4"],
)
def test_scales_lie_where_the_gemm_reads_them(fold, scale, per_slice):
    folded = fold(scale)
    depth = folded.shape[-2]  # rows of a slice, SmemLayoutWeightScaleExpanded
    for row in range(scale.shape[0]):
        for group in range(scale.shape[1]):
            column = row % 64 // depth * per_slice + group % per_slice
            assert folded[row // 64, group // per_slice, row % depth, column] == scale[row, group]


# --- what the GEMMs make of it -----------------------------------------------


def test_the_bf16_kernel_reads_the_numbers():
    """Masks and shifts give bfloat16 numbers that are 2 ** 126 too small.

    A thread's eight numbers are two columns at four places.
    """
    data = random_bytes(ROWS, COLS // 2)
    words = sm90.interleave_mxfp4_bf16(data).view(torch.int32)
    for row, part, buffer_slot in threads():
        word = int(words[row + buffer_slot // 4 % 2 * 8, part * 8 + buffer_slot // 8 * 4 + buffer_slot % 4])
        halves = [word & 0xFFFF, word >> 16 & 0xFFFF]
        fourth = [h << 1 & 0x8000 | h >> 3 & 0x180 | h >> 7 & 0x40 for h in halves]
        bits = [[h & 0x81C0 for h in halves], [h << 3 & 0x81C0 for h in halves], [h << 6 & 0x81C0 for h in halves]]
        for i, pair in enumerate([*bits, fourth]):
            raw = int(data[row + 8 * (i % 2), part * 32 + buffer_slot // 4 * 8 + buffer_slot % 4 + 4 * (i // 2)])
            # 0x8000 is the sign; 0x180 and 0x40 are E2M1's exponent and mantissa at bfloat16's positions
            assert [b >> 12 | b >> 6 & 7 for b in pair] == [raw & 15, raw >> 4]


def e4m3_weights(weight, offset):
    """Return the numbers that the Humming kernel multiplies by: E4M3 from a table by offset, with signs."""
    out = torch.empty(ROWS, COLS, dtype=torch.uint8)
    words, offsets = weight.view(torch.int32).tolist(), sm90.unfold_mxfp4_scale(offset).tolist()
    for row, part, buffer_slot in threads():
        word = words[row + buffer_slot % 8 // 4 * 8][part * 8 + buffer_slot // 8 * 4 + buffer_slot % 4]
        for i in range(8):
            here, column = row + i // 4 * 8, part * 64 + buffer_slot * 4 + i % 4
            o = offsets[here][column // 32] * 8
            magnitude = [0, o, o + 8, o + 12, o + 16, o + 20, o + 24, o + 28][word >> 4 * i & 7]
            sign = word >> 8 * i + 7 & 1 if i < 4 else word >> 8 * (i - 4) + 3 & 1
            out[here, column] = magnitude | sign << 7
    return out.view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize(("low", "high"), [(118, 126), (110, 130), (0, 14)], ids=["narrow", "wide", "tiny"])
def test_the_humming_kernel_reads_the_numbers(low, high):
    data, scale = mxfp4(low=low, high=high)
    weight, offset, residual = sm90.fold_humming(data, scale)
    read = e4m3_weights(weight, offset).double() * (residual.double() * sm90.HUMMING_COMPENSATION)
    back = numbers(*sm90.unfold_humming(weight, offset, residual)).double()
    assert torch.equal(read, back)
    given = numbers(data, scale).double()
    floor = max(int(scale.min()), int(scale.max()) - sm90.HUMMING_RANGE)
    assert ((read - given).abs() <= 2.0 ** (floor - 129)).all()
    assert sm90.humming_is_exact(data, scale) == torch.equal(read, given)


# --- Humming's folding -------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(0, 12), (100, 112), (127, 128), (243, 255)])
def test_humming_keeps_every_number_in_range(low, high):
    data, scale = mxfp4(3, low=low, high=high)
    assert sm90.humming_is_exact(data, scale).all()
    back, back_scale = sm90.unfold_humming(*sm90.fold_humming(data, scale))
    assert torch.equal(back_scale, scale)
    assert torch.equal(numbers(back, back_scale), numbers(data, scale))


def test_humming_rounds_what_lies_below_the_floor():
    """Each code below the floor is rounded, at each depth, as by hand: ties away from zero."""
    halves = {
        1: [0, 1, 1, 2, 2, 3, 4, 5],
        2: [0, 0, 1, 1, 1, 2, 2, 3],
        3: [0, 0, 0, 0, 1, 1, 1, 2],
        4: [0, 0, 0, 0, 0, 0, 1, 1],
    }
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    block = codes[0::2] | codes[1::2] << 4
    for depth in (0, 1, 2, 3, 4, 5, 6, 100, 127, 128, 200):
        top = max(120, depth + 20)
        data = block.repeat(ROWS, COLS // 32)
        scale = torch.full((ROWS, COLS // 32), top, dtype=torch.uint8)
        scale[5, 3] = top - 11 - depth
        back, back_scale = sm90.unfold_humming(*sm90.fold_humming(data, scale))
        assert back_scale[5, 3] == top - 11
        expected = halves.get(depth, list(range(8)) if depth == 0 else [0] * 8)
        low, high = back[5, 48:56] & 15, back[5, 48:56] >> 4
        found = torch.stack([low, high], -1).flatten().tolist()
        assert [code & 7 for code in found] == expected * 2
        assert [E2M1[code] for code in found] == [E2M1[m] for m in expected] + [-E2M1[m] for m in expected]
        assert sm90.humming_is_exact(data, scale) == (depth == 0)


def test_humming_is_exact_if_the_low_blocks_can_be_divided():
    data, scale = mxfp4(3, low=120, high=121)
    scale[:, 7, 2] = 0
    data[0, 7, 32:48] = 0x08  # zeros of both signs
    scale[1, 7, 2] = 120 - 12
    data[1, 7, 32:48] = 0x7C  # 6 and -2 can be halved
    data[2, 7, 32:48] = 0
    data[2, 7, 40] = 1
    assert sm90.humming_is_exact(data, scale).tolist() == [True, True, False]
    back = numbers(*sm90.unfold_humming(*sm90.fold_humming(data, scale)))
    same = (back == numbers(data, scale)).flatten(1).all(1)
    assert same.tolist() == [True, True, False]


def test_humming_folds_each_matrix_of_a_stack_by_itself_and_again_to_the_same():
    data, scale = mxfp4(2, 2, low=100, high=130)
    scale[0, 1] -= 20
    stack = sm90.fold_humming(data, scale)
    assert [tuple(t.shape) for t in stack] == [(2, 2, ROWS, COLS // 2), (2, 2, 1, 2, 16, 4), (2, 2)]
    assert stack[2][0, 0] == stack[2][0, 1] * 2**20
    for one, many in zip(sm90.fold_humming(data[0, 1], scale[0, 1]), stack, strict=True):
        assert torch.equal(one, many[0, 1])
    assert sm90.unfold_mxfp4_scale(stack[1]).unique().tolist() == list(range(1, 13))
    unfolded = sm90.unfold_humming(*stack)
    assert sm90.humming_is_exact(*unfolded).all()
    again = sm90.fold_humming(*unfolded)
    assert torch.equal(again[1], stack[1])
    assert torch.equal(again[2], stack[2])
    assert torch.equal(numbers(*sm90.unfold_humming(*again)), numbers(*unfolded))
