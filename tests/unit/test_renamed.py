"""Test that old names of public things work, and name the new ones."""

import dataclasses
import importlib
import warnings

import pytest
import torch

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.all2all.base import Dispatcher
from ep_moe.experts.base import Experts
from ep_moe.experts.capabilities import ExpertsCapabilities, KernelCapabilities
from ep_moe.experts.fused.base import FusedExperts
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import distributed, rank_device
from ep_moe.types import Activation


@pytest.mark.parametrize("base", [Dispatcher, Experts, FusedExperts])
def test_hooks_of_earlier_plugins_are_asked(base):
    with pytest.warns(
        DeprecationWarning, match=r"Own\.(why_not is unsupported_reason|platform_problem is unsupp)"
    ) as said:

        class Own(base):
            @classmethod
            def why_not(cls, *args, **kwargs):
                return "too small"

            @classmethod
            def platform_problem(cls, *args):
                return "no machine"

    assert len(said) == 2
    assert Own.unsupported_reason() == "too small"
    assert Own.unsupported_platform() == "no machine"
    assert {one.filename for one in said} == {__file__}, "it names the plug-in"


def test_a_hook_under_both_names_is_the_new_one():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Own(Dispatcher):
            @classmethod
            def why_not(cls, *args):
                return "of an earlier release"

            @classmethod
            def unsupported_reason(cls, *args):
                return "of this one"

    assert Own.unsupported_reason() == "of this one"


def test_weight_layouts_under_their_old_name():
    with pytest.warns(DeprecationWarning, match="preparation is weight_layout"):

        class Own(Experts):
            preparation = object

    assert Own.weight_layout is object


@pytest.mark.parametrize("base", [Dispatcher, Experts, FusedExperts])
def test_tested_machines_under_their_old_name(base):
    with pytest.warns(DeprecationWarning, match=r"Own\.run_on is tested_machines"):

        class Own(base):
            run_on = "1 H200"

    assert Own.tested_machines == "1 H200"


@pytest.mark.parametrize("kind", [KernelCapabilities, ExpertsCapabilities])
def test_tested_capabilities_under_their_old_name(kind):
    needed = {"activations": frozenset({Activation.SWIGLU}), "dtypes": frozenset({torch.bfloat16})}
    with pytest.warns(DeprecationWarning, match=rf"{kind.__name__}\(run_on=\) is tested_capabilities") as said:
        made = kind(**needed, run_on=frozenset({(9, 0)}))
    assert said[0].filename == __file__
    assert made == kind(**needed, tested_capabilities=frozenset({(9, 0)}))
    with pytest.warns(DeprecationWarning, match=rf"{kind.__name__}\.run_on is tested_capabilities"):
        assert made.run_on == frozenset({(9, 0)})
    with pytest.warns(DeprecationWarning, match="run_on"):
        assert dataclasses.replace(made, run_on=None).tested_capabilities is None


def test_recordable_calls_under_their_old_name():
    with pytest.warns(DeprecationWarning, match="again is recordable_call"):

        class Own(Dispatcher):
            def again(self, bound):
                return bound

    assert Own.recordable_call(None, 4) == 4


def test_unsupported_maps_under_their_old_name():
    with pytest.warns(DeprecationWarning, match="map_problem is unsupported_map"):

        class Own(FusedExperts):
            @classmethod
            def map_problem(cls, expert_map):
                return "no map"

    assert Own.unsupported_map(None) == "no map"


@pytest.mark.parametrize(
    "made",
    [SCHEMES["nvfp4"], KernelCapabilities(activations=frozenset(), dtypes=frozenset())],
    ids=["scheme", "kernel"],
)
def test_problems_under_their_old_name(made):
    with pytest.warns(DeprecationWarning, match=r"\.problem is unsupported_reason"):
        assert made.problem == made.unsupported_reason


@pytest.mark.parametrize("base", [Dispatcher, FusedExperts])
def test_what_instances_hold(base):
    kind = type("Own", (base,), {})
    kind.__abstractmethods__ = frozenset()
    made = kind.__new__(kind)
    made.dispatch_shape, made.rank_group = "shape", "group"
    with pytest.warns(DeprecationWarning, match=r"Own\.geometry is dispatch_shape"):
        assert made.geometry == "shape"
    with pytest.warns(DeprecationWarning, match=r"Own\.link is rank_group"):
        assert made.link == "group"


@distributed(2)
def test_the_key_of_tuning():
    config = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=2, top_k=1)
    with EPContext.from_groups(device=rank_device()) as context:
        layer = MoELayer(config, context)
        with pytest.warns(DeprecationWarning, match=r"MoELayer\.shape is _tuning_key"):
            assert layer.shape == layer._tuning_key


@distributed(2)
def test_a_lower_bound():
    with EPContext.from_groups(device=rank_device(), max_tokens=8) as context:
        with pytest.warns(DeprecationWarning, match=r"EPContext\.at_most is token_limit"):
            limit = context.at_most(4)
        with limit:
            assert context._current_limit == 4
        assert context._current_limit == 8


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("ep_moe.all2all.base", "Geometry", "ep_moe.all2all.base:DispatchShape"),
        ("ep_moe.types", "PeerCells", "ep_moe.types:PeerPackets"),
        ("ep_moe.registry", "why_not", "ep_moe.registry:unsupported_reason"),
        ("ep_moe.tuned", "Tuned", "ep_moe:Tuned"),
        ("ep_moe.checkpoint.model_names", "FAMILIES", "ep_moe.checkpoint.model_names:CHECKPOINT_NAMES"),
        ("ep_moe.checkpoint.push", "load_weights", "ep_moe.checkpoint.push:load_layer_weights"),
    ],
)
def test_old_names_of_modules_warn(module, old, new):
    home, _, name = new.partition(":")
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is .*{name} now"):
        found = getattr(importlib.import_module(module), old)
    assert found is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = importlib.import_module(module).nothing
