"""Wrong pushed weights: every rank raises the same error, and no rank serves a partial update."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ep_moe import ExpertMap, MoELayer
from ep_moe.checkpoint.push import load_layer_weights
from ep_moe.checkpoint.reader import load_layers
from ep_moe.errors import CheckpointError, ConfigError, InputError
from ep_moe.integrations import transformers as models
from ep_moe.integrations.transformers import export_weights
from ep_moe.testing import distributed
from ep_moe.training import fully_shard
from ep_moe.weights.lora import LowRank, add_lora
from tests.fixtures.checkpoint_files import CONFIGS, LAYERS, quiet, save, tiny_model
from tests.fixtures.distributed_cases import gather_from_all_ranks, same_error
from tests.fixtures.helpers import same_bits
from tests.fixtures.weight_push import KINDS, check_model, context_of, expert_parallel, serving_model


def published(kind):
    return {name: tensor.clone() for name, tensor in KINDS[kind]().state_dict().items()}


def changed(name, tensor):
    """Return a function that replaces a tensor on rank 1 only, or deletes it if `tensor` is None."""

    def change(weights):
        if dist.get_rank() == 1:
            if tensor is None:
                del weights[name]
            else:
                weights[name] = tensor(weights.get(name))
        return weights

    return change


EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
EXTRA = "model.layers.1.mlp.shared_expert.weight"
SEEN_BEFORE = {  # errors found in a mapping before anything is written
    "experts.gate_up_proj is missing": changed(EXPERTS, None),
    r"must have \[8, 512, 128\]": changed(EXPERTS, lambda t: t[..., :127]),
    "must be bfloat16 or float16 or float32 or float64, got int64": changed(EXPERTS, torch.Tensor.long),
    "input_layernorm.weight is missing in the pushed weights": changed("model.layers.1.input_layernorm.weight", None),
    r"lm_head.weight must have shape \[64, 128\], got \[128\]": changed("lm_head.weight", lambda t: t[0]),
    "has model.layers.1.mlp.shared_expert.weight, which OlmoeForCausalLM has no": changed(
        EXTRA, lambda _: torch.ones(1)
    ),
    "embed_tokens.weight must be a Tensor, got NoneType": changed("model.embed_tokens.weight", lambda t: None),
}


@distributed(2)
def test_a_mapping_that_is_wrong_changes_nothing(world_size):
    quiet()
    with context_of() as context:
        server = serving_model("olmoe", context, quantization="fp8_dynamic")
        before = {name: tensor.clone() for name, tensor in server.state_dict().items()}
        ids = torch.arange(5)[None].to(context.device)
        for words, change in SEEN_BEFORE.items():
            with pytest.raises((CheckpointError, InputError), match=words) as caught:
                models.load_weights(server, change(published("olmoe")))
            assert "rank 1" in str(caught.value)
            assert len(set(gather_from_all_ranks(str(caught.value)))) == 1
            assert all(same_bits(tensor, before[name]) for name, tensor in server.state_dict().items()), words
            assert server(input_ids=ids, use_cache=False).logits.isfinite().all(), "it goes on with the old ones"


def poisoned(at):
    """Return a function that sets a number of one expert in the last layer to inf, on rank 1."""

    def change(weights):
        if dist.get_rank() == 1:
            weights[EXPERTS][at, 0, 0] = torch.inf
        return weights

    return change


@distributed(2)
def test_what_fails_on_the_way_is_served_by_no_rank(world_size):
    """After an error in layer 1, layer 0 has the new weights and refuses calls until all are pushed."""
    quiet()
    with context_of() as context:
        server = serving_model("olmoe", context, quantization="fp8_block", expert_map=ExpertMap.redundant(8, 2, 4))
        ids = torch.arange(5)[None].to(context.device)
        wrong = {
            "must be finite, got inf": lambda: poisoned(7)(published("olmoe")),
            "experts.gate_up_proj is missing": lambda: iter(changed(EXPERTS, None)(published("olmoe")).items()),
        }
        for words, make in wrong.items():
            text = same_error(CheckpointError, lambda make=make: models.load_weights(server, make()))
            assert words in text
            assert "rank 1" in text
            for _ in range(2):
                text = same_error(CheckpointError, lambda: server(input_ids=ids, use_cache=False))
                assert text.startswith(
                    "model.layers.0.mlp.experts holds only a part of the pushed weights, whose loading"
                )
            models.load_weights(server, published("olmoe"))
            wanted = expert_parallel(
                KINDS["olmoe"](), context, experts="reference", quantization="fp8_block",
                expert_map=ExpertMap.redundant(8, 2, 4),
            )  # fmt: skip
            check_model(server, wanted, words)
            assert server(input_ids=ids, use_cache=False).logits.isfinite().all()


@distributed(2)
def test_a_rank_with_a_bad_tensor_takes_part_to_the_end(world_size):
    """A rank with a bad tensor goes on to the end before it raises. The trainer's ranks gather each tensor together."""
    quiet()

    def spoiled(pairs, value):
        for name, tensor in pairs:
            yield name, value(tensor) if dist.get_rank() == 1 and name == "model.layers.0.mlp.gate.weight" else tensor

    wrong = {
        "rank 1: model.layers.0.mlp.gate.weight must have shape [8, 128], got [1, 128]": lambda tensor: tensor[:1],
        "rank 1: model.layers.0.mlp.gate.weight must be a Tensor, got NoneType": lambda _: None,
    }
    with context_of() as ours, context_of() as theirs:
        trainer = expert_parallel(KINDS["olmoe"](), ours, experts="reference")
        server, wanted = (serving_model("olmoe", theirs) for _ in range(2))
        models.load_weights(wanted, published("olmoe"))
        for words, value in wrong.items():
            with pytest.raises((CheckpointError, InputError)) as caught:
                models.load_weights(server, spoiled(export_weights(trainer), value))
            assert words in str(caught.value)
            assert len(set(gather_from_all_ranks(str(caught.value)))) == 1
            models.load_weights(server, export_weights(trainer))
            check_model(server, wanted, words)


@distributed(2)
def test_a_folder_that_fails_on_the_way_is_served_by_no_rank(tmp_path, world_size):
    quiet()
    model = KINDS["qwen3_moe"]()
    with torch.no_grad():
        model.model.layers[2].mlp.experts.down_proj[7, 0, 0] = torch.nan
    if dist.get_rank() == 0:
        save(model, tmp_path / "wrong")
        save(KINDS["qwen3_moe"](), tmp_path / "right")
    config = replace(CONFIGS["qwen3_moe"], hidden_size=128, intermediate_size=256)
    with context_of() as context:
        dist.barrier()
        layers = {n: MoELayer(config, context, quantization="fp8_block") for n in LAYERS["qwen3_moe"]}
        x = torch.ones(2, 128, device=context.device)
        with pytest.raises(CheckpointError, match="holds neither"):
            load_layers(layers, tmp_path, "qwen3_moe", progress=False)
        layers[0](x)  # still works
        text = same_error(CheckpointError, lambda: load_layers(layers, tmp_path / "wrong", "qwen3_moe", progress=False))
        assert "must be finite, got nan" in text
        for layer in layers.values():
            assert str(tmp_path / "wrong") in same_error(CheckpointError, lambda: layer(x))  # noqa: B023
        load_layers(layers, tmp_path / "right", "qwen3_moe", progress=False)
        assert all(layer(x).isfinite().all() for layer in layers.values())


@distributed(2)
def test_an_iterable_that_is_wrong_from_the_start_changes_nothing(world_size):
    quiet()
    with context_of() as context:
        server = serving_model("olmoe", context)
        ids = torch.arange(5)[None].to(context.device)
        prefixed = [(f"module.{name}", tensor) for name, tensor in published("olmoe").items()]  # a wrapper's prefix
        for weights in ([], prefixed, [("model.layers.0.mlp.odd.weight", torch.ones(1))], ["no pair"], 7):
            with pytest.raises((CheckpointError, InputError)):
                models.load_weights(server, weights)
            assert server(input_ids=ids, use_cache=False).logits.isfinite().all()


@distributed(2)
def test_ranks_that_push_different_weights_are_told(world_size):
    quiet()
    rank = dist.get_rank()
    with context_of() as context:
        for name, words in (
            ("model.layers.1.mlp.gate.weight", "all ranks must hold the same router"),
            ("model.layers.1.mlp.experts.down_proj", "copies of expert 0 on ranks 0, 1 differ"),
        ):
            layers = {1: MoELayer(CONFIGS["deepseek_v3"], context, expert_map=ExpertMap.redundant(8, 2, 4))}
            weights = tiny_model("deepseek_v3").state_dict()
            layers[1](torch.ones(2, 32, device=context.device))  # the first call compares ranks
            load_layer_weights(layers, weights, "deepseek_v3")
            weights[name] = weights[name] + rank
            assert words in same_error(InputError, lambda: load_layer_weights(layers, weights, "deepseek_v3"))  # noqa: B023
            same_error(CheckpointError, lambda: layers[1](torch.ones(2, 32, device=context.device)))  # noqa: B023


@distributed(2)
def test_routers_of_a_models_own_that_differ_are_told(world_size):
    """Differing routers that stay the model's own are found in the first call and after a push."""
    quiet()
    name = "model.layers.1.mlp.gate.weight"
    with context_of() as context:
        ids = torch.arange(5)[None].to(context.device)
        plain = KINDS["olmoe"]()
        with torch.no_grad():
            plain.get_parameter(name).add_(dist.get_rank())
        server = expert_parallel(plain, context)
        words = "model.layers.1.mlp.experts: all ranks must hold the same router and shared experts, and gate.weight"
        assert words in same_error(InputError, lambda: server(ids))
        server = serving_model("olmoe", context)
        server(ids)
        weights = changed(name, lambda tensor: tensor + 1.0)(published("olmoe"))
        assert words in same_error(InputError, lambda: models.load_weights(server, weights))
        same_error(CheckpointError, lambda: server(ids))


@distributed(1)
def test_what_cannot_be_pushed_is_refused(world_size):
    quiet()
    with context_of() as context:
        model = expert_parallel(KINDS["qwen3_moe"](), context, experts="reference", quantization="fp8_dynamic")
        with pytest.raises(ConfigError, match="quantization must be none for export_weights, got fp8_dynamic"):
            next(export_weights(model))
        with pytest.raises(ConfigError, match="must have expert-parallel layers"):
            models.load_weights(KINDS["qwen3_moe"](), {})
        with pytest.raises(InputError, match="at least one layer"):
            load_layer_weights({}, {}, "qwen3_moe")
        tuned = expert_parallel(KINDS["olmoe"](), context, experts="reference")
        add_lora(models.moe_layers(tuned)[0].expert_weights, {"w13": LowRank(2, 1.0)}, 0)
        for call in (lambda: models.load_weights(tuned, published("olmoe")), lambda: next(export_weights(tuned))):
            with pytest.raises(ConfigError, match="have LoRA factors"):
                call()
        tied = published("qwen3_moe")
        tied["lm_head.weight"] = tied["lm_head.weight"] + 1
        with pytest.raises(CheckpointError, match="are one tensor in Qwen3MoeForCausalLM, and differ"):
            models.load_weights(model, tied)
        twice = [*published("qwen3_moe").items()]
        with pytest.raises(CheckpointError, match="is there twice"):
            models.load_weights(model, twice + twice[3:4])
        models.load_weights(model, twice)
        layer = models.moe_layers(model)[0]
        layer.router.register_forward_hook(lambda *_: models.load_weights(model, published("qwen3_moe")))
        with pytest.raises(InputError, match="weights must be loaded between calls"):
            layer(torch.ones(2, 128))


@distributed(2, set_device=True)
def test_a_model_that_is_sharded_outside_its_experts_takes_no_weights(world_size):
    quiet()
    with context_of() as context:
        model = fully_shard(expert_parallel(KINDS["olmoe"](), context), context)
        text = same_error(ConfigError, lambda: models.load_weights(model, published("olmoe")))
        assert "is sharded over ranks, and load_weights writes whole tensors" in text
