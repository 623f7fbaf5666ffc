"""Test what ranks compare when they make a layer: all of its arguments."""

import re
from contextlib import nullcontext

import pytest
import torch

from ep_moe import ConfigError, EPContext, ExpertMap, MoELayer, RoutingConfig, Wire
from ep_moe.experts.base import ExpertsOptions
from ep_moe.selection.backend_table import BackendTable, TableEntry
from ep_moe.selection.explain import BackendChoice
from ep_moe.selection.resolve import LayerRequest, _check_tuned, _facts
from ep_moe.selection.tuned import Measured, Tuned, layer_facts, machine_facts
from tests.fixtures.single_layer import CPU, EXPERTS, routing, shape

SPARE = ExpertMap.from_ranks([[*range(EXPERTS), 0]], EXPERTS, allow_duplicates=True)


def compared(config=None, **asked):
    """Return the facts that ranks compare for a layer with these arguments."""
    seen = []
    with EPContext.local(CPU) as context:
        context.consensus.require_equal = lambda what, facts, problem: seen.append((what, facts, problem))
        MoELayer(config or shape(), context, **asked)
    ((what, facts, problem),) = seen
    assert (what, problem) == (f"MoELayer {asked.get('name', 'moe0')}", None)
    return facts


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"config": shape(intermediate_size=16)}, {"MoEConfig.intermediate_size"}),
        ({"config": shape(routing=RoutingConfig(scaling_factor=2.0))}, {"MoEConfig.routing.scaling_factor"}),
        ({"name": "other"}, {"layer"}),
        ({"expert_map": SPARE}, {"expert_map"}),
        ({"router": lambda x: routing(len(x))}, {"router"}),
        ({"shared_experts": torch.nn.Identity()}, {"shared_experts"}),
        ({"all2all": "torch_a2a"}, {"all2all"}),
        ({"dtype": torch.bfloat16}, {"dtype"}),
        ({"options": ExpertsOptions(chunk_rows=8)}, {"ExpertsOptions.chunk_rows"}),
        ({"options": ExpertsOptions(deterministic=True)}, {"ExpertsOptions.deterministic"}),
        ({"options": ExpertsOptions(exact=True)}, {"ExpertsOptions.exact"}),
        ({"wire": Wire(dispatch="fp8_row"), "all2all": "local"}, {"Wire.dispatch"}),
        ({"quantization": "fp8_dynamic"}, {"quantization"}),
    ],
    ids=lambda asked: "",
)
def test_each_argument_is_compared(asked, names):
    plain, found = compared(), compared(**asked)
    assert plain.keys() == found.keys()
    assert {name for name in plain if plain[name] != found[name]} == names


def test_the_bound_is_of_what_a_rank_sends(monkeypatch):
    """A layer's token limit is that of the rows a rank sends, its etp peers' tokens included.

    This is more than a model passes.
    """
    monkeypatch.setattr(EPContext, "_max_dispatch_tokens", property(lambda self: 2 * (self.max_tokens or 0)))
    with EPContext.local(CPU) as context:
        context.max_tokens = 9
        layer = MoELayer(shape(), context)
        assert (layer._asked["max_tokens"], layer._entry.tokens, layer._entry.buffer_tokens) == (18, 18, 18)


def test_parts_are_compared():
    """The parts of `pipeline` are compared, because they decide how many exchanges all ranks make."""
    table = BackendTable([TableEntry(8, BackendChoice("nvlink_p2p", "reference", "chosen", ""), None, 8)])
    plain, found = (
        _facts(
            "moe0",
            shape(),
            LayerRequest("auto", "auto", "none", Wire(), pipeline, ExpertsOptions(), torch.float32, None),
            None,
            table,
        )
        for pipeline in (None, 4)
    )
    assert {name for name in plain if plain[name] != found[name]} == {"pipeline"}


@pytest.mark.parametrize(
    ("asked", "tokens", "words"),
    [
        ({}, 9, None),
        (
            {"all2all": "local"},
            9,
            "all2all='local' and tuned are both given, and tuned sets all2all per number of tokens; leave out one",
        ),
        (
            {"experts": "reference"},
            9,
            "experts='reference' and tuned are both given, and tuned sets experts per number of tokens",
        ),
        ({"pipeline": 4}, 9, "pipeline=4 and tuned are both given, and tuned sets pipeline per number of tokens"),
        ({}, None, "tuned chooses backends by the token limit; set it with EPContext.from_torchrun(max_tok"),
        ({"dtype": torch.float64}, 9, "tuned is for another machine or layer: layer dtype is 'float64' here and"),
    ],
)
def test_what_contradicts_a_tuned_choice_is_refused(asked, tokens, words):
    of = {"all2all": "auto", "experts": "auto", "quantization": "none", "wire": Wire(), "pipeline": None}
    of |= {"options": ExpertsOptions(), "dtype": torch.float32, "router": None}
    line = Measured(tokens=4, experts="reference", all2all="local", us=5.5)
    facts = layer_facts(shape(), "none", Wire(), torch.float32)
    tuned = Tuned(machine=machine_facts(CPU, 1, 1), layer=facts, versions={}, buckets=(line,))
    with EPContext.local(CPU) as context:
        if tokens is not None:
            context.max_tokens = tokens
        refused = nullcontext() if words is None else pytest.raises(ConfigError, match=re.escape(words))
        with refused:
            _check_tuned(tuned, context, shape(), LayerRequest(**of | asked, tuned=tuned))


@pytest.mark.parametrize("field", ["router", "shared_experts"])
@pytest.mark.parametrize("exact", [None, False, True])
def test_a_module_of_an_exact_layer_declares_that_it_is_exact(exact, field):
    module = torch.nn.Identity()
    if exact is not None:
        module.exact = exact
    words = rf"^{field}=Identity does not declare .* leave {field}=None, or set exact=True on a module"
    with (
        EPContext.local(CPU) as context,
        nullcontext() if exact else pytest.raises(ConfigError, match=words),
    ):
        MoELayer(shape(), context, **{field: module}, options=ExpertsOptions(exact=True))
