"""Generate with a Hugging Face model on several ranks, while EPLB moves experts between requests.

    torchrun --standalone --nproc-per-node 2 examples/serve.py

The model is a small Qwen3-MoE with random weights, which rank 0 writes to a temporary folder. To use your own
checkpoint, pass its folder or its name on the Hub to `load_pretrained`. The requests use only a few words, so that a
few experts are popular. The outputs are compared with those of `transformers` in one process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ep_moe import EPContext, EPLBConfig, ExpertBalancer, ExpertMap
from ep_moe.integrations.transformers import load_pretrained, read_moe_config

NEW_TOKENS = 6


def write_model(folder: str) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, eos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def request(number: int, context: EPContext) -> Tensor:
    """Return this rank's prompts, [4, length]. Prompts and length differ per rank."""
    rank = context.layout.dp_rank
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(8, (4, 6 + rank), generator=generator).to(context.device)


def answer(model: PreTrainedModel, prompts: Tensor) -> Tensor:
    everything = torch.ones_like(prompts)
    return model.generate(prompts, attention_mask=everything, max_new_tokens=NEW_TOKENS, do_sample=False)


def serve(model: PreTrainedModel, context: EPContext, requests: int) -> tuple[list[Tensor], ExpertBalancer]:
    """Return this rank's answers and the closed balancer, which plans after every 8 requests."""
    balancer = ExpertBalancer(model, context, EPLBConfig(interval=8, window=8))
    answers = []
    with balancer:
        for number in range(requests):
            answers.append(answer(model, request(number, context)))
            balancer.step()  # between requests; also possible after each forward
    return answers, balancer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16, help="of each rank")
    options = parser.parse_args()

    with EPContext.from_torchrun() as context, tempfile.TemporaryDirectory() as own_folder:
        leader = context.layout.rank == 0
        if leader:
            write_model(own_folder)
        folder = [own_folder]
        dist.broadcast_object_list(folder, device=context.device)  # all ranks get the folder of rank 0

        experts, ranks = read_moe_config(folder[0], context).num_experts, context.layout.ep
        with_copies = ExpertMap.redundant(experts, ranks, ranks)  # one more slot on each rank
        model = load_pretrained(folder[0], context, expert_map=with_copies, progress=False)
        model.requires_grad_(False)  # experts move, and an optimizer's state would not move with them
        answers, balancer = serve(model, context, options.requests)

        alone = Qwen3MoeForCausalLM.from_pretrained(folder[0], dtype=torch.float32).to(context.device).eval()
        expected = [answer(alone, request(number, context)) for number in range(options.requests)]
        equal = all(map(torch.equal, answers, expected))
        stats = balancer.stats()
        print(f"rank {context.layout.rank}: {len(answers)} answers, equal to transformers: {equal}", flush=True)
        if leader:
            print(f"{stats.rebalances} rebalances, {stats.commits} layers moved, balancedness {stats.balancedness:.2f}")
        dist.barrier()  # before rank 0 deletes its folder
        return int(not equal or stats.commits == 0)


if __name__ == "__main__":
    sys.exit(main())
