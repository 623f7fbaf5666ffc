"""Test how the computation of experts is identified: activations by their values, and modules off the interface."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, gelu, silu

from ep_moe import Activation, ConfigError, MoEConfig
from ep_moe.integrations import experts_probe
from ep_moe.integrations.activation_probe import WIDTH, computes, find_activation
from ep_moe.integrations.find_experts import find_experts


class Gated(nn.Module):
    """A module with the activation of transformers' experts interface."""

    has_gate, has_bias, is_transposed, is_concatenated, has_post_expert_norm = True, False, False, True, False

    def __init__(self, function):
        super().__init__()
        self._function = function

    def _apply_gate(self, h):
        return self._function(*h.chunk(2, -1))


def limited(gate, up, limit):
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def softcapped(gate, up):
    return 25 * (gate / 25).tanh() * gate.sigmoid() * 11 * (up / 11).tanh()


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda g, u: silu(g) * u, (Activation.SWIGLU, 1.702, 7.0)),
        (lambda g, u: (silu(g.float()) * u.float()).to(g.dtype), (Activation.SWIGLU, 1.702, 7.0)),
        (lambda g, u: gelu(g) * u, (Activation.GEGLU, 1.702, 7.0)),
        (lambda g, u: gelu(g, approximate="tanh") * u, (Activation.GEGLU_TANH, 1.702, 7.0)),
        (lambda g, u: limited(g, u, 10.0), (Activation.SWIGLU_LIMITED, 1.702, 10.0)),
        (lambda g, u: limited(g, u, 0.05), (Activation.SWIGLU_LIMITED, 1.702, 0.05)),
        (lambda g, u: limited(g, u, 50000.0), (Activation.SWIGLU_LIMITED, 1.702, 50000.0)),
        (lambda g, u: silu(g).clamp(max=7) * u.clamp(-7, 7), (Activation.SWIGLU_LIMITED_AFTER, 1.702, 7.0)),
        (softcapped, (Activation.SWIGLU_SOFTCAPPED, 25.0, 11.0)),
        (lambda g, u: softcapped(g.float(), u.float()).to(g.dtype), (Activation.SWIGLU_SOFTCAPPED, 25.0, 11.0)),
        (lambda g, u: silu(g) * (u + 1), (Activation.SWIGLU_CLAMPED, 1.0, 1e6)),
        (
            lambda g, u: (u.clamp(-5, 5) + 1) * g.clamp(max=5) * (1.3 * g.clamp(max=5)).sigmoid(),
            (Activation.SWIGLU_CLAMPED, 1.3, 5.0),
        ),
        (
            lambda g, u: (u.clamp(-0.02, 0.02) + 1) * g.clamp(max=0.02) * (1.3 * g.clamp(max=0.02)).sigmoid(),
            (Activation.SWIGLU_CLAMPED, 1.3, 0.02),
        ),
    ],
)
def test_an_activation_is_found_by_its_numbers(function, found):
    assert find_activation(Gated(function), "experts") == found


@pytest.mark.parametrize(
    "function",
    [
        lambda g, u: silu(u) * g,
        lambda g, u: silu(g) * (u + 2),
        lambda g, u: silu(g) * u * 1.0001,
        lambda g, u: silu(g).clamp(max=7) * u.clamp(-8, 8),
        lambda g, u: silu(g) * u.clamp(max=500000),
        lambda g, u: gelu(g) * u.roll(1, -1),
        lambda g, u: silu(g) * u / u.norm(dim=-1, keepdim=True),
        lambda g, u: g * (1.702 * g).sigmoid() * u,
    ],
)
def test_another_activation_is_refused(function):
    with pytest.raises(ConfigError, match=r"here: Gated computes none of swiglu, geglu, .* add its activation to"):
        find_activation(Gated(function), "here")


def test_an_activation_that_cannot_be_computed_alone():
    def fails(gate, up):
        raise RuntimeError("only on a GPU")

    with pytest.raises(ConfigError, match=r"cannot be computed alone .RuntimeError: only on a GPU"):
        find_activation(Gated(fails), "here")


# --- modules that are not on the interface --------------------------------------------------------------------------


class Experts(nn.Module):
    """Experts that compute the rows of each expert in turn, as transformers' own modules do."""

    def __init__(self, experts=6, hidden=40, inner=24):
        super().__init__()
        self.num_experts, self.hidden_size, self.inner = experts, hidden, inner
        self.first = nn.Parameter(torch.randn(experts, 2 * inner, hidden))
        self.second = nn.Parameter(torch.randn(experts, hidden, inner))

    def forward(self, rows, ids, weights):
        out = torch.zeros_like(rows)
        for expert in ids.unique().tolist():
            row, choice = (ids == expert).nonzero(as_tuple=True)
            out.index_add_(0, row, self.expert(expert, rows[row]) * weights[row, choice, None])
        return out

    def expert(self, expert, x):
        gate, up = (x.view(-1, self.hidden_size) @ self.first[expert].mT).chunk(2, -1)
        return (silu(gate) * up).view(-1, self.inner) @ self.second[expert].mT


class UpFirst(Experts):
    def expert(self, expert, x):
        up, gate = (x @ self.first[expert].mT).chunk(2, -1)
        return (silu(gate) * up) @ self.second[expert].mT


class ByTurns(Experts):
    def expert(self, expert, x):
        h = x @ self.first[expert].mT
        return (silu(h[:, ::2]) * h[:, 1::2]) @ self.second[expert].mT


class Reversed(Experts):
    def expert(self, expert, x):
        return super().expert(self.num_experts - 1 - expert, x)


class Scaled(Experts):
    def expert(self, expert, x):
        return super().expert(expert, x) * (1 + 1e-3 * (expert == self.num_experts - 1))


class WithResidual(Experts):
    def forward(self, rows, ids, weights):
        return super().forward(rows, ids, weights) + rows


class Unweighted(Experts):
    def forward(self, rows, ids, weights):
        return super().forward(rows, ids, torch.ones_like(weights))


class Clamped(Experts):
    """Otherwise from numbers on that no row of usual size has."""

    def expert(self, expert, x):
        return super().expert(expert, x.clamp(-100, 100))


class WithDropout(Experts):
    def expert(self, expert, x):
        return super().expert(expert, dropout(x, 0.5, self.training))


class WithDropoutModule(Experts):
    def __init__(self, rate=0.5):
        super().__init__()
        self.dropout = nn.Dropout(rate)

    def forward(self, rows, ids, weights):
        return self.dropout(super().forward(rows, ids, weights))


class FailsInTraining(Experts):
    def forward(self, rows, ids, weights):
        if self.training:
            raise RuntimeError("only for evaluation")
        return super().forward(rows, ids, weights)


class GatedByModule(Gated):
    def __init__(self, rate):
        super().__init__(lambda gate, up: self.act_fn(gate) * up)
        self.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(rate))


class GateFailsInTraining(Gated):
    def _apply_gate(self, h):
        if self.training:
            raise RuntimeError("only for evaluation")
        return super()._apply_gate(h)


@pytest.mark.parametrize("training", [False, True])
def test_a_gate_that_differs_in_training_is_refused(training):
    """Dropout of a gate is refused, in either mode of the module. Modes and random state stay as they were."""
    before = torch.get_rng_state()
    for module in (GatedByModule(0.5), GateFailsInTraining(lambda gate, up: silu(gate) * up)):
        module.train(training)
        with pytest.raises(ConfigError, match=rf"here: {type(module).__name__} computes something else in training"):
            find_activation(module, "here")
        assert not computes(module, MoEConfig(hidden_size=16, intermediate_size=16, num_experts=2, top_k=1))
        assert {each.training for each in module.modules()} == {training}
    assert torch.equal(torch.get_rng_state(), before)
    assert find_activation(GatedByModule(0.0).train(training), "here").activation is Activation.SWIGLU


@pytest.mark.parametrize("kind", [Experts, ByTurns])
@pytest.mark.parametrize("sizes", [(6, 40, 24), (6, 40, 40), (40, 40, 24), (1, 4, 6), (2, 6, 6)], ids=str)
@torch.no_grad()
def test_a_module_is_recognised_by_what_it_computes(kind, sizes):
    module = kind(*sizes)
    ((_, found),) = find_experts(nn.ModuleDict({"experts": module})).items()
    assert (found.layout.experts, *found.sizes, found.layout.tensors[0].interleaved) == (*sizes, kind is ByTurns)
    assert found.activation == (Activation.SWIGLU, 1.702, 7.0)
    with torch.device("meta"):
        assert find_experts(nn.ModuleDict({"experts": kind(*sizes)})) == {"experts": found}


@pytest.mark.parametrize("kind", [UpFirst, Reversed, Scaled, WithResidual, Unweighted, Clamped])
def test_a_module_that_computes_otherwise_is_no_experts(kind):
    assert find_experts(nn.ModuleDict({"experts": kind()})) == {}


@pytest.mark.parametrize("kind", [WithDropout, WithDropoutModule, FailsInTraining])
@pytest.mark.parametrize("training", [False, True])
def test_a_module_that_computes_otherwise_in_training_is_refused(kind, training):
    model = nn.ModuleDict({"here": kind().train(training)})
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=r"here: \w+ computes something else in training, .* set its rate to 0"):
        find_experts(model)
    assert torch.equal(torch.get_rng_state(), before), "the model's own random numbers"
    assert list(find_experts(nn.ModuleDict({"here": WithDropoutModule(rate=0.0)}))) == ["here"]


def test_a_layer_that_computes_otherwise_than_the_others():
    model = nn.ModuleDict({"first": Experts(), "second": Experts()})
    model["second"].expert = lambda expert, x: torch.tanh(x)
    with pytest.raises(ConfigError, match=r"second: Experts computes no Activation .* as others of its class"):
        find_experts(model)


def test_an_id_of_no_expert_stands_for_the_row_or_for_nothing():
    x = torch.randn(3, 4, dtype=torch.float64)

    def found(out):
        return experts_probe._Probe.zero_experts(
            SimpleNamespace(
                _tried=({}, x), _layout=SimpleNamespace(experts=4), _module=nn.Identity(), _call=lambda *_: out
            )
        )

    assert found(0.5 * x) is True
    assert found(0 * x) is False
    with pytest.raises(ConfigError, match="Identity gives ids of no expert a meaning"):
        found(2 * x)


@pytest.mark.parametrize(
    ("experts", "hidden", "inner", "small"),
    [
        (8, 4096, 1024, (2 * WIDTH, WIDTH)),
        (2 * WIDTH, 4096, 1024, (2 * WIDTH + 1, WIDTH)),  # no size equals E by chance
        (WIDTH, 4096, 1024, (2 * WIDTH, WIDTH + 1)),
        (8, 4096, 4096, (2 * WIDTH, 2 * WIDTH)),  # equal sizes stay equal
        (4 * WIDTH, 4 * WIDTH, 1024, (4 * WIDTH, WIDTH)),
        (4 * WIDTH, 4096, 4 * WIDTH, (2 * WIDTH, 4 * WIDTH)),
        (2, 2, 1024, None),  # sizes too small to differ
        (2, 4096, 2, None),
    ],
)
def test_a_probe_has_sizes_that_tell_attributes_apart(experts, hidden, inner, small):
    assert experts_probe._small(experts, hidden, inner) == small
    if small is None:
        layout = SimpleNamespace(experts=experts, gated=True)
        assert experts_probe.identify(nn.Identity(), layout, hidden, inner) is None
        assert experts_probe.identify_block(nn.Identity(), layout, hidden, inner) is None
