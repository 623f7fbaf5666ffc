"""Registration of `ep_implementation="ep_moe"`, and what it refuses."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ep_moe.errors import ConfigError
from ep_moe.experts.base import ExpertsOptions
from ep_moe.integrations import ep_implementation
from ep_moe.integrations.ep_implementation import Borrower, register_ep_implementation

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
    monkeypatch.setattr(expert_parallel.EPImplementation, "__init__", lambda *_: None)
    monkeypatch.setattr(ep_implementation._Contexts, "of", lambda _, *asked: asked)
    monkeypatch.setattr(ep_implementation, "Borrower", lambda *asked: asked)
    register_ep_implementation("mine", options=options, **given)
    ((name, kind),) = made
    assert name == "mine"
    kind(module, "mesh", "tp mesh")
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
    assert {name: how[name] for name in wanted} == wanted


@pytest.mark.parametrize("top_k", [None, 2])
def test_how_many_experts_a_token_takes_must_be_known(top_k, monkeypatch):
    """By a known name of the configuration, or as it was given."""
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
    """Of one process group, or of no group."""

    device_type = "cpu"

    def __init__(self, *_, **__):
        pass

    def size(self):
        return 1


def test_modules_of_one_mesh_share_a_context(monkeypatch):
    """As long as one of them lives: those of the next model have ranks of their own."""
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
