"""The emulation of the Blackwell kernels: its numbers equal torch's, and it refuses what the kernels refuse."""

from __future__ import annotations

import pytest
import torch

from tests.emulations import cutlass_sm100 as emulation
from tests.emulations.cutlass import FP8, RELU2

BYTES = torch.arange(256).to(torch.uint8)
BF16 = torch.bfloat16


def test_numbers_are_torchs():
    for decode, dtype in ((emulation.e4m3, FP8), (emulation.e8m0, torch.float8_e8m0fnu)):
        torch.testing.assert_close(decode(BYTES), BYTES.view(dtype).float(), rtol=0, atol=0, equal_nan=True)
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert emulation.e2m1(torch.arange(16)).tolist() == sizes + [-size for size in sizes]


def test_the_nearest_code_and_the_even_one_of_two():
    values = torch.tensor([0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 2.6, 3.5, 5.0, 5.1, 9.0, -0.75, -5.0])
    nearest = [0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0, -1.0, -4.0]
    assert emulation.nearest_e2m1(values).tolist() == nearest


def test_blocks():
    """Rounding is within half a step of each block's scale, and exact where a scale fits."""
    values = torch.tensor([6.0, 3.0, -1.5, 0.5] * 4 + [0.06, 0.03, 0.0, 0.0] * 4)
    assert torch.equal(emulation.to_nvfp4(values, torch.tensor(64.0))[:16], 64 * values[:16])
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-3], [1.0], [1e4]])
    error = (emulation.to_mxfp8(values) - values).abs()
    assert (error <= values.abs() / 16 + values.abs().amax(1, keepdim=True) * 2.0**-16).all()
    assert emulation.to_mxfp8(torch.full((32,), 448.0 * 4)).eq(448 * 4).all(), "a power of two is its own scale"
    assert not emulation.to_mxfp8(torch.zeros(32)).any()


def test_nibbles_of_words_are_those_of_their_bytes():
    packed = torch.randint(0, 256, (4, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    codes = emulation.nibbles(packed)
    assert torch.equal(codes[:, 0::2], (packed & 15).long())
    assert torch.equal(emulation.nibbles(packed.view(torch.int64)), codes)


def test_every_scale_has_a_place():
    where = emulation.offsets(256, 8, swizzled=True)
    assert torch.equal(where.flatten().sort().values, torch.arange(256 * 8))
    assert where[[1, 32, 128, 0, 0], [0, 0, 0, 1, 4]].tolist() == [16, 4, 1024, 1, 512]


def call(**changes) -> torch.Tensor:
    """Multiply MXFP8 rows by MXFP4 weights of two experts. Arguments are zeros, except for `changes`."""
    out = torch.full((6, 128), torch.nan, dtype=BF16)
    scale1, scale2 = torch.zeros(2, 256, 1, dtype=torch.int32), torch.zeros(2, 128, 1, dtype=torch.int32)
    arguments = {
        "output": out, "input": torch.zeros(6, 128, dtype=FP8), "input_sf": torch.zeros(6, 4, dtype=torch.uint8),
        "token_selected_experts": torch.tensor([[0, 1], [1, -1]] * 3, dtype=torch.int32), "token_final_scales": None,
        "fc1_expert_weights": torch.zeros(2, 256, 8, dtype=torch.int64), "fc1_expert_biases": None,
        "fc2_expert_weights": torch.zeros(2, 128, 8, dtype=torch.int64), "fc2_expert_biases": None,
        "quant_scales": [scale1, torch.ones(2), scale2, torch.ones(2)], "swiglu_alpha": None, "swiglu_beta": None,
        "swiglu_limit": None, "swizzled_input_sf": False, "tp_size": 1, "tp_rank": 0, "ep_size": 1, "ep_rank": 0,
        "activation_type": 3, "use_mxfp8_act_scaling": True, "output_dtype": BF16,
    }  # fmt: skip
    emulation.emulate_sm100(**(arguments | changes))
    return out


def test_a_call_of_zeros():
    assert torch.equal(call(), torch.zeros(6, 128, dtype=BF16))


REFUSED = {
    "need their input_sf": {"input_sf": None},
    "input_sf has 12 scales": {"input_sf": torch.zeros(3, 4, dtype=torch.uint8)},
    "input_sf must be contiguous bytes": {"input_sf": torch.zeros(4, 6, dtype=torch.uint8).T},
    "it takes 4 quant_scales, there are 2": {"quant_scales": [torch.ones(2)] * 2},
    "fc1 scale must be torch.int32": {"quant_scales": [torch.ones(2)] * 4},
    "input must be torch.float8_e4m3fn": {"input": torch.zeros(6, 128, dtype=BF16)},
    "fc1_expert_weights must have shape": {"activation_type": RELU2},
    "weights are torch.uint8": {"fc1_expert_weights": torch.zeros(2, 256, 64, dtype=torch.uint8)},
    "must be multiples of": {"fc2_expert_weights": torch.zeros(2, 128, 4, dtype=torch.int64)},
    "both biases": {"fc1_expert_biases": torch.zeros(2, 256, dtype=BF16)},
    "swiglu_alpha must be torch.float32": {"swiglu_alpha": torch.ones(2, dtype=BF16)},
    "an expert twice": {"token_selected_experts": torch.zeros(6, 2, dtype=torch.int32)},
    "output must be torch.float16": {"output_dtype": torch.float16},
    "below its size": {"tp_rank": 1},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused(sentence):
    with pytest.raises(AssertionError, match=sentence):
        call(**REFUSED[sentence])
