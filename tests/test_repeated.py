"""Repeated calls without a GPU: over a driver that writes down what its binaries are given, and a stand-in for graphs.
Which calls are repeated, that they launch what the layer launches, what they leave behind, and what ends it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="Triton is not installed")

from ep_moe import ConfigError, EPContext, ExpertMap, InputError, MoEConfig, MoELayer, Wire, repeated
from ep_moe.all2all import nvlink_p2p
from ep_moe.all2all.nvlink_p2p import NVLinkP2PDispatcher
from ep_moe.config import RoutingConfig
from ep_moe.errors import BackendUnavailable
from ep_moe.experts.bf16_triton import Bf16TritonExperts
from ep_moe.experts.fp8_block_triton import Fp8BlockTritonExperts
from ep_moe.experts.fp8_tensor_triton import Fp8TensorTritonExperts
from ep_moe.observe import StageTimes
from ep_moe.parallel.groups import Links
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.ledger import Ledger
from ep_moe.placement.late import LateRouting, placed
from ep_moe.placement.placement import Placement
from ep_moe.router import Router
from ep_moe.types import LogicalIds, Routing
from tests.test_launches import INTERPRETED, Driver

pytestmark = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="stands in for a GPU, and compiles")
CONFIG = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2)
MOST = 3  # tokens
KINDS = {
    "bf16": {},
    "answers in fp8": {"wire": Wire(combine="fp8")},
    "answers given": {},
    "fp8 in blocks": {
        "experts": "fp8_block_triton", "quantization": "fp8_block", "wire": Wire(dispatch="fp8_block"),
    },
    "fp8 per tensor": {
        "experts": "fp8_tensor_triton", "quantization": "fp8_static",
        "wire": Wire(dispatch="fp8_tensor", input_scale=0.1),
    },
}  # fmt: skip
CPU = torch.device("cpu")


def make_memory(link, device, size: int) -> SimpleNamespace:
    local = torch.zeros(size, dtype=torch.uint8)
    return SimpleNamespace(local=local, peers=[local], addresses=torch.tensor([local.data_ptr()]))


class Allocations(TorchDispatchMode):
    """Whether any operation gives what lies nowhere among what it was given."""

    seen = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        found = {t.untyped_storage().data_ptr() for t in tree_leaves(out) if isinstance(t, Tensor)}
        self.seen = self.seen or not found <= given
        return out


class Recording:
    """In the place of a `Recorder`, and of its graphs. recorded: how many there were"""

    here, recorded = True, 0
    why_not = staticmethod(lambda device: None)

    def __init__(self, made: Driver) -> None:
        self.driver = made

    def among(self, made, device, workspaces) -> Recording:
        return self

    def graph_of(self, launch, first, last) -> Callable[..., None]:
        driver, self.recorded = self.driver, self.recorded + 1
        before = driver.found, driver.functions
        driver.found, driver.functions = [], []
        with Allocations() as allocations:
            launch()
        if allocations.seen:
            raise BackendUnavailable("it allocates")
        made = list(zip(driver.found, driver.functions, strict=True))
        driver.found, driver.functions = before
        assert changed(made[0][0], first) == made[0][0], "what was recorded is what was given"
        assert changed(made[-1][0], last) == made[-1][0]

        def launch_again(first, last, stream) -> None:
            for number, (found, function) in enumerate(made):
                found = changed(found, first) if number == 0 else found
                found = changed(found, last) if number == len(made) - 1 else found
                driver.found.append(found)
                driver.functions.append(function)

        return launch_again


def changed(found: tuple, given: list[int] | tuple[int, ...]) -> tuple:
    """A launch with other first arguments; what is None is none of a binary's."""
    places = [place for place, value in enumerate(found[2:], 2) if value is not None][: len(given)]
    other = list(found)
    for place, value in zip(places, given, strict=True):
        other[place] = value
    return tuple(other)


@pytest.fixture
def driver(monkeypatch):
    """What a GPU and its driver would be asked, with everything on the CPU: nothing is computed."""
    from triton.runtime import driver

    made, tables = Driver(), Placement._tables

    def unpinned(self, expert_map):
        with mock.patch.object(torch.Tensor, "is_cuda", False):
            return tables(self, expert_map)

    monkeypatch.setattr(driver, "_active", made)
    monkeypatch.setattr(repeated, "Recorder", Recording(made))
    monkeypatch.setattr(Placement, "_tables", unpinned)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(nvlink_p2p, "make_memory", make_memory)
    monkeypatch.setattr(NVLinkP2PDispatcher, "platform_problem", classmethod(lambda cls, layout: None))
    anywhere = {"devices": frozenset({"cpu"})}
    able = dataclasses.replace(NVLinkP2PDispatcher.capabilities, **anywhere)
    monkeypatch.setattr(NVLinkP2PDispatcher, "capabilities", able)
    anywhere |= {"min_compute_capability": None, "max_compute_capability": None}
    for kernel in (Bf16TritonExperts, Fp8BlockTritonExperts, Fp8TensorTritonExperts):
        able = dataclasses.replace(kernel.capabilities, **anywhere)
        monkeypatch.setattr(kernel, "capabilities", able)
        monkeypatch.setattr(kernel, "available", classmethod(lambda cls: None))
    return made


@pytest.fixture
def context():
    layout, ledger = RankLayout(world=1, rank=0), Ledger()
    with EPContext(layout, CPU, None, Links(layout, ledger, CPU), ledger, max_tokens=MOST) as made:
        yield made


def built(context: EPContext, config: MoEConfig = CONFIG, **asked) -> MoELayer:
    asked = {"all2all": "nvlink_p2p", "experts": "bf16_triton", "dtype": torch.bfloat16} | asked
    return MoELayer(config, context, **asked)


@pytest.fixture
def layer(driver, context):
    """One whose calls are noted."""
    made = built(context)
    for _ in range(2):
        forward(made, *given(1))
    assert len(made.repeated) == 1
    return made


def given(tokens: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, CONFIG.hidden_size, generator=generator).bfloat16()
    ids = torch.rand(tokens, CONFIG.num_experts, generator=generator).topk(CONFIG.top_k).indices.to(dtype)
    return x, Routing(LogicalIds(ids), torch.rand(ids.shape, generator=generator))


@torch.no_grad()
def forward(layer: MoELayer, x: Tensor, routing: Routing | None) -> Tensor:
    return layer(x) if routing is None else layer.forward_routed(x, routing)


def repeats(layer: MoELayer, x: Tensor, routing: Routing | None) -> bool:
    """Whether such a call is repeated."""
    with mock.patch.object(MoELayer, "run", autospec=True, side_effect=MoELayer.run) as run:
        out = forward(layer, x, routing)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    return not run.called


# --- what is launched -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("few_bytes", [0, 1 << 18], ids=["by flags", "by cells"])
@pytest.mark.parametrize("experts", KINDS)
def test_the_launches_of_the_layer_itself(experts, few_bytes, ids, driver, context, monkeypatch):
    """In the same order, the same binaries with the same arguments, but for where the sums go."""
    monkeypatch.setattr(NVLinkP2PDispatcher, "few_bytes", few_bytes)
    if experts == "answers given":
        able = dataclasses.replace(Bf16TritonExperts.capabilities, peer_out=False)
        monkeypatch.setattr(Bf16TritonExperts, "capabilities", able)
    layer = built(context, **KINDS[experts])
    for _ in range(2):
        forward(layer, *given(MOST, dtype=ids))
    for tokens in (1, MOST, 0, 2):
        x, routing = given(tokens, tokens, ids)
        for rows in (x, x.view(tokens, 1, CONFIG.hidden_size)):
            assert repeats(layer, rows, routing)
            made = launches(driver, layer, layer.forward_routed, rows, routing)
            assert made == launches(driver, layer, layer.run, rows, routing)
            assert len(made[0]) == 5 + (experts == "answers given" and few_bytes == 0)


@torch.no_grad()
def launches(
    driver: Driver, layer: MoELayer, call: Callable[..., Tensor], x: Tensor, routing: Routing, *, sums: bool = True
) -> tuple:
    """All that a call launches, but for where the sums go, which is where they are returned; and what the ledger has
    then. sums: whether they are all that is returned"""
    driver.found.clear(), driver.functions.clear()
    before = layer.context.ledger.number
    out = call(x, routing)
    assert out.shape == x.shape
    assert layer.context.ledger.number == before + 2
    last = driver.found[-1]
    assert not sums or last[2] == out.data_ptr()
    return driver.functions[:], driver.found[:-1], last[:2], last[3:], layer.context.ledger.newest[1:]


def test_layers_in_turns_under_bounds_and_maps_that_change(driver, context):
    """Two that share the transport's memory, and one with its own: each call launches what its layer would."""
    draw, made = random.Random(0), []
    layers = [built(context), built(context), built(context, **KINDS["fp8 in blocks"])]
    for step in range(300):
        layer, bound = draw.choice(layers), draw.randint(1, MOST)
        x, routing = given(draw.randint(0, bound), step, draw.choice((torch.int32, torch.int64)))
        x = x if draw.random() < 0.8 else shifted(x)
        if draw.random() < 0.1:
            layer.placement.update(draw.choice((layer.placement.expert_map, ExpertMap.linear(CONFIG.num_experts, 1))))
        if draw.random() < 0.05:
            layer.expert_weights.w2.data = layer.expert_weights.w2.data.clone()
        with context.at_most(bound):
            made.append(repeats(layer, x, routing))
            found, expected = (launches(driver, layer, call, x, routing) for call in (layer.forward_routed, layer.run))
        if x.data_ptr() % 16:  # copies lie where there is room
            assert not made[-1], step
        else:
            assert found == expected, step
    assert 100 < sum(made) < 250


def test_a_router_of_ours_chooses_before(layer, driver):
    x, _ = given(2)
    with torch.no_grad():
        expected = layer.router(x)
    assert repeats(layer, x, None)
    send = driver.found[-5]
    assert send[2] == x.data_ptr()
    assert send[2 + 9] == 2, "tokens"
    seen = []
    layer.router.register_forward_hook(lambda module, args, out: seen.append(out))
    assert repeats(layer, x.view(1, 2, -1), None)
    assert torch.equal(seen[0].ids, expected.ids)
    assert driver.found[-5][4:6] == (seen[0].ids.data_ptr(), seen[0].weights.data_ptr())

    class Other(Router):
        def forward(self, x: Tensor) -> Routing:
            return given(len(x))[1]

    layer.router = Other(CONFIG, dtype=torch.bfloat16)
    assert not repeats(layer, x, None)
    layer.repeated.drop()
    assert [repeats(layer, x, None) for _ in range(3)] == [False] * 3
    assert len(layer.repeated) == 0


@pytest.mark.parametrize("few_bytes", [0, 1 << 18], ids=["by flags", "by cells"])
def test_shared_experts_are_called_behind_few_rows(few_bytes, driver, context, monkeypatch):
    """Many travel beside them. Nothing is computed here but what is shared."""
    monkeypatch.setattr(NVLinkP2PDispatcher, "few_bytes", few_bytes)
    monkeypatch.setattr(repeated.torch, "empty_like", torch.zeros_like)
    config = dataclasses.replace(CONFIG, shared_intermediate_size=64)
    layer = built(context, config)
    x, routing = given(2)
    for _ in range(2):
        forward(layer, x, routing)
    for rows in (x, x.view(2, 1, -1)):
        assert repeats(layer, rows, routing) == (few_bytes > 0) == (len(layer.repeated) > 0)
        if few_bytes:
            with torch.no_grad():
                assert torch.equal(forward(layer, rows, routing), layer.shared_experts(x).view(rows.shape))
                found = launches(driver, layer, layer.forward_routed, rows, routing, sums=False)
                assert found == launches(driver, layer, layer.run, rows, routing, sums=False)


def test_whoever_looks_at_the_placement_goes_on_looking(layer, driver):
    seen = []
    hook = layer.placement.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    x, routing = given(1, 5)
    assert repeats(layer, x, routing)
    assert seen == [routing]
    hook.remove()
    twice = 2 * routing.weights
    hook = layer.placement.register_forward_hook(lambda module, args, out: LateRouting(out.logical, twice, out.tables))
    assert repeats(layer, x, routing)
    assert driver.found[-5][5] == twice.data_ptr()
    hook.remove()
    layer.placement.register_forward_hook(lambda module, args, out: placed(out))
    assert not repeats(layer, x, routing)


def test_the_map_in_force(layer, driver):
    """Tables are rewritten in place."""
    x, routing = given(1)
    assert repeats(layer, x, routing)
    tables = [table.data_ptr() for table in layer.placement.tables[:5]]
    assert list(driver.found[-5][6:11]) == tables
    layer.placement.update(layer.placement.expert_map)
    assert repeats(layer, x, routing)
    layer.placement = Placement(layer.placement.expert_map, ep_rank=1)  # which chooses other replicas
    assert [repeats(layer, x, routing) for _ in range(2)] == [False, True]


# --- which calls ----------------------------------------------------------------------------------------------------


def test_from_the_third_on(driver, context):
    layer = built(context)
    assert layer.dispatcher.again(MOST) is None
    assert [repeats(layer, *given(1, seed)) for seed in range(4)] == [False, False, True, True]
    assert [repeats(layer, *given(1, seed, torch.int32)) for seed in range(3)] == [False, False, True]
    with context.at_most(2):
        assert [repeats(layer, *given(2, seed)) for seed in range(4)] == [False, False, True, True]
    assert repeats(layer, *given(3))


def test_calls_unlike_others_have_nothing_recorded_again(layer):
    x, routing = given(2)
    for _ in range(5):
        assert not repeats(layer, shifted(x), routing)
        assert repeats(layer, x, routing)
    assert repeated.Recorder.recorded == 1


def test_nothing_is_recorded_in_a_capture_of_somebody_elses(driver, context):
    layer = built(context)
    with mock.patch.object(repeated, "capturing", return_value=True):
        assert [repeats(layer, *given(1)) for _ in range(4)] == [False] * 4
    assert repeated.Recorder.recorded == 0


def test_few_are_kept(driver, context, monkeypatch):
    monkeypatch.setattr(repeated, "_CALLS", 2)
    layer = built(context)
    for bound in (1, 2, 3):
        with context.at_most(bound):
            assert [repeats(layer, *given(1)) for _ in range(3)] == [False, False, True]
    assert len(layer.repeated) == 1
    for bound in (1, 2, 1, 2):  # each forgets the other, which was seen once, and not what was recorded
        with context.at_most(bound):
            assert not repeats(layer, *given(1))
    with context.at_most(3):
        assert repeats(layer, *given(1))


def test_compiled_graphs_note_nothing(driver, context):
    layer = built(context)
    for _ in range(2):
        forward(layer, *given(1))
    layer.repeated.drop()
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True), torch.no_grad():
        layer.repeated.note(layer, given(1)[1])
    assert len(layer.repeated) == 0


def every_other(tensor: Tensor) -> Tensor:
    """The same numbers, one step apart."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def shifted(tensor: Tensor) -> Tensor:
    """The same numbers, beginning between two multiples of 16 bytes."""
    room = torch.zeros(tensor.numel() + 16, dtype=tensor.dtype)
    start = (-room.data_ptr() % 16) // tensor.itemsize + 1
    return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("change", [every_other, shifted])
@pytest.mark.parametrize("which", ["x", "ids", "weights"])
def test_tensors_that_binaries_do_not_take(which, change, layer):
    x, routing = given(2)
    parts = {"x": x, "ids": routing.ids, "weights": routing.weights}
    parts[which] = change(parts[which])
    assert not repeats(layer, parts["x"], Routing(LogicalIds(parts["ids"]), parts["weights"]))
    assert repeats(layer, x, routing)


WRONG = {
    "dtype of x": lambda x, r: (x.float(), r),
    "hidden size": lambda x, r: (x[:, :128].contiguous(), r),
    "no tensor": lambda x, r: (x.tolist(), r),
    "tokens of the ids": lambda x, r: (x, Routing(r.ids[:1], r.weights)),
    "tokens of the weights": lambda x, r: (x, Routing(r.ids, r.weights[:1])),
    "picks": lambda x, r: (x, Routing(r.ids[:, :1].contiguous(), r.weights[:, :1].contiguous())),
    "dtype of the weights": lambda x, r: (x, Routing(r.ids, r.weights.double())),
    "dtype of the ids": lambda x, r: (x, Routing(r.ids.short(), r.weights)),
    "ids that are none": lambda x, r: (x, Routing(r.ids.tolist(), r.weights)),
    "weights that are none": lambda x, r: (x, Routing(r.ids, r.weights.tolist())),
    "no routing": lambda x, r: (x, (r.ids, r.weights)),
    "too many tokens": lambda x, r: given(MOST + 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_as_ever(name, layer):
    x, routing = WRONG[name](*given(2))
    with torch.no_grad(), pytest.raises(InputError):
        layer.forward_routed(x, routing)


def test_the_meta_device_is_refused_as_ever(layer):
    x, routing = given(2)
    for wrong in ((x.to("meta"), routing), (x, Routing(routing.ids.to("meta"), routing.weights))):
        with torch.no_grad(), pytest.raises(InputError):
            layer.forward_routed(*wrong)


def with_gradients(layer):
    return torch.enable_grad()


def profiled(layer):
    return torch.autograd.profiler.profile()


def timed(layer):
    return mock.patch.object(layer.context, "stage_times", StageTimes(CPU))


def with_shared_experts(layer):
    return mock.patch.object(layer, "shared_experts", torch.nn.Identity())


def on_another_stream(layer):
    return mock.patch.object(repeated, "current_stream", return_value=5)


def after_another_stream(layer):
    return mock.patch.object(layer.dispatcher.lanes.made[0], "stream", SimpleNamespace(cuda_stream=5))


def captured(layer):
    return mock.patch.object(repeated, "capturing", return_value=True)


def compiled(layer):
    return mock.patch.object(torch.compiler, "is_compiling", return_value=True)


@pytest.mark.parametrize(
    "state",
    [with_gradients, profiled, timed, with_shared_experts, on_another_stream, after_another_stream, captured, compiled],
)
def test_states_in_which_the_layer_runs(state, layer):
    x, routing = given(1)
    with (
        mock.patch.object(layer.dispatcher.lanes.made[0], "follow"),
        mock.patch.object(MoELayer, "run", autospec=True, return_value=x) as run,
        mock.patch.object(Placement, "forward", side_effect=AssertionError("it was placed for nothing")),
        torch.no_grad(),
        state(layer),
    ):
        layer.forward_routed(x, routing)
    assert run.called
    assert repeats(layer, x, routing)


def test_while_a_call_is_under_way_another_takes_its_own_memory(layer):
    x, routing = given(1)
    lane = layer.dispatcher.lanes.made[0]
    lane.busy = True
    assert not repeats(layer, x, routing)
    lane.busy = False
    assert repeats(layer, x, routing)


def test_inside_another_forward_it_is_refused_as_ever(layer):
    with layer.context.entered("other"), pytest.raises(RuntimeError, match="not re-entrant"):
        forward(layer, *given(1))


def test_what_the_watch_found_is_raised(layer):
    layer.context.ledger.refuse("lost")
    with pytest.raises(InputError, match="lost"):
        forward(layer, *given(1))


def test_with_inference_mode(layer):
    x, routing = given(1)
    with torch.inference_mode():
        assert layer.forward_routed(x, routing).is_inference()
    assert not forward(layer, x, routing).is_inference()


# --- what ends it ---------------------------------------------------------------------------------------------------


def test_other_weights_are_noted_anew(layer, driver):
    x, routing = given(1)
    layer.expert_weights.w13.data.fill_(1)
    assert repeats(layer, x, routing), "written in place"
    layer.expert_weights.w13.data = torch.ones_like(layer.expert_weights.w13)
    assert [repeats(layer, x, routing) for _ in range(3)] == [False, False, True]
    assert layer.expert_weights.w13.data_ptr() in driver.found[-4]


def test_what_is_tuned_is_noted_anew(layer):
    layer.use(layer.experts, [])
    assert len(layer.repeated) == 0
    assert [repeats(layer, *given(1)) for _ in range(3)] == [False, False, True]


def test_nothing_is_kept_of_a_context_that_ended(driver):
    layout, ledger = RankLayout(world=1, rank=0), Ledger()
    with EPContext(layout, CPU, None, Links(layout, ledger, CPU), ledger, max_tokens=MOST) as context:
        layer = built(context)
        for _ in range(3):
            forward(layer, *given(1))
    assert len(layer.repeated) == 0
    with pytest.raises(RuntimeError, match="destroyed"):
        forward(layer, *given(1))


@pytest.mark.parametrize(
    "why",
    ["parts", "ranks agree", "weight on input", "another transport", "another kernel", "rounded before", "widened"],
)
def test_layers_whose_calls_are_more_than_launches(why, driver, context, monkeypatch):
    config, asked = CONFIG, {}
    if why == "parts":
        asked["pipeline"] = 2
    elif why == "weight on input":
        config = dataclasses.replace(CONFIG, top_k=1, routing=RoutingConfig(weight_on_input=True))
    elif why == "another kernel":
        able = dataclasses.replace(Bf16TritonExperts.capabilities, cuda_graph=False)
        monkeypatch.setattr(Bf16TritonExperts, "capabilities", able)
    elif why == "rounded before":
        asked["wire"] = Wire(dispatch="mxfp8")
    elif why == "ranks agree":
        monkeypatch.setattr(context.tokens, "whole", False)
    elif why == "widened":
        asked["wire"] = Wire(dispatch="fp8_block")
    try:
        layer = built(context, config, **asked)
    except ConfigError as error:
        pytest.fail(str(error))
    if why == "another transport":
        monkeypatch.setattr(NVLinkP2PDispatcher, "again", lambda *given: None)
    x, routing = given(1)
    routing = Routing(
        LogicalIds(routing.ids[:, : config.top_k].contiguous()), routing.weights[:, : config.top_k].clone()
    )
    with pytest.warns(UserWarning, match="it allocates") if why == "widened" else nullcontext():
        for _ in range(4):
            assert not repeats(layer, x, routing)
    assert len(layer.repeated) == 0
    assert repeated.Recorder.recorded <= 1, "what cannot be recorded is asked no more"
