"""Train a small MoE transformer on text, on any number of ranks, and resume it on any other.

    torchrun --standalone --nproc-per-node 2 examples/train.py --steps 6 --save /tmp/checkpoint
    torchrun --standalone --nproc-per-node 4 examples/train.py --steps 12 --resume /tmp/checkpoint --check

Each rank has its own sequences (data parallel) and its own experts (expert parallel over the same ranks). `--check`
also trains the same model in one process, and fails unless the losses agree.
"""

from __future__ import annotations

import argparse
import sys
from importlib import resources
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.training import clip_grad_norm_, load_balancing_loss, router_logits, sync_gradients

WIDTH, HEADS, LAYERS, VOCABULARY = 64, 4, 2, 256  # a token is a byte
BATCH, LENGTH = 16, 64
CONFIG = MoEConfig(hidden_size=WIDTH, intermediate_size=96, num_experts=8, top_k=2)
AUX_LOSS, MAX_NORM, BOUND = 1e-2, 1.0, 1e-5


class Block(nn.Module):
    def __init__(self, context: EPContext) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.moe = MoELayer(CONFIG, context, experts="reference")  # has a backward on every device

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.moe(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, context: EPContext) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(context) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # backward recomputes activations
        return self.head(self.norm(x))


def make(context: EPContext) -> tuple[Transformer, torch.optim.AdamW]:
    torch.manual_seed(0)  # with the same seed on all ranks, the weights do not depend on the number of ranks
    model = Transformer(context).to(context.device)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch(step: int, context: EPContext) -> Tensor:
    """Return this rank's share of the step's sequences, int64 [BATCH / dp, LENGTH + 1]."""
    text = resources.files("ep_moe").joinpath("demo", "heldout.txt").read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()]).long()
    return rows.chunk(context.layout.dp)[context.layout.dp_rank].to(context.device)


def train(model: Transformer, optimizer: torch.optim.Optimizer, context: EPContext, steps: range) -> list[float]:
    """Train for `steps`, and return the mean loss over ranks of each step."""
    losses = []
    for step in steps:
        tokens = batch(step, context)
        with router_logits(model) as logits:
            predicted = model(tokens[:, :-1])
        loss = cross_entropy(predicted.flatten(0, 1), tokens[:, 1:].flatten())
        (loss + AUX_LOSS * load_balancing_loss(logits, CONFIG.top_k, context=context)).backward()
        sync_gradients(model, context)
        clip_grad_norm_(model, context, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if context.layout.world > 1:
            dist.all_reduce(total)
        losses.append(float(total) / context.layout.world)
    return losses


def state_of(model: Transformer, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Return a state dict with names, which any number of ranks can load."""
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "step": torch.tensor(step)}


def load(path: str, model: Transformer, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, and return the next step."""
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of the whole run, those before a resume included")
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    parser.add_argument("--resume", help="folder of a checkpoint, made on any number of ranks")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    options = parser.parse_args()

    with EPContext.from_torchrun() as context:
        if context.device.type == "cuda":
            torch.cuda.set_device(context.device)  # torch's checkpoint gathers objects on the current device
        model, optimizer = make(context)
        first = load(options.resume, model, optimizer) if options.resume else 0
        losses = train(model, optimizer, context, range(first, options.steps))
        if options.save:
            dcp.save(state_of(model, optimizer, options.steps), checkpoint_id=options.save)
        leader = context.layout.rank == 0
        if leader:
            for step, loss in enumerate(losses, first):
                print(f"step {step:3d}  loss {loss:.6f}")
        if not options.check:
            return 0
        alone = EPContext.local(context.device)
        wanted = train(*make(alone), alone, range(options.steps))[first:]
        worst = max(abs(found - one) / one for found, one in zip(losses, wanted, strict=True))
        if leader:
            print(f"{context.layout.world} ranks and one process agree to {worst:.1e} (allowed: {BOUND:.0e})")
        return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
