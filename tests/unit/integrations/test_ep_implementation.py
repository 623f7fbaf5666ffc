"""Test the registration of `ep_implementation="ep_moe"`, and what it refuses."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ep_moe.errors import ConfigError
from ep_moe.experts.base import ExpertsOptions
from ep_moe.integrations import ep_implementation
from ep_moe.integrations.ep_implementation import Borrower, register_ep_implementation
from ep_moe.selection.explain import BackendChoice
from ep_moe.weights.layouts.base import WeightLayout

expert_parallel = pytest.importorskip("transformers.distributed.expert_parallel")
if not hasattr(expert_parallel, "EPImplementationInterface"):
    pytest.skip("this transformers has no EPImplementationInterface", allow_module_level=True)


def test_names_of_transformers_are_left_alone():
    with pytest.raises(ConfigError, match="name='auto' is an implementation of transformers"):
        register_ep_implementation("auto")


def test_an_older_transformers_is_named(monkeypatch):
    monkeypatch.delattr(expert_parallel, "EPImplementationInterface")
    with pytest.raises(ConfigError, match=r"no EPImplementationInterface; install transformers 5.23 or newer, or use"):
        register_ep_implementation()


@pytest.mark.parametrize("options", [ExpertsOptions(exact=True), None])
def test_modules_have_what_was_registered(options, monkeypatch):
    given = {"all2all": "torch_a2a", "experts": "reference", "max_tokens": 7, "top_k": 3, "deadline_s": 9.0}
    module, made = nn.Module(), []
    register = lambda *named: made.append(named)  # noqa: E731
    monkeypatch.setattr(expert_parallel.EPImplementationInterface, "register", register)
    begun = []
    monkeypatch.setattr(expert_parallel.EPImplementation, "__init__", lambda _, *given: begun.append(given))
    monkeypatch.setattr(ep_implementation._Contexts, "of", lambda _, *asked: asked)
    monkeypatch.setattr(ep_implementation, "Borrower", lambda *asked: asked)
    register_ep_implementation("mine", options=options, **given)
    ((name, kind),) = made
    assert name == "mine"
    kind(module, "mesh", "tp mesh")
    assert begun == [(module, "mesh", "tp mesh")], "what transformers keeps of it"
    experts, context, asked = module.ep_moe_borrower
    assert vars(asked) == {**given, "options": options or ExpertsOptions()}
    assert (experts, context) == (module, ("mesh", "tp mesh", asked))


def test_layers_are_made_as_was_asked(monkeypatch):
    borrower, asked = object.__new__(Borrower), SimpleNamespace(options=ExpertsOptions(exact=True))
    borrower._asked, borrower.context = asked, SimpleNamespace(device="cpu")
    chosen = SimpleNamespace(all2all="torch_a2a", experts="reference")
    given = []
    monkeypatch.setattr(
        ep_implementation, "_choose", lambda *asked, trains: (given.append((*asked, trains)), chosen)[1]
    )
    monkeypatch.setattr(ep_implementation, "BorrowingLayer", lambda *positions, **how: (*positions, how))
    config, context, how = borrower._make("config", torch.float16, trains=True)
    assert given == [("config", borrower.context, torch.float16, asked, True)]
    assert (config, context) == ("config", borrower.context)
    wanted = {"all2all": "torch_a2a", "experts": "reference", "options": asked.options, "dtype": torch.float16}
    wanted["device"] = "cpu"
    assert {name: how[name] for name in wanted} == wanted


@pytest.mark.parametrize("top_k", [None, 2])
def test_how_many_experts_a_token_takes_must_be_known(top_k, monkeypatch):
    """The number of experts per token comes from a known field of the configuration, or from an argument."""
    experts = SimpleNamespace(config=SimpleNamespace(), has_gate=True, has_bias=False, gate_up_proj=torch.ones(1))
    asked = SimpleNamespace(top_k=top_k)
    monkeypatch.setattr(ep_implementation, "config_of", lambda experts, kind, most: most)
    monkeypatch.setattr(Borrower, "_make", lambda self, config, dtype, trains: config)
    monkeypatch.setattr(ep_implementation, "_trains", lambda layer: True)
    if top_k is not None:
        assert Borrower(experts, None, asked).layer == 2
        return
    with pytest.raises(ConfigError, match="does not say how many experts a token takes"):
        Borrower(experts, None, asked)


class Made:
    """A stand-in for a device mesh or context with one rank."""

    device_type = "cpu"

    def __init__(self, *_, **__):
        pass

    def size(self):
        return 1


def test_modules_of_one_mesh_share_a_context(monkeypatch):
    """Modules of one mesh share a context while any of them lives. A later model may have other ranks."""
    monkeypatch.setattr(ep_implementation.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(ep_implementation.EPContext, "from_groups", Made)
    contexts, (mesh, other) = ep_implementation._Contexts(), (Made(), Made())
    asked = SimpleNamespace(deadline_s=1.0, max_tokens=None)
    first = contexts.of(mesh, mesh, asked)
    assert contexts.of(mesh, mesh, asked) is first
    second = contexts.of(other, other, asked)
    assert second is not first
    assert contexts.of(other, other, asked) is second
    place = weakref.ref(second)
    del second
    assert place() is None, "nothing here keeps it"
    assert isinstance(contexts.of(other, other, asked), Made)


class Named:
    """A stand-in for layers, of which one trains by its name."""

    config = SimpleNamespace(top_k=2, num_experts=4)
    expert_weights = SimpleNamespace(borrow=lambda tensors: nullcontext())

    def __init__(self, name):
        self.name, self.calls = name, 0

    def forward_routed(self, x, routing):
        self.calls += 1
        return x

    def _refuse(self, text):
        raise ConfigError(text)


@pytest.mark.parametrize("needs", ["x", "weights", "gate_up_proj", None])
@pytest.mark.parametrize("grad", [True, False])
def test_a_backward_is_asked_of_calls_that_are_differentiated(grad, needs, monkeypatch):
    x, weights = torch.ones(3, 8), torch.ones(3, 2)
    experts = SimpleNamespace(is_transposed=False, has_gate=True, is_concatenated=True, down_proj=torch.ones(4, 8, 4))
    experts.gate_up_proj = torch.ones(4, 8, 8)
    if needs is not None:
        {"x": x, "weights": weights, "gate_up_proj": experts.gate_up_proj}[needs].requires_grad_()
    borrower = object.__new__(Borrower)
    borrower._experts, borrower._names = experts, {"w13": "gate_up_proj", "w2": "down_proj"}
    borrower.layer, borrower.trained, borrower.no_backward = Named("infers"), None, "it has none"
    monkeypatch.setattr(ep_implementation, "_trains", lambda layer: layer.name == "trains")
    with torch.set_grad_enabled(grad):
        call = lambda: borrower(x, torch.zeros(3, 2, dtype=torch.int64), weights)  # noqa: E731
        if grad and needs is not None:
            with pytest.raises(ConfigError, match="infers: a call with gradients: it has none"):
                call()
            borrower.trained = Named("trains")
            assert call() is not x, "no view that FSDP2 would lose"
        else:
            assert call() is x
    calls = borrower.layer.calls, 0 if borrower.trained is None else borrower.trained.calls
    assert calls == ((0, 1) if grad and needs is not None else (1, 0))


@pytest.mark.parametrize(("trains", "chosen"), [(False, "kernel alone"), (True, "both")])
def test_the_first_pair_that_reads_weights_as_they_are_held(trains, chosen, monkeypatch):
    own, can = type("Own", (WeightLayout,), {}), SimpleNamespace
    kinds = {
        "own": can(name="own", weight_layout=own, capabilities=can(differentiable=True)),
        "no backward": can(name="no backward", weight_layout=WeightLayout, capabilities=can(differentiable=False)),
        "kernel": can(name="kernel", weight_layout=WeightLayout, capabilities=can(differentiable=True)),
        "one way": can(name="one way", capabilities=can(differentiable=False, adjoint=False)),
        "both ways": can(name="both ways", capabilities=can(differentiable=False, adjoint=True)),
    }
    rows = [
        BackendChoice("both ways", "kernel", "refused", "kernel: is not here"),
        BackendChoice("inside", "fused", "chosen", "alone"),
        BackendChoice("both ways", "own", "possible", "alone"),
        BackendChoice("one way", "kernel", "possible", "kernel alone"),
        BackendChoice("both ways", "no backward", "possible", "transport alone"),
        BackendChoice("both ways", "kernel", "possible", "both"),
    ]
    registered = SimpleNamespace(
        targets=lambda kind: ["own", "no backward", "kernel"], load=lambda _, name: kinds[name]
    )
    monkeypatch.setattr(ep_implementation, "registry", registered)
    asked, tables = SimpleNamespace(all2all="auto", experts="auto", options=ExpertsOptions(exact=True)), []
    monkeypatch.setattr(
        ep_implementation.explain, "explain", lambda *given, **how: (tables.append((*given, how)), list(rows))[1]
    )
    context = SimpleNamespace(layout="layout", device="cpu", _max_dispatch_tokens=7)
    choose = lambda: ep_implementation._choose("config", context, torch.float16, asked, trains=trains)  # noqa: E731
    assert choose().reason == chosen
    how = {"all2all": "auto", "experts": "auto", "options": asked.options, "max_tokens": 7}
    assert tables == [("config", "layout", "cpu", torch.float16, how)]
    del rows[3 if not trains else 5 :]
    reasons = ["kernel: is not here", "fused is a fused kernel with", "own has a weight layout of its own"]
    reasons += ["one way has no backward", "no backward has no backward"] if trains else []
    needs = "has a backward, and reads weights" if trains else "has room for weights"
    with pytest.raises(ConfigError, match=f"{needs} .*{'.*; '.join(reasons)}"):
        choose()
    asked.experts = "own"
    with pytest.raises(ConfigError, match=r"holds them: own has a weight layout [^;]*; leave"):
        choose()
