"""Test weights cut over etp: pieces join to the whole, and their outputs add up to its output."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ep_moe import Activation, ConfigError, ExpertMap, MoEConfig
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.experts.shared_experts import activate
from ep_moe.types import LocalIds, Received, RowLayout, Weighting
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.parts import etp_dim, etp_shard, join_etp_shards
from tests.fixtures.expert_weights import ACTIVATIONS, REDUNDANT, etp_link, filled_weights, shape
from tests.fixtures.helpers import integer_expert, integer_rows

unhurried = settings(deadline=None)
NAMES = ("w13", "w2", "w13_bias", "w2_bias")


@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.value)
def test_join_etp_shards_undoes_etp_shard(activation, name, etp):
    config = shape(activation)
    whole = integer_expert(config, 3)[name]
    pieces = [etp_shard(config, name, whole, etp, rank) for rank in range(etp)]
    assert torch.equal(join_etp_shards(config, name, pieces), whole)
    for rank, piece in enumerate(pieces):
        assert piece.shape == ExpertWeights(config, REDUNDANT, etp=etp_link(etp, rank)).get_parameter(name)[0].shape


@unhurried
@given(st.sampled_from(ACTIVATIONS), st.integers(1, 6), st.integers(1, 6))
def test_join_etp_shards_undoes_etp_shard_for_any_size(activation, etp, each):
    config = shape(activation, inner=etp * each)
    for name, whole in integer_expert(config, 0).items():
        pieces = [etp_shard(config, name, whole, etp, rank) for rank in range(etp)]
        assert torch.equal(join_etp_shards(config, name, pieces), whole), name
        if etp_dim(name, whole.dim()) is not None:
            assert sum(piece.numel() for piece in pieces) == whole.numel(), name
        else:
            assert all(torch.equal(piece, whole) for piece in pieces), name


def test_a_piece_has_gate_and_up_of_the_same_columns():
    config = shape(inner=4)
    w13 = torch.arange(8.0).unsqueeze(1).expand(8, config.hidden_size)  # gate has rows 0..3, up has rows 4..7
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
    """The outputs of the pieces add up to the output of the whole.

    The sum is exact for small integers and an activation that keeps them integers.
    """
    config = shape(Activation.RELU2, bias)
    everything = ExpertMap.linear(5, 1)
    x = integer_rows(15, 8, 0)
    whole = output(config, filled_weights(config, everything), x)
    pieces = [output(config, filled_weights(config, everything, etp=etp_link(etp, rank)), x) for rank in range(etp)]
    assert torch.equal(sum(pieces), whole)
    assert whole.abs().max() > 0


@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.SWIGLU_CLAMPED], ids=lambda a: a.value)
def test_cutting_commutes_with_computing_gated(activation):
    config = shape(activation)
    everything = ExpertMap.linear(5, 1)
    x = integer_rows(15, 8, 0)
    whole = output(config, filled_weights(config, everything), x)
    pieces = [output(config, filled_weights(config, everything, etp=etp_link(4, rank)), x) for rank in range(4)]
    assert ((sum(pieces) - whole).abs() <= apart(config, x)).all()


def apart(config: MoEConfig, x: Tensor) -> Tensor:
    """Return how far two float32 outputs [T, H] may differ that add the same terms in different orders.

    Each addition, of inner columns, bias and pieces, rounds by at most half a step, 2**-24 of the sizes' sum. The
    activation may use other instructions: an exp that is off by one step, an addition, a division and three products.
    """
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
