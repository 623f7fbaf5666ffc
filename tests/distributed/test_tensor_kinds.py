"""Tensor subclasses: computed if they hold plain rows, refused by name otherwise."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ep_moe import Activation, EPContext, InputError, MoEConfig, MoELayer, ParallelConfig, Routing
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import check_call, gather_from_all_ranks, same_error
from tests.fixtures.helpers import fill, integer_rows

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2, activation=Activation.RELU2)
ODD = 1


KINDS = {
    "sparse": (lambda x: x.to_sparse(), "must be dense, got torch.sparse_coo; pass {}.to_dense()"),
    "nested": (
        lambda x: torch.nested.as_nested_tensor([x, x]),
        "must be dense, got a nested tensor; pass torch.cat({}.unbind()), the rows of all sequences",
    ),
    "DTensor": (
        lambda x: DTensor.from_local(x, DeviceMesh(x.device.type, [0, 1]), [Shard(0)], run_check=False),
        "must be this rank's own rows, got a DTensor; pass {}.to_local()",
    ),
}


@distributed(2)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_other_kinds_are_refused_and_the_context_goes_on(world_size):
    with EPContext.from_groups(device=rank_device(), deadline_s=10) as context:
        layer = fill(MoELayer(CONFIG, context))
        x, mask = torch.ones(4, 16, device=context.device), torch.ones(4, dtype=torch.bool, device=context.device)
        routing = Routing(torch.zeros(4, CONFIG.top_k, dtype=torch.int64, device=context.device), x[:, : CONFIG.top_k])
        for make, words in KINDS.values():
            odd = [make(x), make(mask), make(routing.ids), make(routing.weights)]  # all ranks make the mesh
            given = odd if dist.get_rank() == ODD else [x, mask, routing.ids, routing.weights]
            for name, call in (
                ("x", lambda given=given: layer(given[0])),
                ("mask", lambda given=given: layer(x, given[1])),
                ("routing.ids", lambda given=given: layer.forward_routed(x, Routing(given[2], routing.weights))),
                ("routing.weights", lambda given=given: layer.forward_routed(x, Routing(routing.ids, given[3]))),
            ):
                assert same_error(InputError, call) == f"rank 1: {name} {words.format(name)}"
        check_call(layer, context)


class Named(torch.Tensor):
    """A subclass that only marks a tensor, as libraries have them."""


@distributed(1, 2)
def test_tensors_of_a_users_class_are_computed_as_plain_ones(world_size):
    with EPContext.from_groups(device=rank_device(), deadline_s=10) as context:
        layer, found = fill(MoELayer(CONFIG, context)), []
        x = integer_rows(4, 16, dist.get_rank()).to(context.device)
        for of_class in (lambda x: x, lambda x: x.as_subclass(Named)):
            given, weights = x.clone().requires_grad_(), torch.ones(4, CONFIG.top_k, device=x.device).requires_grad_()
            ids = torch.arange(CONFIG.top_k, device=x.device).expand(4, -1)
            out = layer.forward_routed(of_class(given * 1), Routing(ids, of_class(weights * 1)))
            out.sum().backward()
            found.append((out.detach(), given.grad, weights.grad))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)
        under_way = all_gather_tensor(x, 0, dist.group.WORLD)
        assert type(under_way) is not torch.Tensor
        whole = torch.cat([each.to(x.device) for each in gather_from_all_ranks(x.cpu())])
        assert torch.equal(layer(under_way), layer(whole))


@distributed(2)
def test_functional_call_takes_the_share_of_an_etp_rank(world_size):
    """A whole tensor instead of an etp rank's shard is refused: each etp rank would add the whole expert."""
    parallel = ParallelConfig(tp=2, etp=2)
    with EPContext.from_groups(parallel, device=rank_device(), deadline_s=10) as context:
        layer = fill(MoELayer(CONFIG, context))
        x = torch.ones(4, 16, device=context.device)
        own, name = layer(x).detach(), "expert_weights.0.w2"
        parameter = layer.get_parameter(name)
        wanted = torch.func.functional_call(layer, {name: parameter.detach() * 1}, (x,)).detach()
        assert torch.equal(wanted, own)
        whole = parameter.detach().full_tensor()
        error = same_error(InputError, lambda: torch.func.functional_call(layer, {name: whole}, (x,)))
        assert f"{name} must be float32 [16, 16] (DTensor, [Shard(dim=1)])" in error
        assert torch.equal(layer(x).detach(), own)


@distributed(2)
def test_etp_ranks_experts_that_swap_their_parameters(world_size):
    """Assigned DTensors are in the memory of another expert's slot, which is written too."""
    with EPContext.from_groups(ParallelConfig(tp=2, etp=2), device=rank_device(), deadline_s=10) as context:
        layer, wanted = fill(MoELayer(CONFIG, context)), fill(MoELayer(CONFIG, context))
        wanted.router.load_state_dict(layer.router.state_dict())
        x = integer_rows(4, 16, 0).to(context.device)
        experts = [layer.expert_weights.get_submodule(str(expert)) for expert in range(3)]
        before = [expert.w2.detach().clone() for expert in experts]
        own = layer(x).detach()
        experts[0].w2, experts[1].w2, experts[2].w2 = (experts[at].w2 for at in (1, 2, 0))
        with torch.no_grad():
            for expert, values in enumerate([before[1], before[2], before[0]]):
                wanted.expert_weights.get_submodule(str(expert)).w2.copy_(values)
        for _ in range(2):  # the copies of one call are not those of the next
            assert torch.equal(layer(x), wanted(x))
        experts[0].w2, experts[1].w2, experts[2].w2 = (experts[at].w2 for at in (2, 0, 1))
        assert torch.equal(layer(x), own)
