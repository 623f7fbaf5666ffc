"""Test replaced parameters of experts: for one call (`functional_call`), or by assignment."""

# ruff: noqa: F811

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from ep_moe import ConfigError, ExpertMap, InputError, MoEConfig, MoELayer
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.parts import Expert
from ep_moe.weights.replaced import attach_assigned_parameters
from tests.fixtures.expert_weights import REDUNDANT, shape
from tests.fixtures.helpers import same_bits
from tests.fixtures.single_layer import HIDDEN, INNER, context, full, rows_of  # noqa: F401 (a fixture)


def made(context, **options):
    torch.manual_seed(0)
    return MoELayer(full(), context, **options)


def doubled(layer, x):
    """Return the layer's result and gradients after its parameters were doubled in place."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)
    out = layer(x)
    out.square().sum().backward()
    return out.detach(), {name: parameter.grad for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("twice", [False, True])
def test_functional_call_computes_with_the_given_parameters(context, twice):
    expert_map = ExpertMap.from_ranks([[0, 1, 2, 3, 4, 5, 0]], 6, allow_duplicates=True) if twice else None
    layer, x = made(context, expert_map=expert_map), rows_of(9)
    before = copy.deepcopy({name: parameter.detach() for name, parameter in layer.named_parameters()})
    own = layer(x).detach()
    given = {name: (2 * tensor).requires_grad_() for name, tensor in before.items()}
    found = torch.func.functional_call(layer, given, (x,))
    found.square().sum().backward()
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert same_bits(layer(x).detach(), own), "its own parameters are as before"
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, before[name])
    wanted, gradients = doubled(layer, x)
    torch.testing.assert_close(found.detach(), wanted)
    for name, tensor in given.items():
        torch.testing.assert_close(tensor.grad, gradients[name])


MISFITS = {
    "rows of gate and up shifted": {"3.w1": (INNER + 2, HIDDEN), "3.w3": (INNER - 2, HIDDEN)},
    "one row": {"3.w1": (1, HIDDEN)},
    "transposed": {"3.w2": (INNER, HIDDEN)},
    "another dtype": {"3.w1": torch.bfloat16},
    "codes": {"3.w1": torch.int8},
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_functional_call_with_tensors_that_do_not_fit_is_refused(context, misfit):
    """Kernels read gate and up, and all experts, as one tensor: other sizes would shift rows without an error."""
    layer, x = made(context), rows_of(9)
    own, given = layer(x).detach(), {}
    for name, other in MISFITS[misfit].items():
        right = layer.expert_weights.get_parameter(name).detach()
        odd = right.to(other) if isinstance(other, torch.dtype) else torch.ones(other)
        assert odd.shape != right.shape or odd.dtype != right.dtype
        given[f"expert_weights.{name}"] = odd
    with pytest.raises(
        InputError, match=r"expert_weights\.\d\.w\d must be float32 \[.*\] as .*, got .*functional_call"
    ):
        torch.func.functional_call(layer, given, (x,))
    assert same_bits(layer(x).detach(), own)


def test_data_of_another_shape_is_refused(context):
    """`copy_` would broadcast it to all rows of the expert."""
    layer, x = made(context), rows_of(9)
    expert = layer.expert_weights.get_submodule("3")
    expert.w1.data = torch.ones(1, expert.w1.shape[1])
    with pytest.raises(InputError, match=r"expert_weights\.3\.w1\.data must be \[\d+, \d+\], got \[1, \d+\]"):
        layer(x)


@pytest.mark.parametrize("way", ["data", "parameter"])
def test_experts_that_swap_their_tensors(context, way):
    """Each expert gets the values that the other had before any slot was written."""
    layer, wanted, x = made(context), made(context), rows_of(9)
    experts = [layer.expert_weights.get_submodule(str(expert)) for expert in (1, 3, 4)]
    before = [expert.w1.detach().clone() for expert in experts]
    one, two, three = experts  # no name keeps a tensor: slots that user code references are not written again
    if way == "data":
        one.w1.data, two.w1.data, three.w1.data = two.w1.data, three.w1.data, one.w1.data
    else:
        one.w1, two.w1, three.w1 = two.w1, three.w1, one.w1
    with torch.no_grad():
        for number, values in zip((1, 3, 4), [*before[1:], before[0]], strict=True):
            wanted.expert_weights.get_submodule(str(number)).w1.copy_(values)
    for _ in range(2):
        assert same_bits(layer(x).detach(), wanted(x).detach())


def test_an_assigned_parameter_is_the_layers_after_functional_call(context):
    """A parameter that is assigned before `functional_call` and hidden by it becomes the layer's in the next call."""
    layer, x = made(context), rows_of(9)
    expert = layer.expert_weights.get_submodule("3")
    expert.w1 = nn.Parameter(torch.ones_like(expert.w1))
    given = torch.full_like(expert.w1, 2.0).detach()
    torch.func.functional_call(layer, {"expert_weights.3.w1": given}, (x,))
    layer.update_expert(3, w13=torch.zeros(2 * len(expert.w1), expert.w1.shape[1]), w2=torch.zeros_like(expert.w2))
    assert (given == 2).all(), "the caller's tensor is not the layer's memory"
    assert not expert.w1.any()
    wanted = made(context)
    wanted.update_expert(3, w13=torch.zeros(2 * len(expert.w1), expert.w1.shape[1]), w2=torch.zeros_like(expert.w2))
    assert same_bits(layer(x).detach(), wanted(x).detach())


def test_an_assigned_parameter_is_the_layers(context):
    """An assigned parameter becomes the layer's, in the memory that kernels read, so all other readers find it."""
    layer, x = made(context), rows_of(9)
    layer(x)
    expert = layer.expert_weights.get_submodule("3")
    with torch.no_grad():
        layer.expert_weights.get_submodule("3").w1.mul_(3)
        wanted = layer(x)
        expert.w1.div_(3)
    expert.w1 = nn.Parameter(expert.w1.detach() * 3)
    out = layer(x)
    torch.testing.assert_close(out, wanted)
    out.sum().backward()
    assert expert.w1.grad.abs().max() > 0
    torch.testing.assert_close(layer.expert_weights.slot(3)["w13"][: len(expert.w1)], expert.w1.detach())
    expert.w2 = nn.Parameter(expert.w2.detach() * 2)
    numbers = expert.w2.detach().clone()
    layer.to(torch.float64)
    assert torch.equal(expert.w2, numbers.double()), "also where no call came between"
    layer.update_expert(3, w2=numbers * 5)
    torch.testing.assert_close(expert.w2.detach(), (numbers * 5).double())


@pytest.mark.parametrize("tool", ["prune", "weight_norm", "spectral_norm", "del"])
def test_what_takes_a_parameter_away_is_refused(context, tool):
    layer, x = made(context), rows_of(9)
    expert, wanted = layer.expert_weights.get_submodule("3"), layer(x).detach()
    tools = {
        "prune": lambda: prune.l1_unstructured(expert, "w2", amount=0.5),
        "weight_norm": lambda: parametrizations.weight_norm(expert, "w2"),
        "spectral_norm": lambda: spectral_norm(expert, "w2"),
        "del": lambda: expert.__delattr__("w2"),
    }
    with pytest.raises(ConfigError, match=r"w2(_orig)? of an expert cannot be removed.*fully_shard"):
        tools[tool]()
    assert same_bits(layer(x).detach(), wanted)


WAYS = {
    "setattr": lambda weights, other: setattr(weights, "3", other),
    "dict": lambda weights, other: weights._modules.update({"3": other}),
    "swap": lambda weights, other: weights._modules.__setitem__("3", weights.get_submodule("4")),
    "add_module": lambda weights, other: weights.add_module("3", nn.Linear(4, 4)),
    "another number": lambda weights, other: weights.add_module("7", other),
    "delattr": lambda weights, other: delattr(weights, "3"),
    "pop": lambda weights, other: weights._modules.pop("3"),
    "clear": lambda weights, other: weights._modules.clear(),
    "popitem": lambda weights, other: weights._modules.popitem(),
    "setdefault": lambda weights, other: weights._modules.setdefault("7", other),
    "or": lambda weights, other: weights._modules.__ior__({"3": other}),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_experts_module_is_not_replaced(context, way):
    """An experts module cannot be replaced.

    Kernels read one tensor of all experts, and would continue with the old weights.
    """
    layer, other = made(context), made(context)
    before = list(layer.expert_weights.named_children())
    with pytest.raises(
        ConfigError, match=r"expert \d cannot be replaced by another module.*update_expert\(\d, w13=\.\.\."
    ):
        WAYS[way](layer.expert_weights, other.expert_weights.get_submodule("3"))
    assert list(layer.expert_weights.named_children()) == before


def test_expert_weights_are_not_copied(context):
    with pytest.raises(ConfigError, match=r"cannot be copied or pickled.*state_dict"):
        copy.deepcopy(made(context).expert_weights)


def test_a_dict_of_parameters_is_assigned_or_refused(context):
    layer, x = made(context), rows_of(9)
    expert = layer.expert_weights.get_submodule("3")
    with torch.no_grad():
        expert.w1.mul_(3)
        wanted = layer(x)
        expert.w1.div_(3)
    thrice = nn.Parameter(expert.w1.detach() * 3)
    for refused in (lambda: setattr(expert, "_parameters", {"w1": thrice}), lambda: setattr(expert, "w1", None)):
        with pytest.raises(ConfigError, match=r"w1.* of an expert cannot be removed"):
            refused()
    expert._parameters.update(w1=thrice)
    torch.testing.assert_close(layer(x), wanted)


def test_another_layers_experts_are_not_assigned(context):
    """Another layer's experts cannot be assigned, because the kernel would continue with the old ones."""
    layer, other, x = made(context), made(context), rows_of(9)
    with pytest.raises(ConfigError, match=r"expert_weights cannot be replaced.*call one layer in both places"):
        other.expert_weights = layer.expert_weights
    for name, parameter in layer.expert_weights.named_parameters():
        expert, _, part = name.partition(".")
        setattr(other.expert_weights.get_submodule(expert), part, parameter)
    other.router = layer.router
    with torch.no_grad():
        layer.expert_weights.get_submodule("3").w1.mul_(3)
    assert same_bits(layer(x).detach(), other(x).detach()), "tied by parameter"


def test_a_parameter_on_another_device_is_refused(context):
    """A parameter on another device is refused.

    accelerate's cpu_offload leaves such parameters. Its hooks wait for a call of the expert's module, which never
    comes.
    """
    layer, x = made(context), rows_of(9)
    wanted, parameters = layer(x).detach(), layer.expert_weights.get_submodule("3")._parameters
    own, parameters["w1"] = parameters["w1"], nn.Parameter(parameters["w1"].to("meta"))
    with pytest.raises(InputError, match=r"expert_weights\.3\.w1 is on meta and its layer on .*cpu_offload"):
        layer(x)
    parameters["w1"] = own
    assert same_bits(layer(x).detach(), wanted)


@pytest.mark.parametrize("scheme", ["fp8_block", "mxfp4", "int4"])
def test_codes_that_a_loop_over_parameters_converts_are_refused(scheme, context):
    """Codes that a loop over parameters has converted are refused, because they would be read as other numbers."""
    config = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=2, top_k=1)
    layer = MoELayer(config, context, quantization=scheme, dtype=torch.bfloat16)
    x = torch.ones(3, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = layer(x)
        for name, parameter in layer.expert_weights.named_parameters():
            own = parameter.data
            other = torch.int32 if own.dtype == torch.uint8 else torch.float16
            for wrong in (own.to(other), own[:1]):
                parameter.data = wrong
                with pytest.raises(InputError, match=rf"expert_weights\.{name} must be .*exclude expert_weights"):
                    layer(x)
            parameter.data = own
        assert same_bits(layer(x), wanted)
        layer.expert_weights.w2 = None
        with pytest.raises(InputError, match=r"expert_weights\.w2 was removed; build the layer again"):
            layer(x)


def test_codes_that_are_to_learn_are_refused(context):
    """Codes that require gradients are refused, because gradients of float8 codes would be missing silently."""
    config = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=2, top_k=1)
    layer = MoELayer(config, context, quantization="fp8_block", dtype=torch.bfloat16)
    x, alone = torch.ones(3, 128, dtype=torch.bfloat16), layer.expert_weights
    alone.requires_grad_(True)
    with pytest.raises(InputError, match=r"expert_weights\.w13 requires a gradient.*fp8_block.*do not train"):
        layer(x)
    with torch.no_grad():
        layer(x)
    alone.requires_grad_(False)
    layer(x).float().sum().backward()
    assert layer.router.weight.grad.isfinite().all()


@pytest.mark.parametrize("called", [False, True])
def test_one_parameter_of_two_matrices_is_not_trained(called, context):
    """Calls without gradients serve a parameter of two experts. `functional_call` may pass one tensor twice."""
    layer, x = MoELayer(full(), context), rows_of(7)
    experts = layer.expert_weights._modules
    if called:
        layer(x)
    experts["1"].w2 = experts["0"].w2
    for _ in range(2):
        with pytest.raises(InputError, match=r"weights\.0\.w2 and expert_weights\.1\.w2 are one parameter"):
            layer(x)
    with torch.no_grad():
        served = layer(x)
    with pytest.raises(InputError, match="are one parameter"):
        layer(x)
    experts["1"].w2 = nn.Parameter(experts["0"].w2.detach().clone())
    assert torch.equal(layer(x), served)
    one = experts["0"].w2.detach().clone().requires_grad_()
    given = {"expert_weights.0.w2": one, "expert_weights.1.w2": one}
    torch.func.functional_call(layer, given, (x,)).sum().backward()
    assert one.grad is not None


def test_an_assigned_parameter_of_another_shape_is_refused(context):
    expert = made(context).expert_weights.get_submodule("3")
    with pytest.raises(InputError, match=r"w2 of an expert must be replaced by a parameter of its shape \[16, 8\]"):
        expert.w2 = nn.Parameter(torch.zeros(8, 16))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_expert_in_two_slots_of_a_rank_has_one_gradient(compiled, context):
    """An expert in two slots of a rank has one gradient.

    Compiled graphs stack the parameters, as functional_call does, so each slot's gradient must count once.
    """
    found = []
    for expert_map in (None, ExpertMap.from_ranks([[0, 1, 2, 3, 4, 5, 0]], 6, allow_duplicates=True)):
        layer = made(context, expert_map=expert_map).bfloat16()
        call = torch.compile(layer, backend="eager") if compiled else layer
        call(rows_of(9).bfloat16()).float().square().sum().backward()
        found.append(layer.expert_weights.get_submodule("0").w2.grad.float())
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[1], found[0], rtol=0.0, atol=0.03 * float(found[0].abs().max()))


def by_data(layer):
    """Replace `.data`, as code for an evaluation with averaged weights does. Return a function that restores it."""
    kept = [parameter.data for parameter in layer.parameters()]
    for parameter in layer.parameters():
        parameter.data = 2 * parameter.data

    def back():
        for parameter, data in zip(layer.parameters(), kept, strict=True):
            parameter.data = data

    return back


def by_assignment(layer):
    experts = [m for m in layer.expert_weights.children() if isinstance(m, Expert)]
    kept = [(module, name, parameter) for module in experts for name, parameter in module.named_parameters()]
    for module, name, parameter in kept:
        setattr(module, name, nn.Parameter(2 * parameter.detach()))

    def back():
        for module, name, parameter in kept:
            setattr(module, name, parameter)

    return back


def by_tensors_of_a_state(layer):
    state = layer.state_dict()
    for parameter in layer.parameters():
        parameter.data = 2 * parameter.data
    return lambda: layer.load_state_dict(state)


def by_one_assignment(layer):
    """Of one expert's parameter, beside a state that holds the memory of all."""
    state, expert = layer.state_dict(), layer.expert_weights.get_submodule("3")
    expert.w1 = nn.Parameter(2 * expert.w1.detach())
    return lambda: layer.load_state_dict(state)


@pytest.mark.parametrize("swap", [by_data, by_assignment, by_tensors_of_a_state, by_one_assignment])
@pytest.mark.parametrize("twice", [False, True])
def test_numbers_that_are_put_back_are_the_former_ones(context, swap, twice):
    """Weights that are restored have their former values.

    New weights are written to other memory than the tensors that the caller keeps.
    """
    expert_map = ExpertMap.from_ranks([[0, 1, 2, 3, 4, 5, 0]], 6, allow_duplicates=True) if twice else None
    layer, x = made(context, expert_map=expert_map), rows_of(9)
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    own, early = layer(x).detach(), layer(x)
    for number in range(2):
        back = swap(layer)
        assert not torch.allclose(layer(x), own)
        if swap is by_data and not number:
            early.sum().backward()  # uses the weights that the forward used
        back()
        assert same_bits(layer(x).detach(), own)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, before[name])
    if swap is by_data:
        found = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
        layer.zero_grad()
        layer(x).sum().backward()
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, found[name]), name


@pytest.mark.parametrize("moved", ["all", "one", "one assigned"])
def test_numbers_that_nobody_keeps_are_written_where_kernels_read_them(context, moved):
    """New data that the caller does not keep is copied to where kernels read.

    Recorded calls hold that address.
    """
    layer, x = made(context), rows_of(9)
    layer(x)
    expert, addresses = layer.expert_weights.get_submodule("3"), layer.expert_weights.addresses
    for _ in range(3):
        before = layer(x).detach()
        for parameter in layer.parameters() if moved == "all" else [expert.w1] if moved == "one" else []:
            parameter.data = 0.5 * parameter.data
        if moved == "one assigned":
            expert.w1 = nn.Parameter(0.5 * expert.w1.detach())
        assert not torch.allclose(layer(x), before)
        assert layer.expert_weights.addresses == addresses


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_assigned_parameter_of_several_ranks_is_guarded(ranks, context, monkeypatch):
    """An assigned parameter is marked as different between ranks, because optimizers must know it.

    On other ranks the same gradient belongs to another expert.
    """
    weights = made(context).expert_weights
    monkeypatch.setattr(weights.gradient_sum, "ep", SimpleNamespace(size=ranks))
    assigned = nn.Parameter(torch.ones_like(weights.get_submodule("3").w1))
    weights.get_submodule("3").w1 = assigned
    attach_assigned_parameters(weights)
    assert weights.get_submodule("3").w1 is assigned
    assert hasattr(assigned, "differs_between_ranks") is (ranks > 1)


@pytest.mark.parametrize("frozen", ["w1", "w2", "w3_bias"])
def test_what_is_frozen_on_the_meta_device_stays_so(frozen):
    """Parameters with memory are others."""
    weights = ExpertWeights(shape(), REDUNDANT, device=torch.device("meta"))
    for name, parameter in weights.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    weights.to_empty(device="cpu")
    learns = {name: parameter.requires_grad for name, parameter in weights.named_parameters()}
    assert learns == {name: not name.endswith(frozen) for name in learns}
    assert set(learns.values()) == {False, True}
