"""Run a rollout on 2 ranks and its trainer in one process, with bitwise equal log-probabilities.

    torchrun --standalone --nproc-per-node 2 examples/rollout_replay.py

The rollout has redundant experts and generates tokens one by one. The trainer computes all positions of all sequences
in one call. Every operation of the model is exact: the MoE layers use `ExpertsOptions(exact=True)`, and all other
operations use `ep_moe.runtime.batch_invariant`. The trainer then takes a step, and replays the rollout's routes with
its new weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ep_moe import EPContext, ExpertMap, ExpertsOptions, MoEConfig, MoELayer, RoutingConfig
from ep_moe.runtime import batch_invariant
from ep_moe.training import record_routing, replay_routing

WIDTH, VOCABULARY, EXPERTS, LAYERS = 256, 64, 8, 2
PROMPTS, PROMPT, TOKENS = 3, 4, 12  # sequences of each rank, tokens of a prompt, tokens of a sequence
CONFIG = MoEConfig(
    hidden_size=WIDTH, intermediate_size=128, num_experts=EXPERTS, top_k=2, shared_intermediate_size=64,
    routing=RoutingConfig(renormalize=True),
)  # fmt: skip


class Model(nn.Module):
    """A small MoE model. Instead of attention, each position sees its token and a running sum of the earlier ones."""

    def __init__(self, context: EPContext, expert_map: ExpertMap | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = ExpertsOptions(exact=True)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(
            MoELayer(CONFIG, context, expert_map=expert_map, options=options) for _ in range(LAYERS)
        )
        self.to(context.device)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the log-probabilities of the next token, [T, V]. rows: [T, H], from `embedded`"""
        for layer in self.layers:
            rows = rows + layer(rows)
        scores = batch_invariant.linear(rows, self.head.weight, self.head.bias)
        return batch_invariant.pointwise(torch.log, batch_invariant.softmax(scores))

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the rows of all positions, [B, S, H]. tokens: int64 [B, S]"""
        before = torch.zeros(len(tokens), WIDTH, device=tokens.device)
        rows = []
        for token in tokens.unbind(1):
            before = before / 2 + self.embedding(token)
            rows.append(before)
        return torch.stack(rows, 1)


@torch.no_grad()
def rollout(model: Model, tokens: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return the sequences [B, S], and the log-probabilities of the tokens that were drawn, [B, S - PROMPT]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(TOKENS - PROMPT):
        found = model(model.embedded(tokens)[:, -1])  # one row of each sequence
        chosen = torch.multinomial(found.exp().cpu(), 1, generator=generator).to(tokens.device)
        drawn.append(found.gather(1, chosen))
        tokens = torch.cat([tokens, chosen], 1)
    return tokens, torch.cat(drawn, 1)


def of_drawn(model: Model, tokens: Tensor) -> Tensor:
    """Compute the same log-probabilities for all sequences in one call."""
    rows = model.embedded(tokens)[:, PROMPT - 1 : -1]
    found = model(rows.flatten(0, 1)).view(*rows.shape[:2], VOCABULARY)
    return found.gather(2, tokens[:, PROMPT:].unsqueeze(2)).squeeze(2)


def in_order(ids: dict[str, Tensor]) -> dict[str, Tensor]:
    """Arrange recorded ids, one call per position, in the order of the trainer's rows: [B, S - PROMPT, K]."""
    return {name: found.view(TOKENS - PROMPT, PROMPTS, -1).transpose(0, 1).contiguous() for name, found in ids.items()}


def main() -> None:
    with EPContext.from_torchrun() as context:
        ranks = context.layout.ep
        expert_map = ExpertMap.redundant(EXPERTS, ranks, ranks * (ranks > 1))
        model = Model(context, expert_map)
        generator = torch.Generator().manual_seed(context.layout.rank)
        prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT), generator=generator).to(context.device)
        with record_routing(model, rows=PROMPTS * (TOKENS - PROMPT)) as record:
            tokens, drawn = rollout(model, prompts, context.layout.rank)
        ids = in_order(record.ids())

    with EPContext.local(context.device) as alone:
        trainer = Model(alone)
        found = of_drawn(trainer, tokens)
        if not torch.equal(found, drawn):
            raise SystemExit(f"log-probabilities differ in {int((found != drawn).sum())} of {drawn.numel()} tokens")
        with replay_routing(trainer, ids):
            assert torch.equal(of_drawn(trainer, tokens), drawn)
        who = f"rank {context.layout.rank}"
        print(f"{who}: {drawn.numel()} log-probabilities of {ranks} ranks and of one process are equal")

        optimizer = torch.optim.SGD(trainer.parameters(), lr=0.01)
        with replay_routing(trainer, ids):
            (-of_drawn(trainer, tokens).mean()).backward()
        optimizer.step()
        with replay_routing(trainer, ids), record_routing(trainer, rows=drawn.numel()) as again:
            ratio = (of_drawn(trainer, tokens) - drawn).exp()
        same = all(torch.equal(again.ids()[name], found.flatten(0, 1)) for name, found in ids.items())
        print(f"{who}: after a step the ratio is {ratio.mean():.4f}, over the same experts: {same}")


if __name__ == "__main__":
    main()
