"""`ep-moe run`: reads text with a model on several ranks, and compares its perplexity with that of a single process."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ep_moe import registry
from ep_moe.checkpoint.hub import model_folder
from ep_moe.checkpoint.reader import load_errors_on_all_ranks
from ep_moe.checks import check_picture, check_target, deadline_problem, did_you_mean
from ep_moe.cli.output import check_revision, log_records, note
from ep_moe.cli.perplexity import (
    DEMO,
    Reading,
    Rebalanced,
    TextReader,
    over_ranks,
    rebalance,
    reference_perplexity,
    text_windows,
)
from ep_moe.config import ONE_SCALE, ParallelConfig, Wire
from ep_moe.context import EPContext
from ep_moe.eplb.load import LoadRecorder
from ep_moe.eplb.trace import LoadTrace
from ep_moe.errors import ConfigError
from ep_moe.layer import MoELayer
from ep_moe.metrics import stages as watched_stages
from ep_moe.parallel.groups import TorchrunEnv, init_from_torchrun, local_device
from ep_moe.parallel.local_launch import run_local_ranks
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.placement.placement import balancedness
from ep_moe.quant.schemes import PLAIN, SCHEMES
from ep_moe.runtime.progress import Progress
from ep_moe.selection.explain import AUTO
from ep_moe.selection.tuned import Tuned

LAPTOP_RANKS = 4
_MOST_LOCAL_RANKS = 128  # each is a process of a few hundred MiB
_LOCAL_DEADLINE_S = 900.0  # least deadline of a whole run on this machine, whatever --deadline is
DIGITS = 5  # significant digits in which the perplexities must agree in float32
_REFERENCE_BYTES = 32 * 2**30  # largest weight files for which the untouched model is run without --reference
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of `ep-moe run`. `resolve_options` chooses those that are None.

    model: folder of a Hugging Face checkpoint, or a model's name on the Hub; None for the demo
    revision: branch, tag or commit of a model on the Hub
    text: a file, read as UTF-8
    window: tokens per sequence
    batch: sequences per dp rank and forward
    text_tokens: number of tokens of the text to read
    dtype: "float32", "bfloat16", "float16" or "auto" for the checkpoint's
    reference: also run the untouched model in one process; None: if its weights are small enough
    redundant: number of experts that have a second copy
    eplb: rebalance the experts, and read the text again
    trace: a file for torch.profiler's trace of one more forward of rank 0
    plot: a file for a picture of the load
    record_load: a file for the load of each forward, which `ep-moe plan` reads
    quiet: show no progress
    tuned: a file of `ep-moe tune`
    log_level: least level of log records that forked ranks write to stderr; None leaves logging as it is
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
    """The results of a run. Loads are routes (token, expert) per layer. Times are milliseconds of the slowest rank."""

    title: str
    tokens: int
    perplexity: float
    reference: float | None
    exact: bool  # float32 and not quantized, so the perplexities must agree
    expert_load: list[list[int]]  # [layer][logical expert]
    rank_load: list[list[int]]  # [layer][EP rank]
    stages: dict[str, float]
    forwards: int
    rebalanced: Rebalanced | None = None
    left_out: str | None = None  # why the reference was skipped, if --reference was not given
    recorded: LoadTrace | None = None

    @property
    def agrees(self) -> bool:
        """Whether all perplexities agree in each printed digit."""
        found = {self.perplexity, *([self.reference] if self.reference is not None else [])}
        found |= {self.rebalanced.perplexity} if self.rebalanced else set()
        return len({f"{value:#.{DIGITS}g}" for value in found}) == 1

    @property
    def balancedness(self) -> list[float]:
        return [balancedness(load) for load in self.rank_load]


def run(options: RunOptions) -> RunReport | None:
    """Run on torchrun's ranks if there are any, else on forked ranks. Return None on ranks other than 0."""
    check_options(options)
    if TorchrunEnv.present():
        world = TorchrunEnv.read().world_size
        device = local_device()
        init_from_torchrun(device, deadline_s=options.deadline_s)
        try:
            return run_on_rank(resolve_options(options, world), device)
        finally:
            dist.destroy_process_group()
    world = (options.dp or 1) * (options.tp or 1) if options.dp or options.tp else LAPTOP_RANKS
    if world > _MOST_LOCAL_RANKS:
        raise ConfigError(
            f"--dp * --tp = {world} ranks are more than the {_MOST_LOCAL_RANKS} that ep-moe run starts on one machine; "
            f"give smaller ones, or start the ranks with torchrun"
        )
    arguments = {
        "options": resolve_options(options, world),
        "device": torch.device("cpu"),
        "folder": model_folder(options.model or str(DEMO), revision=options.revision),
        "forked": True,
    }
    longest = max(3 * options.deadline_s, _LOCAL_DEADLINE_S)
    if not options.quiet:
        note(f"run: starting {world} rank{'s' if world > 1 else ''} on this machine")
    report: RunReport = run_local_ranks("ep_moe.cli.run:run_on_rank", world, arguments, deadline_s=longest)[0]
    return report


def resolve_options(options: RunOptions, world: int) -> RunOptions:
    """Choose the options that are None, for a number of ranks. The demo uses tp = 2 if possible."""
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
    """Run one rank, within an initialized process group. Return None on ranks other than 0.

    folder: the model's folder; None to look it up
    forked: the rank is a forked process, in which logging is not set up
    """
    if forked and options.log_level is not None:
        with log_records(options.log_level):
            return run_on_rank(options, device, folder)
    from ep_moe.integrations.transformers import moe_layers

    assert options.dp is not None
    assert options.tp is not None
    parallel = ParallelConfig(dp=options.dp, tp=options.tp, ep=options.ep, etp=options.etp)
    tuned = None if options.tuned is None else Tuned.load(options.tuned)
    tokens = options.batch * options.window  # tokens of a forward; a token limit admits transports with fixed buffers
    with EPContext.from_groups(parallel, device=device, deadline_s=options.deadline_s, max_tokens=tokens) as context:
        if folder is None:
            folder = model_folder(options.model or str(DEMO), context.consensus, revision=options.revision)
        with load_errors_on_all_ranks(folder, context.consensus):
            dtype = model_dtype(options.dtype, folder)
            windows = text_windows(options.text, options.text_tokens, options.window, folder)
        model = _loaded(options, folder, context, dtype, tuned)
        if int(windows.max()) >= model.config.vocab_size:
            raise ConfigError(
                f"--text has token {int(windows.max())}, but the model knows {model.config.vocab_size}; without "
                f"tokenizer files the text is read as bytes"
            )
        layers = moe_layers(model)
        reader = TextReader(model, layers, windows, options.batch, context)
        reading = _read(options, reader, layers, context)
        if options.trace is not None:
            _trace(options.trace, layers, partial(reader.forward, 0), context)
        rebalanced = rebalance(layers, context, reader.forward, reader.steps) if options.eplb else None
        reference, left_out = _compared(options, folder, windows, dtype, context)
        if context.layout.rank != 0:
            return None
        return RunReport(
            title=_title(options, context, layers[0]),
            tokens=reading.predicted + len(windows),
            perplexity=reading.perplexity,
            reference=reference,
            left_out=left_out,
            exact=is_exact(options, dtype),
            expert_load=reading.expert_load,
            rank_load=reading.rank_load,
            stages=reading.stages,
            forwards=reader.steps * len(layers),
            rebalanced=rebalanced,
            recorded=reading.recorded,
        )


def is_exact(options: RunOptions, dtype: torch.dtype) -> bool:
    """Return whether a perplexity that differs from transformers' is a bug: float32, and nothing is quantized."""
    return dtype == torch.float32 and (options.quantization, options.wire) == (PLAIN.name, "plain")


def _loaded(options: RunOptions, folder: Path, context: EPContext, dtype: torch.dtype, tuned: Tuned | None) -> Any:
    """Load the model, with its experts spread over the ranks."""
    from ep_moe.integrations.transformers import load_pretrained, num_experts

    expert_map = None
    if options.redundant:
        expert_map = ExpertMap.redundant(num_experts(folder, context), context.layout.ep, options.redundant)
    return load_pretrained(
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


def _read(options: RunOptions, reader: TextReader, layers: Sequence[MoELayer], context: EPContext) -> Reading:
    """Read the text, count the load and time the stages. Called by all ranks."""
    recorder = None
    if options.record_load is not None:
        recorder = LoadRecorder(layers, context.rank_groups["lockstep"], steps=reader.steps)
    nll, count = 0.0, 0
    shown = not options.quiet and context.layout.rank == 0
    with watched_stages(context) as times, Progress(reader.steps, "reading", "forward", shown=shown) as bar:
        for part_nll, part_count in map(reader.forward, range(reader.steps)):
            nll, count = nll + part_nll, count + part_count
            if recorder is not None:
                recorder.step()
            bar.update()
    stages = times.milliseconds()
    facts = torch.tensor([nll, count], dtype=torch.float64)
    if context.layout.tp_rank:
        facts[:] = 0  # ranks of a tp group read the same text, so only the first one counts
    total = over_ranks(facts, context)
    copies = context.layout.etp  # each member of an etp group counts the same routes
    loads = over_ranks(torch.stack([layer.placement.expert_load for layer in layers]), context) // copies
    rank_loads = over_ranks(torch.stack([layer.placement.rank_load() for layer in layers]), context) // copies
    slowest = over_ranks(torch.tensor(list(stages.values()), dtype=torch.float64), context, dist.ReduceOp.MAX)
    return Reading(
        predicted=int(total[1]),
        perplexity=math.exp(total[0] / total[1]),
        expert_load=loads.tolist(),
        rank_load=rank_loads.tolist(),
        stages=dict(zip(stages, slowest.tolist(), strict=True)),
        recorded=None if recorder is None else recorder.finish(options.model or DEMO.name),
    )


def _compared(
    options: RunOptions, folder: Path, windows: Tensor, dtype: torch.dtype, context: EPContext
) -> tuple[float | None, str | None]:
    """Return the untouched model's perplexity on rank 0, or the reason why it was skipped. Called by all ranks."""
    reference, problem = None, None
    left_out = _too_large(folder) if options.reference is None else None
    if options.reference is not False and left_out is None and context.layout.rank == 0:
        if not options.quiet:
            note("run: the untouched model reads the text in one process")
        try:
            reference = reference_perplexity(folder, windows, options.batch, dtype, context.device)
        except Exception as error:  # too large for one process, or in a format that transformers cannot load here
            problem = ConfigError(f"the untouched model does not run here, pass --no-reference: {error}")
    context.consensus.raise_on_all_ranks(
        "reference", problem
    )  # the other ranks wait for rank 0 here, not in a collective
    return reference, left_out


def check_options(options: RunOptions) -> None:
    """Raise ConfigError for an option that is wrong whatever the ranks are."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("ep-moe run needs transformers; install ep-moe[hf]")
    check_revision(options.model, options.revision)
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
    Wire(dispatch=options.wire, input_scale=1.0 if options.wire in ONE_SCALE else None)  # raises for an unknown format
    for flag, backend, known in (
        ("all2all", options.all2all, registry.targets("dispatchers")),
        ("experts", options.experts, registry.targets("experts") | registry.targets("fused")),
    ):
        if backend not in (AUTO, *known):
            hint = did_you_mean(backend, known)
            raise ConfigError(f"--{flag} must be auto or one of {', '.join(known)}, got {backend!r}{hint}")
    if options.tuned is not None:
        Tuned.load(options.tuned)  # report a bad file before ranks start
    for option, file in (("--trace", options.trace), ("--record-load", options.record_load)):
        check_target(option, None if file is None else Path(file))
    check_picture("--plot", None if options.plot is None else Path(options.plot))
    if options.text is not None and not Path(options.text).is_file():
        raise ConfigError(f"--text {options.text} is not a file")
    if options.model is not None and options.text is None:
        raise ConfigError("a model needs --text: a file to read")


def _trace(file: str, layers: Sequence[MoELayer], forward: Callable[[], Any], context: EPContext) -> None:
    """Run one more forward, which counts no load. Rank 0 writes the trace of torch.profiler. Called by all ranks."""
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
    context.consensus.raise_on_all_ranks("trace", problem)


def _wire(dispatch: str, folder: Path, context: EPContext) -> Wire:
    from ep_moe.integrations.transformers import calibrated_wire

    return calibrated_wire(folder, context, dispatch) if dispatch in ONE_SCALE else Wire(dispatch=dispatch)


def model_dtype(name: str | None, folder: Path) -> torch.dtype:
    """Return the dtype of `RunOptions.dtype`; "auto" is the checkpoint's."""
    if name == "auto":
        from ep_moe.integrations.config_file import read_config

        return read_config(folder).dtype or torch.float32
    return _DTYPES[name or "float32"]


def _too_large(folder: Path) -> str | None:
    """Return why the untouched model is too large to be run without --reference; None if it is not."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size <= _REFERENCE_BYTES:
        return None
    return f"its weights have {size / 2**30:.0f} GiB, all of them in one process; --reference runs it all the same"


def _title(options: RunOptions, context: EPContext, layer: MoELayer) -> str:
    layout = context.layout
    where = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu"
    return (
        f"{Path(options.model or 'demo').name}: {layout.world} ranks (dp {layout.dp}, tp {layout.tp}; "
        f"ep {layout.ep}, etp {layout.etp}), {dist.get_backend()} on {where}, all2all {layer.choice.all2all}, "
        f"experts {layer.choice.experts}, quantization {options.quantization}"
    )
