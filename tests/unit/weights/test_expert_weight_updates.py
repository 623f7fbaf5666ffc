"""Test that updates of experts reach every replica and piece, quantize whole matrices, and write nothing if refused."""

import pytest
import torch

from ep_moe import ExpertMap, InputError
from ep_moe.quant.schemes import PLAIN
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.parts import etp_shard
from tests.fixtures.expert_weights import ACTIVATIONS, LARGE, QUANTISED, REDUNDANT, etp_link, filled_weights, shape
from tests.fixtures.helpers import integer_expert


@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.value)
def test_update_writes_every_replica_and_cuts(activation, etp):
    config = shape(activation)
    written = dict.fromkeys(range(5), 0)
    for ep_rank in range(4):
        for etp_rank in range(etp):
            weights = filled_weights(config, REDUNDANT, ep_rank=ep_rank, etp=etp_link(etp, etp_rank))
            for slot, expert in enumerate(weights.local_experts):
                for name, parameter in weights.stored_tensors().items():
                    if expert == -1:
                        assert parameter[slot].isnan().all()
                    else:
                        expected = etp_shard(config, name, integer_expert(config, expert)[name], etp, etp_rank)
                        assert torch.equal(parameter[slot], expected), name
            for expert in written:
                written[expert] += weights.update_expert(expert, integer_expert(config, expert))
    assert tuple(written.values()) == tuple(etp * count for count in REDUNDANT.replica_count)


def numbers_of_an_expert():
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(spec.shape, generator=generator) / 16
        for name, spec in PLAIN.expert(LARGE, torch.float32).items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", QUANTISED, ids=lambda scheme: scheme.name)
def test_a_quantised_layer_quantises_numbers_whole(scheme, dtype):
    """A quantized layer quantizes whole matrices, and each etp rank holds its piece. Input scales stay."""
    given = {name: tensor.to(dtype) for name, tensor in numbers_of_an_expert().items()}
    wanted = scheme.quantize(given, torch.bfloat16)
    for etp, rank in ((1, 0), (2, 0), (2, 1)):
        options = {"dtype": torch.bfloat16, "scheme": scheme, "etp": etp_link(etp, rank)}
        weights = ExpertWeights(LARGE, ExpertMap.redundant(3, 2, 1), **options)
        before = {name: tensor.clone() for name, tensor in weights.slot(0).items()}
        assert weights.update_expert(0, given) == 1
        found = weights.slot(0)
        assert found.keys() == wanted.keys() | {name for name in before if name.endswith("input_scale")}
        for name, tensor in found.items():
            kept = name not in wanted
            expected = before[name] if kept else etp_shard(LARGE, name, wanted[name], etp, rank)
            assert torch.equal(tensor.float(), expected.to(tensor.dtype).float()), name
            assert kept or not torch.equal(tensor.float(), before[name].float()), name
        only = {"w2": given["w2"] * 2}
        weights.update_expert(0, only)
        expected = etp_shard(LARGE, "w2", scheme.quantize(only, torch.bfloat16)["w2"], etp, rank)
        assert torch.equal(weights.slot(0)["w2"].float(), expected.float())
        assert torch.equal(weights.slot(0)["w13"].float(), found["w13"].float())


@pytest.mark.parametrize("scheme", QUANTISED, ids=lambda scheme: scheme.name)
def test_numbers_that_cannot_be_quantised_change_nothing(scheme):
    weights = ExpertWeights(LARGE, ExpertMap.linear(3, 1), dtype=torch.bfloat16, scheme=scheme)
    before = {name: tensor.clone() for name, tensor in weights.stored_tensors().items()}
    good, bad = numbers_of_an_expert()["w13"], numbers_of_an_expert()["w2"]
    bad[3, 5] = torch.inf
    codes = scheme.quantize({"w13": good}, torch.bfloat16)
    cases = [
        ({"w13": good, "w2": bad}, "expert 1: w2 must be finite to be quantized"),
        *[
            ({"w13": good, part: codes[part]}, f"expert 1: w13 has values in float32, and {part} belongs")
            for part in codes.keys() - {"w13"}
        ],
        (
            {"w13": codes["w13"]},
            r"expert 1: w13 has codes, and their scale w13_scale is missing.*give w13 and w13_scale",
        ),
        *[
            (
                {name: tensor for name, tensor in codes.items() if name != part},
                f"w13 has codes, and their scale {part} is missing",
            )
            for part in codes.keys() - {"w13"}
        ],
        *[
            (codes | {part: tensor.float().int()}, f"{part} must be .* under quantization={scheme.name}, got int32")
            for part, tensor in codes.items()
        ],
        ({"w13": good[:, :128]}, r"expert 1: w13 must be \[512, 256\], got \[512, 128\]"),
    ]
    for tensors, sentence in cases:
        with pytest.raises(InputError, match=sentence):
            weights.update_expert(1, tensors)
    for name, tensor in weights.stored_tensors().items():
        assert torch.equal(tensor.float(), before[name].float()), name


def test_tensors_that_are_given_are_those_of_their_call():
    weights, outer, inner = ExpertWeights(shape(), ExpertMap.linear(5, 1)), {"w13": torch.ones(1)}, {}
    own = weights.stored_tensors()

    def call():
        assert weights.run_with_tensors(inner, weights.stored_tensors) is inner
        return weights.stored_tensors()

    assert weights.run_with_tensors(outer, call) is outer
    assert weights.stored_tensors() is own


def test_update_writes_an_expert_twice_on_one_rank():
    config = shape()
    weights = filled_weights(config, ExpertMap.from_ranks([[0, 1, 0], [2, 3, 4]], 5, allow_duplicates=True))
    assert weights.update_expert(0, integer_expert(config, 0, seed=1)) == 2
    assert torch.equal(weights.w13[0], weights.w13[2])
    assert torch.equal(weights.w13[1], integer_expert(config, 1)["w13"])
    frozen = ExpertWeights(config, weights.expert_map, trainable=False)  # without a parameter for both replicas
    assert frozen.get_parameter("w13")[2].any()
    assert torch.equal(frozen.get_parameter("w13")[0], frozen.get_parameter("w13")[2])
    assert frozen.update_expert(0, integer_expert(config, 0, seed=1)) == 2
    assert torch.equal(frozen.get_parameter("w13")[2], integer_expert(config, 0, seed=1)["w13"])


def test_whatever_may_write_weights_counts_as_an_update():
    """Whatever may write weights counts as an update, so that EPLB moves nothing written meanwhile.

    Ranks that hold no expert count it too.
    """
    config = shape(bias=False)
    for ranks in ([[0, 1, 2, 3, 4]], [[0, 1, 2, 3, 4], []]):
        weights = ExpertWeights(config, ExpertMap.from_ranks(ranks, 5), ep_rank=len(ranks) - 1)
        whole = filled_weights(config, ExpertMap.linear(5, 1)).state_dict()
        for write in (
            weights.reset_parameters,
            lambda weights=weights: weights.update_expert(0, integer_expert(config, 0)),
            lambda weights=weights, whole=whole: weights.load_state_dict(whole),
        ):
            before = weights.updates
            write()
            assert weights.updates > before


def test_update_of_some_tensors_leaves_the_others():
    config = shape()
    weights = filled_weights(config, REDUNDANT)
    before = weights.w13.clone()
    weights.update_expert(4, {"w2": torch.ones(8, 16)})
    assert torch.equal(weights.w13, before)
    assert (weights.w2[0] == 1).all()
    assert torch.equal(weights.w2[1], integer_expert(config, 0)["w2"])


def test_update_keeps_the_parameters_and_their_dtype():
    config = shape()
    weights = ExpertWeights(config, REDUNDANT, dtype=torch.bfloat16)
    pointer = weights.w13.data_ptr()
    weights.update_expert(4, integer_expert(config, 4))
    assert weights.w13.dtype == torch.bfloat16
    assert weights.w13.data_ptr() == pointer
    assert torch.equal(weights.w13[0].float(), integer_expert(config, 4)["w13"])


@pytest.mark.parametrize(
    ("expert", "tensors", "message"),
    [
        (5, {}, "logical_id must be an integer in [0, 5), got 5"),
        (-1, {}, "logical_id must be an integer in [0, 5), got -1"),
        (1.0, {}, "logical_id must be an integer in [0, 5), got 1.0"),
        (1, {"w2": [1.0]}, "expert 1: w2 must be a Tensor, got list"),
        (1, {"w1": torch.ones(1)}, "expert 1 has no tensor 'w1'; it has w13, w2, w13_bias, w2_bias"),
        (1, {"w2": torch.ones(16, 8)}, "expert 1: w2 must be [8, 16], got [16, 8]"),
        (3, {"w13": torch.ones(16, 8)}, "expert 3: w13 must be [32, 8], got [16, 8]"),
        (1, {"w2": torch.ones(8, 16, device="meta")}, "w2 must be a dense tensor with numbers, got one on the meta"),
        (1, {"w2": torch.ones(8, 16).to_sparse()}, "w2 must be a dense tensor with numbers, got one torch.sparse"),
        (1, {"w2": torch.ones(8, 16).int()}, "w2 must be numbers that are rounded to float32, got int32"),
        (1, {"w2": torch.ones(8, 16).to(torch.float8_e5m2)}, "w2 must be numbers that are rounded to float32, got f"),
    ],
)
def test_bad_update_names_field_and_value_and_writes_nothing(expert, tensors, message):
    """A wrong update names field and value and writes nothing, also on ranks without the expert.

    Whether a call is right must not depend on the rank.
    """
    config = shape()
    for ep_rank in range(4):
        weights = filled_weights(config, REDUNDANT, ep_rank=ep_rank)
        before = {name: parameter.clone() for name, parameter in weights.stored_tensors().items()}
        updates = weights.updates
        with pytest.raises(InputError) as error:
            weights.update_expert(expert, {"w2_bias": torch.ones(8), **tensors} if expert == 1 else tensors)
        assert message in str(error.value)
        assert weights.updates == updates, "what was refused is none"
        for name, parameter in weights.stored_tensors().items():
            torch.testing.assert_close(parameter, before[name], rtol=0, atol=0, equal_nan=True)


def test_no_bias_tensor_where_there_is_none():
    with pytest.raises(InputError) as error:
        ExpertWeights(shape(bias=False), REDUNDANT).update_expert(0, {"w2_bias": torch.ones(8)})
    assert "has no tensor 'w2_bias'; it has w13, w2" in str(error.value)
