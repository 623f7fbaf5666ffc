"""Classification models with MoE bodies: replaced in memory, loaded, saved, and started from a language model."""

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from ep_moe import ConfigError, EPContext, ParallelConfig
from ep_moe.integrations.transformers import expert_parallel, idle_step, load_pretrained, save_pretrained
from ep_moe.testing import distributed, rank_device
from ep_moe.training import sync_gradients
from tests.fixtures.checkpoint_files import quiet, tiny_config, tiny_model

JAMBA = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "attn_layer_period": 2,
    "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0, "mamba_d_state": 8, "mamba_dt_rank": 8,
    "use_mamba_kernels": False,
}  # fmt: skip
# two known blocks; one model of which only the experts are replaced
KINDS = {
    "qwen3_moe": AutoModelForSequenceClassification,
    "deepseek_v3": AutoModelForTokenClassification,
    "jamba": AutoModelForSequenceClassification,
}


def classifier(kind):
    torch.manual_seed(0)
    config = transformers.JambaConfig(**JAMBA) if kind == "jamba" else tiny_config(kind)
    config.num_labels, config.pad_token_id = 3, 0
    return KINDS[kind].from_config(config, dtype=torch.float32).eval()


def batch(context):
    generator = torch.Generator().manual_seed(context.layout.dp_rank)
    ids = torch.randint(1, 64, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 6:] = ids[0, 6:] = 0
    return {"input_ids": ids.to(rank_device()), "attention_mask": mask.to(rank_device()), "use_cache": False}


def of_tokens(model, given):
    """Return the logits of sequences or of tokens, without padding, which no expert computes."""
    logits = model(**given).logits
    return logits if logits.dim() == 2 else logits[given["attention_mask"] == 1]


@distributed(2)
def test_heads_equal_transformers(tmp_path, world_size):
    quiet()
    for kind, auto in KINDS.items():
        plain = classifier(kind)
        if dist.get_rank() == 0:
            plain.save_pretrained(tmp_path / kind)
        dist.barrier()
        with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
            plain = plain.to(rank_device())
            given = batch(context)
            with torch.no_grad():
                expected = of_tokens(plain, given)
            with pytest.raises(ConfigError, match=r"with another head.*model_class=transformers\.AutoModelFor"):
                load_pretrained(tmp_path / kind, context, progress=False)
            loaded = load_pretrained(tmp_path / kind, context, model_class=auto, progress=False)
            save_pretrained(loaded, tmp_path / f"{kind}_saved")
            dist.barrier()
            again = auto.from_pretrained(tmp_path / f"{kind}_saved").to(rank_device()).eval()
            for model in (loaded, again, expert_parallel(plain, context)):
                with torch.no_grad():
                    torch.testing.assert_close(of_tokens(model, given), expected, rtol=1e-5, atol=1e-6)


@distributed(2)
def test_a_new_head_is_alike_on_all_ranks_and_learns(tmp_path, world_size):
    quiet()
    for kind in ("mixtral", "jamba"):
        torch.manual_seed(0)
        jamba = transformers.JambaConfig(**JAMBA)
        plain = tiny_model(kind) if kind != "jamba" else transformers.JambaForCausalLM(jamba)
        plain.config.pad_token_id = 0
        if dist.get_rank() == 0:
            plain.save_pretrained(tmp_path / kind)
        dist.barrier()
        with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
            torch.manual_seed(dist.get_rank())
            own = {"model_class": AutoModelForSequenceClassification, "num_labels": 3}
            with pytest.warns(
                UserWarning, match=r"score.weight of .*Classification is missing and was newly initialized"
            ):
                model = load_pretrained(tmp_path / kind, context, **own, progress=False).train()
            assert model.score.weight.shape[0] == 3
            assert 0 < model.score.weight.std() < 1
            labels = torch.tensor([0, 2], device=rank_device())
            loss = model(**batch(context), labels=labels).loss if context.layout.dp_rank else idle_step(model)
            loss.backward()
            sync_gradients(model, context)  # raises if ranks hold different weights
            assert model.score.weight.grad.abs().max() > 0
