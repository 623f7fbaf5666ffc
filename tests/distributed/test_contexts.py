"""Several contexts, several layers, and weights that move between layouts."""

import gc
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from ep_moe import (
    Activation,
    ConfigError,
    ContextClosed,
    EPContext,
    ExpertMap,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    PeerTimeout,
    Tokens,
)
from ep_moe.parallel import connected_ranks
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import check_call, gather_from_all_ranks
from tests.fixtures.helpers import assert_same, fill, integer_expert, integer_routing, integer_rows, moved, saved_expert

CONFIG = MoEConfig(
    hidden_size=16, intermediate_size=16, num_experts=6, top_k=2, activation=Activation.RELU2, expert_bias=True
)
WIDE = MoEConfig(hidden_size=32, intermediate_size=16, num_experts=6, top_k=2, activation=Activation.RELU2)
DEEP = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=6, top_k=3, activation=Activation.RELU2)


def made(**sizes) -> EPContext:
    return EPContext.from_groups(ParallelConfig(**sizes), device=rank_device(), deadline_s=20)


@distributed(4)
def test_two_contexts_at_once(world_size):
    a, b = made(dp=4), made(dp=2, tp=2, ep=2, etp=2)
    on_a, on_b = fill(MoELayer(CONFIG, a)), fill(MoELayer(CONFIG, b), seed=1)
    assert (on_a.name, on_b.name) == ("moe0", "moe0")
    for turn in range(3):
        check_call(on_a, a, tokens=turn, what="first context")
        check_call(on_b, b, tokens=2 * turn, what="second context", seed=1)
    x = integer_rows(2, 16, 0).to(a.device).requires_grad_()
    (on_b(on_a(x)).sum()).backward()  # one autograd graph through both contexts
    assert x.grad is not None
    a.destroy()
    check_call(on_b, b, what="after the first was destroyed", seed=1)
    b.destroy()


@distributed(4)
def test_layers_share_dispatchers_by_geometry(world_size):
    with made(dp=4) as context:
        layers = [MoELayer(config, context, all2all="torch_a2a") for config in (CONFIG, CONFIG, WIDE, DEEP)]
        layers.append(MoELayer(CONFIG, context, all2all="torch_a2a", expert_map=ExpertMap.redundant(6, 4, 6)))
        layers.append(MoELayer(CONFIG, context, all2all="allgather"))
        for turn in range(2):
            for layer in layers:
                check_call(fill(layer), context, tokens=turn + 1, what=layer.name)
        first, second, *others = (layer._dispatcher() for layer in layers)
        assert first is second
        assert len({id(dispatcher) for dispatcher in (first, *others)}) == 5
        assert [layer.name for layer in layers] == [f"moe{index}" for index in range(6)]


@distributed(2)
def test_lifetime(world_size):
    context = made(dp=2)
    layer = fill(MoELayer(CONFIG, context))
    check_call(layer, context)
    with (
        context._begin_call("outer"),
        pytest.raises(RuntimeError, match=r"not re-entrant: moe0 was called inside outer"),
    ):
        layer(torch.zeros(1, 16, device=context.device))
    check_call(layer, context, what="after a refused nested call")
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1)
    start = time.monotonic()
    context.destroy()
    assert dist.get_rank() == 1 or time.monotonic() - start > 0.5, "waits for peers, which may still use a connection"
    if dist.get_rank() == 0:  # a second destroy on one rank waits for no peer
        start = time.monotonic()
        context.destroy()
        assert time.monotonic() - start < 5
    for use in (lambda: layer(torch.zeros(1, 16, device=context.device)), lambda: MoELayer(CONFIG, context)):
        with pytest.raises(RuntimeError, match="this EPContext was destroyed"):
            use()
    for _ in range(3):
        with made(dp=2) as again:
            check_call(fill(MoELayer(CONFIG, again)), again)
    with pytest.raises(KeyError), made(tp=2) as broken:  # a context that an exception leaves does not wait for peers
        raise KeyError
    with pytest.raises(RuntimeError, match="destroyed"):
        MoELayer(CONFIG, broken)


@distributed(2)
def test_a_layer_that_is_gone_is_not_counted(world_size):
    with made(dp=2) as context:
        kept, gone = MoELayer(CONFIG, context), MoELayer(CONFIG, context)
        assert context.plan()["experts"] == 2 * kept.plan()["experts"]
        del gone
        gc.collect()
        assert context.plan() == kept.plan()
        with pytest.raises(ConfigError) as caught:
            MoELayer(CONFIG, context, expert_map=ExpertMap.linear(3, 2))
        assert caught.tb is not None  # the traceback keeps the half-constructed layer alive
        assert context.plan() == kept.plan()


def union(layer: MoELayer) -> dict[str, torch.Tensor]:
    """Return the merged state dicts of all ranks, as a checkpoint."""
    whole = {}
    for part in gather_from_all_ranks(
        {name: tensor.cpu() for name, tensor in layer.expert_weights.state_dict().items()}
    ):
        whole |= part
    return whole


@distributed(4)
def test_weights_move_between_layouts(world_size):
    """Merged state dicts load from any map and etp into any other."""
    sources = [{"dp": 4}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, {"tp": 4, "ep": 1, "etp": 4}, {"dp": 4, "ep": 2}]
    wanted = {f"{e}.{n}": t for e in range(6) for n, t in saved_expert(CONFIG, e).items()}
    for index, sizes in enumerate(sources):
        with made(**sizes) as context, made(**sources[index - 1]) as other:
            ranks = context.layout.ep
            spare = 2 * ranks - 2
            for expert_map in (ExpertMap.redundant(6, ranks, spare), ExpertMap.round_robin(6, ranks)):
                layer = fill(MoELayer(CONFIG, context, expert_map=expert_map))
                found = union(layer)
                assert found.keys() == wanted.keys()
                for name, tensor in wanted.items():
                    assert_same(found[name], tensor, f"{context.layout}, {expert_map}, {name}")
            target = MoELayer(CONFIG, other, expert_map=ExpertMap.round_robin(6, other.layout.ep))
            target.expert_weights.load_state_dict(found)
            check_call(target, other, what=f"{sizes} to {sources[index - 1]}")
            del found["3.w2"], found["5.w1"]
            missing = target.expert_weights.load_state_dict(found, strict=False).missing_keys
            here = set(target.expert_weights.local_experts)
            assert set(missing) == {key for key in ("3.w2", "5.w1") if int(key[0]) in here}


@distributed(2)
def test_a_checkpoint_after_training_holds_what_was_trained(world_size):
    """A state dict holds the trained w2_bias, which every etp rank holds whole but only one rank trains."""
    with made(tp=2, ep=1, etp=2) as context:
        layer = fill(MoELayer(CONFIG, context))
        x, routing = integer_rows(4, 16, 0).to(context.device), moved(integer_routing(4, CONFIG, 0), context.device)
        layer.forward_routed(x, routing).sum().backward()
        with torch.no_grad():
            for parameter in layer.expert_weights.parameters():
                if parameter.grad is not None:
                    parameter -= parameter.grad
        trained = gather_from_all_ranks(layer.expert_weights.w2_bias.detach().cpu())[
            0
        ]  # the one that etp rank 0 trained
        found = layer.expert_weights.state_dict()
        for expert in range(CONFIG.num_experts):
            assert_same(found[f"{expert}.w2_bias"].cpu(), trained[expert], f"expert {expert}")


@distributed(4)
def test_an_update_reaches_every_replica(world_size):
    with made(dp=4) as context:
        layer = fill(MoELayer(CONFIG, context, expert_map=ExpertMap.redundant(6, 4, 6)))
        for expert in range(CONFIG.num_experts):
            layer.update_expert(expert, **integer_expert(CONFIG, expert, seed=1))
        check_call(layer, context, seed=1)
        written = gather_from_all_ranks(layer.update_expert(0, **integer_expert(CONFIG, 0, seed=1)))
        assert sum(written) == layer.placement.expert_map.replica_count[0] == 2


@distributed(2)
def test_construction_on_meta(world_size):
    with made(dp=2) as context:
        full = union(fill(MoELayer(CONFIG, context)))
        with torch.device("meta"):
            layer = MoELayer(CONFIG, context)
        assert all(tensor.is_meta for tensor in [*layer.parameters(), *layer.buffers()])
        layer.to_empty(device=context.device)
        layer.expert_weights.load_state_dict(full)
        layer.router.reset_parameters()
        check_call(layer, context)


@distributed(2, deadline_s=60)
def test_torch_distributed_may_end_first(world_size):
    """After `destroy_process_group()`, a call raises what happened, and `destroy` is silent, also twice."""
    context = made(dp=2)
    layer = MoELayer(DEEP, context)
    x = torch.ones(3, 16, device=context.device)
    assert layer(x).isfinite().all()
    dist.barrier()
    default = dist.distributed_c10d._get_default_store(), dist.get_backend()
    dist.destroy_process_group()
    for call in (lambda: layer(x), lambda: MoELayer(DEEP, context)):
        with pytest.raises(RuntimeError, match="distributed was ended"):
            call()
    context.destroy()
    context.destroy()
    with pytest.raises(RuntimeError, match="this EPContext was destroyed"):
        layer(x)
    store = dist.PrefixStore("again", default[0])  # for the harness, which ends with a barrier
    dist.init_process_group(default[1], store=store, rank=context.layout.rank, world_size=world_size)


@distributed(2)
def test_a_context_of_groups_that_the_caller_ended(world_size):
    """A call over a destroyed group raises ContextClosed.

    One group of the context is destroyed, or all of them and a new default group exists.
    """
    x = torch.ones(3, 16, device=rank_device())
    given = dist.new_group([0, 1])
    context = EPContext.from_groups(ParallelConfig(dp=2), {"ep": given}, device=rank_device(), deadline_s=20)
    layer = MoELayer(DEEP, context)
    other = made(dp=2)
    on_other = MoELayer(DEEP, other)
    assert layer(x).isfinite().all()
    dist.destroy_process_group(given)
    with pytest.raises(ContextClosed, match="destroy_process_group"):
        layer(x)
    context.destroy()
    assert on_other(x).isfinite().all()
    store, rank = dist.PrefixStore("again", dist.distributed_c10d._get_default_store()), dist.get_rank()
    backend = dist.get_backend()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    with pytest.raises(ContextClosed, match="destroy_process_group"):
        on_other(x)
    other.destroy()
    with made(dp=2) as again:
        assert MoELayer(DEEP, again)(x).isfinite().all()


@distributed(2)
def test_a_context_whose_store_is_gone_is_given_back_quietly(world_size):
    context = made(dp=2)
    groups = len(dist.distributed_c10d._world.pg_map)

    def raise_on_all_ranks(*_):
        raise dist.DistNetworkError("failed to recv, got 0 bytes")

    context.consensus.raise_on_all_ranks = raise_on_all_ranks
    context.destroy()
    assert len(dist.distributed_c10d._world.pg_map) < groups


@distributed(2)
def test_groups_that_do_not_connect_are_a_sentence(world_size):
    """Groups that cannot connect in time raise PeerTimeout; the watchdog thread ends, and no ResourceWarning
    follows."""

    def rank_groups(*_):
        raise RuntimeError("Gloo connectFullMesh failed with pair.h:311 Connect timeout")

    before, connected_ranks.RankGroups = connected_ranks.RankGroups, rank_groups
    try:
        with pytest.raises(PeerTimeout, match=r"connect \(step 0\): Gloo connectFullMesh failed.*Raise deadline_s"):
            EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=1)
    finally:
        connected_ranks.RankGroups = before
    begins = time.monotonic()
    while any(thread.name == "ep_moe flight recorder" for thread in threading.enumerate()):
        assert time.monotonic() < begins + 5
        time.sleep(0.01)


@distributed(2)
def test_a_context_that_an_error_left_is_not_named_dropped(world_size):
    with pytest.raises(KeyError), made(dp=2) as context:
        raise KeyError
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch = context._dropped
        assert not watch.alive
    assert watches() == 0, "peers are not watched any more"


@distributed(2, deadline_s=60)
def test_deadlines_and_devices_that_are_none_are_refused_by_all(world_size):
    for wrong in (float("nan"), float("inf"), 1e300, 0, -1.0, True, "5"):
        given = wrong if dist.get_rank() else 20.0  # only one rank passes a wrong value
        with pytest.raises(ConfigError, match="deadline_s must be"):
            EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=given)
    with pytest.raises(ConfigError, match=r"device must be a torch.device or its name, such as 'cuda:0', got 1.5"):
        EPContext.from_groups(ParallelConfig(dp=2), device=1.5 if dist.get_rank() else rank_device(), deadline_s=20)
    with EPContext.from_groups(ParallelConfig(dp=2), device=str(rank_device()), deadline_s=20) as context:
        assert context.device == rank_device()


@distributed(2, deadline_s=60)
def test_arguments_that_ranks_differ_in_are_named(world_size):
    rank = dist.get_rank()
    sizes: dict[str, list] = {"dp": [2, 1], "tp": [1, 2], "ep": [1, 2], "etp": [1, 2], "tokens": [*Tokens]}
    others: dict[str, list] = {"deadline_s": [20, 30], "max_tokens": [8, 16], "ranks_per_node": [1, 2]}
    for name, values in (sizes | others).items():
        asked, given = {"dp": 2}, {"deadline_s": 20}
        (asked if name in sizes else given)[name] = values[rank]
        shown = [f'"{value.value}"' if isinstance(value, Tokens) else str(value) for value in values]
        with pytest.raises(ConfigError, match=rf"{name}: {shown[0]}\S* on rank 0, {shown[1]}\S* on rank 1"):
            EPContext.from_groups(ParallelConfig(**asked), device=rank_device(), **given)


def watches() -> int:
    return sum(thread.name == "ep_moe flight recorder" for thread in threading.enumerate())


@distributed(2)
@pytest.mark.parametrize("ep", [1, 2])
def test_a_watch_ends_with_its_context(ep, world_size):
    """The watchdog thread ends with its context, if destroyed or dropped.

    With ep=1 a rank has no peers in a layer's call, but it sums gradients with others.
    """
    parallel = ParallelConfig(dp=2, ep=ep)
    context = EPContext.from_groups(parallel, device=rank_device(), deadline_s=10)
    assert watches() == 1
    context.destroy()
    assert watches() == 0
    dropped = EPContext.from_groups(parallel, device=rank_device(), deadline_s=2)
    assert watches() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del dropped
        gc.collect()
    begins = time.monotonic()
    while watches():
        assert time.monotonic() < begins + 5
        time.sleep(0.01)


@distributed(2, deadline_s=60)
def test_a_dropped_context_is_named(world_size):
    """A context dropped without `destroy` raises a ResourceWarning, as an open file does, and its watchdog ends."""
    kept = EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=2)
    dropped = EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=2)
    layer = MoELayer(DEEP, dropped)
    layer(torch.ones(3, 16, device=dropped.device)).sum().backward()
    assert watches() == 2
    dist.barrier()
    with pytest.warns(ResourceWarning, match=r"dropped with its process groups open.*context.destroy\(\)"):  # noqa: PT031
        del dropped, layer
        gc.collect()
    begins = time.monotonic()
    while watches() > 1:
        assert time.monotonic() < begins + 5
        time.sleep(0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept.destroy()
        del kept
        EPContext.local(rank_device())
        gc.collect()
