"""Test that a value of a wrong type or range is refused in one sentence with field and value."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import ep_moe.eplb
import ep_moe.metrics
from ep_moe import (
    ConfigError,
    EPContext,
    EPLBConfig,
    EPMoEError,
    ExpertMap,
    ExpertsOptions,
    ModelConfig,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    RankLayout,
    Routing,
    RoutingConfig,
    RoutingMethod,
    Tuned,
    Wire,
    checks,
    load_model_config,
)
from ep_moe.checkpoint.push import load_layer_weights
from ep_moe.checkpoint.reader import load_layers
from ep_moe.checks import INT32_MAX, MOST_EXPERTS, as_id, check_count
from ep_moe.eplb.cost import Machine
from ep_moe.eplb.planner.plan import plan
from ep_moe.eplb.planner.score import balancedness, loads_by_rank, traffic
from ep_moe.eplb.stats import BalancerStats
from ep_moe.placement.placement import LayerStats
from ep_moe.selection.explain import BackendChoice
from ep_moe.training import (
    BiasUpdate,
    clip_grad_norm_,
    load_balancing_loss,
    parameter_groups,
    router_logits,
    router_z_loss,
    sequence_balancing_loss,
    sync_gradients,
)

CPU = torch.device("cpu")
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_experts": 8, "top_k": 2, "shared_intermediate_size": 16}
CONFIG = MoEConfig(**SIZES)
SIGMOID = {"method": RoutingMethod.SIGMOID_TOPK}
RATES = dict.fromkeys(("hbm_bytes_per_s", "flops", "link_bytes_per_s", "node_link_bytes_per_s"), 1.0)
MODEL = {"name": "a", "family": "b", "num_layers": 2, "moe": CONFIG}
MAPS = [ExpertMap.linear(8, 2)]
X, IDS, WEIGHTS, LOGITS = torch.ones(4, 16), torch.arange(2).expand(4, 2), torch.ones(4, 2), torch.ones(4, 8)

NO_COUNT = (True, "4", None, 2.0, float("nan"), -1, 2**63, 10**400, [1], np.float64(2), np.bool_(True))
NO_FLAG = ("yes", None, 1, 0, "False", [])
NO_NUMBER = ("1", None, float("nan"), float("inf"), -1.0, True, 10**400, [1.0], 1j)


def of(cls, good, values, *names):
    """Return calls that set one field of a dataclass to wrong values."""
    return [(lambda v, name=name: cls(**{**good, name: v}), values, f"{cls.__name__}.{name}") for name in names]


def flags(cls, good):
    """Return such calls for all boolean fields."""
    return of(cls, good, NO_FLAG, *[field.name for field in dataclasses.fields(cls) if field.type == "bool"])


def some(values):
    """Return the values except None, which means the default."""
    return tuple(value for value in values if value is not None)


@pytest.fixture(scope="module")
def layer():
    return MoELayer(CONFIG, EPContext.local(CPU), name="block")


# call, wrong values, the name in the error
TABLE = [
    *of(MoEConfig, SIZES, NO_COUNT, *SIZES),
    *flags(MoEConfig, SIZES),
    *of(MoEConfig, SIZES, NO_NUMBER, "activation_alpha", "activation_limit"),
    *of(MoEConfig, SIZES, ("swiglu", None, 1), "activation", "routing"),
    *flags(RoutingConfig, SIGMOID),
    *of(RoutingConfig, SIGMOID, NO_COUNT, "num_groups", "top_groups"),
    *of(RoutingConfig, {}, NO_NUMBER, "scaling_factor"),
    *of(ParallelConfig, {}, NO_COUNT, "pp", "dp", "tp", "etp"),
    *of(ParallelConfig, {}, some(NO_COUNT), "ep"),
    *of(ParallelConfig, {}, ("replicated", None), "tokens"),
    *of(RankLayout, {"world": 2, "rank": 0, "dp": 2, "ep": 2}, NO_COUNT, "world", "rank", "dp", "ep"),
    *of(ExpertsOptions, {}, NO_COUNT, "chunk_rows", "spare_sms"),
    *flags(ExpertsOptions, {}),
    *flags(EPLBConfig, {}),
    *of(Wire, {}, (None, 1, [], "FP8"), "dispatch", "combine"),
    *of(ModelConfig, MODEL, NO_COUNT, "num_layers", "dense_layers"),
    *of(ModelConfig, MODEL, (None, 1), "name", "family", "moe"),
    *of(Machine, RATES, NO_NUMBER, *RATES),
    *of(EPLBConfig, {}, NO_COUNT, "interval", "window", "bytes_per_step", "sync_every"),
    *of(EPLBConfig, {}, some(NO_COUNT), "nodes", "groups"),
    *of(EPLBConfig, {}, NO_NUMBER, "tolerance", "enough"),
    *of(EPLBConfig, {}, some(NO_NUMBER), "deadline_s"),
    (lambda v: Wire(dispatch="nvfp4", input_scale=v), NO_NUMBER, "input_scale"),
    (lambda v: ExpertMap.linear(v, 2), NO_COUNT, "ExpertMap.num_experts"),
    (lambda v: ExpertMap.linear(8, v), NO_COUNT, "ExpertMap.num_ranks"),
    (lambda v: ExpertMap.round_robin(v, 2), NO_COUNT, "ExpertMap.num_experts"),
    (lambda v: ExpertMap.redundant(8, 2, v), NO_COUNT, "ExpertMap.num_redundant"),
    (lambda v: ExpertMap.uneven([v, 2]), NO_COUNT, "counts[0]"),
    (lambda v: ExpertMap.uneven(v), (None, "12", 3, []), "ExpertMap"),
    (lambda v: ExpertMap(v, 1, (0,)), NO_COUNT, "ExpertMap.num_experts"),
    (lambda v: ExpertMap.from_ranks([[0, v]], 2), ("1", None, 1.0, True, float("nan")), "physical_to_logical[1]"),
    (lambda v: ExpertMap.from_ranks(v, 2), (None, "01", 3), "ExpertMap.from_ranks"),
    (lambda v: ExpertMap.from_ranks([[0, 1]], 2, allow_duplicates=v), NO_FLAG, "ExpertMap.allow_duplicates"),
    (ExpertMap.from_json, ("[" * 100_000, "null", "{}", 3), "not an ExpertMap file"),
    (ExpertMap.load, (None, 3), "ExpertMap.load: path"),
    (Tuned.load, (None, 3), "Tuned.load: path"),
    (load_model_config, (None, 3, True), "name_or_path"),
    (
        lambda v: plan(v, MAPS),
        ("text", [["a"] * 8], None, [[1.7e308] * 8], [[float("nan")] * 8], [[-1] * 8], [[True] * 8], [[1], [2, 3]], {}),
        "plan: load",
    ),
    (lambda v: plan([[1] * 8], v), (None, "x", [None], 3), "plan: current"),
    (lambda v: plan([[1] * 8], MAPS, groups=v), NO_COUNT, "plan: groups"),
    (lambda v: plan([[1] * 8], MAPS, nodes=v), NO_COUNT, "plan: nodes"),
    (lambda v: plan([[1] * 8], MAPS, tolerance=v), NO_NUMBER, "plan: tolerance"),
    (lambda v: plan([[1] * 8], MAPS, enough=v), (*NO_NUMBER, 0, 1.5), "plan: enough"),
    (lambda v: plan([[1] * 8], MAPS, dead_ranks=v), (None, "0", 3, [True], [2], [0.0], [2**63]), "dead_ranks"),
    (lambda v: plan([[1] * 8], MAPS, slots=v), ("text", [True, True], [4.0, 4.0], [4], [-1, 8], {}), "plan"),
    (lambda v: loads_by_rank(v, MAPS), ("a", None, [[1.7e308] * 8]), "load"),
    (lambda v: loads_by_rank([[1] * 8], v), (None, 3, [None], "a"), "maps"),
    (lambda v: traffic(MAPS, MAPS, expert_bytes=v), NO_COUNT, "expert_bytes"),
    (lambda v: traffic(MAPS, MAPS, expert_bytes=1, ranks_per_node=v), some(NO_COUNT), "ranks_per_node"),
    (balancedness, ("a", None, [1.0], [[float("nan")]]), "ranks"),
    (lambda v: MoELayer(v, EPContext.local(CPU)), (None, SIZES, 1), "config"),
    (lambda v: MoELayer(CONFIG, v), (None, 1), "context"),
    *(
        (lambda v, name=name: MoELayer(CONFIG, EPContext.local(CPU), **{name: v}), values, name)
        for name, values in {
            "all2all": (None, 1, True, []),
            "experts": (None, 1, True, []),
            "quantization": (None, 1, [], "nope"),
            "pipeline": some(NO_COUNT),
            "name": (1, True, ["a"]),
            "router": (1, "x"),
            "shared_experts": (1, "x"),
            "device": (1.5, "nope", True),
            "dtype": ("bfloat16", 1, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64),
        }.items()
    ),
    (EPContext.local, ("nope", 1.5, True), "device"),
    (lambda v: load_balancing_loss(LOGITS, v), NO_COUNT, "top_k"),
    (lambda v: load_balancing_loss(v, 2), (None, 1, "x", [None], [1], [], LOGITS.int()), "logits"),
    (lambda v: load_balancing_loss(LOGITS, 2, attention_mask=v), (1, "x", [1] * 4, torch.ones(3)), "attention_mask"),
    (lambda v: load_balancing_loss(LOGITS, 2, context=v), (1, "x"), "context"),
    (router_z_loss, (None, 1, "x", [None], LOGITS.int()), "logits"),
    (lambda v: sequence_balancing_loss(v, 2), (None, LOGITS, LOGITS.int()[None]), "logits"),
    (parameter_groups, (None, 1), "model"),
    (lambda v: router_logits(v).__enter__(), (None, 1), "model"),
]
OF_LAYER = [
    (lambda layer, v: layer.update_expert(v, w2=torch.ones(16, 16)), NO_COUNT, "logical_id"),
    (
        lambda layer, v: layer.update_expert(0, w2=v),
        (None, 1, [1], torch.ones(2), torch.ones(16, 16).int(), X[:, :16].to_sparse(), torch.ones(16, 16).to("meta")),
        "w2",
    ),
    (
        lambda layer, v: layer(v),
        (None, 1, "x", X.double(), X.to_sparse(), X.int(), X.to("meta"), X[:, :3], X.numpy()),
        "x must",
    ),
    (
        lambda layer, v: layer.forward_routed(X, v),
        (
            None, 1, (IDS, WEIGHTS), Routing(None, WEIGHTS), Routing(IDS, None), Routing(IDS.float(), WEIGHTS),
            Routing(IDS.bool(), WEIGHTS), Routing(IDS, WEIGHTS.double()), Routing(IDS.to_sparse(), WEIGHTS),
            Routing(IDS, WEIGHTS.to_sparse()), Routing(IDS + 100, WEIGHTS),
        ),
        "routing",
    ),
    (lambda layer, v: layer.placement.update(v), (None, 1, "x"), "expert_map"),
    (lambda layer, v: layer.placement.choose(v), (None, "spread"), "replicas"),
    (
        lambda layer, v: clip_grad_norm_(layer, layer.context, v),
        ("1", None, float("nan"), -1.0, True, [1.0], 1j),
        "max_norm",
    ),
    (
        lambda layer, v: clip_grad_norm_(layer, layer.context, 1.0, v),
        ("2", None, float("nan"), -1, 0, True),
        "norm_type",
    ),
    (lambda layer, v: sync_gradients(layer, v), (None, 1), "context"),
    (lambda layer, v: BiasUpdate(layer, layer.context, v), NO_NUMBER, "speed"),
    (lambda layer, v: layer(X, torch.ones(len(X), dtype=torch.bool), send_masked=v), (None, 1, "no"), "send_masked"),
    (lambda layer, v: load_layers(v, ".", "mixtral"), (None, 5, {}, [1], torch.ones(2)), "layers must"),
    (lambda layer, v: load_layers({0: v}, ".", "mixtral"), (None, "layer"), "layers[0] must be a MoELayer"),
    (lambda layer, v: load_layers({0: layer}, ".", v), (None, [], "nope"), "family"),
    (lambda layer, v: load_layer_weights(v, {}, "mixtral"), (None, 5, {}), "layers must"),
]  # fmt: skip


def wrong(table):
    return [
        pytest.param(call, value, named, id=f"{at}-{named}-{type(value).__name__}")
        for at, (call, values, named) in enumerate(table)
        for value in values
    ]


def check(call, named):
    with pytest.raises(EPMoEError) as caught:
        call()
    text = str(caught.value)
    assert named in text
    assert len(text) < 700, "no whole tensor or file in a sentence"


@pytest.mark.parametrize(("call", "value", "named"), wrong(TABLE))
def test_what_is_none_is_refused_by_name(call, value, named):
    check(lambda: call(value), named)


@pytest.mark.parametrize(("call", "value", "named"), wrong(OF_LAYER))
def test_what_is_none_is_refused_by_a_layer(call, value, named, layer):
    check(lambda: call(layer, value), named)
    assert layer(X).shape == X.shape


def test_numbers_of_numpy_are_numbers(layer):
    config = MoEConfig(**{name: np.int64(value) for name, value in SIZES.items()}, activation_alpha=np.float32(0.5))
    assert {type(getattr(config, name)) for name in SIZES} == {int}
    assert type(config.activation_alpha) is float
    assert EPLBConfig(interval=np.int32(5), window=np.int64(5), tolerance=np.float64(0)).interval == 5
    assert ExpertMap.linear(np.int64(8), np.int64(2)) == ExpertMap.from_ranks(np.arange(8).reshape(2, 4), 8)
    assert plan(np.ones((1, 8), np.float32), MAPS, groups=np.int64(2)) == plan([[3] * 8], MAPS)
    assert layer.update_expert(np.int64(1), w2=torch.ones(16, 16)) == 1
    assert layer.update_expert(torch.tensor(1), w2=torch.ones(16, 16)) == 1
    assert clip_grad_norm_(layer, layer.context, float("inf")) == 0


def test_a_path_may_be_one_of_pathlib(tmp_path):
    MAPS[0].save(tmp_path / "map.json")
    assert ExpertMap.load(Path(tmp_path) / "map.json") == MAPS[0]


def test_ids_are_integers_of_any_library_and_no_flags():
    assert [as_id(one) for one in (3, np.int64(3), torch.tensor(3), torch.tensor([3]))] == [3] * 4
    flags = (True, np.bool_(True), torch.tensor(True))
    assert [as_id(one) for one in (*flags, 3.0, torch.tensor(3.0), torch.tensor([3, 3]), "3", None)] == [None] * 8


@pytest.mark.parametrize(("value", "bound"), [(0, "at least 1"), (9, "at most 8"), (True, "at least 1")])
def test_a_count_is_told_the_bound_that_it_passed(value, bound):
    with pytest.raises(ConfigError, match=f"it must be an integer of {bound}, got {value}"):
        check_count("it", value, at_least=1, at_most=8)


@pytest.mark.parametrize(
    ("call", "named", "most"),
    [
        *(
            (lambda v, cls=cls, good=good, name=name: cls(**{**good, name: v}), f"{cls.__name__}.{name}", most)
            for cls, good, most, names in (
                (MoEConfig, SIZES, INT32_MAX, ("hidden_size", "intermediate_size", "shared_intermediate_size")),
                (MoEConfig, SIZES, MOST_EXPERTS, ("num_experts", "top_k")),
                (ParallelConfig, {}, INT32_MAX, ("pp", "dp", "tp", "ep", "etp")),
                (ModelConfig, MODEL, INT32_MAX, ("num_layers", "dense_layers")),
            )
            for name in names
        ),
        (lambda v: ExpertMap(v, 1, (0,)), "ExpertMap.num_experts", MOST_EXPERTS),
        (lambda v: ExpertMap(1, v, (0,)), "ExpertMap.num_ranks", MOST_EXPERTS),
        (lambda v: ExpertMap(1, 1, (0,) * v), "ExpertMap.physical_to_logical slots", MOST_EXPERTS),
        (lambda v: ExpertMap.linear(v, 2), "ExpertMap.num_experts", MOST_EXPERTS),
        (lambda v: ExpertMap.linear(8, v), "ExpertMap.num_ranks", MOST_EXPERTS),
        (lambda v: ExpertMap.redundant(8, 2, v), "ExpertMap.num_redundant", MOST_EXPERTS),
        (lambda v: ExpertMap.round_robin(v, 2), "ExpertMap.num_experts", MOST_EXPERTS),
        (lambda v: ExpertMap.round_robin(8, v), "ExpertMap.num_ranks", MOST_EXPERTS),
        (lambda v: ExpertMap.uneven([v]), r"counts\[0\]", MOST_EXPERTS),
    ],
)
def test_a_size_beyond_what_kernels_and_maps_count_is_refused(call, named, most):
    with pytest.raises(ConfigError, match=f"^{named} must be an integer of at most {most}, got {most + 1}"):
        call(most + 1)


def test_a_deadline_may_be_as_short_and_as_long_as_the_sentence_says():
    shortest, longest = checks.SHORTEST_DEADLINE_S, checks.LONGEST_DEADLINE_S
    assert checks.deadline_problem("deadline_s", shortest) is None
    assert checks.deadline_problem("deadline_s", longest) is None
    for beyond in (math.nextafter(shortest, 0), math.nextafter(longest, math.inf), -1, math.nan):
        assert "deadline_s must be a number of seconds, at least" in str(checks.deadline_problem("deadline_s", beyond))


def test_a_value_is_shown_whatever_its_repr_does():
    class Odd:
        def __repr__(self):
            raise KeyError("of the user's")

    assert checks.shown(Odd()) == "a Odd"
    assert checks.shown("x" * 118) == repr("x" * 118)
    assert checks.shown("x" * 119) == f"'{'x' * 119}... (str)"


@pytest.mark.parametrize("package", [ep_moe, ep_moe.eplb, ep_moe.metrics], ids=lambda package: package.__name__)
def test_values_that_users_hold_cannot_be_written(package):
    """Values that users hold are frozen, because they are checked at construction and shared by layers."""
    exported = [getattr(package, name) for name in package.__all__]
    values = [value for value in exported if isinstance(value, type) and dataclasses.is_dataclass(value)]
    assert values
    for value in (*values, BalancerStats, LayerStats, BackendChoice):
        field = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(object.__new__(value), field, None)
