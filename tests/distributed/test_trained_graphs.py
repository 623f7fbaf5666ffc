"""Training calls that are recorded and replayed, over memory that ranks share: gradients equal eager ones bit for
bit."""

from __future__ import annotations

import contextlib
import functools
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ep_moe import Activation, EPContext, ExpertMap, InputError, MoEConfig, MoELayer, ParallelConfig, Routing
from ep_moe.execution.trained_graphs import _KEPT, _MOVES
from ep_moe.metrics import snapshot
from ep_moe.parallel.rank_group import barrier
from ep_moe.testing import distributed, rank_device
from ep_moe.testing.transport_case import wait_for_input_error
from ep_moe.training import use_main_grads
from tests.emulations.graph import EmulatedRecorder
from tests.emulations.trained_graph import stand_in
from tests.fixtures.distributed_cases import gather_from_all_ranks
from tests.fixtures.helpers import assert_same, fill, integer_routing, integer_rows
from tests.fixtures.p2p_on_cpu import p2p_on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for CUDA graphs on the CPU")
CONFIG = MoEConfig(
    hidden_size=16, intermediate_size=16, num_experts=6, top_k=2, activation=Activation.RELU2, expert_bias=True
)
MOST = 8


@contextlib.contextmanager
def pair(most=MOST, spare=0):
    """Yield a layer over nvlink_p2p, and one over torch_a2a, which is never recorded."""
    stand_in()
    with (
        p2p_on_cpu(),
        EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=most, deadline_s=30) as context,
    ):
        expert_map = ExpertMap.redundant(6, 2, spare) if spare else None
        yield [
            fill(MoELayer(CONFIG, context, all2all=name, experts="reference", expert_map=expert_map))
            for name in ("nvlink_p2p", "torch_a2a")
        ]


class Call:
    """Run forward of one layer on tokens drawn from a seed."""

    def __init__(self, layer, tokens, seed):
        self.x = integer_rows(tokens, 16, seed).requires_grad_()
        routing = integer_routing(tokens, CONFIG, seed)
        self.weights = routing.weights.requires_grad_()
        with torch.no_grad():
            self.weights[:1, 0] = 0.0
        self.behind = integer_rows(tokens, 16, seed + 50)
        self.out = layer.forward_routed(self.x, Routing(routing.ids, self.weights))

    def backward(self, **how):
        self.out.backward(self.behind, **how)

    def found(self):
        return {"out": self.out, "x": self.x.grad, "weights": self.weights.grad}


def experts(layer):
    return {name: None if p.grad is None else p.grad.clone() for name, p in layer.expert_weights.named_parameters()}


def same(layers, act, what):
    """Check that act(layer) and the experts' gradients are equal for both layers. Return the number of replays."""
    found, before = [], EmulatedRecorder.replays
    for layer in layers:
        layer.zero_grad()
        found.append(act(layer) | experts(layer))
    for name, wanted in found[1].items():
        own = found[0][name]
        if own is None or wanted is None:  # None: the expert received no token
            assert not any(one is not None and one.any() for one in (own, wanted)), f"{what}: {name}"
            continue
        assert_same(own, wanted, f"{what}: {name}")
    assert len(set(gather_from_all_ranks(layers[0].context.flight_recorder._step))) == 1, (
        "a rank that replays is in step"
    )
    return EmulatedRecorder.replays - before


def step(layer, tokens, seed):
    call = Call(layer, tokens, seed)
    call.backward()
    return call.found()


def recorded(layers, rank):
    """Run three steps: noted, recorded, and replayed. Recording and replay take equally many flight recorder steps."""
    flight_recorder, numbers = layers[0].context.flight_recorder, []

    def counted(layer, n):
        before = flight_recorder.number
        found = step(layer, 5, 10 * n + rank)
        if layer is layers[0]:
            numbers.append(flight_recorder.number - before)
        return found

    assert [same(layers, functools.partial(counted, n=n), n) for n in range(3)] == [0, 2, 2]
    calls = {one.name: (one.calls, one.replayed) for one in snapshot(layers[0].context).layers}
    assert [calls[layer.name] for layer in layers] == [(3, 2), (3, 0)]
    assert numbers[1] == numbers[2], "the first one connects"


@distributed(2)
@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("spare", [0, 2])
def test_replayed_steps(main, spare, world_size):
    """Replays work for any number of tokens up to the limit, for 0 tokens, and for gradients that add up over calls."""
    with pair(spare=spare) as layers:
        rank = dist.get_rank()
        if main:
            for layer in layers:
                use_main_grads(layer)
        recorded(layers, rank)
        for n, counts in enumerate(((8, 3), (0, 6), (1, 0), (7, 8))):
            assert same(layers, functools.partial(step, tokens=counts[rank], seed=100 + 2 * n + rank), counts) == 2

        def twice(layer):
            return step(layer, 4, rank) and step(layer, 6, 7 + rank)

        assert same(layers, twice, "two micro-batches") == 4


@distributed(2)
def test_calls_in_flight(world_size):
    """A call whose memory another call still holds runs eagerly.

    The order of backwards and `retain_graph` do not matter.
    """
    with pair() as layers:
        rank = dist.get_rank()
        recorded(layers, rank)

        def both(layer, order, **how):
            calls = [Call(layer, 4, rank), Call(layer, 6, 20 + rank)]
            for place in order:
                calls[place].backward(**how)
            return {f"{name} {place}": value for place in (0, 1) for name, value in calls[place].found().items()}

        for order in ((0, 1), (1, 0)):
            assert same(layers, functools.partial(both, order=order), order) == 2, "the first one alone"
        again = functools.partial(both, order=(0, 1, 0), retain_graph=True)
        assert same(layers, again, "a graph that is kept") == 3
        held = []

        def kept(layer):
            held.append(Call(layer, 4, rank))
            held[-1].backward()
            return held[-1].found()

        for n in range(3):
            assert same(layers, kept, f"results that are kept {n}") == 2, "backward has let its memory go"
        held.append(Call(layers[0], 4, rank))
        same(layers, functools.partial(step, tokens=3, seed=3 + rank), "beside a call without a backward")
        del held[-1]
        assert same(layers, functools.partial(step, tokens=3, seed=3 + rank), "it is gone") == 2


@distributed(2)
def test_a_rank_that_runs_what_its_peer_replays(world_size):
    """A rank that runs eagerly beside one that replays: both are right and in step."""
    with pair() as layers:
        rank = dist.get_rank()
        recorded(layers, rank)
        held = [Call(layers[0], 4, rank)]
        if rank:
            held.clear()
        for n in range(3):
            replays = same(layers, functools.partial(step, tokens=3 + n, seed=3 + rank), f"rank 0 runs its calls {n}")
            assert replays == 2 * rank


def node_of(call):
    """Return the autograd node that holds the saved tensors of a call."""
    node = call.out.grad_fn
    while type(node).__name__ != "_TrainedExchangeBackward":
        node = node.next_functions[0][0]
    return node


@distributed(2)
def test_one_saved_tensor_that_is_held(world_size):
    """The next call runs eagerly while anything holds a saved tensor, and replays afterwards."""
    with pair() as layers:
        rank = dist.get_rank()
        recorded(layers, rank)
        graph = next(iter(layers[0]._graphs.trained._calls.values()))
        own = {tensor.untyped_storage().data_ptr() for tensor in graph._saved_memory.values()}
        saved = node_of(Call(layers[0], 4, rank)).saved_tensors
        places = [place for place, tensor in enumerate(saved) if tensor.untyped_storage().data_ptr() in own]
        del saved
        assert len(places) == 4, "rows, weights, ids, and what the kernel keeps"
        for place in places:
            held = [node_of(Call(layers[0], 4, rank)).saved_tensors[place]]
            assert same(layers, functools.partial(step, tokens=6, seed=30 + rank), f"held: {place}") == 0
            held.clear()
            assert same(layers, functools.partial(step, tokens=6, seed=40 + rank), f"free: {place}") == 2


@distributed(2)
def test_saved_tensors_that_a_hook_has_copied(world_size):
    """Backward reads the copies that a saved-tensor hook made. The next forward overwrites the graph's own memory."""
    with pair() as layers:
        rank = dist.get_rank()
        recorded(layers, rank)

        def copied(layer):
            first = Call(layer, 4, rank)
            if layer is layers[0]:
                for saved in node_of(first)._raw_saved_tensors:
                    saved.register_hooks(torch.clone, lambda tensor: tensor)
            before = EmulatedRecorder.replays
            second = Call(layer, 6, 30 + rank)
            assert EmulatedRecorder.replays - before == (layer is layers[0])
            first.backward()
            second.backward()
            return {f"{n} {name}": v for n, call in enumerate((first, second)) for name, v in call.found().items()}

        assert same(layers, copied, "copied") == 3, "two forwards, and the second one's backward"


@distributed(2)
def test_calls_under_hooks_of_saved_tensors(world_size):
    """Calls under saved-tensor hooks run eagerly. A hook may read a tensor on another stream without holding it."""
    with pair() as layers:
        rank = dist.get_rank()
        recorded(layers, rank)

        def hooked(layer):
            with torch.autograd.graph.save_on_cpu():
                call = Call(layer, 4, rank)
            call.backward()
            return call.found()

        assert same(layers, hooked, "hooked") == 0
        assert same(layers, functools.partial(step, tokens=6, seed=30 + rank), "not hooked") == 2


@distributed(2)
def test_activation_checkpointing(world_size):
    with pair() as layers:
        rank = dist.get_rank()
        recorded(layers, rank)

        def recomputed(layer):
            x, routing = integer_rows(4, 16, rank).requires_grad_(), integer_routing(4, CONFIG, rank)
            weights = routing.weights.requires_grad_()
            out = checkpoint(
                lambda x, w: layer.forward_routed(x, Routing(routing.ids, w)), x, weights, use_reentrant=False
            )
            out.backward(integer_rows(4, 16, rank + 50))
            return {"out": out, "x": x.grad, "weights": weights.grad}

        assert same(layers, recomputed, "recomputed") == 3, "forward twice, backward once"


class Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@distributed(2)
def test_calls_whose_operations_are_seen(world_size):
    """Calls under a dispatch mode run eagerly, with the same operations each time.

    Selective checkpointing finds saved results by operation number.
    """
    with pair() as layers:
        rank = dist.get_rank()
        recorded(layers, rank)

        def seen(layer):
            with Seeing():
                call = Call(layer, 4, rank)
            call.backward()
            return call.found()

        assert same(layers, seen, "seen") == 0


@distributed(2)
def test_layers_in_any_order(world_size):
    """Two layers share the memory that is not saved: forward of one may run between forward and backward of the
    other."""
    with pair() as first, contextlib.ExitStack() as stack:
        rank, context = dist.get_rank(), first[0].context
        second = [fill(MoELayer(CONFIG, context, all2all=name, experts="reference"), seed=1) for name in
                  ("nvlink_p2p", "torch_a2a")]  # fmt: skip
        stack.callback(second.clear)
        blocks = list(zip(first, second, strict=True))

        def one_after_other(layers, order):
            calls = {place: Call(layers[place], 4 + place, 10 * place + rank) for place in order}
            for place in (0, 1):
                calls[place].backward()
            return {f"{n} {name}": v for n, call in calls.items() for name, v in call.found().items()}

        for n, order in enumerate(((0, 1), (0, 1), (0, 1), (1, 0), (0, 1))):
            before, found = EmulatedRecorder.replays, []
            for layers in blocks:
                for layer in layers:
                    layer.zero_grad()
                found.append(one_after_other(layers, order))
                found[-1] |= {f"{i} {k}": v for i, layer in enumerate(layers) for k, v in experts(layer).items()}
            for name, wanted in found[1].items():
                assert_same(found[0][name], wanted, f"{order}: {name}")
            assert EmulatedRecorder.replays - before == (0, 4, 4, 4, 4)[n]


@distributed(2)
def test_what_graphs_read_moves(world_size):
    """Weights in new memory and buffers that have grown cause a new recording, but not again and again."""
    with pair(most=None) as layers:
        rank = dist.get_rank()
        recorded(layers, rank)
        for layer in layers:
            layer.double().float()  # a round trip that gives new memory
        for n, replays in enumerate((0, 2, 2)):
            assert same(layers, functools.partial(step, tokens=5, seed=40 + rank + n), "moved weights") == replays
        layers[0]._dispatcher().least_room = 1
        (call,) = layers[0]._graphs.trained._calls.values()
        assert call._moved == 1
        same(layers, functools.partial(step, tokens=300, seed=50 + rank), "more tokens than there is room for")
        for n in range(3):
            replays = same(layers, functools.partial(step, tokens=5, seed=60 + rank + n), "behind them")
            assert replays == (0, 2, 2)[n]
        assert call._moved == 2
        for layer in layers:
            for parameter in layer.expert_weights.parameters():
                parameter.data = parameter.data + 1
        for n in range(2):
            same(layers, functools.partial(step, tokens=5, seed=70 + rank + n), "other numbers")
        replays, before = [], []
        for n in range(2 * _MOVES + 4):
            before.append(layers[0].expert_weights.stored_tensors())  # hold it, or the allocator would reuse it
            for layer in layers:
                layer.double().float()
            replays.append(same(layers, functools.partial(step, tokens=5, seed=80 + rank + n), "moved each time"))
        assert any(replays[:4])
        assert not any(replays[-3:]), "recording again and again takes longer than it spares"


@distributed(2)
def test_few_bounds_are_kept(world_size):
    with pair() as layers:
        rank, trained = dist.get_rank(), layers[0]._graphs.trained
        for bound in range(1, _KEPT + 3):
            with layers[0].context.token_limit(bound):
                for n in range(2):
                    replays = same(layers, functools.partial(step, tokens=1, seed=bound + rank), f"bound {bound}")
                    assert replays == 2 * n
        assert [transports.bound for transports, *_ in trained._calls] == list(range(3, _KEPT + 3)), "the newest"
        assert len(trained) == _KEPT
        held = {tensor.data_ptr(): tensor.nbytes for call in trained._calls.values() for tensor in call.held}
        assert trained.held_bytes == sum(held.values()) > 0
        layers[0]._graphs.drop()
        assert trained.held_bytes == len(trained) == 0


@distributed(2)
def test_a_call_that_cannot_be_recorded(world_size):
    """A call that cannot be recorded runs eagerly on all ranks, and warns after a few tries."""
    with pair() as layers:
        rank = dist.get_rank()

        def fails(call):
            slot = layers[0]._dispatcher().buffer_pool.buffer_slots[0]
            slot.busy = True  # as after a capture that fails between dispatch and combine
            raise RuntimeError("no capture")

        broken = mock.patch.object(EmulatedRecorder, "record_within_step", side_effect=fails)
        with broken, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for n in range(8):
                assert same(layers, functools.partial(step, tokens=5, seed=n + rank), n) == 0
        texts = [str(one.message) for one in said]
        assert sum("of moe0 with gradients" in text and text.endswith("no capture") for text in texts) == 1


@distributed(2)
def test_too_many_tokens(world_size):
    """A rank with too many tokens raises at once; its replaying peer gets NaN and learns of the refusal."""
    with pair() as (layer, twin):
        rank = dist.get_rank()
        recorded([layer, twin], rank)
        sentence = f"rank 1: x has {MOST + 1} tokens to dispatch, more than max_tokens={MOST}"
        if rank:
            with pytest.raises(InputError, match=sentence):
                Call(layer, MOST + 1, rank)
        else:
            call = Call(layer, 4, rank)
            away = (integer_routing(4, CONFIG, rank).ids >= 3).any(1)
            assert call.out[away].isnan().all()
        barrier(rank_device())
        said = wait_for_input_error(10, layer.context.flight_recorder.check)
        assert sentence in said, said
        barrier(rank_device())
