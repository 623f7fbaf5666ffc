"""Computes the perplexity of a text, by a model on several ranks and by the untouched model in one process.

For `ep-moe run --eplb`, the text is read again while experts move, and after they have moved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_moe.context import EPContext
from ep_moe.eplb.balancer import ExpertBalancer
from ep_moe.eplb.config import EPLBConfig
from ep_moe.eplb.migration.consensus import State
from ep_moe.eplb.planner.score import critical_path
from ep_moe.eplb.trace import LoadTrace
from ep_moe.errors import ConfigError
from ep_moe.layer import MoELayer
from ep_moe.parallel.layout import split_range
from ep_moe.placement.placement import LayerStats

DEMO = resources.files("ep_moe") / "demo"
BYTES_PER_STEP = 1 << 20  # small, so that the demo's move takes more than one step
_PASSES = 40  # most passes over the text until all experts have moved


def text_windows(file: str | None, most: int, window: int, folder: Path) -> Tensor:
    """Read at most `most` tokens of a text file, int64 [windows, window]. A last incomplete window is dropped.

    file: None for the demo's held-out text
    """
    path = Path(file) if file else Path(str(DEMO / "heldout.txt"))
    raw = path.read_bytes()
    if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
        ids = torch.tensor(_tokenizer(folder)(raw.decode("utf-8", "replace"))["input_ids"])
    else:
        ids = torch.tensor(list(raw))  # without a tokenizer a token is a byte, as in the demo
    ids = ids[:most]
    if len(ids) < window:
        raise ConfigError(
            f"{path} gives {len(ids)} tokens (at most --text-tokens), fewer than one --window of {window}"
        )
    return ids[: len(ids) // window * window].view(-1, window)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # broken files, or a class of the repository's own code, which is not run
        raise ConfigError(
            f"{folder} has a tokenizer that transformers cannot make without code of its repository, or cannot read: "
            f"{type(error).__name__}: {error}; remove its files to read the text as bytes"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The results of one reading of the text, over all ranks.

    predicted: number of predicted tokens
    expert_load, rank_load: routes by layer, and by logical expert or EP rank
    stages: milliseconds of the slowest rank, by stage
    recorded: the load of each forward, if requested
    """

    predicted: int
    perplexity: float
    expert_load: list[list[int]]
    rank_load: list[list[int]]
    stages: dict[str, float]
    recorded: LoadTrace | None


class TextReader:
    """Reads this rank's share of a text's windows [windows, window] in `steps` forwards, equally many on all ranks.

    The constructor runs one warm-up forward, whose load is not counted.
    """

    def __init__(self, model: Any, layers: Sequence[MoELayer], windows: Tensor, batch: int, context: EPContext) -> None:
        self._model, self._layers, self._batch = model, layers, batch
        layout = context.layout
        self._mine = windows[slice(*split_range(len(windows), layout.dp, layout.dp_rank))]
        most = -(-len(windows) // layout.dp)
        self.steps = -(-most // batch)
        self._step(self._mine[:1])
        for layer in layers:
            layer.placement.reset_load()

    def forward(self, step: int) -> tuple[float, int]:
        """Run one forward. Return the summed negative log likelihood and the number of predicted tokens."""
        return self._step(self._mine[step * self._batch : (step + 1) * self._batch])

    @torch.no_grad()
    def _step(self, windows: Tensor) -> tuple[float, int]:
        """Run a forward. A rank without windows still computes its experts for the others."""
        if not len(windows):
            for layer in self._layers:
                layer(torch.empty(0, layer.config.hidden_size, dtype=layer.dtype, device=layer.device))
            return 0.0, 0
        return _nll(self._model, windows)


def _nll(model: Any, windows: Tensor) -> tuple[float, int]:
    ids = windows.to(model.device)
    logits = model(input_ids=ids).logits[:, :-1].double()
    targets = ids[:, 1:]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return float(loss), targets.numel()


@torch.no_grad()
def reference_perplexity(folder: Path, windows: Tensor, batch: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the perplexity of the untouched model, in this process alone."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).to(device).eval()
    parts = [_nll(model, part) for part in windows.split(batch)]
    return math.exp(sum(nll for nll, _ in parts) / sum(count for _, count in parts))


@dataclass(frozen=True, kw_only=True)
class Rebalanced:
    """The results of one rebalance.

    before, after: balancedness of the text's load: sum over layers of the mean rank load / sum of the largest
    perplexity: perplexity after the rebalance
    sent_bytes: bytes sent between ranks, over all ranks
    forwards: number of forwards during the rebalance
    usual_ms: the median forward before it, with its `ExpertBalancer.step`, of the slowest rank
    longest_ms: the longest forward during it, with its `ExpertBalancer.step`, of the slowest rank
    """

    before: float
    after: float
    perplexity: float
    sent_bytes: int
    forwards: int
    usual_ms: float
    longest_ms: float


def rebalance(
    layers: Sequence[MoELayer], context: EPContext, forward: Callable[[int], tuple[float, int]], steps: int
) -> Rebalanced:
    """Read the text while a balancer moves experts, then once more. Called by all ranks.

    forward: runs one of the text's `steps` forwards; returns its negative log likelihood and tokens
    """
    for layer in layers:
        layer.expert_weights.requires_grad_(False)
        layer.placement.reset_load()
    config = EPLBConfig(interval=steps, window=steps, bytes_per_step=BYTES_PER_STEP)
    usual: list[float] = []
    moving: list[float] = []
    before: tuple[LayerStats, ...] = ()
    with ExpertBalancer(list(layers), context, config) as balancer:
        for number in range(_PASSES * steps):
            under_way = balancer.state is not State.IDLE
            if before and balancer.state not in (State.PLANNING, State.MOVING):
                break
            start = time.perf_counter()
            forward(number % steps)
            balancer.step()
            (moving if under_way else usual).append(1e3 * (time.perf_counter() - start))
            before = before or balancer.stats().layers
        balancer.settle()
        received = balancer.stats().received_bytes
    nll, count, after = _again(layers, forward, steps)
    facts = torch.tensor([nll, count, received], dtype=torch.float64)
    if context.layout.tp_rank:
        facts[:2] = 0  # ranks of a tp group read the same text, so only the first one counts
    facts = over_ranks(facts, context)
    slowest = over_ranks(torch.tensor([*usual, *moving], dtype=torch.float64), context, dist.ReduceOp.MAX)
    return Rebalanced(
        before=critical_path([layer.rank_load for layer in before]),
        after=critical_path([layer.rank_load for layer in after]),
        perplexity=math.exp(float(facts[0] / facts[1])),
        sent_bytes=int(facts[2]),
        forwards=len(moving),
        usual_ms=float(slowest[: len(usual)].median()),
        longest_ms=float(slowest[len(usual) :].max()) if moving else 0.0,
    )


def _again(
    layers: Sequence[MoELayer], forward: Callable[[int], tuple[float, int]], steps: int
) -> tuple[float, int, list[LayerStats]]:
    """Read the text once more, and count its load from zero."""
    for layer in layers:
        layer.placement.reset_load()
    parts = [forward(step) for step in range(steps)]
    return sum(nll for nll, _ in parts), sum(count for _, count in parts), [layer.stats() for layer in layers]


def over_ranks(values: Tensor, context: EPContext, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce values over all ranks. Return the result on the CPU."""
    values = values.to(context.device)
    dist.all_reduce(values, op=operation)
    return values.cpu()
