"""Test the layouts of FlashInfer's CUTLASS kernel, and ExpertWeights that store them: stored tensors come back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep_moe import Activation, ConfigError, ExpertMap, InputError, MoEConfig
from ep_moe.experts.flashinfer.cutlass import ACTIVATIONS
from ep_moe.experts.shared_experts import activate
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.quant.fp8 import FP8
from ep_moe.quant.schemes import SCHEMES, Rounding, Scheme
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.initial import random_expert
from ep_moe.weights.layouts import cutlass_mixed as mixed
from ep_moe.weights.layouts.base import WeightLayout
from ep_moe.weights.layouts.cutlass import BOUND, SM90_SCHEMES, CutlassSm90, activation_bound
from ep_moe.weights.parts import etp_shard, join_etp_shards, split_parts
from tests.emulations import cutlass as emulation

BF16, F16 = torch.bfloat16, torch.float16
QUANTISED = [name for name in SM90_SCHEMES if name != "none"]

each_scheme = pytest.mark.parametrize("scheme", [SCHEMES[name] for name in SM90_SCHEMES], ids=SM90_SCHEMES)
each_quantised = pytest.mark.parametrize("scheme", [SCHEMES[name] for name in QUANTISED], ids=QUANTISED)
with_and_without_a_gate = pytest.mark.parametrize(
    "activation", [Activation.SWIGLU, Activation.RELU2], ids=lambda a: a.value
)


def config(activation: Activation = Activation.SWIGLU, *, bias: bool = True, inner: int = 128, **more) -> MoEConfig:
    return MoEConfig(
        hidden_size=256,
        intermediate_size=inner,
        num_experts=3,
        top_k=1,
        activation=activation,
        expert_bias=bias,
        **more,
    )


def random_tensors(shape: MoEConfig, scheme: Scheme, dtype: torch.dtype = BF16, seed: int = 0) -> dict[str, Tensor]:
    """Return random bits of each kind that the scheme has.

    Left out is what `mxfp4_fp8` does not keep: -0, and exponents further apart than its range.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, spec in scheme.expert(shape, dtype).items():
        draw = {"size": spec.shape, "generator": generator}
        if spec.dtype == torch.uint8 and scheme.name == "mxfp4_fp8":
            if name.endswith("_scale"):
                tensors[name] = torch.randint(107, 107 + mixed.HUMMING_RANGE + 1, **draw).byte()
            else:
                low, high = (torch.randint(0, 15, **draw) for _ in range(2))
                tensors[name] = ((low + (low >= 8)) | (high + (high >= 8)) << 4).byte()
        elif spec.dtype == torch.uint8:
            # 255 is NaN, and codes times 253 or 254 overflow float32
            tensors[name] = torch.randint(0, 253 if name.endswith("_scale") else 256, **draw).byte()
        elif name.endswith("_scale"):
            tensors[name] = (torch.rand(**draw) + 0.01).to(spec.dtype)
        else:
            tensors[name] = torch.randn(**draw).to(spec.dtype)
    return tensors


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


# --- one expert -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@with_and_without_a_gate
@each_scheme
def test_what_is_prepared_comes_back(scheme, activation, bias, dtype):
    shape = config(activation, bias=bias)
    weight_layout = CutlassSm90(shape, scheme, dtype)
    tensors = random_tensors(shape, scheme, dtype)
    given = {name: tensor.clone() for name, tensor in tensors.items()}
    stored = weight_layout.prepare(tensors)
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in weight_layout.specs().items()
    }
    assert_equal(weight_layout.restore(stored), tensors)
    assert_equal(tensors, given)


@each_scheme
def test_a_piece_of_an_expert_comes_back(scheme):
    shape = config(inner=256)
    weight_layout = CutlassSm90(shape, scheme, BF16, 2)
    whole = random_tensors(shape, scheme)
    for rank in range(2):
        piece = {name: etp_shard(shape, name, tensor, 2, rank) for name, tensor in whole.items()}
        stored = weight_layout.prepare(piece)
        assert {name: tuple(t.shape) for name, t in stored.items()} == {
            name: spec.shape for name, spec in weight_layout.specs().items()
        }
        assert_equal(weight_layout.restore(stored), piece)


def test_what_is_stored_besides_the_canonical_tensors():
    for name in SM90_SCHEMES:
        scheme = SCHEMES[name]
        more = CutlassSm90(config(), scheme, BF16).specs().keys() - scheme.expert(config(), BF16).keys()
        residuals = {"w13_residual", "w2_residual"}
        expected = {"fp8_dynamic": {BOUND}, "int4_fp8": {BOUND}, "mxfp4_fp8": residuals}
        assert more == expected.get(name, set())


def as_the_kernel_reads(name: str, scheme: Scheme, stored: dict[str, Tensor]) -> Tensor:
    """Return the values of a stored matrix by the layouts that the emulation derives from FlashInfer's kernels."""
    parts = {part: stored[name + part].unsqueeze(0) for part in ("", "_scale", "_residual") if name + part in stored}
    match scheme.name:
        case "mxfp4":
            return emulation._weight_w4a16(name, parts[""], parts["_scale"])[0]
        case "mxfp4_fp8":
            return emulation._weight_humming(name, parts[""], parts["_scale"])[0] * parts["_residual"]
        case "int4_fp8":
            return emulation._weight_w4a8(name, parts[""], parts["_scale"])[0]
        case _:
            return scheme.dequantize(stored, name)


@with_and_without_a_gate
@each_scheme
def test_up_comes_first(scheme, activation):
    shape = config(activation)
    tensors = random_expert(shape, scheme, 0, BF16)
    stored = CutlassSm90(shape, scheme, BF16).prepare(tensors)
    w13 = scheme.dequantize(tensors, "w13")
    swapped = torch.cat([w13[128:], w13[:128]]) if activation.gated else w13
    assert torch.equal(as_the_kernel_reads("w13", scheme, stored), swapped)
    assert torch.equal(as_the_kernel_reads("w2", scheme, stored), scheme.dequantize(tensors, "w2"))
    bias = tensors["w13_bias"]
    assert torch.equal(stored["w13_bias"], torch.cat([bias[128:], bias[:128]]) if activation.gated else bias)
    assert torch.equal(stored["w2_bias"], tensors["w2_bias"])


def test_the_canonical_preparation_changes_nothing():
    tensors = random_tensors(config(), SCHEMES["mxfp4"])
    weight_layout = WeightLayout(config(), SCHEMES["mxfp4"], BF16)
    assert_equal(weight_layout.prepare(tensors), tensors)
    assert_equal(weight_layout.restore(tensors), tensors)
    assert weight_layout.specs() == SCHEMES["mxfp4"].expert(config(), BF16)


# --- what no activation exceeds -------------------------------------------------------------------------------------

SMALL = {"hidden_size": 8, "intermediate_size": 4, "num_experts": 1, "top_k": 1}


def small_expert(shape: MoEConfig, generator: torch.Generator, size: float) -> dict[str, Tensor]:
    w13 = torch.randn(shape.w13_rows, 8, generator=generator) * size
    tensors = {"w13": w13, "w2": torch.zeros(8, 4)}
    if shape.expert_bias:
        tensors |= {"w13_bias": torch.randn(shape.w13_rows, generator=generator) * size, "w2_bias": torch.zeros(8)}
    return tensors


def rows_of_interest(w13: Tensor, generator: torch.Generator) -> Tensor:
    """Return rows of several sizes: random, along each row of w13 (where Cauchy-Schwarz is tight), and in between."""
    along = torch.nn.functional.normalize(w13, dim=1)
    gate, up = along.chunk(2) if len(along) == 8 else (along, along)
    ways = torch.cat([torch.randn(64, 8, generator=generator) / 8**0.5, along, gate + up, gate - up, up - gate])
    sizes = torch.tensor([0.0, 0.1, 1.0, 3.0, 10.0, 100.0, -1.0, -30.0])
    return (ways.unsqueeze(0) * sizes.view(-1, 1, 1)).flatten(0, 1)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.value)
def test_the_bound_is_one(activation, bias):
    shape = MoEConfig(**SMALL, activation=activation, expert_bias=bias)
    generator = torch.Generator().manual_seed(5)
    tightest = 0.0
    for turn in range(40):
        tensors = small_expert(shape, generator, size=(0.05, 0.5, 2.0, 8.0)[turn % 4])
        if turn % 3 == 0 and activation.gated:  # gate and up are equal, so both are tight at once
            for name in tensors.keys() & {"w13", "w13_bias"}:
                tensors[name] = tensors[name].chunk(2)[0].repeat(2, *[1] * (tensors[name].dim() - 1))
        bound = activation_bound(shape, SCHEMES["none"], tensors)
        assert (bound.dtype, bound.shape) == (torch.float32, ())
        x = rows_of_interest(tensors["w13"], generator).double()
        h = x @ tensors["w13"].double().T
        if bias:
            h = h + tensors["w13_bias"].double()
        ratio = activate(h, shape).abs().amax(1) / (bound.double() * (x.square().sum(1) + 1))
        assert ratio.max() <= 1 + 1e-6
        tightest = max(tightest, float(ratio.max()))
    if activation is not Activation.SWIGLU_CLAMPED:
        assert tightest > 0.98  # a loose bound would waste fp8's smallest numbers


@pytest.mark.parametrize("name", ["fp8_dynamic", "int4_fp8"])
def test_the_bound_is_of_the_dequantised_weights_and_is_stored(name):
    scheme, shape = SCHEMES[name], config(Activation.GEGLU)
    tensors = random_expert(shape, scheme, 0, BF16)
    stored = CutlassSm90(shape, scheme, BF16).prepare(tensors)
    w13 = scheme.dequantize(tensors, "w13").double()
    length = (w13.square().sum(1) + tensors["w13_bias"].double().square()).sqrt()
    torch.testing.assert_close(stored[BOUND].double(), (length[:128] * length[128:]).max(), rtol=1e-5, atol=0)


# --- parameters in the kernel's layout ------------------------------------------------------------------------------


def etp_link(size: int, rank: int) -> RankGroup:
    """Return a rank's place in an etp group without peers."""
    return RankGroup(None, tuple(range(size)), rank, FlightRecorder())


HELD = [0, 1, 3, 4]  # slots that hold experts 2, 0, 1, 0; slot 2 is empty


def made(scheme: Scheme, shape: MoEConfig | None = None, **options) -> ExpertWeights:
    options = {"weight_layout": CutlassSm90, "dtype": BF16} | options
    expert_map = ExpertMap.from_ranks([[2, 0, -1, 1, 0]], 3, allow_duplicates=True)
    return ExpertWeights(shape or config(), expert_map, scheme=scheme, **options)


def experts_of(shape: MoEConfig, scheme: Scheme, dtype: torch.dtype = BF16) -> list[dict[str, Tensor]]:
    return [random_tensors(shape, scheme, dtype, seed) for seed in range(shape.num_experts)]


def filled(scheme: Scheme, shape: MoEConfig | None = None, **options) -> ExpertWeights:
    weights = made(scheme, shape, **options)
    for expert, tensors in enumerate(experts_of(weights.config, scheme)):
        assert weights.update_expert(expert, tensors) == weights.local_experts.count(expert)
    return weights


def flat(experts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors by the names in a state dict, in which gate and up of plain tensors are separate."""
    found = {}
    for expert, tensors in enumerate(experts):
        plain = set(tensors) <= {"w13", "w2", "w13_bias", "w2_bias"} and tensors["w13"].itemsize > 1
        for name, tensor in tensors.items():
            gated = tensors["w13"].shape[0] == 2 * tensors["w2"].shape[1]
            parts = split_parts(name, tensor, gated) if plain else {name: tensor}
            found |= {f"{expert}.{part}": value for part, value in parts.items()}
    return found


@with_and_without_a_gate
@each_scheme
def test_state_dict_has_the_canonical_tensors(scheme, activation):
    shape = config(activation)
    assert_equal(dict(filled(scheme, shape).state_dict()), flat(experts_of(shape, scheme)))


@each_scheme
def test_checkpoints_go_from_one_layout_to_another_and_back(scheme):
    state = filled(scheme).state_dict()
    canonical = made(scheme, weight_layout=WeightLayout)
    canonical.load_state_dict(state)
    for name, expected in experts_of(config(), scheme)[2].items():
        assert torch.equal(bits(canonical.get_parameter(name)[0]), bits(expected))
    back = made(scheme)
    back.load_state_dict(canonical.state_dict())
    first = filled(scheme)
    for name, parameter in back.stored_tensors().items():
        assert torch.equal(bits(parameter)[HELD], bits(first.get_parameter(name))[HELD]), name
    for name in ("w13", "w2"):
        assert back.dense(name).dtype == BF16
        assert torch.equal(back.dense(name)[HELD], canonical.dense(name)[HELD])


@with_and_without_a_gate
@each_scheme
def test_pieces_over_etp_are_prepared_each_for_itself(scheme, activation, monkeypatch):
    shape = config(activation, inner=256)
    ranks = [filled(scheme, shape, etp=etp_link(2, rank)) for rank in range(2)]
    experts = experts_of(shape, scheme)
    for rank, weights in enumerate(ranks):
        for slot, expert in enumerate(weights.local_experts):
            if expert >= 0:
                pieces = {name: etp_shard(shape, name, tensor, 2, rank) for name, tensor in experts[expert].items()}
                assert_equal(weights.slot(slot), pieces)
                prepared = CutlassSm90(shape, scheme, BF16, 2).prepare(pieces)
                assert_equal({name: p[slot] for name, p in weights.stored_tensors().items()}, prepared)

    # emulates the etp group in one process: tensors are gathered in this order
    order = iter([(slot, name) for slot in (1, 3, 0) for name in ranks[0].names])

    def all_gather(pieces: list[Tensor], wire: Tensor, group: object) -> None:
        slot, name = next(order)
        for rank, out in enumerate(pieces):
            piece = ranks[rank].slot(slot)[name]
            assert piece.numel() * piece.itemsize == wire.numel() * wire.itemsize
            out.copy_(piece.view(out.dtype))

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    assert_equal(dict(ranks[0].state_dict()), flat(experts))
    assert next(order, None) is None


@each_scheme
def test_join_etp_shards_undoes_etp_shard_for_every_tensor(scheme):
    shape = config(inner=256)
    for name, tensor in random_tensors(shape, scheme).items():
        joined = join_etp_shards(shape, name, [bits(etp_shard(shape, name, tensor, 2, rank)) for rank in range(2)])
        assert torch.equal(joined, bits(tensor)), name


@each_scheme
def test_update_of_one_tensor_leaves_the_others(scheme):
    shape = config()
    new = random_tensors(shape, scheme, seed=77)
    for name in new:
        weights = filled(scheme)
        with_scales = (name, f"{name}_scale", f"{name}_global_scale") if name in ("w13", "w2") else (name,)
        given = {part: new[part] for part in with_scales if part in new}
        assert weights.update_expert(0, given) == 2
        now = experts_of(shape, scheme)
        now[0].update(given)
        assert_equal(dict(weights.state_dict()), flat(now))  # the other tensors too
        prepared = CutlassSm90(shape, scheme, BF16).prepare(now[0])  # also what is derived from several tensors
        for slot in (1, 4):
            assert_equal({name: p[slot] for name, p in weights.stored_tensors().items()}, prepared)


def test_fresh_quantised_weights_are_the_plain_ones_rounded():
    """New quantized weights are the plain ones rounded, in any layout.

    Random weights depend only on the seed and the expert.
    """
    torch.manual_seed(3)
    plain = made(SCHEMES["none"])
    numbers = [{name: tensor.float() for name, tensor in plain.slot(slot).items()} for slot in range(plain.num_slots)]
    for scheme in map(SCHEMES.get, SM90_SCHEMES):
        torch.manual_seed(3)
        weights = made(scheme)
        for slot, expert in enumerate(weights.local_experts):
            for name in ("w13", "w2"):
                own, wanted = weights.dense(name)[slot].float(), numbers[slot][name]
                assert own.any() == (expert >= 0)
                # the coarsest, 4-bit codes with a power-of-two scale, round up to 8 of a block down to 6
                assert (own - wanted).abs().max() <= wanted.abs().max() / 4


def test_an_empty_rank_has_no_slots():
    weights = ExpertWeights(
        config(),
        ExpertMap.uneven([3, 0]),
        ep_rank=1,
        dtype=BF16,
        scheme=SCHEMES["mxfp4_fp8"],
        weight_layout=CutlassSm90,
    )
    assert weights.dense("w13").shape == (0, 256, 256)
    assert weights.dense("w2").shape == (0, 256, 128)
    assert weights.w13_residual.shape == (0,)
    assert not weights.state_dict()


@each_quantised
def test_wrong_dtype_is_refused_by_name(scheme):
    weights = filled(scheme)
    before = {name: parameter.clone() for name, parameter in weights.stored_tensors().items()}
    for name, tensor in random_tensors(config(), scheme).items():
        if name.endswith("_bias"):
            continue
        # floating-point numbers would be quantized
        other = tensor.float().int() if name in ("w13", "w2") else tensor.double()
        with pytest.raises(InputError) as error:
            weights.update_expert(0, {"w2_bias": torch.ones(256), name: other})
        wanted, got = (str(one.dtype).removeprefix("torch.") for one in (tensor, other))
        assert f"expert 0: {name} must be {wanted} under quantization={scheme.name}, got {got}" in str(error.value)
    assert_equal(dict(weights.stored_tensors()), before)
    weights.update_expert(0, {"w2_bias": torch.ones(256)})  # biases have the layer's dtype, so any float is accepted
    assert (weights.slot(1)["w2_bias"] == 1).all()


@each_quantised
def test_another_float_dtype_changes_no_quantised_number(scheme):
    weights = filled(scheme)
    before = {name: parameter.clone() for name, parameter in weights.stored_tensors().items()}
    for moved in (weights.to(BF16), weights.bfloat16(), weights.to("cpu", BF16), torch.nn.Sequential(weights).to(BF16)):
        assert isinstance(moved, torch.nn.Module)
        assert weights.dtype == BF16
        assert_equal(dict(weights.stored_tensors()), before)
    for change in (weights.float, weights.half, lambda: weights.to(torch.float64)):
        with pytest.raises(ConfigError) as error:
            change()
        assert f"quantization={scheme.name} was built for dtype bfloat16 and cannot become float" in str(error.value)
        assert "; build the layer with dtype=float" in str(error.value)
        assert_equal(dict(weights.stored_tensors()), before)


def test_plain_weights_change_their_dtype_in_any_layout():
    weights = filled(SCHEMES["none"])
    before = weights.state_dict()
    weights.float()
    assert weights.dtype == weights.w13.dtype == torch.float32
    assert_equal(dict(weights.state_dict()), {name: tensor.float() for name, tensor in before.items()})
    weights.update_expert(1, random_tensors(config(), SCHEMES["none"], torch.float32, seed=5))
    expected = random_tensors(config(), SCHEMES["none"], torch.float32, seed=5)["w13"]
    assert torch.equal(weights.slot(3)["w13"], expected)


@each_scheme
def test_only_plain_weights_are_trained(scheme):
    assert {p.requires_grad for p in made(scheme).parameters()} == {scheme.plain}
    assert {p.requires_grad for p in made(scheme, trainable=False).parameters()} == {False}


@each_scheme
def test_construction_on_meta(scheme):
    with torch.device("meta"):
        weights = made(scheme)
    assert all(parameter.is_meta for parameter in weights.parameters())
    assert {name: (tuple(p.shape[1:]), p.dtype) for name, p in weights.stored_tensors().items()} == {
        name: (spec.shape, spec.dtype) for name, spec in CutlassSm90(config(), scheme, BF16).specs().items()
    }
    state = filled(scheme).state_dict()
    with pytest.raises(RuntimeError, match="meta device; call to_empty"):
        weights.load_state_dict(state)
    weights.to_empty(device="cpu")
    weights.load_state_dict(state)
    assert_equal(dict(weights.state_dict()), dict(state))
    assert {p.requires_grad for p in weights.parameters()} == {scheme.plain}


def test_quantised_sizes_are_checked_at_construction():
    with pytest.raises(ConfigError) as error:
        made(SCHEMES["fp8_block"], config(inner=128), etp=etp_link(2, 0))
    assert "quantization fp8_block needs intermediate_size / etp to be a multiple of 128, got 64" in str(error.value)


def test_printed_with_the_dtypes():
    text = repr(filled(SCHEMES["mxfp4"]))
    assert "w13 [5, 256, 128] uint8" in text
    assert "w13_scale [5, 4, 2, 16, 4] int32" in text
    assert "float" not in repr(filled(SCHEMES["none"]))


def test_static_input_scales_are_kept_as_they_are():
    assert SCHEMES["fp8_static"].activations is Rounding.FP8_STATIC
    weights = filled(SCHEMES["fp8_static"])
    expected = [experts_of(config(), SCHEMES["fp8_static"])[e]["w13_input_scale"] for e in (2, 0, 1, 0)]
    assert weights.w13_input_scale[HELD].tolist() == [float(scale) for scale in expected]
