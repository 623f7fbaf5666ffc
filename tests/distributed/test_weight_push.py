"""Weights that a trainer pushes into serving models of other layouts, maps and schemes."""

import random
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from ep_moe import EPLBConfig, ExpertBalancer, ExpertMap, MoELayer, training
from ep_moe.checkpoint.push import LayerTarget, load_layer_weights
from ep_moe.eplb.migration.consensus import State
from ep_moe.errors import CheckpointError
from ep_moe.integrations import push as pushing
from ep_moe.integrations import transformers as models
from ep_moe.integrations.find_experts import find_experts
from ep_moe.integrations.transformers import export_weights
from ep_moe.testing import distributed
from tests.fixtures.checkpoint_files import (
    CONFIGS,
    FAMILIES,
    LAYERS,
    canonical,
    check_layer,
    piece,
    quantise_fp8,
    quiet,
    stored,
    tiny_model,
)
from tests.fixtures.distributed_cases import gather_from_all_ranks
from tests.fixtures.helpers import same_bits
from tests.fixtures.interface_models import MODELS, interface_model
from tests.fixtures.weight_push import (
    KINDS,
    check_model,
    context_of,
    copied_model,
    expert_parallel,
    serving_model,
    shared_model,
)

KINDS_OF = dict.fromkeys(MODELS, interface_model) | dict.fromkeys(FAMILIES, tiny_model)
# largest error relative to the largest number of the matrix: half of E4M3's last bit; MXFP4 may saturate at 3/4 of it
BLOCK = "fp8_block"
SCHEMES = {"none": 0.0, "fp8_dynamic": 2**-4, BLOCK: 2**-4, "mxfp4": 2**-2}
# layout of the trainer, of the server, and the server's map
LAYOUTS = {
    1: [({}, {}, ExpertMap.from_ranks([[5, 0, 1, 2, 3, 4, 5, 6, 7]], 8, allow_duplicates=True))],
    2: [
        ({"dp": 2, "ep": 1}, {"dp": 2}, ExpertMap.redundant(8, 2, 4)),
        ({"dp": 2}, {"tp": 2, "ep": 1, "etp": 2}, None),
    ],
    4: [
        ({"dp": 4, "ep": 2}, {"dp": 4}, ExpertMap.redundant(8, 4, 4)),
        ({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, {"dp": 2, "tp": 2}, ExpertMap.round_robin(8, 4)),
    ],
}


def addresses(model):
    found = [tensor.data_ptr() for name, tensor in model.state_dict().items() if "expert_weights" not in name]
    return found + [layer.expert_weights.addresses for layer in models.moe_layers(model)]


@distributed(1, 2, 4)
def test_a_server_has_what_the_trainer_has(world_size):
    """A pushed server equals one built from the trainer's model bit for bit, for all layouts, kinds and schemes."""
    quiet()
    for trains, serves, expert_map in LAYOUTS[world_size]:
        with context_of(**trains) as ours, context_of(**serves) as theirs:
            for at, kind in enumerate(KINDS):
                trainer = expert_parallel(copied_model(kind), ours, experts="reference")
                for scheme in SCHEMES if world_size == 1 else ("none", list(SCHEMES)[1 + at % 3]):
                    options = {"expert_map": expert_map, "quantization": scheme}
                    server, where = serving_model(kind, theirs, **options), (trains, serves, kind, scheme)
                    wanted = expert_parallel(copied_model(kind), theirs, experts="reference", **options)
                    before = addresses(server)
                    loaded = models.load_weights(server, export_weights(trainer, save_original_format=at % 2 == 0))
                    check_model(server, wanted, where)
                    assert addresses(server) == before, "graphs that were captured read them"
                    assert loaded >= {"model.norm.weight", "model.embed_tokens.weight"}
                    check_numbers(server, shared_model(kind), scheme, where)


@torch.no_grad()
def check_numbers(server, trained, scheme, where):
    """Compare the server with the trained transformers model: logits, or dequantized weights."""
    if scheme == "none":
        ids = torch.arange(5)[None]
        found, wanted = (m(input_ids=ids.to(m.device), use_cache=False).logits.cpu() for m in (server, trained))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item(), msg=str(where))
    else:
        numbers = [
            found.layout.to_canonical(dict(trained.get_submodule(name).named_parameters()))
            for name, found in find_experts(trained).items()
        ]
        for layer, whole in zip(models.moe_layers(server), numbers, strict=True):
            etp = layer.expert_weights.etp
            for name in ("w13", "w2"):
                pieces = piece(name, whole[name], etp.size, etp.rank)
                dense = layer.expert_weights.dense(name).cpu()
                for slot, expert in enumerate(layer.expert_weights.local_experts):
                    error = (dense[slot] - pieces[expert]).abs().max()
                    assert error <= SCHEMES[scheme] * whole[name][expert].abs().max(), (where, name, expert)


@distributed(2)
def test_layers_take_published_names(world_size):
    quiet()
    for sizes, expert_map in (({"dp": 2}, ExpertMap.redundant(8, 2, 4)), ({"tp": 2, "ep": 1, "etp": 2}, None)):
        with context_of(**sizes) as context:
            for family in FAMILIES:
                trained = tiny_model(family)
                expected, whole = canonical(trained, family), trained.state_dict()
                for weights in (whole, iter(whole.items()), [[*pair] for pair in whole.items()]):
                    layers = {
                        n: MoELayer(CONFIGS[family], context, expert_map=expert_map, experts="reference")
                        for n in LAYERS[family]
                    }
                    loaded = load_layer_weights(layers, weights, family)
                    assert loaded == {name for name in whole if ".experts." in name or name in loaded}
                    assert not any("attn" in name or "embed" in name for name in loaded)
                    for number, layer in layers.items():
                        check_layer(layer, expected[number], (family, number))


@distributed(1)
def test_every_kind_of_model_takes_both_forms_of_names(world_size):
    quiet()
    with context_of() as context:
        for kind in MODELS.keys() - KINDS.keys():
            trainer = expert_parallel(interface_model(kind), context, experts="reference")
            for original in (True, False):
                server = expert_parallel(interface_model(kind), context, experts="reference")
                with torch.no_grad():
                    for parameter in server.parameters():
                        parameter.add_(0.25)
                models.load_weights(server, export_weights(trainer, save_original_format=original))
                check_model(server, trainer, (kind, original))


@distributed(1, 2)
def test_experts_that_are_gathered_a_few_at_a_time_are_the_same(world_size, monkeypatch):
    """Exporting a few experts at a time gives every tensor once, with the same bits.

    Names may contain the expert's number or not.
    """
    quiet()
    gathered, gather = [], pushing.gather_experts
    monkeypatch.setattr(pushing, "gather_experts", lambda *given: gathered.append(given[1]) or gather(*given))
    kinds = KINDS_OF if world_size == 1 else ("qwen3_moe", "gpt_oss")
    with context_of() as context:
        for kind in kinds:
            model = (tiny_model if kind in FAMILIES else interface_model)(kind)
            model = expert_parallel(
                model, context, experts="reference", expert_map=ExpertMap.round_robin(8, world_size)
            )
            monkeypatch.setattr(pushing, "_CHUNK_BYTES", 1 << 28)
            whole = dict(export_weights(model))
            assert {*gathered} == {range(8)}
            gathered.clear()
            monkeypatch.setattr(pushing, "_CHUNK_BYTES", 3 * 3 * 4 * 32 * 48)  # three experts with a gate
            parts = list(export_weights(model))
            # in longcat_flash, identity experts have numbers too
            apart = any(".experts.5." in name for name in whole) and kind != "longcat_flash"
            assert (gathered[0] != range(8)) == apart, kind
            gathered.clear()
            if apart:  # ranks whose sets have other orders give the same one
                first = [name for name, _ in parts if ".experts.0." in name]
                assert first == sorted(first), kind
            assert len(parts) == len(dict(parts)) == len(whole), kind
            assert all(same_bits(tensor, whole[name]) for name, tensor in parts), kind


def shuffled(weights):
    pairs = list(weights.items())
    random.Random(7).shuffle(pairs)
    yield from pairs


def overwritten(weights):
    """Yield each tensor in the same memory, overwriting the one before."""
    room = torch.empty(max(tensor.numel() for tensor in weights.values()))
    for name, tensor in weights.items():
        room[: tensor.numel()].copy_(tensor.flatten())
        yield name, room[: tensor.numel()].view(tensor.shape)
        room.fill_(torch.nan)


@distributed(2)
def test_tensors_come_in_any_order_and_memory(world_size):
    quiet()
    with context_of() as context:
        wanted = expert_parallel(KINDS["olmoe"](), context, experts="reference")
        published = {name: tensor.cpu().clone() for name, tensor in export_weights(wanted)}
        for weights in (shuffled(published), overwritten(published), overwritten(KINDS["olmoe"]().state_dict())):
            server = serving_model("olmoe", context)
            models.load_weights(server, weights)
            check_model(server, wanted, weights)


@distributed(2)
def test_numbers_are_rounded_to_the_servers_dtype(world_size):
    quiet()
    with context_of() as context:
        for scheme in ("none", "fp8_dynamic"):
            wanted, server = (
                expert_parallel(KINDS["olmoe"]().bfloat16(), context, experts="reference", quantization=scheme)
                for _ in range(2)
            )
            with torch.no_grad():
                for parameter in server.parameters():
                    parameter.view(torch.uint8).zero_()
            if scheme == "none":  # other schemes quantize pushed numbers on arrival
                models.load_weights(server, KINDS["olmoe"]().state_dict())
                check_model(server, wanted, scheme)
            models.load_weights(server, KINDS["olmoe"]().bfloat16().state_dict())
            check_model(server, wanted, scheme)
            wide = KINDS["olmoe"]().double().state_dict()
            wide["model.norm.weight"][3] = 1e39
            with pytest.raises(CheckpointError, match=r"model.norm.weight has numbers up to 1e\+39"):
                models.load_weights(server, wide)


@distributed(2)
def test_a_rank_keeps_its_own_experts_of_one_layer(world_size, monkeypatch):
    held, stage = [], LayerTarget.stage

    def measured(self, tensors, **options):
        held.append(sum(tensor.nbytes for tensor in tensors.values() if not tensor.is_meta))
        return stage(self, tensors, **options)

    monkeypatch.setattr(LayerTarget, "stage", measured)
    quiet()
    with context_of() as context:
        model = expert_parallel(tiny_model("qwen3_moe"), context, experts="reference")
        layers = {n: MoELayer(CONFIGS["qwen3_moe"], context, experts="reference") for n in LAYERS["qwen3_moe"]}
        load_layer_weights(layers, export_weights(model), "qwen3_moe")
    expert = 4 * 3 * 32 * 48
    assert held == [4 * expert + 4 * 8 * 32] * 2, "of 8 experts, and the router"


@distributed(2, set_device=True)  # torch's fully_shard takes the current GPU for its mesh
def test_shards_of_fsdp_are_gathered(world_size):
    quiet()
    with context_of() as context:
        wanted = expert_parallel(KINDS["deepseek_v3"](), context, experts="reference")
        model = KINDS["deepseek_v3"]().to(context.device)
        fully_shard(model)
        assert any(hasattr(tensor, "full_tensor") for tensor in model.state_dict().values())
        for weights in (model.state_dict(), iter(model.state_dict().items())):
            server = serving_model("deepseek_v3", context)
            models.load_weights(server, weights)
            check_model(server, wanted, "FSDP2")
    with context_of(dp=2, ep=1) as ours, context_of() as theirs:
        trainer = expert_parallel(KINDS["olmoe"](), ours, experts="reference")
        trainer = training.fully_shard(trainer, ours)
        wanted = expert_parallel(KINDS["olmoe"](), theirs, experts="reference")
        server = serving_model("olmoe", theirs)
        models.load_weights(server, export_weights(trainer))
        check_model(server, wanted, "experts that ep_moe shards over their replicas")


@distributed(2)
def test_codes_are_kept_or_widened(world_size):
    """Checkpoints published as DeepSeek-V3's, with all matrices in block fp8, are pushed as codes or widened."""
    quiet()
    with context_of() as context:
        trainer = expert_parallel(KINDS["deepseek_v3"](), context, experts="reference")
        packed, numbers = quantise_fp8({name: tensor.cpu() for name, tensor in export_weights(trainer)})
        wanted, server, kept = (serving_model("deepseek_v3", context, quantization=q) for q in ("none", "none", BLOCK))
        models.load_weights(wanted, numbers)
        for weights in (lambda: packed, lambda: iter(packed.items())):
            models.load_weights(server, weights())
            check_model(server, wanted, "fp8")
            models.load_weights(kept, weights())
            for number, layer in zip((1, 2), models.moe_layers(kept), strict=True):
                for expert in layer.expert_weights.slots_of_expert:
                    name = f"model.layers.{number}.mlp.experts.{expert}"
                    for part, end in (("", ""), ("_scale", "_scale_inv")):
                        gate, up, down = (packed[f"{name}.{p}_proj.weight{end}"] for p in ("gate", "up", "down"))
                        found = {key: tensor.cpu().float() for key, tensor in stored(layer, expert).items()}
                        assert torch.equal(found[f"w13{part}"], torch.cat([gate.float(), up.float()]))
                        assert torch.equal(found[f"w2{part}"], down.float())
            same = models.moe_layers(wanted)[0].router.weight
            assert same_bits(models.moe_layers(kept)[0].router.weight, same)


# --- with other features ----------------------------------------------------------------------------------------------


@distributed(2)
def test_experts_that_move_meanwhile_arrive_with_the_new_weights(world_size):
    quiet()
    restarts = 0
    with context_of() as context:
        trained = tiny_model("deepseek_v3")
        expected, first = canonical(trained, "deepseek_v3")[1], tiny_model("deepseek_v3").state_dict()
        old = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
        for turn in range(8):
            start = ExpertMap.redundant(8, 2, 4)
            layer = MoELayer(CONFIGS["deepseek_v3"], context, expert_map=start, experts="reference")
            layer.requires_grad_(False)
            load_layer_weights({1: layer}, old, "deepseek_v3")
            slots = start.physical_to_logical
            other = ExpertMap.from_ranks([slots[6:], slots[:6]], 8)
            config = EPLBConfig(interval=0, sync_every=1, bytes_per_step=20_000)
            with ExpertBalancer([layer], context, config) as balancer:
                balancer.move_to([other])
                for number in range(300):
                    if number == turn:
                        load_layer_weights({1: layer}, first, "deepseek_v3")
                    layer(torch.ones(2, 32, device=context.device))
                    if number > turn and balancer.state is State.IDLE:
                        break
                    balancer.step()
                restarts += balancer.stats().restarts
            assert layer.placement.expert_map == other
            check_layer(layer, expected, turn)
    assert restarts > 0


# --- state dicts ------------------------------------------------------------------------------------------------------


@distributed(1, 2)
def test_a_state_dict_of_numbers_is_quantised(world_size):
    """A merged state dict of unquantized experts, as a trainer of another layout has it, is quantized on load."""
    for config in (CONFIGS["qwen3_moe"], CONFIGS["gpt_oss"]):
        config = replace(config, hidden_size=128, intermediate_size=256)
        sizes = {} if world_size == 1 else {"tp": 2, "ep": 1, "etp": 2}
        with context_of() as ours, context_of(**sizes) as theirs:
            trainer = MoELayer(config, ours, experts="reference")
            state = {
                name: tensor
                for rank in gather_from_all_ranks(dict(trainer.state_dict()))
                for name, tensor in rank.items()
            }
            state = {name: tensor.to(theirs.device) for name, tensor in state.items()}
            joined = {name: tensor for name, tensor in state.items() if name.split(".")[-1] not in ("w1", "w3")}
            for expert in range(8):
                name = f"expert_weights.{expert}"
                joined[f"{name}.w13"] = torch.cat([state[f"{name}.w1"], state[f"{name}.w3"]])
            for scheme in SCHEMES:
                wanted, *servers = (MoELayer(config, theirs, experts="reference", quantization=scheme) for _ in "123")
                for expert in range(8):
                    name = f"expert_weights.{expert}."
                    own = {key.removeprefix(name): tensor for key, tensor in joined.items() if key.startswith(name)}
                    if config.expert_bias:
                        own["w13_bias"] = torch.cat([own.pop("w1_bias"), own.pop("w3_bias")])
                    wanted.update_expert(expert, **own)
                wanted.router.load_state_dict(trainer.router.state_dict())
                for server, given in zip(servers, (state, joined), strict=True):
                    server.load_state_dict(given)
                    check_model(server, wanted, scheme)
            less = {name: tensor for name, tensor in state.items() if name != "expert_weights.3.w3"}
            with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "expert_weights.3.w13"'):
                servers[0].load_state_dict(less)
            wrong = state | {"expert_weights.3.w3": state["expert_weights.3.w3"][1:]}
            with pytest.raises(RuntimeError, match=r"expert 3: w3 must be \[256, 128\], got \[255, 128\]"):
                servers[0].load_state_dict(wrong)
