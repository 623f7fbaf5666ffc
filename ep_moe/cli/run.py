"""`ep-moe run`: a real model on real text on ranks, and the proof that its perplexity is the single process's."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ep_moe import registry
from ep_moe.checkpoint.hub import model_folder
from ep_moe.checkpoint.reader import loading
from ep_moe.checks import check_picture, check_target, deadline_problem, did_you_mean
from ep_moe.cli.output import log_records, note
from ep_moe.cli.run_eplb import Rebalanced, rebalance
from ep_moe.config import ONE_SCALE, ParallelConfig, Wire
from ep_moe.context import EPContext
from ep_moe.eplb.load import LoadRecorder
from ep_moe.eplb.trace import LoadTrace
from ep_moe.errors import ConfigError
from ep_moe.layer import MoELayer
from ep_moe.metrics import stages as watched_stages
from ep_moe.parallel.groups import TorchrunEnv, init_from_torchrun, local_device
from ep_moe.parallel.layout import share
from ep_moe.parallel.local_launch import run_local_ranks
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.quant.schemes import PLAIN, SCHEMES
from ep_moe.runtime.profiling import balancedness
from ep_moe.runtime.progress import Progress
from ep_moe.selection.explain import AUTO
from ep_moe.selection.tuned import Tuned

LAPTOP_RANKS = 4
_MOST_LOCAL_RANKS = 128  # each is a process of a few hundred MiB
_LOCAL_DEADLINE_S = 900.0  # of a whole run on this machine, however soon a silent peer is lost
DEMO = resources.files("ep_moe") / "demo"
DIGITS = 5  # to which the perplexities must agree in float32
_REFERENCE_BYTES = 32 * 2**30  # of files: what a GPU or a laptop holds beside this rank's own part
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `ep-moe run` was asked for. None: chosen by `settle`.

    model: folder of a Hugging Face checkpoint, or a model's name on the Hub; revision: its branch, tag or commit
    text: a file, read as UTF-8
    window: tokens per sequence; batch: sequences per dp rank and forward; text_tokens: of the text to read
    dtype: "float32", "bfloat16", "float16" or "auto" for the checkpoint's
    reference: also run the untouched model in one process; None: where its weights are few enough
    redundant: experts that have a second copy; eplb: rebalance the experts, and read the text again
    trace: a file for torch.profiler's trace of one more forward, of rank 0; plot: a picture of the load
    record_load: a file for the load of each forward, which `ep-moe plan` reads
    quiet: show no progress
    tuned: a file of `ep-moe tune`; log_level: the least that ranks which are forked here write to stderr, None for what
    logging is set to
    """

    model: str | None = None
    revision: str | None = None
    text: str | None = None
    dp: int | None = None
    tp: int | None = None
    ep: int | None = None
    etp: int = 1
    all2all: str = "auto"
    experts: str = "auto"
    quantization: str = PLAIN.name
    dtype: str | None = None
    window: int = 256
    batch: int = 8
    text_tokens: int = 16384
    reference: bool | None = None
    redundant: int = 0
    eplb: bool = False
    wire: str = "plain"
    tuned: str | None = None
    trace: str | None = None
    plot: str | None = None
    record_load: str | None = None
    quiet: bool = False
    deadline_s: float = 300.0
    log_level: str | None = None

    @property
    def is_demo(self) -> bool:
        return self.model is None


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What a run found. Loads are routes (token, expert) per layer; times are milliseconds, the slowest rank's."""

    title: str
    tokens: int
    perplexity: float
    reference: float | None
    exact: bool  # float32, not quantised: the perplexities must agree
    expert_load: list[list[int]]  # [layer][logical expert]
    rank_load: list[list[int]]  # [layer][EP rank]
    stages: dict[str, float]
    forwards: int
    rebalanced: Rebalanced | None = None
    left_out: str | None = None  # why there is no reference, which was not asked for
    recorded: LoadTrace | None = None

    @property
    def agrees(self) -> bool:
        """To the last printed digit."""
        found = {self.perplexity, *([self.reference] if self.reference is not None else [])}
        found |= {self.rebalanced.perplexity} if self.rebalanced else set()
        return len({f"{value:#.{DIGITS}g}" for value in found}) == 1

    @property
    def balancedness(self) -> list[float]:
        return [balancedness(load) for load in self.rank_load]


def run(options: RunOptions) -> RunReport | None:
    """Run on torchrun's ranks where there are any, else on ranks forked here. None on ranks other than 0."""
    check_options(options)
    if TorchrunEnv.present():
        world = TorchrunEnv.read().world_size
        device = local_device()
        init_from_torchrun(device, deadline_s=options.deadline_s)
        try:
            return run_on_rank(settle(options, world), device)
        finally:
            dist.destroy_process_group()
    world = (options.dp or 1) * (options.tp or 1) if options.dp or options.tp else LAPTOP_RANKS
    if world > _MOST_LOCAL_RANKS:
        raise ConfigError(
            f"--dp * --tp = {world} ranks are more than the {_MOST_LOCAL_RANKS} that ep-moe run starts on one machine; "
            f"give smaller ones, or start the ranks with torchrun"
        )
    arguments = {
        "options": settle(options, world),
        "device": torch.device("cpu"),
        "folder": model_folder(options.model or str(DEMO), revision=options.revision),
        "forked": True,
    }
    longest = max(3 * options.deadline_s, _LOCAL_DEADLINE_S)
    if not options.quiet:
        note(f"run: starting {world} rank{'s' if world > 1 else ''} on this machine")
    report: RunReport = run_local_ranks("ep_moe.cli.run:run_on_rank", world, arguments, deadline_s=longest)[0]
    return report


def settle(options: RunOptions, world: int) -> RunOptions:
    """Fill in what was left open for this number of ranks. The demo shows tp = 2 where it can."""
    tp = options.tp
    if tp is None:
        tp = world // options.dp if options.dp and world % options.dp == 0 else 1
        if options.dp is None and options.is_demo and world % 2 == 0:
            tp = 2
    if options.dp is None and world % tp:
        raise ConfigError(f"tp={tp} must divide the number of ranks, got {world}; give --dp and --tp")
    dp = options.dp if options.dp is not None else world // tp
    return replace(options, dp=dp, tp=tp, dtype=options.dtype or ("float32" if options.is_demo else "auto"))


def run_on_rank(
    options: RunOptions, device: torch.device, folder: Path | None = None, *, forked: bool = False
) -> RunReport | None:
    """One rank's part, within an initialised process group.

    folder: of the model, None to look it up; forked: in a process of its own, where nothing has set logging
    """
    if forked and options.log_level is not None:
        with log_records(options.log_level):
            return run_on_rank(options, device, folder)
    from ep_moe.integrations.transformers import load_pretrained, moe_layers, num_experts

    assert options.dp is not None
    assert options.tp is not None
    parallel = ParallelConfig(dp=options.dp, tp=options.tp, ep=options.ep, etp=options.etp)
    tuned = None if options.tuned is None else Tuned.load(options.tuned)
    tokens = options.batch * options.window  # of a forward: opens the transports with fixed buffers
    with EPContext.from_groups(parallel, device=device, deadline_s=options.deadline_s, max_tokens=tokens) as context:
        if folder is None:
            folder = model_folder(options.model or str(DEMO), context.consensus, revision=options.revision)
        with loading(folder, context.consensus):
            dtype = model_dtype(options.dtype, folder)
            windows = text_windows(options, folder)
        expert_map = None
        if options.redundant:
            expert_map = ExpertMap.redundant(num_experts(folder, context), context.layout.ep, options.redundant)
        model = load_pretrained(
            folder,
            context,
            dtype=dtype,
            expert_map=expert_map,
            all2all=options.all2all,
            experts=options.experts,
            quantization=options.quantization,
            wire=_wire(options.wire, folder, context),
            tuned=tuned,
            progress=not options.quiet,
        )
        if int(windows.max()) >= model.config.vocab_size:
            raise ConfigError(
                f"--text has token {int(windows.max())}, but the model knows {model.config.vocab_size}; without "
                f"tokenizer files the text is read as bytes"
            )
        layers = moe_layers(model)
        mine = windows[slice(*share(len(windows), options.dp, context.layout.dp_rank))]
        most = -(-len(windows) // options.dp)
        steps = -(-most // options.batch)
        _step(model, layers, mine[:1])  # warm up, and leave it out of times and loads
        for layer in layers:
            layer.placement.reset_load()

        def forward(step: int) -> tuple[float, int]:
            return _step(model, layers, mine[step * options.batch : (step + 1) * options.batch])

        nll, count = 0.0, 0
        recorder = None
        if options.record_load is not None:
            recorder = LoadRecorder(layers, context.rank_groups["lockstep"], steps=steps)
        shown = not options.quiet and context.layout.rank == 0
        with watched_stages(context) as times, Progress(steps, "reading", "forward", shown=shown) as bar:
            for part_nll, part_count in map(forward, range(steps)):
                nll, count = nll + part_nll, count + part_count
                if recorder is not None:
                    recorder.step()
                bar.update()
        stages = times.milliseconds()
        first_tp = context.layout.tp_rank == 0
        total = _sum(torch.tensor([nll, count] if first_tp else [0.0, 0.0], dtype=torch.float64), device)
        loads = _sum(torch.stack([layer.placement.expert_load for layer in layers]), device)
        rank_loads = _sum(torch.stack([layer.placement.rank_load() for layer in layers]), device)
        slowest = _slowest(stages, device)
        recorded = None if recorder is None else recorder.finish(options.model or DEMO.name)
        if options.trace is not None:
            _trace(options.trace, layers, partial(forward, 0), context)
        rebalanced = rebalance(layers, context, forward, steps) if options.eplb else None
        # each member of an etp group places the same routes
        copies = context.layout.etp
        reference, problem = None, None
        left_out = _too_large(folder) if options.reference is None else None
        if options.reference is not False and left_out is None and context.layout.rank == 0:
            if shown:
                note("run: the untouched model reads the text in one process")
            try:
                reference = _reference(folder, windows, options.batch, dtype, device)
            except Exception as error:  # too large for one process, or packed in a way that transformers refuses here
                problem = ConfigError(f"the untouched model does not run here, pass --no-reference: {error}")
        context.consensus.healthy("reference", problem)  # the others wait for rank 0 here and not in a collective
        if context.layout.rank != 0:
            return None
        return RunReport(
            title=_title(options, context, layers[0]),
            tokens=int(total[1]) + len(windows),
            perplexity=math.exp(total[0] / total[1]),
            reference=reference,
            left_out=left_out,
            exact=dtype == torch.float32 and (options.quantization, options.wire) == (PLAIN.name, "plain"),
            expert_load=(loads // copies).tolist(),
            rank_load=(rank_loads // copies).tolist(),
            stages=slowest,
            forwards=steps * len(layers),
            rebalanced=rebalanced,
            recorded=recorded,
        )


def check_options(options: RunOptions) -> None:
    """Raise ConfigError for what is wrong without a look at the ranks."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("ep-moe run needs transformers; install ep-moe[hf]")
    least = {"dp": 1, "tp": 1, "ep": 1, "etp": 1, "window": 2, "batch": 1, "text_tokens": 1, "redundant": 0}
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
    if (wrong := deadline_problem("--deadline", options.deadline_s)) is not None:
        raise ConfigError(wrong)
    if options.dtype not in (None, "auto", *_DTYPES):
        raise ConfigError(f"--dtype must be auto or one of {', '.join(_DTYPES)}, got {options.dtype!r}")
    if options.quantization not in SCHEMES:
        hint = did_you_mean(options.quantization, SCHEMES)
        raise ConfigError(f"--quantization must be one of {', '.join(SCHEMES)}, got {options.quantization!r}{hint}")
    Wire(dispatch=options.wire, input_scale=1.0 if options.wire in ONE_SCALE else None)  # says itself what is wrong
    for flag, backend, known in (
        ("all2all", options.all2all, registry.targets("dispatchers")),
        ("experts", options.experts, registry.targets("experts") | registry.targets("fused")),
    ):
        if backend not in (AUTO, *known):
            hint = did_you_mean(backend, known)
            raise ConfigError(f"--{flag} must be auto or one of {', '.join(known)}, got {backend!r}{hint}")
    if options.tuned is not None:
        Tuned.load(options.tuned)  # what is wrong with the file is said before ranks start
    for option, file in (("--trace", options.trace), ("--record-load", options.record_load)):
        check_target(option, None if file is None else Path(file))
    check_picture("--plot", None if options.plot is None else Path(options.plot))
    if options.text is not None and not Path(options.text).is_file():
        raise ConfigError(f"--text {options.text} is not a file")
    if options.model is not None and options.text is None:
        raise ConfigError("a model needs --text: a file to read")


def _trace(file: str, layers: Sequence[MoELayer], forward: Callable[[], Any], context: EPContext) -> None:
    """One more forward, uncounted, of which rank 0 writes what torch.profiler saw. On all ranks."""
    problem = None
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.no_stats())
        if context.layout.rank:
            forward()
        else:
            kinds = {ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if context.device.type == "cuda" else [])}
            with profile(activities=kinds) as seen:
                forward()
            try:
                seen.export_chrome_trace(file)
            except (OSError, RuntimeError) as error:
                problem = ConfigError(f"--trace {file} cannot be written: {error}")
    context.consensus.healthy("trace", problem)


def _wire(dispatch: str, folder: Path, context: EPContext) -> Wire:
    from ep_moe.integrations.transformers import calibrated_wire

    return calibrated_wire(folder, context, dispatch) if dispatch in ONE_SCALE else Wire(dispatch=dispatch)


def model_dtype(name: str | None, folder: Path) -> torch.dtype:
    """Of `RunOptions.dtype`, "auto" for the checkpoint's."""
    if name == "auto":
        from ep_moe.integrations.config_file import read_config

        return read_config(folder).dtype or torch.float32
    return _DTYPES[name or "float32"]


def text_windows(options: RunOptions, folder: Path) -> Tensor:
    """int64 [windows, window]: the text's tokens, what does not fill a window left out."""
    path = Path(options.text) if options.text else Path(str(DEMO / "heldout.txt"))
    raw = path.read_bytes()
    if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
        ids = torch.tensor(_tokenizer(folder)(raw.decode("utf-8", "replace"))["input_ids"])
    else:
        ids = torch.tensor(list(raw))  # byte-level, as the demo is
    ids = ids[: options.text_tokens]
    if len(ids) < options.window:
        raise ConfigError(
            f"{path} gives {len(ids)} tokens (at most --text-tokens), fewer than one --window of {options.window}"
        )
    return ids[: len(ids) // options.window * options.window].view(-1, options.window)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # broken files, or a class of the repository's own code, which is not run
        raise ConfigError(
            f"{folder} has a tokenizer that transformers cannot make without code of its repository, or cannot read: "
            f"{type(error).__name__}: {error}; remove its files to read the text as bytes"
        ) from error


@torch.no_grad()
def _step(model: Any, layers: Sequence[MoELayer], windows: Tensor) -> tuple[float, int]:
    """Summed negative log likelihood and predicted tokens. A rank without windows still serves its experts."""
    if not len(windows):
        for layer in layers:
            layer(torch.empty(0, layer.config.hidden_size, dtype=layer.dtype, device=layer.device))
        return 0.0, 0
    return _nll(model, windows)


def _nll(model: Any, windows: Tensor) -> tuple[float, int]:
    ids = windows.to(model.device)
    logits = model(input_ids=ids).logits[:, :-1].double()
    targets = ids[:, 1:]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return float(loss), targets.numel()


def _too_large(folder: Path) -> str | None:
    """None, or why the untouched model is not run where it was not asked for."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size <= _REFERENCE_BYTES:
        return None
    return f"its weights have {size / 2**30:.0f} GiB, all of them in one process; --reference runs it all the same"


@torch.no_grad()
def _reference(folder: Path, windows: Tensor, batch: int, dtype: torch.dtype, device: torch.device) -> float:
    """The untouched model's perplexity, in this process alone."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).to(device).eval()
    parts = [_nll(model, part) for part in windows.split(batch)]
    return math.exp(sum(nll for nll, _ in parts) / sum(count for _, count in parts))


def _sum(values: Tensor, device: torch.device) -> Tensor:
    values = values.to(device)
    dist.all_reduce(values)
    return values.cpu()


def _slowest(stages: dict[str, float], device: torch.device) -> dict[str, float]:
    values = torch.tensor(list(stages.values()), dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(stages, values.tolist(), strict=True))


def _title(options: RunOptions, context: EPContext, layer: MoELayer) -> str:
    layout = context.layout
    where = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu"
    return (
        f"{Path(options.model or 'demo').name}: {layout.world} ranks (dp {layout.dp}, tp {layout.tp}; "
        f"ep {layout.ep}, etp {layout.etp}), {dist.get_backend()} on {where}, all2all {layer.choice.all2all}, "
        f"experts {layer.choice.experts}, quantization {options.quantization}"
    )
