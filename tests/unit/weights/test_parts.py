"""Test how an expert's tensors are cut over etp ranks, and joined again."""

import pytest
import torch
from torch import nn

from ep_moe import Activation, ConfigError, InputError, MoEConfig
from ep_moe.weights.parts import Changes, Expert, ExpertModules, connect_in_autograd, etp_shard, join_etp_shards


@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.RELU2])
def test_pieces_are_joined_to_what_was_cut(activation, etp):
    config = MoEConfig(
        hidden_size=8, intermediate_size=16, num_experts=4, top_k=2, activation=activation, expert_bias=True
    )
    shapes = {"w13": (config.w13_rows, 8), "w2": (8, 16), "w13_bias": (config.w13_rows,), "w2_bias": (8,)}
    for name, shape in shapes.items():
        whole = torch.randn(shape)
        pieces = [etp_shard(config, name, whole, etp, rank) for rank in range(etp)]
        assert torch.equal(join_etp_shards(config, name, pieces), whole)


def test_what_every_etp_rank_has_is_that_of_the_first():
    """A tensor that every etp rank holds is taken from the first rank, because only that rank trains w2_bias."""
    config = MoEConfig(hidden_size=8, intermediate_size=16, num_experts=4, top_k=2, expert_bias=True)
    pieces = [torch.full((8,), float(rank)) for rank in range(2)]
    assert join_etp_shards(config, "w2_bias", pieces) is pieces[0]


def test_an_expert_that_fsdp_cuts_by_itself_is_refused():
    """An expert that FSDP2 itself shards is refused.

    FSDP2 replaces each parameter by a DTensor, but ranks hold different experts.
    """
    expert = Expert(Changes())
    expert.w1 = nn.Parameter(torch.ones(2, 2))
    cut = nn.Parameter(torch.ones(1, 2))
    cut.placements = ()
    with pytest.raises(ConfigError, match=r"ep_moe.training.fully_shard"):
        expert.w1 = cut


def test_a_piece_of_etp_is_replaced_by_a_piece_alone():
    """An etp piece is replaced only by an etp piece. A plain tensor may be the whole, or any rows of it."""
    expert = Expert(Changes())
    piece = nn.Parameter(torch.ones(2, 2))
    piece.placements = ()
    expert.register_parameter("w1", piece)
    with pytest.raises(InputError, match=r"w1 of an expert must be replaced by a parameter of its shape .* and kind"):
        expert.w1 = nn.Parameter(torch.ones(2, 2))
    assert expert.w1 is piece
    assert not expert.replaced


def test_a_transform_of_torch_func_is_told_that_it_is_not_served():
    """An unsupported torch.func transform raises torch's own error, and not an internal error."""
    stored = {"w2": torch.ones(3)}
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda p: connect_in_autograd(stored, lambda gradients: gradients, [p])["w2"].sum())(
            torch.ones(3)
        )


def test_modules_beside_the_experts_are_those_of_a_dict():
    modules, other = ExpertModules(), nn.Identity()
    modules.hold({"0": Expert(Changes())})
    modules |= {"lora": other}
    assert type(modules) is ExpertModules
    assert modules.setdefault("lora") is other
    assert modules.pop("absent", None) is None
    assert modules.pop("lora") is other
    assert list(modules) == ["0"]
