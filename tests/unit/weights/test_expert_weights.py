"""Expert weights: cutting over etp, updates, and state dicts that know no placement."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ep_moe import Activation, ConfigError, EPContext, ExpertMap, InputError, MoEConfig, MoELayer
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.experts.shared_experts import activate
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.quant.schemes import PLAIN, SCHEMES
from ep_moe.types import LocalIds, Received, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.parts import etp_dim, etp_shard, join
from tests.fixtures.expert_weights import etp_link
from tests.fixtures.helpers import fill, integer_expert, integer_routing, integer_rows, saved_expert

unhurried = settings(deadline=None)
NAMES = ("w13", "w2", "w13_bias", "w2_bias")


def saved(config: MoEConfig) -> set[str]:
    """Names of an expert's parameters."""
    up = {"w3", "w3_bias"} if config.activation.gated else set()
    return {"w1", "w2", "w1_bias", "w2_bias"} | up


ACTIVATIONS = [Activation.SWIGLU, Activation.RELU2]  # with a gate and without
REDUNDANT = ExpertMap.from_ranks([[4, 0, -1], [1, 2, 0], [3, 2, 4], []], 5)


def shape(activation: Activation = Activation.SWIGLU, bias: bool = True, inner: int = 16) -> MoEConfig:
    return MoEConfig(
        hidden_size=8, intermediate_size=inner, num_experts=5, top_k=2, activation=activation, expert_bias=bias
    )


def filled(
    config: MoEConfig, expert_map: ExpertMap, *, ep_rank: int = 0, etp: RankGroup | None = None
) -> ExpertWeights:
    weights = ExpertWeights(config, expert_map, ep_rank=ep_rank, etp=etp)
    for tensor in weights.stored_tensors().values():
        tensor.fill_(torch.nan)
    for expert in range(config.num_experts):
        weights.update_expert(expert, integer_expert(config, expert))
    return weights


# --- cutting over etp -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.value)
def test_join_undoes_etp_shard(activation, name, etp):
    config = shape(activation)
    whole = integer_expert(config, 3)[name]
    pieces = [etp_shard(config, name, whole, etp, rank) for rank in range(etp)]
    assert torch.equal(join(config, name, pieces), whole)
    for rank, piece in enumerate(pieces):
        assert piece.shape == ExpertWeights(config, REDUNDANT, etp=etp_link(etp, rank)).get_parameter(name)[0].shape


@unhurried
@given(st.sampled_from(ACTIVATIONS), st.integers(1, 6), st.integers(1, 6))
def test_join_undoes_etp_shard_for_any_size(activation, etp, each):
    config = shape(activation, inner=etp * each)
    for name, whole in integer_expert(config, 0).items():
        pieces = [etp_shard(config, name, whole, etp, rank) for rank in range(etp)]
        assert torch.equal(join(config, name, pieces), whole), name
        if etp_dim(name, whole.dim()) is not None:
            assert sum(piece.numel() for piece in pieces) == whole.numel(), name
        else:
            assert all(torch.equal(piece, whole) for piece in pieces), name


def test_a_piece_has_gate_and_up_of_the_same_columns():
    config = shape(inner=4)
    w13 = torch.arange(8.0).unsqueeze(1).expand(8, config.hidden_size)  # gate rows 0..3, up rows 4..7
    assert etp_shard(config, "w13", w13, 2, 0)[:, 0].tolist() == [0, 1, 4, 5]
    assert etp_shard(config, "w13", w13, 2, 1)[:, 0].tolist() == [2, 3, 6, 7]
    assert etp_shard(config, "w13_bias", torch.arange(8.0), 2, 1).tolist() == [2, 3, 6, 7]
    assert etp_shard(config, "w2", torch.arange(4.0).expand(8, 4), 2, 1)[0].tolist() == [2, 3]


def test_without_a_gate_a_piece_is_one_span():
    config = shape(Activation.RELU2, inner=4)
    assert etp_shard(config, "w13_bias", torch.arange(4.0), 2, 1).tolist() == [2, 3]


def output(config: MoEConfig, weights: ExpertWeights, x: Tensor) -> Tensor:
    ids = torch.arange(len(x)).remainder(weights.num_slots).unsqueeze(1)
    received = Received(
        x=x,
        layout=RowLayout.RANK_MAJOR,
        weighting=Weighting.EXPERTS,
        handle=None,
        local_ids=LocalIds(torch.cat([ids, torch.full_like(ids, -1)], 1)),
        weights=torch.full((len(x), 2), 2.0),
    )
    with torch.no_grad():
        return ReferenceExperts(config, weights)(received)


@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_cutting_commutes_with_computing(bias, etp):
    """Small integers and an activation that keeps them so: the sum over the pieces is exact."""
    config = shape(Activation.RELU2, bias)
    everything = ExpertMap.linear(5, 1)
    x = integer_rows(15, 8, 0)
    whole = output(config, filled(config, everything), x)
    pieces = [output(config, filled(config, everything, etp=etp_link(etp, rank)), x) for rank in range(etp)]
    assert torch.equal(sum(pieces), whole)
    assert whole.abs().max() > 0


@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.SWIGLU_CLAMPED], ids=lambda a: a.value)
def test_cutting_commutes_with_computing_gated(activation):
    config = shape(activation)
    everything = ExpertMap.linear(5, 1)
    x = integer_rows(15, 8, 0)
    whole = output(config, filled(config, everything), x)
    pieces = [output(config, filled(config, everything, etp=etp_link(4, rank)), x) for rank in range(4)]
    assert ((sum(pieces) - whole).abs() <= apart(config, x)).all()


def apart(config: MoEConfig, x: Tensor) -> Tensor:
    """How far two outputs [T, H] of float32 may be from each other that add up the same terms in different orders: each
    addition, of the inner columns, the bias and the pieces, rounds by half a step, 2**-24 of the sizes' sum at most. An
    activation may be made by other instructions: exp, off by a step, an addition, a division and three products."""
    additions, roundings = config.intermediate_size + 1 + 4, 2 + 5
    rows = []
    for number, row in enumerate(x.double()):
        expert = {name: tensor.double() for name, tensor in integer_expert(config, number % 5).items()}
        act = activate((expert["w13"] @ row + expert["w13_bias"])[None], config)[0]
        rows.append(expert["w2"].abs() @ act.abs() + expert["w2_bias"].abs())
    return 2.0 * 2 * (additions + roundings) * 2.0**-24 * torch.stack(rows)  # weights are 2, and there are two sums


def test_output_bias_is_added_by_one_rank_of_etp():
    config = shape()
    assert [ExpertWeights(config, REDUNDANT, etp=etp_link(4, rank)).adds_output_bias for rank in range(4)] == [
        True,
        False,
        False,
        False,
    ]


def test_etp_must_divide_the_intermediate_size():
    with pytest.raises(ConfigError) as error:
        ExpertWeights(shape(inner=6), REDUNDANT, etp=etp_link(4, 0))
    assert "got etp=4, intermediate_size=6" in str(error.value)


# --- parameters -----------------------------------------------------------------------------------------------------


def test_parameters_are_named_by_logical_expert():
    config = shape()
    weights = ExpertWeights(config, REDUNDANT, ep_rank=0)
    shapes = {"w1": (16, 8), "w3": (16, 8), "w2": (8, 16), "w1_bias": (16,), "w3_bias": (16,), "w2_bias": (8,)}
    found = {name: tuple(p.shape) for name, p in weights.named_parameters()}
    assert found == {f"{expert}.{name}": size for expert in (0, 4) for name, size in shapes.items()}
    without_gate = ExpertWeights(shape(Activation.RELU2, bias=False), REDUNDANT)
    assert {name for name, _ in without_gate.named_parameters()} == {"0.w1", "0.w2", "4.w1", "4.w2"}


def test_parameters_lie_where_kernels_read():
    """A step of an optimizer in place is what the next call computes with; so is memory put in a parameter's place."""
    weights = ExpertWeights(shape(), REDUNDANT, ep_rank=0)  # slots: experts 4 and 0
    gate, up = weights.get_submodule("4").w1, weights.get_submodule("0").w3
    with torch.no_grad():
        gate.fill_(3), up.fill_(5)
    assert (weights.w13[0, :16] == 3).all()
    assert (weights.w13[1, 16:] == 5).all()
    gate.data = torch.full_like(gate, 7)
    assert weights(lambda: bool((weights.w13[0, :16] == 7).all()))
    assert gate.data_ptr() == weights.w13[0].data_ptr()
    weights.to(torch.float64)
    assert weights.get_submodule("4").w1 is gate, "optimizers hold it"
    assert gate.dtype == torch.float64
    assert gate.data_ptr() == weights.w13[0].data_ptr()


@pytest.mark.parametrize("read", [lambda weights: weights.w13, lambda weights: weights.get_parameter("w13")])
def test_reading_a_stored_tensor_writes_nothing(read):
    weights = filled(
        shape(Activation.RELU2, bias=False), ExpertMap.from_ranks([[0, 1, 0, 2, 3, 4]], 5, allow_duplicates=True)
    )
    first, replaced = weights.get_submodule("0").w1, weights.get_submodule("1").w1
    with torch.no_grad():
        first.fill_(9)
    replaced.data = torch.full_like(replaced, 7)
    before = read(weights).clone()
    assert not (before[1] == 7).any()
    assert not (before[2] == 9).any()
    assert torch.equal(read(weights), before)
    assert (weights.stored_tensors()["w13"][1] == 7).all()
    assert (read(weights)[1] == 7).all()
    assert (read(weights)[2] == 9).all()


def test_kernels_read_parameters_with_memory_of_their_own():
    weights = filled(shape(), ExpertMap.linear(5, 1))
    before = weights.w13.clone()
    weights.unstack()
    with torch.no_grad():
        for found in (weights(lambda: weights.w13), weights(lambda: weights.get_parameter("w13"))):
            assert torch.equal(found, before)
    with pytest.raises(AttributeError):
        weights.get_parameter("w13")


def test_an_expert_that_is_here_twice_has_one_parameter():
    config = shape(Activation.RELU2, bias=False)
    weights = ExpertWeights(config, ExpertMap.from_ranks([[0, 1, 0]], 2, allow_duplicates=True))
    assert [name for name, _ in weights.named_parameters()] == ["0.w1", "0.w2", "1.w1", "1.w2"]
    with torch.no_grad():
        weights.get_submodule("0").w1.fill_(2)
    out = weights(lambda: weights.w13 * torch.tensor([1.0, 10.0, 100.0])[:, None, None])
    assert (out[2] == 200).all(), "the other slot follows"
    out.sum().backward()
    assert (weights.get_submodule("0").w1.grad == 101).all(), "and its gradient counts"


def change_data(weights: ExpertWeights) -> None:
    weights.get_submodule("0").w1.data.fill_(3)


def fused_step(weights: ExpertWeights) -> None:
    first = weights.get_submodule("0").w1
    first.grad = torch.ones_like(first)
    torch.optim.SGD([first], lr=1.0, fused=True).step()


@pytest.mark.parametrize("change", [change_data, fused_step])
def test_copies_of_an_expert_follow_changes_that_bump_no_version(change: Callable[[ExpertWeights], None]) -> None:
    """And nothing that reads the tensors finds them changed where they were not."""
    weights = filled(
        shape(Activation.RELU2, bias=False), ExpertMap.from_ranks([[0, 1, 0, 2, 3, 4]], 5, allow_duplicates=True)
    )
    weights.settle()
    versions = [tensor._version for tensor in weights.stored_tensors().values()]
    before = weights.w13[0].clone()
    change(weights)
    assert not weights.settled
    weights.settle()
    assert not torch.equal(weights.w13[0], before)
    assert torch.equal(weights.w13[2], weights.w13[0])
    assert [tensor._version for tensor in weights.stored_tensors().values()] == versions


def test_what_is_no_tensor_is_named_when_loaded():
    weights = filled(shape(bias=False), ExpertMap.linear(5, 1))
    saved_state = weights.state_dict()
    saved_state["3.w1"] = saved_state["3.w1"].numpy()
    with pytest.raises(RuntimeError, match=r"3\.w1 must be a Tensor, got ndarray"):
        weights.load_state_dict(saved_state)


def test_what_parameters_carry_goes_with_them():
    """Gradients and frozen ones, to another dtype; frozen ones to another map too."""
    weights = filled(shape(bias=False), ExpertMap.linear(5, 1))
    first = weights.get_submodule("0")
    first.w1.grad, first.w2.requires_grad = torch.full_like(first.w1, 3), False
    weights.to(torch.bfloat16)
    first = weights.get_submodule("0")
    assert torch.equal(first.w1.grad, torch.full_like(first.w1, 3))
    assert (first.w1.grad.dtype, first.w1.requires_grad, first.w2.requires_grad) == (torch.bfloat16, True, False)
    weights.requires_grad_(False)
    weights.set_expert_map(ExpertMap.from_ranks([[4, 3, 2, 1, 0]], 5))
    assert not any(parameter.requires_grad for parameter in weights.parameters())


def test_what_keeps_a_rank_in_the_graph_is_where_the_weights_are():
    weights = ExpertWeights(shape(), REDUNDANT, device=torch.device("meta"))
    weights.get_submodule("4").w2.requires_grad_(False)
    assert weights.to_empty(device="cpu").anchor.device == weights.device == torch.device("cpu")
    assert [name for name, p in weights.named_parameters() if not p.requires_grad] == ["4.w2"]
    weights.unstack()
    assert weights.device == torch.device("cpu"), "parameters with memory of their own too"


def test_a_kernel_that_raises_leaves_no_functions_of_parameters():
    weights = filled(shape(), ExpertMap.linear(5, 1))

    def compute():
        assert weights.w13.grad_fn is not None
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            weights(compute)
        assert weights.w13.grad_fn is None


def test_stored_tensors_are_per_slot():
    config = shape()
    weights = ExpertWeights(config, REDUNDANT, ep_rank=0, etp=etp_link(2, 0))
    assert {name: tuple(p.shape) for name, p in weights.stored_tensors().items()} == {
        "w13": (2, 16, 8),
        "w2": (2, 8, 8),
        "w13_bias": (2, 16),
        "w2_bias": (2, 8),
    }
    assert weights.local_experts == (4, 0)
    assert set(ExpertWeights(shape(bias=False), REDUNDANT).stored_tensors()) == {"w13", "w2"}
    assert ExpertWeights(config, REDUNDANT, ep_rank=3).w13.shape == (0, 32, 8)


def test_fresh_parameters_are_random_and_biases_zero():
    weights = ExpertWeights(shape(inner=64), ExpertMap.linear(5, 1))
    for parameter, fan_in in ((weights.w13, 8), (weights.w2, 64)):
        bound = fan_in**-0.5
        assert 0.9 * bound < parameter.abs().max() <= bound
        assert parameter.unique().numel() > 0.9 * parameter.numel()
    assert (weights.w13_bias == 0).all()
    assert (weights.w2_bias == 0).all()


# --- update_expert --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.value)
def test_update_writes_every_replica_and_cuts(activation, etp):
    config = shape(activation)
    written = dict.fromkeys(range(5), 0)
    for ep_rank in range(4):
        for etp_rank in range(etp):
            weights = filled(config, REDUNDANT, ep_rank=ep_rank, etp=etp_link(etp, etp_rank))
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


LARGE = MoEConfig(hidden_size=256, intermediate_size=256, num_experts=3, top_k=2, expert_bias=True)  # whole blocks
QUANTISED = [scheme for scheme in SCHEMES.values() if not scheme.plain]


def numbers_of_an_expert():
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(spec.shape, generator=generator) / 16
        for name, spec in PLAIN.expert(LARGE, torch.float32).items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", QUANTISED, ids=lambda scheme: scheme.name)
def test_a_quantised_layer_quantises_numbers_whole(scheme, dtype):
    """Each etp rank holds its piece of what the whole matrix is quantized to; input scales stay."""
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
            ({"w13": good, part: codes[part]}, f"expert 1: w13 is numbers in float32, and {part} belongs")
            for part in codes.keys() - {"w13"}
        ],
        ({"w13": codes["w13"]}, r"expert 1: w13 is codes, and w13_scale is missing.*give w13 and w13_scale"),
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
        assert weights.given(inner, weights.stored_tensors) is inner
        return weights.stored_tensors()

    assert weights.given(outer, call) is outer
    assert weights.stored_tensors() is own


def test_update_writes_an_expert_twice_on_one_rank():
    config = shape()
    weights = filled(config, ExpertMap.from_ranks([[0, 1, 0], [2, 3, 4]], 5, allow_duplicates=True))
    assert weights.update_expert(0, integer_expert(config, 0, seed=1)) == 2
    assert torch.equal(weights.w13[0], weights.w13[2])
    assert torch.equal(weights.w13[1], integer_expert(config, 1)["w13"])
    frozen = ExpertWeights(config, weights.expert_map, trainable=False)  # where no parameter stands for both
    assert frozen.get_parameter("w13")[2].any()
    assert torch.equal(frozen.get_parameter("w13")[0], frozen.get_parameter("w13")[2])
    assert frozen.update_expert(0, integer_expert(config, 0, seed=1)) == 2
    assert torch.equal(frozen.get_parameter("w13")[2], integer_expert(config, 0, seed=1)["w13"])


def test_whatever_may_write_weights_counts_as_an_update():
    """EPLB moves nothing that was written meanwhile. Ranks that hold nothing of it count too."""
    config = shape(bias=False)
    for ranks in ([[0, 1, 2, 3, 4]], [[0, 1, 2, 3, 4], []]):
        weights = ExpertWeights(config, ExpertMap.from_ranks(ranks, 5), ep_rank=len(ranks) - 1)
        whole = filled(config, ExpertMap.linear(5, 1)).state_dict()
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
    weights = filled(config, REDUNDANT)
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
    ],
)
def test_bad_update_names_field_and_value_and_writes_nothing(expert, tensors, message):
    """On ranks without the expert too: whether a call is right must not depend on the rank."""
    config = shape()
    for ep_rank in range(4):
        weights = filled(config, REDUNDANT, ep_rank=ep_rank)
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


# --- state dict -----------------------------------------------------------------------------------------------------


def state_of_all_ranks(config: MoEConfig, expert_map: ExpertMap) -> dict[str, Tensor]:
    """The union over the ranks, which agree where they overlap."""
    union: dict[str, Tensor] = {}
    for rank in range(expert_map.num_ranks):
        state = filled(config, expert_map, ep_rank=rank).state_dict()
        assert all(torch.equal(union[key], state[key]) for key in union.keys() & state.keys())
        union |= state
    return union


MAPS = {
    "linear": ExpertMap.linear(5, 2),
    "one rank": ExpertMap.linear(5, 1),
    "round robin": ExpertMap.round_robin(5, 3),
    "redundant": ExpertMap.redundant(5, 3, 7),
    "user's": REDUNDANT,
    "twice on a rank": ExpertMap.from_ranks([[4, 0, 4], [1, 2, 3]], 5, allow_duplicates=True),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_union_of_the_ranks_is_a_checkpoint_in_logical_order(name, bias):
    config = shape(bias=bias)
    state = state_of_all_ranks(config, MAPS[name])
    for expert in range(5):
        parts = saved_expert(config, expert)
        assert {key for key in state if key.startswith(f"{expert}.")} == {f"{expert}.{name}" for name in parts}
        for tensor, expected in parts.items():
            assert torch.equal(state[f"{expert}.{tensor}"], expected)


def test_a_rank_saves_what_it_holds_and_loads_that_again():
    config = shape()
    for rank in range(4):
        weights = filled(config, REDUNDANT, ep_rank=rank)
        state = weights.state_dict()
        assert {int(key.split(".")[0]) for key in state} == set(REDUNDANT.local(rank)) - {-1}
        again = ExpertWeights(config, REDUNDANT, ep_rank=rank)
        again.load_state_dict(state)
        assert all(
            torch.equal(again.stored_tensors()[name], tensor) for name, tensor in weights.stored_tensors().items()
        )


def test_a_state_with_gate_and_up_in_one_loads():
    """As version 0.1 wrote it."""
    config = shape()
    state = {f"{e}.{name}": tensor for e in (4, 0) for name, tensor in integer_expert(config, e).items()}
    weights = ExpertWeights(config, REDUNDANT, ep_rank=0)
    weights.load_state_dict(state)
    assert torch.equal(weights.w13[0], integer_expert(config, 4)["w13"])


@pytest.mark.parametrize("to", MAPS)
@pytest.mark.parametrize("of", ["linear", "redundant", "user's"])
def test_checkpoint_of_one_map_loads_into_any_other(of, to):
    config, target = shape(), MAPS[to]
    state = state_of_all_ranks(config, MAPS[of])
    for rank in range(target.num_ranks):
        weights = ExpertWeights(config, target, ep_rank=rank)
        result = weights.load_state_dict(state)
        assert not result.missing_keys
        assert not result.unexpected_keys
        for slot, expert in enumerate(weights.local_experts):
            if expert >= 0:
                for name, parameter in weights.stored_tensors().items():
                    assert torch.equal(parameter[slot], integer_expert(config, expert)[name])


@pytest.mark.parametrize("etp", [2, 4])
def test_checkpoint_loads_into_pieces(etp):
    config = shape()
    state = state_of_all_ranks(config, MAPS["redundant"])
    for rank in range(etp):
        weights = ExpertWeights(config, REDUNDANT, ep_rank=1, etp=etp_link(etp, rank))
        weights.load_state_dict(state)
        for name, parameter in weights.stored_tensors().items():
            assert torch.equal(parameter[0], etp_shard(config, name, integer_expert(config, 1)[name], etp, rank))


def test_state_dict_of_pieces_has_whole_tensors(monkeypatch):
    """The etp group in one process: what the others hold is made here."""
    config = shape()
    ranks = [filled(config, REDUNDANT, ep_rank=1, etp=etp_link(2, rank)) for rank in range(2)]

    def all_gather(pieces: list[Tensor], piece: Tensor, group: object) -> None:
        name, slot = next(
            (name, slot)
            for name, parameter in ranks[0].stored_tensors().items()
            for slot in range(ranks[0].num_slots)
            if parameter[slot].data_ptr() == piece.data_ptr()
        )
        for rank, out in enumerate(pieces):
            out.copy_(ranks[rank].get_parameter(name)[slot].detach())

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    state = ranks[0].state_dict()
    assert {int(key.split(".")[0]) for key in state} == {0, 1, 2}
    for key, tensor in state.items():
        expert, name = key.split(".")
        assert torch.equal(tensor, saved_expert(config, int(expert))[name]), key


def test_ranks_need_their_own_experts_only():
    config = shape()
    state = state_of_all_ranks(config, REDUNDANT)
    own = {key: tensor for key, tensor in state.items() if key.split(".")[0] in "04"}
    weights = ExpertWeights(config, REDUNDANT, ep_rank=0)
    weights.load_state_dict(own)
    for name, parameter in weights.named_parameters():
        assert torch.equal(parameter, own[name]), name
    without = ExpertWeights(config, REDUNDANT, ep_rank=3)
    assert without.load_state_dict({}).missing_keys == []
    assert without.state_dict() == {}


def test_missing_keys_are_reported():
    config = shape()
    state = state_of_all_ranks(config, REDUNDANT)
    del state["4.w2"], state["0.w3"], state["3.w2"]  # rank 0 holds 4 and 0
    weights = ExpertWeights(config, REDUNDANT, ep_rank=0)
    with pytest.raises(RuntimeError) as error:
        weights.load_state_dict(state)
    assert '"0.w3"' in str(error.value)
    assert '"4.w2"' in str(error.value)
    assert "3.w2" not in str(error.value)
    assert sorted(weights.load_state_dict(state, strict=False).missing_keys) == ["0.w3", "4.w2"]


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("given", [("w1", "w3_bias"), ("w3",)])
def test_a_state_with_one_half_leaves_the_other(given, etp):
    config = shape()
    state = {f"0.{name}": torch.full_like(saved_expert(config, 0)[name], 7.0) for name in given}
    expected = saved_expert(config, 0) | {key.removeprefix("0."): tensor for key, tensor in state.items()}
    for rank in range(etp):
        weights = filled(config, REDUNDANT, ep_rank=0, etp=etp_link(etp, rank))
        weights.load_state_dict(state, strict=False)
        for name in ("w13", "w13_bias"):
            half = [expected["w1" + name[3:]], expected["w3" + name[3:]]]
            slot = weights.held[0][0]
            assert torch.equal(
                weights.stored_tensors()[name][slot], etp_shard(config, name, torch.cat(half), etp, rank)
            )


def test_half_a_matrix_is_not_quantized():
    config = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=1, top_k=1)
    weights = ExpertWeights(config, ExpertMap.linear(1, 1), scheme=SCHEMES["fp8_block"])
    before = {name: tensor.clone() for name, tensor in weights.stored_tensors().items()}
    with pytest.raises(RuntimeError, match=r"expert 0: w3 is missing, and w13 is quantized as a whole"):
        weights.load_state_dict({"0.w1": torch.ones(128, 128)}, strict=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.stored_tensors().items())


@pytest.mark.parametrize("scheme", QUANTISED, ids=lambda scheme: scheme.name)
def test_a_state_with_scales_and_without_their_codes_changes_nothing(scheme):
    weights = ExpertWeights(LARGE, ExpertMap.linear(3, 1), dtype=torch.bfloat16, scheme=scheme)
    other = ExpertWeights(LARGE, ExpertMap.linear(3, 1), dtype=torch.bfloat16, scheme=scheme)
    before = {name: tensor.clone() for name, tensor in weights.stored_tensors().items()}
    state = {name: tensor for name, tensor in other.state_dict().items() if name.startswith("1.w2_")}
    with pytest.raises(RuntimeError, match=r"expert 1: w2_\w*scale belongs to codes of its own, and w2 is missing"):
        weights.load_state_dict(state, strict=False)
    for name, tensor in weights.stored_tensors().items():
        assert torch.equal(tensor.float(), before[name].float()), name


def test_sharded_parameters_are_not_broadcast_into():
    config = shape()
    weights = filled(config, ExpertMap.linear(5, 1))
    weights.unstack()
    with pytest.raises(RuntimeError, match=r"expert 0: w1 must be \[16, 8\], got \[8\]"):
        weights.load_state_dict({"0.w1": torch.ones(8)}, strict=False)


def test_misshapen_tensors_are_reported():
    config = shape()
    state = state_of_all_ranks(config, REDUNDANT)
    state["4.w2"], state["0.w1"] = torch.ones(16, 8), torch.ones(3)
    with pytest.raises(RuntimeError) as error:
        ExpertWeights(config, REDUNDANT, ep_rank=0).load_state_dict(state)
    assert "expert 4: w2 must be [8, 16], got [16, 8]" in str(error.value)
    assert "expert 0: w1 must be [16, 8], got [3]" in str(error.value)


def test_unexpected_keys_are_reported():
    config = shape()
    state = state_of_all_ranks(config, REDUNDANT) | {"5.w1": torch.ones(1), "0.w4": torch.ones(1)}
    weights = ExpertWeights(config, REDUNDANT, ep_rank=0)
    with pytest.raises(RuntimeError) as error:
        weights.load_state_dict(state)
    assert '"5.w1"' in str(error.value)
    assert '"0.w4"' in str(error.value)
    assert sorted(weights.load_state_dict(state, strict=False).unexpected_keys) == ["0.w4", "5.w1"]


# --- the whole layer ------------------------------------------------------------------------------------------------


def layer(config: MoEConfig, expert_map: ExpertMap) -> MoELayer:
    return MoELayer(config, EPContext.local(torch.device("cpu")), expert_map=expert_map)


def test_layers_state_loads_into_a_layer_with_another_map():
    config = shape(Activation.RELU2)
    first = fill(layer(config, ExpertMap.linear(5, 1)))
    second = layer(config, ExpertMap.from_ranks([[3, -1, 1, 4, 0, 2, 3]], 5, allow_duplicates=True))
    state = first.state_dict()
    assert set(state) == {"router.weight"} | {f"expert_weights.{e}.{name}" for e in range(5) for name in saved(config)}
    second.load_state_dict(state)
    x, routing = integer_rows(20, 8, 0), integer_routing(20, config, 0)
    with torch.no_grad():
        assert torch.equal(first.forward_routed(x, routing), second.forward_routed(x, routing))
        torch.testing.assert_close(first(x), second(x))
    back = second.state_dict()
    assert set(back) == set(state)
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_layer_reports_a_missing_expert_by_its_whole_key():
    config = shape()
    state = layer(config, ExpertMap.linear(5, 1)).state_dict()
    del state["expert_weights.3.w2_bias"]
    with pytest.raises(RuntimeError) as error:
        layer(config, ExpertMap.linear(5, 1)).load_state_dict(state)
    assert '"expert_weights.3.w2_bias"' in str(error.value)


def test_state_dict_survives_a_file(tmp_path):
    config = shape()
    first = fill(layer(config, ExpertMap.from_ranks([[3, 1, 4, 0, 2]], 5)))
    torch.save(first.state_dict(), tmp_path / "layer.pt")
    second = layer(config, ExpertMap.linear(5, 1))
    second.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert torch.equal(second.expert_weights.w13[3], integer_expert(config, 3)["w13"])


def test_safetensors_keeps_all_experts_of_a_model(tmp_path):
    """It takes tensors of one memory for one tensor, and accelerate then writes one of them."""
    accelerate, safetensors = pytest.importorskip("accelerate"), pytest.importorskip("safetensors.torch")
    with EPContext.local(torch.device("cpu")) as context:
        model = torch.nn.Sequential(MoELayer(shape(), context))
        wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(model)
        accelerator.save_model(model, str(tmp_path))
        assert set(safetensors.load_file(tmp_path / "model.safetensors")) == set(wanted)
        accelerator.save_state(str(tmp_path / "state"))
        for load in (
            lambda: safetensors.load_model(model, tmp_path / "model.safetensors"),
            lambda: accelerator.load_state(str(tmp_path / "state")),
        ):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            load()
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, wanted[name]), name


def test_codes_of_an_expert_are_found_by_its_number():
    """Distributed checkpoints walk along the names of `state_dict`, where quantized experts are no modules."""
    config = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=4, top_k=1)
    weights = ExpertWeights(config, ExpertMap.linear(4, 2), ep_rank=1, scheme=SCHEMES["fp8_block"])
    found, saved_one = getattr(weights, "3").w2, weights.state_dict()["3.w2"]
    assert torch.equal(found.view(torch.uint8), saved_one.view(torch.uint8))
    for name in ("0", "4", "w9"):  # of another rank; of none
        with pytest.raises(AttributeError):
            getattr(weights, name)
