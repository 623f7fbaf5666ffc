"""Test `ep-moe run` of the demo and of small models: its report has the numbers of one process."""

import functools
import math
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_moe import ParallelConfig
from ep_moe.checkpoint.source import SINGLE
from ep_moe.cli import perplexity
from ep_moe.cli import run as run_module
from ep_moe.cli.run import DEMO, RunOptions, run
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.parallel.local_launch import run_local_ranks
from tests.fixtures.checkpoint_files import quiet
from tests.fixtures.run_command import PRINTED, invoke, single_process
from tests.fixtures.transformers_models import tiny_transformers_model

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(TorchrunEnv.present(), reason="starts ranks of its own")

EXPERTS, TOP_K, MOE_LAYERS = 16, 2, 3  # of the demo
REBALANCED = {"window": 128, "text_tokens": 2048, "batch": 2, "redundant": 4, "eplb": True}


@functools.cache
def rebalanced(**options):
    """Return the report of a rebalanced run, cached for two tests."""
    return run(RunOptions(**REBALANCED | options))


def test_demo_rebalanced(monkeypatch):
    """`ep-moe run --eplb` passes its options, and prints the report.

    `test_rebalanced` checks the numbers of the same run.
    """
    asked = []
    monkeypatch.setattr("ep_moe.cli.app.run_model", lambda options: asked.append(options) or rebalanced())
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in REBALANCED.items() if name != "eplb"]
    result = invoke("run", "--eplb", *flags)
    assert {name: getattr(asked[0], name) for name in REBALANCED} == REBALANCED
    assert result.exit_code == 0, result.output
    before, after = re.search(r"balancedness +([\d.]+) before, ([\d.]+) after", result.output).groups()
    assert float(after) > float(before)
    first, second = re.findall(r"(?:ep_moe|perplexity) +([\d.]+)\n", result.output)
    assert first == second
    assert re.search(r"moved +[\d.]+ MiB between ranks, within \d+ forwards\n", result.output)


@pytest.mark.parametrize("kind", ["olmoe", "glm4_moe", "jamba"])
def test_a_model_with_its_own_router(kind, tmp_path):
    """A model that keeps its own router runs. In these families only the experts are replaced."""
    quiet()
    tiny_transformers_model(kind).save_pretrained(tmp_path / kind)
    text = tmp_path / "text.txt"
    text.write_bytes((DEMO / "heldout.txt").read_bytes()[:512])
    options = ("--text", text, "--dtype", "float32", "--window", 64, "--redundant", 4)
    result = invoke("run", tmp_path / kind, *options)
    assert result.exit_code == 0, result.output
    assert re.search(r"ep_moe +[\d.]+\n +transformers +[\d.]+ +\(one process; equal", result.output)


def test_demo_on_four_ranks():
    result = invoke("run")
    assert result.exit_code == 0, result.output
    assert "demo: 4 ranks (dp 2, tp 2; ep 4, etp 1), gloo on cpu" in result.output
    assert "perplexity over 16384 tokens" in result.output
    both = re.search(r"ep_moe +([\d.]+)\n +transformers +([\d.]+) +\(one process; equal", result.output)
    ours, theirs = both.groups()
    assert ours == theirs
    assert len(ours.replace(".", "")) == 5
    assert 1 < float(ours) < 256  # perplexity over bytes, better than guessing
    for line in (r"layer 2( +\d+){4} +[01]\.\d{3}\n", r"expert 15( +\d+){3}\n", r"combine +[\d.]+ +\d+ +\d+%\n"):
        assert re.search(line, result.output), line


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dp": 4, "text_tokens": 384},  # three windows: dp rank 3 has none
        {"dp": 4, "text_tokens": 640, "batch": 1},  # five windows: dp rank 0 runs two forwards
        {"etp": 2},
        {"dp": 4, "ep": 2, "all2all": "allgather", "text_tokens": 640, "etp": 2},
        {"tp": 4, "ep": 2},
        {"dp": 1, "tp": 1},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "default",
)
def test_report_is_that_of_one_process(options):
    options = {"window": 128, "text_tokens": 1024, **options}
    report = run(RunOptions(**options))
    tokens = options["text_tokens"]
    text = (DEMO / "heldout.txt").read_bytes()[:1024]
    perplexity, loads = single_process(DEMO, text, options["window"], tokens)
    assert report.tokens == tokens
    assert report.exact
    assert report.agrees
    assert report.perplexity == pytest.approx(perplexity, rel=PRINTED)
    assert report.reference == pytest.approx(perplexity, rel=PRINTED)
    assert report.expert_load == loads
    assert [sum(load) for load in loads] == [tokens * TOP_K] * MOE_LAYERS
    # the linear map: each EP rank has the next experts
    world = options.get("dp", 1) * options.get("tp", 1) if {"dp", "tp"} & options.keys() else 4
    ep = options.get("ep") or world // options.get("etp", 1)
    each = EXPERTS // ep
    assert report.rank_load == [[sum(load[r * each : (r + 1) * each]) for r in range(ep)] for load in loads]
    assert report.balancedness == [pytest.approx(sum(load) / ep / max(load)) for load in report.rank_load]
    windows, dp = tokens // options["window"], options.get("dp") or world // options.get("tp", 2)
    assert report.forwards == math.ceil(math.ceil(windows / dp) / options.get("batch", 8)) * MOE_LAYERS
    assert list(report.stages) == ["route", "place", "dispatch", "experts", "combine", "gather"]
    assert all(ms >= 0 for ms in report.stages.values())


@pytest.mark.parametrize(
    "options",
    [{}, {"dp": 4, "tp": 1, "redundant": 0}, {"etp": 2}, {"dp": 4, "ep": 2}, {"dp": 1, "tp": 1, "redundant": 0}],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "default",
)
def test_rebalanced(options):
    report = rebalanced(**options)
    options = REBALANCED | options
    found = report.rebalanced
    assert report.agrees, "before, after and in the untouched model"
    assert f"{found.perplexity:#.5g}" == f"{report.perplexity:#.5g}"
    alone = len(report.rank_load[0]) == 1
    assert list(map(sum, report.rank_load)) == list(map(sum, report.expert_load)), "the same routes"
    # with redundant experts, the balancer assumes equal shares of an expert's replicas
    assert found.before == pytest.approx(critical_path(report.rank_load), abs=0.01 if options["redundant"] else 1e-9)
    # an expert without a replica cannot get less load
    hottest = [0 if options["redundant"] else max(load) for load in report.expert_load]
    mean = [sum(load) / len(load) for load in report.rank_load]
    bound = sum(mean) / sum(map(max, mean, hottest))
    assert 0.95 * bound < found.after <= bound + 1e-9
    assert found.after > found.before or alone
    assert (found.sent_bytes > 0) is not alone
    assert found.usual_ms > 0
    assert not alone or found.forwards < 10 * 8, "it waits for what will not come"  # 8 forwards read the text


def critical_path(loads: list[list[int]]) -> float:
    return sum(sum(load) / len(load) for load in loads) / sum(map(max, loads))


def planted(**kwargs):
    """Run `run_on_rank` with a reference that is wrong in the fourth digit."""
    honest = run_module.reference_perplexity
    run_module.reference_perplexity = lambda *args: 1.001 * honest(*args)
    return run_module.run_on_rank(**kwargs)


def test_a_difference_is_exit_code_1(monkeypatch):
    def ranks(target, *args, **kwargs):
        assert target == "ep_moe.cli.run:run_on_rank"
        return run_local_ranks("tests.unit.cli.test_run:planted", *args, **kwargs)

    monkeypatch.setattr(run_module, "run_local_ranks", ranks)
    result = invoke("run", "--text-tokens", 512)
    assert result.exit_code == 1
    assert "DIFFERENT" in result.output
    # in bfloat16 or quantized, equality is not promised
    for flags in (("--dtype", "bfloat16"), ("--quantization", "fp8_dynamic")):
        result = invoke("run", "--text-tokens", 512, *flags)
        assert result.exit_code == 0, result.output
        assert "DIFFERENT" not in result.output


def without_memory(**kwargs):
    """Run `run_on_rank` where the untouched model does not fit into memory."""

    def reference(*_):
        raise torch.OutOfMemoryError("no room for the whole model")

    run_module.reference_perplexity = reference
    return run_module.run_on_rank(**kwargs)


def test_a_reference_that_cannot_run_is_one_sentence(monkeypatch):
    def ranks(target, *args, **kwargs):
        return run_local_ranks("tests.unit.cli.test_run:without_memory", *args, **kwargs)

    monkeypatch.setattr(run_module, "run_local_ranks", ranks)
    result = invoke("run", "--text-tokens", 512, "--dp", 2)
    assert result.exit_code == 2
    assert re.fullmatch(
        "run: starting 2 ranks on this machine\nerror: .*pass --no-reference: no room for the whole model\n",
        result.output,
    )


def test_rows_rounded_on_the_wire(tmp_path):
    """Rows may be rounded on the wire, by a flag or by a tuned file. Perplexities may then differ."""
    found = run(RunOptions(text_tokens=512, wire="fp8_block"))
    assert not found.exact
    assert found.perplexity != found.reference
    assert found.perplexity == pytest.approx(found.reference, rel=0.05)
    out = tmp_path / "tuned.json"
    made = invoke("tune", "demo", "--tokens", 2048, "--wire", "fp8_block", "--out", out)
    assert made.exit_code == 0, made.output
    used = invoke("run", "--text-tokens", 512, "--wire", "fp8_block", "--tuned", out)
    assert used.exit_code == 0, used.output


def test_a_calibrated_checkpoint_with_rows_under_its_scale(tmp_path):
    """Rows are rounded by a calibrated checkpoint's input scale.

    The checkpoint has the demo's experts in E4M3, as Model Optimizer writes them.
    """
    tensors = {
        name: tensor for file in Path(str(DEMO)).glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    for name in [name for name in tensors if ".experts." in name]:
        scale = tensors[name].float().abs().max() / 448
        tensors |= {name: (tensors[name].float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
        tensors[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.05)
    (tmp_path / "fp8").mkdir()
    shutil.copy(DEMO / "config.json", tmp_path / "fp8")
    save_file(tensors, tmp_path / "fp8" / SINGLE)
    asked = {"model": str(tmp_path / "fp8"), "text": str(DEMO / "heldout.txt"), "text_tokens": 512, "reference": False}
    found = run(RunOptions(**asked, quantization="fp8_static", wire="fp8_tensor", dtype="float32"))
    plain = run(RunOptions(text_tokens=512, reference=False))
    assert found.perplexity != plain.perplexity
    assert found.perplexity == pytest.approx(plain.perplexity, rel=0.05)
    result = invoke("run", "--text-tokens", 512, "--wire", "fp8_tensor")
    assert result.exit_code == 2
    assert re.search(
        r"error: .*has no input scales of experts: it was not calibrated; choose another wire", result.output
    )


def test_without_reference():
    result = invoke("run", "--text-tokens", 512, "--no-reference", "--dp", 2)
    assert result.exit_code == 0, result.output
    assert re.search(r"ep_moe +[\d.]+\n", result.output)
    assert "transformers" not in result.output
    assert "demo: 2 ranks (dp 2, tp 1; ep 2, etp 1)" in result.output


def test_a_large_reference_is_left_out(monkeypatch):
    """The reference is left out for a model too large for one process, unless the user asks for it."""
    monkeypatch.setattr(run_module, "_REFERENCE_BYTES", 1000)
    monkeypatch.setattr(run_module, "run_local_ranks", here)
    result = invoke("run", "--text-tokens", 512, "--dp", 1)
    assert result.exit_code == 0, result.output
    assert re.search(
        r"transformers +not run: its weights have \d+ GiB, all of them in one process; --reference", result.output
    )
    assert "equal to" in invoke("run", "--text-tokens", 512, "--dp", 1, "--reference").output


def test_the_reference_keeps_no_graph(monkeypatch):
    modes = []
    monkeypatch.setattr(perplexity, "_nll", lambda *_: modes.append(torch.is_grad_enabled()) or (0.0, 1))
    windows = torch.zeros(2, 8, dtype=torch.int64)
    perplexity.reference_perplexity(Path(str(DEMO)), windows, 1, torch.float32, torch.device("cpu"))
    assert modes == [False, False]


@pytest.mark.parametrize(("model", "looked_up"), [("org/name", "org/name"), (None, str(DEMO))])
def test_a_rank_looks_up_the_model_that_was_asked_for(model, looked_up, monkeypatch):
    """A rank looks up the requested model with its context's consensus, because torchrun starts ranks separately."""

    class LookedUpError(Exception):
        pass

    def look_up(*args, **kwargs):
        raise LookedUpError(args, kwargs)

    context = SimpleNamespace(consensus="of all ranks")
    asked = []

    def opened(parallel, **kwargs):
        asked.append((parallel, kwargs))
        return nullcontext(context)

    monkeypatch.setattr(run_module, "EPContext", SimpleNamespace(from_groups=opened))
    monkeypatch.setattr(run_module, "model_folder", look_up)
    options = RunOptions(model=model, revision="v2", dp=2, tp=4, ep=4, etp=2, batch=3, window=5, deadline_s=7.0)
    with pytest.raises(LookedUpError) as caught:
        run_module.run_on_rank(options, torch.device("cpu"))
    assert caught.value.args == ((looked_up, "of all ranks"), {"revision": "v2"})
    parallel = ParallelConfig(dp=2, tp=4, ep=4, etp=2)
    assert asked == [(parallel, {"device": torch.device("cpu"), "deadline_s": 7.0, "max_tokens": 15})]


@pytest.mark.parametrize("large", [None, "it is large"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("reference", [None, False, True])
def test_rank_0_reads_the_reference_where_it_is_asked_for_or_small(reference, silent, rank, large, monkeypatch):
    noted, read = [], []
    monkeypatch.setattr(run_module, "note", noted.append)
    monkeypatch.setattr(run_module, "_too_large", lambda folder: large)
    monkeypatch.setattr(run_module, "reference_perplexity", lambda *given: read.append(given) or 9.5)
    consensus = SimpleNamespace(raise_on_all_ranks=lambda what, problem: None)
    context = SimpleNamespace(layout=SimpleNamespace(rank=rank), consensus=consensus, device="here")
    options = RunOptions(reference=reference, quiet=silent, batch=3)
    found, left_out = run_module._compared(options, Path("model"), "windows", torch.float32, context)
    wanted = rank == 0 and (reference or (reference is None and large is None))
    assert read == [(Path("model"), "windows", 3, torch.float32, "here")] * bool(wanted)
    assert found == (9.5 if wanted else None)
    assert left_out == (large if reference is None else None)
    assert len(noted) == (wanted and not silent)


def here(target, world, arguments, **_):
    """Run a rank in this process, whose settings a test has changed."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return [run_module.run_on_rank(**arguments)]
    finally:
        torch.distributed.destroy_process_group()
