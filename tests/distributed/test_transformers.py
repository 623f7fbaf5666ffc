"""Models of five families with expert-parallel blocks equal the original models, in float32."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

from ep_moe import EPContext, ExpertMap, ParallelConfig
from ep_moe.checkpoint.source import INDEX
from ep_moe.errors import CheckpointError, ConfigError
from ep_moe.integrations.transformers import ExpertParallelBlock, expert_parallel, load_pretrained, moe_layers
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import CONFIGS, FAMILIES, LAYERS, logits, quiet, tiny_model, written
from tests.fixtures.distributed_cases import gather_from_all_ranks


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return written(tmp_path_factory.getbasetemp())


def untouched(family):
    """Return the model that the family's checkpoints were written from."""
    return tiny_model(family).to(rank_device())


def batch(layout):
    """Return the token ids of a dp rank. Ranks differ in number and length of sequences, all longer than any window."""
    generator = torch.Generator().manual_seed(layout.dp_rank)
    shape = (1 + layout.dp_rank % 3, 20 - 3 * layout.dp_rank)
    return torch.randint(0, 64, shape, generator=generator).to(rank_device())


def expert_parameters(config, etp=1):
    """Return the number of parameters of one expert on one rank."""
    matrices = config.hidden_size * (config.w13_rows + config.intermediate_size) // etp
    return matrices + config.expert_bias * (config.w13_rows // etp + config.hidden_size)


def check_parameters(model, plain, family, layout):
    """Check that the model has all parameters of the original, except other ranks' experts, and no others."""
    layers, config = moe_layers(model), CONFIGS[family]
    held = sum(len(layer.expert_weights.slots_of_expert) for layer in layers) * expert_parameters(config, layout.etp)
    of_experts = len(layers) * config.num_experts * expert_parameters(config)
    own = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    count = {"ours": sum(p.numel() for p in own), "plain": sum(p.numel() for p in plain.parameters())}
    assert count["ours"] == count["plain"] - of_experts + held
    shapes = {tuple(t.shape[:1]) for layer in layers for t in layer.expert_weights.stored_tensors().values()}
    assert shapes == {(layers[0].expert_weights.num_slots,)}


# sizes, map (None: linear), transport
LAYOUTS = {
    1: [({}, None, "auto")],
    2: [
        ({"dp": 2}, None, "torch_a2a"),
        ({"tp": 2}, None, "allgather"),
        ({"tp": 2, "ep": 1, "etp": 2}, None, "auto"),
        ({"dp": 2}, ExpertMap.redundant(8, 2, 4), "auto"),
    ],
    4: [
        ({"dp": 4}, None, "auto"),
        ({"tp": 4}, None, "auto"),
        ({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, None, "auto"),
        ({"dp": 4}, ExpertMap.redundant(8, 4, 6), "allgather"),
        ({"dp": 2, "tp": 2}, ExpertMap.from_ranks([[7, 1, 0], [], [2, -1, 7, 3], [4, 5, 6]], 8), "torch_a2a"),
    ],
}


@distributed(1, 2, 4)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_untouched_model(checkpoints, family, world_size):
    folder = checkpoints[f"{family} shards"].folder
    plain = untouched(family)
    for at, (sizes, expert_map, all2all) in enumerate(LAYOUTS[world_size]):
        with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context:
            ids = batch(context.layout)
            expected = logits(plain, ids)
            assert expected.std() > 0.5  # large enough that a wrong expert shows
            options = {"expert_map": expert_map, "all2all": all2all}
            models = {"from disk": load_pretrained(folder, context, dtype=torch.float32, **options)}
            if at % 2 == 0:  # also build the model in memory, and fill it from one process's experts
                models["in memory"] = expert_parallel(untouched(family), context, **options)
            for name, model in models.items():
                where = f"{family} {sizes} {expert_map} {name}"
                torch.testing.assert_close(
                    logits(model, ids), expected, rtol=1e-5, atol=1e-5, msg=lambda m, where=where: f"{where}: {m}"
                )
                check_parameters(model, plain, family, context.layout)
                assert not model.training
                assert all(not t.is_meta for t in [*model.parameters(), *model.buffers()])


@distributed(2)
@pytest.mark.parametrize("kind", ["deepseek_v3 fp8", "gpt_oss mxfp4", "llama4_text wrapped", "qwen3_moe fused"])
def test_other_forms_on_disk(checkpoints, kind):
    """Packed or wrapped checkpoints give the logits of transformers on the same numbers unpacked."""
    checkpoint = checkpoints[kind]
    quiet()
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.plain).to(rank_device()).eval()
    for sizes in ({"dp": 2}, {"tp": 2, "ep": 1, "etp": 2}):
        with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context:
            model = load_pretrained(checkpoint.folder, context, dtype=torch.float32)
            ids = batch(context.layout)
            expected = logits(plain, ids)
            torch.testing.assert_close(logits(model, ids), expected, rtol=1e-5, atol=1e-5)


@distributed(2)
def test_packed_experts_stay_packed(checkpoints):
    """A kernel that computes from the checkpoint's own MXFP4 bytes gives the same logits."""
    checkpoint = checkpoints["gpt_oss mxfp4"]
    quiet()
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.plain).to(rank_device()).eval()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
        options = {"dtype": torch.float32, "experts": "reference"}
        model = load_pretrained(checkpoint.folder, context, quantization="mxfp4", **options)
        for layer in moe_layers(model):
            assert layer.expert_weights.get_parameter("w13").dtype == torch.uint8
        ids = batch(context.layout)
        torch.testing.assert_close(logits(model, ids), logits(plain, ids), rtol=1e-5, atol=1e-5)


@distributed(2)
def test_a_model_in_memory_is_quantised(checkpoints):
    plain, rounded = untouched("qwen3_moe"), untouched("qwen3_moe")
    scheme = SCHEMES["fp8_dynamic"]
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context, torch.no_grad():
        model = expert_parallel(plain, context, quantization="fp8_dynamic", experts="reference")
        for name, tensor in rounded.named_parameters():
            if "experts.gate_up_proj" in name or "experts.down_proj" in name:
                tensor.copy_(scheme.weights.dequantize(scheme.weights.quantize(tensor, tensor.dtype)))
        ids = batch(context.layout)
        expected = logits(rounded, ids)
        assert (expected - logits(untouched("qwen3_moe"), ids)).abs().max() > 1e-3
        torch.testing.assert_close(logits(model, ids), expected, rtol=1e-5, atol=1e-5)


@distributed(2)
def test_what_is_not_experts_is_the_untouched_models(checkpoints):
    """Parameters and buffers outside the blocks equal the original's bit for bit, tied and computed ones included."""
    with EPContext.from_groups(device=rank_device()) as context:
        for family in FAMILIES:
            folder = checkpoints[f"{family} single"].folder
            plain, model = untouched(family), load_pretrained(folder, context)
            blocks = tuple(name for name, m in model.named_modules() if isinstance(m, ExpertParallelBlock))
            assert len(blocks) == len(LAYERS[family])
            ours = dict([*model.named_parameters(), *model.named_buffers()])
            theirs = dict([*plain.named_parameters(), *plain.named_buffers()])
            rest = {name for name in theirs if not name.startswith(blocks)}
            assert rest == {name for name in ours if not name.startswith(blocks)}
            for name in rest:
                assert torch.equal(ours[name], theirs[name]), f"{family}: {name}"
            if family == "qwen3_moe":
                assert model.lm_head.weight is model.model.embed_tokens.weight


def damage(good, root):
    """Write copies of a checkpoint, each with one fault outside the experts.

    Returns name -> (folder, error class, message pattern).
    """
    cases = {}

    def spoiled(name, change, error, pattern):
        shutil.copytree(good, root / name)
        change(root / name)
        cases[name] = (str(root / name), error, pattern)

    def without(tensor):
        def change(folder):
            index = json.loads((folder / INDEX).read_text())
            del index["weight_map"][tensor]
            (folder / INDEX).write_text(json.dumps(index))

        return change

    def config(**changes):
        def change(folder):
            text = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(text | changes))

        return change

    name = "model.layers.1.self_attn.q_proj.weight"
    spoiled("missing", without(name), CheckpointError, rf"{name} must have shape \[32, 32\], got nothing")
    spoiled("no config", lambda f: (f / "config.json").unlink(), CheckpointError, "holds no config.json")
    spoiled("broken config", lambda f: (f / "config.json").write_text("{"), CheckpointError, "config.json is nothing")
    spoiled("no such type", config(model_type="mixtrel"), CheckpointError, "config.json is nothing.*mixtrel")
    either = (CheckpointError, ConfigError)  # the second where one rank alone has another configuration
    spoiled(
        "other type", config(model_type="olmoe"), either,
        r'gate_up_proj, .*block_sparse_moe.*there instead|model_type: "mixtral" on rank 0, "olmoe" on rank 1',
    )  # fmt: skip
    spoiled(
        "wide norm", config(head_dim=16), either,
        r"q_proj\.weight must have shape \[64, 32\], got \[32, 32\]|head_dim: .* on rank 0, 16 on rank 1",
    )  # fmt: skip
    return cases


@pytest.fixture(scope="session")
def damaged(checkpoints, tmp_path_factory):
    return damage(checkpoints["mixtral shards"].folder, tmp_path_factory.mktemp("damaged_models"))


@distributed(1, 2)
def test_damage_is_one_error_on_all_ranks(checkpoints, damaged, world_size):
    """A damaged checkpoint raises the same error on all ranks, also if only rank 1's copy is damaged."""
    good = checkpoints["mixtral shards"].folder
    with EPContext.from_groups(device=rank_device()) as context:
        for name, (folder, error, pattern) in damaged.items():
            for hit in ({0, 1}, {1}) if world_size == 2 else ({0},):
                path = folder if dist.get_rank() in hit else good
                with pytest.raises(error, match=pattern) as caught:
                    load_pretrained(Path(path), context, dtype=torch.float32)
                said = gather_from_all_ranks(str(caught.value))
                assert len(set(said)) == 1, f"{name} on {hit}: {said}"
        model = load_pretrained(good, context, dtype=torch.float32)
        ids = batch(context.layout)
        torch.testing.assert_close(logits(model, ids), logits(untouched("mixtral"), ids), rtol=1e-5, atol=1e-5)
