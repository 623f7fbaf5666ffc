"""Push a trainer's weights into a serving layer on the same ranks, as reinforcement learning does after each update.

    torchrun --standalone --nproc-per-node 2 examples/rl_weight_push.py

The trainer has its experts in order over the ranks. The serving layer has another expert map, with a second copy of
some experts. Each push broadcasts one expert after the other from the rank that trains it, so that a rank holds one
foreign expert at a time. After each push the serving layer must give what the trainer gives.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from ep_moe import EPContext, ExpertMap, MoEConfig, MoELayer
from ep_moe.training import clip_grad_norm_, parameter_groups, sync_gradients

CONFIG = MoEConfig(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32; the serving layer adds up in another order


@torch.no_grad()
def push(trainer: MoELayer, serving: MoELayer, context: EPContext) -> int:
    """Write all of the trainer's weights into the serving layer. Collective. Returns the slots written on this rank."""
    ranks = context.rank_groups["ep"].ranks
    parameters = dict(trainer.expert_weights.named_parameters())  # of this rank: "3.w1" (gate), "3.w3" (up), "3.w2"
    inner, hidden = CONFIG.intermediate_size, CONFIG.hidden_size
    written = 0
    for expert in range(CONFIG.num_experts):
        owner = trainer.placement.expert_map.primary_owner(expert)
        w13 = torch.empty(2 * inner, hidden, device=context.device, dtype=trainer.dtype)
        w2 = torch.empty(hidden, inner, device=context.device, dtype=trainer.dtype)
        if context.layout.ep_rank == owner:
            torch.cat([parameters[f"{expert}.w1"], parameters[f"{expert}.w3"]], out=w13)  # gate, then up
            w2.copy_(parameters[f"{expert}.w2"])
        for tensor in (w13, w2):
            dist.broadcast(tensor, src=ranks[owner], group=context.rank_groups["ep"].group)
        # on all ranks with the same tensors; a quantized serving layer rounds them here
        written += serving.update_expert(expert, w13=w13.to(serving.dtype), w2=w2.to(serving.dtype))
    serving.router.load_state_dict(trainer.router.state_dict())  # equal on all ranks
    return written


def train(trainer: MoELayer, optimizer: torch.optim.Optimizer, context: EPContext, update: int) -> float:
    """One update on this rank's own samples."""
    generator = torch.Generator().manual_seed(1000 * update + context.layout.dp_rank)
    x = torch.randn(64, CONFIG.hidden_size, generator=generator).to(context.device)
    loss = mse_loss(trainer(x), x)
    loss.backward()
    sync_gradients(trainer, context)
    clip_grad_norm_(trainer, context, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=5)
    options = parser.parse_args()

    with EPContext.from_torchrun() as context:
        torch.manual_seed(0)
        trainer = MoELayer(CONFIG, context, experts="reference", name="trainer")
        optimizer = torch.optim.AdamW(parameter_groups(trainer), lr=1e-2)
        ranks = context.layout.ep
        with_copies = ExpertMap.redundant(CONFIG.num_experts, ranks, ranks)
        serving = MoELayer(CONFIG, context, expert_map=with_copies, name="serving").requires_grad_(False)

        prompts = torch.randn(10 + context.layout.rank, CONFIG.hidden_size, device=context.device)
        for update in range(options.updates):
            loss = train(trainer, optimizer, context, update)
            with torch.no_grad():
                wanted, stale = trainer(prompts), serving(prompts)
                written = push(trainer, serving, context)
                torch.testing.assert_close(serving(prompts), wanted, **TOLERANCE)
            late = float((stale - wanted).abs().max())
            if context.layout.rank == 0:
                print(f"update {update}: loss {loss:.4f}, {written} slots written here, {late:.1e} off before the push")
            assert late > 1e-3, "the weights did not change, so the push shows nothing"
    return 0


if __name__ == "__main__":
    sys.exit(main())
