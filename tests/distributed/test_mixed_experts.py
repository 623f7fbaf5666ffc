"""Training loops that mix the experts of ranks, or their gradients: a later call is refused."""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from io import BytesIO

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import LBFGS, SGD, Adam

from ep_moe import ConfigError, EPContext, ExpertMap, InputError, MoELayer, ParallelConfig, training
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import same_error
from tests.fixtures.training_model import CONFIG, EXPERTS, WIDTH


def average_all(model: nn.Module, context: EPContext) -> None:
    """Average all gradients, as data-parallel scripts do."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def average_twice(model: nn.Module, context: EPContext) -> None:
    training.sync_gradients(model, context)
    average_all(model, context)


def train(layer: MoELayer, context: EPContext, optimizer, after: Callable[[nn.Module, EPContext], None]) -> None:
    for step in range(5):
        generator = torch.Generator().manual_seed(2 * step + context.layout.rank)
        layer(torch.randn(12, WIDTH, generator=generator).to(context.device)).square().mean().backward()
        after(layer, context)
        optimizer.step()
        optimizer.zero_grad()


GRADIENTS, NUMBERS = "an optimizer step on rank 1 used the gradients of rank 0's experts", "ZeroRedundancyOptimizer"
WAYS = {
    "averaged": (lambda p: SGD(p, lr=0.1), average_all, GRADIENTS),
    "averaged for Adam": (lambda p: Adam(p, lr=0.1), average_all, GRADIENTS),
    "averaged after sync_gradients": (lambda p: SGD(p, lr=0.1), average_twice, GRADIENTS),
    "ZeRO": (lambda p: ZeroRedundancyOptimizer(p, SGD, lr=0.1), training.sync_gradients, NUMBERS),
}


@distributed(2)
@pytest.mark.parametrize("way", WAYS)
def test_experts_that_are_mixed_are_found(way):
    make, after, text = WAYS[way]
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        torch.manual_seed(0)
        layer = MoELayer(CONFIG, context)
        fresh = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        found = same_error(InputError, lambda: train(layer, context, make(layer.parameters()), after))
        assert text in found
        assert "expert_parameters(model)" in found
        layer.load_state_dict(fresh)
        train(layer, context, SGD(layer.parameters(), lr=0.1), training.sync_gradients)


STATES = {"Adam": lambda p: Adam(p, lr=0.1), "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9)}


@distributed(2)
@pytest.mark.parametrize("later", [False, True], ids=["a new optimizer", "after steps"])
@pytest.mark.parametrize("kind", STATES)
def test_an_optimizer_file_of_another_rank_is_found(kind, later):
    """All ranks load the optimizer state of rank 0. The moments of its experts are not those of other experts."""
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        torch.manual_seed(0)
        layer = MoELayer(CONFIG, context)
        loop = partial(train, layer, context, after=training.sync_gradients)
        optimizer = STATES[kind](layer.parameters())
        loop(optimizer)
        weights = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        file = BytesIO()
        torch.save(optimizer.state_dict(), file)
        files = [None, None]
        dist.all_gather_object(files, file.getvalue())

        def resumed(rank):
            layer.load_state_dict(weights)
            found = optimizer if later else STATES[kind](layer.parameters())
            found.load_state_dict(torch.load(BytesIO(files[rank]), weights_only=True))
            layer._checks.backward_comparison._backwards["lockstep"] = 0
            loop(found)

        assert "ranks 0 and 1 hold different experts" in same_error(InputError, lambda: resumed(0))
        resumed(dist.get_rank())


@distributed(4)
def test_an_optimizer_file_of_another_rank_than_the_first_is_found():
    """Ranks 2 and 3 load the file of rank 2, and ranks 0 and 1 their own."""
    with EPContext.from_groups(ParallelConfig(dp=4), device=rank_device(), deadline_s=30) as context:
        torch.manual_seed(0)
        layer = MoELayer(CONFIG, context)
        optimizer = STATES["Adam"](layer.parameters())
        train(layer, context, optimizer, training.sync_gradients)
        files = [None] * 4
        dist.all_gather_object(files, optimizer.state_dict()["state"])
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": files[min(2, dist.get_rank())], "param_groups": groups})
        layer._checks.backward_comparison._backwards["lockstep"] = 0
        found = same_error(InputError, lambda: train(layer, context, optimizer, training.sync_gradients))
        assert "ranks 2 and 3 hold different experts" in found


def in_place(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


AVERAGES = {
    "by torch": lambda parameters: average_parameters(iter(parameters), dist.group.WORLD),
    "in place": in_place,
}


@distributed(2)
@pytest.mark.parametrize("way", AVERAGES)
def test_an_average_of_weights_late_in_training_is_found_within_128_backwards(way):
    """Averaging expert weights once, late in training, is found within 128 backwards.

    Later steps of the ranks differ again, so the comparison must find experts that became alike.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        torch.manual_seed(0)
        layer = MoELayer(CONFIG, context)
        fresh = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        optimizer = SGD(layer.parameters(), lr=0.1)
        train(layer, context, optimizer, training.sync_gradients)
        AVERAGES[way](layer.parameters())
        # `train` then ends just before the comparison
        layer._checks.backward_comparison._backwards["lockstep"] = 256 + 128 - 5
        train(layer, context, optimizer, training.sync_gradients)
        found = same_error(InputError, lambda: train(layer, context, optimizer, training.sync_gradients))
        assert "the experts of rank 1 became similar to those of rank 0" in found
        layer.load_state_dict(fresh)
        train(layer, context, optimizer, training.sync_gradients)


@distributed(2)
def test_averages_instead_of_synchronized_gradients_are_found():
    """Averages are found in training that averages weights now and then (local SGD), and no gradients.

    There, routers differ from the first step on. Ranks warn of that once, and then compare experts only.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        torch.manual_seed(0)
        layer = MoELayer(CONFIG, context)
        optimizer = SGD(layer.parameters(), lr=0.1)
        alone = partial(train, layer, context, optimizer, lambda model, context: None)
        with pytest.warns(UserWarning, match=r"router.weight .*differs from the other ranks'"):
            alone()
        in_place(layer.parameters())
        layer._checks.backward_comparison._backwards["lockstep"] = 256 + 128 - 5
        alone()
        assert "the experts of rank 1 became similar to those of rank 0" in same_error(InputError, alone)


@distributed(2)
def test_right_loops_are_not_refused():
    """Correct loops are not refused: equal experts in other slots have equal gradients, and parameters can be saved."""
    maps = [ExpertMap.redundant(EXPERTS, 2, 2), ExpertMap.from_ranks([range(EXPERTS), range(EXPERTS)[::-1]], EXPERTS)]
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        for expert_map in maps:
            torch.manual_seed(0)
            layer = MoELayer(CONFIG, context, expert_map=expert_map)
            train(layer, context, SGD(layer.parameters(), lr=0.1), training.sync_gradients)
            file = BytesIO()
            torch.save(dict(layer.named_parameters()), file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
            SGD(loaded.values(), lr=0.1).step()


@distributed(2)
def test_a_context_of_other_ranks_is_refused():
    """The training tools refuse a context with another layout than the layers'.

    They would average over no ranks, and clip by each rank's own norm.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        model = nn.Sequential(MoELayer(CONFIG, context))
        model(torch.ones(2, WIDTH, device=context.device)).sum().backward()
        for other in (
            EPContext.local(rank_device()),
            EPContext.from_groups(ParallelConfig(tp=2), device=rank_device()),
        ):
            with other:
                for call in (
                    lambda c: training.sync_gradients(model, c),
                    lambda c: training.clip_grad_norm_(model, c, 1.0),
                    lambda c: training.fully_shard(model, c),
                ):
                    with pytest.raises(ConfigError, match="context must have the layout of moe0's"):
                        call(other)
        with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as twin:
            training.sync_gradients(model, twin)


@distributed(2)
@pytest.mark.parametrize("counts", [None, [0, EXPERTS]])
def test_a_step_of_all_parameters_is_refused(counts):
    """LBFGS over experts is refused. Its inner products would cover only this rank's experts.

    A rank without experts refuses it too. Its own optimizer holds dense parameters in either case.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        torch.manual_seed(0)
        layer = MoELayer(CONFIG, context, expert_map=counts and ExpertMap.uneven(counts))
        x = torch.randn(12, WIDTH).to(context.device)

        def closure():
            layer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            training.sync_gradients(layer, context)
            return loss.detach()

        text = same_error(ConfigError, lambda: LBFGS(layer.parameters()).step(closure))
        assert "LBFGS computes each step from inner products" in text
        before = layer.router.weight.detach().clone()
        LBFGS(training.dense_parameters(layer)).step(closure)
        assert not torch.equal(before, layer.router.weight)


@distributed(2)
def test_a_step_of_all_parameters_is_served_where_each_rank_has_all_experts():
    with EPContext.from_groups(ParallelConfig(dp=2, ep=1), device=rank_device(), deadline_s=30) as context:
        torch.manual_seed(0)
        layer = MoELayer(CONFIG, context)
        x = torch.randn(12, WIDTH).to(context.device)
        optimizer, losses = LBFGS(layer.parameters(), lr=0.1), []

        def closure():
            layer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            training.sync_gradients(layer, context)
            losses.append(float(loss))
            return loss.detach()

        optimizer.step(closure)
        assert losses[-1] < losses[0]


DRAWN = {  # tensors of experts, number of experts, whether the call is refused
    "all": (("w1", "w3", "w2"), EXPERTS, True),
    "w2 alone": (("w2",), EXPERTS, False),
    "of one expert a rank": (("w1", "w3", "w2"), 2, False),
    "of another number on each rank": (("w1", "w3", "w2"), EXPERTS - 1, False),
}


@distributed(2)
@pytest.mark.parametrize("case", DRAWN)
def test_experts_that_ranks_draw_from_one_seed(case):
    """Experts initialized from one seed on all ranks are refused, or warned of.

    A loop of torch.nn.init over parameters does this.
    """
    parts, experts, refused = DRAWN[case]
    config = dataclasses.replace(CONFIG, num_experts=experts, top_k=1)
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        layer = MoELayer(config, context)
        x = torch.ones(3, WIDTH).to(context.device)
        with warnings.catch_warnings(record=True) as none:
            warnings.simplefilter("always", UserWarning)
            MoELayer(config, context)(x)
        assert not any("from one seed" in str(warning.message) for warning in none)
        torch.manual_seed(1)
        for name, parameter in layer.expert_weights.named_parameters():
            if name.partition(".")[2] in parts:
                nn.init.normal_(parameter, std=0.02)
        if refused:
            assert "from one seed on all ranks (torch.nn.init)" in same_error(InputError, lambda: layer(x))
        else:
            with pytest.warns(UserWarning, match=rf"{', '.join(parts)} of rank 1's experts have the values of rank 0"):
                layer(x)
        torch.manual_seed(1)
        for expert in range(experts):
            whole = {
                "w13": torch.randn(2 * config.intermediate_size, WIDTH),
                "w2": torch.randn(WIDTH, config.intermediate_size),
            }
            layer.update_expert(expert, **whole)
        layer(x)


@distributed(2)
@pytest.mark.parametrize("after", [training.sync_gradients, partial(training.clip_grad_norm_, max_norm=1.0)])
@pytest.mark.parametrize("differs", ["order of models", "what learns"])
def test_gradients_of_other_parameters_are_not_summed(differs, after):
    """Ranks whose models or frozen parameters differ are named instead of summed.

    Sizes are equal here, so the sum would silently mix gradients of different parameters.
    """
    if rank_device().type != "cpu":
        pytest.skip("compared on CPUs alone")
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        rank = dist.get_rank()
        torch.manual_seed(0)
        models = [nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), MoELayer(CONFIG, context)]) for _ in range(2)]

        def backward():
            for one, two, layer in models:
                (layer(torch.ones(3, WIDTH)).sum() + one(torch.ones(4)).sum() + two(torch.ones(4)).sum()).backward()

        backward()
        for model in models:
            training.sync_gradients(model, context)
        if differs == "what learns":
            models[0][rank].requires_grad_(False)
            wanted = r"AFTER got a model with dense parameters that learn=\d+ .* on rank 0"
        else:
            wanted = r"AFTER got a model with layers=moe0 on rank 0, and with layers=moe1 on rank 1"
        backward()
        in_order = models[::-1] if rank and differs == "order of models" else models
        text = same_error(InputError, lambda: [after(model, context) for model in in_order])
        name = "sync_gradients" if after is training.sync_gradients else "clip_grad_norm_"
        assert re.search(wanted.replace("AFTER", name), text), text


@distributed(2)
@pytest.mark.parametrize("when", ["at first", "later"])
def test_replicas_of_which_some_are_frozen_are_refused(world_size, when):
    """A frozen replica is not updated in a step, and a rank of frozen experts adds no gradient to the others' sum."""
    parallel = ParallelConfig(dp=2)
    with EPContext.from_groups(parallel, device=rank_device(), deadline_s=30) as context:
        layer = MoELayer(CONFIG, context, expert_map=ExpertMap.redundant(EXPERTS, 2, 2))
        optimizer = SGD(layer.parameters(), lr=0.1)

        def freeze() -> None:
            for parameter in list(layer.expert_weights.parameters())[: 3 * (dist.get_rank() == 0)]:
                parameter.requires_grad_(False)

        if when == "later":
            layer(torch.ones(2, WIDTH, device=context.device)).sum().backward()
        freeze()
        if when == "later":
            with torch.no_grad():  # calls without gradients go on
                layer(torch.ones(2, WIDTH, device=context.device))
        message = same_error(InputError, lambda: train(layer, context, optimizer, training.sync_gradients))
        assert re.search(r"some parameters of expert \d have requires_grad=True on one of the ranks 0, 1", message)


@distributed(2, 4)
@pytest.mark.parametrize("count", [1, None], ids=["one parameter", "all parameters"])
@pytest.mark.parametrize("when", ["at first", "later"])
def test_experts_that_one_of_the_ranks_of_the_same_experts_has_frozen(world_size, when, count):
    """All ranks refuse it in backward. The rank of frozen experts would leave the others waiting for its gradients."""
    parallel = ParallelConfig(dp=world_size, ep=world_size // 2)
    with EPContext.from_groups(parallel, device=rank_device(), deadline_s=20) as context:
        layer = MoELayer(CONFIG, context)
        x = torch.ones(2, WIDTH, device=context.device)
        if when == "later":
            for _ in range(4):
                layer(x).sum().backward()
        if dist.get_rank() == world_size - 1:
            for parameter in list(layer.expert_weights.parameters())[:count]:
                parameter.requires_grad_(False)
        pair = f"rank {world_size // 2 - 1} and False on rank {world_size - 1}"
        message = same_error(InputError, layer(x).sum().backward)
        assert f"some expert parameters have requires_grad=True on {pair}, or the reverse" in message
        layer.expert_weights.requires_grad_(False)  # on all ranks
        layer(x).sum().backward()
        layer.expert_weights.requires_grad_(True)
        layer(x).sum().backward()
