"""Test how MoELayer is made in one process: its device, its memory, and its description."""

# ruff: noqa: F811

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ep_moe import ConfigError, EPContext, ExpertMap, ExpertsOptions, InputError, MoELayer, RankLayout
from ep_moe.all2all.torch_collectives import LocalDispatcher
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.selection.explain import explain
from tests.fixtures.single_layer import CPU, EXPERTS, HIDDEN, INNER, context, full, shape  # noqa: F401 (a fixture)


def by_device(context: EPContext) -> MoELayer:
    with torch.device("meta"):
        return MoELayer(full(), context)


def by_argument(context: EPContext) -> MoELayer:
    return MoELayer(full(), context, device=torch.device("meta"))


@pytest.mark.parametrize("make", [by_device, by_argument])
def test_meta_then_to_empty_then_load(context, make):
    first = MoELayer(full(), context)
    second = make(context)
    assert all(t.is_meta for t in [*second.parameters(), *second.buffers()])
    second.to_empty(device=CPU)
    for tensor in second.parameters():
        tensor.data.fill_(torch.nan)
    second.load_state_dict(first.state_dict())
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(second(x), first(x))
    assert torch.equal(second.placement.expert_load, first.placement.expert_load)


def test_to_empty_without_recursion_leaves_the_parts_as_they_are(context):
    """`to_empty(recurse=False)` leaves submodules unchanged, as loops over `model.modules()` rely on.

    Such a loop allocates memory for what each module holds itself.
    """
    layer = MoELayer(shape(), context)
    before = {name: tensor.data_ptr() for name, tensor in layer.named_parameters()}
    layer.to_empty(device="cpu", recurse=False)
    assert {name: tensor.data_ptr() for name, tensor in layer.named_parameters()} == before


@pytest.mark.parametrize(("options", "numbers"), [({}, 1), ({"quantization": "fp8_block"}, 1), ({"device": "meta"}, 0)])
def test_a_layer_takes_one_number_of_the_default_generator(context, options, numbers):
    """A layer takes one number of the default generator (none on meta), whatever it holds.

    What a model draws next therefore does not depend on the layout.
    """
    torch.manual_seed(7)
    for _ in range(numbers):
        torch.randint(2**62, ())
    wanted = torch.rand(3)
    torch.manual_seed(7)
    MoELayer(dataclasses.replace(full(), hidden_size=128, intermediate_size=128), context, **options)
    assert torch.equal(torch.rand(3), wanted)


def test_layer_on_meta_says_what_to_do(context):
    with pytest.raises(InputError) as error:
        by_device(context)(torch.ones(3, HIDDEN))
    assert "meta device; call to_empty(device=...) and load weights first" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plan_is_what_is_allocated(context, dtype):
    on_meta = MoELayer(full(), context, dtype=dtype, device=torch.device("meta"))
    before = on_meta.plan()
    assert all(tensor.is_meta for tensor in on_meta.parameters())
    layer = on_meta.to_empty(device=CPU)
    assert layer.plan() == before
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    assert set(before) == {"experts", "router", "placement", "shared_experts", "workspace", "transport"}
    held = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in [*layer.parameters(), *layer.buffers()]}
    assert sum(before.values()) == sum(storage.nbytes() for storage in held.values())
    assert before["experts"] == dtype.itemsize * EXPERTS * (3 * INNER * HIDDEN + 2 * INNER + HIDDEN)


def test_context_sums_the_plans_of_living_layers(context):
    first, second = MoELayer(shape(), context), MoELayer(full(), context)
    assert context.plan()["experts"] == first.plan()["experts"] + second.plan()["experts"]
    assert context.plan()["shared_experts"] == second.plan()["shared_experts"]
    del second
    assert context.plan() == first.plan()


def test_buffers_that_layers_share_count_once(context, monkeypatch):
    layers = [MoELayer(shape(), context) for _ in range(3)]
    for layer, own in zip(layers, ({"a": 5}, {"a": 7, "b": 1}, {"b": 1}), strict=True):
        monkeypatch.setattr(layer, "_transport_bytes", lambda _tokens, own=own: own)
    assert context.plan()["transport"] == 7 + 1
    layers[0]._small_batch_kernels = {"another": SimpleNamespace(workspace_bytes=lambda: 4096)}
    assert layers[0].plan()["workspace"] == 4096, "of the kernel that needs most"


def test_a_layer_that_was_refused_is_not_in_the_plan(context):
    with pytest.raises(ConfigError) as kept:  # its traceback keeps the half-made layer alive, as in a notebook
        MoELayer(shape(), context, expert_map=ExpertMap.linear(EXPERTS, 2))
    assert context.plan() == {}
    del kept


def test_repr_tells_shape_layout_and_backends(context):
    layer = MoELayer(full(), context)
    assert layer.extra_repr() == (
        "moe0: H=16, I=8, E=6, K=2, swiglu, ep=1, etp=1, all2all=local, experts=reference, quantization=none"
    )
    text = repr(layer)
    assert "w13 [6, 16, 16], w2 [6, 16, 8], w13_bias [6, 16], w2_bias [6, 16]" in text
    assert "H=16, E=6, K=2, method=sigmoid_topk" in text
    assert "ExpertMap(E=6, R=1, slots_per_rank=6, redundant=0)" in text


def test_repr_of_a_context(context):
    layers = [MoELayer(shape(), context) for _ in range(2)]
    for layer in layers:
        layer(torch.ones(1, HIDDEN))
    assert repr(context) == (
        "EPContext(rank 0 of 1 (pp=1 dp=1 tp=1 ep=1 etp=1 replicas=1 tokens=replicated), cpu, 2 layers, 1 transports)"
    )


def test_layers_have_names(context):
    names = [MoELayer(shape(), context, name=name).name for name in (None, "blocks.1.mlp", None)]
    assert names == ["moe0", "blocks.1.mlp", "moe2"]


def test_explain_is_what_runs(context):
    layer = MoELayer(shape(), context)
    assert layer.explain() == explain(shape(), context.layout, CPU, torch.float32)
    assert [row for row in layer.explain() if row.status == "chosen"] == [layer.choice]
    assert (layer._dispatcher().name, layer.experts.name) == (layer.choice.all2all, layer.choice.experts)
    named = MoELayer(shape(), context, all2all="allgather")
    assert [row.all2all for row in named.explain() if row.status == "chosen"] == ["allgather"]
    assert named._dispatcher().name == "allgather"


def test_explain_is_of_the_present_dtype(context, monkeypatch):
    layer = MoELayer(shape(), context)
    only = dataclasses.replace(LocalDispatcher.capabilities, dtypes=frozenset({torch.float32}))
    monkeypatch.setattr(LocalDispatcher, "capabilities", only)
    assert "chosen" in {row.status for row in layer.explain()}
    rows = layer.bfloat16().explain()
    (reason,) = (row.reason for row in rows if (row.all2all, row.experts) == ("local", "reference"))
    assert reason == "local carries float32, not bfloat16"


def test_layers_of_a_context_read_the_registry_once(context):
    MoELayer(shape(), context)
    read = context._backends
    MoELayer(shape(), context)
    assert context._backends is read is not None


def test_a_plan_counts_gradients_of_what_learns(context):
    layer = MoELayer(shape(), context, options=ExpertsOptions(recompute=True))
    before = layer.plan(train_tokens=8)
    layer.router.requires_grad_(False)
    after = layer.plan(train_tokens=8)
    assert before["gradients"] - after["gradients"] == before["router"] > 0


def test_a_state_says_which_slots_of_its_map_it_has(context, monkeypatch):
    layer = MoELayer(shape(), context)
    monkeypatch.setattr(context, "layout", RankLayout(world=4, rank=3, dp=4, ep=2))  # a rank of the second EP group
    assert layer.state_dict()._metadata[""]["ep_rank"] == 1


def test_a_state_with_all_that_a_rank_holds_leaves_it_its_map(context):
    own = ExpertMap.from_ranks([[*range(1, EXPERTS), 0]], EXPERTS)
    saved, layer = MoELayer(shape(), context), MoELayer(shape(), context, expert_map=own)
    layer.load_state_dict(saved.state_dict())
    assert layer.placement.expert_map is layer.expert_weights.expert_map is own
    x = torch.randn(9, HIDDEN)
    assert torch.equal(layer(x), saved(x))


def test_a_state_of_a_map_without_room_here_lacks_experts(context):
    """A state dict of one rank of two lacks experts for one process, and torch names the missing keys."""
    layer = MoELayer(shape(), context)
    state, halves = layer.state_dict(), ExpertMap.linear(EXPERTS, 2)
    for name in [name for name in state if any(name.startswith(f"expert_weights.{e}.") for e in halves.local(1))]:
        del state[name]
    state._metadata[""]["expert_map"] = halves.to_json()
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"expert_weights\.3\.w1\""):
        layer.load_state_dict(state)
    assert layer.placement.expert_map == layer.expert_weights.expert_map == ExpertMap.linear(EXPERTS, 1)


@pytest.mark.parametrize(
    ("expert_map", "message"),
    [
        (ExpertMap.linear(5, 1), "expert_map.num_experts must be 6 for this layer and context, got 5"),
        (ExpertMap.linear(6, 2), "expert_map.num_ranks must be 1 for this layer and context, got 2"),
    ],
)
def test_map_of_another_size_is_refused(context, expert_map, message):
    with pytest.raises(ConfigError) as error:
        MoELayer(shape(), context, expert_map=expert_map)
    assert message in str(error.value)


def test_a_layer_is_not_copied(context):
    """A layer cannot be copied. Averaged models and pickles of whole modules would copy every layer."""
    layer = MoELayer(shape(), context, name="block")
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match=r"block cannot be copied or .* build another MoELayer"):
            copied(nn.Sequential(layer))
    other = MoELayer(shape(), context)
    other.load_state_dict(layer.state_dict())


def test_what_a_layer_was_made_with_is_not_replaced(context):
    """The arguments of a layer cannot be replaced, because only a part of the layer would see the change.

    For example, the router does not read the routing of a new config.
    """
    layer = MoELayer(shape(), context, name="block")
    for field in ("config", "context", "wire", "tuned", "exact"):
        with pytest.raises(ConfigError, match=rf"block: {field} cannot be replaced: .* build another MoELayer"):
            setattr(layer, field, getattr(layer, field))


def test_parameters_of_a_kernel_without_backward_require_no_gradients(context, monkeypatch):
    able = dataclasses.replace(ReferenceExperts.capabilities, differentiable=False)
    monkeypatch.setattr(ReferenceExperts, "capabilities", able)
    layer = MoELayer(shape(), context)
    assert layer.router.weight.requires_grad
    assert not any(parameter.requires_grad for parameter in layer.expert_weights.parameters())
