"""Test the error bound of block-scaled activations: kernels that round by the format are within it, others are not."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from ep_moe import Activation, MoEConfig
from ep_moe.experts.shared_experts import activate
from ep_moe.quant.microscale import dequantize_mxfp8, dequantize_nvfp4, quantize_mxfp8, quantize_nvfp4
from ep_moe.quant.schemes import SCHEMES, Rounding
from ep_moe.testing.expert_oracle import expected_and_limit, half_step, max_error_ratio, rounded, scale_of_rows
from ep_moe.weights.initial import random_expert

BF16 = torch.bfloat16
SLOTS = 3
MICROSCALED = ["nvfp4", "mxfp8", "mxfp4_mxfp8"]


def config(activation: Activation = Activation.SWIGLU, bias: bool = False) -> MoEConfig:
    return MoEConfig(
        hidden_size=256, intermediate_size=128, num_experts=8, top_k=2, activation=activation, expert_bias=bias
    )


def emulate(config: MoEConfig, scheme: str, experts: list[dict[str, Tensor]], x: Tensor, ids: Tensor, weights: Tensor):
    """Emulate a kernel in torch.

    Both products read rounded rows and add in float32. Both results and the output are in bfloat16.
    """
    quantised, y = SCHEMES[scheme], torch.zeros_like(x)
    shared = max(t["w13_input_scale"] for t in experts) if scheme == "nvfp4" else None

    def rounded_rows(rows: Tensor, global_scale: Tensor | None) -> Tensor:
        if global_scale is None:
            return dequantize_mxfp8(*quantize_mxfp8(rows))
        return dequantize_nvfp4(*quantize_nvfp4(rows, global_scale), global_scale)

    for slot, tensors in enumerate(experts):
        at, column = (ids == slot).nonzero(as_tuple=True)
        w13, w2 = (quantised.dequantize(tensors, name) for name in ("w13", "w2"))
        h = (rounded_rows(x[at], shared) @ w13.T).to(BF16)
        if config.expert_bias:
            h = (h.float() + tensors["w13_bias"].float()).to(BF16)
        a = activate(h.float(), config).to(BF16)
        out = rounded_rows(a, tensors.get("w2_input_scale")) @ w2.T
        if config.expert_bias:
            out = out + tensors["w2_bias"].float()
        y.index_add_(0, at, (out * weights[at, column].unsqueeze(1)).to(BF16))
    return y


@functools.cache
def case(scheme: str, activation: Activation = Activation.SWIGLU, bias: bool = False):
    shape = config(activation, bias)
    experts = [random_expert(shape, SCHEMES[scheme], expert, BF16) for expert in range(SLOTS)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(33, 256, generator=generator).to(BF16)
    ids = torch.rand(33, SLOTS, generator=generator).topk(2).indices
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -1, ids)
    weights = torch.rand(ids.shape, generator=generator) + 0.1
    rows = (x, ids, weights)
    return shape, experts, rows, expected_and_limit(shape, SCHEMES[scheme], experts, *rows, BF16)


def ratio(scheme: str, experts: list[dict[str, Tensor]]) -> float:
    shape, _, rows, wanted = case(scheme)
    return max_error_ratio(emulate(shape, scheme, experts, *rows), *wanted)


@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.value)
@pytest.mark.parametrize("scheme", MICROSCALED)
def test_rounding_as_the_format_says_is_within_it(scheme, activation):
    bias = activation is Activation.SWIGLU_CLAMPED
    shape, experts, rows, wanted = case(scheme, activation, bias)
    assert max_error_ratio(emulate(shape, scheme, experts, *rows), *wanted) <= 1


@pytest.mark.parametrize("scheme", MICROSCALED)
def test_a_kernel_that_does_not_round(scheme):
    """With `rounds=False` the bound is that of the layer's dtype, which a kernel that rounds exceeds."""
    shape, experts, (x, ids, weights), _ = case(scheme)
    wanted = expected_and_limit(shape, SCHEMES[scheme], experts, x, ids, weights, BF16, rounds=False)
    y = torch.zeros(x.shape)
    for slot, tensors in enumerate(experts):
        at, column = (ids == slot).nonzero(as_tuple=True)
        w13, w2 = (SCHEMES[scheme].dequantize(tensors, name) for name in ("w13", "w2"))
        y.index_add_(0, at, activate(x[at].float() @ w13.T, shape) @ w2.T * weights[at, column].unsqueeze(1))
    assert max_error_ratio(y.to(BF16), *wanted) <= 1
    assert max_error_ratio(emulate(shape, scheme, experts, x, ids, weights), *wanted) > 1


@pytest.mark.parametrize(("scheme", "rounds"), [("int4", True), ("mxint4", True), ("nvfp4a16", False)])
def test_weights_that_a_kernel_rounds(scheme, rounds):
    """The bound grows if a kernel rounds weights to bf16: an INT4 code times its scale has more bits, E2M1 has not."""
    shape, experts, rows, (_, limit) = case(scheme)
    _, exact = expected_and_limit(shape, SCHEMES[scheme], experts, *rows, BF16, rounds=False)
    growth = (limit / exact)[exact > 0]
    if rounds:  # two more roundings besides about five; the least growth is where the last rounding dominates
        assert growth.min() > 1.03
        assert 1.1 < growth.mean() < 1.25
    else:
        assert growth.eq(1).all()


# --- errors that it must see ----------------------------------------------------------------------------------------


def planted(scheme: str, name: str, change) -> list[dict[str, Tensor]]:
    """Return the case's experts with one tensor of expert 1 changed."""
    experts = [dict(tensors) for tensors in case(scheme)[1]]
    experts[1][name] = change(experts[1][name])
    return experts


def next_block(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8).roll(1, 1).view(scale.dtype)


def next_row(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8).roll(1, 0).view(scale.dtype)


def doubled(scale: Tensor) -> Tensor:
    return scale + 1 if scale.dtype == torch.uint8 else (scale.float() * 2).clamp(max=448).to(scale.dtype)


def one_doubled(scale: Tensor) -> Tensor:
    """Double the scale of one block of columns, in all rows."""
    return torch.cat([scale.view(torch.uint8)[:, :1], doubled(scale).view(torch.uint8)[:, 1:2],
                      scale.view(torch.uint8)[:, 2:]], 1).view(scale.dtype)  # fmt: skip


@pytest.mark.parametrize("change", [next_block, next_row, doubled])
@pytest.mark.parametrize("name", ["w13_scale", "w2_scale"])
@pytest.mark.parametrize("scheme", MICROSCALED)
def test_wrong_block_scales_leave_it(scheme, name, change):
    assert ratio(scheme, planted(scheme, name, change)) > 1


@pytest.mark.parametrize("name", ["w13_scale", "w2_scale"])
@pytest.mark.parametrize("scheme", MICROSCALED)
def test_one_wrong_block_leaves_it(scheme, name):
    assert ratio(scheme, planted(scheme, name, one_doubled)) > 1


@pytest.mark.parametrize("name", ["w13_global_scale", "w2_global_scale"])
def test_another_experts_global_scale_leaves_it(name):
    assert ratio("nvfp4", planted("nvfp4", name, lambda scale: case("nvfp4")[1][2][name])) > 1


@pytest.mark.parametrize("name", ["w13_input_scale", "w2_input_scale"])
def test_rows_multiplied_back_by_another_input_scale_leave_it(name, monkeypatch):
    """Rows rounded by the right input scale and multiplied by another one leave the bound.

    For the first product, the right scale is the largest of all experts.
    """
    experts = case("nvfp4")[1]
    own, other = max(t[name] for t in experts), min(t[name] for t in experts)
    right = dequantize_nvfp4

    def back(data: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
        return right(data, scale, other if global_scale == own else global_scale)

    monkeypatch.setitem(globals(), "dequantize_nvfp4", back)
    assert ratio("nvfp4", experts) > 1


@pytest.mark.parametrize("scheme", MICROSCALED)
def test_exchanged_nibbles_or_bytes_leave_it(scheme):
    def exchanged(data: Tensor) -> Tensor:
        if data.dtype == torch.uint8:
            return data << 4 | data >> 4
        return data.view(torch.uint8).unflatten(1, (-1, 2)).flip(2).flatten(1).view(data.dtype)

    assert ratio(scheme, planted(scheme, "w2", exchanged)) > 1


# --- the steps that it is made of -----------------------------------------------------------------------------------


def numbers() -> Tensor:
    """Return rows of blocks with large and small numbers and zeros, up to the largest for the global scales."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.exp2(torch.randint(-18, 3, (512, 16), generator=generator).float()).repeat_interleave(32, 1)
    values = torch.randn(512, 512, generator=generator) * sizes
    values[:4] = 0
    return values.clamp(-20, 20)


@pytest.mark.parametrize("global_scale", [20 / 2688, 0.05, 1.0])
def test_no_nvfp4_number_is_further_than_half_a_step(global_scale):
    """No NVFP4 number is off by more than half a step.

    Scales are in E4M3's normal range, below it, below its smallest number, and at its largest, 448.
    """
    values = numbers()
    error = (rounded(values, Rounding.NVFP4, global_scale) - values).abs()
    scale = scale_of_rows(values, Rounding.NVFP4, global_scale)
    limit = half_step(values, scale, Rounding.NVFP4, BF16) * (1 + 2.0**-20)
    assert (error <= limit).all()
    assert (error > 0.95 * limit).any()
    true = quantize_nvfp4(values, global_scale)[1].float().repeat_interleave(16, 1) * global_scale
    assert (true <= scale * (1 + 2.0**-20)).all()


def test_no_mxfp8_number_is_further_than_half_a_step():
    values = numbers()
    error = (rounded(values, Rounding.MXFP8, 1.0) - values).abs()
    scale = scale_of_rows(values, Rounding.MXFP8)
    limit = half_step(values, scale, Rounding.MXFP8, BF16)
    assert (error <= limit).all()
    assert (error > 0.9 * limit)[limit > 0].any()
    true = torch.exp2(quantize_mxfp8(values)[1].float() - 127).repeat_interleave(32, 1)
    assert (true <= scale)[4:].all()


def test_the_outputs_bias_may_be_left_to_another_rank_of_etp():
    shape, experts, rows, (whole, _) = case("nvfp4", bias=True)
    without, _ = expected_and_limit(shape, SCHEMES["nvfp4"], experts, *rows, BF16, output_bias=False)
    _, ids, weights = rows
    bias = torch.stack([tensors["w2_bias"].double() for tensors in experts])
    wanted = (bias[ids.clamp(min=0)] * (weights.double() * (ids >= 0)).unsqueeze(-1)).sum(1)
    torch.testing.assert_close(whole - without, wanted)
