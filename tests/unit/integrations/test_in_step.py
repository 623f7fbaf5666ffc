"""Idle steps: of which models, and what they give on one rank."""

from types import SimpleNamespace

import pytest
import torch

from ep_moe import ConfigError, EPContext, InputError, MoEConfig, MoELayer
from ep_moe.integrations import in_step
from ep_moe.integrations.transformers import expert_parallel, idle_step
from ep_moe.training import router_logits
from tests.fixtures.checkpoint_files import tiny_model

pytest.importorskip("transformers")


def test_idle_steps_are_for_models_with_blocks():
    context = EPContext.local(torch.device("cpu"))
    layer = MoELayer(MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2), context)
    with pytest.raises(ConfigError, match=r"idle_step needs a model of load_pretrained.*call layer\(x\[:0\]\)"):
        idle_step(torch.nn.Sequential(layer))
    model = expert_parallel(tiny_model("mixtral"), context)
    assert not idle_step(model).any()
    with pytest.raises(InputError, match=r"call ep_moe.integrations.transformers.idle_step\(model\)"):
        model(torch.zeros(0, 4, dtype=torch.int64))


def test_an_idle_step_that_raised_is_over(monkeypatch):
    """The next `generate` of this rank meets its peers again."""
    generation = object.__new__(in_step.Generation)
    generation._models, generation._serving = [lambda: torch.nn.Identity()], False

    def refused(model):
        assert generation._serving
        raise InputError("rank 1: x")

    monkeypatch.setattr(in_step, "idle_step", refused)
    with pytest.raises(InputError):
        generation._idle(0)
    assert not generation._serving


class Experts(torch.nn.Module):
    """As one of a block's modules of experts."""

    def __init__(self, name, calls):
        super().__init__()
        self.calls, self._log, self._name = 0, calls, name
        self.moe = SimpleNamespace(name=name, _refuse=self._refuse)

    def _refuse(self, problem):
        raise InputError(problem)

    def forward(self, x):
        self.calls += 1
        self._log.append(self._name)
        return 2 * x

    def without_rows(self, *, gradients):
        self._log.append(f"{self._name} without rows{', with gradients' * gradients}")
        return torch.zeros(0, requires_grad=gradients)


class Block(torch.nn.Module):
    def __init__(self, *names):
        super().__init__()
        self.calls = []
        self.parts = torch.nn.ModuleDict({name: Experts(name, self.calls) for name in names})
        in_step.AllCalled(list(self.parts.values())).attach(self)

    def forward(self, x, *names):
        for name in names:
            x = self.parts[name](x)
        return (x, "more")


@pytest.mark.parametrize("gradients", [False, True])
def test_what_a_block_leaves_out_is_called_behind_it(gradients):
    block, x = Block("text", "image", "sound"), torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(gradients):
        for names in (("text", "image", "sound"), ("text",), ()):
            block.calls.clear()
            out, more = block(x, *names)
            end = " without rows" + ", with gradients" * gradients
            assert block.calls == [*names, *(f"{name}{end}" for name in ("text", "image", "sound")[len(names) :])]
            assert (out.tolist(), more) == ([2.0 ** len(names)] * 2, "more")


def test_a_block_that_leaves_out_what_comes_first_is_refused():
    """The others were called already, as the first of a peer's calls."""
    with pytest.raises(InputError, match="text was not called, and what its block calls after it was; ranks differ"):
        Block("text", "image")(torch.ones(2), "image")


class Pair(torch.nn.Module):
    """A block that calls one of its two modules of experts."""

    def __init__(self, number, calls):
        super().__init__()
        self.text, self.image = Experts(f"text {number}", calls), Experts(f"image {number}", calls)

    def forward(self, x):
        return self.text(x)


def test_only_what_its_own_block_leaves_out_is_called_behind_it():
    """Modules of two blocks have the list of blocks in common."""
    calls, model = [], torch.nn.Module()
    model.layers = torch.nn.ModuleList(Pair(number, calls) for number in range(2))
    in_step.attach_all_called(
        model, {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    )
    model.layers[1](torch.ones(2))
    assert calls == ["text 1", "image 1 without rows"]


def test_logits_that_are_recorded_have_no_rows_of_idle_steps():
    """There is one for each layer all the same, as on the ranks that have tokens."""
    context = EPContext.local(torch.device("cpu"))
    model = expert_parallel(tiny_model("mixtral"), context)
    layers = [layer for layer in model.modules() if isinstance(layer, MoELayer)]
    experts = layers[0].config.num_experts
    with router_logits(model) as recorded:
        idle_step(model)
        assert [tuple(logits.shape) for logits in recorded] == [(0, experts)] * len(layers)
        model(torch.zeros(1, 3, dtype=torch.int64))
        assert [tuple(logits.shape) for logits in recorded[len(layers) :]] == [(3, experts)] * len(layers)
