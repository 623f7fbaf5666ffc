"""Train the bundled demo checkpoint: a byte-level Qwen3-MoE on English text that ships with Python.

    python tools/train_demo.py            # about three minutes on 2 CPU cores

The text is `pydoc_data.topics` (Python's own documentation, PSF license). Every tenth topic is held out. The held-out
text is written beside the weights, so that a run on another Python version reads the same bytes. Training is plain
`transformers`, without `ep_moe`.
"""

import argparse
import math
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

OUT = Path(__file__).parent.parent / "ep_moe" / "demo"
HELD_OUT_BYTES = 16384


def split_text() -> tuple[bytes, bytes]:
    """Return training and held-out bytes, split by topic, so that no held-out topic is trained on."""
    names = sorted(topics)
    held_out = names[::10]
    train = "\n\n".join(topics[name] for name in names if name not in held_out)
    return train.encode(), "\n\n".join(topics[name] for name in held_out).encode()[:HELD_OUT_BYTES]


def demo_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        intermediate_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        output_router_logits=True,
        router_aux_loss_coef=0.002,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def batches(data: torch.Tensor, steps: int, batch: int, length: int, generator: torch.Generator):
    for _ in range(steps):
        starts = torch.randint(0, len(data) - length, (batch,), generator=generator)
        yield torch.stack([data[s : s + length] for s in starts.tolist()]).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()

    torch.manual_seed(0)
    train, held_out = split_text()
    data = torch.frombuffer(bytearray(train), dtype=torch.uint8)
    model = Qwen3MoeForCausalLM(demo_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = 50
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warmup) * (0.51 + 0.49 * math.cos(math.pi * step / args.steps)),
    )
    generator = torch.Generator().manual_seed(1)
    start = time.time()
    for step, ids in enumerate(batches(data, args.steps, args.batch, args.length, generator)):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}  {time.time() - start:.0f} s", flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    model.config.output_router_logits = False
    # several shards, so that loading the demo takes the path of a large checkpoint
    model.to(torch.bfloat16).save_pretrained(args.out, max_shard_size="1MB")
    (args.out / "generation_config.json").unlink(missing_ok=True)  # the demo is not used for generation
    (args.out / "heldout.txt").write_bytes(held_out)
    print(f"{sum(p.numel() for p in model.parameters())} parameters written to {args.out}")


if __name__ == "__main__":
    main()
