"""Test quantization schemes: rounding errors, the packing of codes, and refused shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep_moe import Activation, ConfigError, MoEConfig
from ep_moe.quant.fp8 import FP8_MAX
from ep_moe.quant.microscale import dequantize_mxfp4
from ep_moe.quant.schemes import SCHEMES, Scheme, scheme_of
from ep_moe.weights.parts import etp_shard, join_etp_shards

ROWS, COLUMNS = 256, 384
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SLOP = 2.0**-20  # a float32 division and product, each with an error of half a step of 2**-23

each_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def config(activation: Activation = Activation.SWIGLU, *, hidden: int = 256, inner: int = 256, bias=False) -> MoEConfig:
    return MoEConfig(
        hidden_size=hidden, intermediate_size=inner, num_experts=4, top_k=2, activation=activation, expert_bias=bias
    )


def matrix(*lead: int) -> Tensor:
    """Return normal numbers whose size varies over rows and columns, so that a scale of another block is detected."""
    size = torch.exp2(torch.linspace(-6, 3, ROWS).unsqueeze(1) + torch.linspace(-3, 3, COLUMNS))
    return torch.randn(*lead, ROWS, COLUMNS) * size


def there_and_back(scheme: Scheme, weight: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    return scheme.weights.dequantize(scheme.weights.quantize(weight, dtype))


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Expand one scale per block to one per number."""
    return scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)


def nibbles(packed: Tensor) -> Tensor:
    """Return codes [..., c] of bytes [..., c / 2]."""
    codes = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.int64)
    codes[..., 0::2], codes[..., 1::2] = packed & 15, packed >> 4
    return codes


def half_step_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """Return half a step of E4M3 for each number.

    E4M3 has 3 fraction bits. A number in [2**e, 2**(e+1)) is at most 2**(e-4) from the next code, which is 2**-4 of
    itself.
    Below 2**-6, steps are 2**-9. The scale maps the largest magnitude to 448, so nothing saturates.
    """
    return torch.maximum(weight.abs() * 2.0**-4, scale * 2.0**-10) + weight.abs() * SLOP


# --- within half a step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_plain_is_within_half_a_step(dtype, lead):
    weight = matrix(*lead)
    info = torch.finfo(dtype)
    limit = (weight.abs() * info.eps / 2).clamp(min=info.smallest_normal * info.eps / 2)
    assert ((there_and_back(SCHEMES["none"], weight, dtype) - weight).abs() <= limit).all()


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
@pytest.mark.parametrize("name", ["fp8_static", "fp8_dynamic"])
def test_fp8_per_tensor_is_within_half_a_step(name, lead):
    weight = matrix(*lead)
    scale = SCHEMES[name].weights.quantize(weight, BF16)["_scale"]
    assert scale.shape == lead
    torch.testing.assert_close(scale * FP8_MAX, weight.abs().amax((-2, -1)))
    limit = half_step_fp8(weight, scale[..., None, None])
    assert ((there_and_back(SCHEMES[name], weight) - weight).abs() <= limit).all()


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_fp8_per_channel_is_within_half_a_step(lead):
    weight = matrix(*lead)
    scale = SCHEMES["fp8_channel"].weights.quantize(weight, BF16)["_scale"]
    assert scale.shape == (*lead, ROWS)
    torch.testing.assert_close(scale * FP8_MAX, weight.abs().amax(-1))
    limit = half_step_fp8(weight, scale.unsqueeze(-1))
    assert ((there_and_back(SCHEMES["fp8_channel"], weight) - weight).abs() <= limit).all()


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_fp8_blocks_are_within_half_a_step(lead):
    weight = matrix(*lead)
    scale = SCHEMES["fp8_block"].weights.quantize(weight, BF16)["_scale"]
    for row in range(ROWS // 128):
        for column in range(COLUMNS // 128):
            block = weight[..., row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
            torch.testing.assert_close(scale[..., row, column] * FP8_MAX, block.abs().amax((-2, -1)))
    limit = half_step_fp8(weight, spread(scale, 128, 128))
    assert ((there_and_back(SCHEMES["fp8_block"], weight) - weight).abs() <= limit).all()


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_fp8"])
def test_mxfp4_is_the_nearest_number_of_its_block(name, lead):
    """MXFP4 rounds to the nearest E2M1 number of the block.

    Powers of two scale exactly, so the error is the distance to the nearest E2M1: at most half a step below 6. The
    largest
    number may be in (6, 8), and then saturates.
    """
    weight = matrix(*lead)
    scale = SCHEMES[name].weights.quantize(weight, BF16)["_scale"]
    factor = torch.exp2(spread(scale, 1, 32).double() - 127)
    scaled = weight.double() / factor
    top = scaled.unflatten(-1, (-1, 32)).abs().amax(-1)
    assert ((top >= 4) & (top < 8)).all()
    nearest = (scaled.abs().unsqueeze(-1) - E2M1).abs().amin(-1)
    assert torch.equal((there_and_back(SCHEMES[name], weight) - weight.double()).abs(), nearest * factor)
    half_step = torch.where(scaled.abs() < 2, 0.25, torch.where(scaled.abs() < 4, 0.5, 1.0))
    assert (nearest <= half_step)[scaled.abs() < 6].all()


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_int4_is_within_half_a_step(lead):
    """INT4 is within half a step.

    The scale is a bf16 number, at most 2**-9 of itself below largest / 7. Codes reach 7 * (1 + 2**-8) < 7.5.
    """
    weight = matrix(*lead)
    parts = SCHEMES["int4_fp8"].weights.quantize(weight, BF16)
    scale = spread(parts["_scale"].float(), 1, 128)
    assert ((there_and_back(SCHEMES["int4_fp8"], weight) - weight).abs() <= scale / 2 + weight.abs() * SLOP).all()
    assert not (nibbles(parts[""]) == 8).any()  # -8 is unused: the scale comes from the largest magnitude


# --- exact where nothing needs rounding -----------------------------------------------------------------------------


def representable(scheme: Scheme) -> Tensor:
    def fp8(*shape: int) -> Tensor:
        codes = torch.randint(0, 256, shape, dtype=torch.uint8)
        return torch.where(codes & 0x7F == 0x7F, 0x7E, codes).view(FP8).float()  # 0x7F is NaN, 0x7E is 448

    match scheme.name:
        case "none":
            return torch.randn(ROWS, COLUMNS).bfloat16().float()
        case "fp8_static" | "fp8_dynamic":
            weight = fp8(ROWS, COLUMNS)
            weight[7, 9] = -FP8_MAX
            return weight * 0.75
        case "fp8_channel":
            weight = fp8(ROWS, COLUMNS)
            weight[torch.arange(ROWS), torch.arange(ROWS) % COLUMNS] = -FP8_MAX
            return weight * (0.75 * torch.exp2(torch.arange(ROWS) % 40 - 20.0)).unsqueeze(1)
        case "fp8_block":
            weight = fp8(ROWS, COLUMNS)
            weight[::128, ::128] = FP8_MAX
            return weight * spread(torch.tensor([[1.0, 0.375, 2.0**-20], [2.0**12, 3.0, 0.5]]), 128, 128)
        case "int4" | "int4_fp8" | "mxint4" | "mxint4_fp8":
            group = scheme.weights.unit[1]
            codes = torch.randint(-7, 8, (ROWS, COLUMNS)).float()
            codes[:, 5::group] = -7
            return codes * spread((torch.rand(ROWS, COLUMNS // group) + 0.01).bfloat16().float(), 1, group)
        case "mxfp8":
            weight = fp8(ROWS, COLUMNS)
            weight[:, 7::32] = -FP8_MAX
            return weight * spread(torch.exp2(torch.randint(-100, 101, (ROWS, COLUMNS // 32)).float()), 1, 32)
        case "nvfp4" | "nvfp4a16":
            codes = torch.randint(0, 16, (ROWS, COLUMNS))
            codes[:, 3::16] = 15  # -6, so that quantization finds this block's scale
            scale = fp8(ROWS, COLUMNS // 16).abs().clamp(min=2.0**-6)
            scale[0, 0] = FP8_MAX  # and the matrix's global scale
            return torch.cat([E2M1, -E2M1])[codes] * spread(scale, 1, 16) * 0.75
        case _:
            codes = torch.randint(0, 16, (ROWS, COLUMNS))
            exponent = torch.randint(-100, 101, (ROWS, COLUMNS // 32)).float()
            return torch.cat([E2M1, -E2M1])[codes] * spread(torch.exp2(exponent), 1, 32)


@each_scheme
def test_exact_on_numbers_that_it_has(scheme):
    weight = representable(scheme)
    assert torch.equal(there_and_back(scheme, weight), weight)


@each_scheme
def test_zeros_stay_zeros(scheme):
    parts = scheme.weights.quantize(torch.zeros(2, 128, 128), BF16)
    assert not bits(parts[""]).any()
    assert torch.equal(scheme.weights.dequantize(parts), torch.zeros(2, 128, 128))
    if "_scale" in parts:
        of_blocks = parts["_scale"].dtype in (torch.uint8, FP8)  # E8M0 has a smallest number for 0, and E4M3 has 0
        assert (parts["_scale"].float() == (0 if of_blocks else 1)).all()


@each_scheme
def test_a_block_of_zeros_beside_others(scheme):
    weight = torch.randn(256, 256)
    weight[:128, 128:] = 0
    back = there_and_back(scheme, weight)
    assert (back[:128, 128:] == 0).all()
    assert back.isfinite().all()


@pytest.mark.parametrize("largest", [2.0**-148, 2.0**-139, 2.0**-120])
@each_scheme
def test_the_smallest_numbers_make_no_nan(scheme, largest):
    weight = torch.zeros(128, 128)
    weight[3, 5] = largest
    back = there_and_back(scheme, weight)
    assert back.isfinite().all()
    assert ((back - weight).abs() <= weight.abs()).all()


# --- codes and their order ------------------------------------------------------------------------------------------


def e2m1(values: list[float]) -> list[float]:
    """Round values in a block whose exponent is 0, because its largest number is 6."""
    block = torch.tensor([6.0, *values] + [0.0] * (31 - len(values)))
    parts = SCHEMES["mxfp4"].weights.quantize(block.unsqueeze(0), BF16)
    assert int(parts["_scale"]) == 127
    return [float(value) for value in torch.cat([E2M1, -E2M1])[nibbles(parts[""])[0, 1 : len(values) + 1]]]


@pytest.mark.parametrize("sign", [1, -1])
def test_e2m1_ties_go_to_the_even_code(sign):
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert e2m1([sign * tie for tie in ties]) == [sign * value for value in even]
    assert e2m1([sign * tie * 0.999 for tie in ties]) == [sign * float(value) for value in E2M1[:-1]]
    assert e2m1([sign * tie * 1.001 for tie in ties]) == [sign * float(value) for value in E2M1[1:]]


def test_e2m1_saturates_and_keeps_the_sign_of_zero():
    assert e2m1([6.5, 7.0, 7.999, -7.999]) == [6.0, 6.0, 6.0, -6.0]
    parts = SCHEMES["mxfp4"].weights.quantize(torch.tensor([[6.0, -0.1, 0.1, -0.0] + [0.0] * 28]), BF16)
    assert nibbles(parts[""])[0, :4].tolist() == [7, 8, 0, 8]


@pytest.mark.parametrize(("largest", "byte"), [(4.0, 127), (7.99, 127), (3.99, 126), (2.0**-40, 85), (1.5e38, 251)])
def test_mxfp4_exponent_is_that_of_the_largest_less_e2m1s_own(largest, byte):
    block = torch.zeros(1, 32)
    block[0, 11] = -largest
    assert int(SCHEMES["mxfp4"].weights.quantize(block, BF16)["_scale"]) == byte


def test_mxfp4_is_what_the_checkpoint_reader_reads():
    parts = SCHEMES["mxfp4"].weights.quantize(matrix(2), BF16)
    read = dequantize_mxfp4(parts[""].unflatten(-1, (-1, 16)), parts["_scale"])
    assert torch.equal(SCHEMES["mxfp4"].weights.dequantize(parts), read)
    codes = nibbles(parts[""])
    written_out = torch.cat([E2M1, -E2M1])[codes] * torch.exp2(spread(parts["_scale"], 1, 32).float() - 127)
    assert torch.equal(read, written_out)


@pytest.mark.parametrize(("name", "values", "codes"), [
    ("mxfp4", [6.0, -6.0, 0.5, 3.0], [7, 15, 1, 5]),
    ("int4_fp8", [7.0, -7.0, 1.0, -1.0], [7, 9, 1, 15]),
])  # fmt: skip
def test_even_columns_are_low_nibbles(name, values, codes):
    weight = torch.zeros(1, 128)
    weight[0, :4] = torch.tensor(values)
    parts = SCHEMES[name].weights.quantize(weight, BF16)
    assert parts[""][0, :2].tolist() == [codes[0] | codes[1] << 4, codes[2] | codes[3] << 4]
    assert not parts[""][0, 2:].any()
    assert torch.equal(SCHEMES[name].weights.dequantize(parts), weight)


def test_int4_reads_minus_eight():
    parts = {"": torch.full((1, 64), 0x78, dtype=torch.uint8), "_scale": torch.full((1, 1), 0.5, dtype=BF16)}
    back = SCHEMES["int4_fp8"].weights.dequantize(parts)
    assert (back[0, 0::2] == -4).all()
    assert (back[0, 1::2] == 3.5).all()


# --- whole experts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.RELU2], ids=lambda a: a.value)
@each_scheme
def test_quantize_returns_what_is_specified(scheme, activation, bias, etp):
    shape = config(activation, bias=bias)
    rows, inner = shape.w13_rows // etp, 256 // etp
    tensors = {"w13": torch.randn(rows, 256), "w2": torch.randn(256, inner)}
    kept = {}
    if bias:
        kept |= {"w13_bias": torch.randn(rows).to(BF16), "w2_bias": torch.randn(256).to(BF16)}
    if scheme.activations.calibrated:
        kept |= {"w13_input_scale": torch.tensor(0.5), "w2_input_scale": torch.tensor(0.25)}
    found, specs = scheme.quantize(tensors | kept, BF16), scheme.expert(shape, BF16, etp)
    assert found.keys() == specs.keys()
    for name, spec in specs.items():
        assert (tuple(found[name].shape), found[name].dtype) == (spec.shape, spec.dtype), name
    assert all(found[name] is tensor for name, tensor in kept.items())
    for name, weight in tensors.items():
        assert torch.equal(scheme.dequantize(found, name), there_and_back(scheme, weight))


@pytest.mark.parametrize(("activation", "etp"), [(Activation.SWIGLU, 4), (Activation.RELU2, 2)], ids=str)
@each_scheme
def test_a_piece_over_etp_is_the_piece_of_the_numbers(scheme, activation, etp):
    """An etp piece of the codes is the piece of the values.

    Codes are cut with their scales, scalars go to every rank, and the pieces join to the whole.
    """
    shape = config(activation, inner=512)
    whole = scheme.quantize({"w13": torch.randn(shape.w13_rows, 256), "w2": torch.randn(256, 512)}, BF16)
    pieces = [
        {name: etp_shard(shape, name, tensor, etp, rank) for name, tensor in whole.items()} for rank in range(etp)
    ]
    specs = scheme.expert(shape, BF16, etp)
    for rank, piece in enumerate(pieces):
        for name, tensor in piece.items():
            assert (tuple(tensor.shape), tensor.dtype) == (specs[name].shape, specs[name].dtype), name
        for name in ("w13", "w2"):
            numbers = etp_shard(shape, name, scheme.dequantize(whole, name), etp, rank)
            assert torch.equal(scheme.dequantize(piece, name), numbers)
    for name, tensor in whole.items():
        joined = join_etp_shards(shape, name, [bits(piece[name]) for piece in pieces])
        assert torch.equal(joined, bits(tensor)), name


def test_one_scheme_is_plain():
    assert [name for name, scheme in SCHEMES.items() if scheme.plain] == ["none"]
    assert all(scheme.name == name for name, scheme in SCHEMES.items())
    calibrated = [name for name, scheme in SCHEMES.items() if scheme.activations.calibrated]
    assert calibrated == ["fp8_static", "nvfp4"]
    assert SCHEMES["nvfp4"].expert(config(), BF16)["w13_input_scale"].shape == ()


@pytest.mark.parametrize(
    ("name", "sizes", "etp", "sentence"),
    [
        ("fp8_block", {"hidden": 192}, 1, "quantization fp8_block needs hidden_size to be a multiple of 128, got 192"),
        ("fp8_block", {}, 4, "quantization fp8_block needs intermediate_size / etp to be a multiple of 128, got 64"),
        ("mxfp4", {"hidden": 48}, 1, "quantization mxfp4 needs hidden_size to be a multiple of 32, got 48"),
        ("mxfp4_fp8", {"inner": 80}, 1, "quantization mxfp4_fp8 needs intermediate_size / etp to be a multiple of 32, "
         "got 80"),
        ("int4_fp8", {"inner": 64}, 1, "quantization int4_fp8 needs intermediate_size / etp to be a multiple of 128, "
         "got 64"),
        ("fp8_block", {}, 2, None),
        ("mxfp4", {"hidden": 96}, 8, None),
        ("fp8_static", {"hidden": 24, "inner": 10}, 2, None),
        ("fp8_channel", {"hidden": 24, "inner": 10}, 2, None),
        ("none", {"hidden": 7, "inner": 3}, 1, None),
        ("nvfp4", {"hidden": 24}, 1, "quantization nvfp4 needs hidden_size to be a multiple of 16, got 24"),
        ("nvfp4", {"inner": 80}, 5, None),
        ("mxfp8", {}, 16, "quantization mxfp8 needs intermediate_size / etp to be a multiple of 32, got 16"),
        ("mxint4", {"hidden": 48}, 1, "quantization mxint4 needs hidden_size to be a multiple of 32, got 48"),
        ("mxfp4_mxfp8", {}, 8, None),
    ],
)  # fmt: skip
def test_sizes_that_a_scheme_cannot_store_have_a_sentence(name, sizes, etp, sentence):
    assert SCHEMES[name].unsupported_reason(config(**sizes), etp) == sentence


def test_unknown_name_lists_the_known_ones():
    assert scheme_of("mxfp4") is SCHEMES["mxfp4"]
    with pytest.raises(ConfigError) as error:
        scheme_of("fp4")
    assert str(error.value) == (
        "quantization must be one of none, fp8_static, fp8_dynamic, fp8_channel, fp8_block, mxfp4, mxfp4_fp8, "
        "mxfp4_mxfp8, int4_fp8, int4, mxint4, mxint4_fp8, mxfp8, nvfp4, nvfp4a16, got 'fp4' (did you mean 'nvfp4'?)"
    )
