"""Test idle steps: which models run them, and what they give on one rank."""

import contextlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from ep_moe import ConfigError, EPContext, InputError, MoEConfig, MoELayer
from ep_moe.integrations import forward_sync
from ep_moe.integrations.transformers import expert_parallel, idle_step
from ep_moe.training import router_logits
from tests.fixtures.checkpoint_files import tiny_model

transformers = pytest.importorskip("transformers")


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
    """An idle step that raised is over, so the next `generate` of this rank meets its peers again."""
    generation = object.__new__(forward_sync.GenerationSync)
    inner = torch.nn.Identity()
    inner.config = SimpleNamespace(num_hidden_layers=3)
    generation._models, generation._serving = [(torch.nn.Identity, lambda: inner)], False

    def refused(model):
        assert generation._serving
        assert inner.config.num_hidden_layers == 2, "as the peer that leaves a layer out"
        raise InputError("rank 1: x")

    monkeypatch.setattr(forward_sync, "idle_step", refused)
    with pytest.raises(InputError):
        generation._idle(2)
    assert not generation._serving
    assert inner.config.num_hidden_layers == 3


class Experts(torch.nn.Module):
    """A stand-in for a block's experts module."""

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
        forward_sync.SkippedExpertsHook(list(self.parts.values())).attach(self)

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
    """A block that skips its first module is refused.

    The modules after it were already called, where a peer calls the first one.
    """
    with pytest.raises(InputError, match="text was not called, and what its block calls after it was; ranks differ"):
        Block("text", "image")(torch.ones(2), "image")


class Pair(torch.nn.Module):
    """A block that calls one of its two experts modules."""

    def __init__(self, number, calls):
        super().__init__()
        self.text, self.image = Experts(f"text {number}", calls), Experts(f"image {number}", calls)

    def forward(self, x):
        return self.text(x)


def test_only_what_its_own_block_leaves_out_is_called_behind_it():
    """Only modules that their own block skipped are called after it. Modules of other blocks in the list are not."""
    calls, model = [], torch.nn.Module()
    model.layers = torch.nn.ModuleList(Pair(number, calls) for number in range(2))
    forward_sync.attach_skipped_experts_hooks(
        model, {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    )
    model.layers[1](torch.ones(2))
    assert calls == ["text 1", "image 1 without rows"]


def test_logits_that_are_recorded_have_no_rows_of_idle_steps():
    """Idle steps record logits without rows, one for each layer, as ranks with tokens record one for each layer."""
    context = EPContext.local(torch.device("cpu"))
    model = expert_parallel(tiny_model("mixtral"), context)
    layers = [layer for layer in model.modules() if isinstance(layer, MoELayer)]
    experts = layers[0].config.num_experts
    with router_logits(model) as recorded:
        idle_step(model)
        assert [tuple(logits.shape) for logits in recorded] == [(0, experts)] * len(layers)
        model(torch.zeros(1, 3, dtype=torch.int64))
        assert [tuple(logits.shape) for logits in recorded[len(layers) :]] == [(3, experts)] * len(layers)


def test_a_block_that_returns_rows_alone_returns_them():
    block = Block("text", "image")
    block.forward = lambda x, *names: Block.forward(block, x, *names)[0]
    out = block(torch.ones(2, requires_grad=True), "text")
    assert out.tolist() == [2.0, 2.0]
    assert block.calls == ["text", "image without rows, with gradients"]


@pytest.mark.parametrize(("x_grad", "grad"), [(True, True), (True, False), (False, True)])
def test_gradients_are_of_calls_that_have_them(x_grad, grad):
    """A skipped module is called with gradients if the calls of the other modules have them."""
    block = Block("text", "image")
    with torch.set_grad_enabled(grad):
        block(torch.ones(2, requires_grad=x_grad), "text")
    assert block.calls[-1] == "image without rows" + ", with gradients" * (x_grad and grad)


class Inner(transformers.PreTrainedModel):
    """A model within a model, whose parts do not form a block."""

    config_class = transformers.PretrainedConfig

    def __init__(self):
        super().__init__(transformers.PretrainedConfig())
        self.one, self.other = torch.nn.Identity(), torch.nn.Identity()


@pytest.mark.parametrize("kind", ["block", "list", "dict", "model"])
def test_ranks_are_kept_in_step_in_blocks_of_several_modules(kind, monkeypatch):
    """Only blocks with several experts modules are attached.

    Layers in a list and the parts of a model are all called anyway.
    """
    holder = {
        "block": torch.nn.Sequential,
        "list": lambda: torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()]),
        "dict": lambda: torch.nn.ModuleDict({"one": torch.nn.Identity(), "other": torch.nn.Identity()}),
        "model": Inner,
    }[kind]()
    if kind == "block":
        holder.one, holder.other = torch.nn.Identity(), torch.nn.Identity()
    model, kept = torch.nn.Sequential(), []
    model.held = holder
    names = ["held.0", "held.1"] if kind == "list" else ["held.one", "held.other"]
    monkeypatch.setattr(
        forward_sync.SkippedExpertsHook, "attach", lambda self, block: kept.append((self._experts, block))
    )
    forward_sync.attach_skipped_experts_hooks(model, {name: name for name in names})
    assert kept == ([(names, holder)] if kind == "block" else [])


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [("a.b.c", "a.b.d", "a.b"), ("a.b.c", "a.x.c", "a"), ("a.b", "a.b.c", "a.b"), ("a.c", "b.c", "")],
)
def test_the_innermost_module_holds_both(one, other, common):
    assert forward_sync._common(one, other) == common


def generation(size=2, failed=False):
    """Return a `GenerationSync` whose peers receive the error that this rank raises, and the list of what it sent."""
    made, sent = object.__new__(forward_sync.GenerationSync), []
    made._context = SimpleNamespace(
        flight_recorder=SimpleNamespace(failed=failed),
        _report_exception=lambda error: sent.append(("reported", str(error))),
    )
    made._rank_group, made._depth, made._inside = SimpleNamespace(size=size), 0, False

    def next_forward(forward, problem=None):
        sent.append((forward, problem))
        if problem is not None:
            raise InputError(problem)
        return forward

    made._next_forward = next_forward
    return made, sent


@pytest.mark.parametrize(
    ("size", "failed", "inside", "sent"),
    [
        (2, False, False, [(None, "generate raised KeyError: 'x'")]),
        (2, False, True, [("reported", "'x'")]),
        (1, False, False, []),
        (2, True, False, []),
    ],
)
def test_peers_hear_of_an_error_that_leaves_generate(size, failed, inside, sent):
    """Peers learn of an error that leaves `generate` where they wait: within a forward, or between two forwards.

    If a step has already failed, no peer waits.
    """
    made, heard = generation(size, failed)
    made._inside = inside
    made._report_failure(KeyError("x"))
    assert heard == sent


@pytest.mark.parametrize("error", [None, KeyError("x"), InputError("on all ranks")], ids=repr)
def test_generate_ends_however_it_ends(error, monkeypatch):
    """`generate` resets its state however it ends, and the next one starts outside of any forward.

    An error of this package is raised on all ranks already, so the peers are not notified again.
    """
    made, _ = generation()
    sent, finished = [], []
    monkeypatch.setattr(forward_sync.GenerationSync, "_random_state_of_tp", lambda self: contextlib.nullcontext())
    made._report_failure, made._finish, made._inside = sent.append, lambda: finished.append(True), True

    def generate():
        assert (made._depth, made._inside) == (1, False)
        if error is not None:
            raise error
        return "tokens"

    given = inspect.signature(lambda inputs=None, **kwargs: None).bind_partial()
    with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
        assert made._run(given, generate) == "tokens"
    assert made._depth == 0
    assert sent == ([error] if isinstance(error, KeyError) else [])
    assert finished == [True] * (error is None)


@pytest.mark.parametrize("name", ["inputs", "input_ids", "inputs_embeds"])
def test_a_batch_of_no_sequences_is_returned_as_its_ids(name):
    """The ids of a batch without sequences are returned, whichever argument holds it.

    A scalar has no sequences to count.
    """
    signature = inspect.signature(lambda inputs=None, **kwargs: None)
    empty = torch.zeros(0, 3, dtype=torch.int64)
    assert forward_sync._empty(signature.bind_partial(**{name: empty})) is empty
    found = forward_sync._empty(signature.bind_partial(**{name: torch.zeros(0, 3)}))
    assert (found.shape, found.dtype) == ((0, 0), torch.int64)
    for other in (torch.zeros(1, 3), torch.tensor(0), None, "text"):
        assert forward_sync._empty(signature.bind_partial(**{name: other})) is None


def test_random_states_are_put_back_as_they_were():
    state = forward_sync._random_state(torch.device("cpu"))
    wanted = torch.rand(4)
    forward_sync._set_random_state(state, torch.device("cpu"))
    assert torch.equal(torch.rand(4), wanted)
    assert state.dtype == torch.int64
