"""`ep-moe check-exact`: runs the same prompts on several numbers of ranks, expert maps, transports and batch sizes.

With `ExpertsOptions.exact` the results must be bitwise equal. The command compares digests of each layer's output and
of the logits.

Each rank reads its share of the prompts, one at a time. Attention and other dense parts do not belong to this package,
and give a token the same bits only in calls of one shape. Each MoE layer then computes the same rows again in batches
of other sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe import registry
from ep_moe.checkpoint.hub import model_folder
from ep_moe.checkpoint.reader import load_errors_on_all_ranks
from ep_moe.cli.output import log_records
from ep_moe.cli.perplexity import DEMO, text_windows
from ep_moe.cli.run import RunOptions, check_options, model_dtype
from ep_moe.config import ParallelConfig
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.experts.base import ExpertsOptions
from ep_moe.layer import MoELayer
from ep_moe.parallel.groups import TorchrunEnv, init_from_torchrun, local_device
from ep_moe.parallel.layout import split_range
from ep_moe.parallel.local_launch import run_local_ranks
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.selection.explain import AUTO

RANKS = (1, 2, 4)
PROMPTS = "prompts"
BATCHINGS = {PROMPTS: None, "tokens of 3": 3, "all at once": 1 << 30}  # rows per layer call; None: the model's calls
LOGITS = "logits"
_DEADLINE_S = 900.0  # for all runs on one number of ranks


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of `ep-moe check-exact`.

    model: folder of a checkpoint, or a Hub id; None for the demo
    text: a file
    ranks: numbers of ranks; None for the default, or for torchrun's ranks
    prompts: number of prompts
    window: tokens of each prompt
    exact: `ExpertsOptions.exact`; False shows which results differ without it
    """

    model: str | None = None
    revision: str | None = None
    text: str | None = None
    ranks: tuple[int, ...] | None = None
    prompts: int = 6
    window: int = 48
    experts: str = AUTO
    quantization: str = "none"
    dtype: str | None = None
    exact: bool = True
    deadline_s: float = 300.0
    log_level: str | None = None

    def as_run(self) -> RunOptions:
        """Return the options that `ep-moe run` has too."""
        return RunOptions(
            model=self.model, revision=self.revision, text=self.text, window=self.window, experts=self.experts,
            text_tokens=self.prompts * self.window, quantization=self.quantization,
            dtype=self.dtype or ("float32" if self.model is None else "auto"), deadline_s=self.deadline_s,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunDigests:
    """The digests of one way of running.

    digests: by name of a layer, in order, and of LOGITS if the whole model ran
    """

    ranks: int
    expert_map: str
    all2all: str
    experts: str
    batching: str
    digests: dict[str, str]

    @property
    def checksum(self) -> str:
        """The checksum of all layers' digests."""
        text = "".join(digest for name, digest in self.digests.items() if name != LOGITS)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differs_from(self, other: RunDigests) -> str | None:
        """Return the first name whose digest differs; None if all are equal."""
        both = (name for name in self.digests if name in other.digests)
        return next((name for name in both if self.digests[name] != other.digests[name]), None)


def run(options: CheckOptions) -> list[RunDigests] | None:
    """Run all ways and return their digests. Return None on ranks other than 0. Others are compared with the first."""
    _check(options)
    if TorchrunEnv.present():
        device = local_device()
        init_from_torchrun(device, deadline_s=options.deadline_s)
        try:
            return run_on_rank(options, device)
        finally:
            dist.destroy_process_group()
    arguments = {
        "options": options,
        "device": torch.device("cpu"),
        "folder": model_folder(options.model or str(DEMO), revision=options.revision),
        "forked": True,
    }
    found: list[RunDigests] = []
    for ranks in options.ranks or RANKS:
        longest = max(3 * options.deadline_s, _DEADLINE_S)
        target = "ep_moe.cli.check_exact:run_on_rank"
        # one thread on any number of ranks, because results of dense parts may depend on the number of threads
        found += run_local_ranks(target, ranks, arguments, deadline_s=longest, threads=1)[0]
    return found


def run_on_rank(
    options: CheckOptions, device: torch.device, folder: Path | None = None, *, forked: bool = False
) -> list[RunDigests] | None:
    """Run all ways on the current number of ranks. folder, forked: as in `ep_moe.cli.run.run_on_rank`"""
    if forked and options.log_level is not None:
        with log_records(options.log_level):
            return run_on_rank(options, device, folder)
    from ep_moe.integrations.transformers import load_pretrained, num_experts

    world, found = dist.get_world_size(), []
    asked = options.as_run()
    with EPContext.from_groups(ParallelConfig(dp=world), device=device, deadline_s=options.deadline_s) as context:
        if folder is None:
            folder = model_folder(options.model or str(DEMO), context.consensus, revision=options.revision)
        with load_errors_on_all_ranks(folder, context.consensus):
            dtype = model_dtype(asked.dtype, folder)
            windows = text_windows(asked.text, asked.text_tokens, asked.window, folder)
        experts = num_experts(folder, context)
        for name, expert_map in _maps(experts, world).items():
            for all2all in _transports(world, device):
                model = load_pretrained(
                    folder, context, dtype=dtype, expert_map=expert_map, all2all=all2all, experts=options.experts,
                    quantization=options.quantization, options=ExpertsOptions(exact=options.exact), progress=False,
                )  # fmt: skip
                for batching, digests, kernel in _digests(model, windows, context):
                    found.append(
                        RunDigests(
                            ranks=world, expert_map=name, all2all=all2all, experts=kernel, batching=batching,
                            digests=digests,
                        )
                    )  # fmt: skip
    return found if dist.get_rank() == 0 else None


def _check(options: CheckOptions) -> None:
    for name, low in (("prompts", 1), ("window", 2)):
        if getattr(options, name) < low:
            raise ConfigError(f"--{name} must be at least {low}, got {getattr(options, name)}")
    check_options(options.as_run())
    if options.ranks is not None and (len(options.ranks) == 0 or min(options.ranks) < 1 or max(options.ranks) > 64):
        raise ConfigError(f"--ranks must be numbers in [1, 64], got {', '.join(map(str, options.ranks))}")
    if options.ranks is not None and TorchrunEnv.present():
        raise ConfigError("--ranks is for ranks that are started here; under torchrun leave it out")


def _maps(experts: int, ranks: int) -> dict[str, ExpertMap]:
    """Return the maps to compare: experts in order, and a map with a second copy of some experts."""
    if ranks == 1:
        return {"linear": ExpertMap.linear(experts, 1)}
    return {
        "linear": ExpertMap.linear(experts, ranks),
        "redundant": ExpertMap.redundant(experts, ranks, min(ranks, experts * (ranks - 1))),
    }


def _transports(ranks: int, device: torch.device) -> Sequence[str]:
    if ranks == 1:
        return "local", "allgather"
    kind = registry.load("dispatchers", "nvlink_p2p")
    static = device.type in kind.capabilities.devices and kind.available() is None
    return ("nvlink_p2p", "allgather") if static else ("torch_a2a", "allgather")


@torch.no_grad()
def _digests(model: Any, windows: Tensor, context: EPContext) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield for each batching its name, the digests by layer of all prompts in order, and the kernel's name."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
    layout, kernel = context.layout, next(iter(layers.values())).choice.experts
    mine = windows[slice(*split_range(len(windows), layout.world, layout.rank))]
    most = -(-len(windows) // layout.world)
    rows: dict[str, list[Tensor]] = {name: [] for name in layers}
    outs: dict[str, list[Tensor]] = {name: [] for name in (*layers, LOGITS)}
    hooks = [layer.register_forward_hook(_keeper(rows[name], outs[name])) for name, layer in layers.items()]
    for step in range(most):
        if step < len(mine):
            outs[LOGITS].append(model(input_ids=mine[step : step + 1].to(model.device)).logits[0])
        else:  # a rank without a prompt still computes its experts for the others
            for layer in layers.values():
                layer(torch.empty(0, layer.config.hidden_size, dtype=layer.dtype, device=layer.device))
    for hook in hooks:
        hook.remove()
    yield PROMPTS, {name: _digest(parts, context) for name, parts in outs.items()}, kernel
    for batching, size in BATCHINGS.items():
        if size is None:
            continue
        found = {}
        for name, layer in layers.items():
            whole = torch.cat([*rows[name], _nothing(layer)])
            longest = -(-most * windows.shape[1] // size)  # number of calls of the rank with the most rows
            parts = [layer(whole[call * size : (call + 1) * size]) for call in range(longest)]
            found[name] = _digest(parts, context)
        yield batching, found, kernel


def _keeper(rows: list[Tensor], outs: list[Tensor]) -> Any:
    def keep(layer: MoELayer, given: tuple[Tensor, ...], out: Tensor) -> None:
        rows.append(given[0].detach().reshape(-1, layer.config.hidden_size).clone())
        outs.append(out.detach().reshape(-1, layer.config.hidden_size).clone())

    return keep


def _nothing(layer: MoELayer) -> Tensor:
    return torch.empty(0, layer.config.hidden_size, dtype=layer.dtype, device=layer.device)


def _digest(parts: Sequence[Tensor], context: EPContext) -> str:
    """Return a digest of the rows of all ranks in order. It hashes row by row, so it does not depend on batch sizes."""
    own = []
    for part in parts:
        flat = part.detach().contiguous().view(torch.uint8).cpu()
        own += [hashlib.sha256(row.numpy().tobytes()).digest() for row in flat.view(len(part), -1)] if len(part) else []
    found: list[Any] = [None] * context.layout.world
    dist.all_gather_object(found, b"".join(own))
    return hashlib.sha256(b"".join(found)).hexdigest()[:16]
