"""What a balancer refuses with the same error on all ranks: its arguments, and calls after `close`."""

import pytest
import torch
import torch.distributed as dist

from ep_moe import ConfigError, EPLBConfig, ExpertBalancer, ExpertMap, InputError, RebalanceError
from ep_moe.eplb.migration.consensus import State
from ep_moe.testing import distributed
from tests.fixtures.distributed_cases import same_error
from tests.fixtures.eplb_cases import CONFIG, ROW, assert_slots, context_of, make_layers, on_request, random_map
from tests.fixtures.eplb_faults import step_until
from tests.fixtures.helpers import integer_expert, integer_rows


@distributed(2)
def test_what_cannot_be_balanced_is_said_on_all_ranks(world_size):
    rank = dist.get_rank()
    with context_of() as context:
        (layer,) = make_layers(context)
        for config, sentence in (
            (on_request(nodes=3), "EPLBConfig.nodes must divide the 2 EP ranks, got 3"),
            (on_request(groups=3), "EPLBConfig.groups must divide the 10 experts, got 3"),
            (on_request(deadline_s=21.0), "EPLBConfig.deadline_s must be at most the context's, 20, got 21"),
            (on_request(bytes_per_step=100 + rank), "EPLBConfig.bytes_per_step: 100 on rank 0, 101 on rank 1"),
        ):
            found = same_error(ConfigError, lambda config=config: ExpertBalancer([layer], context, config))
            assert sentence in found, found
        layer.expert_weights.requires_grad_(rank == 1)
        found = same_error(ConfigError, lambda: ExpertBalancer([layer], context, on_request()))
        assert "rank 1: expert weights of layer moe0 require gradients" in found
        layer.expert_weights.requires_grad_(False)
        for wrong, sentence in (
            (([torch.nn.Linear(2, 2)],), "ExpertBalancer.layers must be a model with MoELayers in it, or a list"),
            ((torch.nn.Linear(2, 2),), "ExpertBalancer.layers must be a model with MoELayers in it, or a list"),
            ((None,), "ExpertBalancer.layers must be a model with MoELayers in it, or a list"),
            (([layer, layer],), "ExpertBalancer.layers must have each layer once, got ['moe0', 'moe0']"),
            (([layer], {"nodes": 1}), "ExpertBalancer.config must be an EPLBConfig, got {'nodes': 1}"),
        ):
            layers, config = wrong if len(wrong) > 1 else (*wrong, None)
            given = (layers, context, config) if rank else ([layer], context)
            assert f"rank 1: {sentence}" in same_error(ConfigError, lambda given=given: ExpertBalancer(*given))


@distributed(2)
def test_a_closed_balancer_does_nothing_more(world_size):
    with context_of() as context:
        layers = make_layers(context)
        balancer = ExpertBalancer(layers, context, EPLBConfig(interval=2, window=2, sync_every=1))
        balancer.close()
        balancer.close()
        before = layers[0].placement.expert_map
        for name, call in (
            ("step", balancer.step),
            ("move_to", lambda: balancer.move_to([random_map(2, 8, 1)])),
            ("settle", balancer.settle),
        ):
            sentence = f"ExpertBalancer.{name}: this balancer is closed; make another one"
            assert same_error(InputError, call) == sentence
        assert layers[0].placement.expert_map == before


@distributed(2)
def test_a_second_balancer_of_a_layer_is_refused(world_size):
    """The second one would choose replicas for the first, and the moves of each would roll those of the other back."""
    with context_of() as context:
        layers = make_layers(context, 2)
        first = ExpertBalancer(layers, context, on_request())
        found = same_error(ConfigError, lambda: ExpertBalancer(layers[1:], context, on_request()))
        assert "layer moe1 has an ExpertBalancer already" in found
        assert "call close() of that one on all ranks first" in found
        first.move_to([random_map(2, 8, 1)] * 2)
        first.settle()
        first.close()
        second = ExpertBalancer(layers, context, on_request())
        del second  # on all ranks, without close
        ExpertBalancer(layers, context, on_request()).close()


@distributed(2)
def test_a_close_that_rolls_back_gives_back_its_groups(world_size):
    with context_of() as context:
        layers = make_layers(context)
        balancer = ExpertBalancer(layers, context, on_request())
        balancer.move_to([ExpertMap.linear(10, 2)])
        assert "needs a map with slots_per_rank=8, got 5" in same_error(RebalanceError, balancer.close)
        assert "is closed" in same_error(InputError, balancer.step)
        with ExpertBalancer(layers, context, on_request()) as balancer:
            balancer.move_to([random_map(2, 8, 1)])
        assert layers[0].placement.expert_map == random_map(2, 8, 1)


@distributed(2)
def test_experts_that_move_between_forward_and_backward_are_named(world_size):
    """A backward after its experts moved or were updated raises.

    The kernels that move rows bypass autograd's version counters, and gradients would be computed with other experts'
    weights.
    """
    with context_of() as context:
        (layer,) = make_layers(context)
        x = integer_rows(3, 16, dist.get_rank()).to(context.device).requires_grad_()
        with ExpertBalancer([layer], context, on_request()) as balancer:
            out = layer(x)
            balancer.move_to([random_map(2, 8, seed=1)])
            balancer.settle()
            found = same_error(InputError, lambda: out.sum().backward())
            assert "experts moved (ExpertBalancer.step" in found
            assert "between the forward and the backward" in found
            layer(x).sum().backward()  # the next step works
            out = layer(x)
            layer.update_expert(0, **integer_expert(CONFIG, 0))
            assert "weights were written (update_expert" in same_error(InputError, lambda: out.sum().backward())


@distributed(2)
@pytest.mark.parametrize("state", [State.PLANNING, State.MOVING])
def test_a_conversion_while_experts_move_is_refused(state, world_size):
    """The layer stays as it was. It is converted after the rebalance, and its experts move in the new dtype."""
    with context_of() as context:
        (layer,) = make_layers(context)
        with ExpertBalancer([layer], context, on_request(bytes_per_step=ROW // 3)) as balancer:
            balancer.move_to([random_map(2, 8, 0)])
            step_until(balancer, lambda: balancer.state is state)
            for convert in (layer.bfloat16, layer.expert_weights.double, lambda: layer.to("meta")):
                assert "while an ExpertBalancer moves experts; call settle()" in same_error(InputError, convert)
            assert {parameter.dtype for parameter in layer.parameters()} == {torch.float32}
            layer.to(layer.device, torch.float32)
            balancer.settle()
            assert_slots(layer)
            layer.bfloat16()
            balancer.move_to([random_map(2, 8, 1)])
            balancer.settle()
            assert_slots(layer)


@distributed(2)
def test_a_conversion_on_one_rank_moves_no_experts(world_size):
    """The bytes of an expert would be more on one rank than on the other."""
    with context_of() as context:
        (layer,) = make_layers(context)
        with ExpertBalancer([layer], context, on_request()) as balancer:
            if dist.get_rank():
                layer.bfloat16()
            balancer.move_to([random_map(2, 8, 0)])
            text = same_error(RebalanceError, balancer.settle)
            assert "different plans" in text
            assert "converted (.to, .half) on all ranks alike" in text
        assert_slots(layer)
