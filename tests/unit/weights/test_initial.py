"""Test the values of new experts, and the random experts that kernels are checked with."""

import math

import pytest
import torch

from ep_moe import MoEConfig
from ep_moe.quant.schemes import SCHEMES
from ep_moe.types import Activation
from ep_moe.weights.initial import fork_rng_with_shared_seed, initial_expert, random_expert

CPU = torch.device("cpu")
CONFIG = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2, expert_bias=True)


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("make", [initial_expert, random_expert], ids=lambda make: make.__name__)
def test_an_expert_has_the_same_numbers_whatever_was_drawn_before(make):
    def made(expert):
        if make is random_expert:
            return random_expert(CONFIG, SCHEMES["none"], expert, torch.float32)
        return initial_expert(CONFIG, SCHEMES["none"], torch.float32, expert, CPU)

    first = made(3)
    torch.rand(7)
    assert equal(made(3), first)
    assert not torch.equal(made(4)["w13"], first["w13"])
    assert not torch.equal(made(4)["w2"], first["w2"])


def test_fresh_matrices_are_uniform_by_their_fan_in():
    made = initial_expert(CONFIG, SCHEMES["none"], torch.float32, 0, CPU)
    for name, fan_in in (("w13", 256), ("w2", 128)):
        bound = 1 / math.sqrt(fan_in)
        assert 0.99 * bound < made[name].max() <= bound
        assert -bound <= made[name].min() < -0.99 * bound
    assert not made["w13_bias"].any()
    assert not made["w2_bias"].any()


def test_fresh_numbers_are_rounded_to_a_dtype_at_the_end():
    whole, half = (initial_expert(CONFIG, SCHEMES["none"], dtype, 0, CPU) for dtype in (torch.float32, torch.bfloat16))
    for name, tensor in whole.items():
        assert torch.equal(half[name], tensor.to(torch.bfloat16)), name


@pytest.mark.parametrize("scheme", ["fp8_static", "nvfp4"])
def test_fresh_input_scales_are_one(scheme):
    made = initial_expert(CONFIG, SCHEMES[scheme], torch.bfloat16, 0, CPU)
    assert {float(made[f"{name}_input_scale"]) for name in ("w13", "w2")} == {1.0}


def test_experts_to_check_with_keep_activations_near_one():
    made = random_expert(CONFIG, SCHEMES["none"], 0, torch.float32)
    for name, std in (("w13", 1 / 16), ("w2", 1 / 128**0.5), ("w13_bias", 0.3), ("w2_bias", 0.3)):
        assert made[name].std() == pytest.approx(std, rel=0.1), name


@pytest.mark.parametrize("scheme", ["none", "fp8_static", "nvfp4"])
def test_biases_to_check_with_are_there_where_a_layer_has_them(scheme):
    plain = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
    with_biases = random_expert(CONFIG, SCHEMES[scheme], 0, torch.bfloat16)
    assert with_biases["w13_bias"].dtype == with_biases["w2_bias"].dtype == torch.bfloat16
    assert not any(name.endswith("bias") for name in random_expert(plain, SCHEMES[scheme], 0, torch.bfloat16))


@pytest.mark.parametrize("scheme", ["fp8_static", "nvfp4"])
def test_scales_to_check_with_differ_between_experts_and_matrices(scheme):
    """Random scales differ between experts and matrices, so that a kernel which uses a wrong one is detected."""
    experts = [random_expert(CONFIG, SCHEMES[scheme], expert, torch.bfloat16) for expert in range(2)]
    scales = [float(made[f"{name}_input_scale"]) for made in experts for name in ("w13", "w2")]
    assert len(set(scales)) == 4


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_global_scales_to_check_with_differ_and_the_numbers_stay(name):
    scheme = SCHEMES["nvfp4"]
    plain = random_expert(CONFIG, SCHEMES["none"], 1, torch.float32)[name]
    made = random_expert(CONFIG, scheme, 1, torch.bfloat16)
    error = (scheme.dequantize(made, name).float() - plain).abs().max()
    assert error < 0.2 * plain.abs().max()
    largest = 6 * 448 * float(made[f"{name}_global_scale"])
    assert largest == pytest.approx(2 * float(plain.abs().max()), rel=0.01), "twice what quantizing would choose"


def test_static_scales_of_squares_are_wider():
    usual, squares = (
        random_expert(
            MoEConfig(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2, activation=activation),
            SCHEMES["fp8_static"], 0, torch.bfloat16,
        )
        for activation in (Activation.SWIGLU, Activation.RELU2)
    )  # fmt: skip
    assert float(squares["w2_input_scale"]) == pytest.approx(4 * float(usual["w2_input_scale"]))
    assert torch.equal(squares["w13_input_scale"], usual["w13_input_scale"])


def test_a_model_draws_what_its_first_rank_says_and_goes_on_as_after_one_number():
    torch.manual_seed(5)
    drawn = int(torch.randint(2**62, ()))
    behind = torch.rand(3)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        with fork_rng_with_shared_seed(lambda own: found.append(own) or 77, CPU):
            inside = torch.rand(3)
        assert torch.equal(torch.rand(3), behind)
    assert found == [drawn, drawn]
    torch.manual_seed(77)
    assert torch.equal(inside, torch.rand(3))


def test_nothing_is_drawn_for_the_meta_device():
    state = torch.random.get_rng_state()
    with fork_rng_with_shared_seed(lambda own: pytest.fail("asked for a seed"), torch.device("meta")):
        pass
    assert torch.equal(torch.random.get_rng_state(), state)
