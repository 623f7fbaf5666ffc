"""Models of which only the experts are replaced equal the original models, in float32."""

import pytest
import torch
import torch.distributed as dist
import transformers

from ep_moe import EPContext, ParallelConfig
from ep_moe.integrations.generic import ExpertParallelExperts, replace_experts
from ep_moe.integrations.transformers import expert_parallel, idle_step, moe_layers
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import quiet, tiny_model
from tests.fixtures.distributed_cases import gather_from_all_ranks
from tests.fixtures.transformers_models import outcome, tiny_ids, tiny_transformers_model

BOUND = 1e-5  # relative to the largest number: float32 rounding through the layers
ARIA = ["aria_text"] if transformers.__version__ >= "5.18" else []  # earlier versions do not use the experts interface
# written for 5.24: an activation, zero experts, an output norm, experts in one matrix, a sorting router
NEWER = ["step3p7", "longcat_flash", "muse_spark_text", "dbrx", "jetmoe"] if transformers.__version__ >= "5.24" else []
FAMILIES = {
    1: ["olmoe", "minimax_m3_vl_text"],
    2: [
        "olmoe", "glm4_moe", "qwen2_moe", "qwen3_next", "minimax_m2", "deepseek_v2", "ernie4_5_moe", "hunyuan_v1_moe",
        "granitemoe", "jamba", "nemotron_h", "phimoe", "gemma4_text", "deepseek_v4", *ARIA, *NEWER,
    ],
    4: ["glm4_moe", "nemotron_h", "openai_privacy_filter", *NEWER],
}  # fmt: skip
LAYOUTS = {
    1: [{}],
    2: [{"dp": 2}, {"tp": 2}, {"tp": 2, "ep": 1, "etp": 2}],
    4: [{"dp": 4}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}],
}


def model_of(kind):
    return tiny_transformers_model(kind).to(rank_device())


def assert_close(found, expected, where):
    apart = {"rtol": 0, "atol": BOUND * float(expected.abs().max())}
    torch.testing.assert_close(found, expected, **apart, msg=lambda m: f"{where}: {m}")


@distributed(1, 2, 4, deadline_s=240)
def test_logits_are_the_models_own(world_size):
    """Logits equal the original model's, each family on one of the layouts."""
    quiet()
    for at, kind in enumerate(FAMILIES[world_size]):
        sizes = LAYOUTS[world_size][at % len(LAYOUTS[world_size])]
        with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context:
            plain = model_of(kind)
            ids = tiny_ids().roll(context.layout.dp_rank, 1).to(rank_device())
            expected = outcome(plain, ids)
            parallel = expert_parallel(plain, context)
            assert any(isinstance(module, ExpertParallelExperts) for module in parallel.modules())
            assert expected.std() > 0.5  # large enough that a wrong expert shows
            assert_close(outcome(parallel, ids), expected, f"{kind} {sizes}")


@distributed(2, deadline_s=120)
def test_bfloat16_is_as_near_to_float32_as_the_models_own(world_size):
    """In bfloat16, the error to float32 is at most twice that of the original model.

    Rounding can route a token to another expert, so both sides take the median over tokens.
    """
    quiet()
    for kind in ("qwen3_next", "jamba", "olmoe"):
        with EPContext.from_groups(device=rank_device()) as context:
            ids = tiny_ids().roll(context.layout.dp_rank, 1).to(rank_device())
            exact, model = outcome(model_of(kind), ids), model_of(kind).to(torch.bfloat16)
            rounded = outcome(model, ids)
            found = outcome(expert_parallel(model, context), ids)
            theirs, ours = ((one.float() - exact).abs().amax(-1).median() for one in (rounded, found))
            assert 0 < ours <= 2 * theirs, f"{kind}: {ours:.1e} from float32, the model itself {theirs:.1e}"


@distributed(2)
def test_known_families_equal_the_generic_way(world_size):
    quiet()
    for kind in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"):
        with EPContext.from_groups(device=rank_device()) as context, torch.no_grad():
            by_block, by_experts = (tiny_model(kind).to(rank_device()) for _ in range(2))
            expert_parallel(by_block, context)
            replaced = replace_experts(by_experts, context)
            assert len(replaced) == len(moe_layers(by_block))
            ids = torch.randint(0, 64, (2, 9 + context.layout.dp_rank)).to(rank_device())
            found, expected = (model(input_ids=ids).logits for model in (by_experts, by_block))
            assert_close(found, expected, kind)


def padded(rank):
    """Return token ids and mask. Rank 0 has padding on the left."""
    ids = torch.randint(3, 120, (3, 9), generator=torch.Generator().manual_seed(rank)).to(rank_device())
    mask = torch.ones_like(ids)
    if rank == 0:
        mask[0, :5] = mask[2, :1] = 0
    return ids, mask


@distributed(2, deadline_s=120)
def test_padding_and_generation(world_size):
    """Padding is not counted as load, and ranks may generate different numbers of tokens.

    Idle steps keep the ranks in step.
    """
    quiet()
    cases = [("olmoe", sizes) for sizes in LAYOUTS[2]] + [("jamba", {"dp": 2})]  # jamba has layers without attention
    for kind, sizes in cases:
        with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context, torch.no_grad():
            plain, model = model_of(kind), expert_parallel(model_of(kind), context)
            batch = context.layout.dp_rank
            ids, mask = padded(batch)
            expected, found = (m(input_ids=ids, attention_mask=mask).logits for m in (plain, model))
            assert_close(found, expected, f"{kind} {sizes}")
            for layer in moe_layers(model):
                assert sum(layer.stats().expert_load) == 2 * (21 + 27 * (context.layout.dp - 1)), "tokens times top-k"
            how = {"max_new_tokens": 3 + 2 * batch, "do_sample": False, "pad_token_id": 0}
            expected, found = (m.generate(ids, attention_mask=mask, **how) for m in (plain, model))
            assert torch.equal(found, expected), kind
            assert len(set(gather_from_all_ranks(context.flight_recorder.number))) == 1, "ranks out of step"


@distributed(2, deadline_s=120)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_gradients_are_the_models_own(checkpointing, world_size):
    """Gradients equal the original model's if rank 1 has no batch and one matrix is frozen."""
    quiet()
    plain, model = model_of("olmoe"), model_of("olmoe")
    for one in (plain, model):
        one.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
        one.train()
    with EPContext.from_groups(device=rank_device()) as context:
        expert_parallel(model, context)
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids, mask = padded(0)
        plain(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
        loss = model(**batch).loss if dist.get_rank() == 0 else idle_step(model)
        loss.backward()
        for at, (layer, other) in enumerate(zip(moe_layers(model), plain.model.layers, strict=True)):
            theirs = other.mlp.experts
            for expert in layer.expert_weights.slots_of_expert:
                own = layer.expert_weights.get_submodule(str(expert))
                gate, up = theirs.gate_up_proj.grad[expert].chunk(2)
                assert_close(own.w1.grad, gate, f"{at}.{expert}.w1")
                assert_close(own.w3.grad, up, f"{at}.{expert}.w3")
                assert own.w2.requires_grad == (at == 1)
                if at:
                    assert_close(own.w2.grad, theirs.down_proj.grad[expert], f"{at}.{expert}.w2")
        gates = [m.model.layers[1].mlp.gate.weight.grad for m in (model, plain)]
        assert_close(gates[0], gates[1] if dist.get_rank() == 0 else torch.zeros_like(gates[1]), "router")


@distributed(2)
def test_a_model_on_the_meta_device_is_filled_by_expert(world_size):
    quiet()
    for kind in ("olmoe", "gpt_oss", *ARIA, "nemotron_h"):  # gpt_oss: transposed, interleaved, with biases
        with EPContext.from_groups(device=rank_device()) as context:
            plain = model_of(kind)
            expected = outcome(plain, tiny_ids().to(rank_device()))
            with torch.device("meta"):
                model = type(plain)(plain.config).eval()
            replaced = replace_experts(model, context)
            assert all(parameter.is_meta for parameter in model.parameters())
            model.to_empty(device=rank_device())
            own = dict(plain.named_parameters()) | dict(plain.named_buffers())
            with torch.no_grad():
                for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                    if not any(name.startswith(f"{each}.") for each in replaced):
                        tensor.copy_(own[name])
            for name, made in replaced.items():
                theirs = plain.get_submodule(name)
                for expert in made.local_experts:
                    made.write_expert(expert, {each: getattr(theirs, each)[expert] for each in made.tensor_names})
            assert_close(outcome(model, tiny_ids().to(rank_device())), expected, kind)
