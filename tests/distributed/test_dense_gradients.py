"""Dense gradients that are missing on some ranks, sparse, or not averaged; and buffers that differ between ranks."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_moe import ConfigError, EPContext, MoELayer, ParallelConfig, training
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import same_error
from tests.fixtures.training_model import CONFIG, WIDTH


class Skipping(nn.Module):
    """A model that uses only the parts that a call names."""

    def __init__(self, context: EPContext) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = MoELayer(CONFIG, context)

    def forward(self, x: Tensor, used: str) -> Tensor:
        for name in used.split():
            x = x + getattr(self, name)(x)
        return x


def made(context: EPContext) -> Skipping:
    torch.manual_seed(0)
    return Skipping(context).to(context.device)


# the parts that each rank uses in each step
STEPS = [("first second moe", "first second moe"), ("first", "first"), ("first second", "first"), ("first", "first")]


def halves(seed, context):
    """Return the rows of both ranks."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).to(context.device).chunk(2)


@distributed(2, deadline_s=60)
def test_what_no_rank_uses_does_not_move(world_size):
    """A dense parameter that no rank uses keeps `grad` None after `sync_gradients`.

    With a zero gradient, AdamW would change it by momentum and weight decay.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=20) as context:
        model, alone = made(context), made(EPContext.local(rank_device()))
        optimizers = [
            torch.optim.AdamW(training.parameter_groups(each), lr=0.1, weight_decay=0.1) for each in (model, alone)
        ]
        for step, used in enumerate(STEPS):
            x = halves(step, context)
            rank = context.layout.rank
            model(x[rank], used[rank]).square().mean().backward()
            training.sync_gradients(model, context)
            training.sync_gradients(model, context)
            sum(alone(part, names).square().mean() / 2 for part, names in zip(x, used, strict=True)).backward()
            for name, parameter in alone.named_parameters():
                if "expert_weights" in name:
                    continue
                found = model.get_parameter(name)
                assert (found.grad is None) == (parameter.grad is None), (step, name)
                torch.testing.assert_close(found, parameter, msg=f"{step}: {name}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@distributed(2, deadline_s=60)
def test_sparse_gradients_are_refused_on_all_ranks(world_size):
    """Sparse gradients raise on all ranks before anything changes, even if only one rank has one."""
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=20) as context:
        for using in ({0, 1}, {1}):
            model = made(context)
            model.words = nn.Embedding(4, WIDTH, sparse=True, device=context.device)
            x = torch.ones(3, WIDTH, device=context.device, requires_grad=True)
            if context.layout.rank in using:
                x = x + model.words(torch.arange(3, device=context.device))
            model(x, "moe").square().mean().backward()
            before = [parameter.grad for parameter in model.parameters()]
            text = same_error(ConfigError, lambda model=model: training.sync_gradients(model, context))
            assert text == (
                "sync_gradients: words.weight must have a dense gradient, got torch.sparse_coo; make its nn.Embedding "
                "or nn.EmbeddingBag with sparse=False"
            )
            assert all(
                parameter.grad is gradient for parameter, gradient in zip(model.parameters(), before, strict=True)
            )
        model.words.weight.grad = torch.zeros(4, WIDTH, device=context.device).to_sparse()
        text = same_error(ConfigError, lambda: training.clip_grad_norm_(model, context, 1.0))
        assert "clip_grad_norm_: words.weight must have a dense gradient" in text


@distributed(2, 4, deadline_s=60)
def test_sparse_gradients_after_the_first_call_are_refused_on_all_ranks(world_size):
    """Only one rank has a sparse gradient, in its second step or after `sync_gradients`."""
    if rank_device().type != "cpu":
        pytest.skip("on GPUs the exchange would wait for the device")
    sizes = {"dp": 2} if world_size == 2 else {"pp": 2, "dp": 2, "ep": 1}
    with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device(), deadline_s=20) as context:
        model = made(context)
        model.words = nn.Embedding(4, WIDTH, sparse=True, device=context.device)
        for step in range(2):
            x = torch.ones(3, WIDTH, device=context.device, requires_grad=True)
            if step and context.layout.rank == 1:
                x = x + model.words(torch.arange(3, device=context.device))
            model(x, "moe").square().mean().backward()
            if step == 0:
                training.sync_gradients(model, context)
                model.zero_grad()
        wrong = "words.weight must have a dense gradient, got torch.sparse_coo; make its nn.Embedding"
        if world_size == 2:
            text = same_error(ConfigError, lambda: training.sync_gradients(model, context))
            assert text.startswith(f"sync_gradients: {wrong}")
        text = same_error(ConfigError, lambda: training.clip_grad_norm_(model, context, 1.0))
        assert text.startswith(f"clip_grad_norm_: {wrong}")
        model.words.weight.grad = None
        training.sync_gradients(model, context)
        training.clip_grad_norm_(model, context, 1.0)


def averages_all(model, context):
    training.sync_gradients(model, context)
    training.clip_grad_norm_(model, context, 0.1)


def averages_nothing(model, context):
    pass


def averages_the_layer_alone(model, context):
    training.sync_gradients(model.moe, context)


def clips_by_a_rank_s_norm(model, context):
    training.sync_gradients(model, context)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


WAYS = [averages_all, averages_nothing, averages_the_layer_alone, clips_by_a_rank_s_norm]


@distributed(2, deadline_s=60)
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("after", WAYS)
def test_dense_parameters_that_drift_beside_a_router_that_does_not_are_named(after, ep, world_size):
    """Dense parameters that drift apart are named even if the router stays equal.

    The router is frozen, or the loop averages only the layer's gradients.
    """
    with EPContext.from_groups(ParallelConfig(dp=2, ep=ep), device=rank_device(), deadline_s=20) as context:
        model, rank = made(context), context.layout.rank
        if after is not averages_the_layer_alone:
            model.moe.router.requires_grad_(False)
            model.moe.shared_experts.requires_grad_(False)
        optimizer = torch.optim.SGD(training.parameter_groups(model), lr=0.5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(5):
                x = halves(step, context)
                model(x[rank], "first moe second").square().mean().backward()
                after(model, context)
                optimizer.step()
                optimizer.zero_grad()
        texts = [str(warning.message) for warning in caught if "train different models" in str(warning.message)]
        # with ep=1 both ranks hold all experts, whose gradients are clipped by one norm
        drifts = after is not averages_all and not (after is clips_by_a_rank_s_norm and ep == 1)
        assert len(texts) == drifts, texts
        assert all("another parameter of the experts' optimizer, on rank 1, differs" in text for text in texts)


@distributed(2, deadline_s=60)
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("own", [True, False])
def test_means_of_the_users_own_beside_a_frozen_router_are_warned_of(own, ep, world_size):
    """A loop that averages dense gradients by its own `all_reduce` is warned after its first step."""
    with EPContext.from_groups(ParallelConfig(dp=2, ep=ep), device=rank_device(), deadline_s=20) as context:
        model = made(context)
        model.moe.router.requires_grad_(False)
        optimizer = torch.optim.SGD(training.parameter_groups(model), lr=0.1)
        texts = []
        for micro_batch in range(8):
            x = halves(micro_batch, context)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(x[context.layout.rank], "first moe second").square().mean().backward()
            texts += [(micro_batch, str(warning.message)) for warning in caught if "moe0: " in str(warning.message)]
            if micro_batch < 2:
                continue
            if own:
                for parameter in training.dense_parameters(model):
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
                        parameter.grad /= 2
            else:
                training.sync_gradients(model, context)
            optimizer.step()
            optimizer.zero_grad()
        assert [at for at, _ in texts] == ([3] if own else [])
        assert all(text.startswith("moe0: dense parameters stay equal on all ranks") for _, text in texts)


@distributed(2, deadline_s=60)
def test_a_buffer_that_each_rank_writes_is_no_parameter_that_drifts(world_size):
    """A buffer that differs between ranks, such as BatchNorm's, is named once and does not hide later parameter drift.

    Averaged gradients do not change such buffers.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=20) as context:
        torch.manual_seed(0)
        shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to(context.device)
        layer = MoELayer(CONFIG, context, shared_experts=shared)
        optimizer = torch.optim.SGD(training.parameter_groups(layer), lr=0.5)
        texts = []
        for step in range(8):
            x = halves(step, context)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                layer(x[context.layout.rank]).square().mean().backward()
                if step < 4:
                    training.sync_gradients(layer, context)
            texts += [(step, str(warning.message)) for warning in caught if "moe0: " in str(warning.message)]
            optimizer.step()
            optimizer.zero_grad()
        (first, of_buffer), (then, of_parameter) = texts
        assert first == 1
        assert of_buffer.startswith("moe0: the buffer shared_experts.1.running_mean on rank 1 differs")
        assert then == 7
        assert of_parameter.startswith("moe0: router.weight on rank 1 differs")
