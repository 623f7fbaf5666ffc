"""State dicts with other expert maps: all ranks load one and adopt its map, or the next call names the ranks that did
not."""

import warnings

import pytest
import torch
import torch.distributed as dist

from ep_moe import ConfigError, EPContext, ExpertMap, InputError, MoEConfig, MoELayer, ParallelConfig
from ep_moe.errors import PeerTimeout
from ep_moe.placement.expert_map import EMPTY
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import same_error

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2)
FIRST = ExpertMap.redundant(8, 2, 4)
HALVES = [range(4), range(4, 8)]
OTHER = ExpertMap.from_ranks([list(FIRST.local(rank)) for rank in (1, 0)], 8)


def made(context, expert_map, all2all="allgather"):
    torch.manual_seed(0)
    return MoELayer(CONFIG, context, expert_map=expert_map, all2all=all2all)


@distributed(2)
def test_a_map_that_one_rank_alone_adopted(world_size):
    """Ranks with different expert maps are named in the error.

    Without the error, rows would be computed by other experts than the router chose.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        layer, state = made(context, FIRST), made(context, OTHER).state_dict()
        x = torch.ones(3, 16, device=context.device)
        wanted = layer(x)
        if context.layout.rank == 1:
            layer.load_state_dict(state)
        assert "different expert maps, at least rank 0 and rank 1" in same_error(InputError, lambda: layer(x))
        if context.layout.rank == 0:
            layer.load_state_dict(state)
        assert torch.equal(layer(x), wanted)


@distributed(2)
def test_a_map_with_empty_slots_is_adopted(world_size):
    first, other = (ExpertMap.from_ranks([[*held, EMPTY] for held in ranks], 8) for ranks in (HALVES, HALVES[::-1]))
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context, torch.no_grad():
        layer, saved = made(context, first), made(context, other)
        x = torch.randn(3, 16, device=context.device)
        layer.load_state_dict(saved.state_dict())
        assert layer.placement.expert_map == other
        assert torch.equal(layer(x), saved(x))


@distributed(2)
def test_a_state_with_all_experts_serves_the_map_in_force(world_size):
    """A state dict with all experts loads under the map in force.

    Such a dict is merged from the files of all ranks, so the map in its metadata is that of one file.
    """
    first, other = (ExpertMap.from_ranks(ranks, 8) for ranks in (HALVES, [[0, 2, 4, 6], [1, 3, 5, 7]]))
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context, torch.no_grad():
        layer, saved = made(context, first), made(context, other)
        state, found = saved.state_dict(), [None, None]
        dist.all_gather_object(found, {name: 2 * tensor.cpu() for name, tensor in state.items()})
        for one in found:
            state.update(one)
        layer.load_state_dict(state)
        assert layer.placement.expert_map == first
        saved.load_state_dict(state)
        x = torch.randn(3, 16, device=context.device)
        assert torch.equal(layer(x), saved(x))


@distributed(2)
def test_a_state_that_one_rank_alone_loaded(world_size):
    """A state dict that only one rank loaded raises on all ranks at the next call, in inference too.

    Inference compares no gradients that could reveal it. A rank whose load failed may load again.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context, torch.no_grad():
        rank, x = context.layout.rank, torch.ones(3, 16, device=context.device)
        layer, other = made(context, FIRST), made(context, FIRST)
        other.load_state_dict({name: 2 * tensor for name, tensor in layer.state_dict().items()})
        first, second = layer.state_dict(), other.state_dict()
        first = {name: tensor.clone() for name, tensor in first.items()}
        wanted = layer(x)
        for one_alone in (0, 1):
            if rank == one_alone:
                layer.load_state_dict(second)
            text = same_error(InputError, lambda: layer(x))
            assert "ranks have loaded different state dicts since the last call" in text
            assert f"rank {1 - one_alone} none" in text
            layer.load_state_dict(first)
            assert torch.equal(layer(x), wanted)
        layer.load_state_dict(second if rank else first)
        assert "different state dicts" in same_error(InputError, lambda: layer(x))
        if rank:
            with pytest.raises(RuntimeError, match="Missing key"):
                layer.load_state_dict({"router.weight": first["router.weight"]})
        layer.load_state_dict(first)
        assert torch.equal(layer(x), wanted)
        assert torch.equal(layer(x), wanted)
        if rank == 0:
            layer.load_state_dict({"router.weight": second["router.weight"]}, strict=False)
        dist.broadcast(layer.router.weight, 0)
        layer(x)
        empty = made(context, ExpertMap.from_ranks([[], list(range(8))], 8))
        empty(x)
        empty.load_state_dict(empty.state_dict())
        empty(x)


@distributed(2)
def test_a_state_that_one_rank_alone_loaded_over_fixed_buffers(world_size):
    """With fixed buffers, the first call after a load waits until all ranks have loaded, or raises PeerTimeout.

    Calls over fixed buffers exchange nothing on the host, so the ranks compare loads once. The loaded map may differ.
    """
    if rank_device().type == "cuda":
        pytest.skip("the host of a rank that did not goes on there, and hears of it at a later step")
    options = {"device": rank_device(), "ranks_per_node": 1, "max_tokens": 4, "deadline_s": 4}
    with EPContext.from_groups(ParallelConfig(dp=2), **options) as context:
        layer, state = (made(context, one, "hierarchical_static") for one in (FIRST, OTHER))
        x, state = torch.ones(3, 16, device=context.device), state.state_dict()
        wanted = layer(x)
        for rank in range(2):
            if context.layout.rank == rank:
                layer.load_state_dict(state)
            dist.barrier()
        assert layer.placement.expert_map == OTHER
        assert torch.equal(layer(x), wanted)
        if context.layout.rank == 1:
            layer.load_state_dict(state)
        sentence = "a call after load_state_dict, .* needs rank 0 too" if context.layout.rank else "lost its peers"
        with pytest.raises(PeerTimeout, match=sentence):
            layer(x)


@distributed(2)
def test_an_optimizer_that_was_made_before_experts_moved(world_size):
    """An optimizer of the parameters before a map change is refused.

    Its parameters no longer belong to the layer, so its steps would not update the experts.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        layer, state = made(context, FIRST), made(context, OTHER).state_dict()
        for name, parameter in layer.expert_weights.named_parameters():
            parameter.requires_grad_(not name.endswith("w3"))
        early = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer.load_state_dict(state)
        late = torch.optim.SGD(layer.parameters(), lr=0.1)
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(0)).to(context.device)
        layer(x).square().mean().backward()
        before = {name: parameter.detach().clone() for name, parameter in layer.expert_weights.named_parameters()}
        with pytest.raises(ConfigError, match=r"holds expert parameters that their layer has replaced.*make the optim"):
            early.step()
        late.step()
        moved = {
            name for name, parameter in layer.expert_weights.named_parameters() if (parameter != before[name]).any()
        }
        assert {name.partition(".")[2] for name in moved} == {"w1", "w2"}, "what was frozen stays so"
        layer.expert_weights.requires_grad_(False)
        early.step()


@distributed(2)
def test_experts_that_a_state_dict_leaves_out_are_warned_of(world_size):
    """With `strict=False`, a rank that loads another rank's file says which of its experts it kept.

    Without the warning, the outputs are wrong and nothing says so: often one rank alone prints missing keys.
    """
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context, torch.no_grad():
        rank, x = context.layout.rank, torch.ones(3, 16, device=context.device)
        layer, files = made(context, ExpertMap.linear(8, 2)), [None, None]
        dist.all_gather_object(files, {name: tensor.cpu() for name, tensor in layer.state_dict().items()})

        def said(*loaded, then=lambda: None):
            for state in loaded:
                layer.load_state_dict(state, strict=False)
            then()
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                layer(x)
                layer(x)
            return [str(warning.message) for warning in found if "load_state_dict left" in str(warning.message)]

        (text,) = said(files[0]) or ["none"]
        assert text == "none" if rank == 0 else "left experts [4, 5, 6, 7] of rank 1 as they were" in text
        assert not said(files[0], files[1])  # a checkpoint of several files
        assert not said({"router.weight": files[0]["router.weight"]})
        assert not said(files[rank])
        some = {name: tensor for name, tensor in files[rank].items() if not name.startswith("expert_weights.5.")}
        assert [text.partition(" of rank")[0] for text in said(some)] == (
            ["moe0: load_state_dict left experts [5]"] if rank else []
        )
        w1, w3, w2 = (files[1][f"expert_weights.5.{name}"] for name in ("w1", "w3", "w2"))
        assert not said(some, then=lambda: layer.update_expert(5, w13=torch.cat([w1, w3]), w2=w2))
    with EPContext.local(rank_device()) as context, torch.no_grad():  # torch returns the missing keys to the caller
        layer = made(context, ExpertMap.linear(8, 1), "local")
        assert not said(files[0])
