"""Test what a transformers module lends to its layer: which tensors, in which layout, and on which ranks."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ep_moe import ParallelConfig
from ep_moe.errors import ConfigError
from ep_moe.integrations import ep_implementation
from ep_moe.integrations.ep_implementation import Borrower, BorrowingLayer, borrowing_layers
from ep_moe.weights.borrowed import BorrowedWeights

E, H, INNER = 3, 8, 16


def experts(*, gate=True, bias=False, transposed=False, interleaved=False, **more):
    """Return a module with parameters, and the same numbers in our layout."""
    rows = INNER * (2 if gate else 1)
    own = {"w13": torch.randn(E, rows, H), "w2": torch.randn(E, H, INNER)}
    own |= {"w13_bias": torch.randn(E, rows), "w2_bias": torch.randn(E, H)} if bias else {}

    def held(name):
        tensor = own[name]
        if interleaved and name.startswith("w13"):
            tensor = torch.stack(tensor.chunk(2, 1), 2).flatten(1, 2)
        return tensor.mT.contiguous() if transposed and not name.endswith("_bias") else tensor

    first = "gate_up_proj" if gate else "up_proj"
    names = {"w13": first, "w2": "down_proj", "w13_bias": f"{first}_bias", "w2_bias": "down_proj_bias"}
    flags = {
        "has_gate": gate, "has_bias": bias, "is_transposed": transposed, "is_concatenated": not interleaved,
        "config": SimpleNamespace(num_experts_per_tok=2),
    }  # fmt: skip
    return SimpleNamespace(**{names[name]: held(name) for name in own}, **flags | more), own


class Layer:
    """A stand-in for the layer that a borrower makes. It keeps the tensors that it was lent."""

    def __init__(self, config, dtype, trains):
        self.config, self.dtype, self.trains, self.name = config, dtype, trains, "a layer"
        self.expert_weights = self

    @contextmanager
    def borrow(self, tensors):
        self.lent = tensors
        yield

    def forward_routed(self, x, routing):
        self.routing = routing
        return x

    def _refuse(self, text):
        raise ConfigError(text)


@pytest.fixture
def borrower(monkeypatch):
    """Return a function that makes a borrower, over a layer whose kernel has a backward or not."""

    def make(module, *, trains=True, top_k=None):
        config = lambda experts, kind, most: SimpleNamespace(top_k=most, num_experts=E)  # noqa: E731
        monkeypatch.setattr(ep_implementation, "config_of", config)
        monkeypatch.setattr(Borrower, "_make", lambda self, config, dtype, trains: Layer(config, dtype, trains))
        monkeypatch.setattr(ep_implementation, "_trains", lambda layer: trains or layer.trains)
        return Borrower(module, "context", SimpleNamespace(top_k=top_k))

    return make


@pytest.mark.parametrize(
    "form",
    [
        {}, {"bias": True}, {"gate": False}, {"gate": False, "bias": True}, {"transposed": True},
        {"interleaved": True, "bias": True}, {"transposed": True, "interleaved": True, "bias": True},
        {"gate": False, "interleaved": True},
    ],
    ids=str,
)  # fmt: skip
def test_the_numbers_that_are_lent_are_in_our_layout(form, borrower):
    """Lent tensors are in our layout. A module without a gate alternates no rows, whatever its flag says."""
    module, own = experts(**form | ({"interleaved": False} if not form.get("gate", True) else {}))
    module.is_concatenated = not form.get("interleaved", False)
    made = borrower(module)
    made(torch.ones(1, H), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))
    assert made.layer.lent.keys() == own.keys()
    for name, tensor in own.items():
        assert torch.equal(made.layer.lent[name], tensor), name
        assert made.layer.lent[name].is_contiguous()


def test_numbers_at_an_odd_address_are_lent_aligned(borrower):
    """Tensors at an unaligned address are lent as aligned copies, because kernels read 16 bytes at a time."""
    module, own = experts()
    storage = torch.empty(own["w2"].numel() + 1)
    module.down_proj = storage[1:].view(own["w2"].shape).copy_(own["w2"])
    made = borrower(module)
    made(torch.ones(1, H), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))
    assert made.layer.lent["w2"].data_ptr() % 16 == 0
    assert torch.equal(made.layer.lent["w2"], own["w2"])


def test_there_is_room_for_the_most_experts_of_any_layer(borrower):
    module, _ = experts(config=SimpleNamespace(num_experts_per_tok=[2, 4, 3]))
    assert borrower(module).layer.config.top_k == 4
    assert borrower(module, top_k=6).layer.config.top_k == 6


@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_a_token_takes_no_more_experts_than_there_is_room_for(chosen, borrower):
    module, _ = experts()
    call = lambda: borrower(module)(  # noqa: E731
        torch.ones(1, H), torch.zeros(1, chosen, dtype=torch.int64), torch.ones(1, chosen)
    )
    if chosen <= 2:
        call()
        return
    with pytest.raises(ConfigError, match=r"the model chooses 3 experts a token, .* says 2; .*top_k=3\) before"):
        call()


def test_an_expert_that_is_chosen_twice_is_called_once(borrower):
    """A repeated expert id is merged into one route with the sum of its weights.

    A model's router may read its choices from a table, and so repeat an id.
    """
    made = borrower(experts()[0])
    made(torch.ones(1, H), torch.tensor([[1, 1]]), torch.tensor([[0.25, 0.5]]))
    assert made.layer.routing.ids.tolist() == [[1, -1]]
    assert made.layer.routing.weights.tolist() == [[0.75, 0.0]]


@pytest.mark.parametrize(("trains", "layers"), [(True, [False]), (False, [False, True])])
def test_calls_with_gradients_have_a_layer_of_their_own_where_they_must(trains, layers, borrower):
    """Calls with gradients use a separate layer only if the first one has no backward.

    `borrowing_layers` lists all layers of a model in order.
    """
    made = borrower(experts()[0], trains=trains)
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[1].__dict__["ep_moe_borrower"] = made
    assert [layer.trains for layer in borrowing_layers(model)] == layers
    model[0].__dict__["ep_moe_borrower"] = "another library's"
    assert len(borrowing_layers(model)) == len(layers)


def test_a_layer_that_cannot_train_says_why(borrower, monkeypatch):
    made_for = []

    def make(self, config, dtype, trains):
        made_for.append(trains)
        if trains:
            raise ConfigError("no kernel has a backward")
        return Layer(config, dtype, trains)

    module, _ = experts()
    borrower(module)
    monkeypatch.setattr(Borrower, "_make", make)
    monkeypatch.setattr(ep_implementation, "_trains", lambda layer: False)
    made = Borrower(module, "context", SimpleNamespace(top_k=None))
    assert (made_for, made.trained, made.no_backward) == ([False, True], None, "no kernel has a backward")


@pytest.mark.parametrize(
    ("kernel", "transport", "adjoint", "without"),
    [
        (True, True, False, None),
        (True, False, True, None),
        (True, False, False, "moves"),
        (False, True, True, "computes"),
    ],
)
def test_a_backward_is_of_the_kernel_and_of_the_transport(kernel, transport, adjoint, without, monkeypatch):
    """A layer has a backward if its kernel and its transport have one. An adjoint of the transport counts too."""
    can = SimpleNamespace
    kinds = {
        "experts": can(name="computes", capabilities=can(differentiable=kernel)),
        "dispatchers": can(name="moves", capabilities=can(differentiable=transport, adjoint=adjoint)),
    }
    monkeypatch.setattr(ep_implementation, "registry", can(load=lambda kind, name: kinds[kind]))
    choice = can(experts="a", all2all="b")
    assert ep_implementation._without_backward(choice) == without
    assert ep_implementation._trains(can(choice=choice)) is (without is None)


@pytest.mark.parametrize(("call", "name"), [("capture", "capture"), ("capture_routed", "capture_routed")])
def test_what_needs_weights_between_calls_is_refused_by_its_name(call, name):
    layer = object.__new__(BorrowingLayer)
    nn.Module.__init__(layer)
    layer.name = "a layer"
    for refused, said in ((lambda: getattr(layer, call)([1]), name), (lambda: layer._tune_kernel(None, [1]), "tune")):
        with pytest.raises(ConfigError, match=f"^{said} needs the weights of a layer, .*load_pretrained to {said} it$"):
            refused()
    assert BorrowingLayer._weights_class is BorrowedWeights


class Mesh:
    def __init__(self, size, kind="cpu"):
        self.device_type, self._size = kind, size

    def size(self):
        return self._size

    def get_group(self):
        return f"of {self._size}"


@pytest.mark.parametrize(
    ("world", "tp", "ep", "groups"),
    [
        (8, 2, 4, {"ep": "of 4", "tp": "of 2"}),
        (8, 1, 8, {"ep": "of 8"}),
        (8, 2, 1, {"tp": "of 2"}),
        (1, 1, 1, {}),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_context_has_the_ranks_of_the_meshes(device, world, tp, ep, groups, monkeypatch):
    """The context's groups are those of the device meshes. A mesh of one rank has no group."""
    made = []

    class Context:
        pass

    def from_groups(*given, **how):
        made.append((given, how))
        return Context()

    monkeypatch.setattr(ep_implementation.dist, "get_world_size", lambda: world)
    monkeypatch.setattr(ep_implementation, "local_device", lambda: "cuda:3")
    monkeypatch.setattr(ep_implementation.EPContext, "from_groups", from_groups)
    asked = SimpleNamespace(deadline_s=7.0, max_tokens=9)
    ep_implementation._Contexts().of(Mesh(ep, device), Mesh(tp, device), asked)
    how = {"device": "cuda:3" if device == "cuda" else "cpu", "deadline_s": 7.0, "max_tokens": 9}
    assert made == [((ParallelConfig(dp=world // tp, tp=tp, ep=ep), groups), how)]
