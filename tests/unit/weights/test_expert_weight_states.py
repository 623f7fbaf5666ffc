"""Test state dicts of expert weights and layers: they contain no placement, and load into any map and piece."""

import pytest
import torch
from torch import Tensor

from ep_moe import Activation, EPContext, ExpertMap, MoEConfig, MoELayer
from ep_moe.quant.schemes import SCHEMES
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.parts import etp_shard
from tests.fixtures.expert_weights import LARGE, QUANTISED, REDUNDANT, etp_link, filled_weights, shape
from tests.fixtures.helpers import fill, integer_expert, integer_routing, integer_rows, saved_expert

# --- state dict -----------------------------------------------------------------------------------------------------


def state_of_all_ranks(config: MoEConfig, expert_map: ExpertMap) -> dict[str, Tensor]:
    """Return the union over the ranks, which agree where they overlap."""
    union: dict[str, Tensor] = {}
    for rank in range(expert_map.num_ranks):
        state = filled_weights(config, expert_map, ep_rank=rank).state_dict()
        assert all(torch.equal(union[key], state[key]) for key in union.keys() & state.keys())
        union |= state
    return union


MAPS = {
    "linear": ExpertMap.linear(5, 2),
    "one rank": ExpertMap.linear(5, 1),
    "round robin": ExpertMap.round_robin(5, 3),
    "redundant": ExpertMap.redundant(5, 3, 7),
    "user's": REDUNDANT,
    "twice on a rank": ExpertMap.from_ranks([[4, 0, 4], [1, 2, 3]], 5, allow_duplicates=True),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_union_of_the_ranks_is_a_checkpoint_in_logical_order(name, bias):
    config = shape(bias=bias)
    state = state_of_all_ranks(config, MAPS[name])
    for expert in range(5):
        parts = saved_expert(config, expert)
        assert {key for key in state if key.startswith(f"{expert}.")} == {f"{expert}.{name}" for name in parts}
        for tensor, expected in parts.items():
            assert torch.equal(state[f"{expert}.{tensor}"], expected)


def test_a_rank_saves_what_it_holds_and_loads_that_again():
    config = shape()
    for rank in range(4):
        weights = filled_weights(config, REDUNDANT, ep_rank=rank)
        state = weights.state_dict()
        assert {int(key.split(".")[0]) for key in state} == set(REDUNDANT.local(rank)) - {-1}
        again = ExpertWeights(config, REDUNDANT, ep_rank=rank)
        again.load_state_dict(state)
        assert all(
            torch.equal(again.stored_tensors()[name], tensor) for name, tensor in weights.stored_tensors().items()
        )


def test_a_state_with_gate_and_up_in_one_loads():
    """A state dict with gate and up in one tensor loads. Version 0.1 wrote it."""
    config = shape()
    state = {f"{e}.{name}": tensor for e in (4, 0) for name, tensor in integer_expert(config, e).items()}
    weights = ExpertWeights(config, REDUNDANT, ep_rank=0)
    weights.load_state_dict(state)
    assert torch.equal(weights.w13[0], integer_expert(config, 4)["w13"])


@pytest.mark.parametrize("shared_out", [False, True])
def test_of_a_matrix_and_its_halves_the_matrix_is_loaded(shared_out):
    config = shape(bias=False)
    weights = filled_weights(config, ExpertMap.linear(5, 1))
    if shared_out:
        weights.unstack()
    matrix = integer_expert(config, 0, seed=1)["w13"]
    weights.load_state_dict({"0.w1": torch.zeros(16, 8), "0.w13": matrix, "0.w3": torch.zeros(16, 8)}, strict=False)
    expert = weights.get_submodule("0")
    assert torch.equal(torch.cat([expert.w1, expert.w3]), matrix)


@pytest.mark.parametrize("to", MAPS)
@pytest.mark.parametrize("of", ["linear", "redundant", "user's"])
def test_checkpoint_of_one_map_loads_into_any_other(of, to):
    config, target = shape(), MAPS[to]
    state = state_of_all_ranks(config, MAPS[of])
    for rank in range(target.num_ranks):
        weights = ExpertWeights(config, target, ep_rank=rank)
        result = weights.load_state_dict(state)
        assert not result.missing_keys
        assert not result.unexpected_keys
        for slot, expert in enumerate(weights.local_experts):
            if expert >= 0:
                for name, parameter in weights.stored_tensors().items():
                    assert torch.equal(parameter[slot], integer_expert(config, expert)[name])


@pytest.mark.parametrize("etp", [2, 4])
def test_checkpoint_loads_into_pieces(etp):
    config = shape()
    state = state_of_all_ranks(config, MAPS["redundant"])
    for rank in range(etp):
        weights = ExpertWeights(config, REDUNDANT, ep_rank=1, etp=etp_link(etp, rank))
        weights.load_state_dict(state)
        for name, parameter in weights.stored_tensors().items():
            assert torch.equal(parameter[0], etp_shard(config, name, integer_expert(config, 1)[name], etp, rank))


def test_state_dict_of_pieces_has_whole_tensors(monkeypatch):
    """The state dict of an etp piece has whole tensors. The test emulates the etp group in one process."""
    config = shape()
    ranks = [filled_weights(config, REDUNDANT, ep_rank=1, etp=etp_link(2, rank)) for rank in range(2)]

    def all_gather(pieces: list[Tensor], piece: Tensor, group: object) -> None:
        name, slot = next(
            (name, slot)
            for name, parameter in ranks[0].stored_tensors().items()
            for slot in range(ranks[0].num_slots)
            if parameter[slot].data_ptr() == piece.data_ptr()
        )
        for rank, out in enumerate(pieces):
            out.copy_(ranks[rank].get_parameter(name)[slot].detach())

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    state = ranks[0].state_dict()
    assert {int(key.split(".")[0]) for key in state} == {0, 1, 2}
    for key, tensor in state.items():
        expert, name = key.split(".")
        assert torch.equal(tensor, saved_expert(config, int(expert))[name]), key


def test_ranks_need_their_own_experts_only():
    config = shape()
    state = state_of_all_ranks(config, REDUNDANT)
    own = {key: tensor for key, tensor in state.items() if key.split(".")[0] in "04"}
    weights = ExpertWeights(config, REDUNDANT, ep_rank=0)
    weights.load_state_dict(own)
    for name, parameter in weights.named_parameters():
        assert torch.equal(parameter, own[name]), name
    without = ExpertWeights(config, REDUNDANT, ep_rank=3)
    assert without.load_state_dict({}).missing_keys == []
    assert without.state_dict() == {}


def test_missing_keys_are_reported():
    config = shape()
    state = state_of_all_ranks(config, REDUNDANT)
    del state["4.w2"], state["0.w3"], state["3.w2"]  # rank 0 holds experts 4 and 0
    weights = ExpertWeights(config, REDUNDANT, ep_rank=0)
    with pytest.raises(RuntimeError) as error:
        weights.load_state_dict(state)
    assert '"0.w3"' in str(error.value)
    assert '"4.w2"' in str(error.value)
    assert "3.w2" not in str(error.value)
    assert sorted(weights.load_state_dict(state, strict=False).missing_keys) == ["0.w3", "4.w2"]


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("given", [("w1", "w3_bias"), ("w3",)])
def test_a_state_with_one_half_leaves_the_other(given, etp):
    config = shape()
    state = {f"0.{name}": torch.full_like(saved_expert(config, 0)[name], 7.0) for name in given}
    expected = saved_expert(config, 0) | {key.removeprefix("0."): tensor for key, tensor in state.items()}
    for rank in range(etp):
        weights = filled_weights(config, REDUNDANT, ep_rank=0, etp=etp_link(etp, rank))
        weights.load_state_dict(state, strict=False)
        for name in ("w13", "w13_bias"):
            half = [expected["w1" + name[3:]], expected["w3" + name[3:]]]
            slot = weights.slots_of_expert[0][0]
            assert torch.equal(
                weights.stored_tensors()[name][slot], etp_shard(config, name, torch.cat(half), etp, rank)
            )


def test_half_a_matrix_is_not_quantized():
    config = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=1, top_k=1)
    weights = ExpertWeights(config, ExpertMap.linear(1, 1), scheme=SCHEMES["fp8_block"])
    before = {name: tensor.clone() for name, tensor in weights.stored_tensors().items()}
    with pytest.raises(RuntimeError, match=r"expert 0: w3 is missing, and w13 is quantized as a whole"):
        weights.load_state_dict({"0.w1": torch.ones(128, 128)}, strict=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.stored_tensors().items())


@pytest.mark.parametrize("scheme", QUANTISED, ids=lambda scheme: scheme.name)
def test_a_state_of_numbers_loads_into_a_quantized_layer(scheme):
    """Plain numbers load into a quantized layer and are quantized.

    Input scales, which they do not determine, are missing.
    """
    plain = ExpertWeights(LARGE, ExpertMap.linear(3, 1), dtype=torch.bfloat16)
    weights = ExpertWeights(LARGE, ExpertMap.linear(3, 1), dtype=torch.bfloat16, scheme=scheme)
    result = weights.load_state_dict(plain.state_dict(), strict=False)
    assert not result.unexpected_keys
    inputs = [name for name in weights.names if name.endswith("_input_scale")]
    assert sorted(result.missing_keys) == sorted(f"{expert}.{name}" for expert in range(3) for name in inputs)
    for name, tensor in scheme.quantize(plain.slot(1), torch.bfloat16).items():
        assert torch.equal(weights.slot(1)[name].float(), tensor.float()), name


@pytest.mark.parametrize("scheme", QUANTISED, ids=lambda scheme: scheme.name)
def test_a_state_with_scales_and_without_their_codes_changes_nothing(scheme):
    weights = ExpertWeights(LARGE, ExpertMap.linear(3, 1), dtype=torch.bfloat16, scheme=scheme)
    other = ExpertWeights(LARGE, ExpertMap.linear(3, 1), dtype=torch.bfloat16, scheme=scheme)
    before = {name: tensor.clone() for name, tensor in weights.stored_tensors().items()}
    state = {name: tensor for name, tensor in other.state_dict().items() if name.startswith("1.w2_")}
    each = [{name: state[name]} for name in ("1.w2_scale", "1.w2_global_scale") if name in state]
    assert each
    for given in (state, *each):
        with pytest.raises(RuntimeError, match=r"expert 1: w2_\w*scale belongs to codes of its own, and w2 is missing"):
            weights.load_state_dict(given, strict=False)
        for name, tensor in weights.stored_tensors().items():
            assert torch.equal(tensor.float(), before[name].float()), name


def test_sharded_parameters_are_not_broadcast_into():
    config = shape()
    weights = filled_weights(config, ExpertMap.linear(5, 1))
    weights.unstack()
    with pytest.raises(RuntimeError, match=r"expert 0: w1 must be \[16, 8\], got \[8\]"):
        weights.load_state_dict({"0.w1": torch.ones(8)}, strict=False)


def test_misshapen_tensors_are_reported():
    config = shape()
    state = state_of_all_ranks(config, REDUNDANT)
    state["4.w2"], state["0.w1"] = torch.ones(16, 8), torch.ones(3)
    with pytest.raises(RuntimeError) as error:
        ExpertWeights(config, REDUNDANT, ep_rank=0).load_state_dict(state)
    assert "expert 4: w2 must be [8, 16], got [16, 8]" in str(error.value)
    assert "expert 0: w1 must be [16, 8], got [3]" in str(error.value)


def test_unexpected_keys_are_reported():
    config = shape()
    state = state_of_all_ranks(config, REDUNDANT) | {"5.w1": torch.ones(1), "0.w4": torch.ones(1)}
    weights = ExpertWeights(config, REDUNDANT, ep_rank=0)
    with pytest.raises(RuntimeError) as error:
        weights.load_state_dict(state)
    assert '"5.w1"' in str(error.value)
    assert '"0.w4"' in str(error.value)
    assert sorted(weights.load_state_dict(state, strict=False).unexpected_keys) == ["0.w4", "5.w1"]


# --- the whole layer ------------------------------------------------------------------------------------------------


def saved(config: MoEConfig) -> set[str]:
    """Return the names of an expert's parameters."""
    up = {"w3", "w3_bias"} if config.activation.gated else set()
    return {"w1", "w2", "w1_bias", "w2_bias"} | up


def layer(config: MoEConfig, expert_map: ExpertMap) -> MoELayer:
    return MoELayer(config, EPContext.local(torch.device("cpu")), expert_map=expert_map)


def test_layers_state_loads_into_a_layer_with_another_map():
    config = shape(Activation.RELU2)
    first = fill(layer(config, ExpertMap.linear(5, 1)))
    second = layer(config, ExpertMap.from_ranks([[3, -1, 1, 4, 0, 2, 3]], 5, allow_duplicates=True))
    state = first.state_dict()
    assert set(state) == {"router.weight"} | {f"expert_weights.{e}.{name}" for e in range(5) for name in saved(config)}
    second.load_state_dict(state)
    x, routing = integer_rows(20, 8, 0), integer_routing(20, config, 0)
    with torch.no_grad():
        assert torch.equal(first.forward_routed(x, routing), second.forward_routed(x, routing))
        torch.testing.assert_close(first(x), second(x))
    back = second.state_dict()
    assert set(back) == set(state)
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_layer_reports_a_missing_expert_by_its_whole_key():
    config = shape()
    state = layer(config, ExpertMap.linear(5, 1)).state_dict()
    del state["expert_weights.3.w2_bias"]
    with pytest.raises(RuntimeError) as error:
        layer(config, ExpertMap.linear(5, 1)).load_state_dict(state)
    assert '"expert_weights.3.w2_bias"' in str(error.value)


def test_state_dict_survives_a_file(tmp_path):
    config = shape()
    first = fill(layer(config, ExpertMap.from_ranks([[3, 1, 4, 0, 2]], 5)))
    torch.save(first.state_dict(), tmp_path / "layer.pt")
    second = layer(config, ExpertMap.linear(5, 1))
    second.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert torch.equal(second.expert_weights.w13[3], integer_expert(config, 3)["w13"])


def test_safetensors_keeps_all_experts_of_a_model(tmp_path):
    """safetensors saves all experts of a model.

    It treats tensors that share memory as one, and accelerate would then write only one of them.
    """
    accelerate, safetensors = pytest.importorskip("accelerate"), pytest.importorskip("safetensors.torch")
    with EPContext.local(torch.device("cpu")) as context:
        model = torch.nn.Sequential(MoELayer(shape(), context))
        wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(model)
        accelerator.save_model(model, str(tmp_path))
        assert set(safetensors.load_file(tmp_path / "model.safetensors")) == set(wanted)
        accelerator.save_state(str(tmp_path / "state"))
        for load in (
            lambda: safetensors.load_model(model, tmp_path / "model.safetensors"),
            lambda: accelerator.load_state(str(tmp_path / "state")),
        ):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            load()
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, wanted[name]), name


def test_codes_of_an_expert_are_found_by_its_number():
    """Codes of an expert are found by its number. Distributed checkpoints walk the names of `state_dict`.

    Quantized experts are not modules, so attributes must provide these names.
    """
    config = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=4, top_k=1)
    weights = ExpertWeights(config, ExpertMap.linear(4, 2), ep_rank=1, scheme=SCHEMES["fp8_block"])
    found, saved_one = getattr(weights, "3").w2, weights.state_dict()["3.w2"]
    assert torch.equal(found.view(torch.uint8), saved_one.view(torch.uint8))
    for name in ("0", "4", "w9"):  # experts of another rank, and names without an expert
        with pytest.raises(AttributeError):
            getattr(weights, name)
