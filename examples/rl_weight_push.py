"""Push a trainer's weights into a serving model on the same ranks, as reinforcement learning does after each update.

    torchrun --standalone --nproc-per-node 2 examples/rl_weight_push.py [--quantization fp8_dynamic]

The trainer uses the linear expert map. The serving model uses another expert map, with a second copy of some experts,
and may quantize its experts. `export_weights` gathers the trainer's tensors layer by layer. `load_weights` writes them
into the serving model, between two calls. After each push, both models must compute the same logits.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from ep_moe import EPContext, ExpertMap
from ep_moe.integrations.transformers import expert_parallel, export_weights, load_weights
from ep_moe.training import clip_grad_norm_, parameter_groups, sync_gradients

CONFIG = Qwen3MoeConfig(
    vocab_size=256, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
CLOSE = 1e-4  # of the largest logit: float32 sums in another order
ROUNDED = 0.1  # of the largest logit, for quantized experts


def tiny_model(context: EPContext) -> Any:
    """Make a model with the same random weights on all ranks."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).to(context.device)


def train(trainer: Any, optimizer: torch.optim.Optimizer, context: EPContext, update: int) -> float:
    """Update the trainer once, on this rank's own samples, and return the loss."""
    generator = torch.Generator().manual_seed(1000 * update + context.layout.dp_rank)
    ids = torch.randint(0, CONFIG.vocab_size, (4, 16), generator=generator).to(context.device)
    loss = trainer(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    sync_gradients(trainer, context)
    clip_grad_norm_(trainer, context, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@torch.no_grad()
def logits(model: Any, prompts: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=prompts, use_cache=False).logits
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--quantization", default="none", help="of the serving model's experts")
    options = parser.parse_args()

    with EPContext.from_torchrun() as context:
        trainer = expert_parallel(tiny_model(context), context, experts="reference").train()
        optimizer = torch.optim.AdamW(parameter_groups(trainer), lr=1e-2)
        ranks = context.layout.ep
        serving = expert_parallel(
            tiny_model(context).requires_grad_(False),
            context,
            expert_map=ExpertMap.redundant(CONFIG.num_experts, ranks, ranks),
            quantization=options.quantization,
        ).eval()

        prompts = torch.arange(10 + context.layout.rank, device=context.device)[None]
        bound = CLOSE if options.quantization == "none" else ROUNDED
        for update in range(options.updates):
            loss = train(trainer, optimizer, context, update)
            wanted, stale = logits(trainer, prompts), logits(serving, prompts)
            start = time.perf_counter()
            loaded = load_weights(serving, export_weights(trainer))
            seconds = time.perf_counter() - start
            largest = wanted.abs().max()
            late, off = (float((found - wanted).abs().max() / largest) for found in (stale, logits(serving, prompts)))
            assert off < bound < late, f"{off:.1e} of the largest logit off after the push, {late:.1e} before it"
            if context.layout.rank == 0:
                print(
                    f"update {update}: loss {loss:.4f}, {len(loaded)} tensors in {seconds:.2f} s, "
                    f"{late:.1e} of the largest logit off before the push, {off:.1e} after it"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
